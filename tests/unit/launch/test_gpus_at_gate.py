"""The agent of a node tries the GPUs before the first rank; a node that cannot use them starts nothing."""

import dataclasses

import pytest

from hpcenv.project.severities import resolve
from hpcenv.records.files import load_record
from hpcenv.records.gpu_start import GpuStart
from hpcenv.records.manifest import Expectation, PreflightOptions
from hpcenv.records.outcome import NodeExit
from hpcenv.records.verdict import Verdict
from tests.stand_in_torch import write_torch

from .test_loaded_libraries import sif_run, trained  # noqa: F401  (a fixture)


@pytest.fixture
def gpu_run(sif_run):  # noqa: F811
    """A run with 8 GPUs with a stand-in for a SIF and a torch that can use them."""
    write_torch(sif_run.base / "site", trained=sif_run.base / "trained")
    sif_run.save(gpus_per_node=8, severities=resolve({}, gpus=True))
    return sif_run


def with_torch(run, **faults):
    write_torch(run.base / "site", trained=run.base / "trained", **faults)


def test_the_ranks_start_after_every_gpu_was_tried_and_the_record_says_how_long_it_took(gpu_run):
    assert trained(gpu_run) == (0, "")
    assert (gpu_run.base / "trained").exists()
    record = load_record(GpuStart, gpu_run.folder.gpus_of("n1", None))
    assert (record.expected, record.seen, len(record.gpus)) == (8, 8, 8)
    assert record.gpus[7].uuid == "GPU-00000007-0000-0000-0000-000000000000"
    assert 0 < record.seconds < 60


@pytest.mark.parametrize("level", ["off", "quick"])
def test_fewer_gpus_end_with_90_and_the_sentence_whatever_the_level(gpu_run, level):
    gpu_run.save(preflight=PreflightOptions(level=level))
    with_torch(gpu_run, gpus=0, fault="Found no NVIDIA driver on your system.")
    status, output = trained(gpu_run)
    assert status == 90
    assert "error[node-rejected]: torch sees 0 of 8 GPUs in the container on n1" in output
    assert "why: the driver's library is not there (libcuda.so.1: cannot open shared object file" in output
    assert "RuntimeError: Found no NVIDIA driver on your system." in output
    assert not (gpu_run.base / "trained").exists()
    record = load_record(NodeExit, gpu_run.folder.exit_of("n1"))
    assert (record.refused, [d.field for d in record.differences]) == (True, ["cuda.start"])
    # The last step of the batch script writes it into the verdict.
    assert gpu_run.step("finish", "90").returncode == 0
    verdict = load_record(Verdict, gpu_run.folder.verdict)
    assert [(f.field, f.severity, f.found) for f in verdict.findings] == [
        ("cuda.start", "must", "torch sees 0 of 8 GPUs in the container on n1")
    ]


def test_a_child_that_crashes_ends_with_91_and_the_node(gpu_run):
    with_torch(gpu_run, fault="crash")
    status, output = trained(gpu_run)
    assert status == 91
    assert "torch does not say which GPUs it can use in the container on n1" in output
    assert "it was ended by SIGABRT, at the start of torch.cuda" in output
    assert not (gpu_run.base / "trained").exists()


def test_a_torch_that_cannot_be_imported_says_nothing_about_gpus(gpu_run):
    (gpu_run.base / "site" / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: no such file')")
    status, output = trained(gpu_run)
    assert (status, "libcudart.so.13: no such file" in output) == (91, True)


def test_functions_are_tried_too(gpu_run):
    gpu_run.save(launch=dataclasses.replace(gpu_run.manifest.launch, launcher="tasks"))
    with_torch(gpu_run, gpus=3)
    status, output = trained(gpu_run)
    assert (status, "torch sees 3 of 8 GPUs in the container on n1" in output) == (90, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"gpus_per_node": 0},
        {"preflight": PreflightOptions(skipped=("cuda.start",))},
        {"preflight": PreflightOptions(allow_cpu_torch=True)},
        {"severities": resolve({"cuda.start": "info"}, gpus=True)},
        {"expectations": (Expectation(field="torch.version", value="absent", severity="must"),)},
    ],
    ids=["no GPUs", "--skip-check", "--allow-cpu-torch", "[policy]", "no torch"],
)
def test_nothing_is_tried_where_it_is_left_out(gpu_run, changes):
    gpu_run.save(**changes)
    with_torch(gpu_run, fault="crash")
    assert trained(gpu_run)[0] == 0
    assert not gpu_run.folder.gpus_of("n1", None).exists()
