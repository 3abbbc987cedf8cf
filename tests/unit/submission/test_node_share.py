"""CPUs and memory in place of Slurm's defaults: what is requested, what is left to Slurm, and what is refused."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from hpcenv.cluster import node_resources
from hpcenv.cluster.node_types import parse_offers
from hpcenv.errors import UsageError
from hpcenv.submission import node_share
from hpcenv.submission.plan import Request

CONFIG = "SelectTypeParameters    = CR_CORE_MEMORY\n"
NODES = (
    "NodeName=g1 CoresPerSocket=32 CPUEfctv=128 CPUTot=128 Sockets=2 ActiveFeatures=a100 Gres=gpu:a100:8(S:0-1) "
    "RealMemory=1024000 ThreadsPerCore=2 Partitions=gpu,def\n"
    "NodeName=g2 CoresPerSocket=24 CPUEfctv=46 CPUTot=48 Sockets=2 ActiveFeatures=v100 Gres=gpu:v100:4 "
    "RealMemory=200000 MemSpecLimit=8000 ThreadsPerCore=1 Partitions=gpu,odd\n"
    "NodeName=c1 CoresPerSocket=24 CPUTot=48 Sockets=2 Gres=(null) RealMemory=190000 Partitions=cpu\n"
    "NodeName=x1 Gres=gpu:2 Partitions=vague\n"
)
PARTITIONS = (
    "PartitionName=gpu Default=YES\n"
    "PartitionName=def JobDefaults=DefCpuPerGPU=10,DefMemPerGPU=50000\n"
    "PartitionName=odd OverSubscribe=EXCLUSIVE\n"
    "PartitionName=cpu\nPartitionName=vague\n"
    "PartitionName=small MaxCPUsPerNode=12 MaxMemPerCPU=4000\n"
)
CLUSTER = node_resources.parse(CONFIG + PARTITIONS + NODES)
OFFERS = parse_offers(
    "thin*|up|infinite|1-infinite|9|idle|48|190000|(null)|(null)|c[1-9]|2:24:1\n"
    "threads|up|infinite|1-infinite|9|idle|96|190000|(null)|(null)|d[1-9]|2:24:2\n"
    "old|up|infinite|1-infinite|9|idle|96|190000|(null)|(null)|e[1-9]\n"
)


def asking(gpus: int, nproc: int | None = None, **words: Any) -> Request:
    return Request(**{"nodes": 1, "gpus_per_node": gpus, "nproc_per_node": nproc or gpus, **words})


@pytest.mark.parametrize(
    ("request_", "note"),
    [
        (
            asking(4, gpu_type="a100"),
            (
                "64 CPUs (4 of the 8 GPUs of g1, which has 128 CPUs), "
                "512000M of memory (4 of the 8 GPUs of g1, which has 1024000 MiB)"
            ),
        ),
        # 46 CPUs and 3 of 4 GPUs; the memory of the system does not count.
        (
            asking(3, constraint="v100"),
            (
                "34 CPUs (3 of the 4 GPUs of g2, which has 46 CPUs), "
                "144000M of memory (3 of the 4 GPUs of g2, which has 192000 MiB)"
            ),
        ),
        # Nodes of both kinds fit: each of them can give the smaller share.
        (
            asking(2),
            (
                "23 CPUs (2 of the 4 GPUs of g2, which has 46 CPUs), "
                "96000M of memory (2 of the 4 GPUs of g2, which has 192000 MiB)"
            ),
        ),
        (
            asking(2, exclude="g2"),
            (
                "32 CPUs (2 of the 8 GPUs of g1, which has 128 CPUs), "
                "256000M of memory (2 of the 8 GPUs of g1, which has 1024000 MiB)"
            ),
        ),
        (
            asking(2, nodelist="g1"),
            (
                "32 CPUs (2 of the 8 GPUs of g1, which has 128 CPUs), "
                "256000M of memory (2 of the 8 GPUs of g1, which has 1024000 MiB)"
            ),
        ),
        (
            asking(2, partition="def"),
            (
                "20 CPUs (2 GPUs x DefCpuPerGPU=10 of partition def), "
                "100000M of memory (2 GPUs x DefMemPerGPU=50000 of partition def)"
            ),
        ),
        (
            asking(1, partition="odd"),
            "46 CPUs (the job gets whole nodes, and g2 has 46), all memory (the job gets whole nodes)",
        ),
        # Without hyperthreads a node has half of the CPUs.
        (
            asking(1, partition="def", sbatch={"hint": "nomultithread"}, mem="1G"),
            "10 CPUs (1 GPU x DefCpuPerGPU=10 of partition def)",
        ),
        (
            asking(8, gpu_type="a100", sbatch={"hint": "nomultithread", "mem-per-gpu": "1G"}),
            "64 CPUs (8 of the 8 GPUs of g1, which has 64 CPUs)",
        ),
        (
            asking(2, gpu_type="v100", cpus_per_task=2),
            "96000M of memory (2 of the 4 GPUs of g2, which has 192000 MiB)",
        ),
    ],
    # Not all of a value: a set in it has another order in each process.
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_share_of_the_requested_gpus(request_: Request, note: str) -> None:
    share = node_share.of_gpus(request_, CLUSTER)
    assert share.note == f"requested on each node, as scontrol shows it: {note}"
    request = share.added_to(request_)
    assert request.cpus_per_task is not None
    assert str(request.cpus_per_task) in note or request_.cpus_per_task
    assert request.mem in (None, "0", "1G") or f"{request.mem} of memory" in note


def test_a_share_is_whole_cores() -> None:
    nodes = "NodeName=a CoresPerSocket=10 CPUTot=40 Sockets=2 Gres=gpu:8 ThreadsPerCore=2 Partitions=p\n"
    found = node_resources.parse(f"PartitionName=p Default=YES\n{nodes}")
    assert node_share.of_gpus(asking(1), found).cpus == 4


def test_limits_of_the_partition_hold() -> None:
    node = "NodeName=a CoresPerSocket=32 CPUTot=64 Sockets=2 Gres=gpu:4 RealMemory=512000 Partitions=small\n"
    share = node_share.of_gpus(asking(4, partition="small"), node_resources.parse(CONFIG + PARTITIONS + node))
    assert (share.cpus, share.mem) == (12, "48000M")
    assert share.cpus_origin == "4 of the 4 GPUs of a, which has 64 CPUs; at most 12 on a node"
    assert share.mem_origin == "4 of the 4 GPUs of a, which has 512000 MiB; at most 48000 MiB"


def test_what_is_typed_is_left_as_it_is() -> None:
    assert node_share.of_gpus(asking(2, cpus_per_task=3, mem="1G"), CLUSTER) == node_share.NodeShare()
    assert node_share.of_ranks(asking(0, 4, cpus_per_task=9), OFFERS) == node_share.NodeShare()


LEFT = "CPUs and memory are left to Slurm's defaults (--cpus and --mem request them): "


@pytest.mark.parametrize(
    ("request_", "found", "note"),
    [
        (asking(2), "`scontrol` did not end within 5 s", LEFT + "`scontrol` did not end within 5 s"),
        (
            asking(8, gpu_type="h100"),
            CLUSTER,
            LEFT + "`scontrol show node` shows no node of the partition with 8 GPUs of type h100",
        ),
        (
            asking(1, partition="vague"),
            CLUSTER,
            (
                "left to Slurm's default: CPUs (`scontrol show node` does not say how many CPUs x1 has), "
                "memory (`scontrol show node` does not say how much memory x1 has)"
            ),
        ),
        # A request for memory that is not counted would be a limit and nothing else.
        (
            asking(8, gpu_type="a100"),
            node_resources.parse("SelectTypeParameters = CR_CPU\n" + PARTITIONS + NODES),
            (
                "requested on each node, as scontrol shows it: 128 CPUs (8 of the 8 GPUs of g1, which has 128 CPUs); left "
                "to Slurm's default: memory (the cluster does not count memory: SelectTypeParameters=CR_CPU)"
            ),
        ),
        (
            asking(8, gpu_type="a100"),
            node_resources.parse(PARTITIONS + NODES),
            (
                "requested on each node, as scontrol shows it: 128 CPUs (8 of the 8 GPUs of g1, which has 128 CPUs); left "
                "to Slurm's default: memory (SelectTypeParameters is not known)"
            ),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_known_is_not_requested(request_: Request, found: Any, note: str) -> None:
    share = node_share.of_gpus(request_, found)
    assert share.note == note
    assert share.mem is None


def test_ranks_without_gpus_get_one_core_each() -> None:
    share = node_share.of_ranks(asking(0, 3), OFFERS)
    assert (share.cpus, share.note) == (3, "requested on each node: 3 CPUs (one for each rank)")
    share = node_share.of_ranks(asking(0, 3, partition="threads"), OFFERS)
    assert (share.cpus, share.note) == (6, "requested on each node: 6 CPUs (one core, 2 CPUs, for each rank)")
    assert node_share.of_ranks(asking(0, 3, partition="threads", sbatch={"threads-per-core": "1"}), OFFERS).cpus == 3
    assert node_share.of_ranks(asking(0, 3, partition="old"), OFFERS).cpus == 3
    assert node_share.of_ranks(asking(0, 3), ()).cpus == 3


def refusal(request: Request, launcher: str = "torchrun", skipped: tuple[str, ...] = ()) -> tuple[str, Any, Any] | None:
    try:
        node_share.refuse_shared_cores(request, "the CPUs come from --cpus", OFFERS, launcher=launcher, skipped=skipped)
    except UsageError as error:
        return error.what, error.why, error.hint
    return None


SHARED = "ranks that share a core wait for each other in every operation"
SKIP = "; if the ranks may share cores: --skip-check sys.affinity"


def test_ranks_that_would_share_a_core_are_refused() -> None:
    assert refusal(asking(0, 8, cpus_per_task=8)) is None
    assert refusal(asking(0, 8)) is None
    assert refusal(asking(0, 8, cpus_per_task=4)) == (
        "4 CPUs on each node for 8 ranks",
        f"{SHARED}; the CPUs come from --cpus",
        f"--cpus 8 or more, or fewer ranks: --nproc{SKIP}",
    )
    assert refusal(asking(0, 8, cpus_per_task=4), skipped=("sys.affinity",)) is None


def test_hardware_threads_of_one_core_are_not_two_cores() -> None:
    assert refusal(asking(0, 8, partition="threads", cpus_per_task=16)) is None
    assert refusal(asking(0, 8, partition="threads", cpus_per_task=8)) == (
        "8 CPUs on each node are 4 cores, for 8 ranks",
        f"a core of these nodes is 2 CPUs (hardware threads), and {SHARED}; the CPUs come from --cpus",
        f"--cpus 16 or more, or fewer ranks: --nproc{SKIP}",
    )
    assert refusal(asking(0, 8, partition="threads", cpus_per_task=8, sbatch={"hint": "nomultithread"})) is None
    assert refusal(asking(0, 8, partition="threads", cpus_per_task=8), skipped=("sys.affinity",)) is None
    # What sinfo did not say is not refused.
    assert refusal(asking(0, 8, partition="old", cpus_per_task=8)) is None


def test_tasks_of_srun_need_cpus_of_their_own_whatever_is_skipped() -> None:
    assert refusal(asking(0, 2, cpus_per_task=1), launcher="srun", skipped=("sys.affinity",)) == (
        "1 CPU on each node for 2 ranks",
        "with `--launcher srun` each rank is a Slurm task, and has its own CPUs; the CPUs come from --cpus",
        "--cpus 2 or more, or fewer ranks: --nproc",
    )


@pytest.mark.parametrize(
    ("parameters", "offered"),
    [
        ("enable_configless,enable_expedited_requeue", True),
        ("enable_configless", False),
        ("(null)", False),
    ],
)
def test_a_controller_that_offers_it_puts_a_job_whose_node_failed_first(parameters: str, offered: bool) -> None:
    text = f"{CONFIG}SlurmctldParameters     = {parameters}\n"
    answer: Future[Any] = Future()
    answer.set_result(node_resources.parse(text + PARTITIONS + NODES))
    request = node_share.choose(asking(4), (), answer).added_to(asking(4))
    assert request.expedite is offered
    assert node_share.choose(asking(4), (), answer, handover=True).expedite is False
