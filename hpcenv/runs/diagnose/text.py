"""A diagnosis as text. Pure. Runs on: LOGIN NODE."""

from __future__ import annotations

from collections.abc import Iterator

from hpcenv import size
from hpcenv.runs.diagnose.choose import ANY_EXCEPTION
from hpcenv.runs.diagnose.diagnose import Evidence, FailureDiagnosis
from hpcenv.text import plural, wrap

_OWNERS = {
    "user": "you can remove it",
    "node": "a fault of the node",
    "site": "a limit or service of the cluster",
    "unknown": "the line does not say it",
}
# This many findings of other patterns are printed. --json has all of them.
_MOST_OTHERS = 6
_MOST_TEXT = 200
# For these patterns, the first failure or the verdict says everything.
_SAID = frozenset({ANY_EXCEPTION, "gate-check-failed", "gate-mismatch", "gate-unknown", "slurm-cancelled"})


def render(diagnosis: FailureDiagnosis) -> str:
    """Return a diagnosis as text."""
    return "\n".join(_lines(diagnosis))


def next_lines(diagnosis: FailureDiagnosis) -> list[str]:
    """Return the lines for `wait` and `report`: cause, fix and command; empty if the first failure says the same."""
    cause = diagnosis.cause
    if cause is None or cause.pattern in _SAID:
        return []
    said = "" if cause.line == 0 else f"cause: {cause.cause} [{cause.owner}: {cause.pattern}]"
    command = f"next: hpcenv diagnose {diagnosis.subject}"
    return [wrap(line) for line in (said, f"fix: {cause.fix}", command) if line]


def _lines(diagnosis: FailureDiagnosis) -> Iterator[str]:
    if diagnosis.outcome == "no-failure":
        yield f"{diagnosis.subject}: the run completed, and no failure is recorded"
        return
    yield from _headline(diagnosis)
    consequences = [one for one in diagnosis.others if one.kind == "cascade"]
    possible = [one for one in diagnosis.others if one.kind != "cascade"]
    if possible:
        yield ""
        yield "other possible causes, later or less certain:"
        yield from (f"  {_one_line(one)}" for one in possible[:_MOST_OTHERS])
    if consequences:
        yield ""
        yield "consequences, not causes:"
        yield from (f"  {_one_line(one)}" for one in consequences[:_MOST_OTHERS])
    yield from _about(diagnosis)


def _headline(diagnosis: FailureDiagnosis) -> Iterator[str]:
    cause = diagnosis.cause
    if cause is not None:
        yield wrap(f"cause: {cause.cause}")
        yield f"  owner     {cause.owner}: {_OWNERS[cause.owner]}"
        yield f"  where     {_place(cause)}"
        if cause.code:
            yield f"  code      {cause.code}"
        yield f"  line      {cause.text[:_MOST_TEXT]}"
        if cause.peers:
            yield f"  peers     {', '.join(f'{peer} ({count} times)' for peer, count in cause.peers.items())}"
        yield wrap(f"  fix       {cause.fix}", indent=12)
        yield wrap(f"  pattern   {cause.pattern} ({cause.source}; read {cause.retrieved})", indent=12)
        return
    if diagnosis.outcome == "consequences":
        yield "cause unknown: the logs show only consequences of another failure"
    else:
        yield f"no known pattern: none of {diagnosis.patterns} patterns is in the logs"
    if diagnosis.failure:
        yield wrap(f"  first failure: {diagnosis.failure}", indent=4)


def _about(diagnosis: FailureDiagnosis) -> Iterator[str]:
    notes = [wrap(f"note: {note}", indent=2) for note in diagnosis.notes]
    if notes:
        yield ""
        yield from notes
    yield ""
    read = [log for log in diagnosis.logs if not log.problem]
    total = sum(log.size for log in read)
    logs = plural(len(read), "log")
    torch = f", for torch {diagnosis.torch}" if diagnosis.torch else ""
    yield f"{diagnosis.subject}: read {logs}, {size.shown(total)}; {diagnosis.patterns} patterns{torch}"
    yield from (f"  not read: {log.path}: {log.problem}" for log in diagnosis.logs if log.problem)


def _one_line(one: Evidence) -> str:
    times = f", {one.count} times" if one.count > 1 else ""
    return f"{one.pattern}: {one.cause} ({_place(one)}{times})"


def _place(one: Evidence) -> str:
    """Return the place of a finding: file and line, node, ranks, time."""
    parts = [f"{one.file}:{one.line}" if one.line else one.file]
    if one.node:
        parts.append(f"node {one.node}")
    if one.rank is not None:
        more = f" and {len(one.ranks) - 1} more" if len(one.ranks) > 1 else ""
        parts.append(f"rank {one.rank}{more}")
    if one.time:
        parts.append(one.time)
    return ", ".join(parts)
