"""No program that a git repository names is started. Each trick plants a program that leaves a mark.

Plain git starts the program of each trick in TRICKS too: `test_plain_git_falls_for_the_tricks` proves that they are real.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcenv import process
from hpcenv.errors import HpcenvError
from hpcenv.project.context import Context
from hpcenv.project.workspace import open_workspace
from hpcenv.records.run_folder import RunFolder
from hpcenv.submission.plan import Plan
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions
from hpcenv.submission.submit import submit

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="NOT RUN: git is not installed")

WHO = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


class World:
    """A project under git with one nested repository, a planted program, and the user's own configuration."""

    def __init__(self, project: Path, elsewhere: Path, environ: dict[str, str]) -> None:
        self.tree, self.elsewhere = project, elsewhere
        self.mark = elsewhere / "mark"
        self.program = elsewhere / "evil"
        self.program.write_text(f'#!/bin/sh\necho "$0 $*" >> {self.mark}\ncat\n')
        self.program.chmod(0o755)
        self.users = elsewhere / "gitconfig"
        self.users.write_text("[protocol]\nallow = always\n")
        self.temporary = elsewhere / "tmp"
        self.temporary.mkdir()
        self.environ = {
            **environ,
            **WHO,
            "TMPDIR": str(self.temporary),
            "GIT_CONFIG_GLOBAL": str(self.users),
            "GIT_CONFIG_NOSYSTEM": "1",
        }
        (project / ".gitignore").write_text("runs/\n")
        (project / "helper.py").write_text("VALUE = 1\n")
        self.git("init", "-q")
        self.commit()

    def git(self, *words: str, cwd: Path | None = None, check: bool = True) -> str:
        environ = {**os.environ, **self.environ}
        done = subprocess.run(
            ["git", *words], cwd=cwd or self.tree, env=environ, capture_output=True, check=check, timeout=30
        )
        return os.fsdecode(done.stdout).strip()

    def commit(self, cwd: Path | None = None) -> None:
        self.git("-c", "core.safecrlf=false", "add", "-A", cwd=cwd)
        self.git("commit", "-qm", "x", cwd=cwd)

    def touch(self, name: str = "train.py") -> None:
        """Let git compare the content again: the index has another time."""
        os.utime(self.tree / name, (1, 1))

    def nest(self) -> Path:
        inner = self.tree / "lib"
        inner.mkdir()
        (inner / "lib.py").write_text("X = 1\n")
        self.git("init", "-q", cwd=inner)
        self.commit(inner)
        self.commit()
        return inner

    def started(self) -> str:
        return self.mark.read_text() if self.mark.exists() else ""

    def plan(self, **words: Any) -> Plan:
        context = Context(
            environ=self.environ, cwd=self.tree, now=time.localtime(0), token="beef", command=("hpcenv", "submit")
        )
        options = SubmitOptions(**{"script": "train.py", "nproc": 1, "assume_shared": True, "name": "a", **words})
        return plan_job(open_workspace(self.tree), options, context)

    def submit(self, **words: Any) -> RunFolder:
        context = Context(
            environ=self.environ, cwd=self.tree, now=time.localtime(0), token="beef", command=("hpcenv", "submit")
        )
        return RunFolder(submit(self.plan(**words), context).run_folder)


@pytest.fixture
def world(project: Path, tmp_path: Path, fake_slurm: Any) -> World:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    return World(project, elsewhere, dict(fake_slurm.environ))


def _filter(world: World, kind: str) -> None:
    (world.tree / ".gitattributes").write_text("*.py filter=evil\n")
    world.commit()
    world.git("config", f"filter.evil.{kind}", str(world.program))
    world.git("config", "filter.evil.required", "true")
    world.touch()


def _changed(world: World) -> None:
    (world.tree / "helper.py").write_text("VALUE = 2\n")


