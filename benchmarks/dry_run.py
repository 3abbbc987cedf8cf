"""What `hpcenv submit --dry-run` costs: beside TorchX's dry run of the same job, in wall time.

    python -m benchmarks.dry_run [--json] [--rounds N] [--torchx PROGRAM]

The peer is `torchx run --scheduler slurm --dryrun dist.ddp -j 2x8 --script train.py`; without --torchx it is installed
with pip into a folder that is removed again. Ours plans the same shape for a locked environment of this machine, in a
git repository: the script compiled, the lockfile read and compared with hpcenv.toml, the state of the code recorded.
Both are started alternately; the first round, which reads the files from disk, does not count.

Must: below 1 s on a quiet machine. The peer shows what another program needs; it is no limit.
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
import venv
from pathlib import Path
from typing import Any

NEEDS = ("torch",)

SECONDS = 1.0
ROOT = Path(__file__).resolve().parents[1]
# As many GPUs as the peer asks for need no GPU here: nothing is submitted.
OURS = [sys.executable, "-m", "hpcenv", "submit", "train.py", "--nodes", "2", "--gpus", "0", "--nproc", "8"]
PEER = ["run", "--scheduler", "slurm", "--dryrun", "dist.ddp", "-j", "2x8", "--script", "train.py"]
# What an environment needs to be locked: a torch that names its version.
TORCH = {
    "torch/__init__.py": "",
    "torch/version.py": "__version__ = '2.13.0+cpu'\ncuda = None\nhip = None\ngit_version = 'cf30153c'\n",
    "torch-2.13.0+cpu.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n",
    "torch-2.13.0+cpu.dist-info/RECORD": "torch/__init__.py,,\ntorch/version.py,,\n",
}


def main() -> int:
    """Measure, print, and return 1 when the bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--torchx", help="the program, if it is installed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dry-run-") as name:
        folder = Path(name)
        torchx = options.torchx or _install_torchx(folder / "torchx")
        result = _measure(_project(folder), torchx, options.rounds)
    if options.json:
        print(json.dumps(result))
    return 0 if result["met"] else 1


def _install_torchx(folder: Path) -> str:
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", "torchx"], check=True)
    return str(folder / "bin" / "torchx")


def _project(folder: Path) -> Path:
    """Make a locked project under git."""
    venv.create(folder / "env", with_pip=False, symlinks=True)
    site = next((folder / "env").glob("lib/python*/site-packages"))
    for name, text in TORCH.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    project = folder / "project"
    project.mkdir()
    (project / "train.py").write_text("print(1)\n")
    _run([sys.executable, "-m", "hpcenv", "init", "--python", str(folder / "env" / "bin" / "python")], project)
    _run([sys.executable, "-m", "hpcenv", "lock"], project)
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.email=a@b", "-c", "user.name=a", "commit", "-qm", "one"]):
        _run(["git", *words], project)
    return project


def _run(argv: list[str], folder: Path) -> float:
    started = time.perf_counter()
    own = {name: str(folder.parent / name) for name in ("cache", "state")}
    xdg = {"XDG_CACHE_HOME": own["cache"], "XDG_STATE_HOME": own["state"]}
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **xdg}
    done = subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    took = time.perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"{argv} ended with {done.returncode}: {done.stderr[-2000:]}")
    return took


def _measure(project: Path, torchx: str, rounds: int) -> dict[str, Any]:
    ours_argv, peer_argv = [*OURS, "--cluster", "local", "--dry-run"], [torchx, *PEER]
    pairs = [(_run(ours_argv, project), _run(peer_argv, project)) for _ in range(rounds + 1)]
    ours, peer = [pair[0] for pair in pairs[1:]], [pair[1] for pair in pairs[1:]]
    ratios = [one / other for one, other in pairs[1:]]
    ratio = statistics.median(ratios)
    print(f"hpcenv submit --dry-run: median {statistics.median(ours):.3f} s ({min(ours):.3f} to {max(ours):.3f})")
    print(f"torchx run --dryrun:     median {statistics.median(peer):.3f} s ({min(peer):.3f} to {max(peer):.3f})")
    print(f"ratio: median {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return {
        "name": "dry_run",
        "ours_s": round(statistics.median(ours), 3),
        "peer_s": round(statistics.median(peer), 3),
        "ratio": round(ratio, 2),
        "must": f"ours_s < {SECONDS:g}",
        "met": statistics.median(ours) < SECONDS,
    }


if __name__ == "__main__":
    sys.exit(main())
