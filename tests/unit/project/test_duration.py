"""Lengths of time: what is accepted, and what it means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.project import duration
from hpcenv.project.duration import time_minutes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90), ("90s", 90), ("30m", 1800), ("30min", 1800), ("2h", 7200), ("1d", 86400), ("8w", 8 * 604800),
        ("1:30", 90), ("1:00:00", 3600), ("1-0", 86400), ("1-2:30", 95400), ("1-02:30:05", 95405), ("0", 0),
    ],
)  # fmt: skip
def test_the_forms_of_a_length_of_time(text: str, seconds: int) -> None:
    assert duration.parse(text, number="seconds") == seconds


def test_a_plain_number_is_minutes_only_for_slurm() -> None:
    assert duration.parse("90", number="minutes") == 5400
    assert duration.parse("90s", number="minutes") == 90


@pytest.mark.parametrize(
    ("text", "written"), [("90", "90"), ("2h", "02:00:00"), ("1d", "1-00:00:00"), ("30m", "00:30:00"), ("1-2", "1-2")]
)
def test_sbatch_gets_a_form_that_it_reads(text: str, written: str) -> None:
    assert duration.slurm_time(text) == written


@given(st.integers(0, 10**9))
def test_what_is_written_is_what_is_read(seconds: int) -> None:
    assert duration.parse(duration.clock(seconds), number="seconds") == seconds


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("5", 5), ("1:30", 1.5), ("1:00:00", 60), ("1-0", 1440), ("1-2:30", 1590), ("0-0:0:30", 0.5)],
)
def test_slurms_forms_of_a_time(text: str, minutes: float) -> None:
    assert time_minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "5x", "-5", "1:2:3:4", "1-", "٣", "1 2", "5\n", "5m\n", "1.5h", "2h30m"])
def test_other_forms_are_no_time(text: str) -> None:
    assert time_minutes(text) is None
    with pytest.raises(ValueError, match="is not a length of time"):
        duration.parse(text, number="seconds")


def test_a_time_of_hundreds_of_digits_is_none() -> None:
    for text in ("1" * 400, "1-" + "2" * 400, "1" * 10, f"1:{'3' * 400}"):
        assert time_minutes(text) is None
    assert time_minutes("9" * 9) == 999_999_999
