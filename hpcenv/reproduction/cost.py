"""What a reproduction will cost: nodes, GPU hours, minutes, bytes to fetch. Pure. Runs on: LOGIN NODE.

The estimate uses the record of the run that is reproduced. That run may have used different hardware. Unknown values
are None.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcenv.project.lockfile import Lockfile
from hpcenv.reproduction.measured import OF_RANKS
from hpcenv.reproduction.run_record import RunRecord

# Seconds for loading torch and connecting the ranks. They are added to the time of the steps.
_START_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The known part of what a reproduction will cost.

    Attributes:
        nodes, gpus_per_node: the size of the job; 0 without a job.
        minutes: the time of the job, without its time in the queue.
        gpu_hours: GPU hours of the job; 0 for a job without GPUs.
        fetch_bytes: size of the image's compressed layers, in bytes; 0 if the image is already on this cluster.
        basis: a text that says from which recorded values the estimate comes.
    """

    nodes: int
    gpus_per_node: int
    minutes: float | None
    gpu_hours: float | None
    fetch_bytes: int | None
    basis: str


def proofs_cost() -> Cost:
    """Return the cost of `--rung 0`."""
    return Cost(nodes=0, gpus_per_node=0, minutes=0.0, gpu_hours=0.0, fetch_bytes=0, basis="files are read, no job")


def estimate(
    record: RunRecord, locked: Lockfile | None, *, nodes: int, steps: int | None, has_image: bool, slower: int = 1
) -> Cost:
    """Return the cost of a job.

    Args:
        record: record of the run that is reproduced.
        nodes: number of nodes of the new job.
        steps: how many steps are repeated, from the first on; None for all steps.
        has_image: whether the SIF is already on this cluster.
        slower: factor by which a step takes longer, because fewer ranks do the same work.
    """
    seconds, basis = _seconds(record, steps, slower)
    gpus = record.shape.gpus_per_node
    hours = None if seconds is None else nodes * gpus * seconds / 3600
    return Cost(
        nodes=nodes,
        gpus_per_node=gpus,
        minutes=None if seconds is None else seconds / 60,
        gpu_hours=hours if gpus else 0.0,
        fetch_bytes=_fetch_bytes(locked, has_image=has_image),
        basis=basis,
    )


def _seconds(record: RunRecord, steps: int | None, slower: int) -> tuple[float | None, str]:
    training, check = record.timings.training, record.timings.check or 0.0
    if training is None:
        return None, "the run has no record of how long it took"
    done = max((one.last_step for one in record.metrics if one.source in OF_RANKS), default=0)
    if steps is None or (done and steps >= done):
        return check + training * slower, f"the run took {training:.0f} s, and {check:.0f} s for its check"
    if not done:
        return check + training * slower, "at most as long as the run: it recorded no steps"
    part = training * steps / done * slower
    return check + _START_SECONDS + part, f"{steps} of {done} steps, which took {training:.0f} s"


def _fetch_bytes(locked: Lockfile | None, *, has_image: bool) -> int | None:
    if has_image or (locked is not None and locked.container is None):
        return 0
    container = None if locked is None else locked.container
    return sum(layer.size for layer in container.layers) if container is not None and container.layers else None
