"""torch's build facts in torch/version.py."""

from __future__ import annotations

import shutil

from probe_world import Venv
from torch_world import install_torch


def test_torch_absent(env: Venv) -> None:
    values = env.probe()["values"]
    assert (values["torch.version"], values["torch.git-version"], values["torch.cuda"]) == ("absent",) * 3


def test_torchs_build_facts_are_read_and_it_is_not_imported(env: Venv) -> None:
    install_torch(env)
    values = env.probe()["values"]
    assert values["torch.version"] == "2.13.0+cpu" and values["torch.cuda"] == "none"
    assert values["torch.git-version"] == "cf30153c4c131c8164ee7798e5022d810682e2cb"
    assert values["torch.hip"] == "none"


def test_a_rocm_build_names_hip(env: Venv) -> None:
    install_torch(env, "rocm7.0", hip="'7.0.1'")
    assert env.probe()["values"]["torch.hip"] == "7.0.1"


def test_torch_facts_that_are_not_there_are_unknown(env: Venv) -> None:
    install_torch(env)
    (env.site / "torch/version.py").write_text("__version__ = 'x'\ncuda = ((")
    found = env.probe()
    assert found["unknown"]["torch.cuda"].startswith("SyntaxError")
    (env.site / "torch/version.py").unlink()
    assert env.probe()["unknown"]["torch.version"].startswith("FileNotFoundError")
    shutil.rmtree(env.site / "torch")
    assert "no folder 'torch'" in env.probe()["unknown"]["torch.version"]
