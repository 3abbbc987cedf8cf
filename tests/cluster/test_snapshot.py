"""A run works in its own copy of the project: on two nodes, on the host and in a SIF, alone and in an array."""

from __future__ import annotations

import json

from tests.cluster.conftest import Cluster, Project

SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "1")
SCRIPT = """\
import os, helper
rank = os.environ["RANK"]
size = os.path.getsize("data/weights.bin")
print(f"RANK {rank}: {open('conf/base.yaml').read().strip()}, {helper.VALUE}, {size} bytes", flush=True)
os.makedirs("out", exist_ok=True)
open(f"out/{os.environ.get('HPCENV_ELEMENT', 'x')}-{rank}.txt", "w").write("made")
open(f"plots/{rank}.txt", "w").write("made")
"""
MAKE = """\
set -e
mkdir -p conf data
printf 'lr: 0.1\\n' > conf/base.yaml
printf 'VALUE = "first"\\n' > helper.py
head -c 2000000 /dev/zero > data/weights.bin
printf 'runs/\\ndata/\\n' > .gitignore
printf '[code]\\nlive = ["plots"]\\n' >> hpcenv.toml
git init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm one
"""


def copy_of(base: Project, name: str) -> Project:
    """Make another project with the same lockfile, under git."""
    cluster, folder = base.cluster, f"{base.folder}-{name}"
    cluster.must("sh", "-c", f"mkdir {folder} && cp -r hpcenv.toml lockfiles {folder}", cwd=base.folder)
    cluster.write(f"{folder}/train.py", SCRIPT)
    cluster.must("sh", "-c", MAKE, cwd=folder)
    return Project(cluster, folder)


def test_a_config_that_is_edited_while_the_job_waits_is_not_used(
    sif_project: Project, cluster: Cluster, all_nodes_busy: object
) -> None:
    project = copy_of(sif_project, "copied")
    project.must("submit", "train.py", *SHAPE, "--name", "waits")
    project.must("submit", "train.py", *SHAPE, "--name", "tampered")
    cluster.must("sed", "-i", "s/0.1/99.9/", f"{project.folder}/conf/base.yaml")
    cluster.must("sh", "-c", "echo 'VALUE = 2' > runs/tampered/source/helper.py", cwd=project.folder)
    all_nodes_busy()  # type: ignore[operator]
    assert project.hpcenv("wait", "waits").status == 0
    log = project.must("logs", "waits")
    for rank in (0, 1):
        assert f"RANK {rank}: lr: 0.1, first, 2000000 bytes" in log, log
    assert "live, not covered: data/weights.bin" in log

    report = project.must("report", "waits")
    assert "made      2 files, 8 bytes" in report, report
    assert "source/out/x-1.txt" in report
    made = cluster.must("sh", "-c", "ls out plots 2>/dev/null; true", cwd=project.folder).split()
    assert made == ["plots:", "0.txt", "1.txt"]

    assert project.hpcenv("wait", "tampered").status == 90
    verdict = project.record("tampered", "verdict.json")
    found = {(f["node"], f["field"], f["found"]) for f in verdict["findings"] if f["severity"] == "must"}
    assert found == {(node, "code.digest", "changed: helper.py") for node in ("n1", "n2")}

    done = project.hpcenv("submit", "train.py", *SHAPE, "--name", "other", "--allow-dirty", "--wait")
    assert "RANK 0: lr: 99.9, first" in done.text, done.text
    different = project.hpcenv("diff", "waits", "other")
    assert different.status == 26
    assert "conf/base.yaml" in different.text, different.text
    cleaned = project.hpcenv("clean", "waits", "--dry-run").text
    assert "waits holds what its script made: source/out/x-0.txt, source/out/x-1.txt" in cleaned


def test_each_element_of_an_array_has_its_own_copy_and_data_are_compared(
    host_project: Project, cluster: Cluster
) -> None:
    project = copy_of(host_project, "array")
    folder = project.folder
    cluster.must("sh", "-c", 'printf \'[[data]]\\npath = "data"\\ncompare = "sha256"\\n\' >> hpcenv.toml', cwd=folder)
    words = ("--nodes", "1", "--gpus", "0", "--nproc", "1", "--allow-dirty")
    done = project.hpcenv("submit", "train.py", *words, "--array", "0-1", "--name", "a", "--wait")
    assert done.status == 0, done.text
    for number in (0, 1):
        found = cluster.must("ls", f"runs/a/000{number}/source/out", cwd=folder).split()
        assert found == [f"{number}-0.txt"]
        verdict = json.loads(cluster.must("cat", f"runs/a/000{number}/verdict.json", cwd=folder))
        assert verdict["notes"][0].startswith(f"data {folder}/data: sha256 compared: 1 file, 2000000 bytes, ")
    assert cluster.run("test", "-e", f"{folder}/runs/a/source/out").status == 1
