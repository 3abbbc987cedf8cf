"""The bundle of a project with secrets that git ignores, as its user makes it: none is in it, and the list says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="NOT RUN: git is not installed")

MARK = "m4rk-of-a-secret"
# Eight kinds, by name or by content, and one that nothing but git gives away.
IGNORED = {
    ".env": f"TOKEN={MARK}\n",
    "secrets.yaml": f"hf_token: {MARK}\n",
    "conf/credentials.json": json.dumps({"password": MARK}),
    "id_ed25519": f"-----BEGIN OPENSSH PRIVATE KEY-----\n{MARK}\n",
    "local.toml": f'[db]\npassword = "{MARK}"\n',
    "private/notes.txt": f"The pin of the cluster is {MARK}.\n",
    "keys.py": f'API_KEY = "{MARK}"\n',
    "store.p12": f"\0{MARK}",
    "private/.netrc": f"machine x login y password {MARK}\n",
}
GITIGNORE = "runs/\n.env\nsecrets.yaml\ncredentials.json\nid_ed25519\nlocal.toml\nprivate/\nkeys.py\n*.p12\nhelper.py\nmine.py\n"
TRAIN = f"""import keys, helper
mark = {MARK[:4]!r} + {MARK[4:]!r}
assert all(mark in open(name, errors="replace").read() for name in {sorted(IGNORED)!r})
print("found all")
"""


@pytest.fixture
def repository(project: Path) -> Path:
    files = {**IGNORED, "helper.py": "X = 1\n", "train.py": TRAIN, ".gitignore": GITIGNORE, "conf/open.yaml": "lr: 1\n"}
    for name, text in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    return project


def commit(folder: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    me = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "-A"), (*me, "commit", "-qm", "x")):
        subprocess.run(["git", *words], cwd=folder, env=environ, check=True)


def run_and_bundle(hpcenv: Any, folder: Path, *words: str) -> tuple[str, zipfile.ZipFile]:
    """Return what `bundle make` says, and the bundle."""
    submit = ("submit", "train.py", "--nproc", "1", "--cluster", "local", "--name", "a", "--wait")
    done = hpcenv(*submit, *words, cwd=folder)
    assert done.status == 0 and "found all" in done.stdout + (folder / "runs/a/job.log").read_text(), done.stderr
    done = hpcenv("bundle", "make", "a", cwd=folder)
    assert done.status == 0, done.stderr
    return done.stdout, zipfile.ZipFile(folder / "a.hpcenv.zip")


def with_mark(archive: zipfile.ZipFile) -> set[str]:
    return {name for name in archive.namelist() if MARK.encode() in archive.read(name)}


def test_no_secret_that_git_ignores_is_in_a_bundle_and_each_is_listed(hpcenv: Any, repository: Path) -> None:
    commit(repository)
    said, archive = run_and_bundle(hpcenv, repository)
    with archive:
        names = {name.removeprefix("a/source/") for name in archive.namelist()}
        assert with_mark(archive) == set()
        about = json.loads(archive.read("a/bundle.json"))
    assert not set(IGNORED) & names
    assert {"train.py", "helper.py", "conf/open.yaml", ".gitignore"} <= names, "the other code is in it"
    assert {f"source/{name}" for name in IGNORED} <= set(about["left_out"])
    for name in IGNORED:
        assert f"left out: source/{name}: " in said
    assert "source/local.toml: git ignores it, and the copy only links to it" in said
    assert "source/keys.py: line 1 looks like a credential" in said


def test_what_include_names_is_in_it(hpcenv: Any, repository: Path) -> None:
    commit(repository)
    _, archive = run_and_bundle(hpcenv, repository, "--include", "local.toml", "--include", "keys.py")
    with archive:
        assert with_mark(archive) == {"a/source/local.toml", "a/source/keys.py"}


def test_a_new_script_that_git_ignores_is_not_in_it_either(hpcenv: Any, repository: Path) -> None:
    commit(repository)
    (repository / "mine.py").write_text(f'{TRAIN}API_KEY = "{MARK}"\n')
    submit = (
        "submit",
        "mine.py",
        "--nproc",
        "1",
        "--cluster",
        "local",
        "--name",
        "b",
        "--wait",
        "--allow-dirty",
    )
    done = hpcenv(*submit, cwd=repository)
    assert done.status == 0, done.stderr
    assert MARK in (repository / "runs/b/source.diff").read_text()
    done = hpcenv("bundle", "make", "b", cwd=repository)
    assert done.status == 0, done.stderr
    with zipfile.ZipFile(repository / "b.hpcenv.zip") as archive:
        assert with_mark(archive) == set()
    assert "left out: source/mine.py: line 5 looks like a credential" in done.stdout
    assert "left out: source.diff: it has the content of source/mine.py" in done.stdout


def test_without_git_names_and_content_decide(hpcenv: Any, repository: Path) -> None:
    said, archive = run_and_bundle(hpcenv, repository)
    with archive:
        # Nothing but git gave it away.
        assert with_mark(archive) == {"a/source/private/notes.txt"}
        assert "a/source/conf/open.yaml" in archive.namelist()
    assert said.count("left out: source/") == len(IGNORED) - 1


def test_the_verdict_lists_what_no_node_compares(hpcenv: Any, repository: Path) -> None:
    commit(repository)
    done = hpcenv("submit", "train.py", "--nproc", "1", "--cluster", "local", "--name", "a", "--wait", cwd=repository)
    said = " ".join((done.stdout + done.stderr).split())
    assert "live, not covered (links to your project)" in said
    assert "git ignores" in said and "--include PATTERN copies such files" in said
    for name in ("secrets.yaml", "local.toml"):
        assert name in json.loads((repository / "runs/a/manifest.json").read_text())["source"]["live"]


def test_an_export_for_others_has_none_of_them(hpcenv: Any, repository: Path, fake_slurm: Any) -> None:
    commit(repository)
    with open(repository / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write("[submit]\nassume-shared = true\n")
    words = ("submit", "train.py", "--nproc", "1", "--allow-dirty", "--export", "out")
    done = hpcenv(*words, cwd=repository, environ=fake_slurm.environ)
    assert done.status == 0, done.stderr
    found = [path for path in (repository / "out").rglob("*") if path.is_file() and MARK.encode() in path.read_bytes()]
    assert found == []
    assert "keys.py" in done.stderr
