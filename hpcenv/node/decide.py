"""The gate: facts of all nodes and the manifest in, a verdict out. Pure.

Runs on: COMPUTE NODE (the batch node), standard library only.

Three values: `match`, `mismatch`, `unknown`. All nodes are judged before anything is
decided; they are compared with the lockfile and with each other. `unknown` on a field that
must match blocks as a mismatch does, under its own exit status: a wrong "all is well"
costs more than a job that did not start.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from hpcenv.node import rendezvous
from hpcenv.node.table import sif_in_words, visible
from hpcenv.wire import (
    SCHEMA,
    SKIPPED,
    Expectation,
    Facts,
    Finding,
    GpuNeeds,
    Manifest,
    NodeVerdict,
    Result,
    Severity,
    Value,
    Verdict,
)

if TYPE_CHECKING:
    from hpcenv.model import compat

# The note of a finding that compares nodes with each other, not with the lockfile.
DIFFERS_BETWEEN_NODES = "differs between the nodes of this job"

# Nodes of one job must agree in these even where the lockfile says nothing about them: a
# collective over two drivers or two GPU models is a different experiment
# (reference/lockfiles.md section 2, "homogeneity across nodes"). Without GPUs asked for, a
# node's driver is only worth telling.
_SAME_ON_ALL_NODES: dict[str, Severity] = {"host.machine": "must", "host.kernel": "info"}
_SAME_GPUS_ON_ALL_NODES = ("host.driver-version", "host.gpu-models", "host.gpu-mig")

_SIF = "container.sif.sha256"


def judge(
    manifest: Manifest,
    nodes: Sequence[str],
    facts: Mapping[str, Facts],
    problems: Mapping[str, str],
    *,
    attempt: int,
    job_id: str,
) -> tuple[Verdict, rendezvous.Choice]:
    """Judge one attempt.

    Args:
        manifest: what was asked and locked.
        nodes: all nodes of the allocation, in Slurm's order.
        facts: node -> what it reported; facts of another run, attempt or node do not count.
        problems: node -> why there are no facts of it.
        attempt, job_id: of this start; they make the rendezvous id.

    Returns:
        The verdict, and the network choice that it contains in parts.
    """
    reported, problems = _of_this_attempt(manifest, nodes, facts, problems, attempt)
    findings: list[Finding] = list(_judge_shape(manifest, nodes))
    compared = dict.fromkeys(nodes, 0)
    for node, reason in problems.items():
        findings.append(_finding(node, "facts", "reported", reason, "unknown", "must"))
    for node, found in reported.items():
        findings.extend(_judge_node(manifest, found))
        compared[node] = sum(_reported(e.field, found) for e in _expectations(manifest))
    findings.extend(_compare_nodes(manifest, reported))
    launched, choice = _choose_nodes(manifest, nodes, reported, findings, job_id=job_id, attempt=attempt)
    if choice is None:
        launched = ()
        choice = rendezvous.choose(manifest, nodes, reported, job_id=job_id, attempt=attempt)
        findings.extend(_judge_network(nodes, choice, problems))
    result = _worst(f for f in findings if f.node in launched or not launched)
    verdict = Verdict(
        schema=SCHEMA,
        run=manifest.run,
        attempt=attempt,
        result=result,
        nodes=tuple(
            NodeVerdict(
                node=node,
                result=_worst(f for f in findings if f.node == node),
                compared=compared[node],
                sif=_sif_in_words(reported.get(node)),
            )
            for node in nodes
        ),
        findings=tuple(sorted(findings, key=_by_weight)),
        rendezvous=choice.rendezvous if result == "match" else None,
        settings=choice.settings if result == "match" else {},
        launched=launched if result == "match" else (),
    )
    return verdict, choice


def _choose_nodes(
    manifest: Manifest,
    nodes: Sequence[str],
    facts: Mapping[str, Facts],
    findings: Iterable[Finding],
    *,
    job_id: str,
    attempt: int,
) -> tuple[tuple[str, ...], rendezvous.Choice | None]:
    """Return the first nodes that match and reach each other, as many as train; none where there are too few."""
    if len(nodes) != manifest.nodes + manifest.spare:
        return (), None
    out = {finding.node for finding in findings if _blocks(finding)}
    while True:
        chosen = tuple(node for node in nodes if node not in out)[: manifest.nodes]
        if len(chosen) < manifest.nodes:
            return (), None
        choice = rendezvous.choose(manifest, chosen, facts, job_id=job_id, attempt=attempt)
        if choice.rendezvous is not None:
            return chosen, choice
        without_route = set(choice.problems) & set(chosen)
        if not manifest.spare or not without_route:
            return (), None
        # Where all others cannot reach the first one, it is the first one.
        out |= {chosen[0]} if len(without_route) == len(chosen) - 1 > 1 else without_route


def _of_this_attempt(
    manifest: Manifest, nodes: Sequence[str], facts: Mapping[str, Facts], problems: Mapping[str, str], attempt: int
) -> tuple[dict[str, Facts], dict[str, str]]:
    """Part the nodes into those with facts of this very attempt, and the others with the reason."""
    usable, missing = {}, {}
    for node in nodes:
        found = facts.get(node)
        if found is None:
            missing[node] = problems.get(node, "this node reported no facts")
        elif (found.run, found.attempt, found.node) != (manifest.run, attempt, node):
            missing[node] = f"its facts are of run {found.run}, attempt {found.attempt}, node {found.node}"
        else:
            usable[node] = found
    return usable, missing


def _judge_shape(manifest: Manifest, nodes: Sequence[str]) -> Iterable[Finding]:
    """Refuse a job of another size than the one that was planned."""
    if len(nodes) != (asked := manifest.nodes + manifest.spare):
        yield _finding(nodes[0], "job.nodes", str(asked), str(len(nodes)), "mismatch", "must")


def _judge_network(
    nodes: Sequence[str], choice: rendezvous.Choice, without_facts: Mapping[str, str]
) -> Iterable[Finding]:
    """Return what stands in the way of a rendezvous; nodes without facts have a row already."""
    problems = {node: reason for node, reason in choice.problems.items() if node not in without_facts}
    if choice.rendezvous is None and not choice.problems and not without_facts:
        problems = {nodes[0]: "no rendezvous endpoint could be chosen"}
    for node, reason in sorted(problems.items()):
        yield _finding(node, "network.route", f"a route to {nodes[0]}", reason, "unknown", "must")


def _judge_node(manifest: Manifest, facts: Facts) -> list[Finding]:
    findings = [f for e in _expectations(manifest) if (f := compare(e, facts)) is not None]
    findings.extend(_judge_gpus(manifest, facts))
    findings.extend(_judge_staging(facts))
    severity = _package_severity(manifest)
    for d in facts.differences:
        result: Result = "unknown" if d.unknown else "mismatch"
        findings.append(_finding(facts.node, d.field, d.locked, d.found, result, severity, d.note))
    if "probe" in facts.unknown:
        findings = _one_row_for_the_inside(facts, findings)
    if not any(map(_blocks, findings)) and not any(_reported(e.field, facts) for e in manifest.expectations):
        nothing = "nothing that the lockfile says could be compared"
        findings.append(_finding(facts.node, "lockfile", "fields to compare", nothing, "unknown", "must"))
    return findings


def _sif_in_words(facts: Facts | None) -> str:
    return "" if facts is None or facts.sif is None else sif_in_words(facts.sif)


def _judge_staging(facts: Facts) -> Iterable[Finding]:
    """Tell what is used from the shared file system although a copy was asked for: slower, not wrong."""
    for problem in facts.not_staged:
        yield _finding(facts.node, "stage", "a copy on this node", problem, "mismatch", "warn")


def _judge_gpus(manifest: Manifest, facts: Facts) -> Iterable[Finding]:
    """Judge driver and GPUs of a node by the compatibility table that came with the manifest."""
    needs = manifest.gpu_needs
    if needs is None:
        return
    from hpcenv.model import compat

    table = compat.parse(json.loads(needs.table), origin="the compatibility table of this run")
    driver, driver_problem = _text(facts, "host.driver-version")
    capabilities = facts.values.get("host.gpu-compute-capabilities")
    gpus = capabilities if isinstance(capabilities, tuple) else ()
    floor = compat.driver_floor(table, needs.cuda)
    judged = compat.check_driver(table, needs.cuda, driver, node=facts.node, compute_capability=gpus[0] if gpus else "")
    yield from _as_finding(
        facts, needs, "host.driver-version", f">= {floor.version}" if floor else f"for CUDA {needs.cuda}",
        driver_problem or driver, judged,
    )  # fmt: skip
    models = facts.values.get("host.gpu-models")
    for capability in sorted(set(gpus)):
        name = models[gpus.index(capability)] if isinstance(models, tuple) and len(models) == len(gpus) else ""
        judged = compat.covers(table, needs.arch_list, capability, gpu=name, cuda=needs.cuda, driver=driver)
        if not needs.arch_list:
            judged = compat.Judgement(result="unknown", what="which GPUs this torch has kernels for is not known")
        locked = ", ".join(needs.arch_list) or "unknown"
        yield from _as_finding(facts, needs, "host.gpu-compute-capabilities", locked, capability, judged)
    if not gpus:
        reason = facts.unknown.get("host.gpu-compute-capabilities", "no GPU was found")
        judged = compat.Judgement(result="unknown", what=reason)
        locked = ", ".join(needs.arch_list) or "unknown"
        yield from _as_finding(facts, needs, "host.gpu-compute-capabilities", locked, reason, judged)
    yield from _judge_models(facts, needs, table, models if isinstance(models, tuple) else ())
    mig = facts.values.get("host.gpu-mig")
    if isinstance(mig, tuple) and "enabled" in mig:
        judged = compat.Judgement(result="mismatch", what="a GPU is split (MIG)", hint="ask for whole GPUs")
        yield from _as_finding(facts, needs, "host.gpu-mig", "disabled", ", ".join(mig), judged)
    for requirement in compat.requirements(needs.require):
        judged = compat.evaluate_require(requirement, facts.values)
        yield from _as_finding(facts, needs, "container.nvidia-require", requirement.text, judged.why, judged)


def _judge_models(facts: Facts, needs: GpuNeeds, table: compat.Compat, models: tuple[str, ...]) -> Iterable[Finding]:
    """Compare the GPUs with the one that the environment was locked for."""
    from hpcenv.model import compat

    wanted = compat.gpu_by_name(table, needs.gpu) if needs.gpu else None
    for model in sorted(set(models)):
        have = compat.gpu_by_name(table, model)
        if wanted is not None and have is not None and have.name != wanted.name:
            note = f"locked for {needs.gpu}: other GPUs round differently"
            severity = needs.severity.get("host.gpu", "warn")
            yield _finding(facts.node, "host.gpu-models", wanted.name, model, "mismatch", severity, note)


def _text(facts: Facts, field: str) -> tuple[str, str]:
    """Return a fact as text, or nothing and why there is none."""
    if _reported(field, facts):
        return str(facts.values[field]), ""
    return "", facts.unknown.get(field, "this node did not report it")


def _as_finding(
    facts: Facts, needs: GpuNeeds, field: str, locked: str, found: str, judged: compat.Judgement
) -> Iterable[Finding]:
    if judged.result != "match":
        note = "; ".join(part for part in (judged.what, judged.why, judged.hint) if part)
        severity = needs.severity.get(field, "must")
        yield _finding(facts.node, field, locked, found or "unknown", judged.result, severity, note)


def _one_row_for_the_inside(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Say once why nothing inside could be read: a row for each field would bury it."""
    kept = [f for f in findings if not (f.result == "unknown" and _is_inside(f.field))]
    reason = facts.unknown["probe"]
    if reason == SKIPPED and any(f.field == _SIF and _blocks(f) for f in kept):
        return kept  # the SIF's own row says it all
    return [*kept, _finding(facts.node, "environment", "readable", reason, "unknown", "must")]


