"""`--stage`: SIF and data on the nodes' own disks, proved, shared by jobs, and never a reason not to run."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import Cluster, Done, Project, before_step

pytestmark = pytest.mark.cluster

SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "1", "--wait")
NODES = ("n1", "n2")


@pytest.fixture(scope="module")
def disk(cluster: Cluster) -> Iterator[str]:
    """A folder of root's on each node's own disk, as a site has /local."""
    place = f"/var/tmp/stage-{uuid.uuid4().hex[:6]}"
    for node in NODES:
        cluster.must("mkdir", "-m", "1777", place, node=node, user="root")
    yield place
    for node in NODES:
        cluster.run("umount", place, node=node, user="root")
        cluster.must("rm", "-rf", place, node=node, user="root")


def run(project: Project, name: str, *words: str, script: str = "print('TRAINED', flush=True)\n") -> Done:
    project.cluster.write(f"{project.folder}/{name}.py", script)
    return project.hpcenv("submit", f"{name}.py", *SHAPE, "--name", name, *words, timeout=300)


def staged(project: Project, name: str) -> dict[str, Any]:
    found = {node: project.record(name, f"stage/{node}.json") for node in NODES}
    for node, record in found.items():
        print(f"{name}: {node}: {record['how']} {record['seconds']} {record['problems']}")
    return found


def ways(project: Project, name: str) -> dict[str, list[str]]:
    return {node: list(record["how"].values()) for node, record in staged(project, name).items()}


def copy_of(project: Project, name: str) -> str:
    return str(project.record(name, "stage/n1.json")["sif_path"])


DATA_SCRIPT = """\
import hashlib, json, os
here = os.stat(".").st_dev
os.chdir({data!r})
seen = {{"sha256": hashlib.sha256(open("random", "rb").read()).hexdigest(), "link": open("sub/link").read()}}
seen |= {{"writable": os.access(".", os.W_OK), "copy": os.stat(".").st_dev != here}}
print("SEEN", json.dumps(seen), flush=True)
"""


def test_what_is_broadcast_once_is_used_by_the_next_job(sif_project: Project, cluster: Cluster, disk: str) -> None:
    data = f"{sif_project.folder}-data"
    cluster.write(f"{data}/sub/a b.txt", "content")
    cluster.must("sh", "-c", f"head -c 2000000 /dev/urandom > {data}/random; ln -s 'a b.txt' {data}/sub/link")
    digest = cluster.must("sha256sum", f"{data}/random").split()[0]
    for name, how in (("staged", "sbcast"), ("reused", "present")):
        words = ("--verbose", "--stage", "--stage-data", data, "--stage-dir", disk)
        done = run(sif_project, name, *words, script=DATA_SCRIPT.format(data=data))
        assert done.status == 0, done.text
        assert ways(sif_project, name) == {node: [how, how] for node in NODES}
        assert "n[1-2]  match" in done.text and "SIF: own copy, same file as hashed" in done.text
        lines = [line.partition("SEEN ")[2] for line in done.stdout.splitlines() if "SEEN " in line]
        assert len(lines) == 2
        for line in lines:
            assert json.loads(line) == {"sha256": digest, "link": "content", "writable": False, "copy": True}
    for node in NODES:
        facts = sif_project.record("reused", f"facts/{node}.json")
        assert (facts["sif"]["staged"], facts["sif"]["checked"]) == (True, "identity")
        assert facts["sif"]["path"].startswith(disk)
        seconds = facts["seconds"]
        # Nothing was copied, nothing was hashed.
        assert "stage keep" not in seconds
        assert seconds["stage look"] < 0.3
        assert seconds["sif"] - seconds["probe"] < 0.3


def test_a_damaged_copy_is_made_again_and_a_swapped_one_does_not_start(
    sif_project: Project, cluster: Cluster, disk: str
) -> None:
    """Uses the copies of the test before."""
    copy = copy_of(sif_project, "staged")
    flip = (
        f"cp -p {copy} {copy}.x && chmod u+w {copy}.x && printf x | dd of={copy}.x bs=1 seek=9000000 conv=notrunc "
        f"status=none && touch -r {copy} {copy}.x && mv -f {copy}.x {copy}"
    )
    cluster.must("sh", "-c", flip, node="n1")
    at_launch = before_step(sif_project, "task", f'[ "$SLURMD_NODENAME" != n1 ] || {{ {flip}; }}')
    done = run(sif_project, "torn", "--stage", "--stage-dir", disk, *at_launch)
    assert ways(sif_project, "torn") == {"n1": ["copy"], "n2": ["present"]}
    assert sif_project.record("torn", "verdict.json")["result"] == "mismatch"
    assert done.status == 90, done.text
    assert "error[node-rejected]: the SIF changed on node n1 after it was checked" in done.stdout
    assert "TRAINED" not in done.stdout


def test_a_node_without_room_works_from_the_shared_file_and_says_so(
    sif_project: Project, cluster: Cluster, disk: str
) -> None:
    for node, size in (("n1", "2g"), ("n2", "100m")):
        cluster.must("mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "none", disk, node=node, user="root")
    done = run(sif_project, "crowded", "--stage", "--stage-dir", disk)
    assert done.status == 0, done.text
    assert "TRAINED" in done.stdout
    found = staged(sif_project, "crowded")
    assert list(found["n1"]["how"].values()) == ["copy"]
    assert "no space" in found["n2"]["problems"][0]
    findings = sif_project.record("crowded", "verdict.json")["findings"]
    assert [(f["node"], f["field"], f["severity"]) for f in findings] == [("n2", "stage", "warn")]
    assert sif_project.record("crowded", "facts/n2.json")["sif"]["staged"] is False
