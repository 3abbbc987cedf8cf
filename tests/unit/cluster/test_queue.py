"""Why a job waits: the reason in words, the place in the queue, the expected start."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hpcenv.cluster.queue import QueuePlace, can_never_start, find_place, in_words

OWN = "squeue---format=%P|%Q|%S|%u|%V"
QUEUE = "squeue---format=%i|%Q|%u|%r"


def _since(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - seconds))


def test_the_place_counts_the_jobs_that_wait_for_nodes_and_go_first(fake_slurm: Any) -> None:
    """As squeue of Slurm 24.11 printed it, with more users."""
    fake_slurm.answers(OWN, f"batch|5|2026-11-27T04:17:00|alice|{_since(125)}\n")
    fake_slurm.answers(
        QUEUE,
        "9|7|bob|Resources\n30_[1-5]|6|bob|Priority\n8|6|bob|JobHeldUser\n4|6|bob|Dependency\n"
        "11|5|alice|Priority\n12|5|alice|Priority\n13|5|bob|Priority\n14|1|bob|Priority\n",
    )
    place = find_place("12", fake_slurm.environ)
    assert place is not None
    assert (place.partition, place.before, place.hidden) == ("batch", 3, False)
    assert place.waited is not None
    assert 124 <= place.waited <= 130
    assert str(place) == (
        "3 jobs before it in the queue of partition batch; Slurm expects to start it at 2026-11-27 04:17:00"
    )
    assert len(fake_slurm.calls("scontrol")) == 0, "other users' jobs are there: nothing is hidden"


@pytest.mark.parametrize(("private", "before"), [("jobs,usage", None), ("none", 1), ("accounts", 1)])
def test_where_slurm_hides_other_users_jobs_it_says_so(private: str, before: int | None, fake_slurm: Any) -> None:
    fake_slurm.answers(OWN, "batch|5|N/A|alice|2026-11-27T03:36:41\n")
    fake_slurm.answers(QUEUE, "11|5|alice|Resources\n12|5|alice|Priority\n")
    fake_slurm.answers("scontrol", f"PluginDir               = /usr/lib\nPrivateData             = {private}\n")
    place = find_place("12", fake_slurm.environ)
    assert place is not None
    assert (place.before, place.hidden) == (before, before is None)
    assert str(place).endswith("; Slurm does not expect a start yet")
    assert place.short == ("place unknown" if before is None else f"{before} before it") + "; no start expected yet"
    assert ("hides other users' jobs (PrivateData)" in str(place)) == (before is None)


@pytest.mark.parametrize("answer", ["", "7|RUNNING|None|n1|0:01\n", "batch|x|N/A|alice|y\n"])
def test_a_job_that_does_not_wait_has_no_place(answer: str, fake_slurm: Any) -> None:
    fake_slurm.answers("squeue", answer)
    assert find_place("12", fake_slurm.environ) is None


def test_without_an_answer_there_is_no_place(fake_slurm: Any) -> None:
    fake_slurm.answers("squeue", err="slurm_load_jobs error: Unable to contact slurm controller\n", status=1)
    assert find_place("12", fake_slurm.environ) is None
    assert find_place("12", {"PATH": "/nowhere"}) is None


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "Priority: jobs with a higher priority go first"),
        ("preempted; JobHeldUser", "preempted; JobHeldUser: it is held; `scontrol release JOB` lets it go"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "ReqNodeNotAvail, UnavailableNodes:n1: a node that it needs is down, drained or reserved"),
        ("QOSMaxGRESPerUser", "QOSMaxGRESPerUser: a limit of its account or QOS is reached; it waits for other jobs of them to end"),
        ("AWordOfALaterSlurm", "AWordOfALaterSlurm"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_reason_is_said_in_words(reason: str, words: str) -> None:
    assert in_words(reason) == words


def test_a_place_without_the_number_of_jobs_says_that_it_is_unknown() -> None:
    assert str(QueuePlace(partition="p")) == "its place in the queue is unknown; Slurm does not expect a start yet"


@pytest.mark.parametrize(
    "reason",
    [
        *(
            "QOSMaxWallDurationPerJobLimit",
            "AssocMaxCpuPerJobLimit",
            "QOSMaxGRESPerNode",
            "MaxMemPerLimit",
            "QOSMinGRES",
        ),
        *("BadConstraints", "InvalidAccount", "InvalidQOS", "AccountNotAllowed", "QOSNotAllowed"),
        "DependencyNeverSatisfied",
    ],
)
def test_a_request_that_slurm_does_not_start_as_it_is(reason: str) -> None:
    """The end of other jobs does not help: part of the request is above a limit, or not allowed."""
    assert can_never_start(f"preempted; {reason}; 2 ranks, 0 joined a process group")
    assert "other jobs" not in in_words(reason)
    assert "cancel it" in in_words(reason)


@pytest.mark.parametrize(
    "reason", ["", "Resources", "Priority", "QOSMaxGRESPerUser", "AssocGrpCpuLimit", "Dependency", "JobHeldUser", "BeginTime"]
)  # fmt: skip
def test_a_job_with_another_reason_may_start(reason: str) -> None:
    assert not can_never_start(reason)
