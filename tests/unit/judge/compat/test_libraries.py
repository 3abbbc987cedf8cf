"""cuDNN, NCCL, cuBLAS, torchvision and torchaudio against torch."""

import pytest

from hpcenv.judge.compat.libraries import check_library, check_pair, fitting_pairs, judge_environment, library_of
from hpcenv.judge.compat.versions import fits, numbers
from hpcenv.project import compatibility

TABLE = compatibility.table()


@pytest.mark.parametrize(
    ("torch", "cuda", "name", "version", "result"),
    [
        ("2.9.1", "12.8", "cudnn", "9.10.2.21", "match"),
        ("2.9.1", "12.8", "cudnn", "9.10.2", "match"),  # as the library reports itself
        ("2.9.1+cu128", "12.8", "cudnn", "9.10.2", "match"),
        ("2.9.1", "12.8", "cudnn", "9.15.1", "mismatch"),
        ("2.9.1", "12.8", "nccl", "2.27.5", "match"),
        ("2.9.1", "12.8", "nccl", "2.27.3", "mismatch"),
        ("2.12.1", "13.0", "cublas", "13.1.0.3", "match"),  # a range in the wheel
        ("2.12.1", "13.0", "cublas", "13.1.1.3", "match"),
        ("2.12.1", "13.0", "cublas", "13.1.2", "mismatch"),
        ("2.12.1", "13.0", "cudnn", "9.10.2.21", "mismatch"),
        ("2.15.0", "13.2", "triton", "3.9.4", "match"),
        ("2.15.0", "13.2", "triton", "3.10.0", "mismatch"),
        ("2.9.1", "12.6", "cudnn", "9.10.2.21", "unknown"),  # another build, with other libraries
        ("2.9.0a0+145a3a7bda", "13.0", "cudnn", "9.10.2", "unknown"),
        ("2.16.0", "13.2", "cudnn", "9.26.0", "unknown"),
        ("2.9.1", "12.8", "cudnn", "none", "unknown"),
        ("2.9.1", "12.8", "cusolver", "11.7", "unknown"),
    ],
)
def test_libraries(torch, cuda, name, version, result):
    found = check_library(TABLE, torch, cuda, name, version)

    assert (found.field, found.judgement.result) == (f"compat.{name}", result)
    assert found.judgement.why or "not in the table (dated 2" in found.judgement.what or "is no" in found.judgement.what


@pytest.mark.parametrize(
    ("name", "version", "torch", "result", "patch_only"),
    [
        ("torchvision", "0.24.0", "2.9.1", "mismatch", True),
        ("torchvision", "0.24.1", "2.9.1+cu128", "match", False),
        ("torchvision", "0.24.1+cu128", "2.9.1", "match", False),
        ("torchvision", "0.23.0", "2.9.1", "mismatch", False),
        ("torchvision", "0.29.2", "2.15.0", "match", False),
        ("torchvision", "0.29.2", "2.13.0", "mismatch", False),
        ("torchvision", "0.30.0", "2.15.0", "unknown", False),
        ("torchvision", "0.24.0a0+c0", "2.9.1", "unknown", False),
        ("torchaudio", "2.8.0", "2.9.1", "mismatch", False),
        ("torchaudio", "2.11.0", "2.14.1", "match", False),
        ("torchaudio", "2.11.0", "2.15.0", "unknown", False),  # it refuses another CUDA minor version
        ("torchaudio", "2.11.0", "2.16.0", "unknown", False),
    ],
)
def test_pairs(name, version, torch, result, patch_only):
    found = check_pair(TABLE, name, version, torch)

    assert (found.judgement.result, found.patch_only) == (result, patch_only)


def test_a_wrong_pair_is_told_the_right_one():
    assert check_pair(TABLE, "torchvision", "0.24.0", "2.9.1").judgement.hint == "torchvision 0.24.1 fits torch 2.9.1"


@pytest.mark.parametrize("torch", [release.version for release in TABLE.torches])
def test_a_version_that_is_chosen_for_a_torch_is_one_that_the_table_calls_fitting(torch):
    for name, version in fitting_pairs(TABLE, torch).items():
        assert check_pair(TABLE, name, version, torch).judgement.result == "match", (name, version)


def test_an_environment_is_judged_in_all_that_it_has():
    found = judge_environment(
        TABLE, torch="2.9.1", cuda="12.8", versions={"cudnn": "9.10.2", "nccl": "2.29.7", "torchaudio": "2.9.0"}
    )

    assert {one.field: one.judgement.result for one in found} == {
        "compat.cudnn": "match",
        "compat.nccl": "mismatch",
        "compat.torchaudio": "mismatch",
    }


def test_a_torch_outside_of_the_table_is_unknown_once():
    (found,) = judge_environment(TABLE, torch="2.99.0", cuda="14.0", versions={"cudnn": "9.1.0", "nccl": "2.29.7"})

    assert (found.field, found.judgement.result) == ("compat.torch", "unknown")
    assert found.judgement.what == f"torch 2.99.0 is not in the table (dated {TABLE.dated})"


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("nvidia-cudnn-cu12", "cudnn"),
        ("nvidia_cublas", "cublas"),
        ("nvidia-nccl-cu13", "nccl"),
        ("torchvision", "torchvision"),
        ("nvidia-torchvision", ""),
        ("cudnn", ""),
        ("nvidia-cudnn-frontend", ""),
        ("torch", ""),
    ],
)
def test_packages_of_libraries(package, name):
    assert library_of(package) == name


@pytest.mark.parametrize(
    ("version", "requirement", "known", "holds"),
    [
        ("9.10.2", "==9.10.2.21", 3, True),
        ("9.10.2", "==9.10.2.21", 0, False),
        ("3.9.4", "~=3.9.0", 0, True),
        ("3.10.0", "~=3.9.0", 0, False),
        ("2.15", ">=2.14.0,<2.15", 0, False),
        ("13.1", "<13.1.5", 2, True),
        ("12", "==12.0", 0, True),
        ("2.9.1", ">2.9.1", 0, False),
    ],
)
def test_requirements(version, requirement, known, holds):
    assert fits(numbers(version), requirement, known=known) is holds
