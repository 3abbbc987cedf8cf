"""The code of an editable install."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from probe_world import Venv, altered, package


def test_an_editable_install_is_named_and_has_no_digest(env: Venv, tmp_path: Path) -> None:
    info = env.install("mine", {"__editable__.mine.pth": b"/home/me/src\n"})
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///home/me", "dir_info": {"editable": True}}))
    mine = package(env.probe(), "mine")
    assert mine["record-sha256"] is None and mine["reason"] == "editable install of file:me"
    (info / "direct_url.json").write_text("[" * 100000)
    broken = package(env.probe(), "mine")
    assert broken["reason"].startswith("origin: ")


def git(folder: Path, *arguments: str) -> str:
    if shutil.which("git") is None:
        pytest.skip("NOT TESTED: no git on this machine")
    who = ["-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *who, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    return done.stdout.strip()


def test_an_editable_install_names_the_commit_and_whether_it_is_changed(env: Venv, tmp_path: Path) -> None:
    source = tmp_path / "my source"
    (source / "pkg").mkdir(parents=True)
    (source / "pkg/a.py").write_text("1")
    git(source, "init", "-q")
    info = env.install("mine", {"__editable__.mine.pth": b"x\n"})
    url = (source / "pkg").as_uri()
    (info / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {"editable": True}}))

    def state(**variables: str) -> dict[str, Any]:
        entry = package(env.probe(**variables), "mine")
        assert (entry["source"], entry["direct-url"]) == ("editable", {"url": "file:pkg", "editable": True})
        assert isinstance(entry["git"], dict)
        return entry["git"]

    assert state()["reason"].endswith("RECORD: no commit") or "reason" in state()
    git(source, "add", ".")
    git(source, "commit", "-qm", "one")
    commit = git(source, "rev-parse", "HEAD")
    clean = {"commit": commit, "dirty": False, "diff-sha256": "none"}
    assert state() == clean
    git(source, "pack-refs", "--all")
    assert state(PATH="/nonexistent") == {"commit": commit, "reason": "whether it is changed is unknown: no git here"}
    (source / "pkg/a.py").write_text("2")
    changed = state()
    assert changed == {"commit": commit, "dirty": True, "diff-sha256": changed["diff-sha256"]} != clean
    git(source, "checkout", "-q", "--detach")
    git(source, "worktree", "add", "-q", str(tmp_path / "tree"), "main")
    (info / "direct_url.json").write_text(
        json.dumps({"url": (tmp_path / "tree").as_uri(), "dir_info": {"editable": True}})
    )
    entry = package(env.probe(), "mine")
    assert entry["git"] == clean
    (tmp_path / "tree/.git").write_text("gitdir: /etc\n")
    assert package(env.probe(), "mine")["git"]["reason"].startswith("its commit is unknown: FileNotFoundError")


@pytest.fixture
def editable(env: Venv, tmp_path: Path) -> Path:
    """The source of an editable install, not under git."""
    source = tmp_path / "source"
    for path in ("src/pkg/__init__.py", "src/pkg/kernel.cu", "bench/speed.py"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text("1")
    info = env.install("mine", {"__editable__.mine.pth": f"{source}/src\n".encode()})
    (info / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {"editable": True}}))
    return source


def commit_all(source: Path) -> None:
    git(source, "init", "-q")
    (source / ".gitignore").write_text("*.so\n__pycache__/\nbuild/\nout/\n")
    git(source, "add", ".")
    git(source, "commit", "-qm", "one")


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("src/pkg/__init__.py", True),
        ("src/pkg/kernel.cu", True),  # tracked: whatever it is
        ("src/pkg/new.py", False),
        ("src/pkg/fast.cpython-311-x86_64-linux-gnu.so", False),  # ignored
        ("src/pkg/lib/libfast.so.2", False),
        ("src/pkg/bare.pyc", False),
        ("out/generated.py", False),  # ignored, and importable from the source's folder
        ("src/pkg/na\nme \udce9.py", False),
    ],
)
def test_each_edit_of_an_editable_install_changes_its_digest(env: Venv, editable: Path, path: str, known: bool) -> None:
    commit_all(editable)
    seen = []
    for text in ("1" if known else None, "first", "second", None):
        (editable / path).parent.mkdir(exist_ok=True)
        (editable / path).write_text(text) if text else (editable / path).unlink(missing_ok=True)
        seen.append(package(env.probe(), "mine")["git"]["diff-sha256"])
    assert seen[0] == "none" and len(set(seen)) == (4 if known else 3)
    assert (seen[3] == "none") is not known


def test_a_digest_of_changes_is_told_in_the_docstring(env: Venv, editable: Path) -> None:
    commit_all(editable)
    (editable / "src/pkg/kernel.cu").write_text("2")
    (editable / "src/pkg/__init__.py").unlink()
    git(editable, "mv", "bench/speed.py", "bench/fast.py")
    (editable / "link.py").symlink_to("nowhere")
    lines = [
        "src/pkg/kernel.cu\0" + hashlib.sha256(b"2").hexdigest(),
        "src/pkg/__init__.py\0missing",
        "bench/speed.py\0missing",
        "bench/fast.py\0" + hashlib.sha256(b"1").hexdigest(),
        "link.py\0missing\0nowhere",
    ]
    expected = hashlib.sha256(b"hpcenv-diff-v1\n" + "\n".join(sorted(lines)).encode()).hexdigest()
    assert package(env.probe(), "mine")["git"]["diff-sha256"] == expected


@pytest.mark.parametrize(
    "path",
    [
        "src/pkg/__pycache__/x.cpython-311.pyc",
        "build/lib.linux-x86_64/pkg/x.so",  # no folder that Python could import from
        ".cache/x.py",
        "out/notes.txt",
        "data.bin",
        "lockfiles/default.lock.toml",  # holds this digest
        "venv/lib/x.py",
        "runs/first/source/x.py",
    ],
)
def test_what_is_no_code_of_an_editable_install_changes_no_digest(env: Venv, editable: Path, path: str) -> None:
    for mark in ("venv/pyvenv.cfg", "runs/first/manifest.json", "runs/first/lock.toml", "lockfiles/default.lock.toml"):
        (editable / mark).parent.mkdir(parents=True, exist_ok=True)
        (editable / mark).write_text("")

    def written() -> dict[str, Any]:
        (editable / path).parent.mkdir(parents=True, exist_ok=True)
        (editable / path).write_text("2")
        return package(env.probe(), "mine")

    before = package(env.probe(), "mine")["files"]
    assert before["sha256"] == written()["files"]["sha256"]
    (editable / path).unlink()
    (editable / "lockfiles/default.lock.toml").write_text("1")
    commit_all(editable)
    assert written()["git"]["diff-sha256"] == "none"


@pytest.mark.parametrize("under_git", [True, False])
def test_the_environment_beside_the_code_is_no_code_of_an_editable_install(
    env: Venv, tmp_path: Path, under_git: bool
) -> None:
    """`python -m venv env; pip install -e .`: the folder of all packages is on sys.path, and below the source."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/a.py").write_text("1")
    info = env.install("mine", {"__editable__.mine.pth": f"{tmp_path}\n".encode()})
    (info / "direct_url.json").write_text(json.dumps({"url": tmp_path.as_uri(), "dir_info": {"editable": True}}))
    if under_git:
        git(tmp_path, "init", "-q")
        (tmp_path / ".gitignore").write_text("env/\n")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", "one")

    def state() -> str:
        mine = package(env.probe(), "mine")
        return str(mine["git"]["diff-sha256"] if under_git else mine["files"]["sha256"])

    before = state()
    assert (before == "none") is under_git
    env.install("other", {"other/__init__.py": b"X = 1\n"})
    assert state() == before
    (tmp_path / "pkg/b.py").write_text("1")
    assert state() != before


