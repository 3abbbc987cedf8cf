"""Run the preflight checks of this machine: the checks that are useful before a job, or outside of a job.

Runs on: LOGIN NODE, or any machine. Inside a job on a compute node, all quick checks of the host run, with the numbers
of nodes, ranks and GPUs of that job. Elsewhere, a check runs only if its result is also valid for jobs, or for runs on
this machine.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpcenv.errors import NodesUnknown
from hpcenv.facts import host_checks, places
from hpcenv.judge.checks.check_table import at_level
from hpcenv.machine import gpus
from hpcenv.machine.network.detect import detect
from hpcenv.machine.network.reach import observe
from hpcenv.machine.this_node import ThisNode, find_this_node
from hpcenv.machine.tree import HostTree
from hpcenv.project import severities
from hpcenv.project.context import Context
from hpcenv.project.severities import Policy
from hpcenv.project.workspace import Workspace
from hpcenv.records.codec import SCHEMA
from hpcenv.records.manifest import Environment, Manifest, PreflightOptions
from hpcenv.records.severities import Severities
from hpcenv.survey.checked import CheckedMachines, machines, rows_of
from hpcenv.version import VERSION

# The checks that run outside of a job on a machine without GPUs. Their results are also valid for jobs, because jobs
# get the limits of this shell and use the same folders.
_ON_A_LOGIN_NODE = {"sys.nofile", "fs.answers", "fs.usable", "fs.full", "fs.space", "time.filesystem"}


def check_this_machine(
    context: Context, workspace: Workspace | None, *, store: Path, skipped: Sequence[str] = ()
) -> CheckedMachines:
    """Run the quick checks of this machine.

    The checks write a file to TMPDIR and to the folder of run folders, and remove both files.

    Args:
        workspace: the project. Outside of a project, `workspace` is None, and the current folder is used as the folder
            of runs.
        store: the folder in which images are kept.
        skipped: checks that must not run.
    """
    environ, workdir = context.environ, context.cwd
    runs = workdir if workspace is None else workspace.runs
    policy: Policy = {} if workspace is None else workspace.project.policy
    found_gpus = gpus.read(environ=environ)
    manifest, place = _pretended_run(environ, found_gpus, workdir=workdir, runs=runs, store=store)
    left_out = _not_asked(manifest) | set(skipped)
    manifest = replace(manifest, preflight=PreflightOptions(level="quick", skipped=tuple(sorted(left_out))))
    seen = host_checks.AlreadyRead(
        gpus=found_gpus,
        network=observe(place.nodes[0], environ),
        fabric=detect(HostTree(), environ, gpus=found_gpus.places),
        look=places.start(manifest, environ),
    )
    checks = host_checks.run(manifest, place, environ, seen)
    judged = Severities(severities.resolve(policy, gpus=manifest.gpus_per_node > 0))
    rows = rows_of(place.node, checks.results(), judged)
    seconds = {place.node: checks.seconds}
    return machines("quick", rows, nodes=(place.node,), silent={}, skipped=skipped, seconds=seconds)


def _not_asked(manifest: Manifest) -> set[str]:
    """Return the checks whose results have no meaning on a login node."""
    if manifest.cluster == "slurm" or manifest.gpus_per_node:
        return set()
    checks = at_level(PreflightOptions(level="quick"), gpus=True, places=("host",))
    return {check.id for check in checks} - _ON_A_LOGIN_NODE


def _pretended_run(
    environ: Mapping[str, str], found: gpus.GpuFacts, *, workdir: Path, runs: Path, store: Path
) -> tuple[Manifest, ThisNode]:
    """Return the manifest of a pretended run on this machine, and the place of this machine among its nodes."""
    host = socket.gethostname()
    try:
        place, cluster = find_this_node(environ, cluster="slurm"), "slurm"
        count = environ.get("SLURM_GPUS_ON_NODE", "0")
    except NodesUnknown:
        place, cluster = ThisNode(node=host, nodes=(host,), attempt=0, job_id="doctor"), "local"
        count = str(found.values.get("host.gpu-count", 0))
    wanted = int(count) if count.isdecimal() else 0
    # The checks look at the folder of the environment, so a path in the image store makes them look at the store.
    environment = Environment(kind="host", python=str(store / "python"))
    return (
        Manifest(
            schema=SCHEMA,
            run="doctor",
            run_folder=str(_existing(runs)),
            cluster="slurm" if cluster == "slurm" else "local",
            nodes=len(place.nodes),
            nproc_per_node=max(wanted, 1),
            gpus_per_node=wanted,
            cpus_per_task=0,
            backend="nccl" if wanted else "gloo",
            environment=environment,
            script="",
            script_sha256="",
            args=(),
            workdir=str(workdir),
            settings=(),
            expectations=(),
            packages=(),
            probe_level="record",
            lockfile="",
            lockfile_sha256="",
            hpcenv_version=VERSION,
        ),
        place,
    )


def _existing(folder: Path) -> Path:
    """Return a folder if it exists, or else the nearest existing folder above it."""
    return next((one for one in (folder, *folder.parents) if os.path.isdir(one)), folder)
