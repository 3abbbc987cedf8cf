"""The gate: compare the facts of all nodes with the manifest, and return a verdict. Pure.

Runs on: COMPUTE NODE (the batch node), standard library only.

A comparison has one of three results: `match`, `mismatch`, `unknown`. All nodes are judged before the decision. Each
node is compared with the lockfile, and the nodes are compared with each other. The manifest gives the severity of each
field. If a field must match and is `unknown`, the job is blocked as with a mismatch, but with a different exit status.
The reason is that a wrong "match" costs more than a job that did not start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hpcenv.errors import NodeRejected
from hpcenv.judge import gpu_start
from hpcenv.judge.checks import check_results
from hpcenv.judge.compare import compare, show, why_unknown
from hpcenv.judge.compat import gpu_rules, library_rules
from hpcenv.judge.job_variables import changes_results
from hpcenv.judge.network import rendezvous
from hpcenv.judge.verdict_table import binding_in_words, overlay_in_words, sif_in_words
from hpcenv.records.checks import CheckOutcome
from hpcenv.records.codec import SCHEMA
from hpcenv.records.facts import SKIPPED, SKIPPED_FOR_OVERLAY, Difference, Facts
from hpcenv.records.manifest import Expectation, Manifest, Setting
from hpcenv.records.outcome import NodeExit
from hpcenv.records.severities import STRICTEST_FIRST, Severities, strictest
from hpcenv.records.variables import recorded_value
from hpcenv.records.verdict import Finding, NodeVerdict, Result, Verdict

# The note of a finding for which nodes were compared with each other, not with the lockfile.
DIFFERS_BETWEEN_NODES = "differs between the nodes of this job"

_SIF = "container.sif.sha256"
_OVERLAY = "container.overlay.sha256"
_MOUNTS = "container.mounts"
_SCRIPT = "code.script-sha256"
_CODE = "code.digest"
_CHANGED = "code.changed"
_HOOK = "code.start-hook-sha256"
# Fields with a digest over all packages. If a digest differs, the rows of the single packages explain why.
_PACKAGE_DIGESTS = ("packages.env-digest", "packages.content-digest")


@dataclass(frozen=True, kw_only=True)
class _Start:
    """One start of a run, with the facts by which this start is judged.

    Attributes:
        nodes: all nodes of the allocation, in Slurm's order.
        reported: node -> the facts that the node wrote in this attempt.
        silent: node -> why the node has no facts of this attempt.
    """

    manifest: Manifest
    nodes: tuple[str, ...]
    attempt: int
    job_id: str
    severities: Severities
    reported: dict[str, Facts]
    silent: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class _ChosenNodes:
    """The nodes that train, and their rendezvous.

    Attributes:
        launched: the nodes that train; empty if no ranks can start.
        findings: the reasons why no rendezvous is possible.
    """

    launched: tuple[str, ...] = ()
    choice: rendezvous.Choice
    findings: tuple[Finding, ...] = ()


def judge(
    manifest: Manifest,
    nodes: Sequence[str],
    facts: Mapping[str, Facts],
    problems: Mapping[str, str],
    *,
    attempt: int,
    job_id: str,
    window: tuple[float, float] | None = None,
) -> tuple[Verdict, rendezvous.Choice]:
    """Judge one attempt.

    Args:
        manifest: the run, with the locked values and the severity of each field.
        nodes: all nodes of the allocation, in Slurm's order.
        facts: node -> its facts. Facts that belong to a different run, attempt or node do not count.
        problems: node -> why the node has no facts.
        attempt, job_id: attempt and job of this start. The rendezvous id is made from these two numbers.
        window: when this attempt began, and the present time, by the batch node's clock; None if they are unknown.

    Returns:
        The verdict, and the choice of the network. The verdict contains parts of this choice.

    Raises:
        RecordInvalid: the manifest does not give the severity of a field.
    """
    start = _of_this_attempt(manifest, nodes, facts, problems, attempt=attempt, job_id=job_id)
    clocks = check_results.compare_clocks(manifest, start.reported, window)
    findings = _findings(start, clocks)
    chosen = _choose(start, findings)
    return _verdict(start, clocks, findings, chosen), chosen.choice


def _of_this_attempt(
    manifest: Manifest,
    nodes: Sequence[str],
    facts: Mapping[str, Facts],
    problems: Mapping[str, str],
    *,
    attempt: int,
    job_id: str,
) -> _Start:
    """Separate the nodes with facts of this attempt from the nodes without, and say why the facts are missing."""
    usable, missing = {}, {}
    for node in nodes:
        found = facts.get(node)
        if found is None:
            missing[node] = problems.get(node, "this node reported no facts")
        elif (found.run, found.attempt, found.node) != (manifest.run, attempt, node):
            missing[node] = f"its facts belong to run {found.run}, attempt {found.attempt}, node {found.node}"
        else:
            usable[node] = found
    return _Start(
        manifest=manifest,
        nodes=tuple(nodes),
        attempt=attempt,
        job_id=job_id,
        severities=Severities(manifest.severities),
        reported=usable,
        silent=missing,
    )


def _findings(start: _Start, clocks: Mapping[str, CheckOutcome]) -> tuple[Finding, ...]:
    """Return the findings on the job, on each node, and on differences between the nodes."""
    manifest, nodes, severities = start.manifest, start.nodes, start.severities
    return (
        *_judge_shape(manifest, nodes, severities),
        *_judge_lockfile(manifest, nodes, severities),
        *_judge_silent(start.silent, severities),
        *(row for facts in start.reported.values() for row in _judge_node(manifest, facts, severities)),
        *_compare_nodes(manifest, start.reported, severities),
        *(row for node, clock in clocks.items() for row in check_results.findings(node, [clock], severities)),
    )


def _choose(start: _Start, findings: Sequence[Finding]) -> _ChosenNodes:
    """Choose the nodes that train, and their rendezvous. If no rendezvous is possible, return the reasons."""
    manifest, nodes, facts, attempt = start.manifest, start.nodes, start.reported, start.attempt
    launched, choice = _choose_nodes(manifest, nodes, facts, findings, job_id=start.job_id, attempt=attempt)
    if choice is not None:
        return _ChosenNodes(launched=launched, choice=choice)
    choice = rendezvous.choose(manifest, nodes, facts, job_id=start.job_id, attempt=attempt)
    return _ChosenNodes(choice=choice, findings=tuple(_judge_network(nodes, choice, start.silent, start.severities)))


def _verdict(
    start: _Start, clocks: Mapping[str, CheckOutcome], findings: Sequence[Finding], chosen: _ChosenNodes
) -> Verdict:
    """Return the verdict, which contains the settings for a start only if everything matches."""
    manifest, reported, choice, launched = start.manifest, start.reported, chosen.choice, chosen.launched
    findings = (*findings, *chosen.findings)
    verdict = Verdict(
        schema=SCHEMA,
        run=manifest.run,
        attempt=start.attempt,
        result=check_results.worst(f for f in findings if f.node in launched or not launched),
        nodes=_node_verdicts(manifest, start.nodes, reported, findings, start.severities),
        findings=tuple(sorted(findings, key=_by_weight)),
        rendezvous=choice.rendezvous,
        settings=_without_credentials(choice),
        inherited=_inherited(launched, reported, choice),
        launched=launched,
        notes=(*_notes(manifest), *binding_in_words({node: one.rank_cpus for node, one in reported.items()})),
        network=choice.network,
        preflight=check_results.summary(manifest, check_results.with_outcomes(reported, clocks)),
    )
    return verdict if verdict.result == "match" else check_results.without_start(verdict)


def _without_credentials(choice: rendezvous.Choice) -> dict[str, tuple[Setting, ...]]:
    """Return the settings of each node without credentials, as records may contain them."""
    return {
        node: tuple(replace(setting, value=recorded_value(setting.name, setting.value)) for setting in settings)
        for node, settings in choice.settings.items()
    }


def _inherited(
    nodes: Iterable[str], facts: Mapping[str, Facts], choice: rendezvous.Choice
) -> dict[str, tuple[Setting, ...]]:
    """Return, for each node, the variables that its ranks get from the job and that can change results."""
    return {
        node: tuple(
            variable
            for variable in facts[node].variables
            if changes_results(variable.name) and variable.name not in {s.name for s in choice.settings.get(node, ())}
        )
        for node in nodes
        if node in facts
    }


def after_launch(verdict: Verdict, refused: Sequence[NodeExit], severities: Severities) -> Verdict:
    """Add to the verdict why nodes refused the start. Pure.

    Each node checks the SIF once more directly before the start. This last check is a part of the gate.

    Args:
        verdict: the verdict of this attempt, which allowed the start.
        refused: records of the nodes on which the start was refused.
        severities: the severity of each field in this run.
    """
    rows = [row for record in refused for row in _refusal(record, severities)]
    findings = (*rows, *verdict.findings)
    own = {record.node: check_results.worst(row for row in rows if row.node == record.node) for record in refused}
    changed = replace(
        verdict,
        result=check_results.worst(rows),
        nodes=tuple(replace(node, result=own.get(node.node, node.result)) for node in verdict.nodes),
        findings=tuple(sorted(findings, key=_by_weight)),
    )
    return check_results.without_start(changed)


def _refusal(record: NodeExit, severities: Severities) -> list[Finding]:
    if record.differences:
        rows = _in_rows(record.node, record.differences, severities)
    elif record.status == NodeRejected.exit_status:
        rows = [_finding(severities, record.node, _SIF, "the file that was checked", record.detail, "mismatch")]
    else:
        rows = [_finding(severities, record.node, "environment", "ready to start", record.detail, "unknown")]
    # [policy] cannot make this finding weaker: the start was already refused.
    return [replace(row, severity="must") for row in rows]


def _node_verdicts(
    manifest: Manifest,
    nodes: Sequence[str],
    facts: Mapping[str, Facts],
    findings: Iterable[Finding],
    severities: Severities,
) -> tuple[NodeVerdict, ...]:
    """Return the result of each node, and the number of fields that were compared on the node."""
    fields = [expected.field for expected in (*manifest.expectations, *_of_the_run(manifest, severities))]
    of_node: dict[str, list[Finding]] = {node: [] for node in nodes}
    for finding in findings:
        of_node[finding.node].append(finding)
    return tuple(
        NodeVerdict(
            node=node,
            result=check_results.worst(of_node[node]),
            compared=sum(facts[node].has(field) for field in fields) if node in facts else 0,
            sif=_sif_in_words(facts.get(node)),
        )
        for node in nodes
    )


def _sif_in_words(facts: Facts | None) -> str:
    return "" if facts is None or facts.sif is None else sif_in_words(facts.sif)


def _choose_nodes(
    manifest: Manifest,
    nodes: Sequence[str],
    facts: Mapping[str, Facts],
    findings: Iterable[Finding],
    *,
    job_id: str,
    attempt: int,
) -> tuple[tuple[str, ...], rendezvous.Choice | None]:
    """Return the first nodes that match and reach each other, as many as the run needs; empty if there are too few."""
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
        # If no other node can reach the first node, the first node is the problem.
        out |= {chosen[0]} if len(without_route) == len(chosen) - 1 > 1 else without_route


# -- the job as a whole -------------------------------------------------------------------


def _judge_shape(manifest: Manifest, nodes: Sequence[str], severities: Severities) -> Iterable[Finding]:
    """Refuse a job whose number of nodes is not the planned number."""
    if len(nodes) != (planned := manifest.nodes + manifest.spare):
        yield _finding(severities, nodes[0], "job.nodes", str(planned), str(len(nodes)), "mismatch")


def _judge_lockfile(manifest: Manifest, nodes: Sequence[str], severities: Severities) -> Iterable[Finding]:
    """Report that the lockfile was edited, but is used because of --frozen."""
    if manifest.lockfile_edited:
        note = "the file was changed by hand or by a merge, and the fingerprint in it names something else"
        locked, found = "as `hpcenv lock` wrote it", f"content {manifest.lockfile_edited}"
        yield _finding(severities, nodes[0], "lockfile.edited", locked, found, "mismatch", note)


def _judge_silent(problems: Mapping[str, str], severities: Severities) -> Iterable[Finding]:
    for node, reason in problems.items():
        yield _finding(severities, node, "facts", "reported", reason, "unknown")


def _judge_network(
    nodes: Sequence[str], choice: rendezvous.Choice, without_facts: Mapping[str, str], severities: Severities
) -> Iterable[Finding]:
    """Return the problems that prevent a rendezvous. Nodes without facts are left out: they already have a finding."""
    problems = {node: reason for node, reason in choice.problems.items() if node not in without_facts}
    if choice.rendezvous is None and not choice.problems and not without_facts:
        problems = {nodes[0]: "no rendezvous endpoint could be chosen"}
    for node, reason in sorted(problems.items()):
        yield _finding(severities, node, "network.route", f"a route to {nodes[0]}", reason, "unknown")


# -- one node -----------------------------------------------------------------------------


def _judge_staging(_: Manifest, facts: Facts, severities: Severities) -> list[Finding]:
    """Report that a node uses the shared file system although a copy on the node was requested."""
    return [
        _finding(severities, facts.node, "stage", "a copy on this node", problem, "mismatch")
        for problem in facts.not_staged
    ]


def _judge_mounts(manifest: Manifest, facts: Facts, severities: Severities) -> list[Finding]:
    """Report mounts that hide files of the image and are not in the lockfile."""
    if manifest.environment.kind != "sif" or "probe" in facts.unknown or _SIF in facts.unknown:
        return []
    expected = "nothing over files of the image"
    if not facts.has(_MOUNTS):
        return [_finding(severities, facts.node, _MOUNTS, expected, why_unknown(_MOUNTS, facts), "unknown")]
    found = facts.values[_MOUNTS]
    return [_finding(severities, facts.node, _MOUNTS, expected, show(found), "mismatch")] if found else []


def _judge_changed_code(_: Manifest, facts: Facts, severities: Severities) -> list[Finding]:
    """Report modules that changed in the run's copy of the code during an earlier attempt."""
    changed = facts.values.get(_CHANGED)
    note = "changed since the submission, while an earlier attempt ran"
    return [_finding(severities, facts.node, _CHANGED, "none", show(changed), "mismatch", note)] if changed else []


