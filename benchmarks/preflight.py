"""Quick checks on healthy nodes: no false alarm, and how long facts and checks of a node take.

    python -m benchmarks.preflight [--json] [--rounds N] [--instance NAME]

Each round is a real `hpcenv verify --nodes 2` in the testbed, which `python -m benchmarks preflight` brings up: with
the GPUs of its stub NVML, so that every check of GPUs runs, and on a Python without packages. What an environment of
many files adds is measured elsewhere (benchmarks/facts.py). Issue 11 asks for 50 rounds: --rounds 50.

The time is that of the check step on one node, as its facts have it: host, network, fabric and checks in one thread,
the probe of the environment beside them. There is no peer. torch is not installed there, so it cannot be imported.

Must: no check fails in any round, and none is unknown that would warn or block; the slower node of the median round
at most 2 s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

NEEDS = ("testbed",)

ROUNDS = 10
MOST_S = 2.0
NODES = 2
ROOT = Path(__file__).resolve().parents[1]
FOLDER = "/home/alice/hpcenv-bench/preflight"
SPEC = 'image = "host"\npython = "venv/bin/python"\n[policy]\n"torch.version" = "info"\n'
# What one thread of the check step does, one after the other (facts/facts.py); the probe runs beside it.
BESIDE = ("host", "network", "fabric", "preflight")


def main() -> int:
    """Measure, print, and return 1 when a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of each node that the run asks for (default 8)")
    parser.add_argument("--instance", help="which testbed, if not this checkout's own")
    options = parser.parse_args()
    testbed = _Testbed(options.instance)
    _prepare(testbed)
    rounds = [_round(testbed, number, options.gpus) for number in range(1, options.rounds + 1)]
    result = _judge(rounds)
    print(f"{result['alarms']} alarms in {len(rounds)} rounds of {NODES} nodes; {result['checks_fine']} checks fine")
    if result["notes"]:
        print(f"not measured, which is a note: {', '.join(result['notes'])}")
    print("parts of the slowest node, median: " + ", ".join(f"{part} {took:.2f} s" for part, took in result["parts"]))
    if options.json:
        print(json.dumps(result))
    return 0 if result["met"] else 1


class _Testbed:
    def __init__(self, instance: str | None) -> None:
        self._argv = [str(ROOT / "scripts" / "testbed"), *(["--instance", instance] if instance else []), "exec"]

    def run(self, *command: str, cwd: str = "/", stdin: str = "") -> str:
        """Run a command as alice; one that asks for acceptance (29) says so on standard error."""
        argv = [*self._argv, "--cwd", cwd, "--", *command]
        done = subprocess.run(argv, input=os.fsencode(stdin), capture_output=True, check=False)
        if done.returncode not in (0, 29, 90, 91):
            said = os.fsdecode(done.stderr or done.stdout)[-2000:]
            raise SystemExit(f"{command[0]} in the testbed ended with {done.returncode}:\n{said}")
        return os.fsdecode(done.stdout + (done.stderr if done.returncode == 29 else b""))

    def hpcenv(self, *words: str) -> str:
        """Run hpcenv in the project; accept what its own files ask."""
        text = self.run("hpcenv", *words, cwd=FOLDER)
        asked = re.search("--accept ([0-9a-f]{32})", text)
        return self.run("hpcenv", words[0], "--accept", asked[1], *words[1:], cwd=FOLDER) if asked else text


def _prepare(testbed: _Testbed) -> None:
    testbed.run("rm", "-rf", FOLDER)
    testbed.run("mkdir", "-p", FOLDER)
    testbed.run("python3", "-m", "venv", "--without-pip", f"{FOLDER}/venv")
    testbed.run("sh", "-c", 'cat > "$1"', "sh", f"{FOLDER}/hpcenv.toml", stdin=SPEC)
    testbed.hpcenv("lock")


def _round(testbed: _Testbed, number: int, gpus: int) -> dict[str, Any]:
    """Check the nodes once; return what is not fine, and the seconds of the slowest node."""
    data = json.loads(testbed.hpcenv("verify", "--nodes", str(NODES), "--gpus", str(gpus), "--json"))["data"]
    checks = data["verdict"]["preflight"]
    # A finding of a check has an owner; the others are about the lockfile. What cannot be read everywhere, such as the
    # kernel's log, is a note (`info`) where it is unknown.
    own = [row for row in data["verdict"]["findings"] if row["owner"]]
    notes = {row["field"] for row in own if (row["result"], row["severity"]) == ("unknown", "info")}
    alarms = [f"{row['field']} on {row['node']}: {row['found']}" for row in own if row["field"] not in notes]
    walls = {node: _wall(parts) for node, parts in data["seconds"].items()}
    slowest = max(walls, key=walls.__getitem__)
    print(
        f"round {number}: {data['outcome']}, {len(checks['fine'])} fine, {len(alarms)} alarms, "
        f"{walls[slowest]:.2f} s on the slower node" + "".join(f"\n  {alarm}" for alarm in alarms),
        flush=True,
    )
    return {
        "outcome": data["outcome"],
        "fine": len(checks["fine"]),
        "alarms": alarms,
        "notes": sorted(notes),
        "wall": walls[slowest],
        "parts": data["seconds"][slowest],
    }


def _wall(parts: dict[str, float]) -> float:
    beside = sum(took for part, took in parts.items() if part in BESIDE)
    return max(beside, sum(parts.values()) - beside)


def _judge(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    walls = [one["wall"] for one in rounds]
    alarms = Counter(alarm for one in rounds for alarm in one["alarms"])
    outcomes = Counter(one["outcome"] for one in rounds)
    names = sorted({part for one in rounds for part in one["parts"]})
    return {
        "name": f"quick checks and facts on {NODES} healthy nodes",
        "ours_s": round(statistics.median(walls), 3),
        "peer_s": None,
        "ratio": None,
        "must": f"no alarm ({alarms.total()} in {len(rounds)} rounds), at most {MOST_S:g} s on a node",
        "met": not alarms and set(outcomes) == {"match"} and statistics.median(walls) <= MOST_S,
        "alarms": alarms.total(),
        "outcomes": dict(outcomes),
        "notes": sorted({note for one in rounds for note in one["notes"]}),
        "checks_fine": min(one["fine"] for one in rounds),
        "slowest_s": round(max(walls), 3),
        "parts": [(part, statistics.median(one["parts"].get(part, 0.0) for one in rounds)) for part in names],
    }


if __name__ == "__main__":
    raise SystemExit(main())
