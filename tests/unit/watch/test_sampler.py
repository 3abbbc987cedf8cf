"""The file of a node's samples: what several samples have in common, its bounds, and a disk that is full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcenv.machine.this_node import ThisNode
from hpcenv.records import samples
from hpcenv.records.codec import decode_record
from hpcenv.records.files import save_record
from hpcenv.records.manifest import Manifest, WatchOptions
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.samples import GpuUse, NodeUse, RankUse, Sample
from hpcenv.records.session import NodeFolder, SessionNode, SessionOptions
from hpcenv.watch.sampler import Sampler, together
from hpcenv.watch.watched_node import WatchedNode


def sample(at: float, use: float | None, step: int) -> Sample:
    gpus = (GpuUse(index=2, use=use, energy=at * 100, slow=("hw-thermal",) if use == 10 else ()),)
    return Sample(at=at, seconds=10, gpus=gpus, node=NodeUse(cpu=use), ranks=(RankUse(rank=3, pid=9, step=step),))


def test_the_samples_of_a_minute_are_one_with_mean_least_and_most() -> None:
    found = together([sample(10, 10.0, 1), sample(20, 50.0, 2), sample(30, None, 3)])
    assert (found.at, found.seconds) == (30, 30)
    assert found.least is not None and found.most is not None
    assert (found.gpus[0].use, found.least.gpus[0].use, found.most.gpus[0].use) == (30.0, 10.0, 50.0)
    assert (found.node.cpu, found.gpus[0].energy, found.ranks[0].step) == (30.0, 3000, 3), "counters: the last one"
    assert together([sample(10, 1.0, 1)]) == sample(10, 1.0, 1)


def test_a_line_holds_what_is_known_and_reads_back() -> None:
    line = samples.samples_line(sample(10, None, 7))
    assert line == (
        '{"at": 10, "gpus": [{"energy": 1000, "index": 2}], "ranks": [{"pid": 9, "rank": 3, "step": 7}], "seconds": 10}\n'
    )
    assert decode_record(Sample, line, origin="x") == sample(10, None, 7)
    assert '"cpu": 0.3333,' in samples.samples_line(Sample(at=1.0, seconds=1.0, node=NodeUse(cpu=1 / 3, cpus=2)))


def test_a_line_that_is_cut_is_left_out_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "n1.jsonl"
    whole = samples.samples_line(sample(10, 1.0, 1))
    path.write_text(whole + whole[:30])
    found = samples.read_samples(path, node="n1", attempt=0)
    assert (len(found.samples), found.problem) == (1, "")
    path.write_text("nonsense\n" + whole)
    found = samples.read_samples(path, node="n1", attempt=0)
    assert len(found.samples) == 1 and "is not JSON" in found.problem
    assert "No such file" in samples.read_samples(tmp_path / "absent", node="n2", attempt=0).problem


@pytest.fixture
def made(make_manifest: Callable[..., Manifest], tmp_path: Path) -> Sampler:
    manifest = make_manifest(run_folder=str(tmp_path))
    this_node = ThisNode(node="n1", nodes=("n1",), attempt=2, job_id="77")
    (tmp_path / "prom").mkdir()
    options = WatchOptions(sample=10, prometheus=str(tmp_path / "prom"))
    node = WatchedNode(manifest=manifest, this_node=this_node, launch=1, options=options)
    return Sampler(node, begin=1000.0)


def test_a_sample_is_taken_when_it_is_time_and_after_hours_a_minute_is_one_record(
    made: Sampler, tmp_path: Path
) -> None:
    for second in range(1001, 1031):
        made.attend(second)
    path = RunFolder(tmp_path).samples_of(2, "n1")
    found = samples.read_samples(path, node="n1", attempt=2).samples
    assert [(one.at, one.seconds) for one in found] == [(1010, 10), (1020, 10), (1030, 10)]
    later = 1000 + 7 * 3600
    made.attend(later)
    for second in range(later, later + 125, 10):
        made.attend(second)
    (published,) = (tmp_path / "prom").iterdir()
    assert published.name == "hpcenv-77-n1.prom"
    assert f'run="{tmp_path.name}"' in published.read_text()
    made.finish(later + 125)
    assert not published.exists()
    found = samples.read_samples(path, node="n1", attempt=2).samples[3:]
    assert [one.seconds for one in found[1:]] == [60, 60]
    assert all(one.least and one.most for one in found[1:])


def test_a_sample_of_a_session_has_its_open_connections(make_manifest: Callable[..., Manifest], tmp_path: Path) -> None:
    session = SessionOptions(name="lab", folder=str(tmp_path / "lab"))
    for manifest, found in ((make_manifest(run_folder=str(tmp_path), session=session), 0.0), (make_manifest(), None)):
        this_node = ThisNode(node="n1", nodes=("n1",), attempt=0, job_id="77")
        node = WatchedNode(manifest=manifest, this_node=this_node, launch=1, options=WatchOptions(sample=10))
        assert Sampler(node, begin=0.0)._connections() == found  # noqa: SLF001
    folder = NodeFolder(tmp_path / "node")
    folder.open.mkdir(parents=True)
    for name in "ab":
        (folder.open / name).touch()
    run = RunFolder(tmp_path)
    save_record(SessionNode(schema=1, run="x", node="n1", attempt=0, folder=str(folder.path)), run.session_of("n1"))
    manifest = make_manifest(run_folder=str(tmp_path), session=session)
    node = WatchedNode(manifest=manifest, this_node=this_node, launch=1, options=WatchOptions(sample=10))
    Sampler(node, begin=0.0).attend(10.0)
    (taken,) = samples.read_samples(run.samples_of(0, "n1"), node="n1", attempt=0).samples
    assert taken.node.connections == 2.0


def test_a_file_that_is_full_says_so_in_its_last_line(
    made: Sampler, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made.attend(1010)
    path = RunFolder(tmp_path).samples_of(2, "n1")
    monkeypatch.setattr("hpcenv.watch.sampler._MOST_BYTES", int(13 * path.stat().st_size))
    for second in range(1020, 1260, 10):
        made.attend(second)
    found = samples.read_samples(path, node="n1", attempt=2)
    assert [one.seconds for one in found.samples] == [10, 10, 10, 10, 60, 60], "a quarter is full before 6 hours"
    assert found.problem.startswith("samples end at hour 0: the file has reached its limit of ")
    assert capsys.readouterr().err == f"hpcenv: node n1: {found.problem}\n"


def test_what_cannot_be_written_is_said_once_and_the_rest_goes_on(
    made: Sampler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "samples").write_text("not a folder")
    made.attend(1010)
    made.attend(1020)
    assert capsys.readouterr().err.count("hpcenv: node n1: no more samples: ") == 1
