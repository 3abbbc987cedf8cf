"""`hpcenv status`: everything that is known about a run now.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from hpcenv.cluster.queue import QueuePlace, find_place
from hpcenv.errors import RecordInvalid
from hpcenv.judge import first_failure as failure
from hpcenv.judge.first_failure import FirstFailure
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.outcome import NodeExit
from hpcenv.records.session import SessionNode, read_nodes
from hpcenv.records.verdict import SRUN_GAVE_UP, Verdict
from hpcenv.runs.attempts import (
    describe_earlier_attempts,
    describe_unfinished,
    down_nodes,
    nodes_without_facts,
    read_exits,
    read_record,
    read_verdict,
    stopped_before_training,
)
from hpcenv.runs.entries import Run, Submitted
from hpcenv.runs.find import find_run
from hpcenv.runs.state import ResolvedState, RunState, is_from_previous_job, resolve_states
from hpcenv.text import Shown


def status(start: Path, word: str | None, *, environ: Mapping[str, str], runs: str | None = None) -> RunStatus:
    """Return the status of a run.

    Args:
        start: current directory. The project is in this folder or in a folder above.
        word: run folder, run name or job id; None for the latest run.
        environ: environment variables, for the Slurm commands.
        runs: folder of runs, if it is not the project's folder of runs.

    Raises:
        RunNotFound, RecordInvalid, UsageError: see `hpcenv.runs.find.find_run`.
    """
    return with_queue(read_status(find_run(start, word, runs=runs), environ), environ)


@dataclass(frozen=True, kw_only=True, repr=False)
class RunStatus(Shown, RunState):
    """Everything that is known about a run now.

    Attributes:
        job_id: the job id. For a chain, the id of the job that runs now or ran last.
        verdict, exits: records of this attempt. While `waits_again` is True, records of the previous attempt.
        earlier: one line for each earlier attempt.
        chain: job ids of a chain; empty without a chain.
        failure: the first failure; None if no failure is known.
        session: what the nodes of an open session report, from the first node to the first node that is not open.
        queue: place of the run in the queue, if the run waits and `with_queue` has asked Slurm.
    """

    run: str
    run_folder: Path
    job_id: str
    cluster: str
    verdict: Verdict | None
    exits: tuple[NodeExit, ...]
    earlier: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()
    failure: FirstFailure | None = None
    session: tuple[SessionNode, ...] = ()
    queue: QueuePlace | None = None

    @property
    def waits_on_slurm(self) -> bool:
        """Whether the run is in the queue of Slurm."""
        return self.cluster == "slurm" and self.state in ("pending", "requeued")

    @property
    def has_succeeded(self) -> bool:
        """Whether the run completed, with status 0 or an unknown status."""
        return self.state == "completed" and not self.exit_status

    @property
    def has_failed(self) -> bool:
        """Whether the run ended without success; False for a run that the user cancelled."""
        return self.quiet and self.state != "cancelled" and not self.has_succeeded


def read_status(run: Submitted, environ: Mapping[str, str]) -> RunStatus:
    """Return everything that is known about a run, from Slurm and from the run folder."""
    return read_statuses([run], environ)[0]


def with_queue(status: RunStatus, environ: Mapping[str, str]) -> RunStatus:
    """Return the status. If the run waits, add its place in the queue."""
    return replace(status, queue=find_place(status.job_id, environ)) if status.waits_on_slurm else status


def read_statuses(runs: Sequence[Submitted], environ: Mapping[str, str]) -> list[RunStatus]:
    """Return everything that is known about some runs, with one call of squeue and sacct for all runs."""
    return [read_details(run, resolved) for run, resolved in zip(runs, resolve_states(runs, environ), strict=True)]


def read_details(run: Submitted, resolved: ResolvedState) -> RunStatus:
    """Return everything that is known about a run: its resolved state, and what its folder says."""
    state = resolved.state
    verdict, problem = read_verdict(run.folder)
    exits = read_exits(run.folder)
    if state.quiet and is_from_previous_job(run, read_record(run.folder.started)):
        # The job ended before it started, for example because it was cancelled in the queue.
        verdict, problem, exits = None, "", ()
    notes = (state.detail, problem, _not_started(state, verdict), _alone(run, exits))
    return RunStatus(
        run=run.submission.run,
        run_folder=run.folder.path,
        job_id=resolved.job_id,
        cluster=run.submission.cluster,
        verdict=verdict,
        exits=exits,
        earlier=describe_earlier_attempts(run),
        chain=run.submission.chain,
        failure=_first_failure(run, resolved, verdict, exits),
        session=_open_nodes(run, state, verdict),
        **{**vars(state), "detail": "; ".join(filter(None, (*notes, run.problem)))},
    )


def _open_nodes(run: Submitted, state: RunState, verdict: Verdict | None) -> tuple[SessionNode, ...]:
    if not run.submission.session or state.state != "running":
        return ()
    if verdict is None or not verdict.allows(state.attempt):
        return ()
    found = {record.node: record for record in read_nodes(run.folder, state.attempt)}
    return tuple(found[node] for node in takewhile(found.__contains__, verdict.training_nodes))


def _not_started(state: RunState, verdict: Verdict | None) -> str:
    """Return why srun could not start the check on a node; empty if it could, or if `state` has the reason."""
    if state.state != "rejected" or verdict is None or SRUN_GAVE_UP in state.detail:
        return ""
    finding = next((one for one in verdict.findings if one.found.startswith(SRUN_GAVE_UP)), None)
    return "" if finding is None else f"node {finding.node}: {finding.found.partition(' (')[0]}"


def _alone(run: Submitted, exits: Sequence[NodeExit]) -> str:
    """Return a note if no rank joined a process group, so that each rank did the same work alone."""
    if not any(record.alone for record in exits) or not isinstance(run, Run) or run.manifest.session is not None:
        return ""
    ranks = len(exits) * run.manifest.nproc_per_node
    return f"{ranks} ranks, 0 joined a process group" if ranks > 1 else ""


def _first_failure(
    run: Submitted, resolved: ResolvedState, verdict: Verdict | None, exits: tuple[NodeExit, ...]
) -> FirstFailure | None:
    """Return the first failure of this attempt; None if no failure is known."""
    state = resolved.state
    # The records are from the previous attempt, or the training has not run.
    if (
        state.waits_again
        or state.state in ("pending", "rejected")
        or (state.state, state.exit_status) == ("completed", 0)
    ):
        return None
    try:
        manifest = run.manifest if isinstance(run, Run) else load_record(Manifest, run.folder.manifest)
        launches, nproc = manifest.launches, manifest.nproc_per_node
    except RecordInvalid:
        launches, nproc = True, 1
    if verdict is None or verdict.result != "match" or not launches:
        nodes: tuple[str, ...] = ()
    else:
        nodes = verdict.training_nodes
    job_state = state.state if state.state != "unknown" else ""
    if resolved.waited:
        return failure.first_failure((), nodes=(), nproc=nproc, state=job_state, waited=True)
    # For a cancelled job, the cancellation is the cause.
    unfinished = describe_unfinished(resolved.finished) if state.quiet and state.state != "cancelled" else ""
    first = failure.first_failure(
        exits,
        nodes=nodes,
        nproc=nproc,
        state=job_state,
        over=state.quiet,
        down=down_nodes(resolved.finished),
        stopped=stopped_before_training(resolved.finished) if state.quiet else "",
        unfinished=unfinished,
        silent=nodes_without_facts(run.folder) if state.quiet else (),
    )
    if first is None or first.headline != unfinished:
        return first
    rerun = f"to start again: hpcenv rerun {shlex.quote(str(run.folder.path))}"
    return replace(first, notes=(*first.notes, rerun))
