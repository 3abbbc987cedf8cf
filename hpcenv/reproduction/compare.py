"""`hpcenv compare`: whether two runs gave the same results, or from which step on they differ, and possible causes.

Runs on: LOGIN NODE. Three questions get separate answers. Does the run give the same results again on this cluster? Is
the run equal to the reference? If a restart computes steps again, does it give the same results?
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcenv.errors import HpcenvError, NotComparable, UsageError
from hpcenv.locking.diff import diff
from hpcenv.locking.difference import Change, change_of
from hpcenv.reproduction import comparison
from hpcenv.reproduction.causes import Cause, different_switches, rank_causes
from hpcenv.reproduction.closeness import Tolerance
from hpcenv.reproduction.comparison import Divergence, MetricComparison, Nearness, ParameterComparison
from hpcenv.reproduction.measured import HOW_RECORDED, OF_RANKS, Measured, Start, read_measured
from hpcenv.reproduction.seeds import SweepComparison, are_sweeps, compare_sweeps
from hpcenv.reproduction.series import Series
from hpcenv.runs.find import find_run
from hpcenv.text import Shown

Question = Literal["repeats-here", "equals-reference", "restart-replays"]
SameAnswer = Literal["yes", "within", "no", "unknown", "not-asked"]


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One of the three questions with its answer in a word and in a sentence."""

    question: Question
    answer: SameAnswer
    text: str


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps to compare, both ends included; None means no limit."""

    first: int | None = None
    last: int | None = None

    def of(self, series: Sequence[Series]) -> tuple[Series, ...]:
        """Return the part of each series with these steps. A series without any of these steps is left out."""
        first, last = (
            self.first if self.first is not None else -(1 << 62),
            self.last if self.last is not None else 1 << 62,
        )
        cut = (one.between(first, last) for one in series)
        return tuple(one for one in cut if one.steps)

    def of_hashes(self, parameters: Mapping[int, Mapping[int, str]]) -> dict[int, dict[int, str]]:
        """Return the hashes of these steps."""
        return {rank: {n: one for n, one in hashes.items() if n in self} for rank, hashes in parameters.items()}

    def __contains__(self, step: int) -> bool:
        return (self.first is None or step >= self.first) and (self.last is None or step <= self.last)


@dataclass(frozen=True, kw_only=True)
class Side:
    """A run that is compared."""

    name: str
    folder: Path
    measured: Measured
    ranks: int


@dataclass(frozen=True, kw_only=True, repr=False)
class RunComparison(Shown):
    """The comparison of a run with its reference.

    Attributes:
        reference, other: names of the runs.
        verdict: `equal` to the last bit, `within` the tolerance, or `differs`.
        headline: the verdict in one sentence.
        first: the first pair of values that differs, among all metrics and parameters; None if all are equal.
        answers: the answers to the three questions.
        global_batch: for each run, the samples of all ranks in an optimizer step; None if the number is not known.
        causes: differences between the runs, the most likely cause first.
        findings: what the ranks report about their determinism switches.
        not_compared: what was not compared, because a run has no such record or because a record could not be read.
    """

    reference: str
    other: str
    reference_folder: Path
    other_folder: Path
    verdict: Nearness
    headline: str
    metrics: tuple[MetricComparison, ...]
    parameters: ParameterComparison
    first: Divergence | None
    answers: tuple[Answered, ...]
    causes: tuple[Cause, ...]
    global_batch: tuple[int | None, int | None] = (None, None)
    findings: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()


def compare(
    reference: str | Path,
    run: str | Path,
    *again: str | Path,
    project: str | Path = ".",
    runs_dir: str | None = None,
    steps: str | None = None,
    metric: Sequence[str] = (),
    rtol: float | None = None,
    atol: float | None = None,
    ulp: int | None = None,
) -> RunComparison | SweepComparison:
    """Compare the results of a run with the results of a reference, or the results of two sweeps over seeds.

    This function does the same as `hpcenv compare`.

    Args:
        reference, run: a run folder, name or job id for each run; or two sweeps.
        again: further runs with the same settings as `run`. They show whether the run gives the same results again on
            this cluster.
        project: a folder of the project; relative paths begin in this folder.
        runs_dir: folder of runs; None for the project's folder of runs.
        steps: `A:B` compares only the steps from A to B; `N` compares the steps up to N.
        metric: names of the metrics to compare; empty for all.
        rtol, atol: tolerance. If both are None, the tolerance of torch.testing.assert_close is used; if one is None,
            this one is 0.
        ulp: tolerance in units in the last place, instead of rtol and atol.

    Raises:
        RunNotFound, RecordInvalid: a run cannot be found or read.
        NotComparable: the runs have no metric of the same name and step.
        UsageError: `steps` is not a range, or two rules of tolerance are given.
    """
    if ulp is not None and (rtol is not None or atol is not None):
        raise UsageError("`--ulp` does not go together with --rtol and --atol", why="each is a separate rule")
    start, words = Path(project), [str(word) for word in (reference, run, *again)]
    if not again and are_sweeps(start, words, runs=runs_dir):
        return compare_sweeps(start, *words, runs=runs_dir, metrics=metric)
    return compare_runs(
        start,
        words[0],
        words[1],
        again=words[2:],
        runs=runs_dir,
        tolerance=Tolerance(rtol=rtol, atol=atol, ulp=ulp),
        steps=_steps_of(steps),
        metrics=metric,
    )


def _steps_of(text: str | None) -> Steps:
    """Return the range of steps that `--steps` names.

    Raises:
        UsageError: the text is not `A:B`, `A:`, `:B` or `N`.
    """
    if text is None:
        return Steps()
    match = re.fullmatch(r"(?:([0-9]{1,15})?(:))?([0-9]{1,15})?", text)
    if match is None or not (match[1] or match[3]):
        raise UsageError(f"`--steps {text}` is not a range of steps", hint="--steps 1:20, --steps 20")
    first, last = (int(number) if number else None for number in (match[1], match[3]))
    if first is not None and last is not None and first > last:
        raise UsageError(f"`--steps {text}` is empty", hint=f"--steps {last}:{first}")
    return Steps(first=first, last=last)


def compare_runs(
    start: Path,
    reference: str,
    other: str,
    *,
    again: Sequence[str] = (),
    runs: str | None = None,
    tolerance: Tolerance | None = None,
    steps: Steps | None = None,
    metrics: Sequence[str] = (),
) -> RunComparison:
    """Compare a run with a reference.

    Args:
        start: the user's current folder.
        reference, other: a run folder, name or job id.
        again: further runs with the same settings as `other`. They show whether the run gives the same results again on
            this cluster.
        runs: folder of runs; None for the project's folder of runs.
        tolerance: the tolerance; None for the tolerance of torch.testing.assert_close.
        steps: the steps to compare; None for all.
        metrics: names of the metrics to compare; empty for all.

    Raises:
        RunNotFound, RecordInvalid, UsageError: a run cannot be found or read.
        NotComparable: the runs have no metric of the same name and step.
    """
    sides = [read_side(start, word, runs, steps or Steps(), metrics) for word in (reference, other, *again)]
    rule = tolerance or Tolerance()
    found = _compare_measured(sides[0], sides[1], rule)
    if found.level is None:
        raise _not_comparable(sides[0], sides[1])
    causes, missing = causes_between(start, sides[0], sides[1])
    answers = (_repeats(sides, rule, causes, found), _equals(found), _replays(sides[:2], found))
    return RunComparison(
        reference=sides[0].name,
        other=sides[1].name,
        reference_folder=sides[0].folder,
        other_folder=sides[1].folder,
        verdict=found.verdict,
        headline=found.headline,
        metrics=found.metrics,
        parameters=found.parameters,
        first=found.first,
        answers=answers,
        causes=causes,
        global_batch=(sides[0].measured.global_batch, sides[1].measured.global_batch),
        findings=tuple(f"{side.name}: {text}" for side in sides[:2] for text in side.measured.findings),
        not_compared=(*missing, *(f"{side.name}: {text}" for side in sides[:2] for text in side.measured.problems)),
    )


def read_side(start: Path, word: str, runs: str | None, steps: Steps, metrics: Sequence[str]) -> Side:
    """Return the values that a run measured in these steps. `metrics` are names; empty for all metrics.

    Raises:
        RunNotFound, RecordInvalid, UsageError: the run cannot be found or read.
    """
    run = find_run(start, word, runs=runs)
    measured = read_measured(run.folder)
    kept = tuple(one for one in steps.of(measured.series) if not metrics or one.name in metrics)
    cut = Measured(
        **{**vars(measured), "series": kept, "parameters": steps.of_hashes(measured.parameters)},
    )
    return Side(
        name=run.manifest.run,
        folder=run.folder.path,
        measured=cut,
        ranks=run.manifest.nodes * run.manifest.nproc_per_node,
    )


def _not_comparable(reference: Side, other: Side) -> NotComparable:
    names = [sorted({one.name for one in side.measured.series}) for side in (reference, other)]
    why = "\n".join(
        f"`{side.name}` has {', '.join(found[:8]) if found else 'no metrics'}"
        for side, found in zip((reference, other), names, strict=True)
    )
    return NotComparable(
        f"`{reference.name}` and `{other.name}` have no metric with the same steps", why=why, hint=HOW_RECORDED
    )


def causes_between(start: Path, reference: Side, other: Side) -> tuple[tuple[Cause, ...], tuple[str, ...]]:
    """Return the differences between two runs, the most likely cause first, and what could not be compared."""
    changes, missing = _changes(start, reference, other)
    switches = different_switches(reference.measured.effective, other.measured.effective)
    left, right = reference.measured.global_batch, other.measured.global_batch
    if left is not None and right is not None and left != right:
        changes = (*changes, change_of("run.global-batch", left, right, "info"))
    return rank_causes(changes, switches), missing


def _changes(start: Path, reference: Side, other: Side) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """Return the differences between the environments of two runs, and what could not be compared."""
    try:
        # `diff` gets two run folders, so it does not start git and needs no environment variables.
        found = diff(str(reference.folder), str(other.folder), project=start, environ={})
    except HpcenvError as error:
        return (), (f"the environments of the runs: {error.what}",)
    return found.changes, found.not_compared


# -- the results --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The comparison of everything that two runs have in common."""

    metrics: tuple[MetricComparison, ...]
    parameters: ParameterComparison
    level: Nearness | None

    @property
    def incomplete(self) -> tuple[MetricComparison, ...]:
        return tuple(one for one in self.metrics if one.judged and not one.complete)

    @property
    def verdict(self) -> Nearness:
        level = self.level or "differs"
        if level != "differs" and self.incomplete:
            return "differs"
        return "within" if level == "equal" and self.parameters.same is False else level

    @property
    def first(self) -> Divergence | None:
        found = [one.first for one in self.metrics if one.judged and one.first is not None]
        found += [self.parameters.first] if self.parameters.first is not None else []
        return min(found, key=lambda one: one.step, default=None)

    @property
    def headline(self) -> str:
        pairs = sum(one.compared for one in self.metrics if one.judged)
        if self.level == "differs":
            beyond = [one.first_beyond for one in self.metrics if one.judged and one.first_beyond is not None]
            first = min(beyond, key=lambda one: one.step)
            return f"differs: {first.name} is beyond the tolerance from step {first.step} on"
        if self.incomplete:
            one = self.incomplete[0]
            word = "equal to the last bit" if self.level == "equal" else "within the tolerance"
            return (
                f"differs: not the same steps; {one.name} is {word} in the {one.compared} values that both have,"
                f" {one.only_reference} are only in the reference, {one.only_other} only in the other run"
            )
        if self.level == "equal" and self.parameters.same is False:
            first_weights = self.parameters.first
            step = 0 if first_weights is None else first_weights.step
            return f"losses equal to the last bit, weights differ from step {step} on"
        if self.level == "equal":
            weights = ", weights too" if self.parameters.same else ", weights not compared"
            return f"equal to the last bit: {pairs} values{weights}"
        return f"within the tolerance, not equal: {pairs} values"


