"""A sweep or array: many runs of one script under one folder, as one job array.

Runs on: LOGIN NODE. The elements are ordinary run folders; code, source and lockfile lie in
the sweep's own folder once, and the elements refer to them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcenv import wire
from hpcenv.adapters import process, slurm, submitit_bridge
from hpcenv.errors import HpcenvError, SubmitUncertain, UsageError
from hpcenv.model import sbatch
from hpcenv.model import sweep as sweep_model
from hpcenv.model.plan import Call, Plan, directives_of, render_script
from hpcenv.model.sweep import Elements
from hpcenv.steps import runs
from hpcenv.steps import submit as submit_step
from hpcenv.steps.plan import built_in, plan_job, read_template, template_path
from hpcenv.steps.request import Asked, Surroundings
from hpcenv.steps.runs import RunState, Submitted
from hpcenv.steps.workspace import Workspace
from hpcenv.wire import Bind, Manifest, RunFolder, Setting, Submission, SweepElement, SweepRecord

ELEMENT = "HPCENV_ELEMENT"


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep that could be submitted.

    Attributes:
        plan: what all elements have in common; its run folder is that of the sweep.
        record: which elements there are.
        script: the batch script of the array.
        arguments: index -> the script's arguments.
        template: text that the elements' batch scripts are made of.
        call: of functions what every rank starts, relative to an element's folder; empty for scripts.
        files: of functions, index -> what an element has of its own: path relative to its folder -> content.
    """

    plan: Plan
    record: SweepRecord
    script: str
    arguments: Mapping[int, tuple[str, ...]]
    template: str
    call: str = ""
    files: Mapping[int, Mapping[str, bytes]] = field(default_factory=dict)

    @property
    def shape(self) -> str:
        """How much it is, in words."""
        count = _runs(len(self.record.elements))
        at_once = f", {self.record.at_once} at a time" if self.record.at_once else ""
        return f"{count}{at_once}, each {self.plan.request.shape}"


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """A submitted sweep.

    Attributes:
        job_id: of the array; an element's is `job_id_INDEX`.
    """

    run: str
    run_folder: Path
    job_id: str
    shape: str
    elements: tuple[SweepElement, ...]
    notes: tuple[str, ...]


def plan_sweep(workspace: Workspace, asked: Asked, around: Surroundings) -> SweepPlan:
    """Decide everything about a sweep; writes and submits nothing.

    Raises:
        HpcenvError: as for `plan_job`, and what makes no sweep.
    """
    if asked.sweep:
        elements = sweep_model.of_sweep(asked.sweep, asked.max_parallel)
        sweep_model.require_names(asked.args, elements.names)
    else:
        elements = sweep_model.of_array(asked.array or "", asked.max_parallel)
    return _plan(workspace, asked, around, elements)


def plan_calls(workspace: Workspace, asked: Asked, around: Surroundings, calls: Sequence[Call]) -> SweepPlan:
    """Decide everything about an array of a function's calls, one run for each; writes and submits nothing.

    Args:
        asked: without script and call; `max_parallel` of them run at a time.
        calls: of one and the same function.

    Raises:
        HpcenvError: as for `plan_job`; more calls than an array has elements.
    """
    first = calls[0]
    own = {path for path in first.files if any(call.files[path] != first.files[path] for call in calls[1:])}
    elements = sweep_model.of_array(f"0-{len(calls) - 1}", asked.max_parallel)
    # On this machine arrays are refused, as any other is.
    asked = replace(asked, array=elements.array.partition("%")[0], call=first)
    plan = _plan(workspace, asked, around, elements)
    common = {path: content for path, content in plan.plan.files.items() if path not in own}
    return replace(
        plan,
        plan=replace(plan.plan, files=common),
        call=first.script,
        files={index: {path: call.files[path] for path in own} for index, call in enumerate(calls)},
    )


