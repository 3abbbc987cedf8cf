"""Results and errors as text or JSON, and what every verb's options share.

Data goes to stdout, everything else to stderr; nothing needs colour or a terminal.

The JSON envelope has exactly these keys: `schema`, `command`, `ok`, `data`, `error`;
`error` is null or has `code`, `what`, `why`, `hint`, `exit_status`.
"""

from __future__ import annotations

import functools
import io
import os
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from hpcenv.cli._words import option
from hpcenv.errors import FileUnusable, HpcenvError, Interrupted, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from hpcenv.adapters.store import StorePlace
    from hpcenv.steps.workspace import Workspace

ENVELOPE_SCHEMA = 1

Command = TypeVar("Command", bound=Callable[..., Any])


def json_option(command: Command) -> Command:
    """Give a verb `--json`."""
    with_json = option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
    return with_json(command)


def run_argument(command: Command) -> Command:
    """Give a verb the run it is about, and where to look for it."""
    argument = click.argument("run", required=False)
    runs = option("--runs", metavar="DIR", help="Folder of runs, if not the project's.")
    return argument(runs(command))


def consent(what: str, *, as_json: bool) -> None:
    """Ask whether `what` may be removed.

    Raises:
        UsageError: nobody can be asked.
        Interrupted: the answer is no.
    """
    if as_json or not sys.stdin.isatty():
        raise UsageError(
            f"{what} would be removed",
            why="nobody can be asked: stdin is no terminal",
            hint="add --yes, or --dry-run",
        )
    if not click.confirm("Remove them?", err=True):
        raise Interrupted("nothing was removed")


def success(command: str, data: Any) -> None:
    """Print the JSON envelope of a verb that succeeded."""
    _envelope(command, ok=True, data=to_plain(data), problem=None)


def verdict_on(command: str, data: Any, *, ok: bool, problem: HpcenvError | None = None) -> None:
    """Print the JSON envelope of a verb whose answer may be bad news."""
    _envelope(command, ok=ok, data=to_plain(data), problem=None if problem is None else _body(problem))


def _envelope(command: str, *, ok: bool, data: Any, problem: dict[str, Any] | None) -> None:
    body = {"schema": ENVELOPE_SCHEMA, "command": command, "ok": ok, "data": data, "error": problem}
    import json

    print(json.dumps(body, indent=1, sort_keys=True), flush=True)


