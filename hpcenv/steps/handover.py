"""`hpcenv export sbatch`: a folder that a person without hpcenv can submit.

Runs on: LOGIN NODE. The folder holds the batch script, hpcenv's node code, the training
code, the manifest and the lockfile. It may be copied to another place and submitted from
there, any number of times (node/settle.py).
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv import wire
from hpcenv.errors import FileUnusable, UsageError, WouldOverwrite
from hpcenv.model import sbatch, size
from hpcenv.model.plan import Plan, directives_of, render_script
from hpcenv.steps import submit as submit_step
from hpcenv.steps.plan import plan_job, read_template, template_path
from hpcenv.steps.request import Asked, Surroundings
from hpcenv.steps.workspace import Workspace
from hpcenv.wire import Manifest, RunFolder

# Code that is not under git: what lies beside the script, as long as it is that and no data.
_MOST_FILES = 1000
_MOST_BYTES = 50 * 10**6


@dataclass(frozen=True, kw_only=True)
class Handover:
    """An exported folder.

    Attributes:
        needs: what must be there where it is submitted, one sentence each.
    """

    folder: Path
    shape: str
    needs: tuple[str, ...]
    notes: tuple[str, ...]


def export_sbatch(workspace: Workspace, asked: Asked, around: Surroundings, folder: Path) -> Handover:
    """Write what `submit` would hand to Slurm into a folder; submit nothing.

    Args:
        folder: must not exist yet.

    Raises:
        HpcenvError: as for `plan_job`.
        WouldOverwrite: the folder is there.
    """
    if os.path.lexists(folder):
        raise WouldOverwrite(f"`{folder}` exists", why="a new folder is written", hint="choose another one: -o DIR")
    if asked.stage_data:
        raise UsageError("`--stage-data` cannot be exported", why="the packed copies lie in your own folder of runs")
    named = replace(asked, run=folder.name, runs=str(folder.parent), cluster="slurm", handover=True)
    plan = plan_job(workspace, named, around)
    # Before anything is written: there may be too much of it.
    beside = None if plan.source is not None else _beside(Path(plan.manifest.script), workspace)
    script = _render(plan, workspace, asked, around)
    run = RunFolder(folder)
    submit_step.make_folder(folder)
    try:
        submit_step.materialize(replace(plan, script=script), run, around)
        manifest = plan.manifest
        if beside is not None:
            manifest = _take_along(manifest, beside.modules, run)
        manifest = replace(manifest, workdir=str(folder))
        wire.write(manifest, run.manifest)
        needs = tuple(_needs(manifest))
        (folder / "README.txt").write_text(_readme(plan, needs), encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Handover(folder=folder, shape=plan.request.shape, needs=needs, notes=(*plan.notes, *_left_out(beside)))


# Where the folder lies is known when the job starts, not before.
_FIND_RUN = (
    '$(if [ -r "${SLURM_SUBMIT_DIR:-.}/code/hpcenv/node/settle.py" ]; then '
    'python3 -I "$SLURM_SUBMIT_DIR/code/hpcenv/node/settle.py" "$SLURM_SUBMIT_DIR"; '
    "else echo 'error[usage]: submit this from inside its own folder: cd FOLDER && sbatch job.sbatch' >&2; fi)"
)


def _render(plan: Plan, workspace: Workspace, asked: Asked, around: Surroundings) -> str:
    own = {"output": "hpcenv-%j.log"}
    kept = [pair for pair in directives_of(plan.manifest, plan.request) if pair[0] not in (*own, "chdir")]
    return render_script(
        read_template(template_path(workspace, asked, around)),
        plan.manifest,
        plan.request,
        python="python3",
        command=around.command,
        replaced={
            "directives": sbatch.directives([*kept, *own.items()]),
            "run_folder": sbatch.ShellText(f'"{_FIND_RUN}"'),
            "python": sbatch.ShellText('"$(command -v python3)"'),
        },
    )


@dataclass(frozen=True, kw_only=True)
class _Beside:
    """Code that is not under git.

    Attributes:
        modules: the Python files at and below the script's folder, sorted.
        left: the first few of the other files, relative to that folder; `left_count` says how many there are.
    """

    modules: tuple[Path, ...]
    left: tuple[str, ...]
    left_count: int


def _beside(script: Path, workspace: Workspace) -> _Beside:
    """Return what lies beside a script.

    Raises:
        UsageError: there are too many Python files to be one program's.
    """
    modules: list[Path] = []
    left: list[str] = []
    total = left_count = 0
    for place in _files_below(script.parent, workspace):
        if place.suffix != ".py" and place != script:
            left_count += 1
            if len(left) < _SHOWN:
                left.append(str(place.relative_to(script.parent)))
            continue
        modules.append(place)
        total += place.stat().st_size
        if len(modules) > _MOST_FILES or total > _MOST_BYTES:
            raise UsageError(
                f"there is too much Python code below `{script.parent}`",
                why=f"it is not under git, so all of it would be taken along: more than {_MOST_FILES} files "
                f"or {size.shown(_MOST_BYTES)}",
                hint="put the code under git: then what git tracks is taken along",
            )
    return _Beside(modules=tuple(sorted(modules)), left=tuple(left), left_count=left_count)


def _files_below(top: Path, workspace: Workspace) -> Iterator[Path]:
    """Yield files that may belong to a program: no hidden ones, none of hpcenv's own."""
    own = {os.path.realpath(place) for place in (workspace.runs, workspace.lockfile_path("default").parent)}
    own.discard(os.path.realpath(top))
    for folder, names, files in os.walk(top):
        inside = Path(folder)
        names[:] = sorted(
            name
            for name in names
            if not name.startswith((".", "__"))
            and os.path.realpath(inside / name) not in own
            and not any(os.path.lexists(inside / name / mark) for mark in _NOT_CODE)
        )
        for name in sorted(files):
            place = inside / name
            if (name.endswith(".py") or not name.startswith(".")) and place != workspace.spec and place.is_file():
                yield place


