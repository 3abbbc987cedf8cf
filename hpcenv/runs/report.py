"""`hpcenv report`: the result of a run, with its first failure at the top. Runs on: LOGIN NODE."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import RecordInvalid
from hpcenv.judge import verdict_table
from hpcenv.judge.first_failure import FirstFailure, first_failure
from hpcenv.records.codec import Record
from hpcenv.records.files import load_record, read_end
from hpcenv.records.manifest import Manifest
from hpcenv.records.outcome import NodeExit
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import Verdict
from hpcenv.runs.attempts import (
    describe_chain_link,
    nodes_without_facts,
    read_down_nodes,
    read_finished,
    stopped_before_training,
)
from hpcenv.runs.determinism import report_determinism
from hpcenv.runs.diagnose.diagnose import AT_END, diagnose_run
from hpcenv.runs.entries import Run, Submitted, Sweep, problem_of_element
from hpcenv.runs.find import find_submitted
from hpcenv.runs.fingerprint import read_fingerprint
from hpcenv.runs.hangs import hang_lines
from hpcenv.runs.outputs import read_outputs
from hpcenv.runs.rank_gpus import report_gpus
from hpcenv.runs.report_text import EarlierFailure, RunReport
from hpcenv.runs.run_line import RunLine
from hpcenv.runs.run_list import lines_of
from hpcenv.runs.status import RunStatus, read_status, read_statuses
from hpcenv.runs.use import report_use
from hpcenv.text import Shown

# Number of earlier attempts that are reported.
_MAX_ATTEMPTS = 50


@dataclass(frozen=True, kw_only=True, repr=False)
class SweepReport(Shown):
    """The report of a sweep or array.

    Attributes:
        sweep: one line for the whole sweep.
        runs: one line for each run, with its parameter values.
        failures: run -> its first failure, for runs that did not complete.
        names: parameter names in the given order; empty for an array.
        problems: runs that cannot be read, and why.
    """

    sweep: RunLine
    runs: tuple[RunLine, ...]
    failures: dict[str, FirstFailure]
    names: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all runs have completed with exit status 0."""
        return not self.problems and all(run.state == "completed" and run.exit_status in (0, None) for run in self.runs)


def report(
    start: Path, word: str | None, *, environ: Mapping[str, str], runs: str | None = None, lines: int = 10
) -> RunReport | SweepReport:
    """Return the report of a run or of a sweep.

    Args:
        start: current directory. The project is in this folder or in a folder above.
        word: run folder, run name, job id or sweep; None for the latest run.
        environ: environment variables, for the Slurm commands.
        runs: folder of runs, if it is not the project's folder of runs.
        lines: number of lines from the end of the log to include.

    Raises:
        RunNotFound, RecordInvalid: see `hpcenv.runs.find.find_submitted`.
    """
    entry = find_submitted(start, word, runs=runs)
    return _report_sweep(entry, environ) if isinstance(entry, Sweep) else _report_run(entry, environ, lines)


def _report_run(run: Submitted, environ: Mapping[str, str], lines: int) -> RunReport:
    status = read_status(run, environ)
    log = _last_lines(run.folder.log)
    metric = last_metrics(log)
    manifest = run.manifest if isinstance(run, Run) else None
    lockfile = "" if manifest is None else manifest.lockfile
    return RunReport(
        failure=status.failure,
        earlier=_earlier(run, status),
        status=status,
        manifest=manifest,
        table="" if status.verdict is None else verdict_table.render(status.verdict, lockfile=lockfile),
        last_lines=log[max(0, len(log) - lines) :],
        command=run.submission.command,
        commit="" if manifest is None else _commit(manifest),
        fingerprint=read_fingerprint(run.folder),
        metrics=(metric,) if metric else (),
        outputs=read_outputs(run.folder),
        determinism=None if manifest is None or status.state == "pending" else report_determinism(run.folder, manifest),
        gpus=None if manifest is None else report_gpus(run.folder, manifest),
        use=None if manifest is None else report_use(run.folder, manifest),
        diagnosis=diagnose_run(run, status, most=AT_END) if status.has_failed else None,
        hangs=tuple(hang_lines(run.folder)),
    )


def _commit(manifest: Manifest) -> str:
    source = manifest.source
    if source is None or not source.commit:
        return ""
    return f"commit {source.commit}" + (", with changes that are not committed" if source.dirty else "")


