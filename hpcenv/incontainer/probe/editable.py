"""The code that an editable install runs.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import time

from hpcenv.incontainer.probe.paths import is_below
from hpcenv.incontainer.probe.git import GIT_SECONDS, GitRefused, ask_git, changed_files, read_commit, tracked_files
from hpcenv.incontainer.probe.hashing import digest_of_lines, hash_files
from hpcenv.incontainer.probe.text import describe_error, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hpcenv.incontainer.probe.environment import Dist, ProbedEnvironment

SOURCE_SECONDS = 60.0
SOURCE_FILES = 20_000
SOURCE_BYTES = 4 << 30  # enough for a torch with CUDA that was built in its tree
SOURCE_ENTRIES = 1_000_000  # a tree may contain data in addition to the code
IMPORTABLE = (".py", ".pth", ".so", ".pyd")
LEFTOVERS = (".#", "._")  # Emacs's lock links, and files that tar adds on a Mac; Python cannot import them


def read_source(env: ProbedEnvironment, dist: Dist, folder: str) -> None:
    """Read the state of an editable install's code from git, or from the files if git cannot answer."""
    dist.git = _git_state(env, folder)
    if "dirty" in dist.git:
        return
    try:
        deadline = _source_deadline(env)
        files = find_modules(env, folder, deadline)
        dist.files = {"sha256": _source_digest(env, "hpcenv-files-v1", folder, files, deadline)}
    except (OSError, ValueError) as error:
        dist.files = {"reason": describe_error(error)}


def _source_deadline(env: ProbedEnvironment) -> float:
    env.source_deadline = env.source_deadline or time.monotonic() + SOURCE_SECONDS
    return env.source_deadline


def _git_state(env: ProbedEnvironment, folder: str) -> dict[str, Any]:
    """Return the commit of the working tree, whether the tree is changed, and a digest of the changes."""
    import subprocess

    top = folder
    while not os.path.exists(os.path.join(top, ".git")):
        if top == os.path.dirname(top) or not top.startswith("/"):
            return {"reason": "no .git above its folder"}
        top = os.path.dirname(top)
    state: dict[str, Any] = {}
    step = "its commit is unknown: "
    try:
        state["commit"] = read_commit(env, os.path.join(top, ".git"))
        step = "whether it is changed is unknown: "
        status, tracked = ask_git(env, top)
        state["dirty"] = bool(status)
        step = "what differs from its commit is unknown: "
        state["diff-sha256"] = _diff_digest(env, top, folder, status, tracked)
    except subprocess.TimeoutExpired:
        state["reason"] = f"{step}git took longer than {GIT_SECONDS:g} s"
    except (OSError, ValueError, IndexError) as error:
        state["reason"] = step + (str(error) if isinstance(error, GitRefused) else describe_error(error))
    return state


def _diff_digest(env: ProbedEnvironment, top: str, folder: str, status: bytes, tracked: bytes) -> str:
    """Return the digest ``hpcenv-diff-v1`` of a working tree.

    `git diff` is not used, because its output depends on the version and the settings of git.
    """
    deadline = _source_deadline(env)
    known, unwatched = tracked_files(tracked)
    differing = {path for path in changed_files(status) if not path.endswith(".lock.toml")}
    differing.update(path for path in unwatched if os.path.lexists(top + "/" + path))
    start = len(top.rstrip("/")) + 1
    differing.update(path[start:] for path in find_modules(env, folder, deadline) if path[start:] not in known)
    if not differing:
        return "none"
    return _source_digest(env, "hpcenv-diff-v1", top, [top + "/" + path for path in sorted(differing)], deadline)


def find_modules(env: ProbedEnvironment, folder: str, deadline: float) -> list[str]:
    """Return the importable files of a tree outside of the environment, for example of an editable install."""
    modules: list[str] = []
    seen: set[str] = set()
    stack = [folder, *(path for path in env.path if is_below(path, folder) and not _is_installed(env, path, folder))]
    count = 0
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if time.monotonic() > deadline:
            raise TimeoutError(f"reading the editable installs took longer than {SOURCE_SECONDS:g} s")
        folders, names = _listing(current, SOURCE_ENTRIES - count)
        count += len(folders) + len(names)
        if current != folder and _is_apart(env, current, names):
            continue
        stack += [current + "/" + name for name in folders if name.isidentifier() and name != "__pycache__"]
        for name in names:
            if is_leftover(env, name):
                continue
            lone = name.endswith(".pyc") and name[:-1] not in names
            if lone or name.endswith(IMPORTABLE) or ".so." in name:
                modules.append(current + "/" + name)
    return modules


def is_leftover(env: ProbedEnvironment, name: str) -> bool:
    """Return whether an editor or archive program left this file.

    A .pth file does not count as such a file, because old Pythons also run hidden .pth files.
    """
    return name.startswith(LEFTOVERS) and not name.endswith(".pth") and env.has("leftovers")


def _is_installed(env: ProbedEnvironment, path: str, folder: str) -> bool:
    """Return whether a path is in an environment inside the tree.

    The packages of that environment have their own digests.
    """
    return is_below(env.prefix, folder) and is_below(path, env.prefix)


def _listing(folder: str, limit: int) -> tuple[list[str], set[str]]:
    """Return the folders and the other names in a folder; none if the folder cannot be read."""
    folders = []
    names = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                else:
                    names.add(entry.name)
                if len(folders) + len(names) > limit:
                    raise ValueError(f"more than {SOURCE_ENTRIES} files and folders below its folder")
    except (PermissionError, FileNotFoundError, NotADirectoryError):
        return [], set()
    return folders, names


def _is_apart(env: ProbedEnvironment, folder: str, names: set[str]) -> bool:
    """Return whether a folder in the tree is an environment or a run folder. These change independently of the code."""
    return folder == env.prefix or "pyvenv.cfg" in names or {"manifest.json", "lock.toml"} <= names


def _source_digest(env: ProbedEnvironment, tag: str, top: str, files: list[str], deadline: float) -> str:
    if len(files) > SOURCE_FILES:
        raise ValueError(f"more than {SOURCE_FILES} files to hash")
    sizes = [_size_on_disk(file) for file in files]
    if sum(sizes) > SOURCE_BYTES:
        raise ValueError(f"more than {SOURCE_BYTES >> 30} GiB to hash")
    lines = []
    jobs = [(file, "sha256", size) for file, size in zip(files, sizes)]
    for file, result in zip(files, hash_files(env, jobs, deadline)):
        shown = file[len(top.rstrip("/")) + 1 :]
        if result.digest is None:
            raise ValueError(f"{printable(shown)}: {result.problem}")
        target = "\0" + os.readlink(file) if os.path.islink(file) else ""
        lines.append(shown + "\0" + result.word() + target)
    return digest_of_lines(tag, lines)


def _size_on_disk(file: str) -> int:
    try:
        return os.stat(file).st_size
    except OSError:
        return 0  # the file was removed: this is the difference
