"""This node: its name, the nodes of the job, job id and attempt.

Runs on: COMPUTE NODE. The only module in node/ that interprets Slurm's variables.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from hpcenv.errors import Command, NodesUnknown


@dataclass(frozen=True, kw_only=True)
class ThisNode:
    """This node among the nodes of the allocation.

    Attributes:
        node: name of this node (`SLURMD_NODENAME`; the host name may differ if several slurmd run
            on one host, or with aliases).
        nodes: names of all nodes, in Slurm's order; the first one hosts the rendezvous.
        attempt: number of this attempt of the run; the first one is 0. In a chain it counts over all
            jobs (`previous_job.number_in_chain`), else it equals `restarts`.
        job_id: Slurm's job id, or `local-PID`.
        restarts: how often Slurm has restarted this job.
    """

    node: str
    nodes: tuple[str, ...]
    attempt: int
    job_id: str
    restarts: int = 0

    @property
    def rank(self) -> int:
        """Position of this node, 0 for the first."""
        return self.nodes.index(self.node)


# Variables that `--cluster local` sets instead of Slurm.
LOCAL_NODE = "HPCENV_LOCAL_NODE"
LOCAL_NODES = "HPCENV_LOCAL_NODES"
LOCAL_JOB = "HPCENV_LOCAL_JOB"
# Number of a task on its node, as SLURM_LOCALID.
LOCAL_TASK = "HPCENV_LOCAL_TASK"
# Not empty in the `finish` step of a local run that was cancelled.
LOCAL_CANCELLED = "HPCENV_LOCAL_CANCELLED"


def find_this_node(environ: Mapping[str, str], *, cluster: Literal["slurm", "local"]) -> ThisNode:
    """Return the node on which this process runs.

    The batch script and every task of `srun` have `SLURMD_NODENAME`, `SLURM_JOB_NODELIST` and,
    after a requeue, `SLURM_RESTART_COUNT` (sbatch(1), srun(1), Slurm 22.05 to 26.05).

    Args:
        environ: environment variables of this process.
        cluster: where the run was submitted to. The variables alone do not show it: a Slurm job that
            is submitted inside a local run inherits the variables of the local run, and vice versa.

    Raises:
        NodesUnknown: this process is not inside such a job.
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
    """Return the number of this task of the launch step on its node, from 0 (SLURM_LOCALID, srun(1)).

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


# Slurm's limit is 64K nodes (MAX_SLURM_NODES, 24.11). The limit for a name is that of DNS.
_MOST_NODES = 65536
_LONGEST_NAME = 255


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Expand Slurm's host list expression, for example `n[1-3,07],gpu1`.

    `scontrol show hostnames` is not used, because scontrol may be missing on this node. A wrong
    result would give each node a different rendezvous, so invalid text is refused.

    Raises:
        ValueError: unbalanced brackets, an invalid range, or a node named twice.
    """
    names: list[str] = []
    for item in _split_outside_brackets(text):
        names += _expand_item(item)
        if len(names) > _MOST_NODES:
            raise ValueError(f"not a host list: more than {_MOST_NODES} nodes")
    if not names or not all(names):
        raise ValueError(f"not a host list: {text!r}")
    if len(set(names)) != len(names):
        raise ValueError(f"a node is named twice in {text!r}")
    return tuple(names)


def fold_hostlist(names: Iterable[str]) -> str:
    """Return names as a host list expression that `expand_hostlist` expands again: `n[1-3,7],gpu1`.

    Names that differ in their last number only are folded; the first one of them says where they stand.
    """
    parts = [re.fullmatch(r"(.*?)([0-9]{0,9})([^0-9]*)", name, re.DOTALL) for name in dict.fromkeys(names)]
    split = [part.groups() for part in parts if part is not None]
    # n08 and n10 have one width, n8 and n10 have none.
    padded = {(prefix, suffix, len(digits)) for prefix, digits, suffix in split if digits[:1] == "0" and digits != "0"}
    groups: dict[tuple[str, str, int], list[int]] = {}
    for prefix, digits, suffix in split:
        key = (prefix, suffix, len(digits))
        numbers = groups.setdefault(key if key in padded else (prefix, suffix, 0), [])
        numbers += [int(digits)] if digits else []
    return ",".join(_folded(*key, sorted(numbers)) for key, numbers in groups.items())


def _folded(prefix: str, suffix: str, width: int, numbers: list[int]) -> str:
    if not numbers:
        return prefix + suffix
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    parts = [
        str(low).zfill(width) if low == high else f"{str(low).zfill(width)}-{str(high).zfill(width)}"
        for low, high in ranges
    ]
    return f"{prefix}{parts[0]}{suffix}" if len(numbers) == 1 else f"{prefix}[{','.join(parts)}]{suffix}"


def _split_outside_brackets(text: str) -> list[str]:
    items, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ValueError(f"unbalanced brackets in host list {text!r}")
        if character == "," and depth == 0:
            items.append(text[start:position])
            start = position + 1
    if depth:
        raise ValueError(f"unbalanced brackets in host list {text!r}")
    return [*items, text[start:]]


def _expand_item(item: str) -> list[str]:
    """Expand one item. With several bracket groups (`r[1-2]n[1-2]`), the last one changes fastest."""
    pieces = re.split(r"\[([^\[\]]*)\]", item)
    texts = pieces[0::2]
    if sum(map(len, texts)) > _LONGEST_NAME or len(texts) > _LONGEST_NAME:
        raise ValueError("not a host list: a name is longer than a host name can be")
    groups: list[list[str]] = []
    for piece in pieces[1::2]:
        groups.append(_expand_group(piece))
        # Now, not behind the loop: many large groups would need gigabytes of memory.
        if math.prod(map(len, groups)) > _MOST_NODES:
            raise ValueError(f"not a host list: more than {_MOST_NODES} nodes")
    numbered = itertools.product(*groups)
    return ["".join(itertools.chain(*zip(texts, (*numbers, ""), strict=True))) for numbers in numbered]


def _expand_group(group: str) -> list[str]:
    numbers: list[str] = []
    for part in group.split(","):
        numbers += _expand_range(part)
        if len(numbers) > _MOST_NODES:
            raise ValueError(f"not a host list: more than {_MOST_NODES} nodes")
    return numbers


def _expand_range(part: str) -> list[str]:
    low, dash, high = part.partition("-")
    if re.fullmatch(r"[0-9]+(-[0-9]+)?", part) is None:
        raise ValueError(f"not a range: {part!r}")
    if not dash:
        return [low]
    if len(part) > 40 or not int(low) <= int(high) < int(low) + _MOST_NODES:
        raise ValueError(f"not a range: {part!r}")
    # Leading zeros are part of the name: n[08-10] is n08, n09, n10.
    return [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
