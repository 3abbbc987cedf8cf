"""docs/how-to/results.md as it is written: its script writes into the trackers, and its commands find the run.

The short tests give the script three modules that write down what they are told; the long ones use the packages.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv import training
from hpcenv.launch.run_variables import run_variables
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest, Source
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction.measured import read_measured
from hpcenv.runs.run_columns import COLUMNS
from tests.conftest import hpcenv

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "results.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FILES = {text.splitlines()[0].removeprefix("# "): text for kind, text in BLOCKS if text.startswith("# ")}
(NOTEBOOK,) = (text for _, text in BLOCKS if "list_runs" in text)
LISTS, SUBMIT = (text.splitlines() for kind, text in BLOCKS if kind == "sh")
PYTHON = os.environ.get("HPCENV_TEST_TRACKERS_PYTHON", "")

# Each call of a tracker is a line of calls.jsonl in the run folder.
STAND_INS = {
    "calls.py": """
import json, os
class Calls:
    def __init__(self, name):
        self.name = name
    def __getattr__(self, name):
        def call(*values, **words):
            with open(os.environ["HPCENV_RUN_FOLDER"] + "/calls.jsonl", "a") as file:
                print(json.dumps([f"{self.name}.{name}", values, words], default=str), file=file)
            return self
        return call
""",
    "wandb.py": "import calls, sys\nsys.modules['wandb'] = calls.Calls('wandb')\n",
    "mlflow.py": "import calls, sys\nsys.modules['mlflow'] = calls.Calls('mlflow')\n",
    "tensorboardX.py": "import calls\nSummaryWriter = lambda folder: calls.Calls('tensorboard')\n",
}


def trained(project: Path, environ: Mapping[str, str]) -> RunFolder:
    """Run the page's script by its command, on this machine and without torch."""
    for name, text in FILES.items():
        (project / name).write_text(text)
    _, *words = shlex.split(SUBMIT[0])
    # The program alone is the only rank: the variables are those that torchrun sets.
    rank = [
        word
        for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
        for word in ("--env", f"{name}={value}")
    ]
    here = ("--launcher", "none", "--nproc", "1", *rank, "--cluster", "local", "--name", "tracked", "--wait")
    done = hpcenv(*words[:2], *here, *words[2:], cwd=project, environ=environ, timeout=200)
    assert done.status == 0, done.stdout + done.stderr
    return RunFolder(project / "runs" / "tracked")


def plain(project: Path) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "HOME": str(project)}


def test_the_page_has_what_this_file_runs() -> None:
    assert sorted(FILES) == ["track.py", "train.py"]
    assert (len(BLOCKS), len(LISTS), len(SUBMIT)) == (5, 3, 1)


