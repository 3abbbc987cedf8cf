"""A SIF in a registry: fetched by its own digest, and refused if a byte of it is another one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import image_fakes
import pytest
from http_server import SifServed, sha
from layer_cases import base, write_layout

from hpcenv.errors import ImageMismatch, ImageUnavailable, SpecError
from hpcenv.image.pull import BuiltImage, ConvertOptions, ImageRequest, pull
from hpcenv.image.reference import Platform, parse_layered, parse_sif_reference
from hpcenv.image.registry.blobs import BlobSpec
from hpcenv.image.registry.source import Access
from hpcenv.image.sif_proof import read_tree_digest
from hpcenv.image.sif_registry import fetch_sif, resolve_sif
from hpcenv.image.store.store import Store
from hpcenv.image.store.store_folder import open_store
from hpcenv.project.store_config import StorePlace

APPTAINER = r"""#!{python} -IS
import sys
{build}
if sys.argv[1] == "--version":
    print("apptainer version 1.4.5")
else:
    build(sys.argv[1:], {folder!r} + "/salt", {folder!r} + "/builds")
"""


# As Apptainer writes it for hpcenv.
ZSTD_BUILD = image_fakes.BUILD.replace("-comp gzip", "-comp zstd")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> BuiltImage:
    """A SIF that was converted; a program plays Apptainer where mksquashfs is too old for hpcenv."""
    image_fakes.require_mksquashfs()
    folder = tmp_path_factory.mktemp("made")
    write_layout(folder / "lay", [base()])
    tools = folder / "tools"
    tools.mkdir()
    (tools / "salt").write_bytes(b"files")
    (tools / "apptainer").write_text(APPTAINER.format(python=sys.executable, build=ZSTD_BUILD, folder=str(tools)))
    (tools / "apptainer").chmod(0o755)
    request = ImageRequest(source=parse_layered(f"oci:{folder}/lay"), allow_floating=True)
    place = StorePlace(root=folder / "store")
    return pull(
        request,
        ConvertOptions(),
        place=place,
        environ={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        on_event=lambda _: None,
    )


@pytest.fixture
def registry() -> Iterator[SifServed]:
    it = SifServed()
    yield it
    it.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


def access(served: SifServed) -> Access:
    return Access(plain_http=(served.host,), environ={"HOME": "/none"})


def fetch(served: SifServed, reference: str, store: Store, *, spec: BlobSpec | None = None) -> BuiltImage:
    wanted = parse_sif_reference(reference)
    if spec is None:
        spec = resolve_sif(wanted, access(served), allow_floating=False, on_event=lambda _: None)
    return fetch_sif(wanted, spec, access(served), platform=Platform(), store=store, on_event=lambda _: None)


def test_a_sif_keeps_its_identity(made: BuiltImage, registry: SifServed, store: Store) -> None:
    kept = registry.keep(made.path)
    for reference in (kept.reference, kept.by_digest):
        fetched = fetch(registry, reference, store)
        assert fetched.path.read_bytes() == made.path.read_bytes()
        assert fetched.record.digest == f"sha256:{made.record.sif.sha256}"
        assert fetched.record.tree_sha256 == read_tree_digest(made.path)
    record = store.record(fetched.record.digest)
    assert record is not None
    assert record.references == (kept.by_digest, kept.reference)
    # The SIF is in the store once, under its own name only.
    assert os.listdir(store.blobs / "sha256") == os.listdir(store.tmp) == []


def test_one_changed_byte_is_refused(made: BuiltImage, registry: SifServed, store: Store) -> None:
    kept = registry.keep(made.path)
    key = ("lab/train", f"sha256:{kept.sha256}")
    changed = bytearray(registry.blobs[key])
    changed[-5] ^= 1
    registry.blobs[key] = bytes(changed)
    with pytest.raises(ImageUnavailable, match="has not the expected bytes|wrong bytes|differ"):
        fetch(registry, kept.reference, store)
    assert store.list_images() == ()
    # The registry's operator makes it consistent again under the tag: the lock still names the old SIF.
    (store.root.parent / "other.sif").write_bytes(changed)
    other = registry.keep(store.root.parent / "other.sif")
    del registry.blobs[key]
    assert other.sha256 != kept.sha256
    with pytest.raises(ImageUnavailable, match="does not have"):
        fetch(registry, kept.reference, store, spec=BlobSpec(digest=key[1], size=kept.size))


def test_a_changed_sif_in_the_store_is_fetched_again(made: BuiltImage, registry: SifServed, store: Store) -> None:
    kept = registry.keep(made.path)
    first = fetch(registry, kept.reference, store)
    first.path.chmod(0o644)
    with open(first.path, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"x")
    first.path.chmod(0o444)
    again = fetch(registry, kept.reference, store)
    assert (again.reused, again.path.read_bytes() == made.path.read_bytes()) == (False, True)


def test_what_is_no_sif(made: BuiltImage, registry: SifServed, store: Store) -> None:
    registry.image()
    with pytest.raises(ImageUnavailable) as error:
        fetch(registry, f"oras://{registry.host}/lab/img:1", store)
    assert f"hpcenv image pull docker://{registry.host}/lab/img:1" in (error.value.hint or "")
    # A registry that names another file a SIF.
    kept = registry.keep(made.path)
    registry.blobs["lab/train", sha(b"no")] = b"no"
    document = json.loads(registry.manifests["lab/train", "1"][1])
    document["layers"][0] |= {"digest": sha(b"no"), "size": 2}
    registry.manifests["lab/train", "1"] = (document["mediaType"], json.dumps(document).encode())
    with pytest.raises(ImageMismatch):
        fetch(registry, kept.reference, store)
    assert store.list_images() == ()


def test_a_floating_name_is_refused(registry: SifServed) -> None:
    for tag in ("", ":latest"):
        with pytest.raises(SpecError, match="means a new image every few weeks"):
            resolve_sif(
                parse_sif_reference(f"oras://{registry.host}/lab/x{tag}"), access(registry), allow_floating=False,
                on_event=lambda _: None,
            )  # fmt: skip


def test_another_platform_is_refused(made: BuiltImage, registry: SifServed, store: Store) -> None:
    kept = registry.keep(made.path)
    wanted = parse_sif_reference(kept.reference)
    spec = BlobSpec(digest=f"sha256:{kept.sha256}", size=kept.size)
    platform = Platform(architecture="arm64")
    with pytest.raises(ImageUnavailable, match="is for linux/amd64"):
        fetch_sif(wanted, spec, access(registry), platform=platform, store=store, on_event=lambda _: None)


# -- the commands ---------------------------------------------------------------------------


def test_the_verbs(made: BuiltImage, registry: SifServed, tmp_path: Path, hpcenv: Any) -> None:
    environ = {"PATH": "/nonexistent", "HOME": str(tmp_path)}
    kept = registry.keep(made.path)
    words = ("image", "pull", kept.by_digest, "--plain-http", "--store", "s")
    done = hpcenv(*words, cwd=tmp_path, environ=environ)
    assert done.status == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == made.path.read_bytes()
    assert "fetched as a finished SIF, tree sha256:" in done.stderr
    assert hpcenv(*words, "--json", cwd=tmp_path, environ=environ).envelope["data"]["reused"]
    refused = hpcenv(*words, "--no-proof", cwd=tmp_path, environ=environ)
    assert (refused.status, "is a finished SIF" in refused.stderr) == (2, True)
    refused = hpcenv("image", "verify", kept.reference, cwd=tmp_path, environ=environ)
    assert "has nothing to convert or to compare with" in refused.stderr
    done = hpcenv("image", "pull", kept.reference, cwd=tmp_path, environ=environ)
    assert f"hpcenv image pull --plain-http {registry.host} {kept.reference}" in done.stderr


@pytest.mark.parametrize(
    ("name", "says", "noted"),
    [("singularity", "singularity-ce version 4.5.1", True), ("singularity", "apptainer version 1.4.5", False)],
)
def test_a_sif_that_the_runtime_here_does_not_read_is_named(
    made: BuiltImage, registry: SifServed, tmp_path: Path, hpcenv: Any, name: str, says: str, noted: bool
) -> None:
    assert made.record.sif.compression == "zstd"
    kept = registry.keep(made.path)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / name).write_text(f"#!/bin/sh\necho {says}\n")
    (tools / name).chmod(0o755)
    words = ("image", "pull", kept.by_digest, "--plain-http", "--store", "s")
    done = hpcenv(*words, cwd=tmp_path, environ={"PATH": str(tools), "HOME": str(tmp_path)})
    assert done.status == 0, done.stderr
    text = "SingularityCE, which starts containers here, does not read that; the user who pushed it can make a SIF"
    assert (text in done.stderr) is noted


def test_the_reference() -> None:
    reference = parse_sif_reference("oras://ghcr.io/lab/train:1")
    assert str(reference) == "oras://ghcr.io/lab/train:1"
    assert str(replace(reference, tag=None, digest="sha256:" + "0" * 64)).endswith("@sha256:" + "0" * 64)
    for text in ("oras://", "oras://h:1/A", "docker://h:1/a"):
        with pytest.raises(SpecError):
            parse_sif_reference(text)
