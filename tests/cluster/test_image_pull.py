"""`hpcenv image pull` of the real torch image: proved, the same bytes for everybody, and run by stock Apptainer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import IMAGE, Cluster

pytestmark = pytest.mark.cluster

# One rank on each node: gloo sums 1 + 1 over the network.
SUM = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(3)
dist.all_reduce(ones)
print("SUM", dist.get_rank(), ones.tolist())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def stores(cluster: Cluster) -> Iterator[dict[str, str]]:
    name = f"pull-{uuid.uuid4().hex[:6]}"
    places = {user: f"/home/{user}/{name}" for user in ("alice", "bob")}
    yield places
    for user, place in places.items():
        cluster.run("rm", "-rf", place, user=user)


def pull(cluster: Cluster, store: str, **where: Any) -> dict[str, Any]:
    words = ("image", "pull", IMAGE, "--plain-http", "registry:5000", "--store", store, "--json")
    done = cluster.run("hpcenv", *words, timeout=300, **where)
    assert done.status == 0, done.text
    result: dict[str, Any] = json.loads(done.stdout)["data"]
    return result


def test_alice_and_bob_get_the_same_bytes_on_two_nodes(cluster: Cluster, stores: dict[str, str]) -> None:
    first = pull(cluster, stores["alice"], user="alice", node="n1")
    second = pull(cluster, stores["bob"], user="bob", node="n2")
    assert first["reused"] is second["reused"] is False
    assert first["record"]["made"]["builder"] == "hpcenv"
    assert first["path"] != second["path"]
    sums = [cluster.must("sha256sum", made["path"], user="root").split()[0] for made in (first, second)]
    assert sums == [first["record"]["sif"]["sha256"], second["record"]["sif"]["sha256"]]
    assert sums[0] == sums[1]
    assert first["record"]["tree_sha256"] == second["record"]["tree_sha256"]

    again = pull(cluster, stores["alice"], user="alice", node="login")
    assert again["reused"] is True

    proof = cluster.run(
        "hpcenv",
        "image",
        "verify",
        IMAGE,
        "--plain-http",
        "registry:5000",
        "--store",
        stores["alice"],
        "--json",
        timeout=300,
    )
    assert proof.status == 0, proof.text
    said = json.loads(proof.stdout)["data"]
    assert (said["equal"], said["exact"], said["differences"]) == (True, True, [])
    assert said["expected"] == said["found"] == first["record"]["tree_sha256"]
    assert said["paths"] > 20_000


def test_stock_apptainer_runs_it_on_both_nodes(cluster: Cluster, stores: dict[str, str]) -> None:
    made = pull(cluster, stores["alice"], user="alice", node="login")
    script = f"{stores['alice']}/sum.py"
    cluster.write(script, SUM)
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "n1:29577", "--rdzv-id", "pull")
    torchrun = ("torchrun", "--nnodes", "2", "--nproc-per-node", "1", *rendezvous, script)
    done = cluster.run("srun", "-N2", "--ntasks-per-node=1", "apptainer", "exec", made["path"], *torchrun, timeout=300)
    assert done.status == 0, done.text
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("SUM")) == [
        "SUM 0 [2.0, 2.0, 2.0]",
        "SUM 1 [2.0, 2.0, 2.0]",
    ]


def test_a_sif_that_apptainer_pushed_is_fetched_by_its_own_digest(cluster: Cluster, stores: dict[str, str]) -> None:
    """Alice keeps her SIF in a registry with stock Apptainer; bob gets the same bytes with hpcenv."""
    made = pull(cluster, stores["alice"], user="alice")
    sha256, name = made["record"]["sif"]["sha256"], f"oras://registry:5000/sifs-{uuid.uuid4().hex[:6]}/torch:1"
    cluster.must("apptainer", "push", "-U", "--no-https", made["path"], name, user="alice")
    words = ("hpcenv", "image", "pull", name, "--plain-http", "registry:5000", "--store", f"{stores['bob']}/sifs")
    data = json.loads(cluster.must(*words, "--json", user="bob"))["data"]
    assert data["record"]["digest"] == f"sha256:{sha256}"
    assert data["record"]["tree_sha256"] == made["record"]["tree_sha256"]
    assert cluster.must("sha256sum", data["path"], user="bob").split()[0] == sha256


def test_one_changed_byte_is_found_and_named(cluster: Cluster, stores: dict[str, str]) -> None:
    made = pull(cluster, stores["alice"], user="alice", node="login")
    copy = f"{stores['alice']}/changed.sif"
    cluster.must("cp", made["path"], copy)
    cluster.must("chmod", "u+w", copy)
    # In the data of a file in the middle of the squashfs.
    flip = "import sys;f=open(sys.argv[1],'r+b');f.seek(90000000);b=f.read(1);f.seek(90000000);f.write(bytes([b[0]^1]))"
    cluster.must("python3", "-c", flip, copy)
    done = cluster.run(
        "hpcenv",
        "image",
        "verify",
        copy,
        "--image",
        IMAGE,
        "--plain-http",
        "registry:5000",
        "--store",
        stores["alice"],
        timeout=300,
    )
    assert done.status == 11, done.text
    assert "error[image-mismatch]" in done.stderr
