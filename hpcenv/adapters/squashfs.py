"""Make a squashfs out of a tar stream, at an offset inside a file.

Runs on: LOGIN NODE, or a compute node that converts. Standard library only.

The work is done by `mksquashfs - OUT -tar` of squashfs-tools. `sqfstar` is the same program
under another name, so it is not looked for. What was found by reading and running it:

- Before 4.6 it has no use here. 4.5 reads tar, but gives the root folder the caller's user,
  group and time whatever the options say, and cuts a leading `../` off long link targets
  (`tar.c`, 4.5.1; mended in 4.6). 4.4 and older read no tar at all.
- 4.6.1 gives the same bytes for the same stream whatever the number of processors, the
  memory, the user and the umask. It refuses `SOURCE_DATE_EPOCH` next to `-mkfs-time`, and
  asks the host's passwd for user names in tar headers: the stream must not have any.
- 4.7 to 4.7.5 write damaged images, and say nothing, where duplicate files meet limited memory:
  the test image with 4.7.5 and `-mem 256M` or `512M` has unreadable blocks, each time (seen
  2026-11-20; upstream's issues 339, 344, 361 and 362 tell of the same code; 4.6.1 is right).
  With `-no-duplicates` it is right too, and 1.3 % larger.
- A folder costs the square of its entries while tar is read (a linear search per name):
  40,000 entries in one folder take 25 s to 45 s, 1,000 nothing worth naming.
- zstd level 1 is the default: for the test image (1.2 GB of files) the packer takes 5.3 s of
  processor time and 373 MB, at level 3 6.9 s and 352 MB, `gzip -9` 347 MB and ten times as
  long; `import torch` takes the same time from each (2026-11-20).
- zstd must have been compiled in, and needs no right or space besides the output file.
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

from hpcenv.adapters import process
from hpcenv.errors import FileUnusable, HpcenvError, ToolFailed, ToolMissing
from hpcenv.model.progress import Event, OnEvent, ignore
from hpcenv.model.tree import Entry

__all__ = ["ALIGNMENT", "LEAST_VERSION", "PackResult", "Packer", "find_packer", "pack", "usable_processors"]

LEAST_VERSION = (4, 6)
# From here on duplicates are stored twice; raise this only with a version that was tried.
_DAMAGES_DUPLICATES = (4, 7)
# The kernel mounts a squashfs at any multiple of 512; Apptainer aligns and pads to a page.
ALIGNMENT = 4096
# mksquashfs stores times as unsigned 32-bit numbers.
_LATEST = 2**32 - 1
_REPORT_EVERY = 16 << 20
_PROBE_SECONDS = 30.0
_VERSION = re.compile(r"\bversion (\d+)\.(\d+)(?:\.(\d+))?")
_SUPERBLOCK = struct.Struct("<4s16xH6xHH8xQ")
_ZSTD = 6
# What the C library says, in the locale that mksquashfs is given, and what it means here.
_NO_ROOM = {os.strerror(errno.ENOSPC): "the file system is full", os.strerror(errno.EDQUOT): "the quota is used up"}

Write = Callable[[BinaryIO], None]
# Ended from outside: by somebody, the kernel's lack of memory, or a limit on time or file size.
_STOPPED = frozenset(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGXCPU, signal.SIGXFSZ))
_EMPTY_ROOT = Entry(path=b"", kind="directory", mode=0o755)


@dataclass(frozen=True, kw_only=True)
class Packer:
    """A program that turns a tar stream into a squashfs.

    Attributes:
        kind: the command-line language it understands.
        path: the program.
        version: of squashfs-tools, as it names itself.
        origin: where it was found: `PATH` or `apptainer`.
    """

    kind: Literal["mksquashfs"]
    path: str
    version: tuple[int, ...]
    origin: Literal["PATH", "apptainer"]

    @property
    def name(self) -> str:
        """For records: program and version."""
        return f"{self.kind} {'.'.join(map(str, self.version))}"


@dataclass(frozen=True, kw_only=True)
class PackResult:
    """What `pack` made.

    Attributes:
        size: bytes from the offset to the end of the file; a multiple of 4096.
        bytes_used: of them, what the squashfs itself says it uses.
        compression: of its blocks.
        arguments: of the packer, without program and output, for the record.
        notes: what the packer had to say although it succeeded; normally empty.
    """

    size: int
    bytes_used: int
    compression: str
    arguments: tuple[str, ...]
    notes: tuple[str, ...]


# --- finding -----------------------------------------------------------------------------


def find_packer(environ_path: str | None, *, folder: Path | None = None) -> Packer:
    """Return the best program of this host for `pack`.

    Looked at, in this order: `mksquashfs` on PATH, and the one that Apptainer's own packages
    bring along since 1.4 (LIBEXECDIR of `apptainer buildcfg`). Each is tried with an empty
    archive: only that shows that zstd was compiled in.

    Args:
        environ_path: the caller's PATH; None for the process's own.
        folder: where it is tried out; None takes the system's temporary folder.

    Raises:
        ToolMissing: there is none that can be used; says what was found instead.
        ToolFailed: the trial was stopped from outside.
        FileUnusable: there is no room in `folder`.
    """
    found: list[str] = []
    for path, origin in _candidates(environ_path):
        version = _version(path)
        if version is None:
            found.append(f"`{path}` does not say its version")
        elif version[:2] < LEAST_VERSION:
            found.append(f"`{path}` is version {'.'.join(map(str, version))}, 4.6 or newer is needed")
        else:
            packer = Packer(kind="mksquashfs", path=path, version=version, origin=origin)
            problem = _problem(packer, folder)
            if problem is None:
                return packer
            found.append(f"`{path}`: {problem}")
    raise ToolMissing(
        "no program was found that packs an image as it streams in",
        why="; ".join(found) or "there is no `mksquashfs` on PATH, and Apptainer brings none along",
        hint="load or install squashfs-tools 4.6 or newer (or Apptainer 1.4 or newer from its own packages); "
        "without it `apptainer build` does the work, several times slower",
    )


def _candidates(environ_path: str | None) -> Iterator[tuple[str, Literal["PATH", "apptainer"]]]:
    """Yield one after the other: to ask Apptainer takes a tenth of a second, and is mostly not needed."""
    with contextlib.suppress(ToolMissing):
        yield process.find_tool("mksquashfs", needed_for="pack images", path=environ_path), "PATH"
    with contextlib.suppress(HpcenvError):
        apptainer = process.find_tool("apptainer", needed_for="pack images", path=environ_path)
        said = process.run([apptainer, "buildcfg"], timeout=_PROBE_SECONDS, env=environment(environ_path)).stdout
        folder = re.search(r"^LIBEXECDIR=(/.*)$", said, re.MULTILINE)
        own = Path(folder.group(1), "apptainer", "bin", "mksquashfs") if folder else None
        if own is not None and os.access(own, os.X_OK):
            yield str(own), "apptainer"


def _version(path: str) -> tuple[int, ...] | None:
    """Read `mksquashfs version 4.6.1 (2023/03/25)`; the exit status differs between versions."""
    try:
        said = process.run([path, "-version"], timeout=_PROBE_SECONDS, env=environment(None), accept=(0, 1))
    except HpcenvError:
        return None
    numbers = _VERSION.search(said.stdout)
    return tuple(int(number) for number in numbers.groups() if number is not None) if numbers else None


def _problem(packer: Packer, folder: Path | None) -> str | None:
    """Pack nothing, with the very options that `pack` uses."""
    try:
        place = tempfile.TemporaryDirectory(prefix="hpcenv-", dir=folder)
    except OSError as error:
        raise FileUnusable(
            f"`{packer.path}` cannot be tried out",
            why=f"`{folder or 'the temporary folder'}`: {error.strerror or error}",
            hint="free space there, or set TMPDIR to a folder that has some",
        ) from error
    with place as inside:
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
                raise  # says nothing about the program; the slower way makes other bytes
            return (error.stderr.strip().splitlines() or [error.what])[0]
    return None


def usable_processors() -> int:
    """Return how many processors this process may use: its affinity, cut by its cgroup's quota."""
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
    """Return the processors that a cgroup's `cpu.max` gives, rounded up; None where it sets no limit."""
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
    root: Entry,
    duplicates: bool = True,
    processors: int | None = None,
    level: int = 1,
    block_size: int = 128 * 1024,
    memory_mib: int = 256,
    total: int | None = None,
    on_event: OnEvent = ignore,
    timeout: float = 3600.0,
) -> PackResult:
    """Pack what `write` writes, one whole tar archive, into `destination` from `offset` on.

    The result depends on the stream, `epoch`, `level`, `block_size` and the packer's version
    only. Bytes before `offset` are zero. On any failure the packer has ended, and what lies
    at `destination` is of no use: remove it.

    Args:
        destination: is created, or cut to nothing first.
        offset: a multiple of 4096.
        write: gets the packer's input; its own errors are passed on.
        epoch: seconds since 1970 for the file system itself.
        duplicates: store files of equal content once. mksquashfs compares each file with all of
            its size, which costs the square of their number (4.6.1: minutes for 100,000).
        root: mode, owner and time of the root folder, which a packer takes as options.
        processors: how many threads compress; None for all that this process may use.
        level: of zstd.
        block_size: bytes, a power of two from 4 KiB to 1 MiB.
        memory_mib: for the packer's buffers, in MiB.
        total: bytes that `write` will write, where known, for progress.
        timeout: seconds.

    Raises:
        FileUnusable: the file system is full, the quota used up, or the file cannot be written.
        ToolFailed: the packer failed, was killed or did not end in time.
    """
    if offset % ALIGNMENT:
        raise ValueError(f"offset {offset} is no multiple of {ALIGNMENT}")
    arguments: tuple[str, ...] = (
        *("-noappend", "-quiet", "-no-progress", "-offset", str(offset)),
        *("-comp", "zstd", "-Xcompression-level", str(level), "-b", str(block_size)),
        *("-mkfs-time", _time(epoch), "-root-time", _time(root.mtime)),
        *("-root-mode", f"{root.mode:04o}", "-root-uid", str(root.uid), "-root-gid", str(root.gid)),
    )
    if packer.version >= _DAMAGES_DUPLICATES or not duplicates:
        arguments += ("-no-duplicates",)
    limits = ("-processors", str(processors or usable_processors()), "-mem", f"{memory_mib}M")
    _make_place(destination)
    counted = _counting(write, destination, total, on_event)
    argv = [packer.path, "-", os.fspath(destination.absolute()), "-tar", *arguments, *limits]
    try:
        done = process.feed(argv, write=counted, timeout=timeout, env=environment(None))
    except ToolFailed as error:
        raise _explained(error, destination) from error
    size, used = _measure(destination, offset, argv)
    notes = tuple(line for line in done.stdout.splitlines() if line.strip())
    return PackResult(size=size, bytes_used=used, compression="zstd", arguments=arguments, notes=notes)


