"""The jobs of a time, from what the real sacct printed."""

from __future__ import annotations

import pytest

from hpcenv.cluster.accounting import jobs_since, parse
from hpcenv.errors import ToolFailed, ToolMissing


def test_jobs_with_their_gpus_partitions_and_folders(fake_slurm):
    fake_slurm.replays("sacct", "sacct-since")
    jobs = jobs_since(0.0, fake_slurm.environ)
    found = [(one.job_id, one.partition, one.state, one.gpus, one.folder.rpartition("/")[2]) for one in jobs]
    assert ("6", "batch", "failed", 2, "gone") in found
    assert ("7", "batch", "completed", 2, "a|b") in found
    assert ("8_1", "low", "completed", 1, "gone2") in found
    # Queued again: both starts count.
    assert [(one.state, one.seconds) for one in jobs if one.job_id == "9"][0] == ("requeued", 2.0)
    assert sum(one.job_id == "9" for one in jobs) == 2
    # No GPU in a cluster that accounts GPUs.
    assert next(one for one in jobs if one.job_id == "12").gpus == 0


def test_what_sacct_of_26_05_prints_is_the_same(fake_slurm):
    fake_slurm.replays("sacct", "sacct-since", "26.05")
    jobs = jobs_since(0.0, fake_slurm.environ)
    found = [(one.job_id, one.state, one.gpus, one.seconds) for one in jobs]
    assert found == [
        ("1", "failed", 2, 4.0), ("2", "completed", 2, 3.0), ("3_0", "completed", 1, 2.0), ("3_1", "completed", 1, 2.0),
        ("5", "requeued", 1, 1.0), ("6", "timeout", 1, 76.0), ("7", "cancelled", 1, 8.0), ("8", "completed", 0, 3.0),
        ("5", "completed", 1, 4.0),
    ]  # fmt: skip
    assert jobs[1].folder.endswith("/runs/a|b")


def test_a_job_that_started_before_is_left_out(fake_slurm):
    fake_slurm.replays("sacct", "sacct-since")
    assert jobs_since(4e9, fake_slurm.environ) == ()
    (call,) = fake_slurm.calls("sacct")
    assert "--starttime=2096-10-02T" in " ".join(call.argv)


def test_gpus_are_unknown_where_the_site_does_not_account_them():
    text = "1|batch|COMPLETED|2026-11-28T06:38:41|9|billing=1,cpu=1,node=1|/runs/a\n"
    assert [job.gpus for job in parse(text)] == [None]


@pytest.mark.parametrize("start", ["Unknown", "None", ""])
def test_a_job_that_never_started_is_left_out(start):
    assert parse(f"1|batch|CANCELLED by 7|{start}|0||/runs/a\n") == ()


def test_lines_that_sacct_does_not_print_are_left_out():
    assert parse("a banner of the site\n1|2|3\n") == ()


def test_no_answer_is_an_error(fake_slurm):
    fake_slurm.replays("sacct", "sacct-no-accounting")
    with pytest.raises(ToolFailed):
        jobs_since(0.0, fake_slurm.environ)
    with pytest.raises(ToolMissing):
        jobs_since(0.0, {"PATH": "/nosuch"})
