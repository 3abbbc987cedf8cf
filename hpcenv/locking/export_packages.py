"""Find out whether pip can install a locked package, with which line, and with which hash.

Runs on: LOGIN NODE. The export formats share this module.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from packaging.version import InvalidVersion, Version

from hpcenv.project.lockfile import DistTable, Lockfile

if TYPE_CHECKING:
    from packageurl import PackageURL

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,254}[A-Za-z0-9])?")
VERSION = re.compile(r"[!-~]{1,200}")
HEX_SHA256 = re.compile(r"[0-9a-f]{64}")
_URL = re.compile(r"https?://[A-Za-z0-9.:\[\]_-]+/[A-Za-z0-9._~%!$&'()*+,;=:@/-]{1,1900}")
# These sources are not an index. If pip had only name and version, it would install a different package.
NO_INDEX = {
    "editable": "editable install",
    "vcs": "installed from version control",
    "directory": "installed from a directory",
    "archive": "installed from an archive",
    "conda": "installed by conda",
    "dpkg": "installed by dpkg",
}
MODIFIED = "modified after its installation; the export has the original package"


def canonical(name: str) -> str:
    """Return a package's name in the form that indexes use (PEP 503).

    The result is the same as the result of `packaging.utils.canonicalize_name`. But the module of that function also
    loads the tags of platforms. This takes longer than all other work for the `requirements.txt` of a run folder.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def public_url(url: str) -> tuple[str | None, str]:
    """Return a URL without user and password that can be published; or None, and why it cannot be published.

    A file URL would make other users install from a path that they did not choose. A query may contain a secret.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        return None, f"its URL begins with `{parts.scheme}:`, so it is valid on one machine only"
    if parts.query:
        return None, "its URL contains a query, which may be a secret"
    plain = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    return (plain, "") if _URL.fullmatch(plain) else (None, "its URL contains characters that are not allowed in a URL")


def sorted_packages(lockfile: Lockfile) -> list[DistTable]:
    """Return the packages in an order that does not depend on their order in the lockfile."""
    return sorted(lockfile.packages.dist, key=lambda dist: (canonical(dist.name), dist.version, str(dist)))


def judged_packages(lockfile: Lockfile, judge: Callable[[DistTable], str]) -> Iterator[tuple[DistTable, str]]:
    """Yield every package in order, with the reason why it is left out ("" if it is not left out).

    Args:
        lockfile: the lockfile.
        judge: `why_no_pin` or `why_no_wheel`.
    """
    count = Counter(canonical(dist.name) for dist in lockfile.packages.dist)
    for dist in sorted_packages(lockfile):
        times = count[canonical(dist.name)]
        yield dist, judge(dist) if times == 1 else f"it is installed {times} times; pip can install it only once"


def why_no_pin(dist: DistTable) -> str:
    """Return why pip cannot find this package by name and version; "" if pip can find it."""
    if not NAME.fullmatch(dist.name):
        return "pip does not accept its name"
    try:
        Version(dist.version)
    except InvalidVersion:
        return "pip does not accept its version (PEP 440)"
    if not dist.version.isascii() or dist.version.strip() != dist.version:
        return "pip does not accept its version (PEP 440)"
    if dist.source in NO_INDEX and proved_sha256(dist) is None and not is_built(dist):
        return _origin(dist)
    return ""


def is_built(dist: DistTable) -> bool:
    """Return whether a package was compiled in its image. No index has the wheel of such a package."""
    return dist.wheel is not None and dist.wheel.proof == "built"


def why_no_wheel(dist: DistTable) -> str:
    """Return why there is no hash that pip could require; "" if there is a hash."""
    if is_built(dist):
        return "it was compiled in its image: no index has this wheel (`hpcenv image init --build` compiles it)"
    problem = why_no_pin(dist)
    if not problem and of_one_machine(dist):
        return "installed from a file of one machine: no index is known to have this wheel"
    if problem or proved_sha256(dist) is not None:
        return problem
    if dist.wheel is None:
        return "the lockfile names no wheel of it; `hpcenv lock` looks for a wheel"
    return dist.wheel.reason or "its wheel has no proof"


def _origin(dist: DistTable) -> str:
    """Return the source of a package that does not come from an index."""
    text = NO_INDEX[str(dist.source)]
    direct = dist.direct_url
    if direct is not None:
        text += f" {direct.url}" if direct.url else ""
        text += f" at {direct.commit_id}" if direct.commit_id else ""
        text += ", with changes that are not committed" if direct.dirty else ""
    return text


def proved_sha256(dist: DistTable) -> str | None:
    """Return the confirmed sha256 of a package's wheel if other users can get this wheel; otherwise None."""
    wheel = dist.wheel
    if (
        wheel is None
        or wheel.proof in ("built", "claimed", "none")
        or wheel.sha256 is None
        or not HEX_SHA256.fullmatch(wheel.sha256)
    ):
        return None
    return wheel.sha256


def direct_url_of(dist: DistTable) -> str | None:
    """Return the URL from which a wheel was installed, if other users can download from this URL; otherwise None."""
    direct = dist.direct_url
    if direct is None or not direct.url or proved_sha256(dist) is None or not direct.url.endswith(".whl"):
        return None
    # The confirmed wheel may be a different file with the same content, from an index. pip would compare the file at
    # the URL with the hash of that other file.
    return public_url(direct.url)[0] if direct.hash in (None, f"sha256={proved_sha256(dist)}") else None


def of_one_machine(dist: DistTable) -> bool:
    """Return whether a package was installed from a local file, and no index is known to have its wheel."""
    url = (dist.direct_url and dist.direct_url.url) or ""
    return url.startswith("file:") and url.endswith(".whl") and not (dist.wheel and dist.wheel.proof == "record")


def pin_of(dist: DistTable) -> str:
    """Return the requirement (PEP 508) with which pip installs exactly this package."""
    direct = direct_url_of(dist)
    return f"{dist.name}=={dist.version}" if direct is None else f"{dist.name} @ {direct}"


def is_modified(dist: DistTable) -> bool:
    """Return whether files of the package were changed after its installation."""
    return dist.content_sha256 is not None and dist.record_sha256 is not None


def python_version(lockfile: Lockfile) -> str | None:
    """Return the locked version of Python; None if the value is unknown or not a version."""
    version = lockfile.facts.get("python.version")
    return version if isinstance(version, str) and re.fullmatch(r"\d+(\.\d+){1,2}((a|b|rc)\d+)?", version) else None


def package_url(dist: DistTable) -> PackageURL | None:
    """Return a package URL (purl). Its type is pypi only for a package that an index can have."""
    from packageurl import PackageURL

    if not NAME.fullmatch(dist.name) or not VERSION.fullmatch(dist.version):
        return None
    proved = proved_sha256(dist) is not None
    if dist.source in NO_INDEX and not proved and not is_built(dist):
        kind = "conda" if dist.source == "conda" else "generic"
        return PackageURL(type=kind, name=dist.name, version=dist.version)
    filename = dist.wheel.filename if dist.wheel and proved else None
    return PackageURL(
        type="pypi",
        name=canonical(dist.name),
        version=dist.version,
        qualifiers={"file_name": filename} if filename else None,
    )
