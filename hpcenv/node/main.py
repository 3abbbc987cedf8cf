"""The steps that the batch script calls: begin, former, stage-*, check, stopped, decide, task, outcome, finish, local.

Runs on: COMPUTE NODE, from the copy of the code in the run folder. Here, and only here, a
step's environment is read, its lines are printed and its exit status is set.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpcenv import wire
from hpcenv.errors import FileUnusable, HpcenvError, NodeRejected, NodesUnknown, RecordInvalid, UsageError
from hpcenv.node.manifest import open_manifest
from hpcenv.node.place import Place, find_place
from hpcenv.wire import SCHEMA, Facts, Manifest, NodeExit, NodeSettings, RunFolder, Submission, Verdict

# Every step is a process of its own that the job waits for: each loads what it needs and no more.
if TYPE_CHECKING:
    from hpcenv.node import requeue, stopping
    from hpcenv.node.rendezvous import Choice

# NFS may show a file written by another node only after its attribute cache expires
# (nfs(5): acregmax 60 s, acdirmax 60 s; a lookup of a name never asked for before is
# fresh, so this is rarely needed at all).
_SECONDS_FOR_FILES = 20.0

# Of `begin`: this run has ended already, say in an earlier job of its chain; `former` gives its status.
NOTHING_LEFT = 100

# These record how a job ended, and the job's end must not end them: Slurm sends TERM to every
# process of the batch script, and KILL only seconds later (KillWait).
_LASTING = ("begin", "former", "stopped", "outcome", "finish")


# Of `finish`: the job ends with `requeue.CUT_OFF`, though its script ended with 0.
NOT_DONE = 101

# What asks a job to stop or to end; the first two are Slurm's warning and what a user may send.
_REQUESTS = (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Run one step and return its exit status; an error ends as what, why and hint in the log.

    Args:
        arguments: the step's name, the run folder and what the step takes besides.
    """
    # The job's locale decides the encoding of its log; a name it cannot write is no reason to end.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run_step(arguments)
    except HpcenvError as error:
        _say(f"error[{error.code}]: {error}")
        return error.exit_status if error.exit_status in (90, 91) else NodesUnknown.exit_status
    except OSError as error:
        unusable = FileUnusable(
            f"the {arguments[0]} step cannot go on",
            why=str(error),
            hint="check permissions, space and quota of the run folder",
        )
        _say(f"error[{unusable.code}]: {unusable}")
    except Exception:  # noqa: BLE001  (status 1 would say that the training failed)
        import traceback

        _say(f"error[{HpcenvError.code}]: the {arguments[0]} step failed\nwhy: {traceback.format_exc().strip()}")
    return NodesUnknown.exit_status


def _run_step(arguments: list[str]) -> int:
    if arguments[:1] == ["attach"] and len(arguments) > 2:
        from hpcenv.node import attach

        secrets, *command = arguments[2:]
        return attach.attach(RunFolder(Path(arguments[1])), os.environ, command, secrets=secrets == "with-secrets")
    steps: dict[str, Callable[..., int]] = {
        "begin": begin,
        "former": former,
        "stage-look": stage_look,
        "stage-send": stage_send,
        "stage-keep": stage_keep,
        "check": check,
        "stopped": stopped,
        "decide": decide_run,
        "task": task,
        "outcome": outcome,
        "finish": finish,
        "local": run_here,
    }
    wanted = 3 if arguments[:1] in (["finish"], ["outcome"], ["stopped"]) else 2
    if len(arguments) != wanted or arguments[0] not in steps:
        words = ", ".join(steps)
        raise UsageError(
            f"step.py takes one of {words} and a run folder; `stopped`, `outcome` and `finish` a status besides"
        )
    if arguments[0] in _LASTING:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            # Ignored, and so by what they start: scontrol would die of it in the middle of a change.
            signal.signal(number, signal.SIG_IGN)
    return steps[arguments[0]](RunFolder(Path(arguments[1])), os.environ, *arguments[2:])


