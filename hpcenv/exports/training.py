"""The parts of an exported training that are the same for all engines: image, code, command, resources and so on.

Runs on: LOGIN NODE. The function `find` reads the project and decides on these parts. `find` needs no SIF, no Slurm and
no engine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv.errors import Command, Hint, UsageError
from hpcenv.exports import lock_of
from hpcenv.image.reference import LocalImage, parse_source
from hpcenv.locking.image_source import registry_name
from hpcenv.project.context import Context
from hpcenv.project.lockfile import ContainerTable, Lockfile
from hpcenv.project.options import OPTIONS
from hpcenv.project.site_profile import Profile
from hpcenv.project.workspace import Workspace
from hpcenv.records.manifest import Manifest, RecordedData, Secret, Setting
from hpcenv.records.variables import looks_like_credential
from hpcenv.submission import choose_site, determinism, kept_secrets, run_data
from hpcenv.submission.locked import add_own, backend_of, read_fresh, refuse_gpus_for_cpu_torch, settings
from hpcenv.submission.plan import Request
from hpcenv.submission.plan_job import plan_code
from hpcenv.submission.request import MergedOptions, SubmitOptions, detect_cluster, launch_options, make_request, merge
from hpcenv.submission.snapshot import Code

# The folders of the archive, the lock and the code in the container.
OWN_FOLDER = "/hpcenv"
CHECK, LOCK, CODE = f"{OWN_FOLDER}/check", f"{OWN_FOLDER}/lock", f"{OWN_FOLDER}/code"
PORT = 29500

# Options whose effect is in the files, and options about the submission itself. Other options have no effect in an
# exported training.
_USED = frozenset({
    "nodes", "gpus", "allow_cpu_torch", "gpu_type", "gpu_request", "nproc", "cpus", "mem", "module", "entry",
    "launcher", "torchrun_args", "lock", "frozen", "env", "secret", "determinism", "seed", "workdir", "include",
    "allow_dirty", "name", "runs_dir", "cluster", "site", "assume_shared", "runtime",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training that another engine starts.

    Attributes:
        name: a name that every engine accepts: lower case, digits and `-`.
        image: `HOST/NAME@sha256:DIGEST`.
        platform: the platform of the image, in the form of OCI.
        lock: the manifest with which the check compares the container.
        lockfile: the text of the lockfile.
        memory: the memory of each node in MiB; None if no memory is requested.
        program: the arguments for torchrun: the script or `-m MODULE`, then the arguments of the program.
        workdir: the working directory, relative to the copy of the code.
        variables: name -> value, without credentials.
        secrets: names of secrets and where their values are, without the values.
        data: folders of data that the container must have.
        lost: one phrase for each request that no engine fulfils, or that only Slurm would fulfil.
        notes: what the user should know about the code.
    """

    name: str
    image: str
    platform: str
    lock: Manifest
    lockfile: str
    request: Request
    memory: int | None
    torchrun_args: tuple[str, ...]
    program: tuple[str, ...]
    workdir: str
    variables: Mapping[str, str]
    secrets: tuple[Secret, ...]
    data: tuple[RecordedData, ...]
    lost: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def labels(self) -> dict[str, str]:
        """The label with the fingerprint of the lockfile."""
        return {"hpcenv.fingerprint": self.lock.fingerprint}

    @property
    def check(self) -> list[str]:
        """The first program of the container: the check."""
        return [self.lock.environment.python, "-I", f"{CHECK}/check.pyz"]

    def torchrun(self, *rendezvous: str) -> list[str]:
        """Return the arguments of the check: the lock, and the torchrun command that replaces the check if it passes.

        Args:
            rendezvous: options with which torchrun finds the other nodes.
        """
        shape = [f"--nnodes={self.request.nodes}", f"--nproc-per-node={self.request.nproc_per_node}"]
        place = rendezvous if self.request.nodes > 1 else ("--standalone",)
        # The checked Python starts torchrun as a module, because PATH may have the torchrun of another Python.
        command = [self.lock.environment.python, "-m", "torch.distributed.run", *shape, *place, *self.torchrun_args]
        return [f"{LOCK}/lock.json", "--", *command, *self.program]

    def meeting(self, host: str) -> tuple[str, ...]:
        """Return the options for a rendezvous on `host`: no rank starts before the checks of all nodes have passed."""
        return ("--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{PORT}", f"--rdzv-id={self.name}")


