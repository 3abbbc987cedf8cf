"""One pinned package, and which pins count in an environment. Pure.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from packaging.markers import Environment, Marker

from hpcenv.errors import EnvironmentUnreadable, UsageError

# Parts of the names in conda's `subdir` (rattler_conda_types, Platform, 2026-08).
_CONDA_MACHINES = {"x86_64": "64", "i686": "32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """One package as a file pins it.

    Attributes:
        name: the name in normal form (PEP 503); for a conda package, the name as conda writes it.
        version: None if the file does not fix the version (a directory, a VCS, a range).
        hashes: `ALGORITHM:HEX` for every file that may be installed.
        manager: the tool that installs the package: pip (or a similar tool), or conda.
        build: conda's build string; empty if conda is not the manager.
        files: file name and sha256 of every file that has a name and a sha256.
        source: file and line (or entry) of the pin.
        required: False for a constraint, and for a package that only extras or groups need that were not selected.
    """

    name: str
    version: str | None
    hashes: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    source: str
    required: bool = True
    manager: Literal["pypi", "conda"] = "pypi"
    build: str = ""

    @property
    def filenames(self) -> tuple[str, ...]:
        """The names of the files that may be installed."""
        return tuple(name for name, _ in self.files)


@dataclass(frozen=True, kw_only=True, slots=True)
class PinSource:
    """A file of pins as the user names it, and which parts of it were installed.

    Attributes:
        path: the file; `#CHOSEN` after it is an environment of pixi.lock, or categories of conda-lock.yml.
        extras, groups: the extras and groups of the project that were installed.
        package: the member of the workspace that was installed (uv.lock); empty for the project itself.
    """

    path: Path
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    package: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """The choice as options of `uv sync` and `hpcenv lock`."""
        given = [("--extra", one) for one in self.extras] + [("--group", one) for one in self.groups]
        given += [("--package", self.package)] * bool(self.package)
        return tuple(word for pair in given for word in pair)


def pin_source(
    file: str | Path | None, folder: Path, *, extras: Sequence[str], groups: Sequence[str], package: str
) -> PinSource | None:
    """Return a file of pins and the choice from it; None if no file is named.

    Args:
        file: relative to `folder`.

    Raises:
        UsageError: a choice is given without a file.
    """
    if file is not None:
        path = Path(os.path.abspath(folder / file))
        return PinSource(path=path, extras=tuple(extras), groups=tuple(groups), package=package)
    if extras or groups or package:
        option = "--extra" if extras else "--group" if groups else "--package"
        raise UsageError(f"`{option}` chooses from a file of pins, and none is named", hint="name it, or leave it out")
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class PinSelection:
    """Which pins of a file count.

    Attributes:
        environment: the examined environment's values for markers.
        extras, groups: the extras and groups of the project that were installed.
        chosen: the text after `#` in `--from FILE#CHOSEN`; empty without a choice.
    """

    environment: Mapping[str, str]
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    chosen: str = ""

    @property
    def subdir(self) -> str:
        """The environment's platform as conda names it: `linux-64`, `linux-aarch64`."""
        machine = self.environment.get("platform_machine", "")
        return f"linux-{_CONDA_MACHINES.get(machine, machine)}"

    def holds(self, marker: Marker | None, **more: Any) -> bool:
        """Return whether a marker is true. `more` has the value of `extra`, or of `extras` and `dependency_groups`."""
        if marker is None:
            return True
        values: Any = Environment(**{**self.environment, **more})  # type: ignore[typeddict-item]
        context: Literal["lock_file", "metadata"] = "lock_file" if "extras" in more else "metadata"
        return marker.evaluate(values, context=context)


def marker_environment(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the values for markers (PEP 508), from the probe's values for the examined environment.

    Raises:
        EnvironmentUnreadable: the environment's Python version is unknown.
    """
    version = str(facts.get("python.version", ""))
    if not re.match(r"\d+\.\d+", version):
        raise EnvironmentUnreadable("cannot evaluate markers: the environment's Python version is unknown")
    implementation = str(facts.get("python.implementation", "cpython")).lower()
    return {
        "implementation_name": implementation,
        "implementation_version": version,
        "os_name": "posix",
        "platform_machine": str(facts.get("system.machine", "")),
        "platform_python_implementation": {"cpython": "CPython", "pypy": "PyPy"}.get(implementation, implementation),
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": version,
        "python_version": ".".join(version.split(".")[:2]),
        "sys_platform": "linux",
    }


def basename(url: str) -> str:
    """Return the file name in a URL or path; empty if there is no file name."""
    try:
        path = urlsplit(url).path
    except ValueError:
        return ""
    return unquote(path.rsplit("/", 1)[-1])


def sorted_hashes(values: Iterable[str]) -> tuple[str, ...]:
    """Return the hashes sorted, each once."""
    return tuple(sorted(set(values)))


def describe_error(error: BaseException) -> str:
    """Return the error of a parser as one line of text."""
    return f"{type(error).__name__}: {error}"
