"""The lock that an exported training carries: the lockfile, flattened as the gate of a job reads it.

Runs on: LOGIN NODE. The same record as in a job, so the same code judges it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpcenv.errors import SpecError
from hpcenv.judge.compat.compat_table import PACKAGED
from hpcenv.project import lockfile as lock_model
from hpcenv.project import toml_files
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.workspace import Workspace
from hpcenv.records.codec import SCHEMA
from hpcenv.records.manifest import Environment, Expectation, Manifest, RecordedData, Setting
from hpcenv.submission.locked import backend_of, expectations, gate_severities, gpu_needs
from hpcenv.submission.locked_container import LockedSif
from hpcenv.submission.plan import Request
from hpcenv.submission.request import SubmitOptions
from hpcenv.version import VERSION

# A cold disk, and the 27,000 files of a large image.
_SECONDS = 1800

# Apptainer adds it, no image has it.
_OF_APPTAINER = "/.singularity.d/libs"


def container_lock(
    workspace: Workspace,
    options: SubmitOptions,
    locked: Lockfile,
    request: Request,
    variables: Sequence[Setting],
    data: Sequence[RecordedData],
    origin: str,
) -> Manifest:
    """Return what one container is compared with: a run of one node, in a Python that is there already.

    Args:
        request: with the fingerprint of the lockfile's content.
        origin: of the lockfile, for messages.
    """
    gpus = request.gpus_per_node
    # No SIF was hashed there, so every file of a package is.
    level = options.level or "full"
    wanted = expectations(workspace, locked, LockedSif(), level=level, gpus=gpus, origin=origin)
    return Manifest(
        schema=SCHEMA,
        run="container",
        run_folder="/",
        cluster="local",
        nodes=1,
        nproc_per_node=request.nproc_per_node,
        gpus_per_node=gpus,
        cpus_per_task=0,
        backend=backend_of(locked, request),
        environment=Environment(kind="host", python=workspace.project.python or "python3", revision=locked.revision),
        script="",
        script_sha256="",
        args=(),
        workdir="/",
        settings=tuple(variables),
        expectations=tuple(_without_apptainer(one) for one in wanted if not one.field.startswith("container.")),
        packages=lock_model.package_expectations(locked),
        probe_level=level,
        lockfile=origin,
        lockfile_sha256="",
        hpcenv_version=VERSION,
        severities=gate_severities(locked, gpus=gpus),
        gpu_needs=gpu_needs(locked, gpus=gpus, table=toml_files.read(PACKAGED, error=SpecError) if gpus else {}),
        check_seconds=_SECONDS,
        # Times are not those of the files here: the folder was copied.
        data=tuple(one for one in data if one.compare != "size-and-time"),
        lockfile_edited=request.fingerprint if request.fingerprint != locked.fingerprint else "",
        fingerprint=request.fingerprint,
    )


def _without_apptainer(one: Expectation) -> Expectation:
    if not isinstance(one.value, tuple):
        return one
    return replace(one, value=tuple(item for item in one.value if item != _OF_APPTAINER))
