"""Locked packages that fit a combination, and the requirements file."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement
from recipe_cases import DIGEST, HASH, choose, pin

from hpcenv.errors import SpecError
from hpcenv.recipes.pinned_packages import check_pins, requirements


def check(*pins, chosen=None):
    return check_pins(pins, chosen or choose(cuda="cpu"))


def test_pins_that_fit():
    wheel = "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    others = (pin("filelock", file="filelock-1.0-py3-none-any.whl"), pin("numpy", "2.3.0"))
    assert check(pin("torch", "2.13.0+cpu", file=wheel), *others) == (ON_CPU,)


ON_CPU = "the locked torch is on PyTorch's index cpu, not on the default index: site/pip.conf must name it"


def test_the_index_of_a_torch_with_a_label_is_noted_and_its_cuda_is_known():
    of_cuda = choose(cuda="12.6")
    found = check(pin("torch", "2.13.0+cu126"), pin("numpy", "2.3.0"), chosen=of_cuda)
    assert found == (ON_CPU.replace("index cpu", "index cu126"),)


def test_each_cause_has_its_own_hint():
    for file, hint in (
        ("x-1.0.tar.gz", "pip wheel --no-deps"),
        ("x-1.0-cp312-cp312-manylinux_2_28_x86_64.whl", "--os"),
    ):
        with pytest.raises(SpecError) as caught:
            check(pin("x", file=file))
        assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ((pin("torch", "2.13.0+cpu", hashes=()),), "torch 2.13.0+cpu has no sha256"),
        ((pin("numpy", "2.3.0"),), "add torch==2.13.0+cpu to what is locked, and lock again"),
        ((pin("torch", "2.12.1+cpu"),), "the lock has torch 2.12.1+cpu, and torch 2.13.0 is required"),
        ((pin("torch", "2.13.0+cu126"),), "--cuda 12.6"),
        ((pin("torch", "2.13.0"), pin("nvidia-cuda-runtime", "13.0.96")), "--cuda 13.0"),
        ((pin("x", file="x-1.0-cp312-cp312-manylinux_2_28_x86_64.whl"),), "no wheel for Python 3.11"),
        ((pin("x", file="x-1.0-cp311-cp311-manylinux_2_39_x86_64.whl"),), "no wheel for Python 3.11 on bookworm"),
        ((pin("x", file="x-1.0.tar.gz"),), "is locked as a source archive only"),
        ((pin("x\n--index-url=http://evil"),), "is not a package name"),
        ((pin("x", "1.0 --hash=sha256:0"),), "is not one version"),
        ((pin("x", hashes=("sha256:short",)),), "has no sha256"),
    ],
)
def test_pins_that_do_not_fit(pins, says):
    with pytest.raises(SpecError) as caught:
        check(*pins)
    assert says in str(caught.value)


def test_requirements_are_what_pip_reads():
    text = requirements([pin("Zope.Interface", hashes=(HASH, DIGEST)), pin("torch", "2.13.0+cpu")])
    lines = [line for line in text.replace("\\\n", "").splitlines() if not line.startswith("#")]
    assert [Requirement(line.split(" --hash")[0]).name for line in lines] == ["torch", "zope-interface"]
    assert [line.count("--hash=sha256:") for line in lines] == [1, 2]