def _judge_checks(_: Manifest, facts: Facts, severities: Severities) -> list[Finding]:
    """Report the preflight checks that failed or are unknown."""
    return [] if facts.checks is None else check_results.findings(facts.node, facts.checks.others, severities)


# The rules that judge a single node, in addition to the comparison with the lockfile. To add a rule, add its function.
_RULES: tuple[Callable[[Manifest, Facts, Severities], list[Finding]], ...] = (
    gpu_rules.judge,
    library_rules.judge,
    _judge_staging,
    _judge_mounts,
    _judge_changed_code,
    _judge_checks,
)


def _judge_node(manifest: Manifest, facts: Facts, severities: Severities) -> list[Finding]:
    expected = (*manifest.expectations, *_of_the_run(manifest, severities))
    findings = [found for one in expected if (found := compare(one, facts)) is not None]
    for rule in _RULES:
        findings.extend(rule(manifest, facts, severities))
    packages = _judge_packages(facts, severities)
    findings = [*_lighten_digests(findings, packages), *packages]
    if "probe" in facts.unknown:
        findings = _one_row_for_the_inside(facts, findings, severities)
    else:
        findings = _one_row_for_one_reason(facts, findings, severities)
    # The variables are known on every node. If only variables were compared, the environment itself was not compared.
    compared = [e.field for e in manifest.expectations if not e.field.startswith("env.")]
    if not any(map(_blocks, findings)) and not any(facts.has(field) for field in compared):
        nothing = "nothing that the lockfile names could be compared"
        findings.append(_finding(severities, facts.node, "lockfile", "fields to compare", nothing, "unknown"))
    return findings


