"""`hpcenv lock`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from hpcenv.cli import _accept, _pins, _progress, _render
from hpcenv.cli._complete import lockfile_names
from hpcenv.cli.image import _conversion
from hpcenv.cli.submit import context_of
from hpcenv.errors import HpcenvError, UsageError
from hpcenv.locking.lock import CheckResult, LockOptions, LockResult, check_lock, check_locks, lock, problem_of
from hpcenv.project import lockfile as lock_model
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.project.workspace import Workspace


@click.command("lock")
@click.option(
    "--lock",
    "name",
    metavar="NAME",
    default="default",
    show_default=True,
    help="Lockfile to write or check: lockfiles/NAME.lock.toml.",
    shell_complete=lockfile_names,
)
@click.option("--check", is_flag=True, help="Write nothing; say whether the lockfile is stale, and why.")
@click.option("--upgrade", is_flag=True, help="Ask the registry again which image the tag names.")
@click.option("--deep", is_flag=True, help="Import torch, and also lock the libraries that this import loads.")
@click.option(
    "--from",
    "pins",
    metavar="FILE",
    help="A uv.lock, pylock.toml, requirements.txt, pixi.lock or conda-lock.yml that the installed packages must"
    " agree with. FILE#NAME chooses an environment of pixi.lock, or categories of conda-lock.yml.",
)
@_pins.options("--from")
@click.option(
    "--spec-only",
    is_flag=True,
    help="With --check: compare only hpcenv.toml with the lockfile, which needs no SIF and no Slurm.",
)
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="With --check: also check the lockfile of each [environment.NAME] in hpcenv.toml.",
)
@click.option("--require-hashes", is_flag=True, help="End with 47 if the sha256 of a package's wheel is not confirmed.")
@click.option("--no-wheels", is_flag=True, help="Do not look up the wheels' hashes in the package index.")
@click.option(
    "--allow-floating",
    is_flag=True,
    help="Accept an image without a tag or with the tag `latest`. This is the same as allow-floating in hpcenv.toml.",
)
@_conversion.plain_http
@_accept.option
@_render.json_option
def command(
    check: bool,
    as_json: bool,
    deep: bool,
    no_wheels: bool,
    accept: str | None,
    spec_only: bool,
    every: bool,
    **options: Any,
) -> int:
    """Resolve the environment and write its lockfile.

    hpcenv resolves the image's tag to digests, makes the SIF, and reads which Python, torch, libraries and packages
    the SIF contains. For image = "host", hpcenv reads the Python environment of this machine. With --check, hpcenv
    writes nothing, and ends with 7 if the lockfile is stale, or with 21 if the installed packages differ from the
    packages in --from FILE. In a fresh clone, use --check --spec-only.
    """
    wanted = LockOptions(**options, level="deep" if deep else "full", wheels=not no_wheels)
    if check:
        _refuse_with_check(wanted)
    elif spec_only or every:
        option = "--spec-only" if spec_only else "--all"
        raise UsageError(f"`{option}` goes with `--check` only", hint="add --check, or leave it out")
    workspace = _render.open_project()
    if not spec_only:
        # With `image = "host"`, both `hpcenv lock` and `hpcenv lock --check` start the Python of the environment.
        _accept.require(workspace, accept, as_json=as_json)
    if check and every:
        return _show_checked(workspace, check_locks(workspace, wanted, context_of(), spec_only=spec_only), as_json)
    if check:
        return _show_check(workspace, check_lock(workspace, wanted, context_of(), spec_only=spec_only), as_json)
    with _progress.shown(as_json=as_json) as on_event:
        result = lock(workspace, wanted, context_of(), on_event)
    return _show_locked(workspace, wanted.name, result, as_json)


def _refuse_with_check(options: LockOptions) -> None:
    """Refuse options that have an effect only when a lockfile is written.

    Otherwise, `--check` would ignore these options without a message.
    """
    for_writing = {
        "--upgrade": options.upgrade,
        "--deep": options.level == "deep",
        "--no-wheels": not options.wheels,
        "--allow-floating": options.allow_floating,
        "--plain-http": options.plain_http,
    }
    given = [option for option, value in for_writing.items() if value]
    if given:
        raise UsageError(
            f"`--check` does not go with `{given[0]}`",
            why="--check only compares: it writes no file, and does not contact a registry or an index",
            hint="leave out one of the two; "
            "--check goes with --lock, --all, --from, --spec-only, --require-hashes and --json",
        )


def _show_locked(workspace: Workspace, name: str, result: LockResult, as_json: bool) -> int:
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
    jax = f", jax {locked.facts['jax.version']}" if "jax.version" in locked.facts else ""
    _render.say(f"python {python}, torch {torch}, CUDA {cuda}{jax}, {locked.packages.count} packages")
    by_conda = locked.packages.conda_package
    if by_conda:
        pinned = sum(table.proof == "pinned" for table in by_conda)
        _render.say(f"packages of conda: {len(by_conda)}, of which {pinned} are pinned by a file of --from")
    verb = "wrote" if result.changed else "unchanged:"
    _render.say(f"{verb} {workspace.shown(result.path)} ({locked.fingerprint})")
    which = "" if name == DEFAULT_LOCK else f" --lock {name}"
    _render.tell(f"\nnext: {submission_of(locked)}{which}")
    return 0


def submission_of(locked: lock_model.Lockfile) -> str:
    """Return the command that submits a script.

    The options of the command fit the lockfile: `--gpus G` is used only if torch can use GPUs, and torchrun is not used
    if the lockfile has no torch.
    """
    shape = "--gpus 0 --nproc R" if lock_model.gpu_support(locked) == "none" else "--gpus G"
    launcher = " --launcher none" if locked.facts.get("torch.version") == "absent" else ""
    return f"hpcenv submit SCRIPT --nodes N {shape}{launcher}"


def _show_check(workspace: Workspace, result: CheckResult, as_json: bool) -> int:
    if as_json:
        return _answer({"path": result.path, "reasons": result.reasons, "notes": result.notes}, result.problem)
    for note in result.notes:
        _render.tell(f"note: {note}")
    if result.problem is not None:
        raise result.problem
    _render.say(f"{workspace.shown(result.path)} is fresh")
    return 0


def _show_checked(workspace: Workspace, results: Sequence[CheckResult], as_json: bool) -> int:
    """Print whether each of several lockfiles is fresh. If a lockfile is not fresh, raise its problem as an error."""
    problem = problem_of(results)
    if as_json:
        rows = [
            {"name": one.name, "path": one.path, "problem": None if one.problem is None else one.problem.what}
            | {"reasons": one.reasons, "notes": one.notes}
            for one in results
        ]
        return _answer({"lockfiles": rows}, problem)
    for one in results:
        for note in one.notes:
            _render.tell(f"note: {one.name}: {note}")
        if one.fresh:
            _render.say(f"{workspace.shown(one.path)} is fresh")
    if problem is not None:
        raise problem
    return 0


def _answer(data: dict[str, Any], problem: HpcenvError | None) -> int:
    _render.verdict_on("lock", data, ok=problem is None, problem=problem)
    return 0 if problem is None else problem.exit_status
