"""A reader reproduces an author's run on the cluster: proofs, the first steps in the same shape, another thread count."""

from __future__ import annotations

import json
import uuid

import pytest

from .conftest import HOST_PYTHON, ROOT, Cluster, Project

pytestmark = [pytest.mark.cluster, pytest.mark.long]

SCRIPT = (ROOT / "tests/recorded_runs/table-1/source/train.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def author(cluster: Cluster) -> Project:
    """A project with the run `table-1`: two nodes, two ranks on each, under `bitwise`."""
    folder = f"/home/alice/hpcenv-tests/author-{uuid.uuid4().hex[:6]}"
    cluster.write(f"{folder}/hpcenv.toml", f'image = "host"\npython = "{HOST_PYTHON}"\n')
    cluster.write(f"{folder}/train.py", SCRIPT)
    project = Project(cluster, folder)
    project.must("lock")
    shape = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--time", "5")
    project.must(
        "submit", "train.py", *shape, "--determinism", "bitwise", "--name", "table-1", "--wait", "--", "--steps", "8"
    )
    return project


def test_the_first_steps_are_reproduced_to_the_last_bit(cluster: Cluster, author: Project) -> None:
    reader = Project(cluster, f"{author.folder}/reader")
    cluster.must("sh", "-c", f"mkdir {reader.folder} && cp -r {author.folder}/runs/table-1 {reader.folder}/")
    done = reader.hpcenv("reproduce", "table-1", "--copy", "code", "--rung", "2", "--steps", "5", "--json")
    page = json.loads(done.stdout)["data"]
    assert (done.status, page["verdict"]) == (0, "reproduced-bitwise"), done.text
    assert {proof["what"]: proof["result"] for proof in page["proofs"]}[
        "the facts of all nodes give the recorded verdict"
    ] == "proved"
    compared = {one["name"]: one for one in page["comparison"]["metrics"]}
    assert (compared["loss"]["compared"], compared["loss"]["equal"]) == (4 * 5, 4 * 5)
    assert page["comparison"]["causes"] == [] or page["comparison"]["causes"][0]["likelihood"] == "unlikely"


def test_the_operation_that_a_changed_kernel_computes_is_named(author: Project) -> None:
    """Both sides repeat their first steps on two nodes, and the trace of one is enough for a second question."""
    shape = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--time", "5", "--determinism", "bitwise")
    for name, variable in (("vectors", "ATEN_CPU_CAPABILITY=default"), ("products", "MKL_CBWR=COMPATIBLE")):
        author.must("submit", "train.py", *shape, "--name", name, "--env", variable, "--wait", "--", "--steps", "8")
    done = author.hpcenv("compare", "--explain-op", "table-1", "vectors", "--trace-steps", "1:2", "--json")
    page = json.loads(done.stdout)["data"]
    assert done.status == 41, done.text
    assert (page["first"]["kind"], page["first"]["step"], page["ranks"]) == ("kernel", 1, [0, 1, 2, 3])
    assert page["first"]["name"] in ("aten.uniform_.default", "aten.randn.default", "aten.randn.generator")
    assert [source["how"] for source in page["sources"]] == ["repeated", "repeated"]
    assert all(source["repeats"].startswith("it repeats the run: 8 losses") for source in page["sources"])
    assert page["likely"][0]["group"] == "CPU kernels"
    done = author.hpcenv("compare", "--explain-op", "table-1-trace", "products", "--json")
    page = json.loads(done.stdout)["data"]
    assert [source["how"] for source in page["sources"]] == ["recorded", "repeated"], done.text
    # Which products this library computes in another way on this CPU is its own matter.
    assert (done.status, page["verdict"]) in ((41, "operation"), (0, "equal"))
    if page["first"] is not None:
        assert page["first"]["kind"] == "kernel" and page["first"]["name"].startswith("aten.")
