"""The cheap proof of a SIF: accepted for the very same file only, and whatever is odd leads to the full hash."""

import dataclasses
import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from hpcenv.errors import HpcenvError
from hpcenv.identity import sif_check
from hpcenv.identity.sif_check import FileMount, Records

TICK = 0.02


@pytest.fixture
def opened():
    descriptors = []

    def open_it(path):
        descriptors.append(os.open(path, os.O_RDONLY))
        return descriptors[-1]

    yield open_it
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.fixture
def image(tmp_path, make_sif):
    return settled(make_sif(tmp_path / "a.sif"))


@pytest.fixture
def records(tmp_path):
    return Records(tmp_path / "records", "here")


def settled(path):
    """Wait until the clock that stamps files has ticked: a later change then shows."""
    while time.time_ns() - path.stat().st_ctime_ns < 3 * TICK * 1e9:
        time.sleep(TICK)
    return path


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check(path, opened, *, known=None, records=None):
    return sif_check.check(opened(path), path=str(path), staged=False, known=known, records=records, tick=TICK)


@pytest.fixture
def known(image, opened):
    digest, identity = sif_check.identify(opened(image), None, tick=TICK)
    assert digest == identity.sha256 == sha256(image)
    return identity


# -- identity -----------------------------------------------------------------------------


def test_the_same_file_is_known_without_reading_it(image, known, opened):
    descriptor = opened(image)
    found = check(image, opened, known=known)
    assert (found.checked, found.sha256, found.why, found.lasting) == ("identity", sha256(image), "", True)
    assert found.file == sif_check.identity_of(descriptor)
    assert (known.partition_offset, known.partition_size) == (4096, 101)


def test_a_large_file_costs_no_more_than_a_small_one(image, opened):
    """The middle of the file is a hole that must not be read: its pages would count as read."""
    with open(image, "r+b") as file:
        file.truncate(2**40)
    settled(image)
    status = os.stat(image)
    header, offset, size = sif_check.header_of(opened(image))
    known = sif_check.SifIdentity(
        sha256="00", inode=status.st_ino, size=2**40, mtime_ns=status.st_mtime_ns, ctime_ns=status.st_ctime_ns,
        header_sha256=header, partition_offset=offset, partition_size=size,
    )  # fmt: skip
    assert check(image, opened, known=known).checked == "identity"


def replaced(path, data):
    """Put other bytes in a file's place as somebody would who wants it not to show."""
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(data)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(other, path)


def in_place(path, data):
    status = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def one_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    return bytes(data)


@pytest.mark.parametrize("put", [replaced, in_place])
@pytest.mark.parametrize("make", [one_bit, lambda p: p.read_bytes()[:-10], lambda p: p.read_bytes() + b"\0"])
def test_a_change_leads_to_the_full_hash_which_tells(image, known, records, opened, put, make):
    put(image, make(image))
    found = check(image, opened, known=known, records=records)
    assert (found.checked, found.sha256) == ("full", sha256(image))
    assert found.sha256 != known.sha256
    assert "not the file that was hashed before: another" in found.why
    assert "ctime" in found.why


def test_the_same_bytes_in_another_file_are_hashed_and_right(image, known, opened):
    replaced(image, image.read_bytes())
    found = check(image, opened, known=known)
    assert (found.checked, found.sha256) == ("full", known.sha256)


@pytest.mark.parametrize("field", ["inode", "size", "mtime_ns", "ctime_ns", "header_sha256"])
def test_every_part_of_the_identity_counts(image, known, opened, field):
    other = "0" * 64 if field == "header_sha256" else getattr(known, field) + 1
    assert check(image, opened, known=dataclasses.replace(known, **{field: other})).checked == "full"


@pytest.mark.parametrize(
    ("mount", "doubt"),
    [
        (FileMount(kind="ext4", options=("rw",)), ""),
        (FileMount(kind="nfs4", options=("rw", "vers=4.2", "hard")), ""),
        (FileMount(kind="lustre", options=("rw",)), ""),
        (FileMount(kind="nfs", options=("ro", "nocto")), "nocto"),
        (FileMount(kind="fuse.sshfs", options=("rw",)), "fuse.sshfs"),
        (FileMount(kind="afs", options=("rw",)), "afs"),
        (FileMount(kind="cifs", options=("rw",)), "cifs"),
        (FileMount(kind="9p", options=("rw",)), "9p"),
        (None, "mountinfo"),
    ],
)
def test_file_systems_that_may_hide_a_change_are_doubted(mount, doubt):
    said = sif_check.doubt_about(mount)
    assert doubt in said
    assert bool(said) == bool(doubt)


def test_the_mount_of_an_open_file_is_found_by_its_number(opened):
    assert sif_check.mount_of(opened("/proc/self/status")).kind == "proc"
    assert sif_check.mount_of(10**6) is None


def test_what_lies_on_a_doubted_file_system_has_no_identity(opened):
    """/proc is no home for a SIF, and that is the first thing it fails at here."""
    with pytest.raises(HpcenvError):
        sif_check.identify(opened("/proc/self/status"), None)


