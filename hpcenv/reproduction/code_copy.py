"""Make a project from the copy of the code in a run folder, so that it can be submitted elsewhere.

Runs on: LOGIN NODE. The run folder may belong to another user, so it is not trusted. Only listed files with the listed
content are copied. All names stay inside the new folder. Links that lead out of this folder are left out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import FileUnusable, RecordInvalid, UsageError, WouldOverwrite
from hpcenv.project.code_listing import code_files
from hpcenv.records.code_listing import LINK, Listing
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction.bundle.make import ABOUT, About
from hpcenv.reproduction.proofs import file_sha256, safe_place
from hpcenv.submission.request import CopiedCode


@dataclass(frozen=True, kw_only=True)
class CodeCopy:
    """The code of a run in a new folder.

    Attributes:
        code: the new folder, and the listed files in it.
        folder: the folder in the copy that corresponds to the folder from which the run was submitted.
        left_out: one sentence for each file that the copy does not have.
    """

    code: CopiedCode
    folder: Path
    left_out: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the code comes from, in words."""
        return (f"the code is the run's own copy, in {self.code.root}", *self.left_out)


def copy_code(run: RunFolder, manifest: Manifest, target: Path) -> CodeCopy:
    """Copy the code of a run into a new folder.

    Args:
        target: a new folder, or the folder of an earlier call. The files of an existing folder are compared.

    Raises:
        UsageError: the run has no copy of its code, or worked in a folder outside of its project.
        WouldOverwrite: the folder exists, and a code file in it differs from the file of the run.
        FileUnusable: a file cannot be copied, or differs from the file of the run. The new folder is removed again.
        RecordInvalid: the list of the files cannot be read.
    """
    if manifest.source is None or not run.source.is_dir() or run.source.is_symlink():
        raise UsageError(
            f"`{run.path}` has no copy of the code",
            why="the run used its files in place, or the folder was published without `source/`",
            hint="get the authors' repository at the recorded commit, and reproduce in it",
        )
    listed = load_record(Listing, run.listing).files
    own = {path: content for path, content in listed.items() if path.startswith(f"{run.source.name}/")}
    if len(own) < len(listed):
        raise UsageError(
            "the run worked in a folder outside of its project", hint="reproduce in the authors' repository"
        )
    missing = {path: why for path, why in left_out_of(run).items() if path in own and not _is_here(run, path)}
    own = {path: content for path, content in own.items() if path not in missing}
    said = [f"{path}: not in the bundle: {why}" for path, why in sorted(missing.items())]
    said += _copied(run, own, target)
    files = tuple(path.partition("/")[2] for path in own if os.path.lexists(target / path.partition("/")[2]))
    folder = _folder_of_submission(manifest, target)
    return CodeCopy(code=CopiedCode(root=target, files=files), folder=folder, left_out=tuple(said))


def left_out_of(run: RunFolder) -> Mapping[str, str]:
    """Return path -> why, for the files that an unpacked bundle does not have; empty if the folder is no bundle."""
    try:
        return load_record(About, run.path / ABOUT).left_out
    except RecordInvalid:
        return {}


def _is_here(run: RunFolder, path: str) -> bool:
    return os.path.lexists(run.path / path)


def _copied(run: RunFolder, own: Mapping[str, str], target: Path) -> list[str]:
    """Copy the listed files, or compare the files of an earlier call. Return in words what was left out."""
    try:
        target.mkdir(parents=True)
    except FileExistsError as error:
        # The user may have locked a different environment in this folder: see `project/code_listing.py`.
        changed = _changed_copy(code_files(own), target)
        if changed:
            why = f"its `{changed}` differs from the file of the run"
            raise WouldOverwrite(f"`{target}` exists", why=why, hint="choose another folder: --copy DIR") from error
        return []
    except OSError as error:
        raise FileUnusable(f"cannot make `{target}`", why=error.strerror) from error
    try:
        return [said for path in sorted(own) if (said := _copy_file(run, path, own[path], target))]
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _changed_copy(listed: Mapping[str, str], target: Path) -> str:
    """Return the first file in a copy that differs from the list; empty if no file differs."""
    for path, content in sorted(listed.items()):
        place = target / path.partition("/")[2]
        try:
            same = content.startswith(LINK) or (not place.is_symlink() and file_sha256(place) == content)
        except OSError:
            same = False
        if not same:
            return path.partition("/")[2]
    return ""


def _copy_file(run: RunFolder, path: str, content: str, target: Path) -> str:
    """Copy one listed file. Return why the file was left out; empty if the file was copied."""
    source = safe_place(run, path)
    if source is None:
        raise FileUnusable(f"`{path}` in the list of the run leads out of its folder", why=f"{run.listing}")
    place = target / path.partition("/")[2]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if content.startswith(LINK):
            return _copy_link(content.removeprefix(LINK), place, target, path)
        if source.is_symlink() or file_sha256(source) != content:
            raise FileUnusable(
                f"`{source}` is not the file that the run was submitted with", why=f"{run.listing} has its sha256"
            )
        shutil.copy(source, place, follow_symlinks=False)
    except OSError as error:
        raise FileUnusable(f"cannot copy `{source}`", why=error.strerror) from error
    return ""


def _copy_link(points_to: str, place: Path, target: Path, path: str) -> str:
    inside = os.path.normpath(os.path.join(place.parent, points_to))
    if os.path.isabs(points_to) or not Path(inside).is_relative_to(target):
        return f"{path}: a link that leads out of the project"
    os.symlink(points_to, place)
    return ""


def _folder_of_submission(manifest: Manifest, root: Path) -> Path:
    """Return the folder in a copy of the project that corresponds to the folder of the submission."""
    source = manifest.source
    if source is None:
        return root
    given = Path(manifest.submitted_in or manifest.workdir)
    for start in (source.root, source.folder):
        if given.is_relative_to(start):
            return root / given.relative_to(start)
    return root
