"""`hpcenv image init`: files from a lock or from pip's own index, nothing overwritten, no server asked without need."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcenv.cli._command_line import cli
from hpcenv.errors import LockfileInvalid, SpecError, ToolFailed, WouldOverwrite
from hpcenv.locking.pins.formats import open_pins
from hpcenv.locking.pins.pin import PinSource
from hpcenv.recipes.init import pins_of, prepare, write
from hpcenv.recipes.recipe_record import BuildRequest, RecipeRequest, read_record

DIGEST = "sha256:" + "a" * 64
BASE = f"registry.example:5000/team/base:1@{DIGEST}"
WHEELS = {
    "torch": "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl",
    "filelock": "filelock-3.0-py3-none-any.whl",
}


def pylock(folder, wheels=WHEELS, python=">=3.10"):
    rows = []
    for name, file in wheels.items():
        version, sha = file.split("-")[1], hashlib.sha256(file.encode()).hexdigest()
        rows.append(
            f'[[packages]]\nname = "{name}"\nversion = "{version}"\n[[packages.wheels]]\nname = "{file}"\n'
            f'url = "https://index.example/{file}"\nhashes = {{sha256 = "{sha}"}}\n'
        )
    path = folder / "pylock.toml"
    path.write_text(f'lock-version = "1.0"\ncreated-by = "t"\nrequires-python = "{python}"\n' + "".join(rows))
    return path


ON_CPU = "the locked torch is on PyTorch's index cpu, not on the default index: site/pip.conf must name it"


def make(tmp_path, **words):
    options = {"tag": "train", "pylock": pylock(tmp_path), "base": BASE} | words
    how = {name: options.pop(name) for name in ("environ", "force") if name in options}
    options["pylock"] = options["pylock"] and str(options["pylock"])
    prepared = prepare(RecipeRequest(**options), environ=how.get("environ", {}))
    return write(prepared, tmp_path / "out", force=how.get("force", False))


def test_a_recipe_from_a_lock_and_a_digest_asks_nobody(tmp_path):
    result = make(tmp_path)
    assert (result.image, result.torch, result.cuda, result.python) == (
        "train:v2.13.0-cpu-bookworm",
        "2.13.0",
        "cpu",
        "3.11",
    )
    assert {str(path.relative_to(result.folder)) for path in result.files} == {
        ".dockerignore",
        "Dockerfile",
        "README.md",
        "image.def",
        "recipe.json",
        "requirements.lock",
        "site/.gitignore",
    }
    locked = (result.folder / "requirements.lock").read_text()
    assert re.findall(r"^(\S+==\S+) \\$", locked, re.M) == ["filelock==3.0", "torch==2.13.0+cpu"]
    assert "index.example" not in "".join(path.read_text() for path in result.files)
    assert f"FROM registry.example:5000/team/base:1@{DIGEST} AS packages" in (result.folder / "Dockerfile").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"cuda": "12.6"}, "and 12.6 is required"),
        ({"torch": "2.12.1"}, "and torch 2.12.1 is required"),
        ({"cuda": "11.8"}, "no build of torch 2.13.0 for CUDA 11.8"),
        ({"python": "3.12"}, "no wheel for Python 3.12"),
        ({"tag": "Bad Name"}, "not an image name"),
        ({"tag": "train:a b"}, "not an image tag"),
        ({"base": "a b"}, "image reference"),
        ({"apt": ("libgl1; rm -rf /",)}, "not a package of the distribution"),
        ({"base": f"nvidia/cuda:12.6.3-base-ubuntu22.04@{DIGEST}"}, "is ubuntu22.04, and the recipe is for bookworm"),
        ({"base": f"r.example/python:3.11-slim-trixie@{DIGEST}"}, "is trixie, and the recipe is for bookworm"),
        ({"base": f"ubuntu:20.04@{DIGEST}"}, "is ubuntu20.04, and the recipe is for bookworm"),
        ({"base": f"debian:bullseye-slim@{DIGEST}"}, "is bullseye, and the recipe is for bookworm"),
        ({"base": f"rockylinux/rockylinux:9@{DIGEST}"}, "is rockylinux9, and the recipe is for bookworm"),
        ({"base": f"python:3.11-alpine@{DIGEST}"}, "is alpine, and the recipe is for bookworm"),
        (
            {"build": BuildRequest(packages=("x==1",), base=f"ubuntu:24.04@{DIGEST}")},
            "is ubuntu24.04, and the recipe is for",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(tmp_path, words, says):
    with pytest.raises(SpecError) as caught:
        make(tmp_path, **words)
    assert says in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_own_files_are_replaced_and_others_are_not(tmp_path):
    make(tmp_path)
    make(tmp_path, tag="other")
    recipe = tmp_path / "out" / "Dockerfile"
    assert "other:v2.13.0" in recipe.read_text()
    recipe.write_text("FROM mine\n")
    before = (tmp_path / "out" / "image.def").read_text()
    with pytest.raises(WouldOverwrite, match="Dockerfile"):
        make(tmp_path)
    assert (tmp_path / "out" / "image.def").read_text() == before
    make(tmp_path, force=True)
    assert "train:v2.13.0" in recipe.read_text()


@pytest.mark.parametrize("name", ["Dockerfile", "image.def", "requirements.lock", "README.md", "site/.gitignore"])
def test_an_edited_file_is_kept(tmp_path, name):
    make(tmp_path)
    edited = tmp_path / "out" / name
    edited.write_text(edited.read_text() + "# by hand\n")
    with pytest.raises(WouldOverwrite) as caught:
        make(tmp_path, tag="other")
    assert f"`{edited}` was edited" in caught.value.what
    assert "--force" in caught.value.hint
    assert edited.read_text().endswith("# by hand\n")
    assert "train:v2.13.0" in (tmp_path / "out" / "recipe.json").with_name("README.md").read_text()
    make(tmp_path, tag="other", force=True)
    assert not edited.read_text().endswith("# by hand\n")
    make(tmp_path, tag="third")


def test_without_its_record_a_recipe_may_have_been_edited(tmp_path):
    make(tmp_path)
    (tmp_path / "out" / "recipe.json").unlink()
    make(tmp_path)  # it would write the same
    (tmp_path / "out" / "recipe.json").unlink()
    with pytest.raises(WouldOverwrite, match="exists"):
        make(tmp_path, tag="other")


def test_a_record_moves_with_its_project(tmp_path):
    make(tmp_path)
    assert read_record(tmp_path / "out").request.pylock == str(tmp_path / "pylock.toml")
    assert json.loads((tmp_path / "out" / "recipe.json").read_text())["request"]["pylock"] == "../pylock.toml"
    (tmp_path / "out").rename(tmp_path / "moved")
    assert read_record(tmp_path / "moved").request.pylock == str(tmp_path / "pylock.toml")
    assert read_record(tmp_path) is None


def test_a_link_in_the_way_is_never_followed(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "out" / "README.md").symlink_to(tmp_path / "victim")
    with pytest.raises(WouldOverwrite):
        make(tmp_path, force=True)
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("numpy==1.0\n", "has no sha256"),
        ("numpy>=1.0 --hash=sha256:" + "0" * 64 + "\n", "does not pin|one version|cannot be read|not pin"),
        ("", "pins no package"),
        ("[", "pylock|TOML"),
    ],
)
def test_a_lock_that_cannot_be_used(tmp_path, text, says):
    path = tmp_path / ("pylock.odd.toml" if text == "[" else "requirements.txt")
    path.write_text(text)
    with pytest.raises((LockfileInvalid, SpecError), match=says):
        make(tmp_path, pylock=path, torch="2.13.0")


def test_markers_are_judged_for_the_image(tmp_path):
    path = tmp_path / "requirements.txt"
    sha = "--hash=sha256:" + "0" * 64
    path.write_text(f'a==1 ; python_version < "3.12" {sha}\nb==1 ; sys_platform == "win32" {sha}\nc==1 {sha}\n')
    assert [pin.name for pin in pins_of(open_pins(PinSource(path=path)), "3.11")] == ["a", "c"]
    assert [pin.name for pin in pins_of(open_pins(PinSource(path=path)), "3.12")] == ["c"]


# -- without a lock: pip's own index -------------------------------------------------------


def write_wheel(folder: Path, file: str, requires: str = "") -> str:
    """A wheel small enough to make here, for a Python and machine that this may not be."""
    name, version = file.split("-")[:2]
    tag = file.removesuffix(".whl").split("-", 2)[2]
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: false\nTag: {tag}\n",
    }
    rows = [
        f"{at},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip('=')},{len(text)}\n"
        for at, text in files.items()
    ]
    with zipfile.ZipFile(folder / file, "w") as wheel:
        for at, text in files.items():
            wheel.writestr(at, text)
        wheel.writestr(f"{info}/RECORD", "".join(rows) + f"{info}/RECORD,,\n")
    return hashlib.sha256((folder / file).read_bytes()).hexdigest()


def test_pip_resolves_for_the_image_not_for_this_machine(tmp_path):
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    sha = write_wheel(shelf, WHEELS["torch"], "Requires-Dist: filelock\n")
    write_wheel(shelf, "filelock-3.0-py3-none-any.whl")
    write_wheel(shelf, "torch-2.13.0+cpu-cp312-cp312-manylinux_2_28_x86_64.whl")
    for version in ("1.26.4", "2.4.6"):
        write_wheel(shelf, f"numpy-{version}-cp311-cp311-manylinux_2_17_x86_64.whl")
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(shelf)}
    environ["PIP_CONFIG_FILE"] = os.devnull
    result = make(tmp_path, pylock=None, cuda="cpu", torch="2.13.0", environ=environ)
    assert result.packages == 3
    assert "numpy==2.4.6 " in (result.folder / "requirements.lock").read_text()
    assert not any("numpy" in note for note in result.notes)
    assert f"torch==2.13.0+cpu \\\n    --hash=sha256:{sha}\n" in (result.folder / "requirements.lock").read_text()
    assert any("pip resolved the packages now" in note for note in result.notes)
    with pytest.raises(ToolFailed) as caught:
        make(tmp_path, pylock=None, torch="2.12.1", cuda="cpu", environ=environ)
    assert "torch==2.12.1+cpu and numpy, " in caught.value.what
    assert "--pylock" in (caught.value.hint or "")


def test_an_old_torch_gets_the_numpy_that_it_was_compiled_for(tmp_path):
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    write_wheel(shelf, "torch-2.2.2+cpu-cp311-cp311-linux_x86_64.whl")
    for version in ("1.26.4", "2.4.6"):
        write_wheel(shelf, f"numpy-{version}-cp311-cp311-manylinux_2_17_x86_64.whl")
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(shelf)}
    result = make(tmp_path, pylock=None, cuda="cpu", torch="2.2.2", environ=environ | {"PIP_CONFIG_FILE": os.devnull})
    assert "numpy==1.26.4 " in (result.folder / "requirements.lock").read_text()


def shelf_of(tmp_path, *wheels):
    """The environment of a user whose pip knows only these wheels: (file name, what its metadata says more)."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    for file, requires in wheels:
        write_wheel(shelf, file, requires)
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(shelf)}
    return environ | {"PIP_CONFIG_FILE": os.devnull}


