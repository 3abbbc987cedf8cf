"""What a node records about the SIF that it checked, or about a squashfs that is mounted over it.

Runs on: LOGIN NODE and COMPUTE NODE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SifEvidence = Literal["identity", "node-record", "full"]


@dataclass(frozen=True, kw_only=True)
class FileIdentity:
    """Identity of an open file at the time it was hashed (`stat` fields)."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, kw_only=True)
class CheckedSif:
    """The SIF or squashfs that a node checked, so that the launch step can check that it starts this one.

    Attributes:
        path: which file: the shared one, or the node's own copy of it.
        staged: whether it is the node's own copy.
        checked: how its hash is known: `identity` (the very file that was hashed at
            submission, or while it was copied to this node), `node-record` (hashed by an
            earlier job on this node and not changed since), `full` (read and hashed now).
        why: why the cheaper ways could not be used.
        sha256: sha256 of the whole file.
        file: `stat` fields of the open file.
        lasting: a change after the check would show in `file`; where it might not, the
            launch step hashes again.
    """

    path: str
    staged: bool
    checked: SifEvidence
    why: str
    sha256: str
    file: FileIdentity
    lasting: bool