def _of_the_run(manifest: Manifest, severities: Severities) -> Iterable[Expectation]:
    """Yield the values that must be the same as at the submission: script, code, start hook and data."""
    wanted: dict[str, tuple[str, str]] = {}
    if manifest.script:
        wanted[_SCRIPT] = (manifest.script_sha256, "")
    if manifest.launches and manifest.source is not None and manifest.source.digest:
        wanted[_CODE] = (manifest.source.digest, f"the run's copy of the code: {manifest.source.folder}")
    if manifest.launches and manifest.start_hook_sha256:
        wanted[_HOOK] = (manifest.start_hook_sha256, "what Python runs at the start of every rank")
    for one in manifest.data:
        named = f"{one.hub}, {one.path}" if one.hub else one.path
        wanted[f"data.{one.name}"] = (one.state, f"{named} ({one.compare}), as it was at submission")
    for field, (value, note) in wanted.items():
        severity = severities.of(field)
        yield Expectation(field=field, value=value, severity=severity, origin="at submission", note=note)


def _notes(manifest: Manifest) -> tuple[str, ...]:
    """Return the notes of the verdict: on data, code, modules, overlay and GPUs."""
    data = [f"data {one.hub or one.path}: {one.compare} compared: {one.state}" for one in manifest.data]
    live = () if manifest.source is None else manifest.source.live
    code = [f"live, not covered: {', '.join(live)}"] if live else []
    if manifest.module or manifest.entry:
        module = f"the project has no module {manifest.module}"
        what = f"{manifest.entry} is a console script" if manifest.entry else module
        code.append(f"script-sha256 not known: {what}, it is the environment's")
    environment = manifest.environment
    overlay = [] if environment.overlay is None else [overlay_in_words(environment.overlay)]
    through = f"programs in the container start through {' '.join(environment.wrapper)}: {environment.wrapper_origin}"
    reason = gpu_start.why_not_tried(manifest)
    gpus = [f"GPUs: not tried ({reason})"] if reason else []
    return (
        *data,
        *code,
        *manifest.hides,
        *overlay,
        *([through] if environment.wrapper else []),
        *manifest.imported,
        *gpus,
    )


