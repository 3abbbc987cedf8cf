"""Check the squashfs that is mounted over an image, by its hash.

Runs on: COMPUTE NODE, and on the login node while locking and planning. Standard library only. Only runs
with an overlay import this module. docs/decisions/0035 has the reasons.

A squashfs is one file. Like a SIF (sif_check.py), it can be recognised without reading all of it.
"""

from __future__ import annotations

from hpcenv.identity import sif_check
from hpcenv.records.checked_sif import CheckedSif
from hpcenv.records.manifest import SifIdentity

FIELD = "container.overlay.sha256"


def check_file(
    descriptor: int, *, path: str, known: SifIdentity | None, records: sif_check.Records | None
) -> CheckedSif:
    """Return the hash of an open squashfs, in the fastest way that is certain.

    Args:
        descriptor: the open file.
        path: path for the record.
        known: the identity that was recorded together with the full hash; None if there is no such identity.
        records: the hashes that were taken on this machine before; None if there are no records.

    Raises:
        ImageMismatch: the file changed while it was read.
        EnvironmentUnreadable: the file cannot be read.
    """
    return sif_check.check(
        descriptor, path=path, staged=False, known=known, records=records, read_header=sif_check.superblock_of
    )


def identify(descriptor: int, records: sif_check.Records | None) -> tuple[str, SifIdentity | None]:
    """Return the hash of a squashfs, and its identity for the nodes; None if the file system allows no identity.

    Raises:
        ImageMismatch: the file is not a squashfs, or changed while it was read.
        EnvironmentUnreadable: the file cannot be read.
    """
    return sif_check.identify(descriptor, records, read_header=sif_check.superblock_of)
