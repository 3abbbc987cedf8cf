"""What the lockfile means for the nodes of one run: the environment, and what it must be there.

Runs on: LOGIN NODE. The lockfile is interpreted here, once; nodes read the manifest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from hpcenv.adapters import toml_files
from hpcenv.adapters.store_place import StorePlace
from hpcenv.dataclass import dataclass
from hpcenv.errors import ImageMismatch, SpecError, ToolMissing, UsageError
from hpcenv.model import lockfile as lock_model
from hpcenv.model.fields import Level
from hpcenv.model.lockfile import ContainerTable, Lockfile
from hpcenv.model.plan import Request
from hpcenv.model.site import Profile
from hpcenv.node import sif_check
from hpcenv.steps.environment import container_environment, host_environment, locked_sif
from hpcenv.steps.request import Asked, Surroundings
from hpcenv.steps.same_tree import stands_for
from hpcenv.steps.workspace import Workspace
from hpcenv.wire import Bind, Environment, Expectation, GpuNeeds, Setting, Severity, SifIdentity


def default_level(environment: Environment) -> Level:
    """Return how deep nodes look: a SIF's own hash covers its files, on the host nothing does."""
    return "record" if environment.kind == "sif" else "full"


def environment_of(
    workspace: Workspace, locked: Lockfile, request: Request, profile: Profile | None, environ: Mapping[str, str]
) -> Environment:
    """Return what the ranks run in.

    Raises:
        SpecError: a bind's source does not exist.
        ImageMismatch: the SIF is missing or visibly another one.
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
    if locked.container is None:
        return host_environment(workspace, environ)
    image = locked_sif(workspace, locked.container)
    if not image.exists():
        hint = _made_again(locked.container)
        raise ImageMismatch(f"there is no SIF `{image}`", why="the lockfile names it", hint=hint)
    gpus = request.gpus_per_node > 0 and locked.facts.get("torch.cuda") not in (None, "none", "absent")
    program = "" if profile is None else _apptainer(profile, environ)
    environment = container_environment(workspace, image, gpus=gpus, program=program)
    # Not looked for on this machine: a site's binds are of its compute nodes.
    return replace(environment, binds=(*binds, *(() if profile is None else profile.binds)))


def _apptainer(profile: Profile, environ: Mapping[str, str]) -> str:
    """Return the program that the site names; a module may bring it on the nodes only."""
    if not profile.apptainer or os.path.isabs(profile.apptainer):
        return profile.apptainer
    found = shutil.which(profile.apptainer, path=environ.get("PATH"))
    if found is None and not profile.modules:
        raise ToolMissing(
            f"`{profile.apptainer}` is not on PATH",
            why=f"`apptainer` in {profile.path} names it",
            hint="name it there by its absolute path, or the modules that bring it",
        )
    return found or profile.apptainer


@dataclass(frozen=True, kw_only=True)
class LockedSif:
    """The SIF that a run uses.

    Attributes:
        sha256: its hash, taken once; empty without a SIF.
        identity: what the nodes know it again by.
        same_tree: it has other bytes than the locked file, and the locked tree.
    """

    sha256: str = ""
    identity: SifIdentity | None = None
    same_tree: bool = False


def identify_sif(
    environment: Environment, locked: Lockfile, place: StorePlace, cache: Path | None, notes: list[str]
) -> LockedSif:
    """Return the SIF's hash and identity.

    Args:
        place: the store that may have made it anew.
        cache: folder of this user's for what was read before.

    Raises:
        ImageMismatch: it is not the locked one, nor made from the same image with the same tree, and the
            lockfile's policy says that it must be.
    """
    if locked.container is None:
        return LockedSif()
    image, wanted = environment.sif, locked.container.sif
    hint = _made_again(locked.container)
    records = None if cache is None else sif_check.Records(cache / "sif", os.path.realpath(image))
    try:
        descriptor = os.open(image, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ImageMismatch(f"cannot read the SIF `{image}`", why=error.strerror, hint=hint) from error
    try:
        digest, identity = sif_check.identify(descriptor, records)
    finally:
        os.close(descriptor)
    if digest == wanted.sha256:
        return LockedSif(sha256=digest, identity=identity)
    same_tree = stands_for(locked.container, Path(image), digest, place=place, cache=cache)
    if same_tree:
        by = f" (of {wanted.built_with})" if wanted.built_with else ""
        notes.append(f"{image} stands for the locked SIF{by}: it has other bytes, and the same tree")
    elif locked.policy.get("container.sif.sha256", "must") == "must":
        raise ImageMismatch(
            f"`{image}` is not the locked SIF",
            why=f"its sha256 is {digest}, the lockfile says {wanted.sha256}",
            hint=f"move it away, then: {hint}",
        )
    else:
        notes.append(f"{image} is not the locked SIF: sha256 {digest[:12]}... instead of {wanted.sha256[:12]}...")
    return LockedSif(sha256=digest, identity=identity, same_tree=same_tree)


def _made_again(container: ContainerTable) -> str:
    """Return the command that makes a missing SIF: of a locked image the very same, else a new one to lock."""
    return "hpcenv lock" if container.manifest_digest is None else "hpcenv image build"


def backend_of(locked: Lockfile, request: Request) -> Literal["nccl", "gloo"]:
    """Return the backend that the locked torch and the GPUs asked for allow."""
    cuda = locked.facts.get("torch.cuda")
    return "nccl" if request.gpus_per_node and cuda not in (None, "none", "absent") else "gloo"


def settings(workspace: Workspace, asked: Mapping[str, str], profile: Profile | None = None) -> tuple[Setting, ...]:
    """Return what the user, the project and the site set for the ranks, in this precedence."""
    merged = {} if profile is None else {setting.name: setting for setting in profile.settings}
    project = workspace.project.env
    merged |= {n: Setting(name=n, value=v, origin="[env] in hpcenv.toml") for n, v in project.items()}
    for name, value in asked.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise UsageError(f"{name!r} is not a variable name", why=f"it comes from --env {name}=...")
        merged[name] = Setting(name=name, value=value, origin="--env")
    return tuple(merged[name] for name in sorted(merged))


def host_expectations(locked: Lockfile, *, gpus: int) -> tuple[Expectation, ...]:
    """What the nodes themselves must offer to the locked environment."""
    if not gpus or lock_model.cuda_of(locked) is None:
        return ()
    severity = locked.policy.get("host.gpu-count", "must")
    return (Expectation(field="host.gpu-count", value=str(gpus), severity=severity, rule="at-least", origin="--gpus"),)


def gpu_needs(locked: Lockfile, *, gpus: int, table: Mapping[str, Any]) -> GpuNeeds | None:
    """Return what the nodes check their drivers and GPUs against; nothing for a CPU build."""
    cuda = lock_model.cuda_of(locked)
    if not gpus or cuda is None:
        return None
    checked = ("host.driver-version", "host.gpu-compute-capabilities", "host.gpu-mig", "container.nvidia-require")
    profile = locked.determinism.profile
    severity: dict[str, Severity] = {field: locked.policy.get(field, "must") for field in checked}
    severity["host.gpu-sm-counts"] = lock_model.severity_of("host.gpu-sm-counts", locked.policy, profile) or "info"
    severity["host.gpu"] = locked.policy.get("host.gpu", "must" if profile == "bitwise" else "warn")
    return GpuNeeds(
        cuda=cuda,
        arch_list=lock_model.arch_list_of(locked),
        require=dict(locked.host.nvidia_require),
        table=json.dumps(table, sort_keys=True),
        severity=severity,
        gpu=locked.host.gpu or "",
    )


def compat_table(asked: Asked, around: Surroundings, *, needed: bool) -> dict[str, Any]:
    """Return the compatibility table; reading it takes time, so only where GPUs are asked for."""
    if not needed:
        return {}
    from hpcenv.model import compat

    path = compat.PACKAGED if asked.compat_file is None else Path(os.path.abspath(around.cwd / asked.compat_file))
    table = toml_files.read(path, error=SpecError)
    compat.parse(table, origin=str(path))
    return table
