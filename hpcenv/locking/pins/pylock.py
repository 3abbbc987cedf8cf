"""Read pins from a pylock.toml or `pylock.NAME.toml` (PEP 751), with `packaging.pylock`. Pure.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.pylock import Pylock, PylockValidationError

from hpcenv.errors import LockfileInvalid
from hpcenv.locking.pins.pin import Pin, PinSelection, sorted_hashes

if TYPE_CHECKING:
    from packaging.markers import Marker


def select_pins(path: Path, data: Mapping[str, Any], selection: PinSelection) -> Iterator[Pin]:
    """Yield the packages of a pylock.toml.

    Raises:
        LockfileInvalid: the file is not valid, or is not for this environment.
    """
    try:
        lock = Pylock.from_dict(data)
    except PylockValidationError as error:
        raise LockfileInvalid(f"`{path}` is not a valid pylock.toml", why=str(error)) from error
    if lock.environments and not any(_in_lock(selection, marker, lock) for marker in lock.environments):
        raise LockfileInvalid(
            f"`{path}` is not for this environment",
            why="none of its `environments` is true here: " + "; ".join(map(str, lock.environments)),
        )
    _require_python(path, lock, selection)
    _require_known(path, lock, selection)
    for number, package in enumerate(lock.packages):
        required = _in_lock(selection, package.marker, lock)
        if not required and not _in_lock(selection, package.marker, lock, everything=True):
            continue
        artifacts = [*(package.wheels or ()), *([package.sdist] if package.sdist else ())]
        hashes = [item.hashes for item in artifacts] + ([package.archive.hashes] if package.archive else [])
        yield Pin(
            name=package.name,
            version=None if package.version is None else str(package.version),
            hashes=sorted_hashes(f"{kind}:{value}" for some in hashes for kind, value in some.items()),
            files=tuple(
                sorted((item.filename, item.hashes["sha256"]) for item in artifacts if "sha256" in item.hashes)
            ),
            source=f"{path.name} packages[{number}]",
            required=required,
        )


def _require_python(path: Path, lock: Pylock, selection: PinSelection) -> None:
    """Refuse a pylock.toml for a different Python. The standard requires this (PEP 751, requires-python).

    Raises:
        LockfileInvalid: the file is for a different Python.
    """
    version = selection.environment["python_full_version"]
    if lock.requires_python is not None and not lock.requires_python.contains(version, prereleases=True):
        raise LockfileInvalid(
            f"`{path}` is not for Python {version}",
            why=f"its `requires-python` is `{lock.requires_python}`",
            hint="use a Python that it allows, or lock the packages for this Python",
        )


def _require_known(path: Path, lock: Pylock, selection: PinSelection) -> None:
    """Refuse extras and groups that the file does not have.

    Raises:
        LockfileInvalid: an extra or group is missing. The message names the extras and groups that the file has.
    """
    groups = (*(lock.dependency_groups or ()), *(lock.default_groups or ()))
    for option, asked, known in (
        ("--extra", selection.extras, lock.extras or ()),
        ("--group", selection.groups, groups),
    ):
        for one in asked:
            if one not in known:
                has = ", ".join(known) or "none"
                raise LockfileInvalid(f"`{path}` has no `{option} {one}`", why=f"it has {has}", hint="name one of them")


def _in_lock(selection: PinSelection, marker: Marker | None, lock: Any, *, everything: bool = False) -> bool:
    extras = set(lock.extras or ()) if everything else set(selection.extras)
    groups = set(lock.dependency_groups or ()) if everything else {*selection.groups, *(lock.default_groups or ())}
    return selection.holds(marker, extras=extras, dependency_groups=groups)
