"""Copies on a node's own disk: chosen, proved, shared by jobs, and removed only when no job uses them."""

import dataclasses
import fcntl
import hashlib
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from hpcenv.errors import FileUnusable
from hpcenv.identity import sif_check
from hpcenv.identity.stage import data_folder, stage
from hpcenv.identity.stage.stage import Disk, Item, NodeDisks
from hpcenv.judge import verdict_table
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.facts import Staged
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Environment, StageRequest
from hpcenv.records.run_folder import RunFolder

NODES = ("n1", "n2")


def place(node="n1", *, job="77", attempt=0, nodes=NODES):
    return ThisNode(node=node, nodes=nodes, attempt=attempt, job_id=job)


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o755)
    return folder


@pytest.fixture(autouse=True)
def folders_above_are_ours(tmp_path):
    """pytest's own folders are private already; a stricter umask must not decide these tests."""
    tmp_path.chmod(0o755)


@pytest.fixture
def job(tmp_path, disk, make_manifest, make_sif):
    """Make the manifest and run folder of a job that stages a small SIF."""
    image = make_sif(tmp_path / "shared.sif")

    def make(name="r1", *, limit=10**9, data=(), sif=True):
        run = RunFolder(tmp_path / "runs" / name)
        run.path.mkdir(parents=True, exist_ok=True)
        content = image.read_bytes()
        request = StageRequest(
            folder=str(disk),
            limit=limit,
            sif_sha256=hashlib.sha256(content).hexdigest() if sif else "",
            sif_size=len(content) if sif else 0,
            data=tuple(
                data_folder.pack(data_folder.find(str(d), tmp_path / "packed"), tmp_path / "packed") for d in data
            ),
        )
        environment = Environment(kind="sif", python="python3", sif=str(image), apptainer="/apptainer")
        return make_manifest(run=name, run_folder=str(run.path), environment=environment, stage=request), run

    make.image = image
    return make


def on_node(manifest, run, node="n1", **where):
    """The three steps as one node of one sees them; returns what it has then."""
    here = place(node, nodes=(node,), **where)
    save_record(stage.look(manifest, here, {}), run.looked_of(node))
    if stage.send(manifest, run, here, {"PATH": "/nowhere"}):
        save_record(stage.keep(manifest, run, here), run.staged_of(node))
    return load_record(Staged, run.staged_of(node))


def names(disk):
    return sorted(os.listdir(disk / f"hpcenv-stage-{os.geteuid()}"))


# -- one node -----------------------------------------------------------------------------


def test_a_copy_is_made_once_and_known_by_later_jobs(job, disk):
    first = on_node(*job("r1"))
    assert list(first.how.values()) == ["copy"]
    copy = Path(first.sif_path)
    assert (copy.read_bytes(), copy.stat().st_mode & 0o777) == (job.image.read_bytes(), 0o400)
    assert first.sif.inode == copy.stat().st_ino
    assert not first.problems
    job.image.unlink()  # a second job asks nothing of the shared file system
    second = on_node(*job_again(job, first), job="78")
    assert list(second.how.values()) == ["present"]
    assert (second.sif, second.sif_path) == (first.sif, first.sif_path)
    assert not [name for name in names(disk) if name.startswith("incoming")]


def job_again(job, staged):
    job.image.write_bytes(Path(staged.sif_path).read_bytes())
    manifest, run = job("r2")
    job.image.unlink()
    return manifest, run


def test_the_copys_identity_proves_it_in_the_check_step(job):
    staged = on_node(*job())
    descriptor = os.open(staged.sif_path, os.O_RDONLY)
    try:
        found = sif_check.check(descriptor, path=staged.sif_path, staged=True, known=staged.sif, records=None)
    finally:
        os.close(descriptor)
    assert (found.checked, found.sha256) == ("identity", staged.sif.sha256)
    assert verdict_table.sif_in_words(found) == "own copy, same file as hashed"


def spoil_in_place(copy):
    status = copy.stat()
    copy.chmod(0o600)
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    copy.chmod(0o400)
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))


