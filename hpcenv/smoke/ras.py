"""Ask NCCL's RAS service what the hanging ranks are waiting for.

Runs on: COMPUTE NODE. Standard library only. Since NCCL 2.24 each process answers on port 28028, or at the address in
NCCL_RAS_ADDR. The protocol is the same as for the client `ncclras`: one line with the request, then text until the
connection ends (NVIDIA/nccl docs/userguide/source/troubleshooting/ras.rst, read on 2026-11-20). A container of
Apptainer has the network of its node, so no client in the image is needed.
"""

from __future__ import annotations

import contextlib
import socket
import time

_ADDRESS = ("localhost", 28028)
_SECONDS = 5.0
_FIRST_VERSION = (2, 24)


def ask(version: str, address: str = "") -> str:
    """Return the answer, or why there is no answer.

    Args:
        version: version of NCCL, for example `2.27.3`; empty if the value is unknown.
        address: value of NCCL_RAS_ADDR; empty if it is not set.
    """
    if not version:
        return "not asked: the version of NCCL is unknown"
    if _parts(version) < _FIRST_VERSION:
        return f"not asked: NCCL {version} has no RAS service, 2.24 and newer have it"
    host, _, port = address.rpartition(":")
    target = (host.strip("[]"), int(port)) if host and port.isdigit() else _ADDRESS
    try:
        answer = _request(target)
    except OSError as error:
        return f"no answer from {target[0]}:{target[1]}: {error.strerror or error}"
    return answer or f"no answer from {target[0]}:{target[1]} within {_SECONDS:g} s"


def _parts(version: str) -> tuple[int, ...]:
    words = version.split("+", maxsplit=1)[0].split(".")[:2]
    return tuple(int(word) for word in words if word.isdigit())


def _request(target: tuple[str, int]) -> str:
    received = b""
    until = time.monotonic() + _SECONDS
    with socket.create_connection(target, timeout=_SECONDS) as connection:
        connection.sendall(b"verbose status\n")
        with contextlib.suppress(TimeoutError):
            while (left := until - time.monotonic()) > 0:
                connection.settimeout(left)
                piece = connection.recv(4096)
                if not piece:
                    break
                received += piece
    return received.decode("utf-8", errors="replace").strip()
