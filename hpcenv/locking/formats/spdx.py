"""SPDX 2.3 (ISO/IEC 5962 is its version 2.2.1), a bill of materials: packages and the SIF, with their digests.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from hpcenv.errors import Command, ToolMissing
from hpcenv.locking.export_notes import notes_on_edits
from hpcenv.locking.export_packages import HEX_SHA256, package_url, proved_sha256, python_version, sorted_packages
from hpcenv.locking.exporter import Exporter, Rendered
from hpcenv.project.lockfile import DistTable, Lockfile

_ROOT = "SPDXRef-environment"
# SPDX requires a time. The same lockfile must give the same bytes, so it is that of no build.
_NO_TIME = "1970-01-01T00:00:00Z"


def spdx(lockfile: Lockfile) -> Rendered:
    """Return a bill of materials as JSON; its subject is the environment, its version is the fingerprint."""
    root = {**_package(_ROOT, "hpcenv-environment", lockfile.fingerprint), "primaryPackagePurpose": "APPLICATION"}
    packages = [root, *_parts(lockfile)]
    relations = [
        {"spdxElementId": _ROOT, "relationshipType": "CONTAINS", "relatedSpdxElement": one["SPDXID"]}
        for one in packages[1:]
    ]
    described = {"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES", "relatedSpdxElement": _ROOT}
    document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": "hpcenv-environment",
        "documentNamespace": f"urn:uuid:{uuid5(NAMESPACE_URL, f'hpcenv:{lockfile.fingerprint}')}",
        "creationInfo": {"created": _NO_TIME, "creators": ["Tool: hpcenv"]},
        "packages": packages,
        "relationships": [described, *relations],
    }
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    return Rendered(text=text, count=len(lockfile.packages.dist), notes=notes_on_edits(lockfile))


def _parts(lockfile: Lockfile) -> Iterator[dict[str, Any]]:
    if lockfile.container is not None:
        sif = _package("SPDXRef-sif", "SIF", lockfile.container.digest, lockfile.container.sif.sha256)
        yield {**sif, "primaryPackagePurpose": "CONTAINER"}
        overlay = lockfile.container.overlay
        if overlay is not None:
            yield _package("SPDXRef-overlay", "overlay", overlay.content or overlay.digest, overlay.sha256 or "")
    python = python_version(lockfile)
    if python is not None:
        yield _package("SPDXRef-python", str(lockfile.facts.get("python.implementation", "python")), python)
    for number, dist in enumerate(sorted_packages(lockfile), 1):
        yield _dist(number, dist)


def _dist(number: int, dist: DistTable) -> dict[str, Any]:
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", dist.name)
    made = _package(f"SPDXRef-package-{number}-{name}", dist.name, dist.version, proved_sha256(dist) or "")
    url = package_url(dist)
    if url is not None:
        reference = {"referenceType": "purl", "referenceLocator": url.to_string()}
        made["externalRefs"] = [{"referenceCategory": "PACKAGE-MANAGER", **reference}]
    return made


def _package(identifier: str, name: str, version: str, sha256: str = "") -> dict[str, Any]:
    made: dict[str, Any] = {
        "SPDXID": identifier,
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
    }
    if HEX_SHA256.fullmatch(sha256):
        made["checksums"] = [{"algorithm": "SHA256", "checksumValue": sha256}]
    return made


def _render(lockfile: Lockfile) -> Rendered:
    try:
        return spdx(lockfile)
    except ImportError as error:
        raise ToolMissing(
            "packageurl-python is not installed", why=str(error), hint=Command("pip", "install", "packageurl-python")
        ) from error


def _is_ours(text: str) -> bool:
    try:
        document = json.loads(text)
        return bool(document["spdxVersion"] == "SPDX-2.3" and document["name"] == "hpcenv-environment")
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


EXPORTER = Exporter(
    name="spdx",
    help="bill of materials (SPDX 2.3): packages and SIF",
    render=lambda lockfile, _request: _render(lockfile),
    is_ours=_is_ours,
)
