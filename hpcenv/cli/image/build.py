"""`hpcenv image build`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from typing import Any

import click

from hpcenv.cli import _progress, _render
from hpcenv.cli.image import _conversion
from hpcenv.errors import LockfileMissing
from hpcenv.image.pull import BuiltImage
from hpcenv.image.reference import Platform
from hpcenv.image.registry.source import Access
from hpcenv.image.store.store_folder import open_place
from hpcenv.locking.definition_build import (
    DefinitionBuild,
    build_definition,
    parse_bind,
    read_definition,
    refuse_on_cluster,
)
from hpcenv.locking.image_source import project_platform
from hpcenv.locking.project_image import BuildOptions, build, ca_file
from hpcenv.progress import OnEvent
from hpcenv.project.workspace import SPEC_NAME, read_lockfile


@click.command("build")
@click.argument("definition", required=False, metavar="[FILE.def]")
@click.option(
    "--lock", "lock", default="default", show_default=True, metavar="NAME", help="Lockfile whose image is used."
)
@click.option("--upgrade", is_flag=True, help="Ask the registry again which image the tag names.")
@click.option("--allow-floating", is_flag=True, help="Accept an image or a source that may be different tomorrow.")
@click.option(
    "--bind", "binds", multiple=True, metavar="SRC:DST[:ro]", help="Folder that the build of a FILE.def can use."
)
@_conversion.plain_http
@click.option(
    "--platform", type=_conversion.PLATFORM, metavar="OS/ARCH",
    help="Platform for FILE.def, if not the project's or linux/amd64.",
)  # fmt: skip
@_conversion.convert_options
@_render.store_option
@_render.json_option
def command(definition: str | None, lock: str, as_json: bool, where: _render.Where, **values: Any) -> int:
    """Make the project's SIF, or build one from a definition file.

    Without FILE.def: the image that hpcenv.toml names, at its locked digest. With FILE.def:
    Apptainer builds the file without root, and the SIF is stored under its own digest.
    """
    binds = tuple(parse_bind(text, _render.cwd()) for text in values["binds"])
    convert = _conversion.chosen(values)
    options = BuildOptions(convert=convert, allow_floating=values["allow_floating"], binds=binds)
    plain_http, platform = values["plain_http"], values["platform"]
    if definition is None and (plain_http or platform):
        raise click.UsageError("--plain-http and --platform need FILE.def; for a project set them in hpcenv.toml")
    with _progress.shown(as_json=as_json) as on_event:
        if definition is not None:
            result = _from_definition(definition, where, options, on_event, plain_http=plain_http, platform=platform)
        else:
            result = _from_project(where, lock, options, on_event, upgrade=values["upgrade"])
    return _conversion.show_result("image build", result, as_json=as_json)


def _from_definition(
    definition: str,
    where: _render.Where,
    options: BuildOptions,
    on_event: OnEvent,
    *,
    plain_http: tuple[str, ...],
    platform: Platform | None,
) -> BuiltImage:
    if options.convert.allocation is not None:
        refuse_on_cluster(definition)
    here = _render.cwd()
    # In a project, its settings for registries and the platform apply here too.
    in_project = any((folder / SPEC_NAME).is_file() for folder in (here, *here.parents))
    workspace = where.project() if in_project else None
    if workspace is not None:
        platform = platform or project_platform(workspace)
        plain_http = (*plain_http, *workspace.project.plain_http)
    path = here / definition
    request = DefinitionBuild(
        path=path,
        text=read_definition(path),
        name=definition,
        platform=platform or Platform(),
        access=Access(
            plain_http=plain_http, ca_file=None if workspace is None else ca_file(workspace), environ=os.environ
        ),
        allow_floating=options.allow_floating,
        binds=options.binds,
    )
    return build_definition(request, open_place(where.place(), create=True), os.environ, on_event)


def _from_project(
    where: _render.Where, lock: str, options: BuildOptions, on_event: OnEvent, *, upgrade: bool
) -> BuiltImage:
    workspace = where.project()
    before, lockfile = None, workspace.lockfile_path(lock)
    if not upgrade:
        try:
            before = read_lockfile(lockfile)
        except LockfileMissing:
            before = None  # nothing is locked yet: resolve the tag now
    return build(workspace, before=before, environ=os.environ, on_event=on_event, options=options, lockfile=lockfile)
