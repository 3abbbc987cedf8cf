"""The copy of the code: what is in it, what is refused, and that later edits do not reach it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from hpcenv.errors import HpcenvError
from hpcenv.model.plan import Plan
from hpcenv.steps.plan import plan_job
from hpcenv.steps.request import Asked, Surroundings
from hpcenv.steps.submit import submit
from hpcenv.steps.workspace import open_workspace
from hpcenv.wire import RunFolder

GIT = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="NOT RUN: git is not installed")


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "protocol.file.allow=always", *words]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **GIT}, capture_output=True, check=True)
    return os.fsdecode(done.stdout).strip()


@pytest.fixture
def tree(project: Path) -> Path:
    """The tiny project under git."""
    (project / ".gitignore").write_text("runs/\ndata/\n")
    (project / "helper.py").write_text("VALUE = 1\n")
    git(project, "init", "-q")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "one")
    return project


@pytest.fixture
def around(tree: Path, fake_slurm: Any) -> Surroundings:
    environ = {**fake_slurm.environ, **GIT}
    return Surroundings(environ=environ, cwd=tree, now=time.localtime(0), token="beef", command=("hpcenv", "submit"))


@pytest.fixture
def plan(tree: Path, around: Surroundings) -> Callable[..., Plan]:
    def make(script: str = "train.py", **words: Any) -> Plan:
        asked = Asked(script=script, **{"nproc": 1, "assume_shared": True, "run": "a", **words})
        return plan_job(open_workspace(tree), asked, around)

    return make


def refused(make: Callable[[], object], code: str) -> HpcenvError:
    with pytest.raises(HpcenvError) as caught:
        make()
    assert caught.value.code == code, caught.value
    return caught.value


def test_a_run_uses_a_copy_of_what_git_tracks(plan: Any, tree: Path, around: Surroundings) -> None:
    (tree / "data").mkdir()
    (tree / "data" / "big.bin").write_bytes(b"x" * 1000)
    planned = plan()
    result = submit(planned, around)
    (tree / "helper.py").write_text("VALUE = 2\n")
    (tree / "train.py").write_text("later\n")

    run = RunFolder(result.run_folder)
    assert planned.manifest.script == str(run.source / "train.py")
    assert planned.manifest.workdir == str(tree), "data and outputs stay where the user is"
    assert (run.source / "helper.py").read_text() == "VALUE = 1\n"
    assert hashlib.sha256((run.source / "train.py").read_bytes()).hexdigest() == planned.manifest.script_sha256
    assert not (run.source / "data").exists()
    assert not (run.source / ".git").exists()
    source = planned.manifest.source
    assert source is not None
    assert (source.commit, source.dirty, source.diff_sha256) == (git(tree, "rev-parse", "HEAD"), False, "")
    assert source.files == len(git(tree, "ls-files").splitlines())
    code = tomlkit.parse(run.lockfile.read_text())["code"].unwrap()
    assert (code["commit"], code["dirty"], code["script-sha256"]) == (
        source.commit, False, planned.manifest.script_sha256,
    )  # fmt: skip
    assert planned.notes == ()


def test_links_modes_and_odd_names_are_kept(plan: Any, tree: Path, around: Surroundings) -> None:
    odd = os.fsdecode("a b\n'\"$(id)-größe-\xff".encode("utf-8", "surrogateescape")[:-2] + b"\xff.txt")
    (tree / odd).write_text("odd")
    (tree / "tool.sh").write_text("#!/bin/sh\n")
    (tree / "tool.sh").chmod(0o755)
    (tree / "pkg").mkdir()
    (tree / "pkg" / "near").symlink_to("../helper.py")
    (tree / "pkg" / "far").symlink_to("../../elsewhere")
    (tree / "pkg" / "dangling").symlink_to("nothing")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "odd")
    source = RunFolder(submit(plan(), around).run_folder).source
    assert (source / odd).read_text() == "odd"
    assert os.access(source / "tool.sh", os.X_OK)
    assert not os.access(source / "helper.py", os.X_OK)
    assert os.readlink(source / "pkg" / "near") == "../helper.py"
    assert os.readlink(source / "pkg" / "far") == str(tree.resolve().parent / "elsewhere"), "it leads to the same place"
    assert os.readlink(source / "pkg" / "dangling") == "nothing"


def test_changed_code_is_refused_by_name(plan: Any, tree: Path) -> None:
    (tree / "helper.py").write_text("VALUE = 2\n")
    error = refused(plan, "usage")
    assert error.why == "changed: helper.py"
    assert "git commit" in str(error.hint)
    assert "--allow-dirty" in str(error.hint)
    git(tree, "add", "-A")
    assert refused(plan, "usage").why == "changed: helper.py"


def test_an_untracked_script_is_refused_and_an_untracked_module_is_told(plan: Any, tree: Path) -> None:
    (tree / "new.py").write_text("print(1)\n")
    assert refused(lambda: plan("new.py"), "usage").why == "not under git: new.py"
    assert plan().notes == ("not in the copy of the code, git does not track them: new.py",)


def test_a_file_that_git_was_told_not_to_look_at_is_not_taken_for_clean(plan: Any, tree: Path) -> None:
    git(tree, "update-index", "--assume-unchanged", "helper.py")
    (tree / "helper.py").write_text("VALUE = 2\n")
    assert refused(plan, "usage").why == "git was told not to look at: helper.py"


def test_with_allow_dirty_the_difference_is_recorded_and_gives_the_code_again(
    plan: Any, tree: Path, around: Surroundings, tmp_path: Path
) -> None:
    (tree / "helper.py").write_bytes(b"VALUE = 2\r\n\xff")
    (tree / "new.py").write_text("print('new')\n")
    planned = plan("new.py", allow_dirty=True)
    run = RunFolder(submit(planned, around).run_folder)
    source = planned.manifest.source
    assert source is not None
    assert source.dirty
    assert source.diff_sha256 == hashlib.sha256(run.source_diff.read_bytes()).hexdigest()
    git(tmp_path, "clone", "-q", str(tree), "again")
    git(tmp_path / "again", "apply", "--whitespace=nowarn", str(run.source_diff))
    for name in ("helper.py", "new.py", "train.py"):
        assert (tmp_path / "again" / name).read_bytes() == (run.source / name).read_bytes(), name


def test_a_removed_file_is_not_in_the_copy(plan: Any, tree: Path, around: Surroundings) -> None:
    (tree / "helper.py").unlink()
    assert refused(plan, "usage").why == "changed: helper.py"
    source = RunFolder(submit(plan(allow_dirty=True), around).run_folder).source
    assert not (source / "helper.py").exists()


def test_code_that_changes_while_it_is_copied_is_refused(plan: Any, tree: Path, around: Surroundings) -> None:
    planned = plan()
    (tree / "helper.py").write_text("VALUE = 2\n")
    error = refused(lambda: submit(planned, around), "script-unusable")
    assert "changed while it was copied" in error.what
    assert not Path(planned.manifest.run_folder).exists()


def test_no_snapshot_runs_in_place_and_says_so(plan: Any, tree: Path) -> None:
    (tree / "helper.py").write_text("VALUE = 2\n")
    planned = plan(snapshot=False)
    assert planned.manifest.script == str(tree / "train.py")
    assert planned.manifest.source is None
    assert any("--no-snapshot" in note for note in planned.notes)
    code = tomlkit.parse(planned.lockfile_text)["code"].unwrap()
    assert code["commit"] == git(tree, "rev-parse", "HEAD")
    assert code["dirty"] is True
    assert len(code["diff-sha256"]) == 64


def test_submodules_come_along_where_they_are_there(
    plan: Any, tree: Path, around: Surroundings, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    (other / "lib.py").write_text("X = 1\n")
    git(other, "add", "-A")
    git(other, "commit", "-qm", "lib")
    git(tree, "submodule", "add", "-q", str(other), "lib")
    git(tree, "commit", "-qm", "with lib")
    source = RunFolder(submit(plan(), around).run_folder).source
    assert (source / "lib" / "lib.py").read_text() == "X = 1\n"
    assert not (source / "lib" / ".git").exists()
    (tree / "lib" / "lib.py").write_text("X = 2\n")
    assert refused(lambda: plan(run="b"), "usage").why == "changed: lib"
    git(tree, "submodule", "deinit", "-q", "-f", "lib")
    assert any("submodule is not initialised: lib" in note for note in plan(run="c").notes)


def test_too_much_is_refused_and_the_biggest_is_named(plan: Any, tree: Path) -> None:
    (tree / "model.bin").write_bytes(b"x")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "big")
    os.truncate(tree / "model.bin", 2 * 10**9)  # takes no room on the disk
    error = refused(lambda: plan(allow_dirty=True), "usage")
    assert "model.bin (2.0 GB)" in str(error.why)
    assert "--no-snapshot" in str(error.hint)


def test_a_repository_that_git_refuses_is_not_taken_for_none(plan: Any, tree: Path) -> None:
    (tree / ".git" / "HEAD").write_text("nonsense\n")
    error = refused(plan, "tool-failed")
    assert error.hint == "--no-snapshot runs the script from its own place"
    assert any("is not known" in note for note in plan(snapshot=False).notes)


def test_an_outer_git_does_not_lead_astray(plan: Any, tree: Path, around: Surroundings, monkeypatch: Any) -> None:
    strange = {**around.environ, "GIT_DIR": "/nonexistent", "GIT_INDEX_FILE": "/nonexistent"}
    asked = Asked(script="train.py", nproc=1, assume_shared=True, run="a")
    other = Surroundings(environ=strange, cwd=tree, now=around.now, token="beef", command=("hpcenv",))
    assert plan_job(open_workspace(tree), asked, other).manifest.source is not None


def test_without_a_commit_and_without_git_it_runs_in_place(project: Path, fake_slurm: Any) -> None:
    words: dict[str, Any] = {"now": time.localtime(0), "token": "beef", "command": ("hpcenv",)}
    around = Surroundings(environ={**fake_slurm.environ, **GIT}, cwd=project, **words)
    asked = Asked(script="train.py", nproc=1, assume_shared=True, run="a")
    (note,) = plan_job(open_workspace(project), asked, around).notes
    assert note.endswith("is not under git")
    git(project, "init", "-q")
    (note,) = plan_job(open_workspace(project), asked, around).notes
    assert note.endswith("has no commit yet")
