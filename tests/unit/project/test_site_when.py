"""Conditions of values in a site profile."""

from __future__ import annotations

import pytest

from hpcenv.project.site_when import RunFacts, WhenTable, in_words, is_within, judge


@pytest.mark.parametrize(
    ("when", "run", "answer"),
    [
        (None, RunFacts(nodes=1), ("yes", "")),
        (WhenTable(nodes=">=2"), RunFacts(nodes=1), ("no", "")),
        (WhenTable(nodes=">=2"), RunFacts(nodes=2), ("yes", "")),
        (WhenTable(nodes="1"), RunFacts(nodes=2), ("no", "")),
        (WhenTable(partition=("a", "b")), RunFacts(nodes=1, partition="b"), ("yes", "")),
        (WhenTable(partition=("a",)), RunFacts(nodes=1, partition="b"), ("no", "")),
        (WhenTable(partition=("a",)), RunFacts(nodes=1, partition="a,b"), ("unknown", "partition")),
        (WhenTable(partition=("a", "b")), RunFacts(nodes=1, partition="a,b"), ("yes", "")),
        (WhenTable(partition=("a",)), RunFacts(nodes=1), ("unknown", "partition")),
        (WhenTable(gpu_vendor="amd"), RunFacts(nodes=1, gpu_vendor="nvidia"), ("no", "")),
        (WhenTable(gpu=("H100*",)), RunFacts(nodes=1, gpu="h100_sxm"), ("yes", "")),
        (WhenTable(nccl=">=2.27"), RunFacts(nodes=1, nccl="2.30.7"), ("yes", "")),
        (WhenTable(nccl=">=2.27"), RunFacts(nodes=1), ("unknown", "nccl")),
        (WhenTable(rocm=">=6.2,<7"), RunFacts(nodes=1, rocm="7.0.51831-abc"), ("no", "")),
        (WhenTable(rocm=">=6.2,<7"), RunFacts(nodes=1, rocm="6.4"), ("yes", "")),
        (WhenTable(rocm=">=6.2"), RunFacts(nodes=1, rocm="none"), ("no", "")),
        # What does not hold decides, whatever else is unknown.
        (WhenTable(nodes=">=2", nccl=">=2"), RunFacts(nodes=1), ("no", "")),
    ],
)
def test_a_condition_holds_or_not_or_is_not_known(
    when: WhenTable | None, run: RunFacts, answer: tuple[str, str]
) -> None:
    assert judge(when, run) == answer


@pytest.mark.parametrize(
    ("version", "bounds", "answer"),
    [("2.27", ">=2.27", True), ("2.27.0", "2.27", True), ("10", ">9", True), ("2.3", "<2.27", True), ("x", "1", None)],
)
def test_versions_are_compared_as_numbers(version: str, bounds: str, answer: bool | None) -> None:
    assert is_within(version, bounds) is answer


def test_a_condition_in_words() -> None:
    assert in_words(WhenTable(partition=("a", "b"), nodes=">=2")) == "partition a or b, nodes >=2"
    assert in_words(None) == ""
