"""Lockfiles of revision 1 keep their rules, and those of revision 2 their fingerprint (docs/decisions/0039)."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from corpus_not_checked import outside
from corpus_revision import bound, linked_module, old_conda_record
from corpus_world import GCC, UV, Case, ImageWorld, World, environment_variable
from lock_world import check_project

from hpcenv.project.workspace import notes_on, read_lockfile

ROOT = Path(__file__).resolve().parents[2]
# The last commit with revision 1 on which the trial of 2026-11-24 was made.
OLD = "0af6350"

# Both versions run it: what they say of a lockfile, or of an environment. `lock` is for the old one.
LOOK = """
import json, os, sys
from pathlib import Path
from hpcenv.project import lockfile
from hpcenv.project.workspace import open_workspace, read_lockfile
how, path = sys.argv[1:]
environ = dict(os.environ)
if how == "lock":
    from hpcenv.locking.lock import lock
    lock(open_workspace(path), environ=environ, report=lambda line: None)
elif how == "verify":
    try:
        from hpcenv.submission.verify_here import verify
    except ModuleNotFoundError:  # its name in the old version
        from hpcenv.submission.verify import verify
    verdict = verify(open_workspace(path), environ=environ, level="full")[0]
    found = [[f.field, f.result, f.severity, f.locked, f.found] for f in verdict.findings]
    print(json.dumps([verdict.result, sorted(f for f in found if f[0] != "lockfile.revision")]))
else:
    locked = read_lockfile(Path(path))
    expected = (*lockfile.expectations(locked, level="deep", origin=""), *lockfile.bind_expectations(locked, origin=""))
    print(json.dumps({
        "fingerprint": lockfile.fingerprint(lockfile.to_data(locked)),
        "expectations": sorted([e.field, e.value, e.rule] for e in expected),
        "packages": [repr(one).partition("(")[2] for one in lockfile.package_expectations(locked)],
    }, sort_keys=True))
