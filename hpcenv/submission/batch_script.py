"""The batch script: replace the placeholders `@{NAME}` of a readable bash template by values. Pure.

Runs on: LOGIN NODE. Only this module turns values into shell text.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence

from hpcenv.errors import UsageError
from hpcenv.project.template import fill
from hpcenv.text import visible


class ShellText(str):
    """Text that is shell code, made by this module. All other text is quoted."""

    __slots__ = ()


def render(template: str, values: Mapping[str, str], *, parts: Collection[str] = ()) -> str:
    """Return the script.

    Args:
        template: text of a template.
        values: name of a placeholder -> its value; a plain str is quoted for the shell.
        parts: names of the parts to keep. A part begins with `#@if NAME` and ends with `#@end`. All other parts are
            removed.

    Raises:
        ValueError: a placeholder has no value, or a value has no placeholder.
    """
    shell = {name: value if isinstance(value, ShellText) else shlex.quote(value) for name, value in values.items()}
    return fill(template, shell, parts=parts)


def comment(text: str) -> ShellText:
    """Return text that is safe in a comment: one line of printable characters."""
    return ShellText(visible(text))


def options(arguments: Sequence[str]) -> ShellText:
    """Return arguments of a command, each quoted."""
    return ShellText(shlex.join(arguments))


def lines(words: Sequence[str]) -> ShellText:
    """Return arguments of a command, each quoted and on a separate line."""
    return ShellText("".join(f" \\\n  {shlex.quote(word)}" for word in words).lstrip())


def directives(pairs: Sequence[tuple[str, str | None]]) -> ShellText:
    """Return `#SBATCH` lines.

    sbatch has its own parser for these lines (proc_args.c, `get_argument`, Slurm 22.05 to 26.05): a blank ends an
    argument, quotes and backslashes are special, and a newline begins another directive. Values with such characters
    are refused. Values with blanks are written in double quotes.

    Raises:
        UsageError: a value cannot be written.
    """
    return ShellText(
        "\n".join(f"#SBATCH --{name}" + ("" if value is None else f"={_value(name, value)}") for name, value in pairs)
    )


def _value(name: str, value: str) -> str:
    if not value.isprintable() or re.search(r"[\"'\\]", value):
        raise UsageError(
            f"--{name}={value!r} cannot be written into a batch script",
            why="sbatch reads quotes, backslashes and control characters in its own way",
            hint="use a name without them",
        )
    return f'"{value}"' if re.search(r"[\s#]", value) else value


def filename_pattern(path: str) -> str:
    """Return a path for --output with each `%` doubled, because `%` begins a pattern (sbatch(1), filename pattern)."""
    return path.replace("%", "%%")
