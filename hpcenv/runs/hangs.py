"""Show which line each rank of a run executes: on request (`hpcenv stacks`), or when a rank makes no step.

Runs on: LOGIN NODE. The nodes look for a request every 10 s (watch/hangs.py), and write the answer into the run folder.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import Command, HpcenvError, RunNotRunning, UsageError
from hpcenv.judge.hang import not_asked, stack_lines
from hpcenv.records.files import load_record, save_record
from hpcenv.records.hangs import (
    CANNOT_TELL,
    RankStacks,
    StackAnswer,
    StackRequest,
    answer_path,
    ranks_of_node,
    read_found,
    request_path,
    requests_of,
)
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.find import find_run
from hpcenv.runs.status import read_status
from hpcenv.text import Shown, listed, visible

# Nodes look for requests every 10 s, and wait 6 s for a rank. In addition, a shared file system may show a file late.
_MOST_SECONDS = 45.0
_SECONDS_BETWEEN_LOOKS = 0.5
_MOST_NODES = 8
_WORDS = {"hang": "the ranks hang", "working": "no hang", "unknown": CANNOT_TELL, "idle": "idle"}


@dataclass(frozen=True, kw_only=True, repr=False)
class RunStacks(Shown):
    """Which line each rank of a run executes.

    Attributes:
        lines: one line for each different stack of the main threads, with the ranks that have this stack.
        ranks: the stacks of each rank.
        silent: nodes that did not answer.
    """

    run: str
    lines: tuple[str, ...]
    ranks: tuple[RankStacks, ...]
    silent: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return what `hpcenv stacks` prints."""
        late = (f"no answer from {listed(self.silent, _MOST_NODES)}",) if self.silent else ()
        return "\n".join(visible(line) for line in (*self.lines, *late))


def ask_stacks(
    start: Path,
    word: str | None,
    *,
    environ: Mapping[str, str],
    runs: str | None = None,
    rank: int | None = None,
    tell: Callable[[str], None] = lambda _line: None,
) -> RunStacks:
    """Ask the nodes of a running run for the stacks of its ranks. The ranks continue.

    Args:
        start: current directory. The project is in this folder or in a folder above.
        word: run folder, run name or job id; None for the latest run.
        environ: environment variables, for the Slurm commands.
        runs: folder of runs, if it is not the project's folder of runs.
        rank: the requested rank; None for all ranks.
        tell: called with a line of text that says what this function waits for.

    Raises:
        RunNotRunning: the run waits, is being checked, or has ended, or nothing watches its ranks.
        UsageError: the run has no such rank.
    """
    run = find_run(start, word, runs=runs)
    status = read_status(run, environ)
    verdict = status.verdict
    if status.state != "running" or verdict is None or verdict.attempt != status.attempt:
        status_command = Command("hpcenv", "status", status.run)
        what = f"the run `{status.run}` does not train now"
        raise RunNotRunning(what, why=f"its state is {status.state}", hint=status_command)
    if run.manifest.watch is None:
        hint = "leave out `sample` of [watch] in hpcenv.toml, and submit again"
        what = f"the run `{status.run}` is not watched"
        raise RunNotRunning(what, why='it was submitted with sample = "off"', hint=hint)
    nodes = verdict.training_nodes
    count = len(nodes) * run.manifest.nproc_per_node
    if rank is not None and not 0 <= rank < count:
        raise UsageError(f"the run `{status.run}` has no rank {rank}", why=f"its ranks are 0 to {count - 1}")
    tell(f"asked {len(nodes)} nodes; the nodes look for a request every 10 s")
    answers = _asked(requests_of(run.folder, status.attempt), nodes)
    looks = sorted((look for answer in answers for look in answer.ranks), key=lambda look: look.rank)
    wanted = tuple(look for look in looks if rank in (None, look.rank))
    silent = tuple(node for node in nodes if node not in {answer.node for answer in answers})
    asked = {look.rank for look in looks} | ({*range(count)} - {rank} if rank is not None else set())
    missing = not_asked(asked, 0 if silent else ranks_of_node(run.manifest) * len(nodes))
    return RunStacks(run=status.run, lines=(*stack_lines(wanted), *missing), ranks=wanted, silent=silent)


def _asked(folder: Path, nodes: tuple[str, ...]) -> list[StackAnswer]:
    """Write a request, return the answers that nodes write in time, and remove request and answers."""
    name = f"ask-{time.time_ns()}-{os.getpid()}"
    (folder / name).mkdir(parents=True)
    request = request_path(folder, name)
    try:
        save_record(StackRequest(id=name, asked=time.time()), request)
        found: dict[str, StackAnswer] = {}
        until = time.monotonic() + _MOST_SECONDS
        while len(found) < len(nodes) and time.monotonic() < until:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            for node in set(nodes) - set(found):
                with suppress(HpcenvError):
                    found[node] = load_record(StackAnswer, answer_path(folder, name, node, 1))
        return [*found.values()]
    finally:
        request.unlink(missing_ok=True)
        shutil.rmtree(folder / name, ignore_errors=True)


def hang_lines(run: RunFolder) -> Iterator[str]:
    """Yield what the nodes last found about ranks that make no step, in the newest attempt with such a record."""
    attempts = {int(path.name[8:]): path for path in run.hangs.glob("attempt-*") if path.name[8:].isdecimal()}
    for attempt in sorted(attempts, reverse=True):
        if found := read_found(attempts[attempt]):
            last = found[-1]
            first, *more = last.lines or ("no rank answered",)
            yield f"{_WORDS[last.kind]}: {visible(first)}"
            yield from map(visible, more)
            return
