"""The watch over the samples of all nodes: a slow rank is named while the run goes on, and a run without use ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from use_runs import BEGAN, run, thinned

from hpcenv.judge.idle import use_of
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.hangs import read_found, requests_of, why_to_end
from hpcenv.records.manifest import Manifest, WatchOptions
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.samples import GpuUse, NodeSamples, NodeUse, RankUse, Sample, samples_line
from hpcenv.watch.run_use import RunWatch
from hpcenv.watch.watched_node import WatchedNode

IDLE = {"gpu": lambda *_: {"use": 0.0}, "node": lambda *_: {"cpu": 0.02}}


class Watched:
    """A run of two nodes whose samples come as time goes on."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self._manifest, self.folder = manifest, RunFolder(folder)
        self.said: list[tuple[float, str]] = []

    def over(self, nodes: tuple[NodeSamples, ...], *, minutes: float, names: int = 2, **options: Any) -> list[str]:
        """Return what is said in so many minutes."""
        this_node = ThisNode(node="n1", nodes=("n1", "n2")[:names], attempt=0, job_id="7")
        self.options = WatchOptions(sample=10, **options)
        node = WatchedNode(manifest=self._manifest, this_node=this_node, launch=1, options=self.options)
        at = BEGAN
        watch = RunWatch(node, begin=at, say=lambda line: self.said.append(((at - BEGAN) / 60, line)))
        rest = {one.node: list(one.samples) for one in nodes}
        for at in range(int(BEGAN), int(BEGAN + minutes * 60), 5):
            for name, samples in rest.items():
                path = self.folder.samples_of(0, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    while samples and samples[0].at <= at:
                        file.write(samples_line(samples.pop(0)))
            watch.attend(at)
        return [line for _, line in self.said]


@pytest.fixture
def watched(make_manifest: Callable[..., Manifest], tmp_path: Path) -> Watched:
    return Watched(make_manifest(run_folder=str(tmp_path)), tmp_path)


# -- slow ranks -----------------------------------------------------------------------------


def test_a_slow_rank_is_named_once_with_what_explains_it(watched: Watched) -> None:
    def slow(_n: str, at: float, rank: int) -> dict[str, Any]:
        return {"step_seconds": 0.8} if rank == 3 and at > 600 else {}

    hot = {"slow": ("hw-slowdown", "hw-thermal")}
    nodes = run(
        nodes=2, gpus=2, minutes=40, rank=slow, gpu=lambda n, at, i: hot if (n, i) == ("n2", 1) and at > 600 else {}
    )
    (line,) = watched.over(nodes, minutes=40)
    ((minute, _),) = watched.said
    assert line == (
        "hpcenv: note: rank 3 is 1.6 times slower than the median; its GPU reports a hardware slowdown for heat"
    )
    assert 10 < minute < 20


def test_two_notes_have_ten_minutes_between_them(watched: Watched) -> None:
    def slow(_n: str, _at: float, rank: int) -> dict[str, Any]:
        return {"step_seconds": 0.8} if rank == 3 else {"wait_seconds": 0.3} if rank == 1 else {}

    lines = watched.over(run(nodes=2, gpus=2, minutes=40, rank=slow), minutes=40)
    assert [line.partition(": note: ")[2][:6] for line in lines] == ["rank 3", "rank 1"]
    (first, _), (second, _) = watched.said
    assert second - first >= 10


def test_a_gpu_that_is_slowed_down_is_named_where_all_ranks_have_the_same_time_of_a_step(watched: Watched) -> None:
    nodes = run(
        nodes=2, gpus=2, minutes=30, gpu=lambda n, _at, i: {"slow": ("hw-thermal",)} if (n, i) == ("n2", 1) else {}
    )
    assert watched.over(nodes, minutes=30) == ["hpcenv: note: 1 of 2 GPUs of n2 reports a hardware slowdown for heat"]


def test_healthy_ranks_are_not_named(watched: Watched) -> None:
    assert watched.over(run(nodes=2, gpus=2, minutes=30), minutes=30) == []


# -- a run without use ----------------------------------------------------------------------


def test_a_run_in_which_nothing_is_in_use_ends(watched: Watched) -> None:
    def until(used: dict[str, Any]) -> Callable[..., dict[str, Any]]:
        return lambda _n, at, _i: used if at > 600 else {}

    nodes = run(nodes=2, gpus=2, minutes=60, gpu=until({"use": 0.0}), node=until({"cpu": 0.02}))
    (line,) = watched.over(nodes, minutes=60, idle_end=1800)
    assert line == "hpcenv: idle: no GPU and no CPU was in use for 30 min (--idle-end): the run is ended"
    folder = requests_of(watched.folder, 0)
    assert [found.kind for found in read_found(folder)] == ["idle"]
    assert why_to_end(folder, watched.options) == "idle"
    assert why_to_end(folder, WatchOptions()) == ""


IN_USE = {
    "one GPU": {**IDLE, "gpu": lambda n, _at, i: {"use": 5.0 if (n, i) == ("n2", 1) else 0.0}},
    "CPUs of one node": {**IDLE, "node": lambda n, *_: {"cpu": 0.4 if n == "n1" else 0.0}},
    "once in ten minutes": {**IDLE, "gpu": lambda _n, at, _i: {"use": 50.0 if at % 600 == 0 else 0.0}},
    "an open connection": {**IDLE, "node": lambda *_: {"cpu": 0.0, "connections": 1.0}},
    "a save": {**IDLE, "rank": lambda _n, _at, r: {"saving": r == 0}},
}


@pytest.mark.parametrize("curves", IN_USE.values(), ids=IN_USE)
def test_a_run_in_which_anything_is_in_use_goes_on(watched: Watched, curves: dict[str, Any]) -> None:
    assert watched.over(run(nodes=2, gpus=2, minutes=40, **curves), minutes=40, idle_end=900) == []


def test_a_run_of_whose_use_something_is_unknown_goes_on_and_says_so(watched: Watched) -> None:
    unknown = {**IDLE, "gpu": lambda n, *_: {"use": None if n == "n2" else 0.0}}
    lines = watched.over(run(nodes=2, gpus=2, minutes=40, **unknown), minutes=40, idle_end=900)
    assert lines == ["hpcenv: note: --idle-end cannot act: unknown use of a GPU on node n2"]


@pytest.mark.parametrize("silent", [1, 2])
def test_a_node_that_says_nothing_may_do_something(watched: Watched, silent: int) -> None:
    nodes = run(nodes=2, gpus=2, minutes=40, **IDLE)
    late = nodes[0], replace(nodes[1], samples=nodes[1].samples[:60] if silent == 1 else ())
    assert watched.over(late, minutes=40, idle_end=900) == []


def test_the_option_is_off_by_default(watched: Watched) -> None:
    assert (
        watched.over(run(nodes=2, gpus=2, minutes=60, rank=lambda *_: {"step_seconds": None}, **IDLE), minutes=60) == []
    )


def test_of_a_minute_the_highest_values_count() -> None:
    (node,) = thinned(run(gpus=0, ranks=0, minutes=1, **IDLE), cpu=3.0)
    assert use_of(node.samples[0]) == "the CPUs"
    assert use_of(replace(node.samples[0], most=None)) == ""
    assert use_of(Sample(at=1, seconds=1, ranks=(RankUse(rank=0, pid=1, saving=True),))) == "a rank saves"
    assert use_of(Sample(at=1, seconds=1, gpus=(GpuUse(index=0),), node=NodeUse(cpu=0.0))) == "unknown use of a GPU"
