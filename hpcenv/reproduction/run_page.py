"""The content of a report for people, for the HTML and the Markdown page. Pure. Runs on: LOGIN NODE."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcenv.locking.difference import show
from hpcenv.records.manifest import Value
from hpcenv.reproduction import compare_text
from hpcenv.reproduction.closeness import Tolerance, same_bits
from hpcenv.reproduction.compare import RunComparison
from hpcenv.reproduction.comparison import means_of
from hpcenv.reproduction.measured import OF_RANKS, Measured
from hpcenv.reproduction.plot import Curve, Span, duration
from hpcenv.reproduction.run_record import RunRecord
from hpcenv.reproduction.series import Series
from hpcenv.reproduction.use_over_time import UseOverTime
from hpcenv.text import plural

# The largest numbers of plots in a page, and of rows in a table of values.
_PLOTS, _ROWS = 6, 40
_HARDWARE = ("host.machine", "host.gpu-models", "host.gpu-count", "host.driver-version", "host.cpus", "host.kernel")


@dataclass(frozen=True, kw_only=True)
class PlotContent:
    """One plot: its curves, the first step that differs, and exact values around this step and at both ends.

    Attributes:
        gaps: two curves: the difference of the two runs at each step, and the largest difference that the tolerance
            allows. Empty without a second run.
        rule: the tolerance, as text.
    """

    title: str
    curves: tuple[Curve, ...]
    mark: int | None
    rows: tuple[tuple[str, ...], ...]
    gaps: tuple[Curve, ...] = ()
    rule: str = ""


@dataclass(frozen=True, kw_only=True)
class RunPage:
    """The content of a report.

    Attributes:
        verdict: the word from which the page chooses its colours: `equal`, `within`, `differs`, or `none`
            without a comparison.
        summary: name and value of the facts that a reader needs first.
        explained: the lines that `compare --explain-op` prints; empty without a comparison.
        nodes: the header of a table, and one row for each node.
        checklist: question and answer of a paper's checklist. An answer is empty if it is not known.
        use: what the run used over time; None without samples.
    """

    title: str
    verdict: str
    headline: str
    summary: tuple[tuple[str, str], ...]
    answers: tuple[tuple[str, str], ...]
    plots: tuple[PlotContent, ...]
    comparison: RunComparison | None
    explained: tuple[str, ...]
    nodes: tuple[tuple[str, ...], ...]
    spans: tuple[Span, ...]
    again: tuple[str, ...]
    checklist: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    use: UseOverTime | None = None


def make_page(
    record: RunRecord,
    measured: Measured,
    *,
    other: Measured | None = None,
    other_name: str = "",
    comparison: RunComparison | None = None,
    origin: Sequence[tuple[str, str]] = (),
    explained: Sequence[str] = (),
    use: UseOverTime | None = None,
) -> RunPage:
    """Return the content of the report of a run.

    Args:
        record, measured: record and measured values of the run. In a comparison, this run is not the reference.
        other, other_name: measured values and name of the reference, for a comparison.
        comparison: the comparison of both runs with the default tolerance; None for a report of one run.
        origin: further rows of the summary, see `report_origin.py`.
        explained: the lines that `compare --explain-op` prints.
        use: what the run used over time.
    """
    return RunPage(
        title=record.run if comparison is None else f"{record.run} against {other_name}",
        verdict="none" if comparison is None else comparison.verdict,
        headline=f"{record.run}: {record.outcome}" if comparison is None else comparison.headline,
        summary=(*_summary(record), *origin),
        answers=()
        if comparison is None
        else tuple((compare_text.QUESTIONS[one.question], one.text) for one in comparison.answers),
        plots=tuple(_plots(record.run, measured, other, other_name, comparison)),
        comparison=comparison,
        explained=tuple(explained),
        nodes=tuple(_node_rows(record)),
        spans=tuple(_spans(record)),
        again=tuple(_again(record)),
        checklist=tuple(_checklist(record)),
        notes=(*measured.findings, *record.notes),
        use=use,
    )


def _summary(record: RunRecord) -> Iterator[tuple[str, str]]:
    shape = record.shape
    ranks = f" = {shape.world_size} ranks" if shape.nodes > 1 else ""
    gpus = f", {shape.gpus_per_node} GPUs on each" if shape.gpus_per_node else ", no GPU"
    yield "Shape", f"{plural(shape.nodes, 'node')}, {plural(shape.nproc_per_node, 'rank')} on each{ranks}{gpus}"
    yield "Outcome", record.outcome
    yield "Lockfile", "cannot be read" if record.lock is None else record.lock.fingerprint
    yield "Image", "unknown" if record.lock is None else record.lock.manifest_digest or record.lock.image
    yield "Code", _code(record)
    yield "Command", shlex.join((*record.program, *record.args))


def _code(record: RunRecord) -> str:
    if not record.code.commit:
        return f"no commit; digest of the files {record.code.digest[:12] or 'unknown'}"
    return f"commit {record.code.commit[:12]}" + (", with changes that are not committed" if record.code.dirty else "")


# -- plots --------------------------------------------------------------------------------


def _plots(
    name: str, measured: Measured, other: Measured | None, other_name: str, comparison: RunComparison | None
) -> Iterator[PlotContent]:
    own = means_of(measured.series)
    theirs = {} if other is None else means_of(other.series)
    compared = {} if comparison is None else {(one.source, one.name): one for one in comparison.metrics}
    keys = sorted(own.keys() & theirs.keys() if other is not None else own.keys(), key=_order)
    for key in keys[:_PLOTS]:
        pair = [(other_name, theirs[key])] if key in theirs else []
        pair.append((name, own[key]))
        metric = compared.get(key)
        mark = None if metric is None else metric.first
        yield PlotContent(
            title=f"{key[1]} ({key[0]})",
            curves=tuple(Curve(name=label, steps=one.steps, values=one.values) for label, one in pair),
            mark=None if mark is None else mark.step,
            rows=tuple(_value_rows(pair, None if mark is None else mark.step)),
            gaps=() if metric is None or len(pair) < 2 else _gaps(pair[0][1], own[key], metric.dtype),
            rule="" if metric is None else metric.rule,
        )


def _gaps(reference: Series, run: Series, dtype: str) -> tuple[Curve, ...]:
    """Return the difference between a run and its reference at their common steps, and the allowed difference."""
    theirs, values = (dict(zip(one.steps, one.values, strict=True)) for one in (reference, run))
    steps = tuple(step for step in run.steps if step in theirs)
    if not steps:
        return ()
    rtol, atol = Tolerance().of(dtype)
    gaps = tuple(0.0 if same_bits(theirs[n], values[n]) else abs(values[n] - theirs[n]) for n in steps)
    allowed = tuple(atol + rtol * abs(theirs[n]) for n in steps)
    return (
        Curve(name="difference", steps=steps, values=gaps),
        Curve(name="tolerance", steps=steps, values=allowed),
    )


def _order(key: tuple[str, str]) -> tuple[int, str, str]:
    return OF_RANKS.index(key[0]) if key[0] in OF_RANKS else len(OF_RANKS), *key


def _value_rows(pair: Sequence[tuple[str, Series]], mark: int | None) -> Iterator[tuple[str, ...]]:
    """Yield a header and rows of values for the first steps, the last steps and the steps at the first difference."""
    yield ("step", *(label for label, _ in pair))
    values = [dict(zip(one.steps, one.values, strict=True)) for _, one in pair]
    steps = sorted(set().union(*values))
    near = [] if mark is None else [n for n, step in enumerate(steps) if step == mark]
    chosen = {*range(min(5, len(steps))), *range(max(0, len(steps) - 5), len(steps))}
    for place in near:
        chosen |= set(range(max(0, place - 5), min(len(steps), place + 6)))
    for number in sorted(chosen)[:_ROWS]:
        yield (str(steps[number]), *(_value(side.get(steps[number])) for side in values))


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value!r} ({value.hex()})"


# -- nodes, times, how to run it again ----------------------------------------------------


def _node_rows(record: RunRecord) -> Iterator[tuple[str, ...]]:
    known = [name for name in _HARDWARE if any(name in node.values for node in record.nodes)]
    yield ("node", *(name.removeprefix("host.") for name in known))
    for node in record.nodes:
        yield (node.node, *(_shown(node.values.get(name)) for name in known))


def _shown(value: Value | None) -> str:
    """Return a value as text. In a list, equal parts are joined to `COUNT x PART`."""
    if isinstance(value, tuple):
        counts = Counter(value)
        return ", ".join(f"{count} x {part}" if count > 1 else part for part, count in counts.items())
    return "unknown" if value is None else show(value)


def _spans(record: RunRecord) -> Iterator[Span]:
    before: float | None = record.submitted
    for one in record.attempts:
        label = f" {one.attempt}" if len(record.attempts) > 1 else ""
        if before is not None:
            yield Span(name=f"queue{label}", begin=before, end=one.began)
        launched = min((node.launched for node in one.exits), default=None)
        if launched is None:
            if one.ended is not None:
                yield Span(name=f"check{label}", begin=one.began, end=one.ended)
        else:
            yield Span(name=f"check{label}", begin=one.began, end=launched)
            yield Span(name=f"training{label}", begin=launched, end=max(node.ended for node in one.exits))
        before = one.ended


def _again(record: RunRecord) -> Iterator[str]:
    if record.command:
        yield shlex.join(record.command)
    yield f"hpcenv reproduce {shlex.quote(record.run)} --rung 3"


def _checklist(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield questions of papers' checklists (NeurIPS, ACM artifacts), with the answers that the record gives."""
    models = sorted({_shown(node.values.get("host.gpu-models")) for node in record.nodes} - {"unknown", "absent", ""})
    shape = record.shape
    yield "Type of compute", "CPU" if not shape.gpus_per_node else ", ".join(models)
    yield "Number of GPUs", str(shape.nodes * shape.gpus_per_node)
    trained = record.timings.training
    yield "Time of the training", "" if trained is None else duration(trained)
    energy = record.energy.joules
    yield "Energy", "" if energy is None else f"{energy / 3.6e6:.2f} kWh ({record.energy.source})"
    yield "Seeds", _seeds(record)
    profiles = {str(values.get("profile")) for values in record.determinism.values()}
    yield "Determinism", ", ".join(sorted(profiles)) if record.determinism else ""
    versions = {one.name: one.version for one in record.packages}
    named = [f"{name} {versions[name]}" for name in ("torch", "numpy", "transformers", "lightning") if name in versions]
    yield "Versions", f"{', '.join(named)}; {len(versions)} packages in the lockfile" if versions else ""
    yield "Environment", "" if record.lock is None else record.lock.fingerprint
    yield "Code", _code(record)
    yield "Data", "; ".join(f"{one.hub or one.name}: {one.compare} {one.state[:16]}..." for one in record.data)


def _seeds(record: RunRecord) -> str:
    seeds = sorted({str(values["seed"]) for values in record.determinism.values() if values.get("seed") is not None})
    typed = [
        f"{word} {after}"
        for word, after in zip(record.args, (*record.args[1:], ""), strict=False)
        if "seed" in word.lower() and "=" not in word
    ]
    typed += [word for word in record.args if "seed" in word.lower() and "=" in word]
    return ", ".join([*(f"base seed {seed}" for seed in seeds), *typed])
