"""The services of a session: Jupyter, TensorBoard and programs of the user. Each one is reached through a Unix socket.

Runs on: COMPUTE NODE. Standard library only.

A service runs in the verified image or host environment, with the variables of the ranks. Nothing listens on a TCP port
of the node: Jupyter itself listens on the socket, and its kernels use IPC. Any other program runs in a private network
namespace, and incontainer/service.py connects the program with the socket. The folder of the session is on the node's
own disk, and only its owner can open it. A token is in a file in this folder, never in a command line or a variable.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcenv import process
from hpcenv.container.manifest import open_manifest
from hpcenv.errors import ToolFailed, ToolMissing, UsageError
from hpcenv.launch import attach, processes
from hpcenv.records.files import read_end
from hpcenv.records.manifest import Bind, Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.session import SessionService
from hpcenv.sessions import tools
from hpcenv.sessions.folders import require_private
from hpcenv.sessions.training_curves import Curves

# The statuses of incontainer/service.py.
_MISSING, _NO_NAMESPACE, _OPEN_TO_OTHERS = 127, 126, 125

# Time for a service to start: a program may load a model before it listens, and Jupyter in a cold SIF takes tens of
# seconds.
_SECONDS_TO_START = 300.0
# The time between TERM and KILL, in which Jupyter ends its kernels.
_SECONDS_TO_END = 10.0
_SECONDS_BETWEEN_LOOKS = 0.1

# The text of a notebook is only in the browser, and no request to Jupyter saves it. So JupyterLab saves the notebook
# often (JupyterLab's default is 120 s). The setting of a user (Settings > Document Manager) has precedence.
_SAVED = {"@jupyterlab/docmanager-extension:plugin": {"autosaveInterval": 10}}


def name_of(request: SessionService) -> str:
    """Return the name of a service. Its socket, log and configuration are named after it."""
    return f"port-{request.port}" if request.kind == "command" else request.kind


@dataclass(frozen=True, kw_only=True)
class Service:
    """How a service will be started. Nothing is started or written yet.

    Attributes:
        config: the configuration, which incontainer/service.py reads.
        files: more files that the service needs: path -> text.
        folders: folders that the service needs, with mode 0700.
        binds: binds that the service needs in a SIF, in addition to the binds of the run.
    """

    request: SessionService
    config: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    binds: tuple[Bind, ...] = ()

    @property
    def name(self) -> str:
        """The name of the service."""
        return name_of(self.request)

    @property
    def socket(self) -> str:
        """The path of the service's socket."""
        return str(self.config["socket"])


def render(
    request: SessionService,
    manifest: Manifest,
    folder: str,
    *,
    settings: str,
    token: str,
    network: str,
    allow_port: bool = False,
) -> Service:
    """Return how a service is started. Pure.

    Args:
        folder: the folder of the session on this node.
        settings: a lasting folder for what the user sets in Jupyter.
        token: the token for Jupyter.
        network: the node's network namespace, in which a program must not run.
        allow_port: whether a program may listen on 127.0.0.1 of the node.

    Raises:
        UsageError: there is no token, no command or no port.
    """
    in_image = manifest.environment.kind != "host"
    path = f"{folder}/{name_of(request)}.sock"
    private = request.kind != "jupyter" and not allow_port
    config: dict[str, Any] = {
        "socket": path,
        "module": "",
        "argv": list(request.argv),
        "port": request.port,
        "private": private,
        "own_network": private and not in_image,
        "network": network,
        "variables": {},
        # The service can import the same parts of hpcenv as the ranks: hpcenv.training, and a hint in place of
        # hpcenv.submit.
        "python_path": str(RunFolder(Path(manifest.run_folder)).inside) if in_image else "",
    }
    own = Bind(source=folder, target=folder)
    if request.kind == "jupyter":
        if not token:
            raise UsageError("Jupyter without a token", why="with an empty token, Jupyter accepts every user")
        return _jupyter(request, manifest, config, folder, settings=settings, token=token)
    if request.kind == "tensorboard":
        curves = f"{folder}/curves"
        argv = ["--logdir", curves, "--host", "127.0.0.1", "--port", "{port}", "--reload_multifile", "true"]
        runs = tuple(Bind(source=run, target=run, read_only=True) for run in request.argv)
        config |= {"module": "tensorboard.main", "argv": [*argv, "--reload_interval", "10"], "port": 0}
        return Service(request=request, config=config, folders=(curves,), binds=(own, *runs))
    if not request.argv or not request.port:
        raise UsageError("a service needs a port and a command", hint="--serve PORT -- COMMAND")
    return Service(request=request, config=config, binds=(own,))


