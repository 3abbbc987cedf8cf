"""The run's own copy: what is in it, what is refused, and that later edits do not reach it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from hpcenv.errors import HpcenvError
from hpcenv.project.context import Context
from hpcenv.project.workspace import open_workspace
from hpcenv.records.code_listing import Listing, digest_of
from hpcenv.records.files import load_record
from hpcenv.records.run_folder import RunFolder
from hpcenv.submission.plan import Plan
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions
from hpcenv.submission.submit import submit

GIT = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="NOT RUN: git is not installed")


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "protocol.file.allow=always", *words]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **GIT}, capture_output=True, check=True)
    return os.fsdecode(done.stdout).strip()


ONE_CPU = "requested on each node: 1 CPU (one for each rank)"


@pytest.fixture
def tree(project: Path) -> Path:
    """The tiny project under git."""
    (project / ".gitignore").write_text("runs/\ndata/\n")
    (project / "helper.py").write_text("VALUE = 1\n")
    git(project, "init", "-q")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "one")
    return project


@pytest.fixture
def context(tree: Path, fake_slurm: Any) -> Context:
    environ = {**fake_slurm.environ, **GIT}
    return Context(environ=environ, cwd=tree, now=time.localtime(0), token="beef", command=("hpcenv", "submit"))


@pytest.fixture
def plan(tree: Path, context: Context) -> Callable[..., Plan]:
    def make(script: str = "train.py", **words: Any) -> Plan:
        options = SubmitOptions(script=script, **{"nproc": 1, "assume_shared": True, "name": "a", **words})
        return plan_job(open_workspace(tree), options, context)

    return make


def refused(make: Callable[[], object], code: str) -> HpcenvError:
    with pytest.raises(HpcenvError) as caught:
        make()
    assert caught.value.code == code, caught.value
    return caught.value


def test_a_run_uses_a_copy_of_what_git_tracks(plan: Any, tree: Path, context: Context) -> None:
    (tree / "data").mkdir()
    (tree / "data" / "big.bin").write_bytes(b"\0" * 1000)
    planned = plan()
    result = submit(planned, context)
    (tree / "helper.py").write_text("VALUE = 2\n")
    (tree / "train.py").write_text("later\n")

    run = RunFolder(result.run_folder)
    assert planned.manifest.script == str(run.source / "train.py")
    assert (planned.manifest.workdir, planned.manifest.submitted_in) == (str(run.source), str(tree))
    assert (run.source / "helper.py").read_text() == "VALUE = 1\n"
    assert hashlib.sha256((run.source / "train.py").read_bytes()).hexdigest() == planned.manifest.script_sha256
    assert (run.source / "data" / "big.bin").read_bytes() == b"\0" * 1000
    assert not (run.source / ".git").exists()
    assert not (run.source / "runs").exists()
    source = planned.manifest.source
    assert source is not None
    assert (source.commit, source.dirty, source.diff_sha256) == (git(tree, "rev-parse", "HEAD"), False, "")
    # Tracked lockfiles are no code: the run keeps the one that it uses.
    assert source.files == len(git(tree, "ls-files", ":!lockfiles").splitlines()) == 4
    listing = load_record(Listing, run.listing)
    assert source.digest == digest_of(listing.files) == tomlkit.parse(run.lockfile.read_text())["code"]["digest"]
    assert listing.files["source/helper.py"] == hashlib.sha256(b"VALUE = 1\n").hexdigest()
    code = tomlkit.parse(run.lockfile.read_text())["code"].unwrap()
    assert (code["commit"], code["dirty"], code["script-sha256"]) == (
        source.commit, False, planned.manifest.script_sha256,
    )  # fmt: skip
    live = "live, not covered (links to your project): data/big.bin"
    assert planned.notes == (ONE_CPU, f"{live}; git ignores 1 of them, --include PATTERN copies such files")


def test_links_modes_and_odd_names_are_kept(plan: Any, tree: Path, context: Context) -> None:
    odd = os.fsdecode("a b\n'\"$(id)-größe-\xff".encode("utf-8", "surrogateescape")[:-2] + b"\xff.txt")
    (tree / odd).write_text("odd")
    (tree / "tool.sh").write_text("#!/bin/sh\n")
    (tree / "tool.sh").chmod(0o755)
    (tree / "pkg").mkdir()
    (tree / "pkg" / "near").symlink_to("../helper.py")
    (tree / "pkg" / "far").symlink_to("../../elsewhere")
    (tree / "pkg" / "dangling").symlink_to("nothing")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "odd")
    source = RunFolder(submit(plan(), context).run_folder).source
    assert (source / odd).read_text() == "odd"
    assert os.access(source / "tool.sh", os.X_OK)
    assert not os.access(source / "helper.py", os.X_OK)
    assert os.readlink(source / "pkg" / "near") == "../helper.py"
    assert os.readlink(source / "pkg" / "far") == str(tree.resolve().parent / "elsewhere"), "it leads to the same place"
    assert os.readlink(source / "pkg" / "dangling") == "nothing"


def test_changed_code_is_refused_by_name(plan: Any, tree: Path) -> None:
    (tree / "helper.py").write_text("VALUE = 2\n")
    error = refused(plan, "usage")
    assert error.why == "changed: helper.py"
    assert "git commit" in str(error.hint)
    assert "--allow-dirty" in str(error.hint)
    git(tree, "add", "-A")
    assert refused(plan, "usage").why == "changed: helper.py"


def test_an_untracked_script_is_refused_and_an_untracked_module_is_told(
    plan: Any, tree: Path, context: Context
) -> None:
    (tree / "new.py").write_text("print(1)\n")
    assert refused(lambda: plan("new.py"), "usage").why == "not under git: new.py"
    planned = plan()
    assert planned.notes == (
        ONE_CPU,
        "git does not track these modules of the copy: new.py",
    )
    assert (RunFolder(submit(planned, context).run_folder).source / "new.py").read_text() == "print(1)\n"


def test_a_file_that_git_was_told_not_to_look_at_is_not_taken_for_clean(plan: Any, tree: Path) -> None:
    git(tree, "update-index", "--assume-unchanged", "helper.py")
    (tree / "helper.py").write_text("VALUE = 2\n")
    assert refused(plan, "usage").why == "git does not look at (assume-unchanged): helper.py"


def test_with_allow_dirty_the_difference_is_recorded_and_gives_the_code_again(
    plan: Any, tree: Path, context: Context, tmp_path: Path
) -> None:
    (tree / "helper.py").write_bytes(b"VALUE = 2\r\n\xff")
    (tree / "new.py").write_text("print('new')\n")
    planned = plan("new.py", allow_dirty=True)
    run = RunFolder(submit(planned, context).run_folder)
    source = planned.manifest.source
    assert source is not None
    assert source.dirty
    assert source.diff_sha256 == hashlib.sha256(run.source_diff.read_bytes()).hexdigest()
    git(tmp_path, "clone", "-q", str(tree), "again")
    git(tmp_path / "again", "apply", "--whitespace=nowarn", str(run.source_diff))
    for name in ("helper.py", "new.py", "train.py"):
        assert (tmp_path / "again" / name).read_bytes() == (run.source / name).read_bytes(), name


def test_a_removed_file_is_not_in_the_copy(plan: Any, tree: Path, context: Context) -> None:
    (tree / "helper.py").unlink()
    assert refused(plan, "usage").why == "changed: helper.py"
    source = RunFolder(submit(plan(allow_dirty=True), context).run_folder).source
    assert not (source / "helper.py").exists()


def test_code_that_changes_while_it_is_copied_is_refused(plan: Any, tree: Path, context: Context) -> None:
    planned = plan()
    (tree / "helper.py").write_text("VALUE = 2\n")
    error = refused(lambda: submit(planned, context), "script-unusable")
    assert "changed while it was copied" in error.what
    assert error.why == "changed: helper.py"
    assert not Path(planned.manifest.run_folder).exists()


def test_a_log_that_another_program_writes_is_copied_as_it_was_read(plan: Any, tree: Path, context: Context) -> None:
    for name in ("grows.log", "goes.log"):
        (tree / name).write_text("step 1\n")
    planned = plan()
    (tree / "grows.log").write_text("step 1\nstep 2\n")
    (tree / "goes.log").unlink()
    run = RunFolder(submit(planned, context).run_folder)
    listed = load_record(Listing, run.listing).files
    for name in ("grows.log", "goes.log"):
        content = (run.source / name).read_bytes()
        assert (content, hashlib.sha256(content).hexdigest()) == (b"step 1\n", listed[f"source/{name}"])


def test_workdir_live_runs_in_place_says_so_and_records_it(plan: Any, tree: Path) -> None:
    (tree / "helper.py").write_text("VALUE = 2\n")
    planned = plan(workdir="live")
    assert planned.manifest.script == str(tree / "train.py")
    assert (planned.manifest.source, planned.manifest.workdir) == (None, str(tree))
    assert any("--workdir live" in note for note in planned.notes)
    code = tomlkit.parse(planned.lockfile_text)["code"].unwrap()
    assert code["workdir"] == "live"
    assert code["commit"] == git(tree, "rev-parse", "HEAD")
    assert code["dirty"] is True
    assert len(code["diff-sha256"]) == 64


def test_submodules_come_along_where_they_are_there(plan: Any, tree: Path, context: Context, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    (other / "lib.py").write_text("X = 1\n")
    git(other, "add", "-A")
    git(other, "commit", "-qm", "lib")
    git(tree, "submodule", "add", "-q", str(other), "lib")
    git(tree, "commit", "-qm", "with lib")
    source = RunFolder(submit(plan(), context).run_folder).source
    assert (source / "lib" / "lib.py").read_text() == "X = 1\n"
    assert not (source / "lib" / ".git").exists()
    (tree / "lib" / "lib.py").write_text("X = 2\n")
    assert refused(lambda: plan(name="b"), "usage").why == "changed: lib/lib.py"
    git(tree, "submodule", "deinit", "-q", "-f", "lib")
    assert any("submodule is not initialised: lib" in note for note in plan(name="c").notes)


def test_too_much_is_refused_and_the_biggest_is_named(plan: Any, tree: Path) -> None:
    (tree / "model.bin").write_bytes(b"x")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "big")
    os.truncate(tree / "model.bin", 2 * 10**9)  # takes no room on the disk
    error = refused(lambda: plan(allow_dirty=True), "usage")
    assert "model.bin (2.0 GB)" in str(error.why)
    assert "--workdir live" in str(error.hint)


def test_a_repository_that_git_refuses_is_not_taken_for_none(plan: Any, tree: Path) -> None:
    (tree / ".git" / "HEAD").write_text("nonsense\n")
    error = refused(plan, "tool-failed")
    assert error.hint == "--workdir live runs the script in the live project"
    assert any("is not known" in note for note in plan(workdir="live").notes)


def test_an_outer_git_does_not_lead_astray(plan: Any, tree: Path, context: Context, monkeypatch: Any) -> None:
    strange = {**context.environ, "GIT_DIR": "/nonexistent", "GIT_INDEX_FILE": "/nonexistent"}
    options = SubmitOptions(script="train.py", nproc=1, assume_shared=True, name="a")
    other = Context(environ=strange, cwd=tree, now=context.now, token="beef", command=("hpcenv",))
    assert plan_job(open_workspace(tree), options, other).manifest.source is not None


def test_without_a_commit_and_without_git_the_project_is_copied(project: Path, fake_slurm: Any) -> None:
    words: dict[str, Any] = {"now": time.localtime(0), "token": "beef", "command": ("hpcenv",)}
    context = Context(environ={**fake_slurm.environ, **GIT}, cwd=project, **words)
    options = SubmitOptions(script="train.py", nproc=1, assume_shared=True, name="a")
    (project / "helper.py").write_text("VALUE = 1\n")
    for reason in ("is not under git", "has no commit yet"):
        planned = plan_job(open_workspace(project), options, context)
        assert planned.notes == (ONE_CPU,)
        code = tomlkit.parse(planned.lockfile_text)["code"].unwrap()
        assert code["reason"].endswith(reason)
        source = planned.manifest.source
        assert source is not None
        assert (source.commit, source.root, code["digest"]) == ("", str(project), source.digest)
        assert planned.source is not None
        assert set(planned.source.files) == {
            *("source/hpcenv.toml", "source/train.py", "source/helper.py"),
        }
        git(project, "init", "-q")


# -- what git does not track --------------------------------------------------------------


def copied(plan: Any, context: Context, **words: Any) -> tuple[Plan, RunFolder]:
    planned = plan(**words)
    return planned, RunFolder(submit(planned, context).run_folder)


def test_modules_and_text_are_copied_and_other_files_are_links(plan: Any, tree: Path, context: Context) -> None:
    (tree / "conf").mkdir()
    (tree / "conf" / "notes.yaml").write_text("lr: 0.1\n")
    (tree / "conf" / "long.txt").write_text("x" * (1 << 20) + "x")
    (tree / "conf" / "w.npz").write_bytes(b"\0" * 10)
    (tree / "conf" / "ext.so").write_bytes(b"\0" * 10)
    (tree / "__pycache__").mkdir()
    (tree / "__pycache__" / "helper.pyc").write_bytes(b"\0")
    planned, run = copied(plan, context)
    for name in ("notes.yaml", "ext.so"):
        assert not (run.source / "conf" / name).is_symlink()
    for name in ("long.txt", "w.npz"):
        assert os.readlink(run.source / "conf" / name) == str(tree / "conf" / name)
    assert not (run.source / "__pycache__").exists()
    assert planned.manifest.source.live == ("conf/long.txt", "conf/w.npz")
    assert "live, not covered (links to your project): conf/long.txt, conf/w.npz" in planned.notes
    (tree / "conf" / "notes.yaml").write_text("lr: 99.9\n")
    assert (run.source / "conf" / "notes.yaml").read_text() == "lr: 0.1\n"
    again, other = copied(plan, context, name="b", include=("*.npz", "conf/long.txt"))
    assert again.manifest.source.live == ()
    assert not (other.source / "conf" / "w.npz").is_symlink()
    assert again.manifest.source.digest != planned.manifest.source.digest


def listed(run: RunFolder) -> Listing:
    return load_record(Listing, run.listing)


def write(tree: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)


def test_what_git_ignores_is_linked_except_modules_and_what_include_names(
    plan: Any, tree: Path, context: Context
) -> None:
    write(tree, {".gitignore": "runs/\n*.local.yaml\nprivate/\n!keep.local.yaml\n"})
    git(tree, "commit", "-qam", "ignore")
    ignored = {"a.local.yaml": "lr: 1\n", "private/notes.txt": "x\n", "private/mod.py": "X = 1\n"}
    write(tree, {**ignored, "keep.local.yaml": "lr: 2\n", "new.yaml": "lr: 3\n"})
    planned, run = copied(plan, context)
    assert {path for path in ignored if (run.source / path).is_symlink()} == {"a.local.yaml", "private/notes.txt"}
    assert planned.manifest.source.live == ("a.local.yaml", "private/notes.txt")
    found = listed(run)
    assert found.untracked == {
        "source/a.local.yaml": "ignored", "source/private/notes.txt": "ignored", "source/private/mod.py": "other",
        "source/keep.local.yaml": "other", "source/new.yaml": "other",
    }  # fmt: skip
    assert {"source/private/mod.py", "source/keep.local.yaml", "source/new.yaml"} <= set(found.files)
    again, other = copied(plan, context, name="b", include=("*.local.yaml",))
    assert not (other.source / "a.local.yaml").is_symlink()
    assert listed(other).untracked["source/a.local.yaml"] == "include"
    assert "copied, also into a bundle, although git ignores them (include): a.local.yaml" in again.notes


@pytest.mark.parametrize("rules", ["exclude", "global", "deep", "directory"])
def test_each_place_where_git_is_told_what_to_ignore_counts(
    plan: Any, tree: Path, context: Context, tmp_path: Path, rules: str
) -> None:
    write(tree, {"conf/secret-plan.txt": "x\n", "conf/open.txt": "y\n"})
    if rules == "exclude":
        write(tree, {".git/info/exclude": "secret-plan.txt\n"})
    elif rules == "global":
        write(tmp_path, {"ignore": "secret-plan.txt\n"})
        git(tree, "config", "core.excludesFile", str(tmp_path / "ignore"))
    elif rules == "deep":
        write(tree, {"conf/.gitignore": "/secret-plan.txt\n"})
    else:
        write(tree, {"conf/.gitignore": "*\n!open.txt\n"})
    _, run = copied(plan, context)
    assert (run.source / "conf/secret-plan.txt").is_symlink()
    assert not (run.source / "conf/open.txt").is_symlink()


def test_an_ignored_file_in_a_nested_work_tree_and_behind_a_link_is_ignored(
    plan: Any, tree: Path, context: Context, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    for place in (other, tree / "nested"):
        write(place, {".gitignore": "*.txt\n", "a.txt": "x\n", "b.yaml": "y: 1\n"})
        git(place, "init", "-q")
    write(tmp_path, {"plain/a.txt": "x\n", "plain/hf_token.txt": "x\n", "hidden/a.txt": "x\n"})
    for name in ("other", "plain", "hidden"):
        (tree / name).symlink_to(tmp_path / name)
    write(tree, {".gitignore": "runs/\nhidden\n"})
    git(tree, "commit", "-qam", "ignore")
    _, run = copied(plan, context)
    links = {f"{folder}/{name}" for folder in ("other", "nested", "plain", "hidden") for name in ("a.txt", "b.yaml")}
    links |= {"plain/hf_token.txt"}
    assert {path for path in links if (run.source / path).is_symlink()} == {
        "other/a.txt", "nested/a.txt", "hidden/a.txt", "plain/hf_token.txt",
    }  # fmt: skip
    assert os.readlink(run.source / "hidden/a.txt") == str(tmp_path / "hidden/a.txt")


def test_the_project_of_the_working_directory_has_its_own_git(
    plan: Any, tree: Path, context: Context, tmp_path: Path
) -> None:
    """The script is in one repository, the working directory in another one."""
    write(tmp_path, {"code/far.py": "print(1)\n", "code/.gitignore": "*.txt\n"})
    git(tmp_path / "code", "init", "-q")
    git(tmp_path / "code", "add", "-A")
    git(tmp_path / "code", "commit", "-qm", "x")
    write(tree, {".gitignore": "runs/\n*.cfg\n", "a.cfg": "x\n", "b.txt": "y\n"})
    write(tmp_path, {"code/c.txt": "z\n"})
    _, run = copied(plan, context, script=str(tmp_path / "code/far.py"))
    assert (run.path / "work/a.cfg").is_symlink() and (run.source / "c.txt").is_symlink()
    assert not (run.path / "work/b.txt").is_symlink()


def test_where_git_does_not_say_what_it_ignores_text_is_linked(
    plan: Any, tree: Path, context: Context, tmp_path: Path
) -> None:
    write(tree, {"nested/.git": "gitdir: /nonexistent\n", "nested/a.txt": "x\n", "nested/m.py": "X = 1\n"})
    planned, run = copied(plan, context)
    assert (run.source / "nested/a.txt").is_symlink() and not (run.source / "nested/m.py").is_symlink()
    said = f"git does not say what it ignores in {tree}/nested: the text that it does not track there is linked"
    assert said in planned.notes


def test_a_tracked_file_is_copied_whatever_its_name(plan: Any, tree: Path, context: Context) -> None:
    write(tree, {".env": "A=1\n", "secrets.yaml": "hf_token: hf_AAA\n"})
    git(tree, "add", "-Af")
    git(tree, "commit", "-qm", "published")
    _, run = copied(plan, context)
    assert not (run.source / ".env").is_symlink() and not (run.source / "secrets.yaml").is_symlink()


@pytest.mark.parametrize("under_git", [True, False])
def test_names_and_content_decide_where_git_says_nothing(
    plan: Any, tree: Path, context: Context, under_git: bool
) -> None:
    if not under_git:
        shutil.rmtree(tree / ".git")
    secret = {"secrets.yaml": "a: b\n", "conf/db.ini": "[db]\npassword = hunter22\n", "deploy.key": "x\n"}
    plain = {"tokenizer.json": '{"pad_token": "<pad>"}\n', "conf/model.yaml": "max_tokens: 4096\n"}
    write(tree, {**secret, **plain, "keys.py": 'API_KEY = "abcdefgh"\n'})
    _, run = copied(plan, context)
    found = listed(run)
    assert {path for path, known in found.untracked.items() if known == "credential"} == {f"source/{p}" for p in secret}
    assert all((run.source / path).is_symlink() for path in secret)
    assert not any((run.source / path).is_symlink() for path in (*plain, "keys.py"))


def test_many_untracked_files_are_one_question_to_git(plan: Any, tree: Path, context: Context, tmp_path: Path) -> None:
    log, real = tmp_path / "calls", shutil.which("git")
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec {real} "$@"\n')
    program.chmod(0o755)
    write(tree, {f"conf/{number}.yaml": "x: 1\n" for number in range(200)})
    other = replace(context, environ={**context.environ, "PATH": f"{program.parent}:{context.environ['PATH']}"})
    options = SubmitOptions(script="train.py", nproc=1, assume_shared=True, name="a")
    plan_job(open_workspace(tree), options, other)
    assert sum("check-ignore" in line for line in log.read_text().splitlines()) == 1
    shutil.rmtree(tree / "conf")
    log.unlink()
    plan_job(open_workspace(tree), options, other)
    assert "check-ignore" not in log.read_text(), "nothing is asked where it does not matter"


def test_the_file_of_a_secret_is_never_copied(plan: Any, tree: Path, context: Context) -> None:
    (tree / "token").write_text("s3cret\n")
    words = {"secret": {"TOKEN": f"file:{tree / 'token'}"}, "include": ("token",)}
    planned, run = copied(plan, context, **words)
    assert (run.source / "token").is_symlink()
    assert planned.manifest.source.live == ("token",)


@pytest.mark.parametrize("under_git", [True, False])
def test_files_that_usually_hold_credentials_are_not_copied_unless_named(
    plan: Any, tree: Path, context: Context, under_git: bool
) -> None:
    if not under_git:
        shutil.rmtree(tree / ".git")
    names = (".env", ".env.local", "prod.env", ".netrc", "deep/server.pem", "id_rsa")
    for name in (*names, "environment.yaml"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("TOKEN=hunter2\n")
    planned, run = copied(plan, context)
    for name in names:
        assert os.readlink(run.source / name) == str(tree / name)
    assert not (run.source / "environment.yaml").is_symlink()
    assert any(note.startswith("live, not covered") and ".env" in note for note in planned.notes)
    included, again = copied(plan, context, include=(".env",), name="b")
    assert (again.source / ".env").read_text() == "TOKEN=hunter2\n"
    assert not (again.source / ".env").is_symlink()
    assert ".env" not in included.manifest.source.live


def test_an_environment_is_one_link_and_other_runs_are_left_out(plan: Any, tree: Path, context: Context) -> None:
    (tree / "venv" / "lib").mkdir(parents=True)
    (tree / "venv" / "pyvenv.cfg").write_text("home = /usr\n")
    (tree / "venv" / "lib" / "x.py").write_text("x = 1\n")
    (tree / "elsewhere" / "old" / "code").mkdir(parents=True)
    (tree / "elsewhere" / "old" / "manifest.json").write_text("{}")
    planned, run = copied(plan, context)
    assert os.readlink(run.source / "venv") == str(tree / "venv")
    assert not (run.source / "elsewhere").exists()
    assert planned.notes == (ONE_CPU,)


@pytest.mark.parametrize("under_git", [True, False])
def test_too_many_loose_files_are_refused_with_what_to_write(plan: Any, tree: Path, under_git: bool) -> None:
    if not under_git:
        shutil.rmtree(tree / ".git")
    (tree / "outputs" / "old").mkdir(parents=True)
    for number in range(5001):
        (tree / "outputs" / "old" / f"{number}.txt").touch()
    error = refused(plan, "usage")
    assert "outputs/old (" in str(error.why)
    assert '[code] ignore = ["outputs/old"]' in str(error.hint)
    for more in ('[code]\nignore = ["outputs"]\n', '[[data]]\npath = "outputs"\ncompare = "list"\n'):
        (tree / "hpcenv.toml").write_text((tree / "hpcenv.toml").read_text().partition("[")[0] + more)
        planned = plan(allow_dirty=True, name=f"n{len(more)}")
        assert planned.source is not None
        assert not any(path.startswith("source/outputs/") for path in planned.source.files)
    assert planned.manifest.data[0].state.startswith("5001 files, 0 bytes, ")


def test_links_that_leave_the_project_are_resolved_and_hashed(
    plan: Any, tree: Path, context: Context, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    (outside / "package" / "deep").mkdir(parents=True)
    (outside / "helper2.py").write_text("VALUE = 1\n")
    (outside / "package" / "deep" / "m.py").write_text("M = 1\n")
    (tree / "linked.py").symlink_to(outside / "helper2.py")
    (tree / "package").symlink_to(outside / "package")
    (tree / "absolute.py").symlink_to(tree / "helper.py")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "links")
    planned, run = copied(plan, context)
    (outside / "helper2.py").write_text("VALUE = 2\n")
    assert (run.source / "linked.py").read_text() == "VALUE = 1\n"
    assert not (run.source / "linked.py").is_symlink()
    assert not (run.source / "package" / "deep" / "m.py").is_symlink()
    assert (run.source / "absolute.py").resolve() == (run.source / "helper.py").resolve(), "not the live file"
    after = plan(name="b")
    assert after.manifest.source.digest != planned.manifest.source.digest


def test_live_folders_are_made_in_the_project_and_linked(plan: Any, tree: Path, context: Context) -> None:
    with open(tree / "hpcenv.toml", "a") as file:
        file.write('[code]\nlive = ["out/plots"]\n')
    planned, run = copied(plan, context, allow_dirty=True)
    assert os.readlink(run.source / "out" / "plots") == str(tree / "out" / "plots")
    (run.source / "out" / "plots" / "a.txt").write_text("a")
    assert (tree / "out" / "plots" / "a.txt").read_text() == "a"
    assert planned.manifest.source.live == ()


def test_the_working_directory_is_the_same_place_in_the_copy(tree: Path, context: Context, tmp_path: Path) -> None:
    (tree / "sub").mkdir()
    options = SubmitOptions(script="../train.py", nproc=1, assume_shared=True, name="a")
    planned = plan_job(open_workspace(tree / "sub"), options, replace(context, cwd=tree / "sub"))
    assert planned.manifest.workdir == f"{planned.manifest.run_folder}/source/sub"
    assert Path(submit(planned, context).run_folder, "source", "sub").is_dir()

    # The script is in another repository: the project is copied, too.
    other = tmp_path / "other"
    other.mkdir()
    (other / "t.py").write_text("print(1)\n")
    git(other, "init", "-q")
    git(other, "add", "-A")
    git(other, "commit", "-qm", "one")
    options = SubmitOptions(script=str(other / "t.py"), nproc=1, assume_shared=True, name="b")
    planned = plan_job(open_workspace(tree), options, context)
    run = RunFolder(submit(planned, context).run_folder)
    assert planned.manifest.workdir == str(run.path / "work")
    assert planned.manifest.script == str(run.source / "t.py")
    assert (run.path / "work" / "helper.py").read_text() == "VALUE = 1\n"
    assert planned.manifest.source is not None
    assert planned.manifest.source.roots == (str(other), str(tree))


def test_data_are_recorded_and_missing_data_are_refused(plan: Any, tree: Path) -> None:
    (tree / "data").mkdir()
    (tree / "data" / "a").write_bytes(b"123")
    text = (tree / "hpcenv.toml").read_text()
    digests = set()
    for compare in ("sha256", "size-and-time", "list"):
        (tree / "hpcenv.toml").write_text(f'{text}[[data]]\npath = "data"\ncompare = "{compare}"\n')
        (one,) = plan(allow_dirty=True).manifest.data
        assert (one.name, one.path, one.compare) == ("data", str(tree / "data"), compare)
        assert one.state.startswith("1 file, 3 bytes, ")
        digests.add(one.state)
    assert len(digests) == 3
    table = tomlkit.parse(plan(allow_dirty=True).lockfile_text)["data"]["data"].unwrap()
    assert table == {"path": one.path, "compare": "list", "state": one.state}
    (tree / "hpcenv.toml").write_text(f'{text}[[data]]\npath = "gone"\n')
    error = refused(lambda: plan(allow_dirty=True), "usage")
    assert error.what == "cannot read the data `gone`"


@pytest.mark.parametrize("own", ["", 'overlay = "default-extra:/opt/extra"\n'])
def test_overlays_of_other_environments_are_not_copied(plan: Any, tree: Path, context: Context, own: str) -> None:
    for name in ("default-extra", "other-extra"):
        (tree / name).mkdir()
        (tree / name / "module.py").write_text("X = 1\n")
    (tree / "hpcenv.toml").write_text(
        own + (tree / "hpcenv.toml").read_text() + '[environment.other]\noverlay = "other-extra:/opt/extra"\n'
    )
    _, run = copied(plan, context, frozen=True, allow_dirty=True)
    assert (run.source / "default-extra").exists() == (not own)
    assert not (run.source / "other-extra").exists()


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{0}\nsize 12345\n".format("4d7a" * 16)


def test_pointers_of_git_lfs_without_their_content_are_a_note(plan: Any, tree: Path) -> None:
    (tree / "about.md").write_text(f"A pointer of Git LFS begins with\n\n{POINTER}")
    (tree / "model.bin").write_bytes(b"\0" * 200)
    (tree / "long.txt").write_text(POINTER + "x" * 1024)
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "no pointers")
    assert not [note for note in plan(name="b").notes if "LFS" in note]
    (tree / "model.bin").write_text(POINTER)
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "a pointer")
    said = "1 file is a pointer of Git LFS without its content: model.bin; `git lfs pull` fetches it"
    assert [note for note in plan(name="c").notes if "LFS" in note] == [said]
