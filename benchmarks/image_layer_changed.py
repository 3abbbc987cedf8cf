"""One small layer of a cached image changes: `hpcenv image pull` beside `apptainer build` tuned by hand.

    python -m benchmarks.image_layer_changed [--json] [--image REF] [--folder DIR] [--rounds N]

Both have converted the image before and keep their caches. The changed image is an OCI layout made here: the same
layers with one of a few kilobytes on top, a new one each round. The peer compresses with zstd -3 and unpacks on
tmpfs. Must: at most 0.4 of the peer's wall time, at most 768 MiB for all processes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

from benchmarks import _image

NEEDS = ("login node",)


def main() -> int:
    """Measure alternately, print, and return 1 when a bound is not kept."""
    words = _image.options(__doc__)
    mine, theirs, size = [], [], 0.0
    with _image.fresh(words.folder) as place, _image.fresh(words.memory_folder) as temporary:
        store, cache = place / "store", place / "cache"
        _image.ours(words.image, store, store / "tmp")
        [original] = (store / "images").glob("*.sif")
        _image.peer(words.image, place, temporary=temporary, cache=cache, tuned=True)
        for number in range(words.rounds):
            layout = place / f"changed-{number}"
            digest = change(store, original, layout, number)
            mine.append(_image.ours(f"oci:{layout}@{digest}", store, store / "tmp"))
            size = (store / "images" / f"{digest.replace(':', '-')}.sif").stat().st_size / 2**20
            theirs.append(_image.peer(f"oci:{layout}@{digest}", place, temporary=temporary, cache=cache, tuned=True))
    return _image.report(words, _image.summary("image_layer_changed", mine, theirs, must=0.4, size_mib=size))


def change(store: Path, sif: Path, layout: Path, number: int) -> str:
    """Write an OCI layout of the image in `sif` with one more layer; return its manifest's digest."""
    blobs = store / "blobs" / "sha256"
    manifest = json.loads((blobs / sif.stem.removeprefix("sha256-")).read_bytes())
    config = json.loads((blobs / _hex(manifest["config"])).read_bytes())
    (layout / "blobs" / "sha256").mkdir(parents=True)
    for layer in manifest["layers"]:
        os.link(blobs / _hex(layer), layout / "blobs" / "sha256" / _hex(layer))
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        entry = tarfile.TarInfo("opt/train/settings.json")
        text = json.dumps({"round": number}).encode()
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
    top = _put(layout, content.getvalue(), "application/vnd.oci.image.layer.v1.tar")
    manifest["layers"].append(top)
    config["rootfs"]["diff_ids"].append(top["digest"])
    config.pop("history", None)
    manifest["config"] = _put(layout, json.dumps(config).encode(), manifest["config"]["mediaType"])
    described = _put(layout, json.dumps(manifest).encode(), manifest["mediaType"])
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return str(described["digest"])


def _hex(descriptor: dict[str, Any]) -> str:
    return str(descriptor["digest"]).removeprefix("sha256:")


def _put(layout: Path, data: bytes, media_type: str) -> dict[str, Any]:
    name = hashlib.sha256(data).hexdigest()
    (layout / "blobs" / "sha256" / name).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{name}", "size": len(data)}


if __name__ == "__main__":
    sys.exit(main())
