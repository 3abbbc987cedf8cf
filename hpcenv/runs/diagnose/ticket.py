"""The text that a support desk needs: versions, nodes, jobs, the failure, how to repeat it, and excluded causes.

Runs on: LOGIN NODE. The text contains no environment variables, and no credentials that hpcenv can recognise.
Paths are shortened to their last part. Only paths of the system stay as they are.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from hpcenv.errors import RecordInvalid
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record
from hpcenv.records.variables import recorded_command, recorded_value
from hpcenv.runs.diagnose.diagnose import Evidence, FailureDiagnosis
from hpcenv.runs.entries import Run, Submitted
from hpcenv.runs.status import RunStatus
from hpcenv.text import listed, plural, visible
from hpcenv.version import VERSION

# Facts that a support desk asks for. None of them is a path.
_VERSIONS = (
    "host.machine", "system.os-release", "system.glibc", "host.driver-version", "host.gpu-models", "host.gpu-count",
    "python.version", "torch.version", "torch.cuda", "torch.hip",
)  # fmt: skip
_LONGEST = 300
_MOST_FINDINGS = 5

# Folders of the system: they are the same on every machine, so their names are not private.
_PATH = re.compile(r"(?<![\w.:/~])(?:~[\w.-]{0,64})?/[^\s\"'`,;:()\[\]<>|]{1,400}")
_SYSTEM = re.compile(r"/(?:usr|lib|lib64|bin|sbin|etc|dev|proc|sys|opt|env)(?:/|\Z)")
_QUOTED = re.compile(r"([\"'])((?:~|/)[^\"'\n]{1,400})\1")
_TOKEN = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|AKIA|ASIA|xox[abpr]-|eyJ)[\w.-]{8,}|"
    r"(?i:\bBearer\s+)[\w.~+/=-]{8,}"
)
_ASSIGNED = re.compile(
    r"(?i)\b([\w-]{0,40}(?:token|key|secret|passw(?:or)?d|credential)[\w-]{0,40})(\s{0,3}[=:]\s{0,3})[^\s,;]{1,400}"
)
_WITHHELD = "***"


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """A ticket as text."""

    subject: str
    text: str


def write_ticket(diagnosis: FailureDiagnosis, run: Submitted | None, status: RunStatus | None, *, user: str) -> Ticket:
    """Return the ticket for a run. For log files, `run` and `status` are None.

    Args:
        user: login name of the user, which is left out of quoted lines.
    """
    lines = [f"# {diagnosis.subject}: ticket for the support desk, written by hpcenv {VERSION}", ""]
    lines += _what_failed(diagnosis, status)
    if run is not None and status is not None:
        lines += [*_jobs(run, status), *_versions(run), *_nodes(run, status), *_repeat(run)]
    lines += _excluded(diagnosis, status)
    return Ticket(subject=diagnosis.subject, text="\n".join(_clean(line, user) for line in lines) + "\n")


def _clean(line: str, user: str) -> str:
    return redact(visible(line), user=user)


def redact(text: str, *, user: str = "") -> str:
    """Return text without credentials, private folders and the user's login name."""
    text = recorded_value("", text)
    text = _TOKEN.sub(_WITHHELD, text)
    text = _ASSIGNED.sub(lambda match: f"{match[1]}{match[2]}{_WITHHELD}", text)
    text = _QUOTED.sub(lambda match: f"{match[1]}{_shortened(match[2])}{match[1]}", text)
    text = _PATH.sub(lambda match: _shortened(match[0]), text)
    if len(user) > 2:
        text = re.sub(rf"(?<!\w){re.escape(user)}(?!\w)", "USER", text)
    return text


def _shortened(path: str) -> str:
    if _SYSTEM.match(path):
        return path
    return f".../{path.rstrip('/').rpartition('/')[2]}"


def _what_failed(diagnosis: FailureDiagnosis, status: RunStatus | None) -> Iterator[str]:
    yield "## What failed"
    if status is not None:
        ended = f", exit status {status.exit_status}" if status.exit_status is not None else ""
        yield f"state: {status.state}{ended}"
    if diagnosis.failure:
        yield f"first failure: {diagnosis.failure[:_LONGEST]}"
    cause = diagnosis.cause
    if cause is None:
        yield "cause: unknown; no known pattern names one"
    else:
        yield f"cause ({cause.owner}): {cause.cause}"
        yield from _quoted(cause)
    others = [one for one in diagnosis.others if one.kind != "cascade"][:_MOST_FINDINGS]
    for one in others:
        yield f"also: {one.pattern}: {one.cause}"
        yield from _quoted(one)
    yield from (f"note: {note}" for note in diagnosis.notes)
    yield ""


