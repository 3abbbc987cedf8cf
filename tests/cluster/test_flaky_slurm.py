"""squeue fails now and then, or for good: submit, status, report and cancel go on, and say the truth."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import HOST_PYTHON, Cluster, Done

pytestmark = pytest.mark.cluster

# Bob's, because a command fails for one user only, and the other tests are alice's.
FOLDER = "/home/bob/hpcenv-flaky"
SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "1", "--cpus", "1", "--time", "5")
SCRIPT = """\
import sys, time
print("begun", flush=True)
time.sleep(float(sys.argv[1]))
"""


class Bob:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def hpcenv(self, *words: str, timeout: float = 300) -> Done:
        return self.cluster.run("hpcenv", *words, user="bob", cwd=FOLDER, timeout=timeout)

    def status(self, run: str) -> dict[str, Any]:
        said = json.loads(self.hpcenv("status", run, "--json").stdout)
        assert said["ok"], said
        return dict(said["data"])

    def until_begun(self, run: str) -> None:
        for _ in range(240):
            if "begun" in self.hpcenv("logs", run).stdout:
                return
            time.sleep(0.5)
        raise AssertionError(f"{run} never began: {self.hpcenv('logs', run).text}")


@pytest.fixture(scope="module")
def bob(cluster: Cluster) -> Iterator[Bob]:
    cluster.must("rm", "-rf", FOLDER, user="bob")
    cluster.write(f"{FOLDER}/hpcenv.toml", f'image = "host"\npython = "{HOST_PYTHON}"\n', user="bob")
    cluster.write(f"{FOLDER}/nap.py", SCRIPT, user="bob")
    cluster.must("hpcenv", "lock", user="bob", cwd=FOLDER, timeout=600)
    yield Bob(cluster)
    cluster.run("scancel", "--user=bob", user="bob")
    cluster.run("rm", "-rf", FOLDER, user="bob")


@pytest.fixture
def flaky(cluster: Cluster) -> Iterator[Any]:
    """Call it: from then on every n-th squeue of bob's fails."""

    def fail(every: int) -> None:
        done = cluster.testbed("fault", "flaky", "squeue", "--user", "bob", "--every", str(every))
        assert done.status == 0, done.text

    yield fail
    done = cluster.testbed("fault", "heal", "squeue", "--user", "bob")
    assert done.status == 0, done.text


def test_with_every_second_squeue_failing_a_run_is_followed_and_another_one_cancelled(bob: Bob, flaky: Any) -> None:
    flaky(2)
    assert {bob.cluster.run("squeue", user="bob").status for _ in range(2)} == {0, 1}

    started = bob.hpcenv("submit", "nap.py", *SHAPE, "--name", "long", "--", "300")
    assert started.status == 0, started.text
    done = bob.hpcenv("submit", "nap.py", *SHAPE, "--name", "short", "--wait", "--", "1")
    assert done.status == 0, done.text
    assert "begun" in done.stdout
    for _ in range(3):
        short = bob.status("short")
        assert (short["state"], short["exit_status"]) == ("completed", 0)
    assert "completed" in bob.hpcenv("report", "short").stdout

    bob.until_begun("long")
    assert {bob.status("long")["state"] for _ in range(4)} == {"running"}
    cancelled = bob.hpcenv("cancel", "long")
    assert cancelled.status == 0, cancelled.text
    assert {bob.status("long")["state"] for _ in range(3)} == {"cancelled"}
    assert "long" not in bob.cluster.must("squeue", "--noheader", "--user=bob", "--format=%j")


@pytest.mark.long
def test_with_squeue_failing_for_good_nothing_is_said_that_is_not_known(bob: Bob, flaky: Any) -> None:
    started = bob.hpcenv("submit", "nap.py", *SHAPE, "--name", "unseen", "--", "300")
    assert started.status == 0, started.text
    bob.until_begun("unseen")

    flaky(1)
    # sacct and the run's own files still tell that it runs; what neither of them tells is unknown, never an end.
    status = bob.hpcenv("status", "unseen")
    assert bob.status("unseen")["state"] in ("running", "unknown"), status.text
    cancelled = bob.hpcenv("cancel", "unseen", timeout=200)
    if cancelled.status != 0:
        assert "squeue" in cancelled.text
        return
    # That it is still cleaned up after, only squeue could have said.
    for _ in range(60):
        left = bob.cluster.must("squeue", "--noheader", "--user=bob", "--format=%T", user="alice").split()
        assert set(left) <= {"COMPLETING"}
        if not left:
            return
        time.sleep(0.5)
    raise AssertionError("the job did not go")


