"""Drivers and toolkits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.judge.compat.drivers import check_driver
from hpcenv.judge.compat.floors import driver_floor
from hpcenv.judge.compat.versions import numbers
from hpcenv.project import compatibility

TABLE = compatibility.table()


@pytest.mark.parametrize(
    ("cuda", "floor", "packaged"),
    [
        ("13.0", "580.65.06", "580.65.06"),
        ("13.2.1", "580.65.06", "595.58.03"),
        ("12.8", "525.60.13", "570.26"),
        ("12.8.9", "525.60.13", "570.26"),
        ("12.7", "525.60.13", ""),
        ("11", "450.80.02", "450.51.05"),
    ],
)
def test_the_floor_of_a_toolkit(cuda, floor, packaged):
    found = driver_floor(TABLE, cuda)

    assert found is not None
    assert (found.version, found.packaged) == (floor, packaged)
    assert "Release Notes" in found.source


@pytest.mark.parametrize("cuda", ["14.0", "10.2", "", "13.x", "cuda13"])
def test_a_toolkit_of_an_unknown_major_release_has_no_floor(cuda):
    assert driver_floor(TABLE, cuda) is None
    assert check_driver(TABLE, cuda, "580.95.05").result == "unknown"


def test_an_old_driver_is_told_the_newest_torch_and_its_index():
    judged = check_driver(TABLE, "12.8", "470.256.02")

    assert judged.hint == (
        "torch 2.0 (cu117) would run; newer: torch 2.7 (cu118), of PyTorch's index cu118, not the default one"
    )


def test_the_sentence_of_the_issue():
    judged = check_driver(TABLE, "13.0", "535.183.01", node="n3")

    assert judged.result == "mismatch"
    assert judged.what == (
        "this driver is too old for CUDA 13.0 in the image: needs >= 580.65.06, node n3 has 535.183.01"
    )
    assert (
        judged.hint
        == "torch 2.10 (cu128) would run; newer: torch 2.14 (cu126), of PyTorch's index cu126, not the default one"
    )


@pytest.mark.parametrize(
    ("cuda", "driver", "result"),
    [
        ("13.0", "580.65.06", "match"),
        ("13.0", "580.65.05", "mismatch"),
        ("13.0", "580.65", "mismatch"),
        ("13.0", "580.65.06.0", "match"),
        ("13.3", "580.65.06", "match"),
        ("12.8", "525.60.13", "match"),
        ("12.8", "520.61.05", "mismatch"),
        ("12.4", "999.1", "match"),
        ("11.8", "610.43.02", "match"),
        ("13.0", "absent", "mismatch"),
        ("13.0", "580-open", "unknown"),
        ("13.0", "", "unknown"),
    ],
)
def test_drivers_at_and_around_the_floor(cuda, driver, result):
    assert check_driver(TABLE, cuda, driver).result == result


def test_a_driver_between_floor_and_packaged_is_told_its_limits():
    assert "needs >= 595.45.04" in check_driver(TABLE, "13.2", "580.95.05").why
    assert check_driver(TABLE, "13.2", "595.45.04").why == ""


def test_an_unknown_toolkit_of_a_known_major_release_says_so():
    judged = check_driver(TABLE, "13.9", "580.95.05")

    assert judged.result == "match"
    assert "unknown to the table" in judged.why
    assert check_driver(TABLE, "13.9", "535.1").result == "mismatch"


H100 = ("NVIDIA H100 80GB HBM3",)


@pytest.mark.parametrize(
    ("driver", "package", "gpus", "result"),
    [
        ("535.183.01", "13.0", H100, "match"),
        ("570.124.06", "13.2", H100, "match"),
        ("535.183.01", "12.9", H100, "mismatch"),  # older than the toolkit
        ("550.54.15", "13.0", H100, "unknown"),  # a branch that the source leaves out
        ("535.183.01", "13.0", ("NVIDIA GeForce RTX 3090",), "mismatch"),
        ("535.183.01", "13.0", (*H100, "NVIDIA GeForce RTX 3090"), "mismatch"),
        ("535.183.01", "13.0", ("NVIDIA Z9000",), "unknown"),
        ("535.183.01", "13.0", (), "unknown"),
        ("535.183.01", "13.7", H100, "unknown"),
        ("535.183.01", "thirteen", H100, "unknown"),
    ],
)
def test_forward_compatibility(driver, package, gpus, result):
    judged = check_driver(TABLE, "13.0", driver, forward_compat=package, gpus=gpus)

    assert judged.result == result
    assert judged.why


def test_a_compat_package_that_is_older_than_the_driver_stands_in_its_way():
    judged = check_driver(TABLE, "13.0", "610.43.02", forward_compat="13.0", gpus=H100)

    assert judged.result == "mismatch"
    assert judged.what == "cuda-compat 13.0 cannot be used with driver 610.43.02"
    assert judged.hint == "leave it off the loader's path: driver 610.43.02 runs CUDA 13.0 without it"


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_version_is_judged_and_never_matches_by_chance(cuda, driver):
    if numbers(cuda) is None or numbers(driver) is None:
        assert check_driver(TABLE, cuda, driver).result != "match"
