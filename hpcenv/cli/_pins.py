"""Options of `hpcenv lock --from` and `hpcenv image init --pylock`: which part of a file of pins was installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


def options(file: str) -> Callable[[_Command], _Command]:
    """Return a decorator with the options `--extra`, `--group` and `--package`.

    Args:
        file: the option that names the file of pins.
    """

    def decorate(command: _Command) -> _Command:
        for name, word, text, many in (
            ("--package", "package", f"With {file} of a uv.lock: use this member of the workspace.", False),
            ("--group", "groups", f"With {file}: also use this dependency group, in addition to the project.", True),
            ("--extra", "extras", f"With {file}: also use this extra (optional dependencies) of the project.", True),
        ):
            default = None if many else ""
            command = click.option(name, word, metavar="NAME", multiple=many, default=default, help=text)(command)
        return command

    return decorate
