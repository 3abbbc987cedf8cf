"""The smoke test of two nodes over Gloo, beside an empty torchrun job that a careful user writes by hand.

    python -m benchmarks.smoke [--json] [--rounds N] [--instance NAME]

Both run in the testbed, which `python -m benchmarks smoke` brings up: two nodes, one rank each, the same Python on the
shared file system (a container would add the same time to both), alternately, the first of the two in turn. One pair
goes before and is not counted.

Ours is what `--preflight full` adds to a job for the smoke test: from its plan, which the decide step writes last, to
its result (the times of the two files). The peer is the start of an empty job: from the batch script's first line to
that of the script, which srun and torchrun with c10d started on both nodes. The script imports torch, as every training
does, before it writes the time.

No limit: the time of the whole start with this test has one (`start_overhead_full`).

Where ours goes is told by the files of the ranks: `agent` until the last rank runs (srun, step.py, torchrun, its
rendezvous), `import` until torch is imported, `groups` for the four parts of the test, `end` until the result is
judged.
For comparison: `peer without torch` is the same job whose script imports nothing, until it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

NEEDS = ("testbed",)

LEAST_ROUNDS = 5
ROOT = Path(__file__).resolve().parents[1]
PYTHON = "/shared/hostenv/bin/python"
FOLDER = "/home/alice/hpcenv-bench/smoke"
PARTS = ("agent", "import", "groups", "end")

SCRIPT = """\
import time; began = time.time()
import os
import torch, torch.distributed
with open(os.path.join(os.environ["MARKS"], "rank" + os.environ["RANK"]), "w") as file:
    file.write(repr(time.time()) + " " + repr(began))
"""
PEER = """\
#!/bin/bash
#SBATCH --job-name=by-hand
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=5
#SBATCH --output={marks}/log
date +%s.%N > "{marks}/began"
export MARKS={marks} OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task=2 --kill-on-bad-exit=1 {python} -m torch.distributed.run --nnodes=2 --nproc_per_node=1 \\
  --rdzv_backend=c10d --rdzv_endpoint="$head:29400" --rdzv_id="$SLURM_JOB_ID" {folder}/train.py
date +%s.%N > "{marks}/ended"
"""
# Runs where Slurm is, as alice: one job to its end, and the times that it left.
ONE = """
import json, pathlib, re, subprocess, sys, time

marks, run, argv = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
done = subprocess.run(argv, capture_output=True, text=True)
found = re.search("(?:job |^)([0-9]+)$", done.stdout, re.MULTILINE)
if done.returncode or not found:
    sys.exit(done.stdout + done.stderr)
until = time.monotonic() + 300
while subprocess.run(["squeue", "-h", "-j", found[1]], capture_output=True, text=True).stdout.strip():
    if time.monotonic() > until:
        sys.exit("job " + found[1] + " did not end")
    time.sleep(0.5)
times = {path.name: path.read_text().split() for path in marks.iterdir() if path.name != "log"}
if run.is_dir():
    times["began"] = [(run / "smoke" / "plan.json").stat().st_mtime]
    times["ended"] = [(run / "smoke.json").stat().st_mtime]
    times["result"] = json.loads((run / "smoke.json").read_text())["result"]
    files = run.glob("smoke/ranks/*/rank-*.jsonl")
    times["ranks"] = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
