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
        rank, local_rank: global rank, and rank on its node; -1 if not known.
        pid: process id on its node.
        status: exit status, 128 + number for a signal; None if not known.
        signal: name of the signal, for example `SIGKILL`; empty without a signal.
        ended: seconds since the epoch; None if not known.
        message: the exception in one line, or other information.
        traceback: the Python traceback; empty if not known.
        source: where message and traceback come from: torchelastic's `error-file`, the
            rank's `stderr`, or nowhere.
        log: the rank's standard error, relative to the run folder.
        program: whether this is not a rank, but the program that `--launcher none` started and that starts the ranks.
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
        status: exit status of torchrun, 128 + number for a signal.
        asked_to_end: name of the signal that asked this node to end before it ended by
            itself; empty without such a signal. Such a node ended because another one failed, or was
            cancelled; its status says nothing about the training.
        stopped: why the training was asked to save itself and end; empty when it was not.
            `unknown`: it was asked, and Slurm gave no reason.
        saved: the script reported that it saved its state (`hpcenv.training`).
        asked_at: time of that request, in seconds since the epoch.
        ranks: the ranks that failed here, the first one first.
        oom_kills: processes of this job step that the kernel killed for lack of memory on
            this node; None if that could not be read.
        changed: files of the environment that changed while the run ran.
        not_looked_again: why the environment was not looked at when the run ended; empty where it was, or where a
            SIF needs no second look.
        detail: further information, in words.
        refused: the launch step refused to start, and no line of the script ran here.
        differences: why it refused, where libraries that torch had loaded are not the locked ones.
        full: why nothing more could be written to the run folder when this node ended; empty if it could.
        alone: no rank of the whole run joined a process group. Also False if that is not known.
        port_errors: error counters of RDMA ports that grew while the ranks ran.
        port_errors_unknown: why some or all counters are not known; empty if all are known, or without RDMA.
        launcher: what started the ranks.
        tasks: with `--launcher srun`, how many tasks of this node have recorded their end; else 0.
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
        reason: Slurm's reason; `unknown` until Slurm has answered.
        asked: time of the request, in seconds since the epoch.
        ends: when Slurm ends the job; None while not known.
    """

    schema: int
    run: str
    node: str
    attempt: int
    signal: str
    reason: Literal["time-limit", "preemption", "cancelled", "hang", "idle", "unknown"]
    asked: float
    ends: float | None = None
