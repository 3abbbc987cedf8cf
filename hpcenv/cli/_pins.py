"""Options that say which part of a file of pins was installed: `hpcenv lock --from`, `hpcenv image init --pylock`."""

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
            ("--package", "package", f"Member of the workspace in {file} that was installed (uv.lock).", False),
            ("--group", "groups", f"Dependency group in {file} that was installed.", True),
            ("--extra", "extras", f"Extra of the project in {file} that was installed.", True),
        ):
            default = None if many else ""
            command = click.option(name, word, metavar="NAME", multiple=many, default=default, help=text)(command)
        return command

    return decorate