print(json.dumps(times))
"""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS)
    parser.add_argument("--instance", help="which testbed, if not this checkout's own")
    options = parser.parse_args()
    testbed = _Testbed(options.instance)
    _prepare(testbed)
    mine, theirs = [], []
    for number in range(options.rounds + 1):
        pair: dict[str, dict[str, Any]] = {}
        for kind in ("ours", "peer") if number % 2 else ("peer", "ours"):
            pair[kind] = _ours(testbed, f"ours-{number}") if kind == "ours" else _peer(testbed, f"peer-{number}")
        if number:
            mine.append(pair["ours"])
            theirs.append(pair["peer"])
            print(f"round {number}: ours {pair['ours']['whole']:.2f} s, peer {pair['peer']['start']:.2f} s", flush=True)
    result = _judge(mine, theirs)
    if options.json:
        print(json.dumps(result))
    return 0


class _Testbed:
    def __init__(self, instance: str | None) -> None:
        self._argv = [str(ROOT / "scripts" / "testbed"), *(["--instance", instance] if instance else []), "exec"]

    def run(self, *command: str, cwd: str | None = None, stdin: str = "") -> str:
        argv = [*self._argv, *(["--cwd", cwd] if cwd else []), "--", *command]
        done = subprocess.run(argv, input=os.fsencode(stdin), capture_output=True, check=False)
        if done.returncode != 0:
            said = os.fsdecode(done.stderr or done.stdout)[-2000:]
            raise SystemExit(f"{command[0]} in the testbed ended with {done.returncode}:\n{said}")
        return os.fsdecode(done.stdout)

    def write(self, path: str, text: str) -> None:
        self.run("sh", "-c", 'cat > "$1"', "sh", path, stdin=text)


def _prepare(testbed: _Testbed) -> None:
    """Make the project anew."""
    testbed.run("rm", "-rf", FOLDER)
    testbed.run("mkdir", "-p", FOLDER)
    testbed.write(f"{FOLDER}/hpcenv.toml", f'image = "host"\npython = "{PYTHON}"\n')
    testbed.write(f"{FOLDER}/train.py", SCRIPT)
    # It starts a Python outside of the project: the first try says what has to be accepted.
    lock = 'hpcenv lock "$@" 2>&1 || [ $? = 29 ]'
    asked = re.search("--accept ([0-9a-f]{32})", testbed.run("sh", "-c", lock, cwd=FOLDER))
    if asked:
        testbed.run("sh", "-c", lock, "sh", "--accept", asked[1], cwd=FOLDER)
    testbed.run("test", "-f", "lockfiles/default.lock.toml", cwd=FOLDER)


def _ours(testbed: _Testbed, name: str) -> dict[str, float]:
    marks = f"{FOLDER}/{name}"
    testbed.run("mkdir", marks)
    argv = ["hpcenv", "submit", "train.py", "--nodes", "2", "--gpus", "0", "--nproc", "1", "--cpus", "2"]
    argv += ["--time", "5", "--name", name, "--env", f"MARKS={marks}", "--preflight", "full"]
    times = _run(testbed, marks, f"{FOLDER}/runs/{name}", argv)
    if times["result"] != "match":
        raise SystemExit(f"the smoke test of {name} ended with {times['result']}")
    began, ended = float(times["began"][0]), float(times["ended"][0])
    at = [began, *(_last(times["ranks"], *place) for place in (("start", "begin"), ("start", "end"), ("all", "end")))]
    at.append(ended)
    return {"whole": ended - began} | {part: at[number + 1] - at[number] for number, part in enumerate(PARTS)}


def _last(ranks: list[list[dict[str, Any]]], phase: str, state: str) -> float:
    return float(
        max(line["time"] for rank in ranks for line in rank if (line["phase"], line["state"]) == (phase, state))
    )


def _peer(testbed: _Testbed, name: str) -> dict[str, float]:
    marks = f"{FOLDER}/{name}"
    testbed.run("mkdir", marks)
    testbed.write(f"{marks}.sbatch", PEER.format(marks=marks, folder=FOLDER, python=PYTHON))
    times = _run(testbed, marks, f"{marks}.none", ["sbatch", "--parsable", f"{marks}.sbatch"])
    began, ranks = float(times["began"][0]), [times["rank0"], times["rank1"]]
    return {
        "start": max(float(rank[0]) for rank in ranks) - began,
        "empty": max(float(rank[1]) for rank in ranks) - began,
        "whole": float(times["ended"][0]) - began,
    }


def _run(testbed: _Testbed, marks: str, run: str, argv: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(testbed.run("python3", "-c", ONE, marks, run, *argv, cwd=FOLDER))
    return found


def _judge(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, Any]:
    ours, peers = [one["whole"] for one in mine], [one["start"] for one in theirs]
    ratio = statistics.median(ours) / statistics.median(peers)
    parts = {part: statistics.median(one[part] for one in mine) for part in PARTS}
    empty, whole = (statistics.median(one[part] for one in theirs) for part in ("empty", "whole"))
    print(f"ours: median {statistics.median(ours):.2f} s ({min(ours):.2f} to {max(ours):.2f})")
    print(f"by hand: median {statistics.median(peers):.2f} s ({min(peers):.2f} to {max(peers):.2f})")
    print(f"ratio of the medians {ratio:.2f}")
    print("ours in parts: " + ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items()))
    print(f"peer without torch: {empty:.2f} s; peer until srun ended: {whole:.2f} s")
    return {
        "name": "smoke",
        "ours_s": round(statistics.median(ours), 2),
        "peer_s": round(statistics.median(peers), 2),
        "ratio": round(ratio, 2),
        "must": "no limit",
        "parts_s": {part: round(seconds, 2) for part, seconds in parts.items()},
        "peer_without_torch_s": round(empty, 2),
        "peer_to_its_end_s": round(whole, 2),
        "rounds": len(mine),
        "met": True,
    }


if __name__ == "__main__":
    sys.exit(main())
