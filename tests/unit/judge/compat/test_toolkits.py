"""Which toolkits and driver branches support a GPU."""

import datetime as dt
from dataclasses import replace

import pytest

from hpcenv.judge.compat.drivers import check_driver
from hpcenv.judge.compat.toolkits import check_driver_branch, check_toolkit
from hpcenv.project import compatibility

TABLE = compatibility.table()


@pytest.mark.parametrize(
    ("cuda", "capability", "result"),
    [
        ("11.7", "9.0", "mismatch"),
        ("11.8", "9.0", "match"),
        ("12.8", "7.0", "match"),
        ("12.9.1", "7.0", "match"),
        ("13.0", "7.0", "mismatch"),
        ("12.0", "3.7", "mismatch"),
        ("12.8", "10.3", "mismatch"),
        ("13.0", "9.9", "unknown"),
        ("thirteen", "9.0", "unknown"),
    ],
)
def test_first_and_last_toolkit(cuda, capability, result):
    assert check_toolkit(TABLE, cuda, capability).result == result


@pytest.mark.parametrize(
    ("driver", "capability", "result"),
    [
        ("580.95.05", "7.0", "match"),
        ("595.58.03", "7.0", "mismatch"),
        ("610.43.02", "9.0", "match"),
        ("470.82.01", "3.7", "match"),
        ("525.60.13", "3.7", "mismatch"),
        ("580", "9.9", "unknown"),
        ("new", "7.0", "unknown"),
        ("535.183.06", "10.0", "mismatch"),
        ("550.54.15", "10.0", "mismatch"),
        ("570.124.06", "10.0", "match"),
        ("470.256.02", "9.0", "mismatch"),
        ("525.60.13", "9.0", "match"),
        ("535.183.06", "12.0", "mismatch"),
        ("570.124.06", "10.3", "mismatch"),
        ("418.40.04", "8.0", "mismatch"),
        ("450.80.02", "8.0", "match"),
        ("410.48", "7.5", "match"),
    ],
)
def test_first_and_last_driver(driver, capability, result):
    assert check_driver_branch(TABLE, driver, capability).result == result


@pytest.mark.parametrize(
    ("gpu", "capability", "driver", "result"),
    [
        ("H200", "9.0", "525.60.13", "mismatch"),
        ("H200", "9.0", "535.288.01", "mismatch"),
        ("H200", "9.0", "550.54.15", "unknown"),
        ("NVIDIA H200", "9.0", "550.90.07", "match"),
        ("GH200", "9.0", "525.60.13", "mismatch"),
        ("H20", "9.0", "525.60.13", "mismatch"),
        ("L40S", "8.9", "525.60.13", "mismatch"),
        ("L4", "8.9", "520.61.05", "mismatch"),
        ("L4", "8.9", "525.60.13", "unknown"),
        ("B300", "10.3", "575.57.08", "mismatch"),
        ("A30", "8.0", "450.36", "unknown"),
        ("A30", "8.0", "535.183.06", "match"),
        ("A100", "8.0", "450.80.02", "match"),
        ("RTX 4060", "8.9", "520.61.05", "unknown"),
        ("RTX 5050", "12.0", "570.124.06", "unknown"),
        ("H100", "9.0", "525.60.13", "match"),
    ],
)
def test_a_driver_that_is_older_than_the_model_does_not_run_it(gpu, capability, driver, result):
    """The first driver of a model can be newer than the first of its compute capability."""
    assert check_driver_branch(TABLE, driver, capability, gpu=gpu).result == result
    torch = check_driver(TABLE, "11.8", driver, gpus=(gpu,), compute_capability=capability)
    assert torch.result == result or driver == "450.36"  # too old for CUDA 11.8
    # The GPU of a node works with the driver of the node.
    if result == "unknown" and driver != "450.36":
        assert (
            check_driver(TABLE, "11.8", driver, gpus=(gpu,), compute_capability=capability, node="n1").result == "match"
        )


def test_the_driver_check_knows_the_end_of_a_gpu():
    judged = check_driver(TABLE, "12.4", "595.58.03", compute_capability="7.0")

    assert judged.result == "mismatch"
    assert judged.what == "driver 595.58.03 does not run compute capability 7.0: the last branch for it is R580"


def test_a_driver_that_is_older_than_the_gpu_is_named():
    judged = check_driver(TABLE, "12.8", "535.183.06", compute_capability="10.0")

    assert judged.result == "mismatch"
    assert judged.what == (
        "driver 535.183.06 is older than compute capability 10.0: the first CUDA for it, 12.8, came with R570"
    )


def test_a_table_says_that_it_is_old():
    table = replace(TABLE, dated="2026-05-01", origin="mine.toml")

    assert table.age_note(dt.date(2026, 10, 28)) == ""  # 180 days
    note = table.age_note(dt.date(2026, 10, 29))
    assert note.startswith("the compatibility table (mine.toml) is 181 days old")


def test_a_toolkit_is_known_by_its_release_and_its_updates():
    assert all(TABLE.knows_toolkit(cuda) for cuda in ("12.6", "12.6.3", "13.5", "12.8.2"))
    assert not any(TABLE.knows_toolkit(cuda) for cuda in ("12.7", "13.9", "14.0", "12.6.9", "new"))
