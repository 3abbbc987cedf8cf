"""What a session does on its node beside the shells: notices, ports, and what it leaves."""

from __future__ import annotations

import os
import pty
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run_folders as folders

from hpcenv import filesystem
from hpcenv.errors import FileUnusable
from hpcenv.launch import node_folders
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.session import NodeFolder, SessionNode, SessionOptions
from hpcenv.sessions import door
from hpcenv.sessions.enter import marked_open
from hpcenv.sessions.folders import node_folder
from hpcenv.sessions.notices import Notices
from hpcenv.sessions.ports import listening
from hpcenv.steps.this_step import find_place


def test_notices_come_once_thirty_and_five_minutes_before_the_end() -> None:
    notices = Notices({"SLURM_JOB_END_TIME": "100000"})
    assert notices.due(100000 - 31 * 60) == ""
    assert "in 30 min" in notices.due(100000 - 30 * 60)
    assert notices.due(100000 - 29 * 60) == ""
    assert "in 5 min" in notices.due(100000 - 5 * 60)
    assert notices.due(100000 - 60) == ""


def test_a_short_session_gets_one_notice_for_both() -> None:
    notices = Notices({"SLURM_JOB_END_TIME": "100000"})
    assert "in 4 min" in notices.due(100000 - 4 * 60)
    assert notices.due(100000 - 3 * 60) == ""


def test_a_limit_that_was_moved_moves_the_notices(tmp_path: Path) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\n[ "$SLURM_TIME_FORMAT $*" = "%s --noheader --jobs 7 --format %e" ] && echo 107200\n')
    squeue.chmod(0o755)
    notices = Notices({"SLURM_JOB_END_TIME": "100000", "SLURM_JOB_ID": "7", "PATH": str(tmp_path)})
    assert notices.due(100000 - 29 * 60) == ""
    assert notices.due(100000 - 60) == ""
    assert "in 30 min" in notices.due(107200 - 30 * 60)
    assert "in 5 min" in notices.due(107200 - 5 * 60)


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_END_TIME": "Unknown"}])
def test_without_an_end_there_is_no_notice(environ: dict[str, str]) -> None:
    assert Notices(environ).due(1e12) == ""


def test_a_notice_reaches_a_terminal_and_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = pty.openpty()
    Notices({"SLURM_JOB_END_TIME": "100000"}).give(99990, [os.ttyname(theirs), "/nonexistent"])
    assert b"this session ends at" in os.read(ours, 1000)
    assert "hpcenv: this session ends at" in capsys.readouterr().err
    os.close(ours)
    os.close(theirs)


def test_a_port_that_a_program_opens_is_named() -> None:
    before = listening({})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        new = set(listening({})) - set(before)
    assert any(one.startswith(f"127.0.0.1:{port} (") for one in new)


def test_the_folder_is_private_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with node_folder() as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        (folder.path / "x").write_text("secret")
        place = folder.path.parent
    assert list(place.glob("hpcenv-session-*")) == []


def test_an_open_session_keeps_its_folder_and_a_killed_one_loses_it() -> None:
    with node_folder() as first:
        (first.path / "token").write_text("secret")
        node_folders.remove_left()
        assert (first.path / "token").exists()
    code = (
        "import os; from hpcenv.sessions.folders import node_folder\n"
        "with node_folder() as it: (it.path / 'x').touch(); print(it.path, flush=True); os.kill(os.getpid(), 9)"
    )
    left = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    assert os.path.isdir(left)
    node_folders.remove_left()
    assert not os.path.exists(left)


