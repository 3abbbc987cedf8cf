"""The new run of a reproduction: what is submitted, where its image comes from, and the result.

Runs on: LOGIN NODE. `reproduce_target` calls all steps: `plan_new_run` decides, `get_image` and `submit_new_run` act,
`judge_new_run` compares. Before the user accepts the project's requests, hpcenv writes only a copy of the code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcenv.errors import (
    Command,
    ImageUnavailable,
    JobFailed,
    LockfileInvalid,
    NotComparable,
    RecordInvalid,
    UsageError,
)
from hpcenv.locking.image_source import locked_sif
from hpcenv.locking.project_image import build
from hpcenv.progress import OnEvent
from hpcenv.project import acceptance, stale
from hpcenv.project.acceptance import Asked
from hpcenv.project.code_listing import changed_files
from hpcenv.project.context import Context
from hpcenv.project.lockfile import ContainerTable, Lockfile
from hpcenv.project.workspace import SPEC_NAME, Workspace, read_lockfile
from hpcenv.records.code_listing import Listing, digest_of
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction.attainable import expect, expect_after
from hpcenv.reproduction.bundle import image as bundle_image
from hpcenv.reproduction.bundle.archive import counted
from hpcenv.reproduction.code_copy import copy_code
from hpcenv.reproduction.compare import Steps, compare_runs
from hpcenv.reproduction.cost import Cost, estimate, proofs_cost
from hpcenv.reproduction.measured import OF_RANKS
from hpcenv.reproduction.proofs import StatementProof
from hpcenv.reproduction.reproduction import Reproduction, Target, proved, verdict_of, why_rejected
from hpcenv.reproduction.run_record import RunRecord, read_record
from hpcenv.reproduction.rungs import STEPS, Rung, RungPlan, plan_rung
from hpcenv.runs.status import RunStatus
from hpcenv.runs.wait import exit_status_of
from hpcenv.submission import request, rerun
from hpcenv.submission.plan import PlannedSource
from hpcenv.submission.plan_job import plan_code, plan_job
from hpcenv.submission.request import CopiedCode
from hpcenv.submission.submit import SubmitResult, submit
from hpcenv.text import listed

# A function that opens the project around a folder, together with the image store that this project uses.
OpenProject = Callable[[Path], Workspace]


@dataclass(frozen=True, kw_only=True)
class ReproductionWish:
    """How the user wants a run to be repeated.

    Attributes:
        steps: how many optimizer steps are repeated with `--rung 1` and `--rung 2`.
        options: the options of `submit` that the user gave, by name.
        args: arguments for the script; None keeps the arguments of the run.
        copy_to: a new folder for the run's own copy of its code. None uses the project around the current folder, if
            there is one.
        allow_changed: whether to continue if the project's code differs from the code of the run.
        dry_run: whether only to show the cost and the requests that must be accepted, without submitting.
    """

    rung: Rung
    steps: int = STEPS
    options: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[str, ...] | None = None
    copy_to: str | None = None
    allow_changed: bool = False
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """What will be submitted, and from which project.

    Attributes:
        of, record, manifest: folder, record and manifest of the run that is repeated.
        folder: the folder in the project from which the new run is submitted.
        has_image: whether the image is already on this cluster.
        bundled: the file of the image in the bundle; None without such a file.
        other_lockfile: path of the lockfile that replaces the run's own lockfile; empty if the run's own lockfile is
            used.
        recorded: the requests to this machine in the record of the run.
        notes: options that were left out, code that differs, and the like.
    """

    of: RunFolder
    record: RunRecord
    manifest: Manifest
    wish: ReproductionWish
    workspace: Workspace
    folder: Path
    plan: RungPlan
    locked: Lockfile
    has_image: bool
    bundled: Path | None
    other_lockfile: str
    recorded: tuple[Asked, ...]
    notes: tuple[str, ...]

    @property
    def cost(self) -> Cost:
        """The cost of the new run."""
        return estimate(
            self.record,
            self.locked,
            nodes=self.plan.options.nodes or 1,
            steps=self.plan.steps,
            has_image=self.has_image or self.bundled is not None,
            slower=self.plan.factor,
        )

    @property
    def image(self) -> str:
        """Where the image will come from, in words."""
        if self.has_image:
            return "here"
        return "in the bundle" if self.bundled is not None else "not here: it is fetched by its digest"

    def page(self, target: Target, proofs: tuple[StatementProof, ...], environ: Mapping[str, str]) -> Reproduction:
        """Return the page that the user sees before anything is submitted."""
        asked = (*acceptance.asked_by(self.workspace), *self.recorded)
        return Reproduction(
            target=target.name,
            rung=self.wish.rung,
            verdict="planned",
            headline="nothing is submitted yet",
            proofs=proofs,
            cost=self.cost,
            asks=acceptance.review(asked, self.workspace.root, environ),
            notes=self.notes,
            expected=expect(
                self.record,
                world_size=self.plan.world_size,
                accumulated=self.plan.factor > 1,
                args=self.wish.args,
                lockfile=self.other_lockfile,
            ),
            image=self.image,
        )


def reproduce_target(
    target: Target,
    wish: ReproductionWish,
    context: Context,
    open_project: OpenProject,
    *,
    accept: Callable[[NewRun, Reproduction], None],
    fetch: Callable[[NewRun], tuple[NewRun, str]],
    wait: Callable[[SubmitResult], RunStatus],
) -> Reproduction:
    """Repeat a run, and return whether the result is the same.

    Args:
        accept: called with the page before anything is submitted. `accept` raises an error if the user does not accept
            the requests on the page.
        fetch: calls `get_image` and shows its progress to the user.
        wait: called after the run was submitted. `wait` waits for the end of the run and returns the run's status.

    Raises:
        HpcenvError: as for `plan_new_run`, `submit_new_run` and `judge_new_run`.
    """
    proofs = target.proofs()
    if wish.rung == 0:
        return proved(target, proofs, proofs_cost())
    new = plan_new_run(target, wish, context, open_project)
    page = new.page(target, proofs, context.environ)
    if wish.dry_run:
        return page
    accept(new, page)
    new, image = fetch(new)
    result = submit_new_run(new, context)
    return judge_new_run(replace(page, image=image), new, result, wait(result), context.cwd)


def plan_new_run(target: Target, wish: ReproductionWish, context: Context, open_project: OpenProject) -> NewRun:
    """Decide everything about the new run. Only a copy of the code is written.

    Raises:
        UsageError: the target is a lockfile, or the project's code differs from the code of the run.
        HpcenvError: the project or its lockfile cannot be read, or the code cannot be copied.
    """
    if target.run is None or target.manifest is None or target.record is None:
        raise UsageError(
            f"`{target.name}` is a lockfile, which names an environment and no command",
            why=f"rung {wish.rung} repeats a run",
            hint="name the run folder of the authors; --rung 0 checks the lockfile",
        )
    project = _find_project(target.run, target.manifest, wish.copy_to, context.cwd, open_project)
    old = rerun.read_options(target.run.path, target.record.command)
    notes = (*project.notes, *rerun.notes_on_gone(target.run.path))
    given = request.parse_flags(wish.options)
    plan = plan_rung(
        old,
        given,
        wish.rung,
        shape=(target.record.shape.nodes, target.record.shape.nproc_per_node),
        args=target.manifest.args if wish.args is None else wish.args,
        one_node=project.workspace.project.reproduce.one_node,
        steps=_steps(target.record, wish.steps),
    )
    own_lock = "lock" not in given
    workspace = project.workspace.for_lock(old.lock if own_lock else plan.options.lock)
    lockfile = target.lockfile if own_lock else workspace.lockfile_path(plan.options.lock)
    locked = read_lockfile(lockfile)
    name = plan.options.name or f"{target.name.replace('/', '-')[:60]}-rung-{wish.rung}"
    options = replace(plan.options, name=rerun.free_name(name, workspace.runs), copied=project.copied)
    if own_lock:
        options = rerun.with_own_lockfile(options, target.run)
    else:
        notes = (*notes, f"the environment is locked in {lockfile}, not in the run's lockfile")
    if plan.left_out:
        notes = (*notes, f"options for the authors' cluster are left out: {', '.join(plan.left_out)}")
    has_image = locked.container is None or locked_sif(workspace, locked.container).is_file()
    bundled = None if has_image or not own_lock else bundle_image.find_bundled(target.run.path)
    new = NewRun(
        of=target.run,
        record=target.record,
        manifest=target.manifest,
        wish=wish,
        workspace=workspace,
        folder=project.folder,
        plan=replace(plan, options=options),
        locked=locked,
        has_image=has_image,
        bundled=bundled,
        other_lockfile="" if own_lock else str(lockfile),
        recorded=rerun.asked_by_record(options, given),
        notes=notes,
    )
    code, script_sha256 = plan_code(workspace, options, replace(context, cwd=project.folder))
    return replace(new, notes=(*notes, *_require_same_code(new, code.source, script_sha256)))


def _steps(record: RunRecord, wanted: int) -> int:
    """Return the number of steps to repeat: at most the steps of the run."""
    done = max((one.last_step for one in record.metrics if one.source in OF_RANKS), default=0)
    return min(wanted, done) if done else wanted


@dataclass(frozen=True, kw_only=True)
class _Project:
    """The project of the new run, the folder from which it is submitted, and the copied code of the old run."""

    workspace: Workspace
    folder: Path
    copied: CopiedCode | None = None
    notes: tuple[str, ...] = ()


def _find_project(
    run: RunFolder, manifest: Manifest, copy_to: str | None, here: Path, open_project: OpenProject
) -> _Project:
    """Return the project around the current folder. Without such a project, or on request, copy the run's own code."""
    in_project = any((folder / SPEC_NAME).is_file() for folder in (here, *here.parents))
    if in_project and copy_to is None:
        return _Project(workspace=open_project(here), folder=here)
    target = Path(os.path.abspath(here / (copy_to or f"{run.path.name}-code")))
    copy = copy_code(run, manifest, target)
    return _Project(workspace=open_project(copy.folder), folder=copy.folder, copied=copy.code, notes=copy.notes)


