"""`hpcenv submit`: write the folder of a planned run, and give the job to Slurm or start it here.

Runs on: LOGIN NODE. The run folder is written before sbatch is called.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv import filesystem, process
from hpcenv.cluster import slurm, slurm_command
from hpcenv.errors import (
    Command,
    FileUnusable,
    HpcenvError,
    SubmitRejected,
    SubmitUncertain,
    ToolMissing,
    WouldOverwrite,
)
from hpcenv.identity.stage import data_folder
from hpcenv.image.store.store_folder import open_store
from hpcenv.project.context import Context
from hpcenv.records.codec import SCHEMA
from hpcenv.records.files import save_record, sync, write_text
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.submission import Submission
from hpcenv.submission import after, host_packages, hub_cache, kept_secrets, local_limits, locked_container, snapshot
from hpcenv.submission.node_code import copy_node_code, share_archive
from hpcenv.submission.plan import Plan
from hpcenv.submission.request import Cluster
from hpcenv.submission.run_data import packed_folder

# If several waits for the disk run at the same time, they take as long as one wait.
_WAITS_AT_ONCE = 16


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
    """Job ids of a chain, in the order of its jobs."""


def submit(plan: Plan, context: Context, *, any_packages: bool = False) -> SubmitResult:
    """Write the run folder and submit the job.

    If something fails, or the user types ^C, there are two possible results: the job is queued and recorded, or no job
    and no files remain.

    Args:
        any_packages: submit even if the host environment differs, because the user wants to see what the nodes report.

    Raises:
        LockfileStale: the packages of the host environment are not the locked packages. Nothing is queued.
        SubmitRejected, ToolMissing: nothing is queued, and the run folder is removed if it was made.
        WouldOverwrite: a folder with the name of the run was made in the meantime.
    """
    run = RunFolder(Path(plan.manifest.run_folder))
    on_slurm = plan.manifest.cluster == "slurm"
    if on_slurm:
        process.find_tool("sbatch", needed_for="submit a job", path=context.environ.get("PATH"))
    changed = () if any_packages else host_packages.compare(plan.manifest, context)
    wait_for_earlier(plan, context)
    notes = (*plan.notes, *changed, *locked_container.notes_on_sif(plan.manifest.environment, context.environ))
    plan = pack_data(plan)
    context, own = kept_secrets.without(context, plan.secret_values), context
    make_folder(run.path)
    job_ids: list[str] = []
    warnings: list[str] = []
    try:
        materialize(plan, run, context)
        kept_secrets.write(plan.manifest, plan.secret_values, own)
        if on_slurm:
            wait_for_disk(run)
        for _ in range(max(1, plan.manifest.chain)):
            job_id, said = _start(plan, run, context, after=job_ids[-1] if job_ids else None)
            job_ids.append(job_id)
            warnings.extend(said)
        chain = tuple(job_ids) if plan.manifest.chain else ()
        record(plan, run, job_ids[0], chain=chain)
    except BaseException as error:
        reported = undo(plan, run, context, error, job_ids)
        if reported is error:
            raise
        raise reported from error
    return SubmitResult(
        run=plan.manifest.run,
        run_folder=run.path,
        job_id=job_ids[0],
        cluster=plan.manifest.cluster,
        shape=plan.request.shape,
        notes=(*notes, *dict.fromkeys(warnings)),
        chain=chain,
    )


def wait_for_earlier(plan: Plan, context: Context) -> None:
    """Wait for the runs of `--after` for which Slurm cannot wait."""
    if plan.after.waited_for:
        after.wait(plan.after.waited_for, context)


def pack_data(plan: Plan) -> Plan:
    """Pack the data folders of a run. If an earlier run packed a folder in the same state, it is not packed again."""
    stage = plan.manifest.stage
    if stage is None or all(folder.tar for folder in stage.data):
        return plan
    store = packed_folder(Path(plan.manifest.run_folder))
    packed = replace(stage, data=tuple(data_folder.pack(folder, store) for folder in stage.data))
    return replace(plan, manifest=replace(plan.manifest, stage=packed))


def make_folder(path: Path) -> None:
    """Make the run folder. After this call, a failed submission may remove the folder."""
    try:
        path.mkdir(parents=True)
        # If the submission is killed later, this folder remains. `runs/entries.py` recognises the run by this folder.
        (RunFolder(path).code / "hpcenv").mkdir(parents=True)
    except FileExistsError as error:
        raise WouldOverwrite(f"the run folder `{path}` exists", hint="choose another name: --name NAME") from error
    except OSError as error:
        hint = "--runs-dir DIR, or `runs` under [paths] in hpcenv.toml, names a folder that you can write to"
        raise FileUnusable(f"cannot make the run folder `{path}`", why=error.strerror, hint=hint) from error


def wait_for_disk(run: RunFolder, *elements: Path) -> None:
    """Wait until the files that the first step of the job reads are on the disk.

    A new file may be only in the memory of this node, although other nodes see the file. If the login node failed
    before the file is on the disk, a queued job would find no manifest.

    Args:
        elements: for a sweep, the folders of its elements. The job of an element reads the files in the element's
            folder.

    Raises:
        FileUnusable: a file cannot be written, because the disk is full or a quota is exceeded.
    """
    # The job reads these folders first. They contain the records, the batch script, and the steps with their modules.
    folders = (run.path, run.code, *elements)
    files = (Path(entry) for folder in folders for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
    # The entry of a folder is in its parent folder. This submission may also have made the parent folder.
    paths = (*files, *folders, *run.path.parents[:2])
    try:
        with ThreadPoolExecutor(_WAITS_AT_ONCE) as pool:
            for wait in [pool.submit(sync, path) for path in paths]:
                wait.result()
    except OSError as error:
        raise filesystem.refused(Path(error.filename), error) from error


def record(plan: Plan, run: RunFolder, job_id: str, *, chain: tuple[str, ...] = ()) -> None:
    """Write the record of the submission."""
    submission = Submission(
        schema=SCHEMA,
        run=plan.manifest.run,
        cluster=plan.manifest.cluster,
        job_id=job_id,
        submitted=time.time(),
        command=plan.command,
        chain=chain,
        nodes=plan.manifest.nodes,
        verifies=not plan.manifest.launches,
        after=plan.after.names,
        session="" if plan.manifest.session is None else plan.manifest.session.name,
    )
    save_record(submission, run.submission)
    share_archive(run)


def undo(plan: Plan, run: RunFolder, context: Context, error: BaseException, job_ids: Sequence[str]) -> BaseException:
    """Cancel the jobs and remove the run folder of a failed submission. After this, no job and no folder remain.

    Args:
        job_ids: jobs that are known to be queued.

    Returns:
        The error to raise. If a job may still be queued, the error says so.
    """
    if isinstance(error, SubmitRejected) and plan.requested:
        error = error.changed(why="\n".join(filter(None, (error.why, f"requested: {', '.join(plan.requested)}"))))
    try:
        if plan.manifest.cluster == "local":
            _stop_local(job_ids[0] if job_ids else None)
        else:
            # The last job is cancelled first. If an earlier job of a chain were cancelled first, the next job would
            # start.
            for job_id in reversed(job_ids):
                slurm.cancel(job_id, context.environ)
            if not isinstance(error, (SubmitRejected, ToolMissing)) or isinstance(error, SubmitUncertain):
                slurm.cancel_others(str(run.path), plan.manifest.run, job_ids, context.environ)
    except HpcenvError as problem:
        return _may_be_queued(error, problem, plan.manifest.run, run) if isinstance(error, HpcenvError) else error
    kept_secrets.remove([str(run.path)], context)
    shutil.rmtree(run.path, ignore_errors=True)
    return error


def _may_be_queued(error: HpcenvError, problem: HpcenvError, name: str, run: RunFolder) -> HpcenvError:
    why = f"whether the job is queued is unknown: {problem.what}"
    return error.changed(
        why=f"{error.why}\n{why}" if error.why else why,
        hint=(
            Command("squeue", f"--name={name}"),
            " lists the job if it is queued, and so does ",
            Command("hpcenv", "status", name),
            f"; its folder is kept: {run.path}",
        ),
    )


def use_image(plan: Plan) -> None:
    """Record in the store that the SIF is used. `image prune` removes images that were not used for a long time.

    If the store is read-only, nothing is recorded.
    """
    image = Path(plan.manifest.environment.sif)
    name = re.fullmatch(r"sha256-([0-9a-f]{64})\.sif", image.name)
    if name is None or image.parent.name != "images":
        return
    with contextlib.suppress(HpcenvError):
        open_store(image.parents[1]).remember(f"sha256:{name[1]}")


def _stop_local(job_id: str | None) -> None:
    if job_id is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(job_id.rpartition("-")[2]), signal.SIGTERM)


def materialize(plan: Plan, run: RunFolder, context: Context, *, code_as_files: bool = False) -> None:
    """Write everything that the nodes need. The manifest is written last.

    Args:
        code_as_files: see `as_files` of `copy_node_code`.
    """
    if plan.source is not None:
        snapshot.make(plan.source, run)
    copy_node_code(run, as_files=code_as_files)
    _write_records(plan, run)
    if plan.source is not None:
        # The script is compared with the sha256 in the manifest. A function has other files, and their sha256 is not in
        # the manifest.
        sha256 = "" if plan.files or plan.source.script is None else plan.manifest.script_sha256
        snapshot.require_unchanged(plan.source, sha256, context.environ)
    save_record(plan.manifest, run.manifest, durable=False)


def _write_records(plan: Plan, run: RunFolder) -> None:
    for name, content in plan.files.items():
        target = run.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    hub_cache.write(plan.hub, run)
    # One wait at the end (`wait_for_disk`) is enough for all these files.
    write_text(plan.lockfile_text, run.lockfile, durable=False)
    write_text(plan.requirements, run.requirements, durable=False)
    if plan.record is not None:
        save_record(plan.record, run.request, durable=False)
    if plan.script:
        write_text(plan.script, run.script, mode=0o755, durable=False)


def _start(plan: Plan, run: RunFolder, context: Context, *, after: str | None) -> tuple[str, tuple[str, ...]]:
    """Start the job, or the next job of a chain. Return its id, and notes: warnings of sbatch, texts about limits."""
    if after is None:
        use_image(plan)
    if plan.manifest.cluster == "slurm":
        from hpcenv.submission.submitit_executor import queue_script  # loads submitit

        queued = queue_script(
            run.script,
            environ=context.environ,
            passed=plan.manifest.pass_env,
            # The job always starts. Its step `begin` finds out whether the previous job has completed the training.
            options=() if after is None else (f"--dependency=afterany:{after}",),
        )
        return queued.job_id, tuple(f"sbatch: {line}" for line in queued.warnings)
    environ = slurm_command.clean_environment(context.environ)
    scope = local_limits.scope_for(plan.manifest, environ)
    # The output is appended to the log of the run, in the same way as Slurm appends it.
    with open(run.log, "ab") as log:
        child = process.start(
            [*scope.argv, sys.executable, "-I", str(run.step), "local", str(run.path)],
            env=environ,
            cwd=run.path,
            stdout=log,
            stderr=log,
            held_back=process.END_SIGNALS,
        )
    # If this program continues after the submission, the child would remain as a zombie process without this wait.
    threading.Thread(target=child.wait, daemon=True).start()
    return f"local-{child.pid}", scope.notes
