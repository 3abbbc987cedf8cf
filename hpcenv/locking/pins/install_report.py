"""The wheels that were installed, according to pip's reports and to lockfiles. They are for `find_wheels`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from hpcenv.errors import LockfileInvalid
from hpcenv.locking.pins.pin import Pin, basename, describe_error
from hpcenv.locking.wheels.proof import KnownFile


def known_files(pins: Iterable[Pin]) -> tuple[KnownFile, ...]:
    """Return the wheels that a lockfile inside the image names, for `find_wheels`."""
    return tuple(
        KnownFile(name=pin.name, version=pin.version, filename=filename, sha256=sha256, proof="embedded-lock")
        for pin in pins
        if pin.version is not None
        for filename, sha256 in pin.files
        if filename.endswith(".whl")
    )


def parse_report(text: str | bytes, *, origin: str) -> tuple[KnownFile, ...]:
    """Return the wheels that a report of `pip install --report` names.

    Args:
        text: the report.
        origin: the file of the report, for messages.

    Raises:
        LockfileInvalid: the text is not such a report.
    """
    try:
        report = json.loads(text)
        if report["version"] != "1":
            raise LockfileInvalid(
                f"`{origin}` is a pip report of version {report['version']!r}", why="only version '1' is known"
            )
        files = [_reported(entry) for entry in report["install"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LockfileInvalid(
            f"`{origin}` is not a report of `pip install --report`", why=describe_error(error)
        ) from error
    return tuple(file for file in files if file is not None)


def _reported(entry: Mapping[str, Any]) -> KnownFile | None:
    origin = entry["download_info"]
    sha256 = (origin.get("archive_info", {}).get("hashes") or {}).get("sha256")
    filename = basename(origin["url"])
    if not isinstance(sha256, str) or not filename.endswith(".whl"):
        return None
    about = entry["metadata"]
    return KnownFile(
        name=str(about["name"]), version=str(about["version"]), filename=filename, sha256=sha256, proof="install-report"
    )
