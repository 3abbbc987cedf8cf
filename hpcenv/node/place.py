"""Where a step runs: which node of which job, and which attempt.

Runs on: COMPUTE NODE. The only module here that gives a meaning to Slurm's variables.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Literal

from hpcenv.dataclass import dataclass
from hpcenv.errors import NodesUnknown


@dataclass(frozen=True, kw_only=True)
class Place:
    """This node among the nodes of the allocation.

    Attributes:
        node: this node's name (`SLURMD_NODENAME`, not the host name: the two differ where
            several slurmd share a host, and behind aliases).
        nodes: all of them, in Slurm's order; the first one hosts the rendezvous.
        attempt: which start of the run this is, 0 for the first. Over the jobs of a chain it goes on
            (`former.number_in_chain`), else it is `restarts`.
        restarts: how often Slurm started this job before.
        job_id: Slurm's job id, or `local-PID`.
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


# Set by hpcenv's own `--cluster local`, which has no Slurm to ask.
LOCAL_NODE = "HPCENV_LOCAL_NODE"
LOCAL_NODES = "HPCENV_LOCAL_NODES"
LOCAL_JOB = "HPCENV_LOCAL_JOB"
# Not empty for the `finish` step of a local run that was asked to end.
LOCAL_CANCELLED = "HPCENV_LOCAL_CANCELLED"


def find_place(environ: Mapping[str, str], *, cluster: Literal["slurm", "local"]) -> Place:
    """Return where this process runs.

    The batch script and every task of `srun` carry `SLURMD_NODENAME`, `SLURM_JOB_NODELIST`
    and, after a requeue, `SLURM_RESTART_COUNT` (sbatch(1), srun(1), Slurm 22.05 to 26.05).

    Args:
        cluster: where the run was submitted to. Variables alone do not tell: a Slurm job
            submitted from inside a local run inherits the local run's, and the reverse.

    Raises:
        NodesUnknown: not inside such a job.
    """
    nodelist, node = ("SLURM_JOB_NODELIST", "SLURMD_NODENAME") if cluster == "slurm" else (LOCAL_NODES, LOCAL_NODE)
    job, restarts = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT") if cluster == "slurm" else (LOCAL_JOB, "")
    try:
        count = int(environ.get(restarts) or 0)
        place = Place(
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
            hint="start it through `hpcenv submit`",
        ) from error
    if place.nodes.count(place.node) != 1:
        raise NodesUnknown(
            f"node `{place.node}` is {place.nodes.count(place.node)} times in its own job's node list",
            why=f"{nodelist}={environ[nodelist]}",
        )
    return place


# Slurm's own limit is 64K nodes (MAX_SLURM_NODES, 24.11): more is damage, not a cluster. Of a name, that of DNS.
_MOST_NODES = 65536
_LONGEST_NAME = 255


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Expand Slurm's host list expression, for example `n[1-3,07],gpu1`.

    Own code because `scontrol` may be missing where this runs, and a wrong guess here
    would send each node to a rendezvous of its own.

    Raises:
        ValueError: unbalanced brackets, a range that is not one, or a node named twice.
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
    """Expand one item; several bracket groups (`r[1-2]n[1-2]`) vary the last one fastest."""
    pieces = re.split(r"\[([^\[\]]*)\]", item)
    texts, groups = pieces[0::2], [_expand_group(group) for group in pieces[1::2]]
    if sum(map(len, texts)) > _LONGEST_NAME or len(groups) > _LONGEST_NAME:
        raise ValueError("not a host list: a name is longer than any host's")
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
