"""`image init --build`: which compilers, for which GPU, from which source archive."""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from recipe_cases import COMPAT, DIGEST, HASH, choose, hadolint, pin

from hpcenv.errors import SpecError, ToolFailed, UsageError
from hpcenv.recipes import image_recipe
from hpcenv.recipes.compiled_packages import (
    PackageBuild,
    arch_list,
    parse_request,
    require_image,
    tool_requirements,
)
from hpcenv.recipes.image_recipe import BaseImage, ImageRecipe
from hpcenv.recipes.lint import lint
from hpcenv.recipes.pip_resolution import find_sources


def recipe(combination, build):
    version = combination.requirement.partition("==")[2]
    base = BaseImage(reference="docker.io/library/debian", tag="bookworm-slim", digest=DIGEST)
    pins = (pin("torch", version), pin("numpy", "2.4.6"))
    return ImageRecipe(name="train", combination=combination, base=base, pins=pins, build=build)


def build(**more):
    values = {"sources": (pin("flash-attn", "2.8.3"),), "tools": (pin("ninja", "1.13"),), "arch_list": "8.0"}
    return PackageBuild(**{**values, "has_wheels": True, **more})


@pytest.mark.parametrize(
    ("gpu", "cuda", "wanted"), [("a100", "13.0", "8.0"), ("h100", "12.6", "9.0"), (None, "cpu", "")]
)
def test_the_architecture_is_that_of_the_gpu(gpu, cuda, wanted):
    assert arch_list(COMPAT, choose(cuda=cuda), gpu) == wanted


@pytest.mark.parametrize(
    ("gpu", "says"), [(None, "which GPU"), ("nosuch", "not in the compatibility table"), ("v100", "has dropped")]
)
def test_a_gpu_that_cannot_be_compiled_for_is_refused(gpu, says):
    with pytest.raises(SpecError, match=says):
        arch_list(COMPAT, choose(cuda="13.0"), gpu)


@pytest.mark.parametrize("text", ["flash-attn", "flash-attn>=2", "a b==1", "x==1;y", "==1", "x==", "-r==1"])
def test_only_one_version_can_be_compiled(text):
    with pytest.raises(UsageError):
        parse_request(text)


def test_cuda_12_needs_an_image_with_the_compiler():
    with pytest.raises(SpecError, match="no compiler for CUDA 12.6"):
        require_image(choose(cuda="12.6"), None)
    require_image(choose(cuda="12.6"), "nvidia/cuda:12.6.3-devel")
    require_image(choose(cuda="13.0"), None)
    assert "nvidia-cuda-nvcc==13.0.*" in tool_requirements(choose(cuda="13.0"), (), with_toolkit=True)