def _expectations(manifest: Manifest) -> tuple[Expectation, ...]:
    if not manifest.script:
        return manifest.expectations
    script = Expectation(
        field="code.script-sha256", value=manifest.script_sha256, severity="must", origin="at submission"
    )
    return (*manifest.expectations, script)


def _is_inside(field: str) -> bool:
    return field.split(".", maxsplit=1)[0] in ("python", "torch", "libs", "packages", "system")


def _package_severity(manifest: Manifest) -> Severity:
    """Single packages weigh as much as the digest that they explain."""
    digests = [e for e in manifest.expectations if e.field in ("packages.env-digest", "packages.content-digest")]
    return "must" if not digests else min((e.severity for e in digests), key=_SEVERITY_ORDER.index)


_SEVERITY_ORDER: list[Severity] = ["must", "warn", "info"]


def _reported(field: str, facts: Facts) -> bool:
    """Whether a field has a value that counts; one that is also unknown has none."""
    return field in facts.values and field not in facts.unknown


def _why_unknown(field: str, facts: Facts) -> str:
    """Return the field's own reason, or that of the part of the check step it belongs to."""
    part = {"host": "host", "code": "script", "container": "sif"}.get(field.split(".", maxsplit=1)[0], "probe")
    return facts.unknown.get(field) or facts.unknown.get(part) or "this node did not report it"