def run_here(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Play the batch script on this machine."""
    from hpcenv.node import local

    return local.run_here(run, environ)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _place(run: RunFolder, manifest: Manifest, environ: Mapping[str, str]) -> Place:
    """Return where this step runs; the jobs of a chain count their starts together."""
    place = find_place(environ, cluster=manifest.cluster)
    if manifest.chain < 2:
        return place
    from hpcenv.node.former import number_in_chain

    number = number_in_chain(run, job_id=place.job_id, restarts=place.restarts)
    return Place(node=place.node, nodes=place.nodes, attempt=number, job_id=place.job_id, restarts=place.restarts)


def begin(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Set aside what an earlier attempt left, and mark that this one has started.

    Returns NOTHING_LEFT, and leaves all as it is, where an earlier job of a chain has ended the run.
    """
    from hpcenv.node.former import look_back

    manifest = open_manifest(run)
    place = _place(run, manifest, environ)
    before = look_back(manifest, run, attempt=place.restarts)
    if before.over:
        _say(f"hpcenv: {before.why}")
        return NOTHING_LEFT
    leftovers = [path for path in run.of_one_attempt() if os.path.lexists(path)]
    if leftovers:
        import shutil

        aside = _free_name(run.attempts, _attempt_of(run))
        aside.mkdir(parents=True)
        for path in leftovers:
            shutil.move(path, aside / path.name)
    marker = {"schema": SCHEMA, "attempt": place.attempt, "node": place.node, "nodes": list(place.nodes)}
    marker |= {"restarts": place.restarts, "submitted_as": _submitted_as(place, environ)}
    wire.write_text(json.dumps(marker | {"job_id": place.job_id, "time": time.time()}, indent=1) + "\n", run.started)
    if manifest.cluster == "slurm" and not os.path.lexists(run.submission):
        _record_submission(manifest, run, place, environ)
    return 0


def _record_submission(manifest: Manifest, run: RunFolder, place: Place, environ: Mapping[str, str]) -> None:
    """Make a job known whose submission got no answer from Slurm (SubmitUncertain), and was queued all the same.

    Not one of a chain: the other links are not known here. The login node, where it still is at
    work, writes the same with its command line over this.
    """
    if manifest.chain:
        return
    submission = Submission(
        schema=SCHEMA,
        run=manifest.run,
        cluster=manifest.cluster,
        job_id=_submitted_as(place, environ),
        submitted=time.time(),
        command=(),
        nodes=manifest.nodes,
    )
    wire.write(submission, run.submission)


def _submitted_as(place: Place, environ: Mapping[str, str]) -> str:
    """Return this job's id as `submission.json` has it: an element of an array is named by its index there."""
    array = [environ.get(f"SLURM_ARRAY_{name}_ID", "") for name in ("JOB", "TASK")]
    return "_".join(array) if all(array) else place.job_id


def former(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Return the status with which the run has ended already."""
    from hpcenv.node.former import look_back

    manifest = open_manifest(run)
    return look_back(manifest, run, attempt=_place(run, manifest, environ).restarts).status


def _attempt_of(run: RunFolder) -> int:
    try:
        return int(json.loads(run.started.read_text())["attempt"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _free_name(folder: Path, number: int) -> Path:
    """`attempts/N`, with a suffix where a hand-started script used the number before."""
    names = [folder / str(number), *(folder / f"{number}.{again}" for again in range(1, 1000))]
    return next(name for name in names if not name.exists())


def stage_look(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Write what this node has on its disk already and could take."""
    from hpcenv.node import stage

    _end_in_order()

    manifest = open_manifest(run)
    place = _place(run, manifest, environ)
    wire.write(stage.look(manifest, place, environ), run.looked_of(place.node))
    return 0


def stage_send(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Bring to the nodes what most of them lack. Ends with 1 when they have nothing to do about it."""
    from hpcenv.node import stage

    manifest = open_manifest(run)
    return 0 if stage.send(manifest, run, _place(run, manifest, environ), environ) else 1


def stage_keep(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Prove what arrived on this node, and write what it has now."""
    from hpcenv.node import stage

    _end_in_order()

    manifest = open_manifest(run)
    place = _place(run, manifest, environ)
    wire.write(stage.keep(manifest, run, place), run.staged_of(place.node))
    return 0


def check(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Write this node's facts. Ends with 0 whatever was found: the decide step judges."""
    from hpcenv.node import facts

    _end_in_order()
    manifest = open_manifest(run)
    place = _place(run, manifest, environ)
    probe = (run.code / "hpcenv" / "incontainer" / "probe.py").read_text(encoding="utf-8")
    wire.write(facts.gather(manifest, place, environ, probe=probe), run.facts_of(place.node))
    return 0


def _end_in_order() -> None:
    """Let this step end, when it is asked to, by an exception: that ends the probe and removes its folder.

    The batch script is told by the status; so it is where the signal comes before this.
    """
    for number in _REQUESTS:
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))


def stopped(run: RunFolder, environ: Mapping[str, str], status: str) -> int:
    """Note that this job was asked to end before its training began (decision 0009).

    Args:
        status: 128 + the signal that the batch script or a step of it got.

    Returns the status to end with, 143 where it was cancelled, else 91; 0 to go on where TERM came
    and Slurm does not say that the job shall end.
    """
    from hpcenv.node import stopping

    number = _status(status) - 128
    if number not in _REQUESTS:
        raise UsageError(f"`{status}` is not 128 + USR1, USR2 or TERM")
    manifest = open_manifest(run)
    reason = stopping.note_before_training(manifest, _place(run, manifest, environ), environ, number=number)
    if reason is None:
        return 0
    return 128 + signal.SIGTERM if reason == "cancelled" else NodesUnknown.exit_status


def decide_run(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Judge all nodes, write verdict and settings, print the table.

    Returns 0 when training may start, 90 on a mismatch, 91 when it could not be told.
    """
    from hpcenv.node import decide, table

    manifest = open_manifest(run)
    place = _place(run, manifest, environ)
    reported, problems = _collect(run, place)
    verdict, choice = decide.judge(
        manifest, place.nodes, reported, problems, attempt=place.attempt, job_id=place.job_id
    )
    if verdict.rendezvous is not None:
        _write_settings(run, manifest.run, place, verdict, choice)
    # The verdict last: who sees it may rely on the settings being there.
    wire.write(verdict, run.verdict)
    print(table.render(verdict, lockfile=manifest.lockfile), flush=True)
    return exit_status(verdict)


def _write_settings(run: RunFolder, name: str, place: Place, verdict: Verdict, choice: Choice) -> None:
    assert verdict.rendezvous is not None
    wire.write_text("\n".join(verdict.launched) + "\n", run.launched)
    for rank, node in enumerate(verdict.launched):
        settings = NodeSettings(
            schema=SCHEMA,
            run=name,
            node=node,
            attempt=place.attempt,
            node_rank=rank,
            local_address=choice.local_addresses[node],
            rendezvous=verdict.rendezvous,
            settings=choice.settings[node],
        )
        wire.write(settings, run.env_of(node))


def exit_status(verdict: Verdict) -> int:
    """Return the exit status of the gate for a verdict."""
    return {"match": 0, "mismatch": NodeRejected.exit_status, "unknown": NodesUnknown.exit_status}[verdict.result]


def _collect(run: RunFolder, place: Place) -> tuple[dict[str, Facts], dict[str, str]]:
    """Read what every node reported; wait a little for files that are not visible yet."""
    reported: dict[str, Facts] = {}
    problems: dict[str, str] = {}
    deadline = time.monotonic() + _SECONDS_FOR_FILES
    for node in place.nodes:
        try:
            reported[node] = _read_facts(run.facts_of(node), deadline)
        except FileNotFoundError:
            problems[node] = "this node reported no facts; its lines in the log above may say why"
        except RecordInvalid as error:
            problems[node] = f"{error.what}: {error.why}" if error.why else error.what
    return reported, problems


def _read_facts(path: Path, deadline: float) -> Facts:
    while True:
        try:
            return wire.read(Facts, path)
        except RecordInvalid as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            if time.monotonic() > deadline:
                raise error.__cause__ from None
        time.sleep(0.2)


def task(run: RunFolder, environ: Mapping[str, str]) -> int:
    """One task of the launch step, through submitit where submitit submitted the job."""
    place = _place(run, open_manifest(run), environ)
    pickled = run.submitit / f"{place.job_id}_submitted.pkl"
    if place.job_id.isdigit() and pickled.exists():
        return _through_submitit(run)
    return launch_here(str(run.path))


def _through_submitit(run: RunFolder) -> int:
    try:
        from submitit.core import submission
    except ImportError:
        # A script that somebody submits by hand may meet a Python without submitit; the
        # task itself does not need it.
        return launch_here(str(run.path))
    import logging

    logging.getLogger("submitit").setLevel(logging.WARNING)
    submission.process_job(run.submitit)
    return 0


def launch_here(run_folder: str) -> int:
    """Launch the training of the run in `run_folder` on this node; return its status."""
    from hpcenv.node import launch

    run = RunFolder(Path(run_folder))
    manifest = open_manifest(run)
    return launch.launch(manifest, _place(run, manifest, os.environ), os.environ, say=_say)


def outcome(run: RunFolder, environ: Mapping[str, str], status: str) -> int:
    """Return the launch step's own exit status: that of the rank which failed first.

    srun gives the highest of all tasks. With --kill-on-bad-exit the other nodes are told to
    end, and what they die of (143, 135 ...) is higher than what went wrong.
    """
    from hpcenv.model import failure

    place = _place(run, open_manifest(run), environ)
    found = [_exit_of(run, node) for node in place.nodes]
    records = [record for record in found if record is not None and record.attempt == place.attempt]
    first = failure.first_status(records)
    if first is None:
        # Asked to stop, nothing failed; but what a script then ends with is its own to say.
        ended = [r for r in records if r.stopped and r.status != 0 and not r.asked_to_end]
        first = min(ended, key=lambda record: record.ended).status if ended else _status(status)
    return first


def _exit_of(run: RunFolder, node: str) -> NodeExit | None:
    try:
        return wire.read(NodeExit, run.exit_of(node))
    except RecordInvalid:
        return None


def _status(word: str) -> int:
    if not re.fullmatch("[0-9]+", word):
        raise UsageError(f"`{word}` is not an exit status")
    return int(word)


def finish(run: RunFolder, environ: Mapping[str, str], status: str) -> int:
    """Record the batch script's own exit status, and queue the job again where that is wanted.

    For clusters without accounting, and for the next job of a chain.

    Returns NOT_DONE where a training that has more to do is not gone on with.
    """
    from hpcenv.node import attempt, requeue

    number = _status(status)
    try:
        manifest = open_manifest(run)
        place = _place(run, manifest, environ)
        if not attempt.is_ours(run, place):
            _say(f"hpcenv: attempt {place.attempt} ends when another one has begun: it leaves no record")
            return 0
        ending = _ending(run, manifest, place, number, environ)
    except HpcenvError:
        _write_finished(run, number, requeue.Ending())
        return 0
    by_slurm = ending.again and ending.stopped == "preemption" and requeue.slurm_does_it(environ)
    by = "" if not ending.again else "slurm" if by_slurm else "scontrol"
    _write_finished(run, ending.status(number), ending, by=by)
    down = _down(run, manifest, place, environ) if number != 0 else {}
    if down:
        # Only after the status is safe: Slurm may be slow to answer, and kills this soon.
        _write_finished(run, ending.status(number), ending, by=by, down=down)
    if ending.why:
        _say(f"hpcenv: {ending.why}")
    if ending.again and not by_slurm:
        refused = _queue_again(run, manifest, place, ending, environ)
        if refused is not None:
            ending = refused
            _write_finished(run, ending.status(number), ending, down=down)
    return NOT_DONE if ending.status(number) != number else 0


def _queue_again(
    run: RunFolder, manifest: Manifest, place: Place, ending: requeue.Ending, environ: Mapping[str, str]
) -> requeue.Ending | None:
    """Queue this job again; return how it ended where that was refused, else None."""
    from hpcenv.node import requeue

    # Remembered first: a job that is queued again has seconds to live.
    if ending.without:
        requeue.note_retry(run, place, ending.without)
    queued = requeue.queue_again(place, environ, without=ending.without)
    if queued.problem:
        _say(f"hpcenv: {queued.problem}")
    if queued.done:
        return None
    next_link = requeue.has_next_link(run, manifest, place.job_id)
    return requeue.after_refusal(ending, queued.problem, next_link=next_link)


def _ending(
    run: RunFolder, manifest: Manifest, place: Place, status: int, environ: Mapping[str, str]
) -> requeue.Ending:
    from hpcenv.node import requeue
    from hpcenv.node.place import LOCAL_CANCELLED

    if manifest.cluster == "local":
        return requeue.Ending(cancelled=bool(environ.get(LOCAL_CANCELLED)))
    exits = [record for node in place.nodes if (record := _exit_of(run, node)) and record.attempt == place.attempt]
    try:
        verdict: Verdict | None = wire.read(Verdict, run.verdict)
    except RecordInvalid:
        verdict = None
    return requeue.judge(
        manifest,
        exits,
        verdict,
        status=status,
        attempt=place.restarts,
        retried=requeue.read_retries(run),
        next_link=requeue.has_next_link(run, manifest, place.job_id),
        before=_stopped_before(manifest, place, exits, verdict, status, environ),
    )


def _stopped_before(
    manifest: Manifest,
    place: Place,
    exits: Sequence[NodeExit],
    verdict: Verdict | None,
    status: int,
    environ: Mapping[str, str],
) -> stopping.Reason | Literal[""]:
    """Return why this attempt was asked to end before its training began; empty when it was not."""
    from hpcenv.node import stopping

    if verdict is None or verdict.result != "match":
        return stopping.noted_before_training(manifest, place) or ""
    if status == 0 or exits or os.path.lexists(RunFolder(Path(manifest.run_folder)).ranks):
        return ""
    # The launch step was told before it could listen, or Slurm let it no more begin.
    number = status - 128 if status - 128 in _REQUESTS else signal.SIGTERM
    return stopping.note_before_training(manifest, place, environ, number=number) or ""


def _down(run: RunFolder, manifest: Manifest, place: Place, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the nodes that Slurm has lost, where a node did not end by itself."""
    from hpcenv.node import attempt

    if manifest.cluster != "slurm":
        return {}
    exits = [_exit_of(run, node) for node in place.nodes]
    if all(record is not None and not record.asked_to_end for record in exits):
        return {}
    return attempt.down_nodes(place.nodes, environ)


def _write_finished(
    run: RunFolder, status: int, ending: requeue.Ending, *, by: str = "", down: Mapping[str, str] | None = None
) -> None:
    record: dict[str, object] = {"schema": SCHEMA, "status": status, "time": time.time()}
    record |= {"stopped": ending.stopped, "saved": ending.saved, "again": ending.again, "by": by}
    record |= {"before_training": ending.before, "cancelled": ending.cancelled, "down": dict(down or {})}
    record |= {"unfinished": ending.unfinished, "not_again": ending.not_again}
    wire.write_text(json.dumps(record, indent=1) + "\n", run.finished)
