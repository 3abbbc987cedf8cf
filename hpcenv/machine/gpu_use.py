"""The present use of the GPUs of this node, as NVML reports it.

Runs on: COMPUTE NODE. Standard library, and pynvml (nvidia-ml-py) if it is installed.

A GPU that has fallen off the bus can hang the thread that queries it. So a separate thread asks the GPUs, and the
caller waits only a limited time for the answer.

If a GPU is split (MIG), each part that this process may use counts as a GPU. NVML does not report how busy a part is.
Power, clocks and errors of the whole GPU also come from other jobs. So all these values are unknown for a part.

The units and names of the calls are from the NVML API reference (docs.nvidia.com/deploy/nvml-api, R580). All calls
gave an answer on an H200 with driver 580.159.04 (docs/gpu-checks.md).
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcenv.records.samples import GpuUse

# The process of DCGM. DCGM and GPM read the same counters of the hardware, and disturb each other (Syllo/nvtop PR 483).
_DCGM = "nv-hostengine"
# Metrics of NVML's GPM (nvmlGpmMetricId_t).
_GPM = {"sm": 2, "tensor": 5, "dram": 10}
# nvmlClocksEventReasons, without the reason that the GPU is idle.
_SLOW = {
    0x2: "applications-clocks", 0x4: "power-cap", 0x8: "hw-slowdown", 0x10: "sync-boost", 0x20: "sw-thermal",
    0x40: "hw-thermal", 0x80: "hw-power-brake", 0x100: "display-clocks",
}  # fmt: skip
# Field of GpuUse -> the call of NVML that reads the field.
_QUERIES: dict[str, Callable[[Any, Any], object]] = {
    "uuid": lambda n, gpu: _text(n.nvmlDeviceGetUUID(gpu)),
    "use": lambda n, gpu: n.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "memory": lambda n, gpu: n.nvmlDeviceGetMemoryInfo(gpu).used,
    "memory_total": lambda n, gpu: n.nvmlDeviceGetMemoryInfo(gpu).total,
    "power": lambda n, gpu: n.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "power_limit": lambda n, gpu: n.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    "temperature": lambda n, gpu: n.nvmlDeviceGetTemperature(gpu, n.NVML_TEMPERATURE_GPU),
    "clock": lambda n, gpu: n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_SM),
    "clock_limit": lambda n, gpu: n.nvmlDeviceGetMaxClockInfo(gpu, n.NVML_CLOCK_SM),
    "slow": lambda n, gpu: _reasons(n.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
    "ecc": lambda n, gpu: n.nvmlDeviceGetTotalEccErrors(gpu, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC),
    "replays": lambda n, gpu: n.nvmlDeviceGetPcieReplayCounter(gpu),
    "energy": lambda n, gpu: n.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000,
}

# The fields that are read for a part of a split GPU.
_OF_A_PART = ("uuid", "memory", "memory_total")
_PART = "NVML does not give this value for a part of a GPU (MIG)"


class GpuWatch:
    """Asks NVML repeatedly for the use of all GPUs of the job.

    Args of the constructor:
        processes: function that returns process id -> rank, for all processes of the job on this node. Each query calls
            this function.
    """

    def __init__(self, processes: Callable[[], Mapping[int, int]]) -> None:
        self._processes = processes
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[GpuUse, ...] | str] = queue.SimpleQueue()
        self._waits = False
        threading.Thread(target=self._answer, name="hpcenv-gpus", daemon=True).start()

    def look(self, seconds: float) -> tuple[GpuUse, ...] | str:
        """Return the use of each GPU, or the reason why the use is unknown.

        Args:
            seconds: the longest time to wait for the driver.
        """
        until = time.monotonic() + seconds
        while True:
            if not self._waits:
                self._asked.put(None)
            try:
                found = self._answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                self._waits = True
                return "the driver does not answer"
            if not self._waits:
                return found
            self._waits = False  # the answer belongs to an earlier question

    def _answer(self) -> None:
        nvml: _Nvml | str = ""
        while True:
            self._asked.get()
            try:
                nvml = nvml or _open()
                self._answers.put(nvml if isinstance(nvml, str) else nvml.look(self._processes()))
            except Exception as error:  # noqa: BLE001  (any failure of the driver's library is the answer)
                self._answers.put(f"NVML: {type(error).__name__}: {error}")


class _Nvml:
    """NVML with the GPUs of this job, in the order of the PCI bus, as with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Args of the constructor:
        gpus: for each GPU or part of a GPU, its handle and the handle of the whole GPU.
    """

    def __init__(self, nvml: Any, gpus: list[tuple[Any, Any]]) -> None:
        self._nvml = nvml
        self._gpus = gpus
        self._before: dict[int, Any] = {}
        self._dcgm = False

    def look(self, processes: Mapping[int, int]) -> tuple[GpuUse, ...]:
        self._dcgm = _dcgm_runs()  # called once for all GPUs, because it reads the names of all processes
        found = tuple(self._one(index, gpu, whole, processes) for index, (gpu, whole) in enumerate(self._gpus))
        if not processes or any(gpu.ranks for gpu in found) or not any(gpu.others for gpu in found):
            return found
        # If the whole job is in a container, the process ids from NVML may differ from the process ids in the job.
        why = "NVML names no process of the ranks by its number here"
        return tuple(replace(gpu, others=None, unknown={**gpu.unknown, "ranks": why}) for gpu in found)

    def _one(self, index: int, gpu: Any, whole: Any, processes: Mapping[int, int]) -> GpuUse:
        values: dict[str, Any] = {}
        asked = _QUERIES if gpu is whole else _OF_A_PART
        left_out = ", ".join(name for name in _QUERIES if name not in asked)
        unknown = {left_out: _PART} if left_out else {}
        for name in asked:
            try:
                value = _QUERIES[name](self._nvml, gpu)
                values[name] = float(value) if isinstance(value, int) else value
            except self._nvml.NVMLError as error:
                unknown[name] = f"NVML: {error}"
        values |= self._users(gpu, processes, unknown) | self._busy(index, gpu, whole, unknown)
        return GpuUse(index=index, unknown=unknown, **values)

    def _users(self, gpu: Any, processes: Mapping[int, int], unknown: dict[str, str]) -> dict[str, Any]:
        """Return the ranks whose processes use the GPU, and the number of other processes that use it."""
        try:
            pids = {one.pid for one in self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
        except self._nvml.NVMLError as error:
            unknown["ranks"] = f"NVML: {error}"
            return {}
        ours = {processes[pid] for pid in pids if pid in processes}
        return {"ranks": tuple(sorted(ours)), "others": sum(pid not in processes for pid in pids)}

    def _busy(self, index: int, gpu: Any, whole: Any, unknown: dict[str, str]) -> dict[str, Any]:
        """Return how busy the SMs, the tensor cores and the memory were since the last query."""
        nvml = self._nvml
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(whole).isSupportedDevice:
                return {}
            if self._dcgm:
                unknown["sm"] = f"{_DCGM} reads these counters"
                return {}
            sample = nvml.nvmlGpmSampleAlloc()
            before, self._before[index] = self._before.get(index), sample
            if gpu is whole:
                nvml.nvmlGpmSampleGet(gpu, sample)
            else:
                nvml.nvmlGpmMigSampleGet(whole, nvml.nvmlDeviceGetGpuInstanceId(gpu), sample)
            if before is None:
                return {}
            asked = nvml.c_nvmlGpmMetricsGet_t()
            asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(_GPM)
            asked.sample1, asked.sample2 = before, sample
            for place, number in enumerate(_GPM.values()):
                asked.metrics[place].metricId = number
            try:
                nvml.nvmlGpmMetricsGet(asked)
            finally:
                nvml.nvmlGpmSampleFree(before)
            return {
                name: float(asked.metrics[place].value)
                for place, name in enumerate(_GPM)
                if asked.metrics[place].nvmlReturn == nvml.NVML_SUCCESS
            }
        except (nvml.NVMLError, AttributeError) as error:  # an older driver, or an older pynvml
            unknown["sm"] = f"NVML: {error}"
            return {}


def _open() -> _Nvml | str:
    """Return NVML, or the reason why NVML cannot be used."""
    try:
        import pynvml  # type: ignore[import-untyped]  # nodes may not have it
    except ImportError:
        return "pynvml is not installed for the Python that watches"
    try:
        pynvml.nvmlInit()
        gpus = []
        for index in range(int(pynvml.nvmlDeviceGetCount())):
            try:
                gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
                bus = pynvml.nvmlDeviceGetPciInfo(gpu)
            except pynvml.NVMLError as error:
                # nvmlDeviceGetCount_v2 also counts GPUs that this process must not use.
                if error.value != pynvml.NVML_ERROR_NO_PERMISSION:
                    return f"NVML: GPU {index}: {error}"
                continue
            gpus += [((bus.domain, bus.bus, bus.device), index, part, gpu) for part in _parts(pynvml, gpu)]
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    return _Nvml(pynvml, [one[2:] for one in sorted(gpus, key=lambda one: one[:2])])


def _parts(nvml: Any, gpu: Any) -> list[Any]:
    """Return the parts of a split GPU that this process may use; the GPU itself if it is not split."""
    try:
        if not nvml.nvmlDeviceGetMigMode(gpu)[0]:
            return [gpu]
        most = int(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu))
    except nvml.NVMLError:  # a GPU that cannot be split
        return [gpu]
    found = []
    for index in range(most):
        with suppress(nvml.NVMLError):  # no part has this number, or another job has the part
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
    return found


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _reasons(bits: int) -> tuple[str, ...]:
    return tuple(word for bit, word in _SLOW.items() if bits & bit)


def _dcgm_runs() -> bool:
    """Return whether DCGM's daemon is among the processes of this node that this user can see."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if (Path("/proc") / pid / "comm").read_text(encoding="utf-8", errors="replace").strip() == _DCGM:
                return True
        except OSError:
            continue
    return False
