"""squashfs: which packer is taken, that what it makes is whole and always the same, and how it fails."""

from __future__ import annotations

import io
import os
import random
import shutil
import stat
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from hpcenv.errors import FileUnusable, HpcenvError, ToolFailed, ToolMissing
from hpcenv.image.content.tree import TreeEntry
from hpcenv.image.convert import squashfs, squashfs_reader
from hpcenv.progress import Event

REAL = shutil.which("mksquashfs") or "mksquashfs"
ROOT = TreeEntry(path=b"", kind="directory", mode=0o751, uid=3, gid=4, mtime=7)


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake(folder: Path, text: str, version: str = "4.6.1") -> Path:
    """A mksquashfs that says a version and otherwise does `text`."""
    say = f'[ "$1" = -version ] && {{ echo "mksquashfs version {version} (2023/03/25)"; exit 0; }}'
    return program(folder, "mksquashfs", f"{say}\n{text}")


def packer(path: Path | str = REAL) -> squashfs.Packer:
    return squashfs.Packer(kind="mksquashfs", path=str(path), version=host_version(), origin="PATH")


def host_version() -> tuple[int, ...]:
    said = subprocess.run([REAL, "-version"], capture_output=True, text=True, check=False).stdout.split()
    return tuple(int(part) for part in said[2].split("."))


def path_of(*folders: Path) -> str:
    """A PATH with the system's shell and tools, but not its mksquashfs."""
    return os.pathsep.join(map(str, folders))


# --- finding -----------------------------------------------------------------------------


def test_the_one_on_path_is_taken(tmp_path: Path) -> None:
    own = fake(tmp_path, f'exec {REAL} "$@"')
    found = squashfs.find_packer(path_of(tmp_path))
    assert (found.path, found.version, found.origin) == (str(own), (4, 6, 1), "PATH")
    assert found.name == "mksquashfs 4.6.1"


@pytest.mark.parametrize("on_path", ["nothing", "too old"])
def test_else_the_one_that_apptainer_brings(tmp_path: Path, on_path: str) -> None:
    libexec = tmp_path / "libexec"
    brought = fake(libexec / "apptainer" / "bin", f'exec {REAL} "$@"', "4.7.2")
    program(tmp_path / "bin", "apptainer", f'[ "$1" = buildcfg ] && echo "BINDIR=/x"; echo "LIBEXECDIR={libexec}"')
    if on_path == "too old":
        fake(tmp_path / "bin", "exit 9", "4.5.1")
    found = squashfs.find_packer(path_of(tmp_path / "bin"))
    assert (found.path, found.version, found.origin) == (str(brought), (4, 7, 2), "apptainer")


@pytest.mark.parametrize("version", ["4.3-git", "4.4", "4.5.1"])
def test_one_that_is_too_old_is_named_with_its_version(tmp_path: Path, version: str) -> None:
    own = fake(tmp_path, f'exec {REAL} "$@"', version)
    with pytest.raises(ToolMissing) as error:
        squashfs.find_packer(path_of(tmp_path))
    assert f"`{own}` is version {version.removesuffix('-git')}, 4.6 or newer is needed" in str(error.value.why)
    assert "squashfs-tools 4.6" in str(error.value.hint)


def test_one_without_zstd_is_not_taken(tmp_path: Path) -> None:
    fake(tmp_path, """echo 'FATAL ERROR: Compressor "zstd" is not supported!' >&2; exit 1""")
    with pytest.raises(ToolMissing) as error:
        squashfs.find_packer(path_of(tmp_path))
    assert 'Compressor "zstd" is not supported' in str(error.value.why)


def test_what_is_found_and_useless_does_not_hide_that_nothing_was_found(tmp_path: Path) -> None:
    with pytest.raises(ToolMissing, match="no program that can pack") as error:
        squashfs.find_packer(str(tmp_path))
    assert "`mksquashfs` is neither on PATH" in str(error.value.why)
    program(tmp_path, "mksquashfs", "exit 3")
    program(tmp_path, "apptainer", "echo FATAL; exit 255")
    with pytest.raises(ToolMissing) as error:
        squashfs.find_packer(str(tmp_path))
    assert "does not print its version" in str(error.value.why)


def test_processors_are_those_of_this_process() -> None:
    assert 1 <= squashfs.usable_processors() <= len(os.sched_getaffinity(0))


# --- packing -----------------------------------------------------------------------------


