"""GPUs and driver of this node, from NVML (pynvml) or nvidia-smi, or from the driver of AMD.

Runs on: COMPUTE NODE. Standard library, and pynvml (nvidia-ml-py) if it is installed.

The source is NVML. If NVML lists no GPUs, `nvidia-smi` is asked. If a node has no driver, the driver version is
`absent`. A value that cannot be read is unknown, and the reason is recorded.

NVML is loaded in a child process with a time limit. A GPU that has fallen off the bus can hang or crash the process
that queries the GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpcenv import process
from hpcenv.errors import HpcenvError
from hpcenv.machine import amd_gpus, gpu_health
from hpcenv.machine.gpu_health import GpuHealth
from hpcenv.records.network import GpuPlace

# Attribute of a GPU -> the field with one value per GPU.
_FIELDS = {
    "model": "host.gpu-models",
    "uuid": "host.gpu-uuids",
    "compute-capability": "host.gpu-compute-capabilities",
    "memory-mib": "host.gpu-memory-mib",
    "sm-count": "host.gpu-sm-counts",
    "mig": "host.gpu-mig",
    "ecc": "host.gpu-ecc",
    "brand": "host.gpu-brands",
}
_DRIVER, _CUDA, _COUNT = "host.driver-version", "host.cuda-driver-version", "host.gpu-count"

# If no persistence daemon keeps the driver's state, the initialization of eight GPUs takes 10 to 20 s.
_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """Facts about the GPUs: fields that were read, and reasons why other fields could not be read.

    Attributes:
        values: dotted name of a field -> its value.
        unknown: dotted name of a field -> why it could not be read.
        places: bus address and links of each GPU, for the network; empty if NVML did not report them.
        health: health of each GPU; empty if NVML did not list the GPUs.
        problem: text about a GPU that exists but does not answer; empty if there is no such GPU.
        reason: why NVML did not report some values; empty if NVML reported all values.
        hangs: whether the driver did not answer in time.
        vendor: vendor of the GPUs.
    """

    values: dict[str, str | int | float | bool | tuple[str, ...]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    places: tuple[GpuPlace, ...] = ()
    health: tuple[GpuHealth, ...] = ()
    problem: str = ""
    reason: str = ""
    hangs: bool = False
    vendor: Literal["nvidia", "amd"] = "nvidia"


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """The report of one source.

    Attributes:
        driver: driver version; empty if not reported.
        cuda: CUDA driver API version as a number, as NVML reports it: 13000 for 13.0. None if not reported.
        gpus: attributes of each GPU; None if the source did not list the GPUs.
        health: health of each GPU, in the same order; empty if the source did not report the health.
        problem: text about a GPU that exists but does not answer.
        reason: why values are missing.
        hangs: whether the source did not end in time.
    """

    driver: str = ""
    cuda: object = None
    gpus: tuple[dict[str, object], ...] | None = None
    health: tuple[dict[str, object], ...] = ()
    problem: str = ""
    reason: str = ""
    hangs: bool = False


def read(
    *,
    environ: Mapping[str, str],
    proc: Path = Path("/proc"),
    dev: Path = Path("/dev"),
    root: Path = Path("/"),
    seconds: float = _SECONDS,
) -> GpuFacts:
    """Return driver version, CUDA driver API version and GPUs of this node.

    The fields are `host.driver-version`, `host.cuda-driver-version` and `host.gpu-count`. Further fields have one text
    for each GPU: `host.gpu-models`, `-uuids`, `-compute-capabilities`, `-memory-mib`, `-sm-counts`, `-mig`, `-ecc` and
    `-brands`. The texts of `-mig` and `-ecc` are `enabled`, `disabled` or `unsupported`. GPUs that the job must not use
    (cgroup) are not counted. The GPUs are in the order of the PCI bus. For AMD's GPUs, the compute capability is the
    target (`gfx90a`), and driver version and CUDA driver API version are `absent`.

    Args:
        environ: environment of the child processes.
        proc, dev: the folders /proc and /dev.
        root: the folder that contains `sys`, from which AMD's GPUs are read.
        seconds: time limit for each source.
    """
    if not any(path.exists() for path in (proc / "driver/nvidia/version", dev / "nvidiactl", dev / "dxg")):
        if (dev / "kfd").exists():  # the device of AMD's driver (amdgpu, ROCm)
            return _of_amd(_ask_amd(environ, root, seconds))
        nothing: dict[str, Any] = dict.fromkeys(_FIELDS.values(), ())
        return GpuFacts(values={_DRIVER: "absent", _CUDA: "absent", _COUNT: 0, **nothing})
    nvml = _ask_nvml(environ, seconds)
    # If a query hangs in the driver, nvidia-smi would hang, too. So nvidia-smi is not started in this case.
    if nvml.gpus is not None or nvml.problem or nvml.hangs:
        return _facts(nvml)
    return _facts(_merged(nvml, _ask_nvidia_smi(environ, seconds)))


def _of_amd(found: amd_gpus.AmdGpus) -> GpuFacts:
    """Return the facts of AMD's GPUs."""
    values: dict[str, Any] = {_DRIVER: "absent", _CUDA: "absent"}
    if found.gpus is None:
        why = found.problem or found.reason
        unread = dict.fromkeys((_COUNT, *_FIELDS.values()), why)
        return GpuFacts(values=values, unknown=unread, problem=found.problem, reason=why, vendor="amd")
    values[_COUNT] = len(found.gpus)
    unknown = {}
    for attribute, name in _FIELDS.items():
        column = tuple(gpu.attributes.get(attribute, "") for gpu in found.gpus)
        if all(column):
            values[name] = column
        else:
            unknown[name] = "the driver of AMD reports no brand" if attribute == "brand" else found.reason
    health = tuple(_amd_health(gpu) for gpu in found.gpus)
    places = tuple(GpuPlace(bus=gpu.bus) for gpu in found.gpus)
    return GpuFacts(values=values, unknown=unknown, places=places, health=health, reason=found.reason, vendor="amd")


