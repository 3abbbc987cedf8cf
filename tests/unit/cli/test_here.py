"""`hpcenv` without a word: the help, and three lines about the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import run_folders as folders
import tomlkit

from hpcenv.project import lockfile as lock_model

SUBMIT = "hpcenv submit SCRIPT --nodes N --gpus 0 --nproc R"  # the torch of these tests has no CUDA


def _lines(done: Any) -> dict[str, str]:
    assert done.status == 0, done.stderr
    page, _, here = done.stdout.partition("\nThis folder:\n")
    assert page.startswith("Usage: hpcenv [OPTIONS] COMMAND [ARGS]...")
    assert [line[:14] for line in here.splitlines()] == ["  lockfile    ", "  latest run  ", "  next        "]
    return {line[2:12].strip(): line[14:] for line in here.splitlines()}


def test_a_folder_without_a_project(hpcenv: Any, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    environ = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    shown = _lines(hpcenv(cwd=tmp_path / "sub", environ=environ))
    assert shown["lockfile"].startswith("no `hpcenv.toml` in ")
    assert (shown["latest run"], shown["next"]) == ("none", "hpcenv init")


def test_an_hpcenv_toml_that_cannot_be_read(hpcenv: Any, tmp_path: Path) -> None:
    (tmp_path / "hpcenv.toml").write_text("image = 3\n")
    shown = _lines(hpcenv(cwd=tmp_path))
    assert "hpcenv.toml` is not valid: " in shown["lockfile"]
    assert shown["next"] == "edit hpcenv.toml"


def test_a_project_without_a_lockfile(hpcenv: Any, tmp_path: Path) -> None:
    (tmp_path / "hpcenv.toml").write_text('image = "host"\n')
    shown = _lines(hpcenv(cwd=tmp_path))
    assert shown["lockfile"].startswith("there is no lockfile `")
    assert shown["next"] == "hpcenv lock"


def test_a_locked_project_and_a_stale_one(hpcenv: Any, project: Path) -> None:
    assert _lines(hpcenv(cwd=project)) == {
        "lockfile": "lockfiles are as hpcenv.toml asks; the environment was not looked at: hpcenv lock --check",
        "latest run": "none", "next": SUBMIT,
    }  # fmt: skip
    with (project / "hpcenv.toml").open("a") as file:
        file.write('[env]\nA = "1"\n')
    shown = _lines(hpcenv(cwd=project))
    assert shown["lockfile"] == "`lockfiles/default.lock.toml` is stale: env-changed: locked no A, now A = 1"
    assert shown["next"] == "hpcenv lock"


@pytest.mark.parametrize(
    ("key", "value", "shape"),
    [("cuda", "12.8", "--gpus G"), ("version", "absent", "--gpus 0 --nproc R --launcher none")],
)
def test_what_to_type_is_what_submit_accepts(key: str, value: str, shape: str, hpcenv: Any, project: Path) -> None:
    path = project / "lockfiles" / "default.lock.toml"
    data = tomlkit.parse(path.read_text()).unwrap()
    data["torch"][key] = value
    data["fingerprint"] = lock_model.fingerprint(data)
    path.write_text(tomlkit.dumps(data))
    assert _lines(hpcenv(cwd=project))["next"] == f"hpcenv submit SCRIPT --nodes N {shape}"


@pytest.mark.parametrize(
    ("squeue", "sacct", "status", "shown", "hint"),
    [
        ("7|RUNNING|None|n1|1:02", "", None, "a: running", "hpcenv logs -f a"),
        ("7|PENDING|Priority||0:00", "", None, "a: pending (Priority: jobs with a higher priority go first)", "hpcenv logs -f a"),
        ("", "7|COMPLETED|0:0|n1|00:00:09", 0, "a: completed, exit status 0", SUBMIT),
        ("", "7|FAILED|7:0|n1|00:00:09", 7, "a: failed, exit status 7", "hpcenv report a"),
        ("", "7|CANCELLED by 0|0:0|None assigned|00:00:00", None, "a: cancelled (", "hpcenv report a"),
    ],
)  # fmt: skip
def test_the_latest_run_and_what_to_type_about_it(
    squeue: str, sacct: str, status: int | None, shown: str, hint: str, hpcenv: Any, project: Path, fake_slurm: Any
) -> None:
    run = folders.make_run(project / "runs", "a", "7")
    if status is not None:
        folders.start(run, ["n1"], nproc=1)
        folders.write(run.finished, status=status, time=9.0)
    fake_slurm.answers("squeue", f"{squeue}\n")
    fake_slurm.answers("sacct", f"{sacct}\n")
    here = _lines(hpcenv(cwd=project, environ=fake_slurm.environ))
    assert here["latest run"].startswith(shown)
    assert here["next"] == hint
