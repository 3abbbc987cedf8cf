"""The findings in real Dockerfiles that were judged one by one (tests/dockerfiles/README.md)."""

from __future__ import annotations

import csv
import tarfile
from pathlib import Path

import pytest

from hpcenv.errors import SpecError
from hpcenv.recipes import recipe_lint

FOLDER = Path(__file__).resolve().parents[2] / "dockerfiles"
REFUSED = 1  # a list for Kubernetes


def rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.fixture(scope="module")
def found() -> set[tuple[str, int, str]]:
    """What lint finds now: path, line, rule."""
    findings, refused = set(), 0
    with tarfile.open(FOLDER / "files.tar.xz") as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            try:
                judged = recipe_lint.lint_dockerfile(file.read().decode(), origin=member.name)
            except SpecError:
                refused += 1
                continue
            findings |= {(member.name, one.line or 0, one.rule) for one in judged}
    assert refused == REFUSED
    return findings


def test_each_file_names_its_source() -> None:
    with tarfile.open(FOLDER / "files.tar.xz") as archive:
        names = archive.getnames()
    listed = rows("list.tsv")
    assert sorted(names) == sorted(f"{row['repository']}/{row['path']}" for row in listed)
    assert len(names) >= 100
    assert {row["licence"] for row in listed} == {"Apache-2.0", "BSD-3-Clause", "MIT-0"}


@pytest.mark.parametrize("sample", ["sample-1.tsv", "sample-2.tsv"])
def test_what_was_judged_right_is_found(sample: str, found: set[tuple[str, int, str]]) -> None:
    judged = {(f"{row['repository']}/{row['path']}", int(row["line"]), row["rule"]): row for row in rows(sample)}
    right = {key for key, row in judged.items() if row["judged"] == "right"}
    assert right - found == set()
    # Of the first sample no noise is left; of the second at most five of a hundred are noise.
    noise = [key for key, row in judged.items() if row["judged"] == "noise" and key in found]
    assert len(noise) <= (0 if sample == "sample-1.tsv" else 5)
