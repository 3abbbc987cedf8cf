"""What `lock` says about versions that do not fit together."""

import datetime as dt
from pathlib import Path

from hpcenv.locking import compatibility_notes
from hpcenv.project import compatibility
from hpcenv.project.workspace import read_lockfile

SEEDS = Path(__file__).resolve().parents[2] / "fuzz" / "seeds" / "lockfile"
TABLE = compatibility.table()
TODAY = dt.date(2026, 11, 23)


def notes(*, dists=(), today=TODAY, gpu=None, gpu_memory=None, **facts):
    base = read_lockfile(SEEDS / "host.lock.toml")
    values = {"torch.version": "2.9.1", "torch.cuda": "12.8", "torch.arch-list": ("sm_90",), "python.version": "3.11.2"}
    values |= {name.replace("_", ".", 1).replace("_version", ".version"): value for name, value in facts.items()}
    packages = tuple(
        base.packages.dist[0].model_copy(update={"name": name, "version": version}) for name, version in dists
    )
    locked = base.model_copy(
        update={
            "facts": values,
            "packages": base.packages.model_copy(update={"dist": packages}),
            "host": base.host.model_copy(update={"gpu": gpu, "gpu_memory": gpu_memory}),
            "policy": {},
        }
    )
    return compatibility_notes.notes(locked, TABLE, today=today)


def test_what_fits_has_no_note():
    assert notes(dists=[("torchvision", "0.24.1")], libs_cudnn_version="9.10.2") == ()


def test_each_misfit_has_a_note_with_its_severity():
    found = notes(dists=[("torchvision", "0.23.0")], libs_cudnn_version="9.1.0")
    assert found[0].startswith("compat.cudnn (warn): torch 2.9.1 requires cuDNN ==9.10.2.21, here is 9.1.0; ")
    assert found[1].startswith("compat.torchvision (must): torchvision 0.23.0 requires torch ==2.8.0, here is 2.9.1; ")


def test_a_python_without_wheels_of_this_torch_is_said():
    (note,) = notes(python_version="3.9.18")
    assert note.startswith("torch 2.9.1 has no wheel for Python 3.9.18: its wheels begin at 3.10")


def test_a_gpu_that_is_not_sold_with_so_much_memory_is_said():
    (note,) = notes(gpu="t4", gpu_memory="40 GB", **{"torch.arch-list": ("sm_75",)})
    assert note == "T4 is sold with 16 GB at most, and `gpu-memory` under [host] asks for 40 GB: no node can have both"
    assert notes(gpu="t4", gpu_memory="16 GB", **{"torch.arch-list": ("sm_75",)}) == ()
    assert notes(gpu="h100", gpu_memory="80 GB") == ()
    assert notes(gpu_memory="4000 GB") == ()


def test_a_cpu_build_is_judged_by_its_packages_only():
    assert notes(torch_version="2.99.0", torch_cuda="none") == ()
    (note,) = notes(torch_cuda="none", dists=[("torchaudio", "2.8.0")])
    assert note.startswith("compat.torchaudio (must)")


def test_an_old_table_says_so():
    (note,) = notes(today=TODAY + dt.timedelta(days=181))
    assert "days old" in note


def test_kernels_for_the_gpu_of_the_project():
    (note,) = notes(gpu="v100")
    assert "has no kernels for this GPU" in note and "torch 2.10 (cu128)" in note
    (note,) = notes(gpu="v100", **{"system.machine": "aarch64"})
    assert "has no kernels for this GPU" in note and "torch 2.1" not in note
