"""Read a uv.lock with uv, which selects the packages. Only uv knows the workspaces of uv, and which extras conflict.

Runs on: LOGIN NODE. `uv export --frozen` starts no other program and contacts no server (uv 0.13.9, seen with strace).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from hpcenv import process
from hpcenv.errors import Command, LockfileInvalid, ToolFailed

NAME = "uv.lock"
_SECONDS = 60


def export(path: Path, options: Sequence[str]) -> str:
    """Return the pylock.toml (PEP 751) that uv makes from a uv.lock, as text.

    Args:
        path: the uv.lock; pyproject.toml is beside it.
        options: `--extra NAME`, `--group NAME` and `--package NAME`, as for `uv sync`.

    Raises:
        LockfileInvalid: uv is not on PATH, or refuses the file or an option; the error has uv's message.
    """
    uv = shutil.which("uv")
    asked = ("uv", "export", "--frozen", "--offline", "--format", "pylock.toml", *options)
    if uv is None:
        raise LockfileInvalid(
            f"`{path}` cannot be read without uv",
            why="the format belongs to uv alone, and `uv` is not on PATH",
            hint=(
                "install uv, or where it is, in the folder of the file: ",
                Command(*asked, "-o", "pylock.toml"),
                "\nthen name pylock.toml instead",
            ),
        )
    try:
        return process.run((uv, *asked[1:]), timeout=_SECONDS, cwd=path.parent).stdout
    except ToolFailed as error:
        raise LockfileInvalid(f"uv does not export `{path}`", why=error.why, hint=error.hint) from error
