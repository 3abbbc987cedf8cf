"""The parts: facts, driver floor, what the GPU computes, the gate, a local run of the example, and its repeat."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _gpu_checks.checkout import ROOT, Machine
from _gpu_checks.part import Deadline, NotRunError, Part, PartError

_ON_GPU = Path(__file__).with_name("on_gpu.py")
_STEPS = "40"
# Prints what hpcenv reads of the GPUs, and whether its table lets their driver run the CUDA of torch.
_GPUS = """
import json, os, sys
sys.path[:0] = {paths!r}
from hpcenv.judge.compat.drivers import check_driver
from hpcenv.machine import gpus
from hpcenv.project.compatibility import table
seen = gpus.read(environ=os.environ)
floor = check_driver(table(), {cuda!r}, str(seen.values.get("host.driver-version", "")))
print(json.dumps(dict(values=seen.values, unknown=seen.unknown,
                      floor=[floor.result, " ".join(filter(None, (floor.what, floor.why)))])))
"""
# Alternates training without and with each profile; its status 1 is about the record of the losses.
_PRICE = """
import sys
sys.path[:0] = {paths!r}
sys.argv = ["determinism_cost", "--json", "--rounds", "2", "--device", "cuda"]
from benchmarks.determinism_cost import main
sys.exit(main())
"""
# Statuses of `verify` that come with a verdict: match, a must differs, a must is unknown.
_JUDGED = (0, 90, 91)
_NOT_ACCEPTED = 29
_REJECTED = 90
_FLOOR = "host.driver-version"
# Compares what two runs saved: each tensor byte for byte, and the printed losses.
_COMPARE = """
import json, sys, torch
first, second = (torch.load(path, map_location="cpu", weights_only=True) for path in sys.argv[1:])
def tensors(value, path=""):
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from tensors(inner, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from tensors(inner, f"{path}/{number}")
one, two = dict(tensors(first)), dict(tensors(second))
other = sorted(name for name in one.keys() | two.keys()
               if name not in one or name not in two or one[name].dtype != two[name].dtype
               or one[name].shape != two[name].shape
               or not torch.equal(one[name].contiguous().flatten().view(torch.uint8) if one[name].dim() else one[name],
                                  two[name].contiguous().flatten().view(torch.uint8) if two[name].dim() else two[name]))
print(json.dumps({"tensors": len(one), "other": other[:5], "differ": len(other)}))
"""


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """Where the checks work: a project of the example, locked to the machine's own Python.

    Attributes:
        gpus: how many GPUs the parts of hpcenv use: one, or none on a machine without.
    """

    machine: Machine
    folder: Path
    gpus: int

    @property
    def project(self) -> Path:
        return self.folder / "project"

    @property
    def env(self) -> dict[str, str]:
        """What hpcenv writes for the user, it writes here: nothing is left on the machine."""
        kinds = ("CONFIG", "CACHE", "STATE", "DATA")
        return {f"XDG_{kind}_HOME": str(self.folder / kind.lower()) for kind in kinds}

    def hpcenv(self, *words: str) -> list[str]:
        return [*self.machine.hpcenv, *words]

    def need_hpcenv(self) -> None:
        """Raise NotRunError where hpcenv's packages are not there."""
        if self.machine.missing:
            raise NotRunError(f"packages are missing: {', '.join(self.machine.missing)}; give them with --wheels DIR")


def all_parts(workshop: Workshop) -> tuple[Part, ...]:
    """Return the parts in their order; together their limits are below ten minutes."""
    on_gpu = tuple(
        Part(name=name, what=what, seconds=seconds, needs_gpu=True, run=_computes(workshop, name.split()[-1]))
        for name, what, seconds in (
            ("CUDA start", "torch starts CUDA, and a first kernel is right", 60),
            ("matmul", "float32, bfloat16 and float16 products equal the known ones", 60),
            ("AMP", "autocast with and without GradScaler lowers a loss", 60),
            ("NCCL", "a process group of one rank and an all_reduce", 60),
        )
    )
    return (
        Part(name="facts", what="what hpcenv reads of this node", seconds=45, run=lambda d: _facts(workshop, d)),
        *on_gpu,
        Part(name="gate", what="lock of this environment, and verify", seconds=90, run=lambda d: _gate(workshop, d)),
        Part(
            name="driver floor",
            what="hpcenv's table says that this driver runs the CUDA of torch, as it does",
            seconds=60,
            needs_gpu=True,
            run=lambda d: _floor(workshop, d),
        ),
        Part(
            name="local run",
            what="hpcenv submit examples/train.py --cluster local",
            seconds=100,
            run=lambda d: _train(workshop, d, "first"),
        ),
        Part(
            name="GPUs at the start",
            what="that run tried the GPU before its rank, and says the seconds; where a variable hides it: 90",
            seconds=60,
            needs_gpu=True,
            run=lambda d: _start(workshop, d),
        ),
        Part(
            name="price",
            what="how much longer an optimizer step takes with the profiles `seeded` and `bitwise`",
            seconds=90,
            needs_gpu=True,
            run=lambda d: _price(workshop, d),
        ),
        Part(
            name="repeat",
            what="the same run again: weights and optimizer, bit for bit",
            seconds=100,
            run=lambda d: _repeat(workshop, d),
        ),
    )


# -- what the node is -------------------------------------------------------------------------


def _facts(workshop: Workshop, deadline: Deadline) -> Sequence[str]:
    workshop.need_hpcenv()
    found = deadline.json(workshop.hpcenv("net", "explain", "--here", "--json"), cwd=workshop.folder, env=workshop.env)
    data: Any = found.get("data", found)
    gpus = _gpus(workshop, deadline)
    values, unknown = gpus["values"], gpus["unknown"]
    names = {"host.gpu-count": "GPUs", "host.gpu-models": "model", _FLOOR: "driver"}
    names |= {"host.cuda-driver-version": "CUDA driver API", "host.gpu-compute-capabilities": "compute capability"}
    shown = [f"{word} {_shown(values[name])}" for name, word in names.items() if values.get(name) not in (None, [])]
    lines = [", ".join(shown)] if shown else []
    lines += [f"unknown: {name}: {reason}" for name, reason in sorted(unknown.items())[:4]]
    return [*lines, f"network profile {_profile(data)}"]


def _gpus(workshop: Workshop, deadline: Deadline) -> Any:
    machine = workshop.machine
    ask = _GPUS.format(paths=[str(ROOT), str(machine.site)], cuda=machine.cuda)
    return deadline.json([machine.python, "-c", ask], cwd=workshop.folder)


def _profile(data: Any) -> str:
    decision = data.get("decision", data) if isinstance(data, dict) else {}
    return str(decision.get("profile", "unknown"))


def _shown(value: object) -> str:
    return ", ".join(map(str, dict.fromkeys(value))) if isinstance(value, list) else str(value)


# -- what the GPU computes --------------------------------------------------------------------


def _computes(workshop: Workshop, name: str) -> Any:
    def run(deadline: Deadline) -> Sequence[str]:
        argv = [workshop.machine.python, str(_ON_GPU), name.lower()]
        seen: Any = deadline.json(argv, cwd=workshop.folder)["seen"]
        return list(map(str, seen))

    return run


# -- hpcenv -----------------------------------------------------------------------------------


def _gate(workshop: Workshop, deadline: Deadline) -> Sequence[str]:
    workshop.need_hpcenv()
    if not workshop.machine.torch:
        raise NotRunError("this Python has no torch")
    project = workshop.project
    shutil.copytree(ROOT / "examples", project / "examples")
    (project / "hpcenv.toml").write_text(f'image = "host"\npython = {json.dumps(workshop.machine.python)}\n')
    locked = _accepted(deadline, workshop, "lock")
    argv = workshop.hpcenv("verify", "--gpus", str(workshop.gpus), "--json")
    found: Any = deadline.json(argv, cwd=project, env=workshop.env, statuses=_JUDGED)
    verdict = found["data"]["verdict"]
    compared = sum(node["compared"] for node in verdict["nodes"])
    rows = [f"{row['field']}: {row['result']}, {row['found']}" for row in verdict["findings"]]
    if verdict["result"] != "match" or not compared:
        raise PartError(f"{verdict['result']}, {compared} fields compared: {'; '.join(rows[:4])}")
    return [locked.splitlines()[-1] if locked.strip() else "locked", f"{compared} fields compared: match"]


def _accepted(deadline: Deadline, workshop: Workshop, *words: str) -> str:
    """Run hpcenv; accept what the project of these checks asks of the machine, which is its own Python only."""
    done = deadline.command(workshop.hpcenv(*words), cwd=workshop.project, env=workshop.env)
    asked = re.search("--accept ([0-9a-f]{32})", done.output)
    if done.status == _NOT_ACCEPTED and asked:
        again = workshop.hpcenv(words[0], "--accept", asked[1], *words[1:])
        done = deadline.command(again, cwd=workshop.project, env=workshop.env)
    if done.status != 0:
        raise PartError(f"hpcenv {words[0]} ended with {done.status}: {done.end}")
    return done.output


def _floor(workshop: Workshop, deadline: Deadline) -> Sequence[str]:
    workshop.need_hpcenv()
    result, said = _gpus(workshop, deadline)["floor"]
    if result != "match":
        raise PartError(f"{result}: {said}")
    return [said]


def _train(workshop: Workshop, deadline: Deadline, name: str) -> Sequence[str]:
    workshop.need_hpcenv()
    if not (workshop.project / "lockfiles").is_dir():
        raise NotRunError("there is no lockfile: see the gate")
    shape = ["--cluster", "local", "--nodes", "1", "--gpus", str(workshop.gpus), "--nproc", "1", "--cpus", "1"]
    words = ["submit", "examples/train.py", *shape, "--time", "5", "--name", name, "--wait"]
    output = _accepted(deadline, workshop, *words, "--", "--steps", _STEPS, "--seed", "7")
    lines = [line for line in output.splitlines() if "final loss" in line or "  backend " in line]
    if not any("final loss" in line for line in lines):
        raise PartError("the training printed no final loss")
    if workshop.gpus and not any("device cuda" in line for line in lines):
        raise PartError("the training did not use the GPU")
    return [_without_names(line) for line in lines]


def _start(workshop: Workshop, deadline: Deadline) -> Sequence[str]:
    starts = list((workshop.project / "runs" / "first" / "ranks").glob("*/gpus.json"))
    if not starts:
        raise NotRunError("the first run recorded no GPU")
    found: Any = json.loads(starts[0].read_text())
    gpu = found["gpus"][0]
    if found["seen"] != workshop.gpus or gpu["problem"]:
        raise PartError(f"torch sees {found['seen']} of {workshop.gpus} GPUs: {gpu['problem']}")
    shape = ["--cluster", "local", "--nodes", "1", "--gpus", str(workshop.gpus), "--nproc", "1", "--cpus", "1"]
    words = ["submit", "examples/train.py", *shape, "--time", "5", "--name", "hidden", "--wait"]
    hidden = workshop.hpcenv(*words, "--env", "CUDA_VISIBLE_DEVICES=-1")
    done = deadline.command(hidden, cwd=workshop.project, env=workshop.env)
    if done.status != _REJECTED or "torch sees 0 of" not in done.output:
        raise PartError(f"a run whose GPU is hidden ended with {done.status}: {done.end}")
    where = ", ".join(gpu[name] or f"{name} unknown" for name in ("model", "uuid", "bus"))
    return [f"{where}: {found['seconds']:.2f} s of the start", "hidden by CUDA_VISIBLE_DEVICES=-1: 90"]


def _price(workshop: Workshop, deadline: Deadline) -> Sequence[str]:
    workshop.need_hpcenv()
    machine = workshop.machine
    argv = [machine.python, "-c", _PRICE.format(paths=[str(ROOT), str(machine.site)])]
    found: Any = deadline.json(argv, cwd=workshop.folder, statuses=(0, 1))
    ratios = ", ".join(f"{name} {found[f'{name}_ratio']:.2f}" for name in ("seeded", "bitwise"))
    return [f"a small network, {found['peer_s'] * 1000:.2f} ms for a step without hpcenv; times that with {ratios}"]


def _without_names(line: str) -> str:
    """Return a line of the example without prefix, host name and process number."""
    words = line.partition("] ")[2].split("  ") if line.startswith("[") else line.split("  ")
    return ", ".join(word for word in words if word and not word.startswith(("host ", "pid ")))


def _repeat(workshop: Workshop, deadline: Deadline) -> Sequence[str]:
    first = _newest(workshop, "first")
    if first is None:
        raise NotRunError("the first run left no checkpoint")
    _train(workshop, deadline, "second")
    second = _newest(workshop, "second")
    if second is None:
        raise PartError("the second run left no checkpoint")
    argv = [workshop.machine.python, "-c", _COMPARE, str(first), str(second)]
    found: Any = deadline.json(argv, cwd=workshop.folder)
    if not found["tensors"]:
        raise PartError("the checkpoints hold no tensor")
    if found["differ"]:
        raise PartError(f"{found['differ']} of {found['tensors']} tensors differ: {', '.join(found['other'])}")
    return [f"{found['tensors']} tensors equal, bit for bit"]


def _newest(workshop: Workshop, run: str) -> Path | None:
    files = [path for path in (workshop.project / "runs" / run / "checkpoints").glob("*") if path.is_file()]
    return max(files, key=lambda path: path.name, default=None)
