"""The store: who may be trusted with one, what is published in it, what is left by the killed."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcenv import filesystem
from hpcenv.errors import FileUnusable, RecordInvalid, UsageError, WouldOverwrite
from hpcenv.filesystem import Space
from hpcenv.image.store import lease, sif_record
from hpcenv.image.store import store as stores
from hpcenv.image.store.sif_record import ImageRecord, Provenance, SifFacts
from hpcenv.image.store.store import Store
from hpcenv.image.store.store_folder import open_store

DIGEST = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64
HEX = "c" * 64

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: changing owners needs root")


def make_record(content: bytes = b"a SIF", digest: str = DIGEST, tools: str = "4.6.1") -> ImageRecord:
    return ImageRecord(
        digest=digest,
        references=("docker://registry.example/x:1",),
        manifest_digest=digest,
        platform="linux/amd64",
        layers=(OTHER,),
        sif=SifFacts(
            sha256=hashlib.sha256(content).hexdigest(),
            size=len(content),
            partition_sha256=HEX,
            partition_size=3,
            compression="zstd",
            architecture="amd64",
        ),
        made=Provenance(builder="hpcenv", tools={"squashfs-tools": tools}),
    )


def publish(store: Store, content: bytes = b"a SIF", **how: str) -> Path:
    with store.scratch(0) as folder:
        (folder / "image.sif").write_bytes(content)
        return store.publish_image(folder / "image.sif", make_record(content, **how)).path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


# -- making and trusting ------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o077])
@pytest.mark.parametrize(("shared", "folder", "file"), [(False, 0o755, 0o644), (True, 0o2775, 0o664)])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int, shared: bool, folder: int, file: int) -> None:
    before = os.umask(umask)
    try:
        store = open_store(tmp_path / "new" / "store", create=True, shared=shared)
        sif = publish(store)
        store.keep_index(DIGEST, b"index")
    finally:
        os.umask(before)
    modes = {path: os.stat(path).st_mode & 0o7777 for path in store.root.rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {folder}
    assert {mode for path, mode in modes.items() if path.is_file() and path != sif} == {file}
    assert modes[sif] == 0o444
    assert os.stat(tmp_path / "new").st_mode & 0o022 == 0
    assert open_store(store.root).shared is shared


def test_backups_and_git_leave_it_out(store: Store) -> None:
    assert (store.root / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
    assert (store.root / ".gitignore").read_text() == "*\n"


def test_opening_it_again_changes_nothing(store: Store) -> None:
    publish(store)
    before = {path: path.lstat() for path in store.root.rglob("*")}
    again = open_store(store.root, create=True)
    assert again == store
    assert {path: path.lstat().st_ino for path in store.root.rglob("*")} == {p: s.st_ino for p, s in before.items()}


def test_what_is_missing_in_a_store_is_made(store: Store) -> None:
    (store.root / "store.json").unlink()
    (store.root / "leases").rmdir()
    assert open_store(store.root, create=True).leases.is_dir()


def test_a_folder_with_other_things_does_not_become_a_store(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(FileUnusable, match="is neither a store nor empty") as caught:
        open_store(tmp_path, create=True)
    assert caught.value.why == "it contains `thesis.tex`"
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_there_is_no_store(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileUnusable, match="has no store"):
            open_store(folder)


def test_a_store_of_a_newer_hpcenv_is_refused(store: Store) -> None:
    (store.root / "store.json").write_text('{"schema": 2, "shared": false}')
    with pytest.raises(FileUnusable, match="made by a newer hpcenv"):
        open_store(store.root)


@pytest.mark.parametrize("place", ["", "blobs", "blobs/sha256", "indexes/sha256", "images", "tmp", "leases", "hub"])
def test_a_folder_that_everybody_may_write_to_is_refused(store: Store, place: str) -> None:
    folder = store.root / place
    os.chmod(folder, 0o757)
    with pytest.raises(FileUnusable) as caught:
        open_store(store.root, create=True, shared=True)
    assert caught.value.what == f"`{folder}` is not trusted"
    assert "everybody may write to it (mode 0757, owner" in (caught.value.why or "")
    assert caught.value.hint == f"chmod o-w {folder}"


def test_a_parent_in_which_everybody_may_put_another_store_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / "public"
    parent.mkdir()
    os.chmod(parent, 0o777)
    with pytest.raises(FileUnusable, match="is not trusted"):
        open_store(parent / "store", create=True)
    os.chmod(parent, 0o1777)  # sticky, as /tmp: only owners rename what is theirs
    open_store(parent / "store", create=True)


@as_root
def test_a_folder_of_somebody_else_is_refused_unless_named(store: Store) -> None:
    os.chown(store.images, 12345, -1)
    with pytest.raises(FileUnusable) as caught:
        open_store(store.root)
    assert "`12345` could change what is in it (mode 0755, owner 12345:" in (caught.value.why or "")
    assert open_store(store.root, trusted_owners=["12345"]).root == store.root


@as_root
def test_a_store_that_a_group_may_write_to_is_for_who_trusts_the_group(store: Store) -> None:
    os.chown(store.images, -1, 12345)
    os.chmod(store.images, 0o775)
    with pytest.raises(FileUnusable, match="is not trusted") as caught:
        open_store(store.root)
    assert "its group may write to it" in (caught.value.why or "")
    open_store(store.root, shared=True)


@as_root
def test_a_link_of_somebody_else_to_a_good_store_is_refused(store: Store, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(store.root)
    assert open_store(link).root == link
    os.lchown(link, 12345, -1)
    with pytest.raises(FileUnusable, match="is not trusted"):
        open_store(link)


def test_a_trusted_owner_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="knows no user `nosuchuser`"):
        open_store(tmp_path, trusted_owners=["nosuchuser"])


@as_root
def test_a_store_of_another_user_can_be_read_and_says_why_it_is_not_written() -> None:
    """As user 12345, in a process of its own: root may write everywhere."""
    program = (
        "import os, sys; from pathlib import Path\n"
        "from hpcenv import filesystem, process; from hpcenv.image.store import lease, store_folder; from hpcenv.identity import sif; import hpcenv.image.store.sif_record\n"
        "os.chdir('/'); os.setgroups([]); os.setgid(12345); os.setuid(12345)\n"
        "found = store_folder.open_store(Path(sys.argv[1]), create=True)\n"
        "print(found.writable, len(found.list_images()))\n"
        "try: found.require_writable('pull')\n"
        "except Exception as error: print(error.why)\n"
    )
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are private
        os.chmod(folder, 0o755)
        store = open_store(Path(folder) / "store", create=True)
        publish(store)
        words = [sys.executable, "-c", program, str(store.root)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False 1", "it belongs to root; write access is needed to pull"]


# -- publishing ---------------------------------------------------------------------------


def test_a_published_image_is_found(store: Store) -> None:
    path = publish(store)
    assert path == store.images / f"sha256-{'a' * 64}.sif"
    found = store.find_image(DIGEST)
    assert found is not None
    assert (found.path, found.size, found.record) == (path, 5, make_record())
    assert path.stat().st_nlink == 1  # its ctime does not change any more
    assert store.find_image(OTHER) is None
    assert list(store.tmp.iterdir()) == []


def test_the_same_bytes_again_leave_the_file_as_it_is(store: Store) -> None:
    before = publish(store).stat()
    after = publish(store).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_other_bytes_never_replace_a_good_image(store: Store) -> None:
    path = publish(store)
    with pytest.raises(WouldOverwrite) as caught:
        publish(store, b"another SIF", tools="4.7")
    assert path.read_bytes() == b"a SIF"
    assert caught.value.why == (
        "it was made from the same image with other tools:\n"
        "in the store: hpcenv (squashfs-tools 4.6.1)\nnow: hpcenv (squashfs-tools 4.7)"
    )
    assert store.record(DIGEST) == make_record()


def damage_bytes(store: Store, path: Path) -> None:
    os.chmod(path, 0o644)
    path.write_bytes(b"A sif")


def damage_length(store: Store, path: Path) -> None:
    os.chmod(path, 0o644)
    path.write_bytes(b"a")


def lose_record_of_other_bytes(store: Store, path: Path) -> None:
    damage_bytes(store, path)
    store.record_path(DIGEST).unlink()


def put_folder(store: Store, path: Path) -> None:
    path.unlink()
    (path / "x").mkdir(parents=True)


def let_everybody_write(store: Store, path: Path) -> None:
    os.chmod(path, 0o666)


def lose_record(store: Store, path: Path) -> None:
    store.record_path(DIGEST).unlink()


def cut_record(store: Store, path: Path) -> None:
    store.record_path(DIGEST).write_text('{"schema": 1, "digest"')


Damage = Callable[[Store, Path], None]


@pytest.mark.parametrize(
    "damage",
    [damage_bytes, damage_length, lose_record_of_other_bytes, put_folder, let_everybody_write, lose_record, cut_record],
)
def test_what_is_damaged_is_replaced_without_cleaning_by_hand(store: Store, damage: Damage) -> None:
    # What was damaged stays aside for a day: a job may run from it.
    path = publish(store)
    damage(store, path)
    if damage is let_everybody_write:
        with pytest.raises(FileUnusable, match="is not trusted"):
            store.find_image(DIGEST)
    elif damage is not damage_bytes:  # that one only a hash can tell
        assert store.find_image(DIGEST) is None
    assert publish(store) == path
    assert path.read_bytes() == b"a SIF"
    assert os.stat(path).st_mode & 0o777 == 0o444
    assert store.find_image(DIGEST) is not None
    assert all(path.name.startswith("damaged.") for path in store.tmp.iterdir())


def test_without_hard_links_it_is_published_by_rename(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_args: object, **_more: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")  # as BeeGFS between two folders

    monkeypatch.setattr(os, "link", refused)
    path = publish(store)
    assert path.read_bytes() == b"a SIF"
    publish(store)
    with pytest.raises(WouldOverwrite):
        publish(store, b"another SIF")


def test_a_file_that_is_not_what_its_record_says_is_not_published(store: Store) -> None:
    with store.scratch(0) as folder, pytest.raises(UsageError):
        (folder / "x").write_bytes(b"cut")
        store.publish_image(folder / "x", make_record())
    assert store.list_images() == ()


def test_references_are_remembered(store: Store) -> None:
    publish(store)
    store.remember(DIGEST, reference="docker://registry.example/x:latest", index_digest=OTHER)
    record = store.record(DIGEST)
    assert record is not None
    assert record.references == ("docker://registry.example/x:latest", "docker://registry.example/x:1")
    assert record.index_digest == OTHER
    publish(store)  # a second conversion does not forget them
    after = store.record(DIGEST)
    assert after is not None
    assert set(after.references) == set(record.references)
    os.utime(store.record_path(DIGEST), (1, 1))
    store.remember(DIGEST)
    assert os.stat(store.record_path(DIGEST)).st_mtime > 1
    store.remember(OTHER, reference="docker://x")  # not there: nothing to remember


# -- records ------------------------------------------------------------------------------


def test_a_record_survives_being_written_and_read() -> None:
    record = make_record()
    assert sif_record.loads(sif_record.dumps(record), origin="x") == record


@pytest.mark.parametrize(
    "changes",
    [{"schema": 2}, {"schema": True}, {"digest": "sha256:x"}, {"layers": ["x"]}, {"sif": {}}, {"platform": 3},
     {"made": {"builder": "hand", "tools": {}}}, {"tree_sha256": "0"}, {"references": [1]}],
)  # fmt: skip
def test_a_record_that_is_not_one_is_refused(changes: dict[str, object]) -> None:
    data = json.loads(sif_record.dumps(make_record())) | changes
    with pytest.raises(RecordInvalid):
        sif_record.loads(json.dumps(data), origin="x")


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"schema": 1}', "[" * 100_000, "\ud800"])
def test_no_text_is_a_crash(text: str) -> None:
    with pytest.raises(RecordInvalid):
        sif_record.loads(text, origin="x")


def test_a_record_of_another_image_is_none(store: Store) -> None:
    publish(store)
    text = sif_record.dumps(dataclasses.replace(make_record(), digest=OTHER))
    store.record_path(DIGEST).write_text(text)
    assert store.record(DIGEST) is None
    store.record_path(DIGEST).write_bytes(b"\xff")
    assert store.record(DIGEST) is None


@pytest.mark.parametrize("digest", ["", "a" * 64, "sha256:" + "A" * 64, "sha256:../../x", "sha512:" + "a" * 64])
def test_only_digests_name_images(store: Store, digest: str) -> None:
    with pytest.raises(UsageError, match="is not a digest"):
        store.image_path(digest)


# -- unfinished work ----------------------------------------------------------------------


def test_scratch_is_private_and_goes(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.scratch(0) as folder:
        (folder / "half").write_bytes(b"x")
        assert os.stat(folder).st_mode & 0o777 == 0o700
        assert os.stat(folder).st_dev == os.stat(store.images).st_dev
        assert store.leftovers() == ()
        raise ZeroDivisionError
    assert list(store.tmp.iterdir()) == []


def test_the_next_caller_removes_what_a_killed_one_left(store: Store) -> None:
    program = (
        "import os, sys; from pathlib import Path; from hpcenv.image.store.store_folder import open_store\n"
        "with open_store(Path(sys.argv[1])).scratch(0) as folder:\n"
        "    (folder / 'half').mkdir(); (folder / 'half' / 'x').write_bytes(b'x'); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(store.root)], timeout=60)
    assert done.returncode == -9
    (left,) = store.tmp.iterdir()
    assert store.leftovers() == (left,)
    with store.scratch(0) as folder:
        assert list(store.tmp.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("killed_in", "work"),
    [
        ("link", "store.lease('x', purpose='test', timeout=1).__enter__()"),
        ("replace", "store.keep_index('sha256:' + 'a' * 64, b'index')"),
    ],
    ids=["lease", "index"],
)
def test_a_process_that_is_killed_before_a_file_gets_its_name_leaves_nothing_for_long(
    store: Store, killed_in: str, work: str
) -> None:
    program = (
        "import os, sys; from pathlib import Path; from hpcenv.image.store.store_folder import open_store\n"
        "store = open_store(Path(sys.argv[1]))\n"
        f"os.{killed_in} = lambda *_: os.kill(os.getpid(), 9)\n"
        f"{work}\n"
    )
    before = {path for path in store.root.rglob("*") if path.is_file()}
    done = subprocess.run([sys.executable, "-c", program, str(store.root)], timeout=60)
    assert done.returncode == -9
    assert {path for path in store.root.rglob("*") if path.is_file()} > before
    store.clean_leftovers()
    assert {path for path in store.root.rglob("*") if path.is_file()} == before


def test_leftovers_of_other_machines_go_after_a_day_without_a_change(store: Store) -> None:
    me = lease.this_process()
    theirs = store.tmp / f"n7.{me.pid}.1.{'0' * 16}.{'1' * 16}"
    theirs.mkdir()
    (theirs / "x").write_bytes(b"x")
    now = filesystem.file_time(store.tmp)
    for old, fresh in ((theirs, theirs / "x"), (theirs / "x", theirs)):
        os.utime(old, (now - stores.ABANDONED - 60,) * 2)
        os.utime(fresh, (now - 60,) * 2)
        assert store.leftovers() == ()
    for path in (theirs / "x", theirs):
        os.utime(path, (now - stores.ABANDONED - 60,) * 2)
    assert store.leftovers() == (theirs,)


def test_too_little_space_is_told_before_the_work(store: Store) -> None:
    with pytest.raises(FileUnusable) as caught, store.scratch(1 << 60, purpose="convert x"):
        pass
    assert caught.value.what == f"there is not enough space in `{store.tmp}`"
    assert (caught.value.why or "").startswith("1 152 921 504 607 MB are needed to convert x, the file system has ")
    assert list(store.tmp.iterdir()) == []


def test_a_full_disk_is_told_with_the_folder_and_what_to_do(tmp_path: Path) -> None:
    error = filesystem.refused(tmp_path, OSError(errno.ENOSPC, "No space left on device"))
    assert "No space left on device; " in (error.why or "")
    assert f" are free in {tmp_path}" in (error.why or "")
    assert "hpcenv image prune" in (error.hint or "")


# Each as the tool prints it, for the parsers; sizes in KiB.
@pytest.mark.parametrize(
    ("parse", "text", "left"),
    [
        (filesystem._lfs_left, "/lustre/home 900 0 1000 - 12 0 0 -\n", 100 * 1024),
        (filesystem._lfs_left, "/lustre/a/very/long/path\n         1100*   1000    1050 6d23h  12 0 0 -\n", 0),
        (filesystem._lfs_left, "/lustre/home 900 0 0 - 12 0 0 -\n", None),
        (filesystem._lfs_left, "Permission denied.", None),
        (
            filesystem._gpfs_left,
            "m::HEADER:version:::filesystemName:quotaType:id:name:blockUsage:blockQuota:blockLimit:\nm::0:1:::gpfs0:USR:1000:alice:700:1000:0:\n",
            300 * 1024,
        ),
        (filesystem._gpfs_left, "no quota", None),
    ],
)
def test_quota_of_parallel_file_systems(parse: Callable[[str], int | None], text: str, left: int | None) -> None:
    assert parse(text) == left


def test_quota_of_this_file_system_only() -> None:
    text = (
        "Disk quotas for user alice (uid 1000): \n"
        "     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace\n"
        "      srv:/home    5000       0    9000       0      12       0       0       0\n"
        "      srv:/other   8999       0    9000       0      12       0       0       0\n"
    )
    assert filesystem._quota_left(text, "srv:/home") == 4000 * 1024
    assert filesystem._quota_left(text, "srv:/none") is None
    assert Space(free=10).usable == 10
    assert Space(free=10, quota=4).usable == 4
