"""Print results as text or JSON, and define the options that several commands share.

Results are printed to stdout, and all other text to stderr. No output needs colours or a terminal.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from hpcenv.cli import _errors
from hpcenv.cli._complete import run_names
from hpcenv.cli._help_all import RareOption
from hpcenv.cli._terminal import clean_text
from hpcenv.errors import Command, Hint, HpcenvError, Interrupted, UsageError, render_hint
from hpcenv.project import context as project_context
from hpcenv.project import document
from hpcenv.project.context import Context
from hpcenv.project.store_config import StorePlace
from hpcenv.project.workspace import SPEC_NAME, TO_BEGIN, Workspace, open_workspace, project_around
from hpcenv.submission.choose_store import find_store

Error = TypeVar("Error", bound=HpcenvError)
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def json_option(command: Decorated) -> Decorated:
    """Give a command `--json`."""
    with_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
    return with_json(command)


def runs_option(command: Decorated) -> Decorated:
    """Give a command the option --runs-dir, as its argument `runs`."""
    text = "Folder that holds the runs. Default: `runs` under [paths] in hpcenv.toml."
    return click.option("--runs-dir", "runs", metavar="DIR", help=text)(command)


def run_argument(command: Decorated) -> Decorated:
    """Give a command the argument RUN and the option --runs-dir."""
    return click.argument("run", required=False, shell_complete=run_names)(runs_option(command))


def consent(what: str, *, as_json: bool) -> None:
    """Ask the user whether `what` may be removed.

    Raises:
        UsageError: hpcenv cannot ask the user.
        Interrupted: the answer is no.
    """
    if as_json or not sys.stdin.isatty():
        raise UsageError(
            f"{what} would be removed",
            why="hpcenv cannot ask for consent: standard input is not a terminal",
            hint="add --yes, or --dry-run",
        )
    if not click.confirm("Remove them?", err=True):
        raise Interrupted("nothing was removed")


def success(command: str, data: Any) -> None:
    """Print the JSON envelope of a command that succeeded."""
    _errors.envelope(command, ok=True, data=to_plain(data))


def verdict_on(command: str, data: Any, *, ok: bool, problem: HpcenvError | None = None) -> None:
    """Print the JSON envelope of a command. The result of the command may be a failure."""
    _errors.envelope(command, ok=ok, data=to_plain(data), problem=problem)


def to_plain(value: Any) -> Any:
    """Return a result as plain data for JSON."""
    if isinstance(value, document.Document):
        return document.plain(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no nan and no inf
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def say(line: str = "") -> None:
    """Print a line of the result to standard output, with control characters as escapes."""
    print(clean_text(line), flush=True)


def put(data: str) -> None:
    """Print text that another program may read. In a pipe, the text is unchanged."""
    print(data, end="", flush=True)


def tell(line: str) -> None:
    """Print a line about the work to standard error, with control characters as escapes."""
    print(clean_text(line), file=sys.stderr, flush=True)


def cwd() -> Path:
    """Return the current folder of the user. Links in its path are not resolved."""
    return project_context.user_folder(os.environ)


def cache_folder() -> Path:
    """Return the folder of files that hpcenv can compute again."""
    return project_context.cache_folder(os.environ)


# The commands of `hpcenv image` that have `store_option`.
_WITH_STORE = ("build", "inspect", "list", "prune", "pull", "verify")


def _with_options(part: str | Command, options: tuple[str, ...]) -> str | Command:
    takes_store = isinstance(part, Command) and (
        (part[:2] == ("hpcenv", "image") and part[2] in _WITH_STORE) or part[:3] == ("hpcenv", "data", "fetch")
    )
    return Command(*part[:3], *options, *part[3:]) if takes_store and "--store" not in part else part


class Where:
    """The store of blobs and SIFs, from the options of the command line."""

    def __init__(self, *, store: str | None = None, trust: tuple[str, ...] = ()) -> None:
        self.store, self.trust = store, trust

    def project(self, start: Path | None = None, *, script: str | None = None) -> Workspace:
        """Return the project around a folder (default: the current folder), with the store to use.

        Args:
            start: the folder.
            script: the script that the user wants to submit. If there is no project around the folder, but the script
                is in a project, the error names the project of the script.
        """
        here = start or cwd()
        return open_workspace(
            here,
            store=self._named(),
            default_store=_default_store,
            trusted_owners=self._owners(),
            hint=_without_project(here, script),
        )

    @property
    def is_projects(self) -> bool:
        """Whether hpcenv.toml may name the store, because the user did not name a store."""
        return self._named() is None

    def place(self) -> StorePlace:
        """Return the folder for images.

        hpcenv looks at these settings in this order: `--store`, HPCENV_STORE, `[paths] store` of the project, [store]
        of the site profile. The first setting that is given names the folder. Without one, the default folder is used.
        """
        here, named = cwd(), self._named()
        if named is None and any((folder / SPEC_NAME).is_file() for folder in (here, *here.parents)):
            return self.project().store_place
        root, origin = _default_store(None, None) if named is None else named
        return StorePlace(root=root, trusted_owners=self._owners(), origin=origin)

    def options(self) -> tuple[str, ...]:
        """Return the options with which another command finds the same store."""
        named = self.store or os.environ.get("HPCENV_STORE")
        owners = (word for user in self.trust for word in ("--trust", user))
        return (*(("--store", named) if named else ()), *owners)

    def with_options(self, error: Error) -> Error:
        """Return an error with a hint in which each command that has the option `--store` names the store."""
        return error.changed(hint=self._with_options(error.hint_parts))

    def text(self, *parts: str | Command) -> str:
        """Return text in which each command that has the option `--store` names the store."""
        return render_hint(self._with_options(parts))

    def _with_options(self, parts: tuple[str | Command, ...]) -> tuple[str | Command, ...]:
        options = self.options()
        return tuple(_with_options(part, options) for part in parts)

    def _owners(self) -> tuple[str, ...]:
        return (*self.trust, *os.environ.get("HPCENV_STORE_OWNERS", "").replace(",", " ").split())

    def _named(self) -> tuple[Path, str] | None:
        named, origin = (self.store, "--store") if self.store else (os.environ.get("HPCENV_STORE"), "HPCENV_STORE")
        return (Path(os.path.abspath(cwd() / Path(named).expanduser())), origin) if named else None


def _without_project(here: Path, script: str | None) -> Hint:
    """Return a hint for a user who is not in a project.

    The hint never suggests `hpcenv init` in the home folder or in a folder above the home folder.
    """
    around = None if script is None else project_around(Path(os.path.abspath(here / script)).parent)
    if around is not None:
        return f"cd {shlex.quote(os.path.relpath(around, here))} (the project of `{script}` is there)"
    home = os.environ.get("HOME")
    if home and Path(os.path.realpath(home)).is_relative_to(os.path.realpath(here)):
        return "cd PROJECT, the folder of your project; to begin one: `mkdir PROJECT && cd PROJECT && hpcenv init`"
    return TO_BEGIN


def _default_store(root: Path | None, site: str | None) -> tuple[Path, str]:
    context = Context(environ=os.environ, cwd=cwd(), now=local_time(), token="", command=(), cache=cache_folder())
    return find_store(context, root, site)


def store_option(command: Decorated) -> Decorated:
    """Give a command the options --store and --trust. The command gets both options as the parameter `where`."""

    @functools.wraps(command)
    def with_place(*args: Any, store: str | None, trust: tuple[str, ...], **words: Any) -> Any:
        where = Where(store=store, trust=trust)
        try:
            return command(*args, where=where, **words)
        except HpcenvError as problem:
            # The code that raised the error has the folder, but cannot find out whether an option named the folder.
            raise where.with_options(problem) from problem

    store = click.option(
        "--store",
        metavar="DIR",
        help="Folder of images. Default: the folder that HPCENV_STORE names, else the store of the project.",
    )
    text = "Use the folder of --store even if USER owns the folder."
    owners = click.option("--trust", cls=RareOption, metavar="USER", multiple=True, help=text)
    return cast("Decorated", store(owners(with_place)))


def open_project(start: Path | None = None, *, script: str | None = None) -> Workspace:
    """Return the project around a folder (default: the current folder), with the store to use; see `Where`."""
    return Where().project(start, script=script)


# Options of a submission that do not change the run.
_ABOUT_SHOWING = ("--dry-run", "--test-only", "--wait", "--verbose", "-v", "--json")


def command_line() -> tuple[str, ...]:
    """Return the command line, starting with `hpcenv`, that submits the same run again.

    `--accept` and the options for the output are left out, so that a dry run prints exactly the text that `submit`
    writes.
    """
    words = without_accept(sys.argv[1:])
    end = words.index("--") if "--" in words else len(words)
    return ("hpcenv", *(w for w in words[:end] if w not in _ABOUT_SHOWING), *words[end:])


def without_accept(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command line without `--accept DIGEST`."""
    end = words.index("--") if "--" in words else len(words)
    before = ["", *words][:end]
    kept = (
        word
        for word, last in zip(words[:end], before, strict=True)
        if not word.startswith("--accept=") and "--accept" not in (word, last)
    )
    return (*kept, *words[end:])


def quoted(words: tuple[str, ...]) -> str:
    """Return a command line that can be typed again."""
    return shlex.join(words)


def own_program() -> str:
    """Return the absolute path of the program `hpcenv`, even if this process was started as `python3 -m hpcenv`."""
    started = Path(os.path.abspath(sys.argv[0]))
    return str(started if started.name == "hpcenv" else Path(sys.executable).with_name("hpcenv"))


def token() -> str:
    """Return eight random hex digits. With them, runs that are submitted in the same second have different names."""
    # secrets.token_hex does the same, but it imports random and hmac.
    return os.urandom(4).hex()


def local_time() -> time.struct_time:
    return time.localtime()
