"""Run benchmarks and print one table: `python -m benchmarks [--json] [NAME ...]`.

It starts what the benchmarks need, from a fresh clone: a virtual environment with hpcenv and torch
(`.venv` in the checkout, or HPCENV_TEST_VENV), and the testbed (root only), which it takes down
again if it brought it up. Packages come through pip and apt as they are configured on this machine.

Each benchmark runs in its own process. A module says in `NEEDS` what it needs: `torch`, `testbed`
(a testbed that is up) or `login node` (it runs on the testbed's login node, as user alice).
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._stop import end_in_order, run_to_its_end

ROOT = Path(__file__).resolve().parents[1]
TESTBED = ROOT / "scripts" / "testbed"
# The testbed's shared folder, as its machines see it, and the Python that hpcenv is installed with there.
SHARED = "/shared"
LOGIN_PYTHON = f"{SHARED}/hpcenv/venv/bin/python"
NEEDS = frozenset({"torch", "testbed", "login node"})


def main() -> int:
    """Run the named benchmarks, or all; a benchmark that fails is a row of the table."""
    known = names()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of: {', '.join(known)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(known)}")
    selected = options.names or known
    needs = {name: needs_of(name) for name in selected}
    python = environment()
    end_in_order()
    started = start_testbed() if any(need & {"testbed", "login node"} for need in needs.values()) else False
    try:
        return run_all(selected, needs, python, as_json=options.json)
    finally:
        if started:
            progress("takes the testbed down")
            subprocess.run([TESTBED, "down"], check=False, stdout=subprocess.DEVNULL)


def names() -> list[str]:
    """Return the names of all benchmarks."""
    return sorted(module.name for module in pkgutil.iter_modules([str(ROOT / "benchmarks")]) if module.name[0] != "_")


def needs_of(name: str) -> frozenset[str]:
    """Return what a benchmark needs: its `NEEDS`, read without importing it."""
    tree = ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "NEEDS":
            needs = frozenset(ast.literal_eval(node.value))
            if needs <= NEEDS:
                return needs
            raise SystemExit(f"benchmarks/{name}.py: NEEDS has {sorted(needs - NEEDS)}, known are {sorted(NEEDS)}")
    return frozenset()


def environment() -> str:
    """Return the Python of the virtual environment with hpcenv and torch; make it where it is missing."""
    folder = Path(os.environ.get("HPCENV_TEST_VENV") or ROOT / ".venv")
    python = folder / "bin" / "python"
    probe = [python, "-c", "import hpcenv, torch"]
    if not python.exists() or subprocess.run(probe, check=False, capture_output=True).returncode != 0:
        lock = ROOT / "tests" / "packages" / f"python{sys.version_info.major}.{sys.version_info.minor}.txt"
        if not lock.exists():
            raise SystemExit(
                f"no packages are locked for this Python: {lock} is missing\nhint: python3.11 -m benchmarks"
            )
        progress(f"makes a virtual environment in {folder}; torch is large")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # As in scripts/test.sh: what it locks; torch, whose build depends on the index; this checkout.
        subprocess.run([*pip, "--require-hashes", "-r", lock], check=True)
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", ROOT], check=True)
    return str(python)


def start_testbed() -> bool:
    """Bring the testbed up with this checkout installed; return whether it was down before."""
    if os.geteuid() != 0:
        raise SystemExit(
            "the testbed needs root, and a benchmark that was named needs the testbed\n"
            "hint: name those that do not, for example `python -m benchmarks cli_start dry_run`"
        )
    is_up = subprocess.run([TESTBED, "exec", "--", "true"], check=False, capture_output=True).returncode == 0
    progress("installs this checkout in the testbed" if is_up else "brings the testbed up")
    subprocess.run([TESTBED, "install" if is_up else "up"], check=True, stdout=subprocess.DEVNULL)
    return not is_up


def run_all(selected: Sequence[str], needs: Mapping[str, frozenset[str]], python: str, *, as_json: bool) -> int:
    """Run the benchmarks one after the other and print their rows; return 1 if a bound was not kept."""
    failed = 0
    if not as_json:
        print(f"{'name':24} {'ours s':>9} {'peer s':>9} {'ratio':>7}  {'met':4} must")
    for name in selected:
        began = time.monotonic()
        progress(f"{name} ...")
        done = run_on_login_node(name) if "login node" in needs[name] else run_here(name, python)
        rows = _rows(done.stdout)
        for row in rows:
            print(json.dumps(row) if as_json else _line(row), flush=True)
        if not rows:
            what = f"failed with status {done.returncode}: {done.stderr.strip()[-400:]}"
            print(json.dumps({"name": name, "met": False, "error": what}) if as_json else f"{name:24} {what}")
        failed += not rows or not all(row.get("met") for row in rows)
        progress(f"{name}: done in {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def run_here(name: str, python: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark on this machine."""
    path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
    environ = {**os.environ, "PATH": path, "HPCENV_TEST_TORCH_PYTHON": python}
    # A user's hpcenv is compiled, by pip or by its first start, and so are the peers.
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    argv = [python, "-m", f"benchmarks.{name}", "--json"]
    return run_to_its_end(argv, cwd=ROOT, env=environ)


def run_on_login_node(name: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark on the testbed's login node, from a copy of this folder, as user alice."""
    shell = "rm -rf ~/hpcenv-benchmarks && mkdir ~/hpcenv-benchmarks && tar -C ~/hpcenv-benchmarks -x"
    archive = subprocess.run(
        ["tar", "-C", ROOT, "--exclude=__pycache__", "-c", "benchmarks"], check=True, capture_output=True
    )
    subprocess.run([TESTBED, "exec", "--", "sh", "-c", shell], input=archive.stdout, check=True)
    shell = f'cd ~/hpcenv-benchmarks && exec {LOGIN_PYTHON} -m "benchmarks.$0" --json --folder "$HOME"'
    return run_to_its_end([str(TESTBED), "exec", "--", "sh", "-c", shell, name])


def progress(text: str) -> None:
    """Say on stderr what is being done: the rows alone are on stdout."""
    print(f"benchmarks: {text}", file=sys.stderr, flush=True)


def _rows(text: str) -> list[dict[str, Any]]:
    """Return the rows that a benchmark printed: its lines that are JSON objects."""
    rows = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows


def _line(row: Mapping[str, Any]) -> str:
    numbers = " ".join(
        f"{_number(row.get(key)):>{width}}" for key, width in (("ours_s", 9), ("peer_s", 9), ("ratio", 7))
    )
    return f"{row['name']:24} {numbers}  {'yes' if row.get('met') else 'NO':4} {row['must']}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
