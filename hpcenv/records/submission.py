"""How a run was submitted.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only. This record is not in `records/outcome.py`, because that
module imports the records of facts, which `hpcenv submit` does not need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Submission:
    """How a run was submitted (`submission.json`). The login node writes this file once."""

    schema: int
    run: str
    cluster: Literal["slurm", "local"]
    job_id: str
    submitted: float
    command: tuple[str, ...]
    chain: tuple[str, ...] = ()
    """Job ids of a chain, the first one first."""
    nodes: int = 0
    """How many nodes were requested; 0 if not recorded."""
    verifies: bool = False
    """Whether `hpcenv verify --nodes` submitted the job. Such a job only checks its nodes."""
    after: tuple[str, ...] = ()
    """Names of the runs that had to complete first."""
    session: str = ""
    """Name of the session if this run is a session; empty for all other runs."""
