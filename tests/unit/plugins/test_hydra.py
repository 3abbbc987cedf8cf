"""`hydra/launcher=hpcenv` with Hydra from the index: what is submitted, what each trial does, and what comes back."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcenv.identity import code
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from tests import hydra_world
from tests.conftest import FAKES, TORCH, FakeSlurm
from tests.hydra_world import PYTHON

PROGRAM = """
import os
import sys
from pathlib import Path

import hydra
import submitit
from beside import FACTOR
from omegaconf import OmegaConf

OmegaConf.register_new_resolver("twice", lambda value: 2 * value)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def train(cfg):
    rank = submitit.JobEnvironment().global_rank
    if cfg.lr == 3 and rank == 0:
        raise ValueError("lr is 3")
    print("TRAINS", cfg.lr, cfg.double, "rank", rank, os.environ.get("RANK"), sys.argv[0], flush=True)
    return {"lr": cfg.lr * FACTOR, "double": cfg.double, "rank": rank, "path": Path("x")}


if __name__ == "__main__":
    train()
"""
CONFIG = {
    "conf/config.yaml": "defaults: [_self_, size: small]\nlr: 1\ndouble: ${twice:${lr}}\n",
    "conf/size/small.yaml": "width: 8\n",
    "conf/size/large.yaml": "# @package _global_\nwidth: 64\nhydra: {launcher: {nodes: 2}}\n",
    "beside.py": "FACTOR = 10\n",
    "hydra_plugins/show_sweeper.py": """
import json

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore


class ShowSweeper(BasicSweeper):
    def sweep(self, arguments):
        returns = super().sweep(arguments)
        for batch in returns:
            for one in batch:
                print("RETURN", json.dumps(one.return_value), flush=True)
        return returns


node = BasicSweeperConf(_target_="hydra_plugins.show_sweeper.ShowSweeper")
ConfigStore.instance().store(group="hydra/sweeper", name="show", node=node, provider="test")
""",
}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A locked project, whose environment has Hydra and a stand-in for torch."""
    folder = tmp_path_factory.mktemp("locked") / "project"
    venv = tmp_path_factory.mktemp("with-hydra") / "venv"
    hydra_world.make_locked(folder, venv, {"train.py": PROGRAM, **CONFIG}, TORCH)
    return folder


@pytest.fixture
def project(locked: Path, tmp_path: Path) -> Path:
    return shutil.copytree(locked, tmp_path / "project")


@pytest.fixture
def environ(project: Path, plugin_path: Path) -> dict[str, str]:
    return hydra_world.variables(project, plugin_path)


SWEEP = ("train.py", "-m", "hydra/launcher=hpcenv", "hydra.sweep.dir=sweep")


def sweep(project: Path, environ: Mapping[str, str], *words: str, status: int = 0) -> str:
    """Run the program as its user does, on this machine; return all that it printed."""
    command = [PYTHON, *SWEEP, "hydra.launcher.cluster=local", *words]
    done = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def wait_until(is_so: Callable[[], Any], program: subprocess.Popen[str], *, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it took too long"
        assert program.poll() is None, program.communicate()
        time.sleep(0.1)


def log_of(project: Path, number: int) -> str:
    (log,) = (log for log in project.glob("runs/*/job.log") if f"TRAINS {number} " in log.read_text())
    return log.read_text()


def test_six_trials_of_which_one_fails(project: Path, environ: dict[str, str]) -> None:
    said = sweep(project, environ, "lr=1,2,3,4,5,6", status=1)
    failed = [line for line in said.splitlines() if "failed: " in line]
    assert re.search(r"trial #2 \(lr=3\) failed: node local0, rank 0, exit 1, ValueError: lr is 3", failed[0]), said
    assert len([line for line in failed if "[HYDRA]" in line]) == 1, "the others were not ended"
    assert 'raise ValueError("lr is 3")' in said, "the line of the code"
    for number in (1, 2, 4, 5, 6):
        assert f"TRAINS {number} {2 * number} rank 0 None" in log_of(project, number)
        folder = project / "sweep" / str(number - 1)
        assert f"lr: {number}\n" in (folder / ".hydra" / "config.yaml").read_text()
    verdicts = [json.loads(path.read_text())["result"] for path in project.glob("runs/*/verdict.json")]
    assert verdicts == ["match"] * 6, "each trial passed the check"
    assert not list(project.glob("runs/*/source/sweep")), "what trials write is no code"


@pytest.mark.parametrize("torchrun", [False, True], ids=["tasks", "torchrun"])
def test_the_ranks_of_a_trial(torchrun: bool, project: Path, environ: dict[str, str]) -> None:
    count = 1 if torchrun else 2  # the stand-in for torchrun starts one rank
    asked = [f"hydra.launcher.tasks_per_node={count}", f"hydra.launcher.torchrun={torchrun}", "lr=5"]
    said = sweep(project, environ, "hydra/sweeper=show", *asked)
    assert 'RETURN {"lr": 50, "double": 10, "rank": 0, "path": "x"}' in said, "that of rank 0"
    log = log_of(project, 5)
    seen = re.findall(r"TRAINS 5 10 rank (\d) (\w+)", log)
    assert sorted(seen) == ([("0", "0")] if torchrun else [("0", "None"), ("1", "None")])
    assert "hpcenv: JSON has no PosixPath, so the sweep gets its text" in log
    (manifest,) = project.glob("runs/*/manifest.json")
    assert json.loads(manifest.read_text())["launch"]["launcher"] == ("torchrun" if torchrun else "tasks")


def call_as_rank(folder: Path) -> subprocess.CompletedProcess[str]:
    """Do on this machine what the launch step does on a node."""
    manifest = load_record(Manifest, RunFolder(folder).manifest)
    assert manifest.source is not None
    code.make_own_copy(manifest.source, RunFolder(folder))
    submitted = json.loads((folder / "submission.json").read_text())["job_id"]
    (folder / "started.json").write_text(json.dumps({"submitted_as": submitted}))
    variables = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
    variables |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "HPCENV_RUN_FOLDER": str(folder)}
    words = [manifest.environment.python, manifest.script]
    return subprocess.run(words, cwd=manifest.workdir, env=variables, capture_output=True, text=True, timeout=60)


