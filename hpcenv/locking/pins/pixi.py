"""pixi.lock, versions 4 to 7. Pure.

Runs on: LOGIN NODE.

    version: 6
    environments:
      default:
        packages:
          linux-64:
          - conda: https://.../linux-64/cudnn-9.10.2.21-h1_0.conda
          - pypi: https://.../numpy-2.2.1-cp313-cp313-manylinux_2_17_x86_64.whl
    packages:
    - conda: https://.../linux-64/cudnn-9.10.2.21-h1_0.conda
      sha256: ...

`rattler_lock` defines the formats (crates/rattler_lock/src/parse in conda/rattler, 92dc77433054, 2026-08-22):

    4, 5   an entry of `packages` has `kind`, `name`, `version`, `build`, and `url` or `path`
    6      an entry has `conda: URL` or `pypi: URL`; name, version and build of a conda package may be only in the URL
    7      `platforms` lists names of platforms with their `subdir`; a package from source has `conda_source:`

Versions 1 to 3 had no environments. pixi has not written these versions since April 2024.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from hpcenv.errors import LockfileInvalid
from hpcenv.locking.pins.conda_package import conda_pin, pypi_pin
from hpcenv.locking.pins.pin import Pin, PinSelection, describe_error

VERSIONS = ("4", "5", "6", "7")
DEFAULT = "default"


def select_pins(path: Path, data: Mapping[str, Any], selection: PinSelection) -> Iterator[Pin]:
    """Yield the packages of one environment on one platform.

    `selection.chosen` is the environment, or `ENVIRONMENT@PLATFORM`. If nothing is chosen,
    the environment of the file is used; with several environments, `default` is used.

    Raises:
        LockfileInvalid: the file cannot be read, does not have the platform, or names a package for which no file has
            a hash.
    """
    name, _, platform = selection.chosen.partition("@")
    try:
        environment = name or _default(data["environments"])
        platform = _platform(path, data, environment, platform, selection)
        listed = _listed(data["packages"])
        for wanted in data["environments"][environment]["packages"][platform]:
            kind, url = _selector(wanted)
            yield _pin(path, listed, kind, url)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LockfileInvalid(f"`{path}` is not a pixi.lock that hpcenv can read", why=describe_error(error)) from error


def require_known(path: Path, data: Mapping[str, Any], chosen: str) -> None:
    """Refuse a file with an unknown version, or without the chosen environment.

    Raises:
        LockfileInvalid: the version is unknown, or the environment is not in the file.
    """
    version = data.get("version")
    if version not in VERSIONS:
        old = version in ("1", "2", "3")
        raise LockfileInvalid(
            f"`{path}` is a pixi.lock of version {str(version)[:20]}",
            why=f"hpcenv reads the versions {VERSIONS[0]} to {VERSIONS[-1]}",
            hint="write the file again with a newer pixi: pixi lock" if old else "a newer hpcenv may read this version",
        )
    found = data.get("environments")
    if not isinstance(found, dict):
        raise LockfileInvalid(f"`{path}` is not a pixi.lock that hpcenv can read", why="it has no `environments`")
    wanted = chosen.partition("@")[0] or _default(found)
    if wanted not in found:
        raise LockfileInvalid(
            f"`{path}` has no environment `{wanted[:60]}`",
            why=f"it has {', '.join(sorted(found)[:20]) or 'none'}",
            hint=f"name one after `#`: --from {quote(path.name)}#{quote(str(min(found, default='NAME')))}",
        )


def environments(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the environments of a file that has several; empty if it has only one."""
    names = sorted(data["environments"])
    return tuple(names[:20]) if len(names) > 1 else ()


def _default(found: Mapping[str, Any]) -> str:
    return next(iter(found)) if len(found) == 1 else DEFAULT


def _platform(path: Path, data: Mapping[str, Any], environment: str, name: str, selection: PinSelection) -> str:
    """Return the platform of an environment.

    In version 7 and newer, the user must choose if several platforms have this `subdir`.
    """
    platforms = data["environments"][environment]["packages"]
    subdirs = {entry["name"]: entry.get("subdir", entry["name"]) for entry in data.get("platforms", ())}
    fitting = [one for one in platforms if subdirs.get(one, one) == selection.subdir and name in ("", one)]
    if len(fitting) == 1:
        return str(fitting[0])
    asked = f"platform `{name}` of {selection.subdir}" if name else f"platform {selection.subdir}"
    if fitting:
        what, why = f"several platforms for {selection.subdir}", f"they are {', '.join(fitting)}"
        hint = f"name one: --from {quote(path.name)}#{quote(environment)}@{quote(str(fitting[0]))}"
    else:
        what, why = f"no {asked}", f"it has {', '.join(platforms) or 'none'}"
        hint = (
            f"add it under [workspace] platforms of pixi.toml, then: pixi lock && pixi install -e {quote(environment)}"
        )
    raise LockfileInvalid(f"the environment `{environment}` in `{path}` has {what}", why=why, hint=hint)


def _listed(packages: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], tuple[int, Mapping[str, Any]]]:
    """Return a dict: kind and location of a package -> its position in the list, and its entry."""
    found: dict[tuple[str, str], tuple[int, Mapping[str, Any]]] = {}
    for number, entry in enumerate(packages):
        if "kind" in entry:
            key = entry["kind"], entry["url"] if "url" in entry else entry["path"]
        else:
            key = _selector(entry)
        known = found.setdefault(key, (number, entry))[1]
        if any(known.get(algorithm) != entry.get(algorithm) for algorithm in ("sha256", "md5")):
            raise ValueError(f"packages[{number}] and another entry have the same URL and different hashes")
    return found


def _selector(entry: Mapping[str, Any]) -> tuple[str, str]:
    kinds = [kind for kind in ("conda", "pypi", "conda_source") if kind in entry]
    if len(kinds) != 1 or not isinstance(entry[kinds[0]], str):
        raise ValueError(f"{str(dict(entry))[:80]} names no package")
    return kinds[0], entry[kinds[0]]


def _pin(path: Path, listed: Mapping[tuple[str, str], tuple[int, Mapping[str, Any]]], kind: str, url: str) -> Pin:
    if kind == "conda_source":  # `NAME[HASH] @ PATH`
        name, _, place = url.partition(" @ ")
        return conda_pin(path, f"the conda_source `{url[:200]}`", place or url, {"name": name.partition("[")[0]})
    if (kind, url) not in listed:
        raise ValueError(f"`{url[:200]}` is in an environment, and not under `packages`")
    number, entry = listed[kind, url]
    make = conda_pin if kind == "conda" else pypi_pin
    return make(path, f"{path.name} packages[{number}]", url, entry)
