"""Start and end Ray on one node. The first node runs Ray's head and the script, each other node runs a Ray node.

Runs on: inside the image (or in a bare host environment), called by agent.py. Standard library, Python 3.8 to 3.14.
Ray is part of the environment. Ray 2.52 or later is needed, because older versions have no token authentication.

    --ray OPTIONS -- PYTHON-ARGUMENTS...

The options are the options of tasks.py for one program, and also these:

    --node=NAME           name of this node, also in Ray
    --address=HOST:PORT   address of Ray's head
    --local-address=IP    address of this node, for the other nodes
    --gpus=N --memory=MB  what Slurm gave to the job on this node; memory is 0 if it is unknown
    --folder=DIR          folder for Ray's files, made with mode 0700, because Ray gives the folders in it mode 0777
    --meet=PREFIX         PREFIX.token is the file with the token; the head makes PREFIX.ended when the script has ended

`ray start --block` is a child of the agent. The agent ends this child and all its descendants. The agent does not use
`ray stop`, which would end each Ray of this user on the node (ray#59551). If Ray ends before the script, the job ends,
and the record names the node.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any, Dict, List, Tuple

try:
    from importlib import metadata
except ImportError:  # pragma: no cover  (Python 3.7)
    metadata = None  # type: ignore[assignment]

_OLDEST = (2, 52)
# How long the nodes wait for each other. Each node may first have to read the image.
_SECONDS_TO_MEET = 300.0
_SECONDS_TO_END = 5.0
# Number of attempts to start Ray. `ray start` waits 30 s for its raylet, and has no option for another time (2.60).
# This time is too short on some busy nodes, and if Ray is read over a network.
_STARTS = 3
_CHECK_SECONDS = 0.1
_PR_SET_CHILD_SUBREAPER = 36
# Ports are taken in blocks. The blocks are below the ports that the kernel gives to connections (ip_local_port_range,
# from 32768).
_FIRST_PORT, _END_OF_PORTS, _BLOCK = 10240, 32768, 128
_PORT_OPTIONS = ("node-manager-port", "object-manager-port", "runtime-env-agent-port", "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port", "metrics-export-port")  # fmt: skip
_FOR_WORKERS = 16  # the ports before this one are for the daemons
_LARGEST_LOG = 8 << 20

# Waits until Ray has N nodes, and prints the names of its nodes. This program uses only public functions of Ray.
_COUNT = """\
import sys, time
import ray
count, until = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
ray.init(log_to_driver=False, logging_level="error")
while True:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) >= count or time.monotonic() > until:
        break
    time.sleep(0.2)
