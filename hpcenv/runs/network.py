"""`hpcenv net`: the reasons for the network settings of a run, and the differences between two runs.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv.errors import Command, HpcenvError, RecordInvalid
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record
from hpcenv.records.network import Fabric, NetworkDecision, NetworkRow
from hpcenv.records.verdict import Verdict
from hpcenv.runs.entries import Run
from hpcenv.runs.find import find_run


@dataclass(frozen=True, kw_only=True)
class NetworkExplanation:
    """The network settings that hpcenv decided for one run, or for one kind of machine.

    Attributes:
        of: name of the run, or of the kind of machine.
        how: `recorded` if the decision is in the verdict of the run, `computed` if this hpcenv has made the decision
            now.
    """

    of: str
    how: str
    decision: NetworkDecision


@dataclass(frozen=True, kw_only=True)
class NetworkChange:
    """One difference between two runs.

    Attributes:
        kind: `profile`, `variable`, `hardware`, `version` or `warning`.
        left, right: the values of the two runs. If nodes of a run differ, the text has all their values. `absent`
            means that the run has no value.
    """

    kind: str
    name: str
    left: str
    right: str


@dataclass(frozen=True, kw_only=True)
class NetworkDifferences:
    """What differs between the networks of two runs.

    Attributes:
        not_compared: what could not be compared because one of the runs has no such record, and why.
    """

    left: str
    right: str
    changes: tuple[NetworkChange, ...]
    not_compared: tuple[str, ...] = ()


def explain_run(start: Path, word: str | None, *, runs: str | None = None) -> NetworkExplanation:
    """Return the decision on the network that the verdict of a run records.

    Raises:
        RecordInvalid: the run has no verdict, the verdict allowed no start, or the verdict records no decision.
    """
    run = find_run(start, word, runs=runs)
    return NetworkExplanation(of=run.manifest.run, how="recorded", decision=_decision(run))


def _decision(run: Run) -> NetworkDecision:
    verdict = load_record(Verdict, run.folder.verdict)
    if verdict.network is not None:
        return verdict.network
    no_start = f"the verdict is `{verdict.result}`, and settings are decided for nodes that match"
    raise RecordInvalid(
        f"`{run.folder.verdict}` has no decision on the network",
        why=no_start if verdict.result != "match" else "it was written by an hpcenv that did not record it",
        hint=Command("hpcenv", "net", "explain", "--from", str(run.folder.facts / "NODE.json")),
    )


def diff_networks(start: Path, left: str, right: str, *, runs: str | None = None) -> NetworkDifferences:
    """Compare the networks of two runs: what was decided, and what the nodes reported.

    Raises:
        RunNotFound: there is no such run.
        RecordInvalid: a record of one of the runs is damaged.
    """
    sides = [find_run(start, word, runs=runs) for word in (left, right)]
    decisions, missing = [], []
    for run in sides:
        try:
            decisions.append(_without_folder(_decision(run), run.manifest.run_folder))
        except HpcenvError as error:
            missing.append(f"settings of {run.manifest.run}: {error.why or error.what}")
    first, second = (_reported(run) for run in sides)
    changes = list(_hardware(first, second)) if first and second else []
    missing += [
        f"hardware of {run.manifest.run}: no facts of it"
        for run, seen in zip(sides, (first, second), strict=True)
        if not seen
    ]
    if len(decisions) == 2:
        changes = [*_decided(*decisions), *changes]
    return NetworkDifferences(
        left=sides[0].manifest.run, right=sides[1].manifest.run, changes=tuple(changes), not_compared=tuple(missing)
    )


def _without_folder(decision: NetworkDecision, folder: str) -> NetworkDecision:
    """Replace the path of the run folder in a value by a word, because this path differs between any two runs."""
    rows = tuple(replace(row, value=row.value.replace(folder, "RUN_FOLDER")) for row in decision.rows)
    return replace(decision, rows=rows)


def _decided(left: NetworkDecision, right: NetworkDecision) -> Iterable[NetworkChange]:
    if left.profile != right.profile:
        yield NetworkChange(
            kind="profile", name="profile", left=f"{left.profile} ({left.why})", right=f"{right.profile} ({right.why})"
        )
    yield from _compare("variable", _values(left.rows), _values(right.rows))
    warned = [{warning.rule: warning.what for warning in side.warnings} for side in (left, right)]
    yield from _compare("warning", *warned)


def _values(rows: Iterable[NetworkRow]) -> dict[str, str]:
    """Return name of a variable -> its value and origin. If nodes differ, all their values are in one text."""
    found: dict[str, list[str]] = {}
    for row in rows:
        value = "left out" if row.action == "skip" else row.value
        found.setdefault(row.name, []).append(f"{value} ({row.origin})")
    return {name: "; ".join(sorted(set(values))) for name, values in found.items()}


def _reported(run: Run) -> dict[str, Fabric]:
    found = {}
    for path in sorted(run.folder.facts.glob("*.json")):
        try:
            facts = load_record(Facts, path)
        except RecordInvalid:
            continue
        if facts.fabric is not None:
            found[facts.node] = facts.fabric
    return found


def _hardware(left: Mapping[str, Fabric], right: Mapping[str, Fabric]) -> Iterable[NetworkChange]:
    sides = [_summary(side.values()) for side in (left, right)]
    yield from _compare("hardware", *sides)
    versions = [_versions(side.values()) for side in (left, right)]
    yield from _compare("version", *versions)


def _summary(fabrics: Iterable[Fabric]) -> dict[str, str]:
    """Return kind of hardware -> description. If nodes differ, all their descriptions are in one text."""
    parts: dict[str, set[str]] = {}
    for fabric in set(fabrics):
        active = sorted({f"{p.rate_gbit or 0:g} Gb/s {p.layer}" for p in fabric.ports if p.state == "ACTIVE"})
        count = sum(port.state == "ACTIVE" for port in fabric.ports)
        parts.setdefault("active RDMA ports", set()).add(f"{count}: {', '.join(active)}" if count else "none")
        parts.setdefault("Slingshot adapters", set()).add(str(sum(device.link != "no" for device in fabric.cxi)))
        parts.setdefault("GPUs", set()).add(f"{len(fabric.gpus)} ({fabric.gpu_vendor})")
        parts.setdefault("GPU links", set()).add(", ".join(sorted({str(gpu.links) for gpu in fabric.gpus})) or "none")
        parts.setdefault("GPUDirect RDMA", set()).add(fabric.gpudirect or "none")
        for file in fabric.tuning:
            text = ", ".join(f"{one.name}={one.value}" for one in file.variables)
            parts.setdefault(file.path, set()).add(text or file.kind)
    return {name: "; ".join(sorted(values)) for name, values in parts.items()}


def _versions(fabrics: Iterable[Fabric]) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for fabric in set(fabrics):
        for one in fabric.versions:
            found.setdefault(f"{one.name} ({one.path})", set()).add(one.version)
    return {name: ", ".join(sorted(values)) for name, values in found.items()}


def _compare(kind: str, left: Mapping[str, str], right: Mapping[str, str]) -> Iterable[NetworkChange]:
    for name in sorted({*left, *right}):
        first, second = left.get(name, "absent"), right.get(name, "absent")
        if first != second:
            yield NetworkChange(kind=kind, name=name, left=first, right=second)
