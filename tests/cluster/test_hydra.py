"""`hydra/launcher=hpcenv` on real Slurm. Hydra of the index submits from Python 3.13 to an environment of Python 3.11."""

from __future__ import annotations

import base64
import io
import json
import tarfile
import uuid

import pytest

from tests import hydra_world

from .conftest import HOST_PYTHON, Cluster, Project, _project

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SITE = "lib/python3.11/site-packages"
CONFIG = "lr: 1\nsquare: ${times:${lr},${lr}}\n"
PROGRAM = """
import os

import hydra
from omegaconf import OmegaConf

OmegaConf.register_new_resolver("times", lambda one, other: one * other)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def train(cfg):
    # The Python that submits has no torch.
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(cfg.square))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        dist.all_reduce(total)
        dist.destroy_process_group()
    if cfg.lr == 3:
        raise ValueError("lr is 3")
    print("TRAINS", cfg.lr, total.item(), os.environ.get("RANK"), flush=True)
    return total


if __name__ == "__main__":
    train()
"""
SHOW = """
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore


class ShowSweeper(BasicSweeper):
    def sweep(self, arguments):
        returns = super().sweep(arguments)
        print("RETURN", [one.return_value for one in returns[0]], flush=True)
        return returns


node = BasicSweeperConf(_target_="hydra_plugins.show_sweeper.ShowSweeper")
ConfigStore.instance().store(group="hydra/sweeper", name="show", node=node, provider="test")
"""


def packed() -> str:
    """Return Hydra, and what it needs, as a tar file in text."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for path in hydra_world.packages():
            archive.add(path, path.name)
    return base64.b64encode(content.getvalue()).decode()


@pytest.fixture
def project(cluster: Cluster) -> Project:
    """A locked project, whose environment is hostenv's torch with Hydra."""
    name = f"hydra-{uuid.uuid4().hex[:6]}"
    venv = f"/home/alice/hpcenv-tests/{name}-env"
    made = _project(cluster, name, f'image = "host"\npython = "{venv}/bin/python"\n')
    folder = made.folder
    cluster.must(HOST_PYTHON, "-m", "venv", "--without-pip", venv)
    cluster.must("sh", "-c", f"base64 -d | tar xz -C {venv}/{SITE}", stdin=packed())
    cluster.write(f"{venv}/{SITE}/hostenv.pth", f"/shared/hostenv/{SITE}\n")
    # On PYTHONPATH of the Python that submits: Hydra, and nothing of the environment of the jobs.
    cluster.must("sh", "-c", f"mkdir {venv}-submits; cd {venv}/{SITE}; cp -r hydra* omegaconf* antlr4* {venv}-submits")
    files = {"train.py": PROGRAM, "conf/config.yaml": CONFIG, "hydra_plugins/show_sweeper.py": SHOW}
    for name, text in files.items():
        cluster.write(f"{folder}/{name}", text)
    made.must("lock", timeout=600)
    return made


def sweep(project: Project, *words: str) -> tuple[str, ...]:
    python = ("env", f"PYTHONPATH={project.folder}-env-submits", "/shared/hpcenv/venv/bin/python")
    plugins = ("hydra/launcher=hpcenv", "hydra/sweeper=show", "hydra.sweep.dir=sweep")
    return (
        *python,
        "train.py",
        "-m",
        *plugins,
        "hydra.launcher.timeout_min=9",
        "hydra.launcher.signal_delay_s=30",
        *words,
    )


def test_a_trial_of_two_nodes(project: Project, cluster: Cluster) -> None:
    shape = ("hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=2", "hydra.launcher.torchrun=true")
    done = cluster.run(*sweep(project, "lr=5", *shape), cwd=project.folder, timeout=400)
    assert done.status == 0, done.text
    assert "RETURN [100.0]" in done.stdout, "25 of each of four ranks"
    log = cluster.must("sh", "-c", "cat runs/train-*/job.log", cwd=project.folder)
    assert sorted(line[-1] for line in log.splitlines() if "TRAINS 5 100.0" in line) == ["0", "1", "2", "3"]
    verdict = json.loads(cluster.must("sh", "-c", "cat runs/train-*/verdict.json", cwd=project.folder))
    assert verdict["result"] == "match"
    assert len(verdict["nodes"]) == 2
    assert cluster.must("cat", "sweep/0/.hydra/overrides.yaml", cwd=project.folder) == "- lr=5\n"


@pytest.mark.long
def test_six_trials_of_which_one_fails_and_a_config_that_changes_in_the_queue(
    project: Project, cluster: Cluster, all_nodes_busy: object
) -> None:
    command = " ".join(sweep(project, "lr=1,2,3,4,5,6"))
    cluster.must("sh", "-c", f"nohup {command} >said 2>&1 & echo $!", cwd=project.folder)
    waits = (
        "for n in $(seq 200); do [ -e runs/train-*/0005/submission.json ] && exit; sleep 0.5; done; cat said; exit 1"
    )
    cluster.must("bash", "-c", waits, cwd=project.folder, timeout=200)
    jobs = cluster.must("squeue", "--me", "-h", "-r", "-o", "%F", "-t", "PENDING").split()
    assert len(jobs) == 6
    assert len(set(jobs)) == 1, "one array"
    cluster.write(f"{project.folder}/conf/config.yaml", "lr: 1\nsquare: 0\nchanged: true\n")
    cluster.write(f"{project.folder}/train.py", "raise SystemExit('changed')\n")
    all_nodes_busy()  # type: ignore[operator]
    ended = "for n in $(seq 800); do grep -q JobFailed said && exit; sleep 0.5; done; cat said; exit 1"
    cluster.must("bash", "-c", ended, cwd=project.folder, timeout=420)
    said = cluster.must("cat", "said", cwd=project.folder)
    failed = [line for line in said.splitlines() if "failed: node " in line]
    assert "trial #2 (lr=3) failed: node n" in failed[0], said
    assert "ValueError: lr is 3" in failed[0]
    assert not [line for line in failed if "lr=3" not in line]
    log = cluster.must("sh", "-c", "cat runs/train-*/0*/job.log", cwd=project.folder)
    trains = sorted(line.partition("TRAINS ")[2] for line in log.splitlines() if "TRAINS " in line)
    assert trains == [f"{number} {number**2}.0 None" for number in (1, 2, 4, 5, 6)]
    assert log.count("hpcenv verdict: match") == 6
