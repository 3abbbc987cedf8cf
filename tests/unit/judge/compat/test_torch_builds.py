"""Which torch builds exist, and which would run."""

import pytest

from hpcenv.judge.compat.drivers import check_driver
from hpcenv.judge.compat.torch_builds import suggest_torch
from hpcenv.project import compatibility

TABLE = compatibility.table()


def names(suggestions):
    return [str(one) for one in suggestions]


def test_one_build_for_each_release_newest_first():
    assert names(suggest_torch(TABLE, "535.183.01"))[:6] == [
        "torch 2.14 (cu126)",
        "torch 2.13 (cu126)",
        "torch 2.12 (cu126)",
        "torch 2.11 (cu128)",
        "torch 2.10 (cu128)",
        "torch 2.9 (cu128)",
    ]
    assert names(suggest_torch(TABLE, "580.95.05"))[:2] == ["torch 2.15 (cu132)", "torch 2.14 (cu130)"]


def test_a_volta_gpu_is_suggested_only_builds_that_hold_its_kernels():
    found = suggest_torch(TABLE, "580.95.05", compute_capability="7.0")

    assert names(found)[:5] == [
        "torch 2.14 (cu126)",
        "torch 2.13 (cu126)",
        "torch 2.12 (cu126)",
        "torch 2.11 (cu126)",
        "torch 2.10 (cu128)",
    ]
    assert "torch 2.3 (cu121)" in names(found)
    assert suggest_torch(TABLE, "595.45.04", compute_capability="7.0") == (), "R580 is the last branch for it"


def test_a_python_is_suggested_only_what_it_may_install():
    assert names(suggest_torch(TABLE, "580.95.05", python="3.10.4"))[0] == "torch 2.14 (cu130)"
    assert names(suggest_torch(TABLE, "580.95.05", python="3.8"))[0] == "torch 2.4 (cu121)"


@pytest.mark.parametrize("driver", ["absent", "390.157", "x"])
def test_nothing_is_suggested_for_a_driver_that_runs_nothing(driver):
    assert suggest_torch(TABLE, driver) == ()
    assert check_driver(TABLE, "13.0", driver).hint == ""
