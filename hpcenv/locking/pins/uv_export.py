"""Read a uv.lock with uv, which selects the packages. Only uv can read its workspaces, and knows which extras conflict.

Runs on: LOGIN NODE. `uv export --frozen` starts no other program and contacts no server (uv 0.13.9, seen with strace).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from hpcenv import process
from hpcenv.errors import Command, LockfileInvalid, ToolFailed
from hpcenv.locking.pins.text_file import read_text
from hpcenv.locking.pins.toml_text import has_fixed_metadata, parse_toml

NAME = "uv.lock"
_SECONDS = 60
# To read uv.lock, uv needs a Python, and prefers the Python of the project's environment. This folder does not exist,
# so uv takes a Python from PATH, and starts no program of the project.
_NO_ENVIRONMENT = "/dev/null/environment"


def export(path: Path, options: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Ask uv which packages of a uv.lock count.

    Args:
        path: the uv.lock; pyproject.toml is beside it.
        options: `--extra NAME`, `--group NAME` and `--package NAME`, as for `uv sync`.

    Returns:
        The pylock.toml (PEP 751) that uv makes, as text, and a note if uv cannot tell whether uv.lock is older than
        pyproject.toml.

    Raises:
        LockfileInvalid: uv is not on PATH, the file is older than pyproject.toml, or uv refuses the file or an option.
            If uv refuses, the error has uv's message.
    """
    uv = shutil.which("uv")
    asked = ("uv", "export", "--frozen", "--offline", "--format", "pylock.toml", *options)
    if uv is None:
        raise LockfileInvalid(
            f"`{path}` cannot be read without uv",
            why="only uv can read this format, and `uv` is not on PATH",
            hint=(
                "install uv, or where it is, in the folder of the file: ",
                Command(*asked, "-o", "pylock.toml"),
                "\nthen name pylock.toml instead",
            ),
        )
    try:
        text = process.run((uv, *asked[1:]), timeout=_SECONDS, cwd=path.parent).stdout
    except ToolFailed as error:
        raise LockfileInvalid(
            f"uv does not export `{path}`",
            why=error.why,
            hint=error.hint or ("if pyproject.toml is newer than the file, in its folder: ", Command("uv", "lock")),
        ) from error
    return text, _require_current(uv, path, options)


def _built_projects(path: Path) -> list[str]:
    """Return the local projects of a uv.lock that uv must build to find their requirements. uv has read the file."""
    built = []
    for package in parse_toml(path, read_text(path)).get("package", ()):
        source = package.get("source", {})
        folder = source.get("editable") or source.get("virtual") or source.get("directory")
        if folder is not None and not has_fixed_metadata(path.parent / folder):
            built.append(str(package.get("name")))
    return built


def _require_current(uv: str, path: Path, options: Sequence[str]) -> tuple[str, ...]:
    """Refuse a uv.lock that is older than pyproject.toml, because `uv sync` would install other packages.

    uv must not start code of the project, and must not contact an index. For most files it does not need to.

    Returns:
        A note if uv cannot tell; empty if the file agrees with pyproject.toml.

    Raises:
        LockfileInvalid: uv would write a different uv.lock.
    """
    open_question = f"whether {path.name} is older than pyproject.toml"
    by_hand = "this tells it: uv lock --check"
    built = _built_projects(path)
    if built:  # no option of uv forbids this build
        return (f"it is not known {open_question}: uv would start the build of {', '.join(built)}; {by_hand}",)
    variable = f"UV_PROJECT_ENVIRONMENT={_NO_ENVIRONMENT}"
    check = (uv, "lock", "--check", "--offline", "--no-python-downloads", "--color", "never")
    try:
        process.run(("env", variable, *check), timeout=_SECONDS, cwd=path.parent)
    except ToolFailed as error:
        said = str(error.why)
        if "needs to be updated" in said:
            raise LockfileInvalid(
                f"`{path}` is older than pyproject.toml",
                why="uv would write a different uv.lock, and `uv sync` would install the packages in it",
                hint=(
                    "in its folder: ",
                    Command("uv", "lock"),
                    "\nthen install again: ",
                    Command("uv", "sync", *options),
                ),
            ) from error
        reason = re.search(r"^\W*error: (.*)", said, re.MULTILINE)
        return (f"uv could not tell without an index {open_question}{f' ({reason[1]})' if reason else ''}; {by_hand}",)
    return ()