def _compare_measured(reference: Side, other: Side, tolerance: Tolerance) -> _Found:
    same_ranks = reference.ranks == other.ranks
    metrics = comparison.compare_metrics(
        reference.measured.series, other.measured.series, tolerance, same_ranks=same_ranks
    )
    parameters = comparison.compare_parameters(reference.measured.parameters, other.measured.parameters)
    return _Found(metrics=metrics, parameters=parameters, level=comparison.overall(metrics))


# -- the three questions ------------------------------------------------------------------

_WORDS: dict[Nearness, SameAnswer] = {"equal": "yes", "within": "within", "differs": "no"}


def _equals(found: _Found) -> Answered:
    return Answered(question="equals-reference", answer=_WORDS[found.verdict], text=found.headline)


def _repeats(sides: Sequence[Side], tolerance: Tolerance, causes: Sequence[Cause], found: _Found) -> Answered:
    """Answer whether the run gives the same results again here.

    Further runs show this. Without further runs, the reference shows it, if nothing differs between the two runs.
    """
    question: Question = "repeats-here"
    if len(sides) == 2:
        if any(cause.likelihood != "unlikely" for cause in causes):
            text = f"not asked: submit {sides[1].name} once more, and name the new run as the third run"
            return Answered(question=question, answer="not-asked", text=text)
        text = f"the runs have no difference that is known to change results: {found.headline}"
        return Answered(question=question, answer=_WORDS[found.verdict], text=text)
    others = [(side, _compare_measured(sides[1], side, tolerance)) for side in sides[2:]]
    unknown = [side.name for side, one in others if one.level is None]
    if unknown:
        text = f"{', '.join(unknown)} has no metric in common with {sides[1].name}"
        return Answered(question=question, answer="unknown", text=text)
    side, worst = max(others, key=lambda pair: comparison.LEVELS.index(pair[1].verdict))
    text = f"{sides[1].name} against {side.name}: {worst.headline}"
    return Answered(question=question, answer=_WORDS[worst.verdict], text=text)


