"""The lock in an exported training: the lockfile in the form that the gate of a job reads. Runs on: LOGIN NODE."""

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

# Apptainer adds this folder. No image has it.
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
    """Return the manifest with which a container is compared: the manifest of a run on one node, in a host environment.

    Args:
        path: the path of the lockfile, for messages.
        request: the request, with the fingerprint of the lockfile's content.
    """
    environment = Environment(kind="host", python=workspace.project.python or "python3", revision=locked.revision)
    # There is no SIF whose hash covers all files, so the preflight level is `full`: every file of a package is hashed.
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
        # A copy of the data has different file times, so data that are compared by file times are left out.
        data=tuple(one for one in data if one.compare != "size-and-time"),
        lockfile_edited=request.fingerprint if request.fingerprint != locked.fingerprint else "",
        fingerprint=request.fingerprint,
    )


def _anywhere(one: Expectation) -> Expectation:
    if not isinstance(one.value, tuple):
        return one
    return replace(one, value=tuple(item for item in one.value if item != _OF_APPTAINER))
