"""Start a program on one node without torchrun: as all ranks of the node, as one rank, or once and not as a rank.

Runs on: inside the image (or in a bare host environment), called by agent.py. Standard library, Python 3.8 to 3.14.

    OPTIONS -- PYTHON-ARGUMENTS...

The options are --nodes=N, --node-rank=N, --tasks-per-node=N, --log-dir=DIR, and also these:

    --only=L          start only the task with this local rank (each task of srun starts one rank)
    --program         start the program once, and not as a rank; the program starts the ranks itself
    --set=NAME=VALUE  set a variable; may be given more than once
    --prefix=TEXT     prefix of the lines in the job's log; {rank} is the rank

Each task gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and GROUP_RANK, as torchrun's ranks do. The output of a
task goes to DIR/tasks/attempt_0/LOCAL-RANK/{stdout,stderr}.log, and with a prefix to the job's log. The output of a
program goes to DIR/program/, and without a prefix to the job's log. The ranks of a program are found among the
descendants of the program (rank_watch.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any, BinaryIO, Dict, List, Set, Tuple

_CHECK_SECONDS = 0.05
# After one task has failed: time between TERM and KILL for the other tasks.
_SECONDS_TO_END = 5.0


class TaskOptions:
    """The options from the launch step; see the top of this file."""

    def __init__(self, words: List[str]) -> None:
        pairs = [word[2:].partition("=")[::2] for word in words]
        single = dict(pairs)
        self.nodes = int(single["nodes"])
        self.node_rank = int(single["node-rank"])
        self.count = int(single["tasks-per-node"])
        self.log_dir = single["log-dir"]
        self.is_program = "program" in single
        self.local_ranks = [int(single["only"])] if "only" in single else list(range(self.count))
        self.prefix = single.get("prefix", "[default{local_rank}]:")
        self.variables = dict(value.partition("=")[::2] for name, value in pairs if name == "set")


class Task:
    """One process of the node: a rank, or the program that starts the ranks (`local_rank` is -1)."""

    def __init__(self, options: TaskOptions, local_rank: int, argv: List[str]) -> None:
        self.local_rank = local_rank
        self.rank = options.node_rank * options.count + local_rank if local_rank >= 0 else -1
        self.status = None  # type: Any
        self.ended = 0.0
        of_rank = os.path.join("tasks", "attempt_0", str(local_rank))
        folder = os.path.join(options.log_dir, of_rank if local_rank >= 0 else "program")
        os.makedirs(folder, exist_ok=True)
        prefix = options.prefix.format(rank=self.rank, local_rank=local_rank) if local_rank >= 0 else ""
        self.logs = [Log(os.path.join(folder, name + ".log"), prefix) for name in ("stdout", "stderr")]
        self.process = subprocess.Popen(
            [sys.executable, "-u", *argv],
            env={**os.environ, **options.variables, **self._numbers(options)},
            stdin=subprocess.DEVNULL,
            stdout=self.logs[0].target,
            stderr=self.logs[1].target,
            start_new_session=True,
        )
        for log in self.logs:
            log.target.close()

    def _numbers(self, options: TaskOptions) -> Dict[str, str]:
        """Return the variables with the number of this rank; empty for a program."""
        if self.local_rank < 0:
            return {}
        variables = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": options.count * options.nodes,
            "LOCAL_WORLD_SIZE": options.count,
            "GROUP_RANK": options.node_rank,
        }
        return {name: str(value) for name, value in variables.items()}

    def look(self) -> bool:
        """Pass on the new output; return whether the task has ended."""
        code = self.process.poll()
        for log in self.logs:
            log.copy(to_end=code is not None)
        if code is not None and self.status is None:
            self.status, self.ended = (code if code >= 0 else 128 - code), time.time()
        return code is not None

    def record(self) -> Dict[str, Any]:
        """Return the row of this task in the agent's record."""
        return {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "pid": self.process.pid,
            "status": self.status,
            "ended": self.ended,
            "error_file": "",
        }


class Log:
    """A file to which a task writes. Its lines are copied to the job's log, each with a prefix."""

    def __init__(self, path: str, prefix: str) -> None:
        self.target = open(path, "ab")  # type: BinaryIO
        self._source = open(path, "rb")
        self._source.seek(0, os.SEEK_END)
        self._prefix = prefix.encode()
        self._rest = b""

    def copy(self, to_end: bool) -> None:
        """Copy the new complete lines."""
        text = self._rest + self._source.read()
        lines, newline, self._rest = text.rpartition(b"\n")
        if to_end and self._rest:
            lines, newline, self._rest = text, b"\n", b""
        if newline:
            out = sys.stdout.buffer
            out.write(b"".join(self._prefix + line + b"\n" for line in lines.split(b"\n")))
            out.flush()


def run(argv: List[str], rank_watch: Any, proc: Any) -> Dict[str, Any]:
    """Start the tasks, wait until all have ended, and return the agent's record.

    Args:
        argv: options and program, see the top of this file.
        rank_watch, proc: the modules of these names, in the folder of this file.
    """
    end = argv.index("--")
    options = TaskOptions(argv[:end])
    watch = rank_watch.RankWatch(options.count, proc) if options.is_program else None
    tasks = []  # type: List[Task]
    try:
        for local_rank in [-1] if options.is_program else options.local_ranks:
            tasks.append(Task(options, local_rank, argv[end + 1 :]))
        _wait(tasks, watch)
    finally:
        for task in tasks:
            if task.process.poll() is None:
                task.process.kill()
    failed = sorted((task for task in tasks if task.status != 0), key=lambda task: task.ended)
    rows = [task.record() for task in failed]
    if failed and watch is not None:
        # The program ended because a rank of it failed.
        rows = watch.failed(os.path.join(options.log_dir, "errors")) or rows
    status = next((row["status"] for row in rows if row["status"]), failed[0].status if failed else 0)
    return {"schema": 1, "status": status, "error": "", "asked": "", "ranks": rows}


def _wait(tasks: List[Task], watch: Any) -> None:
    """Wait for all tasks. If one task fails, end the other tasks."""
    deadline = None  # type: Any
    signalled = set()  # type: Set[Tuple[int, int]]
    while not all([task.look() for task in tasks]):
        now = time.monotonic()
        if deadline is None and any(task.status not in (None, 0) for task in tasks):
            deadline = now + _SECONDS_TO_END
        if deadline is not None:
            number = signal.SIGTERM if now < deadline else signal.SIGKILL
            for task in tasks:
                if task.status is None and (task.rank, number) not in signalled:
                    signalled.add((task.rank, number))
                    _send(task, number)
        if watch is None:
            time.sleep(_CHECK_SECONDS)
        else:
            watch.wait(_CHECK_SECONDS)
            watch.look()


def _send(task: Task, number: int) -> None:
    try:
        task.process.send_signal(number)
    except OSError:
        pass
