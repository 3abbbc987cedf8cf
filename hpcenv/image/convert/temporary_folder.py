"""Choose a temporary folder by its free space and the kind of its file system.

Runs on: LOGIN NODE and COMPUTE NODE.

An unpacked image has tens of thousands of small files. Unpacking 1.2 GB takes 8 to 10 s on a tmpfs and 11 to 37 s on a
disk. On NFS, Lustre or GPFS, unpacking often fails (no extended attributes, root squash; apptainer issues 1188, 2522,
3013, 3559). But a tmpfs uses memory (in a job, the memory of the job). So a tmpfs is chosen only if enough memory is
free.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import FileUnusable
from hpcenv.filesystem import mount_of

__all__ = ["candidates", "choose_temporary", "describe", "free_memory"]

# This memory must remain free for programs; mksquashfs of Apptainer 1.4.5 alone needs up to 1.25 GB for a tree of 1.2
# GB.
_MEMORY_LEFT = 2 << 30
_MEMORY_KINDS = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, kw_only=True)
class _FolderCandidate:
    path: Path
    kind: str
    free: int
    refusal: str | None


def candidates(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders to try, in order of preference: the job's, the user's, the system's."""
    named = [environ.get("SLURM_TMPDIR"), environ.get("TMPDIR"), "/var/tmp", "/tmp", "/dev/shm"]  # noqa: S108
    return tuple(dict.fromkeys(Path(name) for name in named if name and name.startswith("/")))


def choose_temporary(
    places: Sequence[Path], need_bytes: int, *, likely_bytes: int | None = None, memory: int | None = None
) -> Path:
    """Return the best folder that has `need_bytes` of space and in which programs may run.

    A tmpfs is best if 2 GiB of memory remain free. Otherwise the first folder that fits is best. Network file systems,
    `noexec` and read-only mounts, and folders without write access are never used.

    `likely_bytes` is for data of unknown size: the first folder with `likely_bytes` of space is best. If no folder has
    that much space, the disk with the most space is best, or, without a suitable disk, the tmpfs with the most space. A
    user whose build did not fit can name another folder with TMPDIR.

    Args:
        places: existing folders, see `candidates`.
        need_bytes: the largest number of bytes that will be written to the folder; with `likely_bytes`, the smallest
            number.
        likely_bytes: a number of bytes that is probably enough, if the size is not known; None if the size is known.
        memory: free memory in bytes; with None, the function determines this number.

    Raises:
        FileUnusable: no folder fits; the error lists the reason for each.
    """
    spare = free_memory() if memory is None else memory
    checked = [_check(path, need_bytes, spare) for path in places]
    usable = [place for place in checked if place.refusal is None]
    if not usable:
        raise FileUnusable(
            f"no temporary folder has the required {_size(need_bytes)}",
            why="\n".join(f"{place.path}: {place.refusal}" for place in checked) or "no folder was given",
            hint="set TMPDIR to a folder on a local disk with that much space",
        )
    if likely_bytes is None:
        return min(usable, key=lambda place: place.kind not in _MEMORY_KINDS).path
    for place in usable:
        if _check(place.path, likely_bytes, spare).refusal is None:
            return place.path
    return max(usable, key=lambda place: (place.kind not in _MEMORY_KINDS, place.free)).path


def _check(path: Path, need: int, memory: int) -> _FolderCandidate:
    mount = mount_of(Path(os.path.realpath(path)))
    kind = mount.kind if mount else "unknown"
    try:
        state = os.statvfs(path)
    except OSError as error:
        return _FolderCandidate(path=path, kind=kind, free=0, refusal=error.strerror or str(error))
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
        refusal = f"{has}: an unpacked image does not work on a network file system"
    elif free < need:
        refusal = f"{has}: too small"
    elif kind in _MEMORY_KINDS and memory < need + _MEMORY_LEFT:
        refusal = f"{has}, but {_size(memory)} of memory are free and {_size(need + _MEMORY_LEFT)} are needed"
    return _FolderCandidate(path=path, kind=kind, free=free, refusal=refusal)


def describe(path: Path) -> str:
    """Return the folder, the kind of its file system and its free space in words."""
    mount = mount_of(Path(os.path.realpath(path)))
    state = os.statvfs(path)
    return f"{path} ({mount.kind if mount else 'unknown'}, {_size(state.f_bavail * state.f_frsize)} free)"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 10**8 else f"{count / 1e6:.1f} MB"


def free_memory(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many bytes of memory this process can still use, within the limits of the machine and of its cgroup.

    The result is the smallest of these numbers: `MemAvailable` of proc(5); and, for the process's cgroup and each
    cgroup above it, `memory.max` minus `memory.current` (v2), or `memory.limit_in_bytes` minus `memory.usage_in_bytes`
    (v1). A limit that cannot be read is ignored, but an unknown MemAvailable counts as 0.
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
    free = []
    folder = root / group.lstrip("/")
    for place in (folder, *folder.parents):
        if not place.is_relative_to(root):
            break
        numbers = [line for name in (limit, used) for line in _lines(place / name)[:1]]
        if len(numbers) == 2 and all(number.strip().isdigit() for number in numbers):
            free.append(int(numbers[0]) - int(numbers[1]))
    return free


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
