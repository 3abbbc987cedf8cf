"""What a record of an older run asked for, and hpcenv no longer has."""

from __future__ import annotations

import pytest

from hpcenv.project.gone_options import GONE, without_gone
from hpcenv.project.options import BY_NAME


def test_no_option_is_both_gone_and_there() -> None:
    assert {option.name for option in GONE}.isdisjoint(BY_NAME)


@pytest.mark.parametrize("option", GONE, ids=lambda option: option.name)
def test_a_default_is_left_out_without_a_word(option) -> None:
    assert without_gone({"nodes": 2, option.name: option.default}) == ({"nodes": 2}, ())


@pytest.mark.parametrize(
    ("recorded", "note"),
    [
        ({"standalone": True}, "the run had standalone = true, an option that is gone: the rendezvous that hpcenv chooses"),
        ({"smoke_limit": 30}, "the run had smoke_limit = 30, an option that is gone: each part of the smoke test may take 90 s"),
    ],
)  # fmt: skip
def test_another_value_is_left_out_with_a_note(recorded, note) -> None:
    assert without_gone(recorded) == ({}, (note,))


def test_the_level_deep_becomes_full() -> None:
    kept, notes = without_gone({"preflight": "deep"})
    assert kept == {"preflight": "full"}
    assert "dcgmi diag -r 3" in notes[0]
