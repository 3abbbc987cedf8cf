"""Ask the user to accept the settings of a project that need consent, and define `--accept` for scripts."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

import click

from hpcenv.cli import _render
from hpcenv.cli._help_all import RareOption
from hpcenv.errors import Command, FileUnusable, NotAccepted
from hpcenv.project import acceptance
from hpcenv.project.acceptance import Asked, Review
from hpcenv.project.workspace import SPEC_NAME, Workspace
from hpcenv.records.variables import recorded_command
from hpcenv.submission.plan import Plan
from hpcenv.submission.request import SubmitOptions

# The first words of commands that have two words.
_GROUPS = ("data", "image", "session")


def option(command: _render.Decorated) -> _render.Decorated:
    """Give a command `--accept`."""
    text = (
        "Accept the settings of the project that need your consent. The error that refuses the command prints DIGEST."
    )
    return click.option("--accept", cls=RareOption, metavar="DIGEST", help=text)(command)


def require(workspace: Workspace, given: str | None, *, as_json: bool, more: Sequence[Asked] = ()) -> None:
    """Return if the user has accepted the settings that need consent. On a terminal, ask the user.

    Args:
        given: the digest after `--accept`.
        as_json: whether the command prints JSON. If so, the user is not asked.
        more: the parts of a run's record that need consent, in addition to the settings in hpcenv.toml.

    Raises:
        NotAccepted: the user said no, or hpcenv cannot ask the user.
    """
    _require(workspace, (*acceptance.asked_by(workspace), *more), given, as_json=as_json)


def require_paths(given: str | None, *, as_json: bool) -> None:
    """Do the same as `require`, but only for the folders of [paths]. hpcenv will write to these folders.

    This function is for commands that start no program, but write or remove files in these folders. Outside a project,
    the user need not accept anything.
    """
    here = _render.cwd()
    if any((folder / SPEC_NAME).is_file() for folder in (here, *here.parents)):
        workspace = _render.open_project()
        _require(workspace, acceptance.asked_paths(workspace), given, as_json=as_json)


def _require(workspace: Workspace, asked: Sequence[Asked], given: str | None, *, as_json: bool) -> None:
    hint = ("read hpcenv.toml, then: ", _accepting(acceptance.digest_of(asked)))
    if given is not None or as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        acceptance.require(asked, workspace.root, os.environ, given=given, hint=hint)
        return
    new = acceptance.new_in(asked, workspace.root, os.environ)
    if new:
        _ask(workspace, asked, new)


def _accepting(digest: str) -> Command:
    """Return the typed command with `--accept` and the digest."""
    words = recorded_command(_render.without_accept(sys.argv[1:]))
    verb = 2 if words[:1] and words[0] in _GROUPS else 1
    return Command("hpcenv", *words[:verb], "--accept", digest, *words[verb:])


def _ask(workspace: Workspace, asked: Sequence[Asked], new: Sequence[Asked]) -> None:
    _render.tell(f"These settings of the project {workspace.root} need your consent:")
    for one in asked:
        _render.tell(f"  {'new: ' if one in new and len(new) < len(asked) else ''}{one.text}")
    if not click.confirm("Accept these settings for this project?", err=True):
        raise NotAccepted("you have not accepted the settings of the project; nothing was started")
    acceptance.keep(asked, workspace.root, os.environ)


def show(review: Review) -> None:
    """Print the settings that need consent, for a dry run. The user is not asked."""
    for line in review.asks:
        _render.tell(f"asks: {line}")
    if not review.accepted:
        _render.tell(f"not accepted yet: without --dry-run, hpcenv asks you, or you give --accept {review.digest}")


def reviewed(workspace: Workspace, more: Sequence[Asked] = ()) -> Review:
    """Return the settings of the project that need consent, for a dry run."""
    return acceptance.review((*acceptance.asked_by(workspace), *more), workspace.root, os.environ)


def remember_typed(workspace: Workspace, options: SubmitOptions, plan: Plan) -> None:
    """Record the options that the user typed, so that `hpcenv rerun` of the run does not ask for consent again."""
    # If `--resume-from` named a run, `rerun` uses the checkpoint that was found for this name.
    led_to = replace(options, resume_from=plan.manifest.resume_from or None)
    typed = [one for given in (options, led_to) for one in acceptance.asked_by_options(given, "", script=given.script)]
    if typed:
        with contextlib.suppress(FileUnusable):
            acceptance.keep(typed, workspace.root, os.environ)