def _judge_packages(facts: Facts, severities: Severities) -> list[Finding]:
    """Return a finding for each package that differs from the lockfile, or could not be read."""
    return _in_rows(facts.node, facts.differences, severities)


def _in_rows(node: str, differences: Iterable[Difference], severities: Severities) -> list[Finding]:
    return [
        _finding(severities, node, d.field, d.locked, d.found, "unknown" if d.unknown else "mismatch", d.note)
        for d in differences
    ]


def _lighten_digests(findings: Iterable[Finding], packages: Sequence[Finding]) -> list[Finding]:
    """Lower the severity of a digest over all packages to the severity of the packages that explain the difference.

    If a package is allowed to differ, its difference still changes the digest. With the digest's own severity, this
    package would block the job.
    """
    if not packages:
        return list(findings)
    heaviest = strictest(package.severity for package in packages)
    return [
        replace(finding, severity=max(finding.severity, heaviest, key=STRICTEST_FIRST.index))
        if finding.field in _PACKAGE_DIGESTS
        else finding
        for finding in findings
    ]


def _one_row_for_the_inside(facts: Facts, findings: Sequence[Finding], severities: Severities) -> list[Finding]:
    """Say once why no field inside the environment could be read. One row for each field would hide the reason."""
    kept = [f for f in findings if not (f.result == "unknown" and _is_inside(f.field))]
    reason = facts.unknown["probe"]
    cause = {SKIPPED: (_SIF,), SKIPPED_FOR_OVERLAY: (_OVERLAY,)}.get(reason, ())
    if any(f.field in cause and _blocks(f) for f in kept):
        return kept  # the row on the SIF or on the overlay gives the reason
    return [*kept, _finding(severities, facts.node, "environment", "readable", reason, "unknown")]


