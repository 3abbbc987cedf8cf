"""records.metrics and records.determinism: the formats of the docstrings, and files of somebody else."""

from __future__ import annotations

import json
import os
import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.errors import RecordInvalid
from hpcenv.records import determinism, metrics
from hpcenv.records.files import LONGEST, LONGEST_RECORD
from hpcenv.records.run_folder import RunFolder


def write(tmp_path, *lines: object, attempt: int = 0, rank: int = 0, end: bytes = b""):
    path = RunFolder(tmp_path).metrics_of(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_bytes("".join(text + "\n" for text in texts).encode() + end)
    return path


START = {"kind": "start", "schema": 1, "restart": 0, "pid": 7, "time": 1.5, "world_size": 2}
LOSS = {"kind": "loss", "step": 1, "index": 0, "name": "loss", "value": "0x1.8p+1", "dtype": "float32", "used": True}


def test_the_lines_of_the_docstring_are_read(tmp_path):
    text = metrics.__doc__
    lines = [json.loads(found) for found in re.findall(r'\{"kind".*?\}', text, re.DOTALL)]
    assert [line["kind"] for line in lines] == ["start", "count", "loss", "metric", "parameters", "note", "end"]
    lines[4]["value"] = "9f" * 32
    write(tmp_path, *lines)
    (rank,) = metrics.read_run_metrics(RunFolder(tmp_path))
    assert rank.problems == ()
    assert [record.kind for record in rank.records] == ["loss", "metric", "parameters"]
    assert [metrics.number(record) for record in rank.records[:2]] == [3.125, 0.75]
    assert rank.records[2].at == "interval"
    process = rank.processes[0]
    assert (process.before, process.before_from, process.steps, process.reason) == (10, "optimizer", 20, "finished")
    assert rank.notes[0].startswith("backward was called on a tensor with 64 elements")


@given(st.floats(allow_nan=False, width=32))
def test_every_float_comes_back_to_the_last_bit(value):
    record = metrics._recorded("loss", LOSS | {"value": value.hex()}, process=0)
    assert struct.pack("<d", metrics.number(record)) == struct.pack("<d", value)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-0x0.0p+0"])
def test_values_that_json_has_not_are_text(value):
    assert metrics._recorded("loss", LOSS | {"value": value}, process=0).value == value


def test_ranks_and_attempts_are_in_order_and_other_names_are_left_out(tmp_path):
    for attempt, rank in ((10, 0), (2, 11), (2, 3), (0, 0)):
        write(tmp_path, START, LOSS, attempt=attempt, rank=rank)
    (tmp_path / "metrics" / "attempt-01").mkdir()
    (tmp_path / "metrics" / "attempt-0" / "rank-x.jsonl").touch()
    found = metrics.read_run_metrics(RunFolder(tmp_path))
    assert [(one.attempt, one.rank) for one in found] == [(0, 0), (2, 3), (2, 11), (10, 0)]


BAD = {
    "no JSON": ("{", "it is not JSON"),
    "a list": ("[1]", "it is not a JSON object"),
    "deep": ("[" * 9000, "maximum recursion|not JSON"),
    "printed digits": (LOSS | {"value": "3.1415"}, "not written exactly"),
    "too large for a float": (LOSS | {"value": "0x1p+9999"}, "too large"),
    "a number in place of text": (LOSS | {"value": 3.0}, "`value` is not a text"),
    "a negative step": (LOSS | {"step": -1}, "`step` is not a whole number"),
    "a step that is true": (LOSS | {"step": True}, "`step` is not a whole number"),
    "a huge step": (LOSS | {"step": 1 << 60}, "`step` is not a whole number"),
    "no name": ({k: v for k, v in LOSS.items() if k != "name"}, "`name` is not a text"),
    "a short hash": ({"kind": "parameters", "step": 1, "name": "p", "value": "ab", "dtype": "sha256"}, "exactly"),
    "another kind": ({"kind": "gift"}, "its kind is unknown"),
    "NaN as JSON": ('{"kind": "loss", "step": NaN}', "`value` is not a text"),
}


@pytest.mark.parametrize(("line", "why"), BAD.values(), ids=BAD)
def test_a_bad_line_is_named_and_the_others_are_read(line, why, tmp_path):
    write(tmp_path, START, line, LOSS)
    (rank,) = metrics.read_run_metrics(RunFolder(tmp_path))
    assert len(rank.records) == 1
    assert len(rank.problems) == 1 and rank.problems[0].startswith("line 2: ") and re.search(why, rank.problems[0])


def test_a_line_without_end_is_left_out_and_said(tmp_path):
    write(tmp_path, START, LOSS, end=b'{"kind": "loss", "st')
    (rank,) = metrics.read_run_metrics(RunFolder(tmp_path))
    assert rank.cut and len(rank.records) == 1 and rank.problems == ()


def test_a_file_without_bound_does_not_fill_the_memory(tmp_path):
    os.truncate(write(tmp_path, START, LOSS), LONGEST_RECORD + 1)
    (rank,) = metrics.read_run_metrics(RunFolder(tmp_path))
    assert rank.records == ()
    assert rank.problems == ("the file cannot be read: it has more than 512 MiB",) and not rank.cut


def test_many_bad_lines_are_few_problems(tmp_path):
    write(tmp_path, START, *["no"] * 500)
    (rank,) = metrics.read_run_metrics(RunFolder(tmp_path))
    assert len(rank.problems) == 20


def test_a_link_and_a_pipe_are_not_read(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text(json.dumps(START) + "\n" + json.dumps(LOSS) + "\n")
    path = write(tmp_path)
    path.unlink()
    path.symlink_to(secret)
    os.mkfifo(path.with_name("rank-1.jsonl"))
    link, pipe = metrics.read_run_metrics(RunFolder(tmp_path))
    assert link.records == () and "symbolic link" in link.problems[0]
    assert pipe.records == () and "pipe" in pipe.problems[0]


def test_a_hash_is_no_number():
    row = {"kind": "parameters", "step": 1, "name": "p", "value": "9f" * 32, "dtype": "sha256"}
    with pytest.raises(ValueError, match="hash"):
        metrics.number(metrics._recorded("parameters", row, process=0))


# -- determinism --------------------------------------------------------------------------


def example() -> dict:
    return json.loads(re.search(r"\{\"schema.*\}", determinism.__doc__, re.DOTALL)[0])


def save(tmp_path, data: object, attempt: int = 0, rank: int = 0):
    path = RunFolder(tmp_path).determinism_of(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_the_record_of_the_docstring_is_read(tmp_path):
    save(tmp_path, example())
    (rank,), problems = determinism.read_run_determinism(RunFolder(tmp_path))
    assert problems == ()
    assert (rank.profile, rank.applied_by, rank.state) == ("bitwise", "start-hook", "ended")
    (switch,) = rank.switches
    assert switch.overridden and switch.effective == "False" and switch.changed_at == "train.py:12"
    assert rank.without_deterministic_kernel[0].count == 3


def test_a_switch_that_was_never_read_is_not_called_overridden_and_not_called_effective():
    switch = determinism.SwitchReading(name="x", asked="True")
    assert not switch.overridden and switch.effective is None


def test_a_record_of_another_rank_or_of_nobody_is_a_problem(tmp_path):
    save(tmp_path, example() | {"rank": 3}, rank=0)
    save(tmp_path, "{" * 5000, rank=1)
    os.truncate(save(tmp_path, "", rank=2), LONGEST + 1)
    save(tmp_path, example() | {"profile": "default", "rank": 3}, rank=3)
    found, problems = determinism.read_run_determinism(RunFolder(tmp_path))
    assert found == ()
    assert [problem.rank for problem in problems] == [0, 1, 2, 3]
    assert "it belongs to attempt 0, rank 3" in problems[0].why
    assert "more than 64 MiB" in problems[2].why
    with pytest.raises(RecordInvalid, match="off"):
        determinism.read_determinism(RunFolder(tmp_path).determinism_of(0, 3), 0, 3)