def _jupyter(
    request: SessionService, manifest: Manifest, config: dict[str, Any], folder: str, *, settings: str, token: str
) -> Service:
    runtime, file, kernel = f"{folder}/jupyter", f"{folder}/jupyter.token", f"{folder}/kernels/python3"
    defaults = f"{folder}/config/labconfig"  # JupyterLab 3 and later read it
    argv = [
        f"--ServerApp.sock={config['socket']}",
        "--ServerApp.sock_mode=0600",
        f"--ServerApp.root_dir={manifest.workdir}",
        "--ServerApp.open_browser=False",
        # Without this option Jupyter refuses uid 0, even if the user only appears as 0 in a user namespace.
        "--ServerApp.allow_root=True",
        "--KernelManager.transport=ipc",
        # Extensions that a user installs from the web page would not be in the lockfile.
        "--LabApp.extension_manager=readonly",
        # The user may have installed kernels of other environments, which were not checked.
        "--KernelSpecManager.allowed_kernelspecs=python3",
    ]
    # jpserver-PID-open.html in the runtime folder has the token, and mode 0644 (jupyter_server 2.21).
    variables = {
        "JUPYTER_TOKEN_FILE": file,
        "JUPYTER_TOKEN": "",  # a value from the image or the project would have precedence over the file
        "JUPYTER_RUNTIME_DIR": runtime,
        "JUPYTER_CONFIG_DIR": settings,
        "JUPYTER_CONFIG_PATH": os.path.dirname(defaults),
        # A `kernels/NAME/kernel.json` below this folder has precedence over every kernel of the environment.
        "JUPYTER_PATH": folder,
    }
    spec = {
        "argv": [manifest.environment.python, _program(manifest, "kernel.py"), "-f", "{connection_file}"],
        "display_name": "Python (locked)",
        "language": "python",
        # The debugger would listen on a port.
        "metadata": {"debugger": False},
    }
    config |= {"module": "jupyterlab", "argv": argv, "variables": variables}
    return Service(
        request=request,
        config=config,
        files={
            file: token,
            f"{kernel}/kernel.json": json.dumps(spec),
            f"{defaults}/default_setting_overrides.json": json.dumps(_SAVED),
        },
        folders=(runtime, os.path.dirname(kernel), kernel, os.path.dirname(defaults), defaults),
        binds=tuple(Bind(source=place, target=place) for place in (folder, settings)),
    )


# -- start and end ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Running:
    """A service that was started."""

    service: Service
    child: subprocess.Popen[bytes]
    log: Path


class Services:
    """The running services of a session.

    Attributes:
        token_file: the file with the token of Jupyter; None if Jupyter does not run.
    """

    def __init__(self, running: Sequence[Running]) -> None:
        self._running = list(running)
        files = [name for one in running for name in one.service.files]
        self.token_file = Path(files[0]) if files else None

    @property
    def sockets(self) -> dict[str, str]:
        """Name of a service -> path of its socket, for the services that have not ended."""
        return {one.service.name: one.service.socket for one in self._running}

    def ended(self) -> list[str]:
        """Return a line for each service that has ended since the last call."""
        gone = [one for one in self._running if one.child.poll() is not None]
        self._running = [one for one in self._running if one not in gone]
        return [
            f"{one.service.name} ended with status {one.child.returncode}: {one.log}: {_last_line(one.log)}"
            for one in gone
        ]


@contextlib.contextmanager
def serving(
    requests: Sequence[SessionService],
    *,
    run: RunFolder,
    environ: Mapping[str, str],
    folder: Path,
    settings: Path,
    logs: Path,
    say: Callable[[str], None],
    is_over: Callable[[float], bool],
    allow_port: bool = False,
) -> Iterator[Services]:
    """Start the services. After the block, end them and remove their files.

    Args:
        run: the run of the session, whose check has passed.
        environ: environment variables of this job step.
        folder: the folder of the session on this node's own disk, with mode 0700.
        settings: a lasting folder for what the user sets in Jupyter. It is made if it does not exist.
        logs: folder for the output of the services.
        say: called with one line for the job's log.
        is_over: called with a number of seconds while a service starts. Returns whether the session ends within this
            time.
        allow_port: whether programs may listen on 127.0.0.1 of the node. If so, a line in the log says what this means.

    Raises:
        FileUnusable: other users can read the folder.
        ToolMissing: the environment lacks the program of a service.
        ToolFailed: a service does not start, or other users could use it.
        NodesUnknown: as for `launch.attach.prepared`.
    """
    require_private(folder)
    manifest = open_manifest(run, environ)
    for place in (settings, logs):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = secrets.token_urlsafe(32)
    places = {"settings": str(settings), "network": os.readlink("/proc/self/ns/net")}
    services = [render(one, manifest, str(folder), **places, token=token, allow_port=allow_port) for one in requests]
    for one in services if allow_port else ():
        if one.config["port"] is not None:
            say(f"hpcenv: {one.name} listens on 127.0.0.1: every user of this node can connect to it")
    with ExitStack() as stack:
        for one in services:
            stack.callback(_remove, one)
            _write(one)
        needs = stack.enter_context(ExitStack())
        running: list[Running] = []
        stack.callback(_end, running)
        for one in services:
            running.append(_start(one, manifest, run, environ, logs, needs))  # noqa: PERF401  (a later one may fail)
        for started in running:
            _wait(started, manifest, is_over)
        watched = [Path(name) for one in requests if one.kind == "tensorboard" for name in one.argv]
        if watched:
            stack.enter_context(Curves(folder / "curves", watched))
        yield Services(running)


