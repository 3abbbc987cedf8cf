"""The value of an `env:NAME` secret waits in a file of the user, and is in no other place."""

from __future__ import annotations

import hashlib
import json
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from hpcenv.errors import RunFolderNotShared
from hpcenv.project.context import Context
from hpcenv.records import secret_file
from hpcenv.records.manifest import Secret
from hpcenv.submission import kept_secrets
from tests.conftest import state_home

VALUE = "tik-tok-4711"
# The script does not have the value itself.
PRINTS = "import os, hashlib\nprint('GOT', hashlib.sha256(os.environ['TOKEN'].encode()).hexdigest(), flush=True)\n"
GOT = f"GOT {hashlib.sha256(VALUE.encode()).hexdigest()}"
LOCAL = ("submit", "train.py", "--nproc", "1", "--cluster", "local", "--name", "a", "--secret", "TOKEN=env:MINE")


def kept(project: Path) -> list[Path]:
    return sorted((state_home(project) / "hpcenv" / "secrets").glob("*"))


def places_of(text: str, folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [path for path in files if text.encode() in path.read_bytes()]


def user(project: Path) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "HOME": str(project), "MINE": VALUE}


def test_the_ranks_get_it_and_nothing_is_left(hpcenv: Any, project: Path) -> None:
    (project / "train.py").write_text(PRINTS)
    done = hpcenv(*LOCAL, "--wait", cwd=project, environ=user(project))
    assert done.status == 0, done.stderr
    assert GOT in (project / "runs/a/job.log").read_text()
    assert places_of(VALUE, project / "runs") == []
    assert kept(project) == []


def test_it_is_gone_after_a_failure(hpcenv: Any, project: Path) -> None:
    (project / "train.py").write_text("raise SystemExit(3)\n")
    assert hpcenv(*LOCAL, "--wait", cwd=project, environ=user(project)).status != 0
    assert kept(project) == []


def in_slurm(project: Path, fake_slurm: Any) -> dict[str, str]:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write("[submit]\nassume-shared = true\n")
    fake_slurm.answers("sbatch", "Submitted batch job 34\n")
    return {**fake_slurm.environ, "HOME": str(project), "MINE": VALUE}


WORDS = ("submit", "train.py", "--nproc", "1", "--time", "5", "--name", "a", "--secret", "TOKEN=env:MINE")


def test_sbatch_never_sees_it(hpcenv: Any, project: Path, fake_slurm: Any) -> None:
    shell = {"WANDB_API_KEY": "k", "https_proxy": "http://me:pass@proxy:1"}
    environ = {**in_slurm(project, fake_slurm), **shell}
    done = hpcenv(*WORDS, cwd=project, environ=environ)
    assert done.status == 0, done.stderr
    (call,) = fake_slurm.calls("sbatch")
    assert not {"MINE", "WANDB_API_KEY"} & set(call.env) and call.env["https_proxy"] == "http://proxy:1"
    assert VALUE not in "".join((*call.env.values(), *call.argv, call.script))
    assert places_of(VALUE, project) == []
    (file,) = kept(project)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert secret_file.read(file) == {"MINE": VALUE}
    assert json.loads((project / "runs/a/manifest.json").read_text())["secret_values"] == str(file)


def test_a_refused_job_leaves_nothing(hpcenv: Any, project: Path, fake_slurm: Any) -> None:
    environ = in_slurm(project, fake_slurm)
    fake_slurm.answers("sbatch", err="sbatch: error: Invalid account\n", status=1)
    assert hpcenv(*WORDS, cwd=project, environ=environ).status == 15
    assert kept(project) == []
    assert hpcenv(*WORDS, "--array", "0-3", cwd=project, environ=environ).status == 15
    assert kept(project) == []


def test_the_next_command_that_sees_the_end_removes_it(hpcenv: Any, project: Path, fake_slurm: Any) -> None:
    environ = in_slurm(project, fake_slurm)
    assert hpcenv(*WORDS, "--array", "0-2", cwd=project, environ=environ).status == 0
    assert len(kept(project)) == 3
    fake_slurm.answers("squeue", "34_1|RUNNING|None|n1|0:01\n")
    fake_slurm.answers("sacct", "34_0|CANCELLED|0:0||0\n34_1|RUNNING|0:0|n1|1\n34_2|FAILED|1:0|n1|1\n")
    hpcenv("status", "a", cwd=project, environ=environ)
    (file,) = kept(project)
    assert json.loads(file.read_text())["run_folder"] == str(project / "runs/a/0001")


def test_a_run_folder_that_is_gone_leaves_no_value(hpcenv: Any, project: Path, fake_slurm: Any) -> None:
    environ = in_slurm(project, fake_slurm)
    secret_file.write(state_home(project) / "hpcenv", str(project / "runs" / "gone"), {"A": "b"})
    assert hpcenv(*WORDS, cwd=project, environ=environ).status == 0
    (file,) = kept(project)
    assert secret_file.read(file) == {"MINE": VALUE}


def test_nodes_that_cannot_see_the_folder_are_told_before_the_queue(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_STATE_HOME": "/dev/shm/nobody", "MINE": VALUE}
    context = Context(environ=environ, cwd=tmp_path, now=time.gmtime(0), token="", command=())
    secrets = kept_secrets.mark_kept([Secret(name="TOKEN", source="env:MINE", origin="--secret")], environ)
    with pytest.raises(RunFolderNotShared, match="TOKEN from env:MINE") as caught:
        kept_secrets.require_visible(secrets, context)
    assert "TOKEN=file:PATH" in str(caught.value)
    elsewhere = [Secret(name="TOKEN", source="file:/x", origin="--secret")]
    assert kept_secrets.require_visible(kept_secrets.mark_kept(elsewhere, environ), context) == []


@pytest.mark.parametrize("flag", ["WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD", "MY_SECRET"])
def test_a_typed_variable_that_looks_like_a_credential_is_a_secret(hpcenv: Any, project: Path, flag: str) -> None:
    (project / "train.py").write_text(PRINTS.replace("'TOKEN'", f"'{flag}'"))
    words = ("submit", "train.py", "--nproc", "1", "--cluster", "local", "--name", "a", "--env", f"{flag}={VALUE}")
    done = hpcenv(*words, "--wait", cwd=project)
    assert done.status == 0, done.stderr
    assert f"{flag}: treated as --secret NAME=env:NAME" in done.stderr
    assert GOT in (project / "runs/a/job.log").read_text()
    assert places_of(VALUE, project) == []
    assert kept(project) == []
    again = hpcenv("rerun", "a", cwd=project)
    assert again.status == 2
    assert f"{flag} is not set here, and hpcenv keeps no value after the end of a run" in again.stderr
    assert hpcenv("rerun", "a", "--wait", "--env", f"{flag}={VALUE}", cwd=project).status == 0


@pytest.mark.parametrize(
    ("damage", "why"),
    [(lambda path: path.unlink(), "No such file"), (lambda path: path.chmod(0o644), "other users could read")],
)
def test_a_file_that_is_gone_or_open_to_others_is_not_read(tmp_path: Path, damage: Any, why: str) -> None:
    secret_file.write(tmp_path, "/runs/a", {"A": "b"})
    path = secret_file.path_of(tmp_path, "/runs/a")
    assert secret_file.read(path) == {"A": "b"}
    damage(path)
    with pytest.raises(OSError, match=why):
        secret_file.read(path)
