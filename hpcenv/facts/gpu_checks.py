"""Checks of the GPUs of a node, from the reports of NVML or the files of AMD's driver.

Runs on: COMPUTE NODE, and any machine with GPUs, because no check needs Slurm. Standard library only.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcenv.machine import job_cgroup
from hpcenv.machine.gpu_health import GpuHealth
from hpcenv.machine.gpus import GpuFacts
from hpcenv.records.checks import CheckOutcome
from hpcenv.text import plural

# The actions that the driver can require (nvml.h, nvmlDeviceGpuRecoveryAction, CUDA 13.1).
_ACTIONS = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain the GPU's peers",
    4: "drain and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}
_MANY_CORRECTED = 1_000_000
_MUCH_MEMORY_MIB = 1024
# Reasons for a low clock that are a problem (nvml.h, nvmlClocksEventReasons): hardware slowdown, thermal slowdown,
# power brake. Bits 1 (idle) and 4 (power cap) are normal.
_SLOW = {0x8: "hardware slowdown", 0x40: "too hot", 0x80: "power brake"}
_PROHIBITED = 2
_FABRIC_DONE = 3


@dataclass(frozen=True, kw_only=True)
class GpuNode:
    """The values of the node that the checks of GPUs need.

    Attributes:
        found: what NVML reported.
        wanted: the number of GPUs that the run needs on this node.
        environ: environment variables of the step.
        proc, kmsg: the paths of /proc and /dev/kmsg.
    """

    found: GpuFacts
    wanted: int
    environ: Mapping[str, str]
    proc: Path = Path("/proc")
    kmsg: Path = Path("/dev/kmsg")


def check_gpus(node: GpuNode) -> Iterator[CheckOutcome]:
    """Yield the outcome of every check of GPUs."""
    yield _count(node)
    yield _lost(node)
    if not node.found.health:
        state, why = _why_no_health(node.found)
        yield from (CheckOutcome(id=name, state=state, found=why) for name in (*_RULES, *_OTHERS))
        return
    gpus = _of_this_job(node)
    for name, (query, bad) in _RULES.items():
        yield _over_all(name, gpus, query, bad)
    yield _same_links(gpus)
    yield from _processes(node, gpus)
    yield _xid(node, gpus)


_OTHERS = ("gpu.nvlink", "gpu.stray", "gpu.shared", "gpu.xid")


def _why_no_health(found: GpuFacts) -> tuple[Literal["not-run", "unknown"], str]:
    """Return the state of all checks, and its reason, for a node on which NVML listed no GPU."""
    if found.values.get("host.gpu-count") == 0:
        return "not-run", "no GPU"
    if "pynvml is not installed" in found.reason:
        return "not-run", "pynvml is not installed for this Python"
    return "unknown", found.problem or found.reason or "NVML listed no GPUs"


def _count(node: GpuNode) -> CheckOutcome:
    count = node.found.values.get("host.gpu-count")
    if not isinstance(count, int):
        return CheckOutcome(id="gpu.count", state="unknown", found=node.found.unknown.get("host.gpu-count", ""))
    enough = count >= node.wanted
    return CheckOutcome(
        id="gpu.count", state="fine" if enough else "failed", found=str(count), limit=f">= {node.wanted}"
    )


def _lost(node: GpuNode) -> CheckOutcome:
    found = node.found
    if found.problem or found.hangs:
        what = found.problem or f"the driver does not answer: {found.reason}"
        return CheckOutcome(id="gpu.lost", state="failed", found=what)
    if found.health:
        return CheckOutcome(id="gpu.lost", state="fine", found=f"{len(found.health)} answer")
    state, why = _why_no_health(found)
    return CheckOutcome(id="gpu.lost", state=state, found=why)


def _of_this_job(node: GpuNode) -> Sequence[GpuHealth]:
    """Return the GPUs that this job may use.

    If Slurm does not hide the GPUs of other jobs, NVML lists all GPUs of the node.
    """
    listed = node.found.health
    words = [word for word in node.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    if len(listed) <= node.wanted or not words:
        return listed
    chosen = [gpu for at, gpu in enumerate(listed) if str(at) in words or (gpu.uuid and gpu.uuid in words)]
    return chosen or listed


# -- rules for single GPUs --------------------------------------------------------

_Bad = Callable[[tuple[int, ...]], str]


def _over_all(name: str, gpus: Sequence[GpuHealth], query: str, bad: _Bad) -> CheckOutcome:
    """Apply a rule to each GPU. `bad` gets the numbers of a GPU and returns the problem; empty without a problem."""
    wrong = {gpu: what for gpu in gpus if query in gpu.numbers and (what := bad(gpu.numbers[query]))}
    if wrong:
        found = "; ".join(dict.fromkeys(wrong.values()))
        return CheckOutcome(id=name, state="failed", found=found, note=_which(wrong, gpus))
    unread = {gpu: gpu.unread[query] for gpu in gpus if query in gpu.unread}
    if unread:
        return CheckOutcome(id=name, state="unknown", found=next(iter(unread.values())), note=_which(unread, gpus))
    if not any(query in gpu.numbers for gpu in gpus):
        return CheckOutcome(id=name, state="not-run", found="these GPUs, or their driver, do not report it")
    return CheckOutcome(id=name, state="fine", found=plural(sum(query in gpu.numbers for gpu in gpus), "GPU"))


def _which(some: Iterable[GpuHealth], gpus: Sequence[GpuHealth]) -> str:
    return "; ".join(f"GPU {gpus.index(gpu)} ({gpu.bus or 'bus unknown'}, {gpu.uuid or 'no UUID'})" for gpu in some)


def _recovery(numbers: tuple[int, ...]) -> str:
    return f"the driver asks to {_ACTIONS.get(numbers[0], f'do {numbers[0]}')}" if numbers[0] else ""


def _uncorrected(numbers: tuple[int, ...]) -> str:
    return f"{numbers[0]} uncorrected memory errors" if numbers[0] else ""


def _corrected(numbers: tuple[int, ...]) -> str:
    return f"{numbers[0]} corrected memory errors" if numbers[0] > _MANY_CORRECTED else ""


def _remap_failed(numbers: tuple[int, ...]) -> str:
    return "a memory row could not be replaced" if sum(numbers[3:4]) else ""


def _remap_pending(numbers: tuple[int, ...]) -> str:
    return "memory rows are to be replaced at the next reset" if sum(numbers[2:3]) else ""


def _retired(numbers: tuple[int, ...]) -> str:
    return "memory pages are to be retired at the next reset" if numbers[0] else ""


def _throttled(numbers: tuple[int, ...]) -> str:
    return ", ".join(word for bit, word in _SLOW.items() if numbers[0] & bit)


def _narrow(numbers: tuple[int, ...]) -> str:
    now, most = numbers[:2]
    return f"x{now} instead of x{most}" if now < most else ""


def _fabric(numbers: tuple[int, ...]) -> str:
    state, status = numbers[:2]
    # State 0 means that this GPU has no NVLink switches.
    if state == 0 or (state, status) == (_FABRIC_DONE, 0):
        return ""
    return f"state {state} (3 is done), status {status} (0 is success)"


def _compute_mode(numbers: tuple[int, ...]) -> str:
    return "compute mode `prohibited`" if numbers[0] == _PROHIBITED else ""


def _persistence(numbers: tuple[int, ...]) -> str:
    return "" if numbers[0] else "persistence mode is off"


_RULES: dict[str, tuple[str, _Bad]] = {
    "gpu.recovery": ("recovery", _recovery),
    "gpu.ecc.uncorrected": ("ecc-uncorrected", _uncorrected),
    "gpu.ecc.corrected": ("ecc-corrected", _corrected),
    "gpu.remap.failed": ("remapped", _remap_failed),
    "gpu.remap.pending": ("remapped", _remap_pending),
    "gpu.retired": ("retired-pending", _retired),
    "gpu.throttle": ("throttle", _throttled),
    "gpu.pcie.width": ("pcie-width", _narrow),
    "gpu.fabric": ("fabric", _fabric),
    "gpu.compute-mode": ("compute-mode", _compute_mode),
    "gpu.persistence": ("persistence", _persistence),
}


def _same_links(gpus: Sequence[GpuHealth]) -> CheckOutcome:
    """Compare the numbers of NVLink links of the GPUs. A GPU with a broken link has fewer links than the other GPUs."""
    name = "gpu.nvlink"
    counts = {gpu: gpu.numbers["nvlink"] for gpu in gpus if "nvlink" in gpu.numbers}
    unread = {gpu: gpu.unread["nvlink"] for gpu in gpus if "nvlink" in gpu.unread}
    if unread:
        return CheckOutcome(id=name, state="unknown", found=next(iter(unread.values())), note=_which(unread, gpus))
    if len(gpus) < 2 or not any(up for up, _ in counts.values()):
        why = "one GPU" if len(gpus) < 2 else "these GPUs have no NVLink that is up"
        return CheckOutcome(id=name, state="not-run", found=why)
    most = max(up for up, _ in counts.values())
    fewer = {gpu: up for gpu in gpus if (up := counts.get(gpu, (0, 0))[0]) < most}
    if not fewer:
        return CheckOutcome(id=name, state="fine", found=f"{most} links of each GPU")
    found = ", ".join(f"{up} links on {count} GPU(s)" for up, count in Counter(fewer.values()).items())
    return CheckOutcome(id=name, state="failed", found=found, limit=f"{most} on each", note=_which(fewer, gpus))


# -- processes of others --------------------------------------------------------------------


def _processes(node: GpuNode, gpus: Sequence[GpuHealth]) -> Iterator[CheckOutcome]:
    """Look for processes that use the job's GPUs but belong to no step of this job."""
    if len(gpus) > max(node.wanted, 1):
        why = "which of the listed GPUs are this job's is not known"
        yield from (CheckOutcome(id=name, state="not-run", found=why) for name in ("gpu.stray", "gpu.shared"))
        return
    used: dict[int, int] = {}
    for gpu in gpus:
        numbers = gpu.numbers.get("processes", ())
        for pid, mib in zip(numbers[::2], numbers[1::2], strict=False):
            used[pid] = used.get(pid, 0) + mib
    used = {**dict.fromkeys(_open_devices(node, gpus), 0), **used}
    foreign = {pid: mib for pid, mib in used.items() if _is_foreign(node, pid)}
    large = {pid: mib for pid, mib in foreign.items() if mib > _MUCH_MEMORY_MIB}
    yield _about_processes("gpu.stray", node, large, gpus)
    yield _about_processes("gpu.shared", node, {p: m for p, m in foreign.items() if p not in large}, gpus)