def stream(large: int = 0) -> bytes:
    """A merged layer: folders first, owners as numbers, everything with its own time."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for number, (name, kind, data) in enumerate(
            [
                ("usr", tarfile.DIRTYPE, b""),
                ("usr/bin", tarfile.DIRTYPE, b""),
                ("usr/bin/python", tarfile.REGTYPE, bytes(range(256)) * 5000),
                ("usr/bin/" + "long" * 60, tarfile.REGTYPE, b"text\n" * 300),
                ("usr/new\nline", tarfile.REGTYPE, bytes(large)),
                ("usr/raw-\udcff", tarfile.REGTYPE, b"raw"),
                ("usr/null", tarfile.CHRTYPE, b""),
                ("usr/pipe", tarfile.FIFOTYPE, b""),
                ("usr/link", tarfile.SYMTYPE, b""),
                ("usr/second", tarfile.LNKTYPE, b""),
            ]
        ):
            info = tarfile.TarInfo(name)
            info.type, info.size, info.mtime = kind, len(data), 1_700_000_000 + number
            info.uid, info.gid, info.mode, info.devmajor, info.devminor = number, 70_000, 0o4755, 1, 3
            info.linkname = {b"1": "usr/bin/python", b"2": "../" + "t" * 50}.get(kind, "")
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def writer(data: bytes) -> Callable[[BinaryIO], None]:
    def write(out: BinaryIO) -> None:
        for at in range(0, len(data), 100_000):
            out.write(data[at : at + 100_000])

    return write


def pack(destination: Path, own: squashfs.Packer | None = None, **changes: object) -> squashfs.PackResult:
    options: dict[str, object] = {"offset": 40960, "write": writer(stream()), "epoch": 99, "root": ROOT}
    return squashfs.pack(own or packer(), destination, **{**options, **changes})  # type: ignore[arg-type]


def entries(image: Path, offset: int = 40960) -> list[TreeEntry]:
    return list(squashfs_reader.read_tree(image, offset=offset, size=image.stat().st_size - offset))


def test_the_squashfs_lies_at_its_offset_and_holds_what_was_written(tmp_path: Path) -> None:
    image = tmp_path / "image"
    result = pack(image)
    whole = image.read_bytes()
    assert (len(whole), result.size % 4096) == (40960 + result.size, 0)
    assert result.size - 4096 < result.bytes_used <= result.size
    assert (whole[:40960], whole[40960:40964]) == (bytes(40960), b"hsqs")
    assert (result.compression, result.notes) == ("zstd", ())
    found = {item.path: item for item in entries(image)}
    assert len(found) == 11
    python = found[b"usr/bin/python"]
    assert (python.mode, python.uid, python.gid, python.mtime) == (0o4755, 2, 70_000, 1_700_000_002)
    assert found[b"usr/second"].inode == b"usr/bin/python"
    assert found[b"usr/null"].device == (1, 3)
    assert found[b"usr/link"].target == b"../" + b"t" * 50
    assert {b"usr/new\nline", b"usr/raw-\xff", b"usr/bin/" + b"long" * 60} < set(found)
    # Older ones forget what they are told of the root: that is why `find_packer` refuses them.
    if host_version() >= squashfs.LEAST_VERSION:
        assert found[b""] == ROOT


def test_gzip_holds_the_same_files_as_zstd(tmp_path: Path) -> None:
    pack(tmp_path / "zstd")
    result = pack(tmp_path / "gzip", compression="gzip")
    assert (result.compression, result.arguments[5:7]) == ("gzip", ("-comp", "gzip"))
    # Without the first folder: squashfs-tools before 4.6 gives it the time of the call.
    assert entries(tmp_path / "gzip")[1:] == entries(tmp_path / "zstd")[1:]


def test_the_bytes_depend_on_nothing_but_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(tmp_path / "one", processors=1)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "12345")
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    before = os.umask(0o077)
    try:
        pack(tmp_path / "two", processors=5, memory_mib=64)
    finally:
        os.umask(before)
    if host_version() >= squashfs.LEAST_VERSION:
        assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert entries(tmp_path / "one")[1:] == entries(tmp_path / "two")[1:]


@pytest.mark.parametrize(("version", "once"), [((4, 6, 1), True), ((4, 7), False), ((4, 7, 5), False)])
def test_duplicates_are_kept_once_only_where_that_is_safe(tmp_path: Path, version: tuple[int, ...], once: bool) -> None:
    own = squashfs.Packer(kind="mksquashfs", path=REAL, version=version, origin="PATH")
    body = random.Random(3).randbytes(300_000)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in ("one", "two"):
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    result = pack(tmp_path / "image", own, write=writer(out.getvalue()))
    assert (result.size < 450_000) == once
    assert len({item.blake3 for item in entries(tmp_path / "image")[1:]}) == 1


def test_what_lay_there_is_replaced_and_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"old" * 1_000_000)
    pack(image, offset=4096)
    assert entries(image, 4096)[1].path == b"usr"
    assert image.stat().st_size < 1_000_000
    fresh = tmp_path / "fresh"
    pack(fresh)
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o600


def test_progress_counts_the_stream(tmp_path: Path) -> None:
    seen: list[Event] = []
    whole = stream(large=40 << 20)
    pack(tmp_path / "image", write=writer(whole), on_event=seen.append)
    assert [event.phase for event in seen] == ["pack"] * len(seen)
    assert [event.done for event in seen] == sorted(event.done for event in seen)
    assert len(seen) == 3
    assert (seen[-1].done, seen[-1].total, seen[-1].unit) == (len(whole), len(whole), "bytes")


def test_it_may_be_fed_by_another_thread(tmp_path: Path) -> None:
    results: list[squashfs.PackResult] = []
    thread = threading.Thread(target=lambda: results.append(pack(tmp_path / "image")))
    thread.start()
    thread.join(60)
    assert results[0].size == (tmp_path / "image").stat().st_size - 40960


# --- failing -----------------------------------------------------------------------------


def ended(pid_file: Path) -> bool:
    """True if the process whose number is in the file is no more (or only waits to be collected)."""
    pid = pid_file.read_text().strip()
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    "error", [RuntimeError("layer"), KeyboardInterrupt(), HpcenvError("bad layer"), OSError(5, "x")]
)
def test_an_error_of_the_writer_comes_through_and_nothing_is_left_running(tmp_path: Path, error: BaseException) -> None:
    own = packer(fake(tmp_path, f'echo $$ > {tmp_path}/pid; exec {REAL} "$@"'))

    def write(out: BinaryIO) -> None:
        out.write(stream()[:700_000])
        out.flush()
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text().endswith("\n"):
            time.sleep(0.01)
        raise error

    with pytest.raises(type(error)) as raised:
        pack(tmp_path / "image", own, write=write)
    assert raised.value is error
    assert ended(tmp_path / "pid")


def test_an_unfinished_archive_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ToolFailed, match="ended with status") as error:
        pack(tmp_path / "image", write=writer(stream()[:600_000]))
    assert "truncated or corrupted" in error.value.stderr


@pytest.mark.parametrize(
    ("said", "named"),
    [("No space left on device", "the file system is full"), ("Disk quota exceeded", "the quota is used up")],
)
def test_a_full_disk_is_named(tmp_path: Path, said: str, named: str) -> None:
    """The words are those of 4.5.1 and 4.6.1 on a full tmpfs; the rest of the stream finds no reader."""
    script = f"head -c 100000 >/dev/null; echo 'Write failed because {said}' >&2; echo 'FATAL ERROR: no' >&2; exit 1"
    with pytest.raises(FileUnusable, match=named) as error:
        pack(tmp_path / "image", packer(fake(tmp_path, script)), write=writer(bytes(8 << 20)))
    assert said in str(error.value.why)
    assert str(tmp_path / "image") in error.value.what


def test_a_full_disk_is_named_when_the_writer_wraps_its_error(tmp_path: Path) -> None:
    def write(out: BinaryIO) -> None:
        try:
            writer(bytes(8 << 20))(out)
        except OSError as error:
            raise HpcenvError("the layer could not be written") from error

    script = "echo 'Write failed because No space left on device' >&2; exit 1"
    with pytest.raises(FileUnusable, match="the file system is full"):
        pack(tmp_path / "image", packer(fake(tmp_path, script)), write=write)


def test_one_that_is_killed_says_so(tmp_path: Path) -> None:
    own = packer(fake(tmp_path, "head -c 100000 >/dev/null; kill -9 $$"))
    with pytest.raises(ToolFailed, match="was killed by signal 9") as error:
        pack(tmp_path / "image", own, write=writer(bytes(8 << 20)))
    assert "memory" in str(error.value.why)


def test_one_that_hangs_is_stopped(tmp_path: Path) -> None:
    own = packer(fake(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 60"))
    before = time.monotonic()
    with pytest.raises(ToolFailed, match="did not answer within"):
        pack(tmp_path / "image", own, write=writer(bytes(8 << 20)), timeout=0.5)
    assert time.monotonic() - before < 20
    assert ended(tmp_path / "pid")


def test_one_that_talks_without_end_is_heard_in_part(tmp_path: Path) -> None:
    script = "yes 'a long complaint' | head -c 3000000; cat > /dev/null; echo 'last words'; exit 1"
    with pytest.raises(ToolFailed) as error:
        pack(tmp_path / "image", packer(fake(tmp_path, script)))
    assert error.value.stderr.endswith("last words")
    assert len(error.value.stderr) < 10_000


@pytest.mark.parametrize("script", ["cat > /dev/null", 'cat > /dev/null; echo no squashfs at all > "$2"'])
def test_success_is_not_believed_without_a_file_system(tmp_path: Path, script: str) -> None:
    with pytest.raises(ToolFailed, match="left no file system"):
        pack(tmp_path / "image", packer(fake(tmp_path, script)))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "link").symlink_to("elsewhere")
    for place in (tmp_path / "none" / "image", tmp_path, tmp_path / "link"):
        with pytest.raises(FileUnusable, match="cannot be written"):
            pack(place)
    assert (tmp_path / "elsewhere").read_text() == "precious"
    with pytest.raises(ValueError, match="4096"):
        pack(tmp_path / "image", offset=100)
