"""End a benchmark in order: SIGTERM and SIGHUP raise, so that what it started is taken down."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
# A testbed of 64 nodes is taken down in less.
_SECONDS_TO_END = 180.0


def end_in_order() -> None:
    """Turn the first SIGTERM or SIGHUP into SystemExit; ignore those after it, while things are taken down."""

    def stop(number: int, _frame: FrameType | None) -> None:
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for one in _SIGNALS:
        signal.signal(one, stop)


def run_to_its_end(argv: Sequence[str], **words: Any) -> subprocess.CompletedProcess[str]:
    """Run a program as `subprocess.run` does, but if this process has to end, let the program end in order first."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **words) as child:
        try:
            stdout, stderr = child.communicate()
        except BaseException:
            child.terminate()
            try:
                child.communicate(timeout=_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
    return subprocess.CompletedProcess(child.args, child.returncode, stdout, stderr)
