"""Judge whether torch can use the GPUs of a node, or of a task, before the first rank starts (`cuda.start`). Pure.

Runs on: COMPUTE NODE. Standard library only. The agent in the container asks torch (incontainer/gpu_start.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcenv.judge.checks.check_table import BY_ID
from hpcenv.records.checks import CheckState
from hpcenv.records.codec import SCHEMA
from hpcenv.records.facts import Difference, Facts
from hpcenv.records.gpu_start import GpuStart, StartedGpu
from hpcenv.records.manifest import Manifest, Setting
from hpcenv.records.severities import Severities

NAME = "cuda.start"

# The variables that choose GPUs for CUDA, and for HIP. HIP also reads the variable of CUDA.
_OF_CUDA = ("CUDA_VISIBLE_DEVICES",)
_OF_HIP = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

# Meaning of the numbers that cuInit returns (cuda.h of CUDA 13.0, CUresult).
_STATUSES = {
    100: "the driver finds no GPU that this job may use: its cgroup and the device files decide that",
    802: "the driver is not ready: on machines with NVSwitch, nvidia-fabricmanager has to run",
    803: "the driver's library and its kernel module have different versions",
    804: "forward compatibility: the container's libcuda needs a newer driver, which this GPU does not allow",
    999: "the driver does not start: often the kernel module nvidia_uvm is not loaded",
}


@dataclass(frozen=True, kw_only=True)
class AskedNode:
    """The node, or the task on a node, in which torch was asked about GPUs.

    Attributes:
        local_rank: local rank, if the task has only one rank; None if torch was asked for all ranks of the node.
        environ: variables of the job step, as Slurm sets them.
        settings: variables that hpcenv sets for the ranks.
        facts: facts of this node; None if they cannot be read.
    """

    node: str
    attempt: int
    local_rank: int | None
    environ: Mapping[str, str]
    settings: Sequence[Setting]
    facts: Facts | None


@dataclass(frozen=True, kw_only=True)
class GpuAnswer:
    """The GPUs that torch can use.

    Attributes:
        record: the record of the answer, for the run folder.
        what: how many GPUs torch can use, in one sentence.
        why: the reasons why torch cannot use the expected GPUs, or why it is unknown; empty if the check is fine.
        state: the state of the check.
        notes: notes for the user, which do not prevent the start.
    """

    record: GpuStart
    what: str
    why: str
    state: CheckState
    notes: tuple[str, ...]

    @property
    def difference(self) -> Difference | None:
        """The difference that prevents the start of the ranks; None if the ranks may start."""
        if self.state == "fine":
            return None
        locked = f"{self.record.expected} GPUs that torch can use"
        return Difference(field=NAME, locked=locked, found=self.what, note=self.why, unknown=self.state == "unknown")


def why_not_tried(manifest: Manifest) -> str:
    """Return why torch is not asked in a job with GPUs; empty if torch is asked, or if the job has no GPUs."""
    if not manifest.gpus_per_node:
        return ""
    if NAME in manifest.preflight.skipped:
        return f"--skip-check {NAME}"
    if manifest.preflight.allow_cpu_torch:
        return "--allow-cpu-torch"
    if any(one.field == "torch.version" and one.value == "absent" for one in manifest.expectations):
        return "the locked environment has no torch"
    severity = Severities(manifest.severities).of(NAME)
    return "" if severity == "must" else f'[policy]: "{NAME}" is `{severity}`'


def hint(manifest: Manifest, difference: Difference) -> str:
    """Return a hint: what to do if torch cannot use GPUs."""
    if " hides " in difference.note:
        return f"leave the variable out; to start nevertheless: --skip-check {NAME}"
    where = "a job on that node" if manifest.environment.kind == "host" else "the container of a job on that node"
    return f"look at `nvidia-smi` and /dev in {where}; other nodes: --exclude; without this check: --skip-check {NAME}"


def wanted(manifest: Manifest, local_rank: int | None) -> dict[str, Any]:
    """Return the settings of the GPU test that the agent must run; empty if the agent must not run the test.

    Args:
        local_rank: the only rank that the agent starts; None if it starts all ranks of the node.
    """
    if not manifest.gpus_per_node or why_not_tried(manifest):
        return {}
    step = 1 if local_rank is None else manifest.nproc_per_node
    return {"seconds": BY_ID[NAME].seconds, "first": local_rank or 0, "step": step}


def judge(manifest: Manifest, place: AskedNode, report: Mapping[str, Any]) -> GpuAnswer:
    """Judge the agent's report about the GPUs.

    Args:
        report: the agent's report at the start gate.
    """
    answer: Mapping[str, Any] = report.get("gpus") or {"ended": report.get("problem") or "the agent did not report it"}
    given, hidden = _given(manifest, place, answer)
    seen = None if answer.get("ended") else answer.get("count")
    gpus = tuple(_gpu(gpu) for gpu in answer.get("gpus", ()))
    usable = (seen or 0) - sum(bool(gpu.problem) for gpu in gpus)
    total = given or manifest.gpus_per_node
    where = f"on {place.node}" if manifest.environment.kind == "host" else f"in the container on {place.node}"
    state: CheckState = "unknown"
    if seen is None:
        what, why = f"torch does not say which GPUs it can use {where}", _why_unknown(answer)
    else:
        verb, count = ("sees", seen) if seen < total else ("can use", usable)
        what = f"torch {verb} {count} of {total} GPUs {where}"
        state = "fine" if given and usable >= given else "failed"
        why = "" if state == "fine" else "; ".join(_reasons(manifest, place, answer, gpus, hidden))
    record = GpuStart(
        schema=SCHEMA,
        run=manifest.run,
        node=place.node,
        attempt=place.attempt,
        expected=given,
        seen=seen,
        seconds=float(answer.get("seconds", 0.0)),
        local_rank=place.local_rank,
        gpus=gpus,
    )
    return GpuAnswer(record=record, what=what, why=why, state=state, notes=tuple(hidden))


def _given(manifest: Manifest, place: AskedNode, answer: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return how many GPUs remain after all variables, and which variables hide GPUs that Slurm gave to the job."""
    given, hidden = manifest.gpus_per_node, []
    values: Mapping[str, str] = answer.get("variables", {})
    origins = {setting.name: setting.origin for setting in place.settings}
    for name in _OF_HIP if answer.get("hip") else _OF_CUDA:
        if name not in values:
            continue
        count = _count(values[name])
        by_slurm = name not in origins and place.environ.get(name) == values[name]
        if count < given and not (by_slurm and count):
            origin = "the job's own environment" if by_slurm else origins.get(name, "the image")
            hidden.append(f"{name}={values[name][:60]!r} ({origin}) hides {given - count} of {given} GPUs")
        given = min(given, count)
    return given, hidden


