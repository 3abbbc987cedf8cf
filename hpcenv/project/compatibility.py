"""The compatibility table of hpcenv.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from hpcenv.errors import SpecError
from hpcenv.judge.compat import table_file
from hpcenv.judge.compat.compat_table import PACKAGED, Compat
from hpcenv.project import toml_files


def table() -> Compat:
    """Return the compatibility table."""
    return table_file.parse(toml_files.read(PACKAGED, error=SpecError), origin=str(PACKAGED))
