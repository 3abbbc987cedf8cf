"""compat: what runs with what, and that what nobody knows is never called a match."""

import copy
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.errors import SpecError
from hpcenv.node.check import compat
from hpcenv.project import toml_files

DATA = toml_files.read(compat.PACKAGED, error=SpecError)
TABLE = compat.parse(DATA)
TURING_TO_BLACKWELL = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
MAXWELL_TO_AMPERE = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86")


# -- the table ----------------------------------------------------------------------------


def test_every_row_has_a_source_and_a_date():
    def blocks(table):
        yield table
        for value in table.values():
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, dict):
                    yield from blocks(inner)

    dated = [block for block in blocks(DATA) if "source" in block]
    assert len(dated) >= 8
    for block in dated:
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", block["retrieved"])
    sources = [TABLE.floors_source, TABLE.packaged_source, TABLE.forward.source]
    sources += [release.source for release in TABLE.torches] + [gpu.source for gpu in TABLE.gpus.values()]
    assert all("read 20" in source for source in sources)


def test_no_package_index_is_named():
    text = compat.PACKAGED.read_text()
    assert "://" not in text
    assert not re.search(r"\b[a-z0-9-]+\.(org|com|io)\b", text)


def test_every_pypi_build_is_among_the_builds():
    for release in TABLE.torches:
        assert release.pypi in release.builds
        assert release.requires_python.startswith(">=3.")


def test_every_packaged_driver_is_at_least_the_floor():
    for toolkit, driver in TABLE.packaged.items():
        floor = compat.driver_floor(TABLE, ".".join(map(str, toolkit)))
        assert floor is not None
        if toolkit != (11, 0, 0):  # Update 1 of CUDA 11.0 came with the floor
            assert compat.check_driver(TABLE, floor.cuda, driver).result == "match"


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        (("schema",), 2, "has schema 2"),
        (("schema",), "1", "`schema`"),
        (("cuda",), None, "`cuda`"),
        (("cuda", "floor", "source"), "", "`cuda.floor.source`"),
        (("cuda", "floor", "retrieved"), None, "`cuda.floor.retrieved`"),
        (("cuda", "floor", "driver", "13"), "new", "`cuda.floor.driver.13`"),
        (("cuda", "packaged", "driver", "thirteen"), "1", "`cuda.packaged.driver.thirteen`"),
        (("cuda", "forward", "package", "13.0"), ["yes"], "`cuda.forward.package.13.0`"),
        (("cuda", "forward", "data-centre-only"), "yes", "`cuda.forward.data-centre-only`"),
        (("torch", "release"), {}, "`torch.release`"),
        (("torch", "release", 0), "2.15", "`torch.release[0]`"),
        (("torch", "release", 1, "builds", "12.6"), "5.0 sm_60", "`torch.release[1].builds.12.6`"),
        (("torch", "release", 1, "pypi"), 13.0, "`torch.release[1].pypi`"),
        (("gpu", "other", "new"), ["RTX"], "`gpu.other.new`"),
        (("gpu", "data-centre", "9.0"), ["H100", 7], "`gpu.data-centre.9.0`"),
        (("gpu", "sm-count", "number", "V100"), True, "`gpu.sm-count.number.V100`"),
    ],
)
def test_a_broken_table_names_file_and_key(path, value, key):
    data = copy.deepcopy(DATA)
    *tables, last = path
    table = data
    for one in tables:
        table = table[one]
    if value is None:
        del table[last]
    else:
        table[last] = value

    with pytest.raises(SpecError) as error:
        compat.parse(data, origin="mine.toml")
    assert "`mine.toml`" in error.value.what
    assert key in error.value.what


def test_another_table_takes_the_place_of_the_packaged_one():
    data = copy.deepcopy(DATA)
    data["cuda"]["floor"]["driver"]["14"] = "700.10"

    assert compat.check_driver(TABLE, "14.0", "700.20").result == "unknown"
    assert compat.check_driver(compat.parse(data), "14.0", "700.20").result == "match"


# -- driver and toolkit -------------------------------------------------------------------


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
    found = compat.driver_floor(TABLE, cuda)

    assert found is not None
    assert (found.version, found.packaged) == (floor, packaged)
    assert "Release Notes" in found.source


@pytest.mark.parametrize("cuda", ["14.0", "10.2", "", "13.x", "cuda13"])
def test_a_toolkit_of_an_unknown_major_release_has_no_floor(cuda):
    assert compat.driver_floor(TABLE, cuda) is None
    assert compat.check_driver(TABLE, cuda, "580.95.05").result == "unknown"


def test_the_sentence_of_the_issue():
    judged = compat.check_driver(TABLE, "13.0", "535.183.01", node="n3")

    assert judged.result == "mismatch"
    assert judged.what == (
        "this driver is too old for CUDA 13.0 in the image: needs >= 580.65.06, node n3 has 535.183.01"
    )
    assert judged.hint == "torch 2.10 (cu128) would run"


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
    assert compat.check_driver(TABLE, cuda, driver).result == result


def test_a_driver_between_floor_and_packaged_is_told_its_limits():
    assert "needs >= 595.45.04" in compat.check_driver(TABLE, "13.2", "580.95.05").why
    assert compat.check_driver(TABLE, "13.2", "595.45.04").why == ""


def test_an_unknown_toolkit_of_a_known_major_release_says_so():
    judged = compat.check_driver(TABLE, "13.9", "580.95.05")

    assert judged.result == "match"
    assert "unknown to the table" in judged.why
    assert compat.check_driver(TABLE, "13.9", "535.1").result == "mismatch"


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
    judged = compat.check_driver(TABLE, "13.0", driver, forward_compat=package, gpus=gpus)

    assert judged.result == result
    assert judged.why


