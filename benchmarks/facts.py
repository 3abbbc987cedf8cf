"""How long it takes to say what an environment is: the probe beside `python -m torch.utils.collect_env`.

    python -m benchmarks.facts [--json] [--python PYTHON] [--level LEVEL] [--rounds N]

`--python` names the interpreter of an environment with torch; without it, HPCENV_TEST_TORCH_PYTHON. Warm: one round
of both goes before and is not counted. Ours is started as hpcenv starts it (`python -B - --level LEVEL`, with the
program on standard input);
level record is what nodes read of a SIF, full hashes every installed file as well.

The peer imports torch and asks the system about 27 things; it reads no package's content.

Must: at most 0.2 of the peer's wall time, at most 1.5 s, peak memory at most 100 MiB. The peak is that of the largest
process among the probe and what it starts (wait4); `--json` has it in `peak_mib`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcenv.container.probe_source import probe_source

NEEDS = ("torch",)

RATIO = 0.2
SECONDS = 1.5
PEAK_MIB = 100


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one process took, with all that it started."""

    wall: float
    cpu: float
    peak_mib: float
    stdout: bytes


def main() -> int:
    """Measure, print, and return 1 when a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--python", default=os.environ.get("HPCENV_TEST_TORCH_PYTHON"))
    parser.add_argument("--level", choices=["record", "full", "deep"], default="record")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not options.python:
        parser.error("--python PYTHON, or HPCENV_TEST_TORCH_PYTHON: an interpreter that has torch")
    result = _measure(options.python, options.level, options.rounds)
    if options.json:
        print(json.dumps(result))
    return 0 if result["met"] else 1


def _measure(python: str, level: str, rounds: int) -> dict[str, Any]:
    probe = probe_source().encode()
    ours_argv = [python, "-B", "-", "--level", level]
    peer_argv = [python, "-m", "torch.utils.collect_env"]
    ours, peer = [], []
    for number in range(rounds + 1):
        one, other = _take(ours_argv, probe), _take(peer_argv, b"")
        if number:
            ours.append(one)
            peer.append(other)
            print(f"round {number}: probe {one.wall:.3f} s, {one.peak_mib:.0f} MiB; collect_env {other.wall:.3f} s")
    answer = json.loads(ours[-1].stdout.splitlines()[-1])
    files = _count_files(python)
    wall = statistics.median(one.wall for one in ours)
    ratios = [one.wall / other.wall for one, other in zip(ours, peer, strict=True)]
    peak = max(one.peak_mib for one in ours)
    print(f"{answer['values']['packages.count']} packages, {files} files; level {level}")
    print(
        f"probe median {wall:.3f} s ({_spread([o.wall for o in ours])}), CPU {ours[-1].cpu:.3f} s, peak {peak:.0f} MiB"
    )
    print(f"collect_env median {statistics.median(o.wall for o in peer):.3f} s ({_spread([o.wall for o in peer])})")
    print(f"ratio: median {statistics.median(ratios):.3f} ({_spread(ratios)})")
    print(f"parts: {json.dumps(answer.get('seconds'))}")
    met = statistics.median(ratios) <= RATIO and wall <= SECONDS and peak <= PEAK_MIB
    return {
        "name": "facts" if level == "record" else f"facts_{level}",
        "ours_s": round(wall, 3),
        "peer_s": round(statistics.median(o.wall for o in peer), 3),
        "ratio": round(statistics.median(ratios), 3),
        "must": f"ratio <= {RATIO:g}, ours_s <= {SECONDS:g}, peak_mib <= {PEAK_MIB}",
        "peak_mib": round(peak, 1),
        "files": files,
        "packages": answer["values"]["packages.count"],
        "met": met,
    }


def _take(argv: list[str], stdin: bytes) -> Taken:
    """Run a process and wait for it ourselves: the kernel then says what it and its children took."""
    began = time.perf_counter()
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/")
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(stdin)
    child.stdin.close()
    stdout = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"{argv[:3]} ended with {child.returncode}")
    return Taken(wall=wall, cpu=usage.ru_utime + usage.ru_stime, peak_mib=usage.ru_maxrss / 1024, stdout=stdout)


def _count_files(python: str) -> int:
    folder = Path(python).absolute().parents[1]
    return sum(len(names) for _, _, names in os.walk(folder))


def _spread(values: list[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


if __name__ == "__main__":
    sys.exit(main())