def _missing_object(world: World, *remote: tuple[str, str]) -> None:
    tree = world.git("rev-parse", "HEAD^{tree}")
    world.git("config", "core.repositoryformatversion", "1")
    world.git("config", "extensions.partialClone", "origin")
    world.git("config", "remote.origin.promisor", "true")
    for key, value in remote:
        world.git("config", key, value)
    (world.tree / ".git" / "objects" / tree[:2] / tree[2:]).unlink()


def clean_filter(world: World) -> None:
    _filter(world, "clean")


def smudge_filter(world: World) -> None:
    _filter(world, "clean")
    world.git("config", "filter.evil.smudge", str(world.program))


def process_filter(world: World) -> None:
    _filter(world, "process")


def filter_in_info_attributes(world: World) -> None:
    (world.tree / ".git" / "info").mkdir(exist_ok=True)
    (world.tree / ".git" / "info" / "attributes").write_text("* filter=evil\n")
    world.git("config", "filter.evil.clean", str(world.program))
    world.touch()


def filter_in_an_included_file(world: World) -> None:
    (world.tree / "more.cfg").write_text(f'[filter "evil"]\nclean = {world.program}\n')
    (world.tree / ".gitattributes").write_text("*.py filter=evil\n")
    world.commit()
    world.git("config", "include.path", "../more.cfg")
    world.touch()


def filter_in_a_conditional_include(world: World) -> None:
    filter_in_an_included_file(world)
    world.git("config", "--unset", "include.path")
    world.git("config", f"includeIf.gitdir:{world.tree}/.path", "../more.cfg")


def filter_in_the_worktree_configuration(world: World) -> None:
    (world.tree / ".gitattributes").write_text("*.py filter=evil\n")
    world.commit()
    world.git("config", "extensions.worktreeConfig", "true")
    world.git("config", "--worktree", "filter.evil.clean", str(world.program))
    world.touch()


def filter_with_the_name_of_the_users(world: World) -> None:
    world.users.write_text(world.users.read_text() + '[filter "evil"]\nclean = cat\n')
    _filter(world, "clean")


def fsmonitor(world: World) -> None:
    world.git("config", "core.fsmonitor", str(world.program))


def hooks(world: World) -> None:
    folder = world.elsewhere / "hooks"
    folder.mkdir()
    for name in ("post-index-change", "pre-commit", "reference-transaction", "post-checkout"):
        shutil.copy(world.program, folder / name)
        shutil.copy(world.program, world.tree / ".git" / "hooks" / name)
    world.git("config", "core.hooksPath", str(folder))
    world.touch()


def external_diff(world: World) -> None:
    world.git("config", "diff.external", str(world.program))
    _changed(world)


def diff_command_and_textconv_of_attributes(world: World) -> None:
    (world.tree / ".gitattributes").write_text("*.py diff=evil\n")
    world.commit()
    world.git("config", "diff.evil.command", str(world.program))
    world.git("config", "diff.evil.textconv", str(world.program))
    _changed(world)


def promisor_uploadpack(world: World) -> None:
    _missing_object(
        world, ("remote.origin.url", str(world.elsewhere)), ("remote.origin.uploadpack", f"{world.program};")
    )


def promisor_ext_transport(world: World) -> None:
    url = f"ext::{world.program} %S"
    _missing_object(world, ("remote.origin.url", url), ("protocol.ext.allow", "always"))


def promisor_ssh_command(world: World) -> None:
    url = ("remote.origin.url", "ssh://host.invalid/x")
    _missing_object(world, url, ("core.sshCommand", str(world.program)), ("ssh.variant", "simple"))


def promisor_git_proxy(world: World) -> None:
    _missing_object(world, ("remote.origin.url", "git://host.invalid/x"), ("core.gitProxy", str(world.program)))


def promisor_remote_helper(world: World) -> None:
    _missing_object(world, ("remote.origin.url", "x"), ("remote.origin.vcs", "ext"))
    world.git("config", "remote.origin.url", f"ext::{world.program}")


def nested_filter(world: World) -> None:
    inner = world.nest()
    (inner / ".gitattributes").write_text("* filter=evil\n")
    world.git("config", "filter.evil.clean", str(world.program), cwd=inner)
    world.touch("lib/lib.py")


