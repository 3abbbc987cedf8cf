"""`reproduce` takes equal code for equal, with and without git, also of bundles that an older hpcenv made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcenv.project.code_listing import changed_files
from hpcenv.records.code_listing import Listing, content_of, digest_of
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction.repetition import TracedSteps, earlier_repetitions
from hpcenv.runs.entries import open_run
from tests import traces
from tests.conftest import ROOT
from tests.traces import operation

BUNDLES = ROOT / "tests" / "recorded_bundles"
NAMES = ("with-git", "without-git")

TRAIN = """import helper
from hpcenv import training
for step in range(1, 6):
    training.log_metrics(step, loss=helper.START / step)
"""

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="NOT RUN: git is not installed")


def commit(folder: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    me = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "-A"), (*me, "commit", "--allow-empty", "-qm", "x")):
        subprocess.run(["git", *words], cwd=folder, env=environ, check=True)


# -- bundles of 0af6350 -------------------------------------------------------------------


@pytest.fixture
def reader(tmp_path: Path) -> Path:
    """Somebody's folder, with both bundles in it."""
    folder = tmp_path / "reader"
    folder.mkdir()
    for name in NAMES:
        shutil.copy(BUNDLES / f"{name}.hpcenv.zip", folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_of_an_older_version_verifies(hpcenv: Any, reader: Path, name: str) -> None:
    done = hpcenv("bundle", "verify", f"{name}.hpcenv.zip", "--json", cwd=reader)
    assert done.status == 0, done.stderr
    checks = {one["name"]: one["result"] for one in done.envelope["data"]["checks"]}
    assert checks == {"sums": "match", "lockfile": "match", "code": "match", "image": "absent", "record": "match"}
    assert hpcenv("reproduce", f"{name}.hpcenv.zip", cwd=reader).status == 0


@pytest.mark.parametrize("place", ["plain folder", "work tree of something else"])
@pytest.mark.parametrize("rung", ["2", "3"])
@pytest.mark.parametrize("name", NAMES)
def test_its_own_copy_is_its_code(hpcenv: Any, reader: Path, name: str, rung: str, place: str) -> None:
    if place != "plain folder":
        (reader / "notes.txt").write_text("x\n")
        commit(reader)
    for _ in range(2):
        done = hpcenv("reproduce", f"{name}.hpcenv.zip", "--rung", rung, "--dry-run", cwd=reader, accepts=False)
        assert done.status == 0, done.stderr
        assert "differ from those of the run" not in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_in_which_the_reader_locks_is_still_its_code(hpcenv: Any, reader: Path, name: str) -> None:
    words = ("reproduce", f"{name}.hpcenv.zip", "--rung", "3", "--dry-run")
    assert hpcenv(*words, cwd=reader, accepts=False).status == 0
    copy = reader / f"{name}-code"
    (copy / "lockfiles").mkdir(exist_ok=True)
    shutil.copy(ROOT / "lockfiles" / "default.lock.toml", copy / "lockfiles")
    done = hpcenv(*words, cwd=reader, accepts=False)
    assert done.status == 0, done.stderr
    (copy / "helper.py").write_text("START = 4.0\n")
    assert hpcenv(*words, cwd=reader, accepts=False).status == 17


def unpacked(hpcenv: Any, reader: Path, name: str) -> Path:
    """Return a project that holds the code of a bundle, as the authors' repository does."""
    assert hpcenv("bundle", "unpack", f"{name}.hpcenv.zip", "run", cwd=reader).status == 0
    project = reader / "repository"
    shutil.copytree(reader / "run" / "source", project)
    (project / "lockfiles").mkdir(exist_ok=True)
    shutil.copy(reader / "run" / "lock.toml", project / "lockfiles" / "default.lock.toml")
    return project


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_of_an_older_version_is_reproduced(hpcenv: Any, reader: Path, project: Path, name: str) -> None:
    # The Python of that run is not on this machine. So the reader names another one, and locks it.
    own = shutil.ignore_patterns("hpcenv.toml", "*.lock.toml")
    shutil.copytree(unpacked(hpcenv, reader, name), project, dirs_exist_ok=True, ignore=own)
    for rung in ("1", "2", "3"):
        words = ("--rung", rung, "--cluster", "local", "--allow-changed", "--lock", "default", "--json")
        done = hpcenv("reproduce", str(reader / "run"), *words, cwd=project)
        assert done.status == 0, done.stdout + done.stderr
        page = done.envelope["data"]
        assert page["verdict"] == "reproduced-bitwise"
        assert "equal to the last bit: 5 values" in page["headline"]
        assert [note for note in page["notes"] if "differ from those of the run" in note] == [
            "these files differ from those of the run: hpcenv.toml"
        ]


@pytest.mark.parametrize("under_git", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_authors_repository_is_its_code_with_and_without_git(
    hpcenv: Any, reader: Path, name: str, under_git: bool
) -> None:
    project = unpacked(hpcenv, reader, name)
    if under_git:
        commit(project)
    done = hpcenv("reproduce", "../run", "--rung", "3", "--dry-run", cwd=project, accepts=False)
    assert done.status == 0, done.stderr


@pytest.mark.parametrize("change", ["changed", "removed", "added", "binary"])
@pytest.mark.parametrize("under_git", [True, False])
def test_other_code_is_refused_in_a_dry_run_and_named(hpcenv: Any, reader: Path, under_git: bool, change: str) -> None:
    project = unpacked(hpcenv, reader, "with-git")
    file = {"changed": "helper.py", "removed": "helper.py", "added": "torch_patch.py", "binary": "data/table.bin"}[
        change
    ]
    if change == "removed":
        (project / file).unlink()
    else:
        (project / file).write_bytes(b"\0START = 4.0\n" if change == "binary" else b"START = 4.0\n")
    if under_git:
        commit(project)
    words = ("reproduce", "../run", "--rung", "3", "--dry-run")
    done = hpcenv(*words, cwd=project, accepts=False)
    assert done.status == 2, done.stderr
    assert f"these files differ from those of the run: {file}" in done.stderr
    assert "--copy DIR" in done.stderr and "the run had commit" in done.stderr
    done = hpcenv(*words, "--allow-changed", cwd=project, accepts=False)
    assert done.status == 0, done.stderr
    assert file in done.stdout


def test_a_changed_script_is_refused_before_the_image_is_fetched(hpcenv: Any, reader: Path) -> None:
    project = unpacked(hpcenv, reader, "with-git")
    # An image that nothing can fetch: nothing tries to.
    (project / "hpcenv.toml").write_text('image = "docker://localhost:1/a/b:1"\n')
    (project / "train.py").write_text("print(2)\n")
    done = hpcenv("reproduce", "../run", "--rung", "3", cwd=project, accepts=False)
    assert done.status == 2, done.stderr
    assert "the script differs from the script of the run" in done.stderr and "localhost" not in done.stderr


def test_a_list_that_was_edited_is_not_believed(hpcenv: Any, reader: Path) -> None:
    project = unpacked(hpcenv, reader, "with-git")
    (project / "helper.py").write_text("START = 4.0\n")
    listing = reader / "run" / "source.json"
    data = json.loads(listing.read_text())
    data["files"]["source/helper.py"] = content_of(str(project / "helper.py"))
    listing.write_text(json.dumps(data))
    done = hpcenv("reproduce", "../run", "--rung", "3", "--dry-run", cwd=project, accepts=False)
    assert done.status == 45 and "the checksums in SHA256SUMS are not those of source.json" in done.stderr
    (reader / "run" / "SHA256SUMS").unlink()
    done = hpcenv("reproduce", "../run", "--rung", "3", "--dry-run", cwd=project, accepts=False)
    assert done.status == 2
    assert "the list of the run's files is not the list that its nodes compared" in done.stderr


# -- to the end, on this machine ----------------------------------------------------------


def as_before(folder: Path, project: Path, *, under_git: bool) -> None:
    """Give the record of a run the form that hpcenv gave it at 0af6350."""
    run = RunFolder(folder)
    listing = load_record(Listing, run.listing)
    files = dict(listing.files)
    if under_git:
        (run.source / "lockfiles").mkdir()
        shutil.copy(project / "lockfiles/default.lock.toml", run.source / "lockfiles")
        files["source/lockfiles/default.lock.toml"] = content_of(str(run.source / "lockfiles/default.lock.toml"))
    save_record(Listing(schema=1, files=files, live=listing.live), run.listing)
    data = json.loads(run.listing.read_text())
    del data["untracked"]
    run.listing.write_text(json.dumps(data))
    for name in ("manifest.json", "lock.toml"):
        text = (folder / name).read_text()
        assert digest_of(listing.files) in text
        (folder / name).write_text(text.replace(digest_of(listing.files), digest_of(files)))


@pytest.fixture
def author(project: Path, hpcenv: Any) -> Callable[..., Path]:
    """Make the bundle of a run of a project that is in git or not; return it."""

    def make(*, under_git: bool, before: bool) -> Path:
        files = {
            "train.py": TRAIN,
            "helper.py": "START = 3.0\n",
            ".gitignore": "runs/\n*.zip\n",
            "local.yaml": "x: 1\n",
        }
        for name, text in files.items():
            (project / name).write_text(text)
        (project / "table.bin").write_bytes(b"\0table")
        if under_git:
            commit(project)
        done = hpcenv("submit", "train.py", "--nproc", "1", "--cluster", "local", "--name", "a", "--wait", cwd=project)
        assert done.status == 0, done.stderr
        if before:
            as_before(project / "runs/a", project, under_git=under_git)
        done = hpcenv("bundle", "make", "a", cwd=project)
        assert done.status == 0, done.stderr
        with zipfile.ZipFile(project / "a.hpcenv.zip") as archive:
            has = "a/source/lockfiles/default.lock.toml" in archive.namelist()
        assert has == (under_git and before)
        return project / "a.hpcenv.zip"

    return make


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("under_git", [True, False])
def test_a_run_is_reproduced_from_its_bundle(
    author: Any, hpcenv: Any, tmp_path: Path, under_git: bool, before: bool
) -> None:
    bundle = author(under_git=under_git, before=before)
    reader = tmp_path / "reader"
    reader.mkdir()
    done = hpcenv("reproduce", str(bundle), "--rung", "3", "--cluster", "local", "--json", cwd=reader)
    assert done.status == 0, done.stdout + done.stderr
    page = done.envelope["data"]
    assert page["verdict"] == "reproduced-bitwise"
    said = done.stdout + done.stderr
    assert "another experiment" not in said and "differ from those of the run" not in said
    # The same code, and the same digest of it.
    runs = [
        load_record(Listing, RunFolder(folder).listing).files for folder in (reader / "a", Path(page["run_folder"]))
    ]
    code = [{path: content for path, content in files.items() if not path.endswith(".lock.toml")} for files in runs]
    assert code[0] == code[1]
    assert ("source/table.bin" in code[0]) == under_git


def test_rerun_takes_the_code_of_an_older_run_for_the_same(author: Any, hpcenv: Any) -> None:
    project = author(under_git=True, before=True).parent
    done = hpcenv("rerun", "a", "--wait", cwd=project)
    assert done.status == 0, done.stderr
    assert "has changed since" not in done.stderr
    done = hpcenv("compare", "a", "a-2", cwd=project)
    assert "another experiment" not in done.stdout and "code." not in done.stdout
    (project / "helper.py").write_text("START = 4.0\n")
    commit(project)
    done = hpcenv("rerun", "a", cwd=project)
    assert done.status == 2 and "(helper.py)" in done.stderr


def test_a_module_that_a_bundle_leaves_out_is_named(hpcenv: Any, project: Path, tmp_path: Path) -> None:
    (project / "train.py").write_text("import keys\n" + TRAIN)
    (project / "helper.py").write_text("START = 3.0\n")
    (project / "keys.py").write_text('API_KEY = "abcdefgh"\n')
    done = hpcenv("submit", "train.py", "--nproc", "1", "--cluster", "local", "--name", "a", "--wait", cwd=project)
    assert done.status == 0, done.stderr
    assert hpcenv("bundle", "make", "a", cwd=project).status == 0
    reader = tmp_path / "reader"
    reader.mkdir()
    words = ("reproduce", str(project / "a.hpcenv.zip"), "--rung", "3", "--dry-run")
    done = hpcenv(*words, cwd=reader, accepts=False)
    assert done.status == 2, done.stderr
    assert "these files differ from those of the run: keys.py" in done.stderr
    done = hpcenv(*words, "--allow-changed", cwd=reader, accepts=False)
    assert done.status == 0, done.stderr
    assert "source/keys.py: not in the bundle: line 1 looks like a credential" in " ".join(done.stdout.split())


# -- the comparison -----------------------------------------------------------------------


def test_files_are_compared_without_lockfiles_and_links_by_what_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"1")
    content = content_of(str(tmp_path / "w.bin"))
    then = Listing(
        schema=1,
        files={
            "source/a.py": "1", "source/lockfiles/x.lock.toml": "2", "source/w.bin": content,
            "source/gone": "link:../../nowhere", "source/near": "link:a.py",
        },
    )  # fmt: skip
    now = Listing(
        schema=1, files={"source/a.py": "1", "source/near": "link:a.py"}, live={"source/w.bin": str(tmp_path / "w.bin")}
    )
    assert changed_files(then, now) == ()
    (tmp_path / "w.bin").write_bytes(b"2")
    assert changed_files(then, now) == ("source/w.bin",)
    assert changed_files(then, Listing(schema=1, files={"source/b.py": "1"})) == (
        "source/a.py", "source/b.py", "source/near", "source/w.bin",
    )  # fmt: skip


# -- compare --explain-op -----------------------------------------------------------------

PLAIN = "from hpcenv import training\nfor step in range(1, 4):\n    training.log_metrics(step, loss={top} / step)\n"
SUBMIT = ("submit", "train.py", "--nproc", "1", "--cluster", "local", "--name")
FIRST_STEP = TracedSteps(first=1, last=1)


@pytest.fixture
def two_codes(hpcenv: Any, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A project in git whose code is that of neither of two submissions; the function submits other code."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (project / ".gitignore").write_text("runs/\n")

    def submit(*words: str, top: str, committed: bool = True) -> None:
        if not committed:
            commit(project)
        (project / "train.py").write_text(PLAIN.format(top=top))
        if committed:
            commit(project)
        done = hpcenv(*SUBMIT, *words, cwd=project)
        assert done.status == 0, done.stderr
        (project / "train.py").write_text(PLAIN.format(top="5.0"))

    return submit


def changed_in(folder: Path) -> str:
    return subprocess.run(
        ["git", "status", "--porcelain"], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def test_a_repetition_at_another_commit_is_found_again(hpcenv: Any, project: Path, two_codes: Any) -> None:
    two_codes("one", top="3.0")
    traced = ("--frozen", "--trace-steps", "1:1", "--stop-after-steps", "1")
    two_codes("one-trace", *traced, top="3.0")
    two_codes("two-trace", *traced, top="4.0")
    assert hpcenv("cancel", "one", "one-trace", "two-trace", cwd=project).status == 0
    found = list(earlier_repetitions(open_run(project / "runs/one"), FIRST_STEP))
    assert [one.path.name for one in found] == ["one-trace"]
    assert list(earlier_repetitions(open_run(project / "runs/one"), TracedSteps(first=1, last=2))) == []


@pytest.mark.long
@pytest.mark.parametrize("committed", [True, False])
def test_runs_of_two_commits_are_repeated_from_copies_that_do_not_stay(
    hpcenv: Any, project: Path, tmp_path: Path, two_codes: Any, committed: bool
) -> None:
    for name, top in (("one", "3.0"), ("two", "4.0")):
        dirty = () if committed else ("--allow-dirty",)
        two_codes(name, "--wait", *dirty, top=top, committed=committed)
        assert load_record(Manifest, RunFolder(project / "runs" / name).manifest).source.dirty is not committed
    status = changed_in(project)
    done = hpcenv("compare", "--explain-op", "one", "two", cwd=project)
    # Without torch there is no trace; but both were repeated, each with its own code.
    assert done.status == 42 and done.stderr.count("the code is the run's own copy") == 2, done.stderr
    for name in ("one", "two"):
        assert (project / f"runs/{name}-trace/source/train.py").read_bytes() == (
            project / f"runs/{name}/source/train.py"
        ).read_bytes()
    assert changed_in(project) == status and list((tmp_path / "tmp").glob("hpcenv-code-*")) == []
    # With the traces there, a second call repeats nothing. The page shows the lines of both operations.
    for name, operator, line in (("one", "mm", 3), ("two", "tanh", 9)):
        step = [operation(f"aten.{operator}.default", {"self": "x"}, {"0": "h"}, at=f"source/train.py:{line}")]
        traces.write(RunFolder(project / f"runs/{name}-trace"), 0, traces.lines(*[step] * 4))
    before = sorted(os.listdir(project / "runs"))
    done = hpcenv("compare", "--explain-op", "one", "two", cwd=project)
    assert done.status == 41 and "aten.mm.default" in done.stdout, done.stderr
    assert "source/train.py:3 in the reference" in done.stdout and "source/train.py:9 in the run" in done.stdout
    assert "repeated as one-trace" in done.stdout and sorted(os.listdir(project / "runs")) == before