def _about_processes(name: str, node: GpuNode, some: Mapping[int, int], gpus: Sequence[GpuHealth]) -> CheckOutcome:
    if some:
        found = ", ".join(f"pid {pid} ({_program(node, pid)}): {mib} MiB" for pid, mib in some.items())
        return CheckOutcome(id=name, state="failed", found=found)
    unread = {gpu: gpu.unread["processes"] for gpu in gpus if "processes" in gpu.unread}
    if unread:
        return CheckOutcome(id=name, state="unknown", found=next(iter(unread.values())), note=_which(unread, gpus))
    return CheckOutcome(id=name, state="fine", found="none")


def _open_devices(node: GpuNode, gpus: Sequence[GpuHealth]) -> Iterator[int]:
    """Yield processes of this user that have opened the device file of a GPU, because they may use this GPU soon."""
    devices = {f"/dev/nvidia{gpu.numbers['minor'][0]}" for gpu in gpus if gpu.numbers.get("minor")}
    for entry in os.listdir(node.proc):
        folder = node.proc / entry
        try:
            if not entry.isdigit() or folder.stat().st_uid != os.getuid():
                continue
            if any(os.readlink(folder / "fd" / name) in devices for name in os.listdir(folder / "fd")):
                yield int(entry)
        except OSError:
            continue  # the process has ended, or belongs to a different user


