"""A verdict as text: the table in the job's log and in `hpcenv report`. Pure.

Runs on: COMPUTE NODE and LOGIN NODE. The text is plain ASCII with 80 columns and no colour, because people read it in
log files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpcenv.hostlist import fold_hostlist
from hpcenv.records.checked_sif import CheckedSif
from hpcenv.records.checks import PreflightSummary
from hpcenv.records.facts import RankCpus
from hpcenv.records.manifest import Overlay
from hpcenv.records.network import NetworkDecision
from hpcenv.records.verdict import Finding, NodeVerdict, Verdict
from hpcenv.text import WIDTH, columns, plural, visible_ascii, wrap

_WORDS = {"match": "match", "mismatch": "MISMATCH", "unknown": "UNKNOWN"}


def brief(verdict: Verdict, *, lockfile: str) -> str:
    """Return the table without the settings if something differs; otherwise one line and the notes."""
    checks = verdict.preflight
    unread = {finding.field for finding in verdict.findings if _is_unread(finding)}
    differs = (
        any(finding.field not in unread for finding in verdict.findings)
        or verdict.result != "match"
        or (verdict.launched and len(verdict.launched) < len(verdict.nodes))
        or (checks is not None and (checks.failed or set(checks.unknown) - unread or checks.skipped))
        or (verdict.network is not None and (verdict.network.warnings or verdict.network.step_options))
    )
    if differs:
        return render(verdict, lockfile=lockfile, settings=False)
    fields = sorted({node.compared for node in verdict.nodes})
    span = f"{fields[0]} to " if len(fields) > 1 else ""
    parts = [plural(len(verdict.nodes), "node"), f"{span}{plural(fields[-1], 'field')}"]
    parts += [] if checks is None else [plural(len(checks.fine), "check")]
    parts += [f"not read here: {', '.join(sorted(unread))}"] if unread else []
    variables = {one.name for settings in verdict.settings.values() for one in settings}
    attempt = f", attempt {verdict.attempt}" if verdict.attempt else ""
    chosen = plural(len(variables), "setting")
    lines = [f"hpcenv verdict{attempt}: match: {', '.join(parts)}; {chosen}"]
    return "\n".join([*map(wrap, lines), *(wrap(shorten(note)) for note in verdict.notes)])


def render(verdict: Verdict, *, lockfile: str, settings: bool = True) -> str:
    """Return the verdict as lines of at most 80 columns.

    Args:
        verdict: verdict of one attempt.
        lockfile: name of the lockfile in the headline.
        settings: whether to list the variables of the ranks, too, with origin and reason.
    """
    blocking = [f for f in verdict.findings if f.severity == "must"]
    others = [f for f in verdict.findings if f.severity != "must"]
    parts = [_headline(verdict, lockfile), _node_lines(verdict)]
    if blocking:
        parts.append(_table_of(blocking))
    if others:
        parts.append("also different, not blocking:\n" + _table_of(others))
    if verdict.preflight is not None:
        parts.append(_checks(verdict.preflight))
    if verdict.notes:
        parts.append("\n".join(wrap(shorten(note)) for note in verdict.notes))
    if settings and verdict.rendezvous is not None:
        parts.append(_settings(verdict))
    if verdict.network is not None and (verdict.network.warnings or verdict.network.step_options):
        parts.append(_network(verdict.network))
    return "\n\n".join(parts) + "\n"


# The largest number of rows for one field. If 1,000 nodes have 1,000 values, the other fields must stay visible.
_ROWS_OF_A_FIELD = 8


def _table_of(findings: Sequence[Finding]) -> str:
    """Return a table with one row for all nodes with the same finding.

    If a field has too many rows, a line says this.
    """
    nodes: dict[Finding, list[str]] = {}
    for finding in findings:
        nodes.setdefault(replace(finding, node=""), []).append(finding.node)
    shown: list[Finding] = []
    rows: dict[str, int] = {}
    more: dict[str, int] = {}
    for finding, where in nodes.items():
        rows[finding.field] = rows.get(finding.field, 0) + 1
        if rows[finding.field] <= _ROWS_OF_A_FIELD:
            shown.append(replace(finding, node=_names(where)))
        else:
            more[finding.field] = more.get(finding.field, 0) + len(where)
    rest = [wrap(f"and {visible_ascii(name)} on {number} more; verdict.json has all") for name, number in more.items()]
    single, alike = _apart(shown)
    rows_of_one = [_rows(single)] if single else []
    return "\n".join([*rows_of_one, *map(_alike, alike), *rest])


# If at least this number of fields is unknown for the same reason, one paragraph shows all of them. For example, if
# NVML does not answer, twenty fields are unknown.
_UNKNOWN_TOGETHER = 3


def _apart(findings: Sequence[Finding]) -> tuple[list[Finding], list[list[Finding]]]:
    """Return findings that get a row, and groups of findings that are unknown on the same nodes for the same reason."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.result == "unknown":
            groups.setdefault((finding.node, finding.found), []).append(finding)
    alike = [group for group in groups.values() if len(group) >= _UNKNOWN_TOGETHER]
    together = {finding for group in alike for finding in group}
    return [finding for finding in findings if finding not in together], alike


