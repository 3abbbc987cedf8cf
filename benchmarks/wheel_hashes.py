"""How long it takes to find the sha256 of 60 installed packages' wheels, cold and cached.

    python -m benchmarks.wheel_hashes [--json] [--environment PYTHON] [--rounds N]

Needs pip's configured index. Without `--environment` 60 packages are installed into a temporary venv first (not
measured). Cold is with an empty cache of ours and without pip's HTTP cache, for both.

The peer is what pip itself offers: `pip install --dry-run --ignore-installed --no-deps --report` of the same
packages and versions in one run. It names the file that it would install today and proves nothing about the
installed one; where an index has no PEP 658 metadata (or pip is older than 23.3) it downloads every wheel.

Must: cold at most 15 s, cached at most 0.5 s, and every sha256 that both give is the same.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from hpcenv.locking.wheels.find import find_wheels
from hpcenv.locking.wheels.proof import Index, InstalledDist, WheelProof

COUNT = 60
COLD_S = 15.0
CACHED_S = 0.5
PACKAGES = """
    aiohappyeyeballs aiosignal annotated-types anyio argcomplete attrs babel beautifulsoup4 cachetools certifi cffi
    charset-normalizer click cloudpickle colorama coverage cycler decorator dill filelock fonttools frozenlist fsspec
    gitpython h11 httpcore httpx hypothesis idna importlib-metadata iniconfig isodate jinja2 joblib jsonschema
    kiwisolver lxml markdown-it-py markupsafe mdurl mpmath multidict networkx numpy packaging pandas pillow
    platformdirs pluggy protobuf psutil pyarrow pydantic pydantic-core pygments pyyaml requests rich scikit-learn scipy
    sympy tqdm typing-extensions urllib3
"""


def main() -> int:
    """Measure, print, and return 1 when a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--environment", help="Python of an environment with at least 60 packages")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        python = options.environment or _install(Path(folder))
        dists = _dists(python)[:COUNT]
        result = _measure(dists, Path(folder), options.rounds)
    if options.json:
        print(json.dumps(result))
    return 0 if result["met"] else 1


def _install(folder: Path) -> str:
    """A venv with 60 packages, without their dependencies: they are looked at, not run."""
    venv.create(folder / "env", with_pip=False)
    python = str(folder / "env" / "bin" / "python")
    argv = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-compile"]
    subprocess.run([*argv, "--only-binary", ":all:", *PACKAGES.split()], check=True, timeout=900)
    return python


def _dists(python: str) -> list[InstalledDist]:
    import hpcenv

    probe = Path(str(hpcenv.__file__)).parent / "incontainer" / "probe"
    done = subprocess.run([python, "-B", str(probe)], check=True, capture_output=True, text=True, timeout=120)
    packages = json.loads(done.stdout.splitlines()[-1])["packages"]
    return [InstalledDist.from_probe(entry) for entry in packages if entry["record-sha256"]]


def _measure(dists: list[InstalledDist], folder: Path, rounds: int) -> dict[str, object]:
    env = {**os.environ, "PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    cold, cached, peer, ratios, cpu = [], [], [], [], []
    for number in range(rounds):
        before = os.times()
        seconds, found = _ours(dists, env, folder / f"cache{number}")
        after = os.times()
        cpu.append(after.children_user + after.children_system - before.children_user - before.children_system)
        cold.append(seconds)
        seconds, again = _ours(dists, env, folder / f"cache{number}")
        cached.append(seconds)
        seconds, told = _pip(dists, env, folder / "report.json")
        peer.append(seconds)
        ratios.append(cold[-1] / peer[-1])
        print(f"round {number + 1}: cold {cold[-1]:.2f} s, cached {cached[-1]:.3f} s, pip's report {peer[-1]:.2f} s")
    proofs = collections.Counter(proof.proof for proof in found)
    differ = [
        proof.name for proof in found if proof.sha256 and told.get(proof.filename or "") not in (None, proof.sha256)
    ]
    same = sum(proof.sha256 is not None and told.get(proof.filename or "") == proof.sha256 for proof in found)
    met = max(cold) <= COLD_S and max(cached) <= CACHED_S and not differ and found == again
    print(f"{len(dists)} packages, proofs {dict(proofs)}; same sha256 as pip's report: {same}, other: {differ}")
    print(f"cold median {statistics.median(cold):.2f} s ({min(cold):.2f} to {max(cold):.2f}), CPU {min(cpu):.2f} s")
    print(f"cached median {statistics.median(cached):.3f} s ({min(cached):.3f} to {max(cached):.3f})")
    print(f"ratio to pip's report: median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return {
        "name": "wheel_hashes",
        "ours_s": round(statistics.median(cold), 3),
        "peer_s": round(statistics.median(peer), 3),
        "ratio": round(statistics.median(ratios), 3),
        "must": f"ours_s <= {COLD_S:g}, cached_s <= {CACHED_S:g}",
        "cached_s": round(statistics.median(cached), 3),
        "packages": len(dists),
        "proved": proofs["record"],
        "met": met,
    }


def _ours(dists: list[InstalledDist], env: dict[str, str], cache: Path) -> tuple[float, tuple[WheelProof, ...]]:
    start = time.perf_counter()
    found = find_wheels(dists, index=Index(env=env), cache=cache, timeout=60.0)
    return time.perf_counter() - start, found


def _pip(dists: list[InstalledDist], env: dict[str, str], report: Path) -> tuple[float, dict[str, str]]:
    """Ask pip itself: file name to sha256."""
    argv = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--no-deps"]
    argv += ["--only-binary", ":all:", "--report", str(report), *(f"{dist.name}=={dist.version}" for dist in dists)]
    start = time.perf_counter()
    subprocess.run(argv, check=True, env=env, capture_output=True, timeout=900)
    seconds = time.perf_counter() - start
    told = [entry["download_info"] for entry in json.loads(report.read_text())["install"]]
    return seconds, {origin["url"].rsplit("/", 1)[1]: origin["archive_info"]["hashes"]["sha256"] for origin in told}


if __name__ == "__main__":
    sys.exit(main())