def test_it_names_all_columns_facts_and_variables(tmp_path: Path) -> None:
    (columns,) = re.findall(r"^\| (`run`, .*) \| that column", PAGE, re.MULTILINE)
    assert re.findall(r"`(\w+)`", columns) == list(COLUMNS)
    (facts,) = re.findall(r"depends:\s+(.*?)\. `run_folder", PAGE, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", facts)) == set(training.environment())
    rows = set(re.findall(r"^\| `(HPCENV_\w+)`", PAGE, re.MULTILINE))
    source = Source(root="/", folder="/", commit="0af6350")
    run = folders.make_run(tmp_path, "a", source=source, fingerprint="hpc2-a", resume_from="/x")
    variables = run_variables(load_record(Manifest, run.manifest), attempt=0)
    assert rows - {"HPCENV_NODE", "HPCENV_ELEMENT"} == set(variables)


def test_its_script_tells_each_tracker_the_run_and_its_environment(project: Path) -> None:
    for name, text in STAND_INS.items():
        (project / name).write_text(text)
    run = trained(project, plain(project))
    calls: dict[str, list[Any]] = {}
    for line in (run.path / "calls.jsonl").read_text().splitlines():
        name, values, words = json.loads(line)
        calls.setdefault(name, []).append((values, words))
    fingerprint = load_record(Manifest, run.manifest).fingerprint
    config = calls["wandb.init"][0][1]["config"]
    assert (config["lr"], config["hpcenv"]["run"], config["hpcenv"]["attempt"]) == (3e-4, "tracked", 0)
    assert config["hpcenv"]["fingerprint"] == fingerprint != ""
    assert calls["wandb.init"][0][1]["dir"] == config["hpcenv"]["run_folder"] == str(run.path)
    tags = calls["mlflow.start_run"][0][1]["tags"]
    assert (tags["hpcenv.run"], tags["hpcenv.fingerprint"]) == ("tracked", fingerprint)
    assert calls["mlflow.set_tracking_uri"][0][0] == [f"sqlite:///{run.path}/mlflow.db"]
    assert f"fingerprint = {fingerprint}" in calls["tensorboard.add_text"][0][0][1]
    assert read_measured(run).series[0].values == (3e-4, 3e-4 / 2, 3e-4 / 3)
    assert len(calls["tensorboard.add_scalar"]) == len(calls["wandb.log"]) == len(calls["mlflow.log_metrics"]) == 3


def test_its_commands_find_the_run(project: Path, fake_slurm: Any) -> None:
    """The page's lists, over runs with the arguments and metrics that they name."""
    for number, (lr, loss) in enumerate((("3e-4", 1.8312), ("0.0003", 1.5), ("3e-4", 2.5), ("1e-3", 1.0))):
        words = ("--lr", lr, "--batch-size", "64")
        run = folders.make_run(project / "runs", f"r{number}", str(number + 1), args=words, submitted=float(number))
        start = {"kind": "start", "schema": 1, "restart": 0, "pid": 7, "time": 1.5, "world_size": 1}
        lines = [
            {"kind": "metric", "step": 9, "name": name, "value": loss.hex(), "dtype": "float64"}
            for name in ("loss", "accuracy")
        ]
        run.metrics_of(0, 0).parent.mkdir(parents=True)
        run.metrics_of(0, 0).write_text("".join(json.dumps(line) + "\n" for line in (start, *lines)))
    fake_slurm.answers("sacct", "1|COMPLETED|0:0|n1|03:02:41\n")
    shown = []
    for command in LISTS:
        _, *words = shlex.split(command.partition(" > ")[0])
        done = hpcenv(*words, cwd=project, environ={**plain(project), **fake_slurm.environ})
        assert done.status == 0, done.stderr
        shown.append([re.split(r"[ ,]+", line)[0] for line in done.stdout.splitlines() if line.startswith("r")])
    assert shown == [["r1", "r0", "r2"], ["r0", "r1"], ["run", "r0"]]


@pytest.fixture
def tracked(tmp_path: Path) -> RunFolder:
    """A run of the page's script with the packages of W&B, MLflow and TensorBoard."""
    probe = subprocess.run([PYTHON or "false", "-c", "import mlflow, pandas, tensorboardX, wandb"], capture_output=True)
    if probe.returncode != 0:
        pytest.skip("NOT RUN: HPCENV_TEST_TRACKERS_PYTHON names no Python with mlflow, pandas, tensorboardX and wandb")
    text = f'image = "host"\npython = "{PYTHON}"\n[policy]\n"torch.version" = "info"\n'
    (tmp_path / "hpcenv.toml").write_text(text)
    done = hpcenv("lock", "--no-wheels", cwd=tmp_path, environ=plain(tmp_path), timeout=200)
    assert done.status == 0, done.stderr
    return trained(tmp_path, plain(tmp_path))


_OF_MLFLOW = """
import json, mlflow, sys
mlflow.set_tracking_uri(sys.argv[1])
(run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
print(json.dumps([run.data.metrics, run.data.params, run.data.tags]))
"""


@pytest.mark.long
def test_the_trackers_have_it_and_the_notebook_reads_it(tracked: RunFolder) -> None:
    fingerprint = load_record(Manifest, tracked.manifest).fingerprint
    facts = f'"run":"tracked","attempt":0,"fingerprint":"{fingerprint}"'.encode()
    (written,) = tracked.path.glob("wandb/offline-run-*/run-*.wandb")
    assert facts in written.read_bytes()

    asked = [PYTHON, "-c", _OF_MLFLOW, f"sqlite:///{tracked.path}/mlflow.db"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=tracked.path)
    metrics, params, tags = json.loads(answer.stdout)
    assert (metrics, params) == ({"loss": 3e-4 / 3}, {"lr": "0.0003"})
    assert (tags["hpcenv.fingerprint"], tags["hpcenv.run_folder"]) == (fingerprint, str(tracked.path))

    series = {one.source: one for one in read_measured(tracked).series}
    assert (series["tensorboard"].steps, series["log_metrics"].values) == ((1, 2, 3), (3e-4, 3e-4 / 2, 3e-4 / 3))
    (events,) = (tracked.source / "tensorboard").iterdir()
    assert f"fingerprint = {fingerprint}".encode() in events.read_bytes()

    # pandas is beside the trackers; hpcenv is here.
    (site,) = Path(PYTHON).parents[1].glob("lib/python3*/site-packages")
    program = f"import sys; sys.path.append({str(site)!r})\n{NOTEBOOK}print(table.dtypes['arg.lr'], table.shape[0])\n"
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tracked.path), "PYTHONPATH": str(ROOT)}
    project = tracked.path.parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=project, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *table, last = done.stdout.splitlines()
    assert first == f"[('tracked', '3e-4', {3e-4 / 3})]"
    assert [line.split() for line in table] == [
        ["run", "state", "arg.lr", "metric.loss", "commit"], ["0", "tracked", "completed", "0.0003", "0.0001", "None"],
    ]  # fmt: skip
    assert last == "float64 1"
