"""The report as one HTML file. It needs no scripts, no fonts, no other files and no network. Pure. Runs on: LOGIN NODE.

All texts are escaped, and control characters are shown as escapes. The content security policy of the page forbids
scripts and loading. So a hostile text in a record could not run or send data, even if the escaping had an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from hpcenv.judge.verdict_table import shorten
from hpcenv.reproduction import compare_text, plot, use_pictures
from hpcenv.reproduction.causes import Cause
from hpcenv.reproduction.compare import RunComparison
from hpcenv.reproduction.run_page import PlotContent, RunPage
from hpcenv.text import visible
from hpcenv.version import VERSION

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_CHANGES = 12

_STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1a1a1a; --soft: #5c5c5c; --line: #d5d5d5; --panel: #f5f5f4;
  --a: #0b5cad; --b: #b34700; --mark: #9b1c1c; --good: #14642f; --fair: #7a5200; --bad: #9b1c1c; }
@media (prefers-color-scheme: dark) { :root { --bg: #16181b; --fg: #e6e6e6; --soft: #a8a8a8; --line: #3b3f45;
  --panel: #1f2226; --a: #7ab8ff; --b: #ffab70; --mark: #ff9c9c; --good: #7fd99b; --fair: #f0c060; --bad: #ff9c9c; } }
* { box-sizing: border-box; }
body { background: var(--bg); color: var(--fg); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem;
  padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; margin: .2rem 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.verdict { border-left: .4rem solid var(--soft); background: var(--panel); padding: .7rem 1rem; margin: 1rem 0; }
.verdict strong { font-size: 1.2rem; }
.equal { border-color: var(--good); } .equal strong { color: var(--good); }
.within { border-color: var(--fair); } .within strong { color: var(--fair); }
.differs { border-color: var(--bad); } .differs strong { color: var(--bad); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
caption { text-align: left; color: var(--soft); padding: .3rem 0; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); }
th, .wide td { overflow-wrap: break-word; } .wide td.long { overflow-wrap: anywhere; } figure { margin: 0; }
code, pre { font: .85rem/1.45 ui-monospace, monospace; }
pre { background: var(--panel); padding: .7rem; white-space: pre-wrap; }
pre span { display: inline-block; max-width: 100%; }
svg { width: 100%; height: auto; font: 13px system-ui, sans-serif; } svg text { fill: var(--fg); stroke: var(--bg);
  stroke-width: 4px; paint-order: stroke; }
svg .grid { stroke: var(--line); } svg .axis { stroke: var(--soft); }
svg .curve0 { fill: none; stroke: var(--a); stroke-width: 2; }
svg .curve1 { fill: none; stroke: var(--b); stroke-width: 2; stroke-dasharray: 7 4; }
svg circle.curve0 { fill: var(--a); } svg circle.curve1 { fill: var(--b); }
svg .mark { stroke: var(--mark); stroke-width: 1.5; stroke-dasharray: 2 3; } svg .mark-text { fill: var(--mark); }
svg .span { fill: var(--a); } footer { color: var(--soft); margin-top: 2rem; font-size: .85rem; }
@media (max-width: 32rem) { svg { font-size: 22px; } table { font-size: .75rem; } td, th { padding-right: .4rem; } }
@media print { body { max-width: none; padding: 0; font-size: 11pt; } summary { display: none; }
  details::details-content { content-visibility: visible; block-size: auto; }
  figure, .wide, tr, pre { break-inside: avoid; } h2 { break-after: avoid; } }
"""


