"""The record of a node whose ranks are tasks of srun."""

import dataclasses
import subprocess
import sys
import textwrap

from hpcenv.judge.first_failure import first_failure
from hpcenv.launch import node_exit
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.files import load_record
from hpcenv.records.outcome import NodeExit, RankExit
from hpcenv.records.run_folder import RunFolder

N1 = ThisNode(node="n1", nodes=("n1", "n2"), attempt=0, job_id="7")


def task(rank, *, status=0, ended=100.0, asked_at=None, **changes):
    """The record of one task; `asked_at` is when srun asked it to end."""
    failed = RankExit(rank=rank, local_rank=rank, pid=9, status=status, ended=ended, message=f"rank {rank}: no")
    base = NodeExit(
        schema=1, run="r1", node="n1", attempt=0, status=status, signal="", started=90.0, ended=ended + 0.5,
        ranks=() if status == 0 else (failed,), oom_kills=0, launcher="srun",
        asked_to_end="" if asked_at is None else "SIGTERM", asked_at=asked_at,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_the_task_that_failed_by_itself_decides_whatever_the_order_of_the_records():
    tasks = [task(0, status=143, ended=101.0, asked_at=100.8), task(1, status=3, ended=100.2)]
    for records in (tasks, tasks[::-1]):
        merged = node_exit.merge(records)
        assert (merged.status, merged.asked_to_end, merged.tasks) == (3, "", 2)
        assert [rank.rank for rank in merged.ranks] == [1, 0]
        failure = first_failure([merged], nodes=("n1",), nproc=2)
        assert (failure.rank, failure.status, failure.others) == (1, 3, 1)


def test_each_task_that_failed_by_itself_is_there_once():
    tasks = [task(0, status=1, ended=101.0), task(1, status=1, ended=100.0), task(2, status=143, asked_at=100.5)]
    merged = node_exit.merge(tasks)
    assert [rank.rank for rank in merged.ranks] == [1, 0, 2]
    assert first_failure([merged], nodes=("n1",), nproc=3).others == 2


def test_tasks_that_all_end_well_or_were_all_asked_to_end():
    assert node_exit.merge([task(0), task(1, ended=105.0)]).ended == 105.5
    assert node_exit.merge([task(0), task(1)]).status == 0
    asked = node_exit.merge([task(0, status=143, asked_at=99.0), task(1, status=143, asked_at=99.0)])
    assert (asked.status, asked.asked_to_end) == (143, "SIGTERM")
    assert node_exit.merge([task(0), task(1, refused=True, status=90, detail="other libraries")]).detail


def test_a_task_that_refused_to_start_decides_also_where_another_one_failed_before():
    refused = task(1, status=90, ended=100.5, ranks=(), refused=True, detail="other libraries")
    merged = node_exit.merge([task(0, status=1, ended=100.0), refused])
    assert (merged.status, merged.refused, merged.detail) == (90, True, "other libraries")


def test_a_task_without_a_record_is_no_node_that_ended(tmp_path):
    one = node_exit.merge([task(0, status=143, asked_at=99.0)])
    failure = first_failure([one], nodes=("n1",), nproc=2)
    assert (failure.cause, failure.node) == ("no-record", "n1")
    assert first_failure([node_exit.merge([task(0), task(1)])], nodes=("n1",), nproc=2) is None


def test_tasks_that_end_at_the_same_time_all_count(tmp_path):
    run, count = RunFolder(tmp_path), 6
    code = textwrap.dedent(
        """
        import sys
        from tests.unit.launch.test_node_exit import N1, RunFolder, node_exit, task
        from pathlib import Path
        rank = int(sys.argv[1])
        node_exit.write(task(rank, status=rank), RunFolder(Path(sys.argv[2])), N1, rank, count=6)
        """
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(rank), str(tmp_path)]) for rank in range(count)]
    assert [child.wait() for child in children] == [0] * count
    merged = load_record(NodeExit, run.exit_of("n1"))
    assert merged.tasks == count
    assert {rank.rank for rank in merged.ranks} == {1, 2, 3, 4, 5}


def test_records_of_an_earlier_attempt_do_not_count(tmp_path):
    run = RunFolder(tmp_path)
    assert not node_exit.write(task(0), run, N1, 0, count=2)
    again = dataclasses.replace(N1, attempt=1)
    assert not node_exit.write(task(1, attempt=1), run, again, 1, count=2)
    assert load_record(NodeExit, run.exit_of("n1")).tasks == 1
