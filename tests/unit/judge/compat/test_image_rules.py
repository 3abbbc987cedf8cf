"""The image's own rule, NVIDIA_REQUIRE_CUDA."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.judge.compat.image_rules import evaluate_require, parse_require, requirements
from hpcenv.project import compatibility

TABLE = compatibility.table()


IMAGE = (
    "cuda>=13.0 brand=unknown,driver>=535,driver<536 brand=grid,driver>=535,driver<536 "
    "brand=tesla,driver>=535,driver<536 brand=tesla,driver>=570,driver<571"
)
NODE = {
    "host.cuda-driver-version": "12.2",
    "host.driver-version": "535.183.01",
    "host.gpu-compute-capabilities": ("9.0", "9.0"),
    "host.gpu-brands": ("tesla", "tesla"),
}


def judge(text, **changes):
    facts = {**NODE, **{f"host.{name.replace('_', '-')}": value for name, value in changes.items()}}
    return evaluate_require(parse_require(text), {k: v for k, v in facts.items() if v is not None})


@pytest.mark.parametrize(
    ("text", "changes", "result"),
    [
        (IMAGE, {}, "match"),
        (IMAGE, {"driver_version": "550.54.15"}, "mismatch"),
        (IMAGE, {"driver_version": "550.54.15", "cuda_driver_version": "13.0"}, "match"),
        (IMAGE, {"gpu_brands": ("geforce", "geforce")}, "mismatch"),
        (IMAGE, {"gpu_brands": ("tesla", "geforce")}, "mismatch"),
        (IMAGE, {"gpu_brands": None}, "unknown"),
        (IMAGE, {"gpu_brands": None, "driver_version": "550.54.15"}, "mismatch"),
        (IMAGE, {"gpu_brands": None, "cuda_driver_version": "13.0"}, "match"),
        (IMAGE, {"driver_version": "absent", "cuda_driver_version": "absent", "gpu_brands": ()}, "mismatch"),
        (IMAGE, {"cuda_driver_version": "new", "driver_version": "550.1"}, "unknown"),
        ("", {}, "match"),
        ("   ", {}, "match"),
        ("CUDA>=12.0,BRAND=Tesla", {}, "match"),
        ("cuda>=12.2.0", {}, "match"),
        ("cuda>12.2", {}, "mismatch"),
        ("cuda!=12.2", {}, "mismatch"),
        ("driver<=535.183.1", {}, "match"),
        ("arch>=9.0", {}, "match"),
        ("arch>=9.0", {"gpu_compute_capabilities": ("9.0", "8.0")}, "mismatch"),
        ("arch>=9.0", {"gpu_compute_capabilities": ("9.0", "")}, "unknown"),
        ("brand!=geforce", {}, "match"),
        ("cuda>=12.0 nonsense", {}, "match"),  # NVIDIA's tools stop at the first that holds
        ("nonsense cuda>=12.0", {}, "unknown"),
        ("cuda>=13.0,nonsense cuda>=12.0", {}, "match"),
        ("cuda>=12.0,nonsense cuda>=12.0", {}, "unknown"),
        ("memory>=12", {}, "unknown"),
        ("cuda==12.2", {}, "unknown"),
        ("cuda=>12.2", {}, "unknown"),
        ("cuda!12.2", {}, "unknown"),
        ("cuda>=", {}, "unknown"),
        (">=12", {}, "unknown"),
        ("cuda>=12.x", {}, "unknown"),
        ("brand>tesla", {}, "unknown"),
        ("cuda>=12.0\tdriver>=1", {}, "unknown"),
    ],
)
def test_requirements_as_the_container_toolkit_judges_them(text, changes, result):
    assert judge(text, **changes).result == result


def test_a_requirement_says_what_was_asked_and_what_is_there():
    judged = judge(IMAGE, driver_version="550.54.15")

    assert judged.what == "the image's NVIDIA_REQUIRE_CUDA (cuda>=13.0 or 4 others) does not hold"
    assert judged.why == "this node has arch 9.0, brand tesla, cuda 12.2, driver 550.54.15"
    assert judge("memory>=12").why == "`memory>=12` cannot be judged: `memory` is unknown"
    assert judge("brand=tesla", gpu_brands=None).why == "`brand=tesla` cannot be judged: this node's brand is not known"


def texts(environ):
    return {one.variable: one.text for one in requirements(environ)}


def test_requirements_come_from_every_variable_but_jetpack():
    environ = {
        "NVIDIA_REQUIRE_CUDA": "cuda>=13.0",
        "NVIDIA_REQUIRE_BRAND": "brand=tesla",
        "NVIDIA_REQUIRE_JETPACK": "csv-mounts=all",
        "CUDA_VERSION": "13.0.2",
        "PATH": "/bin",
    }
    assert texts(environ) == {"NVIDIA_REQUIRE_CUDA": "cuda>=13.0", "NVIDIA_REQUIRE_BRAND": "brand=tesla"}


def test_an_old_image_asks_for_its_cuda_version():
    assert texts({"CUDA_VERSION": "9.2.148"}) == {"CUDA_VERSION": "cuda>=9.2"}
    assert texts({"CUDA_VERSION": "9.2", "NVIDIA_REQUIRE_CUDA": ""})["CUDA_VERSION"] == "cuda>=9.2"


@pytest.mark.parametrize(("word", "asked"), [("true", 0), ("1", 0), ("T", 0), ("yes", 1), ("", 1), ("false", 1)])
def test_requirements_can_be_switched_off(word, asked):
    assert len(texts({"NVIDIA_REQUIRE_CUDA": "cuda>=13.0", "NVIDIA_DISABLE_REQUIRE": word})) == asked


CONDITIONS = st.text(alphabet="cudabrndive<>=!.,0123456789 \t\0é", max_size=60)


@given(CONDITIONS)
def test_any_requirement_is_judged(text):
    judged = judge(text)
    if judged.result == "match" and text.strip(" ,"):
        assert any(not c.problem for one in parse_require(text).alternatives for c in one)
