"""Test whether the ranks of a job can communicate. Each rank is one process, started like a rank of the training.

Runs on: inside the image (or in a host environment). Needs only the standard library and torch, Python 3.8 to 3.14.

    smoke.py --folder DIR --backend gloo|nccl --seconds N              # all ranks together, started by torchrun
    smoke.py --folder DIR --backend ... --seconds N --pairs PLAN       # one process per node: pairs of nodes, in rounds

Each rank writes one JSON object per line to DIR/rank-N.jsonl: `phase`, `state` (`begin`, `end` or `failed`), `time`,
and the results. The process outside (smoke/run.py) reads these files. It ends ranks that take too long, because a rank
cannot end a collective that hangs. NCCL writes its log to DIR/nccl-rank-N.log.

The phases are the checks `smoke.*` of nccl_health (docs/explanation/network.md). `init` makes a process group and runs
one all_reduce of one element. `correct` compares the results of four collectives with known values, at sizes for which
NCCL uses different protocols (LL, LL128, Simple). `second-group` uses a second process group beside the first one,
because on some fabrics one group works, but two groups hang (laifs-container-recipes#44). `bandwidth` measures
all_reduce.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any, Callable, Dict, List, Optional, Tuple

# Numbers of float32 elements. NCCL uses different protocols for these numbers.
_SIZES = (1, 1 << 10, 1 << 18, 1 << 20)
# At most this many elements are gathered or exchanged by all ranks together.
_MOST_GATHERED = 1 << 22
# The inputs repeat after this many elements. With up to about 3,300 ranks, all results are whole numbers below 2**24,
# which float32 holds exactly.
_PERIOD = 97

_MEASURED_BYTES = 4 << 20
_MOST_MEASURED_BYTES = {"gloo": 16 << 20, "nccl": 1 << 30}
_SECONDS_TO_MEASURE = 0.1
_REPEATS = 3
_MOST_SOCKETS = 256
_LONGEST_ERROR = 2000
_ESTABLISHED = "01"


class Report:
    """The progress of this rank, in a file that another process reads while this rank runs or hangs."""

    def __init__(self, folder: str, rank: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(os.path.join(folder, "rank-%d.jsonl" % rank), flags, 0o600)

    def write(self, phase: str, state: str, **found: Any) -> None:
        """Append one line."""
        line = dict(found, phase=phase, state=state, time=time.time())
        os.write(self._file, (json.dumps(line, sort_keys=True) + "\n").encode("ascii"))

    def run(self, phase: str, act: Callable[[], Dict[str, Any]]) -> Dict[str, Any]:
        """Run one phase; record its begin, and then its end or failure. If it fails, its exception is raised again."""
        self.write(phase, "begin")
        started = time.monotonic()
        try:
            found = act()
        except Exception as error:
            text = "%s: %s" % (type(error).__name__, error)
            self.write(phase, "failed", seconds=time.monotonic() - started, error=text[:_LONGEST_ERROR])
            raise
        self.write(phase, "end", seconds=time.monotonic() - started, found=found)
        return found


class WrongValue(Exception):
    """The result of a collective is wrong for its inputs."""


class Group:
    """A process group of torch, and tensors on the device that its backend uses."""

    def __init__(self, torch: Any, backend: str, device: Any, group: Any = None) -> None:
        self.torch = torch
        self.backend = backend
        self.distributed = torch.distributed
        self.device = device
        self.group = group
        self.rank = self.distributed.get_rank(group)
        self.size = self.distributed.get_world_size(group)

    def pattern(self, count: int) -> Any:
        """Return `count` whole numbers, 0 to 96 repeated."""
        return self.torch.arange(count, device=self.device).remainder(_PERIOD).to(self.torch.float32)

    def require(self, name: str, count: int, found: Any, expected: Any) -> None:
        """Compare all found elements with the expected ones.

        Raises:
            WrongValue: an element differs.
        """
        if bool(self.torch.equal(found, expected)):
            return
        wrong = (found != expected).nonzero().flatten()
        first = int(wrong[0])
        raise WrongValue(
            "%s of %d elements: %d are wrong; element %d is %r and must be %r"
            % (name, count, len(wrong), first, float(found.flatten()[first]), float(expected.flatten()[first]))
        )

    def all_reduce(self, count: int) -> None:
        """Add a known tensor of each rank."""
        tensor = self.pattern(count) + (self.rank + 1)
        expected = self.pattern(count) * self.size + self.size * (self.size + 1) // 2
        self.distributed.all_reduce(tensor, group=self.group)
        self.require("all_reduce", count, tensor, expected)

    def all_gather(self, count: int) -> None:
        """Collect a known tensor of each rank."""
        count = self._share(count)
        parts = [self.torch.zeros(count, device=self.device) for _ in range(self.size)]
        self.distributed.all_gather(parts, self.pattern(count) + self.rank, group=self.group)
        for rank, part in enumerate(parts):
            self.require("all_gather from rank %d" % rank, count, part, self.pattern(count) + rank)

    def reduce_scatter(self, count: int) -> None:
        """Add known tensors; each rank gets one part of the sum."""
        count = self._share(count)
        parts = [self.pattern(count) + self.rank + part for part in range(self.size)]
        tensor = self.torch.zeros(count, device=self.device)
        self.distributed.reduce_scatter(tensor, parts, group=self.group)
        total = self.size * (self.size - 1) // 2 + self.size * self.rank
        self.require("reduce_scatter", count, tensor, self.pattern(count) * self.size + total)

    def all_to_all(self, count: int) -> None:
        """Send a known tensor from each rank to each rank."""
        count = self._share(count)
        outgoing = self.torch.cat([self.pattern(count) + self.rank * self.size + to for to in range(self.size)])
        incoming = self.torch.zeros_like(outgoing)
        self.distributed.all_to_all_single(incoming, outgoing, group=self.group)
        expected = [self.pattern(count) + sender * self.size + self.rank for sender in range(self.size)]
        self.require("all_to_all", count, incoming, self.torch.cat(expected))

    def _share(self, count: int) -> int:
        return max(1, min(count, _MOST_GATHERED) // int(self.size))


def _is_missing(error: Exception) -> bool:
    """Return whether the error says that the backend lacks a collective.

    A rank gets this error before it sends anything.
    """
    words = str(error).lower()
    return isinstance(error, NotImplementedError) or "does not support" in words or "not supported" in words


def compare_values(group: Group) -> Dict[str, Any]:
    """Run four collectives at several sizes, and compare every element. Return which ran, and which the backend lacks.

    Raises:
        WrongValue: a result is wrong.
    """
    ran: List[str] = []
    not_run: Dict[str, str] = {}
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        try:
            for count in _SIZES:
                getattr(group, name)(count)
        except (RuntimeError, NotImplementedError) as error:
            if not _is_missing(error):
                raise
            not_run[name] = "%s of this torch has no %s" % (group.backend, name)
        else:
            ran.append(name)
    return {"ran": ran, "not_run": not_run, "sizes": [4 * size for size in _SIZES]}


def use_two_groups(first: Group, seconds: float) -> Dict[str, Any]:
    """Make a second group of the same ranks, and use both groups at the same time."""
    limit = timedelta(seconds=seconds)
    made = first.distributed.new_group(list(range(first.size)), timeout=limit)
    second = Group(first.torch, first.backend, first.device, made)
    second.all_reduce(1)
    for count in _SIZES:
        tensors = [group.pattern(count) + (group.rank + 1) for group in (first, second)]
        work = [
            group.distributed.all_reduce(tensor, group=group.group, async_op=True)
            for group, tensor in zip((first, second), tensors)
        ]
        for one in work:
            one.wait()
        expected = first.pattern(count) * first.size + first.size * (first.size + 1) // 2
        for name, tensor in zip(("first", "second"), tensors):
            first.require("all_reduce in the %s of two groups" % name, count, tensor, expected)
    return {}


def measure(group: Group) -> Dict[str, Any]:
    """Return the bandwidth of all_reduce.

    `bus_gb_s` is bytes / seconds * 2 (n - 1) / n, in units of 1e9 bytes per second. This value does not depend on the
    number of ranks n (nccl-tests, PERFORMANCE.md).
    """
    _seconds_of(group, _MEASURED_BYTES)
    seconds = _seconds_of(group, _MEASURED_BYTES)
    wanted = int(_MEASURED_BYTES * _SECONDS_TO_MEASURE / max(seconds, 1e-6))
    size = min(max(_MEASURED_BYTES, wanted), _MOST_MEASURED_BYTES[group.backend])
    # All ranks use the same size: `_seconds_of` returns the same number on each of them.
    size -= size % 4
    seconds = min(_seconds_of(group, size) for _ in range(_REPEATS))
    share = 2 * (group.size - 1) / group.size
    return {"bytes": size, "seconds": seconds, "bus_gb_s": share * size / seconds / 1e9}


def _seconds_of(group: Group, size: int) -> float:
    """Return how long all_reduce takes on the slowest rank."""
    tensor = group.torch.ones(size // 4, device=group.device)
    _finish(group)
    started = time.monotonic()
    group.distributed.all_reduce(tensor, group=group.group)
    _finish(group)
    took = group.torch.tensor([time.monotonic() - started], dtype=group.torch.float64, device=group.device)
    group.distributed.all_reduce(took, op=group.distributed.ReduceOp.MAX, group=group.group)
    return float(took)


def _finish(group: Group) -> None:
    if group.backend == "nccl":
        group.torch.cuda.synchronize()


# -- the connections that are really used ---------------------------------------------------


def connections(ignored_port: str, folder: str = "/proc/self") -> List[List[str]]:
    """Return both addresses of each TCP connection of this process, if the two addresses are different.

    Args:
        ignored_port: port of the store, which only serves the rendezvous.
        folder: folder of the process in /proc.
    """
    own = _own_sockets(folder)
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            with open(folder + "/net/" + name, encoding="ascii") as file:
                lines = file.read().splitlines()[1:]
        except (OSError, ValueError):
            continue
        for line in lines:
            words = line.split()
            if len(words) < 10 or words[3] != _ESTABLISHED or words[9] not in own:
                continue
            here, there = _address(words[1]), _address(words[2])
            if ignored_port not in (here[1], there[1]):
                found.add((here[0], there[0]))
    return [list(pair) for pair in sorted(found)][:_MOST_SOCKETS]


def _own_sockets(folder: str) -> Dict[str, bool]:
    inodes = {}
    for name in os.listdir(folder + "/fd"):
        try:
            target = os.readlink(folder + "/fd/" + name)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes[target[8:-1]] = True
    return inodes


def _address(word: str) -> Tuple[str, str]:
    """Return address and port as text. proc_pid_net(5) has 32-bit words in the byte order of the machine."""
    import socket

    digits, _, port = word.partition(":")
    raw = b"".join(int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8))
    if len(raw) == 16 and raw.startswith(b"\0" * 10 + b"\xff\xff"):
        raw = raw[12:]
    family = socket.AF_INET6 if len(raw) == 16 else socket.AF_INET
    return socket.inet_ntop(family, raw), str(int(port, 16))


# -- all ranks together -----------------------------------------------------------------------


def _device(torch: Any, backend: str) -> Any:
    if backend != "nccl":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _versions(torch: Any, backend: str) -> Dict[str, Any]:
    found = {"torch": str(torch.__version__)}
    if backend == "nccl":
        version = torch.cuda.nccl.version()
        found["nccl"] = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
    return found


def nccl_libraries() -> List[str]:
    """Return the libraries of NCCL, and its plugins, that this process has loaded."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = {line.split(None, 5)[5].strip() for line in file if "nccl" in line and line.count(" ") >= 5}
    except (OSError, IndexError):
        return []
    return sorted(path for path in paths if os.path.basename(path).startswith(("libnccl", "librccl")))


