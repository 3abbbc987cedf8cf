"""Checks before a job is queued. They refuse a job that would fail after its wait in the queue.

Runs on: LOGIN NODE. Each check returns notes or raises an error. No check writes anything.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from hpcenv import filesystem, process
from hpcenv.cluster import node_types, slurm_command
from hpcenv.container.start_command import build_start_command, own_folders
from hpcenv.errors import (
    Command,
    FileUnusable,
    HpcenvError,
    RunFolderNotShared,
    ScriptUnusable,
    ToolMissing,
    UsageError,
)
from hpcenv.machine import free_gpus
from hpcenv.project import native_options
from hpcenv.project.context import Context
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.options import OPTIONS, Option
from hpcenv.records.manifest import Environment, Manifest, Secret
from hpcenv.records.run_folder import RunFolder
from hpcenv.submission import module_file, script_notes, shell_script
from hpcenv.submission.answers import read_answer
from hpcenv.submission.plan import Request
from hpcenv.submission.request import SubmitOptions
from hpcenv.submission.script_notes import LaunchShape
from hpcenv.submission.snapshot import LIVE


def read_module(module: str, cwd: Path, command: Sequence[str]) -> tuple[Path | None, bytes]:
    """Return the path and bytes of a module's file; None if the project does not have the module."""
    path = module_file.in_project(module, cwd, command)
    return (None, b"") if path is None else read_script(os.path.relpath(path, cwd), cwd)


def read_script(script: str, cwd: Path) -> tuple[Path, bytes]:
    """Return the script's path and bytes."""
    path = Path(os.path.abspath(cwd / script))
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ScriptUnusable(f"`{script}` is not a file")
        content = path.read_bytes()
    except FileNotFoundError as error:
        near = filesystem.most_similar(path)
        hint = None if near is None else f"perhaps you meant `{os.path.relpath(near, cwd)}`"
        if module_file.name_of(script, cwd) is not None:
            hint = f"it is a module of the project: -m {script}"
        raise ScriptUnusable(f"there is no script `{script}`", why=f"looked for {path}", hint=hint) from error
    except OSError as error:
        look = Command("ls", "-l", script)
        raise ScriptUnusable(f"cannot read the script `{script}`", why=error.strerror, hint=look) from error
    shell_script.refuse(script, content)
    return path, content


# The value of ast.PyCF_ONLY_AST: compile() parses the text, and makes no code.
_ONLY_PARSE = 0x400


