"""What scontrol says about nodes and partitions: recorded, without readline, and with figures that real sites have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.cluster import node_resources
from hpcenv.errors import ToolFailed

RECORDED = Path(__file__).resolve().parents[2] / "fakes" / "outputs"

# The form of Slurm 24.11 (tests/fakes/outputs), with the shape of a LUMI-G node.
LUMI_G = (
    "NodeName=nid005000 Arch=x86_64 CoresPerSocket=64 CPUAlloc=0 CPUEfctv=112 CPUTot=128 CPULoad=0.00 "
    "AvailableFeatures=AMD_EPYC_7A53,x1000 ActiveFeatures=AMD_EPYC_7A53,x1000 Gres=gpu:mi250:8(S:0) "
    "NodeAddr=nid005000 OS=Linux 5.14 #1 SMP RealMemory=491520 AllocMem=0 FreeMem=1 Sockets=1 Boards=1 "
    "CoreSpecCount=8 MemSpecLimit=11520 State=IDLE ThreadsPerCore=2 Partitions=standard-g,dev-g "
    "CfgTRES=cpu=112,mem=480G Comment=RealMemory=7 CPUTot=1"
)
DEV_G = (
    "PartitionName=dev-g AllowGroups=ALL Default=NO OverSubscribe=EXCLUSIVE MaxCPUsPerNode=56 Nodes=nid005000 "
    "SelectTypeParameters=NONE JobDefaults=DefCpuPerGPU=7,DefMemPerGPU=60000 DefMemPerNode=UNLIMITED "
    "MaxMemPerCPU=2000"
)
CONFIG = "JobDefaults             = DefCpuPerGPU=3\nSelectTypeParameters    = CR_CORE_MEMORY\n"


def test_one_call_answers_for_nodes_and_partitions(fake_slurm: Any) -> None:
    fake_slurm.replays("scontrol", "scontrol-resources")
    found = node_resources.ask(fake_slurm.environ)
    (call,) = fake_slurm.calls("scontrol")
    assert call.argv == ("--all", "--oneliner")
    node = found.nodes[0]
    assert [one.name for one in found.nodes] == ["n1", "n2"]
    assert (node.cpus, node.cpus_per_core, node.memory, node.gpus) == (16, 1, 8000, {"": 8})
    assert node.partitions >= {"batch", "low", "high"}
    assert found.partitions["batch"].default
    assert not found.partitions["low"].default
    batch = found.partitions["batch"]
    assert (batch.cpus_per_gpu, batch.memory_per_gpu, batch.most_cpus, batch.whole_nodes) == (None, None, None, False)
    assert batch.select == "CR_CORE"


@pytest.mark.parametrize("prompt", ["", "scontrol: "])
def test_cores_of_the_system_threads_and_the_partition_s_own_figures(prompt: str) -> None:
    found = node_resources.parse(prompt + CONFIG + prompt + DEV_G + "\n" + prompt + LUMI_G)
    (node,) = found.nodes
    assert (node.cpus, node.cpus_per_core, node.memory) == (112, 2, 480000)
    assert node.gpus == {"mi250": 8}
    assert "x1000" in node.features
    part = found.partitions["dev-g"]
    assert (part.cpus_per_gpu, part.memory_per_gpu, part.most_cpus) == (7, 60000, 56)
    assert (part.most_memory, part.most_memory_per_cpu, part.whole_nodes) == (None, 2000, True)
    assert part.select == "CR_CORE_MEMORY"


def test_figures_of_the_cluster_hold_where_the_partition_has_none() -> None:
    found = node_resources.parse(
        f"{CONFIG}PartitionName=a JobDefaults=(null)\nPartitionName=b SelectTypeParameters=CR_CPU"
    )
    assert found.partitions["a"].cpus_per_gpu == 3
    assert found.partitions["a"].memory_per_gpu is None
    assert found.partitions["b"].select == "CR_CPU"


def test_slurm_may_count_cores_as_cpus() -> None:
    found = node_resources.parse("NodeName=a CoresPerSocket=32 CPUTot=64 Sockets=2 ThreadsPerCore=2")
    assert (found.nodes[0].cpus, found.nodes[0].cpus_per_core, found.nodes[0].memory) == (64, 1, None)


def test_a_refusal_of_slurmctld_is_an_error(fake_slurm: Any) -> None:
    fake_slurm.answers("scontrol", err="slurm_load_node error: Access/permission denied", status=1)
    with pytest.raises(ToolFailed, match="scontrol"):
        node_resources.ask(fake_slurm.environ)


@given(st.text() | st.lists(st.sampled_from([LUMI_G, DEV_G, CONFIG, "NodeName=", "="])).map("\n".join))
def test_any_text_is_parsed(text: str) -> None:
    found = node_resources.parse(text)
    assert all(node.cpus_per_core >= 1 for node in found.nodes)