def find(workspace: Workspace, options: SubmitOptions, context: Context, code_folder: Path) -> tuple[Training, Code]:
    """Return the training, and the code that is copied.

    Args:
        code_folder: the folder of the copy of the code.

    Raises:
        HpcenvError: this machine found a reason why the options or the lockfile cannot be exported.
    """
    workspace = workspace.for_lock(options.lock)
    options, context, hidden = kept_secrets.hide_credentials(options, context)
    merged = merge(options, workspace, {}, "local", None)
    request, launch = make_request(merged.options), launch_options(merged.options)
    if launch.launcher != "torchrun":
        raise UsageError(
            f"`--launcher {launch.launcher}` cannot be exported",
            why="torchrun starts the ranks there",
            hint="--launcher torchrun, or export the job of Slurm: --format slurm",
        )
    read = read_fresh(workspace, options.lock, options.lockfile, frozen=options.frozen)
    path, locked = read.path, read.lockfile
    if locked.facts.get("torch.version") == "absent":
        raise UsageError(
            f"`{path.name}` cannot be exported: it has no torch",
            why="torchrun starts the ranks there",
            hint="lock an image that has torch, or export the job of Slurm: --format slurm",
        )
    image, platform = _image(locked)
    gpus = request.gpus_per_node
    if not merged.options.allow_cpu_torch:
        origin, hint = merged.origins.get("gpus", "--gpus"), "--gpus 0 --nproc R"
        refuse_gpus_for_cpu_torch(locked, gpus=gpus, origin=origin, hint=hint)
    code, _sha256 = plan_code(workspace, options, context, code_folder)
    profile, _ = choose_site.choose(workspace, options, context, detect_cluster(context.environ))
    variables, secrets = _variables(workspace, merged.options, locked, request, context)
    data = _data(workspace, locked)
    request = replace(request, fingerprint=read.edited or locked.fingerprint)
    lock = lock_of.container_lock(workspace, merged.options, locked, path, request, variables, data)
    assert code.source is not None
    training = Training(
        name=_name(options.name or code_folder.name),
        image=image,
        platform=platform,
        lock=lock,
        lockfile=read.content.decode(),
        request=request,
        memory=_mebibytes(request.mem),
        torchrun_args=launch.torchrun_args,
        program=(*_program(merged.options, code, code_folder), *options.args),
        workdir=code.source.workdir,
        variables={setting.name: setting.value for setting in variables},
        secrets=secrets,
        data=data,
        lost=tuple(_lost(workspace, merged, profile, request)),
        notes=(*hidden, *code.notes),
    )
    return training, code


def _name(given: str) -> str:
    """Return a name that each engine accepts.

    Kubernetes has the strictest rules (RFC 1035), and makes the name longer.
    """
    name = re.sub(r"[^a-z0-9]+", "-", given.lower()).strip("-")[:40].rstrip("-")
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")


def _image(locked: Lockfile) -> tuple[str, str]:
    """Return the image by its digest, and its platform; refuse an environment that no engine can pull."""
    container = locked.container
    if container is None:
        raise UsageError(
            "the lockfile is for a host environment", why="the engines start containers", hint="lock an image"
        )
    if container.overlay is not None:
        why = f"the lockfile has {container.overlay.in_words}, and no engine mounts it"
        raise UsageError(
            "an overlay cannot be exported", why=why, hint="build an image with these packages, and lock it"
        )
    image = registry_name(container)
    if image is None:
        source = parse_source(container.reference)
        raise UsageError(
            f"the image `{container.reference}` is in no registry",
            why="the engines pull images from a registry, by digest",
            hint=_push(source if isinstance(source, LocalImage) else None, container),
        )
    return image, container.platform


