"""Which GPU libraries of the host a container gets: NVIDIA's, ROCm's, or none."""

from pathlib import Path

import pytest

from hpcenv.project.workspace import open_workspace, read_lockfile
from hpcenv.submission.locked import environment_of
from hpcenv.submission.plan import Request

LOCKED = read_lockfile(Path(__file__).resolve().parents[2] / "fuzz" / "seeds" / "lockfile" / "sif.lock.toml")


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """Return (--nv, --rocm) of a run with a torch that was built for something."""
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    (tmp_path / "a.sif").touch()
    (tmp_path / "hpcenv.toml").write_text('image = "a.sif"\n')

    def _libraries(*, cuda="none", hip="none", gpus=8, rocm=True):
        container = LOCKED.container.model_copy(update={"reference": "a.sif"})
        locked = LOCKED.model_copy(update={"facts": {"torch.cuda": cuda, "torch.hip": hip}, "container": container})
        request = Request(nodes=1, gpus_per_node=gpus, nproc_per_node=8, rocm=rocm)
        made = environment_of(open_workspace(tmp_path), locked, request, None, {}, lock="default")
        return made.gpus, made.rocm

    return _libraries


def test_rocms_libraries_are_brought_in_only_where_they_are_asked_for(libraries):
    assert libraries(hip="6.4") == (False, True)
    assert libraries(hip="6.4", rocm=False) == (False, False)


def test_torch_for_cuda_and_jobs_without_gpus_never_get_them(libraries):
    assert libraries(cuda="12.8") == (True, False)
    assert libraries(hip="6.4", gpus=0) == (False, False)