def nested_external_diff(world: World) -> None:
    inner = world.nest()
    world.git("config", "diff.external", str(world.program), cwd=inner)
    (inner / "lib.py").write_text("X = 2\n")


def nested_fsmonitor(world: World) -> None:
    world.git("config", "core.fsmonitor", str(world.program), cwd=world.nest())


def nested_promisor(world: World) -> None:
    inner = world.nest()
    commit = world.git("rev-parse", "HEAD^{tree}", cwd=inner)
    world.git("config", "core.repositoryformatversion", "1", cwd=inner)
    for key, value in (
        ("extensions.partialClone", "origin"),
        ("remote.origin.promisor", "true"),
        ("remote.origin.url", str(world.elsewhere)),
        ("remote.origin.uploadpack", f"{world.program};"),
    ):
        world.git("config", key, value, cwd=inner)
    (inner / ".git" / "objects" / commit[:2] / commit[2:]).unlink()


def a_git_folder_elsewhere(world: World) -> None:
    moved = world.elsewhere / "moved.git"
    (world.tree / ".git").rename(moved)
    (world.tree / ".git").write_text(f"gitdir: {moved}\n")
    _filter(world, "clean")


def a_linked_worktree(world: World) -> None:
    _filter(world, "clean")
    main, other = world.elsewhere / "main", world.elsewhere / "other"
    world.git("-c", "filter.evil.clean=", "-c", "filter.evil.required=false", "worktree", "add", "-q", str(other))
    shutil.move(world.tree, main)
    shutil.copytree(other, world.tree, symlinks=True)
    (world.tree / ".git").write_text(f"gitdir: {main}/.git/worktrees/other\n")
    shutil.copytree(main / "lockfiles", world.tree / "lockfiles", dirs_exist_ok=True)
    world.mark.unlink(missing_ok=True)
    world.touch()


def gpg_pager_editor_askpass_and_aliases(world: World) -> None:
    for key in ("gpg.program", "core.pager", "pager.status", "pager.diff", "core.editor", "core.askPass"):
        world.git("config", key, str(world.program))
    for alias in ("status", "diff", "ls-files", "rev-parse"):
        world.git("config", f"alias.{alias}", f"!{world.program}")
    world.git("config", "log.showSignature", "true")
    world.git("config", "credential.helper", f"!{world.program}")
    world.git("config", "core.alternateRefsCommand", str(world.program))
    _changed(world)


def a_work_tree_named_elsewhere(world: World) -> None:
    world.git("config", "core.worktree", str(world.tree))
    _filter(world, "clean")


def alternates(world: World) -> None:
    store = world.elsewhere / "objects"
    shutil.copytree(world.tree / ".git" / "objects", store)
    (world.tree / ".git" / "objects" / "info").mkdir(exist_ok=True)
    (world.tree / ".git" / "objects" / "info" / "alternates").write_text(f"{store}\n")
    world.git("config", "core.alternateRefsCommand", str(world.program))
    fsmonitor(world)


# Plain `git status` or `git diff` starts the program of these.
TRICKS: tuple[Callable[[World], None], ...] = (
    clean_filter,
    smudge_filter,
    process_filter,
    filter_in_info_attributes,
    filter_in_an_included_file,
    filter_in_a_conditional_include,
    filter_in_the_worktree_configuration,
    filter_with_the_name_of_the_users,
    fsmonitor,
    hooks,
    external_diff,
    diff_command_and_textconv_of_attributes,
    promisor_uploadpack,
    promisor_ext_transport,
    promisor_ssh_command,
    promisor_git_proxy,
    nested_filter,
    nested_external_diff,
    nested_fsmonitor,
    nested_promisor,
    a_git_folder_elsewhere,
    a_linked_worktree,
    a_work_tree_named_elsewhere,
    alternates,
)
# Nothing that hpcenv asks needs these, today.
HARMLESS: tuple[Callable[[World], None], ...] = (promisor_remote_helper, gpg_pager_editor_askpass_and_aliases)


