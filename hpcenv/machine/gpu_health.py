"""The health of GPUs, as NVML reports it. The queries run in the child process of gpus.py.

Runs on: COMPUTE NODE. Standard library. The caller passes pynvml as an argument.

If a GPU or its driver does not support a query, the query is `unsupported`. This is no error, because many GPUs do not
support all queries (consumer cards, MIG, vGPU).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


# The class has no __eq__, so two GPUs are never equal, and a GPU can be the key of a dictionary.
@dataclass(frozen=True, kw_only=True, eq=False)
class GpuHealth:
    """The health of one GPU, as the GPU reports it. A query without an answer is in `unsupported` or in `unread`.

    Attributes:
        bus: address on the PCI bus, in the format of /sys/bus/pci; empty if the value is unknown.
        uuid: UUID of the GPU; empty if the value is unknown.
        numbers: query -> numbers that answer this query; see QUERIES.
        unsupported: queries that this GPU or its driver does not support.
        unread: query -> why this query could not be read.
    """

    bus: str = ""
    uuid: str = ""
    numbers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()
    unread: dict[str, str] = field(default_factory=dict)


def parse(reported: Mapping[str, object], *, bus: str, uuid: str) -> GpuHealth:
    """Return the child process's report on one GPU. Queries that are missing in the report are unread."""
    numbers, unsupported = reported.get("numbers"), reported.get("unsupported")
    unread = reported.get("unread")
    known = numbers if isinstance(numbers, dict) else {}
    absent = unsupported if isinstance(unsupported, list) else []
    reasons = unread if isinstance(unread, dict) else {}
    kept = {
        str(name): tuple(value)
        for name, value in known.items()
        if isinstance(value, list) and all(isinstance(one, int) for one in value)
    }
    missing = {
        name: str(reasons.get(name, "NVML did not report it"))
        for name in QUERIES
        if name not in kept and name not in absent
    }
    return GpuHealth(bus=bus, uuid=uuid, numbers=kept, unsupported=tuple(map(str, absent)), unread=missing)


# -- in the child process -------------------------------------------------------------------

# nvml.h, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION (driver 570 and newer).
_RECOVERY_ACTION = 230


def ask(pynvml: Any, handle: Any) -> dict[str, object]:
    """Ask one GPU all queries, and return the answers as plain data for `parse`."""
    absent = (
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    )
    numbers: dict[str, list[int]] = {}
    unsupported: list[str] = []
    unread: dict[str, str] = {}
    for name, query in QUERIES.items():
        try:
            numbers[name] = [int(one) for one in query(pynvml, handle)]
        except pynvml.NVMLError as error:
            if error.value in absent:
                unsupported.append(name)
            else:
                unread[name] = f"NVML: {error}"
        except pynvml.NVMLLibraryMismatchError:  # the driver's library is older than this call
            unsupported.append(name)
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            unread[name] = f"NVML: {error}"
    return {"numbers": numbers, "unsupported": unsupported, "unread": unread}


def _recovery(pynvml: Any, handle: Any) -> list[int]:
    answer = pynvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_ACTION])[0]
    if answer.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(answer.nvmlReturn)
    return [int(answer.value.uiVal)]


def _ecc(kind: str) -> Callable[[Any, Any], list[int]]:
    """Return the query for the number of memory errors of one kind since the driver was loaded."""

    def query(pynvml: Any, handle: Any) -> list[int]:
        which = getattr(pynvml, f"NVML_MEMORY_ERROR_TYPE_{kind}")
        return [pynvml.nvmlDeviceGetTotalEccErrors(handle, which, pynvml.NVML_VOLATILE_ECC)]

    return query


def _links(pynvml: Any, handle: Any) -> list[int]:
    """Return the number of NVLink links that are up, and the number of links that the GPU has."""
    up = links = 0
    for link in range(int(pynvml.NVML_NVLINK_MAX_LINKS)):
        try:
            up += int(pynvml.nvmlDeviceGetNvLinkState(handle, link)) == pynvml.NVML_FEATURE_ENABLED
        except pynvml.NVMLError as error:
            if error.value not in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT):
                raise
            break
        links += 1
    return [up, links]


def _fabric(pynvml: Any, handle: Any) -> list[int]:
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    info.version = pynvml.nvmlGpuFabricInfo_v2
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, pynvml.byref(info))
    return [info.state, info.status, info.healthMask]


def _processes(pynvml: Any, handle: Any) -> list[int]:
    """Return pid and memory in MiB of each process that computes on the GPU, one after the other."""
    every = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return [number for one in every for number in (one.pid, (one.usedGpuMemory or 0) >> 20)]


# Query -> the function that asks it. A comment says what the numbers mean.
QUERIES: dict[str, Callable[[Any, Any], list[int]]] = {
    # The driver requires this action before the GPU is used again (nvml.h, nvmlDeviceGpuRecoveryAction). 0 means no
    # action.
    "recovery": _recovery,
    "ecc-uncorrected": _ecc("UNCORRECTED"),
    "ecc-corrected": _ecc("CORRECTED"),
    # Remapped rows: corrected, uncorrected, pending, failure.
    "remapped": lambda nvml, gpu: list(nvml.nvmlDeviceGetRemappedRows(gpu)),
    "retired-pending": lambda nvml, gpu: [nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu)],
    # Bits of nvmlClocksEventReasons.
    "throttle": lambda nvml, gpu: [nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)],
    # The number of PCIe lanes now, and the largest possible number.
    "pcie-width": lambda nvml, gpu: [nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu), nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)],
    "nvlink": _links,
    # State, status, health mask of the NVLink switches.
    "fabric": _fabric,
    "compute-mode": lambda nvml, gpu: [nvml.nvmlDeviceGetComputeMode(gpu)],
    "persistence": lambda nvml, gpu: [nvml.nvmlDeviceGetPersistenceMode(gpu)],
    "processes": _processes,
    # The number N in /dev/nvidiaN.
    "minor": lambda nvml, gpu: [nvml.nvmlDeviceGetMinorNumber(gpu)],
    # Memory in use, in MiB.
    "memory-used": lambda nvml, gpu: [nvml.nvmlDeviceGetMemoryInfo(gpu).used >> 20],
}
