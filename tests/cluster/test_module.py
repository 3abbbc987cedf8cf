"""`hpcenv submit -m package.train`: a module of the project, from the run's own copy, and a module of the image."""

from __future__ import annotations

from tests.cluster.conftest import Cluster, Project

TRAIN = """\
import os, sys
import torch.distributed as dist
from . import helper
from .deeper.model import SIZE

dist.init_process_group("gloo")
print(f"RANK {dist.get_rank()} of {dist.get_world_size()}: {__name__} {helper.VALUE} {SIZE} {sys.argv[1:]}", flush=True)
dist.destroy_process_group()
"""
SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "1")


def test_a_module_runs_on_two_nodes_with_relative_imports(sif_project: Project, cluster: Cluster) -> None:
    folder = sif_project.folder
    for name, text in {
        "package/__init__.py": "",
        "package/helper.py": "VALUE = 'helped'\n",
        "package/train.py": TRAIN,
        "package/deeper/__init__.py": "",
        "package/deeper/model.py": "SIZE = 7\n",
    }.items():
        cluster.write(f"{folder}/{name}", text)
    done = sif_project.hpcenv("submit", "-m", "package.train", *SHAPE, "--name", "module", "--wait", "--", "--lr", "1")
    assert done.status == 0, done.text
    for rank in (0, 1):
        assert f"RANK {rank} of 2: __main__ helped 7 ['--lr', '1']" in done.text, done.text
    manifest = sif_project.record("module", "manifest.json")
    assert manifest["script"] == f"{folder}/runs/module/source/package/train.py"
    report = sif_project.must("report", "module")
    assert "hpcenv submit -m package.train" in report, report

    again = sif_project.hpcenv("rerun", "module", "--wait", "--", "--lr", "2")
    assert again.status == 0, again.text
    assert "RANK 0 of 2: __main__ helped 7 ['--lr', '2']" in again.text, again.text
    missing = sif_project.hpcenv("submit", "-m", "package.trian", *SHAPE)
    assert "perhaps you meant `-m package.train`" in missing.text, missing.text


def test_a_module_of_the_image_runs_on_two_nodes(sif_project: Project) -> None:
    words = ("submit", "-m", "torch.utils.collect_env", *SHAPE, "--name", "of-the-image", "--wait")
    done = sif_project.hpcenv(*words)
    assert done.status == 0, done.text
    assert "not checked whether the environment has the module `torch.utils.collect_env`" in done.text
    for rank in (0, 1):
        assert f"[{rank}] PyTorch version: 2.13.0+cpu" in done.text, done.text
    assert sif_project.record("of-the-image", "manifest.json")["module"] == "torch.utils.collect_env"
    verdict = sif_project.record("of-the-image", "verdict.json")
    assert any("no module torch.utils.collect_env, it is the environment's" in note for note in verdict["notes"])
    assert "hpcenv submit -m torch.utils.collect_env" in sif_project.must("report", "of-the-image")
    # The ranks of a container write what the watching process of their node reads.
    assert "is not watched" not in done.text and "stacks cannot be read" not in done.text
