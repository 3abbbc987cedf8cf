"""requirements.txt, as `pip-compile` and `uv pip compile` write it.

Runs on: LOGIN NODE.

A file may have lines `NAME[EXTRA]==VERSION ; MARKER --hash=...`, comments, and lines that continue after a backslash.
It may also have `-r` and `-c` with a path. The path is relative to the file that contains the line. Options that
configure pip (--index-url and so on) have no effect. `-e FOLDER` pins no version of the project in the folder. Other
paths, bare URLs and environment variables are refused. A line without `==` pins no version, so the comparison of that
package gives "unknown".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from packaging.markers import InvalidMarker, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from hpcenv.errors import LockfileInvalid
from hpcenv.locking.pins.pin import Pin, PinSelection, basename, describe_error, sorted_hashes
from hpcenv.locking.pins.text_file import read_text
from hpcenv.locking.pins.toml_text import project_name

_EXPLICIT = "@EXPLICIT"  # conda list --explicit
_NESTED = 20  # requirements files may include each other to this depth
_NESTING = re.compile(r"(-r|--requirement|-c|--constraint)(?:\s+|=|(?<=-[rc]))(.+)")
_HASH = re.compile(r"--hash(?:=|\s+)(\S+)")
_IN_URL = re.compile(r"#sha256=([0-9a-f]{64})")
_EDITABLE = re.compile(r"(-e|--editable)(?:\s+|=|(?<=-e))(.+)")


def select_pins(path: Path, text: str, selection: PinSelection, *, seen: tuple[Path, ...] = ()) -> Iterator[Pin]:
    """Yield the packages of a requirements.txt.

    Raises:
        LockfileInvalid: a line is not supported.
    """
    if path.resolve() in seen or len(seen) > _NESTED:
        return
    if _EXPLICIT in text:
        raise LockfileInvalid(
            f"`{path}` is a list of conda's packages, not of pip's",
            why=f"it has a line `{_EXPLICIT}`",
            hint="lock the environment for conda: `conda-lock lock --file environment.yml`, and name conda-lock.yml",
        )
    for number, line in _logical_lines(text):
        source = f"{path.name} line {number}"
        nested = _NESTING.fullmatch(line)
        if nested:
            below = path.parent / nested[2].strip().strip("\"'")
            for pin in select_pins(below, read_text(below), selection, seen=(*seen, path.resolve())):
                yield replace(pin, required=pin.required and nested[1] in ("-r", "--requirement"))
        elif _EDITABLE.fullmatch(line):
            yield _editable(line, source, path.parent)
        elif not line.startswith("-"):
            pin_here = _requirement(line, source, selection)
            if pin_here is not None:
                yield pin_here


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line. Like pip, join lines at a backslash first, then remove comments."""
    parts: list[str] = []
    start = 1
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        if not parts:
            start = number
        comment = raw.lstrip().startswith("#")
        if raw.endswith("\\") and not comment:
            parts.append(raw[:-1])
            continue
        line = re.sub(r"(^|\s)#.*$", "", " ".join([*parts, raw])).strip()
        parts = []
        if line:
            yield start, line


def _requirement(line: str, source: str, selection: PinSelection) -> Pin | None:
    hashes = [*_HASH.findall(line), *(f"sha256:{one}" for one in _IN_URL.findall(line))]
    text = re.split(r"\s--\w", line, maxsplit=1)[0].strip()
    try:
        requirement = Requirement(text)
        if not selection.holds(requirement.marker, extra=""):
            return None
    except (InvalidRequirement, InvalidMarker, UndefinedEnvironmentName) as error:
        why = "paths, bare URLs and variables are not supported" if re.search(r"[/$]", text) else describe_error(error)
        raise LockfileInvalid(f"{source}: `{text}` is not a pinned package", why=why) from error
    filename = basename(requirement.url) if requirement.url else ""
    sha256 = [value[7:] for value in hashes if value.startswith("sha256:")]
    return Pin(
        name=canonicalize_name(requirement.name),
        version=_pinned_version(requirement) or _version_in(filename),
        hashes=sorted_hashes(hashes),
        files=((filename, sha256[0]),) if filename and len(sha256) == 1 else (),
        source=source,
    )


def _editable(line: str, source: str, folder: Path) -> Pin:
    found = _EDITABLE.fullmatch(line)
    assert found is not None
    name = project_name(folder / found[2].strip().strip("\"'"))
    if name is None:
        raise LockfileInvalid(
            f"{source}: `{line}` is not supported",
            why="the folder has no pyproject.toml with a name under [project]",
            hint="leave the line out; `uv export --no-emit-local` does not write such lines",
        )
    return Pin(name=name, version=None, source=source)


def _pinned_version(requirement: Requirement) -> str | None:
    exact = [item.version for item in requirement.specifier if item.operator in ("==", "===")]
    return exact[0] if len(exact) == 1 and not exact[0].endswith(".*") else None


def _version_in(filename: str) -> str | None:
    parts = filename.split("-")
    return parts[1] if filename.endswith(".whl") and len(parts) in (5, 6) else None
