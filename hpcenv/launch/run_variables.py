"""The variables in which the ranks, and `hpcenv.training`, find the facts about their run.

Runs on: COMPUTE NODE. Pure.
"""

from __future__ import annotations

from pathlib import Path

from hpcenv.records.manifest import Manifest, Source
from hpcenv.records.run_folder import RunFolder

# Enough digits to distinguish two states of a work tree.
_DIGITS = 12


def run_variables(manifest: Manifest, *, attempt: int) -> dict[str, str]:
    """Return the variables of all ranks of an attempt."""
    run = RunFolder(Path(manifest.run_folder))
    variables = {
        "HPCENV_RUN": manifest.run,
        "HPCENV_RUN_FOLDER": str(run.path),
        "HPCENV_FINGERPRINT": manifest.fingerprint,
        "HPCENV_COMMIT": commit_of(manifest.source),
        "HPCENV_STOP_FOLDER": str(run.stopping),
        "HPCENV_CHECKPOINTS": str(run.checkpoints),
        "HPCENV_RESUME_FROM": manifest.resume_from,
        "HPCENV_ATTEMPT": str(attempt),
    }
    return {name: value for name, value in variables.items() if value}


def commit_of(source: Source | None) -> str:
    """Return the commit of the code, and a digest of the changes if files differ from it. Return "" without git."""
    if source is None or not source.commit:
        return ""
    return f"{source.commit}-dirty.{source.diff_sha256[:_DIGITS]}" if source.dirty else source.commit
