"""The batch script: a readable bash template with `@{holes}`, filled purely.

Runs on: LOGIN NODE. The only place that turns values into shell text.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence

from hpcenv.errors import UsageError


class ShellText(str):
    """Text that already is shell (made by this module); everything else is quoted."""

    __slots__ = ()


# Bash's own `$` stays alone, and an unfilled template is still valid bash.
_HOLE = re.compile(r"@\{([A-Za-z0-9_-]+)\}")


# A part of the template that only some runs need stands between these two lines.
_PART = re.compile(r"^#@if (?P<name>[a-z-]+)\n(?P<text>.*?)^#@end\n", re.MULTILINE | re.DOTALL)


def render(template: str, values: Mapping[str, str], *, parts: Collection[str] = ()) -> str:
    """Return the script.

    Args:
        template: text of a template.
        values: one for each hole; a plain str is quoted for the shell.
        parts: names of the `#@if NAME` ... `#@end` parts to keep; the others are left out.

    Raises:
        UsageError: a hole without a value, a value without a hole, or a part that is wanted
            and not there.
    """
    lacking = sorted(set(parts) - {part["name"] for part in _PART.finditer(template)})
    if lacking:
        raise UsageError(
            "the batch template does not fit",
            why="\n".join(f"it has no part `#@if {name}`" for name in lacking),
            hint="take the part over from the built-in template, sbatch_templates/job.sbatch",
        )
    template = _PART.sub(lambda part: part["text"] if part["name"] in parts else "", template)
    holes = set(_HOLE.findall(template))
    if holes != set(values):
        missing, surplus = sorted(holes - set(values)), sorted(set(values) - holes)
        problems = [f"@{{{name}}} is unknown" for name in missing] + [f"@{{{name}}} is missing" for name in surplus]
        raise UsageError("the batch template does not fit", why="\n".join(problems))
    shell = {name: value if isinstance(value, ShellText) else shlex.quote(value) for name, value in values.items()}
    return _HOLE.sub(lambda hole: shell[hole.group(1)], template)


def comment(text: str) -> ShellText:
    """Return text that is safe in a comment: one line, printable."""
    return ShellText("".join(c if c.isprintable() else repr(c)[1:-1] for c in text))


def options(arguments: Sequence[str]) -> ShellText:
    """Return arguments of a command, each quoted."""
    return ShellText(shlex.join(arguments))


def directives(pairs: Sequence[tuple[str, str | None]]) -> ShellText:
    """Return `#SBATCH` lines.

    sbatch reads them with a parser of its own (proc_args.c, `get_argument`, Slurm 22.05 to
    26.05): blanks end an argument, quotes and backslashes are special, a newline would
    begin another directive. Values that would need any of this are refused instead; paths
    with blanks are written in double quotes.

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
            why="quotes, backslashes and control characters have a meaning of their own there",
            hint="use a name without them",
        )
    return f'"{value}"' if re.search(r"[\s#]", value) else value


def filename_pattern(path: str) -> str:
    """Return a path for --output: `%` begins a pattern there (sbatch(1), filename pattern)."""
    return path.replace("%", "%%")
