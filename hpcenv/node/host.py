"""Facts of a host besides its GPUs: kernel, C library, Apptainer, Slurm, limits, RDMA.

Runs on: COMPUTE NODE. Standard library only.

Each fact is independent: one that cannot be read is unknown with its reason and hides no other.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from hpcenv.adapters import process
from hpcenv.dataclass import dataclass, field
from hpcenv.errors import HpcenvError, ToolFailed
from hpcenv.wire import Value

# Both answer in milliseconds from a local disk; on a busy shared one this is still enough.
_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Fields by their dotted names, and reasons for those that could not be read."""

    values: dict[str, Value] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


def read(
    environ: Mapping[str, str],
    *,
    apptainer: str = "apptainer",
    sys: Path = Path("/sys"),
    proc: Path = Path("/proc"),
    dev: Path = Path("/dev"),
    seconds: float = _SECONDS,
) -> HostFacts:
    """Return what this host is.

    Fields: `host.kernel`, `host.glibc`, `host.apptainer` and `host.slurm` (a version or
    `absent`), `host.memlock` (`unlimited` or `64 KiB`: what a process of this step may lock
    in memory), `host.shm-mib`, `host.rdma` (one text per port: device and port, state, rate,
    link layer).

    Args:
        environ: environment of the step: its PATH finds the programs.
        apptainer: the program that starts containers, by name or path.
        sys, proc, dev: where /sys, /proc and /dev are.
        seconds: time limit for each program.
    """
    found = HostFacts()
    questions: dict[str, Callable[[], Value]] = {
        "host.kernel": lambda: _line(proc / "sys/kernel/osrelease"),
        "host.glibc": _glibc,
        "host.apptainer": lambda: _apptainer(apptainer, environ, seconds),
        "host.slurm": lambda: _slurm(environ, seconds),
        "host.memlock": _memlock,
        "host.shm-mib": lambda: _mib(dev / "shm"),
        "host.rdma": lambda: _rdma(sys / "class"),
    }
    for name, ask in questions.items():
        try:
            found.values[name] = ask()
        except (HpcenvError, OSError, ValueError) as error:
            found.unknown[name] = _reason(error)
    return found


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


def _glibc() -> str:
    """Return the version of the C library that Python runs on: confstr(3), glibc only."""
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    if name != "glibc" or not version:
        raise ValueError("the C library is not glibc")
    return version


def _apptainer(program: str, environ: Mapping[str, str], seconds: float) -> str:
    """Return `1.5.3`, or `singularity-ce 4.2.1` for the other one under the same name."""
    version = _version(program, environ, seconds)
    if version is None:
        return "absent"
    match = re.fullmatch(r"(\S+) version (\S+)", version)
    if match is None:
        raise ValueError(f"`{program} --version` said {version[:80]!r}")
    return match[2] if match[1] == "apptainer" else f"{match[1]} {match[2]}"


def _slurm(environ: Mapping[str, str], seconds: float) -> str:
    """Return the version of Slurm's programs; the controller is not asked."""
    for program in ("scontrol", "srun"):
        version = _version(program, environ, seconds)
        if version is not None:
            match = re.fullmatch(r"slurm(?:-wlm)? (\S+)", version)
            if match is None:
                raise ValueError(f"`{program} --version` said {version[:80]!r}")
            return match[1]
    if "SLURM_JOB_ID" in environ:
        raise ValueError("neither scontrol nor srun is on PATH")
    return "absent"


def _version(program: str, environ: Mapping[str, str], seconds: float) -> str | None:
    """Return what a program says of its version, None when it is not on PATH."""
    path = shutil.which(program, path=environ.get("PATH", os.defpath))
    if path is None:
        return None
    said = process.run([path, "--version"], timeout=seconds, env=environ).stdout.strip().splitlines()
    return said[0].strip() if said else ""


def _memlock() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"


def _mib(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_frsize * status.f_blocks >> 20


def _rdma(classes: Path) -> tuple[str, ...]:
    """Return `mlx5_0:1 ACTIVE 400 Gb/sec (4X NDR) InfiniBand` for every port of every device.

    Without the kernel's RDMA support there is no such folder, and no such device.
    """
    names = os.listdir(classes)
    if "infiniband" not in names:
        return ()
    devices = classes / "infiniband"
    return tuple(
        _port(device, devices / device / "ports" / port, port)
        for device in sorted(os.listdir(devices), key=_natural)
        for port in sorted(os.listdir(devices / device / "ports"), key=_natural)
    )


def _port(device: str, folder: Path, port: str) -> str:
    # `4: ACTIVE`
    state = _line(folder / "state").rpartition(":")[2].strip()
    return f"{device}:{port} {state} {_line(folder / 'rate')} {_line(folder / 'link_layer')}"


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort mlx5_2 before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
