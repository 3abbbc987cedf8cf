"""Compare the packages of a host environment with its lockfile before the job is queued, in about one second at most.

Runs on: LOGIN NODE, after the user has accepted the project. Reads only metadata; imports and starts nothing. If the
time is not enough, some packages are not compared here. The nodes compare all packages, and the content of their files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from hpcenv import filesystem
from hpcenv.errors import LockfileStale
from hpcenv.incontainer.probe import packages
from hpcenv.incontainer.probe.environment import Dist, ProbedEnvironment, Site
from hpcenv.project import stale
from hpcenv.project.context import Context
from hpcenv.records.facts import Difference
from hpcenv.records.manifest import Manifest, PackageExpectation
from hpcenv.records.package_fields import package_field
from hpcenv.records.severities import Severities
from hpcenv.submission import module_file
from hpcenv.text import listed

_SECONDS = 1.0
_MOST_NAMED = 5


def compare(manifest: Manifest, context: Context) -> tuple[str, ...]:
    """Refuse a run if the packages differ from the lockfile. If the nodes may have other packages, return only a note.

    Raises:
        LockfileStale: the packages differ, and the nodes would find the same difference and refuse the job.
    """
    folder = module_file.only_packages(manifest.environment, {setting.name: "" for setting in manifest.settings})
    if folder is None or not manifest.launches:
        return ()
    severities = Severities(manifest.severities)
    found = [one for one in differences(folder, manifest.packages, _SECONDS) if severities.of(one.field) == "must"]
    if not found:
        return ()
    shown = listed([f"{one.field} {one.locked} -> {one.found}" for one in found], _MOST_NAMED)
    home = Path(context.environ.get("HOME") or os.path.expanduser("~"))
    if manifest.cluster != "local" and not filesystem.visibility(folder, home=home).shared:
        return (f"{folder} differs from the lockfile; nodes with the same packages will refuse the job: {shown}",)
    path = Path(manifest.lockfile)
    raise LockfileStale(
        f"the environment no longer matches `{path.name}`",
        why=f"{shown}\nevery node would refuse the job",
        hint=stale.hint(stale.from_differences(found), path=path, name=path.name.removesuffix(".lock.toml")),
    )


def differences(
    folder: Path,
    locked: tuple[PackageExpectation, ...],
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> list[Difference]:
    """Return how the packages in a folder differ from the locked packages. At the time limit, the comparison ends.

    Args:
        folder: the folder with the packages of a virtual environment.
        locked: the locked packages.
        seconds: the time limit. Packages whose folder name shows a difference are read first.
        clock: returns the time in seconds.
    """
    until = clock() + seconds
    known = {package.name: package for package in locked}
    site = Site(str(folder), str(folder.parents[2]), True)
    environment = ProbedEnvironment("record", [])
    environment.roots = [os.path.realpath(site.base), os.path.realpath(site.path)]
    # If two folders are for the same package, Python uses the first one.
    names = {packages.name_and_version(name)[0]: name for name in reversed(packages.metadata_folders(site.path))}
    suspects = {name for name, info in names.items() if not _seems_locked(info, known)}
    found: dict[str, Dist] = {}
    for name in sorted(names, key=lambda one: one not in suspects):
        if clock() > until:
            break
        dist = packages.read_dist(environment, site, names[name])
        found[dist.name] = dist
    result = [one for name, dist in found.items() if (one := _difference(dist, known.get(name))) is not None]
    # Missing packages are reported only under two conditions. All suspects must have been read, because only METADATA
    # shows the name of a package. No .pth file may add a folder, because the package may be in that folder.
    if suspects <= found.keys() and module_file.places_below(folder) == ([folder], True):
        absent = sorted(known.keys() - names.keys() - found.keys())
        result += [Difference(field=package_field(one), locked=known[one].version, found="absent") for one in absent]
    return result


def _seems_locked(info: str, known: dict[str, PackageExpectation]) -> bool:
    name, version = packages.name_and_version(info)
    return name in known and known[name].version == version


def _difference(dist: Dist, locked: PackageExpectation | None) -> Difference | None:
    """Return how a package differs from the locked package; None if there is no difference, or if none is known."""
    field = package_field(dist.name)
    if not dist.version:
        return None
    if locked is None or locked.version != dist.version:
        return Difference(field=field, locked="absent" if locked is None else locked.version, found=dist.version)
    if dist.record is None or not locked.record_sha256 or dist.record == locked.record_sha256:
        return None
    return Difference(
        field=f"packages.{dist.name}.record-sha256", locked=locked.record_sha256[:12], found=dist.record[:12]
    )
