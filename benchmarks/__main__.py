"""Run every benchmark, or those named, and print one table: `python -m benchmarks [NAME ...]`."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from typing import Any

import benchmarks


def main() -> int:
    """Each one in a process of its own; one that fails is a row, not the end."""
    known = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name[0] != "_")
    names = sys.argv[1:] or known
    if unknown := sorted(set(names).difference(known)):
        raise SystemExit(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(known)}")
    failed = 0
    print(f"{'name':24} {'ours s':>9} {'peer s':>9} {'ratio':>7}  must")
    for name in names:
        argv = [sys.executable, "-m", f"benchmarks.{name}", "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        failed += done.returncode != 0
        for row in _rows(done.stdout):
            print(f"{row['name']:24} {_number(row['ours_s']):>9} {_number(row['peer_s']):>9} ", end="")
            print(f"{_number(row['ratio']):>7}  {row['must']}")
        if done.returncode != 0:
            print(f"{name:24} failed with status {done.returncode}: {done.stderr.strip()[-200:]}")
    return 1 if failed else 0


def _rows(text: str) -> list[dict[str, Any]]:
    lines = text.strip().splitlines()[-1:]
    try:
        return [json.loads(line) for line in lines]
    except ValueError:
        return []


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
