"""The report of a run, and its text for `hpcenv report` and `print(job.run.report())`. Pure. Runs on: LOGIN NODE."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from hpcenv import size
from hpcenv.cluster.queue import in_words
from hpcenv.judge import first_failure
from hpcenv.judge.first_failure import FirstFailure
from hpcenv.judge.use import UseJudgement
from hpcenv.machine.network import port_errors
from hpcenv.project import duration, fields
from hpcenv.records.manifest import Manifest
from hpcenv.records.outcome import NodeExit
from hpcenv.records.verdict import Verdict
from hpcenv.runs import determinism, rank_gpus, use
from hpcenv.runs.determinism import DeterminismReport
from hpcenv.runs.diagnose.diagnose import FailureDiagnosis
from hpcenv.runs.diagnose.text import next_lines
from hpcenv.runs.outputs import Outputs
from hpcenv.runs.rank_gpus import GpuReport
from hpcenv.runs.status import RunStatus
from hpcenv.text import Shown, plural, visible, wrap

# The largest number of characters of a printed line of the log. `hpcenv logs` prints lines in full.
_MAX_LINE = 400
# The largest number of failed ranks that are printed for one node. `--json` has all of them.
_MAX_RANKS = 4
_MAX_COUNTERS = 8


@dataclass(frozen=True, kw_only=True)
class EarlierFailure:
    """The first failure of an earlier attempt.

    Attributes:
        attempt: number of the attempt.
        link: text that says which job of a chain the attempt belongs to; empty without a chain.
    """

    attempt: str
    failure: FirstFailure
    link: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class RunReport(Shown):
    """The report of a run.

    Attributes:
        failure: the first failure; None if no failure is known.
        earlier: first failures of earlier attempts, in order.
        status: state of the run, and exits of its nodes.
        manifest: manifest of the run; None if it cannot be read.
        table: verdict and settings as text; empty without a verdict.
        last_lines: last lines of the log.
        command: the command line that submitted the run; empty if that was not recorded.
        commit: the commit of the run's code, and whether files differed from the commit; empty if the commit is
            unknown.
        fingerprint: fingerprint of the run's lockfile; empty if the lockfile cannot be read.
        metrics: the last line with a metric near the end of the log; empty if there is no such line.
        outputs: what the script left in the run's copy of the project; None if there is no copy.
        determinism: the values of the determinism switches that the ranks read back; None if the run has no start hook.
        gpus: the GPUs that the ranks used; None for a run without GPUs or without records.
        use: what is unusual in the samples of the run; None for a run without samples.
        diagnosis: the cause that the ends of the logs show; None if the run has not failed.
        hangs: what the nodes found when a rank made no optimizer step; empty if all ranks continued.
    """

    failure: FirstFailure | None
    earlier: tuple[EarlierFailure, ...]
    status: RunStatus
    manifest: Manifest | None
    table: str
    last_lines: tuple[str, ...]
    command: tuple[str, ...] = ()
    commit: str = ""
    fingerprint: str = ""
    metrics: tuple[str, ...] = ()
    outputs: Outputs | None = None
    determinism: DeterminismReport | None = None
    gpus: GpuReport | None = None
    use: UseJudgement | None = None
    diagnosis: FailureDiagnosis | None = None
    hangs: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the text that `hpcenv report` prints."""
        return render(self)

    @property
    def ok(self) -> bool:
        """Whether the run has completed with exit status 0."""
        return self.status.state == "completed" and self.status.exit_status == 0


def render(report: RunReport) -> str:
    """Return the report of a run as text, without control characters."""
    return "\n".join(_lines(report))


def state_lines(status: RunStatus) -> Iterator[str]:
    """Yield the state of a run with its reason and exit status, and its jobs."""
    words = in_words(status.detail) if status.waits_on_slurm else status.detail
    detail = f" ({visible(words)})" if words else ""
    exit_status = f", exit status {status.exit_status}" if status.exit_status is not None else ""
    yield wrap(f"{status.run}: {status.state}{detail}{exit_status}")
    yield f"  job       {status.job_id}" + (f", attempt {status.attempt}" if status.attempt else "")
    if status.queue is not None:
        waited = "" if status.queue.waited is None else f"for {duration.clock(status.queue.waited)}; "
        yield wrap(f"  queue     {waited}{visible(str(status.queue))}", indent=12)
    if status.chain:
        link = f"link {status.chain.index(status.job_id) + 1} of " if status.job_id in status.chain else ""
        yield f"  chain     {link}{len(status.chain)} jobs: {', '.join(status.chain)}"


def _lines(report: RunReport) -> Iterator[str]:
    yield from _failure_lines(report)
    yield from _end_lines(report)
    if report.table:
        yield ""
        if report.status.waits_again:
            yield f"verdict of attempt {report.status.attempt}, before the job was requeued:\n"
        yield report.table.rstrip()
    if report.status.state == "rejected" and report.status.verdict is not None:
        yield from _hints(report.status.verdict)
    if report.last_lines and report.status.state != "rejected":
        yield ""
        yield "end of the log:"
        for line in report.last_lines:
            shown = visible(line)
            yield f"  {shown[:_MAX_LINE]}..." if len(shown) > _MAX_LINE else f"  {shown}".rstrip()


