"""Keep the store of torchrun's rendezvous open until the other nodes have left it.

Runs on: inside the image (or in a host environment). Needs only the standard library and torch, Python 3.8 to 3.14.

The agents of all nodes are connected to one store, in the agent of the first node. torchrun ends each agent when the
work of this agent is done. If the first agent ends before the other agents, their connections break. A training that
succeeded then ends with hundreds of lines of C++ frames (RendezvousConnectionError, seen with torch 2.13). So the first
agent ends last.

The first agent finds the remaining agents in the kernel's list of connections (proc_pid_net(5), `net/tcp`). So it needs
no message from the other agents, and does not wait for a killed agent. If nodes are emulated on one machine, the other
agents are other processes of this machine.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

_SECONDS_BETWEEN_LOOKS = 0.02
# After a failure, a rank of another node may wait for its peers without end. Slurm ends this rank when this node has
# ended.
SECONDS_AFTER_FAILURE = 2.0
# If the nodes are emulated on one machine, a leftover process of a rank may keep a connection, and srun does not end
# this process.
_SECONDS_ON_ONE_MACHINE = 10.0
_SECONDS_TO_CONNECT = 60
_ESTABLISHED = "01"


def endpoint_hosted_here(argv: List[str]) -> Optional[Tuple[str, int]]:
    """Return host and port of the store, from torchrun's arguments; None if this node has no store for other nodes."""
    end = argv.index("--") if "--" in argv else len(argv)
    words = dict(word.split("=", 1) for word in argv[:end] if "=" in word)
    match = re.match(r"\[?(.+?)\]?:(\d+)\Z", words.get("--rdzv_endpoint", ""))
    if not match or int(match.group(2)) == 0 or words.get("--nnodes") == "1":
        return None
    return (match.group(1), int(match.group(2))) if words.get("--rdzv_conf") == "is_host=1" else None


def hold(host: str, port: int) -> Any:
    """Keep the store that torchrun uses open, as long as the returned object exists.

    A newer torchrun can share a store that exists in its process (`multi_tenant`, seen in torch 2.13), so this function
    starts the store. An older torchrun must start the store itself, and fails if the port is in use (seen with torch
    2.1.2). For an older torchrun, this function keeps the store that torchrun starts. Returns None if the store cannot
    be started: torchrun then fails with its own message.
    """
    try:
        backend = importlib.import_module("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend")
        if not _names_keyword(backend._create_tcp_store, "multi_tenant"):
            return _note_results(backend, "_create_tcp_store")
        distributed = importlib.import_module("torch.distributed")
        timedelta = importlib.import_module("datetime").timedelta
        return distributed.TCPStore(
            host, port, is_master=True, multi_tenant=True, timeout=timedelta(seconds=_SECONDS_TO_CONNECT)
        )
    except Exception:
        return None


def _names_keyword(function: Any, keyword: str) -> bool:
    """Return whether a function uses this keyword when it calls another function."""
    # The compiled code of a call has the names of its keywords in a tuple (Python 3.8 to 3.14).
    return any(isinstance(one, tuple) and keyword in one for one in function.__code__.co_consts)


def _note_results(owner: Any, name: str) -> List[Any]:
    """Return a list to which each result of a function of `owner` is added from now on."""
    results: List[Any] = []
    function = getattr(owner, name)

    def noted(*args: Any, **options: Any) -> Any:
        results.append(function(*args, **options))
        return results[-1]

    setattr(owner, name, noted)
    return results


def note_stores_of_ranks() -> List[Any]:
    """Return a list to which torchrun's store for the ranks is added when torchrun starts it on this node.

    Since torch 2.4 the agent of rank 0 starts the store for the ranks
    (DynamicRendezvousHandler._create_tcp_store_server, also in 2.13). The list stays empty with a torch that has no
    such function.
    """
    try:
        module = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
        return _note_results(module.DynamicRendezvousHandler, "_create_tcp_store_server")
    except (ImportError, AttributeError):
        return []


def has_joined(stores: List[Any]) -> Optional[bool]:
    """Return whether a rank has joined a process group; None if this is unknown.

    A rank that joins a process group writes a key when it connects to the store (TCPStore with a world size).
    """
    try:
        return any(store.num_keys() > 0 for store in stores) if stores else None
    except Exception:
        return None


def wait_for_others(host: str, port: int, seconds: Optional[float], is_asked_to_end: Callable[[], bool]) -> bool:
    """Wait until no other node is connected to the store; return False if a node was still connected at the end.

    Args:
        host: host of the store; if it is this machine's loopback address, the nodes are emulated here.
        port: port of the store.
        seconds: longest time to wait; None for no limit, after a success. With None, srun ends this step if a node
            dies, or a minute after the first node has ended (`--wait` in the batch script).
        is_asked_to_end: returns whether a signal asks this process to end.
    """
    one_machine = host == "localhost" or host == "::1" or host.startswith("127.")
    if one_machine and seconds is None:
        seconds = _SECONDS_ON_ONE_MACHINE
    until = None if seconds is None else time.monotonic() + seconds
    while True:
        others = count_others(port, own=_own_sockets() if one_machine else None)
        if others is None:
            return False
        if not others:
            return True
        if is_asked_to_end() or (until is not None and time.monotonic() > until):
            return False
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def count_others(port: int, folder: str = "/proc/self/net", own: Optional[Set[str]] = None) -> Optional[int]:
    """Return how many connections to this port come from other nodes; None if the connections cannot be read.

    Args:
        port: port of the store.
        folder: where the kernel lists the connections.
        own: the inodes of this process's sockets, if nodes are emulated on this machine. If `own` is given, connections
            of other processes on this machine count. With None, connections inside this machine do not count.
    """
    inodes: Dict[Tuple[str, str], str] = {}
    peers: List[Tuple[str, str]] = []
    read = False
    for name in ("tcp", "tcp6"):
        try:
            with open(folder + "/" + name, encoding="ascii") as file:
                lines = file.read().splitlines()[1:]
        except (OSError, ValueError):
            continue
        read = True
        for line in lines:
            words = line.split()
            if len(words) < 4 or words[3] != _ESTABLISHED:
                continue
            here, peer = _address(words[1]), _address(words[2])
            inodes[here] = words[9] if len(words) > 9 else ""
            if int(here[1], 16) == port:
                peers.append(peer)
    if not read:
        return None
    # A connection inside this machine is in the list twice, once for each end.
    return sum(1 for peer in peers if peer not in inodes or (own is not None and inodes[peer] not in own))


def _own_sockets() -> Set[str]:
    """Return the inodes of this process's sockets (proc_pid_fd(5))."""
    sockets: Set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink("/proc/self/fd/" + name)
        except OSError:
            continue  # it was closed after the folder was listed
        if target.startswith("socket:["):
            sockets.add(target[len("socket:[") : -1])
    return sockets


def _address(word: str) -> Tuple[str, str]:
    """Return address and port, both in hexadecimal. An IPv4 address in IPv6 form is returned in IPv4 form."""
    address, _, port = word.partition(":")
    return (address[24:] if address.startswith("0000000000000000FFFF0000") else address), port