def spoil_by_another(copy):
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.with_name("x").write_bytes(data)
    os.utime(copy.with_name("x"), ns=(copy.stat().st_atime_ns, copy.stat().st_mtime_ns))
    os.replace(copy.with_name("x"), copy)


def spoil_truncated(copy):
    copy.chmod(0o600)
    os.truncate(copy, copy.stat().st_size - 1)


def spoil_link(copy):
    copy.unlink()
    copy.symlink_to("/etc/passwd")


@pytest.mark.parametrize("spoil", [spoil_in_place, spoil_by_another, spoil_truncated, spoil_link])
def test_a_damaged_copy_is_thrown_away_and_made_again(job, spoil):
    copy = Path(on_node(*job("r1")).sif_path)
    time.sleep(0.03)  # a tick of the clock that stamps files
    spoil(copy)
    staged = on_node(*job("r2"), job="78")
    assert list(staged.how.values()) == ["copy"]
    assert copy.read_bytes() == job.image.read_bytes()


def test_a_shared_file_that_is_not_the_locked_one_is_not_kept(job, disk):
    manifest, run = job()
    spoil_by_another(job.image)
    staged = on_node(manifest, run)
    assert staged.sif is None
    assert "is not the locked SIF" in staged.problems[0]
    assert [n for n in names(disk) if n.startswith(("sha256", "incoming"))] == []


def test_what_arrived_by_broadcast_is_hashed_before_it_gets_its_name(job, disk, tmp_path):
    """A program that stands for sbcast: it brings the file, and then a damaged one."""
    for damage, how in (("", ["sbcast"]), ("printf x >> $3", [])):
        manifest, run = job(f"r{len(how)}")
        bin_ = tmp_path / f"bin{len(how)}"
        bin_.mkdir()
        (bin_ / "sbcast").write_text(f'#!/bin/sh\ncp "$2" "$3"\n{damage}\n')
        (bin_ / "sbcast").chmod(0o755)
        looks = {node: stage.look(manifest, place(node), {}) for node in NODES}
        for node, found in looks.items():
            save_record(found, run.looked_of(node))
        assert stage.send(manifest, run, place(), {"PATH": f"{bin_}:/usr/bin:/bin"})
        staged = stage.keep(manifest, run, place())
        assert list(staged.how.values()) == how
        assert bool(staged.problems) == (not how)
        shutil.rmtree(disk / f"hpcenv-stage-{os.geteuid()}")


def test_without_sbcast_the_nodes_copy_themselves(job):
    manifest, run = job()
    for node in NODES:
        save_record(stage.look(manifest, place(node), {}), run.looked_of(node))
    assert stage.send(manifest, run, place(), {"PATH": "/nowhere"})
    assert "`sbcast` is not on PATH" in load_record(stage.Sending, run.sending).said
    assert [list(stage.keep(manifest, run, place(node)).how.values()) for node in NODES] == [["copy"], ["copy"]]


