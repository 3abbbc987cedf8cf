"""The gate on nodes for JAX's plug-in for CUDA: its driver and its GPUs."""

import json

import pytest

from hpcenv.errors import SpecError
from hpcenv.judge.compat import gpu_rules, library_rules
from hpcenv.project import toml_files
from hpcenv.project.compatibility import PACKAGED
from hpcenv.project.severities import severities
from hpcenv.records.manifest import GpuNeeds

H100, V100 = ("NVIDIA H100 80GB HBM3", "9.0"), ("Tesla V100-SXM2-16GB", "7.0")


@pytest.fixture
def notes(make_manifest, make_facts):
    """Return (field, result, note) of what is found on a node."""
    table = json.dumps(toml_files.read(PACKAGED, error=SpecError))

    def _notes(driver, gpu, *, cuda="", jax_cuda="13", torch="absent"):
        needs = GpuNeeds(cuda=cuda, jax_cuda=jax_cuda, arch_list=("sm_90",) if cuda else (), require={}, table=table)
        manifest = make_manifest(gpus_per_node=1, gpu_needs=needs, nodes=1)
        values = {"host.driver-version": driver, "host.gpu-models": (gpu[0],), "torch.version": torch}
        facts = make_facts("n1", values={**values, "host.gpu-compute-capabilities": (gpu[1],)})
        found = [*gpu_rules.judge(manifest, facts, severities({}))]
        found += library_rules.judge(manifest, facts, severities({}))
        return [(one.field, one.result, one.note.partition(":")[0]) for one in found]

    return _notes


def test_a_driver_of_its_cuda_is_fine_and_torch_is_not_asked_for(notes):
    assert notes("580.95.05", H100) == []
    assert notes("535.183.01", H100, jax_cuda="12") == []


def test_a_driver_that_is_too_old_for_it(notes):
    too_old = ("host.driver-version", "mismatch", "this driver is too old for CUDA 13 of JAX's plug-in")
    assert notes("535.183.01", H100) == [too_old]
    # torch for CUDA 12 runs with this driver.
    assert notes("535.183.01", H100, cuda="12.8", torch="2.9.1") == [too_old]


def test_a_gpu_that_its_cuda_has_dropped(notes):
    dropped = "CUDA 13 has dropped Tesla V100-SXM2-16GB (compute capability 7.0)"
    assert notes("580.95.05", V100) == [("host.gpu-compute-capabilities", "mismatch", dropped)]
    assert notes("535.183.01", V100, jax_cuda="12") == []
