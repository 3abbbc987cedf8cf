"""The source of a distribution.

Runs on: inside the image.
"""

from __future__ import annotations

import os

from hpcenv.incontainer.probe.editable import read_source
from hpcenv.incontainer.probe.files import read_metadata
from hpcenv.incontainer.probe.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hpcenv.incontainer.probe.environment import Dist, ProbedEnvironment


def read_origin(env: ProbedEnvironment, dist: Dist) -> None:
    """Read source, direct URL (PEP 610), build and tags."""
    info = os.path.join(dist.site.path, dist.folder)
    wheel = {}
    try:
        wheel = _all_values(read_metadata(env, dist, os.path.join(info, "WHEEL")))
    except (OSError, ValueError):
        pass  # an egg-info, or a dist-info from which a system package removed files
    dist.build = " ".join(wheel.get("build", [])[:1])
    dist.tags = sorted(set(wheel.get("tag", [])))[:100]
    dist.source = "wheel" if wheel.get("wheel-version") else "unknown"
    if dist.installer == "conda":
        dist.source = "conda"
    elif os.path.isfile(os.path.join(info, "installed-files.txt")):
        dist.source = "sdist"  # pip wrote this file when it ran setup.py install
    try:
        data = read_metadata(env, dist, os.path.join(info, "direct_url.json"))
    except (FileNotFoundError, NotADirectoryError):
        return
    _read_direct_url(env, dist, data)


def _all_values(data: bytes) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for line in data.decode("utf-8", "surrogateescape").splitlines()[:1000]:
        key, colon, value = line.partition(":")
        if colon:
            values.setdefault(key.strip().lower(), []).append(printable(value.strip())[:255])
    return values


def _read_direct_url(env: ProbedEnvironment, dist: Dist, data: bytes) -> None:
    import json

    origin = json.loads(data)
    url = str(origin.get("url", "?"))
    shown = printable(_safe_url(url))[:2000]
    direct: dict[str, Any] = {"url": shown}
    if "vcs_info" in origin:
        dist.source = "vcs"
        direct["commit-id"] = printable(str(origin["vcs_info"].get("commit_id", "")))[:255]
    elif "archive_info" in origin:
        dist.source = "wheel" if _url_path(url).endswith(".whl") else "archive"
        digest = _archive_hash(origin["archive_info"])
        if digest:
            direct["hash"] = digest
    else:
        dist.source = "directory"
    dist.direct_url = direct
    if url.startswith("file:") and dist.source == "wheel":
        dist.wheel_file = os.path.normpath(_url_path(url))
    if origin.get("dir_info", {}).get("editable") is True:
        dist.source = "editable"
        direct["editable"] = True
        dist.reasons.append("editable install of " + shown)
        if url.startswith("file:"):
            read_source(env, dist, os.path.normpath(_url_path(url)))


def _archive_hash(info: dict[str, Any]) -> str:
    hashes = info.get("hashes")
    if isinstance(hashes, dict) and hashes:
        algorithm = "sha256" if "sha256" in hashes else sorted(map(str, hashes))[0]
        return printable(f"{algorithm}={hashes[algorithm]}")[:255]
    return printable(str(info.get("hash") or ""))[:255]


def _safe_url(url: str) -> str:
    """Return a URL without user, password and query. From a `file:` URL, only the file's name is kept."""
    scheme, colon, rest = url.partition(":")
    rest = rest.partition("?")[0].partition("#")[0]
    if scheme == "file":
        return "file:" + rest.rstrip("/").rpartition("/")[2]
    if not colon or not rest.startswith("//"):
        return "?"
    host, slash, path = rest[2:].partition("/")
    return scheme + "://" + host.rpartition("@")[2] + slash + path


def _url_path(url: str) -> str:
    from urllib.parse import unquote

    rest = url.partition(":")[2].partition("?")[0].partition("#")[0]
    return unquote("/" + rest[2:].partition("/")[2] if rest.startswith("//") else rest)
