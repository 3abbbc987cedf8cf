"""Check inside the environment, before the training, whether this node can do what the ranks need.

Runs on: INSIDE THE IMAGE, once on each node after the verdict. Python 3.8 and newer, standard library; it imports the
environment's own torch. Each group of checks runs in a child with a time limit, because CUDA may hang, and because a
crash of one group must not hide the results of other groups.

    python node_checks.py --gpus N --ranks N --backend nccl|gloo [--only GROUP]

Prints a line of JSON for each check: id, state (fine, failed, unknown, not-run), found.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any, Callable, Dict, Iterator, List, Tuple

CheckAnswer = Dict[str, str]

_GIB = 2**30


def _outcome(name: str, state: str, found: object) -> CheckAnswer:
    return {"id": name, "state": state, "found": str(found)[:500]}


# -- what needs no torch --------------------------------------------------------------------


def check_limits(options: argparse.Namespace) -> Iterator[CheckAnswer]:
    """Yield the outcomes about shared memory, locked memory and cores inside the environment."""
    room = os.statvfs("/dev/shm")  # noqa: S108
    free = room.f_frsize * room.f_bavail
    if options.backend == "nccl":
        yield _outcome("inside.shm", "fine" if free >= _GIB else "failed", "%d MiB" % (free >> 20))
    else:
        yield _outcome("inside.shm", "not-run", "the backend is gloo")
    yield _memlock(options)
    cores = _count_cores()
    state = "fine" if cores >= options.ranks else "failed"
    yield _outcome("inside.affinity", state, "%d for %d ranks" % (cores, options.ranks))


def _count_cores() -> int:
    """Return how many cores this process may use. cores.py is loaded by its path, because this file is no package."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cores.py")
    spec = importlib.util.spec_from_file_location("hpcenv_cores", path)
    module: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return int(module.count_cores(os.sched_getaffinity(0)))


def _adapters() -> List[str]:
    try:
        return os.listdir("/sys/class/infiniband")
    except OSError:
        return []


