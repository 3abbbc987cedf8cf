"""`hpcenv image scan`: known vulnerabilities of the locked packages, by grype or osv-scanner.

Runs on: LOGIN NODE. The scanner gets a bill of materials of the lockfile, not the image: the result is about the Python
packages and libraries that the lockfile names, not about the packages of the distribution. hpcenv contacts no server;
the scanner asks its own database, as the user configured it.

The formats: grype's `--output json` (grype/presenter/models of anchore/grype, commit 4562c55, 2026-07-22) and
osv-scanner's `--format json` (pkg/models/results.go of google/osv-scanner, commit add393a, 2026-08-07).
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpcenv import process
from hpcenv.errors import ToolFailed, ToolMissing
from hpcenv.locking.export import export
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.project.workspace import find_lockfile
from hpcenv.records import files

Scanner = Literal["grype", "osv-scanner"]
SCANNERS: tuple[Scanner, ...] = ("grype", "osv-scanner")
SEVERITIES = ("critical", "high", "medium", "low", "unknown")
"""Severities of vulnerabilities, the worst first."""

# A bill of materials is named by its format: osv-scanner knows the format by the name of the file.
_NAMES = {"cyclonedx": "bom.cdx.json", "spdx": "bom.spdx.json"}
_SCAN_SECONDS = 1800.0
_VERSION_SECONDS = 60.0
# The exit statuses with a result. osv-scanner ends with 1 where it found vulnerabilities, and with 128 where it found
# no package (docs/output.md, "Return Codes"). grype ends with 2 where the user's configuration has `fail-on-severity`,
# and prints the result all the same (cmd/grype/cli/cli.go, since 0.91.1).
_WITH_RESULT: Mapping[Scanner, tuple[int, ...]] = {"grype": (0, 2), "osv-scanner": (0, 1)}
# A package that was made to do harm. Such an entry of OSV has no severity (osv.dev/vulnerability/MAL-2025-28595).
_MALICIOUS = "MAL-"


@dataclass(frozen=True, kw_only=True)
class Vulnerability:
    """A known vulnerability of a locked package.

    Attributes:
        id: as the scanner names it: `CVE-2025-32434`, `GHSA-...`.
        severity: one of `SEVERITIES`.
        fixed: versions without it; empty where none is known.
        aliases: its identifiers in other lists.
    """

    id: str
    package: str
    version: str
    severity: str
    fixed: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScanResult:
    """The result of a scan, which is kept beside the lockfile.

    Attributes:
        path: the file that keeps it.
        lockfile: the lockfile.
        fingerprint: of the lockfile: a result of another fingerprint is about other packages.
        scanned: when, RFC 3339.
        scanner: program and version.
        database: when the scanner's database was made; "" where it does not say.
        packages: number of packages in the bill of materials.
        vulnerabilities: the worst first.
        counts: how many of each severity.
    """

    path: Path
    lockfile: Path
    fingerprint: str
    scanned: str
    scanner: str
    database: str
    packages: int
    vulnerabilities: tuple[Vulnerability, ...]
    counts: dict[str, int]

    def count_from(self, severity: str) -> int:
        """Return the number of vulnerabilities that have this severity or a worse one; `unknown` counts all."""
        return sum(self.counts[one] for one in SEVERITIES[: SEVERITIES.index(severity) + 1])


def scan(
    start: Path,
    *,
    environ: Mapping[str, str],
    lock: str = DEFAULT_LOCK,
    scanner: Scanner | None = None,
    bill: Literal["cyclonedx", "spdx"] = "cyclonedx",
) -> ScanResult:
    """Scan the packages of a lockfile, and keep the result as NAME.scan.json beside it.

    Args:
        start: a folder in the project.
        environ: the user's environment.
        lock: the name of one of the project's lockfiles, or the path of any.
        scanner: the program; None for the first that is installed.
        bill: the format of the bill of materials.

    Raises:
        ToolMissing: no scanner is installed.
        ToolFailed: the scanner failed, or its output has another form.
        HpcenvError: the lockfile cannot be read, or the result cannot be written.
    """
    lockfile = find_lockfile(start, lock)
    exported = export(start, bill, environ=environ, lock=lock)
    name, program = _find(scanner, environ)
    version = process.run([program, "--version"], timeout=_VERSION_SECONDS, env=environ).stdout
    number = next(iter(re.findall(r"\d+\.\d+[\w.-]*", version)), "unknown")
    with tempfile.TemporaryDirectory(prefix="hpcenv-") as scratch:
        path = Path(scratch) / _NAMES[bill]
        path.write_text(exported.text, encoding="utf-8")
        report = _run(name, program, number, path, environ)
    try:
        found = sorted(set(_READERS[name](report)), key=_order)
        database = _database(report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ToolFailed(
            f"the output of {name} {number} has another form", why=f"{type(error).__name__}: {error}"[:300]
        ) from error
    counts = Counter(one.severity for one in found)
    result = ScanResult(
        path=lockfile.with_name(f"{lockfile.name.removesuffix('.lock.toml')}.scan.json"),
        lockfile=lockfile,
        fingerprint=exported.fingerprint,
        scanned=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        scanner=f"{name} {number}",
        database=database,
        packages=exported.count,
        vulnerabilities=tuple(found),
        counts={severity: counts[severity] for severity in SEVERITIES},
    )
    files.write_text(_kept(result), result.path)
    return result


def _kept(result: ScanResult) -> str:
    """Return the text of the file; without paths of this machine."""
    data = {
        "schema": 1,
        "fingerprint": result.fingerprint,
        "scanned": result.scanned,
        "scanner": result.scanner,
        "database": result.database or None,
        "packages": result.packages,
        "counts": result.counts,
        "vulnerabilities": [
            {"id": one.id, "aliases": one.aliases, "package": one.package, "version": one.version}
            | {"severity": one.severity, "fixed": one.fixed}
            for one in result.vulnerabilities
        ],
    }
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _find(wanted: Scanner | None, environ: Mapping[str, str]) -> tuple[Scanner, str]:
    for name in SCANNERS if wanted is None else (wanted,):
        program = shutil.which(name, path=environ.get("PATH", os.defpath))
        if program is not None:
            return name, program
    raise ToolMissing(
        f"{wanted or 'no scanner'} is not on PATH" if wanted else "neither grype nor osv-scanner is on PATH",
        why="hpcenv has no list of vulnerabilities: it gives the bill of materials to a scanner",
        hint="install grype (github.com/anchore/grype) or osv-scanner (github.com/google/osv-scanner)",
    )


def _run(name: Scanner, program: str, version: str, bill: Path, environ: Mapping[str, str]) -> Any:
    if name == "grype":
        argv = [program, f"sbom:{bill}", "--output", "json", "--quiet"]
    elif version.startswith("1."):
        argv = [program, "--format", "json", "--sbom", str(bill)]
    else:
        argv = [program, "scan", "source", "--format", "json", "--lockfile", str(bill)]
    done = process.run(argv, timeout=_SCAN_SECONDS, env=environ, accept=_WITH_RESULT[name])
    try:
        return json.loads(done.stdout)
    except (ValueError, RecursionError) as error:
        raise ToolFailed(
            f"{name} printed no JSON", status=done.status, why=done.stdout[:200] or done.stderr[:200]
        ) from error


def _order(one: Vulnerability) -> tuple[int, str, str]:
    return SEVERITIES.index(one.severity), one.package, one.id


def _severity(text: object) -> str:
    """Return one of `SEVERITIES`; grype's `Negligible` is `low`, GitHub's `MODERATE` is `medium`."""
    word = str(text or "").lower()
    return {"moderate": "medium", "negligible": "low"}.get(word, word if word in SEVERITIES else "unknown")


def _plain(value: object) -> str:
    """Return untrusted text as one short line."""
    return "".join(char if char.isprintable() else "?" for char in str(value))[:200]


def _from_grype(report: Any) -> Iterator[Vulnerability]:
    for match in report["matches"]:
        about, artifact = match["vulnerability"], match["artifact"]
        yield Vulnerability(
            id=_plain(about["id"]),
            package=_plain(artifact["name"]),
            version=_plain(artifact["version"]),
            severity=_severity(about.get("severity")),
            fixed=tuple(map(_plain, (about.get("fix") or {}).get("versions") or ())),
            aliases=_others((one["id"] for one in match.get("relatedVulnerabilities") or ()), about["id"]),
        )


def _from_osv(report: Any) -> Iterator[Vulnerability]:
    for source in report.get("results") or ():
        for entry in source["packages"]:
            yield from _of_package(entry)


def _of_package(entry: Any) -> Iterator[Vulnerability]:
    """Yield the vulnerabilities of a package: the entries of a group are one (docs/output.md of osv-scanner 2.5.0)."""
    package = entry["package"]
    entries = {one["id"]: one for one in entry.get("vulnerabilities") or ()}
    for group in _groups(entry, entries):
        about = [entries[identifier] for identifier in group["ids"]]
        names = [name for one in about for name in (one["id"], *(one.get("aliases") or ()))]
        yield Vulnerability(
            id=_plain(about[0]["id"]),
            package=_plain(package["name"]),
            version=_plain(package["version"]),
            severity=_of_group(about, group.get("max_severity")),
            fixed=tuple(dict.fromkeys(_plain(fix) for one in about for fix in _fixed_in(one, package["name"]))),
            aliases=_others(names, about[0]["id"]),
        )


def _groups(entry: Any, entries: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the groups of entries, and each entry that is in no group."""
    left = dict.fromkeys(entries)
    for group in entry.get("groups") or ():
        ids = [one for one in group.get("ids") or () if one in left]
        for one in ids:
            del left[one]
        if ids:
            yield {**group, "ids": ids}
    yield from ({"ids": [one]} for one in left)


