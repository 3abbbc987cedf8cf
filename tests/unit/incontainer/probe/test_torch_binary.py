"""torch's build facts in its binaries."""

from __future__ import annotations

from probe_world import Venv
from torch_world import build_library, install_cuda_torch

OLD_ABI = 'void fail(void) __asm__("_ZN3c106detail14torchCheckFailEPKcS2_jRKSs"); void fail(void) {}'


def test_arch_list_abi_and_debug_are_read_from_the_binaries(env: Venv) -> None:
    install_cuda_torch(env)
    values = env.probe()["values"]
    assert values["torch.arch-list"] == ["sm_80", "sm_90a", "compute_90"]
    assert (values["torch.cxx11-abi"], values["torch.debug"]) == ("true", "false")
    build_library(env.site / "torch/lib/libc10.so", OLD_ABI)
    build_library(env.site / "torch/lib/libtorch_python.so")
    found = env.probe()
    assert found["values"]["torch.cxx11-abi"] == "false"
    assert found["unknown"]["torch.arch-list"].startswith("0 strings in libtorch_python.so")
