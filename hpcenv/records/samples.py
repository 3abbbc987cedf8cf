"""Samples of what a run uses while its ranks run: `samples/attempt-K/NODE.jsonl` has a line for each sample of a node.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only. `watch/` writes these files on the nodes.

A value that could not be read is None, never 0. Sizes are in bytes, times in seconds, shares in percent.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcenv.errors import RecordInvalid
from hpcenv.records.codec import decode_record, encode_line
from hpcenv.records.files import read_lines
from hpcenv.records.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """One GPU at the time of a sample.

    Attributes:
        index: the number of this GPU among the job's GPUs of the node.
        use: share of the time since the last sample in which a kernel ran (NVML).
        memory, memory_total: memory used by all processes, and memory of the GPU.
        power, power_limit: in watts.
        temperature: in degrees Celsius.
        clock, clock_limit: of the SMs, in MHz.
        slow: NVML's reasons why the clock is lower than it could be, without the reason "idle".
        ecc: uncorrected errors since the driver was loaded.
        replays: number of PCIe packets that were sent again since the driver was loaded.
        energy: energy used since the driver was loaded, in joules.
        sm, tensor, dram: shares of time in which SMs, tensor cores and memory were busy (NVML's GPM: Hopper and newer).
        ranks: the ranks that have processes on this GPU.
        others: number of further processes on this GPU. They are counted, but no record names them.
        unknown: what could not be read, and why.
    """

    index: int
    uuid: str = ""
    use: float | None = None
    memory: float | None = None
    memory_total: float | None = None
    power: float | None = None
    power_limit: float | None = None
    temperature: float | None = None
    clock: float | None = None
    clock_limit: float | None = None
    slow: tuple[str, ...] = ()
    ecc: float | None = None
    replays: float | None = None
    energy: float | None = None
    sm: float | None = None
    tensor: float | None = None
    dram: float | None = None
    ranks: tuple[int, ...] = ()
    others: int | None = None
    unknown: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NodeUse:
    """What the job used on one node, from the job's cgroup if the kernel has one.

    Attributes:
        cpu, cpus: CPUs that were busy since the last sample, and CPUs that the job has.
        memory, memory_peak, memory_limit: memory of the job's processes on this node, without the kernel's page cache.
            The peak is the highest value of all samples.
        pressure_cpu, pressure_memory, pressure_io: share of the last 10 s in which a process waited for this resource.
        read, written: bytes read from and written to block devices since the job began.
        shm, shm_total, disk, disk_total: used and total size of /dev/shm, and of the node's temporary folder.
        received, sent: bytes of the node's network devices, without loopback, since the node was started.
        rdma_received, rdma_sent: bytes of the node's RDMA ports since the node was started.
        rdma_errors: errors that the RDMA ports counted (machine/network/port_errors.py); None without RDMA ports.
        connections: open shells and connections of a session; None for a run that is not a session.
        unknown: what could not be read, and why.
    """

    cpu: float | None = None
    cpus: int | None = None
    memory: float | None = None
    memory_peak: float | None = None
    memory_limit: float | None = None
    pressure_cpu: float | None = None
    pressure_memory: float | None = None
    pressure_io: float | None = None
    read: float | None = None
    written: float | None = None
    shm: float | None = None
    shm_total: float | None = None
    disk: float | None = None
    disk_total: float | None = None
    received: float | None = None
    sent: float | None = None
    rdma_received: float | None = None
    rdma_sent: float | None = None
    rdma_errors: float | None = None
    connections: float | None = None
    unknown: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankUse:
    """One rank at the time of a sample.

    Attributes:
        step: number of optimizer steps of this process; None if hpcenv sees no steps.
        step_seconds: mean time of a step since the last sample; None if no step ended since then.
        wait_seconds: the part of `step_seconds` in which the rank waited for its DataLoader; None without a DataLoader
            of torch.
        last_step: when the last step ended, in seconds since the epoch; None before the first step.
        saving: whether the rank is inside `hpcenv.training.saving`.
        state: the state of the process, a letter of proc(5): R, S, D, T.
        cpu: CPUs that the process and its children kept busy since the last sample.
        workers: processes of its DataLoaders; None if unknown.
        torch_memory, torch_peak: memory of torch's tensors on the GPU (`torch.cuda.memory_allocated`), now and at its
            peak.
    """

    rank: int
    pid: int
    step: int | None = None
    step_seconds: float | None = None
    wait_seconds: float | None = None
    last_step: float | None = None
    saving: bool = False
    state: str = ""
    cpu: float | None = None
    workers: int | None = None
    torch_memory: float | None = None
    torch_peak: float | None = None

    @property
    def wait_percent(self) -> float | None:
        """The share of a step's time in which the rank waited for data; None if unknown."""
        if self.wait_seconds is None or not self.step_seconds:
            return None
        return 100 * self.wait_seconds / self.step_seconds


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample of a node or, after some hours, a summary of all samples in a minute.

    Attributes:
        at: when the interval of the sample ended, in seconds since the epoch.
        seconds: length of this interval.
        least, most: in a summary, the least and greatest values of the minute. `gpus`, `node` and `ranks` then contain
            the means. In a single sample, `least` and `most` are None.
        ended: why no sample follows. Only the last record of a file has this text; such a record has no values.
    """

    at: float
    seconds: float
    gpus: tuple[GpuUse, ...] = ()
    node: NodeUse = NodeUse()
    ranks: tuple[RankUse, ...] = ()
    least: Sample | None = None
    most: Sample | None = None
    ended: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeSamples:
    """The samples of one node in one attempt, in the order of time.

    Attributes:
        began: when the first interval in the file began, in seconds since the epoch, if `samples` are only the newest
            ones. None if `samples` are all samples of the file.
        problem: why a part of the file could not be read or written; empty if there was no problem.
    """

    node: str
    attempt: int
    samples: tuple[Sample, ...] = ()
    began: float | None = None
    problem: str = ""


def samples_line(sample: Sample) -> str:
    """Return the line of a sample in its file."""
    return encode_line(sample) + "\n"


def read_samples(path: Path, *, node: str, attempt: int) -> NodeSamples:
    """Return the samples in the file of one node. Lines that are not samples are left out; `problem` reports them."""
    samples, problem = [], ""
    try:
        for line in read_lines(path):
            try:
                one = decode_record(Sample, line.decode("utf-8"), origin=str(path))
                problem = problem or one.ended
                samples += [] if one.ended else [one]
            except (RecordInvalid, UnicodeDecodeError) as error:
                # The last line has no line end while it is written, or if the node was lost.
                problem = problem or ("" if not line.endswith(b"\n") else str(error))
    except OSError as error:
        problem = f"{path}: {error.strerror}"
    return NodeSamples(node=node, attempt=attempt, samples=tuple(samples), problem=problem)


def read_attempt(run: RunFolder, attempt: int) -> Iterator[NodeSamples]:
    """Yield the samples of each node in one attempt, sorted by node. Without samples, yield nothing."""
    for path in sorted(run.samples_of(attempt, "x").parent.glob("*.jsonl")):
        yield read_samples(path, node=path.name.removesuffix(".jsonl"), attempt=attempt)


# At most this number of bytes at the end of a file is read at once, so that a page with 64 nodes appears in seconds.
# With 8 GPUs and a sample every 10 s, the samples of 15 minutes have 0.5 MB.
_MOST_AT_ONCE = 1 << 20


class NewSamples:
    """Reads the samples of an attempt again and again. Each call reads only the new part of each file.

    Args of the constructor:
        seconds: a sample is removed if it is older than the node's newest sample by more than this time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._files: dict[Path, tuple[int, NodeSamples]] = {}

    def read(self, run: RunFolder, attempt: int) -> list[NodeSamples]:
        """Return the newest samples of each node, sorted by node."""
        paths = sorted(run.samples_of(attempt, "x").parent.glob("*.jsonl"))
        return [self._node(path, attempt) for path in paths]

    def _node(self, path: Path, attempt: int) -> NodeSamples:
        """Return the newest samples of a node. An incomplete last line is left for the next call."""
        nothing = NodeSamples(node=path.name.removesuffix(".jsonl"), attempt=attempt)
        position, found = self._files.get(path, (0, nothing))
        try:
            with path.open("rb") as file:
                end = file.seek(0, io.SEEK_END)
                if end < position:  # the file was replaced by another file with the same name
                    position, found = 0, nothing
                begin = max(position, end - _MOST_AT_ONCE)
                file.seek(begin)
                data = file.read(_MOST_AT_ONCE)
                file.seek(0)
                first = file.readline() if found.began is None else b""
        except OSError as error:
            return replace(found, problem=f"{path}: {error.strerror}")
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.splitlines()[1 if begin > position else 0 :]
        new, problem = self._newest(lines, str(path))
        known = (*found.samples, *new)
        samples = tuple(one for one in known if one.at > known[-1].at - self._seconds)
        began = found.began if found.began is not None or not known else _begin_of(first, known[0])
        found = replace(found, samples=samples, began=began, problem=problem or found.problem)
        self._files[path] = (begin + len(whole), found)
        return found

    def _newest(self, lines: list[bytes], origin: str) -> tuple[list[Sample], str]:
        """Return the samples of the last seconds in some lines, and the problem of a line that is not a sample."""
        found: list[Sample] = []
        problem = ""
        for line in reversed(lines):
            try:
                one = decode_record(Sample, line.decode("utf-8"), origin=origin)
            except (RecordInvalid, UnicodeDecodeError) as error:
                problem = problem or str(error)
                continue
            if one.ended:
                problem = one.ended
                continue
            found.append(one)
            if one.at <= found[0].at - self._seconds:
                break
        return found[::-1], problem


def _begin_of(line: bytes, oldest: Sample) -> float:
    """Return when the interval of the first sample in a file began. If this line is damaged, use `oldest`."""
    with suppress(RecordInvalid, UnicodeDecodeError):
        oldest = decode_record(Sample, line.decode("utf-8"), origin="the first sample")
    return oldest.at - oldest.seconds
