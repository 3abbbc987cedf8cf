"""`hpcenv image init --tools`: a script that makes an overlay with the tools of a session for the project's image.

Runs on: LOGIN NODE. The command reads the lockfile and the overlay. Only the script contacts servers, when the user
runs the script.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from hpcenv.errors import SpecError, UsageError, WouldOverwrite
from hpcenv.locking import overlay as overlays
from hpcenv.locking.environment import container_environment
from hpcenv.locking.image_source import locked_sif
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.project.template import fill
from hpcenv.project.workspace import Workspace, read_lockfile
from hpcenv.recipes.image_recipe import FIRST_LINE, TEMPLATES
from hpcenv.records import files
from hpcenv.records.manifest import Overlay
from hpcenv.sessions.tools import TOOLS, how_to_add

SCRIPT = "add-tools.sh"
ENVIRONMENT = "tools"
_TARGET = "/opt/tools"


def write(workspace: Workspace, words: Sequence[str], folder: Path, *, force: bool) -> Path:
    """Write the script, and return its path.

    Args:
        words: words from `TOOLS`.
        folder: the folder for the script, and for the squashfs that the script makes.
        force: replace a script that hpcenv did not write.

    Raises:
        UsageError: a word is unknown.
        SpecError: the project has no image, or its overlay cannot be used.
        LockfileMissing, LockfileInvalid, LockfileNewer: there is no usable lockfile.
        WouldOverwrite: the folder already has such a file, and hpcenv did not write it.
    """
    unknown = [word for word in words if word not in TOOLS]
    if unknown or not words:
        raise UsageError(f"no such tools: {', '.join(unknown) or 'none named'}", hint=f"--tools {','.join(TOOLS)}")
    locked = read_lockfile(workspace.lockfile_path(DEFAULT_LOCK))
    if locked.container is None:
        raise SpecError('`image = "host"` has no image under the tools', hint=how_to_add(words[0], on_host=True))
    environment = container_environment(workspace, locked_sif(workspace, locked.container), gpus=False)
    under = overlays.find(workspace).overlay if workspace.project.overlay else None
    text = render(
        packages=[package for word in words for package in TOOLS[word]],
        runtime=environment.apptainer,
        image=environment.sif,
        under=under,
        folder=folder,
        root=workspace.root,
    )
    path = folder / SCRIPT
    if os.path.lexists(path) and not force and FIRST_LINE not in path.read_text(encoding="utf-8", errors="replace"):
        raise WouldOverwrite(f"`{path}` exists", why="`hpcenv image init` did not write it", hint="give --force")
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(text, path)
    return path


def render(
    *, packages: Sequence[str], runtime: str, image: str, under: Overlay | None, folder: Path, root: Path
) -> str:
    """Return the script. Pure.

    Args:
        under: the overlay that the project already has. The new overlay contains this overlay and the tools.
        folder: the folder of the script.
        root: the folder of the project.
    """
    of_venv = under is not None and under.use == "venv"
    target = under.target if under is not None and of_venv else _TARGET
    packed = folder / f"{ENVIRONMENT}.sqsh"
    values = {
        "packages": shlex.join(packages),
        "image": shlex.quote(image),
        "under": shlex.quote("" if under is None else under.source),
        "target": shlex.quote(target),
        "packed": shlex.quote(str(packed)),
        "site": shlex.quote(str(folder / "site")),
        "runtime": shlex.quote(runtime),
        "pip": shlex.quote(_folder_of_pip()),
        "root": shlex.quote(str(root)),
        "overlay": shlex.quote(f"{os.path.relpath(packed, root)}:{target}"),
    }
    parts = ("venv",) if of_venv else ("new", *(("packages",) if under is not None else ()))
    text = (TEMPLATES / SCRIPT).read_text(encoding="utf-8")
    return fill(text, {**values, "environment": ENVIRONMENT, "first_line": FIRST_LINE}, parts=parts)


def _folder_of_pip() -> str:
    """Return the folder of this Python's package `pip`; empty if pip is not installed, as in an environment of uv."""
    spec = importlib.util.find_spec("pip")
    return "" if spec is None or spec.origin is None else os.path.dirname(spec.origin)