print(*sorted(node["NodeName"] for node in nodes), flush=True)
"""


class RayFailed(Exception):
    """Ray itself failed on this node; the text goes to the record."""


class Ports:
    """Free consecutive ports of this node, which no other job of hpcenv takes while this process runs.

    An abstract socket (unix(7)) reserves each block. The name of the socket disappears when this process ends, for any
    reason.
    """

    def __init__(self, count: int) -> None:
        self.count = -(-count // _BLOCK) * _BLOCK
        self._names = []  # type: List[socket.socket]
        places = list(range(_FIRST_PORT, _END_OF_PORTS - self.count + 1, _BLOCK))
        start = random.SystemRandom().randrange(len(places)) if places else 0
        for first in places[start:] + places[:start]:
            if self._takes(first):
                self.first = first
                return
        span = "%d to %d" % (_FIRST_PORT, _END_OF_PORTS - 1)
        raise RayFailed("no %d free TCP ports one after the other (%s)" % (self.count, span))

    def _takes(self, first: int) -> bool:
        try:
            for block in range(first, first + self.count, _BLOCK):
                name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._names.append(name)
                name.bind("\0hpcenv-ray-ports-%d" % block)
            for port in range(first, first + self.count):
                with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
                    tried.bind(("", port))
        except OSError:
            while self._names:
                self._names.pop().close()
            return False
        return True


class RayNode:
    """Ray on this node.

    Attributes:
        is_head: whether the head and the script run on this node.
        folder: folder for Ray's files, on the node's disk; only this user may enter it.
    """

    def __init__(self, words: List[str], proc: Any) -> None:
        given = dict(word[2:].partition("=")[::2] for word in words)
        self.name = given["node"]
        self.nodes = int(given["nodes"])
        self.is_head = given["node-rank"] == "0"
        self.log_dir = given["log-dir"]
        self._address = _not_loopback(given["address"])
        self._local_address = _not_loopback(given["local-address"])
        self._gpus = int(given["gpus"])
        self._memory = int(given["memory"]) << 20
        self._meet = given["meet"]
        self._proc = proc
        self._ray = None  # type: Any
        os.makedirs(self.log_dir, exist_ok=True)
        self._log = os.path.join(self.log_dir, "ray.log")
        self.folder = given["folder"]
        self._make_folder()

    def _make_folder(self) -> None:
        with open(self._meet + ".token", encoding="ascii") as file:
            token = file.read()
        os.mkdir(self.folder, 0o700)
        with os.fdopen(os.open(self.folder + "/token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)

    def start(self, ports: Ports) -> None:
        """Start Ray. Before the start, all nodes except the first wait for the head."""
        os.environ.pop("RAY_AUTH_TOKEN", None)  # Ray would use this variable instead of the file
        os.environ.pop("RAY_ADDRESS", None)
        os.environ.update(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=self.folder + "/token",
            RAY_USAGE_STATS_ENABLED="0",
            RAY_TMPDIR=self.folder + "/r",
            # The ports of two more daemons of the head; `ray start` has no options for them.
            AUTOSCALER_METRIC_PORT=str(ports.first + len(_PORT_OPTIONS)),
            DASHBOARD_METRIC_PORT=str(ports.first + len(_PORT_OPTIONS) + 1),
        )
        os.environ.setdefault("VLLM_HOST_IP", self._local_address)  # vLLM compares it with Ray's address of the node
        if not self.is_head:
            self._wait_for_head()
        for left in reversed(range(_STARTS)):
            try:
                self._start_once(ports)
                break
            except RayFailed as error:
                if not left:
                    raise
                print("hpcenv: node %s: %s; it is started again" % (self.name, error), file=sys.stderr, flush=True)
                self._kill_below()
        os.environ["RAY_ADDRESS"] = self._address

    def _start_once(self, ports: Ports) -> None:
        """Start Ray, and wait until its log says that it runs."""
        words = [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "entry.py"), "ray", "start"]
        with open(self._log, "ab") as log:
            begin = log.tell()
            self._ray = subprocess.Popen(
                [*words, *self._options(ports)], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        while True:
            self.require_ray()
            with open(self._log, "rb") as log:
                log.seek(begin)
                if b"Ray runtime started" in log.read():
                    return
            time.sleep(_CHECK_SECONDS)

    def _options(self, ports: Ports) -> List[str]:
        cpus = len(os.sched_getaffinity(0))
        numbers = {name: ports.first + number for number, name in enumerate(_PORT_OPTIONS)}
        numbers["min-worker-port"] = ports.first + _FOR_WORKERS
        numbers["max-worker-port"] = ports.first + ports.count - 1
        numbers.update({"num-cpus": cpus, "num-gpus": self._gpus})
        if self._memory:
            room = os.statvfs("/dev/shm")
            # Ray's default is also 30 %, but it is 30 % of the memory of the whole machine.
            store = max(min(self._memory * 3 // 10, room.f_bavail * room.f_frsize * 9 // 10), 80 << 20)
            numbers.update({"memory": self._memory - store, "object-store-memory": store})
        head = ["--address=" + self._address]
        if self.is_head:
            port = self._address.rpartition(":")[2]
            numbers["ray-client-server-port"] = ports.first + len(_PORT_OPTIONS) + 2
            head = ["--head", "--port=" + port, "--include-dashboard=false"]
        place = [
            "--node-ip-address=" + self._local_address,
            "--node-name=" + self.name,
            "--temp-dir=" + self.folder + "/r",
        ]
        given = ["--%s=%d" % number for number in sorted(numbers.items())]
        return [*head, "--block", "--disable-usage-stats", *place, *given]

    def _wait_for_head(self) -> None:
        host, _, port = self._address.rpartition(":")
        until = time.monotonic() + _SECONDS_TO_MEET
        while True:
            self.require_ray()
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise RayFailed("no answer of Ray's head at %s: %s" % (self._address, error))
            time.sleep(_CHECK_SECONDS)

    def require_nodes(self) -> None:
        """Wait until all nodes have joined Ray."""
        argv = [sys.executable, "-c", _COUNT, str(self.nodes), str(_SECONDS_TO_MEET)]
        with open(self._log, "ab") as log:
            counting = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
        assert counting.stdout is not None
        while counting.poll() is None:
            self.require_ray()
            time.sleep(_CHECK_SECONDS)
        names = counting.stdout.read().decode(errors="replace").split()
        if counting.returncode != 0:
            raise RayFailed("Ray's head does not answer: %s" % self._last_line())
        if len(names) < self.nodes:
            raise RayFailed("only %d of %d nodes are in Ray: %s" % (len(names), self.nodes, " ".join(names)))
        print("hpcenv: Ray has %d nodes: %s" % (len(names), " ".join(names)), flush=True)

    def require_ray(self) -> None:
        """Raise RayFailed if Ray, or one of its daemons, has ended on this node."""
        if self._ray is None:
            return
        # `ray start` checks its daemons only once a second. Before that, the script may fail because of this node.
        for pid in self._proc.children(self._ray.pid):
            state, code = self._proc.state(pid)
            if state == "Z" and code and code != signal.SIGTERM:
                raise RayFailed("%s ended with %d" % (_name_of(pid), 128 + code if code < 128 else code >> 8))
        code = self._ray.poll()
        if code is not None:
            raise RayFailed("`ray start` ended with %d: %s" % (code if code >= 0 else 128 - code, self._last_line()))

    def has_ended(self) -> bool:
        """Return whether the head has reported that the script has ended."""
        # When the folder is opened, an NFS client asks the server. Otherwise the client may remember that the file was
        # missing.
        folder, name = os.path.split(self._meet + ".ended")
        return name in os.listdir(folder)

    def tell_end(self, status: int) -> None:
        """Tell the other nodes that the script has ended."""
        with open(self._meet + ".ended", "w", encoding="ascii") as file:
            file.write("%d\n" % status)
        if os.path.exists(self._meet + ".token"):
            os.unlink(self._meet + ".token")

    def _last_line(self) -> str:
        with open(self._log, encoding="utf-8", errors="replace") as file:
            lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", file.read()[-20000:]).splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it said nothing"

    def end(self, keep_logs: bool) -> None:
        """End everything below this process, and remove the folder."""
        if self._ray is not None and self._ray.poll() is None:
            self._ray.terminate()
            try:
                self._ray.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                pass
        self._kill_below()
        if keep_logs:
            self._keep_logs()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_below(self) -> None:
        until = time.monotonic() + _SECONDS_TO_END
        while time.monotonic() < until:
            below = self._proc.descendants(os.getpid())
            left = [pid for pid, _ in below if self._proc.state(pid)[0] not in ("Z", "X", "")]
            if not left:
                return
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
            time.sleep(0.02)

    def _keep_logs(self) -> None:
        def left_out(folder: str, names: List[str]) -> List[str]:
            paths = {name: os.path.join(folder, name) for name in names}
            return [
                name for name, path in paths.items() if os.path.islink(path) or os.path.getsize(path) > _LARGEST_LOG
            ]

        try:
            logs = os.path.join(self.folder, "r", "session_latest", "logs")
            shutil.copytree(os.path.realpath(logs), os.path.join(self.log_dir, "ray-logs"), ignore=left_out)
        except (OSError, shutil.Error):
            pass  # Ray had not begun to write, or the disk is full; ray.log is kept in any case


def _name_of(pid: int) -> str:
    try:
        with open("/proc/%d/comm" % pid, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "a daemon"


def _not_loopback(address: str) -> str:
    """Return the address with 127.0.0.2 for 127.0.0.1, because Ray would change 127.0.0.1 (services.py, 2.60)."""
    return address.replace("127.0.0.1", "127.0.0.2")


def run(argv: List[str], tasks: Any, proc: Any) -> Dict[str, Any]:
    """Run Ray, and the script on the first node, until the script ends; return the agent's record.

    Args:
        argv: options and program, see the top of this file.
        tasks, proc: the modules of these names, in the folder of this file.
    """
    end = argv.index("--")
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # Ray's leftover processes become our children
    record = {"schema": 1, "status": 1, "error": "", "asked": "", "ranks": []}  # type: Dict[str, Any]
    node = None  # type: Any
    try:
        _require_token_support()
        node = RayNode(argv[:end], proc)
        ports = Ports(_FOR_WORKERS + 64 + 4 * len(os.sched_getaffinity(0)))
        node.start(ports)
        record["status"], record["ranks"] = (
            _run_script(node, argv, tasks) if node.is_head else (_wait_for_end(node), [])
        )
    except (RayFailed, OSError) as error:
        record["error"] = str(error)
        print("hpcenv: node %s: %s" % (node.name if node else "", error), file=sys.stderr, flush=True)
    finally:
        if node is not None:
            if node.is_head:
                node.tell_end(record["status"])
            node.end(keep_logs=record["status"] != 0)
    return record


def _require_token_support() -> None:
    try:
        version = metadata.version("ray")
    except Exception:
        raise RayFailed("the environment has no Ray")
    numbers = tuple(int(number) for number in version.split(".")[:2] if number.isdigit())
    if numbers < _OLDEST:
        raise RayFailed("Ray %s has no token authentication; 2.52 or later has" % version)


def _run_script(node: RayNode, argv: List[str], tasks: Any) -> Tuple[int, List[Dict[str, Any]]]:
    """Run the script when all nodes have joined; return the script's status, and its record if the script failed."""
    node.require_nodes()
    end = argv.index("--")
    options = tasks.TaskOptions(argv[:end])
    # With this variable, the launch step finds the process to which it sends the signals of a stop
    # (launch/processes.py).
    options.variables["HPCENV_RAY_SCRIPT"] = "1"
    script = tasks.Task(options, -1, argv[end + 1 :])
    try:
        while not script.look():
            node.require_ray()
            time.sleep(_CHECK_SECONDS)
    finally:
        if script.process.poll() is None:
            script.process.kill()
    return script.status, [script.record()] if script.status else []


def _wait_for_end(node: RayNode) -> int:
    # Many nodes must not ask the file system at once.
    between = max(0.5, node.nodes / 50.0)
    asked = time.monotonic()
    while True:
        node.require_ray()
        if time.monotonic() - asked > between:
            asked = time.monotonic()
            if node.has_ended():
                return 0
        time.sleep(_CHECK_SECONDS)
