"""Two files that make the same image, and values that cannot become commands."""

from __future__ import annotations

import re
import subprocess

import pytest
from recipe_cases import DIGEST, choose, hadolint, pin

from hpcenv.errors import SpecError
from hpcenv.image import recorded_files
from hpcenv.image.convert import definition
from hpcenv.project import toml_files
from hpcenv.recipes import dockerfile, image_lint, image_recipe
from hpcenv.recipes.combination import DISTRIBUTIONS
from hpcenv.recipes.image_recipe import BaseImage, ImageRecipe
from hpcenv.recipes.lint import lint

TROUBLES = image_lint.parse_troubles(toml_files.read(image_lint.PACKAGED_TROUBLES, error=SpecError))


def recipe(combination=None, **more):
    combination = combination or choose(cuda="cpu")
    version = combination.requirement.partition("==")[2]
    values = {
        "name": "train",
        "combination": combination,
        "base": BaseImage(reference="docker.io/library/debian", tag="bookworm-slim", digest=DIGEST),
        "pins": (pin("torch", version), pin("numpy", "2.4.6")),
        "installer": pin("pip", "26.1") if combination.distribution.old_pip else None,
    }
    return ImageRecipe(**values | more)


EVERY = [(distribution, cuda) for distribution in DISTRIBUTIONS for cuda in ("cpu", "13.0")]


@pytest.mark.parametrize(("distribution", "cuda"), EVERY)
def test_both_files_run_the_same_lines(distribution, cuda):
    files = image_recipe.render(recipe(choose(distribution=distribution, cuda=cuda)))
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


@pytest.mark.parametrize(("distribution", "cuda"), EVERY)
def test_what_is_written_passes_lint(tmp_path, distribution, cuda):
    chosen = choose(distribution=distribution, cuda=cuda)
    with_python = BaseImage(reference="docker.io/library/python", tag="3.13-slim-trixie", digest=DIGEST)
    more = {"base_has_python": True, "base": with_python} if distribution == "trixie" else {}
    files = image_recipe.render(recipe(chosen, **more))
    for name in ("Dockerfile", "image.def"):
        (tmp_path / name).write_text(files[name])
    assert lint(["Dockerfile", "image.def"], here=tmp_path).findings == ()
    assert hadolint(tmp_path / "Dockerfile") == ""


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


def test_an_old_pip_is_replaced_by_a_locked_one():
    old = image_recipe.render(recipe(choose(distribution="ubuntu22.04")))
    assert "pip==26.1 " in old["requirements.pip.lock"]
    assert "COPY requirements.pip.lock" in old["Dockerfile"]
    assert '"$python" -m pip --python /opt/venv/bin/python' in old["image.def"]
    assert 'python="/opt/pip/bin/python"' in old["image.def"]
    new = image_recipe.render(recipe(choose(distribution="ubuntu24.04")))
    assert "requirements.pip.lock" not in "".join((*new, *new.values()))


def test_a_sif_as_base_gives_a_definition_only():
    files = image_recipe.render(recipe(base=BaseImage(reference="/images/base.sif", digest=DIGEST, is_sif=True)))
    assert "Dockerfile" not in files
    assert "Bootstrap: localimage\nFrom: /images/base.sif\n" in files["image.def"]


@pytest.mark.parametrize(
    "more",
    [
        {"name": "Train"},
        {"name": "a b"},
        {"base": BaseImage(reference="debian AS x\nRUN evil", digest=DIGEST)},
        {"base": BaseImage(reference="debian", tag="x y", digest=DIGEST)},
        {"base": BaseImage(reference="debian", digest="sha256:0")},
        {"base": BaseImage(reference="/a b.sif", digest=DIGEST, is_sif=True)},
        {"tag": "x y"},
        {"pins": (pin("x", "1\ny==2"),)},
        {"pins": (pin("x", "1 --index-url=x"),)},
    ],
)
def test_odd_words_are_refused(more):
    with pytest.raises(SpecError):
        image_recipe.render(recipe(**more))


def test_what_hpcenv_wrote_is_known_again():
    files = image_recipe.render(recipe())
    assert all(
        text.startswith(image_recipe.FIRST_LINE)
        for name, text in files.items()
        if "ignore" not in name and name != "README.md"
    )


def test_a_tag_replaces_that_of_the_combination():
    files = image_recipe.render(recipe(tag="v1"))
    assert 'LABEL org.opencontainers.image.version="v1"' in files["Dockerfile"]
    assert "train_v1.sif image.def" in files["README.md"]


def test_the_templates_contain_the_paths_that_the_lock_reads():
    text = "".join(path.read_text() for path in image_recipe.TEMPLATES.iterdir() if path.is_file())
    for path in (recorded_files.REPORT, recorded_files.REQUIREMENTS, image_recipe.VENV):
        assert path in text
    assert recorded_files.SYSTEM_PACKAGES in text
    assert all(f"{image_recipe.SITE}/{name}" in text for name in image_recipe.SITE_FILES)


def test_every_template_is_used():
    files = image_recipe.render(recipe(choose()))
    files |= image_recipe.render(recipe(choose(distribution="ubuntu22.04")))
    assert "@{" not in "".join(files.values())
    assert "#@" not in "".join(files.values())
