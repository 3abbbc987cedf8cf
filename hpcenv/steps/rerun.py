"""`hpcenv rerun`: a run again, with the inputs that it had. Runs on: LOGIN NODE.

The command is read from the run's record (`cli/rerun.py`); here its inputs are compared:
the lockfile is the run's own copy, and script, code and SIF must be what they were.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv.errors import FileUnusable, UsageError
from hpcenv.model.plan import Plan
from hpcenv.steps.request import Asked, Surroundings
from hpcenv.wire import Manifest, RunFolder


@dataclass(frozen=True, kw_only=True)
class ChangedInput:
    """Something that a run used and that is not what it was."""

    what: str
    before: str
    now: str


def asked_again(asked: Asked, run: RunFolder, *, other_lock: bool) -> Asked:
    """Return the words of a submission with the lockfile that a run has kept.

    Args:
        other_lock: a lockfile was named for the new run; then that of the project is taken.

    Raises:
        FileUnusable: the run has no lockfile.
    """
    if other_lock:
        return asked
    if not run.lockfile.is_file():
        raise FileUnusable(f"`{run.lockfile}` is not there", why="the run's own lockfile is needed", hint="--lock NAME")
    # Not compared with hpcenv.toml: that may ask for something else by now.
    return replace(asked, lockfile=run.lockfile, frozen=True, locked=False)


def around_again(around: Surroundings, manifest: Manifest, command: tuple[str, ...]) -> Surroundings:
    """Return the surroundings of a run: paths of its command start in the folder where it was submitted.

    Raises:
        FileUnusable: that folder is gone.
    """
    folder = Path(manifest.workdir)
    if not folder.is_dir():
        raise FileUnusable(f"`{folder}` is not there", why="the run was submitted in this folder")
    return replace(around, cwd=folder, command=command)


def changed_inputs(before: Manifest, now: Manifest) -> tuple[ChangedInput, ...]:
    """Return which inputs of a run are not what they were. Pure."""
    pairs = [("the script", before.script_sha256, now.script_sha256)]
    if before.source is not None and now.source is not None:
        pairs.append(("the code's commit", before.source.commit, now.source.commit))
        pairs.append(("what the code has besides its commit", before.source.diff_sha256, now.source.diff_sha256))
    elif (before.source is None) != (now.source is None):
        was, is_now = ("its own place" if one is None else "a copy of the code" for one in (before.source, now.source))
        pairs.append(("where the script runs from", was, is_now))
    if before.sif is not None and now.sif is not None:
        pairs.append(("the SIF", before.sif.sha256, now.sif.sha256))
    pairs.append(("the environment's kind", before.environment.kind, now.environment.kind))
    if before.environment.kind == now.environment.kind == "host":
        pairs.append(("the environment's Python", before.environment.python, now.environment.python))
    return tuple(ChangedInput(what=what, before=a, now=b) for what, a, b in pairs if a != b)


def require_same_inputs(before: Manifest, plan: Plan, *, allow: bool, other_lock: bool) -> tuple[ChangedInput, ...]:
    """Return which inputs have changed where that is allowed.

    Args:
        other_lock: another lockfile was asked for; then another environment is no surprise.

    Raises:
        UsageError: one has changed, and it is not allowed.
    """
    changed = changed_inputs(before, plan.manifest)
    if other_lock:
        changed = tuple(one for one in changed if one.what != "the SIF" and "environment" not in one.what)
    if changed and not allow:
        raise UsageError(
            f"{before.run} cannot be run again with the inputs that it had",
            why="\n".join(f"{one.what} was {_shown(one.before)} and is {_shown(one.now)}" for one in changed),
            hint="add --allow-changed, or bring back what it was; `hpcenv diff` compares the runs afterwards",
        )
    return changed


def _shown(value: str) -> str:
    return value[:12] if re.fullmatch("[0-9a-f]{40,64}", value) else value or "nothing"


def free_name(name: str, folder: Path) -> str:
    """Return a name for a run like the one called `name`: it, or `first-2`, `first-3` and so on."""
    if not os.path.lexists(folder / name):
        return name
    # `first-2` again is `first-3`, but `seed-2` again is `seed-2-2`: there is no `seed`.
    stem = re.sub(r"-[0-9]{1,4}\Z", "", name)
    stem = (stem if os.path.lexists(folder / stem) else name)[:90]
    number = 2
    while os.path.lexists(folder / f"{stem}-{number}"):
        number += 1
    return f"{stem}-{number}"
