"""Curves of a metric, and the timeline of a run, as SVG inside an HTML page. Pure. Runs on: LOGIN NODE.

No library is used. Two curves, axes and a mark need little code, the bytes are the same every time, and a screen reader
gets a title and a description. The colours are CSS variables of the page, for a light and a dark theme. The curves also
differ by their dashes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from hpcenv.text import visible

_WIDTH, _HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 12, 34, 40


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One curve: a name, and its points in ascending order of the steps."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Span:
    """One part of a timeline: its name, its begin and its end, in seconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A linear scale: it maps numbers to coordinates in the picture."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Return the coordinate of a value."""
        width = self.high - self.low
        return self.start + (self.end - self.start) * ((value - self.low) / width if width else 0.5)

    def ticks(self, most: int) -> tuple[float, ...]:
        """Return round numbers between both ends."""
        width = self.high - self.low
        if width < 1e-300 or not math.isfinite(width):
            return (self.low,)
        raw = width / most
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
        first = math.ceil(self.low / step)
        return tuple((first + n) * step for n in range(most + 2) if (first + n) * step <= self.high + step * 1e-9)


def _number(value: float) -> str:
    return f"{value:.4g}" if value else "0"


def curves(
    title: str,
    found: Sequence[Curve],
    *,
    key: str,
    mark: int | None = None,
    label: Callable[[float], str] = _number,
) -> str:
    """Return a picture of one or two curves.

    Args:
        title: name of the metric.
        key: text that makes the ids of this picture unique in the page.
        mark: the step of the first difference; None without a difference.
        label: function that returns a value as text.
    """
    points = [(s, v) for one in found for s, v in zip(one.steps, one.values, strict=True) if math.isfinite(v)]
    if not points:
        return f"<p>{shown_text(title)}: no finite value to draw.</p>"
    across = Scale(low=min(s for s, _ in points), high=max(s for s, _ in points), start=_LEFT, end=_WIDTH - _RIGHT)
    lowest, highest = min(v for _, v in points), max(v for _, v in points)
    margin = (highest - lowest) * 0.04
    up = Scale(low=lowest - margin, high=highest + margin, start=_HEIGHT - _BOTTOM, end=_TOP)
    body = [*_axes(across, up, label), *_mark(mark, across), *_lines(found, across, up), *_legend(found)]
    return svg(key, title, _described(title, found, mark, label), _HEIGHT, body)


def logarithmic(title: str, found: Sequence[Curve], *, key: str, mark: int | None = None) -> str:
    """Return a picture of values that are not negative, on a logarithmic axis. 0 is drawn below the smallest power."""
    powers = [math.log10(v) for one in found for v in one.values if 0 < v < math.inf]
    zero = math.floor(min(powers, default=0.0)) - 1.0

    def label(power: float) -> str:
        return "0" if power <= zero else f"{10.0 ** min(power, 308.0):.0e}"

    placed = (replace(one, values=tuple(zero if v == 0 else math.log10(v) for v in one.values)) for one in found)
    return curves(title, tuple(placed), key=key, mark=mark, label=label)


def _described(title: str, found: Sequence[Curve], mark: int | None, label: Callable[[float], str]) -> str:
    parts = []
    for one in found:
        finite = [value for value in one.values if math.isfinite(value)]
        if finite:
            span = f"steps {one.steps[0]} to {one.steps[-1]}"
            parts.append(f"{one.name}: {span}, from {label(one.values[0])} to {label(one.values[-1])}")
    text = f"{title} by step. " + ". ".join(parts) + "."
    return text + (f" The first difference is at step {mark}." if mark is not None else "")


def svg(key: str, title: str, description: str, height: int, body: Sequence[str]) -> str:
    """Return a picture with a title and a description for screen readers, and with ids that `key` makes unique."""
    return (
        f'<svg role="img" aria-labelledby="{key}-t {key}-d" viewBox="0 0 {_WIDTH} {height}">'
        f'<title id="{key}-t">{shown_text(title)}</title><desc id="{key}-d">{shown_text(description)}</desc>'
        + "".join(body)
        + "</svg>"
    )


