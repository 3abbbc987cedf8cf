"""Level deep: a real import of torch."""

from __future__ import annotations

import hashlib
import os
import re

import pytest
from probe_world import SITE, Venv, probe
from torch_world import install_cuda_torch


@pytest.mark.torch
@pytest.mark.slow
def test_what_torch_maps_is_what_was_expected_without_importing_it() -> None:
    python = os.environ.get("HPCENV_TEST_TORCH_PYTHON")
    if not python:
        pytest.skip("NOT TESTED: HPCENV_TEST_TORCH_PYTHON names no Python with torch")
    found = probe(python, "deep")
    values = found["values"]
    assert not [f for f in found["unknown"] if f.startswith(("loaded.", "torch.", "libs."))]
    assert values["loaded.differs"] == [] and values["torch.running-differs"] == []
    assert values["loaded.libtorch_cpu"] == [values["libs.libtorch_cpu.origin"]]
    assert re.fullmatch("[0-9a-f]{64}", values["torch.config-digest"])


def test_a_torch_that_cannot_be_imported_leaves_the_other_levels(env: Venv) -> None:
    install_cuda_torch(env, cuda=False)
    found = env.probe("deep")
    assert found["unknown"]["loaded.nccl"].startswith("import torch ended with status ")
    assert found["unknown"]["torch.config-digest"].endswith("torch was imported")
    assert found["values"]["libs.libtorch_cpu.origin"].startswith("prefix:")


def test_a_running_torch_that_is_not_its_files_is_said(env: Venv) -> None:
    install_cuda_torch(env, cuda=False)
    (env.site / "torch/__init__.py").write_text(
        "import ctypes, types, os\n"
        "__version__ = '9.9'\n"
        "version = types.SimpleNamespace(git_version='%s', cuda=None, debug=False)\n"
        "_C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)\n"
        "cpu = types.SimpleNamespace(get_cpu_capability=lambda: 'AVX2')\n"
        "backends = types.SimpleNamespace(cpu=cpu)\n"
        "__config__ = types.SimpleNamespace(show=lambda: 'built\\n  - CPU capability usage: AVX2\\nend')\n"
        "ctypes.CDLL(os.path.dirname(__file__) + '/lib/libtorch_cpu.so')\n"
        "print('noise of an import')\n" % "cf30153c4c131c8164ee7798e5022d810682e2cb"
    )
    values = env.probe("deep")["values"]
    assert values["torch.running-differs"] == ["torch.version: 2.13.0+cpu in its files, 9.9 when it runs"]
    expected = f"prefix:{SITE}/torch/lib/libtorch.so"
    assert values["loaded.differs"] == [f"libtorch: nothing mapped, {expected} expected"]
    assert values["torch.config-digest"] == hashlib.sha256(b"built\nend").hexdigest()
    assert values["torch.cpu-capability"] == "AVX2"