def _alike(group: Sequence[Finding]) -> str:
    """Return the paragraph on fields that are unknown for the same reason, with the first hint of these fields."""
    first = group[0]
    fields = ", ".join(visible_ascii(finding.field) for finding in group)
    lines = [
        f"node {first.node}  UNKNOWN, {len(group)} fields for one reason",
        wrap(f"  fields  {fields}", indent=10),
        wrap(f"  found   {shorten(first.found)}", indent=10),
    ]
    return "\n".join([*lines, *next((_note(finding) for finding in group if finding.owner), [])])


_WIDEST_NAMES = 44


def _names(nodes: Sequence[str]) -> str:
    """Return the names of nodes as a host list. A long list is cut, and the number of nodes is added."""
    text = fold_hostlist(visible_ascii(node) for node in nodes)
    return text if len(text) <= _WIDEST_NAMES else f"{text[:_WIDEST_NAMES]}... ({len(nodes)} nodes)"


def _headline(verdict: Verdict, lockfile: str) -> str:
    bad = [node for node in verdict.nodes if node.result != "match" and node.result == verdict.result]
    count, lockfile = len(verdict.nodes), visible_ascii(lockfile)
    attempt = f", attempt {verdict.attempt}" if verdict.attempt else ""
    if verdict.result == "match" and 0 < len(verdict.launched) < count:
        summary = f"match: {len(verdict.launched)} of {plural(count, 'node')} train, as {lockfile} says"
    elif verdict.result == "match":
        summary = f"match: {plural(count, 'node')} as {lockfile} says"
    elif verdict.result == "mismatch" and verdict.of_checks:
        summary = f"MISMATCH: checks failed on {len(bad)} of {plural(count, 'node')}"
    elif verdict.result == "mismatch":
        summary = f"MISMATCH: {len(bad)} of {plural(count, 'node')} not as {lockfile} says"
    else:
        summary = f"UNKNOWN: {len(bad)} of {plural(count, 'node')} could not be read in full"
    return wrap(f"hpcenv verdict{attempt}: {summary}")


def _node_lines(verdict: Verdict) -> str:
    """Return one line for each group of nodes that have the same text."""
    alike: dict[str, list[NodeVerdict]] = {}
    for node in verdict.nodes:
        alike.setdefault(_node_words(node) + _left_out(node, verdict), []).append(node)
    names = {words: _names([node.node for node in nodes]) for words, nodes in alike.items()}
    width = max((len(name) for name in names.values()), default=0)
    return "\n".join(wrap(f"  {name:<{width}}  {words}", indent=width + 14) for words, name in names.items())


def _left_out(node: NodeVerdict, verdict: Verdict) -> str:
    """Say that a node does not train, in a job with spare nodes; empty for a node that trains."""
    if not verdict.launched or node.node in verdict.launched:
        return ""
    return "; spare" if node.result == "match" else "; left out"


def _node_words(node: NodeVerdict) -> str:
    compared = f"{plural(node.compared, 'field')} compared" if node.compared else "nothing compared"
    line = f"{_WORDS[node.result]:<8}  {compared}"
    return f"{line}; SIF: {visible_ascii(node.sif)}" if node.sif else line


def _rows(findings: Sequence[Finding]) -> str:
    cells = [(f.node, visible_ascii(f.field), shorten(f.locked), shorten(f.found)) for f in findings]
    rows = columns([("NODE", "FIELD", "LOCKED", "FOUND"), *cells])
    if max(map(len, rows)) > WIDTH:
        return "\n".join(_stacked(finding) for finding in findings)
    lines = rows[:1]
    for row, finding in zip(rows[1:], findings, strict=True):
        lines += [row, *_note(finding)]
    return "\n".join(lines)


def _stacked(finding: Finding) -> str:
    lines = [f"node {finding.node}  {visible_ascii(finding.field)}  {_WORDS[finding.result]}"]
    for word, value in (("locked", finding.locked), ("found", finding.found)):
        lines.append(wrap(f"  {word:<6}  {shorten(value)}", indent=10))
    return "\n".join([*lines, *_note(finding)])