def _form(torch: Any, options: argparse.Namespace) -> Group:
    device = _device(torch, options.backend)
    torch.distributed.init_process_group(options.backend, timeout=timedelta(seconds=options.seconds))
    group = Group(torch, options.backend, device)
    group.all_reduce(1)
    return group


def test_together(torch: Any, report: Report, options: argparse.Namespace) -> None:
    """Run all phases with all ranks of the job."""
    made: List[Group] = []

    def init() -> Dict[str, Any]:
        made.append(_form(torch, options))
        return {"connections": connections(os.environ.get("MASTER_PORT", "")), "libraries": nccl_libraries()}

    report.run("init", init)
    group = made[0]
    report.run("correct", lambda: compare_values(group))
    report.run("second-group", lambda: use_two_groups(group, options.seconds))
    report.run("bandwidth", lambda: measure(group))
    torch.distributed.destroy_process_group()
    # This is the last line of the file. After it, this process does nothing that could fail or hang (`_end`).
    report.write("all", "end")


# -- pairs of nodes ---------------------------------------------------------------------------


def test_pairs(torch: Any, report: Report, options: argparse.Namespace) -> None:
    """Test pairs of nodes, one process per node; a pair that hangs does not stop the next round.

    The plan has `nodes` (each with `host` and `port`) and `rounds`. Each round is a list of pairs of node numbers. A
    round takes the same time on every node, so that both nodes of a pair start a round together, even if a node hung in
    the round before.
    """
    with open(options.pairs, encoding="utf-8") as file:
        plan = json.load(file)
    rank = int(os.environ["RANK"])
    started = time.monotonic()
    for number, pairs in enumerate(plan["rounds"]):
        pair = next((pair for pair in pairs if rank in pair), None)
        if pair is not None:
            _in_child(functools.partial(_test_pair, torch, report, options, plan, pair), options.seconds)
        left = started + (number + 1) * options.seconds - time.monotonic()
        if left > 0 and number + 1 < len(plan["rounds"]):
            time.sleep(left)
    report.write("all", "end")


