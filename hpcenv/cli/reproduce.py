"""`hpcenv reproduce`: repeat a run of somebody else, and say whether the result is the same. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import click

from hpcenv.cli import _accept, _duration, _progress, _render
from hpcenv.cli import submit as submit_cli
from hpcenv.cli._dashes import WithDashes, after_dashes
from hpcenv.cli._submit_options import GroupedCommand, submit_options, table_values
from hpcenv.cli.wait import tell_state
from hpcenv.errors import (
    Command,
    ImageUnavailable,
    Interrupted,
    JobFailed,
    LockfileInvalid,
    NotComparable,
    Status,
    UsageError,
)
from hpcenv.locking.image_source import locked_sif
from hpcenv.locking.project_image import build
from hpcenv.project import stale
from hpcenv.project.acceptance import Asked
from hpcenv.project.lockfile import ContainerTable, Lockfile
from hpcenv.project.workspace import SPEC_NAME, Workspace, read_lockfile
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction import reproduction_text
from hpcenv.reproduction.attainable import expect, expect_after
from hpcenv.reproduction.bundle import image as bundle_image
from hpcenv.reproduction.bundle.archive import Archive, counted
from hpcenv.reproduction.bundle.unpacked import unpack_once
from hpcenv.reproduction.code_copy import copy_code, folder_of_submission
from hpcenv.reproduction.compare import Steps, compare
from hpcenv.reproduction.cost import estimate, proofs_cost
from hpcenv.reproduction.measured import OF_RANKS
from hpcenv.reproduction.record import RunRecord, read_record
from hpcenv.reproduction.reproduction import Reproduction, Target, find_target, proved, verdict_of, why_rejected
from hpcenv.reproduction.rungs import STEPS, Rung, RungPlan, plan_rung
from hpcenv.reproduction.same_code import code_differences
from hpcenv.runs.entries import open_run
from hpcenv.runs.status import RunStatus
from hpcenv.runs.wait import exit_status_of, wait_for
from hpcenv.submission import request, rerun
from hpcenv.submission.plan import PlannedSource
from hpcenv.submission.plan_job import plan_code, plan_job
from hpcenv.submission.request import CopiedCode
from hpcenv.submission.submit import submit

_STATUS = {
    "proved": 0, "planned": 0, "reproduced-bitwise": 0, "reproduced-within": Status.WITHIN_TOLERANCE,
    "not-reproduced": Status.RESULTS_DIFFER, "not-proved": Status.RESULTS_DIFFER,
    "not-comparable": NotComparable.exit_status,
}  # fmt: skip


class _ReproduceCommand(WithDashes, GroupedCommand):
    """A command with the options of `submit`; what follows `--` replaces the arguments of the script."""


@click.command("reproduce", cls=_ReproduceCommand)
@click.argument("target")
@click.option(
    "--rung", type=click.IntRange(0, 3), default=0, show_default=True, help="How much is repeated, see above."
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=STEPS, show_default=True, metavar="N",
    help="How many optimizer steps rungs 1 and 2 repeat.",
)  # fmt: skip
@click.option("--copy", "copy_to", metavar="DIR", help="Use the run's own copy of its code, put into this new folder.")
@click.option("--allow-changed", is_flag=True, help="Go on if the code here is not the code of the run.")
@click.option("--dry-run", is_flag=True, help="Say what it costs and what must be accepted. Nothing is submitted.")
@submit_options
@_accept.option
@click.option(
    "--timeout", metavar="TIME", callback=_duration.parse_seconds,
    help="Wait at most this long, then end with exit status 124; the run continues. 90 (seconds), 30m, 2h, 1d.",
)  # fmt: skip
@_render.json_option
@click.pass_context
def command(
    context: click.Context, /, target: str, rung: int, steps: int, copy_to: str | None, allow_changed: bool,
    dry_run: bool, accept: str | None,
    timeout: float | None, as_json: bool, **params: Any,
) -> int:  # fmt: skip
    """Repeat TARGET, a run of somebody else, and say whether the result is the same.

    TARGET is a run folder, a run name, a job id, a bundle or a lockfile. Rungs:

    \b
        0  proofs from the files: no job, no GPU, no container, no network
        1  the first steps on one node, with the same global batch
        2  the first steps in the same shape
        3  the whole run in the same shape

    It says first what it costs and what must be accepted. Then it gets the image: it is here, or
    in the bundle, or fetched by its digest. Then it submits, waits and compares. Options of
    `hpcenv submit` apply to the new run. Ends with 0 if it is reproduced to the last bit, 40
    within the tolerance, 41 if not, 42 if nothing can be compared.
    """  # noqa: D301  (click's mark for "do not wrap")
    found = find_target(_render.cwd(), _unpacked(target, as_json=as_json), runs=params["runs_dir"])
    proofs = found.proofs()
    if rung == 0:
        return _show(proved(found, proofs, proofs_cost()), as_json=as_json)
    typed = {
        name: value
        for name, value in table_values(params).items()
        if name != "runs_dir" and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    wish = _Wish(
        rung=cast("Rung", rung), steps=steps, typed=typed, args=after_dashes(), accept=accept, timeout=timeout,
        allow_changed=allow_changed, dry_run=dry_run, as_json=as_json,
    )  # fmt: skip
    job = _prepare(found, wish, copy_to)
    page = Reproduction(
        target=found.name, rung=wish.rung, verdict="planned", headline="nothing is submitted yet", proofs=proofs,
        cost=job.cost, asks=_accept.reviewed(job.workspace, job.recorded), notes=job.notes,
        expected=expect(
            job.record, world_size=job.plan.world_size, accumulated=job.plan.factor > 1, args=wish.args,
            lockfile=job.other_lockfile,
        ),
        image=job.image,
    )  # fmt: skip
    if dry_run:
        return _show(page, as_json=as_json)
    if not as_json:
        for line in reproduction_text.before_lines(page):
            _render.tell(line)
    _accept.require(job.workspace, accept, as_json=as_json, more=job.recorded)
    return _show(_carry_out(found, job, page, wish), as_json=as_json)


def _unpacked(target: str, *, as_json: bool) -> str:
    """Return the folder of a bundle, which is unpacked here once; another target unchanged.

    Raises:
        BundleInvalid: it is no bundle, or was changed, or would write outside its folder; nothing is written then.
        WouldOverwrite: the folder exists, and is not this bundle.
    """
    path = Path(os.path.abspath(_render.cwd() / target))
    if not path.is_file() or path.suffix == ".toml":
        return target
    with _progress.shown(as_json=as_json) as on_event, Archive(path) as archive:
        folder = _render.cwd() / archive.folder
        written = unpack_once(archive, folder, step=counted(on_event, "stage", path.name, archive.size))
    _render.tell(f"unpacked {path.name} to {folder}" if written else f"{path.name} was unpacked before, to {folder}")
    return str(folder)


@dataclass(frozen=True, kw_only=True)
class _Wish:
    """What the user typed."""

    rung: Rung
    steps: int
    typed: dict[str, Any]
    args: tuple[str, ...] | None
    accept: str | None
    timeout: float | None
    allow_changed: bool
    dry_run: bool
    as_json: bool


@dataclass(frozen=True, kw_only=True)
class _PreparedJob:
    """What will be submitted, from which project."""

    workspace: Workspace
    folder: Path
    plan: RungPlan
    record: RunRecord
    manifest: Manifest
    locked: Lockfile
    has_image: bool
    bundled: Path | None
    other_lockfile: str
    other_args: bool
    cost: Any
    recorded: Sequence[Asked]
    notes: tuple[str, ...]

    @property
    def image(self) -> str:
        """Where the image will come from, in words."""
        if self.has_image:
            return "here"
        return "in the bundle" if self.bundled is not None else "not here: it is fetched by its digest"


def _prepare(found: Target, wish: _Wish, copy_to: str | None) -> _PreparedJob:
    """Decide everything about the new run; the only thing that is written is a copy of the code."""
    if found.run is None or found.manifest is None or found.record is None:
        raise UsageError(
            f"`{found.name}` is a lockfile, which names an environment and no command",
            why=f"rung {wish.rung} repeats a run",
            hint="name the run folder of the authors; --rung 0 proves the lockfile",
        )
    workspace, folder, copied, notes = _project(found.run, found.manifest, copy_to)
    old = rerun.read_options(found.run.path, found.record.command)
    notes = (*notes, *rerun.notes_on_gone(found.run.path))
    given = request.parse_flags(wish.typed)
    steps = _steps(found.record, wish.steps)
    plan = plan_rung(
        old, given, wish.rung, shape=(found.record.shape.nodes, found.record.shape.nproc_per_node),
        args=found.manifest.args if wish.args is None else wish.args,
        one_node=workspace.project.reproduce.one_node, steps=steps,
    )  # fmt: skip
    own_lock = "lock" not in given
    workspace = workspace.for_lock(old.lock if own_lock else plan.options.lock)
    lockfile = found.lockfile if own_lock else workspace.lockfile_path(plan.options.lock)
    locked = read_lockfile(lockfile)
    name = plan.options.name or f"{found.name.replace('/', '-')[:60]}-rung-{wish.rung}"
    options = replace(plan.options, name=rerun.free_name(name, workspace.runs), copied=copied)
    if own_lock:
        options = rerun.with_own_lockfile(options, found.run)
    else:
        notes = (*notes, f"the environment is that of {lockfile}, not that of the run")
    if plan.left_out:
        notes = (*notes, f"options for the authors' cluster are left out: {', '.join(plan.left_out)}")
    has_image = locked.container is None or locked_sif(workspace, locked.container).is_file()
    bundled = None if has_image or not own_lock else bundle_image.find_bundled(found.run.path)
    cost = estimate(
        found.record, locked, nodes=options.nodes or 1, steps=plan.steps, has_image=has_image or bundled is not None,
        slower=plan.factor,
    )  # fmt: skip
    recorded = rerun.asked_by_record(options, given)
    code, script_sha256 = plan_code(workspace, options, replace(submit_cli.context_of(), cwd=folder))
    changed = _require_same_code(
        found.run, found.manifest, code.source, script_sha256, allow=wish.allow_changed, is_copy=copied is not None
    )
    return _PreparedJob(
        workspace=workspace, folder=folder, plan=replace(plan, options=options), record=found.record,
        manifest=found.manifest, locked=locked, has_image=has_image, bundled=bundled, cost=cost,
        other_lockfile="" if own_lock else str(lockfile), other_args=wish.args not in (None, found.manifest.args),
        recorded=recorded, notes=(*notes, *changed),
    )  # fmt: skip


def _steps(record: RunRecord, wanted: int) -> int:
    """Return how many steps to repeat: not more than the run had."""
    done = max((one.last_step for one in record.metrics if one.source in OF_RANKS), default=0)
    return min(wanted, done) if done else wanted


def _project(
    run: RunFolder, manifest: Manifest, copy_to: str | None
) -> tuple[Workspace, Path, CopiedCode | None, tuple[str, ...]]:
    """Return the project that the new run uses, the folder in it from which it is submitted, and the run's own copy."""
    here = _render.cwd()
    in_project = any((folder / SPEC_NAME).is_file() for folder in (here, *here.parents))
    if in_project and copy_to is None:
        return _render.open_project(), here, None, ()
    target = Path(os.path.abspath(here / (copy_to or f"{run.path.name}-code")))
    copy = copy_code(run, manifest, target)
    folder = folder_of_submission(manifest, target)
    workspace = _render.open_project(folder)
    return workspace, folder, copy.code, (f"the code is the run's own copy, in {target}", *copy.left_out)


