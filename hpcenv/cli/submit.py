"""`hpcenv submit`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from typing import TYPE_CHECKING, Any

import click

from hpcenv.cli import _render
from hpcenv.cli._words import Command, option
from hpcenv.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from hpcenv.adapters.submitit_bridge import Books
    from hpcenv.model.plan import Plan
    from hpcenv.steps.request import Asked, Surroundings
    from hpcenv.steps.runs import RunStatus
    from hpcenv.steps.submit import SubmitResult


STOP_SIGNALS = ("USR1", "USR2", "TERM", "INT", "HUP")


@click.command("submit", cls=Command, context_settings={"ignore_unknown_options": False})
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@option("--nodes", type=click.IntRange(min=1), help="How many nodes.")
@option("--gpus", type=click.IntRange(min=0), help="GPUs PER NODE; 0 for CPU ranks.")
@option("--gpu-type", metavar="TYPE", help="Which GPUs, as `sinfo --format=%G` names them.")
@option("--nproc", type=click.IntRange(min=1), help="Ranks per node, if not one for each GPU.")
@option("--cpus", type=click.IntRange(min=1), help="CPUs per node.")
@option("--mem", help="Memory per node, as sbatch --mem.")
@option("--time", "time_limit", help="Time limit, as sbatch --time.")
@option("--partition", help="As sbatch.")
@option("--account", help="As sbatch.")
@option("--qos", help="As sbatch.")
@option("--constraint", help="As sbatch.")
@option("--reservation", help="As sbatch.")
@option("--exclude", help="Nodes to leave out, as sbatch.")
@option("--nodelist", help="Nodes that must be among those of the job, as sbatch.")
@option("--dependency", help="As sbatch.")
@option("--spare", type=click.IntRange(min=0), help="Nodes beyond --nodes, to replace those that are rejected.")
@option("--retry-excluding", type=click.IntRange(min=1), metavar="N", help="Queue again without rejected nodes.")
@option("--site", metavar="NAME", help="Site profile, by name or path, if not the one that fits; none.")
@option("--standalone", is_flag=True, help="One node, with a rendezvous of its own.")
@option("--max-restarts", type=click.IntRange(min=0), help="How often torchrun starts failed ranks again.")
@option("--torchrun-args", multiple=True, metavar="WORD", help="One more word for torchrun, literal.")
@option("--env", multiple=True, metavar="NAME=VALUE", help="A variable for the ranks, literal.")
@option("--pass-env", multiple=True, metavar="NAME", help="A variable of the job that the ranks see; NAME* too.")
@option("--secret", multiple=True, metavar="NAME=SOURCE", help="Read on the nodes: file:PATH or env:NAME.")
@option("--grace", type=click.IntRange(min=0), metavar="SECONDS", help="Time to save before the job must end.")
@option("--stop-signal", type=click.Choice(STOP_SIGNALS), help="What ranks get then. Default: USR2.")
@option("--requeue", type=click.Choice(["saved", "always", "never"]), help="Go on in the queue. Default: saved.")
@option("--max-requeues", type=click.IntRange(min=0), help="How often at most. Default: 20.")
@option("--snapshot/--no-snapshot", default=True, help="Run a copy of the code, where it is under git.")
@option("--allow-dirty", is_flag=True, help="Also where it differs from its commit; that is recorded.")
@option("--sweep", multiple=True, metavar="NAME=V1,V2", help="One run for every combination; 0..4 is 0,1,2,3,4.")
@option("--array", metavar="SPEC", help="One run for each index, as sbatch --array; HPCENV_ELEMENT says which.")
@option("--max-parallel", type=click.IntRange(min=1), metavar="N", help="How many of them at a time.")
@option("--chain", type=click.IntRange(min=1), metavar="N", help="N jobs, one after the other, on the same run.")
@option("--lock", "lock_name", default="default", show_default=True, help="Which lockfile.")
@option("--locked", is_flag=True, help="First check that the lockfile is fresh, the environment included.")
@option("--frozen", is_flag=True, help="Take the lockfile as it is, also if hpcenv.toml asks otherwise.")
@option("--cluster", type=click.Choice(["slurm", "local"]), help="Default: slurm where sbatch is.")
@option("--run", "run_name", metavar="NAME", help="Name of the run and its folder.")
@option("--runs", metavar="DIR", help="Folder of runs, if not the project's.")
@option("--template", metavar="PATH", help="Batch template to use instead of the built-in one.")
@option("--compat-file", metavar="PATH", help="Compatibility table to use instead of the packaged one.")
@option("--assume-shared", is_flag=True, help="Do not check that nodes see the folders.")
@option("--stage", is_flag=True, help="Copy the SIF to every node's own disk before it is used.")
@option("--stage-data", multiple=True, metavar="DIR", help="Copy this folder too; the script sees the copy.")
@option("--stage-dir", metavar="DIR", help="Where on the nodes, if not the first disk that all have.")
@option("--stage-limit", metavar="SIZE", help="Bytes for copies on a node, as 200G. Default: 100G.")
@option("--test-only", is_flag=True, help="Ask Slurm when the job would start; submit nothing.")
@option("--dry-run", is_flag=True, help="Print what would be submitted; write nothing.")
@option("--wait", is_flag=True, help="Follow the run and end with its exit status.")
@_render.json_option
def command(test_only: bool, dry_run: bool, wait: bool, as_json: bool, **words: Any) -> int:
    """Submit SCRIPT to run under torchrun on every node, as locked.

    Everything after -- goes to the script, literally:

    \b
        hpcenv submit train.py --nodes 2 --gpus 8 -- --lr 3e-4
    """  # noqa: D301  (click's mark for "do not wrap")
    alone = not (test_only or dry_run or words["sweep"] or words["array"])
    with contextlib.ExitStack() as stack:
        # Before everything else is loaded: submitit takes its time.
        books = _books(words["cluster"], stack) if alone else None
        return _run(test_only=test_only, dry_run=dry_run, wait=wait, as_json=as_json, books=books, words=words)


def _books(cluster: str | None, stack: contextlib.ExitStack) -> Books | None:
    """Return submitit for the job, where there is a Slurm to give it to."""
    from hpcenv import ahead

    books = ahead.take()
    if books is None and cluster != "local" and shutil.which("sbatch") is not None:
        from hpcenv.adapters.submitit_bridge import Books

        books = Books(os.environ)
    return None if books is None else stack.enter_context(books)


def _run(
    *, test_only: bool, dry_run: bool, wait: bool, as_json: bool, books: Books | None, words: dict[str, Any]
) -> int:
    from hpcenv.steps.plan import plan_job

    around, asked = surroundings(), asked_for(words)
    if test_only:
        from hpcenv.cli import _estimate

        return _estimate.show(asked, around, alone=not (dry_run or wait), as_json=as_json)
    if asked.sweep or asked.array is not None:
        from hpcenv.cli import _sweep

        return _sweep.submit(asked, around, runs=words["runs"], dry_run=dry_run, wait=wait, as_json=as_json)
    plan = plan_job(_render.open_project(), asked, around)
    by_name = words["runs"] is None
    return carry_out(plan, around, by_name=by_name, dry_run=dry_run, wait=wait, as_json=as_json, books=books)


def carry_out(
    plan: Plan,
    around: Surroundings,
    *,
    by_name: bool,
    dry_run: bool,
    wait: bool,
    as_json: bool,
    verb: str = "submit",
    books: Books | None = None,
) -> int:
    """Submit a plan, or show it, and follow the run where that is asked for; return the exit status.

    Args:
        by_name: whether the run is found by its name alone, which is not so with --runs.
        verb: which one this is, for the JSON envelope.
        books: submitit, where it is loaded already.
    """
    if dry_run:
        _show_plan(plan, as_json=as_json, verb=verb)
        return 0
    from hpcenv.steps.submit import submit

    result = submit(plan, around, books=books)
    word = result.run if by_name else str(result.run_folder)
    if not wait:
        _show_submitted(result, word, as_json=as_json, verb=verb)
        return 0
    try:
        return _wait(result, word, as_json=as_json, verb=verb)
    except KeyboardInterrupt as stop:
        raise Interrupted(
            f"interrupted; {result.run} goes on", hint=_render.quoted(("hpcenv", "cancel", word))
        ) from stop


def surroundings() -> Surroundings:
    """Return what a step would otherwise read itself."""
    from hpcenv.steps.request import Surroundings

    return Surroundings(
        environ=os.environ,
        cwd=_render.cwd(),
        now=_render.local_time(),
        token=_render.token(),
        command=_render.command_line(),
        cache=_render.cache_folder(),
    )


# Options that the step knows by the very same name.
_SAME_WORDS = (
    *("nodes", "gpus", "nproc", "cpus", "mem", "partition", "account", "qos", "constraint", "reservation"),
    *("exclude", "runs", "template", "compat_file", "cluster", "assume_shared"),
    *("locked", "frozen", "stage", "stage_data", "stage_dir"),
    *("nodelist", "dependency", "spare", "retry_excluding", "site", "standalone", "max_restarts", "torchrun_args"),
    *("pass_env", "grace", "stop_signal", "requeue", "max_requeues", "snapshot", "allow_dirty"),
    *("gpu_type", "sweep", "array", "max_parallel", "chain"),
)


def asked_for(words: dict[str, Any]) -> Asked:
    """Return the words of a submission as the step takes them."""
    from hpcenv.steps.request import Asked

    return Asked(
        script=words["script"],
        args=words["args"],
        env=_variables("--env", words["env"]),
        secrets=_secrets(words["secret"]),
        lock=words["lock_name"],
        run=words["run_name"],
        time=words["time_limit"],
        stage_limit=None if words["stage_limit"] is None else _bytes(words["stage_limit"]),
        **{name: words[name] for name in _SAME_WORDS},
    )


def _bytes(word: str) -> int:
    """Return a size in bytes: `200G` is 200 * 10**9, as disks are sold and `df -H` shows them."""
    match = re.fullmatch(r"([0-9]{1,12})([kMGT]?)B?", word)
    if match is None:
        raise UsageError(f"`--stage-limit {word}` is not a size", hint="--stage-limit 200G")
    factor = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}[match.group(2)]
    return int(match.group(1)) * factor


def _secrets(pairs: tuple[str, ...]) -> dict[str, str]:
    from hpcenv.model.project import SECRET_SOURCE

    found = _variables("--secret", pairs)
    for name, source in found.items():
        if not SECRET_SOURCE.fullmatch(source):
            # The value is not repeated: it may be the secret itself.
            raise UsageError(
                f"`--secret {name}=...` names no source",
                why="a secret's value is never given on a command line, where others can read it",
                hint=f"--secret {name}=file:PATH, or --secret {name}=env:VARIABLE",
            )
    return found


def _variables(option: str, pairs: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"`{option} {pair}` has no value", hint=f"{option} {name}=VALUE")
        if name in found:
            raise UsageError(f"`{option} {name}=...` is given twice")
        found[name] = value
    return found


def _show_plan(plan: Plan, *, as_json: bool, verb: str = "submit") -> None:
    """Print script and manifest exactly as `submit` would write them."""
    from hpcenv import wire

    if as_json:
        data = {"script": plan.script, "manifest": plan.manifest, "shape": plan.request.shape, "notes": plan.notes}
        _render.success(verb, data)
        return
    for note in plan.notes:
        _render.tell(f"note: {note}")
    _render.tell(f"dry run: {plan.request.shape}; nothing is written")
    if plan.script:
        _render.tell("---- job.sbatch")
        print(plan.script, end="", flush=True)
    _render.tell("---- manifest.json")
    print(wire.dumps(plan.manifest), end="", flush=True)


def _show_submitted(result: SubmitResult, word: str, *, as_json: bool, verb: str = "submit") -> None:
    if as_json:
        _render.success(verb, result)
        return
    for note in result.notes:
        _render.tell(f"note: {note}")
    jobs = f"jobs {', '.join(result.chain)}, one after the other" if result.chain else f"job {result.job_id}"
    _render.say(f"submitted {result.run}: {result.shape}, {jobs}")
    _render.tell(f"run folder {result.run_folder}")
    commands = [_render.quoted(("hpcenv", *verb, word)) for verb in (("status",), ("logs", "-f"))]
    _render.tell("\nnext: " + "    ".join(commands))


def _wait(result: SubmitResult, word: str, *, as_json: bool, verb: str = "submit") -> int:
    """Follow the log until the run has ended; return its own exit status."""
    from hpcenv.cli.logs import LogPrinter
    from hpcenv.cli.wait import say_failure, tell_state
    from hpcenv.steps.logs import LogTail
    from hpcenv.steps.runs import open_run
    from hpcenv.steps.wait import exit_status_of, wait_for

    run = open_run(result.run_folder)
    tail, show = LogTail(run.folder.log), LogPrinter(run)

    def print_new() -> bool:
        text = tail.read()
        if not as_json:
            show(text)
        return bool(text)

    def pause(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            print_new()
            time.sleep(min(0.5, left))

    def on_status(status: RunStatus) -> None:
        if not as_json:
            tell_state(status)

    if not as_json:
        _show_submitted(result, word, as_json=False)
    status = wait_for([run], environ=os.environ, pause=pause, on_status=on_status)[0]
    while print_new():
        pass
    if not as_json:
        show(tail.rest())
        show.end()
    code = exit_status_of(status)
    if as_json:
        _render.verdict_on(verb, {"submitted": result, "status": status}, ok=code == 0)
    elif code != 0:
        say_failure(status)
        _render.tell("\nhint: " + _render.quoted(("hpcenv", "report", word)))
    return code
