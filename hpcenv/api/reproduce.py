"""Repeat another person's run from Python: `hpcenv reproduce`. Runs on: LOGIN NODE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcenv.api.here import context_in, open_project, project_folder, require_accepted
from hpcenv.api.run import RunHandle
from hpcenv.progress import ignore
from hpcenv.project.option_types import SubmitKeywords
from hpcenv.reproduction.bundle.unpacked import unpacked
from hpcenv.reproduction.new_run import ReproductionWish, get_image, reproduce_target
from hpcenv.reproduction.reproduction import Reproduction, find_target
from hpcenv.reproduction.rungs import STEPS, Rung
from hpcenv.submission.request import parse_keywords

if TYPE_CHECKING:
    from typing_extensions import Unpack


def reproduce(
    target: str | Path,
    args: Sequence[object] | None = None,
    *,
    rung: Rung = 0,
    steps: int = STEPS,
    copy: str | None = None,
    allow_changed: bool = False,
    dry_run: bool = False,
    project: str | Path = ".",
    accept: str | None = None,
    timeout: float | None = None,
    **options: Unpack[SubmitKeywords],
) -> Reproduction:
    """Repeat a run, wait for the new run, and return whether both runs have the same result.

    Args:
        target: a run folder, run name, job id, bundle or lockfile. A bundle is unpacked below `project`.
        args: arguments for the script. None means the arguments of the run.
        rung: how much is repeated. 0 only checks the files. 1 repeats the first steps on one node. 2 repeats the first
            steps with the same number of nodes and ranks. 3 repeats the whole run.
        steps: how many optimizer steps are repeated if `rung` is 1 or 2.
        copy: a new folder for a copy of the code that was recorded with the run. None uses the code of the project, if
            there is a project.
        allow_changed: continue if the code of the project is not the code of the run.
        dry_run: submit nothing; return the cost, and the requests that must be accepted.
        project: the folder to submit from. If this folder is in no project, the code that is recorded with the run is
            used.
        accept: as for `submit`.
        timeout: seconds to wait at most. After this time, this function stops waiting, but the new run continues.
        options: options of `hpcenv submit` for the new run. If `runs_dir` is given, the run to repeat is searched in
            this folder.

    Raises:
        NotAccepted: as for `submit`.
        UsageError: the code of the project is not the code of the run, or the target is a lockfile and `rung` is not 0.
        WaitTimeout: the new run has not ended within `timeout`.
        JobFailed: the new run did not complete.
    """
    context = context_in(project_folder(project), ("hpcenv.reproduce", str(target)))
    folder, note = unpacked(context.cwd, str(target))
    found = find_target(context.cwd, folder, runs=options.pop("runs_dir", None), compared=bool(note))
    words = None if args is None else tuple(str(word) for word in args)
    wish = ReproductionWish(
        rung=rung, steps=steps, options=parse_keywords(options), args=words, copy_to=copy,
        allow_changed=allow_changed, dry_run=dry_run,
    )  # fmt: skip
    return reproduce_target(
        found,
        wish,
        context,
        open_project,
        accept=lambda new, _page: require_accepted(new.workspace, accept, new.recorded),
        fetch=lambda new: get_image(new, context.environ, ignore),
        wait=lambda result: RunHandle(result.run_folder).wait(timeout),
    )
