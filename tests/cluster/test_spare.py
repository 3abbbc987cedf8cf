"""A node that differs: a spare one takes its place, or the job is queued again without it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from .conftest import Cluster, Project

pytestmark = [pytest.mark.cluster, pytest.mark.long]

VICTIM = "/shared/hostenv/lib/python3.11/site-packages/torch/nn/functional.py"
TRAIN = ("--gpus", "0", "--nproc", "1", "--time", "10")
STEPS = ("--", "--steps", "3")


@pytest.fixture
def bad_n1(cluster: Cluster) -> Iterator[None]:
    """One byte of torch differs on n1, the first node of every job."""
    patch = 'sed "0,/import/s//imqort/" "$1" > /run/patched && mount --bind /run/patched "$1"'
    cluster.must("sh", "-c", patch, "sh", VICTIM, node="n1", user="root")
    yield
    cluster.must("umount", VICTIM, node="n1", user="root")


def nodes_of(cluster: Cluster) -> int:
    return int(cluster.must("sinfo", "-h", "-p", "batch", "-o", "%D").split()[0])


def test_a_spare_node_takes_the_place_of_one_that_differs(
    host_project: Project, cluster: Cluster, bad_n1: None
) -> None:
    run, nodes = f"spare-{uuid.uuid4().hex[:6]}", nodes_of(cluster) - 1
    done = host_project.hpcenv(
        "submit", "examples/train.py", "--nodes", str(nodes), "--spare", "1", "--name", run, "--wait", *TRAIN, *STEPS
    )

    assert done.status == 0, done.text
    verdict = host_project.record(run, "verdict.json")
    expected = [f"n{number}" for number in range(2, nodes + 2)]
    assert (verdict["result"], verdict["launched"]) == ("match", expected)
    assert {node["node"]: node["result"] for node in verdict["nodes"]}["n1"] == "mismatch"
    assert "n1  MISMATCH" in done.stdout
    assert "left out" in done.stdout
    assert "final loss" in done.stdout
    assert f"world_size {nodes} " in done.stdout
    assert "host n1 " not in done.stdout
    names = cluster.must("ls", f"{host_project.folder}/runs/{run}/exits").split()
    assert names == [f"{node}.json" for node in expected]


def test_a_job_is_queued_again_without_the_node_that_differs(
    host_project: Project, cluster: Cluster, bad_n1: None
) -> None:
    run = f"retry-{uuid.uuid4().hex[:6]}"
    host_project.must(
        "submit", "examples/train.py", "--nodes", "1", "--retry-excluding", "1", "--name", run, *TRAIN, *STEPS
    )
    log = f"{host_project.folder}/runs/{run}/job.log"
    cluster.must("timeout", "150", "sh", "-c", 'until grep -q "final loss" "$1"; do sleep 0.5; done', "sh", log)

    job, text = str(host_project.record(run, "submission.json")["job_id"]), cluster.must("cat", log)
    assert "the job is requeued without n1" in text
    assert "host n2 " in text
    assert "host n1 " not in text
    assert host_project.record(run, "attempts/0/finished.json")["status"] == 90
    assert [node["node"] for node in host_project.record(run, "verdict.json")["nodes"]] == ["n2"]
    assert host_project.record(run, "excluded.json")["retries"] == [{"attempt": 0, "job_id": job, "without": ["n1"]}]
    # The node itself is none of our business.
    assert "drain" not in cluster.must("sinfo", "-h", "-n", "n1", "-o", "%T")


def test_without_enough_nodes_that_match_the_job_is_rejected(
    host_project: Project, cluster: Cluster, bad_n1: None
) -> None:
    run = f"few-{uuid.uuid4().hex[:6]}"
    every = str(nodes_of(cluster))
    done = host_project.hpcenv("submit", "examples/train.py", "--nodes", every, "--name", run, "--wait", *TRAIN, *STEPS)

    assert done.status == 90, done.text
    assert host_project.record(run, "verdict.json")["launched"] == []
    assert "world_size" not in done.stdout
