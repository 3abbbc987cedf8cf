"""How long `hpcenv list` takes over 500 runs, and how often it asks Slurm.

    python -m benchmarks.status_500 [--json] [--rounds N] [--testbed]

500 run folders as `submit` and the nodes leave them (a real manifest each), every other one of a job that squeue
lists, the others known to sacct only. Slurm's commands are counted: with `--testbed` the real ones of scripts/testbed
(two arrays of 250 jobs, one of them cancelled), else stand-ins that answer at once. Each round is a process
of its own. There is no peer: submitit and TorchX have no list.

Must: at most 1 s, with one call of squeue and one of sacct.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUNS = 500
SECONDS = 1.0
ROOT = Path(__file__).resolve().parents[1]
SEEDS = ROOT / "tests" / "fuzz" / "seeds"
TESTBED = ROOT / "scripts" / "testbed"

# What counts the calls of a real command: it leaves one file for each, and becomes the command.
_COUNTS = '#!/bin/sh\n: > "$COUNTED/{tool}.$$"\nexec {real}\n'
# Runs where Slurm is: times whole processes, as a user waits for them.
_MEASURE = """
import json, os, pathlib, subprocess, sys, time
hpcenv, folder, rounds = sys.argv[1:]
counted = pathlib.Path(folder, "counted")
env = {**os.environ, "COUNTED": str(counted), "PATH": folder + "/bin:" + os.environ["PATH"]}
taken = []
for number in range(int(rounds) + 1):
    for path in counted.iterdir():
        path.unlink()
    began = time.perf_counter()
    done = subprocess.run([*hpcenv.split(), "list", "--all", "--runs-dir", folder + "/runs", "--json"], env=env,
                          capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    names = [path.name for path in counted.iterdir()]
    calls = {tool: sum(name.startswith(tool) for name in names)
             for tool in ("squeue", "sacct")}
    states = [run["state"] for run in json.loads(done.stdout)["data"]["runs"]]
    if number:  # the first round reads the files from disk
        taken.append({"seconds": seconds, "calls": calls, "states": {s: states.count(s) for s in sorted(set(states))}})
print(json.dumps(taken))
"""


def main() -> int:
    """Measure, print, and return 1 when a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--testbed", action="store_true", help="ask the real Slurm of scripts/testbed")
    options = parser.parse_args()
    taken = _in_testbed(options.rounds) if options.testbed else _with_fakes(options.rounds)
    result = _judge(taken, real=options.testbed)
    if options.json:
        print(json.dumps(result))
    return 0 if result["met"] else 1


def _judge(taken: list[dict[str, Any]], *, real: bool) -> dict[str, Any]:
    seconds = [one["seconds"] for one in taken]
    states, calls = taken[-1]["states"], taken[-1]["calls"]
    if sum(states.values()) != RUNS or states.get("unknown"):
        raise SystemExit(f"not what was made: {states}")
    once = all(one["calls"] == {"squeue": 1, "sacct": 1} for one in taken)
    median = statistics.median(seconds)
    print(f"{RUNS} runs ({', '.join(f'{count} {state}' for state, count in states.items())})")
    print(f"median {median:.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), calls {calls}, real Slurm: {real}")
    return {
        "name": "status_500",
        "ours_s": round(median, 3),
        "peer_s": None,
        "ratio": None,
        "must": f"ours_s <= {SECONDS:g}, one squeue, one sacct",
        "squeue_calls": calls["squeue"],
        "sacct_calls": calls["sacct"],
        "real_slurm": real,
        "met": median <= SECONDS and once,
    }


def write_runs(folder: Path, job_ids: list[str]) -> None:
    """Write the run folders: the manifest as a node meets it, and the records of a job that has begun."""
    from dataclasses import replace

    from hpcenv.records.codec import encode_record
    from hpcenv.records.files import load_record
    from hpcenv.records.manifest import Manifest
    from hpcenv.records.run_folder import RunFolder
    from hpcenv.records.submission import Submission

    seed = load_record(Manifest, next((SEEDS / "manifest").iterdir()))
    for number, job_id in enumerate(job_ids):
        run = RunFolder(folder / "runs" / f"train-20261120-{number:06}")
        run.path.mkdir(parents=True)
        manifest = replace(seed, run=run.path.name, run_folder=str(run.path), cluster="slurm")
        run.manifest.write_text(encode_record(manifest))
        command = ("hpcenv", "submit", "train.py", "--nodes", "2", "--gpus", "8")
        record = Submission(
            schema=1, run=run.path.name, cluster="slurm", job_id=job_id, submitted=1.8e9 + number, command=command
        )
        run.submission.write_text(encode_record(record))
        started = {"schema": 1, "attempt": 0, "node": "n1", "nodes": ["n1", "n2"], "job_id": job_id, "time": 1.8e9}
        run.started.write_text(json.dumps(started))
        if number % 2:
            run.finished.write_text(json.dumps({"schema": 1, "status": 0, "time": 1.8e9}))
        run.log.write_text("a line\n")


def _with_fakes(rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        job_ids = [str(1000 + number) for number in range(RUNS)]
        write_runs(folder, job_ids)
        counted = folder / "counted"
        counted.mkdir()
        answers = {
            "squeue": "".join(f"{one}|RUNNING|None|n[1-2]|1:00\n" for one in job_ids[::2]),
            "sacct": "".join(f"{one}|COMPLETED|0:0|n[1-2]|00:01:00\n" for one in job_ids[1::2]),
        }
        (folder / "bin").mkdir()
        for tool, text in answers.items():
            (folder / f"{tool}.answer").write_text(text)
            script = folder / "bin" / tool
            script.write_text(_COUNTS.format(tool=tool, real=f"cat {folder / tool}.answer"))
            script.chmod(0o755)
        argv = [sys.executable, "-c", _MEASURE, f"{sys.executable} -m hpcenv", str(folder), str(rounds)]
        return _answer(subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=False))


def _answer(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    return list(json.loads(done.stdout.strip().splitlines()[-1]))


def _exec(*command: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    argv = [str(TESTBED), "exec", "--user", "alice", "--", *command]
    return subprocess.run(argv, input=stdin, capture_output=True, check=False)


def _in_testbed(rounds: int) -> list[dict[str, Any]]:
    """Do the same on the login node of the testbed, as alice, with a copy of this hpcenv."""
    array = ("sbatch", "--parsable", "--hold", f"--array=0-{RUNS // 2 - 1}", "--wrap=true")
    jobs = [_exec(*array).stdout.decode().strip() for _ in range(2)]
    place = f"/home/alice/status-500-{jobs[0]}"
    try:
        _exec("scancel", jobs[1])
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / "made"
            write_runs(folder, [f"{jobs[number % 2]}_{number // 2}" for number in range(RUNS)])
            for number in range(1, RUNS, 2):
                (folder / "runs" / f"train-20261120-{number:06}" / "finished.json").unlink()
            (folder / "counted").mkdir()
            (folder / "bin").mkdir()
            for tool in ("squeue", "sacct"):
                script = folder / "bin" / tool
                real = _exec("sh", "-c", f"command -v {tool}").stdout.decode().strip()
                script.write_text(_COUNTS.format(tool=tool, real=f'{real} "$@"'))
                script.chmod(0o755)
            shutil.copytree(ROOT / "hpcenv", folder / "source" / "hpcenv", ignore=shutil.ignore_patterns("__pycache__"))
            packed = subprocess.run(["tar", "-C", str(folder), "-c", "."], capture_output=True, check=True).stdout
        _exec("sh", "-c", f"mkdir -p {place} && tar -C {place} -x", stdin=packed)
        time.sleep(2.0)  # accounting hears of the cancelled ones
        hpcenv = "/shared/hpcenv/venv/bin/python -m hpcenv"
        measure = ("env", f"PYTHONPATH={place}/source", "/shared/hpcenv/venv/bin/python", "-c", _MEASURE)
        done = _exec(*measure, hpcenv, place, str(rounds))
        if done.returncode != 0:
            raise SystemExit((done.stdout + done.stderr).decode())
        return list(json.loads(done.stdout.decode().strip().splitlines()[-1]))
    finally:
        _exec("scancel", *jobs)
        _exec("rm", "-rf", place)


if __name__ == "__main__":
    sys.exit(main())
