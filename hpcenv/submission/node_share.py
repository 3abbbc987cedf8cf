"""Choose CPUs and memory for a job that does not request them: the share of a node that belongs to the job's GPUs.

Runs on: LOGIN NODE. By default, Slurm gives one CPU to each task, so all ranks of a node would share one core. OLCF's
guide to PyTorch on Frontier reports that a start on one core takes 10 minutes instead of 10 seconds
(pytorch_frontier.rst, 2026-11). See also Lightning#18650 (2023-09) and NVIDIA/srt-slurm#254 (2026).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from hpcenv.cluster.node_resources import ClusterResources, NodeResources, PartitionShares
from hpcenv.cluster.node_types import Offer
from hpcenv.errors import UsageError
from hpcenv.submission import capacity
from hpcenv.submission.answers import read_answer
from hpcenv.submission.plan import Request
from hpcenv.text import plural

_SCONTROL = "scontrol show node"
# Sort keys: unknown memory (None) is first, all memory of a node (0) is last.
_AS_LAST = {None: -1.0, 0: float("inf")}
_LEFT_TO_SLURM = "CPUs and memory are left to Slurm's defaults (--cpus and --mem request them)"


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """The CPUs and the memory that are requested on each node instead of Slurm's defaults.

    Attributes:
        cpus: the number of CPUs; None for Slurm's default.
        mem: the memory in the form of sbatch's --mem; None for Slurm's default.
        cpus_origin, mem_origin: how the value was computed, or why it is not requested; may be empty.
        note: one line about CPUs and memory, for the user; may be empty.
        expedite: whether Slurm starts the job before other jobs if it queues the job again after a node failure.
    """

    cpus: int | None = None
    mem: str | None = None
    cpus_origin: str = ""
    mem_origin: str = ""
    note: str = ""
    expedite: bool = False

    def words(self) -> tuple[str, ...]:
        """Return the requested values as text, each with its origin."""
        values = (("cpus", self.cpus, self.cpus_origin), ("mem", self.mem, self.mem_origin))
        return tuple(f"{name} = {value} ({origin})" for name, value, origin in values if value is not None)

    def added_to(self, request: Request) -> Request:
        """Return a request to which the CPUs and the memory of this share are added."""
        cpus = request.cpus_per_task if self.cpus is None else self.cpus
        mem = request.mem if self.mem is None else self.mem
        return replace(request, cpus_per_task=cpus, mem=mem, expedite=self.expedite)


def read_resources(answer: Future[ClusterResources] | None) -> ClusterResources | str:
    """Return the resources of the nodes, or a text that says why they are not known.

    Args:
        answer: the result of `node_resources.ask`; None if scontrol was not asked.
    """
    found = read_answer(answer)
    if found is None:
        return "scontrol was not asked"
    return found if isinstance(found, str) or found.nodes else f"`{_SCONTROL}` lists no nodes"


def choose(
    request: Request,
    offers: Sequence[Offer],
    resources: Future[ClusterResources] | None,
    *,
    handover: bool = False,
) -> NodeShare:
    """Return the CPUs and the memory to request instead of Slurm's defaults.

    Args:
        resources: as for `read_resources`. If the request has GPUs, this function waits for the answer.
        handover: whether another person will submit the job, perhaps to another cluster.
    """
    if request.gpus_per_node == 0:
        return of_ranks(request, offers)
    found = "another cluster may have other nodes" if handover else read_resources(resources)
    return replace(of_gpus(request, found), expedite=not isinstance(found, str) and found.expedites)


def of_ranks(request: Request, offers: Sequence[Offer]) -> NodeShare:
    """Return the CPUs of ranks without GPUs: one core for each rank."""
    if request.cpus_per_task is not None:
        return NodeShare()
    per_core = min((offer.cpus_per_core or 1 for offer in capacity.meant(request, offers)), default=1)
    per_core = 1 if _one_thread_per_core(request) else per_core
    cpus = request.nproc_per_node * per_core
    origin = "one for each rank" if per_core == 1 else f"one core, {per_core} CPUs, for each rank"
    return NodeShare(cpus=cpus, cpus_origin=origin, note=f"requested on each node: {plural(cpus, 'CPU')} ({origin})")


def of_gpus(request: Request, found: ClusterResources | str) -> NodeShare:
    """Return the CPUs and the memory that belong to the requested GPUs, without values that are in the request. Pure.

    Args:
        found: the resources of the nodes, or why they are not known.
    """
    wants_cpus, wants_mem = request.cpus_per_task is None, _wants_memory(request)
    if not wants_cpus and not wants_mem:
        return NodeShare()
    if isinstance(found, str):
        return NodeShare(note=f"{_LEFT_TO_SLURM}: {found}")
    fitting = _fitting(request, found)
    if not fitting:
        what = f"{plural(request.gpus_per_node, 'GPU')}{f' of type {request.gpu_type}' * bool(request.gpu_type)}"
        return NodeShare(note=f"{_LEFT_TO_SLURM}: `{_SCONTROL}` shows no node of the partition with {what}")
    share = NodeShare()
    if wants_cpus:
        cpus = min((_cpus(request, *pair) for pair in fitting), key=lambda one: one[0] or 0)
        share = replace(share, cpus=cpus[0] or None, cpus_origin=cpus[1])
    if wants_mem:
        own = share.cpus or request.cpus_per_task
        memory = min(
            (_memory(request, own, *pair) for pair in fitting), key=lambda one: _AS_LAST.get(one[0], one[0] or 0)
        )
        share = replace(share, mem=_sbatch_memory(memory[0]), mem_origin=memory[1])
    return replace(share, note=_in_one_line(share, wants_cpus=wants_cpus, wants_mem=wants_mem))


def _wants_memory(request: Request) -> bool:
    return request.mem is None and not {"mem-per-cpu", "mem-per-gpu"} & set(request.sbatch)


def _fitting(request: Request, found: ClusterResources) -> list[tuple[NodeResources, PartitionShares]]:
    """Return the nodes that can run the job, each with the partition in which the job would run."""
    named = {name for name in (request.partition or "").split(",") if name}
    partitions = [part for part in found.partitions.values() if (part.name in named if named else part.default)]
    ways = capacity.feature_sets(request.constraint)
    excluded, wanted = capacity.host_names(request.exclude), capacity.host_names(request.nodelist)
    # If `--nodelist` has fewer names than the job has nodes, Slurm adds other nodes.
    only = wanted if len(wanted) >= request.nodes + request.spare else frozenset()
    return [
        (node, part)
        for part in partitions
        for node in found.nodes
        if part.name in node.partitions
        and node.name not in excluded
        and (not only or node.name in only)
        and _gpus(node, request.gpu_type) >= request.gpus_per_node
        and (not ways or any(way <= node.features for way in ways))
    ]


def _gpus(node: NodeResources, kind: str | None) -> int:
    return node.gpus.get(kind, 0) if kind else sum(node.gpus.values())


def _cpus(request: Request, node: NodeResources, part: PartitionShares) -> tuple[int | None, str]:
    """Return the CPUs that belong to the requested GPUs of a node, and how they were computed."""
    gpus, total = request.gpus_per_node, sum(node.gpus.values())
    if node.cpus is None:
        return None, f"`{_SCONTROL}` does not say how many CPUs {node.name} has"
    unit = node.cpus_per_core
    has = node.cpus // unit if _one_thread_per_core(request) else node.cpus
    unit = 1 if _one_thread_per_core(request) else unit
    most = min(has, part.most_cpus or has)
    if _whole_nodes(request, part):
        return most, f"the job gets whole nodes, and {node.name} has {has}"
    if part.cpus_per_gpu is not None:
        cpus, why = part.cpus_per_gpu * gpus, f"{plural(gpus, 'GPU')} x DefCpuPerGPU={part.cpus_per_gpu}"
        why = f"{why} of partition {part.name}"
    else:
        # Slurm never gives one core to two jobs.
        cpus, why = (
            has * gpus // total // unit * unit,
            f"{gpus} of the {total} GPUs of {node.name}, which has {has} CPUs",
        )
    if cpus > most:
        return most, f"{why}; at most {most} on a node"
    return max(cpus, 1), why


def _memory(request: Request, cpus: int | None, node: NodeResources, part: PartitionShares) -> tuple[int | None, str]:
    """Return the memory in MiB for the requested GPUs of a node, 0 for all memory, and how it was computed."""
    gpus, total = request.gpus_per_node, sum(node.gpus.values())
    if "MEMORY" not in part.select.upper():
        # If the cluster does not count memory, a value would only add a limit to the job.
        known = f"SelectTypeParameters={part.select}" if part.select else "SelectTypeParameters is not known"
        return None, f"the cluster does not count memory: {known}" if part.select else known
    if _whole_nodes(request, part):
        return 0, "the job gets whole nodes"
    if node.memory is None:
        return None, f"`{_SCONTROL}` does not say how much memory {node.name} has"
    if part.memory_per_gpu is not None:
        memory = part.memory_per_gpu * gpus
        why = f"{plural(gpus, 'GPU')} x DefMemPerGPU={part.memory_per_gpu} of partition {part.name}"
    else:
        memory, why = (
            node.memory * gpus // total,
            f"{gpus} of the {total} GPUs of {node.name}, which has {node.memory} MiB",
        )
    limits = [node.memory, part.most_memory, part.most_memory_per_cpu and part.most_memory_per_cpu * (cpus or 0)]
    most = min(limit for limit in limits if limit)
    return (most, f"{why}; at most {most} MiB") if memory > most else (memory, why)


def _whole_nodes(request: Request, part: PartitionShares) -> bool:
    # `exclusive` with a value does not give whole nodes. With `user` and `mcs`, jobs share nodes. `topo` is about
    # racks.
    return part.whole_nodes or ("exclusive" in request.sbatch and not request.sbatch["exclusive"])


def _one_thread_per_core(request: Request) -> bool:
    return request.sbatch.get("hint") == "nomultithread" or request.sbatch.get("threads-per-core") == "1"


def _sbatch_memory(mebibytes: int | None) -> str | None:
    if mebibytes is None:
        return None
    return f"{mebibytes}M" if mebibytes else "0"


def _in_one_line(share: NodeShare, *, wants_cpus: bool, wants_mem: bool) -> str:
    """Return one line that says which values are requested and which values Slurm chooses, each with its origin."""
    asked: list[str] = []
    left: list[str] = []
    if wants_cpus:
        words = "" if share.cpus is None else plural(share.cpus, "CPU")
        (asked if words else left).append(f"{words or 'CPUs'} ({share.cpus_origin})")
    if wants_mem:
        words = {None: "", "0": "all memory"}.get(share.mem, f"{share.mem} of memory")
        (asked if words else left).append(f"{words or 'memory'} ({share.mem_origin})")
    parts = [f"requested on each node, as scontrol shows it: {', '.join(asked)}"] if asked else []
    parts += [f"left to Slurm's default: {', '.join(left)}"] if left else []
    return "; ".join(parts)


# -- refused requests ---------------------------------------------------------------------


def refuse_shared_cores(
    request: Request, origin: str, offers: Sequence[Offer], *, launcher: str, skipped: Sequence[str]
) -> None:
    """Refuse a request in which ranks would share a core. If this is not known here, the check of the nodes finds it.

    Args:
        origin: where the number of CPUs comes from.
        launcher: the program that starts the ranks.
        skipped: ids of skipped checks. If `sys.affinity` is skipped, ranks may share cores.

    Raises:
        UsageError: ranks would share a core, or srun could not start its tasks.
    """
    cpus, ranks = request.cpus_per_task, request.nproc_per_node
    if cpus is None:
        return
    each = "with `--launcher srun` each rank is a Slurm task, and has its own CPUs"
    shared = "ranks that share a core wait for each other in every operation"
    allowed = "sys.affinity" in skipped
    instead = "" if allowed else "; if the ranks may share cores: --skip-check sys.affinity"
    if cpus < ranks and (launcher == "srun" or not allowed):
        raise UsageError(
            f"{plural(cpus, 'CPU')} on each node for {ranks} ranks",
            why=f"{each if launcher == 'srun' else shared}; {origin}",
            hint=f"--cpus {ranks} or more, or fewer ranks: --nproc{'' if launcher == 'srun' else instead}",
        )
    per_core = min((offer.cpus_per_core or 1 for offer in capacity.meant(request, offers)), default=1)
    if not allowed and not _one_thread_per_core(request) and -(-cpus // per_core) < ranks:
        raise UsageError(
            f"{plural(cpus, 'CPU')} on each node are {plural(-(-cpus // per_core), 'core')}, for {ranks} ranks",
            why=f"a core of these nodes is {per_core} CPUs (hardware threads), and {shared}; {origin}",
            hint=f"--cpus {ranks * per_core} or more, or fewer ranks: --nproc{instead}",
        )


def origin_of(origins: Mapping[str, str], share: NodeShare) -> str:
    """Return a text for an error that says where the number of CPUs comes from."""
    return (
        f"the CPUs come from {origins['cpus']}"
        if "cpus" in origins
        else f"the number of CPUs is computed: {share.cpus_origin}"
    )
