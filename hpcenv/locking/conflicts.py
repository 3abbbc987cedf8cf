"""Installed packages that do not fit together. `pip check` finds the same conflicts. Pure.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

# A METADATA file comes from the image, which is not trusted. So longer lists are cut.
MOST_REQUIREMENTS = 300


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A requirement of an installed package that its environment does not meet.

    Attributes:
        package: name and version of the package that requires something.
        requirement: the requirement of this package, without the marker.
        found: the installed version of the required package; empty if it is not installed.
    """

    package: str
    requirement: str
    found: str

    def __str__(self) -> str:
        found = f"{self.found} is installed" if self.found else "it is not installed"
        return f"{self.package} requires {self.requirement}: {found}"


def find_conflicts(
    versions: Mapping[str, str], requirements: Mapping[str, Iterable[str]], environment: Mapping[str, str]
) -> Iterator[Conflict]:
    """Yield the requirements that are not met, sorted by the name of the package with the requirement.

    Extras are ignored, because METADATA does not say which extras were requested. Requirements that are not valid by
    PEP 508 and versions that are not valid by PEP 440 are not judged.

    Args:
        versions: installed packages, by their normal name.
        requirements: the `Requires-Dist` lines of each package.
        environment: values for markers.
    """
    for name in sorted(requirements):
        for text in requirements[name]:
            required = _parsed(text)
            if required is None or not _applies(required, environment):
                continue
            found = versions.get(canonicalize_name(required.name), "")
            if not found or not _is_met(required, found):
                wanted = f"{required.name}{required.specifier}"
                yield Conflict(package=f"{name} {versions.get(name, '')}".strip(), requirement=wanted, found=found)


def _parsed(text: str) -> Requirement | None:
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def _applies(required: Requirement, environment: Mapping[str, str]) -> bool:
    if required.marker is None:
        return True
    try:
        return required.marker.evaluate({**environment, "extra": ""})
    except (UndefinedComparison, UndefinedEnvironmentName, InvalidVersion):
        return False


def _is_met(required: Requirement, version: str) -> bool:
    try:
        return required.url is not None or required.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True
