"""Fifty submissions at once from two users; jobs that share the nodes, and one SIF, at the same time."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .conftest import ACCEPT, HOST_PYTHON, ROOT, Cluster, Project

pytestmark = pytest.mark.cluster

EACH = 25
USERS = ("alice", "bob")
SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--cpus", "2", "--time", "5")
# torch 2.13 may abort (SIGABRT) while Python is taken down with gloo's threads at work, more so with fifty jobs at once.
SCRIPT = (ROOT / "tests" / "kinds" / "plain_ddp.py").read_text(encoding="utf-8") + "    os._exit(0)\n"
# Starts the same submission so many times at once, and waits for all; what each said is in a file of its own.
AT_ONCE = (
    'n=$1; shift; mkdir said; for i in $(seq "$n"); do "$@" >said/$i.json 2>said/$i.err & done; wait; cat said/*.err'
)


@pytest.fixture(scope="module")
def folders(cluster: Cluster) -> Iterator[dict[str, str]]:
    """The same project in both homes, as a checkout of it would be; locked once."""
    places = {user: f"/home/{user}/hpcenv-many" for user in USERS}
    for user, place in places.items():
        cluster.must("rm", "-rf", place, user=user)
        cluster.write(f"{place}/hpcenv.toml", f'image = "host"\npython = "{HOST_PYTHON}"\n', user=user)
        cluster.write(f"{place}/train.py", SCRIPT, user=user)
    cluster.must("hpcenv", "lock", cwd=places["alice"], timeout=600)
    locked = cluster.must("cat", f"{places['alice']}/lockfiles/default.lock.toml")
    cluster.write(f"{places['bob']}/lockfiles/default.lock.toml", locked, user="bob")
    # Alice accepted what the project asks when she locked; bob, who has a copy, is asked for himself.
    cluster.must("/shared/hpcenv/venv/bin/python", "-c", ACCEPT, user="bob", cwd=places["bob"])
    yield places
    for user, place in places.items():
        cluster.run("scancel", f"--user={user}", user=user)
        cluster.run("rm", "-rf", place, user=user)


def queued(cluster: Cluster) -> dict[str, tuple[str, str, str]]:
    """What Slurm itself has: job id -> (user, name, work folder)."""
    rows = cluster.must("squeue", "--noheader", "--user=alice,bob", "--format=%A|%u|%j|%Z").splitlines()
    return {job: (user, name, place) for job, user, name, place in (row.split("|") for row in rows)}


def read_json(cluster: Cluster, user: str, *paths: str) -> list[dict[str, Any]]:
    """Read many records at once."""
    text = cluster.must("sh", "-c", 'for one; do cat "$one"; echo; printf "\\0"; done', "sh", *paths, user=user)
    return [json.loads(part) for part in text.split("\0")[:-1]]


def run_records(cluster: Cluster, user: str, folder: str) -> dict[str, Any]:
    verdict, *exits = read_json(
        cluster, user, f"{folder}/verdict.json", f"{folder}/exits/n1.json", f"{folder}/exits/n2.json"
    )
    began, ended = max(one["started"] for one in exits), min(one["ended"] for one in exits)
    return {"verdict": verdict, "began": began, "ended": ended, "statuses": [one["status"] for one in exits]}


@pytest.mark.long
def test_fifty_submissions_at_once_from_two_users_are_queued_once_each(
    cluster: Cluster, folders: dict[str, str], all_nodes_busy: Any
) -> None:
    before = set(queued(cluster))

    def submit(user: str) -> str:
        words = ("hpcenv", "submit", "train.py", *SHAPE, "--json")
        return cluster.must("sh", "-c", AT_ONCE, "sh", str(EACH), *words, user=user, cwd=folders[user], timeout=400)

    with ThreadPoolExecutor(len(USERS)) as pool:
        complaints = dict(zip(USERS, pool.map(submit, USERS), strict=True))

    jobs = {job: row for job, row in queued(cluster).items() if job not in before}
    runs: dict[str, dict[str, dict[str, Any]]] = {}
    for user in USERS:
        place = folders[user]
        said = read_json(cluster, user, *(f"{place}/said/{number}.json" for number in range(1, EACH + 1)))
        assert all(one["ok"] for one in said), (complaints[user], said)
        runs[user] = {one["data"]["job_id"]: one["data"] for one in said}
        assert len(runs[user]) == EACH
        assert {job for job, row in jobs.items() if row[0] == user} == set(runs[user])
        # Every run folder is that of its own job, and there is no other.
        listed = cluster.must("ls", f"{place}/runs", user=user).split()
        assert sorted(listed) == sorted(one["run"] for one in runs[user].values())
        names = [f"{place}/runs/{name}" for name in listed]
        submissions = read_json(cluster, user, *(f"{name}/submission.json" for name in names))
        manifests = read_json(cluster, user, *(f"{name}/manifest.json" for name in names))
        for name, submission, manifest in zip(names, submissions, manifests, strict=True):
            assert manifest["run_folder"] == name
            assert jobs[submission["job_id"]][1] == submission["run"] == manifest["run"]
        scripts = cluster.must("sh", "-c", 'grep -c "^run=" "$@"', "sh", *(f"{n}/job.sbatch" for n in names), user=user)
        assert scripts.count(":1\n") == EACH

    # One of each user is left: they share both nodes, and start at the same time.
    kept = {user: next(iter(runs[user])) for user in USERS}
    for user in USERS:
        cluster.must("scancel", *(job for job in runs[user] if job != kept[user]), user=user)
    all_nodes_busy()
    waits = {user: runs[user][kept[user]]["run"] for user in USERS}
    meetings = set()
    ran = []
    for user, run in waits.items():
        done = cluster.run("hpcenv", "wait", run, user=user, cwd=folders[user], timeout=300)
        log = cluster.must("hpcenv", "logs", run, user=user, cwd=folders[user])
        assert done.status == 0, done.text + log
        assert set(re.findall(r"rank (\d) of 4 on (n\d)", log)) == {("0", "n1"), ("1", "n1"), ("2", "n2"), ("3", "n2")}
        ran.append(run_records(cluster, user, f"{folders[user]}/runs/{run}"))
        meetings.add((ran[-1]["verdict"]["rendezvous"]["host"], ran[-1]["verdict"]["rendezvous"]["port"]))
    assert len(meetings) == 2, "both met at the same port"
    assert max(one["began"] for one in ran) < min(one["ended"] for one in ran), "they did not run at the same time"
    # Of the others hpcenv says what is so.
    other = next(one["run"] for job, one in runs["bob"].items() if job != kept["bob"])
    status = json.loads(cluster.run("hpcenv", "status", other, "--json", user="bob", cwd=folders["bob"]).stdout)
    assert status["data"]["state"] == "cancelled"


@pytest.mark.long
def test_two_jobs_at_the_same_time_use_one_sif(sif_project: Project, cluster: Cluster) -> None:
    cluster.write(f"{sif_project.folder}/plain_ddp.py", SCRIPT)
    runs = ("one-sif-a", "one-sif-b")
    for run in runs:
        sif_project.must("submit", "plain_ddp.py", *SHAPE, "--name", run)
    began = time.monotonic()
    done = sif_project.hpcenv("wait", *runs, timeout=400)

    logs = [sif_project.must("logs", run) for run in runs]
    assert done.status == 0, done.text + "\n".join(logs)
    ran = [run_records(cluster, "alice", f"{sif_project.folder}/runs/{run}") for run in runs]
    assert max(one["began"] for one in ran) < min(one["ended"] for one in ran), (time.monotonic() - began, ran)
    used = {
        node["sif"]["path"]
        for run in runs
        for node in read_json(
            cluster, "alice", *(f"{sif_project.folder}/runs/{run}/facts/{name}.json" for name in ("n1", "n2"))
        )
    }
    assert used == {sif_project.sif()}
    assert len({one["verdict"]["rendezvous"]["port"] for one in ran}) == 2
    for log in logs:
        assert set(re.findall(r"rank (\d) of 4 on (n\d)", log)) == {("0", "n1"), ("1", "n1"), ("2", "n2"), ("3", "n2")}
