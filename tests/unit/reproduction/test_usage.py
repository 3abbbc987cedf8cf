"""What runs cost: from run folders, and from sacct where a folder is gone."""

from __future__ import annotations

import os
import time

import pytest

from hpcenv.records.files import write_text
from hpcenv.records.samples import GpuUse, Sample, samples_line
from hpcenv.reproduction.usage import read_usage
from hpcenv.reproduction.usage_text import usage_lines
from tests.run_folders import make_run, write

HOUR = 3600.0


@pytest.fixture
def parent(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def run_of(parent, name, job_id="7", *, began=1000.0, hours=1.0, status=0, gpus=4, samples=(), **manifest):
    """A run of two nodes that ended."""
    folder = make_run(parent, name, job_id, submitted=began, gpus_per_node=gpus, **manifest)
    write(folder.started, attempt=0, nodes=["n1", "n2"], job_id=job_id, node="n1", time=began)
    if status is not None:
        write(folder.finished, status=status, time=began + hours * HOUR)
    if samples:
        write_text("".join(map(samples_line, samples)), folder.samples_of(0, "n1"))
    return folder


def sample(at, *uses, seconds=1800.0, power=100.0, energy=None):
    gpus = (GpuUse(index=n, use=use, power=power, energy=energy) for n, use in enumerate(uses))
    return Sample(at=at, seconds=seconds, gpus=tuple(gpus))


def read(parent, fake_slurm, **words):
    return read_usage(parent.parent, environ=fake_slurm.environ, runs="runs", **{"since": 0.0, **words})


def sacct(fake_slurm, *lines):
    """Lines as the real sacct prints them: tests/fakes/outputs/24.11/sacct-since.out."""
    fake_slurm.answers("sacct", "".join(f"{line}\n" for line in lines))


def test_used_idle_and_unknown_hours_are_those_asked(parent, fake_slurm):
    run_of(parent, "a", samples=[sample(1800.0, 100.0, 0.0), sample(3600.0, 50.0, None)])
    (row,) = read(parent, fake_slurm).rows
    assert (row.asked, row.used, row.idle) == (8.0, 0.75, 0.75)
    assert row.unknown == 6.5


def test_without_samples_use_and_energy_are_unknown_not_zero(parent, fake_slurm):
    run_of(parent, "a")
    (row,) = read(parent, fake_slurm).rows
    assert (row.asked, row.unknown) == (8.0, 8.0)
    assert (row.used, row.idle, row.energy, row.energy_hours) == (None, None, None, None)


def test_energy_is_from_the_counter_and_else_from_the_power(parent, fake_slurm):
    looks = [sample(1.0, 1.0, energy=5000.0, seconds=10.0), sample(2.0, 1.0, energy=5700.0, seconds=10.0)]
    # The driver was loaded again: the counter begins at 0.
    run_of(parent, "a", samples=[*looks, sample(3.0, 1.0, energy=3.0, seconds=10.0)])
    run_of(parent, "b", samples=[sample(1.0, 1.0, power=None)])
    found = {row.name: row for row in read(parent, fake_slurm).rows}
    assert found["a"].energy == pytest.approx(1000.0 + 700.0 + 1000.0)
    assert found["a"].energy_hours == pytest.approx(30 / 3600)
    assert found["b"].energy is None


def test_a_failed_run_lost_the_hours_after_its_last_checkpoint(parent, fake_slurm):
    folder = run_of(parent, "a", status=1)
    folder.checkpoints.mkdir()
    (folder.checkpoints / "step-00000010.pt").touch()
    os.utime(folder.checkpoints / "step-00000010.pt", (1000 + 2700, 1000 + 2700))
    run_of(parent, "b", status=1)
    run_of(parent, "c")
    found = {row.name: row for row in read(parent, fake_slurm).rows}
    assert (found["a"].failed, found["a"].lost) == (1, 2.0)
    assert (found["b"].failed, found["b"].lost, found["b"].without_checkpoint) == (1, None, 1)
    assert (found["c"].failed, found["c"].lost) == (0, None)


def test_the_end_that_is_not_recorded_is_from_sacct(parent, fake_slurm):
    began = time.mktime((2026, 11, 28, 6, 38, 41, 0, 0, -1))
    folder = run_of(parent, "a", "9", began=began + 3, status=None)
    run_of(parent, "b", "10", began=began, status=None)
    sacct(fake_slurm, f"9|gpu|NODE_FAIL|2026-11-28T06:38:41|3603|gres/gpu=8,node=2|{folder.path}")
    found = {row.name: row for row in read(parent, fake_slurm).rows}
    assert (found["a"].asked, found["a"].failed) == (8.0, 1)
    assert (found["b"].asked, found["b"].without_hours) == (None, 1)


def test_a_run_whose_folder_is_gone(parent, fake_slurm):
    sacct(
        fake_slurm,
        f"6|gpu|REQUEUED|2026-11-28T06:38:41|3600|billing=1,cpu=1,gres/gpu=2,node=1|{parent}/gone",
        f"6|gpu|FAILED|2026-11-28T08:38:41|1800|billing=1,cpu=1,gres/gpu=2,node=1|{parent}/gone",
        "8|gpu|COMPLETED|2026-11-28T06:38:41|1800|billing=1,cpu=1,gres/gpu=2,node=1|/elsewhere/runs/x",
    )
    usage = read(parent, fake_slurm)
    (row,) = usage.rows
    assert (row.name, row.asked, row.unknown, row.used, row.gone, row.failed) == ("gone (job 6)", 3.0, 3.0, None, 1, 1)
    assert "1 job without a run folder: sacct says the hours asked, the rest is" in "\n".join(usage_lines(usage))


def test_rows_by_lockfile_and_partition_with_a_row_for_unknown(parent, fake_slurm):
    run_of(parent, "a", "7", fingerprint="hpc2-111111111111")
    run_of(parent, "b", "8", fingerprint="hpc2-111111111111")
    write_text("#!/bin/bash\n#SBATCH --partition=big\n", parent / "b" / "job.sbatch")
    run_of(parent, "c", "9")
    sacct(fake_slurm, f"7|small|COMPLETED|2026-11-28T06:38:41|9|gres/gpu=8,node=2|{parent}/a")
    by = {row.name: row.runs for row in read(parent, fake_slurm, by="lockfile").rows}
    assert by == {"hpc2-111111111111": 2, "unknown": 1}
    by = {row.name: row.asked for row in read(parent, fake_slurm, by="partition").rows}
    assert by == {"small": 8.0, "big": 8.0, "unknown": 8.0}


def test_an_attempt_before_the_time_does_not_count(parent, fake_slurm):
    run_of(parent, "a", began=1000.0)
    assert read(parent, fake_slurm, since=2000.0).rows == ()


def test_without_an_answer_of_sacct_the_page_says_what_is_missing(parent, fake_slurm):
    run_of(parent, "a")
    fake_slurm.replays("sacct", "sacct-no-accounting")
    usage = read(parent, fake_slurm)
    assert usage.total.asked == 8.0
    assert "Runs whose folder is gone are missing" in "\n".join(usage_lines(usage))


def test_the_page_fits_80_columns_and_names_no_energy_but_the_gpus(parent, fake_slurm):
    for number in range(30):
        run_of(parent, f"a-very-long-name-of-a-run-{number:02}", str(number), hours=1234.5, samples=[sample(1.0, 50.0)])
    lines = "\n".join(usage_lines(read(parent, fake_slurm))).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("energy of the GPUs only" in line for line in lines)
    assert "10 more rows are in `all`; --json has them." in lines


def test_300_runs_are_read_in_seconds(parent, fake_slurm):
    looks = [sample(1000.0 + 10 * n, *[50.0] * 4, seconds=10.0) for n in range(60)]
    for number in range(300):
        run_of(parent, f"run-{number:03}", str(number), samples=looks)
    began = time.process_time()
    usage = read(parent, fake_slurm)
    took = time.process_time() - began
    assert len(usage.rows) == 300
    assert usage.total.used == pytest.approx(300 * 4 * 600 * 0.5 / 3600)
    assert took < 6.0, "1 s on a machine without other work"
