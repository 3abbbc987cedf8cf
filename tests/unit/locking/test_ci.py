"""docs/how-to/ci.md and .pre-commit-hooks.yaml: their commands run in a fresh clone, as continuous integration has it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from exports_world import IMAGE, name_image

ROOT = Path(__file__).resolve().parents[3]


def git(folder: Path, *words: str) -> None:
    argv = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", *words]
    subprocess.run(argv, cwd=folder, check=True, capture_output=True)


@pytest.fixture
def clone(project: Path, tmp_path: Path) -> Path:
    """A clone of the project. The Python of its environment is not there."""
    spec = project / "hpcenv.toml"
    spec.write_text(spec.read_text().replace("/bin/python", "/nowhere/python"))
    for words in (("init", "-q"), ("add", "hpcenv.toml", "lockfiles"), ("commit", "-qm", "locked")):
        git(project, *words)
    git(tmp_path, "clone", "-q", str(project), "clone")
    return tmp_path / "clone"


def steps() -> list[str]:
    page = (ROOT / "docs/how-to/ci.md").read_text(encoding="utf-8")
    found = re.findall(r"^ +- run: (hpcenv .*)$", page, re.MULTILINE)
    assert len(found) == 2
    return found


def run_step(step: str, hpcenv: Any, clone: Path) -> tuple[int, str]:
    """Run a step of the workflow as its shell would; return status and output."""
    command, _, accepted = step.partition(" || test $? -eq ")
    done = hpcenv(*shlex.split(command)[1:], cwd=clone, accepts=False)
    return (0 if accepted and done.status == int(accepted) else done.status), done.stdout + done.stderr


def test_the_workflow_passes_on_a_fresh_clone(hpcenv: Any, clone: Path) -> None:
    for step in steps():
        status, output = run_step(step, hpcenv, clone)
        assert status == 0, output


def test_the_workflow_shows_what_a_change_does_and_refuses_a_stale_lockfile(hpcenv: Any, clone: Path) -> None:
    check, review = steps()
    spec = clone / "hpcenv.toml"
    spec.write_text(spec.read_text() + '[host]\ngpu = "h100"\n')
    assert run_step(check, hpcenv, clone)[0] == 7
    lockfile = clone / "lockfiles" / "default.lock.toml"
    lockfile.write_text(lockfile.read_text().replace("2.13.0+cpu", "2.12.0+cpu"))
    status, output = run_step(review, hpcenv, clone)
    assert status == 0
    assert "!! torch.version: 2.13.0+cpu -> 2.12.0+cpu" in output


def test_the_reference_of_the_image_is_what_docker_pulls(hpcenv: Any, project: Path) -> None:
    """The page's `docker pull $(...)`: one word on standard output, and no SIF is needed."""
    refused = hpcenv("image", "inspect", "--reference", cwd=project)
    assert refused.status == 2
    assert "locks a host environment" in refused.stderr
    name_image(project)
    assert hpcenv("image", "inspect", "--reference", cwd=project).stdout == f"{IMAGE}\n"
    done = hpcenv("image", "inspect", "--reference", "--json", cwd=project)
    assert done.envelope["data"] == {"reference": IMAGE}
    assert hpcenv("image", "inspect", "x.sif", "--reference", cwd=project).status == 2


def test_the_hook_runs_in_a_fresh_clone(hpcenv: Any, clone: Path) -> None:
    hooks = (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    [entry] = re.findall(r"^  entry: hpcenv (.*)$", hooks, re.MULTILINE)
    [files] = re.findall(r"^  files: '(.*)'$", hooks, re.MULTILINE)
    assert all(re.search(files, name) for name in ("hpcenv.toml", "paper/hpcenv.toml", "lockfiles/default.lock.toml"))
    assert not re.search(files, "train.py")
    assert hpcenv(*shlex.split(entry), cwd=clone, accepts=False).status == 0


def test_all_environments_are_checked_and_each_is_named(hpcenv: Any, clone: Path) -> None:
    check = shlex.split(steps()[0])[1:]
    assert "--all" in check
    spec = clone / "hpcenv.toml"
    spec.write_text(f'{spec.read_text()}\n[environment.data]\n[environment.paper]\nimage = "docker://a.example/b:1"\n')
    lockfiles = clone / "lockfiles"
    for name in ("data", "paper"):
        (lockfiles / f"{name}.lock.toml").write_bytes((lockfiles / "default.lock.toml").read_bytes())
    done = hpcenv(*check, cwd=clone, accepts=False)
    assert done.status == 7
    assert "lockfiles/data.lock.toml is fresh" in done.stdout
    assert "`lockfiles/paper.lock.toml` is stale" in done.stderr
    assert "docker://a.example/b:1" in done.stderr
    (lockfiles / "data.lock.toml").unlink()
    done = hpcenv(*check, "--json", cwd=clone, accepts=False)
    found = json.loads(done.stdout)
    assert [(one["name"], one["problem"] is None) for one in found["data"]["lockfiles"]] == [
        ("default", True),
        ("data", False),
        ("paper", False),
    ]
    assert "2 of 3 lockfiles are not right" in found["error"]["what"]
    assert done.status == found["error"]["exit_status"]
    assert hpcenv("lock", "--all", cwd=clone, accepts=False).status == 2


def test_a_conflict_of_a_merge_is_named_and_the_hint_works(hpcenv: Any, clone: Path) -> None:
    lockfile = clone / "lockfiles" / "default.lock.toml"
    text = lockfile.read_text()
    for branch, version in (("one", "1"), ("two", "2")):
        git(clone, "checkout", "-qb", branch, "origin/main")
        lockfile.write_text(text.replace("generated-by =", f'x = "{version}"\ngenerated-by =', 1))
        git(clone, "commit", "-qam", branch)
    with pytest.raises(subprocess.CalledProcessError):
        git(clone, "merge", "one")
    done = hpcenv("lock", "--check", "--spec-only", cwd=clone, accepts=False)
    assert done.status == 5
    assert "a merge left a conflict here" in done.stderr
    assert "hpcenv lock" in done.stderr
    assert "git checkout" not in done.stderr