def _of_group(about: list[Any], score: object) -> str:
    """Return the worst severity that the entries of a group state; where none does, that of their score."""
    if any(one["id"].startswith(_MALICIOUS) for one in about):
        return "critical"
    stated = (_severity((one.get("database_specific") or {}).get("severity")) for one in about)
    return min((one for one in stated if one != "unknown"), key=SEVERITIES.index, default=_of_score(score))


def _others(names: Iterable[str], first: str) -> tuple[str, ...]:
    return tuple(sorted({_plain(name) for name in names if name != first}))


def _of_score(score: object) -> str:
    """Return the severity of a CVSS score (CVSS 3.1 specification, section 5)."""
    try:
        value = float(str(score))
    except ValueError:
        return "unknown"
    limits = ((9.0, "critical"), (7.0, "high"), (4.0, "medium"), (0.1, "low"))
    return next((name for limit, name in limits if value >= limit), "unknown")


def _fixed_in(about: Any, package: str) -> Iterator[str]:
    """Yield the versions that an entry of OSV says are fixed (OSV schema 1.7, `affected[].ranges[].events[].fixed`)."""
    for affected in about.get("affected") or ():
        if (affected.get("package") or {}).get("name") != package:
            continue
        for one in affected.get("ranges") or ():
            if one.get("type") != "GIT":
                yield from (event["fixed"] for event in one.get("events") or () if "fixed" in event)


_READERS = {"grype": _from_grype, "osv-scanner": _from_osv}


def _database(report: Any) -> str:
    """Return when grype's database was made; osv-scanner does not say."""
    descriptor = report.get("descriptor") or {}
    database = descriptor.get("db") or {}
    built = (database.get("status") or {}).get("built") or database.get("built") or ""
    return _plain(built)
