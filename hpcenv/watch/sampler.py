"""Takes the samples of a node, and appends them to its file in the run folder.

Runs on: COMPUTE NODE. Standard library, and pynvml if it is installed.

The size of the file is limited. After `_HOURS_IN_FULL`, the samples of a minute become one record with their means,
minima and maxima. This begins earlier if the samples fill a quarter of the file before. At `_MOST_BYTES`, a last record
says that no more samples follow.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from hpcenv.errors import HpcenvError
from hpcenv.machine.gpu_use import GpuWatch
from hpcenv.records.files import load_record
from hpcenv.records.samples import GpuUse, Sample, samples_line
from hpcenv.records.session import NodeFolder, SessionNode
from hpcenv.watch import prometheus
from hpcenv.watch.node_use import NodePlaces, NodeWatch
from hpcenv.watch.pulses import processes, read_pulses
from hpcenv.watch.rank_use import RankLook
from hpcenv.watch.watched_node import WatchedNode

_HOURS_IN_FULL = 6
_SECONDS_OF_A_RECORD = 60.0
_MOST_BYTES = 64 << 20
# NVML answers within milliseconds. If a driver hangs, the other figures must not wait longer than this.
_SECONDS_FOR_GPUS = 0.8


class Sampler:
    """The samples of one node in one attempt."""

    def __init__(self, node: WatchedNode, *, begin: float) -> None:
        self._node = node
        self._path = node.run.samples_of(node.this_node.attempt, node.this_node.node)
        self._begin = begin
        self._last = begin
        self._pulses = read_pulses(())
        self._ranks = RankLook()
        self._host = NodeWatch(NodePlaces(tmp=Path(tempfile.gettempdir())), node.processes())
        self._gpus = GpuWatch(self._processes) if node.manifest.gpus_per_node else None
        self._minute: list[Sample] = []
        self._folder = Path(node.options.prometheus) if node.options.prometheus else None
        self._labels = {
            "job_id": node.this_node.job_id, "node": node.this_node.node, "run": node.run.path.name,
        }  # fmt: skip
        self._written = 0
        self._problem = ""

    def attend(self, now: float) -> None:
        """Take a sample if the next sample is due."""
        if now - self._last >= self._node.options.sample:
            self._take(now)

    def finish(self, _now: float) -> None:
        """Write the samples that are not written yet. The ranks have ended, so no new sample is taken."""
        if self._minute:
            self._write(together(self._minute))
        if self._folder is not None:
            prometheus.withdraw(self._folder, self._labels)

    def _processes(self) -> dict[int, int]:
        return dict(processes(self._pulses))

    def _take(self, now: float) -> None:
        self._pulses = read_pulses(self._node.rank_folders())
        sample = Sample(
            at=round(now, 3),
            seconds=round(now - self._last, 3),
            gpus=self._look_at_gpus(),
            node=replace(self._host.look(now), connections=self._connections()),
            ranks=self._ranks.look(self._pulses, self._processes(), now),
        )
        self._last = now
        self._publish(sample)
        if now - self._begin < _HOURS_IN_FULL * 3600 and self._written < _MOST_BYTES // 4:
            self._write(sample)
            return
        self._minute.append(sample)
        if sum(one.seconds for one in self._minute) >= _SECONDS_OF_A_RECORD:
            self._write(together(self._minute))
            self._minute = []

    def _connections(self) -> float | None:
        """Return how many shells and connections of a session are open here; None for a run that is not a session."""
        if self._node.manifest.session is None:
            return None
        try:
            door = load_record(SessionNode, self._node.run.session_of(self._node.this_node.node))
            return float(sum(not name.startswith(".") for name in os.listdir(NodeFolder(Path(door.folder)).open)))
        except (OSError, HpcenvError):
            return 0.0  # the session is not yet open here, or is no longer open

    def _publish(self, sample: Sample) -> None:
        """Write the newest sample for the site's Prometheus. After a problem, report it, and write nothing more."""
        try:
            if self._folder is not None:
                prometheus.publish(sample, self._folder, self._labels)
        except OSError as error:
            self._folder = None
            sys.stderr.write(f"hpcenv: node {self._node.this_node.node}: nothing for Prometheus: {error}\n")

    def _look_at_gpus(self) -> tuple[GpuUse, ...]:
        if self._gpus is None:
            return ()
        found = self._gpus.look(_SECONDS_FOR_GPUS)
        count = self._node.manifest.gpus_per_node
        if isinstance(found, tuple) and len(found) > count:
            # On this node, no cgroup hides the GPUs of other jobs. So the GPUs with ranks are the GPUs of the job.
            ours = tuple(gpu for gpu in found if gpu.ranks)
            found = (
                ours if len(ours) == count else f"the node shows {len(found)} GPUs, and which the job has is unknown"
            )
        if isinstance(found, tuple):
            return found
        return tuple(GpuUse(index=index, unknown={"all": found}) for index in range(count))

    def _write(self, sample: Sample) -> None:
        """Append one line with one write. After a problem, report it, and write no more samples."""
        if self._problem:
            return
        line = samples_line(sample).encode()
        problem = ""
        if self._written + len(line) > _MOST_BYTES:
            hour = (sample.at - self._begin) / 3600
            problem = f"samples end at hour {hour:.0f}: the file has reached its limit of {_MOST_BYTES >> 20} MiB"
            line = samples_line(Sample(at=sample.at, seconds=0.0, ended=problem)).encode()
        try:
            self._append(line)
        except OSError as error:
            problem = f"no more samples: {error}"
        if problem:
            self._problem = f"hpcenv: node {self._node.this_node.node}: {problem}"
            sys.stderr.write(f"{self._problem}\n")

    def _append(self, line: bytes) -> None:
        if not self._written:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
        self._written += len(line)


# -- several samples in one ---------------------------------------------------------------

# Counters and states: the combined record has the last value.
_LAST = frozenset((
    "ecc", "replays", "energy", "read", "written", "received", "sent", "rdma_received", "rdma_sent", "step",
    "last_step", "rdma_errors",
))  # fmt: skip


def together(samples: Sequence[Sample]) -> Sample:
    """Return one sample for several consecutive samples, with mean, minimum and maximum of each figure. Pure."""
    last = samples[-1]
    seconds = sum(sample.seconds for sample in samples)
    if len(samples) == 1:
        return last

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    parts: list[Sample] = [_combined(samples, how) for how in (mean, min, max)]
    middle, least, most = (replace(part, at=last.at, seconds=seconds) for part in parts)
    return replace(middle, least=least, most=most)


def _combined(records: Sequence[Any], how: Callable[[Sequence[float]], float]) -> Any:
    """Return the last record, with each figure combined over all records.

    Lists are combined item by item. A list with a different length than the list of the last record is left out.
    """
    last = records[-1]
    changes: dict[str, Any] = {}
    for name in (one.name for one in fields(last)):
        values = [getattr(record, name) for record in records]
        known = [value for value in values if value is not None]
        if is_dataclass(values[-1]):
            changes[name] = _combined(values, how)
        elif isinstance(values[-1], tuple) and values[-1] and is_dataclass(values[-1][0]):
            same = [value for value in values if len(value) == len(values[-1])]
            changes[name] = tuple(_combined(items, how) for items in zip(*same, strict=True))
        elif name not in _LAST and known and isinstance(known[0], float):
            changes[name] = how(known)
    return replace(last, **changes)
