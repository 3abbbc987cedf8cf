"""How the check step tells the launch step of the same node which SIF it has proved to be the locked one.

Runs on: COMPUTE NODE. Standard library only.

Both steps run at the same time, as two processes of one user on one node. The launch step listens at a Unix socket
with an abstract name (unix(7)): it needs no file, it is seen on this node only, and it is gone with its process. The
kernel says which user is at the other end. If the two do not find each other, the launch step starts its container
after the verdict, and reads the same record from the facts of this node.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from hpcenv.errors import RecordInvalid
from hpcenv.node.this_node import ThisNode
from hpcenv.records.checked_sif import CheckedSif
from hpcenv.records.codec import decode_record, encode_record

_SECONDS_BETWEEN_TRIES = 0.02
_SECONDS_TO_READ = 2.0
_LONGEST = 1 << 16


def address_of(run: str, this_node: ThisNode, local_rank: int | None = None) -> str:
    """Return the name of the socket of one attempt of a run on this node, or of one task of it."""
    task = () if local_rank is None else (str(local_rank),)
    parts = (str(os.geteuid()), run, this_node.job_id, str(this_node.attempt), this_node.node, *task)
    return "\0hpcenv-" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]


class Listener:
    """The launch step's end.

    Raises:
        OSError: another process has this name, or there are no Unix sockets.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(address)
            self._socket.listen(4)
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Return the file descriptor that can be read when there is a message."""
        return self._socket.fileno()

    def receive(self) -> CheckedSif | None:
        """Return what the check step has proved; None if another user, or something else, is at the other end."""
        received = b""
        try:
            connection, _ = self._socket.accept()
            with connection:
                connection.settimeout(_SECONDS_TO_READ)
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                if struct.unpack("3i", credentials)[1] != os.geteuid():
                    return None
                while len(received) < _LONGEST and (piece := connection.recv(_LONGEST)):
                    received += piece
            return decode_record(CheckedSif, received.decode(), origin="the check step of this node")
        except (OSError, UnicodeDecodeError, RecordInvalid):
            return None

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


@contextmanager
def telling(addresses: Sequence[str]) -> Iterator[Callable[[CheckedSif], None]]:
    """Yield a function that sends a record to the tasks of the launch step, as long as the block runs.

    It sends in the background and tries again, because the launch step may start later.
    """
    ended = threading.Event()

    def tell(checked: CheckedSif) -> None:
        message = encode_record(checked).encode()
        for address in addresses:
            threading.Thread(target=_send, args=(address, message, ended), daemon=True).start()

    try:
        yield tell
    finally:
        ended.set()


def _send(address: str, message: bytes, ended: threading.Event) -> None:
    while not ended.is_set():
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.settimeout(_SECONDS_TO_READ)
            end.connect(address)
            end.sendall(message)
            return
        ended.wait(_SECONDS_BETWEEN_TRIES)
