"""Clocks and PCIe links of the GPUs while they work: samples of NVML beside the products of `cuda.burn`.

Runs on: COMPUTE NODE, and any machine with GPUs. Standard library; pynvml (nvidia-ml-py) where it is installed. An idle
GPU lowers its clocks and its PCIe speed, so only samples of a busy one are judged.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from hpcenv import process
from hpcenv.records.checks import CheckOutcome

CHECKS = ("load.pcie", "load.clocks", "load.throttle")

# A GPU is busy from this use on, in percent; so many samples of a busy one are needed.
_BUSY = 90
_LEAST_SAMPLES = 3
_SECONDS_BETWEEN = 0.25
# After this time the child ends by itself.
_MOST_SECONDS = 600.0
# Below this part of the other GPUs' clock, and in this part of the samples, it is no accident.
_USUAL_CLOCK = 0.9
_OFTEN = 0.2
# nvml.h, nvmlClocksEventReasons: hardware slowdown, thermal slowdown, power brake.
_SLOW = {0x8: "hardware slowdown", 0x40: "too hot", 0x80: "power brake"}

_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hpcenv.node.preflight import gpu_load; gpu_load.report_samples()"
)


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One GPU at one moment; a number is -1 where NVML does not tell it.

    Attributes:
        use: percent of the last moment in which a program ran on it.
        clock: of the multiprocessors, in MHz.
        generation, width: of its PCIe link now; `most_...`: the most that GPU and slot have.
        reasons: bits of nvmlClocksEventReasons.
    """

    use: int = -1
    clock: int = -1
    generation: int = -1
    most_generation: int = -1
    width: int = -1
    most_width: int = -1
    reasons: int = -1


@dataclass(kw_only=True)
class LoadWatch:
    """The samples of a time: complete when the watch has ended.

    Attributes:
        gpus: samples of each GPU, in the order of NVML.
        reason: why there are no samples; empty where there are.
    """

    gpus: list[list[GpuSample]] = field(default_factory=list)
    reason: str = ""


@contextmanager
def watched(environ: Mapping[str, str]) -> Iterator[LoadWatch]:
    """Sample the GPUs of this node in a child process for as long as the block runs."""
    watch = LoadWatch()
    with tempfile.TemporaryFile() as output:
        argv = [sys.executable, "-I", "-B", "-c", _CHILD, json.dumps(sys.path)]
        child = process.start(argv, env=environ, stdout=output, stderr=output)
        try:
            yield watch
        finally:
            process.kill_session(child)
            output.seek(0)
            _read(output, watch)


def _read(output: IO[bytes], watch: LoadWatch) -> None:
    watch.reason = "NVML gave no sample"
    for line in output.read().decode("utf-8", "replace").splitlines():
        try:
            found = json.loads(line)
            samples = [GpuSample(**one) for one in found["gpus"]]
        except (ValueError, KeyError, TypeError):
            watch.reason = line[:200]
            continue
        watch.reason = ""
        watch.gpus.extend([] for _ in range(len(samples) - len(watch.gpus)))
        for kept, one in zip(watch.gpus, samples, strict=False):
            kept.append(one)


# -- in the child process -------------------------------------------------------------------


def report_samples() -> None:
    """Write a line of JSON for each moment to standard output until this process is ended."""
    import pynvml  # type: ignore[import-untyped]

    pynvml.nvmlInit()
    handles = []
    for index in range(int(pynvml.nvmlDeviceGetCount())):
        try:
            handles.append(pynvml.nvmlDeviceGetHandleByIndex(index))
        except pynvml.NVMLError:
            continue  # a GPU of another job, or a lost one: gpu.lost names it
    until = time.monotonic() + _MOST_SECONDS
    while time.monotonic() < until:
        sys.stdout.write(json.dumps({"gpus": [_sample(pynvml, handle) for handle in handles]}) + "\n")
        sys.stdout.flush()
        time.sleep(_SECONDS_BETWEEN)


def _sample(pynvml: Any, handle: Any) -> dict[str, int]:
    queries: dict[str, Callable[[], Any]] = {
        "use": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "clock": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "generation": lambda: pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        "most_generation": lambda: pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        "width": lambda: pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "most_width": lambda: pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
        "reasons": lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }
    found = {}
    for name, query in queries.items():
        try:
            found[name] = int(query())
        except (pynvml.NVMLError, AttributeError, TypeError):
            found[name] = -1
    return found


# -- judgement ------------------------------------------------------------------------------


def judge(watch: LoadWatch) -> Iterator[CheckOutcome]:
    """Yield the outcomes of the checks under load."""
    if not watch.gpus:
        yield from (CheckOutcome(id=name, state="unknown", found=watch.reason) for name in CHECKS)
        return
    busy = [[one for one in samples if one.use >= _BUSY] for samples in watch.gpus]
    idle = [number for number, samples in enumerate(busy) if len(samples) < _LEAST_SAMPLES]
    if idle:
        why = f"GPU {', '.join(map(str, idle))}: not seen under load"
        yield from (CheckOutcome(id=name, state="unknown", found=why) for name in CHECKS)
        return
    yield _links(busy)
    yield _clocks(busy)
    yield _throttled(busy)


def _links(busy: Sequence[Sequence[GpuSample]]) -> CheckOutcome:
    wrong = []
    for number, samples in enumerate(busy):
        generation, width = max(one.generation for one in samples), max(one.width for one in samples)
        most = samples[-1]
        if generation < most.most_generation:
            wrong.append(f"GPU {number}: generation {generation} instead of {most.most_generation}")
        if width < most.most_width:
            wrong.append(f"GPU {number}: x{width} instead of x{most.most_width}")
    return _outcome("load.pcie", wrong, f"{len(busy)} GPUs")


def _clocks(busy: Sequence[Sequence[GpuSample]]) -> CheckOutcome:
    """Compare the clocks of the GPUs with each other: the power limit lowers those of all."""
    clocks = [statistics.median(one.clock for one in samples) for samples in busy]
    if len(clocks) < 2:
        return CheckOutcome(id="load.clocks", state="not-run", found="one GPU: no other one to compare with")
    usual = statistics.median_high(clocks)
    wrong = [
        f"GPU {number}: {clock:.0f} MHz, the others {usual:.0f} MHz"
        for number, clock in enumerate(clocks)
        if clock < usual * _USUAL_CLOCK
    ]
    return _outcome("load.clocks", wrong, f"{usual:.0f} MHz")


def _throttled(busy: Sequence[Sequence[GpuSample]]) -> CheckOutcome:
    wrong = []
    for number, samples in enumerate(busy):
        for bit, word in _SLOW.items():
            times = sum(one.reasons > 0 and bool(one.reasons & bit) for one in samples)
            if times > len(samples) * _OFTEN:
                wrong.append(f"GPU {number}: {word} in {times} of {len(samples)} samples")
    return _outcome("load.throttle", wrong, f"{len(busy)} GPUs")


def _outcome(name: str, wrong: Sequence[str], fine: str) -> CheckOutcome:
    return CheckOutcome(id=name, state="failed" if wrong else "fine", found="; ".join(wrong) or fine)
