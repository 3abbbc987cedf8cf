"""Facts of a host, without its GPUs: kernel, C library, Apptainer, Slurm, limits, RDMA.

Runs on: COMPUTE NODE. Standard library only.

Facts are read independently. If a fact cannot be read, the fact is unknown, its reason is recorded, and all other facts
are still read. A new fact needs a function here, a line in `FACTS`, and a row in project/fields.py.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcenv import process
from hpcenv.errors import HpcenvError, ToolFailed
from hpcenv.records.manifest import Value

# Programs on a local disk answer in milliseconds. This time is enough even for programs on a busy shared disk.
_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Facts of a host.

    Attributes:
        values: dotted name of a field -> its value.
        unknown: dotted name of a field -> why it could not be read.
    """

    values: dict[str, Value] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host to read.

    Attributes:
        environ: environment of the step. Programs are searched on its PATH.
        apptainer: the program that starts containers, by name or path.
        sys, proc, dev: the folders /sys, /proc and /dev.
        seconds: time limit for each program.
    """

    environ: Mapping[str, str]
    apptainer: str = "apptainer"
    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    seconds: float = _SECONDS


def read(host: Host) -> HostFacts:
    """Return the facts of a host that `FACTS` names."""
    facts = HostFacts()
    for name, read_fact in FACTS.items():
        try:
            facts.values[name] = read_fact(host)
        except (HpcenvError, OSError, ValueError) as error:
            facts.unknown[name] = _reason(error)
    return facts


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if isinstance(error, ToolFailed) and error.stderr.strip():
        return f"{error.what}: {error.stderr.strip().splitlines()[-1]}"
    return error.what if isinstance(error, HpcenvError) else str(error)


def _line(path: Path) -> str:
    text = path.read_text(errors="replace").strip()
    if not text:
        raise ValueError(f"{path} is empty")
    return text


def _kernel(host: Host) -> str:
    return _line(host.proc / "sys/kernel/osrelease")


# The names in /proc/cpuinfo that describe the type of a processor, for x86, arm64, POWER and RISC-V.
_CPU = ("model name", "CPU implementer", "CPU part", "CPU variant", "cpu", "uarch")


def _cpu_model(host: Host) -> str:
    """Return the type of the processor. If a node has several types, return all of them."""
    models = set()
    for block in _line(host.proc / "cpuinfo").split("\n\n"):
        pairs = (line.partition(":")[::2] for line in block.splitlines())
        known = {name.strip(): " ".join(value.split()) for name, value in pairs}
        models.add(" ".join(known[name] for name in _CPU if known.get(name)))
    if not any(models):
        raise ValueError(f"{host.proc / 'cpuinfo'} names no processor")
    return ", ".join(sorted(models - {""}))


def _glibc(_: Host) -> str:
    """Return the version of the C library that this Python uses: confstr(3), glibc only."""
    name, _space, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    if name != "glibc" or not version:
        raise ValueError("the C library is not glibc")
    return version


def _apptainer(host: Host) -> str:
    """Return a version: `1.5.3` for Apptainer, `singularity-ce 4.2.1` for SingularityCE; else `absent`."""
    output = _version(host.apptainer, host)
    if output is None:
        return "absent"
    match = re.fullmatch(r"(\S+) version (\S+)", output)
    if match is None:
        raise ValueError(f"`{host.apptainer} --version` printed {output[:80]!r}")
    return match[2] if match[1] == "apptainer" else f"{match[1]} {match[2]}"


def _slurm(host: Host) -> str:
    """Return the version of Slurm's programs; `absent` without Slurm. The controller is not contacted."""
    for program in ("scontrol", "srun"):
        output = _version(program, host)
        if output is not None:
            match = re.fullmatch(r"slurm(?:-wlm)? (\S+)", output)
            if match is None:
                raise ValueError(f"`{program} --version` printed {output[:80]!r}")
            return match[1]
    if "SLURM_JOB_ID" in host.environ:
        raise ValueError("neither scontrol nor srun is on PATH")
    return "absent"


def _version(program: str, host: Host) -> str | None:
    """Return the first line of `PROGRAM --version`; None if the program is not on PATH."""
    path = shutil.which(program, path=host.environ.get("PATH", os.defpath))
    if path is None:
        return None
    lines = process.run([path, "--version"], timeout=host.seconds, env=host.environ).stdout.strip().splitlines()
    return lines[0].strip() if lines else ""


def _memlock(_: Host) -> str:
    """Return how much memory a process of this step may lock, such as `unlimited` or `64 KiB`."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"


def _shm_mib(host: Host) -> int:
    status = os.statvfs(host.dev / "shm")
    return status.f_frsize * status.f_blocks >> 20


def _rdma(host: Host) -> tuple[str, ...]:
    """Return a text such as `mlx5_0:1 ACTIVE 400 Gb/sec (4X NDR) InfiniBand` for every port of every device.

    If the kernel has no RDMA support, the folder `infiniband` does not exist, and the result is empty.
    """
    classes = host.sys / "class"
    if "infiniband" not in os.listdir(classes):
        return ()
    devices = classes / "infiniband"
    return tuple(
        _port(device, devices / device / "ports" / port, port)
        for device in sorted(os.listdir(devices), key=_natural)
        for port in sorted(os.listdir(devices / device / "ports"), key=_natural)
    )


def _port(device: str, folder: Path, port: str) -> str:
    # The file contains a text such as `4: ACTIVE`.
    state = _line(folder / "state").rpartition(":")[2].strip()
    return f"{device}:{port} {state} {_line(folder / 'rate')} {_line(folder / 'link_layer')}"


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key with which mlx5_2 is before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


# Field -> how to read it.
FACTS: dict[str, Callable[[Host], Value]] = {
    "host.cpu-model": _cpu_model,
    "host.kernel": _kernel,
    "host.glibc": _glibc,
    "host.apptainer": _apptainer,
    "host.slurm": _slurm,
    "host.memlock": _memlock,
    "host.shm-mib": _shm_mib,
    "host.rdma": _rdma,
}
