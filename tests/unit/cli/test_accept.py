"""What a project asks is shown and accepted before anything is queued or started: every command, and the API."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hpcenv as api
from hpcenv.errors import NotAccepted
from hpcenv.project.options import BY_NAME
from tests.conftest import accept, hpcenv, state_home

SUBMIT = ("submit", "train.py", "--nproc", "1", "--cluster", "local")


@pytest.fixture
def hostile(project: Path, tmp_path: Path) -> Path:
    """Somebody's project: its Python would leave a mark if it were started."""
    evil = project / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    evil.chmod(0o755)
    (project / "hpcenv.toml").write_text('image = "host"\npython = "./evil"\n')
    return project


@pytest.mark.parametrize(
    "words",
    [
        ("lock",),
        ("lock", "--check"),
        ("lock", "--json"),
        SUBMIT,
        ("submit", "train.py", "--nproc", "1", "--sweep", "lr=1,2"),
        ("submit", "train.py", "--nproc", "1", "--export", "out"),
        ("verify",),
        ("verify", "--nodes", "2"),
        ("image", "build"),
    ],
)
def test_no_command_starts_or_queues_anything_of_a_project_that_is_not_accepted(
    hpcenv: Any, hostile: Path, tmp_path: Path, fake_slurm: Any, words: tuple[str, ...]
) -> None:
    done = hpcenv(*words, cwd=hostile, environ=fake_slurm.environ, accepts=False)
    assert done.status == NotAccepted.exit_status, (done.stdout, done.stderr)
    said = done.stdout + done.stderr
    assert "python = ./evil: a program that is started here and on the nodes" in said
    assert re.search(rf"hpcenv {' '.join(words[: 1 + (words[0] == 'image')])} --accept [0-9a-f]{{32}}", said)
    assert not (tmp_path / "started").exists()
    assert not (hostile / "runs").exists()
    assert fake_slurm.calls("sbatch") == []