def _require_same_code(new: NewRun, now: PlannedSource | None, script_sha256: str) -> tuple[str, ...]:
    """Return in words how the code differs from the code of the run.

    Raises:
        UsageError: the code differs, and the user did not allow a difference.
    """
    before = new.manifest
    found = tuple(_code_differences(new.of, before, now, script_sha256))
    if found and not new.wish.allow_changed:
        commit = "" if before.source is None else before.source.commit
        is_copy = new.plan.options.copied is not None
        own = "" if is_copy else "check out that commit, or use the run's own copy: --copy DIR, or "
        raise UsageError(
            f"this is not the code of {before.run}",
            why="\n".join((*found, *([f"the run had commit {commit}"] if commit else []))),
            hint=f"{own}add --allow-changed",
        )
    return found


def _code_differences(run: RunFolder, before: Manifest, now: PlannedSource | None, script_sha256: str) -> Iterator[str]:
    """Yield in words how the code differs from a run's code; nothing if the code is equal.

    Args:
        run: the folder of the run, or of its bundle.
        before: the run's manifest.
        now: the planned copy of the code; None if the script runs in the live project.
        script_sha256: the sha256 of the planned script; empty if there is no such file.
    """
    if before.script_sha256 != script_sha256:
        yield "the script differs from the script of the run"
    source = before.source
    # Equal digests mean equal code. Different digests can belong to the same code: see `project/code_listing.py`.
    if source is None or now is None or source.digest in ("", now.record.digest):
        return
    try:
        then = _listing_of(run, source.shared)
        names = [path.partition("/")[2] for path in changed_files(then, now.listing)]
    except (RecordInvalid, OSError):
        yield "project files differ from the run's files; which files is not known: the run's list cannot be read"
        return
    if digest_of(then.files) != source.digest:
        yield "the list of the run's files is not the list that its nodes compared"
    if names:
        yield f"these files differ from those of the run: {listed(names, 5)}"


