"""A verdict as text: the one table in the job's log and in `hpcenv report`. Pure.

Runs on: COMPUTE NODE and LOGIN NODE. Plain ASCII, 80 columns, no colour: it is read in
log files.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from hpcenv.wire import CheckedSif, Finding, NodeVerdict, Verdict

WIDTH = 80

_WORDS = {"match": "match", "mismatch": "MISMATCH", "unknown": "UNKNOWN"}


def render(verdict: Verdict, *, lockfile: str, settings: bool = True) -> str:
    """Return the verdict as lines of at most 80 columns.

    Args:
        verdict: of one attempt.
        lockfile: how to call the lockfile in the headline.
        settings: list the chosen variables with origin and reason.
    """
    blocking = [f for f in verdict.findings if f.severity == "must"]
    others = [f for f in verdict.findings if f.severity != "must"]
    parts = [_headline(verdict, lockfile), _node_lines(verdict)]
    if blocking:
        parts.append(_rows(blocking))
    if others:
        parts.append("also different, not blocking:\n" + _rows(others))
    if settings and verdict.rendezvous is not None:
        parts.append(_settings(verdict))
    return "\n\n".join(parts) + "\n"


def _headline(verdict: Verdict, lockfile: str) -> str:
    bad = [node for node in verdict.nodes if node.result != "match" and node.result == verdict.result]
    count = len(verdict.nodes)
    attempt = f", attempt {verdict.attempt}" if verdict.attempt else ""
    if verdict.result == "match" and 0 < len(verdict.launched) < count:
        summary = f"match: {len(verdict.launched)} of {_plural(count, 'node')} train, as {lockfile} says"
    elif verdict.result == "match":
        summary = f"match: {_plural(count, 'node')} as {lockfile} says"
    elif verdict.result == "mismatch":
        summary = f"MISMATCH: {len(bad)} of {_plural(count, 'node')} not as {lockfile} says"
    else:
        summary = f"UNKNOWN: {len(bad)} of {_plural(count, 'node')} could not be read in full"
    return _wrap(f"hpcenv verdict{attempt}: {summary}")


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _node_lines(verdict: Verdict) -> str:
    width = max((len(node.node) for node in verdict.nodes), default=0)
    lines = (_node_line(node, width) + _left_out(node, verdict) for node in verdict.nodes)
    return "\n".join(_wrap(line, indent=width + 14) for line in lines)


def _left_out(node: NodeVerdict, verdict: Verdict) -> str:
    """Say which nodes of a job with spare ones do not train."""
    if not verdict.launched or node.node in verdict.launched:
        return ""
    return "; spare" if node.result == "match" else "; left out"


def _node_line(node: NodeVerdict, width: int) -> str:
    compared = f"{_plural(node.compared, 'field')} compared" if node.compared else "nothing compared"
    line = f"  {node.node:<{width}}  {_WORDS[node.result]:<8}  {compared}"
    return f"{line}; SIF: {visible(node.sif)}" if node.sif else line


def _rows(findings: Sequence[Finding]) -> str:
    rows = [(f.node, visible(f.field), shorten(f.locked), shorten(f.found)) for f in findings]
    header = ("NODE", "FIELD", "LOCKED", "FOUND")
    widths = [max(len(row[n]) for row in (header, *rows)) for n in range(4)]
    if sum(widths) + 6 <= WIDTH:
        lines = [_columns(header, widths)]
        for row, finding in zip(rows, findings, strict=True):
            lines.append(_columns(row, widths))
            lines.extend(_note(finding))
        return "\n".join(lines)
    return "\n".join(_stacked(finding) for finding in findings)


def _columns(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _stacked(finding: Finding) -> str:
    lines = [f"node {finding.node}  {visible(finding.field)}  {_WORDS[finding.result]}"]
    for word, value in (("locked", finding.locked), ("found", finding.found)):
        lines.append(_wrap(f"  {word:<6}  {shorten(value)}", indent=10))
    return "\n".join([*lines, *_note(finding)])


def _note(finding: Finding) -> list[str]:
    return [_wrap(f"  {visible(finding.note)}", indent=4)] if finding.note else []


def _settings(verdict: Verdict) -> str:
    """The settings of all nodes; one line where the nodes agree, else one per node."""
    assert verdict.rendezvous is not None
    meeting = verdict.rendezvous
    lines = [f"rendezvous {meeting.host}:{meeting.port}, id {meeting.id}", "settings:"]
    names = sorted({s.name for settings in verdict.settings.values() for s in settings})
    for name in names:
        per_node = {n: s for n, settings in verdict.settings.items() for s in settings if s.name == name}
        same = len({(s.value, s.origin) for s in per_node.values()}) == 1 and len(per_node) == len(verdict.settings)
        for node, setting in list(per_node.items())[: 1 if same else None]:
            where = "" if same else f" on {node}"
            why = f"; {setting.reason}" if setting.reason else ""
            lines.append(_wrap(f"  {name} = {shorten(setting.value)}{where}  ({setting.origin}{why})", indent=4))
    return "\n".join(lines)


def shorten(value: str) -> str:
    """Shorten digests to 12 digits; an empty value is shown as one."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28,}\b", r"\1...", visible(value)) or '""'


def sif_in_words(checked: CheckedSif) -> str:
    """Return how a SIF was checked, for a cell of the table."""
    how = {"identity": "same file as hashed", "node-record": "hashed here before", "full": "hashed now"}
    return f"{'own copy, ' if checked.staged else ''}{how[checked.checked]}"


def visible(text: str) -> str:
    """Show control characters and what is not ASCII as escapes, so that a log stays intact."""
    return "".join(c if " " <= c <= "~" else ascii(c)[1:-1] for c in text)


def _wrap(text: str, *, indent: int = 2) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    )
