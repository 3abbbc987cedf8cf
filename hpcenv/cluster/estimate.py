"""When a job would start, as `sbatch --test-only` estimates it.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpcenv import process
from hpcenv.cluster import slurm_command
from hpcenv.errors import SubmitRejected


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Slurm's estimate of when a job would start if it were submitted now.

    Attributes:
        start: local time of the cluster, as Slurm writes it.
        processors: CPUs of the job.
        nodes: which nodes the job would get, as a host list expression.
        partition: partition of the job; empty if Slurm does not report the partition.
        said: the line that Slurm printed.
    """

    start: str
    processors: int
    nodes: str
    partition: str
    said: str


# Slurm 26.05 prints an `a` after the time (seen with 26.05.5). Slurm 22.05 and 24.11 do not.
_ESTIMATE = re.compile(
    r"Job \d+ to start at (?P<start>\S+)(?: \w)? using (?P<processors>\d+) processors? "
    r"on (?:nodes? )?(?P<nodes>\S+)(?: in partition (?P<partition>\S+))?"
)


def estimate_start(script: str, environ: Mapping[str, str], *, seconds: float = 60.0) -> Estimate:
    """Ask `sbatch --test-only` when a script would start. Nothing is queued, and no file is written.

    Args:
        script: text of the batch script.

    Raises:
        ToolMissing, ToolFailed: sbatch is missing, or did not answer.
        SubmitRejected: Slurm would refuse the job, or has no estimate.
    """
    sbatch = process.find_tool("sbatch", needed_for="ask Slurm when a job would start", path=environ.get("PATH"))
    argv = [sbatch, "--test-only"]
    done = process.run(
        argv, timeout=seconds, env=slurm_command.clean_environment(environ), stdin=script, accept=tuple(range(256))
    )
    said = f"{done.stderr}\n{done.stdout}"
    found = parse_estimate(said)
    if found is not None:
        return found
    if done.status == 0:
        raise SubmitRejected("Slurm gave no estimate", why=said.strip()[:500] or "`sbatch --test-only` said nothing")
    reason, hint = slurm_command.rejection(said.strip())
    raise SubmitRejected(
        "Slurm would not start this job",
        why=f"{reason}; the estimate ignores nodes that are down or drained; in the queue, a job waits for them",
        hint=hint,
    )


def parse_estimate(text: str) -> Estimate | None:
    """Return the estimate in the output of `sbatch --test-only`; None if no line has an estimate."""
    found = _ESTIMATE.search(text)
    if found is None:
        return None
    return Estimate(
        start=found["start"],
        processors=int(found["processors"][:12]),
        nodes=found["nodes"],
        partition=found["partition"] or "",
        said=found[0],
    )
