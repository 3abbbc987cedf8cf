"""The manifest of a SIF in a registry, as Apptainer writes it.

Runs on: LOGIN NODE. Pure.

apptainer 1.4 `internal/pkg/client/oras/` (`image.go`, `layer.go`, `config.go`, read 2026-11-23): an OCI manifest with
an empty configuration and one layer, which is the SIF. So the digest of the layer is the sha256 of the SIF. Apptainer
accepts every configuration and two types of the layer; so does hpcenv.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcenv.errors import Command
from hpcenv.image.reference import DIGEST
from hpcenv.image.registry.blobs import BlobSpec
from hpcenv.image.registry.manifests import unusable

__all__ = ["read_sif_layer"]

_SIF_LAYERS = (
    "application/vnd.sylabs.sif.layer.v1.sif",
    # SingularityPro and Singularity before 3.7, with the spelling of their time (hpcng/singularity issue 4437).
    "appliciation/vnd.sylabs.sif.layer.tar",
)


def read_sif_layer(manifest: Mapping[str, Any], name: str) -> BlobSpec:
    """Return the SIF that a manifest names.

    Raises:
        ImageUnavailable: the manifest is not one of a SIF.
    """
    layers = manifest.get("layers")
    entries = [entry for entry in layers if isinstance(entry, dict)] if isinstance(layers, list) else []
    types = [str(entry.get("mediaType"))[:100] for entry in entries]
    if len(entries) != 1 or types[0] not in _SIF_LAYERS:
        image = Command("hpcenv", "image", "pull", name.replace("oras://", "docker://", 1))
        why = f"its layers are of type {', '.join(sorted(set(types)))[:200] or 'none'}, not one SIF"
        raise unusable(name, why, ("if it is a container image: ", image))
    digest, size = entries[0].get("digest"), entries[0].get("size")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise unusable(name, f"its SIF has the digest {str(digest)[:80]!r}, not a sha256 one")
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise unusable(name, f"its SIF has the size {str(size)[:40]!r}")
    return BlobSpec(digest=digest, size=size)
