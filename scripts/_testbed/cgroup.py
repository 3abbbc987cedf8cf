"""Control groups for `up --proctrack cgroup`: can this machine do it, where, and what `down` takes away.

Only version 1: the freezer is what Slurm's proctrack/cgroup holds processes with, and where the machine
has the memory controller too, task/cgroup holds jobs to their memory, as most real sites do. Hierarchies
of one controller can be shared with whatever else runs here. All namespaces see one hierarchy, so each
machine gets a sub-group in each and a cgroup namespace of its own; without them two nodes' steps of one
job would share a group.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from .errors import Status, TestbedError
from .instance import Instance, Layout

LINUXPROC = "linuxproc"
CGROUP = "cgroup"
_CONTROLLER = "freezer"
_MEMORY = "memory"
# Debian's place of Slurm's plugins.
_PLUGINS = Path("usr/lib/x86_64-linux-gnu/slurm-wlm")
_MOUNTINFO = Path("/proc/self/mountinfo")
_DISABLED = "CgroupPlugin=disabled\n"
_VERSION_1 = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n"
_LIMITS = "ConstrainRAMSpace=yes\n"


def require(proctrack: str, mountinfo: Path = _MOUNTINFO) -> None:
    """Refuse proctrack/cgroup at once where the machine has no cgroup v1 to give."""
    if proctrack != CGROUP:
        return
    mounted = _mounted(mountinfo)
    place = mounted.get(_CONTROLLER)
    if place is None:
        known = sorted(mounted)
        raise TestbedError(
            "this machine cannot run proctrack/cgroup",
            why=f"no cgroup v1 hierarchy with {_CONTROLLER} is mounted (v1 here: {', '.join(known) or 'none'}); "
            "with cgroup v2 Slurm wants systemd or a delegated tree, which the machines have not",
            hint=f"scripts/testbed up --proctrack {LINUXPROC}; or where the kernel has it free: "
            f"mkdir -p /sys/fs/cgroup/{_CONTROLLER} && "
            f"mount -t cgroup -o {_CONTROLLER} {_CONTROLLER} /sys/fs/cgroup/{_CONTROLLER}",
            status=Status.CANNOT_RUN_HERE,
        )
    probe = place / f"hpcenv-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise TestbedError(
            "this machine cannot run proctrack/cgroup",
            why=f"no group can be made in {place}: {error.strerror}",
            hint=f"scripts/testbed up --proctrack {LINUXPROC}",
            status=Status.CANNOT_RUN_HERE,
        ) from error


def require_plugin(node_root: Path, slurm: str) -> None:
    """Refuse it too where this Slurm has lost its plugin for version 1."""
    plugin = node_root / _PLUGINS / "cgroup_v1.so"
    if not plugin.is_file():
        raise TestbedError(
            f"Slurm {slurm} cannot run proctrack/cgroup here",
            why=f"it has no {plugin.name}, and cgroup v2 would need systemd or a delegated tree",
            hint="scripts/testbed up --slurm 24.11 --proctrack cgroup",
            status=Status.CANNOT_RUN_HERE,
        )


def hierarchies(mountinfo: Path = _MOUNTINFO) -> dict[str, Path]:
    """Where this machine's whole v1 hierarchies are mounted that Slurm is given; one controller in each."""
    mounted = _mounted(mountinfo)
    alone = [name for name in (_CONTROLLER, _MEMORY) if list(mounted.values()).count(mounted.get(name, Path())) == 1]
    return {name: mounted[name] for name in alone}


def limits_memory(layout: Layout, mountinfo: Path = _MOUNTINFO) -> bool:
    """Whether Slurm holds jobs to their memory."""
    return layout.proctrack == CGROUP and _MEMORY in hierarchies(mountinfo)


def _mounted(mountinfo: Path) -> dict[str, Path]:
    """Where each controller of version 1 is mounted as a whole."""
    found: dict[str, Path] = {}
    for line in mountinfo.read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        # proc_pid_mountinfo(5): type, source and super options stand behind the dash.
        if len(fields) > 4 and len(tail) == 3 and tail[0] == "cgroup" and fields[3] == "/":
            found |= {name: Path(fields[4]) for name in tail[2].split(",") if name not in ("rw", "ro")}
    return found


def words(instance: Instance, layout: Layout, machine: str, role: str) -> list[str]:
    """What machine_init.sh is told: nothing, an empty place, or controllers and the sub-groups to live in."""
    if role != "compute" or conf(layout) == _DISABLED:
        return ["none", "none"]
    places = hierarchies() if layout.proctrack == CGROUP else {}
    if not places:
        # slurmd 22.05 dies without a file system there, and does not look into it.
        return ["empty", "none"]
    own = instance.netns(machine)
    return [",".join(places), ",".join(str(place / own) for place in places.values())]


def conf(layout: Layout) -> str:
    """cgroup.conf: without `disabled` slurmd 24.11 dies where no cgroup is usable; 22.05 does not know the word."""
    if layout.proctrack != CGROUP:
        return _VERSION_1 if layout.slurm == "22.05" else _DISABLED
    return _VERSION_1 + (_LIMITS if limits_memory(layout) else "")


def groups(instance: Instance) -> list[Path]:
    """The sub-groups of an instance's machines."""
    return sorted(
        one
        for place in hierarchies().values()
        for one in place.iterdir()
        if one.is_dir() and one.name.startswith(instance.prefix)
    )


def thaw(instance: Instance) -> None:
    """Let frozen processes run: SIGKILL does not end them before."""
    for group in groups(instance):
        for one in (group, *_below(group)):
            if not (one / "freezer.state").exists():
                continue
            try:
                (one / "freezer.state").write_text("THAWED")
            except OSError:  # gone meanwhile
                continue


def remove(instance: Instance, timeout: float = 10) -> None:
    """Take the groups away once their processes are dead; the kernel may need a moment for that."""
    deadline = time.monotonic() + timeout
    while left := groups(instance):
        for group in left:
            for one in (*reversed(_below(group)), group):
                try:
                    one.rmdir()
                except OSError:  # still busy: the next round
                    continue
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _below(group: Path) -> list[Path]:
    """All groups inside, parents first."""
    return [Path(place) / name for place, names, _ in os.walk(group) for name in names]
