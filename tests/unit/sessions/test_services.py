"""Services of a session: each behind a Unix socket that only its user can use, and nothing is left at the end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcenv import process
from hpcenv.errors import FileUnusable, ToolFailed, ToolMissing, UsageError
from hpcenv.incontainer import service as inside
from hpcenv.machine.this_node import LOCAL_JOB, LOCAL_NODE, LOCAL_NODES
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.session import SessionService
from hpcenv.sessions import services
from hpcenv.sessions.folders import require_private
from hpcenv.sessions.services import Services, render, serving
from tests.kernel_client import CONNECTED

PYTHON = os.environ.get("HPCENV_TEST_SESSIONS_PYTHON") or sys.executable
OTHER_USER = 65534
WEB = "import http.server as h; h.ThreadingHTTPServer(('%s', %d), h.SimpleHTTPRequestHandler).serve_forever()"
GIVES_UP = """\
import os, socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    while True:
        connection, _ = server.accept()
        if connection.recv(1):  # not the look whether somebody listens
            print("gave up", flush=True)
            os._exit(3)
"""
CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


def wanted(kind: Any, argv: tuple[str, ...] = (), port: int | None = None) -> SessionService:
    return SessionService(kind=kind, argv=argv, port=port)


# -- what would be started ----------------------------------------------------------------


@pytest.fixture
def rendered(make_manifest: Any) -> Any:
    """How a service is started in a SIF, or on the host."""

    def call(request: SessionService, *, in_image: bool = True, **more: Any) -> services.Service:
        manifest = make_manifest()
        kind = "sif" if in_image else "host"
        manifest = replace(manifest, environment=replace(manifest.environment, kind=kind))
        return render(
            request, manifest, "/tmp/s", **{"settings": "/home/me/lab", "token": "t0ken", "network": "net:[1]", **more}
        )

    return call


def test_jupyter_listens_on_a_socket_and_its_token_is_in_a_file_only(rendered: Any) -> None:
    found = rendered(wanted("jupyter"))
    assert found.socket == "/tmp/s/jupyter.sock"
    assert found.files["/tmp/s/jupyter.token"] == "t0ken"
    assert "t0ken" not in found.files["/tmp/s/kernels/python3/kernel.json"]
    assert "t0ken" not in json.dumps(found.config)
    assert found.config["port"] is None
    assert {"--ServerApp.sock_mode=0600", "--KernelManager.transport=ipc"} <= set(found.config["argv"])
    assert not re.search("ip=|0\\.0\\.0\\.0|--port", " ".join(found.config["argv"]))
    with pytest.raises(UsageError, match="without a token"):
        rendered(wanted("jupyter"), token="")


@pytest.mark.parametrize(
    ("in_image", "allow_port", "private", "own"), [(True, False, True, False), (False, False, True, True), (True, True, False, False)]
)  # fmt: skip
def test_who_makes_the_network_namespace(
    rendered: Any, in_image: bool, allow_port: bool, private: bool, own: bool
) -> None:
    """The container runtime in an image, incontainer/service.py on the host, neither with --allow-port."""
    for request in (wanted("command", ("streamlit", "run"), 8501), wanted("tensorboard", ("/runs/a",))):
        found = rendered(request, in_image=in_image, allow_port=allow_port)
        assert (found.config["private"], found.config["own_network"]) == (private, own)


def test_tensorboard_sees_the_runs_that_it_shows_and_cannot_change_them(rendered: Any) -> None:
    found = rendered(wanted("tensorboard", ("/runs/a", "/other/b")))
    assert [(bind.source, bind.read_only) for bind in found.binds] == [
        ("/tmp/s", False), ("/runs/a", True), ("/other/b", True)
    ]  # fmt: skip
    assert found.config["argv"][:2] == ["--logdir", "/tmp/s/curves"]


@pytest.mark.parametrize("request_", [wanted("command", ("x",)), wanted("command", (), 80)])
def test_a_command_needs_a_port(rendered: Any, request_: SessionService) -> None:
    with pytest.raises(UsageError, match="needs a port and a command"):
        rendered(request_)


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o750)
    with pytest.raises(FileUnusable, match="mode 0750") as caught:
        require_private(open_folder)
    assert "chmod 700" in str(caught.value)


# -- started on this machine --------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hs-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def checked(hpcenv: Any, project: Path) -> tuple[RunFolder, dict[str, str]]:
    """A run of which this machine has passed the check."""
    return check(hpcenv, project)


def check(hpcenv: Any, project: Path) -> tuple[RunFolder, dict[str, str]]:
    done = hpcenv("run", "--", "true", cwd=project)
    assert done.status == 0, done.stderr
    (path,) = (project / "runs").glob("run-*")
    started = json.loads(RunFolder(path).started.read_text())
    (node,) = started["nodes"]
    environ = {"PATH": os.environ["PATH"], "HOME": str(project)}
    return RunFolder(path), {**environ, LOCAL_NODE: node, LOCAL_NODES: node, LOCAL_JOB: str(started["job_id"])}


def serve(
    checked: tuple[RunFolder, dict[str, str]], folder: Path, *requests: SessionService, said: list[str] | None = None, **more: Any
) -> AbstractContextManager[Services]:  # fmt: skip
    run, environ = checked
    places = {"folder": folder, "settings": run.path / "lab", "logs": run.path / "services", "is_over": goes_on, **more}
    return serving(requests, run=run, environ=environ, say=[].append if said is None else said.append, **places)


def goes_on(seconds: float) -> bool:
    """The session does not end."""
    time.sleep(seconds)
    return False


def get(path: str, url: str = "/", method: str = "GET", body: str | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("localhost", timeout=60)
    with contextlib.closing(connection), socket.socket(socket.AF_UNIX) as connected:
        connected.connect(path)
        connection.sock = connected
        connection.request(method, url, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def listeners(pids: set[int]) -> list[str]:
    """TCP sockets of these processes that listen on this machine."""
    rows = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [row for row in rows if {int(pid) for pid in re.findall("pid=([0-9]+)", row)} & pids]


def free_port() -> int:
    return inside.free_port()


def test_a_command_is_reached_through_its_socket_only(checked: Any, folder: Path) -> None:
    port, before = free_port(), set(process.below(os.getpid()))
    request = wanted("command", ("python", "-c", WEB % ("127.0.0.1", port)), port)
    with serve(checked, folder, request) as running:
        path = running.sockets[f"port-{port}"]
        assert get(path)[0] == 200
        assert os.stat(path).st_mode & 0o777 == 0o600
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        assert listeners(set(process.below(os.getpid()))) == []
        if os.getuid() == 0:
            words = ["/usr/bin/python3", "-c", CONNECT, path]
            other = subprocess.run(
                words, user=OTHER_USER, group=OTHER_USER, extra_groups=[], capture_output=True, text=True
            )
            assert "PermissionError" in other.stderr
            assert "Permission denied" in subprocess.run(
                ["ls", str(folder)], user=OTHER_USER, group=OTHER_USER, extra_groups=[], capture_output=True, text=True
            ).stderr  # fmt: skip
        assert set(process.below(os.getpid())) - before
        assert running.ended() == []
    assert list(folder.iterdir()) == []
    assert set(process.below(os.getpid())) - before == set()


def test_the_user_of_a_service_is_the_user(checked: Any, folder: Path) -> None:
    """Not root, whom some programs refuse: in the network namespace of the host it keeps its user id."""
    port = free_port()
    code = f"import os; print('I am', os.getuid(), flush=True); {WEB % ('127.0.0.1', port)}"
    with serve(checked, folder, wanted("command", ("python", "-c", code), port)):
        log = checked[0].path / "services" / f"port-{port}.log"
        assert f"I am {os.getuid()}" in log.read_text()


def test_a_service_that_ends_is_named_once(checked: Any, folder: Path) -> None:
    port = free_port()
    with serve(checked, folder, wanted("command", ("python", "-c", GIVES_UP, str(port)), port)) as running:
        with contextlib.suppress(OSError):
            get(running.sockets[f"port-{port}"])
        for _ in range(100):
            if said := running.ended():
                break
            time.sleep(0.1)
        assert len(said) == 1
        assert f"port-{port} ended with status 3" in said[0]
        assert "gave up" in said[0]
        assert running.ended() == []


def test_a_port_of_the_node_is_opened_only_if_the_user_allows_it_and_says_what_it_means(
    checked: Any, folder: Path
) -> None:
    port, said = free_port(), []
    request = wanted("command", ("python", "-c", WEB % ("127.0.0.1", port)), port)
    with serve(checked, folder, request, said=said, allow_port=True) as running:
        socket.create_connection(("127.0.0.1", port)).close()
        assert get(running.sockets[f"port-{port}"])[0] == 200
    assert said == [
        f"hpcenv: port-{port} listens on 127.0.0.1: every user of this node can connect to it"
    ]  # fmt: skip


def test_a_port_that_other_machines_reach_is_refused(checked: Any, folder: Path) -> None:
    port = free_port()
    request = wanted("command", ("python", "-c", WEB % ("0.0.0.0", port)), port)
    with pytest.raises(ToolFailed, match="was ended") as caught, serve(checked, folder, request, allow_port=True):
        pass
    assert f"port {port} listens on other addresses than 127.0.0.1" in str(caught.value)
    assert list(folder.iterdir()) == []


def test_a_program_of_somebody_else_on_the_port_is_not_taken_for_the_service(checked: Any, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        request = wanted("command", ("python", "-c", WEB % ("127.0.0.1", port)), port)
        with pytest.raises(ToolFailed, match="another program listens on port") as caught:
            with serve(checked, folder, request, allow_port=True):
                pass
    assert caught.value.exit_status == ToolFailed.exit_status


def test_the_end_of_the_session_ends_the_wait_for_a_service(checked: Any, folder: Path) -> None:
    before = set(process.below(os.getpid()))
    silent = wanted("command", ("sleep", "600"), free_port())
    with (
        pytest.raises(ToolFailed, match="the session ended before port-"),
        serve(checked, folder, silent, is_over=lambda _seconds: True),
    ):
        pass
    assert set(process.below(os.getpid())) - before == set()


def test_a_service_that_is_still_in_the_network_of_the_node_is_refused(tmp_path: Path) -> None:
    """The container runtime was asked for a namespace, and gave none."""
    config = {"socket": str(tmp_path / "s"), "module": "", "argv": ["touch", str(tmp_path / "started")], "port": 80}
    config |= {"private": True, "own_network": False, "variables": {}, "python_path": ""}
    config |= {"network": os.readlink("/proc/self/ns/net")}
    (tmp_path / "c.json").write_text(json.dumps(config))
    words = [sys.executable, inside.__file__, str(tmp_path / "c.json")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (inside.NO_NAMESPACE, "no network namespace: this is that of the node\n")
    assert not (tmp_path / "started").exists()


def test_an_environment_without_the_program_says_what_to_type(checked: Any, folder: Path) -> None:
    with pytest.raises(ToolMissing) as caught, serve(checked, folder, wanted("jupyter")):
        pass
    assert "the environment has no jupyterlab" in str(caught.value)
    assert "python3 -m pip install jupyterlab ipykernel" in str(caught.value)
    with (
        pytest.raises(ToolMissing, match="has no nosuch"),
        serve(checked, folder, wanted("command", ("nosuch",), 9)),
    ):
        pass
    assert list(folder.iterdir()) == []


def test_a_machine_without_user_namespaces_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = {
        "socket": str(tmp_path / "s"),
        "module": "",
        "argv": ["true"],
        "port": 80,
        "private": True,
        "own_network": True,
    }
    (tmp_path / "c.json").write_text(json.dumps({**config, "variables": {}, "python_path": ""}))
    without = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    words = ["unshare", "-Ur", "sh", "-c", without, "sh", sys.executable, inside.__file__, str(tmp_path / "c.json")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        inside.NO_NAMESPACE,
        "no network namespace: [Errno 28] unshare(2): No space left on device\n",
    )


# -- Jupyter and TensorBoard themselves ---------------------------------------------------


@pytest.fixture
def with_tools(hpcenv: Any, tmp_path: Path) -> tuple[RunFolder, dict[str, str]]:
    """A run whose host environment has Jupyter and TensorBoard."""
    find = "import importlib.util as u, sys; sys.exit(not (u.find_spec('jupyterlab') and u.find_spec('tensorboard')))"
    if subprocess.run([PYTHON, "-c", find]).returncode != 0:
        pytest.skip("NOT RUN: HPCENV_TEST_SESSIONS_PYTHON names no Python with jupyterlab and tensorboard")
    (tmp_path / "hpcenv.toml").write_text(f'image = "host"\npython = "{PYTHON}"\n[policy]\n"torch.version" = "info"\n')
    done = hpcenv("lock", "--no-wheels", cwd=tmp_path, timeout=200)
    assert done.status == 0, done.stderr
    return check(hpcenv, tmp_path)


KERNEL = (
    CONNECTED
    + """\
