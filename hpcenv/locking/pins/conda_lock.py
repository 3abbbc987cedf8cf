"""conda-lock.yml, version 1, as conda-lock 1 to 4 write it (conda_lock/lockfile/v1/models.py of 4.0.3). Pure.

Runs on: LOGIN NODE.

    version: 1
    metadata: {platforms: [linux-64], ...}
    package:
    - name: cudnn
      version: 9.10.2.21
      manager: conda
      platform: linux-64
      url: https://.../linux-64/cudnn-9.10.2.21-h1_0.conda
      hash: {md5: ..., sha256: ...}
      category: main
      optional: false

A package must be installed if its category is `main`, or a category that `#CATEGORY,...` chose. All other packages may
be installed. A package can have several entries, one for each category.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from hpcenv.errors import LockfileInvalid
from hpcenv.locking.pins.conda_package import conda_pin, pypi_pin
from hpcenv.locking.pins.pin import Pin, PinSelection, describe_error

VERSION = "1"
_MAIN = "main"


def select_pins(path: Path, data: Mapping[str, Any], selection: PinSelection) -> Iterator[Pin]:
    """Yield the packages for one platform. `selection.chosen` has the categories, separated by commas.

    Raises:
        LockfileInvalid: the file cannot be read, does not have the category or platform, or names a package for which
            no file has a hash.
    """
    try:
        packages = data["package"]
        here = [(n, entry) for n, entry in enumerate(packages) if entry["platform"] == selection.subdir]
        if not here:
            raise _other_platform(path, packages, selection.subdir)
        categories = _categories(path, here, selection.chosen)
        for number, entry in here:
            yield _pin(path, number, entry, required=_category(entry) in categories)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LockfileInvalid(
            f"`{path}` is not a conda-lock.yml that hpcenv can read", why=describe_error(error)
        ) from error


def require_known(path: Path, data: Mapping[str, Any], chosen: str) -> None:
    """Refuse a file with a different format or version. `select_pins` checks the categories.

    Raises:
        LockfileInvalid: the file has a different format or version.
    """
    del chosen
    if "dependencies" in data and "package" not in data:
        raise LockfileInvalid(
            f"`{path}` is an environment.yml: it asks for packages, and pins no files",
            why="only a lockfile says which builds must be installed",
            hint=f"make one and install from it: `conda-lock lock --file {quote(path.name)} && conda-lock install`",
        )
    if "package" not in data:
        raise LockfileInvalid(
            f"`{path}` is neither a pixi.lock nor a conda-lock.yml",
            why="it has neither `environments` nor `package`",
            hint="name a pylock.toml, requirements.txt, pixi.lock or conda-lock.yml",
        )
    if data.get("version") != VERSION:
        raise LockfileInvalid(
            f"`{path}` is a conda-lock.yml of version {str(data.get('version'))[:20]}",
            why=f"hpcenv reads version {VERSION}",
            hint="a newer hpcenv may read this version",
        )


def _pin(path: Path, number: int, entry: Mapping[str, Any], *, required: bool) -> Pin:
    if entry["manager"] not in ("conda", "pip"):
        raise ValueError(f"package[{number}] has the manager {str(entry['manager'])[:40]!r}")
    # conda-lock writes an empty hash if it does not know the hash.
    hashes = {name: value for name, value in entry["hash"].items() if value not in ("", "null", "~")}
    make = conda_pin if entry["manager"] == "conda" else pypi_pin
    # For a direct URL, `name` is the package's name, and `source` is the URL as the user wrote it.
    known = {key: entry[key] for key in ("name", "version", "build") if key in entry} | hashes
    return make(path, f"{path.name} package[{number}]", str(entry["url"]), known, required=required)


def _category(entry: Mapping[str, Any]) -> str:
    return str(entry.get("category", _MAIN))


def _categories(path: Path, entries: Sequence[tuple[int, Mapping[str, Any]]], chosen: str) -> set[str]:
    """Return the categories whose packages must be installed."""
    present = {_category(entry) for _, entry in entries}
    wanted = set(chosen.split(",")) if chosen else set()
    unknown = sorted(wanted - present - {_MAIN})
    if unknown:
        raise LockfileInvalid(
            f"`{path}` has no category `{unknown[0][:60]}`",
            why=f"it has {', '.join(sorted(present)[:20])}",
            hint=f"name other categories after `#`, separated by commas, or none: --from {quote(path.name)}",
        )
    return wanted | {_MAIN}


def _other_platform(path: Path, packages: Sequence[Mapping[str, Any]], subdir: str) -> LockfileInvalid:
    platforms = sorted({str(entry["platform"]) for entry in packages})
    return LockfileInvalid(
        f"`{path}` has no packages for the platform {subdir}",
        why=f"it has {', '.join(platforms[:20]) or 'no packages'}",
        hint=f"lock for it too, then install from the file again: conda-lock lock --platform {subdir}",
    )
