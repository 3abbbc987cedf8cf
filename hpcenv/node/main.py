"""The steps that the batch script calls, from `begin` to `finish`, and `local`, which replaces it.

Runs on: COMPUTE NODE, from the copy of the code in the run folder. Here, and only here, a
step's environment is read, its lines are printed and its exit status is set.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from hpcenv.errors import (
    FileUnusable,
    HpcenvError,
    NodeRejected,
    NodesUnknown,
    RecordInvalid,
    Status,
    UsageError,
)
from hpcenv.node import local
from hpcenv.node.check import code, decide, facts, verdict_table
from hpcenv.node.check.probe_source import probe_source
from hpcenv.node.container import proved_sif
from hpcenv.node.launch import current_attempt, first_failure, launch, requeue, reserve, stopping
from hpcenv.node.launch.previous_job import number_in_chain, read_previous_job
from hpcenv.node.manifest import open_manifest
from hpcenv.node.network.rendezvous import Choice
from hpcenv.node.preflight import judge as preflight
from hpcenv.node.smoke import conclude
from hpcenv.node.stage import stage
from hpcenv.node.this_node import LOCAL_CANCELLED, ThisNode, find_this_node
from hpcenv.records import secret_file
from hpcenv.records.codec import SCHEMA
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record, read_end, read_json, save_record, write_text
from hpcenv.records.listing import CopyAfterAttempt
from hpcenv.records.manifest import Manifest
from hpcenv.records.outcome import NodeExit, Submission
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.severities import Severities
from hpcenv.records.verdict import SRUN_GAVE_UP, NodeSettings, Verdict

# Every step is a separate process, and the job waits for it: each one loads only what it needs.
# NFS may show a file written by another node only after its attribute cache expires
# (nfs(5): acregmax 60 s, acdirmax 60 s; a lookup of a name never asked for before is
# fresh, so this is rarely needed at all).
_SECONDS_FOR_FILES = 20.0

# These record how a job ended, and the job's end must not end them: Slurm sends TERM to every
# process of the batch script, and KILL only seconds later (KillWait).
_LASTING = ("begin", "former", "stopped", "outcome", "finish")


# What srun writes when slurmd of a node cannot check its credential (Slurm 24.11).
_NO_MUNGE = re.compile(r"munge|zero bytes were transmitted|authentication|invalid.*credential", re.IGNORECASE)
_LOG_BYTES = 64 * 1024
# Signals that Slurm sends to srun. A status of 1 is that of a task, not of SIGHUP.
_ENDED_SRUN = (signal.SIGTERM, signal.SIGKILL)

# What asks a job to stop or to end; the first two are Slurm's warning and what a user may send.
_REQUESTS = (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Run one step and return its exit status; an error is written to the log as what, why and hint.

    Args:
        arguments: the step's name, the run folder and further arguments of the step.
    """
    # The job's locale decides the encoding of its log; a character that it cannot write must not end the step.
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
        from hpcenv.node.launch import attach

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
        "inside": check_inside,
        "inside-judge": judge_inside,
        "smoke": smoke_test,
        "smoke-pairs": smoke_pairs,
        "smoke-judge": smoke_judge,
        "task": task,
        "task-on-release": task_on_release,
        "outcome": outcome,
        "finish": finish,
        "local": run_here,
    }
    wanted = 3 if arguments[:1] in (["finish"], ["outcome"], ["stopped"]) else 2
    if len(arguments) != wanted or arguments[0] not in steps:
        words = ", ".join(steps)
        raise UsageError(
            f"step.py takes one of {words} and a run folder; `stopped`, `outcome` and `finish` also take a status"
        )
    if arguments[0] in _LASTING:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            # Ignored, and so by what they start: scontrol would die of it in the middle of a change.
            signal.signal(number, signal.SIG_IGN)
    return steps[arguments[0]](RunFolder(Path(arguments[1])), os.environ, *arguments[2:])


