"""Which environment a project means: a Python of the host, or a SIF.

Runs on: LOGIN NODE. Needs nothing of what locking and converting need: every submission comes here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hpcenv.adapters import apptainer, references
from hpcenv.adapters.references import SifFile
from hpcenv.errors import SpecError
from hpcenv.model.lockfile import ContainerTable
from hpcenv.steps.workspace import Workspace
from hpcenv.wire import Environment


def locked_sif(workspace: Workspace, container: ContainerTable) -> Path:
    """Return where the SIF that a lockfile names lies: in the store, or where the project has it."""
    source = references.parse_source(container.reference)
    if isinstance(source, SifFile):
        return workspace.root / Path(source.path).expanduser()
    return workspace.store / "images" / f"{container.digest.replace(':', '-')}.sif"


def host_environment(workspace: Workspace, environ: Mapping[str, str]) -> Environment:
    """Return the host's Python environment: hpcenv.toml's, else the active one, else ours.

    The path is not resolved: a virtual environment is known by the link's own place.
    """
    asked = workspace.project.python
    if asked is not None:
        python, origin = os.path.join(workspace.root, os.path.expanduser(asked)), f"`python` in {workspace.spec}"
    elif environ.get("VIRTUAL_ENV"):
        python, origin = os.path.join(environ["VIRTUAL_ENV"], "bin", "python"), "VIRTUAL_ENV"
    else:
        python, origin = sys.executable, "the Python that runs hpcenv"
    python = os.path.abspath(python)
    if not os.path.isfile(python) or not os.access(python, os.X_OK):
        raise SpecError(f"`{python}` is not an executable Python", why=f"it comes from {origin}")
    return Environment(kind="host", python=python)


def container_environment(workspace: Workspace, image: Path, *, gpus: bool, program: str = "") -> Environment:
    """Return the environment inside a SIF; `program` starts it, if not the `apptainer` on PATH."""
    return Environment(
        kind="sif",
        python=workspace.project.python or "python3",
        sif=str(image),
        apptainer=program or apptainer.find(),
        gpus=gpus,
    )
