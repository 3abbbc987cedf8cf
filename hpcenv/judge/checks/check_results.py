"""Add the results of the preflight checks to the verdict. Pure.

Runs on: COMPUTE NODE (the batch node) and LOGIN NODE. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hpcenv.judge.checks.check_table import BY_ID, active
from hpcenv.records.checks import CheckOutcome, CheckReport, CheckState, NodeChecks, PreflightSummary
from hpcenv.records.facts import Facts
from hpcenv.records.manifest import Manifest
from hpcenv.records.severities import Severities
from hpcenv.records.verdict import Finding, Result, Verdict

# Many machines cannot do these checks. So an unknown result gives no warning. An unknown result blocks the job only if
# [policy] makes the check a `must`.
INFO_IF_UNKNOWN = frozenset({"fs.lustre.servers", "gpu.xid", "pci.acs", "pci.iommu"})


def findings(node: str, results: Iterable[CheckOutcome], severities: Severities) -> list[Finding]:
    """Return a finding for each check that failed or could not be measured. A check that did not run has no finding."""
    return [_finding(node, result, severities) for result in results if result.state in ("failed", "unknown")]


def _finding(node: str, result: CheckOutcome, severities: Severities) -> Finding:
    check = BY_ID[result.id]
    severity = severities.of(result.id)
    if result.state == "unknown" and severity != "must" and result.id in INFO_IF_UNKNOWN:
        severity = "info"
    return Finding(
        node=node,
        field=result.id,
        locked=result.limit or check.limit,
        found=result.found,
        result="mismatch" if result.state == "failed" else "unknown",
        severity=severity,
        note=result.note,
        owner=check.owner,
        remedy=check.hint,
    )


_SKEW_SECONDS = 30.0


def compare_clocks(
    manifest: Manifest, facts: Mapping[str, Facts], window: tuple[float, float] | None
) -> dict[str, CheckOutcome]:
    """Compare the clocks of the nodes, and return an outcome for each node.

    Args:
        facts: node -> its facts, which compare the node's clock with the clock of the shared file system.
        window: begin of this attempt and the present time, by the batch node's clock. All facts were written between
            these two times. `window` is None if these times are not known.
    """
    name = "time.nodes"
    if name not in [check.id for check in active(manifest)]:
        return {}
    if manifest.cluster == "local" or len(facts) < 2:
        why = "all nodes are this machine" if manifest.cluster == "local" else "there is one node"
        return {node: CheckOutcome(id=name, state="not-run", found=why) for node in facts}
    skews, decided = _skews(facts, window)
    outcomes = {}
    for node, one in facts.items():
        measured = window is not None or (one.checks is not None and one.checks.clock is not None)
        late = abs(skews[node]) > _SKEW_SECONDS
        state: CheckState = "failed" if late else "fine" if measured else "unknown"
        found = f"{abs(skews[node]):.1f} s"
        if late:
            found += " behind" if skews[node] < 0 else " ahead"
        outcomes[node] = CheckOutcome(
            id=name,
            state=state,
            found=found if measured else "no time is known",
            note=_UNDECIDED if late and not decided else "",
        )
    return outcomes


_UNDECIDED = "whether this clock is wrong, or those that it is compared with, cannot be told from so few"


def _skews(facts: Mapping[str, Facts], window: tuple[float, float] | None) -> tuple[dict[str, float], bool]:
    """Return how many seconds the clock of each node is ahead, and whether more than half of the known clocks agree.

    The clock of the file server is compared too, so that the wrong clock of two nodes can be found. If the nodes
    themselves set the times of files, all clocks are compared with the batch node's clock instead.
    """
    by_files = {node: one.checks.clock for node, one in facts.items() if one.checks and one.checks.clock is not None}
    clocks = [0.0, *by_files.values()]
    usual = _middle(clocks)
    of_files = {node: by_files.get(node, usual) - usual for node in facts}
    by_batch = {node: _outside(one.written, window) for node, one in facts.items()}
    # The batch node is the first node. If its clock is wrong, the times of all other nodes are outside of the window.
    batch = next(iter(facts))
    shift = of_files[batch] if by_batch[batch] == 0.0 else 0.0
    of_batch = {node: seconds + shift for node, seconds in by_batch.items()}
    if _differ(of_files.values()) or not _differ(of_batch.values()):
        skews = {node: of_files[node] if node in by_files else seconds for node, seconds in of_batch.items()}
        return skews, _agree(clocks, usual)
    usual = _middle(list(of_batch.values()))
    return {node: seconds - usual for node, seconds in of_batch.items()}, _agree(list(of_batch.values()), usual)


def _outside(moment: float, window: tuple[float, float] | None) -> float:
    """Return how many seconds a moment is after a window: negative if it is before the window, 0 if it is inside.

    If there is no window, return 0.
    """
    if window is None:
        return 0.0
    return max(moment - window[1], 0.0) + min(moment - window[0], 0.0)


def _middle(seconds: Sequence[float]) -> float:
    """Return the median. If two values are in the middle, return the value that is nearer to 0, the reference clock."""
    ordered = sorted(seconds)
    return min(ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2], key=abs)


def _differ(seconds: Iterable[float]) -> bool:
    return any(abs(one) > _SKEW_SECONDS for one in seconds)


def _agree(seconds: Sequence[float], usual: float) -> bool:
    return sum(abs(one - usual) <= _SKEW_SECONDS for one in seconds) > len(seconds) / 2


def add_reports(
    verdict: Verdict, manifest: Manifest, nodes: Sequence[str], reports: Mapping[str, Sequence[CheckReport]]
) -> Verdict:
    """Add to a verdict the results of later checks: the checks in the container and the smoke test.

    Args:
        verdict: the verdict of this attempt, which allowed the start.
        nodes: the nodes that train.
        reports: family of checks -> the reports of the nodes. If a node has no report, its result is unknown.
    """
    severities = Severities(manifest.severities)
    rows: list[Finding] = []
    of_nodes: dict[str, list[CheckOutcome]] = {node: [] for node in nodes}
    for family, written in reports.items():
        usable = {one.node: one for one in written if (one.run, one.attempt) == (verdict.run, verdict.attempt)}
        for node in nodes:
            if node in usable:
                of_nodes[node].extend(usable[node].checks.results())
                rows.extend(findings(node, usable[node].checks.others, severities))
            else:
                rows.append(_silent(node, family))
    both = {node: NodeChecks.of(results, seconds=0) for node, results in of_nodes.items()}
    own = {node: worst(row for row in rows if row.node == node) for node in nodes}
    result = worst(rows)
    checked = replace(
        verdict,
        result=result,
        nodes=tuple(replace(node, result=own.get(node.node, node.result)) for node in verdict.nodes),
        findings=(*rows, *verdict.findings),
        preflight=merged(verdict.preflight, summary(manifest, both)),
    )
    return checked if result == "match" else without_start(checked)


def without_start(verdict: Verdict) -> Verdict:
    """Remove the settings for a start from a verdict that allows no start."""
    return replace(verdict, rendezvous=None, settings={}, inherited={}, launched=(), network=None)


def _silent(node: str, family: str) -> Finding:
    return Finding(
        node=node,
        field="facts",
        locked=f"the checks of {family}",
        found="this node reported none; its lines in the log above may say why",
        result="unknown",
        severity="must",
    )


def worst(rows: Iterable[Finding]) -> Result:
    """Return the worst result of several findings. Only findings with the severity `must` count."""
    blocking = {row.result for row in rows if row.severity == "must" and row.result != "match"}
    if "mismatch" in blocking:
        return "mismatch"
    return "unknown" if "unknown" in blocking else "match"


def merged(first: PreflightSummary | None, second: PreflightSummary | None) -> PreflightSummary | None:
    """Join two summaries of the checks of one run."""
    if first is None or second is None:
        return first or second
    return replace(
        first,
        fine=(*first.fine, *second.fine),
        failed=(*first.failed, *second.failed),
        unknown=(*first.unknown, *second.unknown),
        not_run={**first.not_run, **second.not_run},
    )


def with_outcomes(facts: Mapping[str, Facts], more: Mapping[str, CheckOutcome]) -> dict[str, NodeChecks]:
    """Return node -> the outcomes of its checks, with the outcome of the check that compares the nodes."""
    return {
        node: NodeChecks.of(
            [*one.checks.results(), *([more[node]] if node in more else [])], seconds=one.checks.seconds
        )
        for node, one in facts.items()
        if one.checks is not None
    }


def summary(manifest: Manifest, of_nodes: Mapping[str, NodeChecks]) -> PreflightSummary | None:
    """Return a summary of the checks on all nodes; None if checks are off."""
    if manifest.preflight.level == "off":
        return None
    states: dict[str, set[str]] = {}
    not_run: dict[str, str] = {}
    for checks in of_nodes.values():
        for name in checks.fine:
            states.setdefault(name, set()).add("fine")
        for result in checks.others:
            states.setdefault(result.id, set()).add(result.state)
            if result.state == "not-run":
                not_run.setdefault(result.id, result.found)
    order = [check.id for check in active(manifest)]
    return PreflightSummary(
        level=manifest.preflight.level,
        skipped=manifest.preflight.skipped,
        fine=tuple(name for name in order if states.get(name, set()) - {"not-run"} == {"fine"}),
        failed=tuple(name for name in order if "failed" in states.get(name, ())),
        unknown=tuple(name for name in order if "unknown" in states.get(name, ())),
        not_run={name: not_run[name] for name in order if states.get(name) == {"not-run"}},
    )
