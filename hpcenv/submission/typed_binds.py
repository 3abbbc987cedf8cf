"""The binds of `hpcenv submit --bind SRC[:DST[:ro]]`: folders and files of the nodes that are visible in the container.

Runs on: LOGIN NODE. `apptainer exec --bind` uses the same form (Apptainer user guide 1.4, "User-defined bind paths").
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcenv.errors import UsageError
from hpcenv.records.manifest import Bind, Environment

_READ_ONLY = {"ro": True, "rw": False}
_FORM = "--bind SOURCE, --bind SOURCE:TARGET or --bind SOURCE:TARGET:ro"


def parse(text: str, cwd: Path) -> Bind:
    """Return one bind.

    Args:
        text: the text that the user typed.
        cwd: the folder in which a relative source path begins.

    Raises:
        UsageError: the text has another form, or the target is not an absolute path.
    """
    source, *rest = text.split(":")
    target, mode = (*rest, "", "")[:2]
    if len(rest) > 2 or not source or (mode and mode not in _READ_ONLY) or "," in text:
        raise UsageError(f"`--bind {text}` is not a bind", hint=_FORM)
    path = os.path.abspath(cwd / os.path.expanduser(source))
    if target and not os.path.isabs(target):
        raise UsageError(
            f"`--bind {text}`: `{target}` is not an absolute path", why="it is a path in the container", hint=_FORM
        )
    return Bind(source=path, target=os.path.normpath(target or path), read_only=_READ_ONLY.get(mode, False))


def add(environment: Environment, typed: Sequence[str], cwd: Path) -> tuple[Environment, tuple[str, ...]]:
    """Return the environment with the typed binds, and notes. A typed bind replaces a bind with the same target.

    A note names each source that does not exist on this machine.

    Raises:
        UsageError: the text of a bind has another form, or there is no container.
    """
    binds = tuple(parse(text, cwd) for text in typed)
    if not binds:
        return environment, ()
    if environment.kind != "sif":
        raise UsageError(
            f"`--bind {typed[0]}`: there is no container",
            why="the lockfile is for a host environment, and there the ranks see all folders of their node",
            hint="leave it out",
        )
    absent = [bind.source for bind in binds if not os.path.exists(bind.source)]
    notes = tuple(f"--bind: {source} does not exist on this machine; every node must have it" for source in absent)
    return replace(environment, binds=(*binds, *environment.binds)), notes