def _time(epoch: int) -> str:
    return str(min(max(epoch, 0), _LATEST))


def environment(path: str | None) -> Mapping[str, str]:
    """Return what packers run in: nothing of the caller's.

    SOURCE_DATE_EPOCH stops mksquashfs, a locale changes its words.
    """
    return {"PATH": path or os.defpath, "LC_ALL": "C"}


def _make_place(destination: Path) -> None:
    """Say in our words what is wrong with the place; mksquashfs is terse about it."""
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
    """Passes writes on and reports how much went by."""

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
        """Leave the pipe to its owner: the garbage collector would flush one that is closed or broken."""

    @property
    def done(self) -> int:
        return self._done


def _counting(write: Write, destination: Path, total: int | None, on_event: OnEvent) -> Write:
    def report(done: int) -> None:
        # Headers and padding come on top of the files' bytes: the end is said once, below.
        shown = done if total is None else min(done, total - 1)
        on_event(Event(phase="pack", what=destination.name, done=shown, total=total, unit="bytes"))

    def counted(out: BinaryIO) -> None:
        counter = _Counter(out, report)
        write(cast("BinaryIO", counter))
        end = counter.done if total is None else total
        on_event(Event(phase="pack", what=destination.name, done=end, total=end, unit="bytes"))

    return counted


