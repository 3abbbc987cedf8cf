"""Words on the command line -> one step -> text or JSON.

Runs on: LOGIN NODE. The only place with click, print, exit and os.environ. Verbs are
imported when they are used, so `hpcenv --help` loads none of what they need.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

# isort: off
from hpcenv.cli import _later  # noqa: F401  (before click)
import click
# isort: on

from hpcenv.cli import _render, _words
from hpcenv.cli._group import VerbGroup
from hpcenv.errors import HpcenvError, Interrupted
from hpcenv.version import VERSION

# Verb -> its one-line help, in the order of a project's life.
VERBS = {
    "doctor": "Say what this cluster is like, and write its site profile.",
    "init": "Write a commented hpcenv.toml.",
    "lock": "Resolve the environment and write its lockfile.",
    "image": "Convert, keep, prove and make images.",
    "verify": "Compare an environment, a SIF or nodes with the lockfile.",
    "explain": "Say what a field is, where it comes from and why it matters.",
    "submit": "Submit a script to run on every node as locked.",
    "status": "Say what a run is doing.",
    "list": "List the runs, the newest first.",
    "logs": "Print a run's log; -f follows it.",
    "attach": "Open a shell in a running run, on one of its nodes.",
    "wait": "Wait for runs and end with their exit status.",
    "cancel": "End runs.",
    "report": "Say what became of a run, with its verdict.",
    "rerun": "Submit a run again, with the same inputs or changed flags.",
    "clean": "Remove old run folders; says first which.",
    "diff": "Say what differs between lockfiles and runs.",
    "export": "Write the lockfile in another tool's format.",
}


@click.group(
    cls=VerbGroup,
    verbs=VERBS,
    package="hpcenv.cli",
    modules={"list": "listing"},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog="Exit statuses and error codes: docs/reference/errors.md",
)
@click.version_option(VERSION, prog_name="hpcenv", cls=_words.Option)
def cli() -> None:
    """Lock an environment, submit to Slurm, and know that every node runs it."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    words = sys.argv[1:] if arguments is None else arguments
    # The usual 700 is for programs that make garbage: here nearly all that is made at first is kept.
    gc.set_threshold(20_000)
    _render.prepare_streams()
    try:
        status = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # `hpcenv logs | head` is no failure; 141 is what a shell gives for SIGPIPE.
        _render.close_streams()
        status = 141
    sys.exit(status)


def _verb(words: list[str]) -> str:
    """Return the name of the verb that was typed, for the JSON envelope: `lock`, `image pull`."""
    verb = next((word for word in words if word in VERBS), "")
    if verb != "image":
        return verb
    from hpcenv.cli.image import VERBS as IMAGE_VERBS

    inner = next((word for word in words[words.index(verb) + 1 :] if word in IMAGE_VERBS), None)
    return verb if inner is None else f"{verb} {inner}"


def _run(words: list[str]) -> int:
    """Run a verb; return its exit status, with every error told in our own form."""
    own = words[: words.index("--")] if "--" in words else words
    as_json = "--json" in own
    verb = _verb(own)
    stdout = sys.stdout
    try:
        status: Any = cli.main(args=words, prog_name="hpcenv", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except SystemExit as stop:
        # What click makes of a closed pipe: status 1, and a stdout that does not complain.
        if sys.stdout is not stdout:
            raise BrokenPipeError from stop
        raise
    except BrokenPipeError:
        raise
    except (click.exceptions.Abort, KeyboardInterrupt):
        problem: HpcenvError = Interrupted("interrupted")
    except click.ClickException as error:
        problem = _render.from_click(error)
    except HpcenvError as error:
        problem = error
    except OSError as error:
        problem = _render.from_os(error)
    except Exception as error:  # noqa: BLE001  (the last place to say it in our own form)
        problem = _render.unexpected(error)
    else:
        return status if isinstance(status, int) else 0
    return _render.error(problem, as_json=as_json, command=verb)