def _program(manifest: Manifest, name: str) -> str:
    return str(RunFolder(Path(manifest.run_folder)).code / "hpcenv" / "incontainer" / name)


def _write(service: Service) -> None:
    for name in service.folders:
        os.mkdir(name, mode=0o700)
    for name, text in {**service.files, _config_of(service): json.dumps(service.config)}.items():
        with open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)


def _config_of(service: Service) -> str:
    return f"{service.socket.removesuffix('.sock')}.json"


def _remove(service: Service) -> None:
    for name in service.folders:
        shutil.rmtree(name, ignore_errors=True)
    for name in (*service.files, _config_of(service), service.socket):
        with contextlib.suppress(OSError):
            os.unlink(name)


def _start(
    service: Service, manifest: Manifest, run: RunFolder, environ: Mapping[str, str], logs: Path, needs: ExitStack
) -> Running:
    """Start a service. Temporary resources that it needs are kept until the end of `needs`."""
    command = [manifest.environment.python, _program(manifest, "service.py"), _config_of(service)]
    own_network = bool(service.config["private"])
    start = needs.enter_context(
        attach.prepared(run, environ, command, secrets=False, binds=service.binds, own_network=own_network)
    )
    log = logs / f"{service.name}.log"
    with log.open("ab") as output:
        child = process.start(
            start.argv, env=start.env, cwd=start.cwd, pass_fds=start.pass_fds, stdout=output, stderr=output
        )
    return Running(service=service, child=child, log=log)


def _end(running: Sequence[Running]) -> None:
    """Ask all services to end, so that Jupyter can end its kernels. Then kill the processes that have not ended."""
    every = {pid for one in running for pid in process.below(one.child.pid)}
    for one in running:
        one.child.terminate()  # the container runtime passes the signal on
    until = time.monotonic() + _SECONDS_TO_END
    for one in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.child.wait(max(0.0, until - time.monotonic()))
    processes.send({*every, *(pid for one in running for pid in process.below(one.child.pid))}, signal.SIGKILL)
    for one in running:
        one.child.kill()
        one.child.wait()


# -- does a service answer, and only to its user? -------------------------------------------


def _wait(running: Running, manifest: Manifest, is_over: Callable[[float], bool]) -> None:
    """Wait until a service answers on its socket.

    Raises:
        ToolMissing, ToolFailed: the service does not answer, or other users could use it without the token.
    """
    service, deadline = running.service, time.monotonic() + _SECONDS_TO_START
    while not _answers(service.socket):
        if running.child.poll() is not None:
            raise _not_started(running, manifest)
        if time.monotonic() > deadline:
            raise ToolFailed(f"{service.name} did not answer in {_SECONDS_TO_START:.0f} s", why=str(running.log))
        if is_over(_SECONDS_BETWEEN_LOOKS):
            raise ToolFailed(f"the session ended before {service.name} answered", why=str(running.log))
    if stat.S_IMODE(os.stat(service.socket).st_mode) & 0o077:
        raise ToolFailed(f"the socket of {service.name} is open to other users", why=service.socket)
    if service.request.kind == "jupyter" and _status_without_token(service.socket) != http.client.FORBIDDEN:
        raise ToolFailed("Jupyter answers without the token", why="its settings switch the token off")


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as trial:
        try:
            trial.connect(path)
        except OSError:
            return False
    return True


def _status_without_token(path: str) -> int:
    connection = http.client.HTTPConnection("localhost", timeout=_SECONDS_TO_START)
    with contextlib.closing(connection), socket.socket(socket.AF_UNIX) as connected:
        connected.connect(path)
        connection.sock = connected
        connection.request("GET", "/api/contents")
        return connection.getresponse().status


def _not_started(running: Running, manifest: Manifest) -> ToolMissing | ToolFailed:
    request, name = running.service.request, running.service.name
    status, said = running.child.returncode, _last_line(running.log)
    on_host = manifest.environment.kind == "host"
    if status == _MISSING:
        hint = tools.how_to_add(request.kind, on_host=on_host) if request.kind in tools.TOOLS else None
        return ToolMissing(f"{name} cannot start: {said}", why=str(running.log), hint=hint)
    alone = running.service.config["private"] and not on_host and "network" in said
    if status == _NO_NAMESPACE or alone:
        return ToolFailed(
            f"{name} was not started: this node does not allow a private network for it",
            why=said,
            hint="--allow-port lets it listen on 127.0.0.1, where every user of the node can connect to it",
        )
    what = "was ended" if status == _OPEN_TO_OTHERS else f"ended with status {status}"
    return ToolFailed(f"{name} {what}", why=f"{said}\n{running.log}")


def _last_line(log: Path) -> str:
    try:
        lines = read_end(log, most=4096).decode("utf-8", "replace").split("\n")
    except OSError as error:
        return str(error.strerror)
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
