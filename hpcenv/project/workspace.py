"""The project folder: hpcenv.toml and the lockfiles beside it.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcenv.errors import Command, Hint, LockfileInvalid, LockfileMissing, LockfileNewer, SpecError, UsageError
from hpcenv.project import document, lockfile, toml_files
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.spec import DEFAULT_LOCK, LOCKFILE_NAME, Project
from hpcenv.project.store_config import StorePlace

SPEC_NAME = "hpcenv.toml"

FindStore = Callable[[], StorePlace]
DefaultStore = Callable[[Path, str | None], tuple[Path, str]]


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """A project folder with its parsed hpcenv.toml.

    Attributes:
        find_store: a function that returns the folder of blobs and SIFs, and the users who are trusted to own it. This
            function is called only when images are needed, because it may read a site profile.
        overlays: the overlays of all environments, if the project has several environments.
    """

    root: Path
    project: Project
    find_store: FindStore = field(compare=False, repr=False)
    overlays: tuple[str, ...] = ()

    @functools.cached_property
    def store_place(self) -> StorePlace:
        """Folder of blobs and SIFs, its trusted owners, and the setting that names the folder.

        Raises:
            SpecError, FileUnusable: the user and the project name no folder, and the site profile cannot be used.
        """
        return self.find_store()

    @property
    def store(self) -> Path:
        """Folder of blobs and SIFs, usually shared with other projects."""
        return self.store_place.root

    @property
    def spec(self) -> Path:
        """hpcenv.toml."""
        return self.root / SPEC_NAME

    @property
    def runs(self) -> Path:
        """Folder of the project's runs."""
        return self.root / self.project.paths.runs

    def lockfile_path(self, name: str) -> Path:
        """Return the path of the lockfile `name`."""
        if not re.fullmatch(LOCKFILE_NAME, name):
            plain = Path(name).name.removesuffix(".lock.toml")
            hint = (
                f"--lock {plain}" if re.fullmatch(LOCKFILE_NAME, plain) else "use a plain word, for example `default`"
            )
            raise UsageError(f"{name!r} is not a lockfile name", hint=hint)
        return self.root / self.project.paths.lockfiles / f"{name}.lock.toml"

    def for_lock(self, name: str) -> Workspace:
        """Return this project as the lockfile `name` needs it: with the values of [environment.NAME] in hpcenv.toml."""
        if not self.project.environment:
            return self
        named = (self.project.overlay, *(one.overlay for one in self.project.environment.values()))
        overlays = tuple(overlay for overlay in named if overlay is not None)
        return replace(self, project=self.project.for_lock(name), overlays=overlays)

    def shown(self, path: Path) -> str:
        """Return a path relative to the project folder. If the path is outside this folder, return it unchanged."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)


# Hint if there is no project.
TO_BEGIN: Hint = Command("hpcenv", "init")


def project_around(folder: Path) -> Path | None:
    """Return the folder of the hpcenv.toml that applies to an absolute path; None if no folder has one."""
    return next((one for one in (folder, *folder.parents) if os.path.isfile(one / SPEC_NAME)), None)


def open_workspace(
    start: Path,
    *,
    store: tuple[Path, str] | None = None,
    default_store: DefaultStore | None = None,
    trusted_owners: tuple[str, ...] = (),
    hint: Hint = TO_BEGIN,
) -> Workspace:
    """Find hpcenv.toml in `start` or in a folder above, and read the file.

    Args:
        store: folder of images, and the setting that names it. `store` replaces the folder that the project names.
        default_store: a function that returns the folder of images, and the setting that names it. If images are needed
            and the project names no folder of images, this function is called with the folder of hpcenv.toml and the
            key `site`. If `default_store` is None, a folder in the project is used.
        trusted_owners: users who may own the store, in addition to the caller and root.
        hint: what to do if there is no project.

    Raises:
        SpecError: no hpcenv.toml exists, or it is not valid; every problem is listed.
    """
    # Links are not resolved, because nodes may know a folder only by the path that the user typed (automounter).
    start = Path(os.path.abspath(start))
    root = project_around(start)
    if root is None:
        raise SpecError(f"no `{SPEC_NAME}` in `{start}` or above it", hint=hint)
    path = root / SPEC_NAME
    content = toml_files.read_bytes(path, error=SpecError)
    data = toml_files.loads(content, path, error=SpecError)
    project, problems = document.parse(Project, data, text=content.decode())
    if project is None:
        raise SpecError(f"`{path}` is not valid", why="\n".join(problems))

    @functools.cache
    def find_store() -> StorePlace:
        folder, origin = _store(root, project, store, default_store)
        shared = project.paths.store_shared
        return StorePlace(root=folder, trusted_owners=trusted_owners, shared=shared, origin=origin)

    return Workspace(root=root, project=project, find_store=find_store)


def _store(
    root: Path, project: Project, given: tuple[Path, str] | None, default_store: DefaultStore | None
) -> tuple[Path, str]:
    """Return the folder of images, and the setting that names it."""
    if given is not None:
        return given
    if project.paths.store:
        return root / os.path.expanduser(project.paths.store), f"`store` under [paths] in {root / SPEC_NAME}"
    if default_store is not None:
        return default_store(root, project.site)
    return root / ".hpcenv" / "store", "the default of a project"


# A lockfile with 1,000 packages has less than 1 MiB.
LONGEST_LOCKFILE = 4 << 20


def to_restore(path: Path) -> Hint:
    """Return how to get the original content of a lockfile back, for example from git."""
    folders = Path(os.path.abspath(path)).parents
    lock = _lock_command(path)
    if any(os.path.lexists(folder / ".git") for folder in folders):
        checkout = Command("git", "checkout", "--", str(path))
        return ("restore it from version control: ", checkout, "; if it was never committed, lock anew: ", lock)
    return ("bring it from where it was made; it is not under git here. To lock anew: ", lock)


def _after_a_merge(path: Path) -> Hint:
    """Return what to do with a lockfile with the conflict markers of a merge. git refuses to restore such a file."""
    return ("settle hpcenv.toml first, then lock anew; the file is kept aside: ", _lock_command(path))


def _to_read(path: Path) -> Hint:
    return ("you need permission to read it, and to enter the folders above it: ", Command("ls", "-ld", str(path)))


def read_lockfile(path: Path) -> Lockfile:
    """Read a lockfile. If its revision is newer, read only the known keys.

    Raises:
        LockfileMissing, LockfileNewer, LockfileInvalid: the error has the file, the reason and a hint.
    """
    return parse_lockfile(lockfile_bytes(path), path)


def lockfile_bytes(path: Path) -> bytes:
    """Return the content of a lockfile, as bytes.

    Raises:
        LockfileMissing, LockfileInvalid: as `read_lockfile`.
    """
    try:
        os.lstat(path)
    except FileNotFoundError as error:
        raise LockfileMissing(f"there is no lockfile `{path}`", hint=_lock_command(path)) from error
    except OSError as error:
        raise LockfileInvalid(f"cannot read `{path}`", why=error.strerror, hint=_to_read(path)) from error
    hint = to_restore(path) if os.access(path, os.R_OK) else _to_read(path)
    return toml_files.read_bytes(path, error=LockfileInvalid, hint=hint, most=LONGEST_LOCKFILE)


def names_lockfile_path(lock: str) -> bool:
    """Return whether `--lock` names a file: NAME.lock.toml, or the lock.toml in a run folder."""
    return lock.endswith(".lock.toml") or os.path.basename(lock) == "lock.toml"


def find_lockfile(start: Path, lock: str) -> Path:
    """Return the path of the lockfile that `--lock` names; the file may not exist.

    Args:
        start: a folder in the project.
        lock: the name of one of the project's lockfiles, or the path of any lockfile.

    Raises:
        SpecError: `lock` is a name, and there is no valid hpcenv.toml.
    """
    if names_lockfile_path(lock):
        return Path(os.path.abspath(start / lock))
    return open_workspace(start).lockfile_path(lock)


def parse_lockfile(content: bytes, path: Path) -> Lockfile:
    """Return the lockfile that was read from `path`.

    Raises:
        LockfileNewer, LockfileInvalid: as `read_lockfile`.
    """
    hint = to_restore(path) if toml_files.conflict_line(content) is None else _after_a_merge(path)
    data = toml_files.loads(content, path, error=LockfileInvalid, hint=hint)
    schema, revision = data.get("schema"), data.get("revision", 0)
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        found = "no `schema`" if schema is None else f"schema {schema!r}"
        raise LockfileInvalid(f"`{path}` has {found}, expected the number {lockfile.SCHEMA}", hint=to_restore(path))
    if schema > lockfile.SCHEMA:
        raise LockfileNewer(
            f"`{path}` has schema {schema}, this hpcenv reads schema {lockfile.SCHEMA}",
            why=f"it was written by {data.get('generated-by', 'a newer hpcenv')}",
            hint=Command("pip", "install", "--upgrade", "hpcenv"),
        )
    if isinstance(revision, int) and revision > lockfile.REVISION:
        data = lockfile.known_part(data)
    locked, problems = document.parse(Lockfile, lockfile.from_data(data))
    if locked is None:
        raise LockfileInvalid(f"`{path}` is not a valid lockfile", why="\n".join(problems), hint=to_restore(path))
    return locked


def notes_on(locked: Lockfile, path: Path, *, data: bool = False) -> tuple[str, ...]:
    """Return notes about the parts of a lockfile of another revision that are not compared.

    Args:
        data: whether the project has [[data]].

    Raises:
        LockfileMissing, LockfileInvalid: the lockfile does not exist any more, or cannot be read.
    """
    older = f"revision {locked.revision} of `{path.name}` is older than this hpcenv's {lockfile.REVISION}"
    missing, narrower = lockfile.not_locked(locked), lockfile.not_covered(locked, data=data)
    notes = [f"{older}: not locked, and not compared: {', '.join(missing)}; hpcenv lock adds them"] if missing else []
    notes += [f"{older}: not covered: {'; '.join(narrower)} (hpcenv lock adds them)"] if narrower else []
    if notes:
        return tuple(notes)
    return _notes_on_newer(locked, path)


def _notes_on_newer(locked: Lockfile, path: Path) -> tuple[str, ...]:
    if locked.revision <= lockfile.REVISION:
        return ()
    data = toml_files.loads(lockfile_bytes(path), path, error=LockfileInvalid, hint=to_restore(path))
    names = sorted(lockfile.unknown_keys(data, lockfile.known_part(data)))
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    keys = ("1 key is" if len(names) == 1 else f"{len(names)} keys are") + " not known here"
    keys += f" ({shown})" if names else ""
    newer = f"revision {locked.revision} of `{path.name}` is newer than this hpcenv's {lockfile.REVISION}"
    return (f"{newer}: {keys}, and whether it was edited was not checked; pip install --upgrade hpcenv",)


def _lock_command(path: Path) -> Command:
    name = path.name.removesuffix(".lock.toml")
    return Command("hpcenv", "lock", *(() if name == DEFAULT_LOCK else ("--lock", name)))