@pytest.mark.parametrize("trick", TRICKS, ids=lambda trick: trick.__name__)
def test_plain_git_falls_for_the_tricks(world: World, trick: Callable[[World], None]) -> None:
    trick(world)
    world.mark.unlink(missing_ok=True)
    for words in (("status", "--porcelain"), ("diff", "--submodule=diff", "HEAD")):
        with contextlib.suppress(HpcenvError):
            argv = ["git", "-c", "protocol.allow=always", *words]
            process.run(argv, timeout=5, env={**os.environ, **world.environ}, cwd=world.tree)
        if world.started():
            return
    assert world.started(), "the trick does not work with this git"


@pytest.mark.parametrize("trick", (*TRICKS, *HARMLESS), ids=lambda trick: trick.__name__)
def test_no_program_of_a_repository_is_started(world: World, trick: Callable[[World], None]) -> None:
    trick(world)
    world.mark.unlink(missing_ok=True)
    for call in (world.plan, lambda: world.submit(allow_dirty=True)):
        try:
            call()
        except HpcenvError as refused:
            assert refused.code in ("usage", "tool-failed"), refused
        assert world.started() == ""
    assert os.listdir(world.temporary) == []


def test_a_filter_of_the_repository_is_named_where_it_would_matter(world: World) -> None:
    (world.tree / ".gitattributes").write_text("*.py filter=strip\n")
    world.git("config", "filter.strip.clean", "tr a-z A-Z")
    (world.tree / "train.py").write_text("print('train')\n")
    os.utime(world.tree / "train.py", (2, 2))  # git compares the content of a file as new as its index
    world.commit()
    world.plan()  # the files are as git knows them
    world.touch()
    with pytest.raises(HpcenvError) as refused:
        world.plan()
    assert "changed: train.py\nnot compared through filter strip: train.py: only this repository's own" in str(
        refused.value.why
    )
    assert "git config --global filter.strip.clean COMMAND" in str(refused.value.hint)
    planned = world.plan(allow_dirty=True)
    assert any("not compared through filter strip: train.py" in note for note in planned.notes)
    world.git("config", "--global", "filter.strip.clean", "tr a-z A-Z")
    # The user's own configuration has the same filter.
    assert [note for note in world.plan().notes if "filter" in note] == [
        "not the bytes of the commit, filter strip of git stands between them: train.py"
    ]


def _keep_size_and_time(path: Path, content: bytes) -> None:
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("where", ["of the repository", "of the user"])
def test_rules_of_git_about_times_do_not_hide_a_change(world: World, where: str) -> None:
    scope = ["--global"] if where == "of the user" else []
    for name, value in (("core.trustctime", "false"), ("core.checkStat", "minimal")):
        world.git("config", *scope, name, value)
    os.utime(world.tree / "helper.py", (1, 1))
    world.git("update-index", "-q", "--refresh")
    world.plan()
    _keep_size_and_time(world.tree / "helper.py", b"VALUE = 7\n")
    assert world.git("status", "--porcelain", "-uno") == "", "git itself does not see it"
    with pytest.raises(HpcenvError) as refused:
        world.plan()
    assert "changed: helper.py" in str(refused.value.why)


def test_a_filter_of_the_user_that_hides_a_change_is_named(world: World) -> None:
    (world.tree / ".gitattributes").write_text("*.py filter=calm\n")
    world.git("config", "--global", "filter.calm.clean", "sed s/9/1/")
    world.commit()
    assert not [note for note in world.plan().notes if "filter" in note], "the bytes are those of the commit"
    (world.tree / "helper.py").write_text("VALUE = 9\n")
    said = "not the bytes of the commit, filter calm of git stands between them: helper.py"
    assert [note for note in world.plan().notes if "filter" in note] == [said]


