"""The test image with real PyTorch: wheels, layers, an OCI layout, and the registry's store holding it.

Pip of this machine fetches the wheels (with its own configuration); everything after that
works offline.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import IO

from . import cache, locked, rootfs
from .errors import TestbedError
from .locked import Locked
from .rootfs import Workshop

REPOSITORY = "hpcenv/torch"
TAG = "2.13.0-cpu"
OTHER_TAG = "other"
REFERENCE = f"registry:5000/{REPOSITORY}:{TAG}"
OTHER_REFERENCE = f"registry:5000/{REPOSITORY}:{OTHER_TAG}"

PYTHON = "3.11"  # bookworm's, and the only one that a CPU wheel of torch is at hand for everywhere
REQUIREMENTS = ("torch==2.13.0", "numpy")
_REVISION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob:
    """A file of an OCI layout, as manifests speak of it."""

    mediaType: str  # noqa: N815 - the OCI specification's spelling
    digest: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer and the digest of its uncompressed tar."""

    blob: Blob
    diff_id: str


def torch_wheels(shop: Workshop) -> Path:
    """The wheels of torch and all it needs, for Python 3.11."""
    lock = locked.read(shop.instance, f"python{PYTHON}")

    def build(target: Path) -> None:
        download_wheels(shop, target, PYTHON, list(REQUIREMENTS), lock)

    text = _text("wheels", *REQUIREMENTS, lock.key)
    return cache.entry(shop.instance.cache, "wheels-torch", text, build, shop.progress)


def download_wheels(shop: Workshop, target: Path, python: str, requirements: list[str], lock: Locked) -> None:
    """Wheels for a Python of that version, by this machine's pip and its configuration, of the locked versions."""
    _download(shop, target, ["--only-binary=:all:", "--python-version", python, *requirements], lock)


def build_wheels(
    shop: Workshop, target: Path, requirements: tuple[str, ...], extra: Mapping[str, str], lock: Locked
) -> None:
    """Wheels of packages that are there as sources only, for any Python: by this machine's pip, too."""
    with TemporaryDirectory() as name:
        sources = Path(name) / "sources"
        sources.mkdir()
        constraints = Path(name) / "constraints.txt"
        lock.write_constraints(constraints)
        # What the build needs is locked too; pip 26 has another variable for it than the older ones.
        variables = {**extra, "PIP_CONSTRAINT": str(constraints), "PIP_BUILD_CONSTRAINT": str(constraints)}
        _download(shop, sources, ["--no-deps", "--no-binary=:all:", *requirements], lock, variables)
        argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(target)]
        shop.runner.run([*argv, *map(str, sources.iterdir())], timeout=600, extra=variables)


def _download(
    shop: Workshop, target: Path, words: list[str], lock: Locked, extra: Mapping[str, str] | None = None
) -> None:
    before = set(target.iterdir())
    with NamedTemporaryFile("w", suffix=".txt") as constraints:
        lock.write_constraints(Path(constraints.name))
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(target)]
        shop.runner.run([*argv, "--constraint", constraints.name, *words], timeout=1800, extra=extra)
    lock.check(set(target.iterdir()) - before)


def layout(shop: Workshop, base: Path, wheels: Path) -> Path:
    """The OCI layout with both tags."""

    def build(target: Path) -> None:
        _build_layout(shop, target, base, wheels)

    text = _text("layout", base.name, wheels.name)
    return cache.entry(shop.instance.cache, "image", text, build, shop.progress)


def store(shop: Workshop, service_root: Path, oci: Path) -> Path:
    """A registry's storage directory with both tags pushed to it."""

    def build(target: Path) -> None:
        (target / "store").mkdir()
        binds = {oci: "/mnt", target / "store": "/srv", Path(__file__).parent: "/media"}
        words = ["bash", "/media/fill_registry.sh", REPOSITORY, TAG, OTHER_TAG]
        shop.runner.run(rootfs.sandbox_argv(service_root, target / "scratch", binds, words), timeout=600)
        _drop_scratch(target)

    text = _text("store", service_root.name, oci.name)
    return cache.entry(shop.instance.cache, "registry", text, build, shop.progress) / "store"


def _text(*parts: str) -> str:
    return "\n".join((*parts, f"revision {_REVISION}"))


def _drop_scratch(target: Path) -> None:
    for leftover in target.glob("scratch*"):
        shutil.rmtree(leftover)


