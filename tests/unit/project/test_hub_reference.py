"""Names of repositories: what is understood, and what is refused with the command that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcenv.errors import SpecError
from hpcenv.project.hub_reference import parse_locked, parse_repository
from hpcenv.project.workspace import open_workspace

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "kind", "name", "folder"),
    [
        ("lab/tiny", "model", "lab/tiny", "models--lab--tiny"),
        ("models/lab/tiny", "model", "lab/tiny", "models--lab--tiny"),
        ("gpt2", "model", "gpt2", "models--gpt2"),
        ("datasets/lab/rows", "dataset", "lab/rows", "datasets--lab--rows"),
        ("datasets/squad", "dataset", "squad", "datasets--squad"),
        ("spaces/lab/app", "space", "lab/app", "spaces--lab--app"),
    ],
)
def test_the_kind_is_told_by_the_first_part(text: str, kind: str, name: str, folder: str) -> None:
    found = parse_locked(f"{text}@{COMMIT}")
    assert (found.kind, found.name, found.revision, found.cache_folder) == (kind, name, COMMIT, folder)
    assert parse_locked(str(found)) == found


@pytest.mark.parametrize(
    "text",
    [
        "", "a/b/c", "/lab/tiny", "lab/", "../tiny", "lab/..", "lab/a--b", "lab/tiny.git", "lab/t iny", "lab/tiny\n",
        "lab/tiny@", "lab/tiny@../x", "lab/tiny@a b", "-rf/x", "lab/" + "x" * 97, "datasets/a/b/c", "lab/tiny@x@y",
        "https://host/lab/tiny", "lab/ünï",
    ],
)  # fmt: skip
def test_what_names_no_repository_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_repository(text)


@pytest.mark.parametrize(
    "revision", ["", "@main", "@v1.0", "@" + COMMIT[:39], "@" + COMMIT.upper(), "@" + COMMIT + "0"]
)
def test_a_branch_is_refused_with_the_command_that_tells_its_commit(tmp_path: Path, revision: str) -> None:
    (tmp_path / "hpcenv.toml").write_text(f'image = "host"\n[[data]]\nhub = "datasets/lab/rows{revision}"\n')
    with pytest.raises(SpecError) as caught:
        open_workspace(tmp_path)
    assert "hpcenv data resolve datasets/lab/rows" in str(caught.value.why)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", "needs one of the two"),
        (f'hub = "lab/tiny@{COMMIT}"\nfiles = ["a"]\n[[data]]\nhub = "models/lab/tiny@{COMMIT}"', "two [[data]] name"),
        (f'path = "x"\nhub = "lab/tiny@{COMMIT}"', "needs one of the two"),
        ('path = "x"\nfiles = ["*.json"]', "`files` is for a repository"),
    ],
)
def test_data_have_one_place(tmp_path: Path, lines: str, said: str) -> None:
    (tmp_path / "hpcenv.toml").write_text(f'image = "host"\n[[data]]\n{lines}\n')
    with pytest.raises(SpecError) as caught:
        open_workspace(tmp_path)
    assert said in str(caught.value.why)
