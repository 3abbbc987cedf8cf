"""The resources of this node that the job uses: CPUs, memory, disks and network.

Runs on: COMPUTE NODE. Standard library only.

The figures are those of the job's cgroup, v1 or v2, with the names of Slurm 22.05 to 26.05 (machine/job_cgroup.py). If
Slurm made no cgroup, CPU time is the sum over the job's processes. The other figures are then unknown, because figures
of the whole node would include other jobs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hpcenv.incontainer import proc
from hpcenv.machine import job_cgroup
from hpcenv.machine.network import port_errors
from hpcenv.machine.tree import HostTree
from hpcenv.records.samples import NodeUse

# "no limit" of memory in cgroup v1 is the largest multiple of a page (kernel documentation, cgroup-v1/memory).
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, kw_only=True)
class NodePlaces:
    """The folders from which a node's figures are read.

    Attributes:
        root: the folder that has proc, sys and dev.
        tmp: the node's temporary folder.
    """

    root: Path = Path("/")
    tmp: Path = Path("/tmp")  # noqa: S108  (only its free space is read)


class NodeWatch:
    """Reads the figures of the node repeatedly. The use of CPUs is the use since the last call.

    Args of the constructor:
        processes: returns the processes of the job on this node; None if the processes are not known. If the job has no
            cgroup, the CPU time of these processes counts.
    """

    def __init__(self, places: NodePlaces, processes: Callable[[], Iterable[int]] | None = None) -> None:
        self._places = places
        self._processes = processes
        self._cgroup = _cgroup_of_step(places.root)
        self._before: tuple[float, float] | None = None
        self._peak: float | None = None

    def look(self, now: float) -> NodeUse:
        """Return the resources that the job uses; `now` is in seconds of any clock."""
        values: dict[str, float | None] = {}
        missing = f"{'' if self._processes else 'cpu, '}memory, pressure, read, written"
        unknown = {} if self._cgroup else {missing: "this job step has no cgroup"}
        for name, ask in self._questions().items():
            try:
                values[name] = ask()
            except (OSError, ValueError, IndexError) as error:
                unknown[name] = str(error) or type(error).__name__
        used = values.pop("cpu_seconds", None)
        if used is not None:
            before, self._before = self._before, (now, used)
            if before is not None and now > before[0]:
                values["cpu"] = max(0.0, used - before[1]) / (now - before[0])
        memory = values.get("memory")
        if memory is not None:
            # The kernel's own peak value is not used, because it includes cached files.
            self._peak = values["memory_peak"] = max(memory, self._peak or 0.0)
        cpus = values.pop("cpus", None)
        return NodeUse(**values, cpus=None if cpus is None else int(cpus), unknown=_together(unknown))

    def _questions(self) -> dict[str, Callable[[], float | None]]:
        root, tmp = self._places.root, self._places.tmp
        net = root / "proc/net/dev"
        ports = root / "sys/class/infiniband"
        own = {} if self._processes is None else {"cpu_seconds": self._cpu_of_processes}
        return {
            **(own if self._cgroup is None else self._cgroup.questions()),
            "cpus": lambda: len(os.sched_getaffinity(0)),
            "shm": lambda: _used(root / "dev/shm")[0],
            "shm_total": lambda: _used(root / "dev/shm")[1],
            "disk": lambda: _used(tmp)[0],
            "disk_total": lambda: _used(tmp)[1],
            "received": lambda: _of_devices(net, 0),
            "sent": lambda: _of_devices(net, 8),
            "rdma_received": lambda: _of_ports(ports, "port_rcv_data"),
            "rdma_sent": lambda: _of_ports(ports, "port_xmit_data"),
            "rdma_errors": lambda: _errors(root),
        }

    def _cpu_of_processes(self) -> float:
        return sum(map(proc.cpu_seconds, () if self._processes is None else self._processes()))


def _together(unknown: dict[str, str]) -> dict[str, str]:
    """Return one entry for all fields that are unknown for the same reason."""
    fields: dict[str, list[str]] = {}
    for name, why in unknown.items():
        fields.setdefault(why, []).append(name)
    return {", ".join(names): why for why, names in fields.items()}


# -- the cgroup of the job step -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Cgroup:
    """The cgroup of the job step: one folder in v2, one folder per controller in v1. A missing folder is None."""

    v2: Path | None = None
    memory: Path | None = None
    cpu: Path | None = None
    blocks: Path | None = None

    def questions(self) -> dict[str, Callable[[], float | None]]:
        if self.v2 is not None:
            return _of_v2(self.v2)
        return _of_v1(self)


def _cgroup_of_step(root: Path) -> _Cgroup | None:
    try:
        own = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    base = root / "sys/fs/cgroup"
    folders: dict[str, Path] = {}
    for kinds, path in job_cgroup.steps_of(own):
        if not kinds:
            return _Cgroup(v2=base / path.lstrip("/"))
        folders |= {kind: base / kind / path.lstrip("/") for kind in kinds}
    found = _Cgroup(memory=folders.get("memory"), cpu=folders.get("cpuacct"), blocks=folders.get("blkio"))
    return found if folders else None


def _of_v2(folder: Path) -> dict[str, Callable[[], float | None]]:
    return {
        "cpu_seconds": lambda: _keyed(folder / "cpu.stat", "usage_usec") / 1e6,
        "memory": lambda: _number(folder / "memory.current") - _cached(folder / "memory.stat", ""),
        "memory_limit": lambda: _limit(folder),
        "pressure_cpu": lambda: _pressure(folder / "cpu.pressure"),
        "pressure_memory": lambda: _pressure(folder / "memory.pressure"),
        "pressure_io": lambda: _pressure(folder / "io.pressure"),
        "read": lambda: _of_blocks(folder / "io.stat", "rbytes"),
        "written": lambda: _of_blocks(folder / "io.stat", "wbytes"),
    }


def _of_v1(cgroup: _Cgroup) -> dict[str, Callable[[], float | None]]:
    found: dict[str, Callable[[], float | None]] = {}
    cpu, memory, blocks = cgroup.cpu, cgroup.memory, cgroup.blocks
    if cpu is not None:
        found["cpu_seconds"] = lambda: _number(cpu / "cpuacct.usage") / 1e9
    if memory is not None:
        found["memory"] = lambda: _number(memory / "memory.usage_in_bytes") - _cached(memory / "memory.stat", "total_")
        found["memory_limit"] = lambda: _v1_limit(memory)
    if blocks is not None:
        service = blocks / "blkio.throttle.io_service_bytes"
        found["read"] = lambda: _of_service(service, "Read")
        found["written"] = lambda: _of_service(service, "Write")
    return found


def _number(path: Path) -> float:
    return float(_text(path))


def _keyed(path: Path, key: str) -> float:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return float(value)
    raise ValueError(f"{path.name} has no {key}")


def _cached(path: Path, prefix: str) -> float:
    """Return the bytes of cached files. If a job needs more memory, the kernel frees them first."""
    return _keyed(path, f"{prefix}active_file") + _keyed(path, f"{prefix}inactive_file")


def _limit(folder: Path) -> float | None:
    """Return the lowest memory limit of the step's cgroup and of the cgroups above it; None without a limit."""
    limits = []
    while (folder / "memory.max").exists():
        text = _text(folder / "memory.max")
        limits += [] if text == "max" else [float(text)]
        folder = folder.parent
    return min(limits, default=None)


