"""`hpcenv image lint`."""

from __future__ import annotations

from typing import Any

import click

from hpcenv.cli import _render
from hpcenv.errors import HpcenvError, LintFailed


@click.command("lint")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--allow", multiple=True, metavar="RULE", help="Accept what RULE finds; RULE=reason.")
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warn", "info"]),
    default="error",
    show_default=True,
    help="Which findings make it fail.",
)
@click.option("--platform", default="linux/amd64", show_default=True, help="Which image of several.")
@click.option("--all", "show_all", is_flag=True, help="Show what is allowed, too.")
@_render.json_option
def command(paths: tuple[str, ...], as_json: bool, fail_on: Any, show_all: bool, **words: Any) -> int:
    """Look for trouble in Dockerfiles, definition files and finished images.

    PATH is a recipe, a SIF, a folder with an OCI layout, or oci:, oci-archive: or
    docker-archive:. A line `# hpcenv: allow RULE reason` above an instruction or command
    accepts what RULE finds there.
    """
    from hpcenv.steps.image.lint import lint

    result = lint(paths, here=_render.cwd(), allow=words["allow"], platform=words["platform"])
    bad = result.bad(fail_on)
    problem: HpcenvError | None = None
    if bad:
        problem = LintFailed(
            f"{bad} findings" if bad > 1 else "1 finding",
            why=f"--fail-on {fail_on}",
            hint="repair them, or accept one where it stands: # hpcenv: allow RULE reason",
        )
    if as_json:
        _render.verdict_on("image lint", result, ok=problem is None, problem=problem)
        return 0 if problem is None else problem.exit_status
    for one in result.findings:
        if one.allowed is None or show_all:
            _show(one)
    counts = ", ".join(f"{count} {severity}" for severity, count in result.counts.items())
    accepted = sum(one.allowed is not None for one in result.findings)
    _render.say(f"{len(result.checked)} looked at: {counts}" + (f", {accepted} allowed" if accepted else ""))
    if problem is not None:
        raise problem
    return 0


def _show(one: Any) -> None:
    where = one.origin + (f":{one.line}" if one.line is not None else "")
    place = f" [{one.place}]" if one.place else ""
    allowed = f" (allowed: {one.allowed})" if one.allowed is not None else ""
    _render.say(f"{where}: {one.severity}[{one.rule}] {one.what}{place}{allowed}")
    if one.allowed is not None:
        return
    if one.why:
        _render.say(f"    why: {one.why}")
    if one.advice:
        _render.say(f"    do:  {one.advice}")
