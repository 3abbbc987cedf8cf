"""The lock that an exported training carries: the lockfile as the gate of a job reads it. Runs on: LOGIN NODE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcenv.project.lockfile import Lockfile
from hpcenv.project.workspace import Workspace
from hpcenv.records.manifest import Environment, Expectation, Manifest, RecordedData, Setting
from hpcenv.submission.plan import Request
from hpcenv.submission.request import SubmitOptions
from hpcenv.submission.verify_here import manifest_of_one_node

# Apptainer adds it, no image has it.
_OF_APPTAINER = "/.singularity.d/libs"


def container_lock(
    workspace: Workspace,
    options: SubmitOptions,
    locked: Lockfile,
    path: Path,
    request: Request,
    variables: Sequence[Setting],
    data: Sequence[RecordedData],
) -> Manifest:
    """Return what one container is compared with: the manifest of a run on one node, in a Python that exists already.

    Args:
        path: of the lockfile, for messages.
        request: with the fingerprint of the lockfile's content.
    """
    environment = Environment(kind="host", python=workspace.project.python or "python3", revision=locked.revision)
    # No SIF was hashed there, so every file of a package is.
    level = options.level or "full"
    lock = manifest_of_one_node(workspace, locked, path, environment, level, request.gpus_per_node, None)
    return replace(
        lock,
        run="container",
        run_folder="/",
        workdir="/",
        settings=tuple(variables),
        expectations=tuple(
            map(_anywhere, (one for one in lock.expectations if not one.field.startswith("container.")))
        ),
        # A copy has other times.
        data=tuple(one for one in data if one.compare != "size-and-time"),
        lockfile_edited=request.fingerprint if request.fingerprint != locked.fingerprint else "",
        fingerprint=request.fingerprint,
    )


def _anywhere(one: Expectation) -> Expectation:
    if not isinstance(one.value, tuple):
        return one
    return replace(one, value=tuple(item for item in one.value if item != _OF_APPTAINER))