def _plan(workspace: Workspace, asked: Asked, around: Surroundings, elements: Elements) -> SweepPlan:
    plan = plan_job(workspace, asked, around)
    record = SweepRecord(
        schema=wire.SCHEMA,
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
        script=_render(plan, elements, around),
        arguments={
            index: sweep_model.arguments(asked.args, values, index) for index, values in elements.values.items()
        },
        template=read_template(template_path(workspace, asked, around)),
    )


def _render(plan: Plan, elements: Elements, around: Surroundings) -> str:
    folder = sbatch.filename_pattern(plan.manifest.run_folder)
    own = {"array": elements.array, "output": f"{folder}/%4a/{RunFolder(Path()).log.name}"}
    pairs = [pair for pair in directives_of(plan.manifest, plan.request) if pair[0] not in own]
    values = {
        "run": sbatch.comment(plan.manifest.run),
        "command": sbatch.comment(sbatch.options(around.command)),
        "directives": sbatch.directives([*pairs, *own.items()]),
        "run_folder": plan.manifest.run_folder,
    }
    return sbatch.render(read_template(built_in("sweep.sbatch")), values)


def element_plan(sweep: SweepPlan, element: SweepElement) -> Plan:
    """Return the plan of one element: what lies in its own run folder."""
    base = sweep.plan.manifest
    folder = str(Path(base.run_folder) / element.folder)
    manifest = replace(
        base,
        run=f"{base.run}/{element.folder}",
        run_folder=folder,
        args=sweep.arguments[element.index],
        script=str(Path(folder) / sweep.call) if sweep.call else base.script,
        settings=_settings(base, element),
        element=element.values,
        # An element's code, source and lockfile are those of the sweep.
        environment=replace(
            base.environment,
            binds=(
                *base.environment.binds,
                *([Bind(source=base.run_folder, target=base.run_folder)] if base.environment.kind == "sif" else []),
            ),
        ),
    )
    script = render_script(
        sweep.template, manifest, sweep.plan.request, python=sys.executable, command=sweep.plan.command
    )
    return replace(sweep.plan, manifest=manifest, script=script)


def _settings(base: Manifest, element: SweepElement) -> tuple[Setting, ...]:
    origin = "--sweep" if element.values else "--array"
    own = Setting(name=ELEMENT, value=str(element.index), origin=origin, reason="which element of the array this is")
    return (*(setting for setting in base.settings if setting.name != ELEMENT), own)


# -- submitting ---------------------------------------------------------------------------


def submit_sweep(sweep: SweepPlan, around: Surroundings) -> SweepResult:
    """Write the folders of all elements and hand the array over: all of it is queued, or nothing is left.

    Raises:
        SubmitRejected, ToolMissing: nothing is queued, and the folder is gone again.
        WouldOverwrite: somebody made a folder of that name meanwhile.
    """
    run = RunFolder(Path(sweep.plan.manifest.run_folder))
    process.find_tool("sbatch", needed_for="submit a job", path=around.environ.get("PATH"))
    sweep = replace(sweep, plan=submit_step.pack_data(sweep.plan))
    submit_step.make_folder(run.path)
    job_ids: list[str] = []
    try:
        _materialize(sweep, run, around)
        submit_step.need_image(sweep.plan, run, needed=True)
        submitted = submitit_bridge.submit_array(script=run.script, environ=around.environ)
        job_ids.append(submitted.job_id)
        _record(sweep.record, run, submitted.job_id, sweep.plan.command)
    except BaseException as error:
        submit_step.undo(sweep.plan, run, around, error, job_ids)
        raise
    return SweepResult(
        run=sweep.record.run,
        run_folder=run.path,
        job_id=submitted.job_id,
        shape=sweep.shape,
        elements=sweep.record.elements,
        notes=(*sweep.plan.notes, *(f"sbatch: {line}" for line in dict.fromkeys(submitted.warnings))),
    )


# What the elements share with the sweep's folder.
_SHARED = ("code", "inside", "lock.toml")