def _hints(verdict: Verdict) -> Iterator[str]:
    """Yield hints for the fields that differ. The hint of a failed check is already in the table."""
    rows = [one for one in verdict.findings if one.severity == "must" and one.result == "mismatch" and not one.owner]
    hints = dict.fromkeys(field.hint for row in rows if (field := fields.find(row.field)) is not None)
    if hints:
        yield ""
    yield from (wrap(f"hint: {hint}", indent=6) for hint in hints)


def _failure_lines(report: RunReport) -> Iterator[str]:
    """Yield the first failure of the run, and the first failures of its earlier attempts."""
    folder = str(report.status.run_folder)
    if report.failure is not None:
        yield first_failure.render(report.failure, folder=folder)
    if report.diagnosis is not None:
        yield from next_lines(report.diagnosis)
    for attempt in report.earlier:
        link = f", {attempt.link}" if attempt.link else ""
        yield first_failure.render(attempt.failure, word=f"attempt {attempt.attempt}{link}", folder=folder)
    if report.failure is not None or report.earlier:
        yield ""


def _end_lines(report: RunReport) -> Iterator[str]:
    """Yield the state of the run, and how its nodes and its earlier attempts ended."""
    yield from state_lines(report.status)
    for node in report.status.exits:
        yield from _exit_lines(node)
    for line in report.status.earlier:
        yield f"  earlier   {visible(line)}"
    if report.manifest is not None and report.manifest.element:
        values = ", ".join(f"{name}={value}" for name, value in report.manifest.element.items())
        yield f"  values    {visible(values)}"
    yield f"  folder    {report.status.run_folder}"
    if report.command:
        yield f"  command   {visible(shlex.join(report.command))}"
    if report.commit:
        yield f"  code      {visible(report.commit)}"
    if report.fingerprint:
        lockfile = "" if report.manifest is None else f" ({visible(report.manifest.lockfile)})"
        yield f"  lockfile  {visible(report.fingerprint)}{lockfile}"
    for number, line in enumerate(report.hangs):
        yield wrap(f"  {'' if number else 'steps':10}{line}", indent=12)
    for line in report.metrics:
        yield f"  metrics   {visible(line)[:_MAX_LINE]}"
    if report.determinism is not None:
        yield from determinism.lines(report.determinism)
    if report.gpus is not None:
        yield from rank_gpus.lines(report.gpus)
    if report.use is not None:
        yield from use.lines(report.use)
    if report.outputs is not None:
        yield from _output_lines(report.outputs)


def _output_lines(outputs: Outputs) -> Iterator[str]:
    """Yield the files that the script made or changed in the run's copy of the project, relative to the run folder."""
    if outputs.count:
        yield f"  made      {plural(outputs.count, 'file')}, {size.shown(outputs.size)}"
        yield from (f"            {visible(name)}" for name in outputs.names)
        if outputs.count > len(outputs.names):
            yield f"            and {outputs.count - len(outputs.names)} more"
    yield from (f"  changed   {visible(name)}" for name in outputs.changed)


def _exit_lines(node: NodeExit) -> Iterator[str]:
    """Yield how one node ended, and which of its ranks failed."""
    reason = f" ({visible(node.signal)})" if node.signal else ""
    if node.asked_to_end:
        reason = f", ended on request by {visible(node.asked_to_end)}"
    if node.stopped:
        reason += f", stopped: {node.stopped}" + (", saved" if node.saved else "")
    if node.oom_kills:
        reason += f", {node.oom_kills} processes killed for lack of memory"
    yield f"  {visible(node.node):<8}  exit status {node.status}{reason} after {node.ended - node.started:.0f} s"
    if node.changed:
        yield f"  {'':<8}  changed while it ran: {visible(', '.join(node.changed))}"
    many = [port_errors.in_words(one) for one in node.port_errors if one.many]
    if many:
        yield f"  {'':<8}  RDMA errors while it ran (ib.errors): {visible(', '.join(many[:_MAX_COUNTERS]))}"
    if node.port_errors_unknown:
        yield f"  {'':<8}  RDMA errors unknown: {visible(node.port_errors_unknown)}"
    if node.not_looked_again:
        yield f"  {'':<8}  environment not looked at again: {visible(node.not_looked_again)}"
    if node.asked_to_end:
        return  # its ranks ended because of the request
    for rank in node.ranks[:_MAX_RANKS]:
        name = f"rank {rank.rank}" if rank.rank >= 0 else f"local rank {rank.local_rank}"
        status = (
            ""
            if rank.status is None
            else f", exit {rank.status}" + (f" ({visible(rank.signal)})" if rank.signal else "")
        )
        message = visible(rank.message)
        yield f"            {name}{status}" + (f", {message[:200]}" if message else "")
    if len(node.ranks) > _MAX_RANKS:
        yield f"            and {len(node.ranks) - _MAX_RANKS} more ranks"
