"""`hpcenv diff`: locks and runs, in every combination, with the exit status that a script needs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from hpcenv.api.environment import diff
from hpcenv.errors import Status, UsageError
from hpcenv.project import lockfile as lock_model
from tests.conftest import accept, hpcenv


def edited(project: Path, name: str, *path: str, value: Any) -> str:
    """Write another lockfile that differs in one place, as if it had been locked so."""
    source = project / "lockfiles" / "default.lock.toml"
    data = tomlkit.parse(source.read_text()).unwrap()
    table = data
    for part in path[:-1]:
        table = table.setdefault(part, {})
    table[path[-1]] = value
    data["fingerprint"] = lock_model.fingerprint(data)
    (project / "lockfiles" / f"{name}.lock.toml").write_text(tomlkit.dumps(data))
    return name


def run(hpcenv: Any, project: Path, name: str, *words: str) -> str:
    done = hpcenv("submit", "train.py", "--nproc", "1", "--name", name, "--wait", *words, cwd=project)
    assert done.status == 0, done.stderr
    return name


@pytest.fixture(scope="module")
def ran(locked_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("ran") / "project"
    shutil.copytree(locked_once, project)
    accept(project)
    run(hpcenv, project, "one")
    run(hpcenv, project, "two", "--env", "NCCL_ALGO=Ring", "--", "--lr", "3e-4")
    return project


@pytest.fixture
def two_runs(ran: Path, tmp_path: Path) -> Path:
    """A copy of a project with two runs; a test may change it."""
    return shutil.copytree(ran, tmp_path / "project")


# -- two lockfiles ------------------------------------------------------------------------


def git(project: Path, *words: str) -> None:
    variables = {**os.environ, "GIT_AUTHOR_DATE": "2026-11-23T00:00:00Z", "GIT_COMMITTER_DATE": "2026-11-23T00:00:00Z"}
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *words], cwd=project, env=variables, check=True, capture_output=True)


def test_a_lockfile_of_a_commit_is_compared_with_the_present_one(hpcenv: Any, project: Path) -> None:
    git(project, "init", "-q")
    git(project, "add", "lockfiles")
    git(project, "commit", "-qm", "locked")
    git(project, "tag", "paper")
    edited(project, "default", "torch", "version", value="2.12.0+cpu")
    for left in ("HEAD:default", "paper:lockfiles/default.lock.toml"):
        done = hpcenv("diff", left, "default", cwd=project)
        assert done.status == Status.DIFFERENT, done.stderr
        assert "!! torch.version: 2.13.0+cpu -> 2.12.0+cpu\n" in done.stdout
    assert hpcenv("diff", "HEAD:default", "paper:default", cwd=project).status == 0


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("HEAD~5:default", "HEAD~5"),
        ("HEAD:other", "other.lock.toml"),
        ("--output=x:default", "--output=x"),
        ("HEAD:../../outside.lock.toml", "outside"),
    ],
)
def test_a_commit_without_the_lockfile_is_refused(hpcenv: Any, project: Path, word: str, why: str) -> None:
    git(project, "init", "-q")
    git(project, "add", "lockfiles")
    git(project, "commit", "-qm", "locked")
    done = hpcenv("diff", "--", word, "default", cwd=project)
    assert done.status == 2
    assert why in done.stderr
    assert not (project / "x").exists()


def test_a_lockfile_of_a_commit_needs_a_repository(hpcenv: Any, project: Path) -> None:
    done = hpcenv("diff", "HEAD:default", "default", cwd=project)
    assert done.status == 2
    assert "not a git repository" in done.stderr


def test_a_lockfile_and_itself_are_the_same(hpcenv: Any, project: Path) -> None:
    done = hpcenv("diff", "default", "lockfiles/default.lock.toml", cwd=project)
    assert (done.status, done.stdout) == (0, "default and lockfiles/default.lock.toml are the same\n")


def test_what_must_match_ends_with_its_own_status(hpcenv: Any, project: Path) -> None:
    edited(project, "paper", "torch", "version", value="2.12.0+cpu")
    done = hpcenv("diff", "paper", "default", cwd=project)
    assert done.status == Status.DIFFERENT
    assert done.stdout.startswith("other torch:\n!! torch.version: 2.12.0+cpu -> 2.13.0+cpu\n     why: kernels")
    assert done.stdout.endswith("\n\n1 difference, 1 that must match\n")
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_what_is_only_told_ends_with_0(hpcenv: Any, project: Path) -> None:
    edited(project, "paper", "system", "glibc", value="2.99")
    done = hpcenv("diff", "default", "paper", cwd=project)
    assert done.status == 0
    assert "   system.glibc: " in done.stdout
    assert "1 difference, 0 that must match" in done.stdout


def test_a_long_value_is_cut_on_a_screen_and_whole_as_json(hpcenv: Any, project: Path) -> None:
    long = ", ".join(f"GPU-{number:08}" for number in range(100))
    edited(project, "paper", "system", "glibc", value=long)
    done = hpcenv("diff", "default", "paper", cwd=project)
    (line,) = (line for line in done.stdout.splitlines() if "system.glibc" in line)
    assert line.endswith("...")
    assert len(line) < 240
    assert long in hpcenv("diff", "default", "paper", "--json", cwd=project).stdout


def test_the_profile_may_turn_what_is_told_into_what_blocks(hpcenv: Any, project: Path) -> None:
    edited(project, "paper", "system", "packages-digest", value="sha256:00")
    assert hpcenv("diff", "default", "paper", cwd=project).status == 0
    done = hpcenv("diff", "default", "paper", "--determinism", "bitwise", cwd=project)
    assert done.status == Status.DIFFERENT
    assert "!! system.packages-digest: " in done.stdout


def test_as_json(hpcenv: Any, project: Path) -> None:
    edited(project, "paper", "torch", "version", value="2.12.0+cpu")
    done = hpcenv("diff", "default", "paper", "--json", cwd=project)
    assert done.status == Status.DIFFERENT
    assert (done.envelope["ok"], done.envelope["error"]) == (False, None)
    (change,) = done.envelope["data"]["changes"]
    assert set(change) == {"field", "left", "right", "repair", "severity", "what", "why", "remedy"}
    assert (change["field"], change["severity"], change["repair"]) == ("torch.version", "must", "torch")
    same = hpcenv("diff", "default", "default", "--json", cwd=project)
    assert (same.status, same.envelope["ok"], same.envelope["data"]["changes"]) == (0, True, [])


def test_lockfiles_of_other_folders(project: Path, tmp_path: Path) -> None:
    edited(project, "paper", "policy", "torch.version", value="info")
    there = shutil.copy(project / "lockfiles" / "paper.lock.toml", tmp_path / "theirs.toml")
    found = diff(str(project / "lockfiles" / "default.lock.toml"), "theirs.toml", project=tmp_path)
    assert [(c.field, c.left, c.right) for c in found.changes] == [("policy", "absent", "torch.version = info")]
    assert Path(there).exists()


# -- runs ---------------------------------------------------------------------------------


def test_two_runs_differ_in_command_and_settings(two_runs: Path) -> None:
    found = diff("one", "two", project=two_runs)
    assert [c.field for c in found.changes if c.severity != "info"] == ["run.arguments", "env.NCCL_ALGO"]
    assert {c.field: (c.left, c.right) for c in found.changes}["run.arguments"] == ("", "--lr, 3e-4")
    assert [c.field for c in found.blocking] == ["run.arguments"]
    assert "data that the script reads" in found.not_compared
    strict = diff("one", "two", project=two_runs, determinism="bitwise")
    assert {c.field for c in strict.blocking} == {"env.NCCL_ALGO", "run.arguments"}


def test_another_script_blocks(project: Path, hpcenv: Any) -> None:
    run(hpcenv, project, "one")
    (project / "train.py").write_text("print('other')\n")
    run(hpcenv, project, "three")
    found = diff("one", "three", project=project)
    assert [c.field for c in found.blocking] == ["code.digest", "code.files", "code.script-sha256"]
    files = found.blocking[1]
    assert files.left.startswith("train.py ")
    assert files.right.startswith("train.py ")
    assert files.left != files.right


def test_another_script_of_the_same_content_and_another_world_size_block(project: Path, hpcenv: Any) -> None:
    run(hpcenv, project, "one")
    script = project / "train.py"
    shutil.copy(script, project / "other.py")
    words = ("--nproc", "2", "--name", "wide", "--wait")
    assert hpcenv("submit", "other.py", *words, cwd=project).status == 0
    found = diff("one", "wide", project=project)
    assert [(c.field, c.left, c.right) for c in found.blocking if c.field != "code.digest"] == [
        ("code.files", "other.py absent", f"other.py {hashlib.sha256(script.read_bytes()).hexdigest()[:12]}"),
        ("run.nproc-per-node", "1", "2"),
        ("run.script", "train.py", "other.py"),
    ]
    done = hpcenv("diff", "one", "wide", cwd=project)
    assert done.status == Status.DIFFERENT
    assert "4 that must match\nnot compared: " in done.stdout


def test_a_run_without_a_result_is_told_also_beside_another_one(two_runs: Path, hpcenv: Any) -> None:
    verdict = two_runs / "runs" / "one" / "verdict.json"
    verdict.write_text(verdict.read_text().replace('"result": "match"', '"result": "mismatch"'))
    shutil.copytree(two_runs / "runs" / "one", two_runs / "runs" / "again")
    found = {c.field: (c.left, c.right) for c in diff("one", "two", project=two_runs).blocking}
    assert found["run.outcome"] == ("never trained: the verdict is mismatch", "completed")
    done = hpcenv("diff", "one", "again", cwd=two_runs)
    assert done.status == Status.DIFFERENT
    assert (
        "!! run.outcome: never trained: the verdict is mismatch -> never trained: the verdict is mismatch"
        in done.stdout
    )


def test_runs_that_failed_are_told(two_runs: Path) -> None:
    finished = two_runs / "runs" / "two" / "finished.json"
    finished.write_text(json.dumps({**json.loads(finished.read_text()), "status": 7}))
    found = {c.field: (c.left, c.right) for c in diff("one", "two", project=two_runs).blocking}
    assert found["run.outcome"] == ("completed", "ended with status 7")
    finished.unlink()
    assert "has not ended" in [c.right for c in diff("one", "two", project=two_runs).blocking]


def test_a_lock_and_its_own_run_are_the_same(two_runs: Path, hpcenv: Any) -> None:
    """What only a run has is no difference of the environment."""
    found = diff("default", "two", project=two_runs)
    assert (found.changes, len(found.not_compared)) == ((), 1)
    assert hpcenv("diff", "two", "default", cwd=two_runs).status == 0


def test_a_run_of_another_lock_differs_from_this_one(two_runs: Path) -> None:
    edited(two_runs, "paper", "torch", "git-version", value="0" * 40)
    assert [c.field for c in diff("one", "paper", project=two_runs).blocking] == ["torch.git-version"]


# -- words --------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["nosuch", "", "/no/such/file", "a\nb", "lockfiles"])
def test_a_word_that_is_neither_lock_nor_run(word: str, project: Path) -> None:
    with pytest.raises(UsageError, match="is neither a lockfile nor a run"):
        diff("default", word, project=project)


def test_a_damaged_lockfile_says_so(hpcenv: Any, project: Path) -> None:
    (project / "lockfiles" / "broken.lock.toml").write_text("schema = 1\n[")
    done = hpcenv("diff", "default", "broken", cwd=project)
    assert done.status == 5
    assert "error[lockfile-invalid]" in done.stderr
