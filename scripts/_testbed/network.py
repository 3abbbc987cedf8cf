"""The cluster's network: one bridge in a namespace of its own, one veth pair per machine.

The bridge is not on the host: two testbeds cannot meet, a firewall of the host (Docker's
FORWARD DROP) does not apply, and deleting the namespace removes bridge and links at once.
"""

from __future__ import annotations

from ipaddress import IPv4Network

from .errors import Status, TestbedError
from .instance import Instance
from .process import Runner

SWITCH = "switch"
NETMASK_BITS = 24


def ensure_switch(instance: Instance, runner: Runner) -> None:
    """The bridge, if it is not there yet."""
    if not instance.netns_path(SWITCH).exists():
        runner.run(["ip", "netns", "add", instance.netns(SWITCH)])
    inside = ["ip", "-n", instance.netns(SWITCH)]
    if runner.run([*inside, "link", "show", instance.bridge], check=False).status != 0:
        runner.run([*inside, "link", "add", instance.bridge, "type", "bridge"])
    runner.run([*inside, "link", "set", instance.bridge, "up"])


def ensure_plugged(instance: Instance, runner: Runner, machine: str, address: str) -> None:
    """A machine's namespace with lo and eth0, connected; also undoes `cut` and `slow`."""
    netns, port = instance.netns(machine), _port(machine)
    if not instance.netns_path(machine).exists():
        runner.run(["ip", "netns", "add", netns])
    switch, inside = ["ip", "-n", instance.netns(SWITCH)], ["ip", "-n", netns]
    if runner.run([*inside, "link", "show", "eth0"], check=False).status != 0:
        runner.run([*switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", netns])
        runner.run([*switch, "link", "set", port, "master", instance.bridge])
    runner.run([*inside, "link", "set", "lo", "up"])
    runner.run([*inside, "address", "replace", f"{address}/{NETMASK_BITS}", "dev", "eth0"])
    runner.run([*inside, "link", "set", "eth0", "up"])
    runner.run([*switch, "link", "set", port, "up"])
    runner.run(["tc", "-n", instance.netns(SWITCH), "qdisc", "del", "dev", port, "root"], check=False)
    runner.run(["tc", "-n", netns, "qdisc", "del", "dev", "eth0", "root"], check=False)


def cut(instance: Instance, runner: Runner, machine: str) -> None:
    """Pull the cable at the switch: inside the machine eth0 stays configured, with no carrier."""
    runner.run(["ip", "-n", instance.netns(SWITCH), "link", "set", _port(machine), "down"])


def slow(instance: Instance, runner: Runner, machine: str, delay_ms: int, loss_percent: float) -> None:
    """Delay and loss in both directions, if the kernel has netem."""
    netem = ["netem", "delay", f"{delay_ms}ms", "loss", f"{loss_percent}%"]
    sides = (instance.netns(SWITCH), _port(machine)), (instance.netns(machine), "eth0")
    for netns, device in sides:
        argv = ["tc", "-n", netns, "qdisc", "replace", "dev", device, "root", *netem]
        done = runner.run(argv, check=False)
        if done.status != 0:
            raise TestbedError(
                f"cannot slow {machine} down on this machine",
                why=f"the kernel has no netem queueing discipline: {done.stderr.strip()}",
                hint=f"scripts/testbed fault cut {machine}, or a kernel with CONFIG_NET_SCH_NETEM",
                status=Status.FAULT_UNAVAILABLE,
            )


def is_connected(instance: Instance, runner: Runner, machine: str) -> bool:
    """Whether the machine's cable is plugged in."""
    argv = ["ip", "-n", instance.netns(SWITCH), "-o", "link", "show", _port(machine)]
    done = runner.run(argv, check=False)
    return done.status == 0 and ",UP" in done.stdout.partition(">")[0]


def is_slowed(instance: Instance, runner: Runner, machine: str) -> bool:
    """Whether `slow` is in force."""
    done = runner.run(["tc", "-n", instance.netns(machine), "qdisc", "show", "dev", "eth0"], check=False)
    return " netem " in f" {done.stdout} "


def address(subnet: str, host: int) -> str:
    """The n-th address of the subnet."""
    return str(IPv4Network(subnet)[host])


def _port(machine: str) -> str:
    return f"port-{machine}"
