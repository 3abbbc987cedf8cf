"""`submit --wait` and `rerun --wait`: print the log of a run until it ends."""

from __future__ import annotations

import os
import time

from hpcenv.cli import _render
from hpcenv.cli._pending import PendingLine
from hpcenv.cli._wait import Wait
from hpcenv.cli.logs import LogPrinter
from hpcenv.cli.wait import say_failure, tell_exit_status, tell_state
from hpcenv.judge import verdict_table
from hpcenv.runs.attempts import read_verdict
from hpcenv.runs.determinism import apart_lines, report_determinism
from hpcenv.runs.entries import Run, open_run
from hpcenv.runs.logs import LogTail
from hpcenv.runs.rank_gpus import cpu_lines, report_gpus
from hpcenv.runs.status import RunStatus
from hpcenv.runs.wait import exit_status_of, wait_for
from hpcenv.submission.submit import SubmitResult


def follow(result: SubmitResult, word: str, wait: Wait, *, as_json: bool, verb: str) -> int:
    """Print the log of a run until it has ended; return the exit status of the run.

    Raises:
        WaitTimeout: the run has not ended in time, and continues.
    """
    run = open_run(result.run_folder)
    tail, show, waiting = LogTail(run.folder.log), LogPrinter(run), PendingLine(os.environ)

    def print_new() -> bool:
        text = tail.read()
        if not as_json:
            waiting.renew() if not text else waiting.clear()
            show(text)
            if wait.verbose and "hpcenv verdict" in text and (verdict := read_verdict(run.folder)[0]) is not None:
                lockfile = run.manifest.lockfile if isinstance(run, Run) else ""
                _render.tell(verdict_table.render(verdict, lockfile=lockfile))
        return bool(text)

    def pause(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            print_new()
            time.sleep(min(0.5, left))

    def on_status(status: RunStatus) -> None:
        if not as_json and not waiting.see(status):
            tell_state(status)

    with waiting:
        status = wait_for([run], environ=os.environ, pause=pause, on_status=on_status, timeout=wait.timeout)[0]
    while print_new():
        pass
    if not as_json:
        show(tail.rest())
        show.end()
    code = exit_status_of(status)
    if as_json:
        _render.verdict_on(verb, {"submitted": result, "status": status}, ok=code == 0)
    elif code != 0:
        say_failure(run, status)
        _render.tell("\nhint: " + _render.quoted(("hpcenv", "report", word)))
    if not as_json:
        for line in cpu_lines(report_gpus(run.folder, run.manifest)) if isinstance(run, Run) else ():
            _render.tell(f"GPUs: {line}")
        for line in apart_lines(report_determinism(run.folder, run.manifest)) if isinstance(run, Run) else ():
            _render.tell(f"ranks: {line}")
        tell_exit_status(status)
    return code
