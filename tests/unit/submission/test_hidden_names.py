"""A file of the project that hides a locked package, or a module of the standard library, is named before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcenv.project.workspace import read_lockfile
from hpcenv.records.manifest import Environment
from hpcenv.submission.hidden_names import hidden_names
from hpcenv.submission.module_file import only_packages

ENDING = ": the ranks import it"


def _notes(hpcenv: Any, project: Path, *words: str) -> list[str]:
    done = hpcenv("submit", *words, "--nproc", "1", "--cluster", "local", "--dry-run", "--json", cwd=project)
    assert done.status == 0, done.stderr
    return [note.removesuffix(ENDING) for note in done.envelope["data"]["notes"] if note.endswith(ENDING)]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("torch.py", "torch.py hides the package torch of the lockfile"),
        ("torch/__init__.py", "torch/ hides the package torch of the lockfile"),
        ("torch.cpython-311-x86_64-linux-gnu.so", "the package torch of the lockfile"),
        ("colorsys.py", "colorsys.py hides colorsys of the standard library"),
        ("wave/__init__.py", "wave/ hides wave of the standard library"),
    ],
)
def test_a_file_that_hides_a_module_is_named_by_submit_and_in_the_verdict(
    hpcenv: Any, project: Path, file: str, said: str
) -> None:
    (project / file).parent.mkdir(exist_ok=True)
    (project / file).write_text("")
    (note,) = _notes(hpcenv, project, "train.py")
    assert said in note
    if file == "colorsys.py":
        words = ("--nproc", "1", "--cluster", "local", "--name", "one", "--wait")
        assert hpcenv("submit", "train.py", *words, cwd=project, timeout=120).status == 0
        verdict = json.loads((project / "runs" / "one" / "verdict.json").read_text())
        assert (verdict["result"], note in verdict["notes"]) == ("match", True)


def test_a_module_that_is_started_by_its_name_hides_what_the_environment_has(hpcenv: Any, project: Path) -> None:
    (project / "torch").mkdir()
    for name in ("__init__.py", "__main__.py"):
        (project / "torch" / name).write_text("")
    assert _notes(hpcenv, project, "-m", "torch", "--name", "m") == ["torch/ hides the package torch of the lockfile"]


@pytest.mark.parametrize(
    "file",
    [
        "torch/data.bin",
        "utils/torch.py",
        "torch.yaml",
        "test.py",
        "os.py",
        "sys.py",
        "_torch.py",
        "src/torch/__init__.py",
    ],
)
def test_a_file_that_python_does_not_take_for_it_is_not_named(hpcenv: Any, project: Path, file: str) -> None:
    (project / file).parent.mkdir(parents=True, exist_ok=True)
    (project / file).write_text("")
    assert _notes(hpcenv, project, "train.py") == []


def test_a_script_in_a_folder_does_not_see_what_lies_beside_that_folder(hpcenv: Any, project: Path) -> None:
    (project / "src").mkdir()
    (project / "train.py").rename(project / "src" / "train.py")
    (project / "torch.py").write_text("")
    assert _notes(hpcenv, project, "src/train.py") == []


def test_the_packages_of_an_image_are_not_looked_for_on_this_machine() -> None:
    assert only_packages(Environment(kind="sif", python="python3", sif="/a.sif"), {}) is None
    assert only_packages(Environment(kind="host", python="/python"), {}) is None


def test_names_that_differ_from_the_distribution_and_editable_installs(project: Path, tmp_path: Path) -> None:
    locked = read_lockfile(project / "lockfiles" / "default.lock.toml")
    dist = locked.packages.dist[0].model_dump()

    def hidden(packages: Path | None, **changes: Any) -> tuple[str, ...]:
        table = locked.packages.model_copy(update={"dist": (type(locked.packages.dist[0])(**{**dist, **changes}),)})
        return hidden_names(project, locked.model_copy(update={"packages": table}), packages)

    for name in ("yaml.py", "my_model.py", "odd.py"):
        (project / name).write_text("")
    assert hidden(None, name="pyyaml") == ("yaml.py hides the package pyyaml of the lockfile",)
    assert hidden(None, name="my-model") == ("my_model.py hides the package my-model of the lockfile",)
    assert hidden(None, name="my-model", direct_url={"url": "file:///p", "editable": True}) == ()
    assert hidden(None, name="other-word") == (), "odd.py may hide it; the lockfile does not say so"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "odd.py").write_text("")
    assert hidden(tmp_path / "site", name="other-word") == ("odd.py hides odd of the locked environment",)
