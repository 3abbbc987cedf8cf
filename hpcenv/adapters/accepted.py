"""Which documents were valid when they were read before: pydantic is not asked about them again (decision 0011).

Runs on: LOGIN NODE. A record is the name of an empty file: the sha256 over the bytes that passed,
the kind of document, and the rules as they are in this hpcenv. It says nothing else: what is built
is built of the document's own bytes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcenv.dataclass import dataclass
from hpcenv.model import document
from hpcenv.model.document import Document, Model
from hpcenv.version import VERSION

# Of 0 bytes each; a project has two or three, and as many flags of `submit` as its users vary.
_MOST_RECORDS = 2000

# What the tables are made of besides their own module.
_SHARED_RULES = ("model/document.py", "model/fields.py", "model/project.py", "wire.py")


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The records of one user, in a folder that nobody else can write to.

    Whatever is odd about the folder makes its records count as absent; one that cannot be written
    to costs time only.

    Attributes:
        folder: made when the first record is kept; None keeps none.
    """

    folder: Path | None = None

    def parse(self, kind: type[Model], data: Mapping[str, Any], content: bytes) -> tuple[Model | None, tuple[str, ...]]:
        """Return the document as `document.parse` does, without pydantic where it passed before.

        Args:
            data: what is to be a document of this kind; always the same for the same content.
            content: the bytes that `data` was read from.
        """
        record = None if self.folder is None else self._record(kind, content)
        if record is not None and self._is_there(record):
            return document.build(kind, data), ()
        made, problems = document.parse(kind, data)
        # Only where validation changed nothing is the document what its data say.
        if record is not None and made is not None and document.build(kind, data) == made:
            self._keep(record)
        return made, problems

    def _record(self, kind: type[Document], content: bytes) -> Path | None:
        import hashlib

        key: Any = kind  # mypy takes the hash of its objects for its own
        rules = _rules(key)
        if self.folder is None or rules is None:
            return None
        found = hashlib.sha256(rules)
        for part in (f"{VERSION} {sys.hexversion} {kind.__qualname__}".encode(), content):
            found.update(len(part).to_bytes(8, "big") + part)
        return self.folder / found.hexdigest()

    def _is_there(self, record: Path) -> bool:
        try:
            return _is_own(record.parent, stat.S_ISDIR) and _is_own(record, stat.S_ISREG)
        except OSError:
            return False

    def _keep(self, record: Path) -> None:
        with contextlib.suppress(OSError):
            record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(record.parent, stat.S_ISDIR):
                return
            os.close(os.open(record, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            _prune(record.parent)


# Where nothing is remembered.
NOTHING = Accepted()


def _is_own(path: Path, is_kind: Any) -> bool:
    found = os.lstat(path)
    return is_kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _prune(folder: Path) -> None:
    """Remove the oldest records where there are too many; another process may do the same."""
    names = os.listdir(folder)
    if len(names) <= _MOST_RECORDS:
        return
    aged = []
    for name in names:
        with contextlib.suppress(OSError):
            aged.append((os.lstat(folder / name).st_mtime_ns, name))
    # A quarter at once, so that not every record from now on has to look at all the others.
    for _, name in sorted(aged)[: len(names) - _MOST_RECORDS * 3 // 4]:
        with contextlib.suppress(OSError):
            os.unlink(folder / name)


@functools.cache
def _rules(kind: type[Any]) -> bytes | None:
    """Return a digest of the source that says what is valid; None, and nothing is remembered, where there is none."""
    try:
        return b"".join(_digest(name) for name in (*_SHARED_RULES, f"model/{kind.__module__.rpartition('.')[2]}.py"))
    except OSError:
        return None


@functools.cache
def _digest(name: str) -> bytes:
    import hashlib

    return hashlib.sha256((Path(__file__).parents[1] / name).read_bytes()).digest()
