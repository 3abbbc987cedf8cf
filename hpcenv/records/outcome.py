"""How the ranks and nodes of a run ended.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcenv.records.facts import Difference
from hpcenv.records.manifest import Launcher
from hpcenv.records.network import PortErrors


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How one rank ended.

    Attributes:
        rank, local_rank: global rank, and rank on its node; -1 if the value is unknown.
        pid: process id on its node.
        status: exit status; if a signal ended the rank, 128 + its number; None if the value is unknown.
        signal: name of the signal, for example `SIGKILL`; empty without a signal.
        ended: seconds since the epoch; None if the value is unknown.
        message: the exception in one line, or other information.
        traceback: the Python traceback; empty if the rank wrote no traceback, or if it is unknown.
        source: where message and traceback were found: in torchelastic's `error-file`, or in the rank's `stderr`; empty
            if they were not found.
        log: path of the file with the rank's standard error, relative to the run folder.
        program: whether this record is about the program that `--launcher none` started, and not about a rank. That
            program starts the ranks itself.
    """

    rank: int
    local_rank: int
    pid: int
    status: int | None
    signal: str = ""
    ended: float | None = None
    message: str = ""
    traceback: str = ""
    source: Literal["error-file", "stderr", ""] = ""
    log: str = ""
    program: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeExit:
    """How the launch ended on one node, independent of Slurm's accounting.

    Attributes:
        status: exit status of torchrun; if a signal ended torchrun, 128 + the signal's number.
        asked_to_end: name of the signal that asked the launch on this node to end; empty without such a signal.
            Such a node ended because another node failed or because the job was cancelled. So the node's status says
            nothing about the training.
        stopped: why the training was asked to save its state and end; empty without such a request. `unknown`: Slurm
            gave no reason for the request.
        saved: whether the script reported that it saved its state (`hpcenv.training`).
        asked_at: when the signal `asked_to_end` arrived, in seconds since the epoch; None without such a signal.
        ranks: the ranks that failed on this node, in the order in which they failed.
        oom_kills: how many processes of this job step the kernel killed on this node because memory ran out; None if
            the number could not be read.
        changed: files of the environment that changed during the run.
        not_looked_again: why the environment was not compared again at the end of the run. This text is empty if the
            environment was compared, or if a SIF needs no second comparison.
        detail: further information, in words.
        refused: whether the launch step refused to start, so that no line of the script ran on this node.
        differences: how the libraries that torch had loaded differ from the locked libraries, if the launch step
            refused to start for this reason.
        full: why nothing could be written to the run folder when this node ended; empty if writing was possible.
        alone: whether no rank of the whole run joined a process group. `alone` is also False if this is not known.
        port_errors: error counters of RDMA ports that grew while the ranks ran.
        port_errors_unknown: why some or all counters are not known; empty if all are known, or without RDMA.
        launcher: what started the ranks.
        tasks: with `--launcher srun`, how many tasks of this node have recorded their end; otherwise 0.
    """

    schema: int
    run: str
    node: str
    attempt: int
    status: int
    signal: str
    started: float
    ended: float
    asked_to_end: str = ""
    asked_at: float | None = None
    stopped: Literal["", "time-limit", "preemption", "hang", "idle", "unknown"] = ""
    saved: bool = False
    ranks: tuple[RankExit, ...] = ()
    oom_kills: int | None = None
    changed: tuple[str, ...] = ()
    not_looked_again: str = ""
    detail: str = ""
    refused: bool = False
    differences: tuple[Difference, ...] = ()
    alone: bool = False
    full: str = ""
    port_errors: tuple[PortErrors, ...] = ()
    port_errors_unknown: str = ""
    launcher: Launcher | Literal["tasks"] = "torchrun"
    tasks: int = 0


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """A request to the training on one node to save its state and end (`stop/NODE.json`).

    Attributes:
        signal: the signal that this node received, `SIGUSR2` or `SIGTERM`.
        reason: why the training must end; `unknown` until Slurm has given its reason.
        asked: time of the request, in seconds since the epoch.
        ends: when Slurm will end the job, in seconds since the epoch; None while the value is unknown.
    """

    schema: int
    run: str
    node: str
    attempt: int
    signal: str
    reason: Literal["time-limit", "preemption", "cancelled", "hang", "idle", "unknown"]
    asked: float
    ends: float | None = None
