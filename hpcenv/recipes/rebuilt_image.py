"""An image that is made again from the lockfile of a run, as the image of its reproduction. Runs on: LOGIN NODE.

It is another image than the one of the authors: the same versions and hashes of packages, another digest. So it gets a
lockfile, which every node compares, and the comparison of the runs names what differs. Both lie in a folder of this
project alone: neither the project's lockfiles nor its store change.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv.errors import Command, HpcenvError
from hpcenv.locking.lock import lock
from hpcenv.project.workspace import Workspace, lockfile_bytes
from hpcenv.recipes.rebuild import compare_with, problem_of, rebuild
from hpcenv.recipes.rebuild_comparison import ComparedField

FOLDER = ".hpcenv/rebuilt"
_NAME = "rebuilt"


@dataclass(frozen=True, kw_only=True)
class RebuiltImage:
    """The new image.

    Attributes:
        lockfile: its lockfile.
        same: number of compared fields that are as the authors locked them.
        compared: number of compared fields; 0 if an earlier call has compared them.
    """

    lockfile: Path
    same: int = 0
    compared: int = 0

    @property
    def how(self) -> str:
        """How the image was made, in words."""
        fields = f": {self.same} of {self.compared} fields are as locked" if self.compared else ", by an earlier call"
        return f"made again from the hashes of its packages{fields}"


def make_image_again(
    workspace: Workspace,
    lockfile: Path,
    *,
    environ: Mapping[str, str],
    on_line: Callable[[str], None],
) -> RebuiltImage:
    """Build an image from the lockfile of a run, compare it field by field, and lock it.

    What an earlier call has made is used again, and so is a SIF that the user has put into the folder with
    `hpcenv image rebuild --output`, which has more options.

    Args:
        workspace: the project from which the run is repeated.
        lockfile: the lockfile of the run.
        environ: the user's environment.
        on_line: called with each line of progress.

    Raises:
        RebuildDiffers: a field that must be as locked is not, and was not expected to differ.
        HpcenvError: as `rebuild` and `lock`.
    """
    folder = workspace.root / FOLDER / hashlib.sha256(lockfile_bytes(lockfile)).hexdigest()[:16]
    own = _with_image(workspace, "", folder).lockfile_path(_NAME)
    if own.is_file():
        return RebuiltImage(lockfile=own)
    image, rows = _build(workspace, lockfile, folder, environ, on_line)
    problem = problem_of(rows)
    if problem is not None:
        raise problem
    lock(_with_image(workspace, str(image), folder), environ=environ, report=on_line, name=_NAME)
    return RebuiltImage(lockfile=own, same=sum(row.outcome == "same" for row in rows), compared=len(rows))


def _build(
    workspace: Workspace, lockfile: Path, folder: Path, environ: Mapping[str, str], on_line: Callable[[str], None]
) -> tuple[Path, Sequence[ComparedField]]:
    """Return the SIF, which is built unless it is there, and its comparison with the lockfile."""
    there = sorted(folder.glob("*.sif"))
    if there:
        return there[0], compare_with(lockfile, there[0], environ)
    try:
        made = rebuild(
            workspace.root, folder, environ=environ, lock=str(lockfile), build=True,
            plain_http=workspace.project.plain_http, on_line=on_line, force=True,
        )  # fmt: skip
    except HpcenvError as error:
        again = Command("hpcenv", "image", "rebuild", "--lock", str(lockfile), "--build", "--output", str(folder))
        more = " takes another base (--base) and your site's pip and apt (--pip-config); then reproduce again"
        before = (*error.hint_parts, "\n") if error.hint_parts else ()
        raise error.changed(hint=(*before, again, more)) from error
    assert made.sif is not None
    return made.sif, made.rows


def _with_image(workspace: Workspace, image: str, folder: Path) -> Workspace:
    """Return the project with another image, and with its lockfiles in another folder."""
    paths = replace(workspace.project.paths, lockfiles=os.path.relpath(folder, workspace.root))
    return replace(workspace, project=replace(workspace.project, image=image, paths=paths))
