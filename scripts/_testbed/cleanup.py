"""What `down` does, and how it proves that nothing is left.

It trusts no file: processes are found by the mark in their environment and by their network
namespace, namespaces and control groups by their name, mounts by the path of the state directory. So it works
after `up` was killed at any line.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from . import cgroup, machine
from .errors import TestbedError
from .instance import Instance
from .process import MARK, Runner
from .progress import Progress

_NETNS = Path("/run/netns")


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftovers:
    """Everything of an instance that exists on this machine."""

    processes: tuple[int, ...]
    namespaces: tuple[str, ...]
    mounts: tuple[str, ...]
    links: tuple[str, ...]
    groups: tuple[str, ...]
    directories: tuple[str, ...]

    def __bool__(self) -> bool:
        return any((self.processes, self.namespaces, self.mounts, self.links, self.groups, self.directories))

    def render(self) -> str:
        """The proof, or what contradicts it."""
        counts = {
            "process": self.processes,
            "network namespace": self.namespaces,
            "mount": self.mounts,
            "bridge or link": self.links,
            "control group": self.groups,
            "directory": self.directories,
        }
        return "\n".join(
            f"  {word}: {', '.join(str(item) for item in items) if items else 'none'}" for word, items in counts.items()
        )


def down(instance: Instance, runner: Runner, progress: Progress) -> Leftovers:
    """Remove everything, then look again; answers what was still there at the end."""
    cgroup.thaw(instance)
    _kill_all(instance, progress)
    cgroup.remove(instance)
    for name in _namespaces(instance):
        runner.run(["ip", "netns", "delete", name])
    for path in sorted(_mounts(instance), reverse=True):
        runner.run(["umount", "--lazy", path])
    if instance.state.exists():
        progress.say(f"removing {instance.state}")
        if _mounts(instance):  # never walk through a mount that would lead outside
            raise TestbedError(f"still mounted below {instance.state}", why="\n".join(_mounts(instance)))
        shutil.rmtree(instance.state)
    return find(instance, runner)


def find(instance: Instance, runner: Runner) -> Leftovers:
    """What exists of this instance now."""
    return Leftovers(
        processes=tuple(_processes(instance)),
        namespaces=tuple(_namespaces(instance)),
        mounts=tuple(_mounts(instance)),
        links=tuple(_links(instance, runner)),
        groups=tuple(str(one) for one in cgroup.groups(instance)),
        directories=(str(instance.state),) if instance.state.exists() else (),
    )


def _kill_all(instance: Instance, progress: Progress) -> None:
    deadline = time.monotonic() + 30
    while pids := _processes(instance):
        progress.say(f"killing {len(pids)} processes")
        machine.send_signal(pids, signal.SIGKILL)
        # The first process of a pid namespace is gone only after all others in it are.
        for _ in range(50):
            time.sleep(0.05)
            if not any(Path(f"/proc/{pid}").exists() and not _is_zombie(pid) for pid in pids):
                break
        if time.monotonic() > deadline:
            raise TestbedError(f"these processes survive SIGKILL: {pids}", why="they may hang in a file system")


def _processes(instance: Instance) -> list[int]:
    """Processes with our mark, in a network namespace of ours, or in a pid namespace with a marked one."""
    namespaces = {_identity(_NETNS / name) for name in _namespaces(instance)} - {None}
    marked = f"{MARK}={instance.name}".encode()
    own_pid_ns = _identity(Path("/proc/self/ns/pid"))
    chosen: set[int] = set()
    pid_namespaces: set[tuple[int, int] | None] = set()
    everyone = [pid for pid in machine.all_pids() if pid != os.getpid() and not _is_zombie(pid)]
    for pid in everyone:
        if marked in _environment(pid):
            chosen.add(pid)
            pid_namespaces.add(_identity(Path(f"/proc/{pid}/ns/pid")))
        elif _identity(Path(f"/proc/{pid}/ns/net")) in namespaces:
            chosen.add(pid)
    pid_namespaces -= {own_pid_ns, None}
    chosen |= {pid for pid in everyone if _identity(Path(f"/proc/{pid}/ns/pid")) in pid_namespaces}
    return sorted(chosen)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _is_zombie(pid: int) -> bool:
    try:
        return machine.status_fields(pid).get("State", "").startswith("Z")
    except OSError:
        return True


def _namespaces(instance: Instance) -> list[str]:
    try:
        names = os.listdir(_NETNS)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if name.startswith(instance.prefix))


def _mounts(instance: Instance) -> list[str]:
    """Mount points below the state directory, in this mount namespace."""
    inside = f"{instance.state}/"
    targets = [_unescape(line.split()[4]) for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [target for target in targets if f"{target}/".startswith(inside)]


def _unescape(field: str) -> str:
    """proc(5): space, tab, newline and backslash are written as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), field)


def _links(instance: Instance, runner: Runner) -> list[str]:
    """The bridge, should it ever be seen outside of its namespace."""
    done = runner.run(["ip", "-o", "link", "show"], check=False)
    names = [line.split(":")[1].strip() for line in done.stdout.splitlines() if line.count(":") > 1]
    return [name for name in names if name.partition("@")[0] == instance.bridge]