def test_a_file_that_changed_a_moment_ago_has_no_identity_yet(tmp_path, make_sif, opened, records):
    path = make_sif(tmp_path / "young.sif")
    assert sif_check.identify(opened(path), records) == (sha256(path), None)
    assert not (tmp_path / "records").exists()
    assert check(path, opened).lasting in (True, False)
    found = sif_check.check(opened(path), path=str(path), staged=False, known=None, records=records)
    assert (found.checked, found.lasting) == ("full", False)


def test_whole_seconds_are_a_coarse_clock():
    file = sif_check.FileIdentity(device=1, inode=1, size=1, mtime_ns=0, ctime_ns=10**9)
    assert not sif_check.is_settled(file, now_ns=3 * 10**9, tick=0.01)
    assert sif_check.is_settled(file, now_ns=7 * 10**9, tick=0.01)
    assert sif_check.is_settled(dataclasses.replace(file, ctime_ns=10**9 + 1), now_ns=3 * 10**9, tick=0.01)
    # A clock that is ahead of this machine's: nothing can be told.
    assert not sif_check.is_settled(file, now_ns=0)


def test_what_is_no_sif_is_hashed(tmp_path, opened, records):
    path = tmp_path / "no.sif"
    path.write_bytes(b"no SIF")
    assert check(path, opened, records=records).sha256 == sha256(path)


# -- records ------------------------------------------------------------------------------


def keep(records, image, digest=None):
    file = identity(image)
    records.keep(file, sha256=digest or sha256(image), header_sha256="1" * 64)
    return file


def identity(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return sif_check.identity_of(descriptor)
    finally:
        os.close(descriptor)


def test_a_hash_is_taken_once(image, known, opened, records):
    """A record with a hash of its own shows that the file was not read again."""
    other = dataclasses.replace(known, inode=known.inode + 1)
    assert check(image, opened, known=other, records=records).checked == "full"
    assert check(image, opened, known=other, records=records).checked == "node-record"
    [path] = records.folder.glob("*.json")
    path.write_text(path.read_text().replace(known.sha256, "f" * 64))
    assert check(image, opened, known=other, records=records).sha256 == "f" * 64
    assert sif_check.identify(opened(image), records, tick=TICK)[0] == "f" * 64


def test_records_and_their_folder_are_private(image, records):
    keep(records, image)
    [path] = records.folder.glob("*")
    assert (path.stat().st_mode & 0o777, records.folder.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("put", [replaced, in_place])
def test_a_record_is_of_one_state_of_one_file(image, records, put):
    file = keep(records, image)
    assert records.find(file).sha256 == sha256(image)
    put(image, one_bit(image))
    assert records.find(identity(image)) is None


def test_a_record_of_another_boot_or_path_does_not_count(image, records):
    file = keep(records, image)
    [path] = records.folder.glob("*")
    elsewhere = Records(records.folder, "elsewhere")
    os.rename(path, elsewhere._path(file))
    assert elsewhere.find(file) is None


def spoil_mode(path):
    path.chmod(0o622)


def spoil_folder(path):
    path.parent.chmod(0o777)


def spoil_link(path):
    os.rename(path, path.with_name("real"))
    path.symlink_to("real")


def spoil_fifo(path):
    path.unlink()
    os.mkfifo(path)


def spoil_json(path):
    path.write_text("{")


def spoil_hash(path):
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "sha256": "../x"}))


def spoil_shape(path):
    path.write_text("[1]")


def spoil_deep(path):
    path.write_text("[" * 4000)


def spoil_owner(path):
    os.chown(path, 12345, -1)


def spoil_folders_owner(path):
    os.chown(path.parent, 12345, -1)


@pytest.mark.parametrize(
    "spoil",
    [spoil_mode, spoil_folder, spoil_link, spoil_fifo, spoil_json, spoil_hash, spoil_shape, spoil_deep,
     spoil_owner, spoil_folders_owner],
)  # fmt: skip
def test_a_record_that_others_could_have_written_counts_as_absent(image, records, spoil):
    if "owner" in spoil.__name__ and os.geteuid() != 0:
        pytest.skip("NOT RUN: only root can give files away")
    file = keep(records, image)
    [path] = records.folder.glob("*")
    spoil(path)
    assert records.find(file) is None


def test_a_folder_in_which_nothing_can_be_kept_is_no_error(image, tmp_path):
    (tmp_path / "file").touch()
    records = Records(tmp_path / "file", "here")
    file = keep(records, image)
    assert records.find(file) is None
    (tmp_path / "link").symlink_to(tmp_path)
    assert keep(Records(tmp_path / "link", "here"), image)
    assert not list(tmp_path.glob("*.json"))


def test_old_records_make_room(image, records, monkeypatch):
    monkeypatch.setattr(sif_check, "_MOST_RECORDS", 3)
    for size in range(10):
        records.keep(dataclasses.replace(identity(image), size=size), sha256="0" * 64, header_sha256="1" * 64)
    assert len(list(records.folder.iterdir())) == 3


def test_where_a_node_keeps_its_records(tmp_path):
    found = sif_check.node_records([tmp_path / "no such", tmp_path])
    assert found.folder == tmp_path / f"hpcenv-{os.geteuid()}" / "sif"
    assert found.where == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert sif_check.node_records([tmp_path / "no such"]) is None
