"""What starting hpcenv costs: `hpcenv --help` beside `python -c pass`, in user CPU time.

    python -m benchmarks.cli_start [--json] [--rounds N]

Both are started alternately with this Python, ten times each in a round: many kernels part user from system time by
their clock's tick, which one start hardly sees. The kernel counts the time (wait4). User CPU, not wall time: it is
what a login node that a hundred people share has to give.

Must: at most 4.5 of the peer's, and none of pydantic, tomlkit, submitit, rich and requests is loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

RATIO = 4.5
STARTS = 10
HEAVY = ("pydantic", "requests", "rich", "submitit", "tomlkit", "torch")
HELP = [sys.executable, "-m", "hpcenv", "--help"]
PEER = [sys.executable, "-c", "pass"]


def main() -> int:
    """Measure, print, and return 1 when a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    result = _measure(options.rounds)
    if options.json:
        print(json.dumps(result))
    return 0 if result["met"] else 1


def _measure(rounds: int) -> dict[str, Any]:
    ours, peer = [], []
    for number in range(rounds + 1):
        one, other = 0.0, 0.0
        for _ in range(STARTS):
            one, other = one + _user_seconds(HELP), other + _user_seconds(PEER)
        if number:  # the first round reads the files from disk
            ours.append(one / STARTS)
            peer.append(other / STARTS)
    loaded = _loaded()
    heavy = sorted({name.partition(".")[0] for name in loaded}.intersection(HEAVY))
    ratios = [one / other for one, other in zip(ours, peer, strict=True)]
    ratio = statistics.median(ratios)
    print(f"hpcenv --help: user CPU median {statistics.median(ours) * 1000:.1f} ms ({_spread(ours)})")
    print(f"python -c pass: user CPU median {statistics.median(peer) * 1000:.1f} ms ({_spread(peer)})")
    print(f"ratio: median {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"{len(loaded)} modules more than `python -c pass`; heavy ones: {', '.join(heavy) or 'none'}")
    return {
        "name": "cli_start",
        "ours_s": round(statistics.median(ours), 4),
        "peer_s": round(statistics.median(peer), 4),
        "ratio": round(ratio, 2),
        "must": f"ratio <= {RATIO:g}, heavy = []",
        "modules": len(loaded),
        "heavy": heavy,
        "met": ratio <= RATIO and not heavy,
    }


def _user_seconds(argv: list[str]) -> float:
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as child:
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"{argv} ended with {child.returncode}")
    return usage.ru_utime


def _loaded() -> list[str]:
    """Modules that `hpcenv --help` loads and an empty Python does not."""
    code = (
        "import sys; before = set(sys.modules); sys.argv = ['hpcenv', '--help']\n"
        "from hpcenv.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('\\n'.join(sorted(set(sys.modules) - before)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stderr.split()


def _spread(seconds: list[float]) -> str:
    return f"{min(seconds) * 1000:.1f} to {max(seconds) * 1000:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
