"""Read TOML that may come from a person whom the user does not know.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from hpcenv.errors import HpcenvError, LockfileInvalid
from hpcenv.locking.pins.pin import describe_error
from hpcenv.locking.pins.text_file import read_text
from hpcenv.project import toml_files

if sys.version_info >= (3, 11):
    import tomllib


def parse_toml(path: Path, text: str) -> dict[str, Any]:
    """Return the data of a TOML file.

    Only Python 3.10 uses tomlkit, which is slow: a large pylock.toml takes seconds.
    """
    toml_files.require_short_keys(text.encode("utf-8", "replace"), path, error=LockfileInvalid)
    if sys.version_info >= (3, 11):
        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise LockfileInvalid(f"`{path}` is not TOML", why=describe_error(error)) from error
    else:
        return toml_files.loads(text.encode(), path, error=LockfileInvalid)


def project_name(folder: Path) -> str | None:
    """Return the name under [project] in a folder's pyproject.toml, in normal form (PEP 503); None without a name."""
    name = _project(folder).get("name")
    return canonicalize_name(name) if isinstance(name, str) else None


def has_fixed_metadata(folder: Path) -> bool:
    """Return whether a folder's pyproject.toml itself lists the requirements, so that no build is needed."""
    table = _project(folder)
    return bool(table) and not table.get("dynamic")


def _project(folder: Path) -> dict[str, Any]:
    """Return [project] of a folder's pyproject.toml; empty if it cannot be read or has no such table."""
    path = folder / "pyproject.toml"
    try:
        table = parse_toml(path, read_text(path)).get("project")
    except HpcenvError:
        return {}
    return table if isinstance(table, dict) else {}
