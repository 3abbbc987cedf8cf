"""The results of the preflight checks for `hpcenv doctor`: each check on each node.

Runs on: LOGIN NODE. judge/checks/check_table.py lists the checks, and says who can remove the cause of a failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import HpcenvError, NodeRejected, NodesUnknown
from hpcenv.hostlist import fold_hostlist
from hpcenv.judge.checks import check_results
from hpcenv.judge.checks.check_table import BY_ID
from hpcenv.records.checks import CheckOutcome, CheckReport, CheckState
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest, PreflightLevel, Severity
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.severities import Severities
from hpcenv.records.smoke import SmokeResult
from hpcenv.records.verdict import Result, Verdict
from hpcenv.smoke.inside import FAMILY
from hpcenv.text import visible_ascii, wrap


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """One check on one node.

    Attributes:
        found: the measured value; for `unknown` and `not-run`, why nothing was measured.
        limit: what the value must be.
        severity: the severity in this run; a failure of a check with `must` stops the job.
        owner: where the cause of a failure is: `node` (hardware or a service of the node) or `user` (the user's job).
        remedy: what to do; empty if the check did not fail and is not unknown.
    """

    node: str
    id: str
    state: CheckState
    found: str
    limit: str
    severity: Severity
    owner: str
    note: str = ""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckedMachines:
    """The results of the preflight checks of one machine, or of the nodes of one job.

    Attributes:
        result: `mismatch`: a check with severity `must` failed. `unknown`: a check with severity `must` could not
            measure, or a node reported nothing. `match`: all other cases.
        silent: node that reported nothing -> the reason.
        skipped: the checks that `--skip-check` names.
        seconds: node -> how long its checks on the host took.
    """

    level: PreflightLevel
    nodes: tuple[str, ...]
    rows: tuple[CheckRow, ...]
    result: Result
    silent: Mapping[str, str]
    skipped: tuple[str, ...]
    seconds: Mapping[str, float]

    @property
    def exit_status(self) -> int:
        """The exit status of the command that ran the checks."""
        return {"match": 0, "mismatch": NodeRejected.exit_status, "unknown": NodesUnknown.exit_status}[self.result]


_ORDER = {name: number for number, name in enumerate(BY_ID)}


def rows_of(node: str, outcomes: Iterable[CheckOutcome], severities: Severities) -> list[CheckRow]:
    """Return the rows of one node."""
    rows = []
    for one in outcomes:
        check = BY_ID[one.id]
        bad = {finding.field: finding for finding in check_results.findings(node, [one], severities)}.get(one.id)
        rows.append(
            CheckRow(
                node=node,
                id=one.id,
                state=one.state,
                found=one.found,
                limit=one.limit or check.limit,
                severity=severities.of(one.id) if bad is None else bad.severity,
                owner=check.owner,
                note=one.note,
                remedy="" if bad is None else bad.remedy,
            )
        )
    return rows


def machines(
    level: PreflightLevel,
    rows: Sequence[CheckRow],
    *,
    nodes: Sequence[str],
    silent: Mapping[str, str],
    skipped: Sequence[str],
    seconds: Mapping[str, float],
) -> CheckedMachines:
    """Return the rows in the order of the table of checks, with the result of all rows together."""
    blocking = {row.state for row in rows if row.severity == "must"}
    result: Result = "mismatch" if "failed" in blocking else "unknown" if "unknown" in blocking or silent else "match"
    return CheckedMachines(
        level=level,
        nodes=tuple(nodes),
        rows=tuple(sorted(rows, key=lambda row: _ORDER[row.id])),
        result=result,
        silent=dict(silent),
        skipped=tuple(skipped),
        seconds=dict(seconds),
    )


def of_job(manifest: Manifest, verdict: Verdict, facts: Sequence[Facts]) -> CheckedMachines:
    """Return the results of a job that checked its nodes, from the records of its run folder.

    Args:
        facts: the facts of each node that reported.
    """
    severities, folder = Severities(manifest.severities), RunFolder(Path(manifest.run_folder))
    nodes = [node.node for node in verdict.nodes]
    after = {node: [*_inside(folder, node, verdict)] for node in nodes}
    for node, outcomes in _smoke(folder, verdict).items():
        after.setdefault(node, []).extend(outcomes)
    own = {one.node: list(one.checks.results()) for one in facts if one.checks is not None}
    rows = [row for node in nodes for row in rows_of(node, [*own.get(node, ()), *after[node]], severities)]
    rows += _over_nodes(verdict, severities)
    silent = {row.node: row.found for row in verdict.findings if row.field == "facts" and row.result == "unknown"}
    summary = verdict.preflight
    return machines(
        manifest.preflight.level,
        rows,
        nodes=nodes,
        silent=silent,
        skipped=() if summary is None else summary.skipped,
        seconds={one.node: one.checks.seconds for one in facts if one.checks is not None},
    )


def _inside(folder: RunFolder, node: str, verdict: Verdict) -> list[CheckOutcome]:
    """Return the results of the checks inside a node's environment in this attempt; empty if no check ran in it."""
    try:
        report = load_record(CheckReport, folder.checks_of(FAMILY, node))
    except HpcenvError:
        return []  # if the report of a node is missing, the verdict has a finding about it
    return list(report.checks.results()) if (report.run, report.attempt) == (verdict.run, verdict.attempt) else []


def _smoke(folder: RunFolder, verdict: Verdict) -> dict[str, list[CheckOutcome]]:
    """Return the results of the smoke test on each node; empty if the test did not run."""
    try:
        result = load_record(SmokeResult, folder.smoke_result)
    except HpcenvError:
        return {}
    if (result.run, result.attempt) != (verdict.run, verdict.attempt):
        return {}
    return {node: list(checks.results()) for node, checks in result.checks.items()}


def _over_nodes(verdict: Verdict, severities: Severities) -> list[CheckRow]:
    """Return the rows of checks that compare the nodes. The results of these checks are only in the verdict."""
    rows = []
    for check in BY_ID.values():
        if check.place != "nodes" or verdict.preflight is None:
            continue
        found = [row for row in verdict.findings if row.field == check.id]
        for row in found:
            state: CheckState = "failed" if row.result == "mismatch" else "unknown"
            rows += rows_of(row.node, [CheckOutcome(id=check.id, state=state, found=row.found)], severities)
        if check.id in verdict.preflight.fine:
            every = fold_hostlist(node.node for node in verdict.nodes)
            rows += rows_of(every, [CheckOutcome(id=check.id, state="fine", found=check.limit)], severities)
    return rows


# -- as text ------------------------------------------------------------------------------

_WORDS: Mapping[CheckState, str] = {"failed": "FAILED", "unknown": "unknown", "fine": "fine", "not-run": "not run"}
_WIDEST_ID = max(len(name) for name in BY_ID)


def render(checked: CheckedMachines) -> str:
    """Return the results as text of at most 80 columns. Failed checks are first, with their hints. Pure."""
    parts = [_headline(checked)]
    parts += [
        wrap(f"{visible_ascii(node)} reported nothing: {visible_ascii(why)}") for node, why in checked.silent.items()
    ]
    for state in _WORDS:
        for (name, words), rows in _alike(checked.rows, state).items():
            where = fold_hostlist(row.node for row in rows)
            parts.append(_row(rows[0], name, words, where if len(checked.nodes) > 1 else ""))
    return "\n".join(parts)


def _headline(checked: CheckedMachines) -> str:
    counts = {state: len({row.id for row in checked.rows if row.state == state}) for state in _WORDS}
    # A check that is fine on one node and failed on another node counts in both numbers.
    told = ", ".join(f"{count} {_WORDS[state].lower()}" for state, count in counts.items() if count)
    skipped = f"; skipped: {', '.join(checked.skipped)}" if checked.skipped else ""
    slowest = max(checked.seconds.values(), default=0.0)
    on = "this machine" if not checked.nodes else fold_hostlist(checked.nodes)
    return wrap(f"Preflight checks ({checked.level}) of {on}, {slowest:.2f} s: {told or 'none'}{skipped}")


def _alike(rows: Iterable[CheckRow], state: CheckState) -> dict[tuple[str, str], list[CheckRow]]:
    """Return the rows of one state in groups: equal results of one check on several nodes are one group."""
    found: dict[tuple[str, str], list[CheckRow]] = {}
    for row in rows:
        if row.state == state:
            found.setdefault((row.id, row.found), []).append(row)
    return found


def _row(row: CheckRow, name: str, found: str, where: str) -> str:
    on = f"{where}: " if where else ""
    must = f"; must be: {visible_ascii(row.limit)}" if row.state == "failed" else ""
    what = f"  {_WORDS[row.state]:<8}{name:<{_WIDEST_ID}}  {on}{visible_ascii(found)}{must}"
    lines = [wrap(what, indent=12 + _WIDEST_ID)]
    if row.note and row.remedy:
        lines.append(wrap(f"{'':12}{visible_ascii(row.note)}", indent=12))
    if row.remedy:
        lines.append(wrap(f"{'':12}{row.severity}, [{row.owner}] do: {visible_ascii(row.remedy)}", indent=14))
    return "\n".join(lines)
