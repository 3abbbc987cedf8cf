"""lock -> SIF -> submit -> check on every node -> torchrun -> record, on real Slurm."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest

from .conftest import OTHER_IMAGE, STORE, Cluster, Project

pytestmark = pytest.mark.cluster

SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--time", "10")


def wait_for(project: Project, run: str, text: str) -> None:
    """Wait until a run's log holds `text`; a run that ends before is a failure."""
    for _ in range(240):
        log = project.hpcenv("logs", run).stdout
        if text in log:
            return
        time.sleep(0.5)
    raise AssertionError(f"{text!r} never came:\n{log}")


def losses(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"^\[0\] step +\d+ +loss ([0-9.]+)", text, re.MULTILINE)]


def test_a_locked_training_runs_on_two_nodes(sif_project: Project, cluster: Cluster) -> None:
    done = sif_project.hpcenv(
        "submit", "examples/train.py", *SHAPE, "--wait", "--name", "main", "--", "--steps", "60", timeout=400
    )

    assert done.status == 0, done.text
    assert "2 nodes x no GPU, 2 ranks each = 4 ranks" in done.text
    seen = losses(done.stdout)
    assert seen[-1] < 0.8 * seen[0], seen
    assert set(re.findall(r"rank (\d).*host (n\d)", done.stdout)) == {
        ("0", "n1"),
        ("1", "n1"),
        ("2", "n2"),
        ("3", "n2"),
    }
    verdict = sif_project.record("main", "verdict.json")
    assert verdict["result"] == "match"
    assert [node["node"] for node in verdict["nodes"]] == ["n1", "n2"]
    job = sif_project.record("main", "submission.json")["job_id"]
    assert cluster.must("sacct", "-X", "-n", "-P", "-j", job, "--format=State,ExitCode").strip() == "COMPLETED|0:0"

    report = sif_project.json("report", "main")
    assert report["ok"] is True
    assert report["data"]["status"]["state"] == "completed"
    assert report["data"]["status"]["exit_status"] == 0
    assert sorted(node["node"] for node in report["data"]["status"]["exits"]) == ["n1", "n2"]
    by_job_id = sif_project.json("status", report["data"]["status"]["job_id"])
    assert by_job_id["data"]["run"] == "main"
    by_folder = sif_project.json("status", f"{sif_project.folder}/runs/main")
    assert by_folder["data"]["run"] == "main"
    assert "final loss" in sif_project.must("logs", "main")
    assert "final loss" in sif_project.must("logs", "-f", "main")


def test_one_changed_byte_on_one_node_stops_the_job(host_project: Project, cluster: Cluster) -> None:
    victim = "/shared/hostenv/lib/python3.11/site-packages/torch/nn/functional.py"
    patch = 'sed "0,/import/s//imqort/" "$1" > /run/patched && mount --bind /run/patched "$1"'
    cluster.must("sh", "-c", patch, "sh", victim, node="n2", user="root")
    try:
        sizes = [cluster.must("stat", "-c", "%s", victim, node=node) for node in ("n1", "n2")]
        done = host_project.hpcenv("submit", "examples/train.py", *SHAPE, "--wait", "--name", "byte", timeout=400)
    finally:
        cluster.must("umount", victim, node="n2", user="root")

    assert sizes[0] == sizes[1], "the change must not be visible in the size"
    assert done.status == 90, done.text
    assert "world_size" not in done.stdout, "a line of train.py ran"
    assert "node n2  packages.torch.content-sha256  MISMATCH" in done.stdout
    assert "changed since installation: torch/nn/functional.py" in done.stdout
    findings = host_project.record("byte", "verdict.json")["findings"]
    torch = next(f for f in findings if f["field"] == "packages.torch.content-sha256")
    assert (torch["node"], torch["result"]) == ("n2", "mismatch")
    assert torch["locked"] != torch["found"]
    assert {f["node"] for f in findings} == {"n2"}
    report = host_project.hpcenv("report", "byte")
    assert "rejected" in report.stdout
    assert "packages.torch.content-sha256" in report.stdout


def test_the_unchanged_environment_of_the_host_trains(host_project: Project) -> None:
    done = host_project.hpcenv(
        "submit", "examples/train.py", *SHAPE, "--wait", "--name", "host", "--", "--steps", "5", timeout=400
    )
    assert done.status == 0, done.text
    assert "final loss" in done.stdout


