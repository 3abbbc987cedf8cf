"""Two runs compared: the verdict, the first difference, the three questions, the causes."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from hpcenv.errors import NotComparable
from hpcenv.locking.difference import change_of
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction import causes, compare_text
from hpcenv.reproduction.closeness import Tolerance
from hpcenv.reproduction.compare import Steps, compare_runs
from hpcenv.reproduction.seeds import SeedComparison, compare_sweeps
from tests import measured_runs, run_folders

LOSSES = (3.0, 2.5, 2.25, 2.125)
ULP = 2.0**-22  # of a float32 between 2 and 4


def pair(tmp_path: Path, other=LOSSES, **more) -> tuple[RunFolder, RunFolder]:
    first = measured_runs.make(tmp_path / "runs", "first", losses=LOSSES)
    return first, measured_runs.make(tmp_path / "runs", "second", losses=other, **more)


def compared(tmp_path: Path, **more):
    return compare_runs(tmp_path, str(tmp_path / "runs/first"), str(tmp_path / "runs/second"), **more)


def answers(result) -> dict[str, str]:
    return {one.question: one.answer for one in result.answers}


def test_equal_runs(tmp_path):
    pair(tmp_path)
    result = compared(tmp_path)
    assert (result.verdict, result.first) == ("equal", None)
    assert result.headline == "equal to the last bit: 8 values, weights too"
    assert answers(result) == {"repeats-here": "yes", "equals-reference": "yes", "restart-replays": "not-asked"}


def test_one_bit_in_one_rank_is_found_with_both_values(tmp_path):
    _, second = pair(tmp_path)
    measured_runs.record(second, 1, (*LOSSES[:2], 2.25 + ULP, 2.125))
    result = compared(tmp_path)
    assert result.verdict == "within"
    first = result.first
    assert (first.step, first.rank, first.name, first.ulp) == (3, 1, "loss", 1)
    assert (first.reference, first.value) == ((2.25).hex(), (2.25 + ULP).hex())
    assert result.metrics[0].equal == 7 and result.metrics[0].largest_ulp == 1
    text = compare_text.render(result)
    assert "first difference: step 3, rank 1, loss (1 ULP apart)" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_difference_beyond_the_tolerance(tmp_path):
    pair(tmp_path, other=(3.0, 2.5 + ULP, 2.25, 2.2))
    result = compared(tmp_path)
    assert result.verdict == "differs" and "from step 4 on" in result.headline
    assert result.first.step == 2  # the first difference is not the first one beyond the tolerance
    assert result.metrics[0].first_beyond.step == 4
    assert compared(tmp_path, tolerance=Tolerance(rtol=0.1)).verdict == "within"
    assert compared(tmp_path, steps=Steps(last=1)).verdict == "equal"
    assert compared(tmp_path, steps=Steps(last=3), tolerance=Tolerance(ulp=1)).verdict == "within"
    assert compared(tmp_path, steps=Steps(last=3), tolerance=Tolerance(ulp=0)).verdict == "differs"


def test_equal_losses_with_other_weights_are_a_finding(tmp_path):
    _, second = pair(tmp_path)
    measured_runs.record(second, 0, LOSSES, hashes={3: "ab" * 32})
    result = compared(tmp_path)
    assert result.verdict == "within"
    assert result.headline == "losses equal to the last bit, weights differ from step 3 on"
    assert result.parameters.last_equal_step == 2 and result.first.value == "ab" * 32


def test_a_run_that_lacks_steps_is_not_equal(tmp_path):
    pair(tmp_path, other=LOSSES[:2])
    result = compared(tmp_path)
    assert result.verdict == "differs" and "not the same steps" in result.headline
    assert compared(tmp_path, steps=Steps(last=2)).verdict == "equal"


def test_a_rank_without_a_record_is_not_equal(tmp_path):
    _, second = pair(tmp_path)
    second.metrics_of(0, 1).unlink()
    result = compared(tmp_path)
    assert result.verdict == "differs"
    assert any("only one of the runs has ranks 1" in note for note in result.metrics[0].notes)


def test_nan_equals_nan_and_nothing_else(tmp_path):
    first, second = pair(tmp_path)
    for run in (first, second):
        measured_runs.record(run, 0, (3.0, math.nan, math.nan, math.inf))
    assert compared(tmp_path).verdict == "equal"
    measured_runs.record(second, 0, (3.0, math.nan, 2.0, math.inf))
    assert compared(tmp_path).verdict == "differs"


def test_the_sign_of_zero_is_a_difference_of_0_ulp(tmp_path):
    first, second = pair(tmp_path)
    measured_runs.record(first, 0, (0.0, 1.0, 1.0, 1.0))
    measured_runs.record(second, 0, (-0.0, 1.0, 1.0, 1.0))
    result = compared(tmp_path)
    assert result.verdict == "within" and result.first.ulp == 0


def test_runs_without_common_metrics_cannot_be_compared(tmp_path):
    first, _ = pair(tmp_path)
    shutil.rmtree(first.metrics)
    with pytest.raises(NotComparable, match="`first` has no metrics"):
        compared(tmp_path)


def test_another_number_of_ranks_is_never_equal(tmp_path):
    measured_runs.make(tmp_path / "runs", "first", losses=LOSSES)
    measured_runs.make(tmp_path / "runs", "second", losses=LOSSES, ranks=4)
    result = compared(tmp_path)
    assert result.verdict == "within" and result.metrics[0].compared == 4
    assert "the numbers of ranks differ" in result.metrics[0].notes[0]


def test_accumulated_losses_of_fewer_ranks_add_up(tmp_path):
    two = measured_runs.make(tmp_path / "runs", "first", losses=(1.0, 2.0))
    measured_runs.record(two, 1, (3.0, 4.0))
    one = measured_runs.make(tmp_path / "runs", "second", ranks=1, losses=(0.5, 1.0))
    more = [
        {"kind": "loss", "step": s, "index": 1, "name": "loss", "value": v.hex(), "dtype": "float32", "used": True}
        for s, v in ((1, 1.5), (2, 2.0))
    ]
    measured_runs.record(one, 0, (0.5, 1.0), more=more)  # each loss divided by 2, as scripts do
    result = compared(tmp_path)
    assert result.verdict == "within" and result.metrics[0].equal == 2


def test_metrics_of_the_machine_are_not_judged(tmp_path):
    first, second = pair(tmp_path)
    for run, seconds in ((first, 1.5), (second, 2.5)):
        more = [{"kind": "metric", "step": 1, "name": "time/step", "value": seconds.hex(), "dtype": "float64"}]
        measured_runs.record(run, 0, LOSSES, more=more)
    result = compared(tmp_path)
    assert result.verdict == "equal"
    assert [(one.name, one.judged) for one in result.metrics] == [("loss", True), ("time/step", False)]
    assert "not judged" in compare_text.render(result)


def test_printed_numbers_alone_never_show_equality(tmp_path):
    for run in pair(tmp_path):
        shutil.rmtree(run.metrics)
        run.source.mkdir()
        (run.source / "log.jsonl").write_text('{"step": 1, "loss": 2.31}\n')
    assert compared(tmp_path).verdict == "within"


# -- the three questions ------------------------------------------------------------------


def test_steps_that_were_computed_twice_answer_whether_a_restart_replays(tmp_path):
    _, second = pair(tmp_path)
    for rank in range(2):
        measured_runs.record(second, rank, LOSSES[2:], attempt=1, first=3)
    result = compared(tmp_path)
    assert result.verdict == "equal" and answers(result)["restart-replays"] == "yes"
    measured_runs.record(second, 1, (2.25 + ULP, 2.125), attempt=1, first=3)
    result = compared(tmp_path)
    assert answers(result)["restart-replays"] == "no"
    text = next(one.text for one in result.answers if one.question == "restart-replays")
    assert "step 3 of loss" in text and (2.25 + ULP).hex() in text


def test_a_restart_without_overlap_is_judged_by_the_other_run(tmp_path):
    _, second = pair(tmp_path, other=LOSSES[:2])
    for rank in range(2):
        measured_runs.record(second, rank, LOSSES[2:], attempt=1, first=3)
    assert answers(compared(tmp_path))["restart-replays"] == "yes"
    for rank in range(2):
        measured_runs.record(second, rank, (2.5, 2.0), attempt=1, first=3)
    assert answers(compared(tmp_path))["restart-replays"] == "unknown"


def test_a_third_run_answers_whether_it_repeats_here(tmp_path):
    pair(tmp_path, other=(3.5, 3.0, 2.5, 2.0), args=("--lr", "1"))
    measured_runs.make(tmp_path / "runs", "third", losses=(3.5, 3.0, 2.5, 2.0), args=("--lr", "1"))
    result = compared(tmp_path, again=[str(tmp_path / "runs/third")])
    assert answers(result) == {"repeats-here": "yes", "equals-reference": "no", "restart-replays": "not-asked"}
    assert "third" in result.answers[0].text


# -- causes -------------------------------------------------------------------------------


def rank(*fields: str, switches=None) -> list[str]:
    changes = [change_of(field, "1", "2", "info") for field in fields]
    return [cause.group for cause in causes.rank_causes(changes, switches or {})]


def test_what_the_run_was_told_comes_before_how_it_computed():
    assert rank("packages.torch", "host.gpu-models", "env.OMP_NUM_THREADS", "run.arguments", "host.hostname") == [
        "arguments", "threads", "GPU", "torch and its libraries", "for the record",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "group"),
    [
        ("env.ATEN_CPU_CAPABILITY", "CPU kernels"),
        ("env.MKL_CBWR", "CPU kernels"),
        ("env.MKL_NUM_THREADS", "threads"),
        ("env.NCCL_ALGO", "communication"),
        ("libs.nccl.version", "torch and its libraries"),
        ("packages.nvidia-cublas-cu12", "torch and its libraries"),
        ("packages.einops", "packages"),
        ("run.nodes", "number of ranks"),
        ("data.train", "data"),
        ("code.commit", "for the record"),
        ("code.files", "code"),
        ("container.sif.sha256", "for the record"),
        ("container.tree-sha256", "image"),
        ("never.heard.of", "for the record"),
        ("determinism.MKL_NUM_THREADS", "threads"),
        ("determinism.torch.num-threads", "threads"),
        ("determinism.torch.cpu-capability", "CPU kernels"),
        ("determinism.MKL_CBWR", "CPU kernels"),
        ("determinism.NCCL_ALGO", "communication"),
        ("determinism.torch.initial-seed", "seed"),
        ("determinism.torch.cudnn.benchmark", "determinism switches"),
        ("determinism.version.torch", "torch and its libraries"),
    ],
)
def test_each_field_has_its_group(field, group):
    assert rank(field) == [group]


@pytest.mark.parametrize(
    ("shapes", "groups"),
    [
        ({"nodes": (2, 1), "nproc-per-node": (2, 4)}, ["ranks per node"]),
        ({"nodes": (2, 1), "nproc-per-node": (2, 4), "gpus-per-node": (2, 4)}, ["ranks per node"]),
        ({"nodes": (2, 1), "nproc-per-node": (2, 2)}, ["number of ranks"]),
        ({"nodes": (2, 1), "nproc-per-node": (2, 2), "gpus-per-node": (2, 4)}, ["number of ranks"]),
        ({"gpus-per-node": (2, 4)}, ["ranks per node"]),
        ({"backend": ("gloo", "nccl")}, ["GPU"]),
    ],
)
def test_as_many_ranks_on_other_nodes_are_no_other_number_of_ranks(shapes, groups):
    changes = [change_of(f"run.{name}", *pair, "info") for name, pair in shapes.items() if pair[0] != pair[1]]
    assert [cause.group for cause in causes.rank_causes(changes, {})] == groups


def test_differences_of_equal_runs_are_called_no_causes(tmp_path):
    first, second = pair(tmp_path)
    for run, threads in ((first, "1"), (second, "2")):
        measured_runs.read_back(run, 0, {"torch.threads": threads})
    result = compared(tmp_path)
    assert (result.verdict, [cause.group for cause in result.causes]) == ("equal", ["threads"])
    text = compare_text.render(result)
    assert (
        "differences between the runs (the results are equal):\n1. threads\n     determinism.torch.threads: 1 -> 2"
        in text
    )
    assert "cause" not in text and "changes results" not in text


def test_switches_that_were_read_back_are_causes():
    switches = causes.different_switches(
        {"0": {"torch.threads": "1", "cudnn.benchmark": "True"}, "1": {"torch.threads": "1"}},
        {"0": {"torch.threads": "2", "cudnn.benchmark": "False"}, "1": {"torch.threads": None}},
    )
    assert switches["torch.threads"] == ("1", "2")
    assert rank(switches=switches) == ["threads", "determinism switches"]


def test_the_causes_of_two_runs_come_from_their_records(tmp_path):
    first, second = pair(tmp_path, other=(3.5, 3.0, 2.5, 2.0))
    for run, threads in ((first, "1"), (second, "2")):
        measured_runs.read_back(run, 0, {"torch.threads": threads})
    result = compared(tmp_path)
    assert ("determinism.torch.threads", "1", "2") in result.causes[0].changes
    assert any("environments of the runs" in text for text in result.not_compared)  # they have no lockfile


# -- runs that were recorded on the testbed -----------------------------------------------

RECORDED = Path(__file__).parents[2] / "recorded_runs"


def test_a_recorded_run_with_another_learning_rate():
    result = compare_runs(RECORDED, str(RECORDED / "table-1"), str(RECORDED / "other-lr"))
    assert result.verdict == "differs"
    # The first loss is of the same weights; the first step then uses another learning rate.
    assert (result.first.step, result.metrics[0].equal) == (2, 4) or result.first.name == "parameters"
    assert [cause.group for cause in result.causes] == ["arguments"]
    assert result.causes[0].changes == (("run.arguments", "", "--lr, 0.021"),)


def test_a_recorded_run_on_one_node_with_the_same_global_batch():
    result = compare_runs(RECORDED, str(RECORDED / "table-1"), str(RECORDED / "one-node"), steps=Steps(last=20))
    assert result.verdict == "within", result.headline
    assert result.metrics[0].largest_relative < 1e-6 and result.metrics[0].compared == 20
    assert {"arguments", "number of ranks"} <= {cause.group for cause in result.causes}


# -- sweeps over seeds --------------------------------------------------------------------


def sweep(tmp_path: Path, name: str, last: tuple[float, ...], seeds: str = "01234") -> Path:
    folder = run_folders.make_sweep(
        tmp_path, name, [f"7_{n}" for n in range(len(last))], values=[{"seed": seeds[n]} for n in range(len(last))]
    )
    for number, value in enumerate(last):
        measured_runs.record(RunFolder(folder / f"{number:04}"), 0, (3.0, value))
    return folder


def seeds_compared(tmp_path: Path, first: tuple[float, ...], second: tuple[float, ...], **more) -> SeedComparison:
    one, two = sweep(tmp_path, "first", first), sweep(tmp_path, "second", second, **more)
    (found,) = compare_sweeps(tmp_path, str(one), str(two)).metrics
    return found


def test_seeds_whose_interval_holds_zero_are_not_distinguishable(tmp_path):
    found = seeds_compared(tmp_path, (2.0, 2.125, 2.25), (2.125, 2.0, 2.25))
    assert (found.verdict, found.paired, found.difference.mean) == ("not-distinguishable", True, 0.0)


def test_a_small_difference_of_every_seed_is_found_in_pairs_only(tmp_path):
    shifted = (2.0625, 2.53125, 3.0625)
    assert seeds_compared(tmp_path, (2.0, 2.5, 3.0), shifted).verdict == "different"
    shutil.rmtree(tmp_path / "first")
    shutil.rmtree(tmp_path / "second")
    other = seeds_compared(tmp_path, (2.0, 2.5, 3.0), shifted, seeds="789")
    assert (other.verdict, other.paired) == ("not-distinguishable", False)


def test_two_seeds_are_too_few(tmp_path):
    assert seeds_compared(tmp_path, (2.0, 2.5), (2.0, 2.5)).verdict == "too-few-seeds"


# -- the global batch ---------------------------------------------------------------------


def batches(tmp_path: Path, first: tuple[int | None, ...], second: tuple[int | None, ...]):
    runs = pair(tmp_path)
    for run, samples in zip(runs, (first, second), strict=True):
        for rank_number, size in enumerate(samples):
            measured_runs.read_back(run, rank_number, {}, samples=size)
    return compared(tmp_path)


def test_another_global_batch_is_named(tmp_path):
    result = batches(tmp_path, (8, 8), (4, 8))
    assert result.global_batch == (16, 12)
    assert [(cause.group, cause.changes) for cause in result.causes if "batch" in cause.group] == [
        ("global batch", (("run.global-batch", "16", "12"),))
    ]
    assert "  batch      16, 12 samples in a step of all ranks" in compare_text.render(result).splitlines()


def test_the_same_global_batch_is_no_cause(tmp_path):
    result = batches(tmp_path, (8, 8), (4, 12))
    assert result.global_batch == (16, 16) and not [one for one in result.causes if "batch" in one.group]
    assert "  batch      16 samples in a step of all ranks" in compare_text.render(result).splitlines()


def test_a_rank_that_does_not_say_makes_the_batch_unknown(tmp_path):
    result = batches(tmp_path, (8, None), (8,))
    assert result.global_batch == (None, None) and "samples in a step" not in compare_text.render(result)
