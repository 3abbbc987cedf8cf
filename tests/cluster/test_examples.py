"""Each example as runs of hpcenv on two nodes: trained, stopped and continued, and compared to the last bit.

Three runs each: one without a stop; one that is asked to stop as Slurm asks before a time limit, which the queue
continues; and a new run that continues from a checkpoint of the first one (`--resume-from`).
"""

from __future__ import annotations

import json
import uuid

import pytest

from tests.example_cases import EXAMPLES, SAVED_EVERY, STEPS, Example

from .conftest import Project, copy_examples
from .test_kinds import frameworks
from .test_stop import is_there, log, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long]
assert frameworks  # the fixture

SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--cpus", "2", "--time", "10")
# The number of threads decides how sums are rounded.
THREADS = ("--env", "OMP_NUM_THREADS=1")


@pytest.fixture
def project(request: pytest.FixtureRequest, case: Example) -> Project:
    """A locked project with the examples, in the image or with the Python that has the frameworks."""
    found: Project = request.getfixturevalue("sif_project" if case.needs == "torch" else "frameworks")
    copy_examples(found.cluster, found.folder)
    return found


def submit(project: Project, case: Example, run: str, *words: str) -> str:
    launcher = () if case.launcher == "torchrun" else ("--launcher", case.launcher)
    project.must(
        "submit", f"examples/{case.script}", *launcher, *SHAPE, *THREADS, "--name", run, *words, "--", *case.words
    )
    return str(project.record(run, "submission.json")["job_id"])


def has_completed(project: Project, run: str) -> str:
    """Wait for its end; return its log."""
    done = project.hpcenv("wait", run, timeout=900)
    text = log(project, run)
    assert done.status == 0, done.text + text[-4000:]
    return text


def is_equal(project: Project, case: Example, reference: str, run: str, *words: str) -> int:
    """`hpcenv compare` ends with 0, which is: equal to the last bit. Return the number of losses that it compared."""
    done = project.hpcenv("compare", reference, run, *words, "--json")
    assert done.status == 0, done.text
    (loss,) = [row for row in json.loads(done.stdout)["data"]["metrics"] if row["name"] == "loss"]
    assert loss["ranks"] == case.recorded_by
    assert loss["equal"] == loss["compared"]
    return int(loss["equal"])


def checkpoint(project: Project, run: str, step: int) -> str:
    """The file or folder of a step."""
    place = f"runs/{run}/checkpoints/step-{step:08d}"
    return place if is_there(project, run, f"checkpoints/step-{step:08d}") else f"{place}.pt"


@pytest.mark.parametrize("case", EXAMPLES, ids=lambda case: case.name)
def test_trained_stopped_continued_and_compared(case: Example, project: Project) -> None:
    name = f"{case.name}-{uuid.uuid4().hex[:6]}"
    whole, stopped, onward = (f"{name}-{word}" for word in ("whole", "stopped", "onward"))
    submit(project, case, whole)
    job = submit(project, case, stopped)
    # Long: other jobs may have the nodes.
    wait_until("step 15 of the run to stop", lambda: "step 15  loss" in log(project, stopped), seconds=600)
    project.cluster.must("scancel", "--signal=USR2", job)

    has_completed(project, whole)
    text = has_completed(project, stopped)
    assert "attempt 1: match: 2 nodes" in text
    before = project.record(stopped, "attempts/0/finished.json")
    assert (before["saved"], before["again"]) == (True, True)
    assert is_equal(project, case, whole, stopped) == STEPS * case.losses

    submit(project, case, onward, "--resume-from", checkpoint(project, whole, 2 * SAVED_EVERY))
    assert "step 10  loss" not in has_completed(project, onward)
    second_half = ("--steps", f"{2 * SAVED_EVERY + 1}:{STEPS}")
    assert is_equal(project, case, whole, onward, *second_half) == (STEPS - 2 * SAVED_EVERY) * case.losses
