"""The environment of a project: a Python of the host, or a SIF.

Runs on: LOGIN NODE. Every submission imports this module. So it imports no modules that only locking, converting or
images need.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpcenv.container import runtime
from hpcenv.errors import SpecError
from hpcenv.project.workspace import Workspace
from hpcenv.records.manifest import Environment, Overlay


def host_environment(workspace: Workspace, environ: Mapping[str, str]) -> Environment:
    """Return the host's Python: the Python in hpcenv.toml, otherwise the active Python, otherwise the Python of hpcenv.

    Links in the path are kept: Python finds its virtual environment by the path of the link.
    """
    named = workspace.project.python
    if named is not None:
        python, origin = os.path.join(workspace.root, os.path.expanduser(named)), f"`python` in {workspace.spec}"
    elif environ.get("VIRTUAL_ENV"):
        python, origin = os.path.join(environ["VIRTUAL_ENV"], "bin", "python"), "VIRTUAL_ENV"
    else:
        python, origin = sys.executable, "the Python that runs hpcenv"
    python = os.path.abspath(python)
    require_python(python, why=f"it comes from {origin}")
    return Environment(kind="host", python=python)


def require_python(python: str | Path, *, why: str) -> None:
    """Refuse a path that cannot be an interpreter. Nothing is started.

    Args:
        why: where the path comes from, for the message.

    Raises:
        SpecError: the path is not a file, or the file is not executable.
    """
    if not os.path.isfile(python) or not os.access(python, os.X_OK):
        inside = " (the program in the environment: ENVIRONMENT/bin/python)" if os.path.isdir(python) else ""
        raise SpecError(
            f"`{python}` is not an executable Python{inside}",
            why=why,
            hint="the Python in your environment, for example .venv/bin/python",
        )


def bind_sources(workspace: Workspace) -> dict[str, str]:
    """Return the host's path of each [[bind]], by target. If two binds have the same target, the first bind counts."""
    sources: dict[str, str] = {}
    for bind in workspace.project.bind:
        source = os.path.join(workspace.root, os.path.expanduser(bind.source))
        sources.setdefault(os.path.normpath(bind.target or bind.source), source)
    return sources


def container_environment(workspace: Workspace, image: Path, *, gpus: bool, program: str = "") -> Environment:
    """Return the environment inside a SIF. `program` starts it; otherwise `apptainer` or `singularity` on PATH does."""
    return Environment(
        kind="sif",
        python=workspace.project.python or "python3",
        sif=str(image),
        apptainer=program or workspace.project.submit.runtime or runtime.find(),
        gpus=gpus,
    )


def with_overlay(environment: Environment, overlay: Overlay, workspace: Workspace) -> Environment:
    """Add the overlay to a container's environment; if the overlay is a virtual environment, its Python is used."""
    of_venv = overlay.use == "venv" and workspace.project.python is None
    python = f"{overlay.target.rstrip('/')}/bin/python" if of_venv else environment.python
    return replace(environment, overlay=overlay, python=python)
