"""What each rank read back from its determinism switches, and what a script changed.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only. The ranks write these files (incontainer/start_hook). The
reader limits the size and the number of files. A rank without a file has applied no switch, even if a profile was
requested.

There is one file for each rank and attempt: `determinism/attempt-K/rank-R.json`. The rank writes the whole file at its
start, after its first optimizer step and at its end. All values are text as Python shows them: `True`, `ieee`,
`:4096:8`. The text `(not set)` stands for an environment variable that does not exist. null stands for a value that was
not read.

    {"schema": 1, "attempt": 0, "rank": 0, "local_rank": 0, "world_size": 4, "restart": 0, "pid": 4711,
     "profile": "bitwise", "applied_by": "start-hook", "seed": 0, "rank_seed": 0, "state": "ended",
     "versions": {"python": "3.11.2", "torch": "2.13.0+cpu", "numpy": "2.3.1"},
     "switches": [{"name": "torch.deterministic-algorithms", "asked": "True", "at_start": "True",
                   "after_first_step": "True", "at_end": "False", "changed_at": "train.py:12"}],
     "without_deterministic_kernel": [{"operation": "cumsum_cuda_kernel", "count": 3}],
     "problems": [], "steps": 20, "stopped_after": 0}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpcenv.errors import RecordInvalid
from hpcenv.records.codec import decode_record
from hpcenv.records.files import read_file
from hpcenv.records.manifest import DeterminismProfile
from hpcenv.records.metrics import rank_files
from hpcenv.records.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class SwitchReading:
    """One switch of one rank.

    Attributes:
        name: name in the table of switches (incontainer/start_hook/switches.py).
        asked: the value that the profile gives the switch; None if the profile only records the switch.
        at_start: the value after the profile was applied; None if this value was not read, for example because the rank
            never imported torch.
        after_first_step: the value after the first optimizer step; None without such a step.
        at_end: the value when the rank ended; None if the rank was killed.
        changed_at: `file:line` where the script set the switch to another value; empty if hpcenv saw no such line.
    """

    name: str
    asked: str | None = None
    at_start: str | None = None
    after_first_step: str | None = None
    at_end: str | None = None
    changed_at: str = ""

    @property
    def effective(self) -> str | None:
        """The newest value that was read; None if no value was read."""
        readings = (self.at_end, self.after_first_step, self.at_start)
        return next((value for value in readings if value is not None), None)

    @property
    def overridden(self) -> bool:
        """Whether any value that was read differs from the value that the profile requires."""
        values = {value for value in (self.at_start, self.after_first_step, self.at_end) if value is not None}
        return self.asked is not None and bool(values - {self.asked})


@dataclass(frozen=True, kw_only=True)
class OperationCount:
    """An operation that ran without a deterministic kernel, and how often torch warned about it."""

    operation: str
    count: int


@dataclass(frozen=True, kw_only=True)
class RankDeterminism:
    """What one rank applied and read back in one attempt.

    Attributes:
        restart: how many times torchrun had started the ranks before this process.
        profile: the requested profile.
        applied_by: `start-hook`, `seed_everything`, or empty if nothing was applied (profile `off` without a seed).
        seed: base seed of the run.
        rank_seed: seed of Python, NumPy and torch in this rank; None if no seed was set.
        state: when the file was written last: `started`, `first-step` or `ended`.
        versions: versions of python, torch and numpy, if they were loaded.
        without_deterministic_kernel: operations about which torch warned (profile `seeded`).
        cpus: CPUs that the rank may use, in Linux's list format; empty if it was not bound.
        node: name of the node in a run with GPUs; else empty.
        device: torch's name of the device of the first backward pass; empty without such a pass or without GPUs.
        gpu_model, gpu_uuid, gpu_bus: model, UUID and PCI address of that device; empty if the value is unknown, or if
            the device is no GPU.
        problems: one sentence for each switch or value that could not be applied or read.
        steps: number of optimizer steps in this process.
        samples: samples that the rank took from its loaders between the first two steps; None if the value is unknown.
        stopped_after: the number of optimizer steps after which the start hook ended this process; 0 if the hook did
            not end it.
        apart: whether the rank trained with a loss, but without any collective operation of torch.distributed.
    """

    schema: int
    attempt: int
    rank: int
    local_rank: int
    world_size: int
    restart: int
    pid: int
    profile: DeterminismProfile
    applied_by: Literal["", "start-hook", "seed_everything"] = ""
    seed: int = 0
    rank_seed: int | None = None
    state: Literal["started", "first-step", "ended"] = "started"
    versions: dict[str, str] = field(default_factory=dict)
    switches: tuple[SwitchReading, ...] = ()
    without_deterministic_kernel: tuple[OperationCount, ...] = ()
    cpus: str = ""
    node: str = ""
    device: str = ""
    gpu_model: str = ""
    gpu_uuid: str = ""
    gpu_bus: str = ""
    problems: tuple[str, ...] = ()
    steps: int = 0
    samples: int | None = None
    stopped_after: int = 0
    apart: bool = False


@dataclass(frozen=True, kw_only=True)
class UnreadableRank:
    """A file of a rank that cannot be read, and why."""

    attempt: int
    rank: int
    why: str


def read_run_determinism(run: RunFolder) -> tuple[tuple[RankDeterminism, ...], tuple[UnreadableRank, ...]]:
    """Return what all ranks of a run read back, by attempt and rank, and the files that cannot be read."""
    found, problems = [], []
    for attempt, rank, path in rank_files(run.determinism, ".json"):
        try:
            found.append(read_determinism(path, attempt, rank))
        except RecordInvalid as error:
            problems.append(UnreadableRank(attempt=attempt, rank=rank, why=error.why or error.what))
    return tuple(found), tuple(problems)


def read_determinism(path: Path, attempt: int, rank: int) -> RankDeterminism:
    """Return the record of one rank.

    Raises:
        RecordInvalid: the file is unreadable, too large, not such a record, or belongs to a different rank.
    """
    try:
        text = read_file(path, follow=False).decode("utf-8")
    except OSError as error:
        raise RecordInvalid(f"cannot read `{path}`", why=error.strerror) from error
    except UnicodeDecodeError as error:
        raise RecordInvalid(f"`{path}` is not UTF-8 text", why=str(error)) from error
    record = decode_record(RankDeterminism, text, origin=str(path))
    if (record.attempt, record.rank) != (attempt, rank):
        other = f"it belongs to attempt {record.attempt}, rank {record.rank}"
        raise RecordInvalid(f"`{path}` belongs to another rank", why=other)
    return record
