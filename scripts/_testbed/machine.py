"""A machine of the cluster: namespaces under one init process, found again by scanning /proc.

Nothing about a running machine is kept in files: what /proc says is true also after a crash.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import cgroup, network
from .errors import Status, TestbedError
from .instance import Instance, Layout
from .process import Completed, Runner

GPUS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One machine and its place in the network."""

    name: str
    role: str  # "ctl", "registry", "login" or "compute"
    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process of a machine, as the host sees it."""

    pid: int
    inner_pid: int
    name: str
    state: str


def machines(layout: Layout) -> list[Machine]:
    """All machines, in the order in which they start."""
    fixed = [("ctl", "ctl", 2), ("registry", "registry", 3), ("login", "login", 4)]
    nodes = [(f"n{i}", "compute", 10 + i) for i in range(1, layout.nodes + 1)]
    return [
        Machine(name=name, role=role, address=network.address(layout.subnet, host))
        for name, role, host in fixed + nodes
    ]


def machine_named(layout: Layout, name: str) -> Machine:
    """The machine with that name, or an error that lists them."""
    known = {machine.name: machine for machine in machines(layout)}
    if name not in known:
        raise TestbedError(f"no machine {name!r}", why=f"there are {', '.join(known)}", status=Status.NOT_UP)
    return known[name]


def start(instance: Instance, layout: Layout, machine: Machine, runner: Runner) -> None:
    """Begin a machine's life; `wait_started` sees the end of it."""
    own = instance.machine(machine.name)
    own.mkdir(parents=True, exist_ok=True)
    script = str(Path(__file__).with_name("machine_init.sh"))
    root = layout.service_root if machine.role in ("ctl", "registry") else layout.node_root
    gpus = GPUS if machine.role == "compute" else 0
    words = ["bash", script, machine.name, machine.role, root, str(own), str(instance.etc), str(gpus), runner.mark]
    words += cgroup.words(instance, layout, machine.name, machine.role)
    unshare = ["unshare", "--mount", "--uts", "--pid", "--ipc", "--fork", "--kill-child", "--propagation", "private"]
    enter = ["nsenter", f"--net={instance.netns_path(machine.name)}", "--"]
    binds = _binds(instance, layout, machine)
    runner.spawn([*enter, *unshare, "--", *words, *binds], log=own / "init.log")


def _binds(instance: Instance, layout: Layout, machine: Machine) -> list[str]:
    """What a machine sees of the host, as triples MODE SOURCE TARGET."""
    binds = [
        ("rw", instance.home, "/home"),
        ("rw", instance.shared, "/shared"),
        ("rw", instance.etc / "slurm", "/etc/slurm"),
    ]
    if machine.role in ("login", "compute"):
        # Read-only, so that all instances can use the cached one; to change a file in one
        # node's view: exec --node n2 --user root -- mount --bind CHANGED FILE.
        binds += [("ro", Path(layout.hostenv) / kind, f"/shared/{kind}") for kind in ("hostenv", "python3.11")]
    if machine.role == "registry":
        binds.append(("overlay", Path(layout.store), "/var/lib/registry"))
    return [word for mode, source, target in binds for word in (mode, str(source), target)]


def wait_started(instance: Instance, machine: Machine, timeout: float = 60) -> int:
    """The pid of the machine's init, once it is the real one (not the script before it)."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        init = init_of(instance, machine.name)
        if init is not None and init.name == "tini":
            return init.pid
        time.sleep(0.05)
    log = instance.machine(machine.name) / "init.log"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:]) if log.exists() else ""
    raise TestbedError(f"machine {machine.name} did not start within {timeout:.0f} s", why=tail, hint=f"read {log}")


def init_of(instance: Instance, name: str) -> Process | None:
    """The first process of a machine, None if the machine is off."""
    return next((process for process in processes(instance, name) if process.inner_pid == 1), None)


def processes(instance: Instance, name: str) -> list[Process]:
    """All processes inside a machine (not those on the host that only hold its namespace)."""
    try:
        wanted = os.stat(instance.netns_path(name))
    except FileNotFoundError:
        return []
    found = []
    for pid in all_pids():
        try:
            here = os.stat(f"/proc/{pid}/ns/net")
            if (here.st_ino, here.st_dev) != (wanted.st_ino, wanted.st_dev):
                continue
            fields = status_fields(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        inner = fields.get("NSpid", "").split()
        if len(inner) > 1:
            state = fields.get("State", "?")[:1]
            found.append(Process(pid=pid, inner_pid=int(inner[1]), name=fields.get("Name", ""), state=state))
    return found


def all_pids() -> list[int]:
    """Every process on the host."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def status_fields(pid: int) -> dict[str, str]:
    """/proc/PID/status as a mapping."""
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def enter_argv(pid: int, argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` inside the machine whose init has this pid."""
    # Not `--all`: the user namespace is our own, and joining one's own is refused by the kernel.
    kinds = ["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]
    return ["nsenter", "--target", str(pid), *kinds, "--", *argv]


def as_user(user: str, argv: Sequence[str]) -> list[str]:
    """The same as an unprivileged user, with that user's groups and without capabilities."""
    if user == "root":
        return list(argv)
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--inh-caps=-all", "--", *argv]


def run_inside(
    instance: Instance, runner: Runner, name: str, argv: Sequence[str], *, timeout: float = 60, check: bool = True
) -> Completed:
    """Run a command as root inside a machine, to the end."""
    return runner.run(enter_argv(_init_pid(instance, name), argv), timeout=timeout, check=check)


def start_inside(instance: Instance, runner: Runner, name: str, argv: Sequence[str], log: str) -> None:
    """Leave a program running inside a machine, its output in a file there."""
    # `setsid --fork` makes it a child of the machine's init. The shell gets words, not text. The
    # machine's own control group, if it has one, shows itself as the root of the hierarchy there.
    join = 'for all in /sys/fs/cgroup/*/cgroup.procs; do [ ! -w "$all" ] || echo $$ >"$all"; done'
    script = f'{join}; exec "$@" >>"$0" 2>&1 </dev/null'
    clean = ["env", "-i", f"PATH={runner.environment['PATH']}", "LANG=C.UTF-8"]
    words = [*clean, "setsid", "--fork", "sh", "-c", script, log, *argv]
    runner.run(enter_argv(_init_pid(instance, name), words))


def _init_pid(instance: Instance, name: str) -> int:
    init = init_of(instance, name)
    if init is None:
        raise TestbedError(
            f"machine {name} is not running",
            hint=f"scripts/testbed fault heal {name}, or scripts/testbed up",
            status=Status.NOT_UP,
        )
    return init.pid


def send_signal(pids: Sequence[int], number: signal.Signals) -> None:
    """Signal processes; those that are gone already do not matter."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
