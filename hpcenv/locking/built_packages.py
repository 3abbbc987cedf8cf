"""Packages that were compiled in their image. The build stage of `hpcenv image init --build` writes a report on them.

Runs on: LOGIN NODE.

No index has such a wheel, so its sha256 cannot be compared with another source. Only the image itself states this
sha256. (pip's report of an installation proves no more.) The image may come from a person whom the user does not know,
so sizes and words in the report are checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcenv.errors import LockfileInvalid
from hpcenv.image.recorded_files import BUILT
from hpcenv.locking.wheels.proof import HEX_SHA256, KnownFile
from hpcenv.project.lockfile import BuiltTable

_VERSION = 1
_MOST_BYTES = 1 << 20
_WORDS = re.compile(r"[ -~]{1,200}")


@dataclass(frozen=True, kw_only=True)
class BuiltPackage:
    """One package of the report: the wheel that the build installed, and the source of this wheel."""

    file: KnownFile
    table: BuiltTable


def parse_built(text: bytes) -> tuple[BuiltPackage, ...]:
    """Return the packages of a report.

    Raises:
        LockfileInvalid: the text is not such a report.
    """
    try:
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it has {len(text)} bytes")
        report = json.loads(text)
        if report["version"] != _VERSION:
            raise ValueError(f"its version is {report['version']!r}")
        return tuple(_package(report, entry) for entry in report["packages"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LockfileInvalid(
            f"`{BUILT}` is not a report of compiled packages", why=f"{type(error).__name__}: {error}"[:300]
        ) from error


def _package(report: Mapping[str, Any], entry: Mapping[str, Any]) -> BuiltPackage:
    digest, source = entry["sha256"], entry.get("source-sha256")
    if not all(HEX_SHA256.fullmatch(one) for one in (digest, source) if one is not None):
        raise ValueError("a sha256 is none")
    return BuiltPackage(
        file=KnownFile(
            name=_words(entry["name"]),
            version=_words(entry["version"]),
            filename=_words(entry["filename"]),
            sha256=digest,
            proof="built",
        ),
        table=BuiltTable(
            source_sha256=source,
            compiler=_words(report["compiler"]),
            nvcc=_words(report["nvcc"]) if "nvcc" in report else None,
            arch_list=_words(report["arch-list"]) if "arch-list" in report else None,
        ),
    )


def _words(value: object) -> str:
    if not isinstance(value, str) or not _WORDS.fullmatch(value):
        raise ValueError(f"{str(value)[:60]!r} is not a short text")
    return value
