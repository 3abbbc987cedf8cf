"""Many runs and other ways in: a sweep of a git repository, `submit --export` for somebody else, Python functions."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import pytest

from .conftest import Cluster, Project

pytestmark = pytest.mark.cluster

TRAIN = """\
import os, sys
import helper
print("ELEMENT", os.environ.get("HPCENV_ELEMENT"), helper.VALUE, sys.argv[1:], os.getcwd(), flush=True)
sys.exit(7 if "--seed=1" in sys.argv and not os.path.exists("mended") else 0)
"""

FUNCTION = """\
import hpcenv, helper

def work(base, fail=False):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([base + dist.get_rank()])
    dist.all_reduce(total)
    if fail and dist.get_rank() == 1:
        raise ValueError("no " + helper.VALUE)
    dist.barrier()
    return int(total), dist.get_rank(), helper.VALUE

if __name__ == "__main__":
    executor = hpcenv.Executor("jobs", nodes=2, call="rank", time="5")
    jobs = [executor.submit(work, 10), *executor.map_array(work, (10, 20), (True, False))]
    print(jobs[0].results())
    print("ValueError: no committed" in str(jobs[1].exception()))
    print(jobs[2].results(), [job.job_id.partition("_")[2] for job in jobs])
    print(jobs[1].run.folder.parent == jobs[2].run.folder.parent)
"""


@pytest.fixture(scope="module")
def repository(sif_project: Project, cluster: Cluster) -> Iterator[Project]:
    """A project of its own under git, with the lockfile of the SIF's."""
    folder = f"/home/alice/hpcenv-tests/many-{uuid.uuid4().hex[:6]}"
    cluster.must("mkdir", folder)
    cluster.must("cp", "-r", f"{sif_project.folder}/hpcenv.toml", f"{sif_project.folder}/lockfiles", folder)
    for name, text in (
        ("train.py", TRAIN),
        ("fn.py", FUNCTION),
        ("helper.py", "VALUE = 'committed'\n"),
        (".gitignore", "runs/\n"),
    ):
        cluster.write(f"{folder}/{name}", text)
    commit = "git init -q && git add -A && git -c user.email=a@b -c user.name=a commit -qm one"
    cluster.must("sh", "-c", commit, cwd=folder)
    yield Project(cluster, folder)
    cluster.run("rm", "-rf", folder)


@pytest.mark.long
def test_a_sweep_runs_the_committed_code_and_only_what_failed_runs_again(repository: Project, cluster: Cluster) -> None:
    words = ("--nodes", "1", "--nproc", "1", "--time", "5", "--name", "sw")
    command = ("submit", "train.py", *words, "--sweep", "seed=0..2", "--json", "--", "--x={seed}-$(id)")
    submitted = json.loads(repository.must(*command))
    assert submitted["ok"], submitted
    cluster.write(f"{repository.folder}/helper.py", "VALUE = 'edited'\n")
    refused = repository.hpcenv("submit", "train.py", "--nproc", "1")
    assert (refused.status, "changed: helper.py" in refused.stderr) == (2, True)
    waited = repository.hpcenv("wait", "sw", timeout=200)
    cluster.must("git", "checkout", "-q", "helper.py", cwd=repository.folder)

    assert waited.status == 0, waited.text
    head, *rows = repository.must("report", "sw").splitlines()[1:]
    assert head.split()[:4] == ["RUN", "seed", "STATE", "EXIT"]
    assert [row.split()[:4] for row in rows[:3]] == [[f"000{n}", str(n), "completed", "0"] for n in range(3)]
    job = submitted["data"]["job_id"]
    for number in range(3):
        log = cluster.must("cat", f"{repository.folder}/runs/sw/000{number}/job.log")
        assert (
            f"ELEMENT {number} committed ['--x={number}-$(id)'] {repository.folder}/runs/sw/000{number}/source" in log
        ), log
        assert repository.record(f"sw/000{number}", "submission.json")["job_id"] == f"{job}_{number}"
    states = cluster.must("sacct", "-X", "-n", "-P", "-j", job, "--format=JobID,State").split()
    assert sorted(states) == [f"{job}_{number}|COMPLETED" for number in range(3)]

    words = ("--nodes", "1", "--nproc", "1", "--time", "5", "--name", "bad")
    failed = repository.hpcenv("submit", "train.py", *words, "--sweep", "seed=0..1", "--wait", timeout=200)
    assert failed.status == 7, failed.text
    assert "1 completed, 1 failed" in failed.text
    cluster.write(f"{repository.folder}/runs/bad/0001/source/mended", "")
    again = (
        "import os, sys, time, pathlib\n"
        "from hpcenv.project.context import Context\n"
        "from hpcenv.submission.sweep_job import rerun_failed\n"
        "context = Context(environ=os.environ, cwd=pathlib.Path('.'), now=time.localtime(), token='', command=('x',))\n"
        "print([element.folder for element in rerun_failed(pathlib.Path(sys.argv[1]), context).elements])\n"
    )
    python = ("/shared/hpcenv/venv/bin/python", "-c", again, f"{repository.folder}/runs/bad")
    assert cluster.must(*python, cwd=repository.folder).strip() == "['0001']"
    assert repository.hpcenv("wait", "bad", timeout=200).status == 0
    attempts = cluster.must("ls", f"{repository.folder}/runs/bad/0001/attempts").split()
    assert attempts == ["0"], "what the first start left is kept"


def test_a_stranger_submits_the_exported_folder_from_a_copy(repository: Project, cluster: Cluster) -> None:
    name = f"exported-{uuid.uuid4().hex[:6]}"
    place, image = f"/shared/scratch/{name}", f"/shared/scratch/{name}.sif"
    repository.must("submit", "train.py", "--nodes", "2", "--nproc", "1", "--time", "5", "--export", place, "--", "a b")
    cluster.must("cp", repository.sif(), image)
    copy = f"/home/bob/it's {name}"
    script = (
        'cp -r "$1" "$2" && cd "$2" && HPCENV_SIF="$3" sbatch --wait job.sbatch >/dev/null; echo "status $?"; '
        "cat hpcenv-*.log; cat runs/*/verdict.json"
    )
    try:
        said = cluster.must("sh", "-c", script, "sh", place, copy, image, user="bob", timeout=200)
    finally:
        cluster.run("rm", "-rf", place, image)
        cluster.run("rm", "-rf", copy, user="bob")
    assert said.startswith("status 0"), said
    assert said.count(f"ELEMENT None committed ['a b'] {copy}/runs/") == 2, said
    verdict = json.loads(said[said.index("\n{\n") :])
    assert (verdict["result"], len(verdict["nodes"])) == ("match", 2)


@pytest.mark.long
def test_functions_run_on_both_nodes_in_the_locked_environment(repository: Project, cluster: Cluster) -> None:
    program = ("/shared/hpcenv/venv/bin/python", "fn.py")
    said = cluster.must(*program, cwd=repository.folder, timeout=300).splitlines()
    assert said == [
        "[(21, 0, 'committed'), (21, 1, 'committed')]",
        "True",
        "[(41, 0, 'committed'), (41, 1, 'committed')] ['', '0', '1']",
        "True",
    ]
