"""Make, check, compare and verify a lockfile from Python: `hpcenv init`, `lock`, `diff`, `verify`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hpcenv.api.here import open_here, project_folder, require_accepted
from hpcenv.locking import diff as differing
from hpcenv.locking import init as initial
from hpcenv.locking import lock as locking
from hpcenv.locking.diff import DiffResult
from hpcenv.locking.init import InitResult
from hpcenv.locking.lock import CheckResult, LockOptions, LockResult
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.records.manifest import DeterminismProfile
from hpcenv.submission.verify_nodes import Verified, options_to_verify, verify_environment


def init(
    project: str | Path = ".",
    *,
    image: str = "host",
    python: str | None = None,
    plain_http: Sequence[str] = (),
    force: bool = False,
) -> InitResult:
    """Write a commented hpcenv.toml into a folder: `hpcenv init`.

    Args:
        image: `host`, or a reference such as `docker://HOST/NAME:TAG`.
        python: the interpreter, as a path or a name inside the image. With None, the file contains the default as a
            comment.
        plain_http: registries without TLS, each as HOST:PORT.
        force: replace an existing hpcenv.toml. Without `force`, the home folder is refused, too.

    Raises:
        WouldOverwrite: the folder already has an hpcenv.toml.
        UsageError: a value cannot be written into the file.
        SpecError: `hpcenv lock` would refuse the image or the interpreter.
    """
    return initial.init(
        project_folder(project),
        environ=os.environ,
        image=image,
        python=python,
        plain_http=tuple(plain_http),
        force=force,
    )


def lock(
    project: str | Path = ".",
    *,
    lock: str = DEFAULT_LOCK,
    upgrade: bool = False,
    deep: bool = False,
    pins: str | Path | None = None,
    extras: Sequence[str] = (),
    groups: Sequence[str] = (),
    wheels: bool = True,
    allow_floating: bool = False,
    plain_http: Sequence[str] = (),
    accept: str | None = None,
) -> LockResult:
    """Resolve the environment of a project and write its lockfile: `hpcenv lock`.

    Args:
        lock: NAME of the lockfile `lockfiles/NAME.lock.toml`.
        upgrade: ask the registry again which image the tag names.
        deep: also import torch, and lock the libraries that are loaded.
        pins: the lockfile of another tool that the environment must agree with: uv.lock, pylock.toml,
            requirements.txt, pixi.lock or conda-lock.yml. `#NAME` may follow, as for `--from`. The path is relative
            to `project`.
        extras, groups: the extras and groups that were installed from the lockfile in `pins`.
        wheels: ask the package index for the hashes of the wheels.
        allow_floating: accept an image without a tag, or with the tag `latest`.
        plain_http: registries without TLS, each as HOST:PORT. hpcenv sends your saved password to the registries in
            `plain_http`. It does not send the password to registries that only hpcenv.toml names.
        accept: digest of the project's requests to this machine, if you have not accepted these requests yet. The error
            NotAccepted contains the digest.

    Raises:
        NotAccepted: you have not accepted the project's requests to this machine.
        PinsDiffer: the installed packages differ from the pins.
        HpcenvError: the image or the environment cannot be read. The old lockfile stays as it is.
    """
    workspace, context = open_here(project, ("hpcenv.lock",))
    require_accepted(workspace, accept)
    options = LockOptions(
        name=lock,
        allow_floating=allow_floating,
        plain_http=tuple(plain_http),
        upgrade=upgrade,
        level="deep" if deep else "full",
        pins=pins,
        extras=tuple(extras),
        groups=tuple(groups),
        wheels=wheels,
    )
    return locking.lock(workspace, options, context)


def check_lock(
    project: str | Path = ".",
    *,
    lock: str = DEFAULT_LOCK,
    pins: str | Path | None = None,
    extras: Sequence[str] = (),
    groups: Sequence[str] = (),
    accept: str | None = None,
) -> CheckResult:
    """Return whether a lockfile is stale, and why: `hpcenv lock --check`. No registry or index is contacted.

    Args:
        lock: NAME of the lockfile `lockfiles/NAME.lock.toml`.
        pins, extras, groups: as for `lock`.
        accept: as for `lock`. A check needs `accept`, too, because it starts the Python of `image = "host"`.

    Raises:
        NotAccepted: as for `lock`.
        LockfileMissing, LockfileInvalid, LockfileNewer: there is nothing to check.
        SpecError: the lockfile is stale, and hpcenv.toml names no image that could be locked.
        PinsDiffer: the lockfile is not stale, but the installed packages differ from the pins.
    """
    workspace, context = open_here(project, ("hpcenv.check_lock",))
    require_accepted(workspace, accept)
    return locking.check_lock(
        workspace, LockOptions(name=lock, pins=pins, extras=tuple(extras), groups=tuple(groups)), context
    )


def verify(
    project: str | Path = ".",
    *,
    lock: str = DEFAULT_LOCK,
    deep: bool = False,
    sif: str | Path | None = None,
    gpus: int | None = None,
    imports: bool = False,
    nodes: int | None = None,
    partition: str | None = None,
    account: str | None = None,
    time: str | None = None,
    preflight: str | None = None,
    accept: str | None = None,
) -> Verified:
    """Compare this environment, a SIF, or a set of nodes with the lockfile: `hpcenv verify`.

    Args:
        lock: NAME of the lockfile `lockfiles/NAME.lock.toml`.
        deep: hash every file, import torch, and read which libraries the loader maps.
        sif: verify this SIF instead of the project's SIF; relative to `project`.
        gpus: the number of GPUs that each machine must have.
        imports: if the environment agrees with the lockfile, also import each locked package once. The outcome is in
            `imports` of the result.
        nodes: verify this number of nodes in a Slurm job, and wait for the job. None verifies this machine.
        partition, account, time, preflight: options of that job, as for `submit`. `time` has Slurm's format: `0:30:00`.
        accept: as for `lock`.

    Returns:
        The verdict, and the facts on which the verdict is based. The verdict's `result` is `match`, `mismatch` or
        `unknown`.

    Raises:
        NotAccepted: as for `lock`.
        UsageError: an option needs `nodes`, and `nodes` is not given; or an option cannot be used with `nodes`.
        LockfileMissing, LockfileInvalid, LockfileNewer, LockfileStale: there is no usable lockfile.
        SubmitRejected: the job was refused, or ended without a verdict.
    """
    of_job = {"partition": partition, "account": account, "time": time, "preflight": preflight}
    wanted = options_to_verify(nodes=nodes, lock=lock, deep=deep, sif=sif, gpus=gpus, **of_job)
    workspace, context = open_here(project, ("hpcenv.verify",))
    require_accepted(workspace, accept)
    return verify_environment(workspace, wanted, context, sif=sif, imports=imports)


def diff(
    left: str | Path,
    right: str | Path,
    *,
    project: str | Path = ".",
    determinism: DeterminismProfile | None = None,
    runs_dir: str | None = None,
) -> DiffResult:
    """Return what differs between two lockfiles, two runs, or a lockfile and a run: `hpcenv diff`.

    Each of the two lockfiles sets severities, with its [policy] and its profile. The stricter severity counts.

    Args:
        left, right: each is a lockfile or a run. A lockfile is given by its path, by its name in the project, or as
            `REV:NAME`: the lockfile NAME in the git commit REV. A run is given by its folder, name or job id.
        project: a folder of the project. Relative paths are relative to this folder.
        determinism: the determinism profile whose severities are used for the differences. `bitwise` is for runs
            that should agree in every bit.
        runs_dir: folder of runs, if it is not the project's folder of runs.

    Raises:
        UsageError: `left` or `right` is neither a lockfile nor a run, or the commit contains no such lockfile.
        ToolMissing: a commit is named, and git is not on PATH.
    """
    return differing.diff(left, right, project=project, determinism=determinism, runs_dir=runs_dir, environ=os.environ)
