"""`hpcenv image list`, `path`, `prune` and `inspect`: what a store holds and who needs it."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcenv import filesystem
from hpcenv.errors import EnvironmentUnreadable, FileUnusable, ImageMismatch, ImageUnavailable, UsageError
from hpcenv.identity import sif
from hpcenv.image.store import lease
from hpcenv.image.store.sif_record import ImageRecord, Provenance, SifFacts
from hpcenv.image.store.store import Store
from hpcenv.image.store.store_folder import open_store
from hpcenv.locking.image_inspect import inspect, source_of
from hpcenv.locking.image_path import find_locked, find_path, find_sif
from hpcenv.project.lockfile import AskedTable, ContainerTable, Lockfile, PackagesTable, SifTable
from hpcenv.project.store_config import StorePlace
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Environment, Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.submission import Submission
from hpcenv.runs.prune import Pruned, PrunePlan, PruneRequest, plan_prune, prune
from hpcenv.runs.store_listing import list_images
from hpcenv.submission.plan import Plan, Request
from hpcenv.submission.submit import use_image

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


ANY_AGE = {"older_than": 0.0, "all": True}


def plan(store: Store, environ: Mapping[str, str] = NO_SLURM, **asked: Any) -> PrunePlan:
    return plan_prune(PruneRequest(place=at(store.root), **{**ANY_AGE, **asked}), environ=environ)


def carried_out(found: PrunePlan, store: Store) -> Pruned:
    return prune(found, PruneRequest(place=at(store.root), **ANY_AGE), environ=NO_SLURM)


def letters(found: PrunePlan, kind: str = "image") -> str:
    return "".join(sorted(item.name.removeprefix("sha256:")[0] for item in found.removals if item.kind == kind))


def why_kept(found: PrunePlan, letter: str) -> str:
    return next(item.why for item in found.kept if item.digest == digest(letter))


# -- list and path ------------------------------------------------------------------------


def test_a_list_has_every_image_the_latest_used_first(store: Store) -> None:
    put(store, "a", age=3 * DAY, layer="1")
    put(store, "b", age=DAY)
    store.record_path(digest("b")).write_text("{")
    found = list_images(at(store.root))
    assert [(image.digest[7], image.size, image.references) for image in found.images] == [
        ("b", 100, ()),
        ("a", 100, ("docker://registry.example/a:1",)),
    ]
    assert found.images[0].problem == "its record is missing or damaged"
    assert (found.blobs.count, found.blobs.size, found.indexes.count) == (1, 1000, 1)


def test_an_image_that_a_job_is_submitted_with_is_used(store: Store, tmp_path: Path) -> None:
    put(store, "a", age=9 * DAY)
    run = make_run(store, tmp_path / "runs" / "r", "a")
    plan = Plan(
        manifest=load_record(Manifest, run.manifest), request=Request(nodes=1, gpus_per_node=0, nproc_per_node=1),
        script="", lockfile_text="", command=(), notes=(), requested=(),
    )  # fmt: skip
    use_image(plan)
    (image,) = list_images(at(store.root)).images
    assert time.time() - image.used < DAY


def test_no_store_is_an_empty_list(tmp_path: Path) -> None:
    found = list_images(at(tmp_path / "none"))
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
    assert list_images(at(store.root)).images[0].problem == "it has 10 bytes, but its record has 100"


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
    (image,) = list_images(at(store.root)).images
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
        facts={"python.version": "3.11.7", "torch.version": "2.13.0"},
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
        find_locked(at(store.root), locked_to("b", sha256).model_copy(update={"container": None}), origin=origin)


# -- prune --------------------------------------------------------------------------------


def test_what_was_not_used_for_30_days_is_removed(store: Store) -> None:
    kept, gone = put(store, "a", layer="1", age=29 * DAY), put(store, "b", layer="2", age=31 * DAY)
    request = PruneRequest(place=at(store.root))
    found = plan_prune(request, environ=NO_SLURM)
    assert (letters(found), letters(found, "download"), letters(found, "index")) == ("b", "2", "2")
    assert found.frees == 100 + 1000 + 1000
    assert why_kept(found, "a") == "it was used a short time ago; --all removes it too"
    assert gone.exists()  # a plan removes nothing
    done = prune(found, request, environ=NO_SLURM)
    assert (len(done.removed), done.skipped, done.freed) == (3, (), 2100)
    assert (kept.exists(), gone.exists(), store.record_path(digest("b")).exists()) == (True, False, False)
    assert plan_prune(request, environ=NO_SLURM).removals == ()
    assert os.listdir(store.leases) == []
    assert letters(plan(store)) == "a"


@pytest.mark.parametrize(
    ("reference", "definition", "kept"),
    [
        ("docker://registry.example/a@sha256:" + "a" * 64, None, False),
        ("oras://registry.example/a:1", None, False),
        ("oci-archive:/home/alice/a.tar", None, True),
        ("docker://registry.example/a:1", "sha256:" + "0" * 64, True),
    ],
)
def test_a_sif_that_cannot_be_made_again_stays(
    store: Store, reference: str, definition: str | None, kept: bool
) -> None:
    path = put(store, "a", reference=reference, age=99 * DAY)
    record = store.record(digest("a"))
    assert record is not None
    store.update_record(replace(record, made=replace(record.made, definition=definition)))
    os.utime(store.record_path(digest("a")), (1, 1))
    for found in (plan(store), plan_prune(PruneRequest(place=at(store.root)), environ=NO_SLURM)):
        assert letters(found) == ("" if kept else "a")
        assert not kept or why_kept(found, "a").endswith(f"cannot be made again; remove it by hand: {path}")


def test_a_damaged_sif_is_of_no_use(store: Store) -> None:
    put(store, "a", age=99 * DAY)
    store.record_path(digest("a")).write_text("{")
    os.utime(store.record_path(digest("a")), (1, 1))
    (item,) = plan_prune(PruneRequest(place=at(store.root)), environ=NO_SLURM).removals
    assert (item.name, item.why) == (digest("a"), "it is damaged")


def make_run(store: Store, folder: Path, letter: str) -> RunFolder:
    """A run folder whose manifest names an image of the store."""
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
    return run


def test_what_a_queued_or_running_job_of_the_caller_names_stays(store: Store, tmp_path: Path, fake_slurm: Any) -> None:
    for letter in "abc":
        put(store, letter, age=99 * DAY)
    run, sweep = make_run(store, tmp_path / "runs" / "r", "a"), make_run(store, tmp_path / "runs" / "s" / "0", "b")
    fake_slurm.answers("squeue", f"7|{run.path}\n8|{sweep.path.parent}\n9|/somewhere/else\n")
    found = plan_prune(PruneRequest(place=at(store.root)), environ=fake_slurm.environ)
    assert letters(found) == "c"
    assert why_kept(found, "a") == f"job 7 ({run.path}) names it; --all removes it too"
    assert "--me" in fake_slurm.calls("squeue")[0].argv
    assert letters(plan(store, fake_slurm.environ)) == "abc"


def test_where_squeue_does_not_say_every_image_stays(store: Store, fake_slurm: Any) -> None:
    put(store, "a", layer="1", age=99 * DAY)
    fake_slurm.answers("squeue", err="slurm_load_jobs error: Unable to contact slurm controller\n", status=1)
    found = plan_prune(PruneRequest(place=at(store.root)), environ=fake_slurm.environ)
    assert (letters(found), letters(found, "download")) == ("", "1")
    assert why_kept(found, "a").startswith("squeue does not say whether a job of yours needs it")


def test_an_image_that_others_may_write_to_is_there_all_the_same(store: Store) -> None:
    os.chmod(put(store, "a"), 0o664)
    os.chmod(put(store, "b", age=99 * DAY), 0o664)
    found = plan_prune(PruneRequest(place=at(store.root)), environ=NO_SLURM)
    assert letters(found) == "b"
    assert "; the store does not use it: its group may write to it" in why_kept(found, "a")
    (spare,) = (item for item in found.removals if item.kind == "image")
    assert spare.why.startswith("it was not used lately, and its group may write to it (mode 0664")


def test_age_counts_from_the_last_use(store: Store) -> None:
    put(store, "a", layer="1", age=10 * DAY)
    put(store, "b", layer="2", age=5 * DAY)
    found = plan(store, older_than=7 * DAY)
    assert (letters(found), letters(found, "download")) == ("a", "1")


def test_bytes_to_keep_remove_the_longest_unused_first(store: Store) -> None:
    for letter, age in (("a", 3 * DAY), ("b", 2 * DAY)):
        put(store, letter, age=age)
    put(store, "c", layer="3", age=9 * DAY)
    total = plan(store).total
    assert plan(store, keep_bytes=total).removals == ()
    assert {item.name for item in plan(store, keep_bytes=total - 1).removals} <= {digest("c"), digest("3")}
    found = plan(store, keep_bytes=total - 2101)
    assert (letters(found), letters(found, "download"), letters(found, "index")) == ("ac", "3", "3")
    assert letters(plan(store, keep_bytes=0)) == "abc"


def test_work_in_progress_keeps_everything_and_says_who(store: Store) -> None:
    put(store, "a")
    found = plan(store)
    with store.lease(digest("b"), purpose="converts docker://b", timeout=0):
        for ask in (
            lambda: plan(store),
            lambda: carried_out(found, store),
        ):
            with pytest.raises(FileUnusable, match="is in use") as caught:
                ask()
            assert f"pid {os.getpid()} on {os.uname().nodename} converts docker://b" in (caught.value.why or "")
    assert store.find_image(digest("a")) is not None


def test_what_is_used_since_the_plan_stays(store: Store) -> None:
    for letter in "bc":
        put(store, letter, age=DAY)
    found = plan(store)
    assert letters(found) == "bc"
    find_path(at(store.root), "bbbbbb")
    done = carried_out(found, store)
    assert [[item.name[7] for item in items] for items in (done.removed, done.skipped)] == [["c"], ["b"]]


def test_leftovers_go(store: Store) -> None:
    left = store.tmp / f"n7.1.1.{'0' * 16}.{'1' * 16}"
    left.mkdir()
    (left / "half").write_bytes(bytes(500))
    part = store.blobs / "sha256" / f".{'a' * 64}.part"
    part.write_bytes(bytes(50))
    fresh = store.blobs / "sha256" / f".{'b' * 64}.part"
    fresh.write_bytes(b"x")
    for path in (left / "half", left, part):
        os.utime(path, (1, 1))
    found = plan(store)
    assert sorted((item.path, item.size) for item in found.removals) == sorted([(left, 500), (part, 50)])
    carried_out(found, store)
    assert (left.exists(), part.exists(), fresh.exists()) == (False, False, True)


def test_nothing_is_removed_while_the_store_is_in_use(store: Store) -> None:
    """Image trial 1: `verify` held no lease."""
    put(store, "a", age=2 * DAY)
    with store.in_use(purpose="compares it"), store.in_use(purpose="compares it too"):
        with pytest.raises(FileUnusable, match="is in use") as caught:
            plan(store)
        assert caught.value.why is not None
        assert caught.value.why.count("compares it") == 2
    assert letters(plan(store)) == "a"


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
    carried_out(found, store)
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
    done = carried_out(found, store)
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
        "DIGEST        SIZE       REFERENCE                      PLATFORM     USED     PROBLEM",
        "aaaaaaaaaaaa  100 bytes  docker://registry.example/a:1  linux/amd64  3 d ago  -",
    ]
    envelope = run("list", "--json").envelope
    assert (envelope["command"], envelope["data"]["images"][0]["digest"]) == ("image list", digest("a"))
    dry = run("prune", "--all", "--older-than", "2d", "--dry-run").stdout.splitlines()
    assert dry[0] == "image  aaaaaaaaaaaa  100 bytes  it was not used lately"
    assert run("prune", "--all", status=2).stderr.startswith("error[usage]: 1 of the store's files and folders would")
    assert "`--older-than` is shorter than 30 days" in run("prune", "--older-than", "2d", status=2).stderr
    assert run("prune", "--older-than", "x", status=2).stderr.startswith("error[usage]: Invalid value")
    assert run("inspect", "--path", "aaaaaa").stdout == f"{path}\n"
    assert run("inspect", "--path", "aaaaaa", "--json").envelope["data"] == {"path": str(path)}
    assert run("inspect", "--path", "bbbbbb", "--json", status=10).envelope["error"]["code"] == "image-unavailable"
    assert path.exists()
    assert "kept: aaaaaaaaaaaa 100 bytes: it was used a short time ago; --all removes it too" in run("prune").stderr
    done = run("prune", "--yes", "--json", "--all").envelope["data"]
    assert [item["name"] for item in done["done"]["removed"]] == [digest("a")]
    assert not path.exists()
    sif_file = make_sif(tmp_path / "x.sif", {"hpcenv.source.manifest-digest": digest("a")})
    text = run("inspect", str(sif_file), "--hash").stdout
    assert f"sha256        {hashlib.sha256(sif_file.read_bytes()).hexdigest()}" in text
    assert f"made from     {digest('a')}" in text
    assert run("inspect", "x.sif", "--json").envelope["data"]["source"]["digest"] == digest("a")
