"""`hpcenv submit`: write the folder of a planned run, and hand it to Slurm or to this machine.

Runs on: LOGIN NODE. The run folder is written first; only then Slurm is asked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcenv import node, wire
from hpcenv.adapters import process, slurm, submitit_bridge
from hpcenv.adapters.submitit_bridge import Books
from hpcenv.dataclass import dataclass
from hpcenv.errors import (
    FileUnusable,
    HpcenvError,
    SubmitRejected,
    SubmitUncertain,
    ToolMissing,
    WouldOverwrite,
)
from hpcenv.model.plan import Plan
from hpcenv.node.task import LaunchTask
from hpcenv.steps import snapshot
from hpcenv.steps.plan import packed_folder
from hpcenv.steps.request import Cluster, Surroundings
from hpcenv.wire import RunFolder, Submission

# The node code travels with the run: these modules and nothing else of hpcenv.
_NODE_CODE = (
    "__init__.py",
    "dataclass.py",
    "errors.py",
    "version.py",
    "wire.py",
    "adapters/__init__.py",
    "adapters/apptainer.py",
    "adapters/nvml.py",
    "adapters/process.py",
    "adapters/sif.py",
    "model/__init__.py",
    "model/compat.py",
    "model/failure.py",
)


_NODE_FOLDERS = ("node", "incontainer")

# What a script can import, also from an image without hpcenv.
_RANK_CODE = ("__init__.py", "version.py", "training.py")


@dataclass(frozen=True, kw_only=True)
class SubmitResult:
    """A submitted run."""

    run: str
    run_folder: Path
    job_id: str
    cluster: Cluster
    shape: str
    notes: tuple[str, ...]
    chain: tuple[str, ...] = ()
    """Job ids of a chain, the first one first."""


def submit(plan: Plan, around: Surroundings, *, books: Books | None = None) -> SubmitResult:
    """Write the run folder and hand the job over.

    Whatever goes wrong on the way, also ^C: either the job is queued and recorded, or
    nothing of it is left.

    Args:
        books: submitit, where it is loaded already; it is ended.

    Raises:
        SubmitRejected, ToolMissing: nothing is queued, and the run folder is gone again.
        WouldOverwrite: somebody made a folder of that name meanwhile.
    """
    run = RunFolder(Path(plan.manifest.run_folder))
    if plan.manifest.cluster == "slurm":
        process.find_tool("sbatch", needed_for="submit a job", path=around.environ.get("PATH"))
    with contextlib.ExitStack() as stack:
        if plan.manifest.cluster == "slurm":
            # Ended here: whoever called may wait for the run for days.
            books = stack.enter_context(books or Books(around.environ))
        return _submit(plan, around, run, books)


def _submit(plan: Plan, around: Surroundings, run: RunFolder, books: Books | None) -> SubmitResult:
    plan = pack_data(plan)
    make_folder(run.path)
    job_ids: list[str] = []
    warnings: list[str] = []
    try:
        materialize(plan, run, around)
        for _ in range(max(1, plan.manifest.chain)):
            job_id, said = _start(plan, run, around, after=job_ids[-1] if job_ids else None, books=books)
            job_ids.append(job_id)
            warnings.extend(said)
        chain = tuple(job_ids) if plan.manifest.chain else ()
        record(plan, run, job_ids[0], chain=chain)
    except BaseException as error:
        undo(plan, run, around, error, job_ids)
        raise
    return SubmitResult(
        run=plan.manifest.run,
        run_folder=run.path,
        job_id=job_ids[0],
        cluster=plan.manifest.cluster,
        shape=plan.request.shape,
        notes=(*plan.notes, *(f"sbatch: {line}" for line in dict.fromkeys(warnings))),
        chain=chain,
    )


def pack_data(plan: Plan) -> Plan:
    """Pack the data folders of a run that no run before had in this state."""
    stage = plan.manifest.stage
    if stage is None or all(folder.tar for folder in stage.data):
        return plan
    from hpcenv.node import data_folder

    store = packed_folder(Path(plan.manifest.run_folder))
    packed = replace(stage, data=tuple(data_folder.pack(folder, store) for folder in stage.data))
    return replace(plan, manifest=replace(plan.manifest, stage=packed))


def make_folder(path: Path) -> None:
    """Make the run folder; from here on it is ours, and ours to remove."""
    try:
        path.mkdir(parents=True)
        # A submission that is killed from here on leaves a folder by which it is known: `steps/runs.py`.
        (RunFolder(path).code / "hpcenv").mkdir(parents=True)
    except FileExistsError as error:
        raise WouldOverwrite(f"the run folder `{path}` exists", hint="choose another --run name") from error
    except OSError as error:
        hint = "--runs DIR, or `runs` under [paths] in hpcenv.toml, names a folder that you can write to"
        raise FileUnusable(f"cannot make the run folder `{path}`", why=error.strerror, hint=hint) from error


def record(plan: Plan, run: RunFolder, job_id: str, *, chain: tuple[str, ...] = ()) -> None:
    """Write how the run came to be."""
    submission = Submission(
        schema=wire.SCHEMA,
        run=plan.manifest.run,
        cluster=plan.manifest.cluster,
        job_id=job_id,
        submitted=time.time(),
        command=plan.command,
        chain=chain,
        nodes=plan.manifest.nodes,
    )
    wire.write(submission, run.submission)


def undo(plan: Plan, run: RunFolder, around: Surroundings, error: BaseException, job_ids: Sequence[str]) -> None:
    """Leave neither a job without its folder nor a folder without its job.

    Args:
        job_ids: of the jobs that are known to be queued.
    """
    if isinstance(error, SubmitRejected):
        error.why = "\n".join(filter(None, (error.why, f"asked for {', '.join(plan.asked)}" if plan.asked else "")))
    try:
        if plan.manifest.cluster == "local":
            _stop_local(job_ids[0] if job_ids else None)
        else:
            # The last one first: what waits for another one must not start when that ends.
            for job_id in reversed(job_ids):
                slurm.cancel(job_id, around.environ)
            if not isinstance(error, (SubmitRejected, ToolMissing)) or isinstance(error, SubmitUncertain):
                slurm.cancel_others(str(run.path), plan.manifest.run, job_ids, around.environ)
    except HpcenvError as problem:
        if isinstance(error, HpcenvError):
            error.why = f"{error.why}\nand whether it is queued cannot be told: {problem.what}"
            name = plan.manifest.run
            look = f"`squeue --name={name}` lists it if it is, and `hpcenv status {name}` says so"
            error.hint = f"{look}; its folder is kept: {run.path}"
        return
    need_image(plan, run, needed=False)
    shutil.rmtree(run.path, ignore_errors=True)


def need_image(plan: Plan, run: RunFolder, *, needed: bool) -> None:
    """Let the store know that this run needs its SIF, so that nobody prunes it under a queued job.

    A store that is not ours to write to keeps its images by its owner's decision.
    """
    image = Path(plan.manifest.environment.sif)
    name = re.fullmatch(r"sha256-([0-9a-f]{64})\.sif", image.name)
    if name is None or image.parent.name != "images":
        return
    with contextlib.suppress(HpcenvError):
        from hpcenv.adapters.store import open_store

        store, digest = open_store(image.parents[1]), f"sha256:{name[1]}"
        store.add_root("run", run.path, [digest] if needed else [])
        if needed:
            store.remember(digest)


def _stop_local(job_id: str | None) -> None:
    if job_id is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(job_id.rpartition("-")[2]), signal.SIGTERM)


def materialize(plan: Plan, run: RunFolder, around: Surroundings) -> None:
    """Write everything the nodes need, the manifest last."""
    with contextlib.ExitStack() as stack:
        copied = None if plan.source is None else stack.enter_context(snapshot.make(plan.source, run, around.environ))
        copy_code(run)
        _write_records(plan, run)
        if plan.source is not None and copied is not None:
            # What is verified is the script, or the module that holds the function.
            sha256 = "" if plan.files else plan.manifest.script_sha256
            snapshot.require_unchanged(plan.source, copied, sha256, around.environ)
    wire.write(plan.manifest, run.manifest)


def _write_records(plan: Plan, run: RunFolder) -> None:
    for name, content in plan.files.items():
        target = run.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    wire.write_text(plan.lockfile_text, run.lockfile)
    if plan.script:
        wire.write_text(plan.script, run.script, mode=0o755)


def copy_code(run: RunFolder) -> None:
    """Copy what the nodes run, and what the ranks can import.

    Also what Python has compiled of it already, as it lies beside an installed package: steps on the nodes then
    compile nothing if their Python is of this version. It counts only with the time and size of its source.
    """
    package = Path(node.__file__).parents[1]
    names = [*_NODE_CODE]
    for folder in _NODE_FOLDERS:
        names += [f"{folder}/{source.name}" for source in sorted((package / folder).glob("*.py"))]
    for folder in dict.fromkeys(os.path.dirname(name) for name in names):
        (run.code / "hpcenv" / folder / "__pycache__").mkdir(parents=True, exist_ok=True)
    for name in names:
        folder, _, module = name.rpartition("/")
        compiled = f"{folder}/__pycache__/{module[:-3]}.{sys.implementation.cache_tag}.pyc"
        _copy(f"{package}/{name}", f"{run.code}/hpcenv/{name}")
        with contextlib.suppress(FileNotFoundError, PermissionError):
            _copy(f"{package}/{compiled}", f"{run.code}/hpcenv/{compiled}")
    _copy(f"{package}/node/step.py", str(run.step))
    for name in _RANK_CODE:
        target = run.inside / "hpcenv" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(f"{package}/{name}", str(target))


def _copy(source: str, target: str) -> None:
    """Copy a small file with its time; `shutil` takes three times as long, for eighty files of each submission."""
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(reading)
        content = os.read(reading, status.st_size + 1)
    finally:
        os.close(reading)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        if len(content) != status.st_size or os.write(writing, content) != len(content):
            raise OSError(errno.EIO, "not copied as a whole", target)
        os.utime(writing, ns=(status.st_atime_ns, status.st_mtime_ns))
    finally:
        os.close(writing)


def _start(
    plan: Plan, run: RunFolder, around: Surroundings, *, after: str | None, books: Books | None
) -> tuple[str, tuple[str, ...]]:
    """Start the job, or the next link of a chain; return its id and what sbatch warned about."""

    def keep_image() -> None:
        if after is None:
            need_image(plan, run, needed=True)

    if plan.manifest.cluster == "slurm":
        submitted = submitit_bridge.submit(
            task=LaunchTask,
            run_folder=str(run.path),
            folder=run.submitit,
            script=run.script,
            nodes=plan.request.nodes + plan.request.spare,
            minutes=plan.request.time_minutes,
            environ=around.environ,
            # However the link before ends: `begin` looks whether there is something left to do.
            options=() if after is None else (f"--dependency=afterany:{after}",),
            books=books,
            # Long before the job can start, and nobody waits for it.
            meanwhile=keep_image,
        )
        return submitted.job_id, submitted.warnings
    keep_image()
    # `open` appends nothing here, but keeps local and Slurm runs alike: one growing log.
    with open(run.log, "ab") as log:
        child = process.start(
            [sys.executable, "-I", str(run.step), "local", str(run.path)],
            env=slurm.clean_environment(around.environ),
            cwd=run.path,
            stdout=log,
            stderr=log,
            new_session=True,
        )
    # A program that submits and goes on must not keep it as a zombie.
    threading.Thread(target=child.wait, daemon=True).start()
    return f"local-{child.pid}", ()