SHELF = (
    ("torch-2.1.2+cpu-cp311-cp311-linux_x86_64.whl", ""),
    ("numpy-1.26.4-cp311-cp311-manylinux_2_17_x86_64.whl", ""),
    ("numpy-2.4.6-cp311-cp311-manylinux_2_17_x86_64.whl", ""),
    # pip alone would take the newest: its metadata says nothing against this torch.
    ("torchvision-0.16.2-cp311-cp311-linux_x86_64.whl", "Requires-Dist: numpy\n"),
    ("torchvision-0.17.0-cp311-cp311-linux_x86_64.whl", "Requires-Dist: numpy\n"),
    ("timm-1.0-py3-none-any.whl", "Requires-Dist: torchvision\n"),
    ("tiny_llm-1.0-py3-none-any.whl", ""),
    ("tiny_llm-1.1-py3-none-any.whl", ""),
)


def locked_in(result):
    return re.findall(r"^(\S+==\S+) \\$", (result.folder / "requirements.lock").read_text(), re.M)


@pytest.mark.parametrize("words", [("torchvision", "tiny-llm==1.0"), ("timm", "tiny_llm<1.1")])
def test_more_packages_are_resolved_with_torch_and_get_the_release_that_fits(tmp_path, words):
    environ = shelf_of(tmp_path, *SHELF)
    made = make(tmp_path, pylock=None, torch="2.1.2", cuda="cpu", packages=words, environ=environ)
    found = locked_in(made)
    assert {"numpy==1.26.4", "tiny-llm==1.0", "torch==2.1.2+cpu", "torchvision==0.16.2"} <= {*found}
    assert "torchvision 0.16.2 is made for torch ==2.1.2" in made.notes
    assert (made.folder / "requirements.lock").read_text().count("--hash=sha256:") == len(found)


