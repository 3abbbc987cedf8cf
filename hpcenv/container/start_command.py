"""The command that starts a program in the environment of a run, in a SIF or on the host.

Runs on: COMPUTE NODE, and on the login node while locking. Standard library only.

The probe and the ranks must see the same environment, so both are started through this module. Of the job's environment
variables, a program gets only the variables that this module or the user names. In a SIF the program gets a cleaned
environment and a separate home. On the host the program also gets the variables of a login, but no variable that
changes which Python code is loaded, and no variable of an outer launcher.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcenv.container import apptainer
from hpcenv.judge.job_variables import FROM_THE_JOB, OF_LOGIN, changes_results
from hpcenv.records.manifest import Bind, Environment, Manifest, Setting
from hpcenv.records.variables import WITHHELD, recorded_value, without_credential

# Path of the run's home folder in the container. Images and sites do not use this path. So it does not collide with a
# bind below the user's real home.
CONTAINER_HOME = "/hpcenv/home"

# On the host, programs also get the settings of libraries for GPUs, networks and mathematics. These can change results.
_OF_LIBRARIES = re.compile(
    r"(LD_LIBRARY_PATH|(CUDA|NCCL|RCCL|UCX|FI|OFI|GLOO|HSA|MIOPEN|MKL|KMP|GOMP|OMP|TORCH)_\w+)\Z"
)

# A user's pattern does not match these variables. Some of them decide which Python code is loaded (the lockfile records
# that they are not set). Others belong to hpcenv's steps or to an outer launcher. For example, a job that is submitted
# inside a launcher inherits that launcher's RANK and MASTER_ADDR. A user can pass such a variable by its full name.
_BY_NAME_ONLY = re.compile(
    r"(PYTHON\w*|CONDA_\w*|VIRTUAL_ENV\w*|__PYVENV_LAUNCHER__|LD_PRELOAD|LD_AUDIT|"
    r"(APPTAINER(ENV)?|SINGULARITY(ENV)?|SUBMITIT|SBATCH|SRUN|SLURM|SLURMD|HPCENV|TORCHELASTIC|PMIX?|OMPI|"
    r"GROUP|ROLE)_\w*|HOME|U?ID|EUID|GID|PROMPT_COMMAND|PWD|OLDPWD|SHLVL|_|"
    r"RANK|LOCAL_RANK|NODE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|PET_\w*)\Z"
)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True, kw_only=True)
class StartCommand:
    """A command as data: argv, complete environment, working directory. `opened` prepares the command for its start.

    Attributes:
        variables: text of the file with the variables of a container (`apptainer.env_file`); empty on the host.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: Path | None
    variables: str = ""


@contextlib.contextmanager
def opened(start: StartCommand) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Yield the argv to start, and the open descriptors that the program inherits with the same numbers.

    The variables of a container are in a file in memory. So they do not appear on a disk, in a process list, or in the
    environment of a process on the host. The program reads the file before it starts the container.
    """
    if not start.variables:
        yield start.argv, ()
        return
    descriptor = os.memfd_create("hpcenv-variables", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(start.variables.encode())
        yield apptainer.with_env_file(start.argv, f"/proc/self/fd/{descriptor}"), (descriptor,)
    finally:
        os.close(descriptor)


def build_start_command(
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
) -> StartCommand:
    """Return the command that starts `command` inside `environment`. Pure.

    Args:
        environment: the SIF or host environment.
        command: argv in the environment; each item arrives literally.
        workdir: absolute path of the working directory. With a SIF, the path must be bound or exist in the SIF.
        variables: variables for the command; they override the image's variables.
        inherited: environment variables of this process; this function filters them.
        passed: names of further variables to pass from `inherited`, or patterns such as `HF_*`.
        image: path of the SIF to open instead of `environment.sif`, for example `/proc/self/fd/N` of the hashed file.
        home: host folder that becomes the home in a SIF; None for no home.
        binds: binds in addition to those of `environment`.
        data: binds of data folders; they have priority over other binds with the same target.
    """
    if environment.kind == "host":
        kept = let_through(inherited, passed, on_host=True)
        return StartCommand(
            argv=tuple(command), env={**_host_defaults(environment, kept), **variables}, cwd=Path(workdir)
        )
    kept = let_through(inherited, passed, on_host=False)
    argv = apptainer.exec_argv(
        apptainer=environment.apptainer,
        image=image or environment.sif,
        command=(*environment.wrapper, *command),
        workdir=workdir,
        home=f"{home}:{CONTAINER_HOME}" if home else None,
        binds=needed_binds((*data, *environment.binds, *binds)),
        gpus=environment.gpus,
        rocm=environment.rocm,
        overlay=environment.overlay,
    )
    return StartCommand(
        argv=tuple(argv),
        env=apptainer.start_environment(inherited),
        cwd=None,
        variables=apptainer.env_file(_of_overlay(environment, {**kept, **variables})),
    )


def _of_overlay(environment: Environment, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a container, and add variables with which programs find the content of an overlay.

    A virtual environment is treated as active. If the user or the project sets PYTHONPATH, this value replaces the
    image's PYTHONPATH, as for every variable. Python searches it before the packages of an overlay. Without such a
    setting, Python searches the image's PYTHONPATH after these packages.
    """
    overlay = environment.overlay
    if overlay is None:
        return dict(variables)
    if overlay.use == "venv":
        programs, first = f"{overlay.target}/bin", variables.get("PREPEND_PATH")
        own = {"VIRTUAL_ENV": overlay.target, "PREPEND_PATH": f"{first}:{programs}" if first else programs}
        return {**variables, **own}
    given = variables.get("PYTHONPATH")
    return {**variables, "PYTHONPATH": f"{given}:{overlay.target}" if given else overlay.python_path or overlay.target}


