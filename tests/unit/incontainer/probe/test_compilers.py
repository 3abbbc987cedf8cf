"""The compilers that torch's extensions and Triton would use."""

from __future__ import annotations

from pathlib import Path

import pytest
from probe_world import Venv

NVCC = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.8, V12.8.93\nBuild cuda_12.8\n"


def program(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder on PATH, with what the programs of a test need."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "cat").symlink_to("/bin/cat")
    return folder


def compilers(env: Venv, tools: Path, **variables: str) -> dict[str, object]:
    found = env.probe(PATH=str(tools), **variables)
    both = {**found["values"], **{field: f"unknown: {why}" for field, why in found["unknown"].items()}}
    return {field.partition(".")[2]: value for field, value in both.items() if field.startswith("compilers.")}


def test_they_are_found_as_torch_and_triton_find_them(env: Venv, tools: Path) -> None:
    program(tools / "clang", "clang version 19.1.7\nTarget: x86_64")
    found = compilers(env, tools)
    assert (found["c"], found["cxx"]) == ("clang version 19.1.7", "absent")
    program(tools / "gcc", "gcc (GCC) 12.2.0\nCopyright")
    program(tools / "c++", "c++ (GCC) 12.2.0")
    program(tools / "nvcc", NVCC)
    found = compilers(env, tools)
    assert (found["c"], found["cxx"], found["nvcc"]) == ("gcc (GCC) 12.2.0", "c++ (GCC) 12.2.0", "12.8.93")


def test_variables_name_others(env: Venv, tools: Path) -> None:
    program(tools / "c++", "c++ (GCC) 12.2.0")
    program(tools / "nvcc", NVCC)
    program(env.site / "triton/backends/nvidia/bin/ptxas", NVCC)
    assert compilers(env, tools)["ptxas"] == "12.8.93"  # that of Triton
    found = compilers(
        env,
        tools,
        CXX=f"{program(tools / 'mpicxx', 'mpicxx 4.1')} -O2",
        CUDA_HOME=str(tools / "no-toolkit"),
        TRITON_PTXAS_PATH=str(program(tools / "ptxas", NVCC.replace("12.8.93", "13.0.48"))),
    )
    assert (found["cxx"], found["nvcc"], found["ptxas"]) == ("mpicxx 4.1", "absent", "13.0.48")


def test_a_compiler_that_says_nothing_is_unknown(env: Venv, tools: Path) -> None:
    program(tools / "nvcc", "no licence")
    assert compilers(env, tools)["nvcc"] == "unknown: it printed no release of CUDA"
