"""What is requested against what a cluster has."""

from __future__ import annotations

from typing import Any

import pytest

from hpcenv.cluster.node_types import parse_offers
from hpcenv.errors import SubmitRejected
from hpcenv.submission import capacity
from hpcenv.submission.plan import Request

CLUSTER = parse_offers(
    """\
cpu*|up|2-00:00:00|1-infinite|10|idle|64|256000|(null)|(null)|c[01-10]
gpu|up|1-00:00:00|1-8|4|mixed|64|512000|gpu:a100:4(S:0-1)|a100,nvlink|g[1-4]
gpu|up|1-00:00:00|1-8|2|idle|128|1024000|gpu:h100:8|h100,nvlink|h[1-2]
gpu|up|1-00:00:00|1-8|2|drained|128|1024000|gpu:h100:8|h100,nvlink|h[3-4]
long|down|infinite|2-infinite|10|idle|64|256000|(null)|(null)|c[01-10]
old|drain|infinite|1-infinite|1|idle|8|8000|(null)|(null)|o1
"""
)
ORIGINS = {
    "nodes": "--nodes", "gpus": "[submit] in hpcenv.toml", "gpu_type": "--gpu-type", "cpus": "--cpus", "mem": "SITE",
    "time": "SBATCH_TIMELIMIT", "partition": "--partition", "constraint": "--constraint", "spare": "--spare",
    "exclude": "--exclude", "nodelist": "--nodelist",
}  # fmt: skip


def asking(nodes: int = 1, gpus: int = 0, **words: Any) -> Request:
    return Request(nodes=nodes, gpus_per_node=gpus, nproc_per_node=1, **words)


def refusal(request: Request) -> SubmitRejected:
    with pytest.raises(SubmitRejected) as caught:
        capacity.judge(request, ORIGINS, CLUSTER)
    return caught.value


@pytest.mark.parametrize(
    "request_",
    [
        asking(10, time="2-0", mem="250G", cpus_per_task=64),
        asking(6, 4, partition="gpu"),
        asking(2, 8, partition="gpu", mem="1000000M", cpus_per_task=128),
        asking(4, 4, partition="gpu", gpu_type="a100"),
        asking(6, 1, partition="gpu", constraint="a100|h100"),
        asking(2, partition="gpu", constraint="h100&nvlink"),
        asking(2, partition="gpu", constraint="[rack1*2&rack2*2]"),
        asking(1, 8, partition="cpu,gpu"),
        asking(2, partition="gpu", nodelist="h[1-2]", exclude="g1"),
        asking(1, mem="0"),
    ],
    ids=str,
)
def test_what_fits_is_not_refused(request_: Request) -> None:
    assert capacity.judge(request_, ORIGINS, CLUSTER) == []


@pytest.mark.parametrize(
    ("request_", "what", "why", "hint"),
    [
        (asking(11), "partition `cpu` has 10 nodes, 11 are requested", "None", "--nodes 10"),
        (asking(10, spare=1), "partition `cpu` has 10 nodes, 10 and 1 spare (--spare) are requested", "None", "--nodes 9"),
        (asking(1, 1), "partition `cpu` has no nodes with 1 GPU, 1 is requested", "from [submit] in hpcenv.toml; its nodes have 64 CPUs", "--partition gpu has nodes for this job, if you may use it"),
        (asking(1, 9, partition="gpu"), "no nodes with 9 GPUs", "128 CPUs, 1024000 MiB, 8 GPUs (h100) (4 nodes)", "`sinfo --partition=gpu --Node --long`"),
        (asking(5, 4, partition="gpu", gpu_type="h100"), "has 4 nodes with 4 GPUs of type h100, 5 are requested", "--gpu-type", "sinfo"),
        (asking(1, cpus_per_task=65), "no nodes with 65 CPUs", "--cpus", "--partition gpu"),
        (asking(1, mem="2T", partition="gpu"), "no nodes with 2T of memory", "comes from SITE", "sinfo"),
        (asking(5, 8, partition="gpu", mem="900G"), "has 4 nodes with 8 GPUs", "", ""),
        (asking(1, 4, partition="gpu", gpu_type="a100", mem="900G"), "no nodes with 900G of memory and everything else", "512000 MiB", ""),
        (asking(1, time="3-0"), "ends jobs after 2-00:00:00, 3-0 is requested", "from SBATCH_TIMELIMIT", "--time 2-00:00:00"),
        (asking(9, partition="gpu"), "gives at most 8 nodes to a job, 9 are requested", "None", "--partition cpu"),
        (asking(1, partition="long"), "is for jobs of 2 nodes and more", "None", "--partition cpu"),
        (asking(1, partition="old"), "partition `old` takes no jobs", "calls it `drain`; it comes from --partition", ""),
        (asking(1, partition="gqu"), "there is no partition `gqu`", "the cluster has `cpu`, `gpu`, `long`, `old`", "--partition gpu"),
        (asking(2, partition="gpu", constraint="v100"), "no nodes with `v100`", "--constraint", ""),
        (asking(1, nodelist="c[01-11]"), "there is no node `c11`", "--nodelist", "--nodelist c10"),
        (asking(1, nodelist="g1"), "node `g1` is not in partition `cpu`", "--nodelist", "--partition gpu"),
        (asking(1, exclude="c[1-"), "`c[1-` names no nodes", "--exclude", ""),
        (asking(10, exclude="c01"), "has 9 nodes without those of --exclude (--exclude), 10 are requested", "", "--nodes 9"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("partition") else "",
)  # fmt: skip
def test_what_can_never_run_names_its_origin_and_a_way_out(request_: Request, what: str, why: str, hint: str) -> None:
    error = refusal(request_)
    assert what in error.what
    assert why in str(error.why)
    assert hint in str(error.hint)


def test_nodes_that_are_down_now_are_a_note() -> None:
    (note,) = capacity.judge(asking(3, 8, partition="gpu"), ORIGINS, CLUSTER)
    assert note.startswith("2 of the 4 fitting nodes of gpu are drained now, 3 nodes are needed")


def test_a_partition_that_is_down_is_a_note() -> None:
    (note,) = capacity.judge(asking(2, partition="long"), ORIGINS, CLUSTER)
    assert note == "partition long is down: the job will wait until it is up"


def test_a_qos_may_put_limits_aside() -> None:
    (note,) = capacity.judge(asking(1, time="9-0", qos="long"), ORIGINS, CLUSTER)
    assert "only if QOS long allows it" in note


def test_a_cluster_without_a_default_partition_wants_one_named() -> None:
    with pytest.raises(SubmitRejected, match="no partition is named"):
        capacity.judge(asking(), ORIGINS, [offer for offer in CLUSTER if not offer.default])


def test_what_sinfo_does_not_say_is_not_refused() -> None:
    vague = parse_offers("p*|up|n/a|1-infinite|2|idle|16+|8000+|(null)|(null)|n[1-2")
    assert capacity.judge(asking(2, mem="1T", cpus_per_task=999, time="99-0"), ORIGINS, vague) == []
    assert capacity.judge(asking(2, nodelist="x9"), ORIGINS, vague) == []


@pytest.mark.parametrize(
    ("mem", "mib"), [("4G", 4096), ("100", 100), ("512K", 0.5), ("1T", 1048576), ("0", None), ("x", None), (None, None)]
)
def test_memory_as_sbatch_reads_it(mem: str | None, mib: float | None) -> None:
    assert capacity.mebibytes(mem) == mib


def test_memory_without_a_unit_is_told_with_one() -> None:
    error = refusal(asking(1, mem="9000000", partition="gpu"))
    assert "no nodes with 9000000 MiB of memory" in error.what