def _carry_out(found: Target, job: _PreparedJob, page: Reproduction, wish: _Wish) -> Reproduction:
    """Get the image, submit, wait, compare."""
    job, image = _get_image(job, wish)
    context = replace(submit_cli.context_of(), cwd=job.folder, command=request.command_of(job.plan.options))
    plan = plan_job(job.workspace, job.plan.options, context)
    # Once more: to get the image may have taken long.
    _require_same_code(
        _run_of(found), job.manifest, plan.source, plan.manifest.script_sha256,
        allow=wish.allow_changed, is_copy=job.plan.options.copied is not None,
    )  # fmt: skip
    result = submit(plan, context)
    _render.tell(f"submitted {result.run}: {result.shape}, job {result.job_id}")
    folder = result.run_folder
    status = _wait(folder, wish)
    page = replace(
        page, image=image, run=result.run, run_folder=folder, outcome=status.state,
        notes=(*page.notes, *result.notes),
    )  # fmt: skip
    if exit_status_of(status) != 0:
        raise JobFailed(
            f"{result.run} did not complete: {status.state}",
            why="\n".join((status.detail or f"its exit status is {exit_status_of(status)}", *why_rejected(folder))),
            hint=Command("hpcenv", "report", str(folder)),
        )
    return _judged(page, found, folder, job)


