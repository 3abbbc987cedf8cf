"""Network facts of a node: its interfaces, its routes to the first node, and free ports.

Runs on: COMPUTE NODE. Standard library only. judge/network/rendezvous.py uses these facts for its decision.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import itertools
import json
import random
import re
import shutil
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcenv import process
from hpcenv.errors import HpcenvError
from hpcenv.records.facts import Interface, Network, Route
from hpcenv.records.manifest import Setting
from hpcenv.records.variables import is_tuning

_COMMAND_SECONDS = 10.0

# The number of ports for the smoke test: one port for all nodes together, and one port for pairs of nodes.
_TEST_PORTS = 2


def observe(first_node: str, environ: Mapping[str, str], *, others: Sequence[str] = (), host: str = "") -> Network:
    """Return this node's network facts. If something fails, no error is raised, and `problem` says what failed.

    Args:
        first_node: Slurm's name of the node that will host the rendezvous.
        environ: the job's environment, in which tuning variables are searched.
        others: nodes that will host the rendezvous if the nodes before them are left out.
        host: pattern of the host name of a node, with `{node}` in it; empty if the host name is the node's name.
    """
    interfaces = _interfaces()
    addresses, problem = _resolve(_host_of(first_node, host))
    routes, unreached = _routes(addresses, interfaces)
    for other in others:
        more, _ = _routes(_resolve(_host_of(other, host))[0], interfaces)
        routes += tuple(route for route in more if route not in routes)
    if addresses and not routes:
        problem = f"no route to {first_node}: {'; '.join(unreached)}"
    ports = _free_ports(1 + _TEST_PORTS)
    return Network(
        first_node=first_node,
        first_node_addresses=addresses,
        interfaces=interfaces,
        routes=routes,
        free_port=ports[0] if ports else None,
        test_ports=ports[1:],
        variables=tuple(
            Setting(name=name, value=value, origin="environment of the job")
            for name, value in sorted(environ.items())
            if is_tuning(name)
        ),
        problem=problem,
    )


def _host_of(node: str, pattern: str) -> str:
    return pattern.replace("{node}", node) if pattern else node


def _interfaces() -> tuple[Interface, ...]:
    """Return the network interfaces with their addresses, from `ip` (iproute2) if it is installed."""
    ip = shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin")
    if ip is not None:
        try:
            text = process.run([ip, "-j", "address", "show"], timeout=_COMMAND_SECONDS).stdout
            return parse_addresses(text)
        except (HpcenvError, ValueError, KeyError, TypeError):
            pass
    return tuple(Interface(name=name, addresses=_ioctl_address(name)) for _, name in socket.if_nameindex())


def parse_addresses(text: str) -> tuple[Interface, ...]:
    """Return the interfaces in the output of `ip -j address show`.

    Raises:
        ValueError, KeyError, TypeError: the text is not the output of this command.
    """
    interfaces = []
    for link in json.loads(text):
        if "ifname" not in link:
            continue
        own = [a for a in link.get("addr_info", ()) if "local" in a]
        networks = tuple(_network(a["local"], a.get("prefixlen")) for a in own)
        interfaces.append(
            Interface(
                name=link["ifname"],
                addresses=tuple(a["local"] for a in own),
                networks=networks if all(networks) else (),
            )
        )
    return tuple(interfaces)


def _network(address: str, prefix: object) -> str:
    try:
        return str(ipaddress.ip_interface(f"{address}/{prefix}").network)
    except ValueError:
        return ""


def _ioctl_address(name: str) -> tuple[str, ...]:
    """Return the primary IPv4 address of an interface: netdevice(7), SIOCGIFADDR."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)
        except OSError:
            return ()
    return (socket.inet_ntoa(answer[20:24]),)


def _resolve(name: str) -> tuple[tuple[str, ...], str]:
    """Return the addresses of a node's name, IPv4 first, and the error. The error is empty if the name resolves."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: the name is not valid in DNS
        address = _slurm_address(name)
        return ((address,), "") if address else ((), f"`{name}` does not resolve: {error}")
    found = {str(answer[4][0]) for answer in answers}
    return tuple(sorted(found, key=lambda a: (":" in a, a))), ""


def _slurm_address(name: str) -> str | None:
    """Return NodeAddr from slurm.conf, which is the only source of addresses on sites without DNS."""
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return None
    try:
        text = process.run([scontrol, "show", "node", "-o", name], timeout=_COMMAND_SECONDS).stdout
    except HpcenvError:
        return None
    match = re.search(r"\bNodeAddr=(\S+)", text)
    try:
        return str(ipaddress.ip_address(match.group(1))) if match else None
    except ValueError:
        return None


def _routes(targets: Sequence[str], interfaces: Sequence[Interface]) -> tuple[tuple[Route, ...], tuple[str, ...]]:
    """Return a route for each address that can be reached, and the reason for each other address."""
    routes, unreached = [], []
    for target in targets:
        try:
            source = _source_address(target)
        except OSError as error:
            unreached.append(f"{target}: {error.strerror or error}")
            continue
        owner = next((interface.name for interface in interfaces if source in interface.addresses), None)
        if owner is None:
            unreached.append(f"{target}: no interface has the own address {source}")
        else:
            routes.append(Route(target=target, source=source, interface=owner))
    return tuple(routes), tuple(unreached)


def _source_address(target: str) -> str:
    """Return the address from which the kernel would send to `target`. The UDP connect for this sends no packet."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return str(probe.getsockname()[0])


def _free_ports(count: int) -> tuple[int, ...]:
    """Return at most `count` ports outside of the ephemeral range on which this node can listen.

    If a port is inside the range, the kernel could give this port to an outgoing connection before the launch. hpcenv
    uses no fixed port, because two jobs on one node would then use the same port (pytorch#116974).
    """
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    candidates = [port for port in range(20000, 65000) if not low <= port <= high] or list(range(20000, 65000))
    tried = random.SystemRandom().sample(candidates, min(50, len(candidates)))
    return tuple(itertools.islice((port for port in tried if is_free_port(port)), count))


def is_free_port(port: int) -> bool:
    """Return whether a port is free in IPv4 and, if the node has IPv6, in IPv6. torch's store listens on both."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                return False
    return True
