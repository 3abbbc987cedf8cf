"""The TCP ports on which programs of a session listen. Every user of the node or of the cluster can connect to them.

Runs on: COMPUTE NODE. Standard library only. Reads /proc (proc_net(5)).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcenv.machine import job_cgroup

_LISTEN = "0A"


def listening(environ: Mapping[str, str], proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Return `ADDRESS:PORT (PROGRAM)` for each port on which a process of this user's job listens, sorted.

    srun is left out, because it listens for its own steps. If Slurm does not use cgroups, the list also has ports of
    this user's other jobs on this node.
    """
    sockets = {inode: address for name in ("tcp", "tcp6") for address, inode in _sockets(proc / "net" / name)}
    if not sockets:
        return ()
    found = set()
    by_cgroup = job_cgroup.is_of(_text(proc / "self" / "cgroup"), environ)
    for process in proc.glob("[0-9]*"):
        if by_cgroup and not job_cgroup.is_of(_text(process / "cgroup"), environ):
            continue
        name = _text(process / "comm").strip() or "?"
        own = set() if name == "srun" else sockets.keys() & set(_open_sockets(process))
        found |= {f"{sockets[inode]} ({name})" for inode in own}
    return tuple(sorted(found))


def _sockets(table: Path) -> Iterator[tuple[str, str]]:
    """Yield the address and the inode of each listening socket of this user."""
    for line in _text(table).splitlines()[1:]:
        words = line.split()
        if len(words) > 9 and words[3] == _LISTEN and words[7] == str(os.getuid()):
            yield _address(words[1]), words[9]


def _address(text: str) -> str:
    """Return an address of the table as text. In the table, four bytes are a number in this machine's byte order."""
    host, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    name = socket.inet_ntop(socket.AF_INET6 if len(raw) > 4 else socket.AF_INET, raw)
    return f"[{name}]:{int(port, 16)}" if ":" in name else f"{name}:{int(port, 16)}"


def _open_sockets(process: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(process / "fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
