"""The command: options, the parts one after the other, the section."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from _gpu_checks.checkout import ROOT, Machine, install, look
from _gpu_checks.part import PartResult, run_part
from _gpu_checks.parts import Workshop, all_parts
from _gpu_checks.section import render

PASSED, FAILED, USAGE, NO_GPU = 0, 1, 2, 3
PAGE = ROOT / "docs" / "gpu-checks.md"
# All parts together, in seconds.
MOST = 585.0

_EPILOG = """\
Without a GPU the parts that need one are not run, and the others run on the CPU.
Nothing is installed on the machine, and nothing is asked of the network.

exit status:
  0  all parts passed
  1  a part failed
  2  wrong arguments, or the Python cannot be asked
  3  no part failed, and some were not run (no GPU, packages missing)
"""


def main(argv: Sequence[str]) -> int:
    """Run the parts and print, or append, the section; return the exit status."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="hpcenv-gpu-checks-") as folder:
        begin = time.monotonic()
        try:
            machine = _prepared(options.python, options.wheels, Path(folder))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            print(f"gpu-checks: {options.python} cannot be asked: {error}", file=sys.stderr)
            return USAGE
        workshop = Workshop(machine=machine, folder=Path(folder), gpus=min(1, machine.gpus))
        results = _run(workshop, begin)
        text = _section(results, machine, folder)
    _write(text, results, options)
    return _status(results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu-checks", description="Run everything that one GPU can show of hpcenv, in under ten minutes.",
        epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add(
        "--python", default=sys.executable, help="the Python with the machine's torch (default: the one that runs this)"
    )
    add(
        "--wheels",
        type=Path,
        metavar="DIR",
        help="folder of wheels for what hpcenv needs and this Python lacks: `pip download -d DIR .`",
    )
    add("--append", action="store_true", help=f"append the section to {PAGE.relative_to(ROOT)} (default: print it)")
    add("--json", action="store_true", help="print one JSON object instead of the section")
    return parser


def _prepared(python: str, wheels: Path | None, folder: Path) -> Machine:
    machine = look(python, folder / "site")
    if not (machine.missing and wheels):
        return machine
    problem = install(machine, wheels)
    if problem:
        print(f"gpu-checks: {problem}", file=sys.stderr)
    return look(python, machine.site)


def _run(workshop: Workshop, begin: float) -> list[PartResult]:
    results = []
    for part in all_parts(workshop):
        print(f"{part.name}: {part.what} ...", file=sys.stderr, flush=True)
        left = MOST - (time.monotonic() - begin)
        result = run_part(part, gpus=workshop.machine.gpus, left=left)
        print(
            f"{part.name}: {result.state}, {result.seconds:.1f} s: {'; '.join(result.seen)}",
            file=sys.stderr,
            flush=True,
        )
        results.append(result)
    return results


def _section(results: list[PartResult], machine: Machine, folder: str) -> str:
    """Return the section, without the names of folders of this machine."""
    replaced = ((folder, "WORK"), (str(ROOT), "CHECKOUT"), (str(Path.home()), "~"))
    for number, result in enumerate(results):
        seen = list(result.seen)
        for old, new in replaced:
            seen = [text.replace(old, new) for text in seen]
        results[number] = replace(result, seen=tuple(seen))
    return render(results, machine, date=time.strftime("%Y-%m-%d", time.gmtime()), commit=_commit())


def _commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return f"commit {done.stdout.strip()}" if done.returncode == 0 else "a checkout without git"


def _write(text: str, results: Sequence[PartResult], options: argparse.Namespace) -> None:
    if options.append:
        with PAGE.open("a", encoding="utf-8") as page:
            page.write(f"\n{text}")
        print(f"appended to {PAGE.relative_to(ROOT)}", file=sys.stderr)
    if options.json:
        print(json.dumps({"status": _status(results), "parts": [asdict(result) for result in results]}))
    elif not options.append:
        print(text, end="")


def _status(results: Sequence[PartResult]) -> int:
    states = {result.state for result in results}
    return FAILED if "failed" in states else NO_GPU if "not run" in states else PASSED