def _memlock(options: argparse.Namespace) -> CheckAnswer:
    if not _adapters() or options.backend != "nccl":
        return _outcome("inside.memlock", "not-run", "this run uses no RDMA")
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    enough = soft == resource.RLIM_INFINITY or soft >= _GIB
    found = "unlimited" if soft == resource.RLIM_INFINITY else "%d KiB" % (soft // 1024)
    return _outcome("inside.memlock", "fine" if enough else "failed", found)


def check_verbs(_: argparse.Namespace) -> Iterator[CheckAnswer]:
    """Yield whether libibverbs of the environment finds all RDMA devices of the host, and how many were found."""
    name, adapters = "inside.verbs", _adapters()
    if not adapters:
        yield _outcome(name, "not-run", "no RDMA adapter")
        return
    try:
        verbs = ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        yield _outcome(name, "failed", "the environment has no libibverbs.so.1: %s" % error)
        return
    number = ctypes.c_int(0)
    verbs.ibv_get_device_list.restype = ctypes.c_void_p
    devices = verbs.ibv_get_device_list(ctypes.byref(number))
    found = "%d of %d adapters" % (number.value, len(adapters))
    yield _outcome(name, "fine" if devices and number.value >= len(adapters) else "failed", found)


# -- CUDA -----------------------------------------------------------------------------------

_CUDA_CHECKS = ("cuda.matmul", "cuda.amp")
# A sum of 256 products of -1, 0 and 1 is a whole number of at most 256, which is exact in bfloat16, too.
_SIZE = 256


def check_cuda(options: argparse.Namespace) -> Iterator[CheckAnswer]:
    """Yield whether matrix products are right, also in mixed precision, on every GPU that torch sees."""
    if options.gpus == 0:
        yield from (_outcome(name, "not-run", "no GPU") for name in _CUDA_CHECKS)
        return
    import torch as library

    torch: Any = library
    if not torch.version.cuda and not getattr(torch.version, "hip", None):
        yield from (_outcome(name, "not-run", "this torch is built without CUDA") for name in _CUDA_CHECKS)
        return
    torch.cuda.init()
    count = torch.cuda.device_count()
    if count == 0:
        yield from (_outcome(name, "unknown", "torch sees no GPU") for name in _CUDA_CHECKS)
        return
    yield _on_each_gpu("cuda.matmul", torch, count, _wrong_product)
    yield _on_each_gpu("cuda.amp", torch, count, _wrong_mixed)


def _on_each_gpu(name: str, torch: Any, count: int, wrong: Callable[[Any, Any], str]) -> CheckAnswer:
    problems = []
    for index in range(count):
        problem = wrong(torch, torch.device("cuda", index))
        if problem:
            problems.append("GPU %d: %s" % (index, problem))
    return _outcome(name, "failed" if problems else "fine", "; ".join(problems) or "%d GPUs" % count)


def _matrices(torch: Any, device: Any) -> Tuple[Any, Any]:
    """Return two matrices of small whole numbers, whose product is exact in each precision that is used here."""
    rows = torch.arange(_SIZE * _SIZE).reshape(_SIZE, _SIZE)
    first, second = (rows % 3 - 1).to(torch.float32), (rows // 7 % 3 - 1).to(torch.float32)
    return first.to(device), second.to(device)


def _expected(torch: Any) -> Any:
    first, second = _matrices(torch, "cpu")
    return first.to(torch.int64) @ second.to(torch.int64)


def _difference(torch: Any, product: Any) -> str:
    torch.cuda.synchronize(product.device)
    wrong = int((product.to("cpu").to(torch.int64) != _expected(torch)).sum())
    return "%d of %d results are wrong" % (wrong, _SIZE * _SIZE) if wrong else ""


def _wrong_product(torch: Any, device: Any) -> str:
    first, second = _matrices(torch, device)
    return _difference(torch, first @ second)


def _wrong_mixed(torch: Any, device: Any) -> str:
    first, second = _matrices(torch, device)
    kind = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    with torch.autocast("cuda", dtype=kind):
        product = first @ second
    if product.dtype != kind:
        return "autocast gave %s, not %s" % (product.dtype, kind)
    return _difference(torch, product.to(torch.float32))


# -- process groups -------------------------------------------------------------------------


def check_groups(options: argparse.Namespace) -> Iterator[CheckAnswer]:
    """Yield whether a process group of one rank can compute a sum, with gloo, and with NCCL if the run uses it."""
    import torch

    backends = ["gloo"] + (["nccl"] if options.backend == "nccl" else [])
    if options.backend != "nccl":
        yield _outcome("dist.nccl", "not-run", "no GPU" if options.gpus == 0 else "the backend is gloo")
    for number, backend in enumerate(backends):
        yield _outcome("dist.%s" % backend, *_group_of_one(torch, backend, number))


def _group_of_one(torch: Any, backend: str, number: int) -> Tuple[str, str]:
    import torch.distributed as library

    dist: Any = library
    if not dist.is_available() or not getattr(dist, "is_%s_available" % backend, lambda: True)():
        return "failed", "this torch has no %s" % backend
    device = "cuda:0" if backend == "nccl" else "cpu"
    # A file is used as the store, because a file needs no port and no second process.
    place = os.path.join(os.environ.get("TMPDIR") or "/tmp", "hpcenv-group-%d-%d" % (os.getpid(), number))  # noqa: S108
    store = dist.FileStore(place, 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        values = torch.arange(4, device=device, dtype=torch.float32)
        dist.all_reduce(values)
        good = values.tolist() == [0.0, 1.0, 2.0, 3.0]
    finally:
        dist.destroy_process_group()
        with contextlib.suppress(OSError):
            os.unlink(place)
    return ("fine", "a sum over one rank") if good else ("failed", "all_reduce over one rank changed the values")


# -- groups ---------------------------------------------------------------------------------

# Group -> its function, its time limit in seconds, its checks.
_GROUPS = {
    "limits": (check_limits, 10.0, ("inside.shm", "inside.memlock", "inside.affinity")),
    "verbs": (check_verbs, 10.0, ("inside.verbs",)),
    "cuda": (check_cuda, 120.0, _CUDA_CHECKS),
    "groups": (check_groups, 120.0, ("dist.gloo", "dist.nccl")),
}


def main() -> int:
    """Run all groups, each in a child; with --only, run one group in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--only", choices=sorted(_GROUPS))
    options = parser.parse_args()
    if options.only:
        for outcome in _GROUPS[options.only][0](options):
            print(json.dumps(outcome), flush=True)
        return 0
    children = {name: _start(name) for name in _GROUPS}
    for name, child in children.items():
        _report(name, child)
    return 0


def _start(name: str) -> "subprocess.Popen[str]":
    argv = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--only", name]
    return subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, universal_newlines=True
    )


def _report(name: str, child: "subprocess.Popen[str]") -> None:
    """Print the results of a child. A check without a result counts as failed."""
    _, seconds, checks = _GROUPS[name]
    try:
        output, errors = child.communicate(timeout=seconds)
        lines = errors.strip().splitlines()
        why = lines[-1] if lines else "ended with status %s" % child.returncode
    except subprocess.TimeoutExpired:
        child.kill()
        output, why = "", "no end within %g s" % seconds
    found = {}
    for line in output.splitlines():
        try:
            outcome = json.loads(line)
            found[outcome["id"]] = outcome
        except (ValueError, KeyError, TypeError):
            continue  # output of torch
    for check in checks:
        print(json.dumps(found.get(check) or _outcome(check, "failed", why)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
