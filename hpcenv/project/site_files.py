"""Find and read the files of site profiles. Refuse a file that other users could change.

Runs on: LOGIN NODE. A profile sets variables and names programs for every run of its user, so it must
belong to the user or to root, and no other user may be able to write to it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from hpcenv import filesystem
from hpcenv.errors import FileUnusable, HpcenvError, SpecError
from hpcenv.project import document, template, toml_files
from hpcenv.project.site import SiteFile

SUFFIX = ".toml"
# A profile has a few kilobytes. A larger file cannot be a profile.
_LONGEST = 256 * 1024
# At most this number of profiles of one folder is used. They are the first ones in the order of their names.
_MOST_FILES = 200


def user_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of a user's own profiles (XDG Base Directory Specification 0.8)."""
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    return _absolute(environ.get("XDG_CONFIG_HOME"), home / ".config") / "hpcenv" / "sites"


def folders(project: Path | None, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders in which hpcenv searches for profiles, in order. `project` is the folder of hpcenv.toml.

    The user's own profiles come before the project's profiles, because the choice of the user has priority.
    """
    # The same specification says: if the variable is not set or empty, /etc/xdg is used.
    words = (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    configured = [Path(word) for word in words if word.startswith("/")]
    # A site that cannot write to /etc of its login nodes names a folder in a module or a login script.
    named = [Path(word) for word in environ.get("HPCENV_SITES", "").split(":") if word.startswith("/")]
    places = [
        user_folder(environ),
        *([] if project is None else [project / "sites"]),
        *(folder / "hpcenv" / "sites" for folder in configured),
        Path("/etc/hpcenv/sites"),
        *named,
    ]
    return tuple(dict.fromkeys(places))


def _absolute(named: str | None, default: Path) -> Path:
    # The specification says: a path that is not absolute is ignored.
    return Path(named) if named and os.path.isabs(named) else default


def shipped() -> Path:
    """Return the folder of the example profiles that hpcenv contains."""
    return template.data_file("sites")


def is_path(named: str) -> bool:
    """Return whether a word names a profile by its path instead of its name."""
    return "/" in named or named.endswith(SUFFIX)


def in_folder(folder: Path) -> tuple[Path, ...]:
    """Return the profiles of a folder by name; empty if the folder does not exist or cannot be read."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX) and not name.startswith("."))
    except OSError:
        return ()
    return tuple(folder / name for name in names[:_MOST_FILES])


def read(path: Path) -> tuple[SiteFile, HpcenvError | None]:
    """Return a profile, and the error if it must not be used.

    This function also reads a profile that must not be used. If such a profile fits the cluster, the user must know
    that hpcenv ignored it.

    Raises:
        FileUnusable: the file cannot be read, or is not a regular file.
        SpecError: the file is not a valid profile; every problem is listed.
    """
    descriptor = _open(path)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FileUnusable(f"the site profile `{path}` is not a file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(_LONGEST + 1)
    finally:
        os.close(descriptor)
    if len(content) > _LONGEST:
        raise SpecError(f"`{path}` is not a site profile", why=f"it has more than {_LONGEST // 1024} KiB")
    site, problems = document.parse(SiteFile, toml_files.loads(content, path, error=SpecError))
    if site is None:
        raise SpecError(f"the site profile `{path}` is not valid", why="\n".join(problems))
    return site, _untrusted(path, status)


def _open(path: Path) -> int:
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise FileUnusable(f"cannot read the site profile `{path}`", why=error.strerror) from error


def _untrusted(path: Path, status: os.stat_result) -> FileUnusable | None:
    """Return the error for a file that other users could change or replace; None if they cannot."""
    real = Path(os.path.realpath(path))
    try:
        folder = os.stat(real.parent)
    except OSError as error:
        return FileUnusable(f"cannot look at the folder of `{path}`", why=error.strerror)
    # In a sticky folder, such as /tmp, a user cannot replace files of other users.
    sticky = bool(folder.st_mode & stat.S_ISVTX)
    for what, place, found in (("", real, status), ("its folder ", real.parent, folder)):
        if place == real.parent and sticky:
            continue
        owner = filesystem.user_name(found.st_uid)
        if found.st_uid not in (os.geteuid(), 0):
            return _refusal(path, f"{what}{place} belongs to `{owner}`", f"copy it: cp {path} {_own_copy(path)}")
        if found.st_mode & stat.S_IWOTH:
            return _refusal(path, f"all users can write to {what}{place}", f"chmod o-w {place}")
        if found.st_mode & stat.S_IWGRP and not filesystem.private_group(found.st_gid):
            return _refusal(path, f"a group can write to {what}{place}", f"chmod g-w {place}")
    return None


def _own_copy(path: Path) -> str:
    return f"~/.config/hpcenv/sites/{path.name}"


def _refusal(path: Path, why: str, hint: str) -> FileUnusable:
    return FileUnusable(
        f"the site profile `{path}` is not used: other users can change it",
        why=f"{why}; a profile names programs and sets variables for your runs",
        hint=hint,
    )
