"""Metrics that a training writes itself. The event file was written by tensorboard 2.21."""

from __future__ import annotations

import math
import os
import shutil
import struct
from pathlib import Path

import pytest

from hpcenv.records import event_file
from hpcenv.records.code_listing import Listing
from hpcenv.records.files import save_record
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction import tensorboard
from hpcenv.reproduction.metric_files import read_metric_files
from hpcenv.reproduction.metric_tables import read_csv, read_jsonl

EVENTS = Path(__file__).parents[2] / "metric_files" / "events.out.tfevents.1795414014.node.1.0"


def float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def test_scalars_of_tensorboard_are_read_to_the_last_bit():
    found = tensorboard.read_events(EVENTS)
    assert found.problem == ""
    losses = {one.step: one for one in found.scalars if one.tag == "loss"}
    assert [losses[step].value for step in range(1, 13)] == [float32(1 / step / 3) for step in range(1, 13)]
    assert math.isnan(losses[13].value) and losses[1].dtype == "float32"
    doubles = {one.step: one.value for one in found.scalars if one.tag == "exact"}
    assert doubles == {step: 1 / step / 3 for step in range(1, 13)}


def test_every_cut_of_an_event_file_is_said(tmp_path):
    content, path = EVENTS.read_bytes(), tmp_path / "cut"
    counts = set()
    for end in range(0, len(content), 7):
        path.write_bytes(content[:end])
        found = tensorboard.read_events(path)
        counts.add(len(found.scalars))
        assert found.problem == "" or "is cut" in found.problem
    assert counts == set(range(25))


@pytest.mark.parametrize("place", [0, 9, 14, 300, 500])
def test_a_changed_byte_is_found(place, tmp_path):
    content = bytearray(EVENTS.read_bytes())
    content[place] ^= 0x10
    (tmp_path / "changed").write_bytes(content)
    assert "is damaged" in tensorboard.read_events(tmp_path / "changed").problem


def frame(event: bytes) -> bytes:
    head = struct.pack("<Q", len(event))
    return b"".join(part + struct.pack("<I", event_file.masked_crc(part)) for part in (head, event))


@pytest.mark.parametrize(
    "event",
    [b"\x2a\xff\xff\xff\xff\x0f", b"\xff" * 40, b"\x0b", b"\x2a\x03\x0a\x7f\x00", b"\x11\x00", b"\x80"],
    ids=["length", "endless number", "group", "inner length", "cut number", "cut key"],
)
def test_a_message_that_is_none_stops_the_reading(event, tmp_path):
    (tmp_path / "bad").write_bytes(frame(b"\x10\x01") + frame(event))
    assert "is not an event" in tensorboard.read_events(tmp_path / "bad").problem


def test_a_file_of_a_million_tags_is_bounded(tmp_path):
    def scalar(number: int) -> bytes:
        tag = f"t{number}".encode()
        value = b"\x0a" + bytes([len(tag)]) + tag + b"\x15\x00\x00\x80\x3f"
        summary = b"\x0a" + bytes([len(value)]) + value
        return frame(b"\x10\x01\x2a" + bytes([len(summary)]) + summary)

    (tmp_path / "many").write_bytes(b"".join(scalar(number) for number in range(1200)))
    found = tensorboard.read_events(tmp_path / "many")
    assert len(found.scalars) == tensorboard.MOST_TAGS and "1000 tags" in found.problem


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_csv_of_lightning_has_empty_cells(tmp_path):
    path = write(
        tmp_path / "metrics.csv",
        "epoch,step,train_loss,val_loss\n0,9,2.3025851249694824,\n0,9,,2.1972245773362196\n1,19,1.9459101490553132,\n",
    )
    found = {one.name: one for one in read_csv(path, name="m.csv")}
    assert found.keys() == {"train_loss", "val_loss"}
    assert found["train_loss"].steps == (9, 19) and found["train_loss"].values[0] == 2.3025851249694824
    assert found["train_loss"].exact and found["val_loss"].steps == (9,)


def test_rounded_numbers_are_called_printed(tmp_path):
    path = write(tmp_path / "log.jsonl", '{"step": 1, "loss": 2.3026, "tokens": 512}\n{"step": 2, "loss": 2.19}\n')
    found = {one.name: one for one in read_jsonl(path, name="log.jsonl")}
    assert not found["loss"].exact and "printed with 5 digits" in found["loss"].notes[0]
    assert found["tokens"].exact


def test_values_that_json_has_not_are_read(tmp_path):
    path = write(tmp_path / "log.jsonl", '{"step": 1, "loss": NaN}\n{"step": 2, "loss": -Infinity}\n{"step"')
    (loss,) = read_jsonl(path, name="log.jsonl")
    assert math.isnan(loss.values[0]) and loss.values[1] == -math.inf


HOSTILE = {
    "no numbers": '{"step": "x", "loss": "y"}\n[1]\nnull\n',
    "deep": "[" * 20000,
    "huge whole number": '{"step": 1, "loss": ' + "9" * 5000 + "}\n",
    "huge exponent": '{"step": 1e999, "loss": 1.0}\n',
    "step with a fraction": '{"step": 1.5, "loss": 1.0}\n',
    "control characters": '{"step": 1, "\\u001b[2J": "\\u0000"}\n',
    "empty": "",
    "bytes": "\udcff\udcfe",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_tables_give_nothing(text, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    assert read_jsonl(path, name="x") == ()
    assert [one for one in read_csv(path, name="x") if one.steps] == []


def test_a_csv_with_many_columns_or_a_quote_without_end_gives_nothing(tmp_path):
    wide = write(tmp_path / "wide.csv", "step," + ",".join(f"c{n}" for n in range(500)) + "\n")
    assert read_csv(wide, name="w") == ()
    quote = write(tmp_path / "quote.csv", 'step,loss\n1,"2.0\n')
    assert all(not one.steps for one in read_csv(quote, name="q"))


def test_files_of_a_run_are_found_but_not_those_that_the_project_brought(tmp_path):
    run = RunFolder(tmp_path)
    shutil.copytree(EVENTS.parent, run.source / "logs" / "tb")
    write(run.source / "data.csv", "step,loss\n1,5.0\n")
    write(run.source / "out" / "metrics.csv", "step,loss\n1,2.3025851249694824\n")
    write(run.source / "secret.csv", "step,loss\n1,1.0\n").unlink()
    os.symlink("/etc/passwd", run.source / "secret.csv")
    save_record(Listing(schema=1, files={"source/data.csv": "0"}), run.listing)
    found = read_metric_files(run)
    assert {(one.source, one.name) for one in found.series} == {
        ("csv", "loss"), ("tensorboard", "loss"), ("tensorboard", "exact"),
    }  # fmt: skip
    assert found.problems == ()


def test_two_event_files_of_a_restart_are_one_series(tmp_path):
    run = RunFolder(tmp_path)
    for begun in (1795414014, 1795414099):
        path = run.source / "tb" / f"events.out.tfevents.{begun}.n1.1.0"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(EVENTS, path)
    found = read_metric_files(run)
    loss = next(one for one in found.series if one.name == "loss")
    assert len(loss.steps) == 13 and any("13 steps more than once" in text for text in found.problems)


def test_a_folder_with_too_many_files_is_said(tmp_path):
    run = RunFolder(tmp_path)
    for number in range(101):
        write(run.source / f"{number}.csv", "step,loss\n1,1.5\n")
    found = read_metric_files(run)
    assert any("only the first 100 files" in text for text in found.problems)
