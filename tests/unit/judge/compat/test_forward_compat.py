"""A driver that is too old for the image's CUDA, and cuda-compat in the image: the gate, and the loader's path."""

import json
from dataclasses import replace

import pytest

from hpcenv.errors import SpecError
from hpcenv.judge.compat import gpu_rules
from hpcenv.judge.network import rendezvous
from hpcenv.project import toml_files
from hpcenv.project.compatibility import PACKAGED
from hpcenv.project.severities import severities
from hpcenv.records.facts import CudaCompat
from hpcenv.records.manifest import Environment, GpuNeeds, Setting

SIF = Environment(kind="sif", python="python3", sif="/i.sif", apptainer="/usr/bin/apptainer", gpus=True)
FOLDER = "/usr/local/cuda-13.0/compat"
PACKAGE = CudaCompat(
    version="13.0", folder=FOLDER, first=False, library_path="/usr/local/nvidia/lib64:/.singularity.d/libs"
)
H100, CONSUMER = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"


@pytest.fixture
def node(make_manifest, make_facts):
    """Return the findings about the driver of node n1, and the LD_LIBRARY_PATH that its ranks get; None: it is not set."""
    table = json.dumps(toml_files.read(PACKAGED, error=SpecError))

    def _node(driver, *, package=PACKAGE, gpu=H100, cuda="13.0", environment=SIF, require=None, settings=()):
        needs = GpuNeeds(cuda=cuda, arch_list=("sm_90", "sm_89"), require=require or {}, table=table)
        manifest = make_manifest(
            gpus_per_node=1, gpu_needs=needs, environment=environment, settings=tuple(settings), backend="nccl", nodes=1
        )
        values = {
            "host.driver-version": driver, "host.cuda-driver-version": "12.2", "host.gpu-models": (gpu,),
            "host.gpu-compute-capabilities": ("8.9" if gpu == CONSUMER else "9.0",), "host.gpu-brands": ("nvidia",),
        }  # fmt: skip
        facts = make_facts("n1", values=values, cuda_compat=package)
        found = gpu_rules.judge(manifest, facts, severities({}))
        choice = rendezvous.choose(manifest, ("n1",), {"n1": facts}, job_id="1", attempt=0)
        path = [one.value for one in choice.settings["n1"] if one.name == "LD_LIBRARY_PATH"]
        return {one.field: one for one in found}, path[0] if path else None

    return _node


def test_a_driver_that_is_too_old_is_no_failure_where_cuda_compat_works(node):
    found, path = node("535.183.01")
    assert found == {}
    # The image's other folders stay; Apptainer adds its own folder again.
    assert path == f"{FOLDER}:/usr/local/nvidia/lib64"


def test_without_the_package_it_is_one(node):
    found, path = node("535.183.01", package=None)
    assert (found["host.driver-version"].result, path) == ("mismatch", None)
    assert "this driver is too old for CUDA 13.0" in found["host.driver-version"].note


@pytest.mark.parametrize(
    ("driver", "gpu", "result", "why"),
    [
        ("550.54.15", H100, "unknown", "nothing is said about cuda-compat 13.0 on driver branch 550"),
        ("535.183.01", CONSUMER, "mismatch", "is for data-centre GPUs only"),
        ("535.183.01", "NVIDIA Z9000", "unknown", "whether NVIDIA Z9000 is one is not known"),
    ],
)
def test_a_branch_or_gpu_that_the_table_does_not_allow(node, driver, gpu, result, why):
    found, path = node(driver, gpu=gpu)
    assert (found["host.driver-version"].result, path) == (result, None)
    assert why in found["host.driver-version"].note


def test_a_package_that_is_older_than_the_cuda_of_torch_does_not_help(node):
    found, path = node("535.183.01", cuda="13.2")
    assert (found["host.driver-version"].result, path) == ("mismatch", None)
    assert "cuda-compat 13.0 is older than CUDA 13.2" in found["host.driver-version"].note


def test_a_driver_that_is_new_enough_needs_no_package(node):
    found, path = node("580.95.05")
    assert "host.driver-version" not in found
    assert path is None


def test_a_package_that_the_image_puts_first_is_judged_with_every_driver(node):
    first = replace(PACKAGE, first=True)
    found, path = node("535.183.01", package=first)
    assert (found, path) == ({}, None)  # the image has done it
    found, _ = node("610.43.02", package=first)
    assert found["host.driver-version"].result == "mismatch"
    assert "leave it off the loader's path" in found["host.driver-version"].note


def test_who_sets_the_path_keeps_it_and_the_driver_stays_too_old(node):
    mine = Setting(name="LD_LIBRARY_PATH", value="/mine", origin="--env")
    found, path = node("535.183.01", settings=(mine,))
    assert (found["host.driver-version"].result, path) == ("mismatch", "/mine")


def test_the_images_own_rule_sees_the_cuda_of_the_package(node):
    found, _ = node("535.183.01", require={"NVIDIA_REQUIRE_CUDA": "cuda>=13.0"})
    assert found == {}
    found, _ = node("535.183.01", package=None, require={"NVIDIA_REQUIRE_CUDA": "cuda>=13.0"})
    assert found["container.nvidia-require"].result == "mismatch"
