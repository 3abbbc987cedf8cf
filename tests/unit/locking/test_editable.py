"""Packages whose code lies elsewhere, or came from a commit: locked, checked and compared by what they run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from lock_world import check_project, lock_project

from hpcenv.locking import difference
from hpcenv.locking.lock import LockResult
from hpcenv.project import lockfile as lock_model
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.severities import severities
from hpcenv.project.workspace import open_workspace, read_lockfile
from hpcenv.submission.verify_here import verify

from ...conftest import TORCH, make_python  # noqa: TID252

ENVIRON = {"PATH": os.environ["PATH"]}
NAMES = {name: f"packages.mine.{name}" for name in ("commit-id", "dirty", "diff-sha256", "files-sha256")}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A project whose environment has the package `mine`, installed by `pip install -e source`."""
    folder = tmp_path / "project"
    (folder / "source/mine").mkdir(parents=True)
    (folder / "source/mine/__init__.py").write_text("M = 1\n")
    origin = {"url": (folder / "source").as_uri(), "dir_info": {"editable": True}}
    install(folder, origin, {"__editable__.mine.pth": f"{folder}/source\n"})
    (folder / "hpcenv.toml").write_text('image = "host"\npython = "env/bin/python"\n')
    return folder


def install(folder: Path, origin: dict[str, Any], files: dict[str, str]) -> None:
    info = "mine-1.0.dist-info"
    files = {**TORCH, **files, f"{info}/METADATA": "Name: mine\nVersion: 1.0\n"}
    make_python(folder / "env", files)
    [place] = folder.glob(f"env/lib/python*/site-packages/{info}")
    (place / "direct_url.json").write_text(json.dumps(origin))


@pytest.fixture
def under_git(own: Path) -> Path:
    """The same, with the source at its first commit."""
    (own / "source/.gitignore").write_text("*.so\n")
    git(own, "init", "-q")
    commit(own)
    return own


def git(folder: Path, *words: str) -> str:
    if shutil.which("git") is None:
        pytest.skip("NOT TESTED: no git on this machine")
    who = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    done = subprocess.run(
        ["git", "-C", folder / "source", *who, *words], env=ENVIRON, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(folder: Path) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "more")


def edit(folder: Path, text: str, name: str = "__init__.py") -> None:
    (folder / "source/mine" / name).write_text(text)


def lock_here(folder: Path) -> LockResult:
    return lock_project(folder, ENVIRON)


def locked(folder: Path) -> Lockfile:
    return read_lockfile(folder / "lockfiles/default.lock.toml")


def told(folder: Path) -> dict[str, str]:
    """Return what `verify` tells of packages: field -> severity and result."""
    verdict, *_ = verify(open_workspace(folder), environ=ENVIRON)
    return {f.field: f"{f.severity} {f.result}" for f in verdict.findings if f.field.startswith("packages.")}


# -- lock --check -------------------------------------------------------------------------


def test_a_locked_editable_install_is_fresh(under_git: Path) -> None:
    lock_here(under_git)
    assert check_project(under_git, ENVIRON).reasons == ()


def test_a_locked_package_of_a_repository_is_fresh(tmp_path: Path) -> None:
    origin = {"url": "https://git.example/mine.git", "vcs_info": {"vcs": "git", "commit_id": "ab" * 20}}
    install(tmp_path, origin, {"mine.py": "M = 1\n"})
    (tmp_path / "hpcenv.toml").write_text('image = "host"\npython = "env/bin/python"\n')
    lock_here(tmp_path)
    assert check_project(tmp_path, ENVIRON).reasons == ()
    [info] = tmp_path.glob("env/lib/python*/site-packages/mine-1.0.dist-info")
    origin["vcs_info"] = {"vcs": "git", "commit_id": "cd" * 20}
    (info / "direct_url.json").write_text(json.dumps(origin))
    [reason] = check_project(tmp_path, ENVIRON).reasons
    assert str(reason) == f"environment-differs: locked packages.mine.commit-id {'ab' * 20}, now {'cd' * 20}"


def test_another_commit_is_stale(under_git: Path) -> None:
    lock_here(under_git)
    before = git(under_git, "rev-parse", "HEAD")
    edit(under_git, "M = 2\n")
    commit(under_git)
    after = git(under_git, "rev-parse", "HEAD")
    [reason] = check_project(under_git, ENVIRON).reasons
    assert str(reason) == f"environment-differs: locked packages.mine.commit-id {before}, now {after}"


# -- what is changed in its tree ----------------------------------------------------------


def test_a_clean_tree_matches_and_a_changed_one_is_told(under_git: Path) -> None:
    lock_here(under_git)
    assert told(under_git) == {}
    edit(under_git, "M = 2\n")
    assert told(under_git) == {NAMES["dirty"]: "warn mismatch", NAMES["diff-sha256"]: "warn mismatch"}


def test_a_tree_that_was_locked_while_it_was_changed_matches_until_it_is_changed_again(under_git: Path) -> None:
    edit(under_git, "M = 2\n")
    lock_here(under_git)
    assert told(under_git) == {}
    edit(under_git, "M = 3\n")
    assert told(under_git) == {NAMES["diff-sha256"]: "warn mismatch"}