def _quoted(one: Evidence) -> Iterator[str]:
    where = [f"{one.file}:{one.line}" if one.line else one.file, f"node {one.node}" if one.node else ""]
    where += [f"rank {one.rank}" if one.rank is not None else "", one.time, f"{one.count} lines"]
    yield f"  {', '.join(filter(None, where))}"
    yield f"  > {one.text[:_LONGEST]}"
    if one.peers:
        yield f"  peers named: {', '.join(f'{peer} ({count})' for peer, count in one.peers.items())}"


def _jobs(run: Submitted, status: RunStatus) -> Iterator[str]:
    yield "## Jobs"
    yield f"job ids: {', '.join(run.job_ids)}; attempt {status.attempt}"
    yield from status.earlier
    yield ""


def _versions(run: Submitted) -> Iterator[str]:
    """Yield the versions that the nodes reported: each value once. If the nodes differ, add the nodes to each value."""
    yield "## Versions"
    facts = _facts(run)
    if not facts:
        yield "no node has reported facts"
    for field in _VERSIONS:
        values: dict[str, list[str]] = {}
        for one in facts:
            value = one.values.get(field, f"unknown: {one.unknown[field]}" if field in one.unknown else None)
            if value is not None:
                shown = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
                values.setdefault(shown, []).append(one.node)
        for value, nodes in values.items():
            where = f" ({listed(nodes, 8)})" if len(values) > 1 else ""
            yield f"{field}: {value[:_LONGEST]}{where}"
    if isinstance(run, Run):
        yield f"environment: {run.manifest.environment.kind}, lockfile sha256 {run.manifest.lockfile_sha256}"
    yield ""


def _facts(run: Submitted) -> list[Facts]:
    facts = []
    for path in sorted(run.folder.facts.glob("*.json")):
        try:
            facts.append(load_record(Facts, path))
        except RecordInvalid:
            continue
    return facts


def _nodes(run: Submitted, status: RunStatus) -> Iterator[str]:
    yield "## Nodes"
    ended = {record.node: record for record in status.exits}
    names = sorted({*ended, *(one.node for one in _facts(run))})
    yield f"node list: {','.join(names) or 'unknown'}"
    for record in ended.values():
        failed = ", ".join(f"rank {rank.rank}" for rank in record.ranks[:8] if rank.rank >= 0)
        kills = f", {record.oom_kills} processes killed for lack of memory" if record.oom_kills else ""
        asked = f", ended on request by {record.asked_to_end}" if record.asked_to_end else ""
        yield f"{record.node}: exit status {record.status}{asked}{kills}" + (f"; failed: {failed}" if failed else "")
    yield ""


def _repeat(run: Submitted) -> Iterator[str]:
    yield "## To repeat it"
    yield shlex.join(recorded_command(run.submission.command))
    if isinstance(run, Run):
        manifest = run.manifest
        each = f"{plural(manifest.gpus_per_node, 'GPU')} and {plural(manifest.nproc_per_node, 'rank')} per node"
        shape = f"{plural(manifest.nodes, 'node')}, {each}"
        yield f"shape: {shape}; backend {manifest.backend}"
        if manifest.source is not None and manifest.source.commit:
            yield f"code: commit {manifest.source.commit}" + (" with changes" if manifest.source.dirty else "")
    yield "with the file lock.toml of the run folder, which we can attach"
    yield ""


def _excluded(diagnosis: FailureDiagnosis, status: RunStatus | None) -> Iterator[str]:
    yield "## What was excluded"
    if status is not None and status.verdict is not None:
        verdict = status.verdict
        fields = plural(sum(node.compared for node in verdict.nodes), "field")
        compared = f"{fields} compared on {plural(len(verdict.nodes), 'node')}"
        yield f"environment: {verdict.result}; {compared} before the start"
    found = {one.pattern for one in diagnosis.others} | ({diagnosis.cause.pattern} if diagnosis.cause else set())
    yield f"logs: {diagnosis.patterns - len(found)} of {diagnosis.patterns} known patterns are not in the logs"
    for log in diagnosis.logs:
        yield f"  {log.path}: " + (f"not read: {log.problem}" if log.problem else f"{log.lines} lines read")