def _amd_health(gpu: amd_gpus.AmdGpu) -> GpuHealth:
    absent = tuple(query for query in gpu_health.QUERIES if query not in gpu.numbers)
    return GpuHealth(bus=gpu.bus, uuid=gpu.attributes.get("uuid", ""), numbers=dict(gpu.numbers), unsupported=absent)


def _merged(first: _Answer, second: _Answer) -> _Answer:
    return _Answer(
        driver=first.driver or second.driver,
        cuda=second.cuda if first.cuda is None else first.cuda,
        gpus=second.gpus,
        problem=second.problem,
        reason="; ".join(filter(None, (first.reason, second.reason))),
    )


def _facts(answer: _Answer) -> GpuFacts:
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    reason = answer.reason or "the driver did not report it"
    if re.fullmatch(r"\d+(\.\d+)+", answer.driver):
        values[_DRIVER] = answer.driver
    else:
        unknown[_DRIVER] = reason
    cuda = _cuda_version(answer.cuda)
    if cuda:
        values[_CUDA] = cuda
    else:
        unknown[_CUDA] = reason if answer.cuda is None else f"{answer.cuda!r} is not a CUDA driver API version"
    if answer.gpus is None or answer.problem:
        unread = dict.fromkeys((_COUNT, *_FIELDS.values()), answer.problem or reason)
        return GpuFacts(
            values=values, unknown=unknown | unread, problem=answer.problem, reason=reason, hangs=answer.hangs
        )
    values[_COUNT] = len(answer.gpus)
    checked = [_checked(gpu) for gpu in answer.gpus]
    for attribute, name in _FIELDS.items():
        column = [gpu.get(attribute, "") for gpu in checked]
        if all(column):
            values[name] = tuple(column)
        else:
            unknown[name] = next((why for gpu in checked if (why := gpu.get(f"no {attribute}"))), reason)
    places = gpu_places(answer.gpus)
    return GpuFacts(values=values, unknown=unknown, places=places, health=_health(answer), reason=answer.reason)


def _health(answer: _Answer) -> tuple[GpuHealth, ...]:
    """Return the health of each GPU; empty for nvidia-smi, whose table does not contain the health."""
    return tuple(
        gpu_health.parse(health, bus=str(gpu.get("bus", "")), uuid=str(gpu.get("uuid", "")))
        for gpu, health in zip(answer.gpus or (), answer.health, strict=False)
    )


def gpu_places(gpus: Iterable[Mapping[str, object]]) -> tuple[GpuPlace, ...]:
    """Return place and links of each GPU, from the report of NVML. GPUs without a bus address are left out."""
    return tuple(
        GpuPlace(
            bus=str(gpu["bus"]),
            links=links if isinstance(links := gpu.get("links"), int) else None,
            clique=str(gpu.get("clique", "")),
        )
        for gpu in gpus
        if gpu.get("bus")
    )


def _cuda_version(number: object) -> str:
    """Return 13.0 for 13000, which is 1000 * major + 10 * minor (cuda.h, CUDA 13); empty if it is not a version."""
    if not isinstance(number, int) or not 5000 <= number < 100_000 or number % 10:
        return ""
    return f"{number // 1000}.{number % 1000 // 10}"