# The probe has several parts, and each part reads a few fields. If more fields than this number are missing, more than
# one part has failed, and the rows of the fields are joined.
_FIELDS_OF_A_PART = 8


def _one_row_for_one_reason(facts: Facts, findings: Sequence[Finding], severities: Severities) -> list[Finding]:
    """Say once why many fields inside the environment could not be read."""
    unread: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.result == "unknown" and _is_inside(finding.field):
            unread.setdefault(finding.found, []).append(finding)
    many = {reason: group for reason, group in unread.items() if len(group) > _FIELDS_OF_A_PART}
    kept = [f for f in findings if not (f.result == "unknown" and _is_inside(f.field) and f.found in many)]
    for reason, group in many.items():
        note = f"{len(group)} fields could not be read, among them {', '.join(f.field for f in group[:3])}"
        row = _finding(severities, facts.node, "environment", "readable", reason, "unknown", note)
        kept.append(replace(row, severity=strictest(f.severity for f in group)))
    return kept


def _is_inside(field: str) -> bool:
    return field.split(".", maxsplit=1)[0] in ("python", "torch", "libs", "packages", "system")


# -- the nodes against each other ---------------------------------------------------------


def _compare_nodes(manifest: Manifest, facts: Mapping[str, Facts], severities: Severities) -> list[Finding]:
    """Return findings on nodes that differ from the most frequent value of a field, or cannot be compared."""
    if len(facts) < 2:
        return []
    names = {name for found in facts.values() for name in (*found.values, *found.unknown)}
    has_row = {expected.field for expected in manifest.expectations}
    return [
        finding
        for field in sorted(names)
        if severities.same_on_nodes(field)
        for finding in _compare_field(field, facts, severities)
        if finding.result == "mismatch" or (finding.severity != "info" and field not in has_row)
    ]