def _materialize(sweep: SweepPlan, run: RunFolder, around: Surroundings) -> None:
    submit_step.materialize(replace(sweep.plan, script=sweep.script), run, around)
    run.manifest.unlink()  # the sweep itself is no run
    common = dataclasses.asdict(sweep.plan.manifest)
    for element in sweep.record.elements:
        plan, own = element_plan(sweep, element), RunFolder(run.path / element.folder)
        own.path.mkdir()
        for name in _SHARED:
            os.symlink(os.path.join("..", name), own.path / name)
        if sweep.call:
            _add_call(sweep, run.path, own.path, sweep.files[element.index])
        _write(own.script, plan.script)
        own.script.chmod(0o755)
        _write(own.manifest, _dumps(common, plan.manifest))
    wire.write(sweep.record, run.sweep)


def _add_call(sweep: SweepPlan, shared: Path, folder: Path, files: Mapping[str, bytes]) -> None:
    """Write what one call has of its own; the rest of its folder is the sweep's."""
    place = Path(sweep.call).parent
    (folder / place).mkdir()
    for path in (shared / place).iterdir():
        os.symlink(os.path.join("..", "..", place, path.name), folder / place / path.name)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _dumps(common: Mapping[str, Any], manifest: Manifest) -> str:
    """Return a manifest as `wire.dumps` does; what a thousand have in common is taken apart once."""
    own = {
        "run": manifest.run,
        "run_folder": manifest.run_folder,
        "args": manifest.args,
        "script": manifest.script,
        "settings": [dataclasses.asdict(setting) for setting in manifest.settings],
        "element": manifest.element,
        "environment": dataclasses.asdict(manifest.environment),
    }
    return json.dumps({**common, **own}, indent=1, sort_keys=True) + "\n"


def _write(path: Path, text: str) -> None:
    """Write a file of a folder that nobody looks into yet: no detour, and no wait for the disk."""
    path.write_text(text, encoding="utf-8")


def _record(record: SweepRecord, run: RunFolder, job_id: str, command: Sequence[str]) -> None:
    now = time.time()
    for element in record.elements:
        submission = Submission(
            schema=wire.SCHEMA,
            run=f"{record.run}/{element.folder}",
            cluster="slurm",
            job_id=f"{job_id}_{element.index}",
            submitted=now,
            command=tuple(command),
        )
        _write(RunFolder(run.path / element.folder).submission, wire.dumps(submission))


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
    """Where a sweep stands.

    Attributes:
        problems: elements whose records cannot be read.
    """

    run: str
    run_folder: Path
    names: tuple[str, ...]
    elements: tuple[ElementState, ...]
    problems: tuple[str, ...] = ()

    @property
    def quiet(self) -> bool:
        """Whether nothing more will happen in any of them."""
        return all(element.state.quiet for element in self.elements)

    @property
    def failed(self) -> tuple[ElementState, ...]:
        """Those that are over and did not end well, in the order of their indices."""
        return tuple(
            e
            for e in self.elements
            if e.state.quiet and not (e.state.state == "completed" and e.state.exit_status in (0, None))
        )

    @property
    def exit_status(self) -> int | None:
        """That of the first element that failed; 0 when all ended well, None while one goes on."""
        if self.failed:
            first = self.failed[0].state.exit_status
            return first or 1
        return 0 if self.quiet and not self.problems else None if not self.quiet else 1


def read_sweep(folder: Path, environ: Mapping[str, str]) -> SweepStatus:
    """Return where a sweep stands: one call of squeue and one of sacct for all its elements.

    Raises:
        RecordInvalid: its record is damaged.
    """
    record = runs.read_sweep_record(folder)
    entries = _entries(folder)
    found, problems = [], []
    for element in record.elements:
        if element.folder in entries:
            found.append((element, entries[element.folder]))
        else:
            problems.append(f"{record.run}/{element.folder}: {runs.problem_of_element(folder / element.folder)}")
    states = runs.read_states([entry for _, entry in found], environ)
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
    sweep = runs.open_folder(folder)
    return {one.folder.path.name: one for one in sweep.elements} if isinstance(sweep, runs.Sweep) else {}


