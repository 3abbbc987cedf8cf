"""Environment, folder, time and command line of a command.

Runs on: LOGIN NODE. The command line and the Python API make one `Context` and pass this value down, so that no
function below them reads the environment or the clock.
"""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Context:
    """The values that a command reads once from its environment.

    Attributes:
        cwd: the current folder, by the path that the user typed. Links in this path are kept.
        token: a few random characters, which make the name of a run unique.
        command: the command line, for records.
        cache: folder that stores the hashes of SIF files. If `cache` is None, the hashes are computed each time.
    """

    environ: Mapping[str, str]
    cwd: Path
    now: time.struct_time
    token: str
    command: tuple[str, ...]
    cache: Path | None = None


def of_user(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the user's real home. A session has its own home, without the accepted values."""
    if "HPCENV_RUN" not in environ or "SINGULARITY_CONTAINER" in environ:
        return dict(environ)
    return {**environ, "HOME": pwd.getpwuid(os.getuid()).pw_dir}


def user_folder(environ: Mapping[str, str]) -> Path:
    """Return the current folder by the path that the user typed, which may contain links ($PWD if it is correct)."""
    logical = Path(environ.get("PWD", ""))
    if logical.is_absolute() and logical.exists() and logical.samefile("."):
        return logical
    return Path.cwd()


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of files that hpcenv can compute again (XDG Base Directory Specification 0.8)."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcenv"


def state_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of files that hpcenv cannot compute again (XDG Base Directory Specification 0.8)."""
    # The specification says: a path that is not absolute is ignored.
    named = environ.get("XDG_STATE_HOME", "")
    home = Path(environ.get("HOME") or Path.home())
    return (Path(named) if named.startswith("/") else home / ".local" / "state") / "hpcenv"
