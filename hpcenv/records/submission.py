"""How a run was submitted.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only. It is not in `records/outcome.py`, because that imports the
facts of the nodes, which `hpcenv submit` does not need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Submission:
    """How a run came to be (`submission.json`): written once, by the login node."""

    schema: int
    run: str
    cluster: Literal["slurm", "local"]
    job_id: str
    submitted: float
    command: tuple[str, ...]
    chain: tuple[str, ...] = ()
    """Job ids of a chain, the first one first."""
    nodes: int = 0
    """How many nodes were asked for; 0 where that was not recorded."""
    verifies: bool = False
    """The job is one of `hpcenv verify --nodes`: it checks its nodes and trains nothing."""
    after: tuple[str, ...] = ()
    """Names of the runs that had to complete first."""