def compare(expected: Expectation, facts: Facts) -> Finding | None:
    """Return what is worth telling about one field on one node, None when it matches."""
    locked = _show(expected.value)
    if not _reported(expected.field, facts):
        reason = _why_unknown(expected.field, facts)
        return _finding(facts.node, expected.field, locked, reason, "unknown", expected.severity)
    found = facts.values[expected.field]
    if expected.rule == "at-least":
        return _compare_floor(expected, found, facts.node)
    # Python takes True for 1; a lockfile that says one and a node that says the other differ.
    if found == expected.value and isinstance(found, bool) == isinstance(expected.value, bool):
        return None
    note = _files_note(expected, facts) or expected.note
    note = note or _list_note(expected.value, found) or _kind_note(expected.value, found)
    return _finding(facts.node, expected.field, locked, _show(found), "mismatch", expected.severity, note)


def _compare_floor(expected: Expectation, found: Value, node: str) -> Finding | None:
    floor, have = _version(expected.value), _version(found)
    locked = f">= {_show(expected.value)}"
    if floor is None or have is None:
        result: Result = "mismatch" if found == "absent" else "unknown"
        return _finding(node, expected.field, locked, _show(found), result, expected.severity)
    # 12 and 12.0 are the same version.
    if have + (0,) * (len(floor) - len(have)) >= floor:
        return None
    return _finding(node, expected.field, locked, _show(found), "mismatch", expected.severity)


