"""`hpcenv session`: what is refused, what is submitted, and what connects."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.records.files import load_record, save_record
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.session import SessionFolder, SessionNode, SessionOptions, SessionService
from hpcenv.records.submission import Submission
from hpcenv.runs.entries import open_run
from hpcenv.runs.session import plan_connect, wait_until_open
from hpcenv.submission.session import prepare_folder

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl me@laptop\n"


@pytest.fixture
def slurm(fake_slurm: Any, tmp_path: Path) -> Any:
    fake_slurm.answers("sbatch", "Submitted batch job 71\n")
    fake_slurm.environ["HOME"] = str(tmp_path)
    (tmp_path / "key.pub").write_text(KEY)
    return fake_slurm


@pytest.fixture
def shared_project(project: Path) -> Path:
    """Tests run in /tmp, which hpcenv knows not to be shared."""
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write("[submit]\nassume-shared = true\n")
    return project


def start(hpcenv: Any, slurm: Any, project: Path, *words: str) -> Any:
    key = str(project.parent / "key.pub")
    return hpcenv("session", "start", "lab", "--no-wait", "--key", key, *words, cwd=project, environ=slurm.environ)


def manifest_of(project: Path) -> Any:
    (run,) = (path for path in (project / "runs").iterdir() if path.name.startswith("lab-"))
    return json.loads((run / "manifest.json").read_text())


def test_a_session_is_a_run_with_a_lasting_private_folder(hpcenv: Any, slurm: Any, shared_project: Path) -> None:
    done = start(hpcenv, slurm, shared_project, "--time", "2:00:00")
    assert done.status == 0, done.stderr
    manifest = manifest_of(shared_project)
    folder = Path(manifest["session"]["folder"])
    assert (manifest["session"]["name"], manifest["workdir"]) == ("lab", str(shared_project))
    assert manifest["stop"]["grace"] == 0, "the signal would end each shell"
    assert folder == shared_project / "runs" / f".sessions-{os.getuid()}" / "lab"
    for path in (folder, folder.parent, folder / "home"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for name in ("host_key", "authorized_keys"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert (folder / "authorized_keys").read_text() == KEY
    script = slurm.calls("sbatch")[0].script
    assert "#SBATCH --no-requeue" in script
    assert "#SBATCH --signal" not in script
    slurm.answers("squeue", "71|PENDING|Resources|(null)|0:00\n")
    again = start(hpcenv, slurm, shared_project)
    assert (again.status, "the session `lab` has not ended" in again.stderr) == (17, True), again.stderr
    block = hpcenv("session", "ssh-config", "lab", "--login", "hpc", cwd=shared_project, environ=slurm.environ).stdout
    assert block.splitlines()[2] == "Host lab"
    assert (folder / "host_key.pub").read_text().split()[1] in block
    listed = hpcenv("list", "--json", cwd=shared_project, environ=slurm.environ).envelope["data"]["runs"]
    assert [line["kind"] for line in listed if line["run"].startswith("lab-")] == ["session"]


@pytest.mark.parametrize("name", ["latest", "17", "../x", "-x", "a b", "x" * 41])
def test_what_is_no_name(hpcenv: Any, slurm: Any, project: Path, name: str) -> None:
    done = hpcenv("session", "start", "--no-wait", "--", name, cwd=project, environ=slurm.environ)
    assert done.status == 2
    assert slurm.calls("sbatch") == []


def test_without_slurm_there_is_no_session(hpcenv: Any, project: Path) -> None:
    done = hpcenv("session", "start", "lab", cwd=project)
    assert (done.status, "a session needs Slurm" in done.stderr) == (2, True), done.stderr


def test_a_folder_that_others_can_read_is_refused(hpcenv: Any, slurm: Any, shared_project: Path) -> None:
    folder = shared_project / "runs" / f".sessions-{os.getuid()}"
    folder.mkdir(parents=True)
    folder.chmod(0o750)
    done = start(hpcenv, slurm, shared_project)
    assert (done.status, "others could read the session's files" in done.stderr) == (19, True), done.stderr
    assert slurm.calls("sbatch") == []


def test_a_lost_public_key_is_made_again_from_the_host_key(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path / "sessions" / "lab")
    folder.path.parent.mkdir(mode=0o700)
    prepare_folder(folder, [])
    private, public = folder.host_key.read_bytes(), folder.public_key.read_text()
    folder.public_key.unlink()
    prepare_folder(folder, [])
    assert folder.host_key.read_bytes() == private
    assert folder.public_key.read_text().split()[:2] == public.split()[:2]


def test_keys_with_options_alone_are_no_key(hpcenv: Any, slurm: Any, shared_project: Path) -> None:
    (shared_project.parent / "key.pub").write_text(f'command="rsync" {KEY}')
    done = start(hpcenv, slurm, shared_project)
    assert (done.status, "has no public key" in done.stderr) == (19, True), done.stderr


@pytest.mark.parametrize("words", [("--serve", "8000"), ("--", "python3")])
def test_a_service_needs_port_and_command(hpcenv: Any, slurm: Any, project: Path, words: tuple[str, ...]) -> None:
    done = start(hpcenv, slurm, project, *words)
    assert (done.status, "--serve PORT -- COMMAND" in done.stderr) == (2, True), done.stderr


def test_what_is_started_of_services(hpcenv: Any, slurm: Any, shared_project: Path) -> None:
    done = start(hpcenv, slurm, shared_project, "--serve", "8000", "--", "python3", "-m", "app")
    assert done.status == 0, done.stderr
    services = manifest_of(shared_project)["session"]["services"]
    assert [(one["kind"], one["argv"], one["port"]) for one in services] == [
        ("command", ["python3", "-m", "app"], 8000)
    ]


def _open_session(tmp_path: Path, *services: SessionService) -> Path:
    options = SessionOptions(name="lab", folder=str(tmp_path / "lab"), services=services)
    folder = folders.make_run(tmp_path / "runs", "lab-1", "7", session=options, script="")
    record = Submission(
        schema=1, run="lab-1", cluster="slurm", job_id="7", submitted=1.0, command=("x",), session="lab"
    )
    save_record(record, folder.submission)
    folders.start(folder, ["n1"])
    door = SessionNode(
        schema=1, run="lab-1", node="n1", attempt=0, folder="/tmp/s", sshd="/usr/sbin/sshd", ready=True,
        sockets={"port-8000": "/tmp/s/port-8000.sock"}, ports=("0.0.0.0:80 (app)",),
    )  # fmt: skip
    save_record(door, folder.session_of("n1"))
    return folder.path


def test_a_connection_is_a_step_of_the_job_without_what_bashrc_set(fake_slurm: Any, tmp_path: Path) -> None:
    folder = _open_session(tmp_path)
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    environ = {**fake_slurm.environ, "LD_PRELOAD": "/evil.so", "PYTHONPATH": "/evil", "SLURM_JOB_ID": "1"}
    planned = plan_connect(tmp_path, "lab", environ=environ, runs="runs")
    assert {"--overlap", "--jobid=7", "--nodelist=n1", "--quiet", "--unbuffered", "--cpu-bind=none"} <= set(
        planned.argv
    )
    assert planned.argv[-2:] == ("ssh-server", str(folder))
    assert set(planned.env) == {"PATH", "HOME"}


def test_the_session_of_another_user_is_refused(hpcenv: Any, fake_slurm: Any, tmp_path: Path) -> None:
    folder = _open_session(tmp_path)
    if os.getuid() == 0:
        os.chown(folder, 1, 1)
        where = {"cwd": tmp_path, "environ": fake_slurm.environ}
        # Where several users have their runs in one folder, a name means one's own session.
        assert "no run `lab`" in hpcenv("session", "connect", "lab", "--runs-dir", "runs", **where).stderr
        done = hpcenv("session", "connect", str(folder), **where)
        assert (done.status, "is the session of another user" in done.stderr) == (2, True), done.stderr
        assert fake_slurm.calls("srun") == []


def test_open_and_status_say_what_is_there(hpcenv: Any, fake_slurm: Any, tmp_path: Path) -> None:
    _open_session(tmp_path)
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    where = {"cwd": tmp_path, "environ": fake_slurm.environ}
    said = hpcenv("session", "open", "lab", "--runs-dir", "runs", **where)
    assert said.stdout == "ssh -N -L 127.0.0.1:8888:/tmp/s/port-8000.sock lab\nhttp://127.0.0.1:8888/\n", said.stderr
    status = hpcenv("status", "lab", "--runs-dir", "runs", **where).stdout
    assert "open on n1, with port-8000" in status
    assert "0.0.0.0:80 (app): other users can connect to it" in status
    (node,) = hpcenv("status", "lab", "--runs-dir", "runs", "--json", **where).envelope["data"]["session"]
    assert (node["node"], node["ports"], list(node["sockets"])) == ("n1", ["0.0.0.0:80 (app)"], ["port-8000"])


def test_a_port_on_a_further_node_is_named(hpcenv: Any, fake_slurm: Any, tmp_path: Path) -> None:
    folder = RunFolder(_open_session(tmp_path))
    folders.start(folder, ["n1", "n2"])
    first = load_record(SessionNode, folder.session_of("n1"))
    save_record(replace(first, node="n2", ports=("0.0.0.0:6006 (tensorboard)",)), folder.session_of("n2"))
    fake_slurm.answers("squeue", "7|RUNNING|None|n[1-2]|0:01\n")
    said = hpcenv("status", "lab", "--runs-dir", "runs", cwd=tmp_path, environ=fake_slurm.environ).stdout
    assert "0.0.0.0:80 (app): other users can connect to it" in said
    assert "0.0.0.0:6006 (tensorboard) on n2: other users can connect to it" in said


def test_a_problem_of_a_further_node_ends_the_wait(fake_slurm: Any, tmp_path: Path) -> None:
    folder = RunFolder(_open_session(tmp_path))
    folders.start(folder, ["n1", "n2"])
    first = load_record(SessionNode, folder.session_of("n1"))
    save_record(replace(first, ready=False), folder.session_of("n1"))
    save_record(replace(first, node="n2", ready=False, problem="ended with status -9"), folder.session_of("n2"))
    fake_slurm.answers("squeue", "7|RUNNING|None|n[1-2]|0:01\n")
    environ = {**os.environ, **fake_slurm.environ}
    _, node = wait_until_open(open_run(folder.path), environ=environ, pause=pytest.fail, on_status=lambda _status: None)
    assert node is not None
    assert (node.node, node.problem) == ("n2", "ended with status -9")


@pytest.mark.parametrize(
    ("services", "ready", "why", "hint"),
    [
        ((), True, "it was started without a service", "start another one with --jupyter"),
        ((SessionService(kind="jupyter"),), False, "its services are still starting", "hpcenv logs lab"),
        ((SessionService(kind="jupyter"),), True, "its services have ended", "hpcenv logs lab"),
    ],
)
def test_a_session_without_a_page_says_why(
    services: tuple[SessionService, ...],
    ready: bool,
    why: str,
    hint: str,
    hpcenv: Any,
    fake_slurm: Any,
    tmp_path: Path,
) -> None:
    folder = RunFolder(_open_session(tmp_path, *services))
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    door = load_record(SessionNode, folder.session_of("n1"))
    save_record(replace(door, sockets={}, ready=ready), folder.session_of("n1"))
    done = hpcenv("session", "open", "lab", "--runs-dir", "runs", cwd=tmp_path, environ=fake_slurm.environ)
    assert (done.status, why in done.stderr, hint in done.stderr) == (2, True, True), done.stderr


def test_a_page_of_a_node_without_sshd_comes_through_socat(hpcenv: Any, fake_slurm: Any, tmp_path: Path) -> None:
    folder = RunFolder(_open_session(tmp_path))
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    save_record(replace(load_record(SessionNode, folder.session_of("n1")), sshd=""), folder.session_of("n1"))
    words = ("session", "open", "lab", "--runs-dir", "runs", "--login", "cluster")
    done = hpcenv(*words, cwd=tmp_path, environ=fake_slurm.environ)
    assert done.status == 0, done.stderr
    line, address = done.stdout.splitlines()[:2]
    listen, execute = shlex.split(line)[1:]
    assert listen == "TCP-LISTEN:8888,bind=127.0.0.1,reuseaddr,fork"
    assert re.search(
        r"ssh -T .*ControlPersist=10m cluster \S+/hpcenv session connect lab --runs-dir \S+ --page port-8000", execute
    )
    assert address.startswith("http://127.0.0.1:8888")


def test_a_shell_needs_a_terminal(hpcenv: Any, slurm: Any, project: Path) -> None:
    done = hpcenv("shell", cwd=project, environ=slurm.environ)
    assert (done.status, "a shell needs a terminal" in done.stderr) == (2, True)
    assert slurm.calls("sbatch") == []


def test_gpus_that_torch_cannot_use_are_refused_with_words_that_a_session_has(
    hpcenv: Any, slurm: Any, shared_project: Path
) -> None:
    done = start(hpcenv, slurm, shared_project, "--gpus", "1")
    assert "cannot use GPUs" in done.stderr
    assert "hint: leave out --gpus" in done.stderr
    assert "--nproc" not in done.stderr
