"""What a wheel has beside the package: a man page for each command, and the completion of three shells.

hatchling calls it for each wheel that is not editable. The source of click-man 0.6.0 was read, and it was not run: it
asks a group for `commands`, which those that are loaded late are not in, and keeps click's mark for "do not wrap".
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.utils import get_reproducible_timestamp

PLACES = {
    "bash": "share/bash-completion/completions/hpcenv",
    "zsh": "share/zsh/site-functions/_hpcenv",
    "fish": "share/fish/vendor_completions.d/hpcenv.fish",
}


class SharedFiles(BuildHookInterface[Any]):
    """Puts man pages and completion into share/ of the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        self._folder = tempfile.TemporaryDirectory()
        for number, (place, text) in enumerate(sorted(shared_files().items())):
            path = Path(self._folder.name, str(number))
            path.write_text(text, encoding="utf-8")
            build_data["shared_data"][str(path)] = place

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()


def shared_files() -> dict[str, str]:
    """Return the text of each file by its place in the wheel."""
    from hpcenv.cli._command_line import cli
    from hpcenv.cli.completion import script

    files = {place: script(cli, shell) for shell, place in PLACES.items()}
    for context in _contexts(click.Context(cli, info_name="hpcenv", **cli.context_settings)):
        files[f"share/man/man1/{_name(context)}.1"] = man_page(context)
    return files


def _contexts(context: click.Context) -> Iterator[click.Context]:
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            inner = context.command.get_command(context, name)
            assert inner is not None
            yield from _contexts(click.Context(inner, info_name=name, parent=context, **inner.context_settings))


def _name(context: click.Context) -> str:
    return context.command_path.split(" <", 1)[0].replace(" ", "-")


def man_page(context: click.Context) -> str:
    """Return the help of a command, with all its options, as a man page."""
    from hpcenv.cli._help_all import WHOLE
    from hpcenv.version import VERSION

    context.meta[WHOLE] = True
    # The same for each build of one source, as the times in the wheel: SOURCE_DATE_EPOCH, or hatchling's own.
    date = time.strftime("%Y-%m-%d", time.gmtime(get_reproducible_timestamp()))
    short = context.command.get_short_help_str(200).rstrip(".")
    page = _Page()
    page.write(f'.TH {_name(context).upper()} 1 "{date}" "hpcenv {VERSION}" "hpcenv"\n')
    page.write(".nh\n")  # names and options stay in one piece, so that they can be copied
    page.write(f".SH NAME\n{_filled(f'{_name(context)} - {short}')}\n")
    context.command.format_help(context, page)
    parent = context.parent
    if parent is not None:
        page.write(f".SH SEE ALSO\n.BR {_roff(_name(parent))} (1)\n")
    return page.getvalue()


def _roff(text: str) -> str:
    """Return one line of text as roff prints it unchanged."""
    plain = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{plain}" if plain.startswith((".", "'")) else plain


def _filled(text: str) -> str:
    """Return text as lines that roff fills; mandoc wants at most 80 bytes, and a `-` takes two."""
    return "\n".join(map(_roff, textwrap.wrap(text, 66, break_long_words=False, break_on_hyphens=False)))


class _Page(click.HelpFormatter):
    """Writes as a man page what click would write as a help text."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.write(f".SH SYNOPSIS\n.B {_roff(prog)}\n{_filled(args)}\n.SH DESCRIPTION\n")

    def write_paragraph(self) -> None:
        """Write nothing: click calls it before a text."""

    def write_text(self, text: str) -> None:
        for number, part in enumerate(inspect.cleandoc(text).split("\n\n")):
            as_it_is = part.startswith("\b\n")
            lines = "\n".join(map(_roff, part.removeprefix("\b\n").splitlines()))
            self.write(".PP\n" if number else "")
            self.write(f".nf\n{lines}\n.fi\n" if as_it_is else f"{_filled(part)}\n")

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        if ".SH OPTIONS\n" not in self.buffer and name != "Commands":
            self.write(".SH OPTIONS\n")
        self.write(f".SH {name.upper()}\n" if name == "Commands" else "" if name == "Options" else f".SS {name}\n")
        yield

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        for term, text in rows:
            self.write(f".TP\n.B {_roff(term)}\n{_filled(text)}\n")