# The list of the articles that the project was made from.
SEEDS = ("transformers==4.36.0", "accelerate==0.25.0", "datasets==2.16.0", "wandb==0.16.1", "torchvision")
SEEDS_APT = ("libgl1", "libglib2.0-0", "tini=0.19.0-1")  # the last one has a version


@pytest.fixture
def seeds(tmp_path):
    """Wheels that require what those of the list require, as far as it decides about versions; newer ones beside them."""
    return shelf_of(
        tmp_path,
        *(one for one in SHELF if not one[0].startswith("torch-")),
        ("torch-2.1.2-cp311-cp311-manylinux1_x86_64.whl", ""),
        ("transformers-4.36.0-py3-none-any.whl", "Requires-Dist: tokenizers <0.19,>=0.14\n"),
        ("tokenizers-0.15.2-cp311-cp311-manylinux_2_17_x86_64.whl", ""),
        ("tokenizers-0.22.0-cp311-cp311-manylinux_2_17_x86_64.whl", ""),
        ("accelerate-0.25.0-py3-none-any.whl", "Requires-Dist: numpy >=1.17\nRequires-Dist: torch >=1.10.0\n"),
        ("datasets-2.16.0-py3-none-any.whl", "Requires-Dist: pyarrow >=8.0.0\n"),
        ("pyarrow-25.0.0-cp311-cp311-manylinux_2_28_x86_64.whl", ""),
        ("pyarrow-26.0.1-cp311-cp311-manylinux_2_28_x86_64.whl", ""),
        ("wandb-0.16.1-py3-none-any.whl", "Requires-Dist: setuptools\n"),
        ("setuptools-81.0.0-py3-none-any.whl", ""),
        ("setuptools-84.2.1-py3-none-any.whl", ""),
    )