def _run_of(found: Target) -> RunFolder:
    assert found.run is not None  # `_prepare` refuses a lockfile
    return found.run


def _judged(page: Reproduction, found: Target, new: Path, job: _PreparedJob) -> Reproduction:
    try:
        compared = compare(_render.cwd(), str(_run_of(found).path), str(new), steps=Steps(last=job.plan.steps))
    except NotComparable as error:
        return replace(
            page,
            verdict="not-comparable",
            headline=f"not comparable: {error.what}",
            notes=(*page.notes, error.why or ""),
        )
    accumulated = job.plan.factor > 1 and not job.other_args
    expected = expect_after(job.record, read_record(new), compared.causes, accumulated=accumulated)
    verdict, headline = verdict_of(compared, expected, page.rung)
    return replace(page, verdict=verdict, headline=headline, comparison=compared, expected=expected)


def _get_image(job: _PreparedJob, wish: _Wish) -> tuple[_PreparedJob, str]:
    """Get the image from the bundle or by its digest; return the job that uses it, and how, in words."""
    container = job.locked.container
    if container is None:
        return job, 'the environment of this machine (`image = "host"`), compared with the lockfile by the gate'
    if job.has_image:
        return job, f"was here, {container.digest[:19]}..."
    if job.bundled is not None:
        with _progress.shown(as_json=wish.as_json) as on_event:
            step = counted(on_event, "verify", job.bundled.name, job.bundled.stat().st_size)
            workspace = bundle_image.use_bundled(job.workspace, container, job.bundled, on_bytes=step)
        return replace(job, workspace=workspace), f"from the bundle, sha256 {container.sif.sha256[:12]}..."
    try:
        return job, _fetch_image(job, container, as_json=wish.as_json)
    except ImageUnavailable as error:
        before = (*error.hint_parts, "\nor ") if error.hint_parts else ()
        bundle = Command("hpcenv", "bundle", "make", "RUN", "--with-sif", "FILE")
        raise error.changed(hint=(*before, "ask the authors for a bundle with the image: ", bundle)) from error


