"""The result as a dated section for docs/gpu-checks.md. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from _gpu_checks.checkout import Machine
from _gpu_checks.part import PartResult


def render(results: Sequence[PartResult], machine: Machine, *, date: str, commit: str) -> str:
    """Return the section."""
    lines = [
        f"## {date}: {_title(machine, results)}",
        "",
        f"`scripts/gpu-checks` of {commit}, Python {machine.version} on {machine.architecture}, {_torch(machine)}.",
        "",
        "| part | what | result | seconds | seen |",
        "|---|---|---|---|---|",
    ]
    for one in results:
        seen = "; ".join(one.seen).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {one.name} | {one.what} | {one.state} | {one.seconds:.1f} | {seen} |")
    return "\n".join([*lines, "", _sum(results), ""])


def _title(machine: Machine, results: Sequence[PartResult]) -> str:
    start = next((one for one in results if one.name == "CUDA start" and one.state == "passed"), None)
    if start is not None:
        return start.seen[0].partition(",")[0]
    return f"{machine.gpus} GPUs" if machine.gpus else "no GPU"


def _torch(machine: Machine) -> str:
    if not machine.torch:
        return "without torch"
    return f"torch {machine.torch}" + (f" for CUDA {machine.cuda}" if machine.cuda else ", which has no CUDA")


def _sum(results: Sequence[PartResult]) -> str:
    counts = {state: sum(one.state == state for one in results) for state in ("passed", "failed", "not run")}
    return ", ".join(f"{count} {state}" for state, count in counts.items()) + "."
