"""The click group of all commands. After a command has ended, this module handles errors and the exit status.

Runs on: LOGIN NODE. The module of a command is imported when the command is used (LazyGroup).
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from hpcenv.cli import _errors, _help, _streams
from hpcenv.cli._group import LazyGroup
from hpcenv.cli._help import VERBS
from hpcenv.cli.bundle import VERBS as BUNDLE_VERBS
from hpcenv.cli.data import VERBS as DATA_VERBS
from hpcenv.cli.image import VERBS as IMAGE_VERBS
from hpcenv.cli.kernel import VERBS as KERNEL_VERBS
from hpcenv.cli.net import VERBS as NET_VERBS
from hpcenv.cli.session import VERBS as SESSION_VERBS
from hpcenv.errors import RunNotFound
from hpcenv.project.context import of_user
from hpcenv.version import VERSION


class _Hpcenv(LazyGroup):
    def get_help(self, ctx: click.Context) -> str:
        return _help.page()


@click.group(
    cls=_Hpcenv,
    verbs=VERBS,
    package="hpcenv.cli",
    help="Submit to Slurm, and know that every node runs the locked environment.",
    modules={"list": "listing"},
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": 80},
    invoke_without_command=True,
)
@click.version_option(VERSION, prog_name="hpcenv")
@click.pass_context
def cli(context: click.Context) -> None:
    """Run one of the commands. `--help` prints the text of `_help.page`."""
    if context.invoked_subcommand is None:
        from hpcenv.cli import _here  # imports all modules for projects and runs

        print(_help.page())
        _here.show()


def run(argv: list[str]) -> int:
    """Run a command, print errors in the form of hpcenv, and return the exit status."""
    stdout = sys.stdout
    os.environ.update(of_user(os.environ))
    try:
        status: Any = cli.main(args=argv, prog_name="hpcenv", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except SystemExit as stop:
        # If a pipe is closed, click replaces stdout, and then ends with status 1.
        if sys.stdout is not stdout:
            raise BrokenPipeError from stop
        raise
    except (BrokenPipeError, _streams.OutputLost):
        raise
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (a bug in hpcenv is reported like any other error)
        problem = _errors.from_exception(error)
        if isinstance(problem, RunNotFound):
            # This search is the last one. So hpcenv asks Slurm only about a run that was not found.
            from hpcenv.runs import lost  # imported here, because every command loads _command_line.py

            problem = lost.explain(problem, os.environ)
        return _errors.show(problem, as_json=_wants_json(argv), command=_command_name(argv))
    return status if isinstance(status, int) else 0


def _wants_json(argv: list[str]) -> bool:
    return "--json" in (argv[: argv.index("--")] if "--" in argv else argv)


def _command_name(argv: list[str]) -> str:
    """Return the typed command for the JSON envelope, for example `lock` or `image pull`."""
    name = next((word for word in argv if word in VERBS or word == "--"), "")
    groups = {
        "bundle": BUNDLE_VERBS,
        "data": DATA_VERBS,
        "image": IMAGE_VERBS,
        "kernel": KERNEL_VERBS,
        "net": NET_VERBS,
        "session": SESSION_VERBS,
    }
    verbs = groups.get(name)
    if verbs is None:
        return name.removeprefix("--")
    inner = next((word for word in argv[argv.index(name) + 1 :] if word in verbs), None)
    if inner is None and name == "bundle":
        inner = "make"  # `hpcenv bundle RUN`
    return name if inner is None else f"{name} {inner}"
