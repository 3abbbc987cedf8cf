"""The compatibility table as a project uses it: the packaged one, or `compat-file` under [submit] in hpcenv.toml.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from pathlib import Path

from hpcenv.errors import SpecError
from hpcenv.node.check.compat import table_file
from hpcenv.node.check.compat.table import PACKAGED, Compat
from hpcenv.project import toml_files


def table(path: Path | None = None) -> Compat:
    """Return the compatibility table.

    Args:
        path: a table to use in place of the one in hpcenv.

    Raises:
        SpecError: it cannot be read, or it is no such table.
    """
    path = path or PACKAGED
    return table_file.parse(toml_files.read(path, error=SpecError), origin=str(path))
