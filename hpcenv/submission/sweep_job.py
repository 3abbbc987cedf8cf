"""A sweep or array: many runs of one script in one folder, as one job array.

Runs on: LOGIN NODE. Each element has an ordinary run folder. The node code, the copy of the project, and the lockfile
are only in the folder of the sweep. The elements have links to the node code and the lockfile. When an element begins,
it copies the project from the folder of the sweep.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv import process
from hpcenv.cluster import slurm
from hpcenv.errors import Command, HpcenvError, RunEndUnknown, SubmitUncertain, UsageError, WaitTimeout
from hpcenv.project.context import Context
from hpcenv.project.template import built_in
from hpcenv.project.workspace import Workspace
from hpcenv.records import secret_file
from hpcenv.records import sweep as sweep_model
from hpcenv.records.codec import SCHEMA, encode_record
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Bind, Manifest, Setting, Source
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.submission import Submission
from hpcenv.records.sweep import Elements, SweepElement, SweepRecord
from hpcenv.records.variables import recorded_command
from hpcenv.runs.entries import Submitted, Sweep, open_folder, problem_of_element, read_sweep_record
from hpcenv.runs.state import RunState, read_states
from hpcenv.submission import batch_script, host_packages, kept_secrets
from hpcenv.submission import submit as submit_step
from hpcenv.submission.locked_container import notes_on_sif
from hpcenv.submission.node_code import share_archive
from hpcenv.submission.plan import Call, Plan, directives_of, render_script
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions
from hpcenv.text import plural

ELEMENT = "HPCENV_ELEMENT"


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep that can be submitted.

    Attributes:
        plan: the common part of all elements. The run folder of this plan is the folder of the sweep.
        record: the record of the sweep, which lists the elements.
        script: the batch script of the array.
        arguments: index of an element -> the arguments of the script.
        call: for a function, the file that every rank starts, relative to an element's folder; empty for a script.
    """

    plan: Plan
    record: SweepRecord
    script: str
    arguments: Mapping[int, tuple[str, ...]]
    call: str = ""

    @property
    def shape(self) -> str:
        """The number of runs and their shape, in words."""
        count = plural(len(self.record.elements), "run")
        at_once = f", {self.record.at_once} at a time" if self.record.at_once else ""
        return f"{count}{at_once}, each {self.plan.request.shape}"


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """A submitted sweep.

    Attributes:
        job_id: the job id of the array. For job id 34, the job id of element 2 is `34_2`.
    """

    run: str
    run_folder: Path
    job_id: str
    shape: str
    elements: tuple[SweepElement, ...]
    notes: tuple[str, ...]


def plan_sweep(workspace: Workspace, options: SubmitOptions, context: Context) -> SweepPlan:
    """Decide everything about a sweep. This function does not write or submit anything.

    Raises:
        HpcenvError: as for `plan_job`, or the values do not describe a sweep.
    """
    if options.sweep:
        elements = sweep_model.of_sweep(options.sweep, options.max_parallel)
        sweep_model.require_names(options.args, elements.names)
    else:
        elements = sweep_model.of_array(options.array or "", options.max_parallel)
    return _plan(workspace, options, context, elements)


def plan_calls(workspace: Workspace, options: SubmitOptions, context: Context, call: Call, count: int) -> SweepPlan:
    """Decide everything about an array that calls a function, with one run for each call.

    This function does not write or submit anything.

    Args:
        options: the options, without script and call. At most `max_parallel` runs are active at a time.
        count: the number of calls.

    Raises:
        HpcenvError: as for `plan_job`, or there are more calls than an array can have elements.
    """
    elements = sweep_model.of_array(f"0-{count - 1}", options.max_parallel)
    # Arrays need Slurm. Without Slurm, plan_job refuses them.
    options = replace(options, array=elements.array.partition("%")[0], call=call)
    return replace(_plan(workspace, options, context, elements), call=call.script)


