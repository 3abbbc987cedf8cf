"""The lockfile of this repository's own examples: a real one, as the code of today reads and writes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcenv.project import lockfile as lock_model
from hpcenv.project import stale, toml_files
from hpcenv.project.workspace import open_workspace, read_lockfile
from tests.conftest import ROOT, Done

PATH = ROOT / "lockfiles" / "default.lock.toml"


def test_it_answers_the_projects_hpcenv_toml_and_was_not_edited() -> None:
    assert stale.compare_spec(open_workspace(ROOT).project, read_lockfile(PATH)) == ()


def test_written_again_it_has_the_same_bytes() -> None:
    text = PATH.read_text(encoding="utf-8")
    header = "\n".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
    assert toml_files.dumps(lock_model.to_data(read_lockfile(PATH)), header=header) == text


def test_it_is_of_a_sif_whose_tree_was_proved_and_of_a_real_torch() -> None:
    locked = read_lockfile(PATH)
    assert locked.container is not None
    assert locked.container.tree_sha256 is not None
    assert str(locked.facts["torch.version"]).startswith("2.")
    assert {dist.name for dist in locked.packages.dist} >= {"torch", "numpy"}


@pytest.mark.parametrize("name", ["requirements", "cyclonedx", "environment"])
def test_other_tools_get_their_format(name: str, hpcenv: Callable[..., Done], tmp_path: Path) -> None:
    done = hpcenv("export", name, "--output", str(tmp_path / "out"), cwd=ROOT)
    assert done.status == 0, done.stderr
    assert "torch" in (tmp_path / "out").read_text()
