"""GPUs and driver of this host. The only import of pynvml.

Runs on: COMPUTE NODE. Standard library; pynvml (nvidia-ml-py) where it is installed.

Asks NVML, then libcuda, /proc/driver/nvidia and nvidia-smi for what is still missing. A node
without a driver is a fact ("absent"), a driver that does not answer is unknown.

The driver's libraries are loaded by a child process with a time limit: a GPU that has fallen
off the bus can hang or crash whoever asks for it, and a CUDA context, once made, stays with
its process. Here none is made at all: cuInit and device queries do without.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from typing import Any

from hpcenv.adapters import process
from hpcenv.errors import HpcenvError

# What is known of each GPU -> the field with one value per GPU.
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

# Initialising eight GPUs whose driver keeps no state (no persistence daemon) takes 10 to 20 s.
_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """Fields by their dotted names, and reasons for those that could not be read."""

    values: dict[str, str | int | float | bool | tuple[str, ...]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


@dataclass
class _Found:
    """What the sources said so far. `gpus` is None until one has listed them."""

    driver: str = ""
    cuda: str = ""
    gpus: list[dict[str, str]] | None = None
    problem: str = ""  # of a GPU that is there but does not answer
    reasons: list[str] = field(default_factory=list)
    hangs: bool = False


def read(
    *,
    environ: Mapping[str, str] | None = None,
    proc: Path = Path("/proc"),
    dev: Path = Path("/dev"),
    seconds: float = _SECONDS,
) -> GpuFacts:
    """Return driver version, CUDA driver API version and GPUs of this host.

    Fields: `host.driver-version`, `host.cuda-driver-version`, `host.gpu-count` and, with one
    text per GPU, `host.gpu-models`, `-uuids`, `-compute-capabilities`, `-memory-mib`,
    `-sm-counts`, `-mig` and `-ecc` (`enabled`, `disabled`, `unsupported`) and `-brands`. GPUs
    that the job may not use (cgroup) are not counted. They stand in CUDA's order: by PCI bus,
    and where models differ as libcuda enumerates them.

    Args:
        environ: environment for what is started; None for this process's own.
        proc, dev: where /proc and /dev are.
        seconds: time limit for each source.
    """
    if not any(path.exists() for path in (proc / "driver/nvidia/version", dev / "nvidiactl", dev / "dxg")):
        nothing: dict[str, Any] = dict.fromkeys(_FIELDS.values(), ())
        return GpuFacts(values={_DRIVER: "absent", _CUDA: "absent", _COUNT: 0, **nothing})
    env = {name: value for name, value in (os.environ if environ is None else environ).items() if name != _VISIBLE}
    found = _Found()
    for source in (_ask_nvml, _ask_libcuda, _ask_smi):
        if not found.hangs:
            source(found, env, seconds)
    _ask_proc(found, proc / "driver/nvidia/version")
    return _facts(found)


# libcuda counts only these; the facts are of the host.
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def _facts(found: _Found) -> GpuFacts:
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    reason = "; ".join(found.reasons) or "no source gave it"
    for name, version in ((_DRIVER, found.driver), (_CUDA, found.cuda)):
        if version:
            values[name] = version
        else:
            unknown[name] = reason
    if found.gpus is None or found.problem:
        return GpuFacts(
            values=values, unknown=unknown | dict.fromkeys((_COUNT, *_FIELDS.values()), found.problem or reason)
        )
    values[_COUNT] = len(found.gpus)
    for attribute, name in _FIELDS.items():
        column = [gpu.get(attribute, "") for gpu in found.gpus]
        if all(column):
            values[name] = tuple(column)
        else:
            unknown[name] = next((why for gpu in found.gpus if (why := gpu.get(f"no {attribute}"))), reason)
    return GpuFacts(values=values, unknown=unknown)


# -- the sources ----------------------------------------------------------------------------


def _ask_nvml(found: _Found, env: Mapping[str, str], seconds: float) -> None:
    answer = _ask_child("nvml", found, env, seconds, name="NVML")
    _take(found, answer)
    models = {gpu.get("model") for gpu in found.gpus or ()}
    if len(models) > 1 and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and not found.hangs:
        # CUDA puts the fastest first; only it knows which that is.
        order = [
            str(gpu.get("uuid")) for gpu in _ask_child("libcuda", found, env, seconds, name="libcuda").get("gpus", ())
        ]
        if found.gpus is not None and sorted(order) == sorted(gpu.get("uuid", "") for gpu in found.gpus):
            found.gpus.sort(key=lambda gpu: order.index(gpu["uuid"]))


def _ask_libcuda(found: _Found, env: Mapping[str, str], seconds: float) -> None:
    if found.gpus is None or not found.cuda:
        _take(found, _ask_child("libcuda", found, env, seconds, name="libcuda"))


def _ask_proc(found: _Found, version: Path) -> None:
    """The kernel module's version; its list of GPUs holds those of other jobs too."""
    if found.driver:
        return
    try:
        match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", version.read_text(errors="replace"))
    except OSError as error:
        found.reasons.append(f"{version}: {error.strerror}")
        return
    if match is None:
        found.reasons.append(f"{version} has no version")
    else:
        found.driver = match.group(1)


