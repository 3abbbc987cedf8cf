"""`hpcenv compare`: find out whether two runs gave the same results. Runs on: LOGIN NODE."""

from __future__ import annotations

from typing import Any

import click

from hpcenv.cli import _accept, _duration, _render
from hpcenv.cli._explain_op import ExplainWish, show
from hpcenv.errors import NotComparable, Status, UsageError
from hpcenv.reproduction import compare_text
from hpcenv.reproduction.compare import compare
from hpcenv.reproduction.seeds import SweepComparison

_STATUS = {"equal": 0, "within": Status.WITHIN_TOLERANCE, "differs": Status.RESULTS_DIFFER}


@click.command("compare")
@click.argument("reference")
@click.argument("run")
@click.argument("again", nargs=-1)
@click.option(
    "--steps", metavar="A:B", help="Compare only the steps from A to B; a single number N means the steps up to N."
)
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="Compare only this metric; can be repeated.")
@click.option(
    "--rtol",
    type=click.FloatRange(min=0),
    help="Relative tolerance. Default: the value of torch.testing for the type of the values; 0 if --atol is given.",
)
@click.option(
    "--atol",
    type=click.FloatRange(min=0),
    help="Absolute tolerance. Default: the value of torch.testing for the type of the values; 0 if --rtol is given.",
)
@click.option(
    "--ulp", type=click.IntRange(min=0), help="Tolerance in units in the last place, instead of --rtol and --atol."
)
@click.option("--explain-op", is_flag=True, help="Name the first operation of torch that differs, as described above.")
@click.option(
    "--trace-steps",
    metavar="A:B",
    help="With --explain-op: the steps to trace. Default: the steps after the last state that is equal in both runs.",
)
@_render.runs_option
@_accept.option
@click.option(
    "--timeout", metavar="TIME", callback=_duration.parse_seconds,
    help="With --explain-op: wait at most this long, for example 90 (seconds), 30m, 2h or 1d, and then end with "
    "exit status 124.",
)  # fmt: skip
@_render.json_option
def command(
    reference: str,
    run: str,
    again: tuple[str, ...],
    steps: str | None,
    metrics: tuple[str, ...],
    rtol: float | None,
    atol: float | None,
    ulp: int | None,
    explain_op: bool,
    trace_steps: str | None,
    runs: str | None,
    accept: str | None,
    timeout: float | None,
    as_json: bool,
) -> int:
    """Say whether RUN gave the same results as REFERENCE: losses, metrics and hashes of the weights.

    REFERENCE and RUN are run folders, run names or job ids. AGAIN are more runs like RUN, which show whether equal
    runs give equal results on this cluster. hpcenv names the first step that differs, with both values, and lists
    what differs between the runs, the most likely cause first. hpcenv ends with 0 if all values are equal to the last
    bit, 40 if they are within the tolerance, 41 if they differ, and 42 if nothing can be compared. Two sweeps over
    seeds are compared by the 95 % confidence intervals of their last values; exit status 40 then means that the two
    sweeps cannot be distinguished.

    --explain-op repeats a step of both runs, each in its own locked environment. The repetition begins at the last
    checkpoint that is equal in both runs; without such a checkpoint, it begins at the start. Then hpcenv names the
    first operation that differs, with its module, rank and likely causes. A run that has a trace (`submit
    --trace-steps`) is not repeated. With --explain-op, hpcenv ends with 41 if an operation differs, and with 42 if a
    trace is missing.
    """
    if explain_op:
        if again or steps or metrics or rtol is not None or atol is not None or ulp is not None:
            raise UsageError("`--explain-op` accepts only two runs and the option --trace-steps")
        return _explain_op(
            reference, run, runs=runs, trace_steps=trace_steps, accept=accept, timeout=timeout, as_json=as_json
        )
    for word, value in (("--trace-steps", trace_steps), ("--accept", accept), ("--timeout", timeout)):
        if value is not None:
            raise UsageError(f"`{word}` needs `--explain-op`")
    result = compare(
        reference,
        run,
        *again,
        project=_render.cwd(),
        runs_dir=runs,
        steps=steps,
        metric=metrics,
        rtol=rtol,
        atol=atol,
        ulp=ulp,
    )
    if isinstance(result, SweepComparison):
        return _show_seeds(result, as_json=as_json)
    if as_json:
        _render.verdict_on("compare", result, ok=result.verdict == "equal")
    else:
        _render.say(compare_text.render(result))
    return _STATUS[result.verdict]


def _explain_op(reference: str, run: str, **given: Any) -> int:
    return show(ExplainWish(reference=reference, run=run, **given))


_SEEDS = {
    "not-distinguishable": Status.WITHIN_TOLERANCE, "different": Status.RESULTS_DIFFER,
    "too-few-seeds": NotComparable.exit_status,
}  # fmt: skip


def _show_seeds(result: SweepComparison, *, as_json: bool) -> int:
    """Print the comparison of two sweeps over seeds; return the exit status."""
    if as_json:
        _render.verdict_on("compare", result, ok=result.worst == "not-distinguishable")
        return _SEEDS[result.worst]
    _render.say(f"{result.worst.replace('-', ' ')}: last values of the runs of {result.reference} and {result.other}")
    for one in result.metrics:
        pairs = " (pairs of the same values)" if one.paired else ""
        _render.say(f"  {one.name[:40]} ({one.source}){pairs}:")
        _render.say(f"    {one.verdict.replace('-', ' ')}: {one.text}")
    return _SEEDS[result.worst]
