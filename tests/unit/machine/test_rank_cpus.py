"""Which CPUs are near the GPU of a rank, from what the kernel and NVML say."""

import pytest

from hpcenv.judge import verdict_table
from hpcenv.machine import rank_cpus
from hpcenv.machine.gpus import GpuFacts
from hpcenv.machine.tree import RecordedTree
from hpcenv.records.facts import RankCpus
from hpcenv.records.manifest import LaunchOptions
from hpcenv.records.network import Fabric, GpuPlace

# A node with two sockets of 32 cores, two threads each, and four GPUs on each socket.
SOCKETS = ("0-31,64-95", "32-63,96-127")
BUSES = tuple(f"0000:{number}8:00.0" for number in range(1, 9))
TREE = RecordedTree(
    {f"/sys/bus/pci/devices/{bus}/local_cpulist": f"{SOCKETS[number // 4]}\n" for number, bus in enumerate(BUSES)}, {}
)
UUIDS = tuple(f"GPU-0000000{number}-0000-0000-0000-000000000000" for number in range(8))
ALL = range(128)


def nvml(count=8, models=("NVIDIA H100",)):
    values = {"host.gpu-models": (models * 8)[:count], "host.gpu-uuids": UUIDS[:count]}
    return GpuFacts(values=values, places=tuple(GpuPlace(bus=bus) for bus in BUSES[:count]))


@pytest.fixture
def choose(make_manifest):
    def make(*, gpus=8, nproc=None, allowed=ALL, tree=TREE, environ=None, seen=None, fabric=None, **changes):
        launch = LaunchOptions(cpu_binding=changes.pop("cpu_binding", "near-gpu"))
        manifest = make_manifest(
            gpus_per_node=gpus, nproc_per_node=gpus if nproc is None else nproc, launch=launch, **changes
        )
        view = rank_cpus.HostView(gpus=nvml(gpus) if seen is None else seen, fabric=fabric, allowed=set(allowed))
        return rank_cpus.choose(manifest, environ or {}, view, tree)

    return make


def test_each_rank_gets_the_cpus_near_its_gpu(choose):
    assert choose() == RankCpus(cpus=(SOCKETS[0],) * 4 + (SOCKETS[1],) * 4, gpus=BUSES)


def test_only_cpus_of_the_job_count(choose):
    found = choose(
        allowed={*range(4, 8), *range(40, 44)}, seen=nvml(8), environ={"CUDA_VISIBLE_DEVICES": "2,6"}, gpus=2
    )
    assert found == RankCpus(cpus=("4-7", "40-43"), gpus=(BUSES[2], BUSES[6]))


def test_uuids_name_gpus_too(choose):
    environ = {"CUDA_VISIBLE_DEVICES": f"{UUIDS[5]},{UUIDS[0]}"}
    assert choose(seen=nvml(8), environ=environ, gpus=2).gpus == (BUSES[5], BUSES[0])


def test_amd_gpus_are_those_of_the_kernel_s_driver(choose):
    places = tuple(GpuPlace(bus=bus) for bus in BUSES)
    fabric = Fabric(gpu_vendor="amd", gpus=places)
    found = choose(fabric=fabric, seen=GpuFacts(), gpus=2, environ={"ROCR_VISIBLE_DEVICES": "0,7"})
    assert found == RankCpus(cpus=SOCKETS, gpus=(BUSES[0], BUSES[7]))


@pytest.mark.parametrize("changes", [{"cpu_binding": "off"}, {"gpus": 0, "nproc": 2}, {"script": ""}])
def test_where_no_binding_is_wanted(choose, changes):
    assert choose(**changes) is None


def without(bus):
    files = {f"/sys/bus/pci/devices/{other}/local_cpulist": SOCKETS[0] for other in BUSES if other != bus}
    return RecordedTree(files, {})


@pytest.mark.parametrize(
    ("changes", "bound", "why"),
    [
        ({"seen": GpuFacts(reason="no pynvml")}, 0, "where the GPUs are on the PCI bus is not known"),
        ({"nproc": 9}, 0, "9 ranks use 8 GPUs, and which rank uses which GPU is not known"),
        (
            {"seen": nvml(8, ("NVIDIA H100", "NVIDIA T4"))}, 0,
            "the GPUs differ, and in which order CUDA numbers them is not known",
        ),
        ({"seen": nvml(8), "gpus": 2}, 0, "the job has 2 GPUs here, and the driver lists 8"),
        (
            {"environ": {"CUDA_VISIBLE_DEVICES": "0,9"}, "gpus": 2}, 0,
            "CUDA_VISIBLE_DEVICES=0,9 names other GPUs than the driver lists",
        ),
        ({"allowed": range(32)}, 0, "all CPUs of the job are near the GPUs; Slurm gave no CPU near GPU 0000:58:00.0"),
        (
            {"allowed": [0, *range(32, 64)]}, 4,
            "only 1 of the 33 CPUs of the job are near GPU 0000:18:00.0, for 4 ranks",
        ),
        ({"tree": without("0000:18:00.0"), "gpus": 1}, 0, "the machine does not say which CPUs are near GPU 0000:18:00.0"),
    ],
)  # fmt: skip
def test_what_is_not_known_or_would_be_worse_is_not_bound(choose, changes, bound, why):
    found = choose(**changes)
    assert sum(map(bool, found.cpus)) == bound
    assert found.why.startswith(why)


def test_one_line_for_nodes_that_are_alike():
    bound, not_bound = RankCpus(cpus=("0-3", "4-7")), RankCpus(why="the driver does not answer")
    assert verdict_table.binding_in_words({"n1": bound, "n2": bound}) == [
        "ranks bound to the CPUs near their GPUs: 2 of 2 of a node"
    ]
    assert verdict_table.binding_in_words({"n1": bound, "n2": not_bound, "n3": not_bound, "n4": None}) == [
        "ranks bound to the CPUs near their GPUs: 2 of 2 of a node, on n1",
        "ranks not bound to CPUs (the driver does not answer), on n[2-3]",
    ]


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0-3,x", set()), ("0-3\n", set())]
)
def test_lists_of_cpus(text, numbers):
    assert rank_cpus.parse_list(text) == numbers
    assert rank_cpus.parse_list(rank_cpus.format_list(numbers)) == numbers