# sbatch as it is when its connection breaks after the request: the job is queued, and its number does not arrive.
LOST_ANSWER = """\
#!/bin/sh
/usr/bin/sbatch "$@" >/dev/null || exit
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1
"""


@pytest.fixture
def lost_answer(bob: Bob) -> str:
    """A PATH on which every sbatch queues its job and says that it got no answer."""
    bob.cluster.write(f"{FOLDER}/bin/sbatch", LOST_ANSWER, user="bob")
    bob.cluster.must("chmod", "+x", f"{FOLDER}/bin/sbatch", user="bob")
    # `.testbed-faults`: where the command lies that `flaky` breaks.
    return f"PATH={FOLDER}/bin:/home/bob/.testbed-faults:/shared/hpcenv/venv/bin:/usr/bin:/bin"


def test_an_array_whose_sbatch_was_not_answered_is_found_and_taken_back(bob: Bob, lost_answer: str) -> None:
    shape = (*SHAPE, "--name", "lost", "--sweep", "x=0..3", "--max-parallel", "1", "--", "300")
    words = ("env", lost_answer, "hpcenv", "submit", "nap.py", *shape)
    done = bob.cluster.run(*words, user="bob", cwd=FOLDER)
    assert "error[submit-uncertain]" in done.stderr, done.text
    jobs = bob.cluster.must("squeue", "--noheader", "--user=bob", "--name=lost", "--states=PENDING,RUNNING", user="bob")
    assert jobs == "", "not one element of it is left"
    assert bob.cluster.run("test", "-e", f"{FOLDER}/runs/lost").status == 1, "nor its folder"


@pytest.mark.long
def test_while_nobody_can_tell_the_folder_stays_and_later_says_what_became_of_it(
    bob: Bob, lost_answer: str, flaky: Any
) -> None:
    flaky(1)
    shape = (*SHAPE, "--name", "kept", "--sweep", "x=0..3", "--max-parallel", "1", "--", "300")
    words = ("env", lost_answer, "hpcenv", "submit", "nap.py", *shape)
    done = bob.cluster.run(*words, user="bob", cwd=FOLDER)
    assert "error[submit-uncertain]" in done.stderr, done.text
    assert "its folder is kept" in done.stderr
    bob.cluster.testbed("fault", "heal", "squeue", "--user", "bob")
    # It runs: what has not begun is known by what has.
    bob.until_begun("kept/0000")
    told = json.loads(bob.hpcenv("list", "kept", "--json").stdout)["data"]["runs"]
    assert [run["state"] for run in told] == ["running", "pending", "pending", "pending"]
    assert "it is running" in bob.hpcenv("clean", "kept", "--yes").stderr
    assert bob.hpcenv("cancel", "kept").status == 0
    states = {run["state"] for run in json.loads(bob.hpcenv("report", "kept", "--json").stdout)["data"]["runs"]}
    assert states == {"cancelled"}
    assert bob.hpcenv("clean", "kept", "--yes").status == 0
    assert bob.cluster.run("test", "-e", f"{FOLDER}/runs/kept").status == 1


def test_what_never_queued_says_so_and_goes(bob: Bob) -> None:
    assert bob.hpcenv("submit", "nap.py", *SHAPE, "--name", "never", "--", "1").status == 0
    assert bob.hpcenv("cancel", "never").status == 0
    # As if the request had never arrived, an hour ago.
    records = "rm -rf runs/never/*.json runs/never/job.log runs/never/attempts"
    keep = "cp runs/never/manifest.json kept.json"
    bob.cluster.must(
        "sh", "-c", f"{keep} && {records} && mv kept.json runs/never/manifest.json && touch -d '1 hour ago' runs/never",
        user="bob", cwd=FOLDER,
    )  # fmt: skip
    says = "never queued, according to Slurm; `hpcenv clean never` removes it"
    assert bob.hpcenv("status", "never").stdout.startswith(f"never: not-queued ({says})")
    assert "never queued, according to" in bob.hpcenv("list").stdout
    assert bob.hpcenv("clean", "never", "--yes").status == 0
    assert bob.cluster.run("test", "-e", f"{FOLDER}/runs/never").status == 1
