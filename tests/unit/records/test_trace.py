"""The reader of traces: bounded, and a step that is not whole does not count."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpcenv.records.files import LONGEST_RECORD
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.trace import RankTrace, read_run_trace, read_trace
from tests import traces


def read(folder: Path, *lines: object) -> RankTrace:
    path = folder / "rank-0.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return read_trace(path, 0, 0)


def test_whole_steps_are_read(tmp_path):
    found = read(tmp_path, *traces.lines(traces.STEP, traces.STEP, first=4, resumed=3))
    assert (found.problems, sorted(found.steps)) == ((), [4, 5])
    first = found.steps[4]
    assert (first.resumed, [one.index for one in first.operations]) == (3, [0, 1])
    assert (first.operations[0].module, first.operations[0].module_class) == ("Net.fc", "Linear")
    assert first.operations[1].at == "source/train.py:3"
    assert first.operations[0].inputs[1].hash == traces.digest("w")


def test_a_step_without_an_end_or_before_a_new_begin_does_not_count(tmp_path):
    whole = traces.lines(traces.STEP)
    assert read(tmp_path, *whole[:-1]).steps == {}
    again = [*whole[:-1], {"kind": "begin", "resumed": 2}, {"kind": "end", "step": 3, "operations": 0}]
    assert {number: one.operations for number, one in read(tmp_path, *again).steps.items()} == {3: ()}


WRONG = {
    "not JSON": ("{\n", "Expecting"),
    "not an object": ("[]\n", "not a JSON object"),
    "an unknown kind": ({"kind": "x"}, "its kind is unknown"),
    "a gap": ({**traces.STEP[0], "i": 5}, "it is not operation 2"),
    "an unknown phase": ({**traces.STEP[0], "i": 2, "phase": "x"}, "its phase is unknown"),
    "a text for a hash": ({**traces.STEP[0], "i": 2, "in": [["a", "float32[]", "x; rm"]]}, "hexadecimal"),
    "another number of operations": ({"kind": "end", "step": 1, "operations": 3}, "has 2 operations and not 3"),
    "the limit": ({"kind": "limit", "bytes": 32 << 20}, "reached its limit of 32 MiB"),
    "a cut line": ('{"kind": "op"', "is cut"),
    "too many levels": ("[" * 100000 + "\n", "line 5"),
}


@pytest.mark.parametrize(("line", "problem"), WRONG.values(), ids=WRONG)
def test_a_line_that_does_not_fit_is_a_problem_and_ends_its_step(line, problem, tmp_path):
    end = () if line == WRONG["a cut line"][0] else ({"kind": "end", "step": 1, "operations": 2},)
    found = read(tmp_path, *traces.lines(traces.STEP)[:-1], line, *end)
    assert found.steps == {} and problem in found.problems[0]


def test_a_file_without_bound_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "rank.jsonl"
    path.touch()
    os.truncate(path, LONGEST_RECORD + 1)
    assert read_trace(path, 0, 0).problems == ("the trace cannot be read: it has more than 512 MiB",)


def test_a_file_that_is_no_file_is_a_problem(tmp_path):
    (tmp_path / "other").write_text("")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "other")
    assert "symbolic link" in read_trace(tmp_path / "link.jsonl", 0, 0).problems[0]


def test_a_later_attempt_replaces_the_steps_that_it_traced_again(tmp_path):
    run = RunFolder(tmp_path)
    traces.write(run, 0, traces.lines(traces.STEP, traces.STEP))
    traces.write(run, 0, traces.lines(traces.STEP[:1], first=2, resumed=1), attempt=1)
    found = read_run_trace(run)
    assert {number: len(one.operations) for number, one in found[0].steps.items()} == {1: 2, 2: 1}
