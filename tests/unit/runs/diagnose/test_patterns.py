"""The table of patterns: complete, with sources, and safe to search in hostile logs."""

from __future__ import annotations

import re
import time

import pytest
import tomllib

from hpcenv.project.options import OPTIONS
from hpcenv.runs.diagnose.patterns import TABLE, patterns_for, read_patterns
from hpcenv.runs.diagnose.scan import key_of

PATTERNS = read_patterns()
IDS = [pattern.id for pattern in PATTERNS]


def test_there_are_at_least_sixty_and_each_has_one_name() -> None:
    assert len(PATTERNS) >= 60
    assert len(set(IDS)) == len(IDS)


def test_rows_have_known_keys_only() -> None:
    keys = {
        "id",
        "kind",
        "owner",
        "anchors",
        "match",
        "torch",
        "last",
        "before_ranks",
        "after_failure",
        "warns",
        "ends_attempt",
        "cause",
        "hint",
        "source",
        "retrieved",
    }
    for row in tomllib.loads(TABLE.read_text())["pattern"]:
        assert set(row) <= keys, row["id"]
        assert row["kind"] in ("root", "maybe", "cascade"), row["id"]
        assert row["owner"] in ("user", "node", "site", "unknown"), row["id"]


@pytest.mark.parametrize("pattern", PATTERNS, ids=IDS)
def test_a_row_says_cause_hint_and_source_in_sentences(pattern: object) -> None:
    for text in (pattern.cause, pattern.hint):  # type: ignore[attr-defined]
        assert text.endswith(".")
    assert pattern.source  # type: ignore[attr-defined]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", pattern.retrieved)  # type: ignore[attr-defined]


def test_an_option_that_a_hint_names_can_be_typed() -> None:
    """`--requeue` alone was refused: it needs one of its words. (An option at the end of a sentence is only named.)"""
    found = []
    for pattern in PATTERNS:
        for option in OPTIONS:
            for word in re.findall(rf"{option.flag} ([a-z]+)", f"{pattern.cause} {pattern.hint}"):
                found.append((pattern.id, option.flag, word, option.choices))
    assert [one for one in found if one[3] and one[2] not in one[3]] == []


def test_an_anchor_has_a_word_that_can_be_searched() -> None:
    for pattern in PATTERNS:
        for anchor in pattern.anchors:
            assert len(key_of(anchor)) >= 3, anchor


def test_patterns_depend_on_the_version_of_torch() -> None:
    def ids(torch: str) -> set[str]:
        return {pattern.id for pattern in patterns_for(torch)}

    assert "torch-nccl2-timeout" not in ids("2.13.0+cu130")
    assert "torch-watchdog-stuck" in ids("2.13.0+cu130")
    assert "torch-nccl2-timeout" in ids("2.15.0")
    assert "torch-watchdog-stuck" not in ids("2.15.0")
    assert "checkpoint-weights-only" not in ids("2.5.1")
    assert ids("") == ids("not a version") == set(IDS)


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if p.match], ids=lambda p: p.id)
def test_no_expression_takes_long_for_a_hostile_line(pattern: object) -> None:
    anchor = pattern.anchors[0]  # type: ignore[attr-defined]
    # 4 KiB is what is matched of a line.
    for line in (
        anchor + "a" * 4096,
        (anchor + " ") * (4096 // len(anchor)),
        "A" * 2048 + anchor + "(" * 2048,
        "a." * 2048,
    ):
        began = time.process_time()
        pattern.match.search(line[:4096])  # type: ignore[attr-defined]
        assert time.process_time() - began < 0.2
