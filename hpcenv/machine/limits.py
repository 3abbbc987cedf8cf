"""Checks of the limits for a process of this step: open files, cores, shared memory, memory.

Runs on: COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hpcenv.incontainer.cores import count_cores
from hpcenv.records.checks import CheckOutcome
from hpcenv.records.manifest import Manifest
from hpcenv.text import plural

_LEAST_FILES = 1024
_FILES_PER_RANK = 4
# The number of threads for each rank: torch, its data loaders and NCCL. A rank on eight cores has about 200 threads.
_THREADS_PER_RANK = 512
# If the limit is above this number, the running threads need not be counted.
_MANY_THREADS = 65536
# Since this version, NCCL gives its threads a stack that is large enough.
_STACK_OF_ITS_OWN = (2, 28)
_SHM_BYTES = 2**30
# RealMemory in Slurm includes memory that the kernel keeps for itself. So a node usually has a little less memory.
_USUAL_PART = 0.9


def check_limits(
    manifest: Manifest, environ: Mapping[str, str], *, proc: Path = Path("/proc"), dev: Path = Path("/dev")
) -> Iterator[CheckOutcome]:
    """Yield the outcomes of the checks of limits of this process, and of memory of this node."""
    yield check_open_files(manifest)
    yield check_processes(manifest, proc)
    yield check_stack(manifest)
    yield check_affinity(manifest)
    yield from check_shm(manifest, dev / "shm")
    yield check_memory(environ, proc)


def check_open_files(manifest: Manifest) -> CheckOutcome:
    """Compare the limit of open files with what the rendezvous of all ranks needs."""
    needed = max(_LEAST_FILES, _FILES_PER_RANK * manifest.nodes * manifest.nproc_per_node)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    return CheckOutcome(
        id="sys.nofile",
        state="fine" if unlimited or soft >= needed else "failed",
        found="unlimited" if unlimited else str(soft),
        limit=f">= {needed}",
        note="" if unlimited or soft >= needed else f"the hard limit is {hard}",
    )


def check_processes(manifest: Manifest, proc: Path = Path("/proc")) -> CheckOutcome:
    """Compare this user's limit of processes and threads with the running threads and the threads of the ranks."""
    name = "sys.nproc"
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY:
        return CheckOutcome(id=name, state="fine", found="unlimited")
    if os.geteuid() == 0:
        return CheckOutcome(id=name, state="not-run", found="the limit does not apply to root")
    needed = _THREADS_PER_RANK * manifest.nproc_per_node
    # Counting the threads of this user takes some ms, so the threads are counted only if their number can matter.
    running = _threads_of_user(proc) if soft < _MANY_THREADS else 0
    return CheckOutcome(
        id=name,
        state="fine" if soft - running >= needed else "failed",
        found=f"{soft}, of which {running} are in use" if running else str(soft),
        limit=f">= {needed} free",
        note="" if soft - running >= needed else f"the hard limit is {hard}",
    )


def _threads_of_user(proc: Path) -> int:
    """Return how many threads this user's processes have on this node. RLIMIT_NPROC counts threads (getrlimit(2))."""
    count = 0
    for entry in os.listdir(proc):
        with suppress(OSError):
            if entry.isdecimal() and (proc / entry).stat().st_uid == os.getuid():
                count += len(os.listdir(proc / entry / "task"))
    return count


def check_stack(manifest: Manifest) -> CheckOutcome:
    """Check whether the stack has no limit. glibc then gives a thread only 2 MB, too little for NCCL before 2.28."""
    name = "sys.stack"
    if manifest.backend != "nccl":
        return CheckOutcome(id=name, state="not-run", found="the backend is gloo")
    if resource.getrlimit(resource.RLIMIT_STACK)[0] != resource.RLIM_INFINITY:
        return CheckOutcome(id=name, state="fine", found="limited")
    version = next((str(e.value) for e in manifest.expectations if e.field == "libs.nccl.version"), "")
    match = re.match(r"(\d{1,4})\.(\d{1,4})", version)
    if match is None:
        return CheckOutcome(id=name, state="not-run", found="unlimited; which NCCL the job has is not known")
    safe = (int(match[1]), int(match[2])) >= _STACK_OF_ITS_OWN
    return CheckOutcome(
        id=name, state="fine" if safe else "failed", found=f"unlimited, with NCCL {version}", limit="8192 KiB"
    )


def check_affinity(manifest: Manifest) -> CheckOutcome:
    """Compare the cores of this step with the ranks that share them."""
    cores, ranks = count_cores(os.sched_getaffinity(0)), manifest.nproc_per_node
    return CheckOutcome(
        id="sys.affinity",
        state="fine" if cores >= ranks else "failed",
        found=f"{cores} for {plural(ranks, 'rank')}" if cores < ranks else str(cores),
        limit=f">= {ranks}",
    )


def check_shm(manifest: Manifest, folder: Path) -> Iterator[CheckOutcome]:
    """Compare the free shared memory with the amount that NCCL and data loaders need."""
    if manifest.backend != "nccl":
        for name in ("sys.shm", "sys.shm.ranks"):
            yield CheckOutcome(id=name, state="not-run", found="the backend is gloo")
        return
    room = os.statvfs(folder)
    free = room.f_frsize * room.f_bavail
    for name, needed in (("sys.shm", _SHM_BYTES), ("sys.shm.ranks", _SHM_BYTES * manifest.nproc_per_node)):
        yield CheckOutcome(
            id=name,
            state="fine" if free >= needed else "failed",
            found=f"{free >> 20} MiB",
            limit=f">= {needed >> 20} MiB",
        )


def job_memory(environ: Mapping[str, str]) -> int:
    """Return the memory of the job on this node in MiB; 0 if it is unknown, or if the job has the whole memory.

    Slurm sets SLURM_MEM_PER_NODE, or SLURM_MEM_PER_CPU if the job or the cluster counts memory for each CPU (sbatch(1),
    OUTPUT ENVIRONMENT VARIABLES, Slurm 24.11).
    """
    node, cpu, cpus = (environ.get(f"SLURM_{name}", "") for name in ("MEM_PER_NODE", "MEM_PER_CPU", "CPUS_ON_NODE"))
    if node.isdecimal():
        return int(node)
    return int(cpu) * int(cpus) if cpu.isdecimal() and cpus.isdecimal() else 0


def check_memory(environ: Mapping[str, str], proc: Path) -> CheckOutcome:
    """Compare the available memory of the node with the memory that Slurm gave to the job."""
    given = job_memory(environ)
    if not given:
        return CheckOutcome(id="sys.memory", state="not-run", found="the job asked for no amount of memory")
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE)
    if match is None:
        return CheckOutcome(id="sys.memory", state="unknown", found=f"{proc}/meminfo has no MemAvailable")
    available = int(match[1]) // 1024
    enough = available >= given * _USUAL_PART
    return CheckOutcome(
        id="sys.memory", state="fine" if enough else "failed", found=f"{available} MiB", limit=f"about {given} MiB"
    )
