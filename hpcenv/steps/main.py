"""The steps that the batch script calls, from `begin` to `finish`, and `local`, which replaces it.

Runs on: COMPUTE NODE, from the copy of the code in the run folder. Only this module reads a step's environment, prints
its error and sets its exit status.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcenv.errors import FileUnusable, HpcenvError, NodesUnknown, UsageError
from hpcenv.records.run_folder import RunFolder
from hpcenv.steps.this_step import say


@dataclass(frozen=True)
class Step:
    """Where the code of a step is.

    Attributes:
        module: name of the step's module. Every step is a separate process that loads only this module, because the job
            waits for it.
        function: name of the step's function, which takes the run folder, the environment and the further arguments,
            and returns the exit status.
        takes: the step's further arguments: none, an exit status, a folder, or a command to start.
        lasting: whether the step must survive TERM, because it records how a job ended. Slurm sends TERM to every
            process of the batch script, and KILL only seconds later (KillWait).
    """

    module: str
    function: str
    takes: Literal["nothing", "status", "folder", "service", "command"] = "nothing"
    lasting: bool = False

    def load(self) -> Callable[..., int]:
        """Return the function."""
        found: Callable[..., int] = getattr(importlib.import_module(self.module), self.function)
        return found

    def fits(self, further: int) -> bool:
        """Return whether the step takes this number of further arguments."""
        return {"nothing": further == 0, "command": further > 0}.get(self.takes, further == 1)


_STEPS = "hpcenv.steps"
STEPS = {
    "begin": Step(f"{_STEPS}.begin", "begin", lasting=True),
    "former": Step(f"{_STEPS}.begin", "former", lasting=True),
    "modules": Step(f"{_STEPS}.modules", "keep_effects"),
    "stage-look": Step(f"{_STEPS}.stage", "look"),
    "stage-send": Step(f"{_STEPS}.stage", "send"),
    "stage-keep": Step(f"{_STEPS}.stage", "keep"),
    "check": Step(f"{_STEPS}.check", "check"),
    "stopped": Step(f"{_STEPS}.stopped", "stopped", takes="status", lasting=True),
    "decide": Step(f"{_STEPS}.decide", "decide_run"),
    "inside": Step(f"{_STEPS}.inside", "check_inside"),
    "inside-judge": Step(f"{_STEPS}.inside", "judge_inside"),
    "gpus": Step(f"{_STEPS}.inside", "try_gpus"),
    "gpus-judge": Step(f"{_STEPS}.inside", "judge_gpus"),
    "smoke": Step(f"{_STEPS}.smoke", "smoke_test"),
    "smoke-pairs": Step(f"{_STEPS}.smoke", "smoke_pairs"),
    "smoke-judge": Step(f"{_STEPS}.smoke_judge", "smoke_judge"),
    "task": Step(f"{_STEPS}.launch", "task"),
    "watch": Step(f"{_STEPS}.watch", "watch", lasting=True),
    "session": Step("hpcenv.sessions.door", "keep_open"),
    "ssh-server": Step("hpcenv.sessions.enter", "serve_ssh"),
    "ssh-command": Step("hpcenv.sessions.enter", "run_ssh_command", takes="folder"),
    "page": Step("hpcenv.sessions.enter", "serve_page", takes="service"),
    "run-tasks": Step(f"{_STEPS}.run_tasks", "run_tasks", takes="command", lasting=True),
    "finish": Step(f"{_STEPS}.finish", "finish", takes="status", lasting=True),
    "local": Step("hpcenv.steps.local", "run_here"),
}


def main(arguments: list[str]) -> int:
    """Run one step and return its exit status; an error is written to the log as what, why and hint.

    Args:
        arguments: the step's name, the run folder and further arguments of the step.
    """
    # The job's locale sets the encoding of its log; a character outside this encoding must not end the step.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run_step(arguments)
    except HpcenvError as error:
        say(f"error[{error.code}]: {error}")
        return error.exit_status if error.exit_status in (90, 91) else NodesUnknown.exit_status
    except OSError as error:
        unusable = FileUnusable(
            f"the {arguments[0]} step cannot go on",
            why=str(error),
            hint="check permissions, space and quota of the run folder",
        )
        say(f"error[{unusable.code}]: {unusable}")
    except Exception:  # noqa: BLE001  (status 1 would say that the training failed)
        import traceback

        say(f"error[{HpcenvError.code}]: the {arguments[0]} step failed\nwhy: {traceback.format_exc().strip()}")
    return NodesUnknown.exit_status


def _run_step(arguments: list[str]) -> int:
    if arguments[:1] == ["attach"] and len(arguments) > 2:
        from hpcenv.sessions import enter  # each step loads its own module only

        secrets, *command = arguments[2:]
        return enter.attach(RunFolder(Path(arguments[1])), os.environ, command, secrets=secrets == "with-secrets")
    step = STEPS.get(arguments[0]) if arguments else None
    if step is None or not step.fits(len(arguments) - 2):
        words = ", ".join(STEPS)
        raise UsageError(
            f"step.py takes one of {words} and a run folder; "
            "`stopped` and `finish` also take a status, `ssh-command` a folder, `page` a service, "
            "and `run-tasks` a command"
        )
    if step.lasting:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            # The signal is ignored here and in child processes: otherwise it would kill scontrol during a change.
            signal.signal(number, signal.SIG_IGN)
    return step.load()(RunFolder(Path(arguments[1])), os.environ, *arguments[2:])
