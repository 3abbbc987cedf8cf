"""Find values of a lockfile that do not fit together, according to the compatibility table. Pure.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

from hpcenv.judge.compat import library_rules
from hpcenv.judge.compat.compat_table import Compat
from hpcenv.judge.compat.gpu_names import gpu_by_name
from hpcenv.judge.compat.kernels import covers, covers_built
from hpcenv.judge.compat.libraries import Fit, judge_environment
from hpcenv.judge.compat.torch_builds import check_python
from hpcenv.project import lockfile as lock_model
from hpcenv.project.lockfile import Lockfile


def misfits(locked: Lockfile, table: Compat) -> tuple[Fit, ...]:
    """Return the libraries and packages that do not fit the locked torch, or are not in the table.

    Nothing is compared if there is no torch, or if torch is not a release (for example `2.9.0a0+git`).
    """
    torch = locked.facts.get("torch.version")
    if not isinstance(torch, str) or torch == "absent":
        return ()
    versions = library_rules.versions_of(locked.facts, [(d.name, d.version) for d in locked.packages.dist])
    found = judge_environment(table, torch=torch, cuda=lock_model.cuda_of(locked) or "", versions=versions)
    return tuple(one for one in found if one.judgement.result != "match")


def notes(locked: Lockfile, table: Compat, *, today: dt.date) -> tuple[str, ...]:
    """Return notes for the user about the locked versions.

    Args:
        locked: the new lockfile.
        table: the compatibility table.
        today: the present date, for the age of the table.
    """
    severities = lock_model.severities_of(locked)
    texts = [
        f"{one.field} ({library_rules.weight(one, severities)}): {one.judgement}"
        for one in misfits(locked, table)
        # A lockfile for CPUs has no versions of CUDA, so the results of rules about CUDA are unknown. No note is
        # needed.
        if lock_model.cuda_of(locked) is not None or one.judgement.result == "mismatch"
    ]
    texts += [*_python(locked, table), *_gpu(locked, table), *_gpu_memory(locked, table)]
    age = table.age_note(today) if texts or lock_model.cuda_of(locked) is not None else ""
    return (*texts, *((age,) if age else ()))


def _python(locked: Lockfile, table: Compat) -> Iterator[str]:
    """Yield a note if the locked torch was not made for the locked Python."""
    release = table.torch(str(locked.facts.get("torch.version")))
    python = locked.facts.get("python.version")
    if release is None or not isinstance(python, str):
        return
    judged = check_python(table, release, python, machine=lock_model.machine_of(locked))
    if judged.result == "mismatch":
        yield str(judged)


def _gpu_memory(locked: Lockfile, table: Compat) -> Iterator[str]:
    """Yield a note if the project requires more GPU memory than its GPU has in any size that is sold."""
    model = gpu_by_name(table, locked.host.gpu) if locked.host.gpu is not None else None
    if model is None or not model.memory_gb or max(model.memory_gb) >= lock_model.gpu_memory_gb(locked):
        return
    most = f"{model.name} is sold with {max(model.memory_gb)} GB at most"
    yield f"{most}, and `gpu-memory` under [host] asks for {locked.host.gpu_memory}: no node can have both"


def _gpu(locked: Lockfile, table: Compat) -> Iterator[str]:
    """Yield notes on anything that would fail on the GPU that the project names."""
    arch_list = lock_model.arch_list_of(locked)
    if locked.host.gpu is None or not arch_list or lock_model.cuda_of(locked) is None:
        return
    model = gpu_by_name(table, locked.host.gpu)
    if model is None:
        yield f"the GPU `{locked.host.gpu}` is not in the compatibility table: kernels are not checked for it"
        return
    capability = model.compute_capability
    judged = [covers(table, arch_list, capability, gpu=model.name, machine=lock_model.machine_of(locked))]
    for package, built in lock_model.built_for(locked).items():
        judged.append(covers_built(table, package, built, capability, gpu=model.name))
    for one in judged:
        if one.result != "match":
            yield f"{one.what}; {one.hint or one.why}"
