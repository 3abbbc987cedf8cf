"""The section `use` of `hpcenv report`: a judgement of the samples of a run. Runs on: LOGIN NODE.

The newest attempt that has samples is judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from hpcenv.errors import RecordInvalid
from hpcenv.judge.use import AskedShape, UseJudgement, in_words, judge_use
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.samples import read_attempt
from hpcenv.runs.attempts import read_finished, read_verdict
from hpcenv.text import visible, wrap


def report_use(run: RunFolder, manifest: Manifest) -> UseJudgement | None:
    """Return the judgement of a run's samples; None without samples. A bundle contains only the judgement itself."""
    attempt = newest_attempt(run)
    if attempt is None:
        with suppress(RecordInvalid):
            return load_record(UseJudgement, run.use)
        return None
    return judge_use(tuple(read_attempt(run, attempt)), asked_shape(run, manifest, attempt))


def newest_attempt(run: RunFolder) -> int | None:
    """Return the number of the newest attempt with samples; None if no attempt has samples."""
    numbers = (path.parent.name.removeprefix("attempt-") for path in run.samples.glob("attempt-*/*.jsonl"))
    return max((int(number) for number in numbers if number.isdecimal()), default=None)


def asked_shape(run: RunFolder, manifest: Manifest, attempt: int, now: float | None = None) -> AskedShape:
    """Return the nodes, GPUs and CPUs that a run requested.

    If the attempt has a verdict, add the nodes that started ranks.

    Args:
        now: the present time, if it is known: a run that has not ended may have samples up to this time.
    """
    verdict, finished = read_verdict(run)[0], read_finished(run)
    nodes: tuple[str, ...] = ()
    until = None if finished else now
    if verdict is not None and verdict.attempt == attempt:
        nodes = verdict.training_nodes
        until = _ranks_ended(run, finished) if finished else now
    cpus = manifest.cpus_per_task * manifest.nproc_per_node
    return AskedShape(nodes=nodes, number=manifest.nodes, gpus=manifest.gpus_per_node, cpus=cpus, until=until)


def _ranks_ended(run: RunFolder, finished: Mapping[str, Any]) -> float | None:
    """Return when the last node recorded its end; None if unknown. The job may end much later than the ranks."""
    times = []
    for path in run.exits.glob("*.json"):
        with suppress(OSError):  # a new attempt has moved the record
            times.append(path.stat().st_mtime)
    ended = finished.get("time")
    # In a copy of a run folder, the files may be newer than the end of the job.
    return min(ended, max(times)) if times and isinstance(ended, float) else None


def lines(judgement: UseJudgement) -> Iterator[str]:
    """Yield the judgement as text for `hpcenv report`. Pure."""
    for number, line in enumerate(in_words(judgement)):
        yield wrap(visible(line), first="            " if number else "  use       ", indent=14)