def compile_script(script: str, content: bytes, locked: Lockfile, shape: LaunchShape) -> list[str]:
    """Refuse a script with a syntax error, because the job would find the error only after its wait in the queue.

    This Python knows only the grammar of its version. If the environment has a newer Python, a syntax error is only a
    note.

    Args:
        shape: how the script will be started. The notes name code that does not work with this way to start the script.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # ast.parse makes the same call. It is not used, because the import of ast takes time.
            tree = compile(content, script, "exec", flags=_ONLY_PARSE, dont_inherit=True)
    except (RecursionError, MemoryError):
        return []  # the script is nested too deeply for this parser: the job will show whether the script is correct
    except (SyntaxError, ValueError) as error:
        message, line = (error.msg, error.lineno) if isinstance(error, SyntaxError) else (str(error), None)
        where = f"line {line}: {message}" if line else message
        theirs = str(locked.facts["python.version"])
        if _minor(theirs) > sys.version_info[:2]:
            own = ".".join(map(str, sys.version_info[:3]))
            return [f"`{script}`, {where}: not Python {own}, may be Python {theirs}"]
        raise ScriptUnusable(f"the script `{script}` does not compile", why=where) from error
    return script_notes.notes_on(script, content, tree, shape)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2])


def places_of_nodes(
    run_folder: Path, options: SubmitOptions, context: Context, environment: Environment, checkpoint: Path | None
) -> dict[str, Path]:
    """Return the folders that every node must see: description -> folder."""
    # A run that repeats another run makes a new copy of the other run's code. The nodes read the new copy.
    works_here = options.copied is None or options.workdir == LIVE
    places = {
        "the run folder": run_folder,
        **({"the working directory": context.cwd} if works_here else {}),
        "hpcenv's own Python": Path(sys.executable).parent,
        ("the SIF" if environment.kind == "sif" else "the locked Python"): Path(
            environment.sif or environment.python
        ).parent,
    }
    if environment.overlay is not None:
        places["the overlay"] = Path(environment.overlay.source).parent
    if works_here and options.script is not None and not options.module and not options.entry:
        places["the script's folder"] = Path(os.path.abspath(context.cwd / options.script)).parent
    if options.call is not None:
        folders = {"the folder of the executor": options.call.folder, "the output folder": options.call.outputs}
        places |= {what: folder for what, folder in folders.items() if folder is not None}
    if checkpoint is not None:
        places["the folder of the checkpoint"] = checkpoint.parent
    return places


def require_shared(
    run_folder: Path, options: SubmitOptions, context: Context, environment: Environment, checkpoint: Path | None
) -> list[str]:
    """Refuse a folder that nodes cannot see; return notes about folders that nodes possibly cannot see."""
    home = Path(context.environ.get("HOME") or os.path.expanduser("~"))
    places = places_of_nodes(run_folder, options, context, environment, checkpoint)
    notes = []
    for what, place in places.items():
        seen = filesystem.visibility(place, home=home)
        if seen.shared is False and not options.assume_shared:
            raise RunFolderNotShared(
                f"compute nodes cannot see {what} `{place}`",
                why=seen.reason,
                hint="work on a file system that all nodes share; "
                "if hpcenv is wrong, set `assume-shared = true` under [submit] in hpcenv.toml",
            )
        if seen.shared is None:
            notes.append(f"cannot tell whether nodes see {what} {place}: {seen.reason}")
    return notes


def require_secrets(secrets: Sequence[Secret], context: Context, *, local: bool, as_here: bool) -> list[str]:
    """Refuse a secret that no node can read; return notes about secrets that possibly only the nodes can read.

    This function reads no value. If a variable is not set here, only Slurm, a module or `setup` can set the variable in
    the job. A file may be on the local disks of the nodes.

    Args:
        local: whether the ranks run on this machine.
        as_here: whether the job has only the variables of this process: no module and no `setup` adds variables.

    Raises:
        UsageError: a variable is not set.
        FileUnusable: a file on a shared file system does not exist or cannot be read.
    """
    home = Path(context.environ.get("HOME") or os.path.expanduser("~"))
    notes = []
    for secret in secrets:
        kind, _, place = secret.source.partition(":")
        what = f"the secret {secret.name} cannot be read from `{secret.source}`"
        if kind == "env":
            if place in context.environ or (place.startswith("SLURM") and not local):
                continue
            if as_here or local:
                raise UsageError(
                    what,
                    why=f"{place} is not set here, and hpcenv keeps no value after the end of a run; "
                    f"requested by {secret.origin}",
                    hint=f"export {place}=..., or {secret.name}=file:PATH",
                )
            notes.append(f"the secret {secret.name} needs {place}, which is not set here; the job must set it")
            continue
        path = home / place[2:] if place.startswith("~/") else Path(place)
        problem = _unreadable(path)
        if problem and (local or filesystem.visibility(path, home=home).shared):
            raise FileUnusable(
                what,
                why=f"{path}: {problem}; requested by {secret.origin}",
                hint=("write the file so that only you can read it: ", Command("chmod", "600", str(path))),
            )
        if problem:
            notes.append(f"not known whether nodes can read the secret {secret.name}: here {path}: {problem}")
    return notes


def _unreadable(path: Path) -> str:
    """Return why a file cannot be read; empty if it can be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "it is not a plain file"
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return "" if os.access(path, os.R_OK) else "you may not read it"


def require_cpus_for_local(request: Request, origins: Mapping[str, str], *, typed: bool) -> None:
    """Refuse a request that only a cluster can fulfil.

    A partition in hpcenv.toml has no effect on this machine, and is accepted. A partition on the
    command line shows that the user wants a cluster.

    Args:
        typed: whether the user typed `--cluster`.
    """
    slurm_only = sorted(option.flag for option in OPTIONS if option.needs_slurm and _typed(option, origins))
    many_gpus = request.gpus_per_node > 0 and request.nodes > 1
    if not typed and (slurm_only or many_gpus):
        wanted = slurm_only[0] if slurm_only else f"{request.nodes} nodes with {request.gpus_per_node} GPUs each"
        raise ToolMissing(
            "`sbatch` is not on PATH",
            why=f"{wanted} needs Slurm",
            hint="load the module that provides Slurm's commands, or run on this machine: --cluster local --gpus 0",
        )
    if many_gpus:
        raise UsageError(
            "emulated nodes cannot have their own GPUs",
            why=f"--cluster local with --nodes {request.nodes} --gpus {request.gpus_per_node}",
            hint="use --nodes 1, or --gpus 0 --nproc R",
        )


def require_hpcenv_chooses_gpus(manifest: Manifest) -> None:
    """Refuse a variable that chooses the GPUs of the ranks, because hpcenv chooses free GPUs in a run without Slurm."""
    if manifest.cluster != "local" or not manifest.gpus_per_node:
        return
    for setting in manifest.settings:
        if setting.name == free_gpus.VARIABLE:
            raise UsageError(
                f"{setting.name}={setting.value} ({setting.origin}) names GPUs that the run may not have",
                why="without Slurm the run uses free GPUs, and with this variable its ranks would use other GPUs",
                hint=f"leave it out; `{setting.name}={setting.value} hpcenv submit ...` limits the choice",
            )