def test_a_shared_disk_is_not_the_place_of_a_nodes_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real mounts: the kind of one, then of all, counts as that of a network file system."""
    kinds = {place: filesystem.mount_of(Path(os.path.realpath(place))).kind for place in ("/tmp", "/dev/shm")}  # type: ignore[union-attr]
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    monkeypatch.setattr(filesystem, "_NETWORK", frozenset({kinds["/tmp"]}))
    if kinds["/tmp"] != kinds["/dev/shm"]:
        with node_folder() as folder:
            assert folder.path.parent == Path("/dev/shm")
    monkeypatch.setattr(filesystem, "_NETWORK", frozenset(kinds.values()))
    with pytest.raises(FileUnusable, match="no local disk"), node_folder():
        pass


def test_a_lasting_folder_that_others_can_read_by_now_opens_no_session(tmp_path: Path) -> None:
    options = SessionOptions(name="a", folder=str(lasting(tmp_path / "lasting", 0o750)))
    run = folders.make_run(tmp_path / "runs", "a", cluster="local", session=options)
    run.session.mkdir()
    run.session_start_of("l0").touch()
    with door_of(run, "l0", "l0") as child:
        assert child.wait(60) == 1
    found = load_record(SessionNode, run.session_of("l0"))
    assert (found.folder, "mode 0750" in found.problem) == ("", True), found.problem
    assert run.session_end.exists()


def test_an_open_shell_is_seen_until_it_ends_also_by_a_kill(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path)
    folder.open.mkdir()
    with marked_open(folder):
        assert door.open_terminals(folder) == [""]
    assert door.open_terminals(folder) == []
    code = (
        "import sys, os; from pathlib import Path; from hpcenv.records.session import NodeFolder;"
        "from hpcenv.sessions.enter import marked_open\n"
        "with marked_open(NodeFolder(Path(sys.argv[1]))): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.DEVNULL)
    assert len(list(folder.open.iterdir())) == 1
    assert door.open_terminals(folder) == []
    assert list(folder.open.iterdir()) == []


def lasting(folder: Path, mode: int = 0o700) -> Path:
    """The folder of a session on the shared disk, as the login node makes it."""
    folder.mkdir(mode=0o700)
    (folder / "home").mkdir(mode=0o700)
    folder.chmod(mode)
    return folder


def test_a_session_without_use_ends_and_its_folder_goes(tmp_path: Path) -> None:
    """The process beside the launch step, as a node starts it."""
    options = SessionOptions(name="a", folder=str(lasting(tmp_path / "lasting")), ends_unused=1)
    run = folders.make_run(tmp_path / "runs", "a", cluster="local", session=options)
    run.session.mkdir()
    run.session_start_of("l0").touch()
    code = "import sys; from hpcenv.steps.main import main; sys.exit(main(sys.argv[1:]))"
    environ = {**os.environ, "HPCENV_LOCAL_NODE": "l0", "HPCENV_LOCAL_NODES": "l0", "HPCENV_LOCAL_JOB": "local-7"}
    argv = [sys.executable, "-c", code, "session", str(run.path)]
    with subprocess.Popen(argv, env=environ, stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        until = time.monotonic() + 60
        while not run.session_end.exists():
            assert time.monotonic() < until
            assert child.poll() is None
            time.sleep(0.1)
        found = load_record(SessionNode, run.session_of("l0"))
        folder = Path(found.folder)
        assert found.ready
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "environment.json").stat().st_mode) == 0o600
        child.send_signal(signal.SIGTERM)  # Slurm's; it ends after what holds the job
        time.sleep(0.5)
        assert child.poll() is None
        child.stdin.close()
        assert child.wait(30) == 0
    assert not folder.exists()


def door_of(run: RunFolder, node: str, nodes: str = "l0,l1") -> subprocess.Popen[bytes]:
    """The process beside the launch step of a node."""
    code = "import sys; from hpcenv.steps.main import main; sys.exit(main(sys.argv[1:]))"
    environ = {**os.environ, "HPCENV_LOCAL_NODE": node, "HPCENV_LOCAL_NODES": nodes, "HPCENV_LOCAL_JOB": "local-7"}
    return subprocess.Popen([sys.executable, "-c", code, "session", str(run.path)], env=environ, stdin=subprocess.PIPE)


def wait_for(path: Path, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.1)
    return path.exists()


def test_a_session_opens_when_the_start_gate_has_passed_its_node(tmp_path: Path) -> None:
    options = SessionOptions(name="a", folder=str(lasting(tmp_path / "lasting")))
    run = folders.make_run(tmp_path / "runs", "a", cluster="local", session=options)
    run.session.mkdir()
    with door_of(run, "l0", "l0") as child:
        assert not wait_for(run.session_of("l0"), 3), "no shell before the last check"
        run.session_start_of("l0").touch()
        assert wait_for(run.session_of("l0"), 60)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(30) == 0
    with door_of(run, "l1", "l1") as child:
        assert child.stdin is not None
        child.stdin.close()  # the gate refused the node
        assert child.wait(60) == 0
    assert not run.session_of("l1").exists()


def test_a_node_without_shells_does_not_end_the_session_of_another(tmp_path: Path) -> None:
    options = SessionOptions(name="a", folder=str(lasting(tmp_path / "lasting")), ends_unused=1)
    run = folders.make_run(tmp_path / "runs", "a", cluster="local", session=options)
    run.session.mkdir()
    run.session_start_of("l1").touch()
    with door_of(run, "l1") as child:
        assert wait_for(run.session_of("l1"), 60)
        assert not wait_for(run.session_end, 8)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(30) == 0


def test_a_node_that_cannot_make_the_folder_says_so_and_ends_the_session(
    tmp_path: Path,
) -> None:
    options = SessionOptions(name="a", folder=str(lasting(tmp_path / 'it "quoted"')))
    run = folders.make_run(tmp_path / "runs", "a", cluster="local", session=options)
    run.session.mkdir()
    run.session_start_of("l0").touch()
    with door_of(run, "l0", "l0") as child:
        assert child.wait(60) == 1
    assert run.session_end.exists()
    assert "ssh would misread it" in load_record(SessionNode, run.session_of("l0")).problem


# A step with an unforeseen fault, or one that waits until it is killed.
FAULTY = {"an exception": "raise ZeroDivisionError", "a kill": "import os; os.kill(os.getpid(), 9)"}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_session_whose_process_dies_ends_with_a_reason(tmp_path: Path, fault: str) -> None:
    """Otherwise the job would go on without a way into it, and `session start` would wait without end."""
    options = SessionOptions(name="a", folder=str(lasting(tmp_path / "lasting")))
    run = folders.make_run(tmp_path / "runs", "a", cluster="local", session=options)
    run.code.mkdir()
    run.step.write_text(FAULTY[fault])
    environ = {"HPCENV_LOCAL_NODE": "l0", "HPCENV_LOCAL_NODES": "l0", "HPCENV_LOCAL_JOB": "local-7"}
    manifest = load_record(Manifest, run.manifest)
    with door.beside_launch(manifest, run, find_place(run, manifest, environ)):
        assert wait_for(run.session_end, 60)
    status = {"an exception": 1, "a kill": -9}[fault]
    found = load_record(SessionNode, run.session_of("l0")).problem
    assert f"the process that keeps the session open on node l0 ended with status {status}" in found


def test_the_end_of_the_job_is_no_fault(tmp_path: Path) -> None:
    options = SessionOptions(name="a", folder=str(lasting(tmp_path / "lasting")))
    run = folders.make_run(tmp_path / "runs", "a", cluster="local", session=options)
    run.code.mkdir()
    run.step.write_text("import sys; sys.stdin.read(); sys.exit(1)")
    environ = {"HPCENV_LOCAL_NODE": "l0", "HPCENV_LOCAL_NODES": "l0", "HPCENV_LOCAL_JOB": "local-7"}
    manifest = load_record(Manifest, run.manifest)
    with door.beside_launch(manifest, run, find_place(run, manifest, environ)):
        pass
    assert not run.session_end.exists()


def test_a_shell_on_another_node_is_use(tmp_path: Path) -> None:
    options = SessionOptions(name="a", folder=str(lasting(tmp_path / "lasting")), ends_unused=1)
    run = folders.make_run(tmp_path / "runs", "a", cluster="local", session=options)
    run.session.mkdir()
    run.session_start_of("l1").touch()
    with door_of(run, "l1") as second:
        assert wait_for(run.session_of("l1"), 60)
        with marked_open(NodeFolder(Path(load_record(SessionNode, run.session_of("l1")).folder))):
            until = time.monotonic() + 60
            while load_record(SessionNode, run.session_of("l1")).connections != 1:
                assert time.monotonic() < until
                time.sleep(0.1)
            run.session_start_of("l0").touch()
            with door_of(run, "l0") as first:
                assert not wait_for(run.session_end, 8)
                assert first.poll() is None
                assert first.stdin is not None
                first.stdin.close()
                assert first.wait(30) == 0
        assert second.stdin is not None
        second.stdin.close()
        assert second.wait(30) == 0
