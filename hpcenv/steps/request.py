"""What the user asks for: the words of one submission, merged with project, site and environment.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hpcenv.adapters.accepted import NOTHING, Accepted
from hpcenv.dataclass import dataclass, field
from hpcenv.errors import UsageError
from hpcenv.model import document, launch_words
from hpcenv.model.fields import Level
from hpcenv.model.plan import Call, Request
from hpcenv.model.project import SubmitTable
from hpcenv.model.site import Profile
from hpcenv.steps.workspace import DEFAULT_LOCK, Workspace
from hpcenv.wire import LaunchOptions, Secret, StopOptions

Cluster = Literal["slurm", "local"]
Requeue = Literal["saved", "always", "never"]

# sbatch variables that are a user's own defaults. They would override #SBATCH lines unseen,
# so they are taken into the plan by name; all other SBATCH_* variables are left out.
_SBATCH_DEFAULTS = {
    "account": "SBATCH_ACCOUNT",
    "partition": "SBATCH_PARTITION",
    "qos": "SBATCH_QOS",
    "time": "SBATCH_TIMELIMIT",
    "constraint": "SBATCH_CONSTRAINT",
    "reservation": "SBATCH_RESERVATION",
}


# What Slurm alone understands: on this machine nothing comes of it.
FOR_SLURM = (
    *("mem", "time", "partition", "account", "qos", "constraint", "reservation", "exclude", "nodelist"),
    *("dependency", "spare", "gpu_request", "gpu_type"),
)
_FOR_ALL = ("nodes", "gpus", "nproc", "cpus")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The words of one `hpcenv submit`: flags as given, None where the flag is absent.

    Attributes:
        script: None only checks the nodes (`hpcenv verify --nodes`).
        level: how deep the nodes look; None for the environment's default.
        locked: check before anything else that the lockfile is fresh, by looking into the
            SIF or environment too (`hpcenv lock --check`).
        frozen: take the lockfile as it is, also if hpcenv.toml asks for something else.
        gpus: per node.
        env: NAME -> value.
        stage: copy the SIF to every node's own disk before it is used.
        stage_data: folders to copy there as well.
        stage_dir: where on the nodes; None for the first place that all of them have.
        stage_limit: bytes that copies may take on a node; None for the default.
        standalone, max_restarts, torchrun_args: see `wire.LaunchOptions`.
        pass_env, secrets: variables for the ranks from the job's environment, and from
            files or variables that are read on the nodes only (NAME -> `file:PATH`, `env:NAME`).
        grace: seconds; with stop_signal, requeue, max_requeues see `wire.StopOptions`.
        spare, retry_excluding: see `wire.Manifest`.
        nodelist, dependency: as sbatch.
        site: name of a site profile, or its path; `none` for no profile; None to find the one that fits.
        gpu_type: as the GRES of the cluster name it.
        snapshot: run a copy of the code, where it is under git.
        allow_dirty: also where it differs from its commit; the difference is recorded.
        sweep: words `NAME=V1,V2` or `NAME=0..4`: one run for every combination (model/sweep.py).
        array: indices as sbatch's --array: one run for each.
        max_parallel: how many of them run at a time.
        chain: how many jobs follow each other on this run.
        call: a Python function instead of a script.
        lockfile: the one to take, whatever `lock` names.
        handover: a folder is made that somebody else submits: with their environment and files.
    """

    script: str | None
    args: tuple[str, ...] = ()
    level: Level | None = None
    locked: bool = False
    frozen: bool = False
    nodes: int | None = None
    gpus: int | None = None
    nproc: int | None = None
    cpus: int | None = None
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    lock: str = DEFAULT_LOCK
    run: str | None = None
    runs: str | None = None
    template: str | None = None
    compat_file: str | None = None
    cluster: Cluster | None = None
    assume_shared: bool = False
    stage: bool = False
    stage_data: tuple[str, ...] = ()
    stage_dir: str | None = None
    stage_limit: int | None = None
    standalone: bool = False
    max_restarts: int | None = None
    torchrun_args: tuple[str, ...] = ()
    pass_env: tuple[str, ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict)
    grace: int | None = None
    stop_signal: str | None = None
    requeue: Requeue | None = None
    max_requeues: int | None = None
    spare: int | None = None
    retry_excluding: int | None = None
    nodelist: str | None = None
    dependency: str | None = None
    site: str | None = None
    gpu_type: str | None = None
    snapshot: bool = True
    allow_dirty: bool = False
    sweep: tuple[str, ...] = ()
    array: str | None = None
    max_parallel: int | None = None
    chain: int | None = None
    call: Call | None = None
    lockfile: Path | None = None
    handover: bool = False


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a verb would otherwise read itself: environment, place, time, command line.

    Attributes:
        cache: where hashes of SIFs are kept; None keeps none and takes them anew.
    """

    environ: Mapping[str, str]
    cwd: Path
    now: time.struct_time
    token: str
    command: tuple[str, ...]
    cache: Path | None = None


def detect_cluster(environ: Mapping[str, str]) -> Cluster:
    """Return `slurm` where there is an sbatch, else `local`."""
    return "slurm" if shutil.which("sbatch", path=environ.get("PATH")) else "local"


def merge_values(
    workspace: Workspace,
    asked: Asked,
    environ: Mapping[str, str],
    cluster: Cluster,
    profile: Profile | None,
    notes: list[str],
) -> tuple[dict[str, str | int], dict[str, str]]:
    """Merge flags, hpcenv.toml, the user's SBATCH_* defaults and the site's profile, in this precedence.

    Returns each value that is set, and where it comes from.
    """
    values: dict[str, str | int] = {}
    origins: dict[str, str] = {}
    for name in (*_FOR_ALL, *FOR_SLURM):
        variable = _SBATCH_DEFAULTS.get(name, "")
        candidates = [
            (getattr(asked, name, None), f"--{name.replace('_', '-')}"),
            (getattr(workspace.project.submit, name), f"[submit] in {workspace.spec}"),
            ((environ.get(variable) or None) if cluster == "slurm" else None, variable),
            (None if profile is None else profile.default_of(name), f"{profile.path}" if profile else ""),
        ]
        found = next(((value, origin) for value, origin in candidates if value is not None), None)
        if found is not None:
            values[name], origins[name] = found
            if found[1] == variable:
                notes.append(f"{name} = {found[0]} comes from {variable}")
    per_gpu = None if profile is None else profile.default_of("cpus_per_gpu")
    if profile is not None and isinstance(per_gpu, int) and "cpus" not in values and int(values.get("gpus", 0)):
        values["cpus"], origins["cpus"] = per_gpu * int(values["gpus"]), f"cpus-per-gpu in {profile.path}"
    ignored = sorted(n for n in environ if n.startswith("SBATCH_") and n not in _SBATCH_DEFAULTS.values())
    if ignored and cluster == "slurm":
        notes.append(f"left out, they would change the job unseen: {', '.join(ignored)}")
    unused = [f"{name} = {values[name]} ({origins[name]})" for name in FOR_SLURM if name in values]
    if unused and cluster == "local":
        notes.append(f"without Slurm nothing comes of {', '.join(unused)}")
    return values, origins


def make_request(values: Mapping[str, str | int], origins: Mapping[str, str], accepted: Accepted = NOTHING) -> Request:
    """Return what Slurm is asked for.

    Args:
        accepted: which values were valid before.

    Raises:
        UsageError: a value is none that Slurm takes, or nothing says how many ranks.
    """
    checked = _validated(values, origins, accepted)
    nodes, gpus = 1 if checked.nodes is None else checked.nodes, checked.gpus or 0
    nproc = checked.nproc if checked.nproc is not None else gpus
    if nproc == 0:
        raise UsageError(
            "how many ranks per node?",
            why="neither --gpus nor --nproc is given, here or in [submit] of hpcenv.toml",
            hint="--nodes N --gpus G, or --gpus 0 --nproc R for CPU ranks",
        )
    return Request(
        nodes=nodes,
        gpus_per_node=gpus,
        nproc_per_node=nproc,
        cpus_per_task=checked.cpus,
        gpu_request=checked.gpu_request or "gpus-per-node",
        spare=checked.spare or 0,
        **{name: getattr(checked, name) for name in FOR_SLURM if name not in ("gpu_request", "spare")},
    )


def _validated(values: Mapping[str, str | int], origins: Mapping[str, str], accepted: Accepted) -> SubmitTable:
    """Hold flags and variables to the same rules as the keys of [submit], each by itself."""
    problems: list[str] = []
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = document.kebab(name)
        table, wrong = accepted.parse(SubmitTable, {key: value}, json.dumps([key, value]).encode())
        problems.extend(f"{problem} (from {origins[name]})" for problem in wrong)
        found[name] = getattr(table, name, None)
    if problems:
        raise UsageError("this cannot be submitted", why="\n".join(problems), hint="hpcenv submit --help")
    return SubmitTable(**found)


def require_literal(asked: Asked) -> None:
    """Refuse what no program can be given: a NUL ends a string, a lone surrogate is no byte."""
    words = {f"argument {n} of the script": word for n, word in enumerate(asked.args, start=1)}
    words |= {f"--torchrun-args word {n}": word for n, word in enumerate(asked.torchrun_args, start=1)}
    words |= {"the script": asked.script or "", **{f"--env {name}": value for name, value in asked.env.items()}}
    for what, word in words.items():
        try:
            fits = b"\0" not in os.fsencode(word)
        except UnicodeEncodeError:
            fits = False
        if not fits:
            raise UsageError(f"{what} is {word!r}, which cannot be passed to a program")


def launch_options(asked: Asked, request: Request, *, torch: str = "") -> LaunchOptions:
    """Return torchrun's options.

    Args:
        torch: its version as locked; empty where it is not known.

    Raises:
        UsageError: they contradict the shape of the run, or would break the launch.
    """
    launch_words.check_torchrun_args(asked.torchrun_args, torch=torch)
    if asked.standalone and request.nodes > 1:
        raise UsageError("`--standalone` is for one node", why=f"{request.nodes} nodes are asked for")
    return LaunchOptions(
        standalone=asked.standalone, max_restarts=asked.max_restarts or 0, torchrun_args=asked.torchrun_args
    )


def stop_options(workspace: Workspace, asked: Asked, request: Request) -> StopOptions:
    """Return what happens before the job's end: flags, then hpcenv.toml, then the defaults.

    Raises:
        UsageError: the grace period would be the whole job.
    """
    table, default = workspace.project.submit, StopOptions()
    chosen = asked.grace if asked.grace is not None else table.grace
    seconds = None if request.time_minutes is None else request.time_minutes * 60
    if chosen is not None and seconds is not None and chosen >= seconds:
        raise UsageError(
            f"a grace period of {chosen} s in a job of {seconds:g} s",
            why="the training would be asked to stop as soon as it begins",
            hint="a longer --time, or a shorter --grace",
        )
    # A tenth of a short job is enough to save itself.
    usual = default.grace if seconds is None else min(default.grace, int(seconds // 10))
    return StopOptions(
        signal=asked.stop_signal or table.stop_signal or default.signal,
        grace=next(value for value in (chosen, usual) if value is not None),
        requeue=asked.requeue or table.requeue or default.requeue,
        max_requeues=next(
            value for value in (asked.max_requeues, table.max_requeues, default.max_requeues) if value is not None
        ),
    )


def secrets(workspace: Workspace, asked: Asked) -> tuple[Secret, ...]:
    """Return which variables the nodes read from files or from the job's environment. No value is read here."""
    found = {
        name: Secret(name=name, source=source, origin=f"[secrets] in {workspace.spec}")
        for name, source in workspace.project.secrets.items()
    }
    found |= {name: Secret(name=name, source=source, origin="--secret") for name, source in asked.secrets.items()}
    launch_words.check_secrets(found.values())
    return tuple(found[name] for name in sorted(found))


def passed_variables(workspace: Workspace, asked: Asked) -> tuple[str, ...]:
    """Return which of the job's own variables the ranks see besides.

    Raises:
        UsageError: one is no name.
    """
    names = (*workspace.project.submit.pass_env, *asked.pass_env)
    launch_words.check_pass_env(names)
    return tuple(dict.fromkeys(names))