def test_a_sif_swapped_while_the_job_waits_stops_it(
    sif_project: Project, cluster: Cluster, all_nodes_busy: Any
) -> None:
    other = sif_project.folder + "-other"
    cluster.write(
        f"{other}/hpcenv.toml",
        f'image = "{OTHER_IMAGE}"\nplain-http = ["registry:5000"]\n[paths]\nstore = "{STORE}"\n',
    )
    other_project = Project(cluster, other)
    other_project.must("lock", timeout=600)
    sif, kept = sif_project.sif(), sif_project.sif() + ".kept"
    sif_project.must("submit", "examples/train.py", *SHAPE, "--name", "swapped")
    cluster.must("mv", sif, kept)
    try:
        cluster.must("cp", other_project.sif(), sif)
        all_nodes_busy()
        waited = sif_project.must("logs", "-f", "swapped", timeout=200)
    finally:
        cluster.must("mv", "-f", kept, sif)

    status = sif_project.json("status", "swapped")["data"]
    assert (status["state"], status["exit_status"]) == ("rejected", 90)
    assert "world_size" not in waited, "a line of train.py ran"
    findings = sif_project.record("swapped", "verdict.json")["findings"]
    assert [(f["node"], f["field"], f["result"]) for f in findings] == [
        ("n1", "container.sif.sha256", "mismatch"),
        ("n2", "container.sif.sha256", "mismatch"),
    ]
    assert all(f["locked"] != f["found"] and len(f["found"]) == 64 for f in findings)
    assert re.search(r"^n\[1-2\] +container\.sif\.sha256 +[0-9a-f]{12}\.\.\. +[0-9a-f]{12}\.\.\.", waited, re.MULTILINE)


@pytest.mark.long
def test_a_sif_with_one_flipped_byte_stops_the_job(sif_project: Project, cluster: Cluster) -> None:
    sif, kept = sif_project.sif(), sif_project.sif() + ".kept"
    cluster.must("mv", sif, kept)
    try:
        cluster.must("cp", kept, sif)
        cluster.must("chmod", "u+w", sif)
        flip = (
            "import sys;f=open(sys.argv[1],'r+b');f.seek(9000000);b=f.read(1);f.seek(9000000);f.write(bytes([b[0]^1]))"
        )
        cluster.must("python3", "-c", flip, sif)
        done = sif_project.hpcenv("submit", "examples/train.py", *SHAPE, "--wait", "--name", "flipped", timeout=400)
        locked_again = sif_project.hpcenv("lock")
    finally:
        cluster.must("mv", "-f", kept, sif)

    # Seen before the queue; tests/cluster/test_identity_of_sif.py changes it behind submit's back.
    assert done.status == 11, done.text
    assert "error[image-mismatch]" in done.stderr
    assert "world_size" not in done.stdout
    # Locking again must not take the swapped file for the truth: it is made again as it was.
    assert locked_again.status == 0, locked_again.text
    assert "moved aside and made again" in locked_again.stderr
    assert "unchanged" in locked_again.stdout


def test_the_dry_run_is_what_submit_writes(sif_project: Project, cluster: Cluster) -> None:
    words = ("submit", "examples/train.py", *SHAPE, "--name", "dry")
    # A file changed a moment ago has no identity yet (identity/sif_check.py): the test before this one moves the SIF.
    cluster.must("sleep", "6")
    dry = sif_project.hpcenv(*words, "--dry-run", "--", "--steps", "3")
    script, manifest = dry.stdout.split("\n{\n", 1)
    sif_project.must(*words, "--", "--steps", "3")

    folder = f"{sif_project.folder}/runs/dry"
    written = cluster.must("cat", f"{folder}/job.sbatch")
    assert "{\n" + manifest == cluster.must("cat", f"{folder}/manifest.json")
    assert script + "\n" == written
    cluster.must("bash", "-n", f"{folder}/job.sbatch")
    sif_project.must("cancel", "dry")


@pytest.mark.parametrize("proxy", ["sif", "host"])
def test_arguments_reach_the_script_unchanged(
    proxy: str, sif_project: Project, host_project: Project, cluster: Cluster
) -> None:
    project = {"sif": sif_project, "host": host_project}[proxy]
    arguments = [
        "a b",
        "q'u\"o`t",
        "$(id) $HOME",
        "line\nbreak",
        "größe 文",
        "",
        "--nodes",
        "--",
        "a,b:c",
        "*",
        "\\n",
        "{{x}}",
    ]
    cluster.write(
        f"{project.folder}/my dir/args it's $(id).py",
        "import json, os, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    out = {'argv': sys.argv[1:], 'cwd': os.getcwd(), 'env': dict(os.environ)}\n"
        "    json.dump(out, open('seen.json', 'w'))\n",
    )
    words = ("--nodes", "1", "--gpus", "0", "--nproc", "1", "--name", "args", "--env", 'TRICKY=a,b $HOME `id` "q" \'')
    done = project.hpcenv("submit", "my dir/args it's $(id).py", *words, "--wait", "--", *arguments)

    assert done.status == 0, done.text
    import json

    seen = json.loads(cluster.must("cat", f"{project.folder}/runs/args/source/seen.json"))
    assert seen["argv"] == arguments
    assert seen["cwd"] == f"{project.folder}/runs/args/source"
    assert seen["env"]["TRICKY"] == 'a,b $HOME `id` "q" \''
    assert seen["env"]["PYTHONNOUSERSITE"] == "1"


