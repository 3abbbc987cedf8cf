"""`hpcenv submit --export DIR`: write a folder that a person without hpcenv can submit.

Runs on: LOGIN NODE. The folder contains the batch script, hpcenv's node code, the training
code, the manifest and the lockfile. The folder may be copied to another place and submitted
from there, any number of times (launch/prepare_export_run.py).
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv.errors import UsageError, WouldOverwrite
from hpcenv.project.context import Context
from hpcenv.project.workspace import Workspace
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.variables import recorded_command
from hpcenv.submission import batch_script
from hpcenv.submission import submit as submit_step
from hpcenv.submission.plan import Plan, directives_of, render_script
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions
from hpcenv.text import visible


@dataclass(frozen=True, kw_only=True)
class Handover:
    """An exported folder.

    Attributes:
        needs: texts that name the things that a cluster must have to run the job.
        lost: the things that Slurm, or hpcenv with Slurm, does for a job, and that the other engine does not do.
        start: the command to type in the folder.
    """

    folder: Path
    shape: str
    needs: tuple[str, ...]
    notes: tuple[str, ...]
    lost: tuple[str, ...] = ()
    start: str = "sbatch job.sbatch"


def export_job(workspace: Workspace, options: SubmitOptions, context: Context, folder: Path) -> Handover:
    """Write the files that `submit` would give to Slurm into a folder. Nothing is submitted.

    Args:
        folder: the new folder, which must not exist.

    Raises:
        HpcenvError: as for `plan_job`.
        WouldOverwrite: the folder exists.
    """
    require_exportable(options, folder)
    named = replace(options, name=folder.name, runs_dir=str(folder.parent), cluster="slurm", handover=True)
    plan = plan_job(workspace, named, context)
    script = _render(plan, context)
    run = RunFolder(folder)
    submit_step.make_folder(folder)
    try:
        submit_step.materialize(replace(plan, script=script), run, context, code_as_files=True)
        needs = tuple(_needs(plan.manifest))
        (folder / "README.txt").write_text(_readme(plan, needs), encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Handover(folder=folder, shape=plan.request.shape, needs=needs, notes=plan.notes)


def require_exportable(options: SubmitOptions, folder: Path) -> None:
    """Refuse a folder that exists, and options that cannot be exported.

    Raises:
        WouldOverwrite: the folder exists.
        UsageError: an option cannot be exported.
    """
    if os.path.lexists(folder):
        raise WouldOverwrite(
            f"`{folder}` exists", why="a new folder is written", hint="choose another one: --export DIR"
        )
    if options.workdir == "live":
        raise UsageError(
            "`--workdir live` cannot be exported", why="the folder must have the code", hint="leave --workdir out"
        )
    if options.stage_data:
        raise UsageError("`--stage-data` cannot be exported", why="the packed copies are in your folder of runs")


# The path of the folder is known only when the job starts.
_FIND_RUN = (
    '$(if [ -r "${SLURM_SUBMIT_DIR:-.}/code/hpcenv/launch/prepare_export_run.py" ]; then '
    'python3 -I "$SLURM_SUBMIT_DIR/code/hpcenv/launch/prepare_export_run.py" "$SLURM_SUBMIT_DIR"; '
    "else echo 'error[usage]: submit this from inside its own folder: cd FOLDER && sbatch job.sbatch' >&2; fi)"
)


def _render(plan: Plan, context: Context) -> str:
    own = {"output": "hpcenv-%j.log"}
    kept = [pair for pair in directives_of(plan.manifest, plan.request) if pair[0] not in (*own, "chdir")]
    return render_script(
        plan.manifest,
        plan.request,
        python="python3",
        command=recorded_command(context.command),
        replaced={
            "directives": batch_script.directives([*kept, *own.items()]),
            "run_folder": batch_script.ShellText(f'"{_FIND_RUN}"'),
            "python": batch_script.ShellText('"$(command -v python3)"'),
        },
    )


def _needs(manifest: Manifest) -> Iterator[str]:
    yield "Slurm, and python3 (3.10 or later) on PATH on the nodes"
    environment = manifest.environment
    if environment.kind == "sif":
        digest = "" if manifest.sif is None else f" (sha256 {manifest.sif.sha256})"
        yield "apptainer on the nodes"
        yield f"the image {environment.sif}{digest}, readable by you, or a copy of it: {_OTHER_SIF}"
        if environment.overlay is not None:
            yield f"the overlay {environment.overlay.source} on every node, as it is here"
    else:
        yield f"the Python environment of {environment.python}, at the same path on every node"
    for one in manifest.data:
        named = f"{one.hub} in {one.path}" if one.hub else one.path
        yield f"the data {named} on every node, as they are here"
    for bind in environment.binds:
        yield f"{bind.source} on every node"
    for secret in manifest.secrets:
        yield f"the secret {secret.name} from {secret.source}"


_OTHER_SIF = "HPCENV_SIF=/path/to/copy.sif sbatch job.sbatch"


def _readme(plan: Plan, needs: tuple[str, ...]) -> str:
    words = shlex.join((*_program(plan.manifest), *plan.manifest.args))
    lines = [
        f"A Slurm job: {visible(words)} on {plan.request.shape}.",
        "",
        "Submit it from inside this folder. Options of sbatch before the file name override those in the file:",
        "    cd THIS_FOLDER && sbatch job.sbatch",
        "The folder can be copied to any place that all nodes see and that you can write to,",
        "and submitted as often as you like. Every job works in its own copy of source/: runs/JOBID/source.",
        "",
        "It needs:",
        *(f"  {visible(need)}" for need in needs),
        "",
        "First, every node is compared with lock.toml. If a node differs, the job prints a table and ends with",
        "status 90, and the program does not start. Status 91: hpcenv could not find out whether the nodes match.",
        "Look into hpcenv-JOBID.log, and runs/JOBID: verdict.json, facts/, exits/, ranks/.",
    ]
    return "\n".join(lines) + "\n"


def _program(manifest: Manifest) -> tuple[str, ...]:
    return manifest.program if manifest.module or manifest.entry else (Path(manifest.script).name,)
