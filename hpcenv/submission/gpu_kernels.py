"""Which GPUs the locked torch has kernels for: the compatibility table, and a check before a job is queued.

Runs on: LOGIN NODE. Only submissions with GPUs import this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcenv.cluster import node_types
from hpcenv.errors import SpecError, SubmitRejected
from hpcenv.node.check.compat import table_file
from hpcenv.node.check.compat.gpu_names import gpu_by_name
from hpcenv.node.check.compat.kernels import covers
from hpcenv.node.check.compat.table import PACKAGED
from hpcenv.project import lockfile as lock_model
from hpcenv.project import toml_files
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.workspace import Workspace
from hpcenv.submission import capacity
from hpcenv.submission.plan import Request


def compat_table(file: str | None) -> dict[str, Any]:
    """Return the compatibility table.

    Args:
        file: the path of a table, instead of that of hpcenv.

    Raises:
        SpecError: it cannot be read, or is not valid.
    """
    path = PACKAGED if file is None else Path(file)
    table = toml_files.read(path, error=SpecError)
    table_file.parse(table, origin=str(path))
    return table


def refuse_gpu_without_kernels(
    workspace: Workspace,
    locked: Lockfile,
    request: Request,
    table: Mapping[str, Any],
    offers: Sequence[node_types.Offer],
) -> list[str]:
    """Refuse GPUs that torch has no kernels for, as the nodes would after the queue, if the GPU's name is known."""
    cuda, arch_list = lock_model.cuda_of(locked), lock_model.arch_list_of(locked)
    if not request.gpus_per_node or cuda is None or not arch_list:
        return []
    named = workspace.project.host.gpu
    origin, names = f"`gpu` under [host] in {workspace.spec}", [named] if named else []
    if not names:
        origin, names = "sinfo", capacity.gpu_types(request, offers)

    known = table_file.parse(table, origin=str(PACKAGED))
    models = {name: gpu_by_name(known, name) for name in names}
    judged = [
        covers(known, arch_list, model.compute_capability, gpu=model.name)
        for model in models.values()
        if model is not None
    ]
    # A partition may have several GPU models: it is refused only if torch has kernels for none of them.
    bad = [judgement for judgement in judged if judgement.result == "mismatch"]
    severity = lock_model.severities_of(locked).of("host.gpu-compute-capabilities")
    if bad and len(bad) == len(models) and severity == "must":
        raise SubmitRejected(bad[0].what, why=f"{bad[0].why}; the GPU is known from {origin}", hint=bad[0].hint)
    return [f"{judgement.what} ({origin})" for judgement in bad]
