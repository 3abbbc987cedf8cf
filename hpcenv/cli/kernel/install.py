"""`hpcenv kernel install`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from hpcenv.cli import _accept, _render
from hpcenv.cli._submit_options import table_option
from hpcenv.errors import SpecError
from hpcenv.locking.environment import host_environment
from hpcenv.project.workspace import read_lockfile
from hpcenv.records import files
from hpcenv.sessions.tools import how_to_add
from hpcenv.submission.kernel import folder_name, kernel_json


@click.command("install")
@table_option("lock")
@click.option(
    "--prefix", metavar="DIR", help="Install below DIR/share/jupyter. Default: the folder of your own kernels."
)
@_accept.option
@_render.json_option
def command(lock: str | None, prefix: str | None, accept: str | None, as_json: bool) -> int:
    """Install a Jupyter kernel that starts in the locked environment, for a JupyterHub.

    hpcenv checks each start of the kernel like the start of a job. If this machine differs from the lockfile, the
    kernel does not start, and the log of Jupyter contains the table of the differences. In an allocation the kernel
    starts on the first node of the allocation.
    """
    whole = _render.open_project()
    _accept.require(whole, accept, as_json=as_json)
    name = lock or "default"
    locked, workspace = read_lockfile(whole.lockfile_path(name)), whole.for_lock(name)
    on_host = locked.container is None
    if "ipykernel" not in {dist.name for dist in locked.packages.dist}:
        hint = how_to_add("jupyter", on_host=on_host)
        raise SpecError(f"lockfiles/{name}.lock.toml has no ipykernel", why="the kernel is started with it", hint=hint)
    python = host_environment(workspace, os.environ).python if on_host else workspace.project.python or "python3"
    text = kernel_json(
        project=workspace.root, lock=name, program=_render.own_program(), python=python, on_host=on_host
    )  # fmt: skip
    folder = _kernels(prefix) / folder_name(workspace.root.name, name)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(text, folder / "kernel.json")
    if as_json:
        _render.success("kernel install", {"name": folder.name, "folder": folder})
        return 0
    _render.say(f"installed the kernel {folder.name} in {folder}")
    return 0


def _kernels(prefix: str | None) -> Path:
    """Return Jupyter's folder of kernels (jupyter_core 5: `jupyter_data_dir`)."""
    if prefix is not None:
        return Path(os.path.abspath(_render.cwd() / prefix), "share", "jupyter", "kernels")
    own = os.environ.get("JUPYTER_DATA_DIR") or Path("~/.local/share/jupyter").expanduser()
    return Path(own) / "kernels"