def _v1_limit(folder: Path) -> float | None:
    limits = []
    while (folder / "memory.limit_in_bytes").exists():
        limits.append(_number(folder / "memory.limit_in_bytes"))
        folder = folder.parent
    lowest = min(limits, default=_NO_LIMIT)
    return None if lowest >= _NO_LIMIT else lowest


def _pressure(path: Path) -> float:
    """Return `avg10` of the line `some` (kernel documentation, accounting/psi)."""
    some = _text(path).splitlines()[0].split()
    return float(next(word.partition("=")[2] for word in some if word.startswith("avg10=")))


def _of_blocks(path: Path, key: str) -> float:
    words = _text(path).split()
    return sum(float(word.partition("=")[2]) for word in words if word.startswith(f"{key}="))


def _of_service(path: Path, kind: str) -> float:
    rows = (line.split() for line in _text(path).splitlines())
    return sum(float(row[2]) for row in rows if len(row) == 3 and row[1] == kind)


# -- the node -----------------------------------------------------------------------------


def _used(path: Path) -> tuple[float, float]:
    found = os.statvfs(path)
    return float((found.f_blocks - found.f_bfree) * found.f_frsize), float(found.f_blocks * found.f_frsize)


def _of_devices(path: Path, column: int) -> float:
    """Return a sum over the network devices of /proc/net/dev, without loopback."""
    rows = [line.partition(":") for line in _text(path).splitlines()[2:]]
    return sum(float(numbers.split()[column]) for name, _, numbers in rows if name.strip() != "lo")


def _of_ports(folder: Path, counter: str) -> float | None:
    """Return the bytes of all RDMA ports. The counters count words of four bytes (sysfs-class-infiniband)."""
    ports = list(folder.glob(f"*/ports/*/counters/{counter}"))
    return sum(_number(path) for path in ports) * 4 if ports else None


def _errors(root: Path) -> float | None:
    found = port_errors.read_counters(HostTree(root)).values
    return float(sum(found.values())) if found else None


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace").strip()
