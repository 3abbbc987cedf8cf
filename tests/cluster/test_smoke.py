"""The smoke test over nodes that cannot communicate, or not well: it names them and stops the job within its limit."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import Cluster, Done, Project
from .wires import Wires

# Prints only when every rank has reached the others.
MEET = """\
import torch.distributed as distributed
import torch

distributed.init_process_group("gloo")
total = torch.ones(1)
distributed.all_reduce(total)
print(f"TRAINED with {int(total)}", flush=True)
"""

_SECONDS = 6
# From the start of the job: check, container and `import torch` on a busy machine, the limit, the end.
_SECONDS_TO_STOP = 90


@pytest.fixture(scope="module")
def wires(cluster: Cluster) -> Wires:
    status = json.loads(cluster.testbed("status", "--json").stdout)
    return Wires(status["instance"], Path(status["state"]))


@pytest.fixture
def project(host_project: Project, wires: Wires) -> Iterator[Project]:
    host_project.cluster.write(f"{host_project.folder}/meet.py", MEET)
    with wires.rules("n1", "n2"):
        yield host_project


# As `hpcenv submit meet.py --preflight full --wait` does, with a shorter limit in the plan: a cut link takes all of it.
SUBMIT = """\
import dataclasses, json, sys
from hpcenv.cli import _render
from hpcenv.cli._wait import wait_of
from hpcenv.cli.submit import carry_out, context_of
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import from_keywords
seconds, keywords = float(sys.argv[1]), json.loads(sys.argv[2])
context = context_of()
plan = plan_job(_render.open_project(), from_keywords("meet.py", (), keywords), context)
smoke = dataclasses.replace(plan.manifest.smoke, seconds=seconds)
plan = dataclasses.replace(plan, manifest=dataclasses.replace(plan.manifest, smoke=smoke))
sys.exit(carry_out(plan, context, by_name=True, review=None, wait=wait_of(True, None, False), as_json=False))
"""


def _submit(project: Project, name: str, **options: object) -> Done:
    keywords = {"name": name, "nodes": 2, "gpus": 0, "nproc": 1, "preflight": "full", **options}
    words = ("-c", SUBMIT, str(_SECONDS), json.dumps(keywords))
    return project.cluster.run("/shared/hpcenv/venv/bin/python", *words, cwd=project.folder)


def _finding(project: Project, run: str) -> dict:
    rows = project.record(run, "verdict.json")["findings"]
    return next(row for row in rows if row["field"].startswith("smoke.") and row["severity"] == "must")


def _smoke_seconds(project: Project, run: str) -> float:
    return float(project.record(run, "smoke.json")["seconds"]["all"])


def _after_first_group(project: Project, wires: Wires, run: str, act: Callable[[], object]) -> threading.Thread:
    """Call `act` as soon as the first process group works."""
    rank = wires.state / project.folder.lstrip("/") / "runs" / run / "smoke" / "ranks" / "n1" / "rank-0.jsonl"

    def watch() -> None:
        _wait(lambda: rank.is_file() and '"phase": "init", "seconds"' in rank.read_text(), pause=0.002)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def _wait(is_so: Callable[[], bool], *, pause: float) -> None:
    until = time.monotonic() + _SECONDS_TO_STOP
    while not is_so() and time.monotonic() < until:
        time.sleep(pause)


def test_an_interface_that_reaches_no_node_is_named_before_training(project: Project, wires: Wires) -> None:
    with wires.dead_interface("dead0", "n1", "n2"):
        done = _submit(project, "naive", env={"GLOO_SOCKET_IFNAME": "dead0"})
    assert done.status == 90, done.text
    row = _finding(project, "naive")
    assert row["field"] == "smoke.init"
    assert "between n1 (192.168.250.1, dead0) and n2 (192.168.250.2, dead0)" in row["found"]
    assert "TRAINED" not in project.cluster.must("cat", f"{project.folder}/runs/naive/job.log")
    assert _smoke_seconds(project, "naive") < _SECONDS_TO_STOP


@pytest.mark.long
def test_the_interface_that_reaches_the_nodes_is_chosen_under_any_name(project: Project, wires: Wires) -> None:
    with wires.renamed("n2", "eth0", "enp5s0"), wires.dead_interface("dead0", "n1", "n2"):
        # No other name is that of an interface of both nodes.
        by_hand = project.cluster.run(
            *("timeout", "40", "srun", "-N2", "--ntasks-per-node=1", "sh", "-c"),
            "GLOO_SOCKET_IFNAME=dead0 exec /shared/hostenv/bin/python -m torch.distributed.run --nnodes=2 "
            f"--nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint={wires.address('n1', 'eth0')}:29731 "
            "--rdzv-id=$SLURM_JOB_ID --rdzv-conf=is_host=$((SLURM_NODEID == 0)) --local-addr=$(hostname) meet.py",
            cwd=project.folder,
        )
        done = _submit(project, "names")
    assert by_hand.status == 124, by_hand.text  # `timeout` ended it: it hung
    assert "TRAINED" not in by_hand.text
    assert done.status == 0, done.text
    assert done.text.count("TRAINED with 2") == 2
    settings = project.record("names", "verdict.json")["settings"]
    chosen = {node: row["value"] for node, rows in settings.items() for row in rows if row["name"].startswith("GLOO_S")}
    assert chosen == {"n1": "eth0", "n2": "enp5s0"}
    fine = project.record("names", "smoke.json")["checks"]["n2"]["fine"]
    assert fine["smoke.transport"] == "Gloo over TCP, interface enp5s0, eth0"


@pytest.mark.long
def test_a_slow_link_stops_the_job(project: Project, wires: Wires) -> None:
    with wires.slow("n2", "2mbit"):
        done = _submit(project, "slow")
    assert done.status == 90, done.text
    row = _finding(project, "slow")
    assert row["field"] in ("smoke.correct", "smoke.link")
    assert "between n1 (" in row["found"] and "the link is slow" in row["found"], row


@pytest.mark.long
def test_a_link_that_is_cut_before_the_start_is_named(project: Project, wires: Wires) -> None:
    wires.cut("n2", "n1")
    done = _submit(project, "cut-early")
    assert done.status == 90, done.text
    rows = project.record("cut-early", "verdict.json")["findings"]
    (row,) = [row for row in rows if row["severity"] == "must"]
    assert (row["node"], row["field"]) == ("n2", "net.reach")
    assert f"{wires.address('n1', 'eth0')}: no answer" in row["found"]
    done = _submit(project, "cut", skip_check=["net.reach"])
    assert done.status == 90, done.text
    row = _finding(project, "cut")
    assert row["field"] == "smoke.init"
    assert f"nothing came back from {wires.address('n1', 'eth0')}" in row["found"]


@pytest.mark.long
def test_a_link_that_is_cut_after_the_first_group_is_named(project: Project, wires: Wires) -> None:
    cut = _after_first_group(project, wires, "cut-later", lambda: (wires.cut("n2", "n1"), wires.cut("n1", "n2")))
    done = _submit(project, "cut-later")
    cut.join()
    assert done.status == 90, done.text
    row = _finding(project, "cut-later")
    assert row["field"] in ("smoke.correct", "smoke.second-group", "smoke.link")
    assert "between n1 (" in row["found"]


@pytest.mark.long
def test_ports_closed_after_the_first_group_are_named_as_the_second_group(project: Project, wires: Wires) -> None:
    closed = _after_first_group(project, wires, "ports", lambda: (wires.close_ports("n1"), wires.close_ports("n2")))
    done = _submit(project, "ports")
    closed.join()
    assert done.status == 90, done.text
    row = _finding(project, "ports")
    assert row["field"] == "smoke.second-group", row
    assert "the first process group works; a second one beside it does not" in row["found"]
    assert "between n1 (" in row["found"]