def _listing_of(run: RunFolder, shared: str) -> Listing:
    """Return the list of a run's files. Runs of a sweep share a list in the sweep's folder; a bundle has its own."""
    holder = RunFolder(Path(shared)) if shared and not run.listing.is_file() else run
    return load_record(Listing, holder.listing)


def get_image(new: NewRun, environ: Mapping[str, str], on_event: OnEvent) -> tuple[NewRun, str]:
    """Get the image from the bundle or by its digest. Return the run with the image, and how the image was obtained.

    Raises:
        ImageUnavailable, LockfileInvalid: the image cannot be obtained.
    """
    container = new.locked.container
    if container is None:
        return new, 'the environment of this machine (`image = "host"`), compared with the lockfile by the gate'
    if new.has_image:
        return new, f"was here, {container.digest[:19]}..."
    if new.bundled is not None:
        step = counted(on_event, "verify", new.bundled.name, new.bundled.stat().st_size)
        workspace = bundle_image.use_bundled(new.workspace, container, new.bundled, on_bytes=step)
        return replace(new, workspace=workspace), f"from the bundle, sha256 {container.sif.sha256[:12]}..."
    try:
        return new, _fetch_image(new, container, environ, on_event)
    except ImageUnavailable as error:
        before = (*error.hint_parts, "\nor ") if error.hint_parts else ()
        bundle = Command("hpcenv", "bundle", "make", "RUN", "--with-sif", "FILE")
        raise error.changed(hint=(*before, "ask the authors for a bundle with the image: ", bundle)) from error