def test_under_the_bitwise_profile_that_blocks(under_git: Path) -> None:
    with open(under_git / "hpcenv.toml", "a") as file:
        file.write('[determinism]\nprofile = "bitwise"\n')
    edit(under_git, "M = 2\n")
    lock_here(under_git)
    edit(under_git, "M = 3\n")
    assert told(under_git) == {NAMES["diff-sha256"]: "must mismatch"}
    [reason] = check_project(under_git, ENVIRON).reasons
    assert "packages.mine.diff-sha256" in str(reason)


def test_a_compiled_module_that_git_ignores_is_told(under_git: Path) -> None:
    edit(under_git, "first", "fast.so")
    lock_here(under_git)
    edit(under_git, "second", "fast.so")
    assert told(under_git) == {NAMES["diff-sha256"]: "warn mismatch"}


def test_without_git_the_files_are_compared(own: Path) -> None:
    notes = lock_here(own).notes
    assert "editable installs, compared by the files of their trees: mine" in notes
    assert told(own) == {}
    edit(own, "M = 2\n")
    assert told(own) == {NAMES["files-sha256"]: "warn mismatch"}


def test_where_git_is_missing_the_change_is_unknown_with_its_reason(under_git: Path, tmp_path: Path) -> None:
    lock_here(under_git)
    verdict, *_ = verify(open_workspace(under_git), environ={"PATH": str(tmp_path)})
    found = {f.field: (f.result, f.found) for f in verdict.findings if f.field.startswith("packages.")}
    why = ("unknown", "whether it is changed is unknown: no git here")
    assert found == {NAMES["dirty"]: why, NAMES["diff-sha256"]: why}


def test_what_could_be_told_by_nothing_is_locked_as_unknown(own: Path) -> None:
    (own / "source/mine/loop.so").symlink_to("/proc/self/mem")  # opens, and fails to be read
    result = lock_here(own)
    assert [field for field in result.lockfile.unknown if "mine" in field] == [NAMES["files-sha256"]]
    assert any(note.startswith(f"{NAMES['files-sha256']} is unknown: ") for note in result.notes)
    assert NAMES["files-sha256"] in told(own)


def test_a_lockfile_from_before_there_was_a_digest_matches_as_it_did(under_git: Path) -> None:
    lock_here(under_git)
    path = under_git / "lockfiles/default.lock.toml"
    data = tomlkit.parse(path.read_text()).unwrap()
    for dist in data["packages"]["dist"]:
        dist.get("direct-url", {}).pop("diff-sha256", None)
    data["fingerprint"] = lock_model.fingerprint(data)
    path.write_text(tomlkit.dumps(data))
    assert told(under_git) == {}
    edit(under_git, "M = 2\n")
    assert told(under_git) == {NAMES["dirty"]: "warn mismatch"}


def test_two_lockfiles_of_two_changed_trees_differ(under_git: Path) -> None:
    sides = []
    for text in ("M = 2\n", "M = 3\n"):
        edit(under_git, text)
        lock_here(under_git)
        sides.append(difference.of_lockfile(locked(under_git)))
    assert [change.field for change in difference.compare(*sides, severities=[severities({})])] == [
        NAMES["diff-sha256"]
    ]


# -- what lock says -----------------------------------------------------------------------


def test_lock_says_by_what_an_editable_install_is_compared(under_git: Path) -> None:
    def notes() -> list[str]:
        return [note for note in lock_here(under_git).notes if "mine" in note]

    assert notes() == ["editable installs, compared by their commit and what differs from it: mine"]
    edit(under_git, "M = 2\n")
    here = git(under_git, "rev-parse", "--short=12", "HEAD")
    [note] = notes()
    assert note.startswith(f"mine is an editable install and its tree is not commit {here}: the difference is locked")


def test_lock_says_which_files_are_not_compared(own: Path) -> None:
    beside = own / "beside/tool.egg-info"
    beside.mkdir(parents=True)
    (beside / "PKG-INFO").write_text("Name: tool\nVersion: 1\n")
    [site] = own.glob("env/lib/python*/site-packages")
    (site / "beside.pth").write_text(f"{own}/beside\n")
    (site / "loose.egg-info").mkdir()
    (site / "loose.egg-info/PKG-INFO").write_text("Name: loose\nVersion: 1\n")
    said = [note for note in lock_here(own).notes if "packages without a digest" in note]
    assert said == [
        "packages without a digest (their files count as unlisted): loose",
        "packages without a digest (they are outside of the environment: their files are not compared): tool",
    ]


# -- files that no package lists ----------------------------------------------------------


def unlisted_note(folder: Path) -> str:
    verdict, *_ = verify(open_workspace(folder), environ=ENVIRON)
    [note] = [f.note for f in verdict.findings if f.field == "packages.unlisted-digest"]
    return note


def test_a_file_that_no_package_lists_is_named(own: Path) -> None:
    lock_here(own)
    [site] = own.glob("env/lib/python*/site-packages")
    before = locked(own).packages.unlisted_count
    (site / "helper\x1b[2J.py").write_text("")
    assert before == 0
    assert unlisted_note(own) == r"no such files when it was locked, now 1: site-packages/helper\x1b[2J.py"
    [reason] = check_project(own, ENVIRON).reasons
    assert reason.note == unlisted_note(own)
    lock_here(own)
    for name in "abc":
        (site / f"{name * 100}.py").write_text("")
    note = unlisted_note(own)
    assert note.startswith("1 such file when it was locked, now 4, the newest: ...")
    assert [len(name) for name in note.partition("newest: ")[2].split(", ")] == [60, 60, 60]
