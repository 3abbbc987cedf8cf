"""The RECORD of a wheel.

Runs on: LOGIN NODE, also in the process beside pip: standard library only.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping

from hpcenv.incontainer.probe.programs import launched_by, without_shebang
from hpcenv.incontainer.probe.record import UNHASHED_METADATA
from hpcenv.locking.wheels.names import normal_name, normal_version, parse_wheel_name
from hpcenv.locking.wheels.proof import ENTRY_POINT

RECORD_BYTES = 16 << 20
SCRIPT_BYTES = 1 << 20  # a larger program is not a script, so RECORD has the hash of its content
_SIGNATURES = ("RECORD", "RECORD.jws", "RECORD.p7s")


class NotAWheel(Exception):
    """The file is not a valid wheel. The text says why."""


class Contradiction(Exception):
    """The wheel's content differs from its RECORD. The text names the first difference."""

    def __init__(self, text: str, records: tuple[str, ...]) -> None:
        super().__init__(text)
        self.records = records


def wheel_record_digests(wheel: zipfile.ZipFile, filename: str, *, whole: bool) -> tuple[str, ...]:
    """Return the RECORD digests (hpcenv-env-v1) that installations of a wheel can have.

    Only a wheel with C headers can have several digests. An installer names the folder of the headers after the
    project, and uses the spelling of the user's command.

    Args:
        wheel: the open file.
        filename: the file name of the wheel, which contains the project and the version.
        whole: compare every file with its hash in RECORD, not only names and sizes.

    Raises:
        ValueError, zipfile.BadZipFile: the file is not a wheel.
        Contradiction: the wheel's content differs from its RECORD.
    """
    if not all(info.filename for info in wheel.infolist()):
        raise ValueError("a file in it has no name")
    members = {info.filename: info for info in wheel.infolist() if not info.is_dir()}
    if len(members) != sum(not info.is_dir() for info in wheel.infolist()):
        raise ValueError("a name is listed twice in its zip directory")
    stem = _info_stem(members, filename)
    info = members[f"{stem}.dist-info/RECORD"]
    if info.file_size > RECORD_BYTES:
        raise ValueError("its RECORD is too large")
    _prefetch(wheel, info)
    rows = list(_parse_record(_read_member(wheel, info).decode("utf-8", "surrogateescape")))
    listed = {path for path, _, _ in rows}
    # pip also installs files that RECORD does not list. It adds them to the installed RECORD without a hash.
    rows += [(name, "", "") for name in members if name not in listed and not name.endswith(_signature_names(stem))]
    spellings = sorted({stem.partition("-")[0], normal_name(stem.partition("-")[0])})
    if any(path.startswith(f"{stem}.data/headers/") for path, _, _ in rows):
        spellings = sorted({*spellings, _metadata_name(wheel, members, stem)})
    records = tuple(dict.fromkeys(_installed_digest(rows, stem, spelling) for spelling in spellings))
    problem = _contradiction(wheel, members, rows, stem, whole=whole)
    if problem:
        raise Contradiction(problem, records)
    return records


def wheel_programs(wheel: zipfile.ZipFile, filename: str) -> tuple[tuple[str, str], ...]:
    """Return name and sha256 of each program that a wheel puts into bin/, in the same form as the probe reports them.

    Raises:
        ValueError, zipfile.BadZipFile: the file is not a wheel.
    """
    members = {info.filename: info for info in wheel.infolist() if not info.is_dir()}
    stem = _info_stem(members, filename)
    places = (f"{stem}.data/scripts/", f"{stem}.data/data/bin/")
    own = {path: info for path, info in members.items() if path.startswith(places)}
    claims: dict[str, str] = {}
    if any(info.file_size > SCRIPT_BYTES for info in own.values()):
        record = members[f"{stem}.dist-info/RECORD"]
        rows = _parse_record(_read_member(wheel, record).decode("utf-8", "surrogateescape"))
        claims = {path: claim for path, claim, _ in rows}
    found = {}
    for path, info in own.items():
        name = path.removeprefix(places[0]).removeprefix(places[1])
        found[name] = _program_digest(wheel, info, claims.get(path, ""))
    return tuple(sorted(found.items()))


def _program_digest(wheel: zipfile.ZipFile, info: zipfile.ZipInfo, claim: str) -> str:
    if info.file_size > SCRIPT_BYTES:
        algorithm, _, digest = claim.partition("=")
        return _hex(digest) if algorithm == "sha256" else "unknown"
    _prefetch(wheel, info)
    script = without_shebang(_read_member(wheel, info))
    launched = launched_by(script)
    return ENTRY_POINT + launched if launched else hashlib.sha256(script).hexdigest()


def _hex(digest: str) -> str:
    from base64 import urlsafe_b64decode

    return urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()


def _info_stem(members: Mapping[str, zipfile.ZipInfo], filename: str) -> str:
    """Return `NAME-VERSION` of the dist-info folder, in the spelling of the wheel."""
    own = parse_wheel_name(filename)
    stems = [name.split(".dist-info/")[0] for name in members if re.fullmatch(r"[^/]+\.dist-info/RECORD", name)]
    if own is None or len(stems) != 1:
        raise ValueError("not exactly one RECORD")
    name, _, version = stems[0].partition("-")
    if (normal_name(name), normal_version(version)) != (own.name, own.version):
        raise ValueError("its RECORD belongs to another package")
    return stems[0]


