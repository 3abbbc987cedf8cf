"""The answers of git about a working tree.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import time

from hpcenv.incontainer.probe import git_folder
from hpcenv.incontainer.probe.children import run_child
from hpcenv.incontainer.probe.files import read_small
from hpcenv.incontainer.probe.record import RECORD_BYTES
from hpcenv.incontainer.probe.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcenv.incontainer.probe.environment import ProbedEnvironment

GIT_SECONDS = 20.0


def read_commit(env: ProbedEnvironment, git: str) -> str:
    """Return the commit of HEAD, read without git (gitrepository-layout(5))."""
    import re

    git, common = git_folder.find_folders(git)
    head = os.fsdecode(read_small(env, git + "/HEAD")[0]).strip()
    for _ in range(5):
        if not head.startswith("ref:"):
            break
        name = head[4:].strip()
        if not re.match(r"refs/[^\0]+$", name) or ".." in name.split("/"):
            raise ValueError("HEAD names no branch")
        head = _git_reference(env, git, common, name)
    if not re.match(r"[0-9a-f]{40}([0-9a-f]{24})?$", head):
        raise ValueError("HEAD leads to no commit")
    return head


def _git_reference(env: ProbedEnvironment, git: str, common: str, name: str) -> str:
    for directory in (git, common):
        if os.path.isfile(os.path.join(directory, name)):
            return os.fsdecode(read_small(env, os.path.join(directory, name))[0]).strip()
    packed = os.fsdecode(read_small(env, os.path.join(common, "packed-refs"), RECORD_BYTES)[0])
    commits = [line.split(" ", 1)[0] for line in packed.splitlines() if line.endswith(" " + name)]
    if not commits:
        raise ValueError("no commit yet, or a reference format that is not known here")
    return commits[0]


class GitRefused(ValueError):
    """git is not installed, or gives no answer. The message says why."""


def ask_git(env: ProbedEnvironment, top: str) -> tuple[bytes, bytes]:
    """Return the differences from the commit (git-status(1), porcelain) and the tracked files (git-ls-files(1)).

    git runs once per tree.
    """
    if top not in env.trees:
        try:
            env.trees[top] = _ask(top, time.monotonic() + GIT_SECONDS)
        except Exception as error:  # noqa: BLE001 - the next package of this tree does not wait for git again
            env.trees[top] = error
    answer = env.trees[top]
    if isinstance(answer, Exception):
        raise answer
    return answer


def _ask(top: str, deadline: float) -> tuple[bytes, bytes]:
    """Ask git through a folder of hpcenv, because git would run programs that the repository's configuration names."""
    import tempfile

    variables = git_folder.variables({k: v for k, v in os.environ.items() if not k.startswith("GIT_")})
    git, common = git_folder.find_folders(os.path.join(top, ".git"))
    configuration = git_folder.read_configuration(common)
    listing = _run_git(variables, deadline, *git_folder.LISTING, cwd="/", stdin=configuration)
    with tempfile.TemporaryDirectory(prefix="hpcenv-git-") as folder:
        git_folder.make(folder, common, listing)
        variables = git_folder.placed(variables, git, folder, top)
        status = ("status", "--porcelain", "-z", "--untracked-files=normal", "--ignore-submodules=all")

        def ask(*words: str, stdin: bytes = b"") -> bytes:
            return _run_git(variables, deadline, *words, cwd=top, stdin=stdin)

        changed, listed = ask(*status), ask("ls-files", "-z", "-v", "--stage")
        seen = set(changed_files(changed))
        blobs = {path: blob for path, _, blob in _entries(listed) if blob and path not in seen}
        changed += b"".join(b" M " + os.fsencode(path) + b"\0" for path in git_folder.unseen(ask, top, blobs))
        return changed, listed


def _run_git(variables: dict[str, str], deadline: float, *arguments: str, cwd: str, stdin: bytes = b"") -> bytes:
    import shutil

    git = shutil.which("git")
    if git is None:
        raise GitRefused("no git here")
    seconds = max(0.0, deadline - time.monotonic())
    status, out, err = run_child([git, *git_folder.OPTIONS, *arguments], variables, seconds, cwd=cwd, stdin=stdin)
    if status != 0:
        raise GitRefused(printable(err.decode("utf-8", "replace").strip())[:200])
    return out


def changed_files(status: bytes) -> Iterator[str]:
    """Yield the tracked files that git reports as changed; for a renamed file, also its old name."""
    entries = iter(status.split(b"\0"))
    for entry in entries:
        if len(entry) < 4 or entry[:2] == b"??":
            continue
        yield os.fsdecode(entry[3:])
        if b"R" in entry[:2] or b"C" in entry[:2]:
            yield os.fsdecode(next(entries, b""))


def tracked_files(listed: bytes) -> tuple[set[str], set[str]]:
    """Return the tracked files that git checks for changes, and the files that git was configured not to check."""
    known = set()
    unwatched = set()
    for path, tag, _ in _entries(listed):
        known.add(path)
        if tag.islower() or tag == "S":  # assume-unchanged, skip-worktree
            unwatched.add(path)
    return known - unwatched, unwatched


def _entries(listed: bytes) -> Iterator[tuple[str, str, str]]:
    """Yield path, tag and blob of each tracked file; a link has no blob."""
    for entry in listed.split(b"\0"):
        words, _, name = entry.partition(b"\t")
        if name:
            tag, mode, blob = words.decode().split(" ")[:3]
            yield os.fsdecode(name), tag, blob if mode.startswith("100") else ""
