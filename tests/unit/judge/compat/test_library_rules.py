"""The gate on cuDNN, NCCL, cuBLAS, torchvision, torchaudio, and on the memory of GPUs."""

import dataclasses
import json

import pytest

from hpcenv.errors import SpecError
from hpcenv.judge.compat import gpu_rules, library_rules
from hpcenv.judge.compat.compat_table import PACKAGED
from hpcenv.project import severities, toml_files
from hpcenv.records.manifest import GpuNeeds, PackageExpectation

TABLE = json.dumps(toml_files.read(PACKAGED, error=SpecError))
SEVERITIES = severities.severities({})


def needs(**more):
    return GpuNeeds(cuda="12.8", arch_list=("sm_80",), require={}, table=TABLE, **more)


def rows(make_manifest, make_facts, packages=(), gpu_needs=None, **facts):
    expected = tuple(PackageExpectation(name=name, version=version) for name, version in packages)
    manifest = make_manifest(packages=expected, gpu_needs=gpu_needs or needs())
    values = {name.replace("_", ".", 1).replace("_version", ".version"): value for name, value in facts.items()}
    found = library_rules.judge(manifest, make_facts("n1", values=values), SEVERITIES)
    return [(one.field, one.severity, one.result) for one in found]


def test_what_fits_has_no_row(make_manifest, make_facts):
    facts = {"torch_version": "2.9.1", "libs_cudnn_version": "9.10.2", "libs_nccl_version": "2.27.5"}
    assert rows(make_manifest, make_facts, [("torchvision", "0.24.1")], **facts) == []


def test_what_loads_counts_more_than_what_is_installed(make_manifest, make_facts):
    packages = [("nvidia-nccl-cu12", "2.27.5"), ("nvidia-cudnn-cu12", "9.10.2.21")]
    found = rows(make_manifest, make_facts, packages, torch_version="2.9.1", libs_nccl_version="2.29.7")
    assert found == [("compat.nccl", "warn", "mismatch")]


@pytest.mark.parametrize(
    ("version", "row"),
    [
        ("0.23.0", ("compat.torchvision", "must", "mismatch")),
        ("0.24.0", ("compat.torchvision", "warn", "mismatch")),  # made for 2.9.0
        ("0.99.0", ("compat.torchvision", "info", "unknown")),
    ],
)
def test_torchvision(version, row, make_manifest, make_facts):
    assert rows(make_manifest, make_facts, [("torchvision", version)], torch_version="2.9.1") == [row]


def test_a_torch_of_the_users_own_has_one_row_that_blocks_nothing(make_manifest, make_facts):
    packages = [("torchvision", "0.24.0a0+c0"), ("nvidia-nccl-cu13", "2.28.3")]
    found = rows(make_manifest, make_facts, packages, torch_version="2.9.0a0+145a3a7bda")
    assert found == [("compat.torch", "info", "unknown")]


@pytest.mark.parametrize(
    ("sizes", "result"),
    [
        (("81559", "81559"), None),
        (("81559", "40960"), "mismatch"),
        (("81559", "[N/A]"), "unknown"),
        ((), "unknown"),
    ],
)
def test_the_memory_of_every_gpu(sizes, result, make_manifest, make_facts):
    manifest = make_manifest(gpu_needs=needs(gpu_memory_gb=80))
    found = gpu_rules.judge(manifest, make_facts("n1", values={"host.gpu-memory-mib": sizes}), SEVERITIES)
    assert [one.result for one in found if one.field == "host.gpu-memory"] == ([result] if result else [])


@pytest.mark.parametrize(
    ("built", "capability", "result"),
    [
        (("sm_80",), "8.0", None),
        (("sm_80",), "8.6", None),
        (("sm_86",), "8.0", "mismatch"),
        (("sm_86", "compute_80"), "8.0", None),
        (("Ampere",), "8.0", "unknown"),
    ],
)
def test_kernels_of_a_package_that_was_compiled_in_the_image(built, capability, result, make_manifest, make_facts):
    gpu_needs = needs(built={"flash-attn 2.8.3": built})
    values = {"host.gpu-compute-capabilities": (capability,) * 2, "host.gpu-models": ("NVIDIA A100",) * 2}
    values |= {"host.driver-version": "570.86.15"}
    found = gpu_rules.judge(make_manifest(gpu_needs=gpu_needs), make_facts("n1", values=values), SEVERITIES)
    rows = [one for one in found if one.field == "host.gpu-compute-capabilities"]
    assert [one.result for one in rows] == ([result] if result else [])
    for one in rows:
        assert (one.severity, one.locked) == ("must", ", ".join(built))
        assert "flash-attn 2.8.3" in one.note and "--build flash-attn==2.8.3" in one.note


@pytest.mark.parametrize(("machine", "said"), [("x86_64", "torch 2.10 (cu128) would run"), ("aarch64", "")])
def test_no_build_is_named_that_the_processors_of_the_node_cannot_run(machine, said, make_manifest, make_facts):
    values = {"host.gpu-compute-capabilities": ("7.0",), "host.gpu-models": ("NVIDIA V100",), "host.machine": machine}
    values |= {"host.driver-version": "525.60.13"}
    manifest = make_manifest(gpu_needs=dataclasses.replace(needs(), cuda="13.0"))
    found = gpu_rules.judge(manifest, make_facts("n1", values=values), SEVERITIES)
    notes = {one.field: one.note for one in found}
    for field in ("host.driver-version", "host.gpu-compute-capabilities"):
        assert (said in notes[field]) if said else ("would run" not in notes[field]), notes[field]


@pytest.mark.parametrize(("mib", "gb"), [("15110", 16), ("40960", 40), ("97871", 96), ("183359", 180)])
def test_a_gpu_has_what_its_data_sheet_says(mib, gb, make_manifest, make_facts):
    manifest = make_manifest(gpu_needs=needs(gpu_memory_gb=gb))
    found = gpu_rules.judge(manifest, make_facts("n1", values={"host.gpu-memory-mib": (mib,)}), SEVERITIES)
    assert "host.gpu-memory" not in [one.field for one in found]