def _typed(option: Option, origins: Mapping[str, str]) -> bool:
    return option.flag in origins.get(option.name, "").split(", ")


def read_offers(
    answer: Future[tuple[node_types.Offer, ...]] | None,
) -> tuple[tuple[node_types.Offer, ...], tuple[str, ...]]:
    """Return the resources of the cluster. If sinfo gives no answer, return a note that nothing was checked.

    Args:
        answer: the result of `node_types.offers`; None if sinfo was not asked.
    """
    offers = read_answer(answer) or "sinfo lists no nodes"
    if isinstance(offers, str):
        return (), (f"not checked whether the partition could run this: {offers}",)
    return offers, ()


def require_known_srun_options(request: Request, context: Context) -> list[str]:
    """Refuse an option that the cluster's srun does not know, because the job would wait in the queue and then fail.

    `srun OPTIONS --help` starts nothing, and checks OPTIONS before it prints the help (Slurm 22.05 to 26.05).

    Raises:
        UsageError: srun refuses one of the options.
    """
    if not request.srun:
        return []
    argv = ["srun", *native_options.options_of(request.srun), "--help"]
    try:
        answer = process.run(
            argv, env=slurm_command.clean_environment(context.environ), timeout=20, accept=tuple(range(256))
        )
    except HpcenvError as error:
        return [f"not checked whether srun accepts the options of --srun: {error.what}"]
    if answer.status == 0:
        return []
    first = next((line for line in answer.stderr.splitlines() if line.strip()), f"exit status {answer.status}")
    raise UsageError("srun refuses an option that is passed on", why=first, hint=Command("srun", "--help"))


# At the start, a run folder has about 5 MB of node code and records. Later, logs are added.
_NO_ROOM = 16 * 10**6
_LITTLE_ROOM = 10**9


# Slurm may send the signal of --signal up to this number of seconds too early, because Slurm checks the time only at
# intervals (sbatch(1), 24.11).
_EARLY_SECONDS = 60


def check_warning(minutes: float | None, grace: int) -> tuple[str, ...]:
    """Return a note if Slurm may send the stop signal as soon as the job begins.

    Args:
        minutes: the time limit; None if the partition's limit applies.
        grace: how many seconds before the time limit the ranks get the signal.
    """
    if minutes is None or not grace or minutes * 60 > grace + _EARLY_SECONDS:
        return ()
    when = f"{grace} s (--grace) and up to {_EARLY_SECONDS} s more before its time limit"
    return (f"a job of {minutes:g} min may get the stop signal as it begins: Slurm sends it {when}",)


def check_space(run_folder: Path) -> list[str]:
    """Refuse a run folder without free space or quota; return notes.

    Raises:
        FileUnusable: the records of the run do not fit.
    """
    folder = Path(os.path.realpath(run_folder.parent))
    while not os.path.isdir(folder):
        folder = folder.parent
    try:
        found, files = filesystem.space(folder), os.statvfs(folder)
    except OSError as error:
        return [f"not known how much space is free in {folder}: {error.strerror}"]
    left = f"{found.usable / 1e6:,.0f} MB".replace(",", " ")
    whose = f"your quota leaves {left}" if found.usable == found.quota else f"{left} are free"
    whose += f" (says `{found.origin}`)" if found.usable == found.quota else ""
    elsewhere = "remove old runs, or keep runs elsewhere: --runs-dir DIR, `runs` under [paths] in hpcenv.toml"
    if found.usable < _NO_ROOM:
        raise FileUnusable(f"there is no space for the run in `{run_folder.parent}`", why=whose, hint=elsewhere)
    # File systems without a limit of files report 0 of 0.
    if files.f_files and not files.f_favail:
        raise FileUnusable(
            f"there is no space for the run in `{run_folder.parent}`",
            why="the file system cannot hold more files",
            hint=elsewhere,
        )
    return [f"little space for logs and checkpoints in {run_folder.parent}: {whose}"] * (found.usable < _LITTLE_ROOM)


def require_start_line(manifest: Manifest) -> None:
    """Refuse values that the start command of the container cannot contain. The nodes would refuse them later."""
    run = RunFolder(Path(manifest.run_folder))
    build_start_command(
        manifest.environment,
        [manifest.environment.python, *manifest.program, *manifest.args],
        workdir=manifest.workdir,
        variables={
            **{setting.name: setting.value for setting in manifest.settings},
            **{secret.name: "" for secret in manifest.secrets},
        },
        inherited={name: "" for name in manifest.pass_env if not name.endswith("*")},
        passed=manifest.pass_env,
        home=str(run.home_of("NODE")),
        binds=own_folders(manifest),
    )
