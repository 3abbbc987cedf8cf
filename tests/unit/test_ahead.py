"""What is started before the command line is parsed: for a submission to Slurm, and for nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from hpcenv import ahead


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--help"],
        ["status", "submit"],
        ["submit", "--help"],
        ["submit", "train.py", "--dry-run"],
        ["submit", "train.py", "--test-only"],
        ["submit", "train.py", "--sweep=lr=1,2"],
        ["submit", "train.py", "--array", "0-3"],
        ["submit", "train.py", "--cluster", "local"],
        ["submit", "--cluster=local", "train.py"],
    ],
)
def test_nothing_is_begun_for_other_words(words: list[str], fake_slurm: Any) -> None:
    ahead.begin(words, fake_slurm.environ)
    assert ahead.take() is None


def test_nothing_is_begun_where_there_is_no_slurm() -> None:
    ahead.begin(["submit", "train.py"], {"PATH": "/nowhere"})
    assert ahead.take() is None


@pytest.mark.parametrize("words", [["submit", "train.py", "--nodes", "2"], ["submit", "train.py", "--", "--dry-run"]])
def test_a_submission_has_its_books_begun_once(words: list[str], fake_slurm: Any) -> None:
    ahead.begin(words, fake_slurm.environ)
    books = ahead.take()
    assert books is not None
    assert ahead.take() is None
    with books:
        pass


def test_what_nobody_took_is_ended(fake_slurm: Any) -> None:
    ahead.begin(["submit", "train.py"], fake_slurm.environ)
    ahead.end()
    assert ahead.take() is None
