"""What the name of a GPU says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.judge.compat.gpu_names import gpu_by_name
from hpcenv.project import compatibility

TABLE = compatibility.table()


@pytest.mark.parametrize(
    ("name", "capability", "count"),
    [
        ("gpu:h100:8", "9.0", None),
        ("gres/gpu:nvidia_a100-sxm4-80gb=4", "8.0", 108),
        ("gpu:a100:4(S:0-1)", "8.0", 108),
        ("gpu/v100:2", "7.0", 80),
        ("a100", "8.0", 108),
        ("A10", "8.6", 72),
        ("gpu:a100_1g.5gb:7", "8.0", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "8.0", None),
        ("NVIDIA H100 PCIe", "9.0", 114),
        ("nvidia_h100_80gb_hbm3", "9.0", 132),
        ("NVIDIA H200", "9.0", 132),
        ("NVIDIA B200", "10.0", 148),
        ("gb300", "10.3", None),
        ("Tesla V100-SXM2-32GB", "7.0", 80),
        ("tesla_t4", "7.5", 40),
        ("rtx3090", "8.6", 82),
        ("gpu:3070ti:1", "8.6", None),
        ("geforce_gtx_1080_ti", "6.1", None),
        ("NVIDIA RTX A6000", "8.6", 84),
        ("a6000", "8.6", 84),
        ("rtx_6000_ada", "8.9", None),
        ("quadro_rtx_6000", "7.5", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0", None),
    ],
)
def test_gpus_by_their_names(name, capability, count):
    model = gpu_by_name(TABLE, name)

    assert model is not None
    assert (model.compute_capability, model.sm_count) == (capability, count)


@pytest.mark.parametrize(
    "name", ["", "gpu", "gpu:4", "gres/gpu=8", "rtx6000", "mi300x", "1g.10gb", "a1000", "h10", "volta"]
)
def test_names_that_tell_nothing_or_two_things(name):
    assert gpu_by_name(TABLE, name) is None


@pytest.mark.parametrize(
    ("name", "data_centre"), [("h100", True), ("l40s", True), ("NVIDIA RTX A6000", False), ("NVIDIA TITAN V", False)]
)
def test_data_centre_gpus(name, data_centre):
    model = gpu_by_name(TABLE, name)
    assert model is not None
    assert model.data_centre is data_centre


@given(st.text(max_size=60))
def test_any_name_is_looked_up(name):
    gpu_by_name(TABLE, name)
