"""Recipes: possible combinations only, two files that do the same, and words that stay words."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import pytest
from packaging.requirements import Requirement

from hpcenv.adapters import toml_files
from hpcenv.errors import SpecError
from hpcenv.model import compat, definition, dockerfile, image_lint, image_recipe, recipe_lint
from hpcenv.model.image_recipe import Base, Pin, Recipe

COMPAT = compat.parse(toml_files.read(compat.PACKAGED, error=SpecError))
TROUBLES = image_lint.parse_troubles(toml_files.read(image_lint.PACKAGED_TROUBLES, error=SpecError))
DIGEST = "sha256:" + "a" * 64
HASH = "sha256:" + "b" * 64


def choose(torch="2.13.0", cuda=None, python=None, system="bookworm"):
    return image_recipe.choose(COMPAT, torch=torch, cuda=cuda, python=python, system=system)


def pin(name, version="1.0", *, file=None, hashes=(HASH,)):
    return Pin(name=name, version=version, hashes=hashes, files=(file,) if file else ())


def recipe(choice=None, **more):
    choice = choice or choose(cuda="cpu")
    version = choice.requirement.partition("==")[2]
    said = {
        "name": "train",
        "choice": choice,
        "base": Base(reference="docker.io/library/debian", tag="bookworm-slim", digest=DIGEST),
        "pins": (pin("torch", version), pin("numpy", "2.4.6")),
    }
    return Recipe(**said | more)


@pytest.mark.parametrize(
    ("asked", "tag", "requirement"),
    [
        ({}, "v2.13.0-cuda13.0-bookworm", "torch==2.13.0"),
        ({"cuda": "12.6"}, "v2.13.0-cuda12.6-bookworm", "torch==2.13.0+cu126"),
        ({"cuda": "cpu"}, "v2.13.0-cpu-bookworm", "torch==2.13.0+cpu"),
        ({"cuda": "12.4", "torch": "2.5.1", "system": "ubuntu24.04"}, "v2.5.1-cuda12.4-ubuntu24.04", "torch==2.5.1"),
        ({"torch": "2.15.0", "python": "3.12"}, "v2.15.0-cuda13.2-bookworm", "torch==2.15.0"),
    ],
)
def test_a_possible_combination(asked, tag, requirement):
    found = choose(**asked)
    assert (found.tag, found.requirement) == (tag, requirement)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"cuda": "12.8"}, ("no build of torch 2.13.0 for CUDA 12.8", "12.6, 13.0, 13.2, cpu", "torch 2.11.0 has one")),
        (
            {"torch": "2.15.0", "python": "3.10"},
            ("does not run on Python 3.10", "Python 3.11 or later, or torch 2.14.1"),
        ),
        ({"system": "ubuntu24.04", "python": "3.11"}, ("has Python 3.12", "--os bookworm")),
        ({"system": "alpine"}, ("bookworm, trixie, ubuntu24.04",)),
        ({"torch": "9.9"}, ("not in the compatibility table", "2.15.0")),
        ({"python": "3.11; rm"}, ("not a Python version",)),
    ],
)
def test_an_impossible_one_is_refused_with_the_possible(asked, says):
    with pytest.raises(SpecError) as caught:
        choose(**asked)
    for words in says:
        assert words in str(caught.value)


def test_a_python_of_another_release_comes_with_the_base():
    assert image_recipe.default_base(choose(python="3.11")) == "debian:bookworm-slim"
    assert image_recipe.default_base(choose(python="3.12")) == "python:3.12-slim-bookworm"


# -- packages ------------------------------------------------------------------------------


def check(*pins, choice=None):
    return image_recipe.check_pins(pins, choice or choose(cuda="cpu"))


def test_pins_that_fit():
    wheel = "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert check(pin("torch", "2.13.0+cpu", file=wheel), pin("filelock", file="filelock-1.0-py3-none-any.whl")) == ()


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ((pin("torch", "2.13.0+cpu", hashes=()),), "torch 2.13.0+cpu has no sha256"),
        ((pin("numpy", "2.3.0"),), "add torch==2.13.0+cpu to what is locked, and lock again"),
        ((pin("torch", "2.12.1+cpu"),), "the lock has torch 2.12.1+cpu, asked was 2.13.0"),
        ((pin("torch", "2.13.0+cu126"),), "--cuda 12.6"),
        ((pin("torch", "2.13.0"), pin("nvidia-cuda-runtime", "13.0.96")), "--cuda 13.0"),
        ((pin("x", file="x-1.0-cp312-cp312-manylinux_2_28_x86_64.whl"),), "no wheel for Python 3.11"),
        ((pin("x", file="x-1.0-cp311-cp311-manylinux_2_39_x86_64.whl"),), "no wheel for Python 3.11 on bookworm"),
        ((pin("x", file="x-1.0.tar.gz"),), "no wheel"),
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
    text = image_recipe.requirements([pin("Zope.Interface", hashes=(HASH, DIGEST)), pin("torch", "2.13.0+cpu")])
    lines = [line for line in text.replace("\\\n", "").splitlines() if not line.startswith("#")]
    assert [Requirement(line.split(" --hash")[0]).name for line in lines] == ["torch", "zope-interface"]
    assert [line.count("--hash=sha256:") for line in lines] == [1, 2]


# -- files ---------------------------------------------------------------------------------

EVERY = [(system, cuda) for system in image_recipe.SYSTEMS for cuda in ("cpu", "13.0")]


@pytest.mark.parametrize(("system", "cuda"), EVERY)
def test_both_files_run_the_same_lines(system, cuda):
    files = image_recipe.render(recipe(choose(system=system, cuda=cuda)))
    docker, recipe_file = dockerfile.parse(files["Dockerfile"]), definition.parse(files["image.def"])
    assert [stage.name for stage in docker.stages] == [stage.header("stage") for stage in recipe_file.stages]
    for one, other in zip(docker.stages, recipe_file.stages, strict=True):
        run = next(instruction for instruction in one.instructions if instruction.name == "RUN")
        post = next(section for section in other.sections if section.name == "post")
        assert run.heredocs[0].text.strip() == post.text.strip()
        assert subprocess.run(["sh", "-n"], input=post.text, text=True).returncode == 0
        assert one.base.endswith("@" + DIGEST)
        assert other.header("from").endswith("@" + DIGEST)
    assert docker.stages[-1].instructions[-2].arguments == "10001:10001"


@pytest.mark.parametrize(("system", "cuda"), EVERY)
def test_what_is_written_passes_lint(system, cuda):
    files = image_recipe.render(recipe(choose(system=system, cuda=cuda), base_has_python=system == "trixie"))
    assert recipe_lint.lint_dockerfile(files["Dockerfile"], origin="D", troubles=TROUBLES) == ()
    assert recipe_lint.lint_definition(files["image.def"], origin="d", troubles=TROUBLES) == ()


def test_no_index_and_no_mirror_is_named():
    text = "\n".join(image_recipe.render(recipe()).values())
    assert not re.search(r"https?://|index-url|extra-index", text)


def test_the_same_variables_and_labels():
    files = image_recipe.render(recipe(choose()))
    docker = dict(re.findall(r'^ENV (\w+)="(.*)"$', files["Dockerfile"], re.M))
    apptainer = dict(re.findall(r"^    export (\w+)='(.*)'$", files["image.def"], re.M))
    assert docker.pop("PATH") == "/opt/venv/bin:$PATH"
    assert docker == apptainer
    assert docker["NVIDIA_VISIBLE_DEVICES"] == "all"
    labels = dict(re.findall(r'^LABEL (\S+)="(.*)"$', files["Dockerfile"], re.M))
    assert labels == dict(re.findall(r"^    (\S+\.\S+) (\S+)$", files["image.def"].partition("%labels")[2], re.M))
    assert labels["org.opencontainers.image.version"] == "v2.13.0-cuda13.0-bookworm"


def test_a_sif_as_base_gives_a_definition_only():
    files = image_recipe.render(recipe(base=Base(reference="/images/base.sif", digest=DIGEST, kind="sif")))
    assert "Dockerfile" not in files
    assert "Bootstrap: localimage\nFrom: /images/base.sif\n" in files["image.def"]


@pytest.mark.parametrize(
    "more",
    [
        {"name": "Train"},
        {"name": "a b"},
        {"name": "a:1"},
        {"base": Base(reference="debian AS x\nRUN evil", digest=DIGEST)},
        {"base": Base(reference="debian", tag="x y", digest=DIGEST)},
        {"base": Base(reference="debian", digest="sha256:0")},
        {"base": Base(reference="/a b.sif", digest=DIGEST, kind="sif")},
        {"system_packages": ("vim; rm -rf /",)},
        {"system_packages": ("-o=x",)},
        {"pins": (pin("x", "1\ny==2"),)},
        {"unproved": (pin("x", "1 --index-url=x", hashes=()),)},
        {"environment": (("A B", "x"),)},
        {"environment": (("A", "x\nRUN y"),)},
    ],
)
def test_odd_words_are_refused(more):
    with pytest.raises(SpecError):
        image_recipe.render(recipe(**more))


def test_values_are_quoted_for_both():
    value = """a$HOME "q" 'x' \\ `id` #"""
    files = image_recipe.render(recipe(environment=(("NVIDIA_REQUIRE_CUDA", value),)))
    line = next(line for line in files["image.def"].splitlines() if "NVIDIA_REQUIRE" in line)
    done = subprocess.run(
        ["sh", "-c", f'{line}\nprintf %s "$NVIDIA_REQUIRE_CUDA"'], capture_output=True, text=True, env={}
    )
    assert done.stdout == value
    parsed = dockerfile.parse(files["Dockerfile"])
    setting = next(i for i in parsed.stages[-1].instructions if "NVIDIA_REQUIRE" in i.arguments)
    assert "$HOME" not in setting.arguments.replace("\\$HOME", "")