_SMI = {
    "uuid": "uuid",
    "name": "model",
    "driver_version": "driver",
    "memory.total": "memory-mib",
    "ecc.mode.current": "ecc",
    # Fields that old versions of nvidia-smi refuse (mig: R450, compute_cap: R510) come last.
    "mig.mode.current": "mig",
    "compute_cap": "compute-capability",
}


def _ask_smi(found: _Found, env: Mapping[str, str], seconds: float) -> None:
    """Ask nvidia-smi for what neither library gave; it knows no multiprocessors and no brand."""
    if found.gpus is None or any("mig" not in gpu and "no mig" not in gpu for gpu in found.gpus):
        _take(found, _ask_smi_for_gpus(found, env, seconds))
    if not found.cuda and not found.hangs:
        text, why = _run(["nvidia-smi", "-q", "-x"], env, seconds, found)
        match = re.search(r"<cuda_version>\s*(\d+\.\d+)\s*</cuda_version>", text)
        if match and not why:
            found.cuda = match.group(1)


def _ask_smi_for_gpus(found: _Found, env: Mapping[str, str], seconds: float) -> dict[str, Any]:
    why = ""
    for left_out in (0, 1, 2):
        names = list(_SMI)[: len(_SMI) - left_out]
        argv = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
        text, why = _run(argv, env, seconds, found)
        if "No devices were found" in text:
            return {"gpus": []}
        if not why:
            return _parse_smi(text, names)
        if "not a valid field" not in text + why:
            break
    found.reasons.append(f"nvidia-smi: {why}")
    return {}


def _parse_smi(text: str, names: Sequence[str]) -> dict[str, Any]:
    gpus = []
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(names):
            return {"reason": f"nvidia-smi: cannot read {line[:80]!r}"}
        gpu = {_SMI[name]: cell for name, cell in zip(names, cells, strict=True)}
        for mode in {"mig", "ecc"} & gpu.keys():
            # [N/A] in R450 and later, [Not Supported] before.
            said = gpu[mode].strip("[]").lower()
            gpu[mode] = "unsupported" if said in ("n/a", "not supported") else said
        gpus.append(gpu)
    drivers = {gpu.pop("driver") for gpu in gpus}
    return {"gpus": gpus, "driver": drivers.pop() if len(drivers) == 1 else ""}


# -- taking in what a source said -----------------------------------------------------------


_MODES = ("enabled", "disabled", "unsupported")


def _number(text: str, least: int, most: int) -> bool:
    return text.isdecimal() and least <= int(text) <= most


# What no GPU is, is a misread structure or a broken driver, and worse than nothing.
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


def _take(found: _Found, answer: Mapping[str, Any]) -> None:
    """Add an answer to what is not known yet. The first list of GPUs says which there are."""
    if answer.get("reason"):
        found.reasons.append(str(answer["reason"]))
    if not found.driver and re.fullmatch(r"\d+(\.\d+)+", str(answer.get("driver", ""))):
        found.driver = str(answer["driver"])
    if not found.cuda and "cuda" in answer:
        found.cuda = _cuda_version(answer["cuda"])
        if not found.cuda:
            found.reasons.append(f"{answer['cuda']!r} is not a CUDA driver API version")
    found.problem = found.problem or str(answer.get("problem", ""))
    gpus = answer.get("gpus")
    if not isinstance(gpus, list):
        return
    read_now = [_checked(gpu) for gpu in gpus if isinstance(gpu, Mapping)]
    if found.gpus is None:
        found.gpus = read_now
        return
    by_uuid = {gpu["uuid"]: gpu for gpu in read_now if "uuid" in gpu}
    found.gpus = [{**by_uuid.get(gpu.get("uuid", ""), {}), **gpu} for gpu in found.gpus]


