"""How long a program waits for its image: `import torch` in our SIF beside that in the SIF of `apptainer build`.

    python -m benchmarks.image_first_import [--json] [--image REF] [--folder DIR] [--rounds N]

Both SIFs are made first, the peer's as it comes (gzip -9). Then each round runs `apptainer exec SIF python3 -c
"import torch"` with one and with the other, at least five rounds, the first of the two in turn: once with both files
in the page cache, once after each file was taken out of it (posix_fadvise; no rights are needed for that). Every run
mounts its SIF anew. Must: at most 1.05 of the peer's wall time, the median over the rounds, warm and cold.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import _image

NEEDS = ("login node",)

MUST = 1.05
LEAST_ROUNDS = 5


def main() -> int:
    """Make both SIFs, measure alternately, print, and return 1 when the bound is not kept."""
    words = _image.options(__doc__)
    with _image.fresh(words.folder) as place, _image.fresh(words.folder) as temporary:
        store = place / "store"
        _image.ours(words.image, store, store / "tmp", prove=not words.no_proof)
        [mine] = (store / "images").glob("*.sif")
        _image.peer(words.image, place, temporary=temporary, cache=place / "cache", tuned=False)
        theirs = place / "peer.sif"
        rounds = max(LEAST_ROUNDS, words.rounds)
        warm = measure(mine, theirs, rounds, cold=False)
        cold = measure(mine, theirs, rounds, cold=True)
    return _image.report(words, row(warm, cold))


def measure(mine: Path, theirs: Path, rounds: int, *, cold: bool) -> list[tuple[float, float]]:
    """Return the seconds of both for every round; one round goes before and is not counted."""
    found = []
    for number in range(rounds + 1):
        order = (mine, theirs) if number % 2 else (theirs, mine)
        taken = {sif: import_torch(sif, cold=cold) for sif in order}
        found.append((taken[mine], taken[theirs]))
    return found[1:]


def import_torch(sif: Path, *, cold: bool) -> float:
    """Return the seconds that one container took."""
    if cold:
        with sif.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    subprocess.run(
        ["apptainer", "exec", str(sif), "python3", "-c", "import torch"],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - began


def row(warm: list[tuple[float, float]], cold: list[tuple[float, float]]) -> dict[str, object]:
    """Print what was measured and return the JSON row."""
    ratios = {}
    for name, pairs in (("warm", warm), ("cold", cold)):
        each = [one / other for one, other in pairs]
        ratios[name] = round(statistics.median(each), 3)
        for number, ((one, other), ratio) in enumerate(zip(pairs, each, strict=True), 1):
            print(f"{name} {number}: ours {one:.2f} s, peer {other:.2f} s, ratio {ratio:.3f}")
    return {
        "name": "image_first_import",
        "ours_s": round(statistics.median(one for one, _ in warm), 3),
        "peer_s": round(statistics.median(other for _, other in warm), 3),
        "ratio": ratios["warm"],
        "must": f"ratio <= {MUST:g}, warm and cold",
        "ours_cold_s": round(statistics.median(one for one, _ in cold), 3),
        "peer_cold_s": round(statistics.median(other for _, other in cold), 3),
        "ratio_cold": ratios["cold"],
        "met": max(ratios.values()) <= MUST,
    }


if __name__ == "__main__":
    sys.exit(main())
