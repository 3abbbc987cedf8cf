"""Two traces compared: which operation parts first, and whether it is the cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcenv.records.run_folder import RunFolder
from hpcenv.records.trace import RankTrace, read_run_trace
from hpcenv.reproduction.operations import TraceComparison, common_steps, compare_traces
from tests import traces
from tests.traces import STEP, operation

MM, TANH = STEP


def trace(folder: Path, *ranks: Sequence[Mapping[str, Any]]) -> dict[int, RankTrace]:
    run = RunFolder(folder)
    for rank, step in enumerate(ranks):
        traces.write(run, rank, traces.lines(step))
    return read_run_trace(run)


def compared(tmp_path: Path, left: Sequence[Any], right: Sequence[Any]) -> TraceComparison:
    reference, other = trace(tmp_path / "a", *left), trace(tmp_path / "b", *right)
    return compare_traces(reference, other, common_steps(reference, other))


def test_equal_traces(tmp_path):
    found = compared(tmp_path, [STEP, STEP], [STEP, STEP])
    assert (found.first, found.operations, found.ranks, found.steps) == (None, 4, (0, 1), (1,))


def other(of: Mapping[str, Any], reads: Mapping[str, str], writes: Mapping[str, str], **more: Any) -> dict[str, Any]:
    changed = operation(of["name"], reads, writes)
    return {**of, "in": changed["in"], "out": changed["out"], **more}


CASES = {
    "another kernel": ([other(MM, {"self": "x", "mat2": "w"}, {"0": "H"}), TANH], "kernel", 0, ["output"]),
    "other weights": ([other(MM, {"self": "x", "mat2": "W"}, {"0": "H"}), TANH], "inputs", 0, ["input", "output"]),
    "other input without an effect": ([other(MM, {"self": "x", "mat2": "W"}, {"0": "h"}), TANH], None, 0, []),
    "an input without a hash": ([other(MM, {"self": "-", "mat2": "w"}, {"0": "H"}), TANH], "kernel", 0, ["output"]),
    "an output without a hash": ([other(MM, {"self": "x", "mat2": "w"}, {"0": "-"}), TANH], None, 0, []),
    "another operation": ([MM, operation("aten.relu.default", {"self": "h"}, {"0": "y"})], "sequence", 1, []),
    "one operation less": ([MM], "sequence", 1, []),
    "one operation more": ([MM, TANH, TANH], "sequence", 2, []),
    "other arguments": (
        [{**other(MM, {"self": "x", "mat2": "w"}, {"0": "H"}), "args": "alpha=2"}, TANH],
        "inputs", 0, ["arguments", "output"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("right", "kind", "index", "roles"), CASES.values(), ids=CASES)
def test_the_first_difference(right, kind, index, roles, tmp_path):
    first = compared(tmp_path, [STEP], [right]).first
    if kind is None:
        assert first is None
        return
    assert (first.kind, first.index, [one.role for one in first.values]) == (kind, index, roles)


def test_what_is_known_of_the_operation_is_said(tmp_path):
    first = compared(tmp_path, [STEP], [[other(MM, {"self": "x", "mat2": "w"}, {"0": "H"})]]).first
    assert (first.step, first.rank, first.name, first.phase) == (1, 0, "aten.mm.default", "forward")
    assert (first.module, first.module_class) == ("Net.fc", "Linear")
    assert (first.values[0].reference, first.values[0].value) == (traces.digest("h"), traces.digest("H"))


def test_an_input_that_an_equal_operation_wrote_shows_a_write_that_was_not_seen(tmp_path):
    changed = other(TANH, {"self": "H"}, {"0": "Y"})
    first = compared(tmp_path, [STEP], [[MM, changed]]).first
    assert (first.kind, first.values[0].written_by) == ("inputs", "aten.mm.default (0)")


def test_another_state_of_the_generator_is_told_from_another_kernel(tmp_path):
    def draw(state: str, result: str) -> list[dict[str, Any]]:
        return [operation("aten.randn.default", {"generator": state}, {"0": result})]

    assert compared(tmp_path / "1", [draw("s", "r")], [draw("S", "R")]).first.kind == "random"
    assert compared(tmp_path / "2", [draw("s", "r")], [draw("s", "R")]).first.kind == "kernel"


REDUCE = operation("c10d.allreduce_.default", {"tensors": "g"}, {"tensors": "sum"})


def test_a_sum_of_gradients_points_to_the_rank_whose_gradient_differs(tmp_path):
    changed = operation("c10d.allreduce_.default", {"tensors": "g"}, {"tensors": "SUM"})
    alone = compared(tmp_path / "1", [[REDUCE], [REDUCE]], [[changed], [changed]])
    assert (alone.first.kind, alone.first.rank) == ("collective", 0)
    kernel = other(MM, {"self": "x", "mat2": "w"}, {"0": "H"})
    found = compared(tmp_path / "2", [[REDUCE, MM], [REDUCE, MM]], [[changed, MM], [REDUCE, kernel]])
    assert (found.first.kind, found.first.rank, len(found.of_ranks)) == ("kernel", 1, 2)


def test_the_tensor_of_a_list_is_named(tmp_path):
    def step(*each: str) -> list[dict[str, Any]]:
        row = ["self", "3 tensors: float32[2]", traces.digest(str(each)), [traces.digest(one)[:8] for one in each]]
        return [{**operation("aten._foreach_add_.List", {}, {}), "out": [[*row, ["float32[2]"] * 3]]}]

    value = compared(tmp_path, [step("a", "b", "c")], [step("a", "B", "C")]).first.values[0]
    assert (value.name, value.type) == ("self[1] of 3 and 1 more", "float32[2]")


def test_only_steps_that_all_ranks_have_are_compared_and_missing_ranks_are_named(tmp_path):
    reference = trace(tmp_path / "a", STEP, STEP)
    other_side = trace(tmp_path / "b", STEP)
    assert common_steps(reference, other_side) == (1,)
    assert compare_traces(reference, other_side, (1,)).not_seen == ("only one of the traces has ranks 1",)
    assert common_steps(reference, {}) == ()
