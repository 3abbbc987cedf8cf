"""The console script that `hpcenv submit --entry` names.

Runs on: LOGIN NODE. This module looks for a file and starts nothing. incontainer/entry.py starts the console script on
the nodes.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from hpcenv.errors import ScriptUnusable
from hpcenv.records.manifest import Environment


def require_name(name: str) -> None:
    """Refuse text that cannot be the name of a console script.

    Raises:
        ScriptUnusable: the text is a path.
    """
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise ScriptUnusable(
            f"`{name}` is not the name of a console script",
            why="--entry takes a name, which is looked for in the environment",
            hint="--entry NAME, or without --entry the path of a Python script",
        )


def refuse_starter(name: str, launcher: str | None) -> None:
    """Refuse torchrun for a program that starts ranks itself, because each rank would start all ranks again.

    Raises:
        ScriptUnusable: `name` is such a program, and the launcher is torchrun.
    """
    if name in ("torchrun", "accelerate", "deepspeed") and launcher in (None, "torchrun"):
        raise ScriptUnusable(
            f"`{name}` starts the ranks, and so does torchrun, the default launcher",
            why="each rank would start a training with all its ranks, in the same folder",
            hint=f"--launcher none starts `{name}` once on each node",
        )


def require_in_environment(name: str, environment: Environment) -> tuple[str, ...]:
    """Look for a console script; return a note if only the nodes can find it.

    Raises:
        ScriptUnusable: the host environment does not have the console script.
    """
    if environment.kind != "host":
        return (f"not checked whether the image has the console script `{name}`",)
    folder = Path(environment.python).parent
    if (folder / name).is_file():
        return ()
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    except OSError:
        return (f"not checked whether the environment has the console script `{name}`: cannot read {folder}",)
    near = difflib.get_close_matches(name, names, n=1)
    raise ScriptUnusable(
        f"the environment has no console script `{name}`",
        why=f"looked in {folder}",
        hint=f"did you mean `{near[0]}`?" if near else "add its package to the environment, then hpcenv lock",
    )
