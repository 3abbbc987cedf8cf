"""What TensorBoard shows of runs: the event files of their scripts, else the metrics that hpcenv recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcenv.records import event_file
from hpcenv.records.code_listing import Listing
from hpcenv.records.files import save_record
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction import tensorboard
from hpcenv.sessions.training_curves import Curves, folders_with_events

START = {"kind": "start", "schema": 1, "restart": 0, "pid": 1, "time": 1763877600.5, "world_size": 1}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "runs" / "first")
    found.source.mkdir(parents=True)
    found.manifest.write_text("{}")
    (tmp_path / "curves").mkdir()
    return found


def record(run: RunFolder, *lines: dict[str, object], attempt: int = 0) -> None:
    path = run.metrics_of(attempt, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def loss(step: int, value: float, **more: object) -> dict[str, object]:
    of_loss = {"kind": "loss", "step": step, "index": 0, "name": "loss", "value": value.hex(), "dtype": "float32"}
    return {**of_loss, "used": True, **more}


def shown(folder: Path) -> list[tuple[str, int, float]]:
    (path,) = folder.glob("events.out.tfevents.*")
    read = tensorboard.read_events(path)
    assert read.problem == ""
    return [(one.tag, one.step, one.value) for one in read.scalars]


def test_a_scalar_is_read_as_it_was_written(tmp_path: Path) -> None:
    values = [("loss", 1, 0.5), ("größe", 300, -2.0), ("x", 0, float("inf")), ("huge", 7, 1e300)]
    frames = [event_file.scalar_frame(tag, step, value, 12.5) for tag, step, value in values]
    (tmp_path / "events").write_bytes(event_file.first_frame(12.5) + b"".join(frames))
    read = tensorboard.read_events(tmp_path / "events")
    expected = [*values[:3], ("huge", 7, float("inf"))]
    assert [(one.tag, one.step, one.value) for one in read.scalars] == expected
    assert read.problem == ""


def test_records_of_a_run_that_trains_become_an_event_file_that_grows(run: RunFolder, tmp_path: Path) -> None:
    curves = Curves(tmp_path / "curves", [run.path])
    curves.look()
    assert list((tmp_path / "curves").iterdir()) == []
    record(run, START, loss(1, 2.0), loss(1, 3.0, index=1), loss(2, 9.0, used=False, index=-1))
    curves.look()
    place = tmp_path / "curves" / "first" / "hpcenv"
    assert shown(place) == [("loss", 1, 2.0), ("loss[1]", 1, 3.0)]
    record(run, {"kind": "metric", "step": 2, "name": "acc", "value": "0x1.8p-1", "dtype": "float64"})
    curves.look()
    curves.look()
    assert shown(place) == [("loss", 1, 2.0), ("loss[1]", 1, 3.0), ("acc", 2, 0.75)]


def test_what_the_script_wrote_is_shown_instead_of_the_records(run: RunFolder, tmp_path: Path) -> None:
    curves = Curves(tmp_path / "curves", [run.path])
    record(run, START, loss(1, 2.0))
    curves.look()
    (run.source / "logs" / "a").mkdir(parents=True)
    (run.source / "logs" / "a" / "events.out.tfevents.1.host").write_bytes(b"")
    (run.checkpoints / "tb").mkdir(parents=True)
    (run.checkpoints / "tb" / "events.out.tfevents.2.host").write_bytes(b"")
    curves.look()
    place = tmp_path / "curves" / "first"
    assert {path.name: path.resolve() for path in place.iterdir()} == {
        "source-logs-a": run.source / "logs" / "a",
        "checkpoints-tb": run.checkpoints / "tb",
    }


def test_event_files_that_the_project_brought_are_not_of_the_run(run: RunFolder) -> None:
    (run.source / "old").mkdir()
    (run.source / "old" / "events.out.tfevents.1.host").write_bytes(b"")
    save_record(Listing(schema=1, files={"source/old/events.out.tfevents.1.host": "0" * 64}), run.listing)
    assert folders_with_events(run) == []
    (run.source / "old" / "events.out.tfevents.2.host").write_bytes(b"")
    assert folders_with_events(run) == ["source/old"]


def test_links_of_a_script_lead_nowhere(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "events.out.tfevents.1.host").write_bytes(b"")
    (run.source / "link").symlink_to(tmp_path / "secret")
    assert folders_with_events(run) == []


def test_a_folder_that_is_no_run_is_shown_as_it_is(run: RunFolder, tmp_path: Path) -> None:
    run.manifest.unlink()
    Curves(tmp_path / "curves", [run.path]).look()
    assert (tmp_path / "curves" / "first").resolve() == run.path
