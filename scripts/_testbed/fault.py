"""Breaking things on purpose, and healing them.

A fault is what the kernel says (a stopped process, a cable pulled out, a process gone), not a
note in a file, so `heal` is the same `ensure` that `up` uses. A later kind is one function and
one line in KINDS.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from . import cluster, daemon, flaky, job, machine, network
from .daemon import Daemon
from .errors import Status, TestbedError
from .instance import Instance, Layout
from .job import JobProcess
from .machine import Machine
from .rootfs import Workshop


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A machine as a whole, some of its daemons, processes of a job on it, or a command of Slurm for one user."""

    machine: Machine
    daemons: tuple[Daemon, ...] = ()
    processes: tuple[JobProcess, ...] = ()
    command: str | None = None

    @property
    def label(self) -> str:
        """For messages."""
        if self.command is not None:
            return self.command
        if self.processes:
            return ", ".join(one.label for one in self.processes)
        return ", ".join(one.label for one in self.daemons) or self.machine.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Strength:
    """How much, for the kinds that have a measure."""

    delay_ms: int | None = None
    loss_percent: float = 1.0
    every: int = 2
    user: str = "alice"


def parse_target(layout: Layout, word: str) -> Target:
    """`n2`, `login`, `ctl`: a machine; `slurmctld`, `slurmd@n2`, `registry`: a daemon; `squeue`: a command."""
    if word in flaky.MESSAGES:
        return Target(machine=machine.machine_named(layout, "login"), command=word)
    if job.is_target(word):
        raise TestbedError(
            f"{word} is a process of a job",
            why="it can be stopped and killed; a killed one stays dead",
            hint="to continue a stopped one: scripts/testbed fault heal n1 (the node where it is)",
            status=Status.USAGE,
        )
    # "registry" is both; its daemon is all that its machine is for, so that is what is meant.
    names = {one.name for one in machine.machines(layout)} - {"registry"}
    if word in names:
        return Target(machine=machine.machine_named(layout, word))
    found = daemon.daemons_named(layout, word)
    if len(found) > 1:
        raise TestbedError(
            f"{word!r} runs on {len(found)} machines",
            why="say which: " + ", ".join(one.label for one in found),
            status=Status.USAGE,
        )
    return Target(machine=found[0].machine, daemons=tuple(found))


def parse_process(instance: Instance, layout: Layout, word: str, number: str | None) -> Target:
    """`rank3`, `rank3@n2`, `agent@n2`, `slurmstepd@n2`: processes of the job that runs there now."""
    found = job.find(instance, layout, word, number)
    return Target(machine=machine.machine_named(layout, found[0].machine), processes=tuple(found))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing to break or heal, and where."""

    shop: Workshop
    layout: Layout
    target: Target
    strength: Strength


def stop(fault: Fault) -> None:
    """SIGSTOP: it holds all it has and answers nobody."""
    # Twice at least: what was forked between the look and the signal.
    for _ in range(20):
        running = [pid for pid, state in _victims(fault) if state not in "TZ"]
        if not running:
            return
        machine.send_signal(running, signal.SIGSTOP)
        time.sleep(0.02)
    raise TestbedError(f"{fault.target.label} does not stop", why="it forks faster than it is stopped")


def kill(fault: Fault) -> None:
    """SIGKILL: a daemon, a process of a job, or the power of a machine."""
    victims = [pid for pid, _ in _victims(fault)]
    if not victims:
        raise TestbedError(f"{fault.target.label} is not running", status=Status.NOT_UP)
    machine.send_signal(victims, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(pid in victims for pid, state in _victims(fault) if state != "Z"):
        if time.monotonic() > deadline:
            raise TestbedError(f"{fault.target.label} survived SIGKILL for 10 s")
        time.sleep(0.02)


def cut(fault: Fault) -> None:
    """No network for the machine (for a daemon: for the machine it runs on)."""
    network.cut(fault.shop.instance, fault.shop.runner, fault.target.machine.name)


def slow(fault: Fault) -> None:
    """Delay and loss on the machine's network."""
    network.slow(
        fault.shop.instance,
        fault.shop.runner,
        fault.target.machine.name,
        fault.strength.delay_ms if fault.strength.delay_ms is not None else 200,
        fault.strength.loss_percent,
    )


def flaky_command(fault: Fault) -> None:
    """A command of Slurm that fails at every n-th call of one user."""
    if fault.target.command is None:
        raise TestbedError(
            f"{fault.target.label} cannot be flaky", why=f"commands: {', '.join(flaky.MESSAGES)}", status=Status.USAGE
        )
    strength = fault.strength
    flaky.start(
        fault.shop.instance,
        strength.user,
        fault.target.command,
        every=strength.every,
        delay_ms=strength.delay_ms if strength.delay_ms is not None else 0,
    )


def heal(fault: Fault) -> None:
    """Continue, reconnect, restart; for a command: the real one again."""
    if fault.target.command is not None:
        flaky.heal(fault.shop.instance, fault.strength.user, fault.target.command)
        return
    cluster.ensure(fault.shop, fault.layout, [fault.target.machine])


KINDS: dict[str, Callable[[Fault], None]] = {
    "stop": stop,
    "cut": cut,
    "slow": slow,
    "kill": kill,
    "flaky": flaky_command,
    "heal": heal,
}


def check(kind: str, target: Target) -> None:
    """Refuse what means nothing."""
    if target.command is not None and kind not in ("flaky", "heal"):
        raise TestbedError(
            f"{kind} is not for a command",
            hint=f"scripts/testbed fault flaky {target.command}",
            status=Status.USAGE,
        )


def _victims(fault: Fault) -> list[tuple[int, str]]:
    """Pid and state of the processes that a signal is for."""
    if fault.target.processes:
        wanted = {one.pid for one in fault.target.processes}
        everyone = machine.processes(fault.shop.instance, fault.target.machine.name)
        return [(one.pid, one.state) for one in everyone if one.pid in wanted]
    if fault.target.daemons:
        found = [daemon.process_of(fault.shop.instance, one) for one in fault.target.daemons]
        return [(process.pid, process.state) for process in found if process is not None]
    everyone = machine.processes(fault.shop.instance, fault.target.machine.name)
    # The first process last when stopping: it is what `status` calls stopped.
    return [(one.pid, one.state) for one in sorted(everyone, key=lambda one: -one.inner_pid)]
