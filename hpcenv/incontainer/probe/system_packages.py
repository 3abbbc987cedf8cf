"""Packages of the operating system.

Runs on: inside the image.
"""

from __future__ import annotations

import os

from hpcenv.incontainer.probe.children import run_child
from hpcenv.incontainer.probe.files import SYSTEM_BYTES, SYSTEM_ROOT, read_small
from hpcenv.incontainer.probe.paths import list_folder
from hpcenv.incontainer.probe.hashing import digest_of_lines
from hpcenv.incontainer.probe.table import Probe
from hpcenv.incontainer.probe.values import Unknown
from hpcenv.incontainer.probe.text import describe_error, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts

RPM_SECONDS = 60.0


def probe_system_packages(env: ProbedEnvironment) -> Facts:
    """Return the operating system's packages, from the first package manager that has a database in the image."""
    readers: tuple[tuple[str, Callable[[ProbedEnvironment], list[tuple[str, str, str]] | None]], ...] = (
        ("dpkg", _dpkg),
        ("rpm", _rpm),
        ("apk", _apk),
    )
    fields = ("system.packages-count", "system.packages-digest")
    for manager, reader in readers:
        try:
            packages = reader(env)
        except Exception as error:  # noqa: BLE001 - sqlite3.Error among them
            return {"system.packages-manager": manager, **dict.fromkeys(fields, Unknown(describe_error(error)))}
        if packages is not None:
            env.system_packages = sorted(set(packages))
            lines = ["\t".join(package) for package in env.system_packages]
            digest = "sha256:" + digest_of_lines("hpcenv-system-packages-v1", lines)
            return {"system.packages-manager": manager, fields[0]: len(lines), fields[1]: digest}
    return {"system.packages-manager": "none", fields[0]: 0, fields[1]: "none"}


def _read_database(env: ProbedEnvironment, path: str) -> str | None:
    try:
        return read_small(env, SYSTEM_ROOT + path, SYSTEM_BYTES)[0].decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _dpkg(env: ProbedEnvironment) -> list[tuple[str, str, str]] | None:
    import re

    text = _read_database(env, "var/lib/dpkg/status")
    folder = "var/lib/dpkg/status.d"  # distroless images have one file per package
    names = [n for n in sorted(list_folder(SYSTEM_ROOT + folder)) if not n.endswith(".md5sums")]
    texts = [t for t in [text] + [_read_database(env, f"{folder}/{n}") for n in names] if t]
    if not texts:
        return None
    stanzas: list[dict[str, str]] = []
    # Fields start at the beginning of a line. Only dpkg itself writes 'Status: want flag status'.
    for key, value in re.findall(r"^(Package|Status|Version|Architecture): *(.*)$", "\n".join(texts), re.MULTILINE):
        if key == "Package":
            stanzas.append({})
        if stanzas:
            stanzas[-1].setdefault(key, printable(value.strip()))
    # A removed package that left its configuration behind is not installed.
    installed = [
        f for f in stanzas if f.get("Status", "installed").endswith("installed") and "not-" not in f.get("Status", "")
    ]
    return [(f.get("Package", ""), f.get("Version", ""), f.get("Architecture", "")) for f in installed] or None


def _stanza(block: str, separator: str, keys: tuple[str, str, str]) -> tuple[str, str, str]:
    values = dict.fromkeys(keys, "")
    for line in block.split("\n"):
        key, separated, value = line.partition(separator)
        if separated and key in values:
            values[key] = printable(value.strip())
    return values[keys[0]], values[keys[1]], values[keys[2]]


def _apk(env: ProbedEnvironment) -> list[tuple[str, str, str]] | None:
    text = _read_database(env, "lib/apk/db/installed") or _read_database(env, "usr/lib/apk/db/installed")
    if text is None:
        return None
    stanzas = [_stanza(block, ":", ("P", "V", "A")) for block in text.split("\n\n")]
    return [keys for keys in stanzas if keys[0]]