def _plan(workspace: Workspace, options: SubmitOptions, context: Context, elements: Elements) -> SweepPlan:
    plan = plan_job(workspace, options, context)
    record = SweepRecord(
        schema=SCHEMA,
        run=plan.manifest.run,
        run_folder=plan.manifest.run_folder,
        names=elements.names,
        elements=tuple(
            SweepElement(index=index, folder=sweep_model.folder_name(index), values=dict(values))
            for index, values in elements.values.items()
        ),
        at_once=elements.at_once or 0,
    )
    return SweepPlan(
        plan=plan,
        record=record,
        script=_render(plan, elements, context),
        arguments={
            index: sweep_model.arguments(options.args, values, index) for index, values in elements.values.items()
        },
    )


def _render(plan: Plan, elements: Elements, context: Context) -> str:
    folder = batch_script.filename_pattern(plan.manifest.run_folder)
    own = {"array": elements.array, "output": f"{folder}/%4a/{RunFolder(Path()).log.name}"}
    pairs = [pair for pair in directives_of(plan.manifest, plan.request) if pair[0] not in own]
    values = {
        "run": batch_script.comment(plan.manifest.run),
        "command": batch_script.comment(batch_script.options(recorded_command(context.command))),
        "directives": batch_script.directives([*pairs, *own.items()]),
        "run_folder": plan.manifest.run_folder,
    }
    return batch_script.render(built_in("sweep.sbatch").read_text(encoding="utf-8"), values)


def element_plan(sweep: SweepPlan, element: SweepElement) -> Plan:
    """Return the plan of one element. The element's run folder is written from this plan."""
    base = sweep.plan.manifest
    folder = str(Path(base.run_folder) / element.folder)
    manifest = replace(
        base,
        run=f"{base.run}/{element.folder}",
        run_folder=folder,
        args=sweep.arguments[element.index],
        script=str(Path(folder) / sweep.call) if sweep.call else _in_element(base.script, base, folder),
        workdir=_in_element(base.workdir, base, folder),
        source=_source(base, folder),
        secret_values=str(Path(base.secret_values).with_name(secret_file.name_of(folder)))
        if base.secret_values
        else "",
        settings=_settings(base, element),
        element=element.values,
        # The container of an element must see the folder of the sweep, because it has the node code and the lockfile.
        environment=replace(
            base.environment,
            binds=(
                *base.environment.binds,
                *([Bind(source=base.run_folder, target=base.run_folder)] if base.environment.kind == "sif" else []),
            ),
        ),
    )
    script = render_script(manifest, sweep.plan.request, python=sys.executable, command=sweep.plan.command)
    return replace(sweep.plan, manifest=manifest, script=script)


def _source(base: Manifest, folder: str) -> Source | None:
    """Return the description of an element's copy of the project.

    When an element begins, it makes this copy from the sweep's copy.
    """
    if base.source is None:
        return None
    return replace(base.source, folder=_in_element(base.source.folder, base, folder), shared=base.run_folder)


def _in_element(path: str, base: Manifest, folder: str) -> str:
    """Return the path in an element's folder for a path in the sweep's folder; return any other path unchanged."""
    inside = path.startswith(base.run_folder + os.sep)
    return os.path.join(folder, os.path.relpath(path, base.run_folder)) if inside else path


def _settings(base: Manifest, element: SweepElement) -> tuple[Setting, ...]:
    origin = "--sweep" if element.values else "--array"
    own = Setting(
        name=ELEMENT, value=str(element.index), origin=origin, reason="the index of this element of the array"
    )
    return (*(setting for setting in base.settings if setting.name != ELEMENT), own)


# -- submitting ---------------------------------------------------------------------------


