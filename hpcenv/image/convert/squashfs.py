"""Make a squashfs from a tar stream, at an offset in a file.

Runs on: LOGIN NODE, or a compute node that converts. Standard library only.

This module runs `mksquashfs - OUT -tar` of squashfs-tools. `sqfstar` is the same program under another name. Facts from
the program's source and from tests:

- Versions before 4.6 are unsuitable. 4.5 reads tar, but ignores the options for the root folder's
  user, group and time, and removes a leading `../` from long link targets
  (`tar.c`, 4.5.1; fixed in 4.6). 4.4 and older cannot read tar.
- 4.6.1 gives the same bytes for the same stream with any number of processors, memory, user and umask. 4.6.1 rejects
  `SOURCE_DATE_EPOCH` together with `-mkfs-time`. It looks up user names of tar headers on the host, so the stream must
  not have user names.
- 4.7 to 4.7.5 write damaged images without a message if there are duplicate files and limited memory:
  the test image with 4.7.5 and `-mem 256M` or `512M` has unreadable blocks, each time (seen
  2026-11-20; upstream issues 339, 344, 361 and 362 concern the same code; 4.6.1 is correct).
  With `-no-duplicates` 4.7.5 is correct too, but the result is 1.3 % larger.
- The time for a folder grows with the square of its entries (a linear search per name in the tar reader): 40,000
  entries in one folder take 25 s to 45 s, and 1,000 entries take a negligible time.
- The default is zstd level 1. For the test image (1.2 GB of files), mksquashfs needs 5.3 s of processor time with this
  level and writes 373 MB. Level 3 needs 6.9 s and writes 352 MB. `gzip -9` needs ten times as long and writes 347 MB.
  `import torch` takes the same time with all three (2026-11-20).
- SingularityCE 4.0 to 4.5.1 refuses zstd (seen with 4.5.1: "unknown compression algorithm value 6";
  pkg/image/squashfs.go). For SingularityCE hpcenv uses gzip, also with level 1.
- mksquashfs must be built with zstd. mksquashfs needs no privileges, and needs space only for the output file.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

from hpcenv import process
from hpcenv.errors import Command, FileUnusable, HpcenvError, ToolFailed, ToolMissing
from hpcenv.image.content.tree import TreeEntry
from hpcenv.progress import Event, OnEvent, ignore

__all__ = ["ALIGNMENT", "LEAST_VERSION", "PackResult", "Packer", "find_packer", "pack", "usable_processors"]

LEAST_VERSION = (4, 6)
# With this and later versions, `-no-duplicates` is used: files with equal content are stored several times. Increase it
# only after a test of the new version.
_DAMAGES_DUPLICATES = (4, 7)
# The kernel mounts a squashfs at any multiple of 512; Apptainer aligns and pads to a page.
ALIGNMENT = 4096
# mksquashfs stores times as unsigned 32-bit numbers.
_LATEST = 2**32 - 1
_REPORT_EVERY = 16 << 20
_PROBE_SECONDS = 30.0
_VERSION = re.compile(r"\bversion (\d+)\.(\d+)(?:\.(\d+))?")
_SUPERBLOCK = struct.Struct("<4s16xH6xHH8xQ")
# Constants of the superblock (squashfs_fs.h).
_NUMBERS = {"gzip": 1, "zstd": 6}
# Messages of the C library in the locale C -> their meaning for the user.
_NO_ROOM = {os.strerror(errno.ENOSPC): "the file system is full", os.strerror(errno.EDQUOT): "the quota is used up"}

Write = Callable[[BinaryIO], None]
# Exit statuses of a program that was killed: by a user, for lack of memory, or by a limit on time or file size.
_STOPPED = frozenset(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGXCPU, signal.SIGXFSZ))
_EMPTY_ROOT = TreeEntry(path=b"", kind="directory", mode=0o755)


Compression = Literal["zstd", "gzip"]


@dataclass(frozen=True, kw_only=True)
class Packer:
    """A program that turns a tar stream into a squashfs.

    Attributes:
        kind: the syntax of the program's command line.
        path: the program.
        version: the version of squashfs-tools, as the program prints it.
        origin: where hpcenv found it: on `PATH`, or in the folder of `apptainer`.
    """

    kind: Literal["mksquashfs"]
    path: str
    version: tuple[int, ...]
    origin: Literal["PATH", "apptainer"]

    @property
    def name(self) -> str:
        """Program and version, for records."""
        return f"{self.kind} {'.'.join(map(str, self.version))}"


@dataclass(frozen=True, kw_only=True)
class PackResult:
    """The result of `pack`.

    Attributes:
        size: bytes from the offset to the end of the file; a multiple of 4096.
        bytes_used: the size in the squashfs superblock.
        compression: the compression of the squashfs blocks.
        arguments: the arguments of mksquashfs without the program and the output, for the record.
        notes: warnings of a successful mksquashfs; normally empty.
    """

    size: int
    bytes_used: int
    compression: str
    arguments: tuple[str, ...]
    notes: tuple[str, ...]


# --- finding -----------------------------------------------------------------------------


def find_packer(environ_path: str | None, *, folder: Path | None = None) -> Packer:
    """Return the best program of this host for `pack`.

    The candidates are, in this order: `mksquashfs` on PATH, and the `mksquashfs` in Apptainer's own packages since 1.4
    (LIBEXECDIR of `apptainer buildcfg`). Each program is tested with an empty archive, because only a test shows
    whether it was built with zstd.

    Args:
        environ_path: the caller's PATH; None uses the PATH of this process.
        folder: where to test; None uses the system's temporary folder.

    Raises:
        ToolMissing: this host has no suitable program; the error lists the unsuitable programs.
        ToolFailed: the test was killed.
        FileUnusable: `folder` has no space.
    """
    problems: list[str] = []
    for path, origin in _candidates(environ_path):
        version = _version(path)
        if version is None:
            problems.append(f"`{path}` does not print its version")
        elif version[:2] < LEAST_VERSION:
            problems.append(f"`{path}` is version {'.'.join(map(str, version))}, 4.6 or newer is needed")
        else:
            packer = Packer(kind="mksquashfs", path=path, version=version, origin=origin)
            problem = _problem(packer, folder)
            if problem is None:
                return packer
            problems.append(f"`{path}`: {problem}")
    raise ToolMissing(
        "this host has no program that can pack an image from a stream",
        why="; ".join(problems) or "`mksquashfs` is neither on PATH nor part of an installed Apptainer",
        hint="load or install squashfs-tools 4.6 or newer (or Apptainer 1.4 or newer from its own packages); "
        "without it hpcenv uses `apptainer build`, which is several times slower",
    )


def _candidates(environ_path: str | None) -> Iterator[tuple[str, Literal["PATH", "apptainer"]]]:
    """Yield the candidates.

    Asking Apptainer takes 0.1 s, so Apptainer is asked only if PATH has no suitable program.
    """
    with contextlib.suppress(ToolMissing):
        yield process.find_tool("mksquashfs", needed_for="pack images", path=environ_path), "PATH"
    with contextlib.suppress(HpcenvError):
        apptainer = process.find_tool("apptainer", needed_for="pack images", path=environ_path)
        settings = process.run([apptainer, "buildcfg"], timeout=_PROBE_SECONDS, env=environment(environ_path)).stdout
        folder = re.search(r"^LIBEXECDIR=(/.*)$", settings, re.MULTILINE)
        own = Path(folder.group(1), "apptainer", "bin", "mksquashfs") if folder else None
        if own is not None and os.access(own, os.X_OK):
            yield str(own), "apptainer"


def _version(path: str) -> tuple[int, ...] | None:
    """Return the version that the program prints, or None; for example `mksquashfs version 4.6.1 (2023/03/25)`.

    The exit status of `-version` differs between versions.
    """
    try:
        done = process.run([path, "-version"], timeout=_PROBE_SECONDS, env=environment(None), accept=(0, 1))
    except HpcenvError:
        return None
    numbers = _VERSION.search(done.stdout)
    return tuple(int(number) for number in numbers.groups() if number is not None) if numbers else None


def _problem(packer: Packer, folder: Path | None) -> str | None:
    """Test a packer with an empty archive and the options of `pack`; return the problem, or None."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix="hpcenv-", dir=folder)
    except OSError as error:
        raise FileUnusable(
            f"`{packer.path}` cannot be tested",
            why=f"`{folder or 'the temporary folder'}`: {error.strerror or error}",
            hint="free space there, or set TMPDIR to another folder",
        ) from error
    with temporary as inside:
        try:
            pack(
                packer,
                Path(inside, "probe"),
                offset=ALIGNMENT,
                write=lambda out: cast("None", out.write(bytes(1024))),
                epoch=0,
                root=_EMPTY_ROOT,
                processors=1,
                timeout=_PROBE_SECONDS,
            )
        except ToolFailed as error:
            if error.status in _STOPPED:
                raise  # the program may be suitable, so do not use `apptainer build`, which gives different bytes
            return (error.stderr.strip().splitlines() or [error.what])[0]
    return None