def test_the_list_of_the_seeds_is_one_line(tmp_path, seeds):
    words = {"pylock": None, "torch": "2.1.2", "apt": SEEDS_APT, "environ": seeds, "base": f"debian:bookworm@{DIGEST}"}
    made = make(tmp_path, packages=(*SEEDS, "pyarrow<26", "setuptools<82"), **words)
    assert made.image == "train:v2.1.2-cuda12.1-bookworm"
    assert {*locked_in(made)} == {
        "accelerate==0.25.0",
        "datasets==2.16.0",
        "numpy==1.26.4",
        "pyarrow==25.0.0",
        "setuptools==81.0.0",
        "tokenizers==0.15.2",
        "torch==2.1.2",
        "torchvision==0.16.2",
        "transformers==4.36.0",
        "wandb==0.16.1",
    }
    assert not any("known trouble" in note for note in made.notes)
    for name in ("Dockerfile", "image.def"):
        text = (made.folder / name).read_text()
        assert re.search(r"install --no-install-recommends .* libgl1 libglib2.0-0 tini=0.19.0-1$", text, re.M)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_index_still_has_the_list_of_the_seeds(tmp_path):
    """With the index that this machine's pip is configured for. tests/cluster/test_seeds_image.py builds the image."""
    words = {"pylock": None, "torch": "2.1.2", "apt": SEEDS_APT, "environ": dict(os.environ)}
    made = make(tmp_path, packages=(*SEEDS, "pyarrow<26", "setuptools<82"), **words)
    found = {*locked_in(made)}
    assert {*SEEDS[:4], "torch==2.1.2", "torchvision==0.16.2", "numpy==1.26.4"} <= found
    assert not any("its import fails" in note for note in made.notes)


def test_what_fails_at_the_import_is_said_before_the_build(tmp_path, seeds):
    made = make(tmp_path, pylock=None, torch="2.1.2", packages=SEEDS, environ=seeds)
    found = [note for note in made.notes if "known trouble" in note]
    for note, begins, advice in zip(
        found,
        ("pyarrow 26.0.1 has known trouble: its import fails", "wandb 0.16.1 has known trouble: its import fails"),
        ("; take pyarrow<26 (", "; take setuptools<82, or wandb 0.16.4 or later ("),
        strict=True,
    ):
        assert note.startswith(begins)
        assert advice in note


def test_a_pair_that_the_table_doubts_is_left_to_pip_and_said(tmp_path):
    environ = shelf_of(
        tmp_path,
        ("torch-2.15.0+cpu-cp311-cp311-linux_x86_64.whl", ""),
        ("numpy-2.4.6-cp311-cp311-manylinux_2_17_x86_64.whl", ""),
        ("torchaudio-2.11.0-cp311-cp311-linux_x86_64.whl", ""),
        ("torchaudio-2.11.1-cp311-cp311-linux_x86_64.whl", ""),
    )
    words = {"pylock": None, "torch": "2.15.0", "cuda": "cpu", "environ": environ}
    made = make(tmp_path, packages=("torchaudio",), **words)
    assert "torchaudio==2.11.1" in locked_in(made)
    assert any(note.startswith("torchaudio 2.11.1 is not in the table") for note in made.notes)
    made = make(tmp_path, packages=("torchaudio==2.11.0",), **words)
    (note,) = (note for note in made.notes if "torchaudio" in note)
    assert note.startswith("whether torchaudio 2.11.0 runs with torch 2.15.0 is not known (2.11.0 refuses a torch of")


