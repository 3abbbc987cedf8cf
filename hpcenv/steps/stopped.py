"""The step `stopped`: handle a request to end that came before the training began.

Runs on: COMPUTE NODE.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

from hpcenv.container.manifest import open_manifest
from hpcenv.errors import NodesUnknown, UsageError
from hpcenv.launch import stopping
from hpcenv.records.run_folder import RunFolder
from hpcenv.steps.this_step import REQUESTS, find_place, read_status


def stopped(run: RunFolder, environ: Mapping[str, str], status: str) -> int:
    """Record that this job was asked to end before its training began (decision 0009).

    Args:
        status: 128 + the number of the signal that the batch script or one of its steps got.

    Returns the status with which the job ends: 143 if the job was cancelled, else 91. Returns 0 if TERM came, but Slurm
    does not report that the job must end. In this case, the job continues.
    """
    number = read_status(status) - 128
    if number not in REQUESTS:
        raise UsageError(f"`{status}` is not 128 + USR1, USR2 or TERM")
    manifest = open_manifest(run, environ)
    reason = stopping.note_before_training(manifest, find_place(run, manifest, environ), environ, number=number)
    if reason is None:
        return 0
    return 128 + signal.SIGTERM if reason == "cancelled" else NodesUnknown.exit_status
