"""Determinism profiles on the cluster: what repeats to the last bit, what is recorded without a change of the script."""

from __future__ import annotations

import json
import tempfile
import uuid
from pathlib import Path

import pytest

from hpcenv.records.determinism import RankDeterminism, read_run_determinism
from hpcenv.records.metrics import RankMetrics, read_run_metrics
from hpcenv.records.run_folder import RunFolder

from .conftest import ROOT, Cluster, Project
from .test_kinds import frameworks
from .test_stop import MOST_CPUS, is_there, needs_most_cpus, wait_for_line, wait_until

pytestmark = pytest.mark.cluster
assert frameworks  # the fixture

SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--time", "10")
# A preempted run gets other CPUs; the number of threads is part of what decides bits.
THREADS = ("--env", "OMP_NUM_THREADS=1")
FETCH = (
    "import json, pathlib, sys; run = pathlib.Path(sys.argv[1]); "
    "print(json.dumps({str(f.relative_to(run)): f.read_text() for k in ('metrics', 'determinism') "
    "for f in run.glob(k + '/*/*')}))"
)


def recorded(project: Project, run: str) -> tuple[list[RankMetrics], list[RankDeterminism]]:
    """Read what the ranks of a run recorded."""
    place = f"{project.folder}/runs/{run}"
    files = json.loads(project.cluster.must("python3", "-c", FETCH, place))
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        found, problems = read_run_determinism(RunFolder(Path(folder)))
        metrics = read_run_metrics(RunFolder(Path(folder)))
    assert problems == () and all(rank.problems == () and not rank.cut for rank in metrics)
    return list(metrics), list(found)


def losses(metrics: list[RankMetrics]) -> dict[tuple[int, int], list[str]]:
    """(rank, step) -> its losses; a later attempt counts, which replayed the step."""
    found: dict[tuple[int, int], list[str]] = {}
    for rank in metrics:
        own: dict[tuple[int, int], list[str]] = {}
        for record in rank.records:
            if record.kind == "loss" and record.used:
                own.setdefault((rank.rank, record.step), []).append(record.value)
        found |= own
    return found


def last_hashes(metrics: list[RankMetrics]) -> dict[int, str]:
    """Rank -> hash of its parameters at the end."""
    return {rank.rank: r.value for rank in metrics for r in rank.records if r.kind == "parameters" and r.at == "end"}


def submit(project: Project, script: str, run: str, *words: str) -> None:
    project.must("submit", script, *SHAPE, *THREADS, "--name", run, *words)


def wait_for_end(project: Project, run: str) -> None:
    wait_until(f"end of {run}", lambda: is_there(project, run, "finished.json"))


def test_the_first_steps_of_a_bitwise_run_are_recorded_and_it_ends_in_order(sif_project: Project) -> None:
    """One job: profile, read-back, losses, hashes and the end after N steps, on two nodes in a container."""
    run = f"bitwise-{uuid.uuid4().hex[:6]}"
    submit(sif_project, "examples/train.py", run, "--determinism", "bitwise", "--stop-after-steps", "3", "--cpus", "2")
    wait_for_end(sif_project, run)

    assert sif_project.record(run, "finished.json")["status"] == 0
    metrics, ranks = recorded(sif_project, run)
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3]
    for rank in ranks:
        assert (rank.profile, rank.applied_by, rank.state, rank.problems) == ("bitwise", "start-hook", "ended", ())
        assert (rank.steps, rank.stopped_after) == (3, 3)
        values = {switch.name: switch for switch in rank.switches}
        assert values["torch.deterministic-mode"].effective == "2"
        assert values["PYTHONHASHSEED"].effective == values["PYTHONHASHSEED"].asked == "0"
        assert not any(switch.overridden for switch in rank.switches)
    assert {rank.rank_seed for rank in ranks} == {0, 1000003, 2000006, 3000009}
    found = losses(metrics)
    assert set(found) == {(rank, step) for rank in range(4) for step in (1, 2, 3)}
    assert all(len(values) == 1 for values in found.values())
    assert len(set(last_hashes(metrics).values())) == 1 and set(last_hashes(metrics)) == {0, 1, 2, 3}
    assert {rank.processes[0].reason for rank in metrics} == {"stop-after-steps"}