def test_a_locked_pair_that_does_not_fit_is_said(tmp_path):
    (tmp_path / "with").mkdir()
    lock = pylock(tmp_path / "with", WHEELS | {"torchvision": "torchvision-0.27.0-cp311-cp311-linux_x86_64.whl"})
    made = make(tmp_path, pylock=lock)
    (note,) = (note for note in made.notes if "torchvision" in note)
    assert note.startswith("torchvision 0.27.0 requires torch ==2.12.0, here is 2.13.0")
    assert note.endswith(": torchvision 0.28.0 fits torch 2.13.0")


def test_a_base_whose_name_does_not_say_its_distribution(tmp_path, make_sif):
    said = "the name of the base does not say whether it is bookworm; the build checks this"
    made = make(tmp_path)
    assert said in made.notes
    for name in ("Dockerfile", "image.def"):
        assert 'test "${VERSION_CODENAME:-}" = "bookworm" ||' in (made.folder / name).read_text()
    assert said not in make(tmp_path, base=f"debian:12-slim@{DIGEST}").notes
    assert said in make(tmp_path, base=str(make_sif(tmp_path / "base.sif")), force=True).notes
    assert said not in make(tmp_path, base=str(make_sif(tmp_path / "debian12.sif")), force=True).notes


def test_a_requirements_file_without_hashes_decides_about_torch(tmp_path):
    environ = shelf_of(tmp_path, *SHELF)
    (tmp_path / "requirements.in").write_text("torch==2.1.2+cpu\ntiny-llm  # newest\ntorchvision\n")
    made = make(tmp_path, pylock=None, requirements=str(tmp_path / "requirements.in"), environ=environ)
    assert (made.torch, made.cuda) == ("2.1.2", "cpu")
    assert locked_in(made) == ["numpy==1.26.4", "tiny-llm==1.1", "torch==2.1.2+cpu", "torchvision==0.16.2"]
    with pytest.raises(ToolFailed, match="2.2.2"):
        make(tmp_path, pylock=None, torch="2.2.2", requirements=str(tmp_path / "requirements.in"), environ=environ)


def test_packages_that_do_not_go_together_are_pips_to_refuse(tmp_path):
    environ = shelf_of(tmp_path, *SHELF)
    with pytest.raises(ToolFailed) as caught:
        make(tmp_path, pylock=None, torch="2.1.2", cuda="cpu", packages=("torchvision==0.17.0",), environ=environ)
    assert "torchvision==0.16.2" in caught.value.why


@pytest.mark.parametrize(
    ("words", "more", "why", "hint"),
    [
        (
            {"packages": ("tiny-llm==9",)},
            {},
            "no wheel of tiny-llm==9 for Python 3.11 on bookworm is on pip's index; it has 1.0, 1.1",
            "name a version that is there, or let pip choose: --with tiny-llm",
        ),
        ({"packages": ("nosuch",)}, {}, "no wheel of nosuch for Python 3.11 on bookworm", "--build nosuch==VERSION"),
        (
            {"packages": ("other-python",)},
            {},
            "no wheel of other-python for Python 3.11",
            "--build other-python==VERSION",
        ),
        (
            {"packages": ("tiny-llm==1.1", "needs-old")},
            {},
            "needs-old 1.0 depends on tiny-llm<1.1",
            "name versions that go together",
        ),
        (
            {"packages": ("needs-missing",)},
            {},
            "no wheel of tiny-llm>5 (from needs-missing)",
            "name a version that is there, or let pip choose: --with needs-missing",
        ),
        ({"torch": "2.1.1"}, {}, "no wheel of torch==2.1.1+cpu", "builds `+cpu` are on another index"),
        ({"torch": "2.1.1", "cuda": None}, {}, "it has 2.1.2+cpu", "name a version that is there: --torch VERSION"),
        (
            {},
            {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://u:secret@127.0.0.1:9/simple", "PIP_RETRIES": "0"},
            "pip could not reach http://***@127.0.0.1:9/simple/",
            "check `pip config list` and the network, and try again",
        ),
    ],
)
def test_what_pip_did_not_find_and_what_to_do(tmp_path, words, more, why, hint):
    shelf = (
        *SHELF,
        ("needs_old-1.0-py3-none-any.whl", "Requires-Dist: tiny-llm<1.1\n"),
        ("needs_missing-1.0-py3-none-any.whl", "Requires-Dist: tiny-llm>5\n"),
        ("other_python-1.0-cp312-cp312-linux_x86_64.whl", ""),
    )
    environ = shelf_of(tmp_path, *shelf) | more
    words = {"pylock": None, "torch": "2.1.2", "cuda": "cpu", "environ": environ} | words
    if more:
        (tmp_path / "shelf" / SHELF[0][0]).unlink()
    with pytest.raises(ToolFailed) as caught:
        make(tmp_path, **words)
    assert why in caught.value.why
    assert hint in caught.value.hint
    assert caught.value.hint.endswith(",\nor give your own lock: --pylock FILE")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("torch==2.13.0", "names torch"),
        ("--index-url=https://evil.example", "not a package of an index"),
        ("./local", "not a package of an index"),
        ("x @ https://h.example/x-1-py3-none-any.whl", "not a package of an index"),
    ],
)
def test_a_word_of_with_is_a_package(tmp_path, word, says):
    with pytest.raises(SpecError, match=says):
        make(tmp_path, pylock=None, packages=(word,))


