"""Translate options of sbatch into options of `hpcenv submit`. The user typed them, or they are `#SBATCH` lines.

Runs on: LOGIN NODE. Pure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from hpcenv.project import native_options
from hpcenv.project.options import OPTIONS

_BY_NAME = {row.sbatch: row for row in OPTIONS if row.sbatch}
# One-letter options of sbatch -> their long names.
SHORT = {row.short: row.sbatch for row in OPTIONS if row.short} | {
    "G": "gpus",
    "n": "ntasks",
    "o": "output",
    "e": "error",
    "i": "input",
    "D": "chdir",
    "L": "licenses",
    "M": "clusters",
    "F": "nodefile",
    "k": "no-kill",
    "s": "oversubscribe",
    "H": "hold",
    "b": "begin",
}
_SHAPE = (
    "gres",
    "gpus-per-node",
    "gpus",
    "gpus-per-task",
    "ntasks",
    "ntasks-per-node",
    "cpus-per-task",
    "cpus-per-gpu",
)
_PER_TASK = ("gpus-per-task", "cpus-per-task")


def read(text: str) -> dict[str, str]:
    """Return the `#SBATCH` options before the first command of a script: long name -> value, which may be empty."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            found.update(_pairs(line.removeprefix("#SBATCH")))
    return found


def _pairs(line: str) -> Iterator[tuple[str, str]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return
    for word, after in zip(words, (*words[1:], ""), strict=True):
        following = "" if after.startswith("-") else after
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            yield name, value if equals else following
        elif word.startswith("-") and word[1:2] in SHORT:
            yield SHORT[word[1]] or "", word[2:] or following


def translate(given: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the arguments for `hpcenv submit`, and the options that have no translation, each with the reason."""
    # sbatch has two names for this option.
    given = {"ntasks-per-node" if name == "tasks-per-node" else name: value for name, value in given.items()}
    left = _without_shape(given)
    given = {name: value for name, value in given.items() if name not in left}
    words = [*_shape(given)]
    reasons = native_options.owned("sbatch")
    for name, value in given.items():
        row, stop = _BY_NAME.get(name), re.fullmatch(r"(?:[BR]+:)?(?:SIG)?(\w+)@(\d+)", value)
        if name in _SHAPE:
            continue
        # In `--array=1-4%2`, the sign % is part of the value.
        if _is_open(value.replace("%", "") if name == "array" else value) and name not in ("output", "error"):
            left[name] = _to_fill_in(value)
        elif name == "signal" and stop:
            words += ["--grace", stop[2], "--stop-signal", stop[1]]
        elif row is not None and name not in ("signal", "requeue"):
            words += [row.flag, value]
        elif name in reasons:
            left[name] = reasons[name]
        else:
            words += ["--sbatch", f"{name}={value}" if value else name]
    return tuple(words), left


def _is_open(value: str) -> bool:
    """Return whether a value is a placeholder of the shell, of a template, or for a person (`<ACCOUNT>`)."""
    return re.search(r"[$<>{%]", value) is not None


def _to_fill_in(value: str) -> str:
    return f"its value `{value}` is to be filled in"


def _without_shape(given: Mapping[str, str]) -> dict[str, str]:
    """Return the options with counts that hpcenv cannot turn into equal numbers for all nodes, each with the reason."""
    left: dict[str, str] = {}
    text = given.get("nodes", "1")
    nodes = _number(text)
    if not nodes:
        not_one = f"hpcenv needs one number of nodes, and `{text}` is none"
        left["nodes"] = _to_fill_in(text) if _is_open(text) else not_one
    of_node = {"ntasks": ("ntasks-per-node",), "gpus": ("gpus-per-node", "gpus-per-task", "gres")}
    for name, instead in of_node.items():
        count = _number(given.get(name, "").rpartition(":")[2])
        if not count or any(one in given for one in instead):
            continue
        if not nodes:
            left[name] = f"{count} for the job, and the number of nodes is open"
        elif count % nodes:
            left[name] = f"{count} do not divide by {nodes} nodes"
    if "ntasks" in left:
        left.update((name, "the ranks of a node are not known") for name in _PER_TASK if name in given)
    if "cpus-per-gpu" in given and ("gpus" in left or "gpus-per-task" in left):
        left["cpus-per-gpu"] = "the GPUs of a node are not known"
    return left


def _shape(given: Mapping[str, str]) -> Iterator[str]:
    """Yield the options for GPUs, ranks and CPUs per node. sbatch counts some of them per job or per task."""
    nodes = _number(given.get("nodes", "")) or 1
    tasks = _number(given.get("ntasks-per-node", "")) or _number(given.get("ntasks", "")) // nodes
    items = given.get("gres", "").split(",") if given.get("gres") else []
    of_gpus = [re.sub(r"^(gres[/:])?gpu:?", "", item) or "1" for item in items if native_options.is_gpu_gres(item)]
    wanted = next((given[name] for name in ("gpus-per-node", "gpus-per-task", "gpus") if given.get(name)), "")
    kind, _, count = (of_gpus[0] if of_gpus else wanted).rpartition(":")
    kind, count = (kind, count) if count.isdecimal() else (count, "1" if count else "")
    gpus = _number(count)
    if not of_gpus and not given.get("gpus-per-node"):
        gpus = gpus * max(tasks, 1) if given.get("gpus-per-task") else gpus // nodes
    if gpus:
        yield from ("--gpus", str(gpus), *(("--gpu-type", kind) if kind else ()))
    elif tasks:
        yield from ("--nproc", str(tasks))
    cpus = _number(given.get("cpus-per-task", "")) * max(tasks, 1) or _number(given.get("cpus-per-gpu", "")) * gpus
    if cpus:
        yield from ("--cpus", str(cpus))
    others = [item for item in items if not native_options.is_gpu_gres(item)]
    if others:
        yield from ("--sbatch", f"gres={','.join(others)}")


def _number(text: str) -> int:
    return int(text[:6]) if text.isdecimal() else 0
