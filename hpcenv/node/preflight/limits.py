"""Checks of what a process of this step may use: open files, cores, memory.

Runs on: COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import os
import resource

from hpcenv.records.checks import CheckOutcome
from hpcenv.records.manifest import Manifest

_LEAST_FILES = 1024
_FILES_PER_RANK = 4


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


def check_affinity(manifest: Manifest) -> CheckOutcome:
    """Compare the cores of this step with the ranks that share them."""
    cores, ranks = len(os.sched_getaffinity(0)), manifest.nproc_per_node
    return CheckOutcome(
        id="sys.affinity",
        state="fine" if cores >= ranks else "failed",
        found=f"{cores} for {ranks} ranks" if cores < ranks else str(cores),
        limit=f">= {ranks}",
    )
