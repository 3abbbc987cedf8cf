"""TOML that somebody else may have written.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hpcenv.errors import LockfileInvalid
from hpcenv.locking.pins.pin import describe_error
from hpcenv.locking.pins.text_file import LONGEST_FILE
from hpcenv.project import toml_files

if sys.version_info >= (3, 11):
    import tomllib


def parse_toml(path: Path, text: str) -> dict[str, Any]:
    """Return the data of a TOML file. tomlkit is only for Python 3.10: it needs seconds for a large pylock.toml."""
    toml_files.require_short_keys(text.encode("utf-8", "replace"), path, error=LockfileInvalid)
    if sys.version_info >= (3, 11):
        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise LockfileInvalid(f"`{path}` is not TOML", why=describe_error(error)) from error
    else:
        return toml_files.read(path, error=LockfileInvalid, most=LONGEST_FILE)
