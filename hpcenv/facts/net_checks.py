"""Checks of names, ports and connections before the rendezvous.

Runs on: COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import errno
import ipaddress
import select
import socket
import time
from collections.abc import Iterable, Iterator, Sequence

from hpcenv.machine.network.reach import is_free_port
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.checks import CheckOutcome
from hpcenv.records.facts import Network
from hpcenv.records.manifest import Manifest

# The port on which NCCL's RAS threads listen (NCCL user guide, RAS, 2.24 and newer).
_RAS_PORT = 28028
# A port that is in no ephemeral range and belongs to no well-known service. Most likely, no process of the first node
# listens on this port, and the node refuses the connection. A refusal is an answer. A firewall gives no answer, or says
# that the host is unreachable.
_PORT = 20998
# All nodes of a job connect to the first node at the same time, so packets can be lost even without a firewall. The
# kernel sends a lost packet again after 1 s and 3 s (RFC 6298, section 2: the initial timeout is 1 s, and doubles).
_CONNECT_SECONDS = 4.0
# When one address has answered, the other addresses get only this additional time.
_MORE_SECONDS = 0.1


def check_network(manifest: Manifest, place: ThisNode, network: Network) -> Iterator[CheckOutcome]:
    """Yield the outcomes about the network. Some network checks run only in jobs with several nodes."""
    yield _own_name(manifest)
    yield _named_port(manifest, place)
    yield _ras_port(manifest)
    yield _first_node_answers(manifest, place, network)


def _not_run(name: str, why: str) -> CheckOutcome:
    return CheckOutcome(id=name, state="not-run", found=why)


def _one_machine(manifest: Manifest) -> str:
    if manifest.cluster == "local":
        return "the nodes are emulated on one machine"
    return "the job has one node" if manifest.nodes + manifest.spare < 2 else ""


def _own_name(manifest: Manifest) -> CheckOutcome:
    """Check whether this node's own name resolves to loopback. Debian's installer writes this entry (127.0.1.1)."""
    name, why = "net.loopback", _one_machine(manifest)
    if why:
        return _not_run(name, why)
    host = socket.gethostname()
    try:
        addresses = sorted({str(answer[4][0]) for answer in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError) as error:
        return CheckOutcome(id=name, state="failed", found=f"`{host}` does not resolve: {error}")
    if all(_is_loopback(address) for address in addresses):
        return CheckOutcome(id=name, state="failed", found=f"`{host}` is {', '.join(addresses)}", note="see /etc/hosts")
    return CheckOutcome(id=name, state="fine", found=", ".join(addresses))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _named_port(manifest: Manifest, place: ThisNode) -> CheckOutcome:
    """Check whether a port that the user chose is free on the first node. hpcenv itself chooses only free ports."""
    name = "net.port"
    setting = next((one for one in manifest.settings if one.name == "MASTER_PORT"), None)
    if setting is None or not setting.value.isdecimal() or int(setting.value) > 65535:
        return _not_run(name, "no port is chosen by hand")
    if place.rank != 0:
        return _not_run(name, "only the first node listens")
    if is_free_port(int(setting.value)):
        return CheckOutcome(id=name, state="fine", found=setting.value)
    return CheckOutcome(
        id=name,
        state="failed",
        found=f"port {setting.value} is in use",
        note=f"MASTER_PORT comes from {setting.origin}",
    )


def _ras_port(manifest: Manifest) -> CheckOutcome:
    name = "net.ras-port"
    if manifest.backend != "nccl":
        return _not_run(name, "the backend is gloo")
    if any(one.name in ("NCCL_RAS_ADDR", "NCCL_RAS_ENABLE") for one in manifest.settings):
        return _not_run(name, "NCCL_RAS_ADDR or NCCL_RAS_ENABLE is set")
    free = is_free_port(_RAS_PORT)
    found = str(_RAS_PORT) if free else f"port {_RAS_PORT} is in use"
    return CheckOutcome(id=name, state="fine" if free else "failed", found=found)


def _first_node_answers(manifest: Manifest, place: ThisNode, network: Network) -> CheckOutcome:
    """Connect to the first node on a port on which nothing listens. Any answer shows that packets arrive."""
    name, why = "net.reach", _one_machine(manifest)
    if why or place.rank == 0:
        return _not_run(name, why or "this is the first node")
    addresses = [route.target for route in network.routes if not _is_loopback(route.target)]
    if not addresses:
        return _not_run(name, "no route to an address of the first node; see network.route")
    answered, silent = connect_all(addresses, _PORT, seconds=_CONNECT_SECONDS)
    if answered:
        return CheckOutcome(id=name, state="fine", found=f"{', '.join(answered)} answers")
    found = "; ".join(f"{address}: {problem}" for address, problem in silent.items())
    return CheckOutcome(id=name, state="failed", found=found)


_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


def connect_all(addresses: Sequence[str], port: int, *, seconds: float) -> tuple[tuple[str, ...], dict[str, str]]:
    """Connect to several addresses at once.

    Return the addresses that answer, and why the other addresses do not answer.
    """
    waiting: dict[int, tuple[str, socket.socket]] = {}
    ended: dict[str, int] = {}
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        opened = socket.socket(family, socket.SOCK_STREAM)
        opened.setblocking(False)
        number = opened.connect_ex((address, port))
        if number == errno.EINPROGRESS:
            waiting[opened.fileno()] = (address, opened)
        else:
            ended[address] = number
            opened.close()
    until = time.monotonic() + seconds
    while waiting:
        left = until - time.monotonic()
        # This runs once more after the limit. On a busy node, an answer may have arrived before the limit although this
        # process has not seen it.
        ready = _ended(waiting, max(left, 0.0))
        for descriptor in ready:
            address, opened = waiting.pop(descriptor)
            ended[address] = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            opened.close()
            if ended[address] in _ANSWERS:
                until = min(until, time.monotonic() + _MORE_SECONDS)
        if left <= 0 and not ready:
            break
    for address, opened in waiting.values():
        ended[address] = errno.ETIMEDOUT
        opened.close()
    good = tuple(address for address, number in ended.items() if number in _ANSWERS)
    late = {errno.ETIMEDOUT: f"no answer within {seconds:g} s"}
    return good, {
        address: late.get(number) or errno.errorcode.get(number, f"error {number}")
        for address, number in ended.items()
        if number not in _ANSWERS
    }


def _ended(waiting: Iterable[int], seconds: float) -> list[int]:
    """Wait until a connection is made or refused, at most `seconds`; return the descriptors of these connections."""
    some = select.poll()
    for descriptor in waiting:
        some.register(descriptor, select.POLLOUT)
    return [descriptor for descriptor, _ in some.poll(seconds * 1000)]
