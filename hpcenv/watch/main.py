"""The loop of the watching process, which runs once a second until the launch step closes its standard input.

Runs on: COMPUTE NODE. Standard library, and pynvml if it is installed.
"""

from __future__ import annotations

import select
import sys
import time
from typing import Protocol

from hpcenv.watch.hangs import HangWatch
from hpcenv.watch.run_use import RunWatch
from hpcenv.watch.sampler import Sampler
from hpcenv.watch.watched_node import WatchedNode

_SECONDS_BETWEEN_LOOKS = 1.0


class Watcher(Protocol):
    """Watches one subject: hangs, samples or the whole run."""

    def attend(self, now: float) -> None:
        """Do the work that is due at `now`, in seconds since the epoch.

        Raises nothing, and takes less than a second.
        """

    def finish(self, _now: float) -> None:
        """Write the remaining results after the ranks have ended. Takes less than a second."""


def watch_node(node: WatchedNode) -> None:
    """Watch a node until standard input is closed."""
    watchers = _watchers(node)
    while not select.select([sys.stdin], [], [], _SECONDS_BETWEEN_LOOKS)[0]:
        for watcher in watchers:
            watcher.attend(time.time())
    for watcher in watchers:
        watcher.finish(time.time())


def _watchers(node: WatchedNode) -> list[Watcher]:
    """Return the watchers of this node. On the first node, one more watcher watches the whole run."""
    watchers: list[Watcher] = [HangWatch(node)]
    if node.options.sample:
        watchers.append(Sampler(node, begin=time.time()))
    if node.options.sample and node.this_node.rank == 0:
        watchers.append(RunWatch(node, begin=time.time()))
    return watchers
