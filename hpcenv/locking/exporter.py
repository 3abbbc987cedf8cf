"""The parts of an export format.

Runs on: LOGIN NODE. Each module in `formats/` is one format. Its constant `EXPORTER` describes the format. A new format
needs only a new module in `formats/`, because `exporters()` of locking/export.py finds this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcenv.project.lockfile import Lockfile


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A package that is not in the export, and the reason."""

    name: str
    version: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """An export's text.

    Attributes:
        count: number of packages in the text.
        left_out: packages that are not in the text.
        notes: notes for the user about the text.
    """

    text: str
    count: int
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """The data that a format may need in addition to the lockfile.

    Attributes:
        name: the lockfile's name.
        environ: the user's environment; pip finds its configuration through it.
    """

    name: str
    environ: Mapping[str, str]


def _no_path_notes(_path: Path) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """One export format.

    Attributes:
        name: the word after `hpcenv export`; also the name of the format's module.
        help: a short description of the format for `hpcenv export --help`.
        render: returns the text; raises HpcenvError if the text cannot be made.
        is_ours: whether a text is an export of this format by hpcenv, so that a new export may replace it.
        needs_index: whether `render` asks pip's index. The other formats need the lockfile only.
        path_notes: notes for the user about the name of the file that was written.
    """

    name: str
    help: str
    render: Callable[[Lockfile, ExportRequest], Rendered]
    is_ours: Callable[[str], bool]
    needs_index: bool = False
    path_notes: Callable[[Path], tuple[str, ...]] = _no_path_notes