def render(page: RunPage) -> str:
    """Return the page."""
    body = "\n".join(_body(page))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{_text(page.title)}</title>\n<style>{_STYLE}{use_pictures.STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _body(page: RunPage) -> Iterator[str]:
    yield f"<header><h1>{_text(page.title)}</h1></header><main>"
    yield f'<div class="verdict {page.verdict}" role="status"><strong>{_text(page.headline)}</strong></div>'
    yield _pairs("Summary", page.summary)
    if page.answers:
        yield "<h2>Three questions</h2>"
        yield _pairs("", page.answers)
    if page.plots:
        yield "<h2>Curves</h2>"
        for number, one in enumerate(page.plots):
            yield from _plot(one, number)
    if page.use is not None:
        yield "<h2>Use over time</h2>"
        yield from use_pictures.pictures(page.use)
    if page.comparison is not None:
        yield from _comparison(page.comparison)
        yield "<h2>The first operation that differs</h2>"
        yield f"<pre>{_text_lines(page.explained or ('unknown',))}</pre>"
    yield "<h2>Nodes</h2>"
    yield _table("What each node found on itself", page.nodes)
    yield "<h2>Timeline</h2>"
    yield plot.timeline(page.spans, key="times")
    yield "<h2>Run it again</h2>"
    yield f"<pre>{_command_lines(page.again)}</pre>"
    yield "<h2>Checklist for a paper</h2>"
    yield _pairs("", [(question, answer or "not recorded") for question, answer in page.checklist])
    if page.notes:
        yield "<h2>What could not be read, and what the ranks report</h2><ul>"
        yield from (f"<li>{_text(note)}</li>" for note in page.notes[:50])
        yield "</ul>"
    yield f"</main><footer>Written by hpcenv {VERSION}.</footer>"


def _plot(one: PlotContent, number: int) -> Iterator[str]:
    yield f"<figure>{plot.curves(one.title, one.curves, key=f'plot{number}', mark=one.mark)}"
    yield f"<figcaption>{_text(one.title)}</figcaption></figure>"
    if one.gaps:
        title = f"Difference of {one.title}, mean of the ranks"
        yield f"<figure>{plot.logarithmic(title, one.gaps, key=f'gap{number}', mark=one.mark)}"
        yield f"<figcaption>{_text(title)}; the tolerance is {_text(one.rule)}</figcaption></figure>"
    yield "<details><summary>Exact values</summary>"
    yield _table(f"{one.title}: both ends, and around the first difference", one.rows)
    yield "</details>"


def _comparison(found: RunComparison) -> Iterator[str]:
    yield "<h2>Results</h2>"
    yield _table("Metrics of both runs", compare_text.metric_rows(found.metrics))
    yield f"<p>{_text(' '.join(compare_text.parameter_lines(found)))}</p>"
    if found.first is not None:
        yield f"<pre>{_text_lines(tuple(compare_text.divergence_lines(found.first)))}</pre>"
    yield "<h2>Differences between the runs</h2>"
    if not found.causes:
        yield "<p>None that is recorded.</p>"
    else:
        yield f"<p>{compare_text.meaning_of_causes(found).capitalize()}.</p><ol>"
        yield from (_cause(cause, explain=found.verdict != "equal") for cause in found.causes)
        yield "</ol>"
    if found.not_compared:
        yield "<h2>Not compared</h2><ul>"
        yield from (f"<li>{_text(text)}</li>" for text in found.not_compared[:50])
        yield "</ul>"


def _cause(cause: Cause, *, explain: bool) -> str:
    rows = [("field", "reference", "run"), *((f, shorten(a), shorten(b)) for f, a, b in cause.changes[:_CHANGES])]
    more = len(cause.changes) - _CHANGES
    tail = f"<p>and {more} more</p>" if more > 0 else ""
    head = f"<strong>{_text(cause.group)}</strong>{_text(compare_text.how_it_changes(cause)) if explain else ''}"
    return f"<li>{head}{_table(cause.group, rows)}{tail}</li>"


def _pairs(caption: str, pairs: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f'<tr><th scope="row">{_text(name)}</th><td>{_text(value)}</td></tr>' for name, value in pairs)
    return f"<table>{f'<caption>{_text(caption)}</caption>' if caption else ''}{rows}</table>"


def _table(caption: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a table in a box with its own scroll bar. The first row is the header."""
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in rows[0])
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[1:])
    label = escape(visible(caption), quote=True)
    return (
        f'<div class="wide" role="region" aria-label="{label}" tabindex="0"><table><caption>{label}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(cell: str) -> str:
    """Return a table cell. Only long words may be broken, so that a table fits on a phone and on paper."""
    long = any(len(word) > _WORD for word in cell.split())
    return f"<td{' class=long' if long else ''}>{_text(cell)}</td>"


_LONGEST, _WORD = 2000, 14


def _text(text: str) -> str:
    shown = visible(text)
    return escape(shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}...", quote=True)


def _text_lines(lines: Sequence[str]) -> str:
    return "\n".join(_text(line) for line in lines)


def _command_lines(lines: Sequence[str]) -> str:
    """Return command lines that wrap only between words.

    On paper, a `--` at the end of a line would look like a word.
    """
    return "\n".join(" ".join(f"<span>{_text(word)}</span>" for word in line.split(" ")) for line in lines)
