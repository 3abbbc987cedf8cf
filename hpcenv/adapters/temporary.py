"""Where to unpack: temporary space by size and kind of file system.

Runs on: LOGIN NODE and COMPUTE NODE.

An unpacked image is tens of thousands of small files: on a tmpfs that takes 8 to 10 s for
1.2 GB, on a disk 11 to 37 s, and on NFS, Lustre or GPFS it often fails (no extended
attributes, root squash; apptainer issues 1188, 2522, 3013, 3559). A tmpfs is memory, though,
and inside a job the memory is the job's: so it is taken only where memory is plenty.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcenv.adapters.filesystem import mount_of
from hpcenv.errors import FileUnusable

__all__ = ["candidates", "choose_temporary", "free_memory"]

# What has to stay for the programs that work on the files; mksquashfs of Apptainer 1.4.5
# alone takes up to 1.25 GB for a 1.2 GB tree.
_MEMORY_LEFT = 2 << 30
_MEMORY_KINDS = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, kw_only=True)
class _Place:
    path: Path
    kind: str
    free: int
    refusal: str | None


def candidates(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders to try, in order of preference: the job's, the user's, the system's."""
    named = [environ.get("SLURM_TMPDIR"), environ.get("TMPDIR"), "/var/tmp", "/tmp", "/dev/shm"]  # noqa: S108
    return tuple(dict.fromkeys(Path(name) for name in named if name and name.startswith("/")))


def choose_temporary(places: Sequence[Path], need_bytes: int, *, memory: int | None = None) -> Path:
    """Return the best folder that can hold `need_bytes` and in which programs may be run.

    A tmpfs comes first if it fits into memory with 2 GiB to spare; then the first that fits,
    in the order given. Network file systems, `noexec` and read-only mounts, and folders
    that may not be written are refused.

    Args:
        places: existing folders, see `candidates`.
        need_bytes: what will be written there at most.
        memory: bytes of memory that are free; None finds out.

    Raises:
        FileUnusable: none will do; says of each what it has.
    """
    spare = free_memory() if memory is None else memory
    looked = [_look(path, need_bytes, spare) for path in places]
    usable = [place for place in looked if place.refusal is None]
    if not usable:
        raise FileUnusable(
            f"no temporary folder has the {_size(need_bytes)} that are needed",
            why="\n".join(f"{place.path}: {place.refusal}" for place in looked) or "none was named",
            hint="set TMPDIR to a folder on a local disk with that much space",
        )
    return min(usable, key=lambda place: place.kind not in _MEMORY_KINDS).path


def _look(path: Path, need: int, memory: int) -> _Place:
    mount = mount_of(Path(os.path.realpath(path)))
    kind = mount.kind if mount else "unknown"
    try:
        state = os.statvfs(path)
    except OSError as error:
        return _Place(path=path, kind=kind, free=0, refusal=error.strerror or str(error))
    free = state.f_bavail * state.f_frsize
    has = f"{kind}, {_size(free)} free"
    refusal = None
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        refusal = "not a folder that you can write to"
    elif state.f_flag & os.ST_RDONLY:
        refusal = f"{has}, mounted read-only"
    elif state.f_flag & os.ST_NOEXEC:
        refusal = f"{has}, mounted noexec"
    elif mount is not None and mount.network:
        refusal = f"{has}: a network file system cannot hold an unpacked image"
    elif free < need:
        refusal = f"{has}: too small"
    elif kind in _MEMORY_KINDS and memory < need + _MEMORY_LEFT:
        refusal = f"{has}, but {_size(memory)} of memory are free and {_size(need + _MEMORY_LEFT)} are needed"
    return _Place(path=path, kind=kind, free=free, refusal=refusal)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 10**8 else f"{count / 1e6:.1f} MB"


def free_memory(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory this process can still use: the machine's and its cgroup's.

    `MemAvailable` of proc(5); `memory.max` less `memory.current` of cgroup v2 for the
    process's group and those above, `memory.limit_in_bytes` less `memory.usage_in_bytes`
    for v1. What cannot be read limits nothing, but an unknown MemAvailable counts as 0.
    """
    limits = [_available(proc)]
    for line in _lines(proc / "self/cgroup"):
        controllers, _, group = line.partition(":")[2].partition(":")
        if controllers == "":
            limits += _headroom(cgroups, group, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            limits += _headroom(cgroups / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return max(0, min(limits))


def _available(proc: Path) -> int:
    for line in _lines(proc / "meminfo"):
        words = line.split()
        if words[:1] == ["MemAvailable:"] and words[1].isdigit():
            return int(words[1]) * 1024
    return 0


def _headroom(root: Path, group: str, limit: str, used: str) -> list[int]:
    found = []
    folder = root / group.lstrip("/")
    for place in (folder, *folder.parents):
        if not place.is_relative_to(root):
            break
        numbers = [line for name in (limit, used) for line in _lines(place / name)[:1]]
        if len(numbers) == 2 and all(number.strip().isdigit() for number in numbers):
            found.append(int(numbers[0]) - int(numbers[1]))
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