def usable_processors() -> int:
    """Return how many processors this process may use, by its affinity and its cgroup's quota."""
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError, IndexError):
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        folder = next(line[3:].strip() for line in own.splitlines() if line.startswith("0::"))
        at = Path("/sys/fs/cgroup", folder.lstrip("/"))
        for level in (at, *at.parents):
            if level == Path("/sys/fs"):
                break
            quota = _quota(level)
            allowed = allowed if quota is None else min(allowed, quota)
    return max(1, allowed)


def _quota(cgroup: Path) -> int | None:
    """Return the number of processors in a cgroup's `cpu.max`, rounded up; None without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, -(-int(quota) // max(1, int(period))))


# --- packing -----------------------------------------------------------------------------


def pack(
    packer: Packer,
    destination: Path,
    *,
    offset: int,
    write: Write,
    epoch: int,
    root: TreeEntry,
    duplicates: bool = True,
    processors: int | None = None,
    compression: Compression = "zstd",
    level: int = 1,
    block_size: int = 128 * 1024,
    memory_mib: int = 256,
    total: int | None = None,
    on_event: OnEvent = ignore,
    timeout: float = 3600.0,
) -> PackResult:
    """Make a squashfs in `destination`, beginning at `offset`, from the tar archive that `write` writes.

    The result depends only on the stream, `epoch`, `compression`, `level`, `block_size` and the version of
    squashfs-tools. Bytes before `offset` are zero. After an error the packer has ended, and the caller
    must remove `destination`.

    Args:
        packer: the program.
        destination: the file; it is created or truncated.
        offset: a multiple of 4096.
        write: called with a stream; it writes one whole tar archive to the stream. Exceptions of `write` are passed on.
        epoch: time of the file system, in seconds since 1970.
        root: mode, owner and time of the root folder, which mksquashfs takes as options.
        duplicates: whether to store files of equal content only once. mksquashfs compares each file with all files of
            the same size, so the time grows with the square of the number of such files (4.6.1: minutes for 100,000).
        processors: threads that compress; None for all processors that this process may use.
        compression: the compression of the blocks.
        level: the level of the compression.
        block_size: bytes, a power of two from 4 KiB to 1 MiB.
        memory_mib: size of the packer's buffers in MiB.
        total: bytes that `write` will write, for the progress; None if the number is unknown.
        on_event: called with the progress.
        timeout: seconds.

    Raises:
        FileUnusable: the file system is full, the quota is used up, or the file cannot be written.
        ToolFailed: the packer failed, was killed, or exceeded the timeout.
    """
    if offset % ALIGNMENT:
        raise ValueError(f"offset {offset} is not a multiple of {ALIGNMENT}")
    arguments: tuple[str, ...] = (
        *("-noappend", "-quiet", "-no-progress", "-offset", str(offset)),
        *("-comp", compression, "-Xcompression-level", str(level), "-b", str(block_size)),
        *("-mkfs-time", _time(epoch), "-root-time", _time(root.mtime)),
        *("-root-mode", f"{root.mode:04o}", "-root-uid", str(root.uid), "-root-gid", str(root.gid)),
    )
    if packer.version >= _DAMAGES_DUPLICATES or not duplicates:
        arguments += ("-no-duplicates",)
    limits = ("-processors", str(processors or usable_processors()), "-mem", f"{memory_mib}M")
    _create_file(destination)
    counted = _counting(write, destination, total, on_event)
    argv = [packer.path, "-", os.fspath(destination.absolute()), "-tar", *arguments, *limits]
    try:
        done = process.feed(argv, write=counted, timeout=timeout, env=environment(None))
    except ToolFailed as error:
        raise _explained(error, destination) from error
    size, used = _measure(destination, offset, compression, argv)
    notes = tuple(line for line in done.stdout.splitlines() if line.strip())
    return PackResult(size=size, bytes_used=used, compression=compression, arguments=arguments, notes=notes)


def _time(epoch: int) -> str:
    return str(min(max(epoch, 0), _LATEST))


def environment(path: str | None) -> Mapping[str, str]:
    """Return the environment of mksquashfs, without the caller's variables.

    mksquashfs fails with SOURCE_DATE_EPOCH, and a locale changes its messages.
    """
    return {"PATH": path or os.defpath, "LC_ALL": "C"}


def _create_file(destination: Path) -> None:
    """Create the file, to give a better error than mksquashfs."""
    try:
        fd = os.open(destination, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.close(fd)
    except OSError as error:
        raise FileUnusable(
            f"`{destination}` cannot be written",
            why=error.strerror,
            hint="check the folder, its permissions and its quota",
        ) from error


class _Counter(io.RawIOBase):
    """Passes writes on and reports the number of bytes."""

    def __init__(self, out: BinaryIO, report: Callable[[int], None]) -> None:
        super().__init__()
        self._out = out
        self._report = report
        self._done = 0
        self._next = _REPORT_EVERY

    def writable(self) -> bool:
        return True

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        written = self._out.write(data)
        self._done += written
        if self._done >= self._next:
            self._next = self._done + _REPORT_EVERY
            self._report(self._done)
        return written

    def flush(self) -> None:
        self._out.flush()

    def close(self) -> None:
        """Do nothing: the owner closes the pipe, and the garbage collector must not flush a broken pipe."""

    @property
    def done(self) -> int:
        return self._done


def _counting(write: Write, destination: Path, total: int | None, on_event: OnEvent) -> Write:
    def report(done: int) -> None:
        # `done` also counts headers and padding and can exceed `total`, so only `counted` reports the end.
        shown = done if total is None else min(done, total - 1)
        on_event(Event(phase="pack", what=destination.name, done=shown, total=total, unit="bytes"))

    def counted(out: BinaryIO) -> None:
        counter = _Counter(out, report)
        write(cast("BinaryIO", counter))
        end = counter.done if total is None else total
        on_event(Event(phase="pack", what=destination.name, done=end, total=end, unit="bytes"))

    return counted


_SIGNALS: dict[int, str] = {
    signal.SIGXFSZ: "a limit on the size of files stopped it (ulimit -f)",
    signal.SIGXCPU: "a limit on processor time stopped it (ulimit -t)",
}


def _explained(error: ToolFailed, destination: Path) -> HpcenvError:
    """Return a better error for causes that the user can remove."""
    for message, meaning in _NO_ROOM.items():
        if message in error.stderr:
            return FileUnusable(
                f"`{destination}` could not be written: {meaning}",
                why=f"`mksquashfs` reported: {message}",
                hint="free space there, or choose another folder for the images",
            )
    if error.status is not None and error.status < 0:
        return ToolFailed(
            f"`mksquashfs` was killed by signal {-error.status}",
            argv=error.argv,
            status=error.status,
            stderr=error.stderr,
            why=_SIGNALS.get(-error.status, "somebody or the kernel stopped it, most often for lack of memory"),
            hint=(
                "on a login node, convert in a job: ",
                Command("srun", "-c", "8", "hpcenv", "image", "pull", "REFERENCE"),
                "; in a job, ask for more memory (--mem) or time, or raise the limit (ulimit)",
            ),
        )
    return error


def _measure(destination: Path, offset: int, compression: Compression, argv: list[str]) -> tuple[int, int]:
    """Check the result, because a good exit status is not enough; return its padded size and the superblock's size."""
    try:
        with destination.open("rb") as file:
            size = os.fstat(file.fileno()).st_size - offset
            file.seek(offset)
            magic, found, major, minor, used = _SUPERBLOCK.unpack(file.read(_SUPERBLOCK.size))
    except (OSError, struct.error) as error:
        why = f"`{destination}`: {getattr(error, 'strerror', None) or 'it is too short'}"
        raise ToolFailed("`mksquashfs` left no file system", argv=tuple(argv), status=0, why=why) from error
    if magic != b"hsqs" or (major, minor) != (4, 0) or found != _NUMBERS[compression] or not 0 < used <= size:
        raise ToolFailed("`mksquashfs` left a damaged file system", argv=tuple(argv), status=0)
    _pad(destination, size)
    return size + -size % ALIGNMENT, used


def _pad(destination: Path, size: int) -> None:
    if size % ALIGNMENT:
        with destination.open("ab") as file:
            file.write(bytes(-size % ALIGNMENT))
