"""`hpcenv image lint`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from typing import Any

import click

from hpcenv.cli import _render
from hpcenv.cli.image import _conversion
from hpcenv.errors import FileUnusable, HpcenvError, LintFailed
from hpcenv.image.reference import Platform
from hpcenv.recipes.image_lint import LintFinding
from hpcenv.recipes.lint import LintResult, lint


@click.command("lint")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--allow",
    multiple=True,
    metavar="RULE",
    help="Accept the findings of RULE; RULE=reason adds a reason. Can be repeated.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warn", "info"]),
    default="error",
    show_default=True,
    help="Fail if there is a finding of this severity or of a higher severity.",
)
@_conversion.platform
@click.option("--all", "show_all", is_flag=True, help="Show accepted findings too.")
@_render.json_option
def command(
    paths: tuple[str, ...], allow: tuple[str, ...], platform: Platform, fail_on: Any, show_all: bool, as_json: bool
) -> int:
    """Check Dockerfiles, definition files and finished images.

    PATH is a recipe, a SIF, a folder with an OCI layout, or oci:, oci-archive: or
    docker-archive:. For general rules about Dockerfiles use hadolint. A line
    `# hpcenv: allow RULE reason` above an instruction or command accepts what RULE finds in this instruction or
    command.
    """
    result = lint(paths, here=_render.cwd(), allow=allow, platform=platform)
    problem = _unread(result) or _problem(result.count_from(fail_on), fail_on)
    if as_json:
        _render.verdict_on("image lint", result, ok=problem is None, problem=problem)
        return 0 if problem is None else problem.exit_status
    for finding in result.findings:
        if finding.allowed is None or show_all:
            _show(finding)
    counts = ", ".join(f"{count} {severity}" for severity, count in result.counts.items())
    accepted = sum(finding.allowed is not None for finding in result.findings)
    _render.say(f"{len(result.checked)} checked: {counts}" + (f", {accepted} allowed" if accepted else ""))
    if problem is not None:
        raise problem
    return 0


def _unread(result: LintResult) -> HpcenvError | None:
    if not result.unread:
        return None
    return FileUnusable(
        f"{len(result.unread)} of {len(result.checked) + len(result.unread)} paths could not be checked",
        why="\n".join(f"{one.what}: {one.why}" if one.why else one.what for one in result.unread),
        hint="name recipes and images only; the other paths were checked",
    )


def _problem(count: int, fail_on: str) -> HpcenvError | None:
    if not count:
        return None
    return LintFailed(
        f"{count} findings" if count > 1 else "1 finding",
        why=f"`--fail-on {fail_on}` refuses findings of this severity",
        hint="repair the findings, or accept a finding with a comment above its line: `# hpcenv: allow RULE reason`",
    )


def _show(finding: LintFinding) -> None:
    line = f":{finding.line}" if finding.line is not None else ""
    place = f" [{finding.place}]" if finding.place else ""
    allowed = f" (allowed: {finding.allowed})" if finding.allowed is not None else ""
    _render.say(f"{finding.origin}{line}: {finding.severity}[{finding.rule}] {finding.what}{place}{allowed}")
    if finding.allowed is not None:
        return
    if finding.why:
        _render.say(f"    why: {finding.why}")
    if finding.advice:
        _render.say(f"    do:  {finding.advice}")