def _version(value: Value) -> tuple[int, ...] | None:
    """Return `580.65.06`, or a count, as numbers; None for what is neither."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return None
    text = str(value)
    return tuple(int(part) for part in text.split(".")) if re.fullmatch(r"[0-9]+(\.[0-9]+)*", text) else None


def _files_note(expected: Expectation, facts: Facts) -> str:
    """Name files behind the digest over what no package lists: the newest, for all that is locked is how many."""
    count = facts.values.get("packages.unlisted-count")
    if expected.field != "packages.unlisted-digest" or not isinstance(count, int):
        return ""
    now = f"{expected.note}, now {count}" if expected.note else f"{count} such files"
    names = ", ".join(_short_path(path) for path in facts.unlisted)
    if not names:
        return now
    return f"{now}: {names}" if count <= len(facts.unlisted) else f"{now}, the newest: {names}"


def _short_path(path: str) -> str:
    """Return the end of a path, which tells most, in less than a line."""
    path = visible(re.sub(r"^.*?/(?=(site|dist)-packages/)", "", path))
    return path if len(path) <= _PATH_WIDTH else "..." + path[3 - _PATH_WIDTH :]


_PATH_WIDTH = 60


def _list_note(locked: Value, found: Value) -> str:
    if not isinstance(locked, tuple) or not isinstance(found, tuple):
        return ""
    added = [item for item in found if item not in locked]
    gone = [item for item in locked if item not in found]
    if not added and not gone:
        return "the same items in another order or number"
    return "; ".join(f"{word}: {', '.join(items[:3])}" for word, items in (("added", added), ("gone", gone)) if items)


def _kind_note(locked: Value, found: Value) -> str:
    """Tell `8` from 8 where both would look alike in the table."""
    if _show(locked) != _show(found):
        return ""
    return f"locked as {_KINDS[type(locked)]}, found as {_KINDS[type(found)]}"


_KINDS: dict[type, str] = {str: "text", int: "a number", float: "a number", bool: "true or false", tuple: "a list"}


def _show(value: Value) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _compare_nodes(manifest: Manifest, facts: Mapping[str, Facts]) -> list[Finding]:
    """Return the nodes that differ from the majority of the others, or cannot be compared."""
    gpus: Severity = "must" if manifest.gpus_per_node else "info"
    fields = {**_SAME_ON_ALL_NODES, **dict.fromkeys(_SAME_GPUS_ON_ALL_NODES, gpus)}
    if manifest.gpu_needs is not None:
        fields["host.gpu-sm-counts"] = manifest.gpu_needs.severity.get("host.gpu-sm-counts", "info")
    has_row = {e.field for e in manifest.expectations}
    return [
        finding
        for field, severity in fields.items()
        for finding in _compare_field(field, severity, facts)
        if finding.result == "mismatch" or (severity == "must" and field not in has_row)
    ]


def _compare_field(field: str, severity: Severity, facts: Mapping[str, Facts]) -> Iterable[Finding]:
    seen = {node: found.values[field] for node, found in facts.items() if _reported(field, found)}
    if len(facts) < 2 or not (seen or any(field in found.unknown for found in facts.values())):
        return  # nothing to compare; nodes without a GPU driver have no GPU models at all
    usual = Counter(seen.values()).most_common(1)[0][0] if seen else None
    expected = "the same on all nodes" if usual is None else _show(usual)
    for node, found in facts.items():
        if node not in seen:
            yield _finding(node, field, expected, _why_unknown(field, found), "unknown", severity)
        elif seen[node] != usual:
            note = DIFFERS_BETWEEN_NODES
            yield _finding(node, field, expected, _show(seen[node]), "mismatch", severity, note)


def _finding(
    node: str, field: str, locked: str, found: str, result: Result, severity: Severity, note: str = ""
) -> Finding:
    return Finding(node=node, field=field, locked=locked, found=found, result=result, severity=severity, note=note)


def _blocks(finding: Finding) -> bool:
    return finding.severity == "must" and finding.result != "match"


def _worst(findings: Iterable[Finding]) -> Result:
    """A mismatch is certain and comes before a doubt; only `must` blocks."""
    blocking = {finding.result for finding in findings if _blocks(finding)}
    if "mismatch" in blocking:
        return "mismatch"
    return "unknown" if "unknown" in blocking else "match"


def _by_weight(finding: Finding) -> tuple[int, int, str, int, str]:
    """Blocking rows first; within a node the single package before the digest it explains."""
    order: list[Result] = ["mismatch", "unknown", "match"]
    summary = finding.field in ("packages.env-digest", "packages.content-digest", "packages.count")
    return (
        _SEVERITY_ORDER.index(finding.severity),
        order.index(finding.result),
        finding.node,
        int(summary),
        finding.field,
    )