@pytest.mark.parametrize("rule", ["autocrlf", "eol", "ident", "lfs", "encoding"])
def test_what_git_converts_by_itself_is_no_difference(world: World, rule: str) -> None:
    name = "helper.py"
    if rule == "autocrlf":
        world.git("config", "core.autocrlf", "true")
    elif rule == "lfs":
        name = "model.bin"
        world.git("config", "--global", "filter.lfs.clean", "cat >/dev/null; echo pointer")
        (world.tree / name).write_bytes(b"the content")
    words = {"eol": "*.py text eol=crlf", "ident": "*.py ident", "lfs": "*.bin filter=lfs"}
    words["encoding"] = "*.py text working-tree-encoding=UTF-16LE"
    (world.tree / ".gitattributes").write_text(words.get(rule, "") + "\n")
    if rule == "encoding":
        (world.tree / name).write_bytes("# VALUE\n".encode("utf-16-le"))
    elif rule == "ident":
        (world.tree / name).write_text("# $Id$\n")
    world.commit()
    if rule != "lfs":
        (world.tree / name).unlink()
        world.git("checkout", "-q", "--", name)
    before = world.git("rev-parse", f"HEAD:{name}")
    assert world.git("hash-object", "--no-filters", name) != before, "the bytes are other ones"
    world.touch(name)
    assert not [note for note in world.plan().notes if "filter" in note or name in note]


@pytest.mark.parametrize("kind", ["clean", "process"])
def test_a_filter_of_the_user_works(world: World, kind: str) -> None:
    """As Git LFS: its programs are in the configuration of the user."""
    (world.tree / ".gitattributes").write_text("*.bin filter=lfs\n")
    if kind == "process":
        program = world.elsewhere / "process"
        program.write_text(PROCESS_FILTER)
        world.git("config", "--global", "filter.lfs.process", f"python3 {program} {world.mark}")
    else:
        world.git("config", "--global", "filter.lfs.clean", f"{world.program} >/dev/null; echo pointer")
    world.git("config", "--global", "filter.lfs.required", "true")
    (world.tree / "model.bin").write_text("the real content, 8 GB\n")
    world.commit()
    assert world.git("show", "HEAD:model.bin") == "pointer"
    world.mark.unlink()
    world.touch("model.bin")
    # What the repository says about the same filter is not used.
    world.git("config", "filter.lfs.clean", "false")
    world.git("config", "filter.lfs.process", "false")
    source = world.submit().source
    assert world.started(), "the user's filter was started"
    assert (source / "model.bin").read_text() == "the real content, 8 GB\n"
    (world.tree / "helper.py").write_text("VALUE = 2\n")
    run = world.submit(allow_dirty=True, name="b")
    assert b"helper.py" in run.source_diff.read_bytes()
    assert b"model.bin" not in run.source_diff.read_bytes()


# A filter process of gitattributes(5), "Long Running Filter Process", that turns each file into `pointer`.
PROCESS_FILTER = r"""
import sys
r, w = sys.stdin.buffer, sys.stdout.buffer
open(sys.argv[1], "a").write("started\n")
def get():
    lines = []
    while (n := int(r.read(4) or b"0", 16)):
        lines.append(r.read(n - 4))
    return lines
def put(*lines):
    for line in lines:
        w.write(b"%04x" % (len(line) + 4) + line)
    w.write(b"0000")
    w.flush()
get(); put(b"git-filter-server\n", b"version=2\n"); get(); put(b"capability=clean\n")
while get():
    get(); put(b"status=success\n"); put(b"pointer\n"); put()
"""


def test_what_says_how_files_are_compared_is_kept(world: World) -> None:
    (world.tree / "tool.sh").write_text("#!/bin/sh\n")
    world.commit()
    (world.tree / "tool.sh").chmod(0o755)
    with pytest.raises(HpcenvError, match="differs from commit"):
        world.plan()
    world.git("config", "core.fileMode", "false")
    world.plan()
    (world.tree / "helper.py").write_bytes(b"VALUE = 2\r\n")
    world.git("config", "core.autocrlf", "input")
    world.commit()
    world.touch("helper.py")
    world.plan()
    world.git("config", "core.autocrlf", "false")
    with pytest.raises(HpcenvError, match="differs from commit"):
        world.plan()
    world.git("config", "core.autocrlf", "input")