def submit_sweep(sweep: SweepPlan, context: Context) -> SweepResult:
    """Write the folders of all elements and submit the array. If the submission fails, no job and no files remain.

    Raises:
        LockfileStale: the packages of the host environment are not the locked packages; nothing is queued.
        SubmitRejected, ToolMissing: Slurm refused the array, or sbatch is missing. Nothing is queued, and the folder of
            the sweep is removed.
        WouldOverwrite: a folder with the name of the sweep was made in the meantime.
    """
    run = RunFolder(Path(sweep.plan.manifest.run_folder))
    process.find_tool("sbatch", needed_for="submit a job", path=context.environ.get("PATH"))
    changed = host_packages.compare(sweep.plan.manifest, context)
    submit_step.wait_for_earlier(sweep.plan, context)
    notes = (*sweep.plan.notes, *changed, *notes_on_sif(sweep.plan.manifest.environment, context.environ))
    sweep = replace(sweep, plan=submit_step.pack_data(sweep.plan))
    context, own = kept_secrets.without(context, sweep.plan.secret_values), context
    submit_step.make_folder(run.path)
    job_ids: list[str] = []
    try:
        _materialize(sweep, run, context)
        _keep_secrets(sweep, own)
        submit_step.wait_for_disk(run, *(run.path / element.folder for element in sweep.record.elements))
        submit_step.use_image(sweep.plan)
        from hpcenv.submission.submitit_executor import queue_script  # loads submitit

        submitted = queue_script(run.script, environ=context.environ, passed=sweep.plan.manifest.pass_env)
        job_ids.append(submitted.job_id)
        _record(sweep.record, run, submitted.job_id, sweep.plan.command)
    except BaseException as error:
        reported = submit_step.undo(sweep.plan, run, context, error, job_ids)
        if not run.path.exists():
            kept_secrets.remove([str(run.path / element.folder) for element in sweep.record.elements], own)
        if reported is error:
            raise
        raise reported from error
    return SweepResult(
        run=sweep.record.run,
        run_folder=run.path,
        job_id=submitted.job_id,
        shape=sweep.shape,
        elements=sweep.record.elements,
        notes=(*notes, *(f"sbatch: {line}" for line in dict.fromkeys(submitted.warnings))),
    )


def _keep_secrets(sweep: SweepPlan, context: Context) -> None:
    """Write a file with the values of secrets for each element. An element removes its file when it has ended."""
    for element in sweep.record.elements if sweep.plan.secret_values else ():
        kept_secrets.write(element_plan(sweep, element).manifest, sweep.plan.secret_values, context)


# Files and folders of the sweep to which the elements have links.
_SHARED = ("code", "inside", "start-hook", "lock.toml", "requirements.txt")


def _materialize(sweep: SweepPlan, run: RunFolder, context: Context) -> None:
    submit_step.materialize(replace(sweep.plan, script=sweep.script), run, context)
    run.manifest.unlink()  # the sweep itself is not a run
    # Each element gets a copy of request.json, because records of a run are not read through links.
    request = run.request.read_text(encoding="utf-8") if run.request.exists() else None
    for element in sweep.record.elements:
        plan, own = element_plan(sweep, element), RunFolder(run.path / element.folder)
        own.path.mkdir()
        for name in _SHARED:
            if os.path.lexists(run.path / name):
                os.symlink(os.path.join("..", name), own.path / name)
        if sweep.call:
            _add_call(sweep, run.path, own.path)
        _write(own.script, plan.script)
        own.script.chmod(0o755)
        _write(own.manifest, encode_record(plan.manifest))
        if request is not None:
            _write(own.request, request)
    save_record(sweep.record, run.sweep)


def _add_call(sweep: SweepPlan, shared: Path, folder: Path) -> None:
    """Make a folder for one call, with links to the files of the sweep.

    The executor writes the job id into the folder.
    """
    place = Path(sweep.call).parent
    (folder / place).mkdir()
    for path in (shared / place).iterdir():
        os.symlink(os.path.join("..", "..", place, path.name), folder / place / path.name)


def _write(path: Path, text: str) -> None:
    """Write a file without a temporary file, because no other process reads this folder yet."""
    path.write_text(text, encoding="utf-8")


