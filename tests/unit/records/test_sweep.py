"""Sweeps and arrays: which elements there are, and what each one's arguments are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.errors import UsageError
from hpcenv.records import sweep


def test_every_combination_the_last_name_varies_fastest() -> None:
    found = sweep.of_sweep(["lr=1e-3,3e-4", "seed=0..2"], None)
    assert found.names == ("lr", "seed")
    assert [tuple(values.values()) for values in found.values.values()] == [
        ("1e-3", "0"), ("1e-3", "1"), ("1e-3", "2"), ("3e-4", "0"), ("3e-4", "1"), ("3e-4", "2"),
    ]  # fmt: skip
    assert list(found.values) == [0, 1, 2, 3, 4, 5]
    assert found.array == "0-5"


def test_values_are_literal() -> None:
    found = sweep.of_sweep([r"x= a b,$(id),,'\,',=,1..x"], 2)
    assert [values["x"] for values in found.values.values()] == [" a b", "$(id)", "", "','", "=", "1..x"]
    assert found.array == "0-5%2"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["lr"], "`--sweep lr` is not NAME=VALUES"),
        (["=1"], "`--sweep =1` is not NAME=VALUES"),
        (["a b=1"], "`--sweep a b=1` is not NAME=VALUES"),
        (["a=1", "a=2"], "`--sweep a=...` is given twice"),
        (["a=1,2,1"], "`--sweep a=1,2,1` has '1' twice"),
        (["a=4..0"], "`--sweep a=4..0` is empty"),
        (["a=0..1000"], "the sweep has more than 1000 elements"),
        (["a=0..99999999"], "the sweep has more than 1000 elements"),
        (["a=1..100", "b=1..11"], "the sweep has more than 1000 elements"),
    ],
)
def test_what_is_no_sweep(words: list[str], what: str) -> None:
    with pytest.raises(UsageError) as caught:
        sweep.of_sweep(words, None)
    assert caught.value.what == what


def test_a_thousand_are_enough() -> None:
    assert len(sweep.of_sweep(["a=1..100", "b=1..10"], None).values) == 1000
    assert len(sweep.of_sweep(["a=-5..5"], None).values) == 11


@pytest.mark.parametrize(
    ("spec", "indices", "array"),
    [
        ("0-3", [0, 1, 2, 3], "0-3"),
        ("7", [7], "7"),
        ("1,5,3-4", [1, 3, 4, 5], "1,3-5"),
        ("0-20:5%2", [0, 5, 10, 15, 20], "0,5,10,15,20%2"),
        ("3,3,3", [3], "3"),
    ],
)
def test_an_array(spec: str, indices: list[int], array: str) -> None:
    found = sweep.of_array(spec, None)
    assert (list(found.values), found.array, found.names) == (indices, array, ())


@pytest.mark.parametrize(
    "spec", ["", "x", "3-1", "1-", "-1", "0-9%", "0-9%0", "0-9%2,5", "0-9:0", "1,,2", "9999999", "0-1000", "0-4000000"]
)
def test_what_is_no_array(spec: str) -> None:
    with pytest.raises(UsageError):
        sweep.of_array(spec, None)


def test_the_limit_is_said_once() -> None:
    with pytest.raises(UsageError) as caught:
        sweep.of_array("0-9%2", 3)
    assert "--max-parallel" in str(caught.value.why)
    assert sweep.of_array("0-9", 3).array == "0-9%3"


@given(st.sets(st.integers(0, 5000), min_size=1, max_size=200))
def test_what_slurm_is_told_means_the_same_elements(indices: set[int]) -> None:
    spec = sweep.array_spec(sorted(indices))
    expanded = [
        number
        for part in spec.split(",")
        for first, _, last in [part.partition("-")]
        for number in range(int(first), int(last or first) + 1)
    ]
    assert expanded == sorted(indices)


def test_a_name_in_an_argument_stands_for_its_value_and_is_not_appended() -> None:
    values = {"lr": "1e-3", "seed": "7"}
    assert sweep.arguments(["--out", "r/{seed}-{element}", "{x}"], values, 3) == ("--out", "r/7-3", "{x}", "--lr=1e-3")


def test_a_value_is_not_looked_into() -> None:
    assert sweep.arguments(["{a}{b}"], {"a": "{b}", "b": "{a}"}, 0) == ("{b}{a}",)


def test_braces_of_the_scripts_own_are_left_alone_but_a_misspelt_name_is_not() -> None:
    sweep.require_names(['{"json": 1}', "{}", "{other}", "{element}"], ["lr", "seed"])
    with pytest.raises(UsageError) as caught:
        sweep.require_names(["--s={sed}"], ["lr", "seed"])
    assert caught.value.hint == "{seed}"


def test_folders_sort_as_their_indices() -> None:
    assert [sweep.folder_name(index) for index in (0, 42, 12345)] == ["0000", "0042", "12345"]


def test_no_value_at_all_is_no_sweep() -> None:
    with pytest.raises(UsageError, match="`--sweep lr=` has no values") as caught:
        sweep.of_sweep(["lr="], None)
    assert caught.value.hint == "--sweep lr=V1,V2"
    assert len(sweep.of_sweep(["flag=,x"], None).values) == 2, "one of several may be empty"
