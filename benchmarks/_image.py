"""What the image benchmarks share: a run with its wall time, peak memory and peak temporary space."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ZSTD = "-comp zstd -Xcompression-level 3"


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one conversion took, all its processes together.

    Attributes:
        wall: seconds.
        cpu: processor seconds, user and system: what a busy machine changes least.
        peak_mib: largest sum of the processes' proportional set sizes (PSS, proc(5)).
        space_mib: most that lay in the watched folders at one time.
    """

    wall: float
    cpu: float
    peak_mib: float
    space_mib: float


def options(doc: str | None) -> argparse.Namespace:
    """Parse the words that all image benchmarks know."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--image", default="docker://registry:5000/hpcenv/torch:2.13.0-cpu", help="what is converted")
    parser.add_argument("--folder", default=None, help="where to work; a fresh folder below it is used")
    parser.add_argument("--memory-folder", default="/dev/shm", help="tmpfs for the tuned peer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-proof", action="store_true", help="leave out what the peer does not do either")
    return parser.parse_args()


@contextlib.contextmanager
def fresh(parent: str | None) -> Iterator[Path]:
    """Give a folder that is gone afterwards, whatever modes an unpacked image left in it."""
    place = Path(tempfile.mkdtemp(prefix="hpcenv-bench-", dir=parent))
    try:
        yield place
    finally:
        remove(place)


def remove(place: Path) -> None:
    """Remove a tree that may hold folders without permissions."""
    subprocess.run(["chmod", "-R", "u+rwX", str(place)], check=False, stderr=subprocess.DEVNULL)
    shutil.rmtree(place, ignore_errors=True)


def cold(name: str, doc: str | None, *, tuned: bool, must: float) -> int:
    """Convert with nothing cached, ours and the peer alternately; return 1 when a bound is not kept."""
    words = options(doc)
    mine, theirs, size = [], [], 0.0
    for _ in range(words.rounds):
        with fresh(words.folder) as place, fresh(words.memory_folder if tuned else words.folder) as temporary:
            store, cache = place / "store", place / "cache"
            mine.append(ours(words.image, store, store / "tmp", prove=not words.no_proof))
            [made] = (store / "images").glob("*.sif")
            size = made.stat().st_size / 2**20
            theirs.append(peer(words.image, place, temporary=temporary, cache=cache, tuned=tuned))
    return report(words, summary(name, mine, theirs, must=must, size_mib=size))


def report(words: argparse.Namespace, row: dict[str, object]) -> int:
    """Print the JSON line if it was asked for; return the exit status."""
    if words.json:
        print(json.dumps(row))
    return 0 if row["met"] else 1


def ours(reference: str, store: Path, watched: Path, *, prove: bool = True) -> Taken:
    """Convert with `hpcenv image pull` into `store`."""
    argv = [sys.executable, "-m", "hpcenv", "image", "pull", reference, "--store", str(store)]
    argv += [] if prove else ["--no-proof"]
    if reference.startswith("docker://"):
        argv += ["--plain-http"]
    return take(argv, os.environ, [watched])


def peer(reference: str, place: Path, *, temporary: Path, cache: Path, tuned: bool) -> Taken:
    """Convert with `apptainer build`, as it comes or tuned by hand."""
    argv = ["apptainer", "build", "--force", *(["--mksquashfs-args", ZSTD] if tuned else [])]
    argv += [*(["--no-https"] if reference.startswith("docker://") else []), str(place / "peer.sif"), reference]
    env = {**os.environ, "APPTAINER_TMPDIR": str(temporary), "APPTAINER_CACHEDIR": str(cache)}
    return take(argv, env, [temporary])


def take(argv: list[str], env: Mapping[str, str], watched: list[Path]) -> Taken:
    """Run a program to its end and watch its processes and folders twenty times a second."""
    child = subprocess.Popen(argv, env=dict(env), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    watcher = _Watcher(child.pid, watched)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    watcher.start()
    _, said = child.communicate()
    wall = time.perf_counter() - began
    watcher.stop()
    if child.returncode != 0:
        raise SystemExit(f"{argv[:4]} ended with {child.returncode}:\n{said[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Taken(wall=wall, cpu=cpu, peak_mib=watcher.peak_mib, space_mib=watcher.space_mib)


class _Watcher(threading.Thread):
    def __init__(self, pid: int, folders: list[Path]) -> None:
        super().__init__(daemon=True)
        self._pid, self._folders = pid, folders
        self._over = threading.Event()
        self.peak_mib = self.space_mib = 0.0

    def run(self) -> None:
        number = 0
        while not self._over.wait(0.05):
            self.peak_mib = max(self.peak_mib, sum(map(_pss_mib, _tree(self._pid))))
            if number % 10 == 0:
                self.space_mib = max(self.space_mib, sum(map(_used_mib, self._folders)))
            number += 1

    def stop(self) -> None:
        self._over.set()
        self.join()


def _tree(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from _tree(int(child))


def _pss_mib(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def _used_mib(folder: Path) -> float:
    done = subprocess.run(["du", "-s", "--block-size=1K", str(folder)], capture_output=True, text=True, check=False)
    word = done.stdout.split()[:1]
    return int(word[0]) / 1024 if word else 0.0


def summary(name: str, mine: list[Taken], theirs: list[Taken], *, must: float, size_mib: float) -> dict[str, object]:
    """Print what was measured and return the JSON row."""
    ratios = [one.wall / other.wall for one, other in zip(mine, theirs, strict=True)]
    peak, space = max(one.peak_mib for one in mine), max(one.space_mib for one in mine)
    for number, (one, other, ratio) in enumerate(zip(mine, theirs, ratios, strict=True), 1):
        print(f"round {number}: ours {one.wall:.2f} s, peer {other.wall:.2f} s, ratio {ratio:.3f}", end="")
        print(f"; processor seconds {one.cpu:.1f} and {other.cpu:.1f}")
    print(f"ours: peak memory {peak:.0f} MiB, temporary space {space:.0f} MiB for a result of {size_mib:.0f} MiB")
    met = statistics.median(ratios) <= must and peak <= 768
    return {
        "name": name,
        "ours_s": round(statistics.median(one.wall for one in mine), 3),
        "peer_s": round(statistics.median(one.wall for one in theirs), 3),
        "ratio": round(statistics.median(ratios), 3),
        "must": f"ratio <= {must:g}, peak_mib <= 768",
        "ratio_cpu": round(statistics.median(one.cpu / other.cpu for one, other in zip(mine, theirs, strict=True)), 3),
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "peak_mib": round(peak, 1),
        "space_mib": round(space, 1),
        "size_mib": round(size_mib, 1),
        "met": met,
    }
