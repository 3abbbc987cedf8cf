"""A project that is locked and checked as the commands do, in an environment that the test gives."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from hpcenv.locking.lock import CheckResult, LockOptions, LockResult, check_lock, lock
from hpcenv.progress import Event
from hpcenv.project import lockfile as lock_model
from hpcenv.project.context import Context
from hpcenv.project.workspace import open_workspace


def context(environ: Mapping[str, str], cache: Path | None = None) -> Context:
    return Context(environ=environ, cwd=Path("/"), now=time.localtime(), token="", command=(), cache=cache)


def lock_project(
    folder: Path,
    environ: Mapping[str, str],
    *,
    said: list[str] | None = None,
    cache: Path | None = None,
    **options: Any,
) -> LockResult:
    """Lock the project of a folder.

    Args:
        said: gets the lines about progress.
        cache: the cache folder; without one no wheels are looked for.
    """

    def keep(event: Event) -> None:
        if said is not None and event.phase == "note":
            said.append(event.what)

    return lock(open_workspace(folder), LockOptions(**options), context(environ, cache), keep)


def check_project(folder: Path, environ: Mapping[str, str], **options: Any) -> CheckResult:
    return check_lock(open_workspace(folder), LockOptions(**options), context(environ))


def edit_lockfile(project: Path, table: str, key: str, value: str) -> None:
    """Change a lockfile as if another environment had been locked."""
    path = project / "lockfiles" / "default.lock.toml"
    data = tomlkit.parse(path.read_text()).unwrap()
    data[table][key] = value
    data["fingerprint"] = lock_model.fingerprint(data)
    path.write_text(tomlkit.dumps(data))
