"""Whether packets come back from the first node, seen from another one, while the ranks start.

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


class Reach(threading.Thread):
    """Tries to connect until anything answers.

    Attributes:
        answered: the other side has sent a packet: it accepted or refused.
        problem: why the last try failed; empty before the first one ended.
    """

    def __init__(self, host: str, port: int) -> None:
        """Begin to try when the thread is started."""
        super().__init__(name="hpcenv-reach", daemon=True)
        self._target = (host, port)
        self._end = threading.Event()
        self.answered = False
        self.problem = ""
        self._begun = time.monotonic()

    def run(self) -> None:
        """Try until an answer comes, or until `close`."""
        while not self._end.is_set() and not self.answered:
            code = _connect(self._target)
            self.answered = code in (0, errno.ECONNREFUSED)
            self.problem = "" if self.answered else os.strerror(code)
            self._end.wait(_SECONDS_BETWEEN)

    def silent_for(self) -> float:
        """Return for how many seconds nothing has answered; 0 after an answer, and before the first try has failed."""
        return time.monotonic() - self._begun if self.problem and not self.answered else 0.0

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
