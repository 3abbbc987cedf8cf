"""`hpcenv status`: what a run is doing. Runs on: LOGIN NODE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from hpcenv.steps.runs import RunStatus, find_run, open_run, read_status
from hpcenv.steps.wait import wait_for


def status(start: Path, word: str | None, *, environ: Mapping[str, str], runs: str | None = None) -> RunStatus:
    """Return the status of a run.

    Args:
        start: where the user is.
        word: run folder, run name, job id; None for the latest run.
    """
    return read_status(find_run(start, word, runs=runs), environ)


def wait(
    run_folder: Path,
    *,
    environ: Mapping[str, str],
    pause: Callable[[float], None],
    on_status: Callable[[RunStatus], None],
    timeout: float | None = None,
) -> RunStatus:
    """Wait until a run has ended, or Slurm has forgotten it, and return its last status: see `wait_for`."""
    run = open_run(run_folder)
    return wait_for([run], environ=environ, pause=pause, on_status=on_status, timeout=timeout)[0]
