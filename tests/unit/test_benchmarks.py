"""A benchmark that is told to end takes down what it started."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Starts something that must be taken down, and waits.
INNER = """
import pathlib, sys, time
from benchmarks._stop import end_in_order
end_in_order()
place = pathlib.Path(sys.argv[1])
try:
    place.write_text("up")
    time.sleep(60)
finally:
    time.sleep(0.3)
    place.write_text("down")
"""
OUTER = """
import sys
from benchmarks._stop import end_in_order, run_to_its_end
end_in_order()
run_to_its_end([sys.executable, "-c", sys.argv[1], sys.argv[2]])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("nested", [False, True])
def test_what_it_started_is_taken_down(tmp_path: Path, nested: bool, number: signal.Signals) -> None:
    place = tmp_path / "testbed"
    argv = [sys.executable, "-c", *([OUTER, INNER] if nested else [INNER]), str(place)]
    with subprocess.Popen(argv, cwd=ROOT) as running:
        until = time.monotonic() + 60
        while not (place.exists() and place.read_text() == "up") and time.monotonic() < until:
            time.sleep(0.05)
        running.send_signal(number)
        # A second signal comes while it takes things down, as from `timeout` to the whole group.
        time.sleep(0.1)
        running.send_signal(number)
        assert running.wait(60) == 128 + number
    assert place.read_text() == "down"
