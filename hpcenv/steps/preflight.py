"""What can be refused before a job waits in the queue.

Runs on: LOGIN NODE. Each check returns notes or raises; none writes anything.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcenv.adapters import filesystem, process, slurm_cluster
from hpcenv.errors import (
    FileUnusable,
    HpcenvError,
    LockfileStale,
    RunFolderNotShared,
    ScriptUnusable,
    SubmitRejected,
    ToolMissing,
    UsageError,
)
from hpcenv.model import lockfile as lock_model
from hpcenv.model import stale
from hpcenv.model.lockfile import Lockfile
from hpcenv.model.plan import Request
from hpcenv.steps import capacity
from hpcenv.steps.request import FOR_SLURM, Asked, Surroundings
from hpcenv.steps.workspace import DEFAULT_LOCK, Workspace
from hpcenv.wire import Environment, Secret

if TYPE_CHECKING:
    from typing_extensions import Self


def read_script(asked: str, cwd: Path) -> tuple[Path, bytes]:
    """Return the script's path and bytes."""
    path = Path(os.path.abspath(cwd / asked))
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ScriptUnusable(f"`{asked}` is not a file")
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise ScriptUnusable(f"there is no script `{asked}`", why=f"looked for {path}") from error
    except OSError as error:
        raise ScriptUnusable(f"cannot read the script `{asked}`", why=error.strerror) from error
    return path, content


# ast.PyCF_ONLY_AST: parse, and make no code.
_ONLY_PARSE = 0x400


def compile_script(asked: str, content: bytes, locked: Lockfile) -> list[str]:
    """Refuse a script with a typo: a job must not wait a day to find it.

    Only this Python's grammar is at hand: for an environment with a newer one, what does
    not compile here is a note.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # What ast.parse does, without the module: a submission is not to wait for its import.
            compile(content, asked, "exec", flags=_ONLY_PARSE, dont_inherit=True)
    except (RecursionError, MemoryError):
        return []  # nested beyond what this parser takes: the job will tell
    except (SyntaxError, ValueError) as error:
        message, line = (error.msg, error.lineno) if isinstance(error, SyntaxError) else (str(error), None)
        where = f"line {line}: {message}" if line else message
        import platform

        theirs = str(locked.facts["python.version"])
        if _minor(theirs) > sys.version_info[:2]:
            return [f"`{asked}`, {where}: not Python {platform.python_version()}, may be Python {theirs}"]
        raise ScriptUnusable(f"the script `{asked}` does not compile", why=where) from error
    return []


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2])


def refuse_stale(
    workspace: Workspace, asked: Asked, environ: Mapping[str, str], reasons: tuple[stale.StaleReason, ...]
) -> None:
    """Refuse what can be seen without reading the environment: nodes do that anyway, `locked` does it here."""
    if not reasons and asked.locked:
        from hpcenv.steps import lock as lock_step

        reasons = lock_step.check_lock(workspace, environ=environ, name=asked.lock).reasons
    if reasons:
        raise LockfileStale(
            f"`{workspace.shown(workspace.lockfile_path(asked.lock))}` is stale",
            why="\n".join(str(reason) for reason in reasons),
            hint="hpcenv lock" if asked.lock == DEFAULT_LOCK else f"hpcenv lock --name {asked.lock}",
        )


def require_shared(run_folder: Path, asked: Asked, around: Surroundings, environment: Environment) -> list[str]:
    """Refuse places that nodes cannot see; say which could not be told."""
    home = Path(around.environ.get("HOME") or os.path.expanduser("~"))
    places = {
        "the run folder": run_folder,
        "the working directory": around.cwd,
        "hpcenv's own Python": Path(sys.executable).parent,
        ("the SIF" if environment.kind == "sif" else "the locked Python"): Path(
            environment.sif or environment.python
        ).parent,
    }
    if asked.script is not None:
        places["the script's folder"] = Path(os.path.abspath(around.cwd / asked.script)).parent
    notes = []
    for what, place in places.items():
        seen = filesystem.visibility(place, home=home)
        if seen.shared is False and not asked.assume_shared:
            raise RunFolderNotShared(
                f"compute nodes cannot see {what} `{place}`",
                why=seen.reason,
                hint="work on a file system that all nodes share; --assume-shared if you know better",
            )
        if seen.shared is None:
            notes.append(f"cannot tell whether nodes see {what} {place}: {seen.reason}")
    return notes


def require_secrets(secrets: Sequence[Secret], around: Surroundings, *, local: bool, as_here: bool) -> list[str]:
    """Refuse a secret that no node could read; say which may be on the nodes only. No value is read.

    A job gets the environment of its submission (`--export=ALL`), so a variable that is not
    set here can only come from Slurm, from a module, or from a batch template of the user's
    own. A file may lie on the nodes' own disks.

    Args:
        local: the ranks run on this machine.
        as_here: neither modules nor a template of the user's own add variables.

    Raises:
        UsageError: a variable is not set.
        FileUnusable: a file that the nodes would see is not there, or may not be read.
    """
    home = Path(around.environ.get("HOME") or os.path.expanduser("~"))
    notes = []
    for secret in secrets:
        kind, _, place = secret.source.partition(":")
        what = f"the secret {secret.name} cannot be read from `{secret.source}`"
        if kind == "env":
            if place in around.environ or (place.startswith("SLURM") and not local):
                continue
            if as_here or local:
                raise UsageError(
                    what,
                    why=f"{place} is not set here, and a job has the variables of its submission; "
                    f"asked for by {secret.origin}",
                    hint=f"export {place}=..., or {secret.name}=file:PATH",
                )
            notes.append(f"the secret {secret.name} needs {place}, which is not set here: does the job set it?")
            continue
        path = home / place[2:] if place.startswith("~/") else Path(place)
        problem = _unreadable(path)
        if problem and (local or filesystem.visibility(path, home=home).shared):
            raise FileUnusable(
                what,
                why=f"{path}: {problem}; asked for by {secret.origin}",
                hint=f"write it there, for yourself alone: chmod 600 {path}",
            )
        if problem:
            notes.append(f"not known whether nodes can read the secret {secret.name}: here {path}: {problem}")
    return notes


def _unreadable(path: Path) -> str:
    """Return why a file cannot be read, empty if it can."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "it is not a plain file"
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return "" if os.access(path, os.R_OK) else "you may not read it"


