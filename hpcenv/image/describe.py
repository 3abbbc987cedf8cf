"""Describe a SIF from its bytes. Runs on: LOGIN NODE."""

from __future__ import annotations

from pathlib import Path

from hpcenv.identity import sif
from hpcenv.image.store.sif_record import ImageRecord, Provenance, SifFacts


def describe_sif(path: Path, reference: str, made: Provenance) -> ImageRecord:
    """Return a store record of a SIF. The record is made from the SIF itself, so the whole file is read.

    Args:
        path: the SIF.
        reference: the name by which the user knows the SIF.
        made: how the SIF was made.

    Raises:
        HpcenvError: the SIF cannot be read.
    """
    header = sif.read_header(path)
    sha256 = sif.file_sha256(path)
    return ImageRecord(
        digest=f"sha256:{sha256}",
        references=(reference,),
        platform=f"linux/{header.architecture}",
        sif=SifFacts(
            sha256=sha256,
            size=header.file_size,
            partition_sha256=sif.partition_sha256(path, header),
            partition_size=header.runs.size,
            compression=sif.superblock(path, header).compression,
            architecture=header.architecture,
        ),
        made=made,
    )
