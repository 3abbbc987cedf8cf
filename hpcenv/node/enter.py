"""How a command enters the environment of a run: the one start line for probe and ranks.

Runs on: COMPUTE NODE, and on the login node while locking. Standard library only.

The probe and the training must see the same thing, so both come through here. Nothing
leaks in: of the job's environment only what is named here, or by the user, reaches a
command. A SIF gets a cleaned environment and a home of its own (reference/apptainer.md
section 0.7); on the host also what a login gives, but nothing that changes which Python
code is loaded, and nothing that an outer launcher left behind.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcenv.adapters import apptainer
from hpcenv.dataclass import dataclass, replace
from hpcenv.errors import RecordInvalid
from hpcenv.node.place import Place
from hpcenv.wire import SCHEMA, Bind, Environment, Manifest, RunFolder, Staged, read

# Where the run's own home folder appears inside a container: a path that no image and no
# site uses, so that it cannot collide with a bind below the user's real home.
CONTAINER_HOME = "/hpcenv/home"

# What the ranks may know of the job they run in.
_FROM_THE_JOB = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "SLURMD_NODENAME",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_CLUSTER_NAME",
    "SLURM_GPUS_ON_NODE",
    "SLURM_JOB_ACCOUNT",
    "SLURM_JOB_END_TIME",
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_START_TIME",
    "SLURM_NODEID",
    "SLURM_RESTART_COUNT",
)

# What the ranks may know besides on the host, where programs are found through variables: what a
# login gives, environment modules, where certificates and Kerberos tickets are, proxies, and tuning
# of GPU and network libraries. Not SLURM_NTASKS and its like: Lightning and accelerate take a
# process that sees them for a task of srun, and give it a rank by themselves (Lightning 2.6
# SLURMEnvironment.detect, accelerate 1.12 utils/environment.py).
_ON_HOST = re.compile(
    r"(PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TERM|HOSTNAME|SLURM_CONF|"
    r"LD_LIBRARY_PATH|MODULEPATH|MODULESHOME|LOADEDMODULES|_LMFILES_|(LMOD|XDG)_\w+|"
    r"KRB5CCNAME|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|"
    r"(https?|ftp|all|no)_proxy|(HTTPS?|FTP|ALL|NO)_PROXY|"
    r"(CUDA|NCCL|RCCL|UCX|FI|OFI|GLOO|HSA|MIOPEN|MKL|KMP|GOMP|OMP|TORCH)_\w+)\Z"
)

# No pattern of the user's brings these along: variables that decide which Python code loads
# (checked against the lockfile as absent), that hpcenv's own steps carry, or that belong to an
# outer launcher, whose RANK and MASTER_ADDR a job submitted from inside it inherits. Who wants
# one all the same gives its whole name.
_BY_NAME_ONLY = re.compile(
    r"(PYTHON\w*|CONDA_\w*|VIRTUAL_ENV\w*|__PYVENV_LAUNCHER__|LD_PRELOAD|LD_AUDIT|"
    r"(APPTAINER(ENV)?|SINGULARITY(ENV)?|SUBMITIT|SBATCH|SRUN|SLURM|SLURMD|HPCENV|TORCHELASTIC|PMIX?|OMPI|"
    r"GROUP|ROLE)_\w*|HOME|U?ID|EUID|GID|PROMPT_COMMAND|PWD|OLDPWD|SHLVL|_|"
    r"RANK|LOCAL_RANK|NODE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|PET_\w*)\Z"
)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A command as it must be started: argv, whole environment, working directory."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: Path | None


def enter(
    environment: Environment,
    command: Sequence[str],
    *,
    workdir: str,
    variables: Mapping[str, str],
    inherited: Mapping[str, str],
    passed: Sequence[str] = (),
    image: str | None = None,
    home: str | None = None,
    binds: Sequence[Bind] = (),
    data: Sequence[Bind] = (),
) -> Entry:
    """Return how to start `command` inside `environment`. Pure.

    Args:
        command: argv inside; every item arrives literally.
        workdir: absolute path where it starts; in a SIF it must be bound or exist there.
        variables: settings for the command; they win over the image's own.
        inherited: the environment of this process, filtered here.
        passed: names of further variables of it, `*` for any end (`HF_*`).
        image: path of the SIF to open instead of `environment.sif`: `/proc/self/fd/N` for
            the very file that was hashed.
        home: host folder that becomes the home inside a SIF; None gives it no home.
        binds: host folders for the container besides those of `environment`.
        data: copies of data folders; they win where another bind shows the same place.
    """
    if environment.kind == "host":
        kept = let_through(inherited, passed, on_host=True)
        return Entry(argv=tuple(command), env={**_host_defaults(environment, kept), **variables}, cwd=Path(workdir))
    kept = let_through(inherited, passed, on_host=False)
    argv = apptainer.exec_argv(
        apptainer=environment.apptainer,
        image=image or environment.sif,
        command=command,
        workdir=workdir,
        home=f"{home}:{CONTAINER_HOME}" if home else None,
        binds=needed_binds((*data, *environment.binds, *binds)),
        gpus=environment.gpus,
    )
    return Entry(argv=tuple(argv), env=apptainer.exec_env(inherited, {**kept, **variables}), cwd=None)


def let_through(inherited: Mapping[str, str], passed: Sequence[str], *, on_host: bool) -> dict[str, str]:
    """Return what the ranks see of the job's environment. Pure.

    Args:
        passed: what the user asks for besides, names or beginnings with a `*`.
        on_host: they run on the host, not in a SIF.
    """
    return {
        name: value
        for name, value in inherited.items()
        if name in _FROM_THE_JOB or (on_host and _ON_HOST.match(name)) or _is_passed(name, passed)
    }


def _is_passed(name: str, passed: Sequence[str]) -> bool:
    if name in passed:
        return True
    # A shell's functions are variables too (`BASH_FUNC_module%%`), which no program is meant to see.
    if not _NAME.match(name) or _BY_NAME_ONLY.match(name):
        return False
    return any(word.endswith("*") and name.startswith(word[:-1]) for word in passed)


def _host_defaults(environment: Environment, kept: Mapping[str, str]) -> dict[str, str]:
    """Return the host's environment as if its virtual environment were active."""
    folder = os.path.dirname(environment.python)
    return {
        **kept,
        "PATH": f"{folder}:{kept['PATH']}" if kept.get("PATH") else folder,
        # ~/.local differs from node to node and from user to user.
        "PYTHONNOUSERSITE": "1",
    }


