"""Read the CPUs, memory and GPUs of nodes, and the CPUs and memory per GPU of partitions, with one call of scontrol.

Runs on: LOGIN NODE. This module reads the text output of scontrol; the docstring of `node_types` says why. A missing
value is None.

scontrol without a command reads commands from standard input (scontrol(1), Slurm 22.05 to 26.05), so one process
can run three commands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcenv import process
from hpcenv.cluster import slurm_command
from hpcenv.cluster.node_types import QUICK_SECONDS, parse_configuration, parse_gpus, parse_partition_rules
from hpcenv.errors import ToolFailed

_COMMANDS = "show config\nshow partition\nshow node\n"
# scontrol prints about 800 bytes for each node.
_LONGEST = 64 * 1024 * 1024
# With readline, scontrol repeats each command after its prompt. Without readline, the answer follows the prompt.
_PROMPT = "scontrol: "


@dataclass(frozen=True, kw_only=True)
class NodeResources:
    """The resources of one node that jobs can use.

    Attributes:
        cpus: CPUs of the node without those that Slurm keeps for the system (CPUEfctv; CoreSpecCount, CPUSpecList).
        cpus_per_core: how many of Slurm's CPUs are hardware threads of one core; 1 if the value is unknown.
        memory: memory for jobs in MiB, without MemSpecLimit.
        gpus: type of GPU -> number of GPUs. The type is empty if GRES has no type.
    """

    name: str
    partitions: frozenset[str]
    cpus: int | None
    cpus_per_core: int
    memory: int | None
    gpus: Mapping[str, int] = field(default_factory=dict)
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class PartitionShares:
    """The resources that a partition gives to jobs.

    Attributes:
        default: whether jobs without `--partition` run in this partition.
        cpus_per_gpu, memory_per_gpu: DefCpuPerGPU and DefMemPerGPU (MiB) of the partition. If the partition does not
            set these values, the values of the cluster; None if the cluster does not set them either.
        most_cpus, most_memory: MaxCPUsPerNode and MaxMemPerNode (MiB); None for no limit.
        most_memory_per_cpu: MaxMemPerCPU (MiB); None for no limit.
        whole_nodes: whether every job gets whole nodes (OverSubscribe=EXCLUSIVE).
        select: SelectTypeParameters; it shows whether Slurm allocates memory to jobs; empty if the value is unknown.
    """

    name: str
    default: bool = False
    cpus_per_gpu: int | None = None
    memory_per_gpu: int | None = None
    most_cpus: int | None = None
    most_memory: int | None = None
    most_memory_per_cpu: int | None = None
    whole_nodes: bool = False
    select: str = ""


@dataclass(frozen=True, kw_only=True)
class ClusterResources:
    """All nodes and all partitions of the cluster.

    Attributes:
        expedites: whether the controller accepts `--requeue=expedite` (slurm.conf(5), Slurm 25.11).
    """

    nodes: tuple[NodeResources, ...]
    partitions: Mapping[str, PartitionShares]
    expedites: bool = False


def ask(environ: Mapping[str, str], *, seconds: float = QUICK_SECONDS) -> ClusterResources:
    """Ask scontrol for the resources of all nodes and partitions.

    Raises:
        ToolMissing: scontrol is missing.
        ToolFailed: scontrol did not answer in time, or the answer is too long.
    """
    tool = process.find_tool("scontrol", needed_for="ask what the nodes have", path=environ.get("PATH"))
    env = slurm_command.clean_environment(environ)
    text = slurm_command.run([tool, "--all", "--oneliner"], env, timeout=seconds, stdin=_COMMANDS).stdout
    if len(text) > _LONGEST:
        raise ToolFailed(f"`scontrol` printed more than {_LONGEST >> 20} MiB", argv=("scontrol",))
    return parse(text)


def parse(text: str) -> ClusterResources:
    """Parse the answers to the three commands. Lines in another format are ignored."""
    nodes: list[str] = []
    partitions: list[str] = []
    configuration: list[str] = []
    for printed in text.splitlines():
        line = _after_prompts(printed)
        if line.startswith("NodeName="):
            nodes.append(line)
        else:
            (partitions if line.startswith("PartitionName=") else configuration).append(line)
    cluster = parse_configuration("\n".join(configuration))
    rules = parse_partition_rules("\n".join(partitions))
    return ClusterResources(
        nodes=tuple(_node(line) for line in nodes),
        partitions={name: _shares(name, rule, cluster) for name, rule in rules.items()},
        expedites="enable_expedited_requeue" in cluster.get("slurmctldparameters", "").lower().split(","),
    )


def _after_prompts(line: str) -> str:
    while line.startswith(_PROMPT):
        line = line[len(_PROMPT) :]
    return line


def _node(line: str) -> NodeResources:
    # If a key is repeated, the first value counts, because free text, such as Reason=, is at the end of the line.
    pairs = {key: value for key, equals, value in (word.partition("=") for word in reversed(line.split())) if equals}
    cpus, cores = _number(pairs.get("CPUTot")), 0
    sockets, per_socket = _number(pairs.get("Sockets")), _number(pairs.get("CoresPerSocket"))
    if sockets and per_socket:
        cores = sockets * per_socket
    memory = _number(pairs.get("RealMemory"))
    kept = _number(pairs.get("MemSpecLimit")) or 0
    features = pairs.get("ActiveFeatures") or pairs.get("AvailableFeatures") or ""
    return NodeResources(
        name=pairs["NodeName"],
        partitions=frozenset(pairs.get("Partitions", "").split(",")),
        cpus=_number(pairs.get("CPUEfctv")) or cpus,
        cpus_per_core=max(1, cpus // cores) if cpus and cores else 1,
        memory=None if memory is None else max(0, memory - kept),
        gpus=parse_gpus(pairs.get("Gres", "")),
        features=frozenset(filter(None, features.split(","))) - {"(null)"},
    )


def _shares(name: str, rule: Mapping[str, str], cluster: Mapping[str, str]) -> PartitionShares:
    own, usual = (_defaults(words) for words in (rule.get("jobdefaults", ""), cluster.get("jobdefaults", "")))
    select = rule.get("selecttypeparameters", "")
    return PartitionShares(
        name=name,
        default=rule.get("default") == "YES",
        cpus_per_gpu=own.get("defcpupergpu", usual.get("defcpupergpu")),
        memory_per_gpu=own.get("defmempergpu", usual.get("defmempergpu")),
        most_cpus=_number(rule.get("maxcpuspernode")) or None,
        most_memory=_number(rule.get("maxmempernode")) or _number(cluster.get("maxmempernode")) or None,
        most_memory_per_cpu=_number(rule.get("maxmempercpu")) or _number(cluster.get("maxmempercpu")) or None,
        whole_nodes=rule.get("oversubscribe") == "EXCLUSIVE",
        select=cluster.get("selecttypeparameters", "") if select in ("", "NONE", "N/A") else select,
    )


def _defaults(words: str) -> dict[str, int]:
    """Return lower-case name -> number for the value of JobDefaults, such as `DefCpuPerGPU=8,DefMemPerGPU=64000`."""
    found = re.findall(r"(DefCpuPerGPU|DefMemPerGPU)=([0-9]{1,15})\b", words, re.IGNORECASE)
    return {key.lower(): int(value) for key, value in found if int(value)}


def _number(text: str | None) -> int | None:
    """Return a number that scontrol printed; None for UNLIMITED and all other words."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,15}", text) else None