def test_two_jobs_that_stage_at_once_both_get_a_right_copy(job, disk):
    jobs = [job(f"r{n}") for n in range(4)]
    done = []

    def one(n):
        done.append(on_node(*jobs[n], job=str(n)))

    threads = [threading.Thread(target=one, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [list(staged.problems) for staged in done] == [[]] * 4
    assert {staged.sif_path for staged in done} == {done[0].sif_path}
    assert Path(done[0].sif_path).read_bytes() == job.image.read_bytes()
    assert {staged.sif.inode for staged in done} == {Path(done[0].sif_path).stat().st_ino}
    assert not [name for name in names(disk) if name.startswith("incoming")]


def test_data_folders_are_unpacked_proved_and_reused(job, tmp_path):
    source = tmp_path / "data"
    source.mkdir()
    (source / "a").write_text("content")
    first = on_node(*job("r1", data=[source], sif=False))
    copy = Path(first.data[str(source)])
    assert (copy / "a").read_text() == "content"
    assert list(first.how.values()) == ["copy"]
    assert list(on_node(*job("r2", data=[source], sif=False), job="78").how.values()) == ["present"]
    (copy / "a").chmod(0o600)
    (copy / "a").write_text("CONTENT")
    assert list(on_node(*job("r3", data=[source], sif=False), job="79").how.values()) == ["copy"]
    assert (copy / "a").read_text() == "content"


# -- room and age -------------------------------------------------------------------------


def test_no_room_is_said_and_nothing_is_copied(job):
    staged = on_node(*job(limit=1000))
    assert (staged.sif, staged.how) == (None, {})
    assert "stage-limit" in staged.problems[0]


def test_a_disk_without_room_says_how_much_is_missing(job, monkeypatch):
    monkeypatch.setattr(stage, "_ROOM_LEFT", 10**18)
    staged = on_node(*job())
    assert staged.sif is None
    assert "no space in" in staged.problems[0]
    assert "0 MB free" in staged.problems[0]


def old_copy(disk, name, *, hours, size=1000):
    folder = disk / f"hpcenv-stage-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / name).write_bytes(b"x" * size)
    (folder / f"{name}.used").touch()
    os.utime(folder / f"{name}.used", (time.time() - hours * 3600,) * 2)
    return folder


@pytest.mark.parametrize(
    ("hours", "limit", "stays"),
    [(0.5, 5000, True), (2, 10**9, True), (2, 5000, False), (24 * 15, 10**9, False)],
    ids=["used just now", "there is room", "crowded", "too old"],
)
def test_old_copies_go_by_age_and_when_room_is_needed(job, disk, hours, limit, stays):
    old_copy(disk, "sha256-old.sif", hours=hours, size=4096)
    on_node(*job(limit=limit))
    assert ("sha256-old.sif" in names(disk)) == stays
    assert ("sha256-old.sif.used" in names(disk)) == stays


def test_a_copy_that_a_job_holds_stays_however_old(job, disk):
    folder = old_copy(disk, "sha256-held.sif", hours=24 * 30)
    descriptor = os.open(folder / "sha256-held.sif.used", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    on_node(*job("r1"))
    assert "sha256-held.sif" in names(disk)
    os.close(descriptor)
    on_node(*job("r2"), job="78")
    assert "sha256-held.sif" not in names(disk)


def test_what_killed_jobs_left_behind_goes_after_a_day(job, disk):
    folder = old_copy(disk, "sha256-x.sif", hours=1)
    for name, age in (("incoming-1-0-x", 25), ("incoming-2-0-x", 1)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age * 3600,) * 2)
    on_node(*job())
    assert [n for n in names(disk) if n.startswith("incoming")] == ["incoming-2-0-x"]


# -- where --------------------------------------------------------------------------------


def unusable(base):
    with pytest.raises(FileUnusable) as caught:
        stage.open_folder(base, base / f"hpcenv-stage-{os.geteuid()}", memory_too=True)
    return caught.value.what


def test_a_folder_that_others_can_change_is_refused(disk):
    disk.chmod(0o777)
    assert "other users can rename" in unusable(disk)
    disk.chmod(0o1777)
    own = disk / f"hpcenv-stage-{os.geteuid()}"
    stage.open_folder(disk, own, memory_too=True)
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o770)
    assert "other users can read or write it" in unusable(disk)
    own.rmdir()
    own.symlink_to("/tmp")
    assert "belongs to another user, or other users can read or write it" in unusable(disk)


def test_a_folder_of_another_user_is_refused(disk):
    if os.geteuid() != 0:
        pytest.skip("NOT RUN: only root can give folders away")
    own = disk / "hpcenv-stage-0"
    own.mkdir(mode=0o700)
    os.chown(own, 12345, -1)
    assert "belongs to another user, or other users can read or write it" in unusable(disk)
    os.chown(disk, 12345, -1)
    assert "belongs to another user" in unusable(disk)


def test_what_is_no_disk_of_this_node_is_refused():
    assert "is not on a disk of this node (proc)" in unusable(Path("/proc"))


def test_memory_is_used_only_when_it_is_named(tmp_path):
    if sif_check_kind("/dev/shm") != "tmpfs":
        pytest.skip("NOT RUN: /dev/shm is no tmpfs here")
    with pytest.raises(FileUnusable, match="--stage-dir"):
        stage.open_folder(Path("/dev/shm"), Path("/dev/shm/no"), memory_too=False)


def sif_check_kind(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return sif_check.mount_of(descriptor).kind
    finally:
        os.close(descriptor)


def test_every_place_that_cannot_be_used_is_told_with_its_reason(job):
    manifest, run = job()
    request = dataclasses.replace(manifest.stage, folder="/no/such/folder")
    staged = on_node(dataclasses.replace(manifest, stage=request), run)
    assert staged.sif is None
    assert "/no/such/folder" in staged.problems[0]


# -- all nodes ----------------------------------------------------------------------------

ITEM = Item(name="sha256-x.sif", path="/x", sha256="x", size=10, on_disk=10)
THERE = sif_check.SifIdentity(
    sha256="x", inode=1, size=10, mtime_ns=0, ctime_ns=0, header_sha256="", partition_offset=0, partition_size=0
)


def look(node, *disks):
    return NodeDisks(schema=1, run="r1", node=node, attempt=0, disks=disks, seconds=0)


@pytest.mark.parametrize(
    ("disks", "folder"),
    [
        ({"n1": [Disk(folder="/a"), Disk(folder="/b")], "n2": [Disk(folder="/a"), Disk(folder="/b")]}, "/a"),
        ({"n1": [Disk(folder="/a"), Disk(folder="/b")], "n2": [Disk(folder="/b")]}, "/b"),
        ({"n1": [Disk(folder="/a", reason="x"), Disk(folder="/b")], "n2": [Disk(folder="/a", reason="x")]}, "/b"),
        ({"n1": [Disk(folder="/a", no_room={ITEM.name: ""}), Disk(folder="/b")]}, "/b"),
        ({"n1": [Disk(folder="/a", no_room={ITEM.name: ""}, sif=THERE), Disk(folder="/b")]}, "/a"),
        ({"n1": [Disk(folder="/a", no_room={ITEM.name: ""})]}, "/a"),
        ({"n1": [Disk(folder="/a", reason="x")]}, ""),
        ({}, ""),
    ],
)
def test_all_nodes_use_one_folder_the_first_that_serves_most(disks, folder):
    assert stage.choose_folder({node: look(node, *found) for node, found in disks.items()}, [ITEM]) == folder


FREE, HAS, FULL = Disk(folder="/a"), Disk(folder="/a", sif=THERE), Disk(folder="/a", no_room={ITEM.name: "full"})


@pytest.mark.parametrize(
    ("disks", "count", "sends"),
    [
        ([FREE, FREE], 2, True),
        ([FREE, HAS], 2, False),
        ([FREE, FREE, HAS], 3, True),
        ([FREE, FREE, HAS, HAS, HAS], 5, False),
        ([FREE, FULL], 2, False),
        ([FREE, FREE], 3, False),
        ([FREE], 1, False),
    ],
)
def test_a_broadcast_is_for_files_that_most_nodes_lack(disks, count, sends):
    assert stage.worth_sending(ITEM, dict(enumerate(disks)), count=count) == sends


def test_a_node_that_told_nothing_keeps_no_other_from_its_copy(job):
    manifest, run = job()
    save_record(stage.look(manifest, place("n1"), {}), run.looked_of("n1"))
    assert stage.send(manifest, run, place(), {"PATH": "/nowhere"})
    assert stage.keep(manifest, run, place("n1")).sif is not None
    assert stage.keep(manifest, run, place("n2")).problems == ("there is no stage-look record for this attempt",)


def test_what_another_attempt_found_does_not_count(job):
    manifest, run = job()
    save_record(stage.look(manifest, place("n1"), {}), run.looked_of("n1"))
    assert stage.send(manifest, run, place(attempt=1), {"PATH": "/nowhere"})
    assert stage.keep(manifest, run, place("n1", attempt=1)).sif is None
