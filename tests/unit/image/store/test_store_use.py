"""`hpcenv image list`, `path`, `prune` and `inspect`: what a store holds and who needs it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcenv import filesystem
from hpcenv.errors import EnvironmentUnreadable, FileUnusable, ImageMismatch, ImageUnavailable, UsageError
from hpcenv.image.store import lease
from hpcenv.image.store.record import ImageRecord, Provenance, SifFacts
from hpcenv.image.store.store import Store
from hpcenv.image.store.store_folder import open_store
from hpcenv.locking.image_inspect import inspect, source_of
from hpcenv.locking.image_path import find_locked, find_path, find_sif
from hpcenv.node.check import sif
from hpcenv.project.lockfile import AskedTable, ContainerTable, Lockfile, PackagesTable, SifTable
from hpcenv.project.store_config import StorePlace
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Environment, Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.submission import Submission
from hpcenv.runs.prune import PrunePlan, PruneRequest, plan_prune, prune
from hpcenv.runs.store_listing import list_images
from hpcenv.submission.plan import Plan, Request
from hpcenv.submission.submit import need_image

DAY = 86400.0
NO_SLURM: Mapping[str, str] = {"PATH": "/nonexistent"}


def at(root: Path) -> StorePlace:
    return StorePlace(root=root)


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


def put(store: Store, letter: str, *, reference: str = "", layer: str = "", age: float = 0.0) -> Path:
    """Publish an image whose digest is one letter; its SIF has 100 bytes, its layer 1000."""
    content = letter.encode() * 100
    record = ImageRecord(
        digest=digest(letter),
        references=(reference or f"docker://registry.example/{letter}:1",),
        manifest_digest=digest(letter),
        index_digest="sha256:1ddec0de" + "0" * 56,
        platform="linux/amd64",
        layers=(digest(layer),) if layer else (),
        diff_ids=(digest(layer),) if layer else (),
        sif=SifFacts(
            sha256=hashlib.sha256(content).hexdigest(), size=100, partition_sha256="0" * 64, partition_size=10,
            compression="zstd", architecture="amd64",
        ),
        made=Provenance(builder="hpcenv", tools={}, created="2026-11-20T00:00:00Z"),
    )  # fmt: skip
    with store.scratch(0) as folder:
        (folder / "x").write_bytes(content)
        path = store.publish_image(folder / "x", record).path
    if layer:
        for place in (store.blobs, store.indexes):
            (place / "sha256" / (layer * 64)).write_bytes(bytes(1000))
            os.utime(place / "sha256" / (layer * 64), (filesystem.file_time(store.tmp) - age,) * 2)
    when = filesystem.file_time(store.tmp) - age
    os.utime(path, (when, when))
    os.utime(store.record_path(digest(letter)), (when, when))
    return path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


def plan(store: Store, environ: Mapping[str, str] = NO_SLURM, **asked: Any) -> PrunePlan:
    return plan_prune(PruneRequest(place=at(store.root), **{"older_than": 0.0, **asked}), environ=environ)


def letters(found: PrunePlan, kind: str = "image") -> str:
    return "".join(sorted(item.name.removeprefix("sha256:")[0] for item in found.removals if item.kind == kind))


def why_kept(found: PrunePlan, letter: str) -> str:
    return next(item.why for item in found.kept if item.digest == digest(letter))


# -- list and path ------------------------------------------------------------------------


def test_a_list_has_every_image_the_latest_used_first(store: Store, tmp_path: Path) -> None:
    put(store, "a", age=3 * DAY, layer="1")
    put(store, "b", age=DAY)
    (tmp_path / "x.lock.toml").write_text("")
    store.add_root("lockfile", tmp_path / "x.lock.toml", [digest("a")])
    store.record_path(digest("b")).write_text("{")
    found = list_images(at(store.root), NO_SLURM)
    assert [(image.digest[7], image.size, image.references) for image in found.images] == [
        ("b", 100, ()),
        ("a", 100, ("docker://registry.example/a:1",)),
    ]
    assert [image.used_by for image in found.images] == [(), (f"lockfile {tmp_path / 'x.lock.toml'}",)]
    assert found.images[0].problem == "its record is missing or damaged"
    assert (found.blobs.count, found.blobs.size, found.indexes.count) == (1, 1000, 1)


def test_a_run_that_has_ended_needs_nothing(store: Store, tmp_path: Path, fake_slurm: Any) -> None:
    put(store, "a", age=9 * DAY)
    for name in ("over", "waits", "gone"):
        make_run(store, tmp_path / "runs" / name, "a")
    for name, job in (("over", "7"), ("waits", "8")):
        record = RunFolder(tmp_path / "runs" / name).submission
        record.write_text(record.read_text().replace('"7"', f'"{job}"'))
    shutil.rmtree(tmp_path / "runs" / "gone")
    fake_slurm.answers("squeue", "7|COMPLETED|None|n1|0:01\n8|PENDING|Priority||0:00\n")
    fake_slurm.answers("sacct", "7|COMPLETED|0:0|n1|00:00:01\n8|PENDING|0:0||00:00:00\n")
    (image,) = list_images(at(store.root), fake_slurm.environ).images
    assert image.used_by == (f"run {tmp_path / 'runs' / 'waits'}",)
    assert len(fake_slurm.calls("squeue")) == 1


def test_an_image_that_a_job_is_submitted_with_is_used(store: Store, tmp_path: Path) -> None:
    put(store, "a", age=9 * DAY)
    run = make_run(store, tmp_path / "runs" / "r", "a")
    plan = Plan(
        manifest=load_record(Manifest, run.manifest), request=Request(nodes=1, gpus_per_node=0, nproc_per_node=1),
        script="", lockfile_text="", command=(), notes=(), requested=(),
    )  # fmt: skip
    need_image(plan, run, needed=True)
    (image,) = list_images(at(store.root), NO_SLURM).images
    assert time.time() - image.used < DAY


def test_no_store_is_an_empty_list(tmp_path: Path) -> None:
    found = list_images(at(tmp_path / "none"), NO_SLURM)
    assert (found.exists, found.images) == (False, ())


@pytest.mark.parametrize(
    "word", ["docker://registry.example/a:1", "registry.example/a:1", "a" * 64, "sha256:" + "a" * 64, "aaaaaa"]
)
def test_an_image_is_found_by_reference_digest_and_prefix(store: Store, word: str) -> None:
    path = put(store, "a", age=DAY)
    put(store, "b")
    assert find_path(at(store.root), word) == path


def test_too_few_digits_are_told(store: Store) -> None:
    put(store, "a")
    with pytest.raises(ImageUnavailable) as caught:
        find_path(at(store.root), "aaaa")
    assert caught.value.why == "a digest needs at least 6 digits"


def test_an_image_that_is_asked_for_counts_as_used(store: Store) -> None:
    put(store, "a", age=9 * DAY)
    find_path(at(store.root), "aaaaaa")
    assert letters(plan(store, older_than=8 * DAY)) == ""


def test_a_name_of_two_images_is_not_guessed(store: Store) -> None:
    put(store, "a", reference="docker://x:1")
    put(store, "b", reference="docker://x:1")
    for word in ("docker://x:1", "1ddec0de"):
        with pytest.raises(UsageError, match="fits 2 images") as caught:
            find_path(at(store.root), word)
        assert f"{digest('a')} made 2026-11-20T00:00:00Z" in (caught.value.why or "")


@pytest.mark.parametrize("word", ["docker://registry.example/c:1", "cccccc", "aaaaa", "../x"])
def test_an_image_that_is_not_there(store: Store, tmp_path: Path, word: str) -> None:
    put(store, "a")
    with pytest.raises(ImageUnavailable):
        find_path(at(store.root), word)
    with pytest.raises(ImageUnavailable):
        find_path(at(tmp_path / "none"), word)


def test_a_truncated_sif_is_not_given_out(store: Store) -> None:
    path = put(store, "a")
    os.chmod(path, 0o644)
    os.truncate(path, 10)
    os.chmod(path, 0o444)
    with pytest.raises(ImageUnavailable):
        find_path(at(store.root), "aaaaaa")
    assert list_images(at(store.root), NO_SLURM).images[0].problem == "it has 10 bytes, but its record has 100"


SAYS = {0o664: "its group may write to it (mode 0664, owner ", 0o646: "everybody may write to it (mode 0646, owner "}


@pytest.mark.parametrize("mode", SAYS)
def test_a_sif_that_others_may_write_to_is_named_and_not_given_out(store: Store, mode: int, tmp_path: Path) -> None:
    path = put(store, "a")
    os.chmod(path, mode)
    locked = locked_to("a", hashlib.sha256(b"a" * 100).hexdigest())
    asked = (
        lambda: find_path(at(store.root), "aaaaaa"),
        lambda: find_locked(at(store.root), locked, origin=tmp_path / "x.lock.toml"),
        lambda: store.find_image(digest("a")),
    )
    for ask in asked:
        with pytest.raises(FileUnusable) as caught:
            ask()
        assert caught.value.what == f"`{path}` is not trusted"
        assert (caught.value.why or "").startswith(SAYS[mode])
        assert (caught.value.hint or "").startswith(f"chmod go-w {path.parent}/*.sif\n")
    (image,) = list_images(at(store.root), NO_SLURM).images
    assert image.problem.startswith(SAYS[mode])
    os.chmod(path, 0o444)
    assert find_path(at(store.root), "aaaaaa") == path


def test_another_images_mode_is_not_in_the_way(store: Store) -> None:
    os.chmod(put(store, "a"), 0o664)
    path = put(store, "b")
    assert find_path(at(store.root), "bbbbbb") == path


def locked_to(letter: str, sha256: str) -> Lockfile:
    table = SifTable(
        sha256=sha256, size=100, partition_sha256="0" * 64, partition_size=1, compression="zstd", arch="amd64"
    )
    container = ContainerTable(
        reference="docker://x:1", manifest_digest=digest(letter), platform="linux/amd64", sif=table
    )
    return Lockfile(
        schema_=1,
        generated_by="",
        fingerprint="",
        kind="sif",
        asked=AskedTable(image="docker://x:1", platform="linux/amd64"),
        container=container,
        packages=PackagesTable(count=0, env_digest="", unlisted_count=0, unlisted_digest=""),
    )


def test_the_image_of_a_lockfile(store: Store, tmp_path: Path) -> None:
    path, origin = put(store, "a"), tmp_path / "default.lock.toml"
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert find_locked(at(store.root), locked_to("a", sha256), origin=origin) == path
    with pytest.raises(ImageMismatch, match="is not the SIF that") as caught:
        find_locked(at(store.root), locked_to("a", "0" * 64), origin=origin)
    assert f"the store has sha256 {sha256}, 100 bytes" in (caught.value.why or "")
    for root in (store.root, tmp_path / "none"):
        with pytest.raises(ImageUnavailable) as missing:
            find_locked(at(root), locked_to("b", sha256), origin=origin)
        assert missing.value.hint == f"hpcenv image build --lock {origin}"
    with pytest.raises(UsageError, match="not an image"):
        find_locked(at(store.root), replace(locked_to("b", sha256), container=None), origin=origin)


# -- prune --------------------------------------------------------------------------------


def test_only_what_nobody_needs_is_removed(store: Store, tmp_path: Path) -> None:
    lockfile = tmp_path / "lockfiles" / "default.lock.toml"
    lockfile.parent.mkdir()
    lockfile.write_text(f'manifest-digest = "{digest("a")}"\n')
    store.add_root("lockfile", lockfile, [digest("a")])
    kept, gone = put(store, "a", layer="1"), put(store, "b", layer="2")
    found = plan(store)
    assert (letters(found), letters(found, "layer"), letters(found, "index")) == ("b", "2", "2")
    assert found.frees == 100 + 1000 + 1000
    assert why_kept(found, "a") == f"lockfile {lockfile}"
    assert gone.exists()  # a plan removes nothing
    done = prune(found, PruneRequest(place=at(store.root), older_than=0), environ=NO_SLURM)
    assert (len(done.removed), done.skipped, done.freed) == (3, (), 2100)
    assert (kept.exists(), gone.exists(), store.record_path(digest("b")).exists()) == (True, False, False)
    assert plan(store).removals == ()
    assert os.listdir(store.leases) == []


def test_what_the_lockfile_says_now_counts_not_what_was_noted(store: Store, tmp_path: Path) -> None:
    lockfile = tmp_path / "default.lock.toml"
    store.add_root("lockfile", lockfile, [digest("a")])
    put(store, "a")
    path = put(store, "b")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    lockfile.write_text(f'schema = 99\n[container.sif]\nsha256 = "{sha256}"\n')
    assert letters(plan(store)) == "a"


def test_lockfiles_beside_a_known_one_and_of_this_project_count(store: Store, project: Path, tmp_path: Path) -> None:
    from hpcenv.project.workspace import open_workspace

    known = tmp_path / "elsewhere" / "one.lock.toml"
    known.parent.mkdir()
    known.write_text("")
    (known.parent / "two.lock.toml").write_text(f"# {digest('a')}")
    store.add_root("lockfile", known, [digest("c")])
    (project / "lockfiles" / "old.lock.toml").write_text(f"# {digest('b')}")
    for letter in "abc":
        put(store, letter)
    assert letters(plan(store)) == "bc"
    assert letters(plan(store, workspaces=(open_workspace(project),))) == "c"


def test_a_lockfile_that_is_gone_needs_nothing_and_its_note_goes_too(store: Store, tmp_path: Path) -> None:
    store.add_root("lockfile", tmp_path / "gone.lock.toml", [digest("a")])
    put(store, "a")
    found = plan(store)
    assert (letters(found), [i.why for i in found.removals if i.kind == "note"]) == (
        "a",
        [f"lockfile {tmp_path / 'gone.lock.toml'} is gone"],
    )
    prune(found, PruneRequest(place=at(store.root), older_than=0), environ=NO_SLURM)
    assert store.list_roots() == ()


@pytest.mark.parametrize(
    "changes", [{"host": "n7"}, {"mount": "/scratch", "network": True}, {"kind_of_mount": "lustre"}, {"path": "/x\0"}]
)
def test_a_lockfile_that_cannot_be_looked_at_from_here_keeps_its_images(
    store: Store, tmp_path: Path, changes: dict[str, object]
) -> None:
    store.add_root("lockfile", tmp_path / "gone.lock.toml", [digest("a")])
    ((note, _),) = store.list_roots()
    note.write_text(json.dumps(json.loads(note.read_text()) | changes))
    put(store, "a")
    found = plan(store)
    assert found.removals == ()
    assert why_kept(found, "a").endswith("cannot be reached from here")


def test_a_lockfile_that_cannot_be_read_keeps_its_images(store: Store, tmp_path: Path) -> None:
    (tmp_path / "x.lock.toml").mkdir()  # there, and no text
    store.add_root("lockfile", tmp_path / "x.lock.toml", [digest("a")])
    put(store, "a")
    put(store, "b")
    assert letters(plan(store)) == "b"


def test_a_damaged_note_keeps_everything(store: Store) -> None:
    (store.roots / "x.json").write_text("{")
    put(store, "a")
    found = plan(store)
    assert found.removals == ()
    assert why_kept(found, "a") == (
        f"the note {store.roots / 'x.json'} cannot be read; remove it if you know that it is not needed"
    )


def make_run(store: Store, folder: Path, letter: str) -> RunFolder:
    """A run folder whose manifest names an image of the store, known to the store."""
    run = RunFolder(folder)
    manifest = Manifest(
        schema=1, run=folder.name, run_folder=str(folder), cluster="slurm", nodes=1, nproc_per_node=1, gpus_per_node=0,
        cpus_per_task=0, backend="gloo", script="/s.py", script_sha256="0", args=(), workdir="/", settings=(),
        environment=Environment(kind="sif", python="python3", sif=str(store.image_path(digest(letter)))),
        expectations=(), packages=(), probe_level="full", lockfile="l", lockfile_sha256="0", hpcenv_version="0",
    )  # fmt: skip
    save_record(manifest, run.manifest)
    save_record(
        Submission(schema=1, run=folder.name, cluster="slurm", job_id="7", submitted=1.0, command=()), run.submission
    )
    store.add_root("run", folder, [digest(letter)])
    return run


@pytest.mark.parametrize(
    ("squeue", "needed"),
    [("7|PENDING|Priority||0:00\n", True), ("7|RUNNING|None|n1|0:01\n", True), ("7|COMPLETED|None|n1|0:01\n", False),
     ("7|CANCELLED|None|n1|0:01\n", False), ("7|NEW_STATE|None|n1|0:01\n", True), ("", True)],
    ids=["pending", "running", "completed", "cancelled", "a state nobody knows", "forgotten by Slurm"],
)  # fmt: skip
def test_a_run_needs_its_image_until_it_surely_has_ended(
    store: Store, tmp_path: Path, fake_slurm: Any, squeue: str, needed: bool
) -> None:
    fake_slurm.answers("squeue", squeue)
    make_run(store, tmp_path / "runs" / "r", "a")
    put(store, "a")
    assert letters(plan(store, fake_slurm.environ)) == ("" if needed else "a")


def test_without_slurm_nobody_can_tell_and_the_image_stays(store: Store, tmp_path: Path) -> None:
    make_run(store, tmp_path / "runs" / "r", "a")
    put(store, "a")
    found = plan(store)
    assert found.removals == ()
    assert why_kept(found, "a") == f"run {tmp_path / 'runs' / 'r'}: unknown"


def test_an_image_that_others_may_write_to_is_there_all_the_same(store: Store, tmp_path: Path) -> None:
    lockfile = tmp_path / "x.lock.toml"
    lockfile.write_text(f'manifest-digest = "{digest("a")}"\n')
    store.add_root("lockfile", lockfile, [digest("a")])
    for letter, layer in (("a", "1"), ("b", "2")):
        os.chmod(put(store, letter, layer=layer), 0o664)
    found = plan(store)
    assert (letters(found), letters(found, "layer"), letters(found, "index")) == ("b", "2", "2")
    assert why_kept(found, "a").startswith(f"lockfile {lockfile}; the store does not use it: its group may write to it")
    (spare,) = (item for item in found.removals if item.kind == "image")
    assert spare.why.startswith("no lockfile and no run needs it, and its group may write to it (mode 0664")


@pytest.mark.parametrize("name", ["manifest", "submission"])
def test_a_damaged_run_keeps_its_image(store: Store, tmp_path: Path, fake_slurm: Any, name: str) -> None:
    run = make_run(store, tmp_path / "runs" / "r", "a")
    getattr(run, name).write_text("{")
    for letter in "ab":
        put(store, letter)
    assert letters(plan(store, fake_slurm.environ)) == "b"


def test_a_damaged_run_that_nobody_noted_keeps_every_image(store: Store, project: Path) -> None:
    from hpcenv.project.workspace import open_workspace

    make_run(store, project / "runs" / "r", "a").manifest.write_text('{"run": "r", ')
    store.add_root("run", project / "runs" / "r", [])
    put(store, "b")
    assert letters(plan(store, workspaces=(open_workspace(project),))) == ""


def test_runs_of_this_project_count_without_a_note(store: Store, project: Path, fake_slurm: Any) -> None:
    from hpcenv.project.workspace import open_workspace

    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    make_run(store, project / "runs" / "r", "a")
    store.add_root("run", project / "runs" / "r", [])
    put(store, "a")
    assert letters(plan(store, fake_slurm.environ)) == "a"
    assert letters(plan(store, fake_slurm.environ, workspaces=(open_workspace(project),))) == ""


def test_age_counts_from_the_last_use(store: Store) -> None:
    put(store, "a", layer="1", age=10 * DAY)
    put(store, "b", layer="2", age=5 * DAY)
    found = plan(store, older_than=7 * DAY)
    assert (letters(found), letters(found, "layer")) == ("a", "1")


def test_bytes_to_keep_remove_the_longest_unused_first(store: Store, tmp_path: Path) -> None:
    (tmp_path / "x.lock.toml").write_text(digest("c"))
    store.add_root("lockfile", tmp_path / "x.lock.toml", [digest("c")])
    for letter, age in (("a", 3 * DAY), ("b", 2 * DAY), ("c", 9 * DAY)):
        put(store, letter, age=age)
    put(store, "c", layer="3", age=9 * DAY)
    total = plan(store).total
    assert letters(plan(store, keep_bytes=total)) == ""
    assert letters(plan(store, keep_bytes=total - 1)) == "a"
    assert letters(plan(store, keep_bytes=total - 101)) == "ab"
    found = plan(store, keep_bytes=0)  # and then layers of what stays, but never what stays
    assert (letters(found), letters(found, "layer"), letters(found, "index")) == ("ab", "3", "3")


def test_work_in_progress_keeps_everything_and_says_who(store: Store) -> None:
    put(store, "a")
    found = plan(store)
    with store.lease(digest("b"), purpose="converts docker://b", timeout=0):
        for ask in (
            lambda: plan(store),
            lambda: prune(found, PruneRequest(place=at(store.root), older_than=0), environ=NO_SLURM),
        ):
            with pytest.raises(FileUnusable, match="is in use") as caught:
                ask()
            assert f"pid {os.getpid()} on {os.uname().nodename} converts docker://b" in (caught.value.why or "")
    assert store.find_image(digest("a")) is not None


def test_what_is_needed_since_the_plan_stays(store: Store, tmp_path: Path) -> None:
    for letter in "abc":
        put(store, letter, age=DAY)
    found = plan(store)
    assert letters(found) == "abc"
    (tmp_path / "x.lock.toml").write_text(digest("a"))
    store.add_root("lockfile", tmp_path / "x.lock.toml", [digest("a")])
    find_path(at(store.root), "bbbbbb")
    done = prune(found, PruneRequest(place=at(store.root), older_than=0), environ=NO_SLURM)
    assert [[item.name[7] for item in items] for items in (done.removed, done.skipped)] == [["c"], ["a", "b"]]


def test_leftovers_go(store: Store) -> None:
    left = store.tmp / f"n7.1.1.{'0' * 16}.{'1' * 16}"
    left.mkdir()
    (left / "half").write_bytes(bytes(500))
    part = store.blobs / "sha256" / f".{'a' * 64}.free.{'0' * 16}.part"
    part.write_bytes(bytes(50))
    fresh = store.blobs / "sha256" / f".{'b' * 64}.free.{'0' * 16}.part"
    fresh.write_bytes(b"x")
    for path in (left / "half", left, part):
        os.utime(path, (1, 1))
    found = plan(store)
    assert sorted((item.path, item.size) for item in found.removals) == sorted([(left, 500), (part, 50)])
    prune(found, PruneRequest(place=at(store.root), older_than=0), environ=NO_SLURM)
    assert (left.exists(), part.exists(), fresh.exists()) == (False, False, True)


def test_what_was_used_within_a_day_is_spared(store: Store) -> None:
    """Image trial 1: a colleague may run it without hpcenv."""
    put(store, "a", layer="1", age=0.9 * DAY)
    put(store, "b", layer="2", age=1.1 * DAY)
    found = plan_prune(PruneRequest(place=at(store.root)), environ=NO_SLURM)
    assert (letters(found), letters(found, "layer")) == ("b", "2")
    assert why_kept(found, "a") == "it was used a short time ago; --older-than 0 removes it too"
    assert letters(plan_prune(PruneRequest(place=at(store.root), older_than=0), environ=NO_SLURM)) == "ab"


def test_nothing_is_removed_while_the_store_is_in_use(store: Store) -> None:
    """Image trial 1: `verify` held no lease."""
    put(store, "a", age=2 * DAY)
    with store.in_use(purpose="compares it"), store.in_use(purpose="compares it too"):
        with pytest.raises(FileUnusable, match="is in use") as caught:
            plan(store)
        assert caught.value.why is not None
        assert caught.value.why.count("compares it") == 2
    assert letters(plan(store)) == "a"


def blob(store: Store, content: bytes) -> str:
    name = hashlib.sha256(content).hexdigest()
    (store.blobs / "sha256" / name).write_bytes(content)
    return name[:12]


def test_what_was_pulled_is_named_by_what_it_is(store: Store, hpcenv: Any, tmp_path: Path) -> None:
    put(store, "a", layer="1")  # a record names these two
    (store.blobs / "sha256" / ("a" * 64)).write_bytes(b"{}")
    kinds = {
        blob(store, b'{"config": {}, "layers": []}'): "manifest",
        blob(store, b'{"manifests": []}'): "manifest",
        blob(store, b'{"rootfs": {}, "os": "linux"}'): "configuration",
        blob(store, b'{"os": "linu'): "layer",  # cut off, or no JSON at all
        blob(store, b"[1]"): "layer",
        blob(store, b"\x1f\x8b\x08\0"): "layer",
        blob(store, b"[" * 100_000): "layer",
        blob(store, b'{"rootfs": "' + b"x" * (9 << 20) + b'"}'): "layer",  # larger than any configuration
        "1" * 12: "layer",
        "a" * 12: "manifest",
    }
    found = plan(store)
    named = {item.name[7:19]: item.kind for item in found.removals if item.kind not in ("image", "index")}
    assert named == kinds
    environ = {"PATH": "/nonexistent", "HOME": str(tmp_path)}
    words = ("--dry-run", "--older-than", "0", "--store", "store")
    lines = hpcenv("image", "prune", *words, cwd=tmp_path, environ=environ).stdout.splitlines()
    assert "manifest       aaaaaaaaaaaa  2 bytes    no kept image was made from it" in lines
    assert "index          111111111111  1.0 kB     no kept image was made from it" in lines


def left_by(store: Store, host: str, *, age: float) -> Path:
    """Unfinished work of a process on another machine."""
    left = store.tmp / f"{host}.1.1.{'0' * 16}.{'1' * 16}"
    left.mkdir()
    (left / "half").write_bytes(bytes(500))
    when = filesystem.file_time(store.tmp) - age
    for path in (left / "half", left):
        os.utime(path, (when, when))
    return left


def test_work_of_another_machine_goes_as_soon_as_nobody_holds_a_lease(store: Store) -> None:
    killed, fresh = left_by(store, "n7", age=90), left_by(store, "n8", age=20)
    aside = store.tmp / "damaged.0"  # jobs may run from it
    aside.write_bytes(b"x")
    os.utime(aside, (1, 1))
    assert store.leftovers() == ()  # alone it shows only after a day
    with store.lease(digest("a"), purpose="converts it", timeout=0), pytest.raises(FileUnusable, match="is in use"):
        plan(store)
    found = plan(store)
    assert [(item.path, item.kind, item.size) for item in found.removals] == [(killed, "unfinished", 500)]
    prune(found, PruneRequest(place=at(store.root), older_than=0), environ=NO_SLURM)
    assert (killed.exists(), fresh.exists(), aside.exists()) == (False, True, True)


def test_one_lease_of_a_dead_process_is_waited_out_and_its_work_goes(store: Store) -> None:
    killed = left_by(store, "n7", age=90)
    said = {"schema": 1, "token": "0" * 32, "host": "n7", "machine": "0" * 16, "pid": 1, "start": 1, "purpose": "x"}
    (store.leases / "sha256-0").write_text(json.dumps(said) + "\n" + "0" * 15 + "\n")
    # As `_require_idle` waits, in a second instead of half a minute.
    assert lease.live_holders(store.leases, stale_after=1.0) == ()
    assert killed in store.leftovers(idle=True)


def test_a_plan_is_looked_at_again_before_anything_is_removed(store: Store, tmp_path: Path) -> None:
    for letter in "ab":
        put(store, letter, age=DAY)
    left = left_by(store, "n7", age=90)
    found = plan(store)
    # Since: one is written to again, one is not there any more, one has come.
    (left / "half").write_bytes(bytes(501))
    os.utime(left)
    store.image_path(digest("a")).unlink()
    put(store, "c", age=DAY)
    done = prune(found, PruneRequest(place=at(store.root), older_than=0), environ=NO_SLURM)
    assert [item.name[7] for item in done.removed if item.kind == "image"] == ["b"]
    assert {item.path for item in done.skipped} == {left, store.image_path(digest("a"))}
    assert (left.exists(), store.find_image(digest("c")) is not None) == (True, True)


# -- inspect ------------------------------------------------------------------------------

SQUASHFS = b"hsqs" + (7).to_bytes(4, "little") + (1_700_000_000).to_bytes(4, "little") + (131072).to_bytes(4, "little")
SQUASHFS += bytes(4) + (6).to_bytes(2, "little") + bytes(6) + (4).to_bytes(2, "little") + bytes(10)
SQUASHFS += (96).to_bytes(8, "little") + bytes(48)


def make_sif(path: Path, labels: Mapping[str, str], **more: bytes) -> Path:
    metadata = json.dumps({"data": {"attributes": {"labels": dict(labels)}}}).encode()
    objects = [("json", "inspect-metadata.json", metadata)]
    objects += [
        (kind.replace("_", "-"), name, data) for key, data in more.items() for kind, _, name in [key.partition("__")]
    ]
    begin = sif.squashfs_offset_for(objects)
    path.write_bytes(bytes(begin) + SQUASHFS)
    sif.write(path, architecture="amd64", squashfs_offset=begin, objects=objects)
    return path


def test_a_sif_tells_what_it_is(tmp_path: Path) -> None:
    lock = b'schema = 1\nfingerprint = "hpc1-0123456789ab"\n[asked]\nkind = "no"\n'
    path = make_sif(
        tmp_path / "x.sif",
        {"hpcenv.source.manifest-digest": digest("a"), "maintainer": "x"},
        **{"json__oci-config.json": b'{"config": {"Cmd": ["sh"]}}', f"generic__{sif.EMBEDDED_LOCK}": lock},
    )
    found = inspect(tmp_path / "x.sif", hashes=True)
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.partition_sha256 == hashlib.sha256(SQUASHFS).hexdigest()
    assert found.squashfs is not None
    assert (found.squashfs.compression, found.squashfs.inodes, found.header.architecture) == ("zstd", 7, "amd64")
    assert (found.source.digest, found.source.origin) == (digest("a"), "label hpcenv.source.manifest-digest")
    assert found.labels["maintainer"] == "x"
    assert found.config == {"config": {"Cmd": ["sh"]}}
    assert found.lock is not None
    assert (found.lock.size, found.lock.fields["fingerprint"]) == (len(lock), "hpc1-0123456789ab")
    assert (found.signatures, found.notes) == (0, ())
    assert inspect(path).sha256 is None


def test_a_sif_of_the_store_is_found_by_its_reference(store: Store, tmp_path: Path) -> None:
    path = put(store, "a")
    with pytest.raises(ImageMismatch) as caught:  # found, and it is 100 letters
        inspect(find_sif("docker://registry.example/a:1", tmp_path, at(store.root)))
    assert str(path) in caught.value.what


def test_what_is_not_there_or_no_sif_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text.sif").write_text("x")
    with pytest.raises(ImageMismatch):
        inspect(tmp_path / "text.sif")
    with pytest.raises(EnvironmentUnreadable):
        inspect(find_sif("none.sif", tmp_path, at(tmp_path)))
    with pytest.raises(ImageUnavailable):
        find_sif("none", tmp_path, at(tmp_path / "none"))


def test_a_damaged_part_is_a_note_and_the_rest_is_told(tmp_path: Path) -> None:
    make_sif(tmp_path / "x.sif", {}, **{"json__oci-config.json": b"[" * 100_000, "json__labels": b"x"})
    path = tmp_path / "x.sif"
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"attributes")] = 0
    raw[raw.index(b"hsqs")] = 0
    path.write_bytes(raw)
    found = inspect(tmp_path / "x.sif")
    assert (found.labels, found.config, found.squashfs, found.source.origin) == ({}, None, None, "unknown")
    assert [note.partition(":")[0] for note in found.notes] == ["labels", "file system", "OCI configuration"]


FROM = "org.label-schema.usage.singularity.deffile.from"


@pytest.mark.parametrize(
    ("labels", "definition", "origin", "digest_of"),
    [
        ({"hpcenv.source.manifest-digest": digest("a"), "org.opencontainers.image.base.digest": digest("b")}, b"",
         "label hpcenv.source.manifest-digest", "manifest"),
        ({"hpcenv.source.manifest-digest": "x", "org.opencontainers.image.base.digest": digest("a"), FROM: "x@" + digest("b")},
         b"", "label org.opencontainers.image.base.digest", "manifest or index"),
        ({FROM: "host/x@" + digest("a")}, b"From: y@" + digest("b").encode(), f"label {FROM}", "manifest or index"),
        ({FROM: "host/x:1"}, b"bootstrap: docker\nfrom: host/x@" + digest("a").encode() + b"\n", "definition file",
         "manifest or index"),
    ],
)  # fmt: skip
def test_the_surest_statement_about_the_source_counts(
    labels: dict[str, str], definition: bytes, origin: str, digest_of: str
) -> None:
    found = source_of(labels, [definition])
    assert (found.origin, found.digest, found.digest_of) == (origin, digest("a"), digest_of)


def test_a_build_from_a_tag_names_no_digest() -> None:
    found = source_of({FROM: "host/x:1"}, [b"bootstrap: docker\nfrom: host/x:1\n"])
    assert (found.origin, found.reference, found.digest) == ("unknown", "host/x:1", None)


# -- the verbs ----------------------------------------------------------------------------


def test_the_verbs_as_text_and_as_json(store: Store, hpcenv: Any, tmp_path: Path) -> None:
    path = put(store, "a", age=3 * DAY)
    environ = {"PATH": "/nonexistent", "HOME": str(tmp_path), "HPCENV_STORE": str(store.root)}

    def run(*words: str, status: int = 0) -> Any:
        done = hpcenv("image", *words, cwd=tmp_path, environ=environ)
        assert done.status == status, done.stderr
        return done

    assert run("list").stdout.splitlines() == [
        "DIGEST        SIZE       REFERENCE                      PLATFORM     USED     NEEDED BY",
        "aaaaaaaaaaaa  100 bytes  docker://registry.example/a:1  linux/amd64  3 d ago  -",
    ]
    envelope = run("list", "--json").envelope
    assert (envelope["command"], envelope["data"]["images"][0]["digest"]) == ("image list", digest("a"))
    dry = run("prune", "--older-than", "2d", "--dry-run").stdout.splitlines()
    assert dry[0] == "image  aaaaaaaaaaaa  100 bytes  no lockfile and no run needs it"
    assert run("prune", status=2).stderr.startswith("error[usage]: 1 of the store's files and folders would")
    assert run("prune", "--older-than", "x", status=2).stderr.startswith("error[usage]: Invalid value")
    assert run("inspect", "--path", "aaaaaa").stdout == f"{path}\n"
    assert run("inspect", "--path", "aaaaaa", "--json").envelope["data"] == {"path": str(path)}
    assert run("inspect", "--path", "bbbbbb", "--json", status=10).envelope["error"]["code"] == "image-unavailable"
    old = run("path", "aaaaaa", status=2).stderr
    assert "`hpcenv image path` is now `hpcenv image inspect --path`\n" in old
    assert old.endswith("\nhint: hpcenv image inspect --path aaaaaa\n")
    assert path.exists()
    assert (
        "kept: aaaaaaaaaaaa 100 bytes: it was used a short time ago; --older-than 0 removes it too"
        in run("prune").stderr
    )
    done = run("prune", "--yes", "--json", "--older-than", "0").envelope["data"]
    assert [item["name"] for item in done["done"]["removed"]] == [digest("a")]
    assert not path.exists()
    sif_file = make_sif(tmp_path / "x.sif", {"hpcenv.source.manifest-digest": digest("a")})
    text = run("inspect", str(sif_file), "--hash").stdout
    assert f"sha256        {hashlib.sha256(sif_file.read_bytes()).hexdigest()}" in text
    assert f"made from     {digest('a')}" in text
    assert run("inspect", "x.sif", "--json").envelope["data"]["source"]["digest"] == digest("a")