def _push(image: LocalImage | None, container: ContainerTable) -> Hint:
    if image is None:
        return f"`{container.reference}` has no layers: build an image from a Dockerfile, push it, and lock it"
    push = Command("skopeo", "copy", str(image), "docker://HOST/NAME:TAG")
    return ("push it: ", push, '\nthen write image = "docker://HOST/NAME:TAG", and run ', Command("hpcenv", "lock"))


def _program(options: SubmitOptions, code: Code, code_folder: Path) -> tuple[str, ...]:
    assert options.script is not None
    assert code.source is not None
    if options.module:
        return ("-m", options.script)
    if options.entry:
        return ("--no-python", options.script)
    assert code.source.script is not None
    return (os.path.relpath(code.source.script, code_folder / code.source.workdir),)


def _variables(
    workspace: Workspace, options: SubmitOptions, locked: Lockfile, request: Request, context: Context
) -> tuple[tuple[Setting, ...], tuple[Secret, ...]]:
    """Return the variables of the ranks, and the secrets.

    A variable becomes a secret if its name looks like the name of a credential.
    """
    strict = determinism.determinism_options(
        options, workspace.project, locked, gpus=request.gpus_per_node, backend=backend_of(locked, request),
        launcher="torchrun",
    )  # fmt: skip
    given, _ = add_own(settings(workspace, options.env), determinism.variables(strict), "")
    secrets = {one.name: one for one in kept_secrets.secrets_of(workspace, options, context.environ)}
    for one in given:
        if looks_like_credential(one.name):
            secrets.setdefault(one.name, Secret(name=one.name, source=f"env:{one.name}", origin=one.origin))
    return tuple(one for one in given if one.name not in secrets), tuple(secrets.values())


def _data(workspace: Workspace, locked: Lockfile) -> tuple[RecordedData, ...]:
    found, _cache = run_data.find_data(workspace, locked.revision)
    return tuple(one for one in found if not one.hub)


def _mebibytes(mem: str | None) -> int | None:
    """Return the memory that `--mem` requests; None for all memory of a node."""
    match = re.fullmatch(r"([0-9]+)([KMGT]?)", (mem or "").upper())
    if match is None or not int(match[1]):
        return None
    return max(1, int(int(match[1]) * 1024.0 ** ("KMGT".index(match[2] or "M") - 1)))


def _lost(workspace: Workspace, merged: MergedOptions, profile: Profile | None, request: Request) -> Iterator[str]:
    """Yield a phrase for each thing that Slurm, or hpcenv on Slurm, would do, but no engine does."""
    yield "the nodes are not compared with each other, and GPUs are not tried before the training"
    if request.nodes > 1:
        yield "InfiniBand and the network between nodes: the engine's network and NCCL's own choice are used"
    if request.gpus_per_node:
        yield "the ranks are not bound to the CPUs near their GPUs"
    yield "nothing is watched, and the training gets no signal before a time limit"
    if profile is not None and (profile.modules or profile.settings):
        words = [*profile.modules, *(setting.name for setting in profile.settings)]
        yield f"modules and variables of the site profile {profile.name}: {', '.join(words)}"
    unused = [o for o in OPTIONS if o.name in merged.origins and o.name not in _USED]
    if unused:
        yield f"options without effect in an export: {', '.join(merged.shown(option) for option in unused)}"
    if workspace.project.bind:
        yield f"[[bind]]: {', '.join(bind.target or bind.source for bind in workspace.project.bind)}"
    hub = [one.hub for one in workspace.project.data if one.hub]
    if hub:
        yield f"data of a hub, which the container must fetch itself: {', '.join(hub)}"
    if any(one.path and one.compare == "size-and-time" for one in workspace.project.data):
        yield 'data of `compare = "size-and-time"` are not compared: a copy has different file times'
    if (merged.options.determinism or "off") != "off" or merged.options.seed is not None:
        yield "determinism: its variables are set, but hpcenv seeds no rank and sets no switch of torch in it"
