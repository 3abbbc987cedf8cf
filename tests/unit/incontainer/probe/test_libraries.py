"""The libraries under torch."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from probe_world import SITE, Venv, altered
from torch_world import ANSWERS, build_library, install_cuda_torch, install_torch

from hpcenv.incontainer.probe.library_versions import LIBRARIES

VENDOR = [name for name, (_, _, function) in LIBRARIES.items() if function]


def test_a_cuda_build_without_libraries_is_unknown_and_not_absent(env: Venv) -> None:
    install_torch(env, "cu130", "'13.0'")
    found = env.probe()
    assert found["unknown"]["libs.nccl.version"].startswith("no such library found: torch has no extension module _C")
    assert found["unknown"]["libs.nccl.version"].endswith("(torch.cuda is 13.0)")


def test_library_versions_come_from_the_libraries_themselves(env: Venv) -> None:
    install_cuda_torch(env)
    found = env.probe("full")
    values = found["values"]
    versions = {name: values[f"libs.{name}.version"] for name in VENDOR}
    assert versions == {
        "cudart": "13.0",
        "cudnn": "9.20.0",
        "nccl": "2.29.7",
        "cufft": "12.0.0",
        "cusparse": "12.6.3",
        "cusparselt": "0.8.1",
        "nvrtc": "13.0",
        "nvjitlink": "13.2",
        "nvshmem": "3.4.5",
        "cublas": "13.1.1",
        "cublaslt": "13.1.2",
    }
    assert not [field for field in found["unknown"] if field.startswith("libs.")]
    nccl = env.site / "nvidia/nccl/lib/libnccl.so.2"
    assert values["libs.nccl.sha256"] == hashlib.sha256(nccl.read_bytes()).hexdigest()
    assert "libs.cublas.version" not in env.probe()["values"], "loading the real one takes 150 MiB"


def test_origin_moves_with_the_environment_and_build_id_is_the_notes(env: Venv) -> None:
    name = "nccl/lib/libnccl.so.2"
    install_cuda_torch(env)
    build_library(env.site / "nvidia" / name, ANSWERS[name], flags=("-Wl,--build-id=0xc0ffee0123456789",))
    build_library(env.site / "nvidia/cudnn/lib/libcudnn.so.9", flags=("-Wl,--build-id=none",))
    values = env.probe()["values"]
    assert values["libs.nccl.origin"] == f"prefix:{SITE}/nvidia/{name}"
    assert values["libs.nccl.build-id"] == "c0ffee0123456789"
    assert values["libs.cudnn.build-id"] == "none"
    assert values["libs.libtorch_cuda.origin"] == f"prefix:{SITE}/torch/lib/libtorch_cuda.so"


def test_what_torch_opens_itself_when_the_loader_finds_nothing(env: Venv) -> None:
    # Of a major version that no system has.
    two = {"cuda_runtime/lib/libcudart.so.99": "", "nccl/lib/libnccl.so.99": ANSWERS["nccl/lib/libnccl.so.2"]}
    install_cuda_torch(env, answers=two, linked=False)
    # Without RPATH nothing is found: then torch opens what __init__.py names, wherever sys.path has it.
    found = env.probe()
    assert found["values"]["libs.nccl.origin"] == f"prefix:{SITE}/nvidia/nccl/lib/libnccl.so.99"
    assert found["values"]["libs.nccl.version"] == "2.29.7"


def test_a_needed_library_that_is_nowhere_is_unknown_and_one_that_is_not_needed_is_absent(env: Venv) -> None:
    # Of a major version that no system has.
    install_cuda_torch(env, answers={"cuda_runtime/lib/libcudart.so.99": "", "nccl/lib/libnccl.so.99": ""})
    assert env.probe()["values"]["libs.nvshmem.version"] == "absent"
    (env.site / "nvidia/nccl/lib/libnccl.so.99").rename(env.site / "nvidia/nccl/lib/gone.txt")
    unknown = env.probe()["unknown"]
    where = f"{SITE}/torch/lib/libtorch_cuda.so needs libnccl.so.99"
    assert unknown["libs.nccl.version"] == f"no such library found: {where}, and the loader finds none"
    assert unknown["libs.nvshmem.version"] == "not every library under torch was found: libnccl.so.99 is missing"


def test_a_cpu_build_never_looks_at_the_systems_cuda(env: Venv, tmp_path: Path) -> None:
    install_cuda_torch(env, cuda=False)
    shadow = build_library(tmp_path / "cuda/libnccl.so.2", ANSWERS["nccl/lib/libnccl.so.2"])
    values = env.probe("full", LD_LIBRARY_PATH=str(shadow.parent))["values"]
    for name in (*VENDOR, "libtorch_cuda"):
        assert values[f"libs.{name}.origin"] == values[f"libs.{name}.sha256"] == "absent"
    assert values["libs.libtorch_cpu.origin"] == f"prefix:{SITE}/torch/lib/libtorch_cpu.so"
    assert re.fullmatch("[0-9a-f]{64}", values["libs.libtorch_cpu.sha256"])
    assert values["torch.arch-list"] == "none"


def test_old_libraries_packed_their_versions_otherwise(env: Venv) -> None:
    answers = {
        "nccl/lib/libnccl.so.2": "int ncclGetVersion(int *v) { *v = 2708; return 0; }",
        "cudnn/lib/libcudnn.so.8": "size_t cudnnGetVersion(void) { return 8902; }",
        "cuda_runtime/lib/libcudart-d0da41ae.so.11.0": "int cudaRuntimeGetVersion(int *v) { *v = 11070; return 0; }",
    }
    install_cuda_torch(env, answers=answers)
    values = env.probe()["values"]
    versions = {name: values[f"libs.{name}.version"] for name in ("nccl", "cudnn", "cudart")}
    assert versions == {"nccl": "2.7.8", "cudnn": "8.9.2", "cudart": "11.7"}


def test_a_library_that_crashes_lies_or_fails_is_unknown_and_alone(env: Venv) -> None:
    answers = {
        "nccl/lib/libnccl.so.2": "int ncclGetVersion(int *v) { abort(); }",
        "cudnn/lib/libcudnn.so.9": 'size_t cudnnGetVersion(void) { write(1, "noise", 5); return 7; }',
        "cuda_runtime/lib/libcudart.so.13": "int cudaRuntimeGetVersion(int *v) { return 35; }",
        "cu13/lib/libnvrtc.so.13": "int other(void) { return 0; }",
        "cu13/lib/libcufft.so.12": ANSWERS["cu13/lib/libcufft.so.12"],
    }
    install_cuda_torch(env, answers=answers)
    found = env.probe()
    unknown = found["unknown"]
    assert unknown["libs.nccl.version"] == "its child process ended with status -6"
    assert unknown["libs.cudnn.version"] == "the library reports 7, which is not a version"
    assert unknown["libs.cudart.version"] == "status [35]"
    assert "undefined symbol: nvrtcVersion" in unknown["libs.nvrtc.version"]
    assert found["values"]["libs.cufft.version"] == "12.0.0"


def test_a_library_that_hangs_is_given_up_and_not_left_behind(env: Venv) -> None:
    name = "nccl/lib/libnccl.so.2"
    install_cuda_torch(env, answers={name: "int ncclGetVersion(int *v) { sleep(600); return 0; }"})
    found = altered(env, {"LIBRARY_SECONDS = 20.0": "LIBRARY_SECONDS = 0.5"})
    assert found["unknown"]["libs.nccl.version"] == "loading it took longer than 0.5 s"
    assert str(env.site / "nvidia" / name) not in "".join(maps_of_all())


def maps_of_all() -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.append((process / "maps").read_text())
        except OSError:
            continue
    return found
