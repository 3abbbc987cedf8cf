"""The files of a repository at a commit, as the hub lists them.

Runs on: LOGIN NODE. Pure. The hub's answer is untrusted and must be checked, because its names and sizes become paths
and downloads.

The entries come from the hub's library (huggingface_hub 2.4, hf_api.py, `RepoFile` and `RepoFolder`): `path`,
`size`, `blob_id` (git's SHA-1 of the file) and, for files that git does not store itself, `lfs` with `sha256` of the
content and `size`. The library checks none of the values.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from hpcenv.errors import DataUnavailable

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile, RepoFolder

MOST_FILES = 100_000
# A file system allows 255 bytes for a name and 4096 for a path, and the path contains the folders of the store too.
_LONGEST_NAME = 255
_LONGEST_PATH = 1024
_MOST_BYTES = 1 << 50
_SHA1 = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """A file of a repository.

    Attributes:
        path: the path relative to the repository; its parts are plain names.
        digest: `sha256:HEX` for a file in LFS, else `git-sha1:HEX`, which is SHA-1 over `blob SIZE`, a zero byte and
            the content.
        size: in bytes.
    """

    path: str
    digest: str
    size: int


def parse_entries(entries: Iterable[RepoFile | RepoFolder], *, origin: str) -> tuple[HubFile, ...]:
    """Return the files that the entries of a listing name, sorted by path.

    Args:
        entries: the entries of all pages.
        origin: the repository, for messages.

    Raises:
        DataUnavailable: an entry is not valid, a path could lead outside the folder, or there are too many files.
    """
    files: dict[str, HubFile] = {}
    sizes: dict[str, int] = {}
    for entry in entries:
        if not hasattr(entry, "blob_id"):
            continue  # a folder
        file = _file(cast("RepoFile", entry), origin)
        if file.path in files:
            raise _refused(origin, f"two files have the name {file.path!a}")
        files[file.path] = file
        if sizes.setdefault(file.digest, file.size) != file.size:
            raise _refused(origin, f"{file.path!a} has the same digest as another file, but a different size")
        if len(files) > MOST_FILES:
            raise _refused(origin, f"it has more than {MOST_FILES} files")
    _require_tree(files, origin)
    return tuple(files[path] for path in sorted(files))


def select(files: Sequence[HubFile], patterns: Sequence[str], *, origin: str) -> tuple[HubFile, ...]:
    """Return the files that fit at least one of the patterns; without patterns, return all files.

    A pattern matches like `allow_patterns` of huggingface_hub 2.4 (utils/_paths.py, `filter_repo_objects`): `*` also
    stands for `/`, and a pattern that ends with `/` means all files below this folder.

    Raises:
        DataUnavailable: a pattern fits no file, or there are no files.
    """
    if not files:
        raise _refused(origin, "it has no files")
    chosen: set[str] = set()
    for pattern in patterns:
        exact = f"{pattern}*" if pattern.endswith("/") else pattern
        fitting = {file.path for file in files if fnmatch.fnmatchcase(file.path, exact)}
        if not fitting:
            shown = ", ".join(ascii(file.path)[1:-1] for file in files[:5]) + (", ..." if len(files) > 5 else "")
            raise DataUnavailable(
                f"no file of {origin} fits the pattern `{pattern}`",
                why=f"it has {len(files)} files: {shown}",
                hint="correct `files` of [[data]] in hpcenv.toml",
            )
        chosen |= fitting
    return tuple(file for file in files if not patterns or file.path in chosen)


def _file(entry: RepoFile, origin: str) -> HubFile:
    path: object = entry.path
    if not isinstance(path, str) or not _is_safe(path):
        raise _refused(
            origin, f"a file has the name {ascii(path)[:200]}, which is not a plain path below the repository"
        )
    named, algorithm = (_SHA1, "git-sha1") if entry.lfs is None else (_SHA256, "sha256")
    digest: object = entry.blob_id if entry.lfs is None else entry.lfs.sha256
    size: object = entry.size if entry.lfs is None else entry.lfs.size
    if not isinstance(digest, str) or not named.fullmatch(digest):
        raise _refused(origin, f"{path!a} has no valid digest")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MOST_BYTES:
        raise _refused(origin, f"{path!a} has the size {ascii(size)[:50]}")
    return HubFile(path=path, digest=f"{algorithm}:{digest}", size=size)


def _is_safe(path: str) -> bool:
    """Return whether a path stays below its folder on every file system, and cannot deceive a reader or git.

    A folder `.git` would be a git repository, and its configuration can name programs that git starts. For some file
    systems, `.GIT` is the same name. A git repository cannot contain a file with such a name, so no real hub lists it.
    """
    if not path.isprintable() or "\\" in path or len(path.encode("utf-8", "replace")) > _LONGEST_PATH:
        return False
    parts = path.split("/")
    return all(
        part not in ("", ".", "..") and part.lower() != ".git" and len(part.encode()) <= _LONGEST_NAME for part in parts
    )


def _require_tree(files: dict[str, HubFile], origin: str) -> None:
    """Refuse a name that is both a file and a folder."""
    for path in files:
        parts = path.split("/")
        for count in range(1, len(parts)):
            folder = "/".join(parts[:count])
            if folder in files:
                raise _refused(origin, f"{folder!a} is a file and a folder")


def _refused(origin: str, why: str) -> DataUnavailable:
    return DataUnavailable(f"the list of files of {origin} cannot be used", why=why)