def test_what_changes_while_a_trial_is_queued_has_no_effect(
    project: Path, environ: dict[str, str], fake_slurm: FakeSlurm
) -> None:
    environ |= {**fake_slurm.environ, "HOME": str(project)}
    command = [PYTHON, *SWEEP, "lr=7"]
    with subprocess.Popen(command, cwd=project, env=environ, text=True, stderr=subprocess.PIPE) as program:
        try:
            wait_until(lambda: list(project.glob("sweep/.submitit/4242/*_submitted.pkl")), program)
        finally:
            program.kill()
    (project / "conf" / "config.yaml").write_text("lr: 1\ndouble: 0\nchanged: true\n")
    for name in ("train.py", "beside.py"):
        (project / name).write_text("raise SystemExit('changed')\n")
    (run,) = project.glob("runs/train-*")
    done = call_as_rank(run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TRAINS 7 14 rank 0" in done.stdout
    kept = (project / "sweep" / "0" / ".hydra" / "config.yaml").read_text()
    assert "lr: 7\n" in kept
    assert "changed" not in kept


def test_trials_that_ask_for_the_same_are_one_array_and_another_python_finds_the_task(
    project: Path, environ: dict[str, str], fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    lock = project / "lockfiles" / "default.lock.toml"
    lock.write_text(re.sub(r'(?m)^version = "3\.[0-9.]+"', 'version = "3.99.1"', lock.read_text(), count=1))
    # Each job has another id.
    tools = shutil.copytree(FAKES, tmp_path / "tools", symlinks=True)
    (tools / "sbatch").unlink()
    (tools / "sbatch").write_text(f'#!/bin/bash\n{FAKES}/sbatch "$@" | sed "s/job 4242/job $$/"\n')
    (tools / "sbatch").chmod(0o755)
    environ |= {**fake_slurm.environ, "PATH": f"{tools}:/usr/bin:/bin", "HOME": str(project)}

    def arrays() -> list[str]:
        return [call.script for call in fake_slurm.calls("sbatch") if "--array=" in call.script]

    def runs() -> list[Path]:
        return sorted(project.glob("runs/*/0*"), key=lambda run: ("--nodes=2" in (run / "job.sbatch").read_text(), run))

    command = [PYTHON, *SWEEP, "+hydra.launcher.frozen=true", "lr=1,2", "size=small,large"]
    with subprocess.Popen(command, cwd=project, env=environ, text=True, stderr=subprocess.PIPE) as program:
        try:
            wait_until(lambda: len(list(project.glob("runs/*/0*/submission.json"))) == 4, program)
        finally:
            program.kill()
    assert len(arrays()) == 2
    assert sorted(re.findall(r"--nodes=(\d)", "".join(arrays()))) == ["1", "2"]
    assert all("--array=0-1%256" in script for script in arrays())
    assert json.loads((runs()[1] / "function" / "call.json").read_text())["how"] == "name"
    done = call_as_rank(runs()[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TRAINS 2 4 rank 0" in done.stdout
    # Of the trials (1, small), (1, large), (2, small), (2, large).
    assert "lr: 2\n" in (project / "sweep" / "2" / ".hydra" / "config.yaml").read_text()


# Hydra's own tests of a launcher; each trial is a job on this machine.
SUITE = """
import pytest
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, IntegrationTestSuite, LauncherTestSuite

HERE = ["hydra.launcher.cluster=local", "+hydra.launcher.project=PROJECT"]


@pytest.mark.parametrize("launcher_name, overrides", [("hpcenv", HERE)])
class TestLauncher(LauncherTestSuite):
    pass


@pytest.mark.parametrize("launcher_name, overrides", [("hpcenv", [*HERE, "hydra.sweeper.max_batch_size=2"])])
class TestBatches(BatchedSweeperTestSuite):
    pass


@pytest.mark.parametrize("task_launcher_cfg, extra_flags", [({}, ["-m", "hydra/launcher=hpcenv", *HERE])])
class TestIntegration(IntegrationTestSuite):
    pass
"""
SHORT = "test_sweep_2_jobs and TestLauncher or custom_resolver or test_get_orig_dir_multirun"


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        pytest.param(SHORT, 3, id="short"),
        pytest.param("", 21, id="all", marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
def test_hydras_own_tests_of_a_launcher(chosen: str, count: int, project: Path, environ: dict[str, str]) -> None:
    (project / "suite.py").write_text(SUITE.replace("PROJECT", str(project)))
    pytest_ = [
        PYTHON,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--basetemp=tmp",
        "-W",
        "ignore",
        "-c",
        "/dev/null",
    ]
    done = subprocess.run(
        [*pytest_, "--rootdir=.", "-k", chosen, "suite.py"],
        cwd=project, env=environ, capture_output=True, text=True, timeout=1700,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert f"{count} passed" in done.stdout.splitlines()[-1]
