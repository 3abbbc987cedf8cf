"""The digest of the content that a bind shows in a container.

Runs on: COMPUTE NODE, and on the login node while locking. Standard library only.

The digest (`hpcenv-bind-v1`) of a file is the sha256 of its bytes. The digest of a folder is the sha256 of the sorted
lines `KIND NUL path NUL value`, where the value is the sha256 of a file or the target of a link. Inner folders count
with their names; owners, modes and times do not count. A link that leads out of the folder is resolved in the
container, so only its target path counts.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping

from hpcenv.incontainer.probe.paths import is_below
from hpcenv.records.files import sha256_at

# These limits are low, because a bind that hides files of an image shows code or a library. Data should be bound to a
# path that the image does not have.
LIMIT_BYTES = 2 << 30
LIMIT_FILES = 50_000


def source_of(path: str, sources: Mapping[str, str]) -> tuple[str, str]:
    """Return the target of the bind that shows a path of the container, and the path's source; empty without a bind.

    Args:
        sources: the source of each bind, by the target of the bind.
    """
    target = max((one for one in sources if is_below(path, one)), key=len, default="")
    return target, sources[target] + path[len(target.rstrip("/")) :] if target else ""


def content_digest(source: str, *, compiled: bool = False) -> str:
    """Return the digest of a file or folder of the host, `sha256:...`.

    Args:
        compiled: whether folders `__pycache__` count, as in lockfiles before revision 2.

    Raises:
        OSError: a part of the source cannot be read.
        ValueError: the source is not a file or folder, or is too large for a digest on each node.
    """
    status = os.stat(source)
    if stat.S_ISREG(status.st_mode):
        if status.st_size > LIMIT_BYTES:
            raise ValueError(_too_large(source))
        return f"sha256:{sha256_at(source)}"
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{source} is neither a file nor a folder")
    return _folder_digest(source, compiled)


def _folder_digest(folder: str, compiled: bool) -> str:
    lines: list[bytes] = []
    whole = os.fsencode(folder)
    for kind, path, value in _entries(whole, compiled):
        content = sha256_at(os.path.join(whole, path)).encode() if kind == b"file" else value
        lines.append(b"\0".join((kind, path, content)))
    return "sha256:" + hashlib.sha256(b"\n".join(sorted(lines))).hexdigest()


def _entries(folder: bytes, compiled: bool) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield kind, relative path and value of all entries in a folder; the value of a file is not read."""
    total = count = 0
    for place, folders, files in os.walk(folder, onerror=_raise):
        if not compiled and b"__pycache__" in folders:
            folders.remove(b"__pycache__")
        for name in (*folders, *files):
            path = os.path.join(place, name)
            status = os.lstat(path)
            count += 1
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
            if total > LIMIT_BYTES or count > LIMIT_FILES:
                raise ValueError(_too_large(os.fsdecode(folder)))
            kind, value = b"other", b""
            if stat.S_ISLNK(status.st_mode):
                kind, value = b"link", os.readlink(path)
            elif stat.S_ISDIR(status.st_mode):
                kind = b"folder"
            elif stat.S_ISREG(status.st_mode):
                kind = b"file"
            yield kind, os.path.relpath(path, folder), value


def _raise(error: OSError) -> None:
    raise error


def _too_large(source: str) -> str:
    return f"{source} has more than {LIMIT_BYTES >> 30} GiB or {LIMIT_FILES} files"
