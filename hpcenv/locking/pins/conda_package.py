"""One package in a pixi.lock or a conda-lock.yml. Pure.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from hpcenv.errors import LockfileInvalid
from hpcenv.locking.pins.pin import Pin, basename

ARCHIVES = (".conda", ".tar.bz2")
_DISTRIBUTIONS = (".whl", ".tar.gz", ".zip", ".tar.bz2", ".tar.xz", ".tgz")
_PROJECT = (".", "./")
_WORD = re.compile(r"[!-~]{1,200}")
_HEX = {"sha256": re.compile(r"[0-9a-f]{64}"), "md5": re.compile(r"[0-9a-f]{32}")}
_WITHOUT_FILE = "install it from a wheel or a conda package of a channel, or lock without --from"


def archive_parts(url: str) -> tuple[str, str, str]:
    """Return name, version and build from the file name of a conda package (CEP 26).

    Raises:
        ValueError: the URL does not end with the file name of a conda package.
    """
    name = basename(url)
    for ending in ARCHIVES:
        parts = name.removesuffix(ending).rsplit("-", 2)
        if name.endswith(ending) and len(parts) == 3:
            return parts[0], parts[1], parts[2]
    raise ValueError(f"`{name[:200]}` is not the name of a conda package")


def conda_pin(path: Path, source: str, url: str, entry: Mapping[str, Any], *, required: bool = True) -> Pin:
    """Return the pin of a conda package.

    The project itself (`.`) has no file. It may be installed, but it cannot be compared.

    Args:
        path: the file, for messages.
        source: the place in the file, for messages.
        url: the archive's URL.
        entry: the package's entry in the file: the hashes, and perhaps `name`, `version` and `build`.
        required: whether the package must be installed.

    Raises:
        LockfileInvalid: the package has no hash, or is built from source.
        ValueError: a value has a wrong type or form.
    """
    if url in _PROJECT:
        name = word(entry["name"])
        return Pin(manager="conda", name=name, version=None, source=f"{source}, the project itself,", required=False)
    if not basename(url).endswith(ARCHIVES):
        raise LockfileInvalid(
            f"{path}: `{url[:200]}` is not a file of a channel",
            why=f"{source} is built from source where it is installed: no file has a hash",
            hint=_WITHOUT_FILE,
        )
    name, version, build = archive_parts(url)
    hashes = _hashes(entry)
    if not hashes:
        raise _no_hash(path, source, name)
    return Pin(
        manager="conda",
        name=word(entry.get("name", name)),
        version=word(entry.get("version", version)),
        build=word(entry.get("build", build)),
        hashes=hashes,
        files=tuple((basename(url), one[7:]) for one in hashes if one.startswith("sha256:")),
        source=source,
        required=required,
    )


def pypi_pin(path: Path, source: str, url: str, entry: Mapping[str, Any], *, required: bool = True) -> Pin:
    """Return the pin of a Python package that pip or a similar tool installs.

    The project itself (`.`) has no file. It may be installed, but it cannot be compared. The arguments are those of
    `conda_pin`.

    Raises:
        LockfileInvalid: the package has no hash, or comes from a folder or from version control.
        ValueError: a value has a wrong type or form.
    """
    name = canonicalize_name(word(entry["name"]))
    url = url.removeprefix("direct+")
    if url in _PROJECT:
        return Pin(name=name, version=None, source=f"{source}, the project itself,", required=False)
    if url.startswith(("git+", "hg+", "svn+", "bzr+")) or url.partition("?")[0].partition("@")[0].endswith(".git"):
        raise _without_file(path, name, f"{source} is a commit of a repository: no file has a hash")
    filename = basename(url)
    if entry.get("editable") == "true" or not filename.endswith(_DISTRIBUTIONS):
        raise _without_file(path, name, f"{source} is the folder `{url[:200]}`, not a file with a hash")
    sha256 = [one for one in _hashes(entry) if one.startswith("sha256:")]
    if not sha256:
        raise _no_hash(path, source, name)
    return Pin(
        name=name,
        version=word(entry["version"]),
        hashes=tuple(sha256),
        files=((filename, sha256[0][7:]),),
        source=source,
        required=required,
    )


def word(value: object) -> str:
    """Return the value if it is a name, version or build.

    Raises:
        ValueError: the value is not a short text.
    """
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        raise ValueError(f"{str(value)[:60]!r} is not a name or version")
    return value


def _hashes(entry: Mapping[str, Any]) -> tuple[str, ...]:
    hashes = []
    for algorithm, pattern in _HEX.items():
        value = entry.get(algorithm)
        if value is None:
            continue
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(f"{str(value)[:80]!r} is no {algorithm}")
        hashes.append(f"{algorithm}:{value}")
    return tuple(hashes)


def _no_hash(path: Path, source: str, name: str) -> LockfileInvalid:
    return LockfileInvalid(
        f"{path} states no hash of `{name}`",
        why=f"{source} has neither sha256 nor md5, so it is unknown which file is meant",
        hint="lock again with the tool that wrote the file, or lock without --from",
    )


def _without_file(path: Path, name: str, why: str) -> LockfileInvalid:
    return LockfileInvalid(f"{path} pins no file of `{name}`", why=why, hint=_WITHOUT_FILE)
