"""Read the lockfile for one run: the environment of the run, and the values that the nodes must find.

Runs on: LOGIN NODE. Only this machine interprets the lockfile. The nodes read only the manifest.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpcenv.errors import LockfileStale, SpecError, SubmitRejected, UsageError
from hpcenv.image.reference import parse_source
from hpcenv.locking import same_tree
from hpcenv.locking.environment import container_environment, host_environment
from hpcenv.project import lockfile as lock_model
from hpcenv.project import severities, stale
from hpcenv.project.fields import FieldLevel
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.site_profile import Profile
from hpcenv.project.stale import StaleReason
from hpcenv.project.workspace import Workspace, lockfile_bytes, parse_lockfile
from hpcenv.records.manifest import (
    Bind,
    DeterminismProfile,
    Environment,
    Expectation,
    FieldSeverity,
    GpuNeeds,
    Setting,
    Severity,
)
from hpcenv.submission.locked_container import LockedSif, find_sif, program_of, with_locked_overlay, with_wrapper
from hpcenv.submission.plan import Request
from hpcenv.text import plural


@dataclass(frozen=True, kw_only=True)
class FreshLockfile:
    """A lockfile that was read for a run.

    Attributes:
        reasons: why the lockfile is stale. A stale lockfile is accepted only with `--frozen`.
    """

    path: Path
    content: bytes
    lockfile: Lockfile
    reasons: tuple[StaleReason, ...]

    @property
    def edited(self) -> str:
        """The fingerprint of the lockfile's content, if the lockfile states another fingerprint; else empty."""
        return next((one.found for one in self.reasons if one.name == "edited"), "")


def read_fresh(workspace: Workspace, lock: str, path: Path | None, *, frozen: bool) -> FreshLockfile:
    """Read the lockfile of a run; refuse a stale lockfile.

    Args:
        lock: the name of the lockfile.
        path: the path of the lockfile; None to find it by its name.
        frozen: whether a stale lockfile is accepted.

    Raises:
        LockfileStale: the lockfile is stale.
        HpcenvError: the lockfile cannot be read.
    """
    path = path or workspace.lockfile_path(lock)
    content = lockfile_bytes(path)
    lockfile = parse_lockfile(content, path)
    reasons = stale.compare_spec(workspace.project, lockfile)
    if not frozen:
        refuse_stale(workspace, lock, reasons)
    return FreshLockfile(path=path, content=content, lockfile=lockfile, reasons=reasons)


def refuse_stale(workspace: Workspace, lock: str, reasons: tuple[StaleReason, ...]) -> None:
    """Refuse a stale lockfile.

    The packages of a host environment are compared later, at submission (host_packages.py).
    """
    if reasons:
        path = workspace.lockfile_path(lock)
        # If `image` in hpcenv.toml is not valid, report this error first, because a new lock would be refused, too.
        parse_source(workspace.project.image)
        why = "\n".join(str(reason) for reason in reasons)
        hint = stale.hint(reasons, path=path, name=lock)
        raise LockfileStale(f"`{workspace.shown(path)}` is stale", why=why, hint=hint)


def default_level(environment: Environment) -> FieldLevel:
    """Return the level of the nodes' check. A SIF needs a lower level, because its hash covers all its files."""
    return "record" if environment.kind == "sif" else "full"


def environment_of(
    workspace: Workspace,
    locked: Lockfile,
    request: Request,
    profile: Profile | None,
    environ: Mapping[str, str],
    *,
    lock: str,
    runtime: str | None = None,
) -> Environment:
    """Return the environment of the ranks.

    Args:
        lock: name or path of the lockfile, for a hint.
        runtime: the program that starts containers, as the user typed it.

    Raises:
        SpecError: a bind's source does not exist.
        ImageMismatch: the SIF is missing.
    """
    binds, container = project_binds(workspace), locked.container
    if container is None:
        return replace(host_environment(workspace, environ), revision=locked.revision)
    image = find_sif(workspace, container, lock=lock)
    # The container gets the GPUs even if torch cannot use GPUs (--allow-cpu-torch) or is missing, because other
    # software in the image may use the GPUs.
    gpus = request.gpus_per_node > 0 and lock_model.gpu_support(locked) != "hip"
    program = program_of(runtime, profile, environ)
    environment = container_environment(workspace, image, gpus=gpus, program=program)
    environment = replace(environment, rocm=request.rocm and request.gpus_per_node > 0 and not gpus)
    environment = with_wrapper(with_locked_overlay(environment, workspace, container), profile)
    # The folders of the site profile are not checked here, because they may exist only on compute nodes.
    binds = (*binds, *(() if profile is None else profile.binds))
    return replace(environment, binds=binds, revision=locked.revision)


def project_binds(workspace: Workspace) -> tuple[Bind, ...]:
    """Return the binds of the [[bind]] tables in hpcenv.toml.

    Raises:
        SpecError: a bind's source does not exist.
    """
    binds = tuple(
        Bind(
            source=os.path.join(workspace.root, os.path.expanduser(bind.source)),
            target=bind.target or bind.source,
            read_only=bind.read_only,
        )
        for bind in workspace.project.bind
    )
    missing = [bind.source for bind in binds if not os.path.exists(bind.source)]
    if missing:
        raise SpecError(f"bind source `{missing[0]}` does not exist", why=f"[[bind]] in {workspace.spec}")
    return binds


def unlocked_binds(locked: Lockfile, environment: Environment) -> tuple[str, ...]:
    """Return the targets of binds that are not in the lockfile.

    These binds come from the site profile or from --bind, or the user added them to hpcenv.toml after the lock
    (--frozen).
    """
    known = {bind.target for bind in locked.bind}
    targets = {os.path.normpath(bind.target) for bind in environment.binds}
    return tuple(sorted(targets - known))