_MODES = ("enabled", "disabled", "unsupported")


def _number(text: str, least: int, most: int) -> bool:
    return text.isdecimal() and least <= int(text) <= most


# If a value is outside of these limits, a structure was misread or the driver is broken. Such a value is dropped.
_PLAUSIBLE: dict[str, Callable[[str], bool]] = {
    "model": lambda text: 0 < len(text) <= 128 and text.isprintable() and not text.startswith("["),
    "uuid": lambda text: re.fullmatch(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text) is not None,
    "compute-capability": lambda text: re.fullmatch(r"[1-9]\d?\.\d", text) is not None,
    "memory-mib": lambda text: _number(text, 64, 2**24),
    "sm-count": lambda text: _number(text, 1, 4096),
    "mig": lambda text: text in _MODES,
    "ecc": lambda text: text in _MODES,
    "brand": lambda text: text in _BRANDS,
}


def _checked(gpu: Mapping[str, object]) -> dict[str, str]:
    """Return the attributes of a GPU. An attribute that is not plausible becomes `no NAME`, with the reason."""
    checked = {}
    for name, value in gpu.items():
        text = str(value)
        if name in _PLAUSIBLE and not _PLAUSIBLE[name](text):
            checked[f"no {name}"] = f"{text[:80]!r} cannot be a GPU's {name}"
        else:
            checked[name] = text
    return checked


# -- nvidia-smi ---------------------------------------------------------------------------

_SMI = {
    "uuid": "uuid",
    "name": "model",
    "driver_version": "driver",
    "memory.total": "memory-mib",
    "ecc.mode.current": "ecc",
    # Old versions refuse these fields (mig before R450, compute_cap before R510). So these fields are at the end, and
    # can be left out.
    "mig.mode.current": "mig",
    "compute_cap": "compute-capability",
}


def _ask_nvidia_smi(env: Mapping[str, str], seconds: float) -> _Answer:
    """Ask nvidia-smi, whose tables do not contain multiprocessors, brand and CUDA driver API version."""
    output, why = "", ""
    for omitted in (0, 1, 2):
        names = list(_SMI)[: len(_SMI) - omitted]
        argv = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
        output, why, _ = _run(argv, env, seconds)
        if "No devices were found" in output:
            return _Answer(gpus=())
        if not why:
            return _parse_nvidia_smi(output, names)
        if "not a valid field" not in output + why:
            break
    return _Answer(reason=f"nvidia-smi: {why}")


