"""How fast `hpcenv diagnose` reads a log: mixed lines of a training on 16 ranks, with a failure in its middle.

    python -m benchmarks.diagnose [--json] [--mib N]

The log has progress lines, NCCL's INFO lines, warnings, log lines with the word "error", and 5 % of prose whose every
line is new. It is read in a separate process, once with an eighth of its size and once whole: the difference of the
memory is what grows. There is no peer that reads these logs offline.

Must: 100 MB of log per second of CPU time, at most 10 MiB more memory for eight times the log, and the right cause.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MB_PER_SECOND = 100
GROWTH_MIB = 10
CAUSE = "gpu-out-of-memory"
_FAILURE = Path(__file__).resolve().parents[1] / "tests" / "logs" / "failed" / f"{CAUSE}.log"
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def main() -> int:
    """Measure, print, and return 1 when a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--mib", type=int, default=512, help="size of the log")
    parser.add_argument("--read", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(_read(Path(options.read))))
        return 0
    result = _measure(options.mib << 20)
    if options.json:
        print(json.dumps(result))
    return 0 if result["met"] else 1


def _measure(size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small.log", Path(folder) / "large.log"
        _write(small, size // 8)
        _write(large, size)
        first, whole = _in_a_process(small), _in_a_process(large)
        speed = large.stat().st_size / 1e6 / whole["cpu_s"]
    growth = whole["peak_mib"] - first["peak_mib"]
    print(f"{size >> 20} MiB: {whole['cpu_s']:.2f} s of CPU time, {speed:.0f} MB/s, peak {whole['peak_mib']:.0f} MiB")
    print(f"an eighth of it: peak {first['peak_mib']:.0f} MiB; cause {whole['cause']}")
    return {
        "name": "diagnose",
        "ours_s": round(whole["cpu_s"], 3),
        "peer_s": None,
        "ratio": None,
        "must": f"mb_per_s >= {MB_PER_SECOND}, growth_mib <= {GROWTH_MIB}, the right cause",
        "mb_per_s": round(speed, 1),
        "growth_mib": round(growth, 1),
        "met": speed >= MB_PER_SECOND and growth <= GROWTH_MIB and whole["cause"] == first["cause"] == CAUSE,
    }


def _in_a_process(log: Path) -> dict[str, Any]:
    argv = [sys.executable, "-m", "benchmarks.diagnose", "--read", str(log)]
    return dict(json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout))


def _read(log: Path) -> dict[str, Any]:
    """What the command does with a log, in this process."""
    from hpcenv.runs.diagnose.diagnose import diagnose_files

    began = time.process_time()
    diagnosis = diagnose_files([log], [log.name])
    return {
        "cpu_s": time.process_time() - began,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "cause": None if diagnosis.cause is None else diagnosis.cause.pattern,
    }


def _write(log: Path, size: int) -> None:
    """Write a log with the failure in its middle."""
    generator = random.Random(1)
    words = ["".join(generator.choices(_LETTERS, k=generator.randrange(2, 10))) for _ in range(20_000)]
    failure, written = _FAILURE.read_bytes(), 0
    with open(log, "wb") as file:
        while written < size:
            piece = "".join(_lines(generator, words)).encode()
            written += file.write(piece)
            if failure and written >= size // 2:
                written += file.write(failure)
                failure = b""


def _lines(generator: random.Random, words: list[str]) -> Iterator[str]:
    """Yield some thousand lines of a training."""
    for _ in range(4000):
        rank, step, value = generator.randrange(16), generator.randrange(100_000), generator.random()
        kind = generator.random()
        if kind < 0.55:
            yield f"[{rank}] step {step}/100000 loss {value * 5:.4f} lr {value / 1e3:.3e} tokens/s {value * 1e5:.1f}\n"
        elif kind < 0.80:
            yield f"[{rank}] n{rank // 8}:{step}:{step + 9} [{rank % 8}] NCCL INFO Channel {step % 24:02}/0 : {rank}"
            yield f"[{rank % 8}] -> {rank + 1}[{rank % 7}] via P2P/CUMEM/read\n"
        elif kind < 0.90:
            yield f"[{rank}] 2026-11-22 10:{step % 60:02}:11,{step % 1000:03} INFO trainer.py:{step % 400} "
            yield f"epoch {step % 90}: validation error {value:.3f}, failed samples {step % 7}\n"
        elif kind < 0.95:
            yield f"[{rank}] /env/lib/python3.12/site-packages/torch/utils/checkpoint.py:{step}: UserWarning: "
            yield "the use_reentrant parameter should be passed explicitly.\n"
        else:
            yield " ".join(generator.choices(words, k=14)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