def test_packages_without_a_hash_are_installed_apart():
    files = image_recipe.render(recipe(unproved=(pin("odd", "3", hashes=()),), verb="rebuild"))
    assert "odd==3" in files["requirements.unproved.txt"]
    text = files["image.def"].replace("\\\n", "")
    lines = [line for line in text.splitlines() if " install " in line and "pip" in line and "--requirement" in line]
    assert ["--require-hashes" in line for line in lines] == [True, False]
    assert "COPY requirements.unproved.txt" in files["Dockerfile"]
    only = image_recipe.render(recipe(pins=(), unproved=(pin("odd", "3", hashes=()),)))
    assert "--require-hashes" not in only["image.def"]
    assert image_recipe.REPORT in only["image.def"]


def test_what_hpcenv_wrote_is_known_again():
    files = image_recipe.render(recipe(unproved=(pin("odd", "3", hashes=()),)))
    assert all(image_recipe.is_ours(text) for text in files.values())
    assert not image_recipe.is_ours("FROM debian\n")


def test_more_packages_for_apt():
    files = image_recipe.render(replace(recipe(), system_packages=("libnuma1", "git=1:2.39.5-0+deb12u1")))
    assert "librdmacm1 libnuma1 git=1:2.39.5-0+deb12u1\n" in files["Dockerfile"]