def _record(record: SweepRecord, run: RunFolder, job_id: str, command: Sequence[str]) -> None:
    now = time.time()
    for element in record.elements:
        submission = Submission(
            schema=SCHEMA,
            run=f"{record.run}/{element.folder}",
            cluster="slurm",
            job_id=f"{job_id}_{element.index}",
            submitted=now,
            command=tuple(command),
        )
        _write(RunFolder(run.path / element.folder).submission, encode_record(submission))
    share_archive(run)


# -- afterwards ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ElementState:
    """One line of a sweep's table."""

    element: str
    values: dict[str, str]
    job_id: str
    state: RunState


@dataclass(frozen=True, kw_only=True)
class SweepStatus:
    """The state of a sweep.

    Attributes:
        problems: a text for each element whose records cannot be read.
    """

    run: str
    run_folder: Path
    names: tuple[str, ...]
    elements: tuple[ElementState, ...]
    problems: tuple[str, ...] = ()

    @property
    def quiet(self) -> bool:
        """Whether all elements have ended and will not start again."""
        return all(element.state.quiet for element in self.elements)

    @property
    def failed(self) -> tuple[ElementState, ...]:
        """The elements that have ended and did not complete with exit status 0, in the order of their indices."""
        return tuple(
            e
            for e in self.elements
            if e.state.quiet and not (e.state.state == "completed" and e.state.exit_status in (0, None))
        )

    @property
    def exit_status(self) -> int | None:
        """The exit status of the first failed element; 0 if all elements completed; None while elements are active."""
        if self.failed:
            first = self.failed[0].state.exit_status
            return first or RunEndUnknown.exit_status
        return 0 if self.quiet and not self.problems else None if not self.quiet else RunEndUnknown.exit_status


def read_sweep(folder: Path, environ: Mapping[str, str]) -> SweepStatus:
    """Return the state of a sweep. squeue and sacct are called once for all elements.

    Raises:
        RecordInvalid: the record of the sweep is damaged.
    """
    record = read_sweep_record(folder)
    entries = _entries(folder)
    found, problems = [], []
    for element in record.elements:
        if element.folder in entries:
            found.append((element, entries[element.folder]))
        else:
            problems.append(f"{record.run}/{element.folder}: {problem_of_element(folder / element.folder)}")
    states = read_states([entry for _, entry in found], environ)
    return SweepStatus(
        run=record.run,
        run_folder=folder,
        names=record.names,
        elements=tuple(
            ElementState(element=element.folder, values=element.values, job_id=entry.job_ids[-1], state=state)
            for (element, entry), state in zip(found, states, strict=True)
        ),
        problems=tuple(problems),
    )


def _entries(folder: Path) -> dict[str, Submitted]:
    """Return the elements that can be read, by the names of their folders."""
    sweep = open_folder(folder)
    return {one.folder.path.name: one for one in sweep.elements} if isinstance(sweep, Sweep) else {}


