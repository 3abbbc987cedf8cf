"""A lockfile written in the testbed, verified there: on the login node and on both nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Cluster, Project

pytestmark = pytest.mark.cluster


def verified(project: Project, *words: str, status: int = 0) -> dict[str, Any]:
    done = project.hpcenv("verify", *words, "--json", timeout=600)
    assert done.status == status, done.text
    data = json.loads(done.stdout)["data"]
    for node, parts in data["seconds"].items():
        shown = ", ".join(f"{part} {took:.2f} s" for part, took in sorted(parts.items()))
        print(f"verify {' '.join(words)}: {node}: {shown}")
    return dict(data)


@pytest.mark.parametrize("level", [(), ("--deep",)], ids=["default", "deep"])
def test_both_nodes_match_the_sif(sif_project: Project, level: tuple[str, ...]) -> None:
    data = verified(sif_project, "--nodes", "2", *level)
    assert data["outcome"] == "match"
    assert [(n["node"], n["result"]) for n in data["verdict"]["nodes"]] == [("n1", "match"), ("n2", "match")]
    assert all(n["compared"] > 20 for n in data["verdict"]["nodes"])


@pytest.mark.parametrize("level", [(), ("--deep",)], ids=["default", "deep"])
def test_both_nodes_match_the_host_environment(host_project: Project, level: tuple[str, ...]) -> None:
    assert verified(host_project, "--nodes", "2", *level)["outcome"] == "match"


def test_this_machine_matches(sif_project: Project, host_project: Project) -> None:
    assert verified(sif_project)["outcome"] == "match"
    assert verified(host_project)["outcome"] == "match"


def test_a_changed_byte_is_found_on_the_one_node_that_has_it(host_project: Project, cluster: Cluster) -> None:
    victim = "/shared/hostenv/lib/python3.11/site-packages/numpy/version.py"
    patch = 'sed "0,/version/s//versiom/" "$1" > /run/patched && mount --bind /run/patched "$1"'
    cluster.must("sh", "-c", patch, "sh", victim, node="n1", user="root")
    try:
        data = verified(host_project, "--nodes", "2", status=90)
    finally:
        cluster.must("umount", victim, node="n1", user="root")
    assert data["outcome"] == "mismatch"
    findings = [f for f in data["verdict"]["findings"] if f["severity"] == "must"]
    assert {f["node"] for f in findings} == {"n1"}
    assert findings[0]["field"] == "packages.numpy.content-sha256"
    assert "numpy/version.py" in findings[0]["note"]


def test_nodes_with_different_kernels_of_a_cpu_build_still_match_but_say_so(sif_project: Project) -> None:
    """Only what must agree is compared between nodes; the rest is in the facts."""
    run = verified(sif_project, "--nodes", "2")["verdict"]["run"]
    facts = [sif_project.record(run, f"facts/{node}.json")["values"] for node in ("n1", "n2")]
    assert facts[0]["host.hostname"] == "n1"
    assert facts[1]["host.apptainer"].startswith("1.")
    assert facts[1]["host.slurm"].startswith("2")


def test_another_sif_is_a_mismatch_named_by_its_hash(sif_project: Project, cluster: Cluster) -> None:
    copy = f"{sif_project.folder}/copy.sif"
    cluster.must("sh", "-c", f"head -c 50000000 '{sif_project.sif()}' > {copy}")
    data = verified(sif_project, "--sif", copy, status=90)
    assert [f["field"] for f in data["verdict"]["findings"]] == ["container.sif.sha256"]
    cluster.must("rm", copy)


def test_diff_and_explain_tell_the_same_words(sif_project: Project) -> None:
    for run in ("one", "two"):
        sif_project.must(
            "submit", "examples/train.py", "--nodes", "1", "--gpus", "0", "--nproc", "1", "--wait", "--name", run,
            "--", "--steps", "2" if run == "one" else "3",
        )  # fmt: skip
    told = sif_project.must("diff", "default", "one")
    assert told.startswith("default and one are the same in all that is recorded\n")
    changed = sif_project.json("diff", "one", "two")["data"]["changes"]
    assert [c["field"] for c in changed if c["severity"] != "info"] == ["run.arguments"]
    explained = sif_project.must("explain", "container.sif.sha256")
    assert "severity" in explained and "locked" in explained
