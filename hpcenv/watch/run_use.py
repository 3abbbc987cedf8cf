"""Read the samples of all nodes while the run goes on, to report slow ranks, and to end a run that uses nothing.

Runs on: COMPUTE NODE, the first node of the job. Standard library only. Each node writes its samples into the run
folder. So no further process and no connection between nodes is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from hpcenv.errors import HpcenvError
from hpcenv.judge.hang import duration
from hpcenv.judge.idle import use_of
from hpcenv.judge.use import AskedShape, judge_speed
from hpcenv.records.files import save_record
from hpcenv.records.hangs import HangFound, found_path, requests_of
from hpcenv.records.samples import NewSamples, NodeSamples
from hpcenv.watch.hangs import in_words, say_in_log
from hpcenv.watch.watched_node import WatchedNode

_SECONDS_BETWEEN_LOOKS = 120.0
# The samples of the last period of this length are judged. A note is followed by no other note within the same time.
_SECONDS_JUDGED = 600.0
# If the newest sample of a node is older than this, the node may be in use. After some hours, a node writes only one
# sample per minute, and a shared file system may show the sample late.
_LATEST = 150.0


class RunWatch:
    """The samples of all nodes in one attempt.

    Args of the constructor:
        node: the first node.
        begin: now, in seconds since the epoch.
        say: called with each line for the job's log.
    """

    def __init__(self, node: WatchedNode, *, begin: float, say: Callable[[str], None] | None = None) -> None:
        self._node = node
        self._say = say or say_in_log
        self._samples = NewSamples(_SECONDS_JUDGED)
        idle_end = node.options.idle_end
        self._between = min(_SECONDS_BETWEEN_LOOKS, idle_end / 5 if idle_end else _SECONDS_BETWEEN_LOOKS)
        self._looked = begin
        self._said = float("-inf")
        self._named: set[str] = set()
        self._used = dict.fromkeys(node.this_node.nodes, begin)
        self._knows = True
        self._ended = False

    def attend(self, now: float) -> None:
        """If it is time, read and judge the samples that the nodes have written."""
        if now - self._looked < self._between:
            return
        self._looked = now
        with suppress(OSError, HpcenvError):
            nodes = self._samples.read(self._node.run, self._node.this_node.attempt)
            self._name_slow_ranks(nodes, now)
            if self._node.options.idle_end and not self._ended:
                self._end_if_idle(nodes, now)

    def finish(self, _now: float) -> None:
        """Do nothing, because all results are already written."""

    def _name_slow_ranks(self, nodes: Sequence[NodeSamples], now: float) -> None:
        """Report each slow rank once, with the reason, and at least ten minutes after the previous note."""
        if now - self._said < _SECONDS_JUDGED:
            return
        asked = AskedShape(nodes=self._node.this_node.nodes, gpus=self._node.manifest.gpus_per_node)
        for sentence in judge_speed(nodes, asked):
            whom = {f"{sentence.rule} {who}" for who in sentence.ranks or sentence.nodes}
            if not whom <= self._named:
                self._named |= whom
                self._said = now
                self._say(f"hpcenv: note: {sentence.text}")
                return

    def _end_if_idle(self, nodes: Sequence[NodeSamples], now: float) -> None:
        """Record and report if nothing was in use for the time limit. Then the watch on each node ends the ranks."""
        limit = self._node.options.idle_end
        newest = {}
        for node in nodes:
            words = ""
            for sample in node.samples:
                newest[node.node], words = sample.at, use_of(sample)
                if words:
                    self._used[node.node] = max(sample.at, self._used.get(node.node, 0.0))
            # The first sample has no use of CPUs, because the use is measured since the previous sample.
            if self._knows and words.startswith("unknown") and len(node.samples) > 1:
                self._knows = False
                self._say(f"hpcenv: note: --idle-end cannot act: {words} on node {node.node}")
        latest = max(_LATEST, 3 * self._node.options.sample)
        if any(now - newest.get(name, 0.0) > latest for name in self._node.this_node.nodes):
            return  # a node without a new sample may be in use
        idle = now - max(self._used.values())
        if idle >= limit:
            self._ended = True
            what = "no GPU and no CPU" if self._node.manifest.session is None else "no GPU, no CPU and no connection"
            text = f"{what} was in use for {duration(idle)} (--idle-end): the run is ended"
            found = HangFound(id=f"idle-{now:.0f}", kind="idle", at=now, lines=(text,))
            folder = requests_of(self._node.run, self._node.this_node.attempt)
            folder.mkdir(parents=True, exist_ok=True)
            save_record(found, found_path(folder, found.id))
            for line in in_words(found):
                self._say(line)