@pytest.mark.long
def test_three_bitwise_runs_one_of_them_preempted_are_equal_to_the_last_bit(
    sif_project: Project, cluster: Cluster
) -> None:
    name = uuid.uuid4().hex[:6]
    first, second, preempted = (f"{word}-{name}" for word in ("first", "second", "preempted"))
    train = ("--determinism", "bitwise", "--", "--steps", "50", "--log-every", "10", "--sleep-per-step", "0.8")
    submit(sif_project, "examples/train.py", preempted, "--cpus", str(MOST_CPUS), "--partition", "low-grace", *train)
    submit(sif_project, "examples/train.py", first, "--cpus", "2", *train)
    submit(sif_project, "examples/train.py", second, "--cpus", "2", *train)
    wait_for_line(sif_project, preempted, "] step 10 ")
    needs_most_cpus(cluster)
    for run in (first, second, preempted):
        wait_for_line(sif_project, run, "final loss")
        wait_for_end(sif_project, run)

    assert is_there(sif_project, preempted, "attempts/0")
    found = {run: recorded(sif_project, run)[0] for run in (first, second, preempted)}
    assert {rank.attempt for rank in found[preempted]} == {0, 1}
    resumed = next(rank.processes[0] for rank in found[preempted] if rank.attempt == 1)
    assert resumed.before_from == "optimizer" and 10 <= (resumed.before or 0) < 50
    assert set(losses(found[first])) == {(rank, step) for rank in range(4) for step in range(1, 51)}
    assert losses(found[first]) == losses(found[second]) == losses(found[preempted])
    assert last_hashes(found[first]) == last_hashes(found[second]) == last_hashes(found[preempted]) != {}


# A script that seeds nothing: only the profile can make it repeat.
UNSEEDED = """
import random, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 8) * random.random()).pow(2).mean()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_script_without_seeds_repeats_under_seeded_and_not_under_off(host_project: Project) -> None:
    host_project.cluster.write(f"{host_project.folder}/unseeded.py", UNSEEDED)
    name = uuid.uuid4().hex[:6]
    found = {}
    for profile in ("seeded", "off"):
        for number in (1, 2):
            run = f"{profile}-{number}-{name}"
            submit(host_project, "unseeded.py", run, "--determinism", profile, "--cpus", "2")
            found[profile, number] = run
    for run in found.values():
        wait_for_end(host_project, run)
    records = {key: recorded(host_project, run) for key, run in found.items()}
    values = {key: losses(metrics) for key, (metrics, _) in records.items()}
    assert set(values["off", 1]) == {(rank, step) for rank in range(4) for step in range(1, 6)}
    assert values["seeded", 1] == values["seeded", 2]
    assert values["off", 1] != values["off", 2]
    # The ranks differ from each other: no rank repeats another's random numbers.
    assert len({tuple(values["seeded", 1][rank, 1]) for rank in range(4)}) == 4
    assert {rank.applied_by for rank in records["off", 1][1]} == {""}
    assert all(rank.switches for rank in records["off", 1][1]), "read back, although nothing was asked for"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nano_gpt", "image_classifier", "with_lightning", "with_accelerate"])
def test_a_script_without_a_line_of_hpcenv_has_its_losses_recorded(frameworks: Project, kind: str) -> None:
    """As `train.py` and as `-m package.train`; Lightning and accelerate as their users write them."""
    cluster, name = frameworks.cluster, uuid.uuid4().hex[:6]
    text = (ROOT / "tests" / "kinds" / f"{kind}.py").read_text()
    assert "import hpcenv" not in text and "from hpcenv" not in text
    cluster.write(f"{frameworks.folder}/{kind}.py", text)
    cluster.write(f"{frameworks.folder}/kinds/{kind}.py", text)
    cluster.write(f"{frameworks.folder}/kinds/__init__.py", "")
    # The Lightning script says itself that it has two nodes.
    shape = ("--nodes", "2" if kind == "with_lightning" else "1", *SHAPE[2:], "--cpus", "2")
    runs = {}
    for form, words in (("file", (f"{kind}.py",)), ("module", ("-m", f"kinds.{kind}"))):
        runs[form] = f"{kind}-{form}-{name}".replace("_", "-")
        frameworks.must("submit", *words, *shape, *THREADS, "--name", runs[form], "--determinism", "seeded")
    done = frameworks.hpcenv("wait", *runs.values(), timeout=400)
    assert done.status == 0, done.text
    as_file, as_module = (losses(recorded(frameworks, runs[form])[0]) for form in ("file", "module"))
    assert {rank for rank, _ in as_file} == ({0, 1, 2, 3} if kind == "with_lightning" else {0, 1})
    steps = {step for _, step in as_file}
    assert steps == set(range(1, len(steps) + 1)) and len(steps) >= 5
    assert as_file == as_module