def test_a_lock_without_numpy_is_noted(tmp_path):
    assert any("add `numpy` to what is locked" in note for note in make(tmp_path).notes)
    with_numpy = WHEELS | {"numpy": "numpy-2.4.6-cp311-cp311-manylinux_2_17_x86_64.whl"}
    (tmp_path / "with").mkdir()
    assert make(
        tmp_path, pylock=pylock(tmp_path / "with", with_numpy), force=True, base=f"debian:bookworm@{DIGEST}"
    ).notes == (ON_CPU,)


# -- the command ---------------------------------------------------------------------------


def test_the_command_shows_its_options_and_no_former_ones():
    shown = CliRunner().invoke(cli, ["image", "init", "--help"]).output
    options = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", shown, re.M))
    assert options == {
        "--tools",
        "--torch",
        "--cuda",
        "--python",
        "--os",
        "--with",
        "--requirements",
        "--apt",
        "--pylock",
        "--extra",
        "--group",
        "--package",
        "--base",
        "--tag",
        "--output",
        "--build",
        "--build-with",
        "--build-base",
        "--gpu",
        "--force",
        "--json",
        "--help",
    }


def test_the_registries_without_tls_are_those_of_the_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hpcenv.toml").write_text('image = "docker://r:5000/x:1"\nplain-http = ["r:5000"]\n')
    pylock(tmp_path)
    cli.main(["image", "init", "--pylock", "pylock.toml", "--base", BASE, "-o", "here"], standalone_mode=False)
    assert "AS final" in (tmp_path / "here" / "Dockerfile").read_text()


def test_base_images_of_the_chosen_site_are_named_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    image = f"h.example/base@sha256:{'0' * 64}"
    (tmp_path / "jura.toml").write_text(
        f'name = "jura"\n[[base-image]]\nimage = "{image}"\nreason = "has the fabric"\n'
        f'[[base-image]]\nimage = "{image[:-1]}1"\nreason = "for many"\nwhen = {{ nodes = ">=2" }}\n'
    )
    (tmp_path / "jura.toml").chmod(0o600)
    for site, said in (("./jura.toml", True), ("none", False)):
        monkeypatch.setenv("HPCENV_SITE", site)
        with pytest.raises(SpecError, match="nosuch"):
            cli.main(["image", "init", "--os", "nosuch"], standalone_mode=False)
        shown = " ".join(capsys.readouterr().err.split())
        assert (f"the site jura recommends the base image {image} (has the fabric): --base {image}" in shown) is said
        assert "for many" not in shown


def test_a_base_must_contain_another_python(tmp_path):
    wheels = {"torch": WHEELS["torch"].replace("cp311", "cp312"), "filelock": WHEELS["filelock"]}
    (tmp_path / "other").mkdir()
    result = make(tmp_path, python="3.12", pylock=pylock(tmp_path / "other", wheels))
    assert "the base must contain Python 3.12; the build checks that" in result.notes
    text = (result.folder / "image.def").read_text()
    assert "python3-venv" not in text
    assert "sys.version_info[:2] == (3, 12)" in text
