"""squashfs_reader: every kind of inode, table and compression that mksquashfs writes, and hostile images."""

from __future__ import annotations

import io
import os
import random
import stat
import struct
import subprocess
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from blake3 import blake3

from hpcenv.errors import EnvironmentUnreadable, HpcenvError, ImageMismatch
from hpcenv.image.content.tree import FileKind, TreeEntry
from hpcenv.image.convert import squashfs_reader

MODES: dict[int, FileKind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character-device",
    stat.S_IFBLK: "block-device",
}
BLOCK = 128 * 1024


def mksquashfs(source: str | Path, image: Path, *options: str, stdin: bytes | None = None) -> Path:
    subprocess.run(
        ["mksquashfs", str(source), str(image), "-noappend", "-quiet", "-no-progress", *options],
        input=stdin or b"",
        check=True,
        capture_output=True,
        timeout=120,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
    )
    return image


def read(image: Path, **options: object) -> list[TreeEntry]:
    return list(squashfs_reader.read_tree(image, offset=0, size=image.stat().st_size, **options))  # type: ignore[arg-type]


# --- a folder with everything an ordinary user can make ----------------------------------


def fill(root: Path) -> None:
    """Make files of every awkward size, name and kind."""
    rng = random.Random(1)
    sizes = [0, 1, 511, 4095, 4096, 4097, 8192, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7]
    for size in sizes:
        (root / f"random-{size}").write_bytes(rng.randbytes(size))
        (root / f"text-{size}").write_bytes((b"the same words again " * (size // 20 + 1))[:size])
    (root / "twin").write_bytes((root / f"random-{2 * BLOCK + 7}").read_bytes())
    with (root / "holes").open("wb") as file:
        file.write(b"begin")
        file.seek(5 * BLOCK + 100)
        file.write(b"middle")
        file.truncate(8 * BLOCK + 3)
    (root / "only-hole").touch()
    os.truncate(root / "only-hole", 5 * BLOCK)
    fill_folders(root)
    fill_names(root)
    for path in sorted(root.rglob("*"), reverse=True):
        os.utime(path, ns=(0, rng.randrange(2**32) * 10**9), follow_symlinks=False)
    os.utime(root, (5, 1234567890))


def fill_folders(root: Path) -> None:
    (root / "empty").mkdir()
    deep = root / "deep"
    for _ in range(60):
        deep.mkdir()
        deep /= "d"
    deep.write_text("down here")
    many = root / "many"
    many.mkdir()
    for number in range(1500):
        (many / f"{number:04}-{'n' * (number % 200)}").touch()
    # Sorted by whole path, `a-b` and `a.b` lie between `a` and `a/c`.
    for name in ("order/a", "order/a!", "order/a-", "order/a.b/c", "order/a/c", "order/a0"):
        (root / name).mkdir(parents=True, exist_ok=True)


def fill_names(root: Path) -> None:
    for name in (b"n" * 255, b"new\nline", b"\xff\xfe not utf-8", b"back\\slash \"'*?[", b"\x01\x7f", "größe".encode()):
        Path(os.fsdecode(os.path.join(os.fsencode(root), name))).write_bytes(name)
    os.symlink("../" * 40 + "t" * 1000, root / "long-link")
    os.symlink(b"\xff\n", os.fsencode(root) + b"/odd-link")
    os.mkfifo(root / "fifo", 0o640)
    (root / "odd-mode").write_bytes(b"x")
    (root / "odd-mode").chmod(0o7751)
    (root / "empty").chmod(0o1700)
    os.link(root / "text-4097", root / "zz-second")
    os.link(root / "text-4097", root / "deep" / "third")
    os.link(root / "fifo", root / "a-fifo")
    with_xattrs(root)


def with_xattrs(root: Path) -> None:
    """Values short, long, empty, binary, shared by several files (kept once, out of line)."""
    shared = bytes(range(256)) * 4
    for name in ("text-4095", "text-4096", "random-1", "empty"):
        os.setxattr(root / name, "user.shared", shared)
        os.setxattr(root / name, "user.of-" + name, name.encode() + b"\0\xff")
    os.setxattr(root / "text-0", "user.none", b"")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    fill(root)
    return root


def expected(root: Path) -> list[TreeEntry]:
    """The same folder as the operating system tells it."""
    base = os.fsencode(root)
    paths = [b""]
    for folder, folders, files in os.walk(base):
        inside = os.path.relpath(folder, base)
        prefix = b"" if inside == b"." else inside + b"/"
        paths += [prefix + name for name in (*folders, *files)]
    first: dict[int, bytes] = {}
    return [entry(base, path, first) for path in sorted(paths)]


def entry(base: bytes, path: bytes, first: dict[int, bytes]) -> TreeEntry:
    full = os.path.join(base, path) if path else base
    seen = os.lstat(full)
    kind = MODES[stat.S_IFMT(seen.st_mode)]
    plain = kind == "file"
    return TreeEntry(
        path=path,
        kind=kind,
        mode=stat.S_IMODE(seen.st_mode),
        uid=seen.st_uid,
        gid=seen.st_gid,
        mtime=int(seen.st_mtime),
        size=seen.st_size if plain else 0,
        blake3=blake3(Path(os.fsdecode(full)).read_bytes()).hexdigest() if plain else None,
        target=os.readlink(full) if kind == "symlink" else b"",
        xattrs=tuple(
            sorted(
                (os.fsencode(name), os.getxattr(full, name, follow_symlinks=False))
                for name in os.listxattr(full, follow_symlinks=False)
                if name.startswith(("user.", "trusted.", "security."))
            )
        ),
        inode=path if kind == "directory" else first.setdefault(seen.st_ino, path),
    )


OPTIONS = {
    "gzip": (),
    "xz": ("-comp", "xz"),
    "xz-with-filters": ("-comp", "xz", "-Xbcj", "x86"),
    "lzma": ("-comp", "lzma"),
    "zstd": ("-comp", "zstd", "-Xcompression-level", "3"),
    "zstd-4K": ("-comp", "zstd", "-Xcompression-level", "1", "-b", "4K"),
    "zstd-1M": ("-comp", "zstd", "-Xcompression-level", "1", "-b", "1M"),
    "nothing-packed": ("-noI", "-noD", "-noF", "-noX"),
    "only-data-packed": ("-noI", "-noX"),
    "no-fragments": ("-no-fragments",),
    "all-fragments": ("-always-use-fragments", "-comp", "zstd", "-Xcompression-level", "1"),
    "twins-twice": ("-no-duplicates", "-no-sparse", "-no-exports"),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_tree_is_read_as_it_lies_on_disk(tree: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    image = mksquashfs(tree, tmp_path / "image", *options)
    assert read(image) == expected(tree)


def test_threads_and_places_in_the_file_change_nothing(tree: Path, tmp_path: Path) -> None:
    image = mksquashfs(tree, tmp_path / "image", "-comp", "zstd", "-offset", "40960")
    whole = expected(tree)
    size = image.stat().st_size - 40960
    for threads in (1, 2, 5):
        hashed: list[int] = []
        with image.open("rb") as file:
            file.seek(7)
            found = squashfs_reader.read_tree(
                file.fileno(), offset=40960, size=size, on_bytes=hashed.append, threads=threads
            )
            assert list(found) == whole
            assert file.tell() == 7
        # Each content once: hard links and twins are not read again.
        contents = {(item.blake3, item.size) for item in whole if item.kind == "file"}
        assert sum(hashed) == sum(length for _digest, length in contents)


def test_without_content_nothing_is_hashed(tree: Path, tmp_path: Path) -> None:
    image = mksquashfs(tree, tmp_path / "image")
    assert read(image, content=False) == [replace(item, blake3=None) for item in expected(tree)]


def test_one_small_file_is_read(tree: Path, tmp_path: Path) -> None:
    image = mksquashfs(tree, tmp_path / "image", "-comp", "zstd")
    size = image.stat().st_size
    for path in (b"text-4097", b"holes", b"deep/" + b"d/" * 59 + b"d", b"\xff\xfe not utf-8", b"random-262151"):
        wanted = Path(os.fsdecode(os.path.join(os.fsencode(tree), path))).read_bytes()
        assert squashfs_reader.read_file(image, path, offset=0, size=size) == wanted
    for path in (b"none", b"text-0/x", b"deep", b"long-link", b"", b"/text-0", b"empty/"):
        with pytest.raises(ImageMismatch):
            squashfs_reader.read_file(image, path, offset=0, size=size)
    with pytest.raises(ImageMismatch, match="cannot be used") as error:
        squashfs_reader.read_file(image, b"holes", offset=0, size=size, limit=100)
    assert "more than the limit of 100" in str(error.value.why)


# --- what only root could make on disk, out of a tar stream ------------------------------


def member(
    name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **fields: object
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def archive(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def test_owners_devices_and_privileged_attributes(tmp_path: Path) -> None:
    capability = "\x01\x00\x00\x02\x00 " + "\x00" * 14
    stream = archive(
        [
            member("dev", tarfile.DIRTYPE, mode=0o755, uid=70000, gid=4000000000, mtime=2**32 - 1),
            member("dev/null", tarfile.CHRTYPE, mode=0o666, devmajor=1, devminor=3),
            member("dev/sda", tarfile.BLKTYPE, mode=0o660, devmajor=259, devminor=70000, gid=6),
            member("ping", data=b"p", mode=0o4755, pax_headers={"SCHILY.xattr.security.capability": capability}),
            member("trust", data=b"p", pax_headers={"SCHILY.xattr.trusted.overlay.opaque": "y"}),
            member("link", tarfile.SYMTYPE, linkname="dev", pax_headers={"SCHILY.xattr.trusted.a": "b"}),
            member("node", tarfile.CHRTYPE, devmajor=1, devminor=5, pax_headers={"SCHILY.xattr.trusted.a": "b"}),
            member("pipe", tarfile.FIFOTYPE, pax_headers={"SCHILY.xattr.trusted.a": "b"}),
            member("a-link", tarfile.LNKTYPE, linkname="link"),
            member("folder", tarfile.DIRTYPE, pax_headers={"SCHILY.xattr.trusted.a": "b"}),
        ]
    )
    image = mksquashfs("-", tmp_path / "image", "-tar", stdin=stream)
    found = {item.path: item for item in read(image)}
    one = ((b"trusted.a", b"b"),)
    assert (found[b"dev"].uid, found[b"dev"].gid, found[b"dev"].mtime) == (70000, 4000000000, 2**32 - 1)
    assert (found[b"dev/null"].kind, found[b"dev/null"].device) == ("character-device", (1, 3))
    assert (found[b"dev/sda"].kind, found[b"dev/sda"].device) == ("block-device", (259, 70000))
    assert found[b"ping"].mode == 0o4755
    assert found[b"ping"].xattrs == ((b"security.capability", capability.encode()),)
    assert found[b"trust"].xattrs == ((b"trusted.overlay.opaque", b"y"),)
    assert [found[name].xattrs for name in (b"link", b"node", b"pipe", b"folder")] == [one] * 4
    assert found[b"link"].target == found[b"a-link"].target == b"dev"
    assert found[b"link"].inode == found[b"a-link"].inode == b"a-link"
    assert found[b"ping"].inode == b"ping"


def test_a_socket_is_one(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    image = mksquashfs(tmp_path / "tree", tmp_path / "image", "-p", "talk i 600 1 2 s")
    assert [(item.path, item.kind, item.mode, item.uid, item.gid) for item in read(image)][1] == (
        *(b"talk", "socket", 0o600, 1, 2),
    )


def test_a_folder_of_five_thousand(tmp_path: Path) -> None:
    """Its listing is 100 KB long: the inode has an index, and entries refer to many inode blocks."""
    many = tmp_path / "tree" / "many"
    many.mkdir(parents=True)
    names = [b"%011d" % number for number in range(5_000)]
    folder = os.open(many, os.O_RDONLY)
    try:
        for name in names:
            os.mknod(name, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    image = mksquashfs(tmp_path / "tree", tmp_path / "image", "-comp", "zstd")
    assert [item.path for item in read(image)] == [b"", b"many", *(b"many/" + name for name in names)]


# --- damaged and hostile -----------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Little images with many kinds of content, packed and not."""
    root = tmp_path_factory.mktemp("small")
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "big").write_bytes(random.Random(2).randbytes(9000) + b"x" * 5000)
    (root / "sub" / "one").write_bytes(b"one")
    os.link(root / "sub" / "one", root / "two")
    os.symlink("sub/one", root / "link")
    os.setxattr(root / "two", "user.a", b"b" * 300)
    os.setxattr(root / "big", "user.a", b"b" * 300)
    images = {}
    for name in ("nothing-packed", "zstd-4K", "gzip", "xz"):
        image = mksquashfs(
            root, root.with_name("small-image"), *OPTIONS[name], "-nopad", "-all-root", "-mkfs-time", "1"
        )
        images[name] = image.read_bytes()
    return images


def attempt(path: Path, data: bytes) -> str:
    """Read an image in every way there is; say how it ended."""
    path.write_bytes(data)
    try:
        entries = list(squashfs_reader.read_tree(path, offset=0, size=len(data), threads=1, largest_content=64 << 20))
        assert [item.path for item in entries] == sorted({item.path for item in entries})
        squashfs_reader.read_file(path, b"sub/one", offset=0, size=len(data))
    except ImageMismatch as error:
        assert str(path) in error.what
        assert error.why
        return error.why
    return ""


@pytest.mark.parametrize("name", ["nothing-packed", "zstd-4K", "gzip", "xz"])
def test_every_shorter_file_is_refused(small: dict[str, bytes], tmp_path: Path, name: str) -> None:
    whole = small[name]
    assert attempt(tmp_path / "image", whole) == ""
    for length in [*range(0, 200, 7), *range(200, len(whole), 61), len(whole) - 1]:
        assert attempt(tmp_path / "image", whole[:length])


@pytest.mark.parametrize("name", ["nothing-packed", "zstd-4K", "gzip"])
def test_any_changed_byte_is_survived(small: dict[str, bytes], tmp_path: Path, name: str) -> None:
    """Only the right kind of error comes out, and of the tables' bytes most are noticed."""
    whole = small[name]
    tables = struct.unpack_from("<Q", whole, 64)[0]
    noticed = 0
    positions = [*range(4, 96), *range(tables, len(whole), 3)]
    for position in positions:
        changed = bytearray(whole)
        changed[position] ^= 0xFF
        noticed += bool(attempt(tmp_path / "image", bytes(changed)))
    assert noticed > len(positions) // 3


def tables_of(whole: bytes) -> dict[str, int]:
    names = ("ids", "xattrs", "inodes", "directories", "fragments", "export")
    return dict(zip(names, struct.unpack_from("<6Q", whole, 48), strict=True))


def swap(whole: bytes, old: bytes, new: bytes) -> bytes:
    assert whole.count(old) == 1
    assert len(old) == len(new)
    return whole.replace(old, new)


def listing_entry(whole: bytes, name: bytes) -> int:
    """Where the listing's entry for `name` begins."""
    tables = tables_of(whole)
    at = whole.index(struct.pack("<H", len(name) - 1) + name, tables["directories"], tables["fragments"])
    return at - 6


def test_a_folder_inside_itself_is_refused(small: dict[str, bytes], tmp_path: Path) -> None:
    whole = bytearray(small["nothing-packed"])
    (root,) = struct.unpack_from("<Q", whole, 32)
    empty, sub = listing_entry(bytes(whole), b"empty"), listing_entry(bytes(whole), b"sub")
    # The entry `empty` of `sub` becomes `sub` again.
    inside, delta = struct.unpack_from("<Hh", whole, sub)
    struct.pack_into("<Hh", whole, empty, inside, delta)
    why = attempt(tmp_path / "image", bytes(whole))
    assert "second time" in why or "refers to inode" in why
    # And the root itself.
    struct.pack_into("<H", whole, empty, root & 0xFFFF)
    assert attempt(tmp_path / "image", bytes(whole))


@pytest.mark.parametrize("name", [b"a/b", b"\0bc", b"..c", b"zzz"])
def test_names_that_no_folder_can_have_are_refused(small: dict[str, bytes], tmp_path: Path, name: bytes) -> None:
    whole = bytearray(small["nothing-packed"])
    at = listing_entry(bytes(whole), b"sub") + 8
    if name == b"..c":
        # `..` itself, with the length to match.
        at_two = listing_entry(bytes(whole), b"two")
        struct.pack_into("<H", whole, at_two + 6, 1)
        name = b".."
        at = at_two + 8
    whole[at : at + len(name)] = name
    assert attempt(tmp_path / "image", bytes(whole))


def test_sizes_without_an_end_are_refused_before_they_are_read(small: dict[str, bytes], tmp_path: Path) -> None:
    whole = small["nothing-packed"]
    begin = tables_of(whole)["inodes"] + 2
    at = whole.index(struct.pack("<I", 14000), begin)
    for size in (2**32 - 1, 14000 + BLOCK, 2**31):
        assert attempt(tmp_path / "image", whole[:at] + struct.pack("<I", size) + whole[at + 4 :])


def test_holes_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "hole").touch()
    os.truncate(tmp_path / "tree" / "hole", 80 << 20)
    image = mksquashfs(tmp_path / "tree", tmp_path / "image")
    with pytest.raises(ImageMismatch) as error:
        read(image, largest_content=64 << 20)
    assert "83886080 bytes together" in str(error.value.why)


def test_a_block_that_unpacks_to_more_than_it_may_is_refused(tmp_path: Path) -> None:
    bomb = bytes(64 << 20)
    image = tmp_path / "image"
    for compression, packed in (
        (1, zlib.compress(bomb)),
        (6, zstandard.compress(bomb)),
        (6, zstandard.ZstdCompressor(write_content_size=False).compress(bomb)),
        # A frame that only claims much: 2 TiB.
        (6, bytes.fromhex("28b52ffd c0 00 00000000 00020000 010000".replace(" ", ""))),
    ):
        body = struct.pack("<H", len(packed[:8000])) + packed[:8000]
        image.write_bytes(superblock(compression, len(body)) + body)
        with pytest.raises(ImageMismatch, match="cannot be used") as error:
            read(image)
        assert "compress" in str(error.value.why)


def superblock(compression: int, tables: int) -> bytes:
    end = 96 + tables
    return struct.pack(
        "<4sIIIIHHHHHHQQQQQQQQ",
        *(b"hsqs", 1, 0, BLOCK, 0, compression, 17, 0, 1, 4, 0, 0, end),
        *(96, 2**64 - 1, 96, end, 96, 2**64 - 1),
    )


@pytest.mark.parametrize("number", [0, 3, 5, 7])
def test_a_compression_that_cannot_be_read_says_what_to_do(tmp_path: Path, number: int) -> None:
    (tmp_path / "image").write_bytes(superblock(number, 100) + bytes(100))
    with pytest.raises(ImageMismatch, match="cannot be read here") as error:
        read(tmp_path / "image")
    assert "zstd" in str(error.value.hint)


def test_what_is_no_image_or_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"no image at all" * 100)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ImageMismatch):
        read(tmp_path / "text")
    with pytest.raises(ImageMismatch):
        next(squashfs_reader.read_tree(tmp_path / "fifo", offset=0, size=1000))
    with pytest.raises(EnvironmentUnreadable):
        next(squashfs_reader.read_tree(tmp_path / "none", offset=0, size=1000))
    with pytest.raises(EnvironmentUnreadable):
        next(squashfs_reader.read_tree(987654, offset=0, size=1000))
    for offset, size in ((-1, 1500), (0, 95), (2**62, 2**62)):
        with pytest.raises(HpcenvError):
            next(squashfs_reader.read_tree(tmp_path / "text", offset=offset, size=size))