def to_plain(value: Any) -> Any:
    """Return a result as JSON can hold it."""
    import dataclasses

    from hpcenv.model import document

    if isinstance(value, document.Document):
        return document.plain(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def say(line: str = "") -> None:
    """Print a line of the answer."""
    print(line, flush=True)


def tell(line: str) -> None:
    """Print a line about what is going on (stderr, so that stdout stays data)."""
    print(line, file=sys.stderr, flush=True)


def _body(problem: HpcenvError) -> dict[str, Any]:
    return {
        "code": problem.code,
        "what": problem.what,
        "why": problem.why,
        "hint": problem.hint,
        "exit_status": problem.exit_status,
    }


def error(problem: HpcenvError, *, as_json: bool, command: str) -> int:
    """Print an error and return its exit status."""
    if as_json:
        _envelope(command, ok=False, data=None, problem=_body(problem))
        return problem.exit_status
    tell(f"error[{problem.code}]: {problem.what}")
    if problem.why:
        tell("  why: " + problem.why.replace("\n", "\n       "))
    if problem.hint:
        tell(f"\nhint: {problem.hint}")
    return problem.exit_status


def from_click(problem: click.ClickException) -> HpcenvError:
    """Return a parsing error in our own form; click knows the nearest option's name."""
    context = getattr(problem, "ctx", None)
    # click 8.1 has no such class: it prints the help itself.
    if isinstance(problem, getattr(click.exceptions, "NoArgsIsHelpError", ())) and context is not None:
        verbs = ", ".join(context.command.list_commands(context))
        return UsageError("which verb?", why=f"one of {verbs}", hint="hpcenv --help")
    hint = None if context is None else f"{context.command_path} --help"
    if isinstance(problem, click.NoSuchOption) and context is not None:
        return _no_such_option(problem.option_name, context)
    return UsageError(problem.format_message().rstrip("."), hint=hint)


def _no_such_option(typed: str, context: click.Context) -> UsageError:
    """Name the nearest option, and what to do with one of the script's."""
    import difflib

    known = [name for option in context.command.get_params(context) for name in (*option.opts, *option.secondary_opts)]
    # Without the dashes, which every option shares.
    names = {name.lstrip("-"): name for name in known if name.startswith("--")}
    close = difflib.get_close_matches(typed.lstrip("-"), names, n=1, cutoff=0.75)
    near = names[close[0]] if close else None
    what = f"no such option `{typed}`" + (f", perhaps you meant `{near}`" if near else "")
    hint = f"{context.command_path} --help"
    if context.info_name != "submit":
        return UsageError(what, hint=f"{context.command_path} {near}" if near else hint)
    after = f"an option of the script goes after `--`: hpcenv submit SCRIPT ... -- {typed}"
    return UsageError(what, why=after if near else None, hint=f"hpcenv submit SCRIPT ... {near}" if near else after)


def from_os(problem: OSError) -> HpcenvError:
    """Return what the operating system refused in our own form."""
    reason = problem.strerror or str(problem)
    if problem.filename is None:
        return FileUnusable(reason)
    return FileUnusable(f"cannot use `{os.fsdecode(problem.filename)}`", why=reason)


def unexpected(problem: Exception) -> HpcenvError:
    """Return a bug of hpcenv in our own form, its traceback on stderr."""
    import traceback

    traceback.print_exception(problem)
    return HpcenvError(
        f"this is a bug in hpcenv: {type(problem).__name__}: {problem}",
        hint="please report it with the lines above",
    )


def prepare_streams() -> None:
    """Let no character of a path or log end hpcenv: what the terminal cannot show is escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def close_streams() -> None:
    """Turn away from a pipe that nobody reads; Python would else complain once more at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def cwd() -> Path:
    """Return the user's folder as they see it, through links."""
    from pathlib import Path

    logical = os.environ.get("PWD", "")
    if logical and os.path.isabs(logical) and os.path.exists(logical) and os.path.samefile(logical, "."):
        return Path(logical)
    return Path.cwd()


def cache_folder() -> Path:
    """Return where hpcenv keeps what it can find again (XDG Base Directory Specification 0.8)."""
    from pathlib import Path

    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcenv"


# The verbs of `hpcenv image` that `store_option` is given to.
_WITH_STORE = ("build", "inspect", "list", "path", "prune", "pull", "verify")


class Where:
    """What was typed about the place of blobs and SIFs."""

    def __init__(self, *, store: str | None = None, trust: tuple[str, ...] = ()) -> None:
        self.store, self.trust = store, trust

    def project(self, start: Path | None = None) -> Workspace:
        """Return the project around a folder, the user's if none is named, with the store that applies."""
        from hpcenv.adapters.accepted import Accepted
        from hpcenv.steps.workspace import open_workspace

        return open_workspace(
            start or cwd(),
            store=self._named(),
            default_store=cache_folder() / "store",
            trusted_owners=self._owners(),
            accepted=Accepted(folder=cache_folder() / "validated"),
        )

    def place(self) -> StorePlace:
        """Return where images are kept: `--store`, HPCENV_STORE, the project's `[paths] store`, the cache."""
        from hpcenv.adapters.store import StorePlace
        from hpcenv.steps.workspace import SPEC_NAME

        here, named = cwd(), self._named()
        if named is None and any((folder / SPEC_NAME).is_file() for folder in (here, *here.parents)):
            return self.project().store_place
        return StorePlace(root=named or cache_folder() / "store", trusted_owners=self._owners())

    def words(self) -> tuple[str, ...]:
        """Return what another command needs on its line to find the same store."""
        named = self.store or os.environ.get("HPCENV_STORE")
        owners = (word for user in self.trust for word in ("--trust", user))
        return (*(("--store", named) if named else ()), *owners)

    def in_commands(self, text: str) -> str:
        """Return a text whose `hpcenv image ...` commands name the store that was named here."""
        more, known = quoted(self.words()), "|".join(_WITH_STORE)
        if not more or "--store " in text.replace("(--store, HPCENV_STORE)", ""):
            return text
        return re.sub(rf"\bhpcenv image (?:{known})\b", lambda match: f"{match[0]} {more}", text)

    def _owners(self) -> tuple[str, ...]:
        return (*self.trust, *os.environ.get("HPCENV_STORE_OWNERS", "").replace(",", " ").split())

    def _named(self) -> Path | None:
        from pathlib import Path

        named = self.store or os.environ.get("HPCENV_STORE")
        return Path(os.path.abspath(cwd() / Path(named).expanduser())) if named else None


def store_option(command: Command) -> Command:
    """Give a verb the place of blobs and SIFs, as `where`."""

    @functools.wraps(command)
    def with_place(*args: Any, store: str | None, trust: tuple[str, ...], **words: Any) -> Any:
        where = Where(store=store, trust=trust)
        try:
            return command(*args, where=where, **words)
        except HpcenvError as problem:
            # Who raised it knows the folder, not how the user came to name it.
            problem.hint = where.in_commands(problem.hint) if problem.hint else problem.hint
            raise

    store = option("--store", metavar="DIR", help="Where images are kept, if not HPCENV_STORE or the project's.")
    owners = option("--trust", metavar="USER", multiple=True, help="... also if this user owns that folder.")
    return cast("Command", store(owners(with_place)))


def open_project(start: Path | None = None) -> Workspace:
    """Return the project around a folder, the user's if none is named, with the store that applies."""
    return Where().project(start)


# What makes no other run of a submission.
_ABOUT_SHOWING = ("--dry-run", "--test-only", "--wait", "--json")


def command_line() -> tuple[str, ...]:
    """Return the words that make this run again, starting with `hpcenv`.

    Words about how it is shown are left out: a dry run then says exactly what submit writes.
    """
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    return ("hpcenv", *(w for w in words[:end] if w not in _ABOUT_SHOWING), *words[end:])


def quoted(words: tuple[str, ...]) -> str:
    """Return a command line that can be typed again."""
    import shlex

    return shlex.join(words)


def token() -> str:
    """Return eight hex digits that tell apart runs submitted in the same second, fifty of them even."""
    # What secrets.token_hex does, without its import of random and hmac.
    return os.urandom(4).hex()


def local_time() -> time.struct_time:
    return time.localtime()
