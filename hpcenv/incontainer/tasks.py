"""Start some copies of a program on one node, each as a task with its own rank, without torchrun.

Runs on: inside the image (or in a bare host environment), called by agent.py. Standard library only, Python 3.8 to 3.14.

    OPTIONS -- SCRIPT ARGS...

Options: --nodes=N, --node-rank=N, --tasks-per-node=N, --log-dir=DIR. Each task gets RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE and GROUP_RANK, as torchrun's ranks do; the program itself must set MASTER_ADDR and do a rendezvous.
The output of a task goes to DIR/tasks/attempt_0/LOCAL-RANK/{stdout,stderr}.log, and with a prefix to the job's log.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any, BinaryIO, Dict, List, Set, Tuple

_CHECK_SECONDS = 0.05
# Time between TERM and KILL for the other tasks after one has failed.
_SECONDS_TO_END = 5.0


class Task:
    """One process of the node."""

    def __init__(self, options: Dict[str, str], local_rank: int, argv: List[str]) -> None:
        count, nodes = int(options["tasks-per-node"]), int(options["nodes"])
        self.local_rank = local_rank
        self.rank = int(options["node-rank"]) * count + local_rank
        self.status = None  # type: Any
        self.ended = 0.0
        folder = os.path.join(options["log-dir"], "tasks", "attempt_0", str(local_rank))
        os.makedirs(folder, exist_ok=True)
        self.logs = [Log(os.path.join(folder, name + ".log"), local_rank) for name in ("stdout", "stderr")]
        variables = {
            "RANK": self.rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": count * nodes,
            "LOCAL_WORLD_SIZE": count,
            "GROUP_RANK": int(options["node-rank"]),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-u", *argv],
            env={**os.environ, **{name: str(value) for name, value in variables.items()}},
            stdin=subprocess.DEVNULL,
            stdout=self.logs[0].target,
            stderr=self.logs[1].target,
            start_new_session=True,
        )
        for log in self.logs:
            log.target.close()

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
    """A file that a task writes to; its lines go to the job's log with the prefix that torchrun gives them."""

    def __init__(self, path: str, local_rank: int) -> None:
        self.target = open(path, "ab")  # type: BinaryIO
        self._source = open(path, "rb")
        self._source.seek(0, os.SEEK_END)
        self._prefix = b"[default%d]:" % local_rank
        self._rest = b""

    def copy(self, to_end: bool) -> None:
        """Copy the complete lines that are new."""
        text = self._rest + self._source.read()
        lines, newline, self._rest = text.rpartition(b"\n")
        if to_end and self._rest:
            lines, newline, self._rest = text, b"\n", b""
        if newline:
            out = sys.stdout.buffer
            out.write(b"".join(self._prefix + line + b"\n" for line in lines.split(b"\n")))
            out.flush()


def run(argv: List[str]) -> Dict[str, Any]:
    """Start the tasks, wait until all have ended, and return the agent's record."""
    end = argv.index("--")
    options = dict(word[2:].split("=", 1) for word in argv[:end])
    tasks = []  # type: List[Task]
    try:
        for local_rank in range(int(options["tasks-per-node"])):
            tasks.append(Task(options, local_rank, argv[end + 1 :]))
        _wait(tasks)
    finally:
        for task in tasks:
            if task.process.poll() is None:
                task.process.kill()
    failed = sorted((task for task in tasks if task.status != 0), key=lambda task: task.ended)
    return {
        "schema": 1,
        "status": failed[0].status if failed else 0,
        "error": "",
        "asked": "",
        "ranks": [task.record() for task in failed],
    }


def _wait(tasks: List[Task]) -> None:
    """Wait for all tasks. If one fails, end the others."""
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
        time.sleep(_CHECK_SECONDS)


def _send(task: Task, number: int) -> None:
    try:
        task.process.send_signal(number)
    except OSError:
        pass
