"""Before a job is queued, refuse GPUs and packages that the locked torch cannot use. Uses the compatibility table.

Runs on: LOGIN NODE. Only submissions with GPUs import this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcenv.cluster import node_types
from hpcenv.errors import SpecError, SubmitRejected
from hpcenv.judge.compat import library_rules, table_file
from hpcenv.judge.compat.compat_table import PACKAGED, Compat, GpuModel
from hpcenv.judge.compat.gpu_names import gpu_by_name
from hpcenv.judge.compat.judgement import Judgement
from hpcenv.judge.compat.kernels import covers, covers_built
from hpcenv.locking import compatibility_notes
from hpcenv.project import lockfile as lock_model
from hpcenv.project import toml_files
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.workspace import Workspace
from hpcenv.submission import capacity
from hpcenv.submission.plan import Request


def compat_table() -> dict[str, Any]:
    """Return the compatibility table, as plain data."""
    return toml_files.read(PACKAGED, error=SpecError)


def refuse_gpu_without_kernels(
    workspace: Workspace,
    locked: Lockfile,
    request: Request,
    table: Mapping[str, Any],
    offers: Sequence[node_types.Offer],
) -> list[str]:
    """Refuse GPUs for which torch has no kernels. The nodes would refuse these GPUs, too, but only in the job.

    GPUs can be refused here only if their name is known from hpcenv.toml or sinfo.
    """
    cuda, arch_list = lock_model.cuda_of(locked), lock_model.arch_list_of(locked)
    if not request.gpus_per_node or cuda is None or not arch_list:
        return []
    named = workspace.project.host.gpu
    origin, names = f"`gpu` under [host] in {workspace.spec}", [named] if named else []
    if not names:
        origin, names = "sinfo", capacity.gpu_types(request, offers)

    known = table_file.parse(table, origin=str(PACKAGED))
    models = {name: gpu_by_name(known, name) for name in names}
    bad = {name: _without_kernels(locked, known, model) for name, model in models.items() if model is not None}
    first = [judged[0] for judged in bad.values() if judged]
    _refuse_small_gpus(locked, models, origin)
    severity = lock_model.severities_of(locked).of("host.gpu-compute-capabilities")
    # A partition may have several GPU models. The job is refused only if every model lacks kernels.
    if first and len(first) == len(models) and severity == "must":
        raise SubmitRejected(first[0].what, why=f"{first[0].why}; the GPU is known from {origin}", hint=first[0].hint)
    return [f"{judgement.what} ({origin})" for judged in bad.values() for judgement in judged]


def _without_kernels(locked: Lockfile, known: Compat, model: GpuModel) -> list[Judgement]:
    """Return a judgement for each package without kernels for a GPU: torch, or a package compiled in the image."""
    capability = model.compute_capability
    arch_list, machine = lock_model.arch_list_of(locked), lock_model.machine_of(locked)
    judged = [covers(known, arch_list, capability, gpu=model.name, machine=machine)]
    judged += [
        covers_built(known, package, built, capability, gpu=model.name)
        for package, built in lock_model.built_for(locked).items()
    ]
    return [one for one in judged if one.result == "mismatch"]


def _refuse_small_gpus(locked: Lockfile, models: Mapping[str, GpuModel | None], origin: str) -> None:
    """Refuse GPU models with less memory than the project requests. The nodes check the real size later.

    Raises:
        SubmitRejected: no GPU model has enough memory.
    """
    wanted = lock_model.gpu_memory_gb(locked)
    sizes = {m.name: m.memory_gb for m in models.values() if m is not None and m.memory_gb}
    large = [name for name, known in sizes.items() if max(known) >= wanted]
    if len(sizes) < len(models) or large or not sizes:
        return
    if lock_model.severities_of(locked).of("host.gpu-memory") == "must":
        shown = ", ".join(f"{name} has {max(known)} GB" for name, known in sizes.items())
        raise SubmitRejected(
            f"the GPUs have less memory than the {wanted} GB that the project asks for",
            why=f"{shown} at most; the GPU is known from {origin}",
            hint="request another GPU (--gpu-type, --constraint), or lower `gpu-memory` under [host]",
        )


def judge_libraries(locked: Lockfile, request: Request, table: Mapping[str, Any]) -> list[str]:
    """Refuse torchvision or torchaudio if it was made for another torch. The gate would do this only after the queue.

    Returns:
        Notes about packages that do not fit, but do not block the job.

    Raises:
        SubmitRejected: a package does not fit, and its field must match.
    """
    if not request.gpus_per_node or lock_model.cuda_of(locked) is None:
        return []
    known = table_file.parse(table, origin=str(PACKAGED))
    severities = lock_model.severities_of(locked)
    found = compatibility_notes.misfits(locked, known)
    weights = [(one, library_rules.weight(one, severities)) for one in found]
    for one, weight in weights:
        if weight == "must":
            judged = one.judgement
            to_accept = f'or accept the difference: "{one.field}" = "warn" under [policy]'
            raise SubmitRejected(judged.what, why=judged.why, hint=f"{judged.hint or 'install what fits'}, {to_accept}")
    return [f"{one.field}: {one.judgement.what}" for one, weight in weights if weight == "warn"]