def _fetch_image(new: NewRun, container: ContainerTable, environ: Mapping[str, str], on_event: OnEvent) -> str:
    """Fetch the image by its digest, and return in words how it was fetched."""
    if new.locked.asked != stale.asked_by(new.workspace.project):
        raise LockfileInvalid(
            f"`{new.workspace.spec}` does not name the image in the lockfile of the run",
            why=f"{new.workspace.project.image} in place of {new.locked.asked.image}",
            hint="--copy DIR uses the run's own copy of its project",
        )
    build(new.workspace, before=new.locked, environ=environ, on_event=on_event)
    return f"fetched by its digest, {container.digest[:19]}..."


def submit_new_run(new: NewRun, context: Context) -> SubmitResult:
    """Submit the run if the code is unchanged. The user may have edited the code while the image was fetched.

    Raises:
        UsageError: the code has changed.
        HpcenvError: the job cannot be planned, or Slurm refuses it.
    """
    context = replace(context, cwd=new.folder, command=request.command_of(new.plan.options))
    plan = plan_job(new.workspace, new.plan.options, context)
    _require_same_code(new, plan.source, plan.manifest.script_sha256)
    return submit(plan, context, any_packages=True)


def judge_new_run(page: Reproduction, new: NewRun, result: SubmitResult, status: RunStatus, cwd: Path) -> Reproduction:
    """Compare the new run, which has ended, with the run that it repeats.

    Args:
        page: the page of `NewRun.page`.
        cwd: the user's current folder, for paths in the page.

    Raises:
        JobFailed: the new run did not complete.
    """
    folder = result.run_folder
    if exit_status_of(status) != 0:
        raise JobFailed(
            f"the run `{result.run}` did not complete: {status.state}",
            why="\n".join((status.detail or f"its exit status is {exit_status_of(status)}", *why_rejected(folder))),
            hint=Command("hpcenv", "report", str(folder)),
        )
    notes = (*page.notes, *result.notes)
    page = replace(page, run=result.run, run_folder=folder, outcome=status.state, notes=notes)
    try:
        compared = compare_runs(cwd, str(new.of.path), str(folder), steps=Steps(last=new.plan.steps))
    except NotComparable as error:
        headline = f"not comparable: {error.what}"
        return replace(page, verdict="not-comparable", headline=headline, notes=(*notes, error.why or ""))
    other_args = new.wish.args not in (None, new.manifest.args)
    accumulated = new.plan.factor > 1 and not other_args
    expected = expect_after(new.record, read_record(folder), compared.causes, accumulated=accumulated)
    verdict, headline = verdict_of(compared, expected, page.rung)
    return replace(page, verdict=verdict, headline=headline, comparison=compared, expected=expected)
