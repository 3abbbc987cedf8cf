"""Find out whether Slurm's commands get no answer because munge does not work on this machine.

Runs on: LOGIN NODE. If munge is down, Slurm's commands try for a minute before they print an error (24.11).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from hpcenv import process
from hpcenv.errors import HpcenvError, ToolFailed

# Slurm normally answers in less time. If a command takes longer, munge is tested.
SECONDS_UNTIL_ASKED = 2.0
_SECONDS = 5.0
DOWN = "Slurm cannot check who you are: munge does not work on this machine"


def explain(environ: Mapping[str, str]) -> HpcenvError | None:
    """Return an error if munge does not work on this machine; None if munge works, or if this site does not use it."""
    munge = shutil.which("munge", path=environ.get("PATH"))
    if munge is None:
        return None
    try:
        process.run([munge, "--no-input"], timeout=_SECONDS, env=environ)
    except ToolFailed as error:
        said = next((line for line in error.stderr.splitlines() if line.strip()), error.what)
        return describe(said.strip())
    except HpcenvError:
        return None
    return None


def describe(said: str) -> ToolFailed:
    """Return the error for the text that `munge` printed."""
    return ToolFailed(
        DOWN,
        why=said,
        hint="tell your site's support that munged is down on this machine; `munge -n` shows when it works again",
        argv=("munge", "--no-input"),
        stderr=said,
    )
