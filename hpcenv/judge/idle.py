"""Judge whether a node is in use: its GPUs, its CPUs, or connections to it. Pure.

Runs on: COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

from hpcenv.records.samples import Sample

# A GPU below this use, in percent, counts as idle. If a job uses fewer CPUs than this, its processes only wait.
_LEAST_GPU = 1.0
_LEAST_CPUS = 0.1


def use_of(sample: Sample) -> str:
    """Return the resource that is in use on a node, as text; empty if nothing is in use.

    If a use is unknown, it counts as used. If a sample covers a minute, the highest values in that minute count.
    """
    most = sample.most or sample
    known = (
        ("a rank saves", any(rank.saving for rank in most.ranks)),
        ("an open connection", bool(most.node.connections)),
        ("a GPU", any((gpu.use or 0.0) >= _LEAST_GPU for gpu in most.gpus)),
        ("the CPUs", (most.node.cpu or 0.0) >= _LEAST_CPUS),
        ("unknown use of a GPU", any(gpu.use is None for gpu in most.gpus)),
        ("unknown use of the CPUs", most.node.cpu is None),
    )
    return next((words for words, is_so in known if is_so), "")