def _report_sweep(sweep: Sweep, environ: Mapping[str, str]) -> SweepReport:
    summary = lines_of([sweep], environ, within=sweep.folder.parent)[0]
    rows = lines_of(sweep.elements, environ, within=sweep.folder, values=sweep.values)
    others = [n for n, row in enumerate(rows) if row.state != "completed" or row.exit_status not in (0, None)]
    statuses = read_statuses([sweep.elements[n] for n in others], environ) if others else []
    failures = {rows[n].run: status.failure for n, status in zip(others, statuses, strict=True)}
    return SweepReport(
        sweep=summary,
        runs=rows,
        failures={run: failure for run, failure in failures.items() if failure is not None},
        names=sweep.names,
        problems=tuple(_problems(sweep)),
    )


def _problems(sweep: Sweep) -> Iterator[str]:
    if sweep.record is None:
        yield f"`{RunFolder(sweep.folder).sweep}` cannot be read: the number of runs and their values are unknown"
        return
    known = {element.folder.path.name for element in sweep.elements}
    for element in sweep.record.elements:
        if element.folder not in known:
            yield f"{element.folder}: {problem_of_element(sweep.folder / element.folder)}"


# -- earlier attempts ---------------------------------------------------------------------


def _earlier(run: Submitted, status: RunStatus) -> tuple[EarlierFailure, ...]:
    """Return the first failure of each earlier attempt. If the manifest cannot be read, return no failure."""
    if not isinstance(run, Run):
        return ()
    folders = [(path.name, RunFolder(path)) for path in _attempts(run.folder)]
    if status.waits_again:
        folders.append((str(status.attempt), run.folder))
    return tuple(
        EarlierFailure(attempt=name, failure=failure, link=describe_chain_link(run, folder))
        for name, folder in folders
        if (failure := _failure_in(folder, run.manifest)) is not None
    )


def _attempts(folder: RunFolder) -> list[Path]:
    try:
        names = [path for path in folder.attempts.iterdir() if path.name.replace(".", "").isdecimal()]
    except OSError:
        return []
    return sorted(names, key=lambda path: [int(part) for part in path.name.split(".") if part])[-_MAX_ATTEMPTS:]


def _failure_in(attempt: RunFolder, manifest: Manifest) -> FirstFailure | None:
    """Return the first failure of an earlier attempt, from its files only, because Slurm's answers are not stored."""
    stopped = stopped_before_training(read_finished(attempt))
    if stopped:
        silent = nodes_without_facts(attempt)
        return first_failure((), nodes=(), nproc=manifest.nproc_per_node, stopped=stopped, silent=silent)
    verdict = _read(Verdict, attempt.verdict)
    if verdict is None or verdict.result != "match" or not manifest.launches:
        return None
    nodes = verdict.training_nodes
    exits = tuple(record for node in nodes if (record := _read(NodeExit, attempt.exit_of(node))) is not None)
    return first_failure(exits, nodes=nodes, nproc=manifest.nproc_per_node, down=read_down_nodes(attempt))


def _read(kind: type[Record], path: Path) -> Record | None:
    try:
        return load_record(kind, path)
    except RecordInvalid:
        return None


# -- the log ------------------------------------------------------------------------------

# Only this part at the end of the log is read. It is enough for some hundred lines.
_TAIL_BYTES = 256 * 1024
# A name that trainings use for a metric, and a number near it: `loss 2.44`, `val_loss=0.31`, `acc: 97.1%`.
_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_METRIC = re.compile(
    r"(?<![A-Za-z])(?:[A-Za-z0-9]+[_/.-])*(?:loss|acc|accuracy|perplexity|ppl|bleu|rouge|f1|auc|iou|map|mse|mae|rmse|"
    rf"psnr|reward|score|error_rate)(?:[_@/-]?[0-9]{{1,3}})?['\"]?\s*[=:]?\s*(?:{_NUMBER}|nan|inf)\b",
    re.IGNORECASE,
)
# Lines that torch or hpcenv writes, not the training.
_OTHER = re.compile(r"^(hpcenv|error\[|[IWEF]\d{4} )")


def _last_lines(log: Path) -> tuple[str, ...]:
    """Return the lines in the last 256 KiB of a log."""
    try:
        text = read_end(log, most=_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ()
    lines = text.removesuffix("\n").split("\n") if text else []
    return tuple(lines)


def last_metrics(lines: Sequence[str]) -> str:
    """Return the last line of a log that contains a metric; empty if no line contains one. Pure."""
    for line in reversed(lines):
        if len(line) <= 4000 and not _OTHER.match(line) and _METRIC.search(line):
            return line.strip()
    return ""