def _rpm(env: ProbedEnvironment) -> list[tuple[str, str, str]] | None:
    folders = [SYSTEM_ROOT + f for f in ("usr/lib/sysimage/rpm", "var/lib/rpm")]
    for folder in folders:
        if os.path.isfile(folder + "/rpmdb.sqlite"):
            return _rpm_sqlite(folder + "/rpmdb.sqlite")
    if any(os.path.isfile(f"{folder}/{name}") for folder in folders for name in ("Packages", "Packages.db")):
        return _rpm_query()
    return None


def _rpm_sqlite(path: str) -> list[tuple[str, str, str]]:
    import sqlite3
    from urllib.parse import quote

    try:
        unmerged = os.path.getsize(path + "-wal")
    except OSError:
        unmerged = 0
    # An image is read-only, so sqlite cannot lock the file. With `immutable`, sqlite needs no lock, but ignores a
    # write-ahead log.
    options = "mode=ro" if unmerged else "mode=ro&immutable=1"
    database = sqlite3.connect(f"file:{quote(path)}?{options}", uri=True)
    try:
        rows = database.execute("SELECT blob FROM Packages LIMIT 100000").fetchall()
    finally:
        database.close()
    packages = [_rpm_header(bytes(row[0])) for row in rows]
    return [package for package in packages if package[0] != "gpg-pubkey"]


def _rpm_header(blob: bytes) -> tuple[str, str, str]:
    """Return name, [epoch:]version-release and architecture from a header of rpm, which is an index and its data."""
    import struct

    count, _ = struct.unpack_from(">II", blob)
    if count > 100_000:
        raise ValueError("an rpm header with more than 100000 entries")
    start = 8 + 16 * count
    values: dict[int, str] = {}
    for tag, kind, offset, _ in struct.iter_unpack(">IIiI", blob[8:start]):
        if tag in (1000, 1001, 1002, 1022) and kind == 6:  # NAME, VERSION, RELEASE, ARCH: strings
            end = blob.index(b"\0", start + offset)
            values[tag] = printable(blob[start + offset : end].decode("utf-8", "replace"))
        elif tag == 1003 and kind == 4:  # EPOCH: a number
            values[tag] = str(struct.unpack_from(">I", blob, start + offset)[0]) + ":"
    version = values.get(1003, "") + values.get(1001, "") + "-" + values.get(1002, "")
    return values.get(1000, ""), version, values.get(1022, "")


def _rpm_query() -> list[tuple[str, str, str]]:
    """Return the packages that rpm itself lists. Only rpm can read the formats of older databases."""
    import shutil

    rpm = shutil.which("rpm")
    if rpm is None:
        raise ValueError("the rpm database is not a sqlite file, and there is no rpm to read it")
    pattern = r"%{NAME}\t%|EPOCH?{%{EPOCH}:}|%{VERSION}-%{RELEASE}\t%|ARCH?{%{ARCH}}|\n"
    command = [rpm, *(["--root", SYSTEM_ROOT] if SYSTEM_ROOT != "/" else []), "-qa", "--qf", pattern]
    status, out, err = run_child(command, dict(os.environ), RPM_SECONDS)
    if status != 0:
        raise ValueError(f"rpm ended with status {status}: {err.decode('utf-8', 'replace').strip()[-200:]}")
    rows = [_clean_row(line) for line in out.decode("utf-8", "replace").splitlines()]
    return [row for row in rows if row[0] != "gpg-pubkey"]


def _clean_row(line: str) -> tuple[str, str, str]:
    parts = [printable(part) for part in (line + "\t\t").split("\t")]
    return parts[0], parts[1], parts[2]


PROBES: tuple[Probe, ...] = (
    Probe(
        "system-packages",
        ("system.packages-manager", "system.packages-count", "system.packages-digest"),
        probe_system_packages,
    ),
)
