"""`hpcenv image rebuild`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _render
from hpcenv.cli.image import _conversion


@click.command("rebuild")
@click.argument("lockfile", metavar="LOCK")
@click.option("--out", default="rebuilt", show_default=True, metavar="DIR", help="Folder for the files.")
@click.option("--name", default="rebuilt", show_default=True, help="Name of the image.")
@click.option("--os", "system", metavar="NAME", help="Distribution, if not the locked one.")
@click.option("--base", metavar="REF", help="Base image NAME[:TAG][@sha256:...], or a SIF.")
@click.option("--base-python", is_flag=True, help="The base brings the Python: install none.")
@click.option("--proved-only", is_flag=True, help="Leave out packages whose wheel is not known by hash.")
@click.option("--build", is_flag=True, help="Make the SIF and compare it with the lockfile.")
@click.option("--site", metavar="DIR", help="Folder with pip.conf, apt.sources ...; else DIR/site.")
@_conversion.plain_http
@click.option("--force", is_flag=True, help="Replace files that hpcenv did not write.")
@_render.json_option
def command(lockfile: str, out: str, site: str | None, base: str | None, as_json: bool, **words: Any) -> int:
    """Make an image again from a lockfile, when the original is gone.

    Writes a Dockerfile and a definition file, and says what will be the same and what
    not. With --build it makes the SIF, looks into it, and compares every field; the exit
    status is 21 when something that must be as locked is not.
    """
    from hpcenv.steps.image.rebuild import rebuild

    here = _render.cwd()
    if base is not None and base.endswith(".sif"):
        base = os.path.abspath(here / base)
    result = rebuild(
        Path(os.path.abspath(here / lockfile)),
        Path(os.path.abspath(here / out)),
        environ=os.environ,
        name=words["name"],
        system=words["system"],
        base=base,
        base_has_python=words["base_python"],
        proved_only=words["proved_only"],
        plain_http=words["plain_http"],
        build=words["build"],
        site=None if site is None else Path(os.path.abspath(here / site)),
        on_line=_render.tell,
        force=words["force"],
    )
    problem = result.problem
    if as_json:
        _render.verdict_on("image rebuild", result, ok=problem is None, problem=problem)
        return 0 if problem is None else problem.exit_status
    _show(result)
    if problem is not None:
        raise problem
    return 0


def _show(result: Any) -> None:
    for note in result.notes:
        _render.tell(f"note: {note}")
    for part in result.parts:
        _render.say(f"{part.prospect:7} {part.what}: {part.why}")
    _render.say(f"wrote {', '.join(path.name for path in result.files)} to {result.folder}")
    if result.sif is None:
        return
    _render.say(f"made {result.sif}")
    same = sum(row.outcome == "same" for row in result.rows)
    for row in result.rows:
        if row.outcome != "same":
            as_said = " (as said above)" if row.announced else ""
            _render.say(
                f"{row.outcome:8} {row.severity:5} {row.field}{as_said}: locked {row.locked}, found {row.found}"
            )
    _render.say(f"same     {same} of {len(result.rows)} fields")