def _cuda_version(number: object) -> str:
    """Return 13000 as 13.0: 1000 * major + 10 * minor (cuda.h, CUDA 13)."""
    if not isinstance(number, int) or not 5000 <= number < 100_000 or number % 10:
        return ""
    return f"{number // 1000}.{number % 1000 // 10}"


def _checked(gpu: Mapping[str, Any]) -> dict[str, str]:
    """Keep what can be true; say of the rest why not."""
    kept = {}
    for name, value in gpu.items():
        text = str(value)
        if name in _PLAUSIBLE and not _PLAUSIBLE[name](text):
            kept[f"no {name}"] = f"{text[:80]!r} cannot be a GPU's {name}"
        else:
            kept[name] = text
    return kept


# -- child processes ------------------------------------------------------------------------

# With this process's own path: on a node hpcenv lies in the run folder, and pynvml where the
# user has it.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hpcenv.adapters import nvml; nvml.answer(sys.argv[2])"
)


def _ask_child(library: str, found: _Found, env: Mapping[str, str], seconds: float, *, name: str) -> dict[str, Any]:
    """Return what a child said of `library`, as far as it came before it hung or crashed."""
    argv = [sys.executable, "-I", "-B", "-c", _CHILD, json.dumps(sys.path), library]
    text, why = _run(argv, env, seconds, found)
    said: dict[str, Any] = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            part = json.loads(line)
            said.update(part if isinstance(part, dict) else {})
    if why or "reason" in said:
        said["reason"] = f"{name}: {said.get('reason') or why}"
    return said


def _run(argv: Sequence[str], env: Mapping[str, str], seconds: float, found: _Found) -> tuple[str, str]:
    """Run a program and return what it wrote and why it failed ("" if it did not).

    It is not waited for beyond its time: a process that hangs in the driver may survive even
    SIGKILL (state D), and this one must not.
    """
    try:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = process.start(argv, env=env, stdout=out, stderr=err, new_session=True)
            ended = _wait(child.poll, seconds)
            if ended is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                _wait(child.poll, 1.0)
                found.hangs = True
            # nvidia-smi tells its errors on standard output.
            return _text(out), _why(ended, seconds, _text(err) or _text(out))
    except FileNotFoundError:
        return "", f"`{argv[0]}` is not on PATH"
    except (OSError, HpcenvError) as error:
        return "", f"`{argv[0]}` cannot be started: {error}"


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
    said = output.strip().splitlines()
    if status < 0:
        return f"ended by signal {-status}"
    return "" if status == 0 else f"ended with status {status}: {said[-1][:200] if said else ''}".rstrip(": ")


# -- inside the child -----------------------------------------------------------------------


def answer(library: str) -> None:
    """Tell what `nvml` or `libcuda` says, as JSON on standard output. Runs in a child of its own."""
    try:
        {"nvml": _tell_nvml, "libcuda": _tell_libcuda}[library]()
    except Exception as error:  # noqa: BLE001  (whatever a driver's library brings: it is the answer)
        _tell(reason=f"{type(error).__name__}: {error}")


def _tell(**said: object) -> None:
    """Write one part of the answer at once: what comes next may hang."""
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def _tell_nvml() -> None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        _tell(reason=str(error))
        return
    # This one works without nvmlInit, and so where a GPU is sick (NVML API, System Queries).
    number = ctypes.c_int(0)
    if library.nvmlSystemGetCudaDriverVersion(ctypes.byref(number)) == 0:
        _tell(cuda=number.value)
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        _tell(reason="pynvml is not installed for this Python")
        return
    try:
        pynvml.nvmlInit()
        _tell(driver=_decoded(pynvml.nvmlSystemGetDriverVersion()))
        _tell_gpus(pynvml)
    except pynvml.NVMLError as error:
        _tell(reason=str(error))


def _tell_gpus(pynvml: Any) -> None:
    gpus = []
    for index in range(int(pynvml.nvmlDeviceGetCount())):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            # nvmlDeviceGetCount_v2 counts GPUs that this process may not use.
            if error.value != pynvml.NVML_ERROR_NO_PERMISSION:
                _tell(problem=f"GPU {index}: {error}")
            continue
        gpus.append((_bus(pynvml, handle, index), _gpu(pynvml, handle)))
    _tell(gpus=[gpu for _, gpu in sorted(gpus, key=lambda pair: pair[0])])


def _bus(pynvml: Any, handle: Any, index: int) -> tuple[int, int, int, int]:
    try:
        bus = pynvml.nvmlDeviceGetPciInfo(handle)
    except pynvml.NVMLError:
        return (-1, -1, -1, index)
    return (int(bus.domain), int(bus.bus), int(bus.device), index)