def test_nothing_of_the_users_home_or_environment_leaks_into_the_container(
    sif_project: Project, cluster: Cluster
) -> None:
    site = "/home/alice/.local/lib/python3.11/site-packages"
    cluster.write(f"{site}/numpy/__init__.py", "raise SystemExit('shadowed by ~/.local')\n")
    cluster.write(
        f"{sif_project.folder}/leak.py",
        "import json, os, sys, numpy\n"
        "names = {n: v for n, v in os.environ.items() if n.startswith(('LEAK', 'PYTHONPATH', 'APPTAINERENV'))}\n"
        "print('SEEN', json.dumps({'names': names, 'home': os.path.expanduser('~'), 'path': sys.path}))\n",
    )
    try:
        done = cluster.run(
            "env", "LEAK=1", "PYTHONPATH=/tmp/evil", "APPTAINERENV_LEAKED=1", "APPTAINER_BIND=/etc:/leaked",
            "hpcenv", "submit", "leak.py", "--nodes", "1", "--gpus", "0", "--nproc", "1", "--wait", "--name", "leak",
            cwd=sif_project.folder,
        )  # fmt: skip
    finally:
        cluster.must("rm", "-rf", "/home/alice/.local/lib/python3.11")

    assert done.status == 0, done.text
    import json

    seen = json.loads(re.search(r"SEEN (.*)", done.stdout)[1])  # type: ignore[index]
    # The run's own folders, with the start hook and `hpcenv.training`, and nothing of the caller's.
    run = f"{sif_project.folder}/runs/leak"
    assert seen["names"] == {"PYTHONPATH": f"{run}/start-hook:{run}/inside"}
    assert seen["home"] == "/hpcenv/home"
    assert not [entry for entry in seen["path"] if entry.startswith(("/home/alice/.local", "/tmp"))]


def test_the_users_own_settings_win_and_say_where_they_are_from(sif_project: Project, cluster: Cluster) -> None:
    done = cluster.run(
        "env", "NCCL_DEBUG=INFO", "GLOO_SOCKET_IFNAME=from-the-shell",
        "hpcenv", "submit", "examples/train.py", "--nodes", "1", "--gpus", "0", "--nproc", "1", "--wait",
        "--name", "settings", "--env", "GLOO_SOCKET_IFNAME=lo", "--", "--steps", "2",
        cwd=sif_project.folder,
    )  # fmt: skip
    assert done.status == 0, done.text
    chosen = {
        s["name"]: (s["value"], s["origin"]) for s in sif_project.record("settings", "verdict.json")["settings"]["n1"]
    }
    assert chosen["NCCL_DEBUG"] == ("INFO", "environment of the job")
    assert chosen["GLOO_SOCKET_IFNAME"] == ("lo", "--env")


def test_the_scripts_own_exit_status_ends_the_job(sif_project: Project, cluster: Cluster) -> None:
    cluster.write(f"{sif_project.folder}/fails.py", "import sys\nprint('about to fail', flush=True)\nsys.exit(7)\n")
    words = ("submit", "fails.py", "--nodes", "2", "--gpus", "0", "--nproc", "1", "--wait")
    for n in range(3 if os.environ.get("HPCENV_TEST_LONG") else 1):
        done = sif_project.hpcenv(*words, "--name", f"fails-{n}")
        # torchrun would end with 1; srun would say 135 or 143, the status of the node that it
        # killed because of the first one.
        assert done.status == 7, done.text
        assert sif_project.json("status", f"fails-{n}")["data"]["state"] == "failed"
    assert sif_project.hpcenv(*words, "--name", "fails-local", "--cluster", "local").status == 7


# A minute on a slow machine; test_stop.py has a requeue by hpcenv itself by default.
@pytest.mark.long
def test_a_requeued_job_is_checked_again_and_its_earlier_attempt_is_kept(
    host_project: Project, cluster: Cluster
) -> None:
    words = ("--nodes", "2", "--gpus", "0", "--nproc", "1", "--name", "again")
    # It must still train when the requeue reaches it: a loaded machine needs seconds for that.
    host_project.must("submit", "examples/train.py", *words, "--", "--steps", "150", "--sleep-per-step", "0.2")
    wait_for(host_project, "again", "step   1")
    job = host_project.record("again", "submission.json")["job_id"]
    cluster.must("scontrol", "requeue", job)
    waiting = host_project.must("status", "again")
    cluster.start_again_soon(job)
    host_project.must("logs", "-f", "again", timeout=300)

    assert "pending" in waiting or "requeued" in waiting or "completing" in waiting, waiting
    status = host_project.json("status", "again")["data"]
    assert (status["state"], status["exit_status"], status["attempt"]) == ("completed", 0, 1)
    assert status["verdict"]["attempt"] == 1
    assert len(status["earlier"]) == 1
    assert "attempt 0: match" in status["earlier"][0]
    assert "attempt 0: match" in host_project.must("report", "again")


def test_a_running_job_is_cancelled(sif_project: Project) -> None:
    sif_project.must(
        "submit", "examples/train.py", *SHAPE, "--name", "long", "--", "--steps", "1000", "--sleep-per-step", "1"
    )
    wait_for(sif_project, "long", "step    1")
    done = sif_project.must("cancel", "long")
    assert "cancelled" in done
    assert sif_project.json("status", "long")["data"]["state"] == "cancelled"