"""


@pytest.fixture(scope="module")
def old_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hpcenv as it was at that commit."""
    done = subprocess.run(["git", "archive", OLD, "hpcenv", "lockfiles", "tests"], cwd=ROOT, capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"NOT TESTED: commit {OLD} is not in this clone")
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def look(code: Path, how: str, path: Path, environ: dict[str, str]) -> Any:
    argv = [sys.executable, "-c", LOOK, how, str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, env={**environ, "PYTHONPATH": str(code)}, cwd=code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout else None


def lockfiles_of(folder: Path) -> list[Path]:
    found = [*folder.rglob("*.lock.toml"), *folder.rglob("lock.toml")]
    return sorted(path for path in found if "invalid" not in path.name)


def test_a_lockfile_of_then_says_what_it_said(old_code: Path) -> None:
    """Every lockfile in the repository: its fingerprint, and what each node is compared with."""
    judged, removed = [], []
    for path in lockfiles_of(old_code):
        locked = read_lockfile(path)
        overlay = None if locked.container is None else locked.container.overlay
        if overlay is not None and not overlay.can_be_mounted:
            removed.append(path)
            continue
        environ = {"PATH": os.environ["PATH"]}
        assert look(old_code, "read", path, environ) == look(ROOT, "read", path, environ), path
        judged.append(path)
    assert len(judged) >= 20
    assert {path.parents[1].name for path in removed} <= {"overlay-changed", "overlay-differs", "overlay-missing"}


def test_a_lockfile_of_this_repository_keeps_its_bytes(old_code: Path) -> None:
    for path in (old_code / "lockfiles").glob("*.lock.toml"):
        assert (ROOT / "lockfiles" / path.name).read_bytes() == path.read_bytes()


def _corners(case: Case) -> list[Callable[[], object]]:
    """Put everything into an environment that revision 2 looks at in another way; return changes of it."""
    module = linked_module(case)
    data = {
        "extpkg-2.1.dist-info/entry_points.txt": "[torch.backends]\n",
        "torch/lib/libdevice.10.bc": "one",
        "purepkg/._core.py": "one",
        "~urepkg/core.py": "one",
        "nohash/table.json": "one",
        "/lib/libmkl_rt.so": "one",
    }
    for name, text in data.items():
        case.write(name, text)
    old_conda_record(case)
    if GCC is not None:
        made = [
            case.world.libraries.build("libpre.so", f"int p(void) {{ return {n}; }}", variant=str(n)) for n in (1, 2)
        ]
        library = outside(case, "libpre.so", "")
        shutil.copy(made[0], library)
        case.environ["LD_PRELOAD"] = str(library)
        replaced = [lambda: (library.unlink(), shutil.copy(made[1], library))]
    else:
        replaced = []
    kept = [name for name in data if name not in ("purepkg/._core.py", "~urepkg/core.py")]
    changes = [lambda name=name: case.write(name, "two") for name in kept]
    return [lambda: module.write_text("X = 2\n"), *replaced, *changes]


def test_a_lockfile_of_revision_1_is_judged_by_its_own_rules(old_code: Path, world: World, tmp_path: Path) -> None:
    case = world.copy(tmp_path / "p")
    changes = _corners(case)
    look(old_code, "lock", case.root, case.environ)
    assert read_lockfile(case.lockfile()).revision == 1
    before = look(old_code, "verify", case.root, case.environ)
    assert before[0] == "match"
    assert look(ROOT, "verify", case.root, case.environ) == before
    for change in changes:
        change()
    assert look(ROOT, "verify", case.root, case.environ) == look(old_code, "verify", case.root, case.environ)
    [note] = notes_on(read_lockfile(case.lockfile()), case.lockfile())
    assert "code outside of the environment that its links lead to; an entry_points.txt that no RECORD lists" in note
    assert world.lock(case.root, environ=case.environ).lockfile.revision == 2
    assert look(ROOT, "verify", case.root, case.environ)[0] == "match"
    case.clean_up()


# -- the fingerprint of revision 2 --------------------------------------------------------


def fingerprint(case: Case) -> str:
    locked = case.world.lock(case.root, environ=case.environ).lockfile
    assert locked.fingerprint.startswith("hpc2-")
    return str(locked.fingerprint)


def _moved(case: Case) -> None:
    case.env.rename(case.root / "other")
    case.env, case.site = case.root / "other", case.root / "other" / case.world.site_name
    (case.root / "hpcenv.toml").unlink()
    (case.root / "hpcenv.toml").write_text('image = "host"\npython = "other/bin/python"\n')


def _wheel(case: Case) -> Path:
    """A local wheel: each installer writes its address and its hash in its own way."""
    [wheel] = case.world.wheels.glob("purepkg-*.whl")
    return wheel


def _by_pip(case: Case) -> None:
    case.world.pip(case.env, "install", "--force-reinstall", str(_wheel(case)))


def _by_uv(case: Case) -> None:
    words = ["--no-index", "--no-deps", "--no-config", "--no-cache", "--link-mode", "copy", "--reinstall"]
    argv = [str(UV), "pip", "install", "--python", str(case.env / "bin/python"), *words, str(_wheel(case))]
    done = subprocess.run(argv, capture_output=True, text=True, env=case.world.environ)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("change", [_moved, _by_pip, _by_uv])
def test_equal_environments_have_one_fingerprint(change: Callable[[Case], None], world: World, tmp_path: Path) -> None:
    if change is _by_uv and UV is None:
        pytest.skip("NOT TESTED: no uv on PATH or beside this Python")
    case = world.copy(tmp_path / "p")
    before = fingerprint(case)
    change(case)
    assert fingerprint(case) == before
    case.edit("purepkg/core.py", "LIMIT = 100", "LIMIT = 101")
    assert fingerprint(case) != before
    case.clean_up()


def test_packages_of_the_login_node_are_not_part_of_a_host_environment(world: World) -> None:
    from hpcenv.project import lockfile

    data = lockfile.to_data(read_lockfile(world.base / "lockfiles/default.lock.toml"))
    other = {**data, "system": {**data["system"], "packages-digest": "sha256:" + "0" * 64}}
    assert lockfile.fingerprint(other) == lockfile.fingerprint(data) == data["fingerprint"]
    assert lockfile.fingerprint({**other, "revision": 1}) != lockfile.fingerprint({**data, "revision": 1})
    other = {**data, "system": {**data["system"], "glibc": "2.1"}}
    assert lockfile.fingerprint(other) != data["fingerprint"]


# -- binds --------------------------------------------------------------------------------


def test_lock_check_sees_a_changed_module_in_a_bind(image_world: ImageWorld, tmp_path: Path) -> None:
    case = image_world.copy(tmp_path / "p")
    module = bound(case, "/opt", "pp/helper.py")
    [table] = read_lockfile(case.lockfile()).bind
    assert (table.content, list(table.code)) == (None, ["/opt/pp"])
    with environment_variable("PATH", case.environ["PATH"]):
        assert check_project(case.root, case.environ).fresh
        module.write_text("X = 2\n")
        [reason] = check_project(case.root, case.environ).reasons
    assert (reason.name, reason.locked.partition(" ")[0]) == ("bind-changed", "/opt/pp")
    case.clean_up()
