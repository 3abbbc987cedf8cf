"""How long `hpcenv list --where ... --sort ...` takes over 1,000 runs.

    python -m benchmarks.list_1000 [--json] [--rounds N]

1,000 run folders as `submit` and the nodes leave them: a real manifest each, with arguments, and 1,000 steps of a loss
and a metric. Slurm's commands are stand-ins that answer at once: benchmarks.status_500 has the real ones. Each round is
a separate process, `first_s` the first one after the folders were written. There is no peer: submitit and TorchX have
no list.

Must: at most 2 s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import status_500

RUNS = 1000
STEPS = 1000
SECONDS = 2.0
ROOT = status_500.ROOT
WORDS = ("--where", "lr=0.0003", "--where", "loss<500", "--sort", "-loss", "--columns", "lr,loss,accuracy,commit,state")


def main() -> int:
    """Measure, print, and return 1 when the bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        _write(folder)
        seconds = [_list(folder) for _ in range(options.rounds + 1)]
    first, *others = seconds
    median = statistics.median(others)
    print(f"{RUNS} runs: first {first:.3f} s, then median {median:.3f} s ({min(others):.3f} to {max(others):.3f})")
    result = {
        "name": "list_1000",
        "ours_s": round(median, 3),
        "peer_s": None,
        "ratio": None,
        "must": f"ours_s <= {SECONDS:g}",
        "first_s": round(first, 3),
        "met": median <= SECONDS,
    }
    if options.json:
        print(json.dumps(result))
    return 0 if result["met"] else 1


def _write(folder: Path) -> None:
    status_500.write_runs(folder, [str(1000 + number) for number in range(RUNS)])
    for number, run in enumerate(sorted((folder / "runs").iterdir())):
        manifest = json.loads((run / "manifest.json").read_text())
        manifest["args"] = ["--lr", "3e-4" if number % 2 else "1e-3", "--seed", str(number)]
        (run / "manifest.json").write_text(json.dumps(manifest))
        lines = [{"kind": "start", "schema": 1, "restart": 0, "pid": 7, "time": 1.5, "world_size": 1}]
        for step in range(1, STEPS + 1):
            value = (number + 1 / step).hex()
            loss = {"kind": "loss", "name": "loss", "value": value, "dtype": "float32", "step": step}
            lines += [{**loss, "index": 0, "used": True}]
            lines += [{"kind": "metric", "step": step, "name": "accuracy", "value": value, "dtype": "float64"}]
        (run / "metrics" / "attempt-0").mkdir(parents=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run / "metrics" / "attempt-0" / "rank-0.jsonl").write_text(text)
    (folder / "bin").mkdir()
    for tool, text in (("squeue", "1000|RUNNING|None|n[1-2]|1:00"), ("sacct", "1001|COMPLETED|0:0|n[1-2]|00:01:00")):
        script = folder / "bin" / tool
        script.write_text(f"#!/bin/sh\necho '{text}'\n")
        script.chmod(0o755)


def _list(folder: Path) -> float:
    """Return the seconds of one command, which must list the runs that were chosen."""
    argv = [sys.executable, "-m", "hpcenv", "list", "--runs-dir", str(folder / "runs"), *WORDS, "--all"]
    environ = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    began = time.perf_counter()
    done = subprocess.run(argv, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    header, first, *others = done.stdout.splitlines()
    if done.returncode or len(others) != 249 or not first.startswith("train-20261120-000499 "):
        raise SystemExit(f"not what was made: {header} {first} and {len(others)} lines\n{done.stderr}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
