"""Every check inside the environment fails once, in its own process as on a node, and none fails on a healthy node.

GPUs are those of a small stand-in for torch, with arrays of numpy and one faulty device; Gloo is that of the real torch.
What needs root, a C compiler or torch says loudly that it did not run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcenv.judge.checks.check_table import CHECKS

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "hpcenv" / "incontainer" / "node_checks.py"
GCC = shutil.which("gcc") or shutil.which("cc")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="NOT RUN: mounting a file system needs root")
needs_gcc = pytest.mark.skipif(GCC is None, reason="NOT RUN: NO C COMPILER for a small libibverbs")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="NOT RUN: torch is not installed")
needs_numpy = pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="NOT RUN: numpy is not installed")

# What the checks use of torch. FAULT says what is wrong, and with which GPU.
TORCH = """\
import contextlib, os, types
import numpy

FAULT, _, _which = os.environ.get("FAULT", "").partition(":")
GPUS = int(os.environ.get("GPUS", "2"))
float32, bfloat16, float16, int64 = "float32", "bfloat16", "float16", "int64"
mixed = []

class device:
    def __init__(self, kind, index=0):
        self.index = index

class Tensor:
    def __init__(self, data, where="cpu", dtype="int64"):
        self.data, self.device, self.dtype = data, where, dtype
    def reshape(self, *shape): return Tensor(self.data.reshape(*shape), self.device, self.dtype)
    def __mod__(self, number): return Tensor(self.data % number, self.device, self.dtype)
    def __floordiv__(self, number): return Tensor(self.data // number, self.device, self.dtype)
    def __sub__(self, number): return Tensor(self.data - number, self.device, self.dtype)
    def __ne__(self, other): return Tensor(self.data != other.data)
    def sum(self): return int(self.data.sum())
    def to(self, what):
        if isinstance(what, str) and what != "cpu":
            return Tensor(self.data, self.device, what)
        return Tensor(self.data, what, self.dtype)
    def __matmul__(self, other):
        product = self.data @ other.data
        faulty = isinstance(self.device, device) and str(self.device.index) == _which
        if faulty and (FAULT == "product" or (FAULT == "mixed" and mixed)):
            product = product.copy()
            product[3, 5] += 1
        dtype = mixed[-1] if mixed and FAULT != "no-autocast" else self.dtype
        return Tensor(product, self.device, dtype)

def arange(count): return Tensor(numpy.arange(count))

@contextlib.contextmanager
def autocast(kind, dtype):
    mixed.append(dtype)
    yield
    mixed.pop()

def _init():
    if FAULT == "driver":
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).")
    if FAULT == "crash":
        os.abort()

