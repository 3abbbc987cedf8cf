"""Templates: text files with holes, filled purely; and where those of hpcenv are.

Runs on: LOGIN NODE.

A hole is `@{name}`: a `$` of the shell stays alone, and a batch script with holes is still valid shell. A part that
only some files need is between the lines `#@if NAME` and `#@end`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from hpcenv.errors import UsageError

_HOLE = re.compile(r"@\{([A-Za-z0-9_-]+)\}")
_PART = re.compile(r"^#@if (?P<name>[a-z-]+)\n(?P<text>.*?)^#@end\n", re.MULTILINE | re.DOTALL)


def fill(
    template: str,
    values: Mapping[str, str],
    *,
    parts: Collection[str] = (),
    name: str = "template",
    origin: str = "the built-in template",
) -> str:
    """Fill the holes of a template.

    Args:
        template: its text.
        values: the text for each hole, written unchanged.
        parts: names of the `#@if NAME` ... `#@end` parts to keep; the others are left out.
        name: what kind of template it is, for messages.
        origin: where a template with all parts is, for messages.

    Returns:
        The filled text.

    Raises:
        UsageError: a hole has no value, a value has no hole, or a part of `parts` is not in the template.
    """
    lacking = sorted(set(parts) - {part["name"] for part in _PART.finditer(template)})
    if lacking:
        raise UsageError(
            f"the {name} does not fit",
            why="\n".join(f"it has no part `#@if {part}`" for part in lacking),
            hint=f"take the part over from {origin}",
        )
    template = _PART.sub(lambda part: part["text"] if part["name"] in parts else "", template)
    holes = set(_HOLE.findall(template))
    if holes != set(values):
        missing, surplus = sorted(holes - set(values)), sorted(set(values) - holes)
        problems = [f"@{{{hole}}} is unknown" for hole in missing] + [f"@{{{hole}}} is missing" for hole in surplus]
        raise UsageError(f"the {name} does not fit", why="\n".join(problems))
    return _HOLE.sub(lambda hole: values[hole[1]], template)


def built_in(name: str) -> Path:
    """Return the path of one of hpcenv's batch templates."""
    package = Path(__file__).parents[1]
    installed = package / "_data" / "sbatch_templates" / name
    return installed if installed.exists() else package.parent / "sbatch_templates" / name
