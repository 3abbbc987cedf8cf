"""`hpcenv site`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from hpcenv.cli import _render
from hpcenv.project.context import Context
from hpcenv.project.site_page import page
from hpcenv.project.site_when import RunFacts, SiteGpuVendor
from hpcenv.project.workspace import SPEC_NAME
from hpcenv.survey.site_values import FoundProfile, list_profiles, values_for


@click.command("site")
@click.argument("name", required=False)
@click.option("--nodes", type=click.IntRange(min=1), default=1, metavar="N", help="Number of nodes. Default: 1.")
@click.option("--partition", metavar="NAME", help="Slurm partition, as --partition of submit.")
@click.option(
    "--gpu-vendor", type=click.Choice(["nvidia", "amd", "none"]), help="Vendor of the GPUs for which torch is built."
)
@click.option("--gpu", metavar="TYPE", help="Type of the GPUs, for example h100.")
@click.option("--nccl", metavar="VERSION", help="Version of NCCL, or of RCCL.")
@click.option("--rocm", metavar="VERSION", help="Version of ROCm, or none.")
@_render.json_option
def command(
    name: str | None,
    nodes: int,
    partition: str | None,
    gpu_vendor: SiteGpuVendor | None,
    gpu: str | None,
    nccl: str | None,
    rocm: str | None,
    as_json: bool,
) -> int:
    """Say which settings the site profile NAME gives to a run, with reasons and sources.

    NAME is the name or the path of a profile. Without NAME, hpcenv lists all profiles that --site can name. If the
    condition of a value is about something that you do not give here, hpcenv leaves out the value and prints a note.
    """
    here = _render.cwd()
    project = next((folder for folder in (here, *here.parents) if (folder / SPEC_NAME).is_file()), None)
    if name is None:
        return _list(project, as_json=as_json)
    run = RunFacts(nodes=nodes, partition=partition, gpu_vendor=gpu_vendor, gpu=gpu, nccl=nccl, rocm=rocm)
    found = values_for(name, project, _context(here), run)
    if as_json:
        parts = {key: getattr(found, key) for key in ("name", "path", "notes", "no_runtime", "used", "left_out")}
        _render.success("site", parts)
        return 0
    _render.say(page(found).rstrip("\n"))
    return 0


def _list(project: Path | None, *, as_json: bool) -> int:
    found = list_profiles(project, os.environ)
    if as_json:
        _render.success("site", {"profiles": found})
        return 0
    for one in found:
        _render.say(_row(one))
    return 0


def _row(one: FoundProfile) -> str:
    use = one.problem or (f"for cluster {one.cluster}" if one.cluster else "by name only")
    return f"{one.name:<16} {use:<24} {one.path}"


def _context(here: Path) -> Context:
    return Context(environ=os.environ, cwd=here, now=time.localtime(), token="", command=())