version = types.SimpleNamespace(cuda="12.8")
cuda = types.SimpleNamespace(
    init=_init, device_count=lambda: GPUS, synchronize=lambda where: None, is_bf16_supported=lambda: True,
)
"""
VERBS = """\
#include <stddef.h>
void **ibv_get_device_list(int *number) {{ static void *list[2]; *number = {count}; return list; }}
"""


def run(*words: str, before: str = "", **environ: str) -> dict[str, dict[str, str]]:
    """Run the checks after the shell commands `before`, in namespaces of their own; return id -> outcome."""
    argv = [sys.executable, "-B", str(PROGRAM), *words]
    if before:
        argv = ["unshare", "--mount", "sh", "-ec", f'{before}\nexec "$@"', "sh", *argv]
    done = subprocess.run(argv, env={**os.environ, **environ}, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return {one["id"]: one for one in map(json.loads, done.stdout.splitlines())}


def only(group: str, *words: str, backend: str = "nccl", ranks: int = 1, **more: str) -> dict[str, dict[str, str]]:
    return run("--gpus", "2", "--ranks", str(ranks), "--backend", backend, "--only", group, *words, **more)


def assert_one(found: dict[str, dict[str, str]], name: str, state: str, word: str) -> None:
    assert (found[name]["state"], word in found[name]["found"]) == (state, True), found[name]


# -- limits -----------------------------------------------------------------------------------


@needs_root
def test_small_shared_memory() -> None:
    found = only("limits", before="mount -t tmpfs -o size=64m none /dev/shm")
    assert_one(found, "inside.shm", "failed", "64 MiB")
    assert_one(only("limits", before="mount -t tmpfs -o size=2g none /dev/shm"), "inside.shm", "fine", "2048 MiB")


def test_one_core_for_two_ranks() -> None:
    core = min(os.sched_getaffinity(0))
    argv = ["taskset", "-c", str(core), sys.executable, "-B", str(PROGRAM)]
    words = ["--gpus", "0", "--ranks", "2", "--backend", "gloo", "--only", "limits"]
    lines = subprocess.run([*argv, *words], capture_output=True, text=True, check=True).stdout.splitlines()
    found = {one["id"]: one for one in map(json.loads, lines)}
    assert_one(found, "inside.affinity", "failed", "1 for 2 ranks")
    assert_one(found, "inside.shm", "not-run", "gloo")


# A machine with one RDMA adapter.
ADAPTER = "mount -t tmpfs none /sys/class\nmkdir -p /sys/class/infiniband/mlx5_0"


@needs_root
def test_little_locked_memory_with_rdma() -> None:
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == 0:
        pytest.skip("NOT RUN: this machine locks no memory")
    assert_one(only("limits", before=f"{ADAPTER}\nulimit -l 64"), "inside.memlock", "failed", "64 KiB")
    if not os.path.isdir("/sys/class/infiniband"):
        assert_one(only("limits"), "inside.memlock", "not-run", "no RDMA")


@needs_root
@needs_gcc
@pytest.mark.parametrize(("count", "state"), [(0, "failed"), (1, "fine")])
def test_adapters_that_the_environment_cannot_open(tmp_path: Path, count: int, state: str) -> None:
    (tmp_path / "verbs.c").write_text(VERBS.format(count=count))
    library = tmp_path / "libibverbs.so.1"
    subprocess.run([str(GCC), "-shared", "-fPIC", "-o", library, tmp_path / "verbs.c"], check=True)
    found = only("verbs", before=ADAPTER, LD_LIBRARY_PATH=str(tmp_path))
    assert_one(found, "inside.verbs", state, f"{count} of 1 adapters")


@needs_root
def test_an_environment_without_libibverbs() -> None:
    found = only("verbs", before=ADAPTER)
    if "of 1 adapters" in found["inside.verbs"]["found"]:
        pytest.skip("NOT RUN: this machine has libibverbs")
    assert_one(found, "inside.verbs", "failed", "no libibverbs.so.1")


# -- CUDA -------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    return {"PYTHONPATH": str(tmp_path)}


@needs_numpy
def test_two_good_gpus(stand_in: dict[str, str]) -> None:
    found = only("cuda", **stand_in)
    assert {name: one["state"] for name, one in found.items()} == dict.fromkeys(("cuda.matmul", "cuda.amp"), "fine")


@needs_numpy
@pytest.mark.parametrize(
    ("fault", "name", "word"),
    [
        ("product:1", "cuda.matmul", "GPU 1: 1 of 65536 results are wrong"),
        ("mixed:1", "cuda.amp", "GPU 1: 1 of 65536 results are wrong"),
        ("no-autocast", "cuda.amp", "GPU 0: autocast gave float32, not bfloat16"),
    ],
)
def test_a_gpu_that_computes_wrong_is_named(stand_in: dict[str, str], fault: str, name: str, word: str) -> None:
    found = only("cuda", FAULT=fault, **stand_in)
    assert_one(found, name, "failed", word)


@needs_numpy
def test_no_gpu_to_compute_on(stand_in: dict[str, str]) -> None:
    found = only("cuda", GPUS="0", **stand_in)
    assert_one(found, "cuda.matmul", "unknown", "torch sees no GPU")


@needs_numpy
@pytest.mark.parametrize(
    ("fault", "word"), [("driver", "RuntimeError: The NVIDIA driver on your system is too old"), ("crash", "status -6")]
)
def test_cuda_that_does_not_start_fails_its_checks_and_hides_no_other(
    stand_in: dict[str, str], fault: str, word: str
) -> None:
    found = run("--gpus", "2", "--ranks", "1", "--backend", "gloo", FAULT=fault, **stand_in)
    for name in ("cuda.matmul", "cuda.amp"):
        assert_one(found, name, "failed", word)
    assert_one(found, "inside.affinity", "fine", "for 1 ranks")
    every = {check.id for check in CHECKS if check.place == "container" and check.level == "full"}
    assert set(found) == every


# -- process groups ---------------------------------------------------------------------------


@needs_torch
def test_gloo_of_the_real_torch_starts_and_a_dead_interface_fails_it() -> None:
    assert_one(only("groups", backend="gloo"), "dist.gloo", "fine", "a sum over one rank")
    found = run("--gpus", "0", "--ranks", "1", "--backend", "gloo", GLOO_SOCKET_IFNAME="nosuch0")
    assert_one(found, "dist.gloo", "failed", "nosuch0")
    assert_one(found, "dist.nccl", "not-run", "no GPU")
    assert_one(found, "cuda.matmul", "not-run", "no GPU")


@needs_torch
def test_a_torch_without_nccl_fails_where_the_run_needs_nccl() -> None:
    import torch.distributed

    if torch.distributed.is_nccl_available():
        pytest.skip("NOT RUN: this torch has NCCL")
    assert_one(only("groups"), "dist.nccl", "failed", "this torch has no nccl")