def _count(value: str) -> int:
    """Return how many GPUs a variable names. CUDA ignores words after the first invalid word (CUDA 13, env vars)."""
    words = [word.strip() for word in value.split(",")]
    bad = [at for at, word in enumerate(words) if word in ("", "-1", "NoDevFiles", "none", "void")]
    return min(bad, default=len(words))


def _gpu(gpu: Mapping[str, Any]) -> StartedGpu:
    words = {name: str(gpu.get(name, ""))[:300] for name in ("model", "uuid", "bus", "problem")}
    return StartedGpu(index=int(gpu["index"]), **words)


def _why_unknown(answer: Mapping[str, Any]) -> str:
    at = f", at {answer['at']}" if answer.get("at") else ""
    return f"the process that starts CUDA or HIP before the ranks: {answer['ended']}{at}"


def _reasons(
    manifest: Manifest, place: AskedNode, answer: Mapping[str, Any], gpus: Sequence[StartedGpu], hidden: Sequence[str]
) -> Iterator[str]:
    """Yield the reasons why torch cannot use the expected GPUs, the most direct reason first."""
    yield from hidden
    if not answer.get("hip") and not answer.get("count"):
        yield from _of_driver(manifest, answer)
    if "enabled" in str(place.facts.values.get("host.gpu-mig", "") if place.facts else ""):
        yield "a GPU is split (MIG): a process can use one part only"
    problems = [f"GPU {gpu.index}: {gpu.problem}" for gpu in gpus if gpu.problem]
    if any("busy or unavailable" in problem for problem in problems):
        yield "another process uses the GPU alone, or its compute mode allows none (nvidia-smi -q -d COMPUTE)"
    yield from [str(answer["problem"])] if answer.get("problem") else []
    yield from problems[:4]


def _of_driver(manifest: Manifest, answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of NVIDIA's driver and its device files inside the container."""
    files = answer.get("files", ())
    if answer.get("missing"):
        yield f"the driver's library is not there ({answer['missing']})"
        if manifest.environment.kind == "sif":
            without = "the container was started without --nv"
            yield "--nv did not bring it from the node" if manifest.environment.gpus else without
        return
    count = sum(name.startswith("nvidia") and name[6:].isdigit() for name in files)
    if answer.get("status") and count < manifest.gpus_per_node:
        yield f"/dev has {count} device files of GPUs"
    if answer.get("status") and "nvidia-uvm" not in files:
        yield "/dev/nvidia-uvm is not there: the kernel module nvidia_uvm is not loaded"
    if answer.get("status"):
        text = _STATUSES.get(answer["status"], "the driver does not start")
        yield f"{text} (cuInit: {answer['status']}, {answer.get('library', '')})"
