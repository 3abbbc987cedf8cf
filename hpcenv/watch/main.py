"""The loop of the watching process: it looks once a second, until the launch step closes its standard input.

Runs on: COMPUTE NODE. Standard library only, but for pynvml where it is installed.
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
    """One thing that is watched."""

    def attend(self, now: float) -> None:
        """Look, if it is time to; `now` is in seconds since the epoch. It raises nothing and takes below a second."""

    def finish(self, _now: float) -> None:
        """The ranks have ended: write what is left, within a second."""


def watch_node(node: WatchedNode) -> None:
    """Watch a node until standard input is closed."""
    watchers = _watchers(node)
    while not select.select([sys.stdin], [], [], _SECONDS_BETWEEN_LOOKS)[0]:
        for watcher in watchers:
            watcher.attend(time.time())
    for watcher in watchers:
        watcher.finish(time.time())


def _watchers(node: WatchedNode) -> list[Watcher]:
    """Return what is watched on this node; on the first one, the whole run."""
    watchers: list[Watcher] = [HangWatch(node)]
    if node.options.sample:
        watchers.append(Sampler(node, begin=time.time()))
    if node.options.sample and node.this_node.rank == 0:
        watchers.append(RunWatch(node, begin=time.time()))
    return watchers