def wait_for_sweep(
    folder: Path,
    *,
    environ: Mapping[str, str],
    pause: Callable[[float], None],
    on_change: Callable[[SweepStatus], None],
) -> SweepStatus:
    """Wait until nothing more will happen in any element.

    Args:
        pause: called with seconds to sleep between two looks.
        on_change: called when some element's state changed.
    """
    seconds, shown, gone = 0.5, "", 0
    while True:
        now = read_sweep(folder, environ)
        counted = counts(now)
        if counted != shown:
            on_change(now)
            shown, seconds = counted, 0.5
        # Accounting may need some seconds more than squeue to know how a job ended.
        gone = gone + 1 if now.quiet and any(not element.state.ended for element in now.elements) else 0
        if all(element.state.ended for element in now.elements) or gone > _LOOKS_AFTER_GONE:
            return now
        pause(seconds)
        seconds = min(10.0, seconds * 1.3)


_LOOKS_AFTER_GONE = 5


def counts(status: SweepStatus) -> str:
    """Return how many elements are in which state: `3 completed, 1 running`."""
    found: dict[str, int] = {}
    for element in status.elements:
        found[element.state.state] = found.get(element.state.state, 0) + 1
    return ", ".join(f"{number} {state}" for state, number in sorted(found.items()))


def rerun_failed(folder: Path, around: Surroundings) -> SweepResult:
    """Queue the elements again that did not end well, in their own folders, as a new array.

    What an earlier start left in them is set aside under `attempts/` when they begin. How they were made
    stays their record: another job runs the same submission.

    Raises:
        UsageError: none failed, or some have not ended yet and may still fail.
        SubmitRejected, SubmitUncertain, ToolMissing: as for a submission; nothing changed.
    """
    status = read_sweep(folder, around.environ)
    failed = status.failed
    if not failed:
        raise UsageError(f"nothing in `{status.run}` failed", why=counts(status) or "no element can be read")
    record = runs.read_sweep_record(folder)
    again = {element.element for element in failed}
    elements = tuple(element for element in record.elements if element.folder in again)
    run = RunFolder(folder)
    spec = sweep_model.array_spec([element.index for element in elements], record.at_once or None)
    known = {element.job_id.partition("_")[0] for element in status.elements}
    try:
        submitted = submitit_bridge.submit_array(
            script=run.script, environ=around.environ, options=(f"--array={spec}",)
        )
    except (SubmitUncertain, KeyboardInterrupt) as error:
        _take_back(record, known, around, error)
        raise
    _record_again(elements, folder, submitted.job_id)
    return SweepResult(
        run=record.run,
        run_folder=folder,
        job_id=submitted.job_id,
        shape=f"{len(elements)} of {_runs(len(record.elements))}",
        elements=elements,
        notes=tuple(f"sbatch: {line}" for line in dict.fromkeys(submitted.warnings)),
    )


def _record_again(elements: Sequence[SweepElement], folder: Path, job_id: str) -> None:
    entries, now = _entries(folder), time.time()
    for element in elements:
        own = entries[element.folder]
        # Not as `_write` does it: somebody may read it at this moment.
        again = replace(own.submission, job_id=f"{job_id}_{element.index}", submitted=now)
        wire.write(again, own.folder.submission)


def _take_back(record: SweepRecord, known: AbstractSet[str], around: Surroundings, error: BaseException) -> None:
    """Cancel an array that was queued although nobody heard of it: its elements still belong to the arrays before.

    Args:
        known: numbers of those.
    """
    try:
        slurm.cancel_others(record.run_folder, record.run, known, around.environ)
    except HpcenvError as problem:
        if isinstance(error, HpcenvError):
            error.why = f"{error.why}\nand whether it is queued cannot be told: {problem.what}"
            error.hint = (
                f"`squeue --name={record.run}` lists it if it is, beside what is left of {', '.join(sorted(known))}"
            )