def let_through(inherited: Mapping[str, str], passed: Sequence[str], *, on_host: bool) -> dict[str, str]:
    """Return the variables of the job that the ranks get; passwords of proxies are removed. Pure.

    Args:
        inherited: environment variables of the job.
        passed: further names or patterns (`HF_*`) that the user requested.
        on_host: whether the ranks run on the host, not in a SIF.
    """
    return {
        name: value if is_passed(name, passed) else without_credential(value)
        for name, value in inherited.items()
        if name in FROM_THE_JOB or (on_host and _is_let_through_on_host(name)) or is_passed(name, passed)
    }


def _is_let_through_on_host(name: str) -> bool:
    return OF_LOGIN.match(name) is not None or _OF_LIBRARIES.match(name) is not None


def record_variables(manifest: Manifest, inherited: Mapping[str, str]) -> tuple[Setting, ...]:
    """Return the records' entries for the variables of the job and the secrets that the ranks get. Pure.

    Variables that a setting of the run replaces are left out.

    Args:
        manifest: the run.
        inherited: environment variables of the job.
    """
    on_host = manifest.environment.kind == "host"
    kept = let_through(inherited, manifest.pass_env, on_host=on_host)
    if on_host:
        kept = _host_defaults(manifest.environment, kept)
    modules = f"the job loads {', '.join(manifest.modules)}" if manifest.modules else ""
    found = {
        name: Setting(
            name=name,
            value=recorded_value(name, value),
            origin=_origin(name, on_host=on_host),
            reason=modules if changes_results(name) else "",
        )
        for name, value in kept.items()
    }
    for secret in manifest.secrets:
        found[secret.name] = Setting(name=secret.name, value=WITHHELD, origin=f"{secret.origin}, {secret.source}")
    replaced = {setting.name for setting in manifest.settings}
    return tuple(found[name] for name in sorted(found) if name not in replaced)


def _origin(name: str, *, on_host: bool) -> str:
    if on_host and name == "PYTHONNOUSERSITE":
        return "set by hpcenv on the host"
    if name in FROM_THE_JOB or (on_host and _is_let_through_on_host(name)):
        return "environment of the job"
    return "environment of the job, by --pass-env"


def is_passed(name: str, passed: Sequence[str]) -> bool:
    """Return whether the user requested a variable of the job, by its name or by a pattern."""
    if name in passed:
        return True
    # Shell functions are also in variables (`BASH_FUNC_module%%`). Programs do not need them.
    if not _NAME.match(name) or _BY_NAME_ONLY.match(name):
        return False
    return any(word.endswith("*") and name.startswith(word[:-1]) for word in passed)


def _host_defaults(environment: Environment, kept: Mapping[str, str]) -> dict[str, str]:
    """Return the variables on the host, as if the virtual environment were active."""
    folder = os.path.dirname(environment.python)
    return {
        **kept,
        "PATH": f"{folder}:{kept['PATH']}" if kept.get("PATH") else folder,
        # ~/.local may differ between nodes and users.
        "PYTHONNOUSERSITE": "1",
    }


def own_folders(manifest: Manifest) -> tuple[Bind, ...]:
    """Return the binds of the run's folders at their own paths. These binds may hide folders of the image.

    The project's folders are included, because links in the run's copy of the code lead to them.
    """
    folders = [manifest.workdir, manifest.run_folder]
    if manifest.script:
        folders.append(os.path.dirname(manifest.script))
    if manifest.source is not None:
        folders.extend(manifest.source.roots)
    binds = [Bind(source=folder, target=folder) for folder in folders]
    if manifest.resume_from:
        # The record of a checkpoint is beside the checkpoint.
        folder = os.path.dirname(manifest.resume_from)
        binds.append(Bind(source=folder, target=folder, read_only=True))
    return tuple(binds)


def needed_binds(binds: Sequence[Bind]) -> tuple[Bind, ...]:
    """Remove binds that another bind already includes. If two binds have the same target, the first is kept.

    In the result, outer folders are before inner folders, because a mount hides earlier mounts below it.
    """
    per_target: dict[str, Bind] = {}
    for bind in binds:
        per_target.setdefault(os.path.normpath(bind.target), bind)
    kept: list[Bind] = []
    for target in sorted(per_target, key=lambda t: (t.count("/") if t != "/" else 0, t)):
        outer_binds = [outer for outer in kept if _is_below(target, outer.target)]
        # Only the innermost of these binds counts, because it hides all outer binds.
        if not outer_binds or not _covers(outer_binds[-1], per_target[target]):
            kept.append(per_target[target])
    return tuple(kept)


def _covers(outer: Bind, inner: Bind) -> bool:
    """Whether `outer` already shows the content of `inner` at the target of `inner`."""
    if outer.read_only != inner.read_only or not _is_below(inner.source, outer.source):
        return False
    return os.path.relpath(inner.source, outer.source) == os.path.relpath(inner.target, outer.target)


def _is_below(path: str, folder: str) -> bool:
    return os.path.commonpath([os.path.normpath(path), os.path.normpath(folder)]) == os.path.normpath(folder)
