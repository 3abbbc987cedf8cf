"""Kernels of a torch build and GPUs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.judge.compat.architectures import of_build
from hpcenv.judge.compat.kernels import covers
from hpcenv.project import compatibility

TABLE = compatibility.table()

TURING_TO_BLACKWELL = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
MAXWELL_TO_AMPERE = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86")


@pytest.mark.parametrize(
    ("arch_list", "capability", "result"),
    [
        (TURING_TO_BLACKWELL, "9.0", "match"),
        (TURING_TO_BLACKWELL, "8.9", "match"),  # Ada runs kernels of 8.6
        (TURING_TO_BLACKWELL, "10.3", "match"),
        (TURING_TO_BLACKWELL, "12.1", "match"),
        (TURING_TO_BLACKWELL, "7.0", "mismatch"),
        (TURING_TO_BLACKWELL, "11.0", "mismatch"),
        (TURING_TO_BLACKWELL, "8.7", "mismatch"),  # Tegra
        (MAXWELL_TO_AMPERE, "9.0", "mismatch"),
        (("sm_86",), "8.0", "mismatch"),
        (("sm_87",), "8.9", "mismatch"),
        (("sm_87",), "8.7", "match"),
        (("sm_90a",), "9.0", "match"),
        (("sm_100a",), "10.3", "mismatch"),
        (("sm_100f",), "10.3", "match"),
        (("sm_103f",), "10.0", "mismatch"),
        (("sm_100f",), "12.0", "mismatch"),
        (("compute_70",), "9.0", "match"),
        (("compute_90",), "8.0", "mismatch"),
        (("compute_90a",), "10.0", "mismatch"),
        (("compute_100f",), "10.3", "match"),
        (("compute_100f",), "12.0", "mismatch"),
        ((), "9.0", "mismatch"),
        (("gfx942",), "9.0", "unknown"),
        (("sm_90", "sm_zz"), "9.0", "match"),
        (("sm_80", "sm_zz"), "9.0", "unknown"),
        (TURING_TO_BLACKWELL, "", "unknown"),
        (TURING_TO_BLACKWELL, "9", "unknown"),
    ],
)
def test_kernels_and_gpus(arch_list, capability, result):
    assert covers(TABLE, arch_list, capability).result == result


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8.0", ("sm_80",)),
        ("7.5;8.0;12.0+PTX", ("sm_75", "sm_80", "sm_120", "compute_120")),
        (" 9.0a  10.0f ", ("sm_90a", "sm_100f")),
        ("Ampere;9.0", ("Ampere", "sm_90")),
        ("", ()),
    ],
)
def test_the_architectures_of_a_build(text, words):
    assert of_build(text) == words


def test_no_kernels_says_for_which_gpu_and_what_would_run():
    judged = covers(TABLE, MAXWELL_TO_AMPERE, "9.0", gpu="H100")

    assert judged.what == (
        "this image's torch has no kernels for this GPU (H100, compute capability 9.0; it has sm_50 ... sm_86)"
    )
    assert judged.hint == "torch 2.15 (cu132) has kernels for it"
    with_driver = covers(TABLE, MAXWELL_TO_AMPERE, "9.0", gpu="H100", cuda="12.1", driver="535.183.01")
    assert (
        with_driver.hint
        == "torch 2.10 (cu128) would run; newer: torch 2.14 (cu126), of PyTorch's index cu126, not the default one"
    )


@pytest.mark.parametrize(
    ("cuda", "driver", "result"),
    [("", "", "match"), ("13.2", "595.45.04", "match"), ("13.2", "580.95.05", "mismatch"), ("13.9", "999", "unknown")],
)
def test_ptx_needs_a_driver_as_new_as_the_toolkit(cuda, driver, result):
    judged = covers(TABLE, ("sm_90", "compute_90"), "10.0", gpu="B200", cuda=cuda, driver=driver)

    assert judged.result == result
    assert "compute_90" in judged.what


@given(st.lists(st.text(alphabet="smcopute_0123456789af", max_size=12), max_size=5), st.text(max_size=8))
def test_any_arch_list_is_judged(arch_list, capability):
    covers(TABLE, arch_list, capability, cuda="13.0", driver="580.95.05")
