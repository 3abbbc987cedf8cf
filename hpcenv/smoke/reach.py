"""Whether packets come back from the first node, seen from another one, until the ranks start.

Runs on: COMPUTE NODE. Standard library only. torchrun waits ten minutes at its rendezvous, and says only that it timed
out. A port without a listener answers with a reset; a cut link, or a firewall that drops, answers nothing.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time

_SECONDS_TO_ANSWER = 3.0
_SECONDS_BETWEEN = 0.5
# Once a listener is there the agents usually meet within a second, and each try costs it a connection.
_SECONDS_AFTER_ACCEPT = 5.0


class Reach(threading.Thread):
    """Tries to connect, again and again: a link that worked may be cut later.

    Attributes:
        problem: why nothing came back from the last try; empty if the other side accepted or refused, and before the
            first try ended.
    """

    def __init__(self, host: str, port: int) -> None:
        """Begin to try when the thread is started."""
        super().__init__(name="hpcenv-reach", daemon=True)
        self._target = (host, port)
        self._end = threading.Event()
        self.problem = ""
        self._answered = time.monotonic()

    def run(self) -> None:
        """Try until `close`."""
        while not self._end.is_set():
            begun = time.monotonic()
            code = _connect(self._target)
            answered = code in (0, errno.ECONNREFUSED)
            self._answered = begun if answered else self._answered
            self.problem = "" if answered else os.strerror(code)
            self._end.wait(_SECONDS_AFTER_ACCEPT if code == 0 else _SECONDS_BETWEEN)

    def silent_for(self) -> float:
        """Return how long ago the last try began that was answered, in seconds; 0 if the last one was.

        Without any answer it is the time since the first try.
        """
        return time.monotonic() - self._answered if self.problem else 0.0

    def close(self) -> None:
        """Stop trying."""
        self._end.set()


def _connect(target: tuple[str, int]) -> int:
    family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_SECONDS_TO_ANSWER)
        try:
            probe.connect(target)
        except TimeoutError:
            return errno.ETIMEDOUT
        except OSError as error:
            return error.errno or errno.EIO
    return 0
