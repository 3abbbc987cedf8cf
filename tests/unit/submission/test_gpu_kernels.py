"""Refused before the queue: GPUs with too little memory, and packages that are made for another torch."""

import dataclasses
from pathlib import Path

import pytest

from hpcenv.errors import SpecError, SubmitRejected
from hpcenv.judge.compat.compat_table import PACKAGED
from hpcenv.project import toml_files
from hpcenv.project.lockfile import BuiltTable, WheelTable
from hpcenv.project.workspace import open_workspace, read_lockfile
from hpcenv.submission import gpu_kernels
from hpcenv.submission.plan import Request

SEEDS = Path(__file__).resolve().parents[2] / "fuzz" / "seeds" / "lockfile"
TABLE = toml_files.read(PACKAGED, error=SpecError)
GPUS = Request(nodes=1, gpus_per_node=1, nproc_per_node=1)


def locked(*, memory=None, dists=(), policy=None, cuda="12.8", built=None):
    base = read_lockfile(SEEDS / "host.lock.toml")
    facts = {"torch.version": "2.9.1", "torch.cuda": cuda, "torch.arch-list": ("sm_75", "sm_80", "sm_90")}
    packages = tuple(
        base.packages.dist[0].model_copy(update={"name": name, "version": version}) for name, version in dists
    )
    if built is not None:
        table = BuiltTable(compiler="c++ 12.2", nvcc="12.8", arch_list=built)
        flash = base.packages.dist[0].model_copy(update={"name": "flash-attn", "version": "2.8.3"})
        packages += (flash.model_copy(update={"wheel": WheelTable(proof="built", built=table)}),)
    return base.model_copy(
        update={
            "facts": facts,
            "packages": base.packages.model_copy(update={"dist": packages}),
            "host": base.host.model_copy(update={"gpu_memory": memory}),
            "policy": policy or {},
        }
    )


@pytest.fixture
def refuse_gpus(tmp_path):
    def refuse(lock, gpu):
        (tmp_path / "hpcenv.toml").write_text(f'image = "host"\n[host]\ngpu = "{gpu}"\n')
        return gpu_kernels.refuse_gpu_without_kernels(open_workspace(tmp_path), lock, GPUS, TABLE, ())

    return refuse


def test_a_gpu_that_is_sold_with_less_memory_is_refused(refuse_gpus):
    with pytest.raises(SubmitRejected) as caught:
        refuse_gpus(locked(memory="80 GB"), "t4")
    assert caught.value.what == "the GPUs have less memory than the 80 GB that the project asks for"
    assert "T4 has 16 GB at most" in caught.value.why


@pytest.mark.parametrize(("memory", "gpu"), [("80 GB", "a100"), (None, "t4"), ("80 GB", "rtx_2080")])
def test_one_that_may_have_it_is_left_to_the_nodes(memory, gpu, refuse_gpus):
    assert refuse_gpus(locked(memory=memory), gpu) == []


def test_a_package_that_was_compiled_for_another_gpu_is_refused(refuse_gpus):
    with pytest.raises(SubmitRejected) as caught:
        refuse_gpus(locked(built="8.0;8.6"), "h100")
    assert caught.value.what == (
        "flash-attn 2.8.3 has no kernels for this GPU (H100, compute capability 9.0; it has sm_80, sm_86)"
    )
    assert "hpcenv image init --build flash-attn==2.8.3 --gpu NAME" in str(caught.value.hint)
    (note,) = refuse_gpus(locked(built="8.0", policy={"host.gpu-compute-capabilities": "warn"}), "h100")
    assert note.startswith("flash-attn 2.8.3 has no kernels for this GPU (H100")


@pytest.mark.parametrize(("machine", "hint"), [("x86_64", "torch 2.10 (cu128)"), ("aarch64", "")])
def test_no_build_of_torch_is_named_that_the_locked_image_cannot_run(machine, hint, refuse_gpus):
    lock = locked()
    with pytest.raises(SubmitRejected) as caught:
        refuse_gpus(lock.model_copy(update={"facts": {**lock.facts, "system.machine": machine}}), "v100")
    assert str(caught.value.hint or "").startswith(hint) and ("torch" in str(caught.value.hint)) == bool(hint)


@pytest.mark.parametrize("built", ["9.0", "8.0 9.0+PTX", "8.0+PTX", "9.0a"])
def test_a_package_that_was_compiled_for_this_gpu_is_not(built, refuse_gpus):
    assert refuse_gpus(locked(built=built), "h100") == []


def test_policy_decides_about_memory_too(refuse_gpus):
    assert refuse_gpus(locked(memory="80 GB", policy={"host.gpu-memory": "warn"}), "t4") == []


def test_a_torchvision_of_another_torch_is_refused_before_the_queue():
    with pytest.raises(SubmitRejected) as caught:
        gpu_kernels.judge_libraries(locked(dists=[("torchvision", "0.23.0")]), GPUS, TABLE)
    assert caught.value.what == "torchvision 0.23.0 requires torch ==2.8.0, here is 2.9.1"
    assert "torchvision 0.24.1 fits torch 2.9.1" in caught.value.hint
    assert '"compat.torchvision" = "warn" under [policy]' in caught.value.hint


def test_what_only_warns_is_a_note():
    dists = [("torchvision", "0.24.0"), ("nvidia-nccl-cu12", "2.29.7")]
    assert gpu_kernels.judge_libraries(locked(dists=dists), GPUS, TABLE) == [
        "compat.nccl: torch 2.9.1 requires NCCL ==2.27.5, here is 2.29.7",
        "compat.torchvision: torchvision 0.24.0 requires torch ==2.9.0, here is 2.9.1",
    ]
    accepted = locked(dists=[("torchvision", "0.23.0")], policy={"compat.torchvision": "info"})
    assert gpu_kernels.judge_libraries(accepted, GPUS, TABLE) == []


def test_without_gpus_or_cuda_nothing_is_judged():
    wrong = [("torchvision", "0.23.0")]
    assert gpu_kernels.judge_libraries(locked(dists=wrong), dataclasses.replace(GPUS, gpus_per_node=0), TABLE) == []
    assert gpu_kernels.judge_libraries(locked(dists=wrong, cuda="none"), GPUS, TABLE) == []
