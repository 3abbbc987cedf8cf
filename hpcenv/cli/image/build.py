"""`hpcenv image build`."""

from __future__ import annotations

import os
from typing import Any

import click

from hpcenv.cli import _progress, _render
from hpcenv.cli.image import _conversion


@click.command("build")
@click.argument("definition", required=False, metavar="[FILE.def]")
@click.option("--lock", "name", default="default", show_default=True, help="Lockfile whose image is kept.")
@click.option("--upgrade", is_flag=True, help="Ask the registry again what the tag means.")
@click.option("--allow-floating", is_flag=True, help="Accept what may be something else tomorrow.")
@click.option("--bind", "binds", multiple=True, metavar="SRC:DST[:ro]", help="What the build of a FILE.def sees.")
@_conversion.plain_http
@click.option("--platform", metavar="OS/ARCH", help="With FILE.def, if not the project's or linux/amd64.")
@_conversion.options
@_render.store_option
@_render.json_option
def command(definition: str | None, name: str, as_json: bool, where: _render.Where, **words: Any) -> int:
    """Make the project's SIF, or one from a definition file.

    Without FILE.def: the image that hpcenv.toml names, as it is locked. With it: what
    Apptainer builds from the file, without root, kept in the store by its own digest.
    """
    from hpcenv.steps.image.build import Choices, parse_bind

    binds = tuple(parse_bind(text, _render.cwd()) for text in words["binds"])
    choices = Choices(allow_floating=words["allow_floating"], binds=binds, **_conversion.chosen(words))
    plain_http, platform = words["plain_http"], words["platform"]
    if definition is None and (plain_http or platform):
        raise click.UsageError("--plain-http and --platform go with FILE.def; a project has them in hpcenv.toml")
    with _progress.shown(as_json=as_json) as on_event:
        if definition is not None:
            result = _definition(definition, where, choices, on_event, plain_http=plain_http, platform=platform)
        else:
            result = _project(where, name, choices, on_event, upgrade=words["upgrade"])
    return _conversion.tell("image build", result, as_json=as_json)


def _definition(
    definition: str,
    where: _render.Where,
    choices: Any,
    on_event: Any,
    *,
    plain_http: tuple[str, ...],
    platform: str | None,
) -> Any:
    from hpcenv.steps.image.build import build_definition, ca_file
    from hpcenv.steps.workspace import SPEC_NAME

    here = _render.cwd()
    # Within a project its word on registries and the platform counts here, too.
    around = any((folder / SPEC_NAME).is_file() for folder in (here, *here.parents))
    workspace = where.project() if around else None
    return build_definition(
        here / definition,
        definition,
        where.place().open(create=True),
        os.environ,
        on_event,
        choices,
        platform=platform or (workspace.project.platform if workspace else "linux/amd64"),
        plain_http=(*plain_http, *(workspace.project.plain_http if workspace else ())),
        ca_file=ca_file(workspace) if workspace else None,
    )


def _project(where: _render.Where, name: str, choices: Any, on_event: Any, *, upgrade: bool) -> Any:
    from hpcenv.errors import LockfileMissing
    from hpcenv.steps.image.build import build
    from hpcenv.steps.workspace import read_lockfile

    workspace = where.project()
    before, lockfile = None, workspace.lockfile_path(name)
    if not upgrade:
        try:
            before = read_lockfile(lockfile)
        except LockfileMissing:
            before = None  # nothing is kept yet: what the tag means now
    return build(workspace, before=before, environ=os.environ, on_event=on_event, choices=choices, lockfile=lockfile)
