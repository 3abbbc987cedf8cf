"""Change the network of testbed nodes while a test runs: interfaces without peers, slow links, dropped packets.

Everything here acts on the network namespaces of one testbed, as root of this machine, and is undone at the end.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Of alice, who starts the jobs: srun, the launch step and the ranks.
_ALICE = "2001"
# The kernel takes ports of this range for a listener without a fixed port, as Gloo's are.
_PORTS = "32768:60999"
# Slurm's daemons, and srun's own listeners (SrunPortRange in scripts/_testbed/slurm.py). A user's srun keeps these: a
# test that cuts them shows what Slurm does, not what the ranks see. hpcenv chooses no port of this range
# (`_free_ports` of hpcenv/machine/network/reach.py).
_SLURM_PORTS = "6817:6819,15000:17999"


@dataclass(frozen=True)
class Wires:
    """The network of one testbed."""

    instance: str
    state: Path

    def _run(self, *argv: str) -> None:
        subprocess.run(argv, check=True, capture_output=True, timeout=30)

    def inside(self, node: str, *argv: str) -> None:
        """Run a program in the network namespace of a machine."""
        self._run("ip", "netns", "exec", f"hpcenv-{self.instance}-{node}", *argv)

    def address(self, node: str, interface: str) -> str:
        name = f"hpcenv-{self.instance}-{node}"
        argv = ["ip", "-n", name, "-j", "-4", "address", "show", interface]
        found = json.loads(subprocess.run(argv, check=True, capture_output=True, timeout=30).stdout)
        return str(found[0]["addr_info"][0]["local"])

    @contextmanager
    def dead_interface(self, name: str, *nodes: str) -> Iterator[None]:
        """Give each node an interface that is up, with an address of one subnet, and that reaches no other node."""
        try:
            for number, node in enumerate(nodes, 1):
                self.inside(node, "ip", "link", "add", name, "type", "veth", "peer", "name", "no-peer")
                self.inside(node, "ip", "address", "add", f"192.168.250.{number}/24", "dev", name)
                self.inside(node, "ip", "link", "set", name, "up")
                self.inside(node, "ip", "link", "set", "no-peer", "up")
            yield
        finally:
            for node in nodes:
                self._try(node, "ip", "link", "del", name)

    @contextmanager
    def renamed(self, node: str, old: str, new: str) -> Iterator[None]:
        """Give an interface another name; its address and connections stay."""
        self._rename(node, old, new)
        try:
            yield
        finally:
            self._rename(node, new, old)

    def _rename(self, node: str, old: str, new: str) -> None:
        self.inside(node, "sh", "-c", f"ip link set {old} down && ip link set {old} name {new} && ip link set {new} up")

    @contextmanager
    def slow(self, node: str, rate: str) -> Iterator[None]:
        """Limit what a node sends and receives; `rate` as tc-tbf(8) has it."""
        limit = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
        try:
            self.inside(node, "tc", "qdisc", "replace", "dev", "eth0", *limit)
            self.inside("switch", "tc", "qdisc", "replace", "dev", f"port-{node}", *limit)
            yield
        finally:
            self._try(node, "tc", "qdisc", "del", "dev", "eth0", "root")
            self._try("switch", "tc", "qdisc", "del", "dev", f"port-{node}", "root")

    @contextmanager
    def rules(self, *nodes: str) -> Iterator[None]:
        """Remove, at the end, what `cut` and `close_ports` add."""
        try:
            yield
        finally:
            self.open(*nodes)

    def open(self, *nodes: str) -> None:
        """Remove all rules."""
        for node in nodes:
            self._try(node, "iptables", "-F", "OUTPUT")

    def cut(self, node: str, other: str) -> None:
        """Drop the packets of the user's processes from one node to another, but for those of Slurm."""
        to = self.address(other, "eth0")
        ports = ("-m", "multiport", "!", "--ports", _SLURM_PORTS)
        owner = ("-m", "owner", "--uid-owner", _ALICE)
        self.inside(node, "iptables", "-A", "OUTPUT", "-d", to, "-p", "tcp", *ports, *owner, "-j", "DROP")

    def close_ports(self, node: str) -> None:
        """Drop new connections of the user's processes to the range of ports from which Gloo listens."""
        owner = ("-m", "owner", "--uid-owner", _ALICE)
        rule = ("-o", "eth0", "-p", "tcp", "--syn", "--dport", _PORTS, *owner)
        self.inside(node, "iptables", "-A", "OUTPUT", *rule, "-j", "DROP")

    def _try(self, node: str, *argv: str) -> None:
        subprocess.run(
            ["ip", "netns", "exec", f"hpcenv-{self.instance}-{node}", *argv], capture_output=True, timeout=30
        )