client.execute_interactive("import sys, os; print('SAID', sys.prefix, os.environ['HPCENV_RUN'])", timeout=60)
forked = "import os, time; os.fork() or (print('FORKED', flush=True), os._exit(0)); os.wait(); time.sleep(1)"
client.execute_interactive(forked, timeout=60)
"""
)


def test_jupyter_with_a_kernel_and_tensorboard_open_no_port_and_show_no_token(with_tools: Any, folder: Path) -> None:
    run, _ = with_tools
    before = set(process.below(os.getpid()))
    requests = (wanted("jupyter"), wanted("tensorboard", (str(run.path),)))
    with serve(with_tools, folder, *requests) as running:
        assert running.token_file is not None
        token, path = running.token_file.read_text(), running.sockets["jupyter"]
        assert get(path, "/api/contents")[0] == 403
        assert get(path, "/api/contents", Authorization=f"token {token}")[0] == 200
        settings = get(
            path, "/lab/api/settings/@jupyterlab/docmanager-extension:plugin", Authorization=f"token {token}"
        )
        assert json.loads(settings[1])["schema"]["properties"]["autosaveInterval"]["default"] == 10
        status, body = get(path, "/api/kernels", "POST", "{}", Authorization=f"token {token}")
        assert status == 201
        connection = folder / "jupyter" / f"kernel-{json.loads(body)['id']}.json"
        assert json.loads(connection.read_text())["transport"] == "ipc"
        done = subprocess.run([PYTHON, "-c", KERNEL, str(connection)], capture_output=True, text=True, timeout=120)
        assert f"SAID {Path(PYTHON).parents[1]} {run.path.name}" in done.stdout, done.stderr
        assert "FORKED" in done.stdout, done.stderr
        assert b"<title>TensorBoard" in get(running.sockets["tensorboard"])[1]

        ours = set(process.below(os.getpid())) - before
        assert listeners(ours) == []
        for pid in ours:
            with contextlib.suppress(OSError):
                assert token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        for top, _, names in os.walk(run.path.parents[1]):
            for name in names:
                assert token.encode() not in Path(top, name).read_bytes(), name
        for top, folders, names in os.walk(folder):
            assert all(os.stat(os.path.join(top, one)).st_mode & 0o077 == 0 for one in (*folders,))
    assert list(folder.iterdir()) == []
    assert set(process.below(os.getpid())) - before == set()