def backend_of(locked: Lockfile, request: Request) -> Literal["nccl", "gloo"]:
    """Return the backend that fits the locked torch and the GPUs of the run. For torch on ROCm, `nccl` means RCCL."""
    return "nccl" if request.gpus_per_node and lock_model.gpu_support(locked) in ("cuda", "hip") else "gloo"


def settings(workspace: Workspace, asked: Mapping[str, str], profile: Profile | None = None) -> tuple[Setting, ...]:
    """Return the variables for the ranks.

    `--env` has precedence over [env] of hpcenv.toml, and [env] has precedence over the site profile.
    """
    merged = {} if profile is None else {setting.name: setting for setting in profile.settings}
    project = workspace.project.env
    merged |= {n: Setting(name=n, value=v, origin="[env] in hpcenv.toml") for n, v in project.items()}
    for name, value in asked.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise UsageError(f"{name!r} is not a variable name", why=f"it comes from --env {name}=...")
        merged[name] = Setting(name=name, value=value, origin="--env")
    return tuple(merged[name] for name in sorted(merged))


def add_own(given: Sequence[Setting], own: Sequence[Setting], but: str) -> tuple[tuple[Setting, ...], tuple[str, ...]]:
    """Return the variables of the ranks, with hpcenv's own variables added, and notes.

    If `given` and `own` have the same variable, the value in `given` is used. If the two values differ, a note says
    which value is used.

    Args:
        given: the variables that the user, the project or the site profile gives.
        own: hpcenv's own variables.
        but: the end of the note, which follows the replaced value.
    """
    known = {setting.name: setting for setting in own}
    notes = tuple(
        f"{one.name}={one.value} ({one.origin}) replaces {known[one.name].value}{but}"
        for one in given
        if one.name in known and known[one.name].value != one.value
    )
    known |= {setting.name: setting for setting in given}
    return tuple(known[name] for name in sorted(known)), notes


def expectations(
    workspace: Workspace, lockfile: Lockfile, sif: LockedSif, *, level: FieldLevel, gpus: int, origin: str
) -> tuple[Expectation, ...]:
    """Return the values that the nodes must find."""
    locked = lock_model.expectations(lockfile, level=level, origin=origin)
    return (
        *(same_tree.expecting(locked, sif.sha256, lockfile) if sif.same_tree else locked),
        *lock_model.env_expectations(lockfile, workspace.project.env, origin=origin),
        *lock_model.bind_expectations(lockfile, origin=origin),
        *host_expectations(lockfile, gpus=gpus),
    )


def host_expectations(locked: Lockfile, *, gpus: int) -> tuple[Expectation, ...]:
    """Return the requirements of the locked environment for the host of each node."""
    if not lock_model.compares_gpus(locked, gpus):
        return ()
    severity = lock_model.severities_of(locked).of("host.gpu-count")
    # If the number of AMD GPUs cannot be read, this is only a warning, because the files of AMD's driver have less
    # information than NVML.
    lighter: Severity | None = "warn" if severity == "must" and lock_model.gpu_support(locked) == "hip" else None
    return (
        Expectation(
            field="host.gpu-count",
            value=str(gpus),
            severity=severity,
            if_unknown=lighter,
            rule="at-least",
            origin="--gpus",
        ),
    )


def refuse_gpus_for_cpu_torch(locked: Lockfile, *, gpus: int, origin: str, hint: str) -> None:
    """Refuse GPUs that the locked torch cannot use. These GPUs would stay idle, although the verdict would be `match`.

    Args:
        gpus: how many GPUs are requested on each node.
        origin: where the number of GPUs comes from.
        hint: the command or option that the user can type next.

    Raises:
        SubmitRejected: torch was built without CUDA and without ROCm.
    """
    if not gpus or lock_model.gpu_support(locked) != "none":
        return
    raise SubmitRejected(
        f"torch {locked.facts.get('torch.version')} cannot use GPUs: it was built without CUDA and without ROCm",
        why=f"{plural(gpus, 'GPU')} on each node would stay idle; the number comes from {origin}",
        hint=hint,
    )


def gpu_needs(locked: Lockfile, *, gpus: int, table: Mapping[str, Any]) -> GpuNeeds | None:
    """Return the requirements for drivers and GPUs of the nodes.

    The result is None if the run has no GPUs, or if torch and JAX do not use CUDA.
    """
    cuda, jax_cuda = lock_model.cuda_of(locked), lock_model.jax_cuda_of(locked)
    if not gpus or (cuda is None and jax_cuda is None):
        return None
    return GpuNeeds(
        cuda=cuda or "",
        jax_cuda=jax_cuda or "",
        arch_list=lock_model.arch_list_of(locked),
        require=dict(locked.host.nvidia_require),
        table=json.dumps(table, sort_keys=True),
        gpu=locked.host.gpu or "",
        gpu_memory_gb=lock_model.gpu_memory_gb(locked),
        built=lock_model.built_for(locked),
    )


def gate_severities(
    locked: Lockfile, *, gpus: int, profile: DeterminismProfile | None = None
) -> tuple[FieldSeverity, ...]:
    """Return the severities that a lockfile gives to a run.

    Args:
        gpus: how many GPUs the run has on each node.
        profile: a determinism profile that replaces the profile of the lockfile.
    """
    compared = lock_model.compares_gpus(locked, gpus)
    return severities.resolve(locked.policy, profile or locked.determinism.profile, gpus=compared)