KINDS = {
    "wheels": (choose(cuda="13.0"), build()),
    "image": (choose(cuda="12.6"), build(base=f"registry.example/cuda:12.6-devel@{DIGEST}", has_wheels=False)),
    "cpu": (choose(cuda="cpu"), build(arch_list="", has_wheels=False)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_compiles_and_the_image_takes_only_the_result(tmp_path, kind):
    combination, compiled = KINDS[kind]
    files = image_recipe.render(recipe(combination, compiled))
    for name in ("Dockerfile", "image.def"):
        (tmp_path / name).write_text(files[name])
    assert lint(["Dockerfile", "image.def"], here=tmp_path).findings == ()
    assert hadolint(tmp_path / "Dockerfile") == ""
    script = files["image.def"].partition("Stage: build")[2].partition("%post")[2].partition("\nBootstrap")[0]
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0
    assert (
        files["image.def"].count("%files from build") == files["Dockerfile"].count("COPY --from=build /opt/venv") == 1
    )
    assert ("nvcc --version" in script) == (kind != "cpu")
    assert ("/opt/cuda" in script) == (kind == "wheels")
    assert re.findall(r"^export (\w+)=\"8.0\"$", script, re.M) == ([] if kind == "cpu" else ["TORCH_CUDA_ARCH_LIST"])
    assert 'export FLASH_ATTENTION_FORCE_BUILD="TRUE"' in script
    assert "--no-build-isolation" in script
    assert f"flash-attn==2.8.3 \\\n    --hash={HASH}" in files["requirements.sources.lock"]
    assert all(text.startswith(image_recipe.FIRST_LINE) for name, text in files.items() if ".lock" in name)


def test_an_image_for_the_build_is_named_by_digest():
    with pytest.raises(SpecError, match="not a name with a digest"):
        image_recipe.render(recipe(choose(cuda="12.6"), build(base="nvidia/cuda:12.6-devel", has_wheels=False)))


def test_the_report_of_the_build_names_the_wheel_and_its_source(tmp_path):
    text = (image_recipe.TEMPLATES / "built-report.py").read_text()
    text = text.replace("/usr/share/hpcenv", str(tmp_path)).replace("/opt/wheels", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    wheel = tmp_path / "wheels" / "Flash_Attn-2.8.3-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"w")
    lines = image_recipe.render(recipe(*KINDS["wheels"]))["requirements.sources.lock"]
    (tmp_path / "requirements.sources.lock").write_text(lines)
    environ = {"COMPILER_SAYS": "c++ (Debian 12.2.0-14) 12.2.0\nCopyright (C) 2022", "TORCH_CUDA_ARCH_LIST": "8.0"}
    environ["NVCC_SAYS"] = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88\n"
    subprocess.run([sys.executable, "-"], input=text, text=True, check=True, env=environ)

    from hpcenv.locking.built_packages import parse_built

    (found,) = parse_built((tmp_path / "built.json").read_bytes())
    assert (found.file.name, found.file.version, found.file.proof) == ("Flash_Attn", "2.8.3", "built")
    assert found.file.sha256 == hashlib.sha256(b"w").hexdigest()
    assert (found.table.nvcc, found.table.arch_list) == ("13.0.88", "8.0")
    assert found.table.compiler == "c++ (Debian 12.2.0-14) 12.2.0"
    assert f"sha256:{found.table.source_sha256}" == HASH


# -- source archives, from pip's own lists --------------------------------------------------------------------------


def archive(folder: Path, name: str) -> str:
    """A source archive whose setup.py must not run; return its sha256."""
    folder.mkdir(exist_ok=True)
    text = b"raise SystemExit('setup.py was run')\n"
    with tarfile.open(folder / name, "w:gz") as file:
        member = tarfile.TarInfo(f"{name.removesuffix('.tar.gz')}/setup.py")
        member.size = len(text)
        file.addfile(member, io.BytesIO(text))
    return hashlib.sha256((folder / name).read_bytes()).hexdigest()


def environment(**more: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        **more,
    }


def test_a_source_archive_in_a_folder_is_hashed_and_not_run(tmp_path):
    wanted = archive(tmp_path / "sources", "tiny_cuda-1.0.tar.gz")
    archive(tmp_path / "sources", "tiny_cuda-1.0.1.tar.gz")
    archive(tmp_path / "sources", "tiny_cuda_more-1.0.tar.gz")
    (found,) = find_sources([("tiny-cuda", "1.0")], environment(PIP_FIND_LINKS=str(tmp_path / "sources")))
    assert found.hashes == (f"sha256:{wanted}",)
    assert found.files == ("tiny_cuda-1.0.tar.gz",)


def index(folder: Path, lines: str) -> dict[str, str]:
    page = folder / "simple" / "tiny-cuda" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(lines)
    more = environment(PIP_INDEX_URL=(folder / "simple").as_uri())
    del more["PIP_NO_INDEX"]
    return more


def test_an_index_states_the_sha256(tmp_path):
    lines = (
        f'<a href="../../f/tiny-cuda-1.0.tar.gz#sha256={"c" * 64}">x</a><a href="tiny_cuda-1.0-py3-none-any.whl">y</a>'
    )
    (found,) = find_sources([("tiny-cuda", "1.0")], index(tmp_path, lines))
    assert found.hashes == ("sha256:" + "c" * 64,)


def test_without_a_source_archive_nothing_is_compiled(tmp_path):
    with pytest.raises(SpecError, match="no source archive of tiny-cuda 2.0"):
        find_sources([("tiny-cuda", "2.0")], environment(PIP_FIND_LINKS=str(tmp_path)))


def test_an_index_that_cannot_be_asked_is_an_error(tmp_path):
    with pytest.raises(ToolFailed, match="could not be asked"):
        find_sources([("tiny-cuda", "1.0")], environment(PIP_RETRIES="no number"))