def _build_layout(shop: Workshop, target: Path, base: Path, wheels: Path) -> None:
    blobs = target / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    upper = target / "scratch"
    install = ["python3", "-m", "pip", "install", "--quiet", "--break-system-packages"]
    install += ["--find-links", "/mnt", *REQUIREMENTS]
    shop.runner.run(rootfs.sandbox_argv(base, upper, {wheels: "/mnt"}, install), timeout=1200)
    shop.progress.say("image: torch is installed, packing the layers")
    (upper / "workspace").mkdir()
    layers = [
        _pack(["tar", "-C", str(base), "--exclude=./.recipe", "--exclude=./dev/*", "-c", "."], blobs),
        _pack(["tar", "-C", str(upper), "-c", "./usr", "./workspace"], blobs),
    ]
    _drop_scratch(target)
    variant = _pack_bytes(_one_file_tar("opt/hpcenv-variant", b"other\n"), blobs)
    manifests = [
        _write_manifest(blobs, layers, tag=TAG),
        _write_manifest(blobs, [*layers, variant], tag=OTHER_TAG),
    ]
    (target / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}\n')
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": manifests}
    (target / "index.json").write_text(json.dumps(index, indent=1))


def _pack(tar: list[str], blobs: Path) -> Layer:
    """Run `tar`, and gzip its output into a blob while hashing both sides."""
    words = [tar[0], "--numeric-owner", "--sort=name", "--format=pax", "--pax-option=delete=atime,delete=ctime"]
    process = subprocess.Popen([*words, *tar[1:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    layer = _compress(process.stdout, blobs)
    complaint = process.stderr.read().decode(errors="replace")
    if process.wait(timeout=60) != 0:
        raise TestbedError("packing a layer of the test image failed", why=complaint[-800:])
    return layer


def _pack_bytes(tar: bytes, blobs: Path) -> Layer:
    return _compress(io.BytesIO(tar), blobs)


def _compress(tar: IO[bytes], blobs: Path) -> Layer:
    plain = hashlib.sha256()
    aside = blobs / "layer.new"
    # Level 3: a third of level 9's time for 5 % more size; mtime 0: the same tar gives the same blob.
    with (
        aside.open("wb") as out,
        gzip.GzipFile(filename="", fileobj=out, mode="wb", compresslevel=3, mtime=0) as packed,
    ):
        while chunk := tar.read(1 << 20):
            plain.update(chunk)
            packed.write(chunk)
    blob = _adopt(aside, blobs, "application/vnd.oci.image.layer.v1.tar+gzip")
    return Layer(blob=blob, diff_id=f"sha256:{plain.hexdigest()}")


def _adopt(aside: Path, blobs: Path, media_type: str) -> Blob:
    """Give a finished file its digest as name."""
    with aside.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    aside.rename(blobs / digest)
    return Blob(mediaType=media_type, digest=f"sha256:{digest}", size=(blobs / digest).stat().st_size)


def _one_file_tar(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size, member.mtime = len(content), int(time.time())
        tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _write_manifest(blobs: Path, layers: list[Layer], tag: str) -> dict[str, object]:
    """Config and manifest of one tag; answers its line of the index."""
    config = _write_json(blobs, _config(layers), "application/vnd.oci.image.config.v1+json")
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": asdict(config),
        "layers": [asdict(layer.blob) for layer in layers],
    }
    blob = _write_json(blobs, manifest, "application/vnd.oci.image.manifest.v1+json")
    return {**asdict(blob), "annotations": {"org.opencontainers.image.ref.name": tag}}


def _write_json(blobs: Path, content: object, media_type: str) -> Blob:
    aside = blobs / "json.new"
    aside.write_text(json.dumps(content))
    return _adopt(aside, blobs, media_type)


def _config(layers: list[Layer]) -> dict[str, object]:
    # Now, that is after the newest file: Apptainer clamps mtimes to it where it is used as
    # SOURCE_DATE_EPOCH, and an older date makes every .pyc stale (`import torch` twice as slow).
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "created": created,
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Env": [
                "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "LANG=C.UTF-8",
                "TORCH_HOME=/opt/torch",
            ],
            "WorkingDir": "/workspace",
            "Cmd": ["python3"],
            "Labels": {"org.opencontainers.image.title": "hpcenv test image", "org.opencontainers.image.version": TAG},
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created": created, "created_by": f"hpcenv testbed: layer {n}"} for n, _ in enumerate(layers)],
    }
