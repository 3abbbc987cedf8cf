"""`hpcenv image rebuild`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _accept, _render
from hpcenv.cli._complete import lockfile_names
from hpcenv.cli.image import _conversion
from hpcenv.project.workspace import names_lockfile_path
from hpcenv.recipes.rebuild import RebuildResult, rebuild


@click.command("rebuild")
@click.option(
    "--lock",
    metavar="NAME",
    default="default",
    show_default=True,
    help="Which lockfile: lockfiles/NAME.lock.toml, or the path of any lockfile.",
    shell_complete=lockfile_names,
)
@click.option("-o", "--output", default="rebuilt", show_default=True, metavar="DIR", help="Folder for the files.")
@click.option("--tag", default="rebuilt", show_default=True, metavar="NAME[:TAG]", help="Name of the new image.")
@click.option("--os", "distribution", metavar="NAME", help="Distribution. Default: the locked one.")
@click.option("--base", metavar="IMAGE", help="Image to start from: NAME[:TAG][@sha256:...], or a SIF.")
@click.option("--base-python", "base_has_python", is_flag=True, help="The base contains the Python: install none.")
@click.option("--proved-only", is_flag=True, help="Leave out packages whose wheel is not known by hash.")
@click.option("--build", is_flag=True, help="Build the SIF and compare it with the lockfile.")
@click.option(
    "--pip-config",
    metavar="DIR",
    help="Folder with pip.conf, apt.sources, apt.conf and ca.crt for --build. Default: `site` in the output folder.",
)
@_conversion.plain_http
@click.option("--force", is_flag=True, help="Replace files that hpcenv did not write.")
@_accept.option
@_render.json_option
def command(
    lock: str,
    output: str,
    pip_config: str | None,
    base: str | None,
    accept: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Make an image again from its lockfile, after the original is lost.

    It writes a Dockerfile and a definition file, and says which parts will be the same. With
    --build it builds the SIF and compares every field with the lockfile. The exit status
    is 28 when a field that must match differs.
    """
    here = _render.cwd()
    if options["build"] and not names_lockfile_path(lock):
        _accept.require(_render.open_project(), accept, as_json=as_json)
    if base is not None and base.endswith(".sif"):
        base = os.path.abspath(here / base)
    result = rebuild(
        here,
        Path(os.path.abspath(here / output)),
        environ=os.environ,
        lock=lock,
        base=base,
        pip_config=None if pip_config is None else Path(os.path.abspath(here / pip_config)),
        on_line=_render.tell,
        **options,
    )
    problem = result.problem
    if as_json:
        _render.verdict_on("image rebuild", result, ok=problem is None, problem=problem)
        return 0 if problem is None else problem.exit_status
    _show(result)
    if problem is not None:
        raise problem
    return 0


def _show(result: RebuildResult) -> None:
    for note in result.notes:
        _render.tell(f"note: {note}")
    for part in result.parts:
        _render.say(f"{part.prospect:7} {part.what}: {part.why}")
    _render.say(f"wrote {', '.join(path.name for path in result.files)} to {result.folder}")
    if result.sif is None:
        return
    _render.say(f"built {result.sif}")
    same = sum(row.outcome == "same" for row in result.rows)
    for row in result.rows:
        if row.outcome != "same":
            expected = " (expected, see above)" if row.announced else ""
            _render.say(
                f"{row.outcome:8} {row.severity:5} {row.field}{expected}: locked {row.locked}, found {row.found}"
            )
    _render.say(f"same     {same} of {len(result.rows)} fields")
