"""Test whether torch can use the GPUs of this node or srun task: a child process starts CUDA or HIP, and ends.

Runs on: inside the image (or in a host environment), in the agent, which has imported torch. Standard library only,
Python 3.8 to 3.14. judge/gpu_start.py outside compares the answer with the request.

The test runs in a child process, because the driver can hang or crash a process, and because a process keeps memory on
each GPU that it has used. A forked child can start CUDA if this process has not started CUDA (CUDA C++ Programming
Guide 13.0, fork). If this process has started CUDA, for example in a sitecustomize, the child is a new Python, which
imports torch again.

    python3 gpu_start.py JSON DESCRIPTOR      the child as a new Python
"""

import ctypes
import json
import os
import re
import runpy
import select
import signal
import sys
import time
import warnings
from typing import Any, Callable, Dict, List, Optional, Tuple

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_DEVICE_FILES = re.compile(r"(nvidia[0-9]+|nvidiactl|nvidia-uvm|kfd|dxg)\Z")
_CHECK_SECONDS = 0.01
# A process that hangs in the driver may survive even SIGKILL.
_SECONDS_TO_KILL = 5.0


def read(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """Return the report of the child, how the child ended, and which variables may hide GPUs from the child.

    Args:
        wanted: `seconds` is the time limit. The child makes a context on the GPU with the number `first` and on each
            `step`-th GPU after that GPU. If all tasks of a node see all GPUs, the tasks share the work in this way.
    """
    started = time.monotonic()
    try:
        lines, ended = _ask(wanted)
    except (OSError, AttributeError) as error:  # no process can be started, or this torch has no torch.cuda
        lines, ended = [], "%s: %s" % (type(error).__name__, error)
    answer = {"gpus": []}  # type: Dict[str, Any]
    for line in lines:
        part = json.loads(line)
        answer["gpus"] += [part.pop("gpu")] if "gpu" in part else []
        answer.update(part)
    answer["ended"] = ended
    answer["variables"] = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    answer["files"] = sorted(name for name in os.listdir("/dev") if _DEVICE_FILES.match(name))
    answer["seconds"] = round(time.monotonic() - started, 3)
    return answer


def _ask(wanted: Dict[str, Any]) -> Tuple[List[str], str]:
    """Start the child and wait for it; return its lines and, if it failed, how it ended."""
    until = time.monotonic() + wanted["seconds"]
    source, target = os.pipe()
    pid = _start_child(wanted, target)
    os.close(target)
    text, status = b"", None  # type: bytes, Optional[int]
    poll = select.poll()
    poll.register(source, select.POLLIN)
    while time.monotonic() < until and poll.poll(max(0.0, until - time.monotonic()) * 1000):
        piece = os.read(source, 1 << 16)
        if not piece:
            status = _wait(pid, until)
            break
        text += piece
    os.close(source)
    lines = text.decode("utf-8", "replace").splitlines()
    if status is None:
        os.kill(pid, signal.SIGKILL)
        _wait(pid, time.monotonic() + _SECONDS_TO_KILL)
        return lines, "no answer within %g s" % wanted["seconds"]
    if os.WIFSIGNALED(status):
        return lines, "it was ended by %s" % signal.Signals(os.WTERMSIG(status)).name
    return lines, "it ended with status %d" % os.WEXITSTATUS(status) if status else ""


def _wait(pid: int, until: float) -> Optional[int]:
    """Return the status of a child; None if it has not ended in time."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        if time.monotonic() > until:
            return None
        time.sleep(_CHECK_SECONDS)


def _start_child(wanted: Dict[str, Any], target: int) -> int:
    """Start the child, which writes its lines to the descriptor `target`; return its pid."""
    torch = sys.modules["torch"]  # type: Any
    if torch.cuda.is_initialized() or _library_of_driver():
        os.set_inheritable(target, True)
        argv = [sys.executable, os.path.abspath(__file__), json.dumps(wanted), str(target)]
        return os.posix_spawn(sys.executable, argv, os.environ)
    with warnings.catch_warnings():
        # Python 3.12 warns because this process has another thread. That thread only waits for a pipe.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _look(torch, wanted, target)
        status = 0
    finally:
        # Skip the agent's own exit functions and its buffers.
        os._exit(status)


# -- in the child -------------------------------------------------------------------------


def _look(torch: Any, wanted: Dict[str, Any], target: int) -> None:
    """Write what torch sees. Each line is written at once, because the next call may hang."""

    def say(**part: Any) -> None:
        os.write(target, (json.dumps(part) + "\n").encode())

    hip = bool(getattr(torch.version, "hip", None))
    say(hip=hip, at="cuInit")
    driver = None if hip else _start_driver(say)
    say(at="the start of torch.cuda")
    try:
        torch.cuda.init()
        # torch.cuda.device_count() may ask NVML, which lists GPUs that CUDA cannot use (torch 2.0 to 2.13).
        count = int(getattr(torch._C, "_cuda_getDeviceCount", torch.cuda.device_count)())
    except Exception as error:
        say(count=0, problem=_first_line(error))
        return
    say(count=count)
    step = wanted["step"] if count >= wanted["step"] else 1
    for index in range(wanted["first"] if step > 1 else 0, count, step):
        say(at="GPU %d" % index)
        say(gpu=_try(torch, index, driver))


def _start_driver(say: Callable[..., None]) -> Any:
    """Start NVIDIA's driver through its library; return the library if the driver starts.

    The library returns the number of an error. torch gives this number only inside a text.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        status = int(driver.cuInit(0))
    except (OSError, AttributeError) as error:
        say(missing=str(error))
        return None
    say(status=status, library=_library_of_driver())
    return None if status else driver


def _library_of_driver() -> str:
    """Return the path of the driver's library in this process; empty if it is not loaded."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        words = [line.rstrip("\n").split(None, 5) for line in maps if "/libcuda.so" in line]
    return words[0][-1] if words else ""


def _try(torch: Any, index: int, driver: Any) -> Dict[str, Any]:
    """Make a context on one GPU. Return the identity of the GPU, or the reason if it cannot be used."""
    try:
        torch.zeros(1, device="cuda:%d" % index)
        torch.cuda.synchronize(index)
    except Exception as error:
        return {"index": index, "problem": _first_line(error)}
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "start_hook", "device.py")
    found = runpy.run_path(beside)["identity"](torch.cuda.get_device_properties(index))
    return {"index": index, **found, "bus": found["bus"] or _bus(driver, index)}


def _bus(driver: Any, index: int) -> str:
    """Return the PCI address of a GPU as in /sys/bus/pci (cuda.h, cuDeviceGetPCIBusId); empty if unknown."""
    device, text = ctypes.c_int(0), ctypes.create_string_buffer(32)
    try:
        wrong = driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetPCIBusId(text, 32, device)
    except AttributeError:
        return ""
    return "" if wrong else text.value.decode("ascii", "replace").lower()


def _first_line(error: Exception) -> str:
    return ("%s: %s" % (type(error).__name__, error)).splitlines()[0][:300]


if __name__ == "__main__":
    import torch as _torch

    _look(_torch, json.loads(sys.argv[1]), int(sys.argv[2]))
