"""The files of a repository at a commit, as the hub lists them.

Runs on: LOGIN NODE. Pure. The hub's answer is untrusted: names and sizes become paths and downloads.

`GET /api/models/ORG/NAME/tree/COMMIT?recursive=true` answers with a list of objects (huggingface_hub 2.4, hf_api.py,
`list_repo_tree` and `RepoFile`): `type`, `path`, `size`, `oid` (git's SHA-1 of the file) and, for files that git does
not hold itself, `lfs` with `oid` (SHA-256 of the content) and `size`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcenv.errors import DataUnavailable
from hpcenv.image.registry.blobs import BlobSpec

MOST_FILES = 100_000
# A file system allows 255 bytes for a name, and a path of 4096; the folders of the store come before it.
_LONGEST_NAME = 255
_LONGEST_PATH = 1024
_MOST_BYTES = 1 << 50
_SHA1 = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """A file of a repository.

    Attributes:
        path: below the repository; its parts are plain names.
        blob: size and digest: `sha256:` for a file in LFS, else `git-sha1:`.
    """

    path: str
    blob: BlobSpec


def parse_entries(entries: Iterable[Any], *, origin: str) -> tuple[HubFile, ...]:
    """Return the files that the entries of a listing name, sorted by path.

    Args:
        entries: of all pages.
        origin: the repository, for messages.

    Raises:
        DataUnavailable: an entry is not valid, a name could leave the folder, or there are too many files.
    """
    files: dict[str, HubFile] = {}
    sizes: dict[str, int] = {}
    for entry in entries:
        if not isinstance(entry, dict):
            raise _refused(origin, "an entry is not an object")
        if entry.get("type") == "directory":
            continue
        file = _file(entry, origin)
        if file.path in files:
            raise _refused(origin, f"two files have the name {file.path!a}")
        files[file.path] = file
        if sizes.setdefault(file.blob.digest, file.blob.size) != file.blob.size:
            raise _refused(origin, f"{file.path!a} has the digest of another file and not its size")
        if len(files) > MOST_FILES:
            raise _refused(origin, f"it has more than {MOST_FILES} files")
    _require_tree(files, origin)
    return tuple(files[path] for path in sorted(files))


def select(files: Sequence[HubFile], patterns: Sequence[str], *, origin: str) -> tuple[HubFile, ...]:
    """Return the files that fit one of the patterns; all without patterns.

    A pattern is judged as `allow_patterns` of huggingface_hub 2.4 (utils/_paths.py, `filter_repo_objects`): `*` also
    stands for `/`, and a pattern that ends with `/` means all files below.

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


def _file(entry: dict[str, Any], origin: str) -> HubFile:
    path, lfs = entry.get("path"), entry.get("lfs")
    if not isinstance(path, str) or not _is_safe(path):
        raise _refused(
            origin, f"a file has the name {ascii(path)[:200]}, which is not a plain path below the repository"
        )
    if entry.get("type") != "file":
        raise _refused(origin, f"{path!a} is of the type {ascii(entry.get('type'))[:50]}")
    named, digest, size = _SHA1, entry.get("oid"), entry.get("size")
    if lfs is not None:
        if not isinstance(lfs, dict):
            raise _refused(origin, f"the entry `lfs` of {path!a} is not an object")
        named, digest, size = _SHA256, lfs.get("oid"), lfs.get("size")
    if not isinstance(digest, str) or not named.fullmatch(digest):
        raise _refused(origin, f"{path!a} has no valid digest")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MOST_BYTES:
        raise _refused(origin, f"{path!a} has the size {ascii(size)[:50]}")
    algorithm = "git-sha1" if lfs is None else "sha256"
    return HubFile(path=path, blob=BlobSpec(digest=f"{algorithm}:{digest}", size=size))


def _is_safe(path: str) -> bool:
    """Tell whether a path stays below its folder on every file system, and is no trick on a reader."""
    if not path.isprintable() or "\\" in path or len(path.encode("utf-8", "replace")) > _LONGEST_PATH:
        return False
    parts = path.split("/")
    return all(part not in ("", ".", "..") and len(part.encode()) <= _LONGEST_NAME for part in parts)


def _require_tree(files: dict[str, HubFile], origin: str) -> None:
    """Refuse a name that is a file and a folder."""
    for path in files:
        parts = path.split("/")
        for count in range(1, len(parts)):
            folder = "/".join(parts[:count])
            if folder in files:
                raise _refused(origin, f"{folder!a} is a file and a folder")


def _refused(origin: str, why: str) -> DataUnavailable:
    return DataUnavailable(f"the list of files of {origin} cannot be used", why=why)