def require_cpus_for_local(request: Request, origins: Mapping[str, str], *, typed: bool) -> None:
    """Refuse what only a cluster can give, and say what is missing for one.

    A partition in hpcenv.toml is for the cluster and left out here; one on the command line
    says that a cluster is meant.
    """
    slurm_only = sorted(name for name in FOR_SLURM if origins.get(name) == f"--{name}")
    many_gpus = request.gpus_per_node > 0 and request.nodes > 1
    if not typed and (slurm_only or many_gpus):
        wanted = f"--{slurm_only[0]}" if slurm_only else f"{request.nodes} nodes with {request.gpus_per_node} GPUs each"
        raise ToolMissing(
            "`sbatch` is not on PATH",
            why=f"{wanted} can only be had from Slurm",
            hint="load the module that provides Slurm's commands, or run on this machine: --cluster local --gpus 0",
        )
    if many_gpus:
        raise UsageError(
            "emulated nodes cannot have GPUs of their own",
            why=f"--cluster local with --nodes {request.nodes} --gpus {request.gpus_per_node}",
            hint="use --nodes 1, or --gpus 0 --nproc R",
        )


def refuse_gpu_without_kernels(
    workspace: Workspace,
    locked: Lockfile,
    request: Request,
    table: Mapping[str, Any],
    offers: Sequence[slurm_cluster.Offer],
) -> list[str]:
    """Say before the queue what the nodes would say after it, where the GPU's name is known."""
    cuda, arch_list = lock_model.cuda_of(locked), lock_model.arch_list_of(locked)
    if not request.gpus_per_node or cuda is None or not arch_list:
        return []
    named = workspace.project.host.gpu
    origin, names = f"`gpu` under [host] in {workspace.spec}", [named] if named else []
    if not names:
        origin, names = "sinfo", capacity.gpu_types(request, offers)
    from hpcenv.model import compat

    known = compat.parse(table, origin=str(compat.PACKAGED))
    models = {name: compat.gpu_by_name(known, name) for name in names}
    judged = [
        compat.covers(known, arch_list, model.compute_capability, gpu=model.name)
        for model in models.values()
        if model is not None
    ]
    # A partition may hold several models: it is refused only if none of them would do.
    bad = [judgement for judgement in judged if judgement.result == "mismatch"]
    if bad and len(bad) == len(models) and locked.policy.get("host.gpu-compute-capabilities", "must") == "must":
        raise SubmitRejected(bad[0].what, why=f"{bad[0].why}; the GPU is known from {origin}", hint=bad[0].hint)
    return [f"{judgement.what} ({origin})" for judgement in bad]