def _axes(across: Scale, up: Scale, label: Callable[[float], str]) -> Iterator[str]:
    for value in up.ticks(5):
        y = up.place(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label(value)}</text>'
    for value in across.ticks(8):
        if value == int(value):
            x = across.place(value)
            yield f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{int(value)}</text>'
    bottom = _HEIGHT - _BOTTOM
    yield f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    yield f'<text x="{(_LEFT + _WIDTH) / 2:.0f}" y="{_HEIGHT - 4}" text-anchor="middle">step</text>'


def _mark(mark: int | None, across: Scale) -> Iterator[str]:
    if mark is None or not across.low <= mark <= across.high:
        return
    x = across.place(mark)
    yield f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
    anchor, shift = ("start", 5) if x < _WIDTH * 0.6 else ("end", -5)
    yield (
        f'<text class="mark-text" x="{x + shift:.1f}" y="{_HEIGHT - _BOTTOM - 8}" text-anchor="{anchor}">'
        f"first difference: step {mark}</text>"
    )


def _lines(found: Sequence[Curve], across: Scale, up: Scale) -> Iterator[str]:
    for number, one in enumerate(found[:2]):
        for part in _parts(one):
            places = [(across.place(step), up.place(value)) for step, value in part]
            text = " ".join(f"{x:.1f},{y:.1f}" for x, y in _reduced(places))
            if len(part) == 1:
                yield f'<circle class="curve{number}" cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="2.5"/>'
            else:
                yield f'<polyline class="curve{number}" points="{text}"/>'


def _parts(curve: Curve) -> Iterator[list[tuple[int, float]]]:
    """Yield the parts of a curve. A value that is not finite ends a part."""
    part: list[tuple[int, float]] = []
    for step, value in zip(curve.steps, curve.values, strict=True):
        if math.isfinite(value):
            part.append((step, value))
        elif part:
            yield part
            part = []
    if part:
        yield part


def _reduced(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most four points for each column of pixels: the first, lowest, highest and last point."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for place in places:
        columns.setdefault(int(place[0]), []).append(place)
    kept: list[tuple[float, float]] = []
    for column in columns.values():
        few = {0, len(column) - 1, *(column.index(pick(column, key=lambda one: one[1])) for pick in (min, max))}
        kept += [column[n] for n in sorted(few)]
    return kept


def _legend(found: Sequence[Curve]) -> Iterator[str]:
    # The legend is one line above the curves, so that it hides no curve.
    y = _TOP - 22
    for number, one in enumerate(found[:2]):
        x = _LEFT + 330 * number
        yield f'<line class="curve{number}" x1="{x}" x2="{x + 34}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{x + 42}" y="{y + 4}">{shown_text(one.name[:28])}</text>'


def timeline(spans: Sequence[Span], *, key: str) -> str:
    """Return a picture of the parts of a run over time. `spans` must be in order."""
    known = [one for one in spans if math.isfinite(one.begin) and math.isfinite(one.end) and one.end >= one.begin]
    if not known:
        return "<p>No times are recorded.</p>"
    start, end = min(one.begin for one in known), max(one.end for one in known)
    across = Scale(low=0.0, high=end - start, start=150, end=_WIDTH - 90)
    height = 24 * len(known) + 10
    body = []
    for number, one in enumerate(known):
        y, left, right = 24 * number + 6, across.place(one.begin - start), across.place(one.end - start)
        body.append(f'<text x="142" y="{y + 13}" text-anchor="end">{shown_text(one.name[:22])}</text>')
        body.append(f'<rect class="span" x="{left:.1f}" y="{y}" width="{max(1.0, right - left):.1f}" height="16"/>')
        body.append(f'<text x="{right + 6:.1f}" y="{y + 13}">{duration(one.end - one.begin)}</text>')
    told = "; ".join(f"{one.name}: {duration(one.end - one.begin)}" for one in known)
    return svg(key, "Timeline", f"{told}.", height, body)


def duration(seconds: float) -> str:
    """Return a duration as text, in s, min or h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def shown_text(text: str) -> str:
    """Return a text that is safe in XML, because control characters (which XML forbids) and markup are escaped."""
    return escape(visible(text), quote=True)