def _note(finding: Finding) -> list[str]:
    """Return the note of a finding. For a check, add who can remove the cause, and how."""
    lines = [wrap(f"  {visible_ascii(finding.note)}", indent=4)] if finding.note else []
    if finding.owner and not _is_unread(finding):
        lines.append(wrap(f"  [{finding.owner}] do: {visible_ascii(finding.remedy)}", indent=4))
    return lines


def _is_unread(finding: Finding) -> bool:
    """Whether this is a check that many machines cannot do (INFO_IF_UNKNOWN). Users often cannot read /dev/kmsg."""
    return bool(finding.owner) and finding.result == "unknown" and finding.severity == "info"


def _checks(summary: PreflightSummary) -> str:
    """Summarize the preflight checks in a few lines. Checks that failed or are unknown already have rows above."""
    parts = [f"{len(summary.fine)} fine"]
    parts += [
        f"{len(some)} {word}" for word, some in (("failed", summary.failed), ("unknown", summary.unknown)) if some
    ]
    reasons = sorted({visible_ascii(reason) for reason in summary.not_run.values()})
    parts += [f"{len(summary.not_run)} not run ({', '.join(reasons)})"] if reasons else []
    parts += [f"skipped (--skip-check): {', '.join(summary.skipped)}"] if summary.skipped else []
    return wrap(f"checks ({summary.level}): {'; '.join(parts)}")


def _settings(verdict: Verdict) -> str:
    """Return the variables of the ranks, chosen and inherited: one line for each variable and value."""
    assert verdict.rendezvous is not None
    meeting = verdict.rendezvous
    lines = [f"rendezvous {meeting.host}:{meeting.port}, id {meeting.id}", "settings:"]
    of_node = {node: (*chosen, *verdict.inherited.get(node, ())) for node, chosen in verdict.settings.items()}
    for name in sorted({s.name for settings in of_node.values() for s in settings}):
        nodes: dict[tuple[str, str, str], list[str]] = {}
        for node, settings in of_node.items():
            for s in (s for s in settings if s.name == name):
                nodes.setdefault((s.value, s.origin, s.reason), []).append(node)
        for (value, origin, reason), named in list(nodes.items())[:_ROWS_OF_A_FIELD]:
            where = "" if len(named) == len(verdict.settings) else f" on {_names(named)}"
            why = f"; {reason}" if reason else ""
            lines.append(wrap(f"  {name} = {shorten(value)}{where}  ({origin}{why})", indent=4))
        more = sum(map(len, list(nodes.values())[_ROWS_OF_A_FIELD:]))
        lines += [f"  and {name} on {more} more; verdict.json has all"] if more else []
    return "\n".join(lines)


def _network(decision: NetworkDecision) -> str:
    """Return the problems of the network and of its settings. `hpcenv net explain` shows everything else."""
    lines = [wrap(f"network: {decision.profile} ({visible_ascii(decision.why)})")]
    for warning in decision.warnings:
        where = f" on {_names(warning.nodes)}" if warning.nodes else ""
        todo = f"; do: {visible_ascii(warning.todo)}" if warning.todo else ""
        lines.append(wrap(f"  warning: {visible_ascii(warning.what)}{where}{todo}", indent=4))
    lines += [
        wrap(f"  missing: srun {option.option}: {option.reason}; put it into [srun]", indent=4)
        for option in decision.step_options
    ]
    return "\n".join(lines)


def shorten(value: str) -> str:
    """Shorten digests to 12 digits. An empty value is shown as two quotes."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28,}\b", r"\1...", visible_ascii(value)) or '""'


def sif_in_words(checked: CheckedSif) -> str:
    """Return how a SIF was checked, for a cell of the table."""
    how = {"identity": "same file as hashed", "node-record": "hashed here before", "full": "hashed now"}
    return f"{'own copy, ' if checked.staged else ''}{how[checked.checked]}"


def overlay_in_words(overlay: Overlay) -> str:
    """Return the overlay that is mounted over the image, for a note below the table."""
    what = "its Python starts the ranks" if overlay.use == "venv" else "on PYTHONPATH"
    return f"overlay, read-only: {overlay.source} at {overlay.target}, {what}"


def binding_in_words(found: Mapping[str, RankCpus | None]) -> list[str]:
    """Return lines that say how many ranks are bound to CPUs, on which nodes, and why ranks are not bound."""
    nodes: dict[str, list[str]] = {}
    for node, one in found.items():
        if one is None:
            continue
        count = sum(map(bool, one.cpus))
        bound = f"ranks bound to the CPUs near their GPUs: {count} of {len(one.cpus)} of a node"
        text = bound if count else "ranks not bound to CPUs"
        nodes.setdefault(f"{text} ({one.why})" if one.why else text, []).append(node)
    if len(nodes) < 2:
        return list(nodes)
    return [f"{text}, on {fold_hostlist(names)}" for text, names in nodes.items()]