def test_a_compat_package_that_is_older_than_the_driver_stands_in_its_way():
    judged = compat.check_driver(TABLE, "13.0", "610.43.02", forward_compat="13.0", gpus=H100)

    assert judged.result == "mismatch"
    assert judged.what == "cuda-compat 13.0 cannot be used with driver 610.43.02"
    assert judged.hint == "leave it off the loader's path: driver 610.43.02 runs CUDA 13.0 without it"


# -- torch --------------------------------------------------------------------------------


def names(suggestions):
    return [str(one) for one in suggestions]


def test_one_build_for_each_release_newest_first():
    assert names(compat.suggest_torch(TABLE, "535.183.01"))[:6] == [
        "torch 2.14 (cu126)",
        "torch 2.13 (cu126)",
        "torch 2.12 (cu126)",
        "torch 2.11 (cu129)",
        "torch 2.10 (cu128)",
        "torch 2.9 (cu128)",
    ]
    assert names(compat.suggest_torch(TABLE, "580.95.05"))[:2] == ["torch 2.15 (cu132)", "torch 2.14 (cu130)"]


def test_a_volta_gpu_is_suggested_only_builds_that_hold_its_kernels():
    found = compat.suggest_torch(TABLE, "580.95.05", compute_capability="7.0")

    assert names(found)[:5] == [
        "torch 2.14 (cu126)",
        "torch 2.13 (cu126)",
        "torch 2.12 (cu126)",
        "torch 2.11 (cu126)",
        "torch 2.10 (cu128)",
    ]
    assert "torch 2.3 (cu121)" not in names(found), "its kernels are not known"


def test_a_python_is_suggested_only_what_it_may_install():
    assert names(compat.suggest_torch(TABLE, "580.95.05", python="3.10.4"))[0] == "torch 2.14 (cu130)"
    assert names(compat.suggest_torch(TABLE, "580.95.05", python="3.8"))[0] == "torch 2.5 (cu124)"


@pytest.mark.parametrize("driver", ["absent", "390.157", "x"])
def test_nothing_is_suggested_for_a_driver_that_runs_nothing(driver):
    assert compat.suggest_torch(TABLE, driver) == ()
    assert compat.check_driver(TABLE, "13.0", driver).hint == ""


# -- kernels and GPUs ---------------------------------------------------------------------


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
    assert compat.covers(TABLE, arch_list, capability).result == result


def test_no_kernels_says_for_which_gpu_and_what_would_run():
    judged = compat.covers(TABLE, MAXWELL_TO_AMPERE, "9.0", gpu="H100")

    assert judged.what == (
        "this image's torch has no kernels for this GPU (H100, compute capability 9.0; it has sm_50 ... sm_86)"
    )
    assert judged.hint == "torch 2.15 (cu132) has kernels for it"
    with_driver = compat.covers(TABLE, MAXWELL_TO_AMPERE, "9.0", gpu="H100", cuda="12.1", driver="535.183.01")
    assert with_driver.hint == "torch 2.10 (cu128) would run"


@pytest.mark.parametrize(
    ("cuda", "driver", "result"),
    [("", "", "match"), ("13.2", "595.45.04", "match"), ("13.2", "580.95.05", "mismatch"), ("13.9", "999", "unknown")],
)
def test_ptx_needs_a_driver_as_new_as_the_toolkit(cuda, driver, result):
    judged = compat.covers(TABLE, ("sm_90", "compute_90"), "10.0", gpu="B200", cuda=cuda, driver=driver)

    assert judged.result == result
    assert "compute_90" in judged.what


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
    model = compat.gpu_by_name(TABLE, name)

    assert model is not None
    assert (model.compute_capability, model.sm_count) == (capability, count)


@pytest.mark.parametrize(
    "name", ["", "gpu", "gpu:4", "gres/gpu=8", "rtx6000", "mi300x", "1g.10gb", "a1000", "h10", "volta"]
)
def test_names_that_tell_nothing_or_two_things(name):
    assert compat.gpu_by_name(TABLE, name) is None


@pytest.mark.parametrize(
    ("name", "data_centre"), [("h100", True), ("l40s", True), ("NVIDIA RTX A6000", False), ("NVIDIA TITAN V", False)]
)
def test_data_centre_gpus(name, data_centre):
    model = compat.gpu_by_name(TABLE, name)
    assert model is not None
    assert model.data_centre is data_centre


# -- NVIDIA_REQUIRE_CUDA ------------------------------------------------------------------

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
    return compat.evaluate_require(compat.parse_require(text), {k: v for k, v in facts.items() if v is not None})


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
    return {one.variable: one.text for one in compat.requirements(environ)}


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


# -- whatever comes -----------------------------------------------------------------------

CONDITIONS = st.text(alphabet="cudabrndive<>=!.,0123456789 \t\0é", max_size=60)


@given(CONDITIONS)
def test_any_requirement_is_judged(text):
    judged = judge(text)
    if judged.result == "match" and text.strip(" ,"):
        assert any(not c.problem for one in compat.parse_require(text).alternatives for c in one)


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_version_is_judged_and_never_matches_by_chance(cuda, driver):
    if compat.numbers(cuda) is None or compat.numbers(driver) is None:
        assert compat.check_driver(TABLE, cuda, driver).result != "match"


@given(st.lists(st.text(alphabet="smcopute_0123456789af", max_size=12), max_size=5), st.text(max_size=8))
def test_any_arch_list_is_judged(arch_list, capability):
    compat.covers(TABLE, arch_list, capability, cuda="13.0", driver="580.95.05")


@given(st.text(max_size=60))
def test_any_name_is_looked_up(name):
    compat.gpu_by_name(TABLE, name)
