"""The fuzzer itself, and everything it once found: `python -m tests.fuzz.run --minutes N` runs it for long."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .run import LEAST_EXECUTIONS
from .targets import CORPUS, TARGETS

ROOT = Path(__file__).resolve().parents[2]

# Found, reported, and not mended yet; what is mended leaves this list.
KNOWN: set[str] = set()


def fuzz(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz.run", *words], cwd=ROOT, text=True, capture_output=True, timeout=300
    )


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_read_as_they_are(name: str) -> None:
    """A seed that is refused at once would fuzz nothing but the first check."""
    for seed in TARGETS[name].seeds:
        TARGETS[name].run(seed)


def test_what_was_found_once_stays_mended() -> None:
    done = fuzz("--replay")
    told = dict(re.findall(r"^(?:good|bad) (\S+): (.*)$", done.stdout, re.MULTILINE))
    assert set(told) == {f"{path.parent.name}/{path.name}" for path in CORPUS.glob("*/*")}, done.stderr
    bad = set(re.findall(r"^bad (\S+):", done.stdout, re.MULTILINE))
    assert bad <= KNOWN, done.stdout


def test_every_corpus_belongs_to_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= set(TARGETS)


def test_a_short_run_over_the_lockfile_and_the_sif(tmp_path: Path) -> None:
    done = fuzz("lockfile", "sif", "facts", "record", "--minutes", "0.1", "--crashes", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["executions"] >= 4 * LEAST_EXECUTIONS
    assert told["crashes"] == 0


def test_a_reader_that_hangs_or_eats_memory_is_noticed(tmp_path: Path) -> None:
    """The watchdog, tried on a known case."""
    done = fuzz("--replay", "hostlist")
    line = next(line for line in done.stdout.splitlines() if "huge-range" in line)
    assert line.startswith(("bad hostlist/huge-range: ", "good hostlist/huge-range: "))