def _signature_names(stem: str) -> tuple[str, ...]:
    return tuple(f"{stem}.dist-info/{name}" for name in _SIGNATURES)


def _prefetch(wheel: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
    """Fetch a member from a server with one request. zipfile alone would read header and content in small pieces."""
    fetch = getattr(wheel.fp, "fetch", None)  # of a RangeFile
    if fetch is not None:
        start = info.header_offset
        fetch(start, start + 30 + 2 * len(info.orig_filename) + len(info.extra) + 256 + info.compress_size)


def _read_member(wheel: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    with wheel.open(info) as member:
        data = member.read(info.file_size + 1)
    if len(data) != info.file_size:
        raise zipfile.BadZipFile("a file does not have the size that its zip directory states")
    return data


def _parse_record(text: str) -> Iterator[tuple[str, str, str]]:
    if "\0" in text:
        raise ValueError("its RECORD contains a NUL byte")
    for cells in csv.reader(io.StringIO(text, newline="")):
        if len(cells) > 3 or any("\n" in cell or "\r" in cell for cell in cells):
            raise ValueError("a row of its RECORD is not path, hash, size")
        if cells and cells[0]:
            path, claim, size = [*cells, "", ""][:3]
            yield path, claim, size


def _metadata_name(wheel: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], stem: str) -> str:
    """Return the project's name in its METADATA. pip uses this spelling for the folder of the headers."""
    info = members.get(f"{stem}.dist-info/METADATA")
    if info is None or info.file_size > RECORD_BYTES:
        return stem.partition("-")[0]
    _prefetch(wheel, info)
    for line in _read_member(wheel, info).decode("utf-8", "replace").splitlines():
        if line.lower().startswith("name:"):
            return line[5:].strip()
    return stem.partition("-")[0]


def _installed_digest(rows: Iterable[tuple[str, str, str]], stem: str, spelling: str) -> str:
    """Return the digest of the rows that are installed, with their installed paths (steps 2 and 3 of the probe)."""
    installed = [(_installed_path(path, stem, spelling), claim, size) for path, claim, size in rows]
    names = {path for path, _, _ in installed}
    lines = set()
    for path, claim, size in installed:
        # A compiled file (.pyc) counts only if its source is missing, as in the probe.
        if path is not None and not (path.endswith(".pyc") and path[:-1] in names):
            lines.add(f"{path}\0{claim}\0{size}".encode("utf-8", "surrogateescape"))
    return hashlib.sha256(b"\n".join(sorted(lines))).hexdigest()


def _installed_path(path: str, stem: str, spelling: str) -> str | None:
    """Return the path at which the file in a row is installed; None if the digest does not cover the file."""
    if "__pycache__" in path.split("/"):
        return None
    if path[0] in "./" or "/." in path or "//" in path:
        path = os.path.normpath(path)
        if path.startswith(("../", "/")):
            raise ValueError("its RECORD lists a path outside of the wheel")
    folder, _, name = path.rpartition("/")
    if folder == f"{stem}.dist-info" and name in UNHASHED_METADATA:
        return None
    if not path.startswith(f"{stem}.data/"):
        return path
    scheme, _, rest = path[len(stem) + 6 :].partition("/")
    if scheme in ("purelib", "platlib"):
        return rest
    if scheme == "headers":
        return f"{{headers}}/{spelling}/{rest}"
    return _data_path(rest) if scheme == "data" else None


def _data_path(rest: str) -> str | None:
    """Return the installed path of a file below `.data/data/`, with the probe's names for some folders."""
    if rest.startswith("bin/"):
        return None
    site = re.match(r"lib(?:64)?/python[0-9][^/]*/(?:site|dist)-packages/", rest)
    if site:
        return rest[site.end() :]
    headers = re.match(r"include/(?:site/)?python[0-9][^/]*/", rest)
    return "{headers}/" + rest[headers.end() :] if headers else "{data}/" + rest


def _contradiction(
    wheel: zipfile.ZipFile,
    members: Mapping[str, zipfile.ZipInfo],
    rows: Iterable[tuple[str, str, str]],
    stem: str,
    *,
    whole: bool,
) -> str:
    """Return the first difference between the wheel and its RECORD; "" if there is no difference."""
    for path, claim, size in rows:
        info = members.get(path)
        if path.endswith(_signature_names(stem)):
            continue
        if info is None:
            return f"its RECORD lists `{path}`, which is not in it"
        if size.isdigit() and int(size) != info.file_size:
            return f"`{path}` in it has {info.file_size} bytes, its RECORD says {size}"
        if whole and claim and not _matches(wheel, info, claim):
            return f"`{path}` in it is not what its RECORD says"
    return ""


def _matches(wheel: zipfile.ZipFile, info: zipfile.ZipInfo, claim: str) -> bool:
    algorithm, _, listed = claim.partition("=")
    try:
        found = hashlib.new(algorithm)
    except ValueError:
        return False
    with wheel.open(info) as member:
        for chunk in iter(lambda: member.read(1 << 20), b""):
            found.update(chunk)
    return urlsafe_b64encode(found.digest()).rstrip(b"=") == listed.rstrip("=").encode()
