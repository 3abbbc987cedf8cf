"""The report as Markdown, for a repository or an issue. Pure. Runs on: LOGIN NODE."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from hpcenv.judge.verdict_table import shorten
from hpcenv.reproduction import compare_text
from hpcenv.reproduction.compare import RunComparison
from hpcenv.reproduction.plot import duration
from hpcenv.reproduction.run_page import RunPage
from hpcenv.text import visible

_LONGEST = 500
# Characters with a meaning in Markdown. Characters with a meaning in HTML are replaced by entities elsewhere.
_SPECIAL = re.compile(r"([\\`*_{}\[\]#|!~])")


def render(page: RunPage) -> str:
    """Return the page as Markdown. Texts from records are escaped."""
    return "\n".join(_lines(page)) + "\n"


def _lines(page: RunPage) -> Iterator[str]:
    yield f"# {_text(page.title)}\n"
    yield f"**{_text(page.headline)}**\n"
    yield from _table((("", ""), *page.summary))
    if page.answers:
        yield "\n## Three questions\n"
        yield from (f"- {_text(question)} {_text(answer)}" for question, answer in page.answers)
    if page.comparison is not None:
        yield from _comparison(page.comparison)
        yield "\n## The first operation that differs\n"
        yield from (f"    {visible(line)}" for line in page.explained or ("unknown",))
    yield "\n## Nodes\n"
    yield from _table(page.nodes)
    yield "\n## Timeline\n"
    yield from (f"- {_text(one.name)}: {duration(one.end - one.begin)}" for one in page.spans)
    yield "\n## Run it again\n"
    yield from (f"    {visible(line)}" for line in page.again)
    yield "\n## Checklist for a paper\n"
    yield from _table((("", ""), *((question, answer or "not recorded") for question, answer in page.checklist)))
    if page.notes:
        yield "\n## What could not be read, and what the ranks report\n"
        yield from (f"- {_text(note)}" for note in page.notes[:50])


def _comparison(found: RunComparison) -> Iterator[str]:
    yield "\n## Results\n"
    yield from _table(compare_text.metric_rows(found.metrics))
    yield ""
    yield from (_text(line) for line in compare_text.parameter_lines(found))
    if found.first is not None:
        yield ""
        yield from (f"    {visible(line)}" for line in compare_text.divergence_lines(found.first))
    yield "\n## Differences between the runs\n"
    for number, cause in enumerate(found.causes, start=1):
        how = "" if found.verdict == "equal" else compare_text.how_it_changes(cause)
        yield f"{number}. **{_text(cause.group)}**{_text(how)}"
        for field, left, right in cause.changes[:12]:
            yield f"    - {_text(field)}: {_text(shorten(left))} -> {_text(shorten(right))}"
    if not found.causes:
        yield "None that is recorded."
    yield from (f"\nNot compared: {_text(text)}" for text in found.not_compared[:20])


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield "| " + " | ".join(map(_text, row)) + " |"
        if number == 0:
            yield "|" + "---|" * len(row)


def _text(text: str) -> str:
    shown = visible(text)
    short = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
    return escape(_SPECIAL.sub(r"\\\1", short), quote=False)