def test_a_file_that_git_is_told_not_to_look_at_counts(env: Venv, editable: Path) -> None:
    commit_all(editable)
    git(editable, "update-index", "--assume-unchanged", "src/pkg/__init__.py")
    before = package(env.probe(), "mine")["git"]
    (editable / "src/pkg/__init__.py").write_text("2")
    after = package(env.probe(), "mine")["git"]
    assert (before["dirty"], after["dirty"]) == (False, False)
    assert before["diff-sha256"] != after["diff-sha256"]


@pytest.mark.parametrize("has_git", [False, True])
def test_without_an_answer_of_git_the_files_of_an_editable_install_count(
    env: Venv, editable: Path, has_git: bool
) -> None:
    if has_git:
        commit_all(editable)

    def files() -> str:
        entry = package(env.probe(PATH="/nonexistent"), "mine")
        assert "diff-sha256" not in entry["git"] and entry["git"]["reason"]
        return str(entry["files"]["sha256"])

    one = hashlib.sha256(b"1").hexdigest()
    lines = [f"bench/speed.py\0{one}", f"src/pkg/__init__.py\0{one}"]
    assert files() == hashlib.sha256(b"hpcenv-files-v1\n" + "\n".join(lines).encode()).hexdigest()
    (editable / "src/pkg/fast.so").write_text("1")
    before = files()
    (editable / "src/pkg/fast.so").write_text("2")
    assert files() != before


def test_a_git_that_does_not_end_is_not_waited_for_twice(env: Venv, editable: Path, tmp_path: Path) -> None:
    commit_all(editable)
    info = env.install("other", {"__editable__.other.pth": b"x\n"})
    (info / "direct_url.json").write_text(json.dumps({"url": editable.as_uri(), "dir_info": {"editable": True}}))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").write_text('#!/bin/sh\necho x >> "$0.calls"\nexec sleep 60\n')
    (tmp_path / "bin/git").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    found = altered(env, {"GIT_SECONDS = 20.0": "GIT_SECONDS = 0.5"}, path=path)
    for name in ("mine", "other"):
        entry = package(found, name)
        assert entry["git"]["reason"] == "whether it is changed is unknown: git took longer than 0.5 s"
        assert entry["files"]["sha256"]
    assert (tmp_path / "bin/git.calls").read_text() == "x\n"


@pytest.mark.parametrize(
    ("bound", "reason"),
    [
        ("SOURCE_FILES = 20_000", "ValueError: more than 1 files to hash"),
        ("SOURCE_BYTES = 4 << 30", "ValueError: more than 0 GiB to hash"),
        ("SOURCE_ENTRIES = 1_000_000", "ValueError: more than 1 files and folders below its folder"),
        ("SOURCE_SECONDS = 60.0", "TimeoutError: reading the editable installs took longer than 1e-06 s"),
    ],
)
def test_a_tree_beyond_the_bounds_is_unknown(env: Venv, editable: Path, bound: str, reason: str) -> None:
    small = "1e-6" if "SECONDS" in bound else "1"
    found = altered(env, {bound: f"{bound.split()[0]} = {small}"}, path=os.environ["PATH"])
    assert package(found, "mine")["files"] == {"reason": reason}
