"""A large image becomes a SIF: time, memory and temporary space of `hpcenv image pull` for 15 GiB of files.

    python -m benchmarks.image_large [--json] [--gib N] [--folder DIR]

Needs squashfs-tools 4.6 or Apptainer. The image is an OCI layout of five layers that are generated here: files of
64 MiB, half of each random and half text, compressed as registries have them. The folder needs 2.5 times the size.
Must: at most 768 MiB for all processes, and no more temporary space than 1.25 times the SIF.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from isal import igzip

from benchmarks import _image

NEEDS = ("login node",)

_LAYERS, _FILE = 5, 64 << 20
_PIECE = 1 << 20
_KIND = "application/vnd.oci.image."


class _Hashed(io.RawIOBase):
    """Writes to a file and hashes what is written."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self.file, self.digest, self.size = file, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.digest.update(data)
        self.size += len(data)
        return self.file.write(data)


class _Content(io.RawIOBase):
    """The content of one file; another one for each seed."""

    def __init__(self, seed: int, size: int) -> None:
        self._pieces = _pieces(seed, size)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while len(self._rest) < size:
            piece = next(self._pieces, b"")
            if not piece:
                break
            self._rest += piece
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


def _pieces(seed: int, size: int) -> Iterator[bytes]:
    source = random.Random(seed)
    for number in range(size // _PIECE):
        line = f"file {seed}, piece {number}: a line of text that compresses well\n".encode()
        yield source.randbytes(_PIECE // 2) + (line * (_PIECE // 2 // len(line) + 1))[: _PIECE // 2]


def _layer(folder: Path, number: int, files: int) -> dict[str, object]:
    """Write a layer; return its descriptor, with the digest of its content under `diff_id`."""
    path = folder / f"layer-{number}"
    with path.open("wb") as raw:
        stored = _Hashed(raw)
        with igzip.IGzipFile(fileobj=stored, mode="wb", compresslevel=1, mtime=0) as packed:  # type: ignore[arg-type]
            plain = _Hashed(packed)  # type: ignore[arg-type]
            with tarfile.open(fileobj=plain, mode="w|") as archive:
                for at in range(files):
                    member = tarfile.TarInfo(f"opt/large/{number}/{at}.bin")
                    member.size, member.mode = _FILE, 0o644
                    archive.addfile(member, _Content(number * 10_000 + at, _FILE))  # type: ignore[arg-type]
    digest = stored.digest.hexdigest()
    path.rename(folder / digest)
    kind = f"{_KIND}layer.v1.tar+gzip"
    described: dict[str, object] = {"mediaType": kind, "digest": f"sha256:{digest}", "size": stored.size}
    return {**described, "diff_id": f"sha256:{plain.digest.hexdigest()}"}


def write_image(place: Path, files: int) -> int:
    """Write an OCI layout with so many files in each layer; return the bytes of its stored layers."""
    blobs = place / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layers = [_layer(blobs, number, files) for number in range(_LAYERS)]
    contents = {"type": "layers", "diff_ids": [layer.pop("diff_id") for layer in layers]}
    config = {"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/bin"]}, "rootfs": contents}
    described = _blob(blobs, config, "config")
    manifest = {"schemaVersion": 2, "mediaType": f"{_KIND}manifest.v1+json", "config": described, "layers": layers}
    index = {"schemaVersion": 2, "manifests": [_blob(blobs, manifest, "manifest")]}
    (place / "index.json").write_text(json.dumps(index))
    (place / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return sum(int(str(layer["size"])) for layer in layers)


def _blob(blobs: Path, document: object, kind: str) -> dict[str, object]:
    text = json.dumps(document).encode()
    digest = hashlib.sha256(text).hexdigest()
    (blobs / digest).write_bytes(text)
    return {"mediaType": f"{_KIND}{kind}.v1+json", "digest": f"sha256:{digest}", "size": len(text)}


def main() -> int:
    """Generate the image, convert it once, and print what that took; 1 when a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--gib", type=float, default=15.0, help="size of the image's files")
    parser.add_argument("--folder", default=None, help="where to work; a fresh folder below it is used")
    words = parser.parse_args()
    size = int(words.gib * 2**30)
    with _image.fresh(words.folder) as place:
        free = shutil.disk_usage(place).free
        if free < 2.5 * size:
            raise SystemExit(f"{words.gib:g} GiB need {2.5 * words.gib:.0f} GiB of disk, {free / 2**30:.0f} are free")
        files = max(1, size // _LAYERS // _FILE)
        stored = write_image(place / "layout", files)
        store = place / "store"
        took = _image.ours(f"oci:{place / 'layout'}", store, store / "tmp")
        [made] = (store / "images").glob("*.sif")
        sif = made.stat().st_size
    return _report(words, took, unpacked=files * _LAYERS * _FILE, stored=stored, sif=sif)


def _report(words: argparse.Namespace, took: _image.Taken, *, unpacked: int, stored: int, sif: int) -> int:
    rate = unpacked / 1e6 / took.wall
    print(
        f"{unpacked / 2**30:.1f} GiB of files, {stored / 2**30:.1f} GiB stored: {took.wall:.1f} s, {rate:.0f} MB/s;",
        end=" ",
    )
    print(f"processor {took.cpu:.0f} s, peak memory {took.peak_mib:.0f} MiB, temporary {took.space_mib:.0f} MiB")
    met = took.peak_mib <= 768 and took.space_mib <= 1.25 * sif / 2**20
    row = {
        "name": "image_large",
        "gib": round(unpacked / 2**30, 2),
        "ours_s": round(took.wall, 1),
        "mb_per_s": round(rate, 1),
        "cpu_s": round(took.cpu, 1),
        "peak_mib": round(took.peak_mib, 1),
        "space_mib": round(took.space_mib, 1),
        "size_mib": round(sif / 2**20, 1),
        "must": "peak_mib <= 768, space_mib <= 1.25 size_mib",
        "met": met,
        "machine": f"{os.cpu_count()} CPUs",
    }
    if words.json:
        print(json.dumps(row))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