def _fetch_image(job: _PreparedJob, container: ContainerTable, *, as_json: bool) -> str:
    """Fetch the image by its digest; return how, in words."""
    if job.locked.asked != stale.asked_by(job.workspace.project):
        raise LockfileInvalid(
            f"`{job.workspace.spec}` names another image than the lockfile of the run",
            why=f"{job.workspace.project.image} in place of {job.locked.asked.image}",
            hint="--copy DIR uses the run's own copy of its project",
        )
    with _progress.shown(as_json=as_json) as on_event:
        build(job.workspace, before=job.locked, environ=os.environ, on_event=on_event)
    return f"fetched by its digest, {container.digest[:19]}..."


def _require_same_code(
    run: RunFolder, before: Manifest, now: PlannedSource | None, script_sha256: str, *, allow: bool, is_copy: bool
) -> tuple[str, ...]:
    """Return how the code differs from that of the run, in words.

    Args:
        is_copy: the code is the run's own copy already.

    Raises:
        UsageError: it differs, and that is not allowed.
    """
    found = code_differences(run, before, now, script_sha256)
    if found and not allow:
        commit = "" if before.source is None else before.source.commit
        own = "" if is_copy else "check out that commit, or use the run's own copy: --copy DIR, or "
        raise UsageError(
            f"this is not the code of {before.run}",
            why="\n".join((*found, *([f"the run had commit {commit}"] if commit else []))),
            hint=f"{own}add --allow-changed",
        )
    return found


def _wait(folder: Path, wish: _Wish) -> RunStatus:
    def on_status(status: RunStatus) -> None:
        if not wish.as_json:
            tell_state(status)

    run = open_run(folder)
    try:
        return wait_for([run], environ=os.environ, pause=time.sleep, on_status=on_status, timeout=wish.timeout)[0]
    except KeyboardInterrupt as stop:
        hint = Command("hpcenv", "cancel", str(folder))
        raise Interrupted(f"interrupted; {run.manifest.run} continues", hint=hint) from stop


def _show(page: Reproduction, *, as_json: bool) -> int:
    status = _STATUS[page.verdict]
    if as_json:
        _render.verdict_on("reproduce", page, ok=status == 0)
    else:
        _render.say(reproduction_text.render(page))
    return status
