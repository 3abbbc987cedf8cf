"""The SIF that a run uses, as data. Runs on: LOGIN NODE."""

from __future__ import annotations

from dataclasses import dataclass

from hpcenv.records.manifest import SifIdentity


@dataclass(frozen=True, kw_only=True)
class LockedSif:
    """The SIF that a run uses.

    Attributes:
        sha256: its hash, taken once; empty without a SIF.
        identity: how the nodes recognise it.
        overlay: how the nodes recognise a squashfs that is mounted over it.
        same_tree: its bytes differ from the locked file, but its file tree is the locked one.
        notes: what the user should know about them.
    """

    sha256: str = ""
    identity: SifIdentity | None = None
    overlay: SifIdentity | None = None
    same_tree: bool = False
    notes: tuple[str, ...] = ()
