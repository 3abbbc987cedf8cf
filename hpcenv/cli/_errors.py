"""Print errors as text or JSON, and the JSON envelope of every command.

The envelope has exactly these keys: `schema`, `command`, `ok`, `data`, `error`. `error` is null, or it has
the keys `code`, `what`, `why`, `hint`, `commands` and `exit_status`. `commands` are the commands in the hint,
each as a list of words.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from hpcenv import filesystem
from hpcenv.cli import _foreign_options, _other_words, _terminal
from hpcenv.errors import Command, FileUnusable, HpcenvError, Interrupted, UsageError, render_hint
from hpcenv.text import WIDTH, wrap

ENVELOPE_SCHEMA = 1
# How many characters of each part of an error are printed as text. --json has the whole part.
_LONGEST = 4000


def show(problem: HpcenvError, *, as_json: bool, command: str) -> int:
    """Print an error and return its exit status."""
    if as_json:
        envelope(command, ok=False, data=None, problem=problem)
        return problem.exit_status
    print(text(problem), file=sys.stderr, flush=True)
    return problem.exit_status


def show_lost_output(reason: str) -> int:
    """Print the error that standard output cannot be written, and return its exit status."""
    hint = "free some space there, or send the output to another place; the command has done its work"
    problem = FileUnusable("standard output cannot be written", why=reason, hint=hint)
    return show(problem, as_json=False, command="")


def text(problem: HpcenvError) -> str:
    """Return the printed text of an error, in lines that fit into the terminal. Commands and paths stay in one line."""
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    lines = _wrapped(f"error[{problem.code}]: ", problem.what, indent=7, width=width)
    if problem.why:
        lines += _wrapped("  why: ", problem.why, indent=7, width=width)
    if problem.hint:
        is_command = len(problem.hint_parts) == 1 and isinstance(problem.hint_parts[0], Command)
        lines += ["", *_wrapped("hint: ", problem.hint, indent=6, width=sys.maxsize if is_command else width)]
    return "\n".join(lines)


def _wrapped(first: str, words: str, *, indent: int, width: int) -> list[str]:
    lines = _terminal.clean_text(_shortened(words)).split("\n")
    firsts = [first, *[" " * indent] * (len(lines) - 1)]
    # If a line is too long, its continuation lines are indented by two more columns.
    return [wrap(line, first=start, indent=indent + 2, width=width) for start, line in zip(firsts, lines, strict=True)]


def _shortened(words: str) -> str:
    """Return a part of an error, shortened if it is long. A key or line of a hostile file could fill many screens."""
    more = len(words) - _LONGEST
    return words if more <= 0 else f"{words[:_LONGEST]} ... ({more} more characters)"


def envelope(command: str, *, ok: bool, data: Any, problem: HpcenvError | None = None) -> None:
    """Print the JSON envelope of a command. `data` must be plain data."""
    body = {
        "schema": ENVELOPE_SCHEMA,
        "command": command,
        "ok": ok,
        "data": data,
        "error": None if problem is None else _body(problem),
    }
    print(json.dumps(body, indent=1, sort_keys=True), flush=True)


def _body(problem: HpcenvError) -> dict[str, Any]:
    return {
        "code": problem.code,
        "what": problem.what,
        "why": problem.why,
        "hint": problem.hint,
        "commands": [list(part) for part in problem.hint_parts if isinstance(part, Command)],
        "exit_status": problem.exit_status,
    }


def from_exception(error: BaseException) -> HpcenvError:
    """Return an HpcenvError for any exception. An unexpected exception is a bug in hpcenv."""
    if isinstance(error, HpcenvError):
        return error
    # Before 3.12, Python turns an interrupt in the body of a class (`__set_name__`) into a RuntimeError.
    if isinstance(error, (click.exceptions.Abort, KeyboardInterrupt)) or isinstance(error.__cause__, KeyboardInterrupt):
        return Interrupted("interrupted")
    if isinstance(error, click.ClickException):
        return _from_click(error)
    if isinstance(error, OSError):
        return _from_os(error)
    return _unexpected(error)


def _from_click(problem: click.ClickException) -> HpcenvError:
    """Return an HpcenvError for an error of click, which parses the command line."""
    context = getattr(problem, "ctx", None)
    # click 8.1 does not have this class, because click 8.1 prints the help itself.
    if isinstance(problem, getattr(click.exceptions, "NoArgsIsHelpError", ())) and context is not None:
        verbs = ", ".join(context.command.list_commands(context))
        return UsageError("no command is given", why=f"the commands are {verbs}", hint=Command("hpcenv", "--help"))
    hint = None if context is None else _with(context, "--help")
    if isinstance(problem, click.NoSuchOption) and context is not None:
        typed = problem.option_name
        return (
            _of_another_program(typed, context)
            or _other_words.option(context.command_path, typed)
            or _no_such_option(typed, context)
        )
    instead = _other_words.value("" if context is None else context.command_path, problem)
    return UsageError(problem.format_message().rstrip("."), hint=instead or hint)


def _of_another_program(typed: str, context: click.Context) -> UsageError | None:
    """Return the error for an option of sbatch, srun or torchrun; None for all other options."""
    if context.command_path.partition(" ")[2] not in ("submit", "rerun"):
        return None
    return _foreign_options.answer(typed, sys.argv[1:])


def _no_such_option(typed: str, context: click.Context) -> UsageError:
    """Return an error that names the most similar option. For `submit`, it also says how to type a script's option."""
    known = [name for option in context.command.get_params(context) for name in (*option.opts, *option.secondary_opts)]
    # The dashes are removed, because they would make all options similar.
    names = {name.lstrip("-"): name for name in known if name.startswith("--")}
    close = difflib.get_close_matches(typed.lstrip("-"), names, n=1, cutoff=0.75)
    near = names[close[0]] if close else None
    what = f"no such option `{typed}`" + (f", perhaps you meant `{near}`" if near else "")
    if context.info_name != "submit":
        return UsageError(what, hint=_with(context, "--help") if near is None else _corrected(typed, near))
    script = (
        "an option of the script goes after `--`: ",
        Command("hpcenv", "submit", "SCRIPT", "OPTIONS", "--", typed),
    )
    if near is None:
        return UsageError(what, hint=script)
    return UsageError(what, why=render_hint(script), hint=_corrected(typed, near))