def _parse_nvidia_smi(output: str, names: Sequence[str]) -> _Answer:
    gpus: list[dict[str, object]] = []
    drivers = set()
    for line in filter(None, map(str.strip, output.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(names):
            return _Answer(reason=f"nvidia-smi: cannot read {line[:80]!r}")
        gpu: dict[str, object] = {_SMI[name]: cell for name, cell in zip(names, cells, strict=True)}
        drivers.add(str(gpu.pop("driver")))
        gpus.append(gpu | {name: _mode(str(gpu[name])) for name in ("mig", "ecc") if name in gpu})
    return _Answer(
        gpus=tuple(gpus),
        driver=drivers.pop() if len(drivers) == 1 else "",
        reason="nvidia-smi does not report it in a table",
    )


def _mode(cell: str) -> str:
    # nvidia-smi prints `[N/A]` in R450 and later, and `[Not Supported]` in older versions.
    text = cell.strip("[]").lower()
    return "unsupported" if text in ("n/a", "not supported") else text


# -- NVML, in a child process -------------------------------------------------------------

# The child gets the sys.path of this process. On a node, hpcenv is in the run folder, and pynvml is in the user's own
# environment.
_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from hpcenv.machine import gpus; gpus.report_nvml()"


def _ask_nvml(env: Mapping[str, str], seconds: float) -> _Answer:
    """Return what the child process reported, even if the child hung or crashed after a part of its report."""
    argv = [sys.executable, "-I", "-B", "-c", _CHILD, json.dumps(sys.path)]
    output, why, hangs = _run(argv, env, seconds)
    report: dict[str, Any] = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            part = json.loads(line)
            report.update(part if isinstance(part, dict) else {})
    reason = report.get("reason") or why
    gpus, health = report.get("gpus"), report.get("health")
    return _Answer(
        driver=str(report.get("driver", "")),
        cuda=report.get("cuda"),
        gpus=tuple(gpu for gpu in gpus if isinstance(gpu, dict)) if isinstance(gpus, list) else None,
        health=tuple(one for one in health if isinstance(one, dict)) if isinstance(health, list) else (),
        problem=str(report.get("problem", "")),
        reason=f"NVML: {reason}" if reason else "",
        hangs=hangs,
    )


# A child process reads AMD's files, too, because a faulty GPU can also hang a process that reads its driver's files.
_AMD_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hpcenv.machine import amd_gpus; amd_gpus.report(sys.argv[2])"
)


def _ask_amd(env: Mapping[str, str], root: Path, seconds: float) -> amd_gpus.AmdGpus:
    """Return what a child process reads about AMD's GPUs."""
    output, why, hangs = _run(
        [sys.executable, "-I", "-B", "-c", _AMD_CHILD, json.dumps(sys.path), str(root)], env, seconds
    )
    try:
        return amd_gpus.parse(json.loads(output.splitlines()[-1]))
    except (ValueError, LookupError, TypeError):
        reason = f"this node has AMD GPUs, and their driver's files could not be read: {why or 'no answer'}"
        return amd_gpus.AmdGpus(gpus=None, reason=reason, problem=reason if hangs else "")


def report_nvml() -> None:
    """Write what NVML reports to standard output, as lines of JSON. This function runs in a child process."""
    try:
        _report_nvml()
    except Exception as error:  # noqa: BLE001  (any failure of the driver's library is the answer)
        _report(reason=f"{type(error).__name__}: {error}")


def _report(**part: object) -> None:
    """Write one part of the answer at once, because the next call may hang."""
    sys.stdout.write(json.dumps(part) + "\n")
    sys.stdout.flush()


def _report_nvml() -> None:
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        _report(reason="pynvml is not installed for this Python")
        return
    problem = ""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        problem = str(error)
        _report(reason=problem)
    # This function works without nvmlInit, so it works even if a GPU is broken (NVML API, System Queries).
    with contextlib.suppress(pynvml.NVMLError):
        _report(cuda=int(pynvml.nvmlSystemGetCudaDriverVersion()))
    if problem:
        return
    try:
        _report(driver=_decoded(pynvml.nvmlSystemGetDriverVersion()))
        _report_gpus(pynvml)
    except pynvml.NVMLError as error:
        _report(reason=str(error))


def _report_gpus(pynvml: Any) -> None:
    gpus = []
    for index in range(int(pynvml.nvmlDeviceGetCount())):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            # nvmlDeviceGetCount_v2 also counts GPUs that this process must not use.
            if error.value != pynvml.NVML_ERROR_NO_PERMISSION:
                _report(problem=f"GPU {index}: {error}")
            continue
        gpus.append((_bus(pynvml, handle, index), _gpu(pynvml, handle), handle))
    gpus.sort(key=lambda parts: parts[0])
    _report(gpus=[gpu for _, gpu, _ in gpus])
    # The health is read last. If a query hangs or crashes, the facts above are already reported.
    _report(health=[gpu_health.ask(pynvml, handle) for _, _, handle in gpus])


def _bus(pynvml: Any, handle: Any, index: int) -> tuple[int, int, int, int]:
    try:
        bus = pynvml.nvmlDeviceGetPciInfo(handle)
    except pynvml.NVMLError:
        return (-1, -1, -1, index)
    return (int(bus.domain), int(bus.bus), int(bus.device), index)


def _bus_address(bus: tuple[int, int, int, int]) -> str:
    """Return a PCI address in the format of /sys/bus/pci.

    Raises:
        ValueError: NVML did not report the address.
    """
    domain, number, device, _ = bus
    if domain < 0:
        raise ValueError("no bus address")
    return f"{domain:04x}:{number:02x}:{device:02x}.0"


def _gpu(pynvml: Any, handle: Any) -> dict[str, object]:
    queries: dict[str, Callable[[], object]] = {
        "model": lambda: _decoded(pynvml.nvmlDeviceGetName(handle)),
        "uuid": lambda: _decoded(pynvml.nvmlDeviceGetUUID(handle)),
        "compute-capability": lambda: "{}.{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        "memory-mib": lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) >> 20,
        "sm-count": lambda: _multiprocessors(
            int(pynvml.nvmlDeviceGetNumGpuCores(handle)), pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        ),
        "mig": lambda: _MODE[int(pynvml.nvmlDeviceGetMigMode(handle)[0])],
        "ecc": lambda: _MODE[int(pynvml.nvmlDeviceGetEccMode(handle)[0])],
        "brand": lambda: _BRANDS[int(pynvml.nvmlDeviceGetBrand(handle))],
        "bus": lambda: _bus_address(_bus(pynvml, handle, 0)),
        "links": lambda: _links_up(pynvml, handle),
        "clique": lambda: _clique(pynvml, handle),
    }
    gpu: dict[str, object] = {}
    for name, query in queries.items():
        try:
            gpu[name] = query()
        except pynvml.NVMLError as error:
            if name in ("mig", "ecc") and error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                gpu[name] = "unsupported"
            else:
                gpu[f"no {name}"] = f"NVML: {error}"
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            gpu[f"no {name}"] = f"NVML: {error}"
    return gpu


def _links_up(pynvml: Any, handle: Any) -> int:
    """Return the number of NVLink links that are up; 0 for a GPU that has no NVLink."""
    count = 0
    for link in range(int(pynvml.NVML_NVLINK_MAX_LINKS)):
        try:
            count += int(pynvml.nvmlDeviceGetNvLinkState(handle, link)) == pynvml.NVML_FEATURE_ENABLED
        except pynvml.NVMLError as error:
            # The GPU has fewer links than the largest number, or has no NVLink.
            if error.value not in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT):
                raise
            break
    return count


