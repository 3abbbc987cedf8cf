"""Read the records of one attempt of a run: its start, its verdict, the exits of its nodes, and its end.

Runs on: LOGIN NODE. A record that cannot be read is treated as missing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcenv.errors import RecordInvalid
from hpcenv.judge import first_failure as failure
from hpcenv.launch.current_attempt import silent_nodes
from hpcenv.records.files import load_record, read_json
from hpcenv.records.outcome import NodeExit
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import Result, Verdict
from hpcenv.runs.entries import Submitted
from hpcenv.text import visible_ascii


def read_finished(folder: RunFolder) -> Mapping[str, Any]:
    """Return the record of how an attempt's batch script ended; empty if it cannot be read."""
    return read_record(folder.finished) or {}


def read_down_nodes(folder: RunFolder) -> dict[str, str]:
    """Return the nodes that Slurm reported as down when an attempt ended, each with the reason."""
    return down_nodes(read_finished(folder))


def down_nodes(finished: Mapping[str, Any]) -> dict[str, str]:
    """Return the nodes that Slurm reported as down, each with the reason, from the record of an attempt's end."""
    down = finished.get("down")
    return {str(node): str(reason) for node, reason in down.items()} if isinstance(down, dict) else {}


def describe_chain_link(run: Submitted, attempt: RunFolder) -> str:
    """Return the job of a chain to which an attempt belongs: `link 2 of 3, job 124`; empty if there is no chain."""
    chain = run.submission.chain
    job_id = (read_record(attempt.started) or {}).get("job_id")
    if len(chain) < 2 or job_id not in chain:
        return ""
    return f"link {chain.index(job_id) + 1} of {len(chain)}, job {job_id}"


def describe_earlier_attempts(run: Submitted) -> tuple[str, ...]:
    """Return one line for each earlier attempt of a run."""
    lines, attempts = [], run.folder.attempts
    for path in sorted(attempts.glob("*"), key=lambda p: [int(n) for n in p.name.split(".") if n.isdigit()]):
        attempt = RunFolder(path)
        link = describe_chain_link(run, attempt)
        verdict, problem = read_verdict(attempt)
        exits = ", ".join(_describe_exit(record) for record in read_exits(attempt)) or "no node recorded its end"
        result = verdict.result if verdict is not None else problem or "no verdict"
        text = describe_stop(read_finished(attempt)) or f"{result}; {exits}"
        lines.append(f"attempt {path.name}{f' ({link})' if link else ''}: {text}")
    return tuple(lines)


def _describe_exit(record: NodeExit) -> str:
    reason = f" after {record.asked_to_end}" if record.asked_to_end else ""
    return f"{record.node} ended with {record.status}{reason}"


def read_verdict(folder: RunFolder) -> tuple[Verdict | None, str]:
    """Return the verdict, and why the verdict cannot be read; (None, "") if there is no verdict."""
    if not os.path.lexists(folder.verdict):
        return None, ""
    try:
        return load_record(Verdict, folder.verdict), ""
    except RecordInvalid as error:
        return None, error.what


def attempt_number(started: Mapping[str, Any] | None) -> int:
    """Return the number of an attempt from its start record; 0 if there is no start record."""
    value = (started or {}).get("attempt")
    return value if type(value) is int else 0


def nodes_started(started: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the nodes of an attempt from its start record; empty if there is no start record."""
    value = (started or {}).get("nodes")
    return tuple(str(node) for node in value) if isinstance(value, list) else ()


def nodes_without_facts(folder: RunFolder) -> tuple[str, ...]:
    """Return the nodes whose check has not ended, if other nodes of the attempt have facts and there is no verdict."""
    if os.path.lexists(folder.verdict):
        return ()
    return silent_nodes(folder, nodes_started(read_record(folder.started)))


def read_exits(folder: RunFolder) -> tuple[NodeExit, ...]:
    """Return the exit records of an attempt's nodes. Records that cannot be read are skipped."""
    exits = []
    for path in sorted(folder.exits.glob("*.json")):
        try:
            exits.append(load_record(NodeExit, path))
        except RecordInvalid:
            continue
    return tuple(exits)


def read_record(path: Path) -> dict[str, Any] | None:
    """Return a small JSON record; None if it is missing, too long or damaged."""
    try:
        data = read_json(path)
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


# Why an attempt was stopped -> Slurm's name for this state, and a description.
_STATES_AFTER_STOP = {"time-limit": ("timeout", "the time limit"), "preemption": ("preempted", "preempted")}


def state_after_stop(finished: Mapping[str, Any]) -> str:
    """Return the state of a job that was stopped, from the record of its end."""
    return _STATES_AFTER_STOP.get(str(finished.get("stopped")), ("failed", ""))[0]


def describe_stop(finished: Mapping[str, Any]) -> str:
    """Describe why an attempt was stopped before its training started; empty if the training started."""
    reason = stopped_before_training(finished)
    if not reason:
        return ""
    return f"stopped before the training started: {_STATES_AFTER_STOP.get(reason, ('', 'stop requested'))[1]}"


def stopped_before_training(finished: Mapping[str, Any]) -> str:
    """Return why an attempt was stopped before its training started, as in `NodeExit.stopped`; else empty."""
    reason = finished.get("stopped")
    return reason if finished.get("before_training") is True and isinstance(reason, str) else ""


def describe_unfinished(finished: Mapping[str, Any]) -> str:
    """Describe why a training was stopped before it was finished; empty if the training was not stopped."""
    if finished.get("unfinished") is not True:
        return ""
    stopped, not_again = (str(finished.get(key) or "") for key in ("stopped", "not_again"))
    return failure.unfinished(stopped, saved=finished.get("saved") is True, not_again=not_again)


# The largest number of characters of a reason in a line of `hpcenv status`. The table of the verdict has the whole
# reason.
_LONGEST_REASON = 160


def describe_rejection(folder: RunFolder, result: Result) -> str:
    """Return why the gate stopped a run. If a check failed or a value is unknown, add the first finding."""
    verdict, _ = read_verdict(folder)
    rows = () if verdict is None else verdict.findings
    blocking = [row for row in rows if row.severity == "must" and row.result == result]
    checks = verdict is not None and verdict.of_checks
    text = "a node could not be checked in full, or did not start"
    if result == "mismatch":
        text = "a check failed" if checks else "a node differs from the lockfile"
    if not blocking or (result == "mismatch" and not checks):
        return text
    found = visible_ascii(blocking[0].found)
    found = found if len(found) <= _LONGEST_REASON else f"{found[:_LONGEST_REASON]}..."
    return f"{text}: {visible_ascii(blocking[0].node)}, {visible_ascii(blocking[0].field)}: {found}"


def read_verdict_result(folder: RunFolder) -> str | None:
    """Return the result of the verdict; None if no verdict can be read."""
    value = (read_record(folder.verdict) or {}).get("result")
    return value if isinstance(value, str) else None