def own_folders(manifest: Manifest) -> tuple[Bind, ...]:
    """Return the folders that every run sees at their own paths; they may hide parts of the image."""
    places = [manifest.workdir, manifest.run_folder]
    if manifest.script:
        places.append(os.path.dirname(manifest.script))
    return tuple(Bind(source=place, target=place) for place in places)


def staged_here(manifest: Manifest, place: Place) -> Staged:
    """Return what this node has on its own disk for this very attempt; nothing if nothing was asked for."""
    nothing = Staged(schema=SCHEMA, run=manifest.run, node=place.node, attempt=place.attempt)
    if manifest.stage is None:
        return nothing
    try:
        staged = read(Staged, RunFolder(Path(manifest.run_folder)).staged_of(place.node))
    except RecordInvalid as error:
        return replace(nothing, problems=(f"{error.what}: {error.why}" if error.why else error.what,))
    if (staged.run, staged.node, staged.attempt) != (manifest.run, place.node, place.attempt):
        return replace(nothing, problems=(f"the copies are of attempt {staged.attempt} of {staged.run}",))
    return staged


def data_binds(manifest: Manifest, staged: Staged) -> tuple[Bind, ...]:
    """Return the data folders at their own paths, read-only: the node's copy, else the shared one."""
    folders = () if manifest.stage is None else manifest.stage.data
    return tuple(
        Bind(source=staged.data.get(folder.source, folder.source), target=folder.source, read_only=True)
        for folder in folders
    )


def needed_binds(binds: Sequence[Bind]) -> tuple[Bind, ...]:
    """Leave out what another bind shows already; of two for one target the first one wins.

    Outer folders come first: a mount hides what was mounted below it before.
    """
    per_target: dict[str, Bind] = {}
    for bind in binds:
        per_target.setdefault(os.path.normpath(bind.target), bind)
    kept: list[Bind] = []
    for target in sorted(per_target, key=lambda t: (t.count("/") if t != "/" else 0, t)):
        around = [outer for outer in kept if _is_below(target, outer.target)]
        # Only the nearest one counts: it hides what lies further out.
        if not around or not _covers(around[-1], per_target[target]):
            kept.append(per_target[target])
    return tuple(kept)


def _covers(outer: Bind, inner: Bind) -> bool:
    """Whether `inner`, below `outer` in the container, shows what is there anyway."""
    if outer.read_only != inner.read_only or not _is_below(inner.source, outer.source):
        return False
    return os.path.relpath(inner.source, outer.source) == os.path.relpath(inner.target, outer.target)


def _is_below(path: str, folder: str) -> bool:
    return os.path.commonpath([os.path.normpath(path), os.path.normpath(folder)]) == os.path.normpath(folder)