def _explained(error: ToolFailed, destination: Path) -> HpcenvError:
    """Name the causes that a person can do something about."""
    for said, meaning in _NO_ROOM.items():
        if said in error.stderr:
            return FileUnusable(
                f"`{destination}` could not be written: {meaning}",
                why=f"`mksquashfs` said: {said}",
                hint="free space there, or choose another folder for the images",
            )
    if error.status is not None and error.status < 0:
        return ToolFailed(
            f"`mksquashfs` was killed by signal {-error.status}",
            argv=error.argv,
            status=error.status,
            stderr=error.stderr,
            why="somebody or the kernel stopped it; on a login node a limit on memory, time or file size",
            hint="run the conversion inside a job, where memory and time are yours",
        )
    return error


def _measure(destination: Path, offset: int, argv: list[str]) -> tuple[int, int]:
    """Return what was added, and what the squashfs says of itself; an exit status alone is believed too easily."""
    try:
        with destination.open("rb") as file:
            size = os.fstat(file.fileno()).st_size - offset
            file.seek(offset)
            magic, compression, major, minor, used = _SUPERBLOCK.unpack(file.read(_SUPERBLOCK.size))
    except (OSError, struct.error) as error:
        why = f"`{destination}`: {getattr(error, 'strerror', None) or 'it is too short'}"
        raise ToolFailed("`mksquashfs` left no file system", argv=tuple(argv), status=0, why=why) from error
    if magic != b"hsqs" or (major, minor) != (4, 0) or compression != _ZSTD or not 0 < used <= size:
        raise ToolFailed("`mksquashfs` left a damaged file system", argv=tuple(argv), status=0)
    _pad(destination, size)
    return size + -size % ALIGNMENT, used


def _pad(destination: Path, size: int) -> None:
    if size % ALIGNMENT:
        with destination.open("ab") as file:
            file.write(bytes(-size % ALIGNMENT))
