"""A package that changes while the training runs: the gate said `match`, so the report tells of it."""

from __future__ import annotations

import time

import pytest

from .conftest import HOST_PYTHON, Cluster, Project

pytestmark = pytest.mark.cluster

WAITS = """\
import os, time
open(f"ready-{os.environ['RANK']}", "w").close()
until = time.monotonic() + 120
while not os.path.exists("go") and time.monotonic() < until:
    time.sleep(0.1)
"""
FILE = f"{HOST_PYTHON.rpartition('/bin/')[0]}/lib/python3.11/site-packages/jinja2/constants.py"


def wait_for(cluster: Cluster, *paths: str) -> None:
    until = time.monotonic() + 120
    while cluster.run("ls", *paths).status != 0:
        assert time.monotonic() < until, f"{paths} did not appear"
        time.sleep(0.5)


def test_a_package_that_changes_while_the_training_runs_is_reported(cluster: Cluster, host_project: Project) -> None:
    cluster.write(f"{host_project.folder}/waits.py", WAITS)
    shape = ("--nodes", "2", "--gpus", "0", "--nproc", "1", "--time", "10")
    host_project.must("submit", "waits.py", *shape, "--name", "changes")
    source = f"{host_project.folder}/runs/changes/source"
    wait_for(cluster, f"{source}/ready-0", f"{source}/ready-1")
    copy = "/run/second-look.py"
    change = f"(cat {FILE}; echo '# changed') > {copy} && mount --bind {copy} {FILE}"
    cluster.must("sh", "-c", change, node="n1", user="root")
    try:
        cluster.must("touch", f"{source}/go")
        waited = host_project.hpcenv("wait", "changes", timeout=300)
    finally:
        cluster.must("umount", FILE, node="n1", user="root")
    assert waited.status == 0, waited.text
    assert host_project.record("changes", "verdict.json")["result"] == "match"
    report = host_project.must("report", "changes")
    told = "changed while it ran: lib/python3.11/site-packages/jinja2/constants.py"
    lines = report.partition("end of the log")[0].splitlines()
    assert [line.strip() for line in lines if "changed while" in line] == [told], report
    assert f"node n1: the environment {told}\n" in host_project.must("logs", "changes")
