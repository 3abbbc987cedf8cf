"""`hpcenv image init`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _pins, _render
from hpcenv.errors import Command, UsageError, render_hint
from hpcenv.locking.pins.pin import pin_source
from hpcenv.project.context import Context
from hpcenv.project.site_when import RunFacts
from hpcenv.project.workspace import SPEC_NAME, open_workspace
from hpcenv.recipes import session_tools
from hpcenv.recipes.combination import DISTRIBUTIONS
from hpcenv.recipes.init import WrittenRecipe, prepare, write
from hpcenv.recipes.recipe_record import BuildRequest, RecipeRequest
from hpcenv.sessions.tools import TOOLS
from hpcenv.submission.choose_site import by_name


@click.command("init")
@click.option(
    "--torch", metavar="X.Y.Z", help="torch release. Default: the locked release, or the newest release that fits."
)
@click.option(
    "--cuda", metavar="X.Y|cpu", help="CUDA of the torch build. Default: the CUDA version of torch's default index."
)
@click.option("--python", metavar="3.X", help="Python version. Default: the version in the distribution.")
@click.option(
    "--os",
    "distribution",
    metavar="NAME",
    default="bookworm",
    show_default=True,
    help=f"Distribution of the image: {', '.join(DISTRIBUTIONS)}.",
)
@click.option(
    "--with", "packages", metavar="NAME[==VERSION]", multiple=True, help="Python package that pip resolves with torch."
)
@click.option(
    "--requirements", metavar="FILE", help="Requirements file without hashes; pip resolves its packages with torch."
)
@click.option("--apt", metavar="NAME", multiple=True, help="Package of the distribution to install.")
@click.option(
    "--pylock", metavar="FILE", help="File with locked packages: uv.lock, pylock.toml or requirements with hashes."
)
@_pins.options("--pylock")
@click.option("--base", metavar="IMAGE", help="Image to start from: NAME[:TAG][@sha256:...], or a SIF.")
@click.option(
    "--build", "compiled", metavar="NAME==VERSION", multiple=True, help="Package to compile for this torch and GPU."
)
@click.option(
    "--build-with", "tools", metavar="NAME", multiple=True, help="One more package that a build of --build needs."
)
@click.option(
    "--build-base",
    metavar="IMAGE",
    help="Image with the CUDA toolkit in which packages are compiled, for CUDA 12 and older.",
)
@click.option("--gpu", metavar="NAME", help="GPU to compile for. Default: `gpu` under [host] in hpcenv.toml.")
@click.option("--tag", default="train", show_default=True, metavar="NAME[:TAG]", help="Name of the new image.")
@click.option("-o", "--output", default="image", show_default=True, metavar="DIR", help="Folder for the files.")
@click.option(
    "--tools",
    "for_sessions",
    metavar="NAME,...",
    help=f"Tools for sessions, which are installed over the project's image: {','.join(TOOLS)}.",
)
@click.option("--force", is_flag=True, help="Replace files that hpcenv did not write.")
@_render.json_option
def command(
    output: str,
    compiled: tuple[str, ...],
    tools: tuple[str, ...],
    build_base: str | None,
    gpu: str | None,
    as_json: bool,
    for_sessions: str | None,
    force: bool,
    **wanted: Any,
) -> int:
    """Write a Dockerfile and an Apptainer definition file that make the same image.

    torch, CUDA and Python are checked against the compatibility table. The files name the
    base by digest and every package by sha256. pip and apt use their own configuration.
    Packages of --with and --requirements are resolved together with torch; torchvision and
    torchaudio get the release for this torch. A file that you edited is not replaced.
    A package of --build (flash-attn, apex ...) is compiled from its source archive, in a separate build stage that
    does not become part of the image.

    With --tools, hpcenv writes one script instead. The script installs the tools into a virtual environment over the
    locked image, packs this virtual environment, and locks the result as [environment.tools].
    """
    here, folder = _render.cwd(), Path(os.path.abspath(_render.cwd() / output))
    _check_options(compiled, tools, build_base, wanted, for_sessions=for_sessions)
    if for_sessions is not None:
        return _write_tools(for_sessions.split(","), folder, force=force, as_json=as_json)
    plain_http, host_gpu = _project_settings(here)
    base = wanted["base"]
    if base is not None and base.endswith(".sif"):
        wanted["base"] = os.path.abspath(here / base)
    for option in ("pylock", "requirements"):
        if wanted[option] is not None:
            wanted[option] = os.path.abspath(here / wanted[option])
    recommended = _recommended(here) if base is None else ()
    if not as_json:
        # The note is printed before the work. If the official base image cannot be reached, the user needs the note,
        # because the image that the site recommends may be reachable.
        for note in recommended:
            _render.tell(f"note: {note}")
    build = BuildRequest(packages=compiled, tools=tools, base=build_base, gpu=gpu or host_gpu)
    request = RecipeRequest(**wanted, build=build)
    prepared = prepare(request, environ=os.environ, plain_http=plain_http)
    result = write(prepared, folder, force=force)
    if as_json:
        _render.success("image init", replace(result, notes=(*result.notes, *recommended)))
        return 0
    _show(result)
    return 0


def _check_options(
    compiled: Sequence[str],
    tools: Sequence[str],
    build_base: str | None,
    wanted: Mapping[str, Any],
    *,
    for_sessions: str | None,
) -> None:
    """Refuse options that would have no effect."""
    from_index = wanted["packages"] or wanted["requirements"]
    if for_sessions is not None and (compiled or wanted["base"] or wanted["pylock"] or from_index or wanted["apt"]):
        raise UsageError(
            "--tools adds tools to the locked image, and accepts no options for a new image",
            hint="leave out --build, --base, --pylock, --with, --requirements and --apt",
        )
    if not compiled and (tools or build_base):
        raise UsageError("--build-with and --build-base need --build", hint="for example --build flash-attn==2.8.3")
    if wanted["pylock"] and from_index:
        raise UsageError(
            "--pylock names all packages, but --with and --requirements add more packages",
            hint="add the packages to the file of --pylock, or leave out --pylock",
        )
    if not wanted["pylock"]:
        pin_source(None, Path(), extras=wanted["extras"], groups=wanted["groups"], package=wanted["package"])


def _write_tools(words: Sequence[str], folder: Path, *, force: bool, as_json: bool) -> int:
    script = session_tools.write(_render.open_project(), words, folder, force=force)
    if as_json:
        _render.success("image init", {"script": script})
        return 0
    _render.say(f"wrote {script}")
    _render.say(render_hint(("next: ", Command("sh", os.path.relpath(script, _render.cwd())))))
    return 0


def _project_settings(here: Path) -> tuple[tuple[str, ...], str | None]:
    """Return the registries without TLS, and the GPU, from hpcenv.toml. Outside a project, return empty and None."""
    if not any((folder / SPEC_NAME).is_file() for folder in (here, *here.parents)):
        return (), None
    workspace = open_workspace(here)
    return workspace.project.plain_http, workspace.project.host.gpu


def _recommended(here: Path) -> tuple[str, ...]:
    """Return a note for each base image that the chosen site profile recommends; empty if no profile is chosen."""
    root = next((folder for folder in (here, *here.parents) if (folder / SPEC_NAME).is_file()), None)
    named, origin = os.environ.get("HPCENV_SITE"), "HPCENV_SITE"
    if not named and root is not None:
        workspace = open_workspace(here)
        named, origin = workspace.project.site, f"`site` in {workspace.spec}"
    if not named or named == "none":
        return ()
    context = Context(environ=os.environ, cwd=here, now=time.localtime(), token="", command=())
    found = by_name(named, origin, root, context).for_run(RunFacts(nodes=1))
    return tuple(
        f"the site {found.name} recommends the base image {value.value} ({value.reason}): --base {value.value}"
        for value in found.used
        if value.kind == "base-image"
    )


def _show(result: WrittenRecipe) -> None:
    for note in result.notes:
        _render.tell(f"note: {note}")
    cuda = "CPU only" if result.cuda == "cpu" else f"CUDA {result.cuda}"
    _render.say(f"{result.image}: torch {result.torch}, {cuda}, Python {result.python}, {result.packages} packages")
    if result.compiled:
        for_gpu = f" for TORCH_CUDA_ARCH_LIST={result.arch_list}" if result.arch_list else ""
        _render.say(f"to compile: {', '.join(result.compiled)}{for_gpu}")
    _render.say(f"base {result.base}")
    _render.say(f"wrote {', '.join(str(path.relative_to(result.folder)) for path in result.files)} to {result.folder}")