def _clique(pynvml: Any, handle: Any) -> str:
    """Return the NVLink domain across nodes that this GPU has joined; empty if it has joined no domain."""
    try:
        info = pynvml.c_nvmlGpuFabricInfo_t()
        pynvml.nvmlDeviceGetGpuFabricInfo(handle, pynvml.byref(info))
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
            return ""
        raise
    cluster = bytes(int(part) & 255 for part in info.clusterUuid)
    if int(info.state) != pynvml.NVML_GPU_FABRIC_STATE_COMPLETED or not any(cluster):
        return ""
    return f"{cluster.hex()}.{int(info.cliqueId)}"


_MODE = {0: "disabled", 1: "enabled"}

# Brands in NVML's order (nvml.h, nvmlBrandType_t), in the spelling of NVIDIA_REQUIRE_CUDA.
_BRANDS: tuple[str, ...] = (
    "unknown",
    "quadro",
    "tesla",
    "nvs",
    "grid",
    "geforce",
    "titan",
    "vapps",
    "vpc",
    "vcs",
    "vws",
    "cloudgaming",
    "quadrortx",
    "nvidiartx",
    "nvidia",
    "geforcertx",
    "titanrtx",
)

# A multiprocessor has 64 CUDA cores for these compute capabilities, and 128 cores for all other compute capabilities
# (CUDA Programming Guide). NVML reports the number of cores, but not the number of multiprocessors.
_64_CORES = {(6, 0), (7, 0), (7, 2), (7, 5), (8, 0)}
_NEWEST_KNOWN = (12, 1)


def _multiprocessors(cores: int, capability: Iterable[int]) -> int:
    known = tuple(capability)
    per_sm = 64 if known in _64_CORES else 128
    if not (5, 0) <= known <= _NEWEST_KNOWN or cores <= 0 or cores % per_sm:
        raise ValueError(f"{cores} cores of compute capability {known} do not give a number of multiprocessors")
    return cores // per_sm


def _decoded(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


# -- child processes ------------------------------------------------------------------------


def _run(argv: Sequence[str], env: Mapping[str, str], seconds: float) -> tuple[str, str, bool]:
    """Run a program; return its output, why it failed (empty if it did not fail), and whether it hangs.

    This function waits about `seconds` at most, because a process that hangs in the driver may survive
    even SIGKILL (state D).
    """
    try:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = process.start(argv, env=env, stdout=out, stderr=err)
            status = _wait(child.poll, seconds)
            if status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                _wait(child.poll, 1.0)
            # nvidia-smi writes its errors to standard output.
            return _text(out), _why(status, seconds, _text(err) or _text(out)), status is None
    except FileNotFoundError:
        return "", f"`{argv[0]}` is not on PATH", False
    except (OSError, HpcenvError) as error:
        return "", f"`{argv[0]}` cannot be started: {error}", False


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read(2**20).decode(errors="replace"))


def _wait(poll: Callable[[], int | None], seconds: float) -> int | None:
    until = time.monotonic() + seconds
    while (status := poll()) is None and time.monotonic() < until:
        time.sleep(0.005)
    return status


def _why(status: int | None, seconds: float, output: str) -> str:
    if status is None:
        return f"no answer within {seconds:g} s"
    if status < 0:
        return f"ended by signal {-status}"
    lines = output.strip().splitlines()
    return "" if status == 0 else f"ended with status {status}: {lines[-1][:200] if lines else ''}".rstrip(": ")