def _is_foreign(node: GpuNode, pid: int) -> bool:
    """Return whether a process exists and belongs neither to a step of this job nor to this check."""
    folder = node.proc / str(pid)
    if not folder.exists() or _program(node, pid).startswith("nvidia-"):  # a daemon for MPS or persistence
        return False
    job = node.environ.get("SLURM_JOB_ID", "")
    if not job:
        return pid != os.getpid()
    try:
        if job_cgroup.is_of((folder / "cgroup").read_text(), node.environ):
            return False
        return f"SLURM_JOB_ID={job}".encode() not in (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return True


def _program(node: GpuNode, pid: int) -> str:
    try:
        return (node.proc / str(pid) / "comm").read_text().strip()[:40]
    except OSError:
        return "unknown program"


# -- the kernel's log -----------------------------------------------------------------------

_XID = re.compile(rb"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
# Errors that need an administrator, from NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors, 2026-11). Errors of
# a program (13, 31, 43, 45, 94) and corrected errors (63, 92) are not in this set.
_BAD_XID = frozenset((48, 54, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158))
_MOST_KMSG = 16 * 2**20


def _xid(node: GpuNode, gpus: Sequence[GpuHealth]) -> CheckOutcome:
    """Look for the driver's reports of errors since the node's boot."""
    if node.found.vendor != "nvidia":
        return CheckOutcome(id="gpu.xid", state="not-run", found="only NVIDIA's driver reports Xid errors")
    try:
        log = _read_kmsg(node.kmsg)
    except OSError as error:
        return CheckOutcome(id="gpu.xid", state="unknown", found=f"{node.kmsg}: {error.strerror}")
    ours = {gpu.bus.rpartition(".")[0].lower() for gpu in gpus if gpu.bus}
    codes = Counter(
        int(code) for bus, code in _XID.findall(log) if int(code) in _BAD_XID and (not ours or _bus(bus) in ours)
    )
    if not codes:
        return CheckOutcome(id="gpu.xid", state="fine", found="none")
    return CheckOutcome(
        id="gpu.xid", state="failed", found=", ".join(f"Xid {code}, {count} times" for code, count in codes.items())
    )


def _bus(text: bytes) -> str:
    """Return a bus address in the form `0000:01:00`. The kernel writes `0000:01:00` or `00000000:01:00.0`."""
    return text.decode().lower().split(".")[0][-len("0000:00:00") :]


def _read_kmsg(path: Path) -> bytes:
    """Return the kernel's messages. Each read of the file returns one message, until all messages were read.

    Raises:
        OSError: this user may not read the file (kernel.dmesg_restrict), or there is no such file.
    """
    parts: list[bytes] = []
    size = 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while size < _MOST_KMSG:
            try:
                part = os.read(descriptor, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # messages were overwritten during this read
                continue
            if not part:
                break
            parts.append(part)
            size += len(part)
    finally:
        os.close(descriptor)
    return b"".join(parts)