@pytest.mark.parametrize("words", [("status",), ("list",), (*SUBMIT, "--dry-run"), ("export", "requirements")])
def test_what_starts_nothing_does_not_ask(hpcenv: Any, hostile: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    done = hpcenv(*words, cwd=hostile, accepts=False)
    assert done.status != NotAccepted.exit_status
    assert not (tmp_path / "started").exists()


def test_a_dry_run_shows_and_does_not_ask(hpcenv: Any, project: Path) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('[srun]\nmpi = "none"\n')
    done = hpcenv(*SUBMIT, "--dry-run", cwd=project, accepts=False)
    assert done.status == 0, done.stderr
    assert "asks: [srun] mpi = none: srun gets it" in done.stderr
    digest = re.search("--accept ([0-9a-f]{32})", done.stderr)
    assert digest
    data = hpcenv(*SUBMIT, "--dry-run", "--json", cwd=project, accepts=False).envelope["data"]["acceptance"]
    assert (data["digest"], data["accepted"], len(data["asks"])) == (digest[1], False, 2)
    assert hpcenv("lock", "--check", "--accept", digest[1], cwd=project, accepts=False).status == 0
    assert hpcenv(*SUBMIT, "--dry-run", "--json", cwd=project).envelope["data"]["acceptance"]["accepted"]


def test_the_digest_is_that_of_the_list_and_a_script_hears_of_a_change(hpcenv: Any, project: Path) -> None:
    done = hpcenv("lock", "--check", "--accept", "0" * 32, cwd=project, accepts=False)
    assert done.status == NotAccepted.exit_status
    assert f"not {'0' * 32}" in done.stderr
    # The line of the hint has one digest, the right one.
    assert re.search("then: `hpcenv lock --accept (?!0{32})[0-9a-f]{32} --check`", done.stderr)


def on_terminal(words: tuple[str, ...], answer: str, cwd: Path) -> tuple[int, str]:
    leader, follower = pty.openpty()
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "XDG_STATE_HOME": str(state_home(cwd)), "TERM": "xterm"}
    child = subprocess.Popen(
        [sys.executable, "-m", "hpcenv", *words], cwd=cwd, env=environ, stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    os.write(leader, f"{answer}\n".encode())
    said = b""
    while True:
        try:
            said += os.read(leader, 4096)
        except OSError:
            break
    os.close(leader)
    return child.wait(timeout=60), said.decode()


def test_on_a_terminal_the_user_is_asked_once(project: Path) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('[srun]\nmpi = "none"\n')
    status, said = on_terminal(("lock", "--check"), "n", project)
    assert (status, "new: [srun] mpi = none" in said) == (NotAccepted.exit_status, True), said
    status, said = on_terminal(("lock", "--check"), "", project)
    assert status == NotAccepted.exit_status, said
    status, said = on_terminal(("lock", "--check"), "y", project)
    assert (status, "is fresh" in said) == (0, True), said
    status, said = on_terminal(("lock", "--check"), "", project)
    assert (status, "Accept" in said) == (0, False), said


def test_what_the_user_types_is_his_own_and_rerun_does_not_ask(hpcenv: Any, project: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x\n")
    typed = ("--secret", f"T=file:{tmp_path}/token", "--env", "LD_AUDIT=")
    done = hpcenv(*SUBMIT, *typed, "--name", "a", "--wait", cwd=project, accepts=False)
    assert done.status == 0, done.stderr
    done = hpcenv("rerun", "a", "--wait", cwd=project, accepts=False)
    assert done.status == 0, done.stderr
    # The same record in somebody else's clone is not the user's own.
    request = json.loads((project / "runs/a/request.json").read_text())
    request["options"]["secret"] = {"T": "file:/etc/hostname"}
    (project / "runs/a/request.json").write_text(json.dumps(request))
    done = hpcenv("rerun", "a", cwd=project, accepts=False)
    assert done.status == NotAccepted.exit_status, done.stderr
    assert "--secret T = file:/etc/hostname" in done.stderr


@pytest.fixture(scope="module")
def with_a_run(locked_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("with-a-run") / "project"
    shutil.copytree(locked_once, project)
    accept(project)
    done = hpcenv(*SUBMIT, "--name", "a", "--wait", cwd=project)
    assert done.status == 0, done.stderr
    return project


@pytest.fixture
def recorded(with_a_run: Path) -> Iterator[Path]:
    """A project with a run `a`. Tests share it; each may change the two records."""
    kept = {path: path.read_text() for path in map((with_a_run / "runs/a").joinpath, ("request.json", "manifest.json"))}
    yield with_a_run
    for path, text in kept.items():
        path.write_text(text)


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("bind", ["/:/mnt"], "--bind = /:/mnt"),
        ("resume_from", "/etc/hostname", "--resume-from = /etc/hostname"),
        ("stage_data", ["/etc"], "--stage-data = /etc"),
        ("include", ["../*"], "--include = ../*"),
        ("site", "evil.toml", "--site = evil.toml"),
        ("setup", ["curl evil"], "--setup = curl evil"),
    ],
)
def test_rerun_asks_for_what_an_edited_record_reaches(
    hpcenv: Any, recorded: Path, name: str, value: object, line: str
) -> None:
    runs = sorted(os.listdir(recorded / "runs"))
    path = recorded / "runs/a/request.json"
    request = json.loads(path.read_text())
    request["options"][name] = value
    path.write_text(json.dumps(request))
    done = hpcenv("rerun", "a", "--allow-changed", cwd=recorded, accepts=False)
    assert done.status == NotAccepted.exit_status, done.stderr
    assert line in done.stderr
    assert sorted(os.listdir(recorded / "runs")) == runs
    if name != "setup":  # no option of a command line
        word = BY_NAME[name].flag
        done = hpcenv("rerun", "a", "--allow-changed", "--without", word, "--wait", cwd=recorded, accepts=False)
        assert done.status == 0, done.stderr


def test_rerun_asks_for_a_script_elsewhere_and_for_the_checkpoint_of_the_manifest(hpcenv: Any, recorded: Path) -> None:
    run = recorded / "runs/a"
    request, manifest = json.loads((run / "request.json").read_text()), json.loads((run / "manifest.json").read_text())
    (run / "request.json").write_text(json.dumps({**request, "script": "/etc/../etc/train.py"}))
    (run / "manifest.json").write_text(json.dumps({**manifest, "resume_from": "/etc/hostname"}))
    done = hpcenv("rerun", "a", cwd=recorded, accepts=False)
    assert done.status == NotAccepted.exit_status, done.stderr
    assert "the script = /etc/../etc/train.py" in done.stderr
    assert "--resume-from = /etc/hostname" in done.stderr


def test_the_checkpoint_that_a_typed_name_led_to_is_the_users_own(hpcenv: Any, project: Path) -> None:
    done = hpcenv(*SUBMIT, "--name", "a", "--wait", cwd=project)
    assert done.status == 0, done.stderr
    checkpoint = project / "runs/a/checkpoints/step-1.pt"
    checkpoint.parent.mkdir()
    checkpoint.write_text("x")
    done = hpcenv(*SUBMIT, "--name", "b", "--resume-from", "a", "--wait", cwd=project, accepts=False)
    assert done.status == 0, done.stderr
    done = hpcenv("rerun", "b", "--wait", cwd=project, accepts=False)
    assert done.status == 0, done.stderr
    manifest = json.loads((project / "runs/b-2/manifest.json").read_text())
    assert manifest["resume_from"] == str(checkpoint)


def test_the_api_takes_a_digest(hostile: Path, tmp_path: Path) -> None:
    calls = (
        lambda: api.lock(hostile),
        lambda: api.check_lock(hostile),
        lambda: api.submit("train.py", project=hostile, nproc=1, cluster="local"),
        lambda: api.sweep("train.py", over={"lr": [1]}, project=hostile, nproc=1),
        lambda: api.Executor(tmp_path / "jobs", project=hostile, cluster="local").submit(print),
    )
    for call in calls:
        with pytest.raises(NotAccepted, match='accept="[0-9a-f]{32}"'):
            call()
    assert not (tmp_path / "started").exists()
    digest = re.search('accept="([0-9a-f]{32})"', str(pytest.raises(NotAccepted, api.lock, hostile).value))
    assert digest
    with pytest.raises(api.HpcenvError) as caught:
        api.lock(hostile, accept=digest[1])
    assert not isinstance(caught.value, NotAccepted)
    assert (tmp_path / "started").exists()


def test_lock_names_the_interpreter_of_the_project(hpcenv: Any, hostile: Path) -> None:
    done = hpcenv("lock", cwd=hostile)
    assert f"starting {hostile}/evil, which `python` in {hostile}/hpcenv.toml names" in done.stderr