def _in_child(act: Callable[[], None], seconds: float) -> None:
    """Run `act` in a child process, and kill it after `seconds`. A process cannot use NCCL again after a failure."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException as error:
            print("%s: %s" % (type(error).__name__, error), file=sys.stderr, flush=True)
            os._exit(1)
    until = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        time.sleep(0.02)


def _test_pair(torch: Any, report: Report, options: argparse.Namespace, plan: Dict[str, Any], pair: List[int]) -> None:
    first, rank = plan["nodes"][pair[0]], int(os.environ["RANK"])
    limit = timedelta(seconds=options.seconds * 0.8)

    def act() -> Dict[str, Any]:
        device = _device(torch, options.backend)
        store = torch.distributed.TCPStore(first["host"], first["port"], 2, rank == pair[0], limit)
        torch.distributed.init_process_group(
            options.backend, store=store, rank=pair.index(rank), world_size=2, timeout=limit
        )
        group = Group(torch, options.backend, device)
        group.all_reduce(1)
        use_two_groups(group, options.seconds * 0.8)
        return measure(group)

    report.run("pair-%d-%d" % tuple(pair), act)


def _arguments(words: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--backend", required=True, choices=("gloo", "nccl"))
    parser.add_argument("--seconds", required=True, type=float, help="limit of each collective, and of each pair")
    parser.add_argument("--diagnostics", action="store_true", help="let NCCL 2.31 and newer test itself")
    parser.add_argument("--pairs", help="file with the rounds of pairs")
    return parser.parse_args(words)


def main(words: Optional[List[str]] = None) -> int:
    """Run the test; the files in the folder contain the results."""
    options = _arguments(words)
    rank = int(os.environ["RANK"])
    report = Report(options.folder, rank)
    report.write("start", "begin")
    if options.backend == "nccl":
        # This is set before torch is imported. Each rank has its own file, because in one file the lines would mix.
        os.environ["NCCL_DEBUG"] = "INFO"
        os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,NET,ENV,GRAPH"
        if options.diagnostics:
            os.environ["NCCL_RUN_DIAGNOSTICS"] = os.environ["NCCL_RUN_RAS_DIAGNOSTICS"] = "1"
        os.environ["NCCL_DEBUG_FILE"] = os.path.join(options.folder, "nccl-rank-%d.log" % rank)
    # This folder has modules of hpcenv, which must not hide modules of the environment.
    if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("torch.distributed")
        report.write("start", "end", found=_versions(torch, options.backend))
    except Exception as error:
        report.write("start", "failed", error=("%s: %s" % (type(error).__name__, error))[:_LONGEST_ERROR])
        raise
    if options.pairs:
        test_pairs(torch, report, options)
    else:
        test_together(torch, report, options)
    return 0


def _end(status: int) -> None:
    """End this process at once: the clean-up of Python and of torch's libraries could hang or fail."""
    import ctypes

    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # output of libraries, such as NCCL's diagnostics
    os._exit(status)


if __name__ == "__main__":
    _end(main())