class Question:
    """What sinfo is asked once about the cluster, while its caller does something else; for a `with`.

    Args:
        needed: False asks nothing.
    """

    def __init__(self, around: Surroundings, *, needed: bool) -> None:
        self._asked: process.Begun | None = None
        self._error: HpcenvError | None = None
        try:
            self._asked = slurm_cluster.begin_offers(around.environ) if needed else None
        except HpcenvError as error:
            self._error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._asked is not None:
            self._asked.__exit__()

    def answer(self, notes: list[str]) -> tuple[slurm_cluster.Offer, ...]:
        """Return what the cluster has; what sinfo does not say in time is a note, and not checked."""
        try:
            if self._error is not None:
                raise self._error
            offers = () if self._asked is None else slurm_cluster.read_offers(self._asked)
        except HpcenvError as error:
            notes.append(f"not checked whether the partition could run this: {error.what}")
            return ()
        if not offers:
            notes.append("not checked whether the partition could run this: sinfo lists no nodes")
        return offers


def check_cluster(request: Request, origins: Mapping[str, str], offers: Sequence[slurm_cluster.Offer]) -> list[str]:
    """Refuse what no node of the partition could satisfy; return notes.

    Raises:
        SubmitRejected: see `capacity.judge`.
    """
    return capacity.judge(request, origins, offers) if offers else []


# A run folder begins with about 1 MB of node code and records; logs follow.
_NO_ROOM = 16 * 10**6
_LITTLE_ROOM = 10**9


# How much earlier than asked for Slurm may send the signal of --signal (sbatch(1), 24.11): it looks now and then only.
_EARLY_SECONDS = 60


def check_warning(minutes: float | None, grace: int) -> tuple[str, ...]:
    """Return a note where Slurm may ask a job to stop as it begins.

    Args:
        minutes: the time limit; None where the partition's own holds.
        grace: seconds before it at which the ranks are told.
    """
    if minutes is None or not grace or minutes * 60 > grace + _EARLY_SECONDS:
        return ()
    when = f"{grace} s (--grace) and up to {_EARLY_SECONDS} s more before its time limit"
    return (f"a job of {minutes:g} min may be asked to stop as it begins: Slurm tells it {when}",)


def check_space(run_folder: Path) -> list[str]:
    """Refuse a run folder that has no room or quota left; return notes.

    Raises:
        FileUnusable: not even the records of the run would fit.
    """
    folder = Path(os.path.realpath(run_folder.parent))
    while not os.path.isdir(folder):
        folder = folder.parent
    try:
        found, files = filesystem.space(folder), os.statvfs(folder)
    except OSError as error:
        return [f"not known how much room {folder} has: {error.strerror}"]
    left = f"{found.usable / 1e6:,.0f} MB".replace(",", " ")
    whose = f"your quota leaves {left}" if found.usable == found.quota else f"{left} are free"
    whose += f" (says `{found.origin}`)" if found.usable == found.quota else ""
    elsewhere = "remove old runs, or keep runs elsewhere: --runs DIR, `runs` under [paths] in hpcenv.toml"
    if found.usable < _NO_ROOM:
        raise FileUnusable(f"there is no room for the run in `{run_folder.parent}`", why=whose, hint=elsewhere)
    # File systems without a number of files say 0 of 0.
    if files.f_files and not files.f_favail:
        raise FileUnusable(
            f"there is no room for the run in `{run_folder.parent}`",
            why="the file system can take no more files",
            hint=elsewhere,
        )
    return [f"little room for logs and checkpoints in {run_folder.parent}: {whose}"] * (found.usable < _LITTLE_ROOM)
