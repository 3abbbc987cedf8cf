"""The lockfiles of this repository: real ones, as the code of today reads and writes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcenv.locking.compatibility_notes import misfits
from hpcenv.locking.required_hashes import unproved
from hpcenv.project import compatibility, stale, toml_files
from hpcenv.project import lockfile as lock_model
from hpcenv.project.workspace import open_workspace, read_lockfile
from tests.conftest import ROOT, Done

FOLDER = ROOT / "lockfiles"
DEFAULT, CUDA = FOLDER / "default.lock.toml", FOLDER / "cuda.lock.toml"
PROJECTS = {DEFAULT: ROOT, CUDA: FOLDER / "cuda"}
EACH = pytest.mark.parametrize("path", [DEFAULT, CUDA], ids=["default", "cuda"])


@EACH
def test_it_answers_the_projects_hpcenv_toml_and_was_not_edited(path: Path) -> None:
    assert stale.compare_spec(open_workspace(PROJECTS[path]).project, read_lockfile(path)) == ()


def test_the_root_project_finds_both_fresh(hpcenv: Callable[..., Done]) -> None:
    done = hpcenv("lock", "--check", "--spec-only", "--all", cwd=ROOT)
    assert done.status == 0, done.stderr
    assert done.stdout.count("is fresh") == 2


@EACH
def test_written_again_it_has_the_same_bytes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    header = "\n".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
    assert toml_files.dumps(lock_model.to_data(read_lockfile(path)), header=header) == text


@EACH
def test_it_is_of_a_sif_whose_tree_was_proved_and_of_a_real_torch(path: Path) -> None:
    locked = read_lockfile(path)
    assert locked.container is not None
    assert locked.container.tree_sha256 is not None
    assert str(locked.facts["torch.version"]).startswith("2.")
    assert {dist.name for dist in locked.packages.dist} >= {"torch", "numpy"}


def test_the_cuda_lock_names_image_libraries_and_each_wheel_with_its_proved_hash() -> None:
    locked = read_lockfile(CUDA)
    assert locked.container is not None
    assert re.fullmatch("sha256:[0-9a-f]{64}", str(locked.container.manifest_digest))
    versions = {name: locked.facts[f"libs.{name}.version"] for name in ("cudart", "cudnn", "nccl", "cublas")}
    assert versions == {"cudart": "13.0", "cudnn": "9.24.0", "nccl": "2.30.7", "cublas": "13.1.1"}
    assert (locked.facts["torch.version"], locked.facts["torch.cuda"]) == ("2.14.1+cu130", "13.0")
    assert unproved(locked, every=True) == ()
    assert {dist.wheel.proof for dist in locked.packages.dist if dist.wheel is not None} == {"record"}


def test_its_page_shows_its_first_lines() -> None:
    shown = re.search(r"(?s)```toml\n(.*?)```", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert shown is not None
    assert CUDA.read_text(encoding="utf-8").startswith(shown[1])
    assert 'manifest-digest = "sha256:' in shown[1]


def test_the_proved_hashes_are_those_that_pip_resolved() -> None:
    text = (FOLDER / "cuda" / "requirements.lock").read_text(encoding="utf-8").replace("\\\n", "")
    resolved = {
        name: (version, sha) for name, version, sha in re.findall(r"(?m)^(\S+)==(\S+) +--hash=sha256:(\S+)$", text)
    }
    locked = {
        d.name: (d.version.partition("+")[0], d.wheel.sha256) for d in read_lockfile(CUDA).packages.dist if d.wheel
    }
    assert len(resolved) >= 30
    assert locked == resolved


def test_the_compatibility_table_has_nothing_against_it() -> None:
    assert misfits(read_lockfile(CUDA), compatibility.table()) == ()


@pytest.mark.parametrize("name", ["requirements", "cyclonedx", "environment"])
def test_other_tools_get_their_format(name: str, hpcenv: Callable[..., Done], tmp_path: Path) -> None:
    done = hpcenv("export", name, "--output", str(tmp_path / "out"), cwd=ROOT)
    assert done.status == 0, done.stderr
    assert "torch" in (tmp_path / "out").read_text()


def test_the_cuda_lock_gives_requirements_with_hashes(hpcenv: Callable[..., Done], tmp_path: Path) -> None:
    done = hpcenv("export", "requirements", "--lock", "cuda", "--output", str(tmp_path / "out"), cwd=ROOT)
    assert done.status == 0, done.stderr
    assert (tmp_path / "out").read_text().count("--hash=sha256:") == 30
