"""The output of `hpcenv usage`. Pure, but the text depends on the local time zone. Runs on: LOGIN NODE."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hpcenv.reproduction.usage import Usage, UsageRow
from hpcenv.text import WIDTH, plural, visible, wrap

_ROWS = 20
_HEADER = ("RUNS", "ASKED", "USED", "IDLE", "UNKNOWN", "KWH", "FAILED", "LOST")


def usage_lines(usage: Usage) -> Iterator[str]:
    """Yield the lines of the output. A name that is longer than its column has a separate line."""
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(usage.since))
    yield f"GPU hours by {usage.by} since {since}"
    yield ""
    shown, total = usage.rows[:_ROWS], usage.total
    rows = [(usage.by.upper(), _HEADER), *((visible(row.name), _cells(row)) for row in (*shown, total))]
    widths = [max(len(cells[n]) for _, cells in rows) for n in range(len(_HEADER))]
    room = WIDTH - sum(widths) - 2 * len(widths)
    for name, cells in rows:
        numbers = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        if len(name) > room:
            yield name
        yield f"{name if len(name) <= room else '':{room}}{numbers}"
    if len(usage.rows) > _ROWS:
        yield f"{len(usage.rows) - _ROWS} more rows are in `all`; --json has them."
    yield ""
    for note in _notes(usage, total):
        yield wrap(note, first="- ")


def _cells(row: UsageRow) -> tuple[str, ...]:
    kwh = None if row.energy is None else row.energy / 3.6e6
    hours = (_number(value) for value in (row.asked, row.used, row.idle, row.unknown, kwh))
    return (str(row.runs), *hours, str(row.failed), _number(row.lost))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _notes(usage: Usage, total: UsageRow) -> Iterator[str]:
    yield "ASKED: the GPUs of a job times its hours. USED, IDLE: by the GPUs' use in its samples. UNKNOWN: no sample."
    yield (
        f"KWH: energy of the GPUs only, for {_number(total.energy_hours or 0.0)} of these hours: CPUs, memory, network "
        "and cooling are not in it."
    )
    yield "LOST: hours of failed runs after their last checkpoint (hpcenv.training, or the run's checkpoints folder)."
    if total.without_checkpoint:
        yield f"{plural(total.without_checkpoint, 'failed run')} not in LOST: no checkpoint is known."
    if total.without_hours:
        yield f"{plural(total.without_hours, 'run')} not in ASKED: the end or the number of GPUs is unknown."
    if total.gone:
        yield f"{plural(total.gone, 'job')} without a run folder: sacct says the hours asked, the rest is unknown."
    if usage.no_accounting:
        yield f"Runs whose folder is gone are missing: {visible(usage.no_accounting)}."
