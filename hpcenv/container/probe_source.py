"""The probe as one text, which a Python inside an image reads from its standard input.

Runs on: LOGIN NODE and COMPUTE NODE. The probe needs no mount in the image.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping

from hpcenv.incontainer import probe

_START = "__main__"


def probe_source() -> str:
    """Return the program that `python3 -B - --level LEVEL` runs (see incontainer/probe/__init__.py)."""
    return join_chapters(read_chapters())


def read_chapters() -> dict[str, str]:
    """Return the probe's modules: name -> source text."""
    names = sorted(("__init__", *(module.name for module in pkgutil.iter_modules(probe.__path__))))
    # This also works if hpcenv runs from the archive in a run folder.
    return {name: (pkgutil.get_data(probe.__name__, f"{name}.py") or b"").decode() for name in names}


def join_chapters(chapters: Mapping[str, str]) -> str:
    """Return one program from these modules. It contains their texts as data, and code that imports this data."""
    sources = {name: text for name, text in chapters.items() if name != _START}
    return f"SOURCES = {sources!a}\n{chapters[_START]}"
