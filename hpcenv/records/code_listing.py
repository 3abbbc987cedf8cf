"""The listing of a run's copy of the code: the files in the copy, and the links in the copy that are not compared.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpcenv.records.files import sha256_at

# In the listing, the content of a symbolic link is this word, followed by the link's target.
LINK = "link:"

# Folders with this name are never copied, because Python writes them again.
BYTECODE = "__pycache__"


# What is known about a file that git does not track. `include`: the option `--include` names the file. `ignored`: git
# ignores the file. `credential`: the name or a line of the file looks like a credential. `other`: none of these cases.
Untracked = Literal["include", "ignored", "credential", "other"]


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The content of the copy when it was made (`source.json`).

    Attributes:
        files: path in the run folder -> sha256 of the file, or `link:TARGET`.
        live: path in the run folder -> target of a link. The digest does not cover these targets.
        untracked: path in the run folder -> what is known about the file, for each file that git does not track.
            Without git, `untracked` contains all files. `untracked` is None in a listing from before 2026-11-25, which
            did not record such files.
    """

    schema: int
    files: dict[str, str]
    live: dict[str, str] = field(default_factory=dict)
    untracked: dict[str, Untracked] | None = None


@dataclass(frozen=True, kw_only=True)
class CopyAfterAttempt:
    """How the copy differed from its listing when an attempt of the job ended (`source-after.json`).

    Attributes:
        started: when that attempt began, from `started.json`.
        changed: path -> content in the form of a listing; empty for a removed file. `changed` contains the files of the
            listing that have changed, and new files that Python can import.
    """

    schema: int
    started: float
    changed: dict[str, str]


def digest_of(files: Mapping[str, str]) -> str:
    """Return the digest over the files of a listing. Pure."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(os.fsencode(path) + b"\0" + os.fsencode(files[path]) + b"\0")
    return digest.hexdigest()


def content_of(path: str) -> str:
    """Return the content of a file or link in the form of a listing; empty if there is no such file.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        if os.path.islink(path):
            return LINK + os.readlink(path)
        return sha256_at(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""


def is_importable(name: str) -> bool:
    """Return whether Python can import a file with this name."""
    return name.endswith((".py", ".pyc", ".so"))


def walk(folder: Path, below: str) -> list[tuple[str, os.DirEntry[str]]]:
    """Return (path in the run folder, entry) for everything below a folder of the run. Folders precede their content.

    Raises:
        OSError: a folder cannot be read.
    """
    found: list[tuple[str, os.DirEntry[str]]] = []
    waiting = [below]
    while waiting:
        inside = waiting.pop()
        with os.scandir(folder / inside) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                path = f"{inside}/{entry.name}"
                found.append((path, entry))
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
    return found