def _replays(sides: Sequence[Side], found: _Found) -> Answered:
    """Answer whether a restart gives the same results again.

    The answer comes from steps that a run computed twice. Without such steps, the answer comes from an equal run
    without restart.
    """
    question: Question = "restart-replays"
    restarted = [side for side in sides if len(side.measured.starts) > 1]
    if not restarted:
        return Answered(question=question, answer="not-asked", text="not asked: no run was started again")
    counted, first = 0, None
    for side in restarted:
        for count, divergence in _replayed(side.measured.starts):
            counted += count
            if first is None and divergence is not None:
                first = (side, divergence)
    if first is not None:
        side, pair = first
        text = f"{side.name}: step {pair.step} of {pair.name} gave {pair.reference}, and {pair.value} after the restart"
        return Answered(question=question, answer="no", text=text)
    if counted:
        text = f"{counted} values were computed again after a restart, equal to the last bit"
        return Answered(question=question, answer="yes", text=text)
    if len(restarted) < len(sides) and found.verdict == "equal":
        text = f"the steps of {restarted[0].name} after its restart are equal to the steps of the run without a restart"
        return Answered(question=question, answer="yes", text=text)
    text = "no step was computed twice, and there is no equal run without a restart"
    return Answered(question=question, answer="unknown", text=text)


def _replayed(starts: Sequence[Start]) -> Iterator[tuple[int, Divergence | None]]:
    """For each pair of starts, yield the number of values that both computed, and the first value that differs."""
    for number, later in enumerate(starts):
        for earlier in starts[:number]:
            metrics = comparison.compare_metrics(earlier.series, later.series, Tolerance(), same_ranks=True)
            of_ranks = [one for one in metrics if one.source in OF_RANKS and one.judged]
            parameters = comparison.compare_parameters(earlier.parameters, later.parameters)
            firsts = (*(one.first for one in of_ranks), parameters.first)
            differing = [first for first in firsts if first is not None]
            count = sum(one.compared for one in of_ranks) + parameters.compared
            yield count, min(differing, key=lambda pair: pair.step, default=None)
