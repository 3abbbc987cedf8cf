"""The daemons: on which machine each runs, how it starts, how one sees that it answers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from . import machine
from .errors import Status, TestbedError
from .instance import Instance, Layout
from .machine import Machine, Process
from .process import Runner


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A daemon's program, the roles of machines that run it, and its probe."""

    name: str
    roles: tuple[str, ...]
    argv: tuple[str, ...]
    process: str  # as /proc/PID/comm shows it, 15 characters at most
    user: str = "root"
    probe: tuple[str, ...] = ()

    @property
    def many(self) -> bool:
        """Whether several machines run one."""
        return self.roles not in (("ctl",), ("registry",))


@dataclass(frozen=True, kw_only=True, slots=True)
class Daemon:
    """One daemon on one machine."""

    kind: Kind
    machine: Machine

    @property
    def label(self) -> str:
        """How users name it: slurmctld, slurmd@n2."""
        return f"{self.kind.name}@{self.machine.name}" if self.kind.many else self.kind.name


_MARIADB = (
    "mariadbd --user=mysql --skip-networking "
    # Slurm's documentation asks for the lock timeout; the rest is for a small, quick and mortal database.
    "--innodb-lock-wait-timeout=900 --innodb-buffer-pool-size=64M --innodb-flush-log-at-trx-commit=0 "
    "--skip-innodb-doublewrite --skip-log-bin"
)
_EVERYWHERE = ("ctl", "login", "compute")

# In the order in which they must start. All stay in the foreground under the machine's init.
KINDS = (
    Kind(name="munged", roles=_EVERYWHERE, argv=("munged", "--foreground"), process="munged", user="munge",
         probe=("sh", "-c", "munge --no-input | unmunge --output=/dev/null")),
    Kind(name="registry", roles=("registry",), argv=("docker-registry", "serve", "/etc/registry.yml"),
         process="docker-registry", probe=("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/5000")),
    Kind(name="mariadbd", roles=("ctl",), argv=tuple(_MARIADB.split()), process="mariadbd",
         probe=("mariadb-admin", "ping", "--silent")),
    Kind(name="slurmdbd", roles=("ctl",), argv=("slurmdbd", "-D"), process="slurmdbd",
         probe=("sacctmgr", "--noheader", "show", "cluster")),
    # -i: killed before its first save of state, 26.05 would refuse to start again ("No Assoc usage file").
    Kind(name="slurmctld", roles=("ctl",), argv=("slurmctld", "-D", "-i"), process="slurmctld",
         probe=("sh", "-c", "scontrol ping | grep --quiet 'is UP'")),
    Kind(name="slurmd", roles=("compute",), argv=("slurmd", "-D"), process="slurmd",
         probe=("scontrol", "show", "slurmd")),
)  # fmt: skip

_ACCOUNTING = ("mariadbd", "slurmdbd")


def daemons(layout: Layout) -> list[Daemon]:
    """All daemons of a testbed, in their starting order."""
    everything = machine.machines(layout)
    kinds = [kind for kind in KINDS if layout.accounting or kind.name not in _ACCOUNTING]
    return [Daemon(kind=kind, machine=one) for kind in kinds for one in everything if one.role in kind.roles]


def daemons_named(layout: Layout, target: str) -> list[Daemon]:
    """The daemons that a word means: `slurmd@n2`, `slurmctld`, `munged` (all of them)."""
    name, _, place = target.partition("@")
    everything = daemons(layout)
    found = [one for one in everything if one.kind.name == name and place in ("", one.machine.name)]
    if not found:
        known = ", ".join(one.label for one in everything)
        raise TestbedError(f"no daemon {target!r}", why=f"there are {known}", status=Status.NOT_UP)
    return found


def process_of(instance: Instance, daemon: Daemon) -> Process | None:
    """The daemon's process, None if it is not running."""
    found = [p for p in machine.processes(instance, daemon.machine.name) if p.name == daemon.kind.process]
    # slurmd forks while it starts a job step: the oldest is the daemon.
    return min((p for p in found if p.state != "Z"), key=lambda p: p.inner_pid, default=None)


def ensure(instance: Instance, runner: Runner, wanted: Iterable[Daemon]) -> list[Daemon]:
    """Start those that do not run and wait until all answer; answers those that were started."""
    wanted = list(wanted)
    started = [daemon for daemon in wanted if process_of(instance, daemon) is None]
    for daemon in started:
        argv = machine.as_user(daemon.kind.user, daemon.kind.argv)
        machine.start_inside(instance, runner, daemon.machine.name, argv, _log(daemon))
    for daemon in wanted:
        _wait(instance, runner, daemon)
    return started


def answers(instance: Instance, runner: Runner, daemon: Daemon, timeout: float = 10) -> bool:
    """Whether the daemon does its work; without a probe, whether it runs."""
    process = process_of(instance, daemon)
    if process is None or process.state == "T":
        return False
    if not daemon.kind.probe:
        return True
    done = machine.run_inside(instance, runner, daemon.machine.name, daemon.kind.probe, timeout=timeout, check=False)
    return done.status == 0


def _wait(instance: Instance, runner: Runner, daemon: Daemon, timeout: float = 90) -> None:
    deadline = time.monotonic() + timeout
    born = time.monotonic()
    while not answers(instance, runner, daemon):
        # It may take a moment to appear; if it is not there after that, it has died.
        dead = process_of(instance, daemon) is None and time.monotonic() > born + 3
        if dead or time.monotonic() > deadline:
            show = ["tail", "-n", "12", _log(daemon)]
            tail = machine.run_inside(instance, runner, daemon.machine.name, show, check=False).stdout
            raise TestbedError(
                f"{daemon.label} {'died at its start' if dead else f'does not answer after {timeout:.0f} s'}",
                why=tail.strip(),
                hint=f"scripts/testbed exec --node {daemon.machine.name} --user root -- less {_log(daemon)}",
            )
        time.sleep(0.1)


def _log(daemon: Daemon) -> str:
    return f"/var/log/{daemon.kind.name}.log"
