"""The project folder: hpcenv.toml and the lockfiles beside it.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hpcenv.adapters import toml_files
from hpcenv.adapters.accepted import NOTHING, Accepted
from hpcenv.adapters.store_place import StorePlace
from hpcenv.dataclass import dataclass
from hpcenv.errors import LockfileInvalid, LockfileMissing, LockfileNewer, SpecError, UsageError
from hpcenv.model import lockfile
from hpcenv.model.lockfile import Lockfile
from hpcenv.model.project import Project

SPEC_NAME = "hpcenv.toml"
DEFAULT_LOCK = "default"


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """A project folder with its parsed hpcenv.toml.

    Attributes:
        store_place: where blobs and SIFs are kept, and whom the user trusts with them.
        accepted: which documents were valid before.
    """

    root: Path
    project: Project
    store_place: StorePlace
    accepted: Accepted = NOTHING

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
        """Return where the lockfile `name` lies."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise UsageError(f"{name!r} is not a lockfile name", hint="use a plain word, for example `default`")
        return self.root / self.project.paths.lockfiles / f"{name}.lock.toml"

    def shown(self, path: Path) -> str:
        """Return a path as a person in the project folder would write it."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)


def open_workspace(
    start: Path,
    *,
    store: Path | None = None,
    default_store: Path | None = None,
    trusted_owners: tuple[str, ...] = (),
    accepted: Accepted = NOTHING,
) -> Workspace:
    """Find hpcenv.toml in `start` or above it and read it.

    Args:
        store: where images are kept, whatever the project says.
        default_store: where they are kept when the project says nothing; None keeps them
            in the project's own folder.
        trusted_owners: users besides the caller and root who may own the store.
        accepted: which documents were valid before.

    Raises:
        SpecError: there is none, or it is not valid; every problem is listed.
    """
    # Not resolved: nodes may know a folder by the user's name for it only (automounter).
    start = Path(os.path.abspath(start))
    root = next((folder for folder in (start, *start.parents) if os.path.isfile(folder / SPEC_NAME)), None)
    if root is None:
        raise SpecError(f"no `{SPEC_NAME}` in `{start}` or above it", hint="hpcenv init")
    path = root / SPEC_NAME
    content = toml_files.read_bytes(path, error=SpecError)
    project, problems = accepted.parse(Project, toml_files.loads(content, path, error=SpecError), content)
    if project is None:
        raise SpecError(f"`{path}` is not valid", why="\n".join(problems))
    named = project.paths.store and root / os.path.expanduser(project.paths.store)
    place = StorePlace(
        root=store or named or default_store or root / ".hpcenv" / "store",
        trusted_owners=trusted_owners,
        shared=project.paths.store_shared,
    )
    return Workspace(root=root, project=project, store_place=place, accepted=accepted)


_REMEDY = "restore it from version control, or run `hpcenv lock` again"


def read_lockfile(path: Path, accepted: Accepted = NOTHING) -> Lockfile:
    """Read a lockfile; a newer revision is read as far as it is known.

    Args:
        accepted: which documents were valid before.

    Raises:
        LockfileMissing, LockfileNewer, LockfileInvalid: named file, reason and remedy.
    """
    return parse_lockfile(lockfile_bytes(path), path, accepted)


def lockfile_bytes(path: Path) -> bytes:
    """Return a lockfile as it lies there.

    Raises:
        LockfileMissing, LockfileInvalid: as `read_lockfile`.
    """
    try:
        os.lstat(path)
    except FileNotFoundError as error:
        raise LockfileMissing(f"there is no lockfile `{path}`", hint=_lock_command(path)) from error
    except OSError as error:
        raise LockfileInvalid(f"cannot read `{path}`", why=error.strerror, hint=_REMEDY) from error
    return toml_files.read_bytes(path, error=LockfileInvalid, hint=_REMEDY)


def parse_lockfile(content: bytes, path: Path, accepted: Accepted = NOTHING) -> Lockfile:
    """Return the lockfile that was read from `path`.

    Raises:
        LockfileNewer, LockfileInvalid: as `read_lockfile`.
    """
    data = toml_files.loads(content, path, error=LockfileInvalid, hint=_REMEDY)
    schema, revision = data.get("schema"), data.get("revision", 0)
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        found = "no `schema`" if schema is None else f"schema {schema!r}"
        raise LockfileInvalid(f"`{path}` has {found}, expected the number {lockfile.SCHEMA}", hint=_REMEDY)
    if schema > lockfile.SCHEMA:
        raise LockfileNewer(
            f"`{path}` has schema {schema}, this hpcenv reads schema {lockfile.SCHEMA}",
            why=f"it was written by {data.get('generated-by', 'a newer hpcenv')}",
            hint="pip install --upgrade hpcenv",
        )
    if isinstance(revision, int) and revision > lockfile.REVISION:
        data = lockfile.known_part(data)
    locked, problems = accepted.parse(Lockfile, lockfile.from_data(data), content)
    if locked is None:
        raise LockfileInvalid(f"`{path}` is not a valid lockfile", why="\n".join(problems), hint=_REMEDY)
    return locked


def notes_on(locked: Lockfile, path: Path) -> tuple[str, ...]:
    """Say what of a lockfile nobody can have looked at here; nothing where all of it was read.

    Raises:
        LockfileMissing, LockfileInvalid: it is not there any more.
    """
    if locked.revision <= lockfile.REVISION:
        return ()
    data = toml_files.loads(lockfile_bytes(path), path, error=LockfileInvalid, hint=_REMEDY)
    names = sorted(lockfile.unknown_keys(data, lockfile.known_part(data)))
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    keys = ("1 key is" if len(names) == 1 else f"{len(names)} keys are") + " not known here"
    keys += f" ({shown})" if names else ""
    newer = f"revision {locked.revision} of `{path.name}` is newer than this hpcenv's {lockfile.REVISION}"
    return (f"{newer}: {keys}, and whether it was edited was not checked; pip install --upgrade hpcenv",)


def _lock_command(path: Path) -> str:
    name = path.name.removesuffix(".lock.toml")
    return "hpcenv lock" if name == DEFAULT_LOCK else f"hpcenv lock --name {name}"
