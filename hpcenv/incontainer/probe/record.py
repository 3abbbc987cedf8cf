"""The RECORD of a distribution: steps 1 to 3 of the digest that the docstring of this package describes.

Runs on: inside the image.
"""

from __future__ import annotations

import os

from hpcenv.incontainer.probe.environment import Row
from hpcenv.incontainer.probe.files import read_metadata
from hpcenv.incontainer.probe.paths import is_below
from hpcenv.incontainer.probe.hashing import digest_of_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcenv.incontainer.probe.environment import Dist, ProbedEnvironment, Site

RECORD_BYTES = 16 << 20  # the largest known RECORD (torch with CUDA) has 1.5 MiB
RECORD_ROWS = 300_000
CSV_CELL = 131_072  # the maximum length for the csv module
# Each installer writes these files in its own way. They are left out, so that the same wheel gives the same digest.
UNHASHED_METADATA = frozenset(
    ("INSTALLER", "REQUESTED", "RECORD", "RECORD.jws", "RECORD.p7s", "direct_url.json")
    + ("provenance_url.json", "uv_cache.json", "uv_build.json")
)


def read_record(env: ProbedEnvironment, dist: Dist) -> None:
    """Read a dist's RECORD into ``rows`` and ``listed``. The fast reader sets ``plain_digest`` instead of ``rows``."""
    if not dist.folder.endswith(".dist-info"):
        dist.no_record = "no RECORD: installed as egg-info (by a system package, setup.py or develop)"
        dist.reasons.append(dist.no_record)
        return
    path = os.path.join(dist.site.path, dist.folder, "RECORD")
    data = read_metadata(env, dist, path, RECORD_BYTES)
    if env.level == "record" and _read_plain_record(dist, data):
        return
    rows: list[Row] = []
    for raw, claim, size in _cells(data.decode("utf-8", "surrogateescape")):
        row = _counted(dist, raw, claim, size, dist.listed)
        if row is not None:
            rows.append(row)
    dist.rows = _without_copies(rows)


def _counted(dist: Dist, raw: str, claim: str, size: str, listed: list[str]) -> Row | None:
    """Return the row if the digest covers it (step 1). Add its file to ``listed`` if the row has a hash."""
    if raw.endswith(".pyc") and "__pycache__/" in raw:
        return None  # half of all rows; their files are not hashed and not searched
    row = _row(dist.site, raw, claim, size)
    if row.file is not None and claim:  # a file without a hash counts as unlisted
        listed.append(row.file)
    if "__pycache__" in raw.split("/"):
        return None
    folder, _, name = row.path.rpartition("/")
    if folder == dist.folder and name in UNHASHED_METADATA:
        return None
    if row.file is not None and not (claim or row.script or raw.endswith(".pyc")):
        dist.unhashed.add(row.file)
    return row


def _without_copies(rows: list[Row]) -> list[Row]:
    """Drop the rows of compiled files whose source is listed beside them, because Python then imports the source."""
    if not any(row.path.endswith(".pyc") for row in rows):
        return rows
    paths = {row.path for row in rows}
    return [row for row in rows if not (row.path.endswith(".pyc") and row.path[:-1] in paths)]


def _read_plain_record(dist: Dist, data: bytes) -> bool:
    """Do steps 1 to 3 for a RECORD in plain ASCII. This is several times faster, because most lines are used unchanged.

    No rows are kept, because below level full no listed file is opened.

    Returns:
        True if `dist` has its digest now. False if the RECORD contains an error or anything that needs csv; then `dist`
        is unchanged.
    """
    if not data.isascii() or b'"' in data or b"\0" in data:
        return False
    end = b"\r\n" if b"\r\n" in data else b"\n"  # pip writes one of these line ends, and uv writes the other
    breaks = data.count(end)
    if data.count(b"\n") != breaks or data.count(b"\r") != breaks * (len(end) - 1) or breaks >= RECORD_ROWS:
        return False
    # Replace the commas by the separators of the digest.
    lines = data.decode("ascii").replace(",", "\0").split(end.decode("ascii"))
    if len(max(lines, key=len)) >= CSV_CELL:
        return False
    counted: list[str] = []
    listed: list[str] = []
    base, metadata = dist.site.path + "/", dist.folder + "/"
    for line in lines:
        cells = line.split("\0")
        path = cells[0]
        if len(cells) != 3 or not path:
            if line:
                return False
        elif (
            "__pycache__" in path
            or "/." in path
            or "//" in path
            or path[0] in "./"
            or not cells[1]
            or path.endswith(".pyc")
            or path.startswith(metadata)
        ):
            row = _counted(dist, path, cells[1], cells[2], listed)
            if row is not None and row.path.endswith(".pyc"):
                return False  # a .pyc counts only without its source, so all rows must be seen together
            if row is not None and not row.script:
                counted.append("\0".join((row.path, row.claim, row.size)))
        else:
            listed.append(base + path)
            counted.append(line)
    dist.listed = listed
    dist.plain_digest = digest_of_lines("", list(dict.fromkeys(counted)))
    return True


def _cells(text: str) -> Iterator[list[str]]:
    import csv
    import io

    if "\0" in text:
        raise ValueError("it contains a NUL byte")
    quoted = '"' in text  # without a quote no cell can contain a line break
    for number, cells in enumerate(csv.reader(io.StringIO(text, newline="")), 1):
        if number > RECORD_ROWS:
            raise ValueError(f"more than {RECORD_ROWS} rows")
        if len(cells) > 3 or (quoted and any("\n" in cell or "\r" in cell for cell in cells)):
            # The digest is computed over lines, so a line break in a cell could imitate another line.
            raise ValueError(f"row {number} is not path, hash, size")
        if cells and cells[0]:
            yield cells if len(cells) == 3 else (cells + ["", ""])[:3]


def _row(site: Site, raw: str, claim: str, size: str) -> Row:
    """Return a row with its file, and with the path that does not depend on the environment's folder (step 2)."""
    if raw[0] not in "./" and "/." not in raw and "//" not in raw:  # 99 of 100 rows
        return Row(raw, claim, size, site.path + "/" + raw, False)
    file = os.path.normpath(os.path.join(site.path, raw))
    if is_below(file, site.path):
        return Row(os.path.relpath(file, site.path), claim, size, file, False)
    inside = is_below(file, site.base)
    if raw.startswith("/"):
        rest = os.path.relpath(file, site.base) if inside else raw
    else:
        rest = os.path.normpath(raw)
        while rest.startswith("../"):
            rest = rest[3:]
    if rest.startswith("bin/"):
        return Row("{scripts}/" + rest[4:], claim, size, file if inside else None, True)
    if not inside:
        return Row("{outside}/" + raw, claim, size, None, False)
    return Row(_headers(rest), claim, size, file, False)


def _headers(rest: str) -> str:
    import re

    match = re.match(r"include/(?:site/)?python[0-9][^/]*/", rest)
    return "{headers}/" + rest[match.end() :] if match else "{data}/" + rest


def record_digest(rows: list[Row], claims: dict[int, str] | None = None) -> str:
    """Return the digest of rows: the digest of step 3, or with `claims` the digest of step 4.

    Args:
        rows: the rows of a RECORD.
        claims: index of a row -> the real hash of its modified file.
    """
    real = claims or {}
    lines = set()
    for index, row in enumerate(rows):
        if not row.script:
            lines.add("\0".join((row.path, real.get(index, row.claim), row.size)))
    return digest_of_lines("", list(lines))
