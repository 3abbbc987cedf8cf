"""`hpcenv lock`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _progress, _render
from hpcenv.errors import LockfileStale, UsageError


@click.command("lock")
@click.option("--name", default="default", show_default=True, help="Which lockfile: lockfiles/NAME.lock.toml.")
@click.option("--check", is_flag=True, help="Only say whether it is stale, and why; with --from, against the pins.")
@click.option("--upgrade", is_flag=True, help="Ask the registry again what the tag means.")
@click.option("--deep", is_flag=True, help="Import torch too, and lock the libraries that really load.")
@click.option("--from", "pins", metavar="FILE", help="pylock.toml, requirements.txt or uv.lock to agree with.")
@click.option("--no-wheels", is_flag=True, help="Do not ask the package index for the wheels' hashes.")
@click.option("--allow-floating", is_flag=True, help="Accept `latest` or no tag, as allow-floating in hpcenv.toml.")
@_render.json_option
def command(name: str, check: bool, as_json: bool, pins: str | None, **words: Any) -> int:
    """Resolve the environment and write its lockfile.

    Resolves the image's tag to digests, makes the SIF, and reads Python, torch, libraries
    and every package inside. For image = "host" it reads the Python environment of this
    machine. --check writes nothing and ends with 7 when the lockfile is stale, with 21
    when something else is installed than --from pins.
    """
    path = None if pins is None else Path(os.path.abspath(_render.cwd() / pins))
    if not check:
        return _lock(name, as_json, pins=path, **words)
    _refuse_with_check(words)
    return _check(name, as_json, path)


def _refuse_with_check(words: dict[str, Any]) -> None:
    """Let nobody believe that a flag was heeded which only has a meaning when a lockfile is written."""
    given = [f"--{name.replace('_', '-')}" for name, value in words.items() if value]
    if given:
        raise UsageError(
            f"`--check` does not go with `{given[0]}`",
            why="it compares what is locked with what is there: it writes nothing, and asks no registry and no index",
            hint="leave one of the two out; with --check there can be --name, --from and --json",
        )


def _lock(
    name: str, as_json: bool, *, upgrade: bool, deep: bool, pins: Path | None, no_wheels: bool, allow_floating: bool
) -> int:
    from hpcenv.model.progress import Event
    from hpcenv.steps.lock import lock

    workspace = _render.open_project()
    with _progress.shown(as_json=as_json) as on_event:
        result = lock(
            workspace,
            environ=os.environ,
            report=lambda line: on_event(Event(phase="note", what=line)),
            on_event=on_event,
            name=name,
            allow_floating=allow_floating,
            upgrade=upgrade,
            level="deep" if deep else "full",
            pins=pins,
            wheels_cache=None if no_wheels else _render.cache_folder() / "wheels",
        )
    locked = result.lockfile
    if as_json:
        _render.success(
            "lock",
            {
                "path": result.path,
                "changed": result.changed,
                "changes": result.changes,
                "fingerprint": locked.fingerprint,
                "sif": result.sif,
                "notes": result.notes,
            },
        )
        return 0
    for note in result.notes:
        _render.tell(f"note: {note}")
    for change in result.changes:
        _render.say(f"changed: {change}")
    torch, cuda = locked.facts.get("torch.version"), locked.facts.get("torch.cuda")
    python = locked.facts.get("python.version")
    _render.say(f"python {python}, torch {torch}, CUDA {cuda}, {locked.packages.count} packages")
    verb = "wrote" if result.changed else "unchanged:"
    _render.say(f"{verb} {workspace.shown(result.path)} ({locked.fingerprint})")
    return 0


def _check(name: str, as_json: bool, pins: Path | None) -> int:
    from hpcenv.steps.lock import check_lock

    workspace = _render.open_project()
    result = check_lock(workspace, environ=os.environ, name=name, pins=pins)
    problem = None
    if not result.fresh:
        problem = LockfileStale(
            f"`{workspace.shown(result.path)}` is stale",
            why="\n".join(str(reason) for reason in result.reasons),
            hint="hpcenv lock" if name == "default" else f"hpcenv lock --name {name}",
        )
    if as_json:
        data = {"path": result.path, "reasons": result.reasons, "notes": result.notes}
        _render.verdict_on("lock", data, ok=result.fresh, problem=problem)
        return 0 if problem is None else problem.exit_status
    for note in result.notes:
        _render.tell(f"note: {note}")
    if problem is not None:
        raise problem
    _render.say(f"{workspace.shown(result.path)} is fresh")
    return 0
