"""Pictures of what a run used, from made-up samples of 1 to 512 GPUs."""

from __future__ import annotations

import math
import random
import re
import xml.etree.ElementTree as ET

import pytest

from hpcenv.records.files import write_text
from hpcenv.records.samples import GpuUse, NodeSamples, RankUse, Sample, read_attempt, samples_line
from hpcenv.reproduction.attempt_record import AttemptRecord
from hpcenv.reproduction.measured import Measured
from hpcenv.reproduction.series import Series
from hpcenv.reproduction.use_over_time import COLUMNS, Track, make_use, read_use
from hpcenv.reproduction.use_pictures import _rows, pictures
from tests.run_folders import make_run

SECONDS = 3600.0


def made_up(gpus, *, step=60.0, seconds=SECONDS):
    """Samples of nodes with 8 GPUs: one GPU idles after half of the time, one rank is slow, the first minutes compile."""
    random.seed(1)
    for node in range(math.ceil(gpus / 8)):
        samples = []
        for number in range(1, int(seconds / step) + 1):
            at = number * step
            looks, ranks = [], []
            for index in range(min(8, gpus - 8 * node)):
                rank = 8 * node + index
                idle = (rank == 1 and at > seconds / 2) or at < seconds / 12
                use = 0.0 if idle else min(100.0, random.gauss(88, 6))
                looks.append(GpuUse(index=index, use=use, memory=(40 + 20 * at / seconds) * 1e9, memory_total=80e9))
                time = 0.5 * (1.6 if rank == 17 else 1.0) * random.gauss(1, 0.05)
                known = at > seconds / 12
                ranks.append(
                    RankUse(
                        rank=rank,
                        pid=1,
                        step=int(at * 2),
                        step_seconds=time if known else None,
                        wait_seconds=time * 0.3,
                    )
                )
            samples.append(Sample(at=1000.0 + at, seconds=step, gpus=tuple(looks), ranks=tuple(ranks)))
        yield NodeSamples(node=f"n{node:02}", attempt=0, samples=tuple(samples))


def measured():
    steps = tuple(range(0, int(SECONDS * 2), 20))
    loss = tuple(8 / (1 + step / 500) for step in steps)
    return Measured(
        series=(Series(name="loss", source="backward", file="", dtype="float32", steps=steps, values=loss, rank=0),)
    )


def page_of(gpus):
    use = make_use(made_up(gpus), measured(), begin=1000.0, end=1000.0 + SECONDS)
    return "".join(pictures(use))


@pytest.mark.parametrize("gpus", [1, 2, 32, 64, 512])
def test_the_pictures_are_svg_that_loads_nothing_and_are_small(gpus):
    page = page_of(gpus)
    for svg in re.findall("<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(svg)
    assert not re.search(r"https?:|url\(|<script|<image|href", page)
    assert len(page) < 1_000_000
    assert all(f"<strong>{title}</strong>" in page for title in ("GPU use, percent", "Time of a step, seconds", "loss"))


def test_up_to_32_gpus_have_a_small_picture_each_and_more_have_a_row():
    assert page_of(32).count('preserveAspectRatio="none"') == 32
    page = page_of(64)
    assert 'preserveAspectRatio="none"' not in page
    assert "first row: n00 GPU 0;" in page
    assert "first row: rank 0;" in page
    assert "first row: rank 0 to rank 7;" in page_of(512)


def test_a_row_of_many_ranks_shows_the_worst_of_them():
    tracks = [Track(name=f"rank {n}", values=(9.0 if n == 17 else 1.0, None)) for n in range(512)]
    rows = _rows(tracks, max)
    assert len(rows) == 64
    assert [row.name for row in rows if row.values[0] == 9.0] == ["rank 16 to rank 23"]
    assert {row.values[1] for row in rows} == {None}


def test_the_band_reaches_from_the_least_to_the_most():
    page = page_of(64)
    # The GPU that idles is in the area: least is 0.
    assert re.search(r"GPU use, percent over 60.0 min: median [0-9.]+, from 0 to", page)


def test_columns_without_samples_are_unknown_not_zero():
    gpu = GpuUse(index=0, use=50.0)
    parts = [Sample(at=20.0, seconds=10.0, gpus=(gpu,)), Sample(at=100.0, seconds=10.0, gpus=(gpu,))]
    use = make_use([NodeSamples(node="n1", attempt=0, samples=tuple(parts))], Measured(), begin=0.0, end=120.0)
    (track,) = use.use
    assert track.values[15] == 50.0
    assert track.values[50] is None
    assert track.values[95] == 50.0
    assert len(track.values) == COLUMNS
    assert "".join(pictures(use)).count('class="median"') == 2


def test_a_minute_fills_its_columns_and_unknown_values_are_left_out():
    gpus = (GpuUse(index=0, use=10.0), GpuUse(index=1))
    sample = Sample(at=60.0, seconds=60.0, gpus=gpus)
    use = make_use([NodeSamples(node="n1", attempt=0, samples=(sample,))], Measured(), begin=0.0, end=120.0)
    assert [one.values[:3] for one in use.use] == [(10.0,) * 3, (None,) * 3]
    assert "n1 GPU 1: unknown" in "".join(pictures(use))


def test_without_samples_there_is_no_picture():
    assert make_use([], measured(), begin=0.0, end=1.0) is None


def test_a_hostile_name_of_a_node_is_text():
    sample = Sample(at=1.0, seconds=1.0, gpus=(GpuUse(index=0, use=1.0),))
    use = make_use([NodeSamples(node='<b>"', attempt=0, samples=(sample,))], Measured(), begin=0.0, end=1.0)
    page = "".join(pictures(use))
    assert "<b>" not in page
    assert "&lt;b&gt;&quot; GPU 0" in page


def test_samples_of_a_run_folder_of_an_attempt_that_has_not_ended(tmp_path):
    folder = make_run(tmp_path, "a")
    (node,) = made_up(2)
    write_text("".join(map(samples_line, node.samples)), folder.samples_of(0, "n1"))
    attempt = AttemptRecord(
        attempt=0, job_id="7", began=1000.0, ended=None, nodes=("n1",), verdict="", status=None, outcome="", exits=()
    )
    use = read_use(folder, (attempt,), measured())
    assert [track.name for track in use.use] == ["n1 GPU 0", "n1 GPU 1"]
    assert len(list(read_attempt(folder, 0))) == 1
