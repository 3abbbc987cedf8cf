"""The pictures of what a run used, as HTML with SVG in it. Pure. Runs on: LOGIN NODE.

One picture shows all GPUs or ranks together: the line is their median, and the area reaches from the lowest to the
highest value. So a page for 512 GPUs is about as long as a page for one GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import chain, groupby
from statistics import median

from hpcenv.reproduction.plot import Scale, duration, shown_text, svg
from hpcenv.reproduction.use_over_time import COLUMNS, Track, UseOverTime

_WIDTH, _HEIGHT = 720, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 12, 12, 34
_MOST_SMALL = 32
_LEVELS = 8
_MOST_ROWS = 64

STYLE = """
svg .band { fill: var(--a); opacity: .25; stroke: none; } svg .median { fill: none; stroke: var(--a); stroke-width: 2; }
.small { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: .6rem; }
figure figcaption { font-size: .9rem; margin-top: .8rem; }
.small figure figcaption { font-size: .8rem; margin: 0; } .small svg { background: var(--panel); display: block; }
svg .heat { stroke: var(--a); fill: none; } svg .none { fill: var(--panel); }
@media print { main > figure svg { max-height: 17rem; }
  .small { grid-template-columns: repeat(4, 1fr); }
  svg .band, svg .heat, svg .none, .small svg {
  print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def pictures(use: UseOverTime) -> Iterator[str]:
    """Yield the parts of the page."""
    percent = 0.0, 100.0
    if max(len(use.use), len(use.step_time)) > 1:
        yield "<p>The line is the median of all GPUs or ranks; the area reaches from the least to the most.</p>"
    yield from _band("GPU use, percent", use.use, use.seconds, "use", "GPUs", percent)
    yield from _band("GPU memory, percent", use.memory, use.seconds, "memory", "GPUs", percent)
    yield from _band("Time of a step, seconds", use.step_time, use.seconds, "steps", "ranks", None)
    yield from _band("Waiting for data, percent of a step", use.waiting, use.seconds, "waiting", "ranks", percent)
    for track in use.loss:
        yield from _band(track.name, (track,), use.seconds, "loss", "", None)
    if len(use.use) <= _MOST_SMALL:
        yield from _small(use.use)
    else:
        rows = _rows(use.use, min)
        yield from _heat("GPU use, percent, the least of each row", rows, use.seconds, "heat-use", 100.0)
    if len(use.step_time) > _MOST_SMALL:
        most = 2 * median(_known(use.step_time) or [0.5])
        rows = _rows(use.step_time, max)
        yield from _heat("Time of a step, seconds, the most of each row", rows, use.seconds, "heat-steps", most)
    yield from (f"<p>{shown_text(text)}</p>" for text in use.unread[:5])


def _columns(tracks: Sequence[Track]) -> list[list[float]]:
    """Return the known values of each column."""
    columns = zip(*(track.values for track in tracks), strict=True)
    return [[value for value in values if value is not None and math.isfinite(value)] for values in columns]


def _known(tracks: Sequence[Track]) -> list[float]:
    return [*chain.from_iterable(_columns(tracks))]


def _axis(seconds: float) -> tuple[Scale, str, float]:
    """Return the time axis with its unit, and the seconds of one unit."""
    unit, size = ("h", 3600.0) if seconds > 7200 else ("min", 60.0) if seconds > 120 else ("s", 1.0)
    return Scale(low=0.0, high=max(seconds, 1e-9) / size, start=_LEFT, end=_WIDTH - _RIGHT), unit, size


def _time_ticks(across: Scale, unit: str, bottom: float) -> Iterator[str]:
    for value in across.ticks(5):
        x = across.place(value)
        anchor = "end" if x > _WIDTH - 60 else "middle"
        yield f'<text x="{x:.0f}" y="{bottom + 22:.0f}" text-anchor="{anchor}">{value:.4g} {unit}</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom:.0f}" y2="{bottom:.0f}"/>'


def _band(
    title: str, tracks: Sequence[Track], seconds: float, key: str, noun: str, limits: tuple[float, float] | None
) -> Iterator[str]:
    known = _known(tracks)
    if not known:
        return
    low, high = limits or (min(known), max(known))
    low = min(0.0, low) if noun else low
    across, unit, size = _axis(seconds)
    up = Scale(low=low, high=high if high > low else low + 1.0, start=_HEIGHT - _BOTTOM, end=_TOP)
    body = [*_levels(up), *_time_ticks(across, unit, _HEIGHT - _BOTTOM)]
    width = seconds / size / COLUMNS
    for part in _parts(tracks):
        xs = [across.place((column + 0.5) * width) for column, _ in part]
        rows = [(min(values), median(values), max(values)) for _, values in part]
        # A part of one column is drawn as a short horizontal line.
        xs, rows = ([xs[0] - 2, xs[0] + 2], rows * 2) if len(xs) == 1 else (xs, rows)
        least, middle, most = ([(x, up.place(row[n])) for x, row in zip(xs, rows, strict=True)] for n in range(3))
        if len(tracks) > 1:
            body.append(f'<polygon class="band" points="{_points([*least, *reversed(most)])}"/>')
        body.append(f'<polyline class="median" points="{_points(middle)}"/>')
    told = f"median {median(known):.3g}, from {min(known):.3g} to {max(known):.3g}"
    yield f"<figure>{_caption(title, told)}"
    yield f"{svg(f'use-{key}', title, f'{title} over {duration(seconds)}: {told}.', _HEIGHT, body)}</figure>"


def _caption(title: str, told: str) -> str:
    return f"<figcaption><strong>{shown_text(title)}</strong> ({shown_text(told)})</figcaption>"


def _levels(up: Scale) -> Iterator[str]:
    for value in up.ticks(3):
        y = up.place(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{f"{value:.4g}" if value else "0"}</text>'


def _parts(tracks: Sequence[Track]) -> Iterator[list[tuple[int, list[float]]]]:
    """Yield the columns with known values, in parts. A column without known values ends a part."""
    for known, part in groupby(enumerate(_columns(tracks)), key=lambda one: bool(one[1])):
        if known:
            yield list(part)


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.0f},{y:.1f}" for x, y in places)


def _small(tracks: Sequence[Track]) -> Iterator[str]:
    """Yield one small picture for each GPU."""
    yield '<h3>Use of each GPU</h3><div class="small">'
    for track in tracks:
        bars = "".join(
            f"M{column} 40V{40 - 0.4 * value:.1f}" for column, value in enumerate(track.values) if value is not None
        )
        known = _known([track])
        told = f"{track.name}: {f'{sum(known) / len(known):.0f} %' if known else 'unknown'}"
        label = escape(told, quote=True)
        yield f'<figure><svg role="img" aria-label="{label}" viewBox="0 0 {COLUMNS} 40" preserveAspectRatio="none">'
        yield f'<path class="heat" d="{bars}"/></svg><figcaption>{shown_text(told)}</figcaption></figure>'
    yield "</div>"


def _rows(tracks: Sequence[Track], worst: Callable[[list[float]], float]) -> list[Track]:
    """Return at most 64 rows, each for one or more GPUs or ranks. More rows would be thinner than a pixel."""
    size, rows = math.ceil(len(tracks) / _MOST_ROWS), []
    for first in range(0, len(tracks), size):
        part = tracks[first : first + size]
        name = part[0].name if len(part) == 1 else f"{part[0].name} to {part[-1].name}"
        rows.append(Track(name=name, values=tuple(worst(one) if one else None for one in _columns(part))))
    return rows


def _heat(title: str, tracks: Sequence[Track], seconds: float, key: str, most: float) -> Iterator[str]:
    """Yield a picture with one row for each track. A stronger colour means a higher value."""
    size = 7
    across, unit, _ = _axis(seconds)
    bottom, step = size * len(tracks) + _TOP, (across.end - across.start) / COLUMNS
    paths: dict[int, list[str]] = {}
    for row, track in enumerate(tracks):
        levels = [None if v is None else min(_LEVELS - 1, int(_LEVELS * v / most)) for v in track.values]
        for level, part in groupby(enumerate(levels), key=lambda one: one[1]):
            columns = [column for column, _ in part]
            if level is not None:
                x, y = _LEFT + columns[0] * step, _TOP + (row + 0.5) * size
                paths.setdefault(level, []).append(f"M{x:.1f} {y:.1f}h{step * len(columns):.1f}")
    area = f'x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - _RIGHT}" height="{size * len(tracks)}"'
    body = [f'<rect class="none" {area}/>', *_time_ticks(across, unit, bottom)]
    for level, lines in sorted(paths.items()):
        look = f'stroke-width="{size}" opacity="{(level + 1) / _LEVELS:.2f}"'
        body.append(f'<path class="heat" {look} d="{"".join(lines)}"/>')
    for row in range(0, len(tracks), max(1, len(tracks) // 8)):
        y = _TOP + (row + 0.5) * size + 4
        # The part of a row's name that is printed at the row: `n07` of `n07 GPU 1 to n07 GPU 4`, `8` of `rank 8 to rank
        # 15`.
        name = tracks[row].name.removeprefix("rank ").split(" ")[0]
        body.append(f'<text x="{_LEFT - 6}" y="{y:.0f}" text-anchor="end">{shown_text(name[-8:])}</text>')
    told = f"first row: {tracks[0].name}; strongest colour: {most:.3g} or more; grey: unknown"
    yield f"<figure>{_caption(title, told)}{svg(f'use-{key}', title, f'{title}; {told}.', int(bottom + _BOTTOM), body)}"
    yield "</figure>"
