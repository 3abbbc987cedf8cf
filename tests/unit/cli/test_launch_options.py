"""Options of the launch on the command line: in the manifest as asked, or refused before anything is queued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def project(project: Path) -> Path:
    """The tiny project; tests run in /tmp, which hpcenv knows not to be shared."""
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write("[submit]\nassume-shared = true\n")
    return project


def set_setup(project: Path, line: str) -> None:
    spec = project / "hpcenv.toml"
    spec.write_text(spec.read_text().replace("[submit]\n", f'[submit]\nsetup = ["{line}"]\n'))


SUBMIT = ("submit", "train.py", "--cluster", "local", "--nproc", "1", "--name", "a")


def test_they_are_in_the_manifest_as_asked(hpcenv: Any, project: Path) -> None:
    (project / "train.py").write_text("")
    words = (
        *("--torchrun-args", "--max-restarts=2", "--torchrun-args", "--monitor-interval=1", "--torchrun-args"),
        *("--role=a b", "--pass-env", "HF_*", "--pass-env", "HF_*", "--secret", "TOKEN=file:~/token"),
    )
    (project / "token").write_text("x")  # HOME is this folder
    done = hpcenv(*SUBMIT, *words, "--dry-run", "--json", cwd=project)
    assert done.status == 0, done.stderr
    manifest = json.loads(done.stdout)["data"]["manifest"]
    assert manifest["launch"] == {
        "cpu_binding": "near-gpu",
        "launcher": "torchrun", "expand": False,
        "torchrun_args": ["--max-restarts=2", "--monitor-interval=1", "--role=a b"],
    }  # fmt: skip
    assert manifest["pass_env"] == ["HF_*"]
    assert manifest["secrets"] == [{"name": "TOKEN", "source": "file:~/token", "origin": "--secret", "kept": False}]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--torchrun-args", "--nnodes=4"), "`--torchrun-args --nnodes=4` cannot be passed on"),
        (("--torchrun-args", "other.py"), "`--torchrun-args other.py` cannot be passed on"),
        (("--pass-env", "A=1"), "`A=1` is not the name of a variable"),
        (("--secret", "TOKEN=file:token"), "the secret TOKEN is in `token`, which is not an absolute path"),
        (("--torchrun-args", "--standalone"), "`--torchrun-args --standalone` cannot be passed on"),
    ],
)
def test_what_would_break_the_launch_is_refused_with_status_2(
    hpcenv: Any, project: Path, words: tuple[str, ...], what: str
) -> None:
    (project / "train.py").write_text("")
    done = hpcenv(*SUBMIT, *words, "--dry-run", cwd=project)
    assert (done.status, done.stderr.splitlines()[0]) == (2, f"error[usage]: {what}")


@pytest.mark.parametrize(
    ("source", "status", "why"),
    [
        ("env:NOTSET", 2, "NOTSET is not set here"),
        ("file:~/nonexist", 19, "No such file or directory"),
        ("file:/", 19, "it is not a plain file"),
    ],
)
def test_a_secret_that_no_node_could_read_is_refused_here(
    hpcenv: Any, project: Path, source: str, status: int, why: str
) -> None:
    done = hpcenv(*SUBMIT, "--secret", f"FOO={source}", cwd=project)
    assert done.status == status, done.stderr
    assert f"the secret FOO cannot be read from `{source}`" in done.stderr
    assert why in done.stderr
    assert not (project / "runs" / "a").exists()


def test_a_secret_that_the_job_may_get_otherwise_is_a_note(hpcenv: Any, project: Path, fake_slurm: Any) -> None:
    environ = {**fake_slurm.environ, "HOME": str(project), "HERE": "x"}
    words = ("submit", "train.py", "--nproc", "1", "--name", "a", "--dry-run")
    known = hpcenv(
        *words, "--secret", "A=env:HERE", "--secret", "B=env:SLURM_JOB_ID", "--secret", "C=file:/tmp/hpcenv-none",
        cwd=project, environ=environ,
    )  # fmt: skip
    assert known.status == 0, known.stderr
    assert "not known whether nodes can read the secret C" in known.stderr
    assert hpcenv(*words, "--secret", "A=env:NOTSET", cwd=project, environ=environ).status == 2
    set_setup(project, "export NOTSET=1")
    noted = hpcenv(*words, "--secret", "A=env:NOTSET", cwd=project, environ=environ)
    assert noted.status == 0, noted.stderr
    assert "the secret A needs NOTSET, which is not set here" in noted.stderr


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (("--name", "34"), 2, "why: `34` means a job id"),
        (("--name", "34_1"), 2, "why: `34_1` means a job id"),
        (("--time", "3Q"), 2, "hint: hpcenv submit --help"),
        (("--torchrun-args", "--bogus=1"), 2, "why: torchrun of torch 2.13.0+cpu has no such option"),
    ],
)
def test_what_cannot_be_is_told_before_the_queue(
    hpcenv: Any, project: Path, fake_slurm: Any, words: tuple[str, ...], status: int, line: str
) -> None:
    environ = {**fake_slurm.environ, "HOME": str(project)}
    run = () if "--name" in words else ("--name", "a")
    done = hpcenv("submit", "train.py", "--nproc", "1", *run, *words, cwd=project, environ=environ)
    assert done.status == status, done.stderr
    assert line in [text.strip() for text in done.stderr.splitlines()]
    assert fake_slurm.calls("sbatch") == []


def test_lines_of_setup_are_in_the_script_and_in_the_manifest_and_need_slurm(
    hpcenv: Any, project: Path, fake_slurm: Any
) -> None:
    set_setup(project, "ulimit -l unlimited")
    words = ("submit", "train.py", "--nproc", "1", "--name", "a")
    done = hpcenv(*words, "--dry-run", "--json", cwd=project, environ=fake_slurm.environ)
    assert done.status == 0, done.stderr
    data = json.loads(done.stdout)["data"]
    assert data["manifest"]["setup"] == ["ulimit -l unlimited"]
    (asked,) = (line for line in data["acceptance"]["asks"] if "setup" in line)
    assert asked.startswith("[submit] setup = ulimit -l unlimited: it runs in the shell of the batch script")
    refused = hpcenv(*words, "--cluster", "local", cwd=project, environ=fake_slurm.environ)
    assert refused.status == 2
    assert refused.stderr.startswith("error[usage]: `setup` needs Slurm\n")
