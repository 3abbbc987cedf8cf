"""`--wait` and `--timeout` of the commands that submit. Runs on: LOGIN NODE."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import click

from hpcenv.cli import _duration
from hpcenv.cli._help_all import RareOption
from hpcenv.errors import Command, Interrupted, UsageError


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The user's request to follow a run until it ends.

    Attributes:
        timeout: maximum seconds to wait; None for no limit.
        verbose: whether to print the whole verdict and the settings, too.
    """

    timeout: float | None = None
    verbose: bool = False


def wait_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add `--wait`, `--timeout` and `--verbose` to a command."""
    verbose = click.option(
        "-v", "--verbose", is_flag=True, cls=RareOption,
        help="With --wait: print the whole verdict, with the settings of the ranks.",
    )  # fmt: skip
    timeout = click.option(
        "--timeout",
        cls=RareOption,
        metavar="TIME",
        callback=_duration.parse_seconds,
        help="With --wait: wait at most this long, for example 90 (seconds), 30m, 2h, 1d or HH:MM:SS, and then end "
        "with exit status 124. The run continues.",
    )
    wait = click.option(
        "--wait", is_flag=True, help="Print the log until the run ends, and end with the exit status of the run."
    )
    return wait(timeout(verbose(command)))


def wait_of(wait: bool, timeout: float | None, verbose: bool) -> Wait | None:
    """Return the combined value of `--wait`, `--timeout` and `--verbose`; None means "do not wait".

    Raises:
        UsageError: `--timeout` or `--verbose` is given without `--wait`.
    """
    if timeout is not None and not wait:
        raise UsageError(
            "`--timeout` needs --wait",
            why="it limits how long hpcenv waits, not how long the run takes",
            hint="add --wait, or set the time limit of the job: --time",
        )
    if verbose and not wait:
        hint = ("add --wait; for a run that is already submitted: ", Command("hpcenv", "report", "RUN"))
        raise UsageError("`--verbose` needs --wait", why="the verdict is made by the job", hint=hint)
    return Wait(timeout=timeout, verbose=verbose) if wait else None


@contextmanager
def interruptible(continues: str, *words: str, again: Sequence[str] = ("wait",)) -> Iterator[None]:
    """Turn ^C during a wait into an error. The error says what continues, how to wait again, and how to cancel it.

    Args:
        continues: the text that says what continues.
        words: the names of the runs. The commands in the hint get these names.
        again: the command of hpcenv that waits again.

    Raises:
        Interrupted: the user stopped the wait.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        look, cancel = Command("hpcenv", *again, *words), Command("hpcenv", "cancel", *words)
        hint = ("to look again: ", look, "; to cancel it: ", cancel)
        raise Interrupted(f"interrupted; {continues}", hint=hint) from stop
