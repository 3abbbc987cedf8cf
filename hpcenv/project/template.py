"""Templates: replace the placeholders in a text, and find the template files of hpcenv.

Runs on: LOGIN NODE.

A placeholder (`hole` in this code) is `@{name}`. The shell does not replace it, and a batch script with placeholders is
valid shell code. A part that only some files need is between the lines `#@if NAME` and `#@end`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

_HOLE = re.compile(r"@\{([A-Za-z0-9_-]+)\}")
_PART = re.compile(r"^#@if (?P<name>[a-z-]+)\n(?P<text>.*?)^#@end\n", re.MULTILINE | re.DOTALL)


def fill(template: str, values: Mapping[str, str], *, parts: Collection[str] = ()) -> str:
    """Replace the placeholders of a template.

    Args:
        template: the text of the template.
        values: the text for each placeholder, written unchanged.
        parts: names of the `#@if NAME` ... `#@end` parts to keep. All other parts are left out.

    Returns:
        The filled text.

    Raises:
        ValueError: a placeholder has no value, or a value has no placeholder.
    """
    template = _PART.sub(lambda part: part["text"] if part["name"] in parts else "", template)
    holes = set(_HOLE.findall(template))
    if holes != set(values):
        raise ValueError(
            f"holes without a value: {sorted(holes - set(values))}; values without a hole: "
            f"{sorted(set(values) - holes)}"
        )
    return _HOLE.sub(lambda hole: values[hole[1]], template)


def built_in(name: str) -> Path:
    """Return the path of one of hpcenv's batch templates."""
    return data_file("sbatch_templates", name)


def data_file(*names: str) -> Path:
    """Return a path next to the code: in `_data` if hpcenv is installed, else in the checkout."""
    package = Path(__file__).parents[1]
    installed = package.joinpath("_data", *names)
    return installed if installed.exists() else package.parent.joinpath(*names)
