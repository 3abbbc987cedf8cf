"""What a node records about the SIF that it checked, or about a squashfs that is mounted over it.

Runs on: LOGIN NODE and COMPUTE NODE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SifEvidence = Literal["identity", "node-record", "full"]


@dataclass(frozen=True, kw_only=True)
class FileIdentity:
    """Identity of an open file when it was hashed (`stat` fields)."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, kw_only=True)
class CheckedSif:
    """The SIF or squashfs that a node checked. With this record, the launch step checks that it starts the same file.

    Attributes:
        path: path of the checked file: the shared file, or the node's own copy of the shared file.
        staged: whether the file is the node's own copy.
        checked: how the hash of the file is known. `identity`: the file is the same file that was hashed at submission,
            or when it was copied to this node. `node-record`: an earlier job on this node hashed the file, and the file
            has not changed since. `full`: the check read and hashed the file now.
        why: why the check could not use a faster way.
        sha256: sha256 of the whole file.
        file: `stat` fields of the open file.
        lasting: whether every change after the check would be visible in `file`. If `lasting` is false, the launch step
            hashes the file again.
    """

    path: str
    staged: bool
    checked: SifEvidence
    why: str
    sha256: str
    file: FileIdentity
    lasting: bool
