"""A folder of data packed, sent as one file, unpacked and proved."""

import io
import os
import tarfile

import pytest

from hpcenv.errors import FileUnusable, ImageMismatch
from hpcenv.identity.stage import data_folder

ODD = os.fsdecode(b"\xff not UTF-8\n")


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "data"
    (folder / "sub" / ODD).mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "a").write_bytes(b"a" * 100_000)
    (folder / "sub" / ODD / "run.sh").write_text("#!/bin/sh\n")
    (folder / "sub" / ODD / "run.sh").chmod(0o755)
    (folder / "sub" / "link").symlink_to("../a")
    (folder / "sub" / ("x" * 200)).write_text("long")
    return folder


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def packed(source, store):
    return data_folder.pack(data_folder.find(str(source), store), store)


def test_what_is_unpacked_is_what_was_packed_and_read_only(source, store, tmp_path):
    folder = packed(source, store)
    target = tmp_path / "copy"
    assert data_folder.unpack(store / f"sha256-{folder.sha256}.tar", target) == folder.sha256
    assert sorted(os.listdir(target)) == ["a", "empty", "sub"]
    assert (target / "a").read_bytes() == b"a" * 100_000
    assert os.readlink(target / "sub" / "link") == "../a"
    assert (target / "sub" / ("x" * 200)).read_text() == "long"
    modes = [oct(p.stat().st_mode & 0o777) for p in (target, target / "a", target / "sub" / ODD / "run.sh")]
    assert modes == ["0o500", "0o400", "0o500"]
    assert folder.unpacked == 100_000 + 4 + 10
    data_folder.remove(target)
    assert not target.exists()


def test_the_same_content_is_packed_once_and_to_the_same_bytes(source, store, tmp_path):
    first = packed(source, store)
    assert data_folder.find(str(source), store) == first
    # Packed anew elsewhere: the same file.
    assert packed(source, tmp_path / "other").sha256 == first.sha256
    assert sorted(p.suffix for p in store.iterdir()) == [".json", ".tar"]


def test_what_a_killed_process_left_is_removed_after_a_day(source, store):
    store.mkdir()
    old, new = (store / f".{digit * 64}.{'5' * 16}" for digit in "ab")
    for path in (old, new):
        path.write_bytes(b"half a tar")
    os.utime(old, (0, 0))
    packed(source, store)
    assert not old.exists()
    assert new.exists()


def test_a_change_is_packed_anew(source, store):
    first = packed(source, store)
    status = (source / "a").stat()
    (source / "a").write_bytes(b"b" * 100_000)
    os.utime(source / "a", ns=(status.st_atime_ns, status.st_mtime_ns))
    found = data_folder.find(str(source), store)
    assert found.tar == ""
    assert data_folder.pack(found, store).sha256 != first.sha256


def test_a_packed_file_that_is_gone_or_cut_short_is_made_again(source, store):
    first = packed(source, store)
    for spoil in (os.unlink, lambda p: (os.chmod(p, 0o600), os.truncate(p, 10))):
        spoil(first.tar)
        assert data_folder.find(str(source), store).tar == ""
        assert packed(source, store) == first


def test_what_cannot_be_packed_is_named(source, store):
    os.mkfifo(source / "pipe")
    with pytest.raises(FileUnusable, match="pipe` is not a file, folder or symbolic link"):
        data_folder.find(str(source), store)
    with pytest.raises(FileUnusable, match="cannot read"):
        data_folder.find(str(source / "nosuch"), store)


def test_a_folder_that_changes_while_it_is_packed_is_refused(source, store):
    found = data_folder.find(str(source), store)
    (source / "new").touch()
    with pytest.raises(FileUnusable, match="changed while it was packed"):
        data_folder.pack(found, store)
    assert list(store.iterdir()) == []


@pytest.mark.parametrize("spoil", ["byte", "cut", "no tar"])
def test_a_damaged_file_is_not_taken_for_the_packed_one(source, store, tmp_path, spoil):
    folder = packed(source, store)
    data = bytearray((store / f"sha256-{folder.sha256}.tar").read_bytes())
    data = {"byte": data[:2000] + b"!" + data[2001:], "cut": data[: len(data) // 2], "no tar": b"x" * 2000}[spoil]
    bad = tmp_path / "bad.tar"
    bad.write_bytes(data)
    try:
        digest = data_folder.unpack(bad, tmp_path / "copy")
    except ImageMismatch as error:
        assert "is damaged" in error.what
    else:
        assert digest != folder.sha256


def member(name, kind=tarfile.REGTYPE, **more):
    found = tarfile.TarInfo(name)
    found.type = kind
    for key, value in more.items():
        setattr(found, key, value)
    return found


@pytest.mark.parametrize(
    "members",
    [
        [member("../out")],
        [member("/out")],
        [member("..")],
        [member("nosuch/out")],
        [member("link", tarfile.SYMTYPE, linkname="/tmp"), member("link/out")],
        [member("hard", tarfile.LNKTYPE, linkname="/etc/passwd")],
        [member("dev", tarfile.CHRTYPE)],
        [member("fifo", tarfile.FIFOTYPE)],
        [member("a", tarfile.DIRTYPE), member("a/../../out")],
    ],
    ids=lambda members: members[-1].name,
)
def test_names_that_lead_out_are_refused_before_anything_is_written(members, tmp_path):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for one in members:
            tar.addfile(one)
    (tmp_path / "evil.tar").write_bytes(raw.getvalue())
    target = tmp_path / "place" / "copy"
    target.parent.mkdir()
    with pytest.raises(ImageMismatch, match="is damaged"):
        data_folder.unpack(tmp_path / "evil.tar", target)
    assert sorted(os.listdir(tmp_path)) == ["evil.tar", "place"]
    assert os.listdir(target.parent) == ["copy"]


def test_a_change_of_an_unpacked_file_shows(source, store, tmp_path):
    folder = packed(source, store)
    target, record = tmp_path / "copy", tmp_path / "copy.listing"
    data_folder.unpack(store / f"sha256-{folder.sha256}.tar", target)
    assert not data_folder.is_unchanged(target, record)
    data_folder.note_listing(target, record)
    assert data_folder.is_unchanged(target, record)
    status = (target / "a").stat()
    (target / "a").chmod(0o600)
    (target / "a").write_bytes(b"b" * 100_000)
    (target / "a").chmod(0o400)
    os.utime(target / "a", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not data_folder.is_unchanged(target, record)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"boot": null, "listing": null}'])
def test_a_damaged_record_of_a_listing_counts_as_absent(source, tmp_path, text):
    record = tmp_path / "record"
    record.write_text(text)
    assert not data_folder.is_unchanged(source, record)
