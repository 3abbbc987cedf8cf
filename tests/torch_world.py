"""A torch made of small compiled libraries, for the tests of the probe."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from probe_world import Venv

TORCH = """from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = '2.13.0+{tag}'
debug = False
cuda: Optional[str] = {cuda}
git_version = 'cf30153c4c131c8164ee7798e5022d810682e2cb'
hip: Optional[str] = {hip}
"""


def install_torch(env: Venv, tag: str = "cpu", cuda: str = "None", hip: str = "None") -> None:
    files = {
        "torch/__init__.py": b"raise SystemExit('torch was imported')",
        "torch/version.py": TORCH.format(tag=tag, cuda=cuda, hip=hip).encode(),
    }
    env.install("torch", files, version="2.13.0")


def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc")
    if found is None:
        pytest.skip("NOT TESTED: no C compiler on this machine")
    return found


def build_library(path: Path, body: str = "", *, needs: tuple[Path, ...] = (), flags: tuple[str, ...] = ()) -> Path:
    """A real shared library whose soname is its file name; it needs the given ones by their sonames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text("#include <stddef.h>\n#include <unistd.h>\n#include <stdlib.h>\n" + body)
    command = [compiler(), "-shared", "-fPIC", "-Wl,--no-as-needed", f"-Wl,-soname,{path.name}", *flags]
    subprocess.run([*command, "-o", path, source, *needs], check=True)
    source.unlink()
    return path


PROPERTY = "int %s(int which, int *v) { static int n[] = {%s}; *v = n[which]; return 0; }"


ANSWERS = {
    "cuda_runtime/lib/libcudart.so.13": "int cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }",
    "nccl/lib/libnccl.so.2": "int ncclGetVersion(int *v) { *v = 22907; return 0; }",
    "cudnn/lib/libcudnn.so.9": "size_t cudnnGetVersion(void) { return 92000; }",
    "cu13/lib/libcublasLt.so.13": PROPERTY % ("cublasLtGetProperty", "13,1,2"),
    "cu13/lib/libcublas.so.13": PROPERTY % ("cublasGetProperty", "13,1,1"),
    "cu13/lib/libcufft.so.12": PROPERTY % ("cufftGetProperty", "12,0,0"),
    "cu13/lib/libcusparse.so.12": PROPERTY % ("cusparseGetProperty", "12,6,3"),
    "cusparselt/lib/libcusparseLt.so.0": PROPERTY % ("cusparseLtGetProperty", "0,8,1"),
    "cu13/lib/libnvrtc.so.13": "int nvrtcVersion(int *a, int *b) { *a = 13; *b = 0; return 0; }",
    "cu13/lib/libnvJitLink.so.13": "int nvJitLinkVersion(unsigned *a, unsigned *b) { *a = 13; *b = 2; return 0; }",
    "nvshmem/lib/libnvshmem_host.so.3": (
        "void nvshmemx_vendor_get_version_info(int *a, int *b, int *c) { *a = 3; *b = 4; *c = 5; }"
    ),
}


ARCHS = 'const char *archs(void) { return "sm_80 sm_90a compute_90"; }'


NEW_ABI = (
    'void fail(void) __asm__("_ZN3c106detail14torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_stringIcSt11char_traits'
    'IcESaIcEEE"); void fail(void) {}'
)


PRELOADS = """
raise SystemExit('torch was imported')
def _preload_cuda_deps(err=None):
    cuda_libs = [
        ("cuda_runtime", "libcudart.so.*[0-9]"),
        ("nccl", "libnccl.so.*[0-9]"),
    ]
def _load_global_deps():
    _preload_cuda_deps(err)
pass
"""


def install_cuda_torch(
    env: Venv,
    *,
    tags: str = "--disable-new-dtags",
    answers: dict[str, str] = ANSWERS,
    linked: bool = True,
    cuda: bool = True,
    abi: str = NEW_ABI,
) -> Path:
    """What a torch wheel is to the dynamic loader: stubs with the real names, sonames, RPATHs and needs."""
    install_torch(env, *(("cu130", "'13.0'") if cuda else ("cpu", "None")))
    (env.site / "torch/__init__.py").write_text(PRELOADS)
    vendor = [build_library(env.site / "nvidia" / name, body) for name, body in answers.items()] if cuda else []
    folders = sorted({f"$ORIGIN/../../nvidia/{os.path.dirname(name)}" for name in answers})
    path = (f"-Wl,{tags}", f"-Wl,-rpath,{':'.join([*(folders if linked else []), '$ORIGIN'])}")
    lib = env.site / "torch/lib"
    build_library(lib / "libtorch_global_deps.so", needs=tuple(p for p in vendor if "cudart" in p.name), flags=path)
    c10 = build_library(lib / "libc10.so", abi)
    cpu = build_library(lib / "libtorch_cpu.so", needs=(c10,), flags=path)
    gpu = (build_library(lib / "libtorch_cuda.so", needs=(cpu, *vendor), flags=path),) if cuda else ()
    torch = build_library(lib / "libtorch.so", needs=(cpu, *gpu), flags=path)
    python = build_library(lib / "libtorch_python.so", ARCHS, needs=(torch, *gpu), flags=path)
    suffix = env.probe()["values"]["python.soabi"]
    return build_library(
        env.site / f"torch/_C.{suffix}.so", needs=(python,), flags=(f"-Wl,{tags}", "-Wl,-rpath,$ORIGIN/lib")
    )
