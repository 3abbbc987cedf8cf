"""`hpcenv image scan`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from typing import Any

import click

from hpcenv.cli import _render
from hpcenv.cli._complete import lockfile_names
from hpcenv.errors import HpcenvError, LintFailed
from hpcenv.locking.scan import SCANNERS, SEVERITIES, ScanResult, scan

# The file keeps all of them.
_SHOWN = 20


@click.command("scan")
@click.option(
    "--lock",
    metavar="NAME",
    default="default",
    show_default=True,
    help="Which lockfile: lockfiles/NAME.lock.toml, or the path of any lockfile.",
    shell_complete=lockfile_names,
)
@click.option("--scanner", type=click.Choice(SCANNERS), help="Which scanner. Default: the first that is installed.")
@click.option(
    "--sbom",
    "bill",
    type=click.Choice(["cyclonedx", "spdx"]),
    default="cyclonedx",
    show_default=True,
    help="Format of the bill of materials that the scanner gets.",
)
@click.option(
    "--fail-on",
    type=click.Choice(SEVERITIES),
    help="Fail when there is one of this severity or a worse one. With unknown: when there is any.",
)
@_render.json_option
def command(lock: str, scanner: Any, bill: Any, fail_on: str | None, as_json: bool) -> int:
    """Look for known vulnerabilities of the locked packages.

    grype or osv-scanner looks them up, from the lockfile's bill of materials. The dated
    result is kept beside the lockfile, as NAME.scan.json. It is about Python packages, not
    about those of the distribution.
    """
    result = scan(_render.cwd(), environ=os.environ, lock=lock, scanner=scanner, bill=bill)
    problem = None if fail_on is None else _problem(result.count_from(fail_on), fail_on)
    if as_json:
        _render.verdict_on("image scan", result, ok=problem is None, problem=problem)
        return 0 if problem is None else problem.exit_status
    _show(result)
    if fail_on is not None and fail_on != "unknown" and result.counts["unknown"]:
        _render.tell(f"--fail-on {fail_on} does not count those of unknown severity; --fail-on unknown counts all")
    if problem is not None:
        raise problem
    return 0


def _problem(count: int, fail_on: str) -> HpcenvError | None:
    if not count:
        return None
    return LintFailed(
        f"{count} known vulnerabilities" if count > 1 else "1 known vulnerability",
        why=f"--fail-on {fail_on}",
        hint="install versions without them, and lock again",
    )


def _show(result: ScanResult) -> None:
    for one in result.vulnerabilities[:_SHOWN]:
        fixed = f"fixed in {', '.join(one.fixed[:3])}" if one.fixed else "no version without it is known"
        names = [] if one.id.startswith("CVE-") else [name for name in one.aliases if name.startswith("CVE-")]
        cve = f" ({names[0]})" if names else ""
        _render.say(f"{one.severity:<9} {one.package} {one.version}  {one.id}{cve}  {fixed}")
    if len(result.vulnerabilities) > _SHOWN:
        _render.say(f"and {len(result.vulnerabilities) - _SHOWN} more in {result.path}")
    counts = ", ".join(f"{count} {severity}" for severity, count in result.counts.items() if count)
    database = f", database of {result.database}" if result.database else ""
    _render.say(f"{result.packages} packages by {result.scanner}{database}: {counts or 'no known vulnerability'}")
    _render.tell(f"kept in {result.path}")