# A virtual environment, a run folder, one of a sweep's runs, and a conda environment.
_NOT_CODE = ("pyvenv.cfg", "manifest.json", "sweep.json", "conda-meta")
_SHOWN = 3


def _left_out(beside: _Beside | None) -> Iterator[str]:
    if beside is not None and beside.left:
        more = beside.left_count - len(beside.left)
        named = ", ".join(_plain(name) for name in beside.left) + (f" and {more} more" if more else "")
        yield f"the code is not under git, so only Python files are taken along; left here: {named}"


def _take_along(manifest: Manifest, modules: tuple[Path, ...], run: RunFolder) -> Manifest:
    """Copy the script and the modules beside it; return the manifest that names the copy."""
    script = Path(manifest.script)
    try:
        for path in {script, *modules}:
            target = run.source / path.relative_to(script.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    except OSError as error:
        raise FileUnusable(f"cannot copy the code to `{run.source}`", why=str(error)) from error
    return replace(manifest, script=str(run.source / script.name))


def _needs(manifest: Manifest) -> Iterator[str]:
    yield "Slurm, and python3 (3.10 or later) on PATH on the nodes"
    environment = manifest.environment
    if environment.kind == "sif":
        digest = "" if manifest.sif is None else f" (sha256 {manifest.sif.sha256})"
        yield "apptainer on the nodes"
        yield f"the image {environment.sif}{digest}, readable by you, or a copy of it: {_OTHER_SIF}"
    else:
        yield f"the Python environment of {environment.python}, at that very path on every node"
    for bind in environment.binds:
        yield f"{bind.source} on every node"
    for secret in manifest.secrets:
        yield f"the secret {secret.name} from {secret.source}"


_OTHER_SIF = "HPCENV_SIF=/path/to/copy.sif sbatch job.sbatch"


def _readme(plan: Plan, needs: tuple[str, ...]) -> str:
    words = shlex.join((Path(plan.manifest.script).name, *plan.manifest.args))
    lines = [
        f"A Slurm job: {_plain(words)} on {plan.request.shape}.",
        "",
        "Submit it from inside this folder; flags of sbatch before the name win over those in it:",
        "    cd THIS_FOLDER && sbatch job.sbatch",
        "The folder may be copied to any place that all nodes see and that you can write to,",
        "and submitted as often as you like. Relative paths of the program start here.",
        "",
        "It needs:",
        *(f"  {_plain(need)}" for need in needs),
        "",
        "Every node is compared with lock.toml first; if one differs, the job ends with status 90",
        "(91: it could not be told) and a table, and not a line of the program runs.",
        "Look into hpcenv-JOBID.log, and runs/JOBID: verdict.json, facts/, exits/, ranks/.",
    ]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