def run_here(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Play the batch script on this machine."""
    return local.run_here(run, environ)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _place(run: RunFolder, manifest: Manifest, environ: Mapping[str, str]) -> ThisNode:
    """Return where this step runs; the jobs of a chain count their starts together."""
    place = find_this_node(environ, cluster=manifest.cluster)
    if manifest.chain < 2:
        return place

    number = number_in_chain(run, job_id=place.job_id, restarts=place.restarts)
    return ThisNode(node=place.node, nodes=place.nodes, attempt=number, job_id=place.job_id, restarts=place.restarts)


def begin(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Set aside what an earlier attempt left, and mark that this one has started.

    Returns Status.RUN_HAS_ENDED, and leaves all as it is, where an earlier job of a chain has ended the run.
    """
    manifest = open_manifest(run)
    place = _place(run, manifest, environ)
    before = read_previous_job(manifest, run, attempt=place.restarts)
    if before.over:
        _say(f"hpcenv: {before.why}")
        _forget_secrets(manifest)
        return Status.RUN_HAS_ENDED
    _forget_other_attempts(run)
    leftovers = [path for path in run.of_one_attempt() if os.path.lexists(path)]
    if leftovers:
        aside = _free_name(run.attempts, _attempt_of(run))
        aside.mkdir(parents=True)
        for path in leftovers:
            shutil.move(path, aside / path.name)
    marker = {"schema": SCHEMA, "attempt": place.attempt, "node": place.node, "nodes": list(place.nodes)}
    marker |= {"restarts": place.restarts, "submitted_as": _submitted_as(place, environ)}
    write_text(json.dumps(marker | {"job_id": place.job_id, "time": time.time()}, indent=1) + "\n", run.started)
    if manifest.launches:
        reserve.make(run, place.nodes)
    if manifest.cluster == "slurm" and not os.path.lexists(run.submission):
        _record_submission(manifest, run, place, environ)
    if manifest.source is not None:
        code.make_own_copy(manifest.source, run)
    return 0


def _forget_other_attempts(run: RunFolder) -> None:
    """Remove the record of the copy where the last attempt did not write it: the node failed before it could."""
    try:
        written = load_record(CopyAfterAttempt, run.listing_after).started
    except RecordInvalid:
        written = None
    if written != _started(run):
        run.listing_after.unlink(missing_ok=True)


def _started(run: RunFolder) -> float | None:
    try:
        return float(read_json(run.started)["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _record_copy(run: RunFolder, manifest: Manifest) -> None:
    """Record how this attempt leaves the run's copy of the code, for the check of the next attempt."""
    started = _started(run)
    if manifest.source is None or not manifest.source.digest or started is None:
        return
    after = code.note_after(run, schema=SCHEMA, started=started)
    with contextlib.suppress(OSError):
        if after is not None:
            save_record(after, run.listing_after)


def _record_submission(manifest: Manifest, run: RunFolder, place: ThisNode, environ: Mapping[str, str]) -> None:
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
    save_record(submission, run.submission)


def _submitted_as(place: ThisNode, environ: Mapping[str, str]) -> str:
    """Return this job's id as `submission.json` has it: an element of an array is named by its index there."""
    array = [environ.get(f"SLURM_ARRAY_{name}_ID", "") for name in ("JOB", "TASK")]
    return "_".join(array) if all(array) else place.job_id


def former(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Return the status with which the run has ended already."""
    manifest = open_manifest(run)
    return read_previous_job(manifest, run, attempt=_place(run, manifest, environ).restarts).status


def _attempt_of(run: RunFolder) -> int:
    try:
        return int(read_json(run.started)["attempt"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _free_name(folder: Path, number: int) -> Path:
    """`attempts/N`, with a suffix where a hand-started script used the number before."""
    names = [folder / str(number), *(folder / f"{number}.{again}" for again in range(1, 1000))]
    return next(name for name in names if not name.exists())


def stage_look(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Write what this node has on its disk already and could take."""
    _end_in_order()

    manifest = open_manifest(run)
    place = _place(run, manifest, environ)
    save_record(stage.look(manifest, place, environ), run.looked_of(place.node))
    return 0


def stage_send(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Bring to the nodes what most of them lack. Ends with 1 when they have nothing to do about it."""
    manifest = open_manifest(run)
    return 0 if stage.send(manifest, run, _place(run, manifest, environ), environ) else 1


def stage_keep(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Prove what arrived on this node, and write what it has now."""
    _end_in_order()

    manifest = open_manifest(run)
    place = _place(run, manifest, environ)
    save_record(stage.keep(manifest, run, place), run.staged_of(place.node))
    return 0


def check(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Write this node's facts. Ends with 0 whatever was found: the decide step judges."""
    _end_in_order()
    manifest = open_manifest(run)
    place = _place(run, manifest, environ)
    with proved_sif.telling(proved_sif.address_of(manifest.run, place)) as tell:
        on_proved = tell if manifest.launch.beside_check else None
        found = facts.gather(manifest, place, environ, probe=probe_source(), on_proved=on_proved)
        save_record(found, run.facts_of(place.node))
    return 0


def _end_in_order() -> None:
    """Turn a signal that asks this step to end into an exception, which ends the probe and removes its folder.

    The batch script sees the signal in the exit status, also if it came before this call.
    """
    for number in _REQUESTS:
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))


def stopped(run: RunFolder, environ: Mapping[str, str], status: str) -> int:
    """Note that this job was asked to end before its training began (decision 0009).

    Args:
        status: 128 + the signal that the batch script or a step of it got.

    Returns the status to end with, 143 if it was cancelled, else 91; 0 to continue if TERM came
    and Slurm does not report that the job must end.
    """
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
    manifest = open_manifest(run)
    place = _place(run, manifest, environ)
    reported, problems = _collect(run, place)
    started = _started(run)
    window = None if started is None else (started, time.time())
    verdict, choice = decide.judge(
        manifest, place.nodes, reported, problems, attempt=place.attempt, job_id=place.job_id, window=window
    )
    if verdict.rendezvous is not None:
        _write_settings(run, manifest.run, place, verdict, choice)
    # The verdict last: who sees it may rely on the settings being there.
    save_record(verdict, run.verdict)
    print(verdict_table.render(verdict, lockfile=manifest.lockfile), flush=True)
    if manifest.smoke is not None and verdict.result == "match":
        planned = conclude.prepare(manifest, run, verdict, reported, job_id=place.job_id, now=time.time())
        verdict = _say_concluded(planned, manifest)
    return exit_status(verdict)


def _say_concluded(concluded: conclude.Concluded, manifest: Manifest) -> Verdict:
    """Print what the smoke test gave; return the verdict that holds now."""
    for line in concluded.lines:
        print(line, flush=True)
    verdict = concluded.verdict or concluded.before
    if verdict.result != concluded.before.result:
        print(verdict_table.render(verdict, lockfile=manifest.lockfile), flush=True)
    return verdict


def check_inside(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Run the checks inside the environment of this node. Ends with 0 whatever was found: the judge step judges."""
    from hpcenv.node.preflight import inside

    _end_in_order()
    manifest = open_manifest(run)
    place = _place(run, manifest, environ)
    path = run.checks_of(inside.FAMILY, place.node)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_record(inside.run(manifest, place, environ), path)
    return 0


def judge_inside(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Add what the checks inside the environments found to the verdict.

    Returns 0 when training may start, 90 when a check failed, 91 when it could not be told.
    """
    from hpcenv.node.preflight import inside

    manifest = open_manifest(run)
    place = _place(run, manifest, environ)
    before = load_record(Verdict, run.verdict)
    nodes = before.launched or place.nodes
    found = inside.reports(manifest, nodes, wait=_SECONDS_FOR_FILES)
    verdict = preflight.add_reports(before, manifest, nodes, {inside.FAMILY: found})
    save_record(verdict, run.verdict)
    print(verdict_table.render(verdict, lockfile=manifest.lockfile, settings=False), flush=True)
    return exit_status(verdict)


def smoke_test(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Run the smoke test on this node. Ends with 0 whatever was found: the judge step judges."""
    return _smoke(run, environ, pairs=False)


def smoke_pairs(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Test pairs of nodes, with this node in some of them."""
    return _smoke(run, environ, pairs=True)


def _smoke(run: RunFolder, environ: Mapping[str, str], *, pairs: bool) -> int:
    from hpcenv.node.smoke import run as smoke

    manifest = open_manifest(run)
    report = smoke.run(manifest, _place(run, manifest, environ), environ, pairs=pairs)
    if report.ended != "stopped":
        return 0
    number = next((n for n in _REQUESTS if report.problem.endswith(n.name)), signal.SIGTERM)
    return 128 + number


def smoke_judge(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Join what all nodes saw in the smoke test; a failure changes the verdict.

    Returns 0 when training may start, 90 or 91 when it may not, Status.TEST_PAIRS when pairs have to be tested first.
    """
    manifest = open_manifest(run)
    place = _place(run, manifest, environ)
    concluded = conclude.conclude(manifest, place, wait=_SECONDS_FOR_FILES, now=time.time())
    verdict = _say_concluded(concluded, manifest)
    return exit_status(verdict) if concluded.verdict is not None else Status.TEST_PAIRS


def _write_settings(run: RunFolder, name: str, place: ThisNode, verdict: Verdict, choice: Choice) -> None:
    assert verdict.rendezvous is not None
    write_text("\n".join(verdict.launched) + "\n", run.launched)
    if any(setting.value.startswith(f"{run.flight}/") for settings in choice.settings.values() for setting in settings):
        run.flight_of(place.attempt).mkdir(parents=True, exist_ok=True)
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
            binds=choice.binds.get(node, ()),
        )
        save_record(settings, run.env_of(node))


def exit_status(verdict: Verdict) -> int:
    """Return the exit status of the gate for a verdict."""
    return {"match": 0, "mismatch": NodeRejected.exit_status, "unknown": NodesUnknown.exit_status}[verdict.result]


def _collect(run: RunFolder, place: ThisNode) -> tuple[dict[str, Facts], dict[str, str]]:
    """Read what every node reported; wait a little for files that are not visible yet."""
    reported: dict[str, Facts] = {}
    problems: dict[str, str] = {}
    deadline = time.monotonic() + _SECONDS_FOR_FILES
    for node in place.nodes:
        try:
            reported[node] = _read_facts(run.facts_of(node), deadline)
        except FileNotFoundError:
            unknown = "this node reported no facts; its lines in the log above may say why"
            problems[node] = _why_srun_gave_up(run) or unknown
        except RecordInvalid as error:
            problems[node] = f"{error.what}: {error.why}" if error.why else error.what
    return reported, problems


def _why_srun_gave_up(run: RunFolder) -> str:
    """Return why srun could not start the check on a node, if the log of this job says that it is munge."""
    try:
        lines = read_end(run.log, most=_LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = next((line for line in lines if line.startswith(("srun:", "slurmstepd")) and _NO_MUNGE.search(line)), "")
    if not said:
        return ""
    return f"{SRUN_GAVE_UP}: authentication failed, munged may be down there ({said[:200]})"


def _read_facts(path: Path, deadline: float) -> Facts:
    while True:
        try:
            return load_record(Facts, path)
        except RecordInvalid as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            if time.monotonic() > deadline:
                raise error.__cause__ from None
        time.sleep(0.2)


def task(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Launch the training of this run on this node; return its exit status."""
    manifest = open_manifest(run)
    return launch.launch(manifest, _place(run, manifest, environ), environ, say=_say)


def task_on_release(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Launch the training of this run on this node when standard input says so; return its exit status."""
    manifest = open_manifest(run)
    place = _place(run, manifest, environ)
    if place.rank == 0:
        # The batch script, on this node, sees by this file that the step has started.
        write_text(f"{place.node}\n", run.launch_waits)
    return launch.launch(manifest, place, environ, say=_say, release=sys.stdin.fileno())


def outcome(run: RunFolder, environ: Mapping[str, str], status: str) -> int:
    """Return the launch step's own exit status: that of the rank which failed first.

    srun returns the highest status of all tasks. With --kill-on-bad-exit srun ends the other nodes,
    and their status (143, 135 ...) is higher than that of the failure.
    """
    place = _place(run, open_manifest(run), environ)
    found = [_exit_of(run, node) for node in place.nodes]
    records = [record for record in found if record is not None and record.attempt == place.attempt]
    first = first_failure.first_status(records)
    if first is None:
        # Asked to stop, nothing failed; but what a script then ends with is its own to say.
        ended = [r for r in records if r.stopped and r.status != 0 and not r.asked_to_end]
        first = min(ended, key=lambda record: record.ended).status if ended else _status(status)
        if not records and first in _ENDED_SRUN:
            # srun ends with the bare number of a signal if it was ended itself, for example because the disk is full.
            first += 128
    return first


def _exit_of(run: RunFolder, node: str) -> NodeExit | None:
    try:
        return load_record(NodeExit, run.exit_of(node))
    except RecordInvalid:
        return None


def _status(word: str) -> int:
    if not re.fullmatch("[0-9]+", word):
        raise UsageError(f"`{word}` is not an exit status")
    return int(word)


def finish(run: RunFolder, environ: Mapping[str, str], status: str) -> int:
    """Record the batch script's own exit status, and queue the job again where that is wanted.

    For clusters without accounting, and for the next job of a chain.

    Returns Status.NOT_DONE where a training that has more to do is not gone on with.
    """
    number = _status(status)
    try:
        manifest = open_manifest(run)
        place = _place(run, manifest, environ)
        if not current_attempt.is_current_attempt(run, place):
            _say(f"hpcenv: attempt {place.attempt} writes no record: a later attempt has begun")
            return 0
        _let_verdict_follow(run, manifest, place)
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
    _record_copy(run, manifest)
    if ending.why:
        _say(f"hpcenv: {ending.why}")
    if ending.again and not by_slurm:
        refused = _queue_again(run, manifest, place, ending, environ)
        if refused is not None:
            ending = refused
            _write_finished(run, ending.status(number), ending, down=down)
    if _is_last(run, manifest, place, ending):
        _forget_secrets(manifest)
    return Status.NOT_DONE if ending.status(number) != number else 0


def _is_last(run: RunFolder, manifest: Manifest, place: ThisNode, ending: requeue.Ending) -> bool:
    """Whether no attempt can follow this one.

    What was asked to end may be queued again by Slurm or by hand (`scontrol requeue`) after this step. The next command
    of hpcenv that sees the end of such a run removes what is left (`runs/state.py`).
    """
    if ending.again or ending.cancelled or ending.stopped not in ("", "time-limit"):
        return False
    exits = [record for node in place.nodes if (record := _exit_of(run, node)) and record.attempt == place.attempt]
    asked = any(record.asked_to_end for record in exits) and not ending.stopped
    return not asked and not requeue.has_next_link(run, manifest, place.job_id)


def _forget_secrets(manifest: Manifest) -> None:
    """Remove the file with the values of the run's secrets."""
    path = Path(manifest.secret_values)
    if manifest.secret_values:
        secret_file.remove(path.parents[1], [manifest.run_folder])


def _let_verdict_follow(run: RunFolder, manifest: Manifest, place: ThisNode) -> None:
    """Write the verdict anew where a node refused to start after it, for example because the SIF was replaced."""
    exits = [record for node in place.nodes if (record := _exit_of(run, node)) and record.attempt == place.attempt]
    refused = [record for record in exits if record.refused]
    try:
        verdict = load_record(Verdict, run.verdict) if refused else None
        if verdict is None or (verdict.attempt, verdict.result) != (place.attempt, "match"):
            return
        changed = decide.after_launch(verdict, refused, Severities(manifest.severities))
        save_record(changed, run.verdict)
    except (HpcenvError, OSError) as error:
        _say(f"hpcenv: the verdict could not be written anew: {error}")
        return
    names = ", ".join(record.node for record in refused)
    _say(f"hpcenv: the verdict is now {changed.result}: the start was refused on {names}")


def _queue_again(
    run: RunFolder, manifest: Manifest, place: ThisNode, ending: requeue.Ending, environ: Mapping[str, str]
) -> requeue.Ending | None:
    """Queue this job again; return how it ended where that was refused, else None."""
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
    run: RunFolder, manifest: Manifest, place: ThisNode, status: int, environ: Mapping[str, str]
) -> requeue.Ending:
    if manifest.cluster == "local":
        return requeue.Ending(cancelled=bool(environ.get(LOCAL_CANCELLED)))
    exits = [record for node in place.nodes if (record := _exit_of(run, node)) and record.attempt == place.attempt]
    try:
        verdict: Verdict | None = load_record(Verdict, run.verdict)
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
    place: ThisNode,
    exits: Sequence[NodeExit],
    verdict: Verdict | None,
    status: int,
    environ: Mapping[str, str],
) -> stopping.Reason | Literal[""]:
    """Return why this attempt was asked to end before its training began; empty when it was not."""
    if verdict is None or verdict.result != "match":
        return stopping.noted_before_training(manifest, place) or ""
    if status == 0 or exits or os.path.lexists(RunFolder(Path(manifest.run_folder)).ranks):
        return ""
    # The signal came before the launch step handled it, or Slurm did not start the step any more.
    number = status - 128 if status - 128 in _REQUESTS else signal.SIGTERM
    return stopping.note_before_training(manifest, place, environ, number=number) or ""


def _down(run: RunFolder, manifest: Manifest, place: ThisNode, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the nodes that Slurm has lost, where a node did not end by itself."""
    if manifest.cluster != "slurm":
        return {}
    exits = [_exit_of(run, node) for node in place.nodes]
    if all(record is not None and not record.asked_to_end for record in exits):
        return {}
    return current_attempt.down_nodes(place.nodes, environ)


def _write_finished(
    run: RunFolder, status: int, ending: requeue.Ending, *, by: str = "", down: Mapping[str, str] | None = None
) -> None:
    record: dict[str, object] = {"schema": SCHEMA, "status": status, "time": time.time()}
    record |= {"stopped": ending.stopped, "saved": ending.saved, "again": ending.again, "by": by}
    record |= {"before_training": ending.before, "cancelled": ending.cancelled, "down": dict(down or {})}
    record |= {"unfinished": ending.unfinished, "not_again": ending.not_again}
    reserve.write(run, reserve.BATCH, json.dumps(record, indent=1) + "\n", run.finished)
    if not ending.again:
        reserve.remove(run)