@pytest.mark.parametrize("kind", ["split index", "packed", "sha256", "linked worktree", "sparse", "shallow"])
def test_kinds_of_repositories(world: World, kind: str, tmp_path: Path) -> None:
    if kind == "split index":
        world.git("update-index", "--split-index")
    elif kind == "packed":
        world.git("gc", "-q")
        world.git("pack-refs", "--all")
    elif kind == "sha256":
        shutil.rmtree(world.tree / ".git")
        world.git("init", "-q", "--object-format=sha256")
        world.commit()
    elif kind == "linked worktree":
        main = world.elsewhere / "main"
        world.git("clone", "-q", str(world.tree), str(main))
        shutil.rmtree(world.tree / ".git")
        world.git("worktree", "add", "-q", "--detach", str(world.elsewhere / "linked"), cwd=main)
        shutil.move(world.elsewhere / "linked" / ".git", world.tree / ".git")
        (main / ".git" / "worktrees" / "linked" / "gitdir").write_text(f"{world.tree}/.git\n")
        world.git("update-index", "-q", "--refresh", check=False)
    elif kind == "sparse":
        (world.tree / "data").mkdir()
        (world.tree / "data" / "x.py").write_text("1\n")
        world.commit()
        world.git("sparse-checkout", "set", "--cone", "lockfiles")
    else:
        world.commit() if world.git("status", "--porcelain") else None
        commit = world.git("rev-parse", "HEAD")
        (world.tree / ".git" / "shallow").write_text(commit + "\n")
    planned = world.plan()
    source = planned.manifest.source
    assert source is not None
    assert (source.commit, source.dirty) == (world.git("rev-parse", "HEAD"), False)
    left_out = [note for note in planned.notes if "not in the work tree" in note]
    assert bool(left_out) == (kind == "sparse")


def test_a_submodule_with_another_commit_or_change_is_seen_and_its_difference_recorded(world: World) -> None:
    inner = world.nest()
    recorded = world.git("rev-parse", "HEAD", cwd=inner)
    assert world.plan().manifest.source is not None
    (inner / "lib.py").write_text("X = 2\n")
    with pytest.raises(HpcenvError) as refused:
        world.plan()
    assert refused.value.why == "changed: lib/lib.py"
    world.commit(inner)
    with pytest.raises(HpcenvError) as refused:
        world.plan()
    assert refused.value.why == "changed: lib"
    (inner / "lib.py").write_text("X = 3\n")
    patch = world.submit(allow_dirty=True).source_diff.read_text()
    assert f"-Subproject commit {recorded}" in patch
    assert "--- a/lib/lib.py\n+++ b/lib/lib.py\n@@ -1 +1 @@\n-X = 1\n+X = 3\n" in patch


def test_a_link_that_leads_back_is_not_followed_for_ever(world: World) -> None:
    inner = world.nest()
    shutil.rmtree(inner)
    inner.symlink_to(".")
    with pytest.raises(HpcenvError) as refused:
        world.plan()
    assert refused.value.why == "changed: lib"


def test_a_missing_object_is_an_error_that_names_it_and_nothing_waits(world: World) -> None:
    _missing_object(world, ("remote.origin.url", "/x"), ("remote.origin.uploadpack", "sleep 9999;"))
    before = time.monotonic()
    with pytest.raises(HpcenvError) as refused:
        world.plan()
    assert refused.value.code == "tool-failed"
    assert "bad tree object HEAD" in str(refused.value.why)
    assert time.monotonic() - before < 20


@pytest.mark.parametrize("place", ["config", "HEAD", "index", "commondir"])
def test_a_pipe_in_the_git_folder_does_not_keep_the_caller(
    world: World, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcenv.project.git._SECONDS", 1.0)
    (world.tree / ".git" / place).unlink(missing_ok=True)
    os.mkfifo(world.tree / ".git" / place)
    before = time.monotonic()
    with pytest.raises(HpcenvError, match="git fails for the code"):
        world.plan()
    assert time.monotonic() - before < 30