def wait_for_sweep(
    folder: Path,
    *,
    environ: Mapping[str, str],
    pause: Callable[[float], None],
    on_change: Callable[[SweepStatus], None],
    timeout: float | None = None,
) -> SweepStatus:
    """Wait until all elements have ended and will not start again.

    Args:
        pause: called between two checks, with the number of seconds to sleep.
        on_change: called when the state of an element has changed.
        timeout: maximum seconds to wait; None for no limit.

    Raises:
        WaitTimeout: an element has not ended within `timeout`.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    seconds, shown, gone = 0.5, "", 0
    while True:
        now = read_sweep(folder, environ)
        counted = counts(now)
        if counted != shown:
            on_change(now)
            shown, seconds = counted, 0.5
        # sacct may show that a job has ended some seconds later than squeue.
        gone = gone + 1 if now.quiet and any(not element.state.ended for element in now.elements) else 0
        if all(element.state.ended for element in now.elements) or gone > _LOOKS_AFTER_GONE:
            return now
        if deadline is not None and (left := deadline - time.monotonic()) <= seconds:
            if left <= 0:
                raise WaitTimeout(
                    f"the sweep `{now.run}` has not ended in time",
                    why=counted,
                    hint=Command("hpcenv", "wait", str(folder)),
                )
            seconds = max(left, 0.05)
        pause(seconds)
        seconds = min(10.0, seconds * 1.3)


_LOOKS_AFTER_GONE = 5


def counts(status: SweepStatus) -> str:
    """Return how many elements are in each state, for example `3 completed, 1 running`."""
    found: dict[str, int] = {}
    for element in status.elements:
        found[element.state.state] = found.get(element.state.state, 0) + 1
    return ", ".join(f"{number} {state}" for state, number in sorted(found.items()))


def rerun_failed(folder: Path, context: Context) -> SweepResult:
    """Queue the failed elements again as a new array, in their old run folders.

    When an element begins, the files of its earlier start are moved to `attempts/`. The element's record of the
    submission gets the new job id and the new time.

    Raises:
        UsageError: no element failed, or the environment lacks the value of a secret.
        SubmitRejected, SubmitUncertain, ToolMissing: as for a submission. The records have not changed.
    """
    status = read_sweep(folder, context.environ)
    failed = status.failed
    if not failed:
        raise UsageError(f"nothing in `{status.run}` failed", why=counts(status) or "no element can be read")
    record = read_sweep_record(folder)
    again = {element.element for element in failed}
    elements = tuple(element for element in record.elements if element.folder in again)
    run = RunFolder(folder)
    spec = sweep_model.array_spec([element.index for element in elements], record.at_once or None)
    known = {element.job_id.partition("_")[0] for element in status.elements}
    folders = [folder / element.folder for element in elements]
    manifests = [load_record(Manifest, RunFolder(path).manifest) for path in folders]
    values, passed = kept_secrets.renew(manifests, context), [name for one in manifests for name in one.pass_env]
    environ = kept_secrets.without(context, values).environ
    try:
        from hpcenv.submission.submitit_executor import queue_script  # loads submitit

        submitted = queue_script(run.script, environ=environ, options=(f"--array={spec}",), passed=passed)
    except (SubmitUncertain, KeyboardInterrupt) as error:
        reported = _take_back(record, known, context, error)
        if reported is error:
            raise
        raise reported from error
    except HpcenvError:
        kept_secrets.remove([str(path) for path in folders], context)
        raise
    _record_again(elements, folder, submitted.job_id)
    return SweepResult(
        run=record.run,
        run_folder=folder,
        job_id=submitted.job_id,
        shape=f"{len(elements)} of {plural(len(record.elements), 'run')}",
        elements=elements,
        notes=tuple(f"sbatch: {line}" for line in dict.fromkeys(submitted.warnings)),
    )


def _record_again(elements: Sequence[SweepElement], folder: Path, job_id: str) -> None:
    entries, now = _entries(folder), time.time()
    for element in elements:
        own = entries[element.folder]
        # `_write` is not used here, because another process may read this file at the same time.
        again = replace(own.submission, job_id=f"{job_id}_{element.index}", submitted=now)
        save_record(again, own.folder.submission)


def _take_back(record: SweepRecord, known: AbstractSet[str], context: Context, error: BaseException) -> BaseException:
    """Cancel an array if sbatch did not report whether it is queued. The elements keep their previous job ids.

    Args:
        known: job ids of the previous arrays.

    Returns:
        The error to raise. If the array may still be queued, the error says so.
    """
    try:
        slurm.cancel_others(record.run_folder, record.run, known, context.environ)
    except HpcenvError as problem:
        if not isinstance(error, HpcenvError):
            return error
        why = f"whether the array is queued is unknown: {problem.what}"
        return error.changed(
            why=f"{error.why}\n{why}" if error.why else why,
            hint=(
                Command("squeue", f"--name={record.run}"),
                f" lists the array if it is queued, together with the other jobs of {', '.join(sorted(known))}",
            ),
        )
    return error
