"""`hpcenv image refresh`: make a recipe again from the same request, build and lock its image, and list what changed.

Runs on: LOGIN NODE. Like `hpcenv image init`, this command asks a registry for the base, and pip's index for the
packages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import Command, HpcenvError, LockfileMissing, SpecError
from hpcenv.identity import sif
from hpcenv.image.convert import squashfs_reader
from hpcenv.image.recorded_files import SYSTEM_PACKAGES
from hpcenv.image.reference import DefinitionFile
from hpcenv.locking.image_source import locked_sif, project_source, within
from hpcenv.locking.lock import LockOptions, lock
from hpcenv.locking.project_image import BuildOptions, build
from hpcenv.progress import OnEvent
from hpcenv.project.context import Context
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.project.workspace import Workspace, read_lockfile
from hpcenv.recipes.init import PreparedRecipe, prepare, write
from hpcenv.recipes.recipe_record import RECORD, read_record, require_replaceable
from hpcenv.records.files import write_bytes
from hpcenv.records.manifest import Bind

_PINNED = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class RefreshPlan:
    """The recipe that the same request gives now.

    Attributes:
        folder: the recipe's folder.
        changes: what has changed since the recipe was written: the base, and Python packages.
    """

    folder: Path
    prepared: PreparedRecipe
    changes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Refreshed:
    """An image that was built again, and its lock.

    Attributes:
        recipe: what changed in the recipe, as `RefreshPlan.changes`.
        system: packages of the distribution that changed. None if the previous image is not on this machine, or has no
            list of these packages.
        lock: the differences from the previous lockfile.
        path: the lockfile.
        notes: sentences for the user.
    """

    recipe: tuple[str, ...]
    system: tuple[str, ...] | None
    lock: tuple[str, ...]
    path: Path
    sif: Path | None
    notes: tuple[str, ...]


def plan_refresh(workspace: Workspace, folder: Path, *, environ: Mapping[str, str], force: bool) -> RefreshPlan:
    """Find the base and the packages that the recipe would name now. This function writes no file.

    Args:
        folder: the folder with the files of `hpcenv image init`.
        environ: the user's environment.
        force: accept files that were edited.

    Raises:
        SpecError: the folder has no recipe, or hpcenv.toml does not name the recipe's definition file.
        WouldOverwrite: a file of the recipe was edited.
        HpcenvError: see `prepare`.
    """
    record = read_record(folder)
    if record is None:
        raise SpecError(
            f"`{folder}` has no recipe.json",
            why="`hpcenv image init` writes there what was asked for",
            hint=("write the recipe again: ", Command("hpcenv", "image", "init", "--torch", "VERSION")),
        )
    _require_own_image(workspace, folder)
    prepared = prepare(record.request, environ=environ, plain_http=workspace.project.plain_http)
    files = prepared.files
    require_replaceable(folder, files, force=force)
    base = prepared.recipe.base.pinned
    changes = [] if base == record.base else [f"base {record.base} -> {base}"]
    locked = folder / "requirements.lock"
    before = dict(_PINNED.findall(locked.read_text(encoding="utf-8", errors="replace") if locked.exists() else ""))
    now = dict(_PINNED.findall(files["requirements.lock"]))
    changes += changed_versions(before, now)
    return RefreshPlan(folder=folder, prepared=prepared, changes=tuple(changes))


def refresh(workspace: Workspace, plan: RefreshPlan, context: Context, on_event: OnEvent, *, force: bool) -> Refreshed:
    """Write the recipe, build its image again, and lock the image.

    The build runs even if the recipe is the same, because the distribution may have newer packages. If the build or the
    lock fails, the files of the recipe get their former content, so that the next call lists the same changes.

    Args:
        force: replace files that were edited.

    Raises:
        WouldOverwrite: a file of the recipe was edited.
        HpcenvError: see `build` and `lock`.
    """
    before = _locked_system(workspace)
    site = Bind(source=str(plan.folder / "site"), target="/mnt", read_only=True)
    options = BuildOptions(binds=(site,), anew=True)
    with _restored_on_failure([plan.folder / name for name in (*plan.prepared.files, RECORD)]):
        write(plan.prepared, plan.folder, force=force)
        build(workspace, before=None, environ=context.environ, on_event=on_event, options=options)
        locked = lock(workspace, LockOptions(upgrade=True), context, on_event)
    now = None if locked.sif is None else system_packages(locked.sif)
    return Refreshed(
        recipe=plan.changes,
        system=None if before is None or now is None else changed_versions(before, now),
        lock=locked.changes,
        path=locked.path,
        sif=locked.sif,
        notes=(*plan.prepared.notes, *locked.notes),
    )


@contextmanager
def _restored_on_failure(paths: Sequence[Path]) -> Iterator[None]:
    """Give files their former content if the block ends with an exception, for example after Ctrl-C."""
    before = {path: path.read_bytes() if path.exists() else None for path in paths}
    try:
        yield
    except BaseException:
        for path, content in before.items():
            with suppress(OSError):  # the error of the block says more, for example that the disk is full
                if content is None:
                    path.unlink(missing_ok=True)
                elif path.read_bytes() != content:
                    write_bytes(content, path)
        raise


def _require_own_image(workspace: Workspace, folder: Path) -> None:
    source, wanted = project_source(workspace), folder / "image.def"
    if isinstance(source, DefinitionFile) and within(workspace, source).resolve() == wanted.resolve():
        return
    raise SpecError(
        f"the project's image is not made from `{workspace.shown(wanted)}`",
        why=f"`image` in {workspace.spec} is {workspace.project.image}",
        hint=f'write image = "{workspace.shown(wanted)}" in hpcenv.toml, or build and push the image yourself',
    )


def _locked_system(workspace: Workspace) -> dict[str, str] | None:
    """Return the packages of the distribution in the locked image; None if they are not known."""
    try:
        container = read_lockfile(workspace.lockfile_path(DEFAULT_LOCK)).container
    except LockfileMissing:
        return None
    return None if container is None else system_packages(locked_sif(workspace, container))


def system_packages(image: Path) -> dict[str, str] | None:
    """Return name and version of the distribution's packages in a SIF from a recipe; None if the SIF has no list."""
    try:
        part, inside = sif.read_header(image).runs, SYSTEM_PACKAGES.lstrip("/").encode()
        listed = squashfs_reader.read_file(image, inside, offset=part.offset, size=part.size)
    except HpcenvError:
        return None
    rows = (line.split() for line in listed.decode("utf-8", "replace").splitlines())
    return {row[0]: row[1] for row in rows if len(row) > 1}


def changed_versions(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for each package that was added or removed, or that has another version."""
    return tuple(
        f"{name} {before.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    )