def _compare_field(field: str, facts: Mapping[str, Facts], severities: Severities) -> Iterable[Finding]:
    values = {node: found.values[field] for node, found in facts.items() if found.has(field)}
    if field.startswith("env."):
        values = {node: values.get(node, "absent") for node in facts}
    usual = Counter(values.values()).most_common(1)[0][0] if values else None
    expected = "the same on all nodes" if usual is None else show(usual)
    for node, found in facts.items():
        if node not in values:
            finding = _finding(severities, node, field, expected, why_unknown(field, found), "unknown")
        elif values[node] != usual:
            note = DIFFERS_BETWEEN_NODES
            finding = _finding(severities, node, field, expected, show(values[node]), "mismatch", note)
        else:
            continue
        yield replace(finding, severity=severities.between_nodes(field))


# -- findings -----------------------------------------------------------------------------


def _finding(
    severities: Severities, node: str, field: str, locked: str, found: str, result: Result, note: str = ""
) -> Finding:
    severity = severities.of(field)
    return Finding(node=node, field=field, locked=locked, found=found, result=result, severity=severity, note=note)


def _blocks(finding: Finding) -> bool:
    return finding.severity == "must" and finding.result != "match"


def _by_weight(finding: Finding) -> tuple[int, int, str, int, str]:
    """Return a sort key. Blocking rows are first. Single packages are before the digest of a node's packages."""
    order: list[Result] = ["mismatch", "unknown", "match"]
    summary = finding.field in (*_PACKAGE_DIGESTS, "packages.count")
    return (
        STRICTEST_FIRST.index(finding.severity),
        order.index(finding.result),
        finding.node,
        int(summary),
        finding.field,
    )
