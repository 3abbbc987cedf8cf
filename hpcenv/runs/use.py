"""The section `use` of `hpcenv report`: a judgement of the samples of a run. Runs on: LOGIN NODE.

The newest attempt that has samples is judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from hpcenv.errors import RecordInvalid
from hpcenv.judge.use import AskedShape, UseJudgement, in_words, judge_use
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.samples import read_attempt
from hpcenv.records.verdict import Verdict
from hpcenv.runs.attempts import read_verdict
from hpcenv.text import visible, wrap


def report_use(run: RunFolder, manifest: Manifest) -> UseJudgement | None:
    """Return the judgement of a run's samples; None without samples. A bundle contains only the judgement itself."""
    attempt = newest_attempt(run)
    if attempt is None:
        with suppress(RecordInvalid):
            return load_record(UseJudgement, run.use)
        return None
    return judge_use(tuple(read_attempt(run, attempt)), asked_shape(manifest, read_verdict(run)[0], attempt))


def newest_attempt(run: RunFolder) -> int | None:
    """Return the number of the newest attempt with samples; None if no attempt has samples."""
    numbers = (path.parent.name.removeprefix("attempt-") for path in run.samples.glob("attempt-*/*.jsonl"))
    return max((int(number) for number in numbers if number.isdecimal()), default=None)


def asked_shape(manifest: Manifest, verdict: Verdict | None, attempt: int) -> AskedShape:
    """Return what a run asked for, and, if the attempt has a verdict, the nodes that started ranks."""
    nodes: tuple[str, ...] = ()
    if verdict is not None and verdict.attempt == attempt:
        nodes = verdict.launched or tuple(node.node for node in verdict.nodes)
    cpus = manifest.cpus_per_task * manifest.nproc_per_node
    return AskedShape(nodes=nodes, gpus=manifest.gpus_per_node, cpus=cpus)


def lines(judgement: UseJudgement) -> Iterator[str]:
    """Yield the judgement as text for `hpcenv report`. Pure."""
    for number, line in enumerate(in_words(judgement)):
        yield wrap(visible(line), first="            " if number else "  use       ", indent=14)