def _gpu(pynvml: Any, handle: Any) -> dict[str, object]:
    questions: dict[str, Callable[[], object]] = {
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
    }
    gpu: dict[str, object] = {}
    for name, ask in questions.items():
        try:
            gpu[name] = ask()
        except pynvml.NVMLError as error:
            if name in ("mig", "ecc") and error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                gpu[name] = "unsupported"
            else:
                gpu[f"no {name}"] = f"NVML: {error}"
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            gpu[f"no {name}"] = f"NVML: {error}"
    return gpu


_MODE = {0: "disabled", 1: "enabled"}

# Brands in NVML's order (nvml.h, nvmlBrandType_t), as NVIDIA_REQUIRE_CUDA spells them.
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

# CUDA cores, which NVML counts, per multiprocessor, which it does not (CUDA Programming Guide,
# Compute Capabilities): 64 for these, else 128.
_64_CORES = {(6, 0), (7, 0), (7, 2), (7, 5), (8, 0)}
_NEWEST_KNOWN = (12, 1)


def _multiprocessors(cores: int, capability: Iterable[int]) -> int:
    known = tuple(capability)
    per_sm = 64 if known in _64_CORES else 128
    if not (5, 0) <= known <= _NEWEST_KNOWN or cores <= 0 or cores % per_sm:
        raise ValueError(f"{cores} cores of compute capability {known} tell no number of multiprocessors")
    return cores // per_sm


def _decoded(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


# Attributes of cuDeviceGetAttribute (cuda.h, CUdevice_attribute).
_ATTRIBUTE = {"sm-count": 16, "ecc": 32, "major": 75, "minor": 76}


def _tell_libcuda() -> None:
    """Memory is left out: libcuda counts what a context may use, NVML and nvidia-smi all of it."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        _tell(reason=str(error))
        return
    number = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(number)) == 0:
        _tell(cuda=number.value)
    status = library.cuInit(0)
    if status == 100:  # CUDA_ERROR_NO_DEVICE
        _tell(gpus=[])
        return
    if status == 0:
        status = library.cuDeviceGetCount(ctypes.byref(number))
    if status != 0:
        _tell(reason=f"cuInit says {status} ({_CUDA_ERRORS.get(status, 'see cuda.h')})")
        return
    gpus = [_cuda_gpu(library, index) for index in range(number.value)]
    if any(gpu.pop("slice") for gpu in gpus):
        # With MIG on, CUDA shows one slice and no GPU.
        _tell(reason="it shows MIG slices, not GPUs")
    else:
        _tell(gpus=gpus)


_CUDA_ERRORS = {
    3: "not initialized",
    999: "unknown error, as when nvidia_uvm is not loaded",
    802: "system not ready, as when the fabric manager does not run",
    803: "driver and library differ",
    804: "forward compatibility is not supported on this GPU",
}


def _cuda_gpu(library: Any, index: int) -> dict[str, Any]:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    whole, own = (ctypes.c_ubyte * 16)(), (ctypes.c_ubyte * 16)()
    _must(library.cuDeviceGet(ctypes.byref(device), index))
    _must(library.cuDeviceGetName(name, 255, device))
    _must(library.cuDeviceGetUuid(ctypes.byref(whole), device))
    v2 = getattr(library, "cuDeviceGetUuid_v2", None)
    # Version 2 gives a slice's own UUID, version 1 its GPU's (CUDA Driver API, Device Management).
    is_slice = v2 is not None and v2(ctypes.byref(own), device) == 0 and bytes(own) != bytes(whole)
    seen = {name: _attribute(library, code, device) for name, code in _ATTRIBUTE.items()}
    return {
        "model": name.value.decode(errors="replace"),
        "uuid": _uuid(bytes(whole)),
        "compute-capability": f"{seen['major']}.{seen['minor']}",
        "sm-count": seen["sm-count"],
        # Without ECC memory it says 0 too.
        **({"ecc": "enabled"} if seen["ecc"] == 1 else {}),
        "slice": is_slice,
    }


def _attribute(library: Any, code: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _must(library.cuDeviceGetAttribute(ctypes.byref(value), code, device))
    return value.value


def _must(status: int) -> None:
    if status != 0:
        raise OSError(f"libcuda says {status} ({_CUDA_ERRORS.get(status, 'see cuda.h')})")


def _uuid(raw: bytes) -> str:
    digits = raw.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
