"""Watch, on each node except the first, whether the first node answers, until the ranks start.

Runs on: COMPUTE NODE. Standard library only. torchrun waits ten minutes at its rendezvous, and reports only a timeout.
If no program listens on the port, the first node answers with a reset. If a link is broken, or a firewall drops
packets, there is no answer.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time

_SECONDS_TO_ANSWER = 3.0
_SECONDS_BETWEEN = 0.5
# After a listener has started, the agents usually meet within a second. Each try uses a connection of the listener.
_SECONDS_AFTER_ACCEPT = 5.0


class Reach(threading.Thread):
    """Tries to connect repeatedly, because a link that worked may fail later.

    Attributes:
        problem: why the last try got no answer; empty if the first node accepted or refused the connection, or if no
            try has ended yet.
    """

    def __init__(self, host: str, port: int) -> None:
        """Begin the tries when the thread is started."""
        super().__init__(name="hpcenv-reach", daemon=True)
        self._target = (host, port)
        self._end = threading.Event()
        self.problem = ""
        self._answered = time.monotonic()

    def run(self) -> None:
        """Try until `close` is called."""
        while not self._end.is_set():
            begun = time.monotonic()
            code = _connect(self._target)
            answered = code in (0, errno.ECONNREFUSED)
            self._answered = begun if answered else self._answered
            self.problem = "" if answered else os.strerror(code)
            self._end.wait(_SECONDS_AFTER_ACCEPT if code == 0 else _SECONDS_BETWEEN)

    def silent_for(self) -> float:
        """Return how many seconds ago the last answered try began; 0 if the latest try was answered.

        If no try was answered, the result is the time since this object was made.
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
