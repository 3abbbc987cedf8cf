"""Judge whether driver and GPUs of a node meet the needs of the locked torch, of JAX and of the image. Pure.

Runs on: COMPUTE NODE (the batch node). Standard library only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable

from hpcenv.judge.compat import forward_compat, table_file
from hpcenv.judge.compat.compat_table import Compat
from hpcenv.judge.compat.floors import driver_floor
from hpcenv.judge.compat.gpu_names import gpu_by_name
from hpcenv.judge.compat.image_rules import evaluate_require, requirements
from hpcenv.judge.compat.judgement import Judgement
from hpcenv.judge.compat.kernels import covers, covers_built
from hpcenv.judge.compat.toolkits import check_toolkit
from hpcenv.judge.compat.torch_builds import X86_64
from hpcenv.records.facts import CudaCompat, Facts
from hpcenv.records.manifest import GpuNeeds, Manifest
from hpcenv.records.severities import Severities
from hpcenv.records.verdict import Finding


def judge(manifest: Manifest, facts: Facts, severities: Severities) -> list[Finding]:
    """Return the findings on a driver or GPUs that do not meet the needs of the run.

    Nothing is compared if the run uses no GPU, or if it has no torch and no JAX for CUDA.
    """
    needs = manifest.gpu_needs
    if needs is None:
        return []
    known = table(needs.table)
    package = forward_compat.package_for(manifest, facts, needs, known)
    rows = [*_driver(facts, needs, known, package), *_kernels(facts, needs, known), *_model(facts, needs, known)]
    rows += [*_memory(facts, needs), *_mig(facts), *_image_rules(facts, needs, package)]
    return [
        Finding(
            node=facts.node,
            field=field,
            locked=locked,
            found=found or "unknown",
            result=judged.result,
            severity=severities.of(field),
            note=str(judged),
        )
        for field, locked, found, judged in rows
        if judged.result != "match"
    ]


# The field, the needed value, the value of the node, and the judgement.
_RuleRow = tuple[str, str, str, Judgement]


@functools.lru_cache(maxsize=1)
def table(text: str) -> Compat:
    """Return the compatibility table, which is parsed once for all nodes of a run."""
    return table_file.parse(json.loads(text), origin="the compatibility table of this run")


def _driver(facts: Facts, needs: GpuNeeds, table: Compat, package: CudaCompat | None) -> Iterable[_RuleRow]:
    driver, problem = _text(facts, "host.driver-version")
    capability = next(iter(_capabilities(facts)), "")
    for cuda, holder in ((needs.cuda, " in the image"), (needs.jax_cuda, " of JAX's plug-in")):
        if not cuda:
            continue
        minimum = driver_floor(table, cuda)
        judged = forward_compat.judge_driver(
            table, cuda, facts, driver=driver, package=package, capability=capability, holder=holder
        )
        wanted = f">= {minimum.version}" if minimum else f"for CUDA {cuda}"
        yield "host.driver-version", wanted, problem or driver, judged


def _kernels(facts: Facts, needs: GpuNeeds, table: Compat) -> Iterable[_RuleRow]:
    """Judge whether torch, JAX and packages compiled in the image have kernels for each kind of GPU on the node."""
    field, locked = "host.gpu-compute-capabilities", ", ".join(needs.arch_list) or "unknown"
    gpus, models = _capabilities(facts), _models(facts)
    driver, _ = _text(facts, "host.driver-version")
    for capability in sorted(set(gpus)):
        name = models[gpus.index(capability)] if len(models) == len(gpus) else ""
        if needs.jax_cuda:  # JAX compiles its kernels where it runs
            wanted = f"CUDA {needs.jax_cuda} of JAX's plug-in"
            yield field, wanted, capability, check_toolkit(table, needs.jax_cuda, capability, gpu=name)
        if not needs.cuda:
            continue
        judged = covers(
            table, needs.arch_list, capability, gpu=name, cuda=needs.cuda, driver=driver,
            machine=str(facts.values.get("host.machine", X86_64)),
        )  # fmt: skip
        if not needs.arch_list:
            judged = Judgement(result="unknown", what="it is not known for which GPUs this torch has kernels")
        yield field, locked, capability, judged
        for package, built in needs.built.items():
            own = covers_built(table, package, built, capability, gpu=name, cuda=needs.cuda, driver=driver)
            yield field, ", ".join(built), capability, own
    if not gpus:
        reason = facts.unknown.get(field, "no GPU was found")
        yield field, locked, reason, Judgement(result="unknown", what=reason)


def _model(facts: Facts, needs: GpuNeeds, table: Compat) -> Iterable[_RuleRow]:
    """Compare the GPUs of a node with the GPU for which the environment was locked."""
    wanted = gpu_by_name(table, needs.gpu) if needs.gpu else None
    for model in sorted(set(_models(facts))):
        known = gpu_by_name(table, model)
        if wanted is not None and known is not None and known.name != wanted.name:
            note = f"locked for {needs.gpu}: other GPUs round differently"
            yield "host.gpu", wanted.name, model, Judgement(result="mismatch", what=note)


# The driver and error correction use a part of the memory: NVML reports 15.84 GB for a T4 of 16 GB.
_MEMORY_KEPT = 0.02


def _memory(facts: Facts, needs: GpuNeeds) -> Iterable[_RuleRow]:
    """Judge whether each GPU has the memory that the project requires."""
    field, wanted = "host.gpu-memory", f">= {needs.gpu_memory_gb} GB"
    if not needs.gpu_memory_gb:
        return
    sizes = facts.values.get("host.gpu-memory-mib")
    known = [int(size) for size in sizes if size.isdigit()] if isinstance(sizes, tuple) else []
    if not known or not isinstance(sizes, tuple) or len(known) != len(sizes):
        reason = facts.unknown.get("host.gpu-memory-mib", "this node did not report it")
        yield field, wanted, reason, Judgement(result="unknown", what=reason)
    elif min(known) * 2**20 < needs.gpu_memory_gb * 10**9 * (1 - _MEMORY_KEPT):
        found = f"{min(known) * 2**20 / 10**9:.1f} GB"
        yield field, wanted, found, Judgement(result="mismatch", what="the project asks for GPUs with more memory")


def _mig(facts: Facts) -> Iterable[_RuleRow]:
    mig = facts.values.get("host.gpu-mig")
    if isinstance(mig, tuple) and "enabled" in mig:
        judged = Judgement(result="mismatch", what="a GPU is split (MIG)", hint="ask for whole GPUs")
        yield "host.gpu-mig", "disabled", ", ".join(mig), judged


def _image_rules(facts: Facts, needs: GpuNeeds, package: CudaCompat | None) -> Iterable[_RuleRow]:
    # With the libcuda of the cuda-compat package, the ranks have the CUDA version of that package.
    lifted = {} if package is None else {"host.cuda-driver-version": package.version}
    for requirement in requirements(needs.require):
        judged = evaluate_require(requirement, {**facts.values, **lifted})
        yield "container.nvidia-require", requirement.text, judged.why, judged


def _capabilities(facts: Facts) -> tuple[str, ...]:
    value = facts.values.get("host.gpu-compute-capabilities")
    return value if isinstance(value, tuple) else ()


def _models(facts: Facts) -> tuple[str, ...]:
    value = facts.values.get("host.gpu-models")
    return value if isinstance(value, tuple) else ()


def _text(facts: Facts, field: str) -> tuple[str, str]:
    """Return a fact as text, and an empty reason. If the fact is missing, return an empty text and the reason."""
    if facts.has(field):
        return str(facts.values[field]), ""
    return "", facts.unknown.get(field, "this node did not report it")
