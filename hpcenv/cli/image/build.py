"""`hpcenv image build`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _accept, _progress, _render
from hpcenv.cli._complete import lockfile_names
from hpcenv.cli.image import _conversion
from hpcenv.errors import LockfileMissing
from hpcenv.image.pull import BuiltImage
from hpcenv.image.reference import Platform
from hpcenv.image.registry.source import Access
from hpcenv.image.store.store_folder import open_place
from hpcenv.locking.definition_build import DefinitionBuild, build_definition, parse_bind, read_definition
from hpcenv.locking.image_source import project_platform
from hpcenv.locking.project_image import BuildOptions, build, registry_access
from hpcenv.progress import OnEvent
from hpcenv.project.workspace import SPEC_NAME, Workspace, read_lockfile
from hpcenv.recipes.dockerfile_build import ENGINES, DockerfileBuild, build_dockerfile, is_dockerfile


@click.command("build")
@click.argument("definition", required=False, metavar="[FILE.def|DOCKERFILE]")
@click.option(
    "--lock",
    "lock",
    default="default",
    show_default=True,
    metavar="NAME",
    help="Lockfile whose image is used.",
    shell_complete=lockfile_names,
)
@click.option("--upgrade", is_flag=True, help="Ask the registry again which image the tag names.")
@click.option("--allow-floating", is_flag=True, help="Accept an image or a source that may be different tomorrow.")
@click.option(
    "--bind", "binds", multiple=True, metavar="SRC:DST[:ro]", help="Folder that the build of a FILE.def can use."
)
@_conversion.plain_http
@click.option(
    "--platform", type=_conversion.PLATFORM, metavar="OS/ARCH",
    help="Platform for FILE.def. Default: the platform of the project, else linux/amd64.",
)  # fmt: skip
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="auto",
    show_default=True,
    help="Program that builds a DOCKERFILE. auto: buildah if it is installed, else podman.",
)
@click.option(
    "--build-arg",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Value for an ARG instruction of a DOCKERFILE.",
)
@click.option("--target", metavar="STAGE", help="Stage of a DOCKERFILE to build. Default: the last stage.")
@click.option(
    "--context", metavar="DIR", help="Folder that a DOCKERFILE copies from. Default: the folder of the DOCKERFILE."
)
@_conversion.convert_options
@_accept.option
@_render.store_option
@_render.json_option
def command(
    definition: str | None, lock: str, accept: str | None, as_json: bool, where: _render.Where, **values: Any
) -> int:
    """Make the project's SIF, or build one from a definition file or a Dockerfile.

    Without FILE.def, hpcenv makes the SIF of the image that hpcenv.toml names, at the locked digest. With FILE.def,
    Apptainer builds the SIF without root, and hpcenv stores the SIF under its own digest. With DOCKERFILE, buildah or
    podman builds the image, without docker.
    """
    binds = tuple(parse_bind(text, _render.cwd()) for text in values["binds"])
    convert = _conversion.chosen(values)
    plain_http, platform = values["plain_http"], values["platform"]
    options = BuildOptions(convert=convert, allow_floating=values["allow_floating"], binds=binds, plain_http=plain_http)
    _check_options(definition, values)
    workspace = _project(where, needed=definition is None)
    if workspace is not None:
        _accept.require(workspace, accept, as_json=as_json)
    with _progress.shown(as_json=as_json) as on_event:
        if definition is not None and _names_dockerfile(definition):
            request = _dockerfile_build(definition, workspace, options, values, platform=platform)
            store = open_place(where.place(), create=True)
            result = build_dockerfile(request, convert, store, os.environ, on_event)
        elif definition is not None:
            result = _from_definition(definition, where, workspace, options, on_event, platform=platform)
        elif workspace is not None:
            result = _from_project(workspace, lock, options, on_event, upgrade=values["upgrade"])
    return _conversion.show_result("image build", result, as_json=as_json)


def _check_options(definition: str | None, values: dict[str, Any]) -> None:
    """Refuse options that would have no effect."""
    if definition is None and values["platform"]:
        raise click.UsageError("--platform needs FILE.def; for a project set it in hpcenv.toml")
    if definition is not None and _names_dockerfile(definition):
        if values["binds"]:
            raise click.UsageError("--bind needs FILE.def: it has no effect on the build of a DOCKERFILE")
        return
    given = {"--engine": values["engine"] != "auto", "--build-arg": values["arguments"], "--target": values["target"]}
    given |= {"--context": values["context"]}
    for option, value in given.items():
        if value:
            raise click.UsageError(f"{option} needs a DOCKERFILE")


def _names_dockerfile(path: str) -> bool:
    file = _render.cwd() / path
    return is_dockerfile(read_definition(file), path) if file.is_file() else False


def _dockerfile_build(
    path: str, workspace: Workspace | None, options: BuildOptions, values: dict[str, Any], *, platform: Platform | None
) -> DockerfileBuild:
    file = Path(os.path.abspath(_render.cwd() / path))
    context = file.parent if values["context"] is None else Path(os.path.abspath(_render.cwd() / values["context"]))
    if not context.is_dir():
        raise click.UsageError(f"--context: there is no folder `{context}`")
    if any("=" not in text.lstrip("=") for text in values["arguments"]):
        raise click.UsageError("--build-arg has the form NAME=VALUE")
    access = Access(plain_http=options.plain_http, environ=os.environ)
    if workspace is not None:
        access = registry_access(workspace, os.environ, typed=options.plain_http)
        platform = platform or project_platform(workspace)
    return DockerfileBuild(
        path=file,
        name=path,
        context=context,
        engine=values["engine"],
        arguments=dict(text.split("=", 1) for text in values["arguments"]),
        target=values["target"],
        platform=platform or Platform(),
        access=access,
    )


def _project(where: _render.Where, *, needed: bool) -> Workspace | None:
    """Return the project around this folder; None if there is no project, and the command needs no project."""
    here = _render.cwd()
    in_project = any((folder / SPEC_NAME).is_file() for folder in (here, *here.parents))
    return where.project() if needed or in_project else None


def _from_definition(
    definition: str,
    where: _render.Where,
    workspace: Workspace | None,
    options: BuildOptions,
    on_event: OnEvent,
    *,
    platform: Platform | None,
) -> BuiltImage:
    # In a project, the project's settings for registries and the platform are used here, too.
    access = Access(plain_http=options.plain_http, environ=os.environ)
    if workspace is not None:
        platform = platform or project_platform(workspace)
        access = registry_access(workspace, os.environ, typed=options.plain_http)
    path = _render.cwd() / definition
    request = DefinitionBuild(
        path=path,
        text=read_definition(path),
        name=definition,
        platform=platform or Platform(),
        access=access,
        allow_floating=options.allow_floating,
        binds=options.binds,
    )
    return build_definition(request, open_place(where.place(), create=True), os.environ, on_event)


def _from_project(
    workspace: Workspace, lock: str, options: BuildOptions, on_event: OnEvent, *, upgrade: bool
) -> BuiltImage:
    before, lockfile = None, workspace.lockfile_path(lock)
    workspace = workspace.for_lock(lock)
    if not upgrade:
        try:
            before = read_lockfile(lockfile)
        except LockfileMissing:
            before = None  # no image is locked yet, so the tag is resolved now
    return build(workspace, before=before, environ=os.environ, on_event=on_event, options=options)
