"""This node: its name, the nodes of the job, job id and attempt.

Runs on: COMPUTE NODE. The values are read from variables that Slurm sets, or that `--cluster local` sets instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hpcenv.errors import Command, NodesUnknown
from hpcenv.hostlist import expand_hostlist


@dataclass(frozen=True, kw_only=True)
class ThisNode:
    """This node among the nodes of the allocation.

    Attributes:
        node: name of this node (`SLURMD_NODENAME`). The host name may differ if several slurmd run
            on one host, or if the node has an alias.
        nodes: names of all nodes, in Slurm's order. The first node hosts the rendezvous.
        attempt: number of this attempt of the run. The first attempt has number 0. In a chain, attempts
            are counted over all jobs (`previous_job.number_in_chain`). Outside of a chain, `attempt` equals `restarts`.
        job_id: Slurm's job id, or `local-PID`.
        restarts: how many times Slurm has restarted this job.
    """

    node: str
    nodes: tuple[str, ...]
    attempt: int
    job_id: str
    restarts: int = 0

    @property
    def rank(self) -> int:
        """Position of this node among `nodes`. The first node has position 0."""
        return self.nodes.index(self.node)


# Variables that `--cluster local` sets in place of Slurm's variables.
LOCAL_NODE = "HPCENV_LOCAL_NODE"
LOCAL_NODES = "HPCENV_LOCAL_NODES"
LOCAL_JOB = "HPCENV_LOCAL_JOB"
# The number of a task on its node, like SLURM_LOCALID.
LOCAL_TASK = "HPCENV_LOCAL_TASK"
# This variable is not empty in the `finish` step of a local run that was cancelled.
LOCAL_CANCELLED = "HPCENV_LOCAL_CANCELLED"


def find_this_node(environ: Mapping[str, str], *, cluster: Literal["slurm", "local"]) -> ThisNode:
    """Return the node on which this process runs.

    The batch script and every task of `srun` have `SLURMD_NODENAME`, `SLURM_JOB_NODELIST` and,
    after a requeue, `SLURM_RESTART_COUNT` (sbatch(1), srun(1), Slurm 22.05 to 26.05).

    Args:
        environ: environment variables of this process.
        cluster: the cluster of the run, Slurm or this machine. The variables alone do not show the cluster: a Slurm job
            that is submitted inside a local run inherits the variables of the local run, and vice versa.

    Raises:
        NodesUnknown: this process does not run inside a job of this cluster.
    """
    nodelist, node = ("SLURM_JOB_NODELIST", "SLURMD_NODENAME") if cluster == "slurm" else (LOCAL_NODES, LOCAL_NODE)
    job, restarts = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT") if cluster == "slurm" else (LOCAL_JOB, "")
    try:
        count = int(environ.get(restarts) or 0)
        this_node = ThisNode(
            node=environ[node],
            nodes=expand_hostlist(environ[nodelist]),
            attempt=count,
            job_id=environ[job],
            restarts=count,
        )
    except (KeyError, ValueError) as error:
        why = f"{error.args[0]} is not set" if isinstance(error, KeyError) else str(error)
        raise NodesUnknown(
            f"this step does not run inside a {'Slurm job' if cluster == 'slurm' else 'local run'}",
            why=why,
            hint=("start it with ", Command("hpcenv", "submit", "SCRIPT")),
        ) from error
    if this_node.nodes.count(this_node.node) != 1:
        raise NodesUnknown(
            f"node `{this_node.node}` is {this_node.nodes.count(this_node.node)} times in the node list of its job",
            why=f"{nodelist}={environ[nodelist]}",
        )
    return this_node


def find_local_rank(environ: Mapping[str, str], *, cluster: Literal["slurm", "local"]) -> int:
    """Return the number of this task on its node. The first task has number 0 (SLURM_LOCALID, srun(1)).

    Raises:
        NodesUnknown: this process is not a task of a launch step.
    """
    name = "SLURM_LOCALID" if cluster == "slurm" else LOCAL_TASK
    try:
        return int(environ[name])
    except (KeyError, ValueError) as error:
        raise NodesUnknown(
            "this task does not know its number on the node",
            why=f"{name} is `{environ.get(name, '')}`",
            hint="start the run with its batch script",
        ) from error
