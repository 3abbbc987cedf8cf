"""The check of the run's own copy: what was submitted, what the attempt before left, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpcenv.identity import code
from hpcenv.records.code_listing import Listing, content_of, digest_of
from hpcenv.records.codec import SCHEMA
from hpcenv.records.files import save_record
from hpcenv.records.manifest import Source
from hpcenv.records.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    (run.source / "conf").mkdir(parents=True)
    (run.source / "train.py").write_text("import helper\n")
    (run.source / "helper.py").write_text("VALUE = 1\n")
    (run.source / "conf" / "base.yaml").write_text("lr: 0.1\n")
    (run.source / "near.py").symlink_to("helper.py")
    (run.source / "data.bin").symlink_to("/project/data.bin")
    names = ("train.py", "helper.py", "conf/base.yaml", "near.py")
    files = {f"source/{name}": content_of(str(run.source / name)) for name in names}
    save_record(Listing(schema=SCHEMA, files=files, live={"source/data.bin": "/project/data.bin"}), run.listing)
    return run


def source_of(run: RunFolder) -> Source:
    from hpcenv.records.files import load_record

    digest = digest_of(load_record(Listing, run.listing).files)
    return Source(root="/project", folder=str(run.source), commit="", digest=digest)


def write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


CHANGES = {
    "module": (lambda s: write(s / "helper.py", "VALUE = 2\n"), "changed: helper.py"),
    "config": (lambda s: write(s / "conf" / "base.yaml", "lr: 9\n"), "changed: conf/base.yaml"),
    "removed": (lambda s: (s / "helper.py").unlink(), "changed: helper.py"),
    "folder in its place": (lambda s: ((s / "conf" / "base.yaml").unlink(), (s / "conf" / "base.yaml").mkdir()), None),
    "own link": (lambda s: link(s / "near.py", "train.py"), "changed: near.py"),
    "link to the project": (lambda s: link(s / "data.bin", "/elsewhere"), "link changed: data.bin"),
    "module that shadows": (lambda s: write(s / "numpy.py", ""), "added: numpy.py"),
    "package that shadows": (lambda s: write(s / "numpy" / "__init__.py", ""), "added: numpy/__init__.py"),
    "extension": (lambda s: write(s / "numpy.so", ""), "added: numpy.so"),
    "text in no listing": (lambda s: write(s / "override.yaml", "lr: 9\n"), "added: override.yaml"),
    "text in a new folder": (lambda s: write(s / "new" / "x.yaml", ""), "added: new/x.yaml"),
    "link in no listing": (lambda s: (s / "override.yaml").symlink_to("/elsewhere"), "added: override.yaml"),
    "bytecode": (lambda s: write(s / "__pycache__" / "helper.cpython-311.pyc", ""), "added: __pycache__/"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_before_the_first_attempt_is_seen(run: RunFolder, name: str) -> None:
    source = source_of(run)
    assert code.find_digest(source, run) == source.digest
    change, said = CHANGES[name]
    change(run.source)
    if said is None:
        with pytest.raises(OSError):
            code.find_digest(source, run)
    else:
        assert code.find_digest(source, run).startswith(said)


@pytest.mark.parametrize("name", ["empty folder", "file that NFS keeps", "setup", "requeue"])
def test_files_that_nobody_put_there_to_be_read_are_no_difference(run: RunFolder, name: str) -> None:
    source = source_of(run)
    (run.source / "outputs").mkdir()
    write(run.source / "conf" / ".nfs000000000012a3", "")
    assert code.find_digest(source, run) == source.digest
    if name in ("setup", "requeue"):
        write(run.source / "version.txt", "by a line of setup, or by the attempt before\n")
    if name == "requeue":
        run.attempts.mkdir()
    assert code.find_digest(source, run, "new-modules" if name == "setup" else "all") == source.digest


def test_where_ranks_may_have_begun_only_modules_that_were_submitted_count(run: RunFolder) -> None:
    source = source_of(run)
    write(run.source / "metrics.json", "{}")
    write(run.source / "conf" / "base.yaml", "epoch: 1\n")
    write(run.source / "__pycache__" / "helper.cpython-311.pyc", "")
    assert code.find_digest(source, run, "own-modules") == source.digest
    write(run.source / "helper.py", "VALUE = 2\n")
    assert code.find_digest(source, run, "own-modules") == "changed: helper.py"


def test_modules_that_an_attempt_left_changed_are_named_and_its_own_files_are_not(run: RunFolder) -> None:
    began = time.time()
    assert code.left_changed(run) == ()
    for name in ("conf/base.yaml", "wandb/files/code/train.py", "out.txt"):
        (run.source / name).parent.mkdir(parents=True, exist_ok=True)
        write(run.source / name, "of the script\n")
    for name in ("helper.py", "requests.py"):
        write(run.source / name, "VALUE = 2\n")
    after = code.note_after(run, schema=SCHEMA, started=began)
    assert after is not None
    save_record(after, run.listing_after)
    assert code.left_changed(run) == ("helper.py", "requests.py")


def test_a_shortened_listing_is_seen(run: RunFolder) -> None:
    source = source_of(run)
    save_record(Listing(schema=SCHEMA, files={}), run.listing)
    assert code.find_digest(source, run) == "another source.json"


def test_a_later_attempt_must_find_what_the_one_before_left(run: RunFolder) -> None:
    source, began = source_of(run), time.time()
    run.attempts.mkdir()
    write(run.source / "conf" / "base.yaml", "epoch: 1\n")
    write(run.source / "made.py", "X = 1\n")
    write(run.source / "out.txt", "made")
    write(run.source / "__pycache__" / "helper.cpython-311.pyc", "")
    after = code.note_after(run, schema=SCHEMA, started=began)
    assert after is not None
    assert set(after.changed) == {"source/conf/base.yaml", "source/made.py"}
    save_record(after, run.listing_after)
    assert code.find_digest(source, run) == source.digest
    write(run.source / "conf" / "base.yaml", "epoch: 9\n")
    write(run.source / "made.py", "X = 2\n")
    assert code.find_digest(source, run) == "changed: conf/base.yaml; added: made.py"


def test_without_a_record_of_the_attempt_before_modules_are_compared(run: RunFolder) -> None:
    source = source_of(run)
    run.attempts.mkdir()
    write(run.source / "conf" / "base.yaml", "epoch: 1\n")
    assert code.find_digest(source, run) == source.digest
    write(run.source / "helper.py", "VALUE = 2\n")
    assert code.find_digest(source, run) == "changed: helper.py"


def test_a_second_attempt_that_changes_nothing_keeps_what_the_first_changed(run: RunFolder) -> None:
    write(run.source / "conf" / "base.yaml", "epoch: 1\n")
    first = code.note_after(run, schema=SCHEMA, started=time.time())
    assert first is not None
    save_record(first, run.listing_after)
    # Long after: no file has been touched since.
    second = code.note_after(run, schema=SCHEMA, started=time.time() + 10_000)
    assert second is not None
    assert second.changed == first.changed


def test_runs_that_share_a_copy_each_make_their_own(run: RunFolder, tmp_path: Path) -> None:
    (run.source / "for-bob.bin").write_bytes(b"\0")
    write(run.source / "__pycache__" / "x.pyc", "")
    own = RunFolder(run.path / "runs" / "7")
    own.path.mkdir(parents=True)
    shared = Source(root="/p", folder=str(own.source), commit="", digest=source_of(run).digest, shared=str(run.path))
    code.make_own_copy(shared, own)
    assert code.find_digest(shared, own) == shared.digest
    assert os.readlink(own.source / "for-bob.bin") == str(run.source / "for-bob.bin")
    write(own.source / "helper.py", "VALUE = 2\n")
    assert (run.source / "helper.py").read_text() == "VALUE = 1\n"
    code.make_own_copy(shared, own)
    assert (own.source / "helper.py").read_text() == "VALUE = 2\n", "a later attempt keeps it"