def _corrected(typed: str, near: str) -> Command:
    """Return the typed command line with the option that the user probably meant."""
    return Command("hpcenv", *_foreign_options.replaced(sys.argv[1:], typed, near))


def _with(context: click.Context, option: str) -> Command:
    return Command(*context.command_path.split(), option)


def _from_os(problem: OSError) -> HpcenvError:
    """Return an HpcenvError for an error of the operating system."""
    reason = problem.strerror or str(problem)
    if problem.filename is None and problem.errno == errno.ENOENT and not _has_folder():
        return FileUnusable("the current folder no longer exists", why=reason, hint="cd ~")
    if problem.filename is None:
        hint = "df -h . $HOME /tmp shows which file system is full" if problem.errno in filesystem.FULL else None
        return FileUnusable("a file cannot be read or written", why=reason, hint=hint)
    path = Path(os.path.abspath(os.fsdecode(problem.filename)))
    if problem.errno in filesystem.FULL:
        return filesystem.refused(path, problem)
    near = filesystem.most_similar(path) if problem.errno == errno.ENOENT else None
    hint = None if near is None else f"perhaps you meant `{near}`"
    return FileUnusable(f"cannot use `{os.fsdecode(problem.filename)}`", why=reason, hint=hint)


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _unexpected(problem: BaseException) -> HpcenvError:
    """Return the error for a bug in hpcenv; print its traceback to stderr."""
    import traceback

    lines = "".join(traceback.format_exception(problem))
    print(_terminal.clean_text(lines), end="", file=sys.stderr, flush=True)
    return HpcenvError(
        f"this is a bug in hpcenv: {type(problem).__name__}: {problem}",
        hint="please report this bug, together with the lines above",
    )
