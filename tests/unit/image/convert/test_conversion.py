"""Layers are packed while they are read for the first time: same bytes as afterwards, and nothing half-checked."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from layer_cases import CASES, base, digest_of, directory, file, tar, whiteout, write_layout

from hpcenv.errors import ImageMismatch, ImageUnavailable, ToolFailed
from hpcenv.image.convert.layers import LayerLimits
from hpcenv.image.pull import ConvertOptions, ImageRequest, pull
from hpcenv.image.reference import parse_layered
from hpcenv.image.store.store import Store
from hpcenv.image.store.store_folder import open_store
from hpcenv.project.store_config import StorePlace

# Keeps the stream it is given behind a superblock, and notes that it ran; refuses where it is told to.
PACKER = """#!{python}
import os, struct, sys
if sys.argv[1] == "-version":
    print("mksquashfs version 4.6.1 (2023/03/25)")
    sys.exit(0)
data = sys.stdin.buffer.read()
here = os.path.dirname(os.path.abspath(__file__))
if len(data) > 1024:
    with open(os.path.join(here, "ran"), "a") as ran:
        ran.write("x")
    refused = os.path.join(here, "refuse")
    if os.path.exists(refused):
        os.remove(refused)
        sys.exit("FATAL ERROR: refused")
options = sys.argv[3:]
comp = dict(gzip=1, zstd=6)[options[options.index("-comp") + 1]]
root = " ".join(options[at + 1] for at, word in enumerate(options) if word.startswith("-root")).encode()
with open(sys.argv[2], "r+b") as out:
    out.seek(int(options[options.index("-offset") + 1]))
    out.write(struct.pack("<4s16xH6xHH8xQ", b"hsqs", comp, 4, 0, 48 + len(data)) + bytes(200) + root + data)
"""
TOP = tar(file(b"opt/new", b"n" * 5000), whiteout(b"etc/app.conf"), file(b"bin/tool", b"changed"))


@dataclass
class World:
    """A store, a packer that keeps what it is given, and images in layouts."""

    folder: Path
    store: Store
    notes: list[str] = field(default_factory=list)

    def image(self, layers: list[bytes], **more: object) -> str:
        layout = self.folder / "layout"
        return f"oci:{layout}@{write_layout(layout, layers, **more)}"

    def archive(self, layers: list[bytes], **more: object) -> str:
        """Return an image in an archive; its layers are copied into the store."""
        digest = write_layout(self.folder / "in-archive", layers, **more)
        with tarfile.open(self.folder / "image.tar", "w") as out:
            out.add(self.folder / "in-archive", arcname=".")
        return f"oci-archive:{self.folder}/image.tar@{digest}"

    def pull(self, reference: str, **how: object) -> bytes:
        """Pull without proof: what this packer makes is no file system."""
        made = pull(
            ImageRequest(source=parse_layered(reference)),
            ConvertOptions(builder="hpcenv", prove=False, **how),  # type: ignore[arg-type]
            place=StorePlace(root=self.store.root),
            environ={"PATH": str(self.folder / "bin"), "HOME": "/none"},
            on_event=lambda event: self.notes.append(event.what) if event.phase == "note" else None,
        )
        return made.path.read_bytes()

    def forget_sifs(self) -> None:
        shutil.rmtree(self.store.root / "images")
        self.store = open_store(self.store.root, create=True)

    def forget_index(self, layer: bytes) -> None:
        self.store.index_path(digest_of(layer)).unlink()

    @property
    def runs(self) -> int:
        ran = self.folder / "bin" / "ran"
        return len(ran.read_text()) if ran.exists() else 0


@pytest.fixture
def world(tmp_path: Path) -> World:
    packer = tmp_path / "bin" / "mksquashfs"
    packer.parent.mkdir()
    packer.write_text(PACKER.format(python=sys.executable))
    packer.chmod(0o755)
    return World(tmp_path, open_store(tmp_path / "store", create=True))


def test_layers_read_for_the_first_time_give_the_bytes_that_known_ones_give(world: World) -> None:
    each = [base(), tar(directory(b"./", mode=0o711, mtime=7), file(b"etc/app.conf", b"middle")), TOP]
    reference = world.image(each, packed=("gzip", "zstd"))
    first = world.pull(reference)
    assert world.runs == 1
    for unknown in ([], each, each[:1], each[1:2], each[2:]):
        world.forget_sifs()
        for layer in unknown:
            world.forget_index(layer)
        assert world.pull(reference) == first
    assert world.runs == 6


def test_too_many_files_are_refused_at_the_limit_not_after_the_last_layer(world: World) -> None:
    """The layers are each below the limit; what was read before counts, and the rest is not read."""
    each = [tar(*(file(b"%d-%d" % (layer, at), b"x" * 600) for at in range(100))) for layer in range(4)]
    with pytest.raises(ImageMismatch, match="more entries, more than the limit `entries` of 150") as refusal:
        world.pull(world.image(each), limits=LayerLimits(entries=150))
    assert "--limit entries=none" in (refusal.value.hint or "")
    known = [world.store.index_path(digest_of(layer)).exists() for layer in each]
    assert known.count(True) == 1
    assert world.pull(world.image(each), limits=LayerLimits(entries=400))


def compression_of(made: bytes) -> int:
    return int.from_bytes(made[made.index(b"hsqs") + 20 :][:2], "little")


def test_singularity_gets_gzip_and_a_stored_sif_with_zstd_is_made_again_for_it(world: World) -> None:
    reference = world.image([base()])
    program = world.folder / "bin" / "singularity"
    program.write_text("#!/bin/sh\necho singularity-ce version 4.5.1\n")
    program.chmod(0o755)
    assert compression_of(world.pull(reference, compression="zstd")) == 6
    # What starts containers here decides; the second SIF serves both programs.
    gzip = world.pull(reference)
    assert (compression_of(gzip), world.runs) == (1, 2)
    assert "compressed with zstd, which SingularityCE does not read" in " ".join(world.notes)
    assert world.pull(reference, compression="zstd") == gzip
    world.forget_sifs()
    # Apptainer's own link of that name reads zstd.
    program.write_text("#!/bin/sh\necho apptainer version 1.4.5\n")
    assert compression_of(world.pull(reference)) == 6


@pytest.mark.parametrize("name", ["below-symlink", "hard-link-target-hidden", "twice-in-one-layer"])
def test_an_image_that_was_guessed_wrong_is_packed_again(world: World, name: str) -> None:
    reference = world.image(CASES[name].layers())
    first = world.pull(reference)
    assert world.runs in {1, 2}  # the packer may be stopped before it has read all
    before = world.runs
    world.forget_sifs()
    assert world.pull(reference) == first
    assert world.runs == before + 1


def test_a_packer_that_fails_on_what_was_guessed_gets_what_is_known(world: World) -> None:
    reference = world.image([base(), TOP])
    (world.folder / "bin" / "refuse").touch()
    first = world.pull(reference)
    world.forget_sifs()
    assert world.pull(reference) == first
    world.forget_sifs()
    (world.folder / "bin" / "refuse").touch()
    with pytest.raises(ToolFailed, match="mksquashfs"):
        world.pull(reference)


@pytest.mark.parametrize("wrong", [0, 1])
def test_nothing_is_published_of_layers_that_are_not_what_the_config_says(world: World, wrong: int) -> None:
    each = [base(), TOP]
    digests = [digest_of(layer) for layer in each]
    digests[wrong] = digest_of(b"something else")
    with pytest.raises(ImageMismatch, match="has the digest"):
        world.pull(world.image(each, diff_ids=digests))
    assert list((world.store.root / "images").iterdir()) == []
    assert list(world.store.tmp.iterdir()) == []
    assert not world.store.index_path(digests[wrong]).exists()


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_layer_that_the_disk_lost_is_fetched_again(world: World, wrong: int) -> None:
    each = [base(), TOP]
    reference = world.archive(each, packed=("plain",))
    first = world.pull(reference)
    world.forget_sifs()
    for layer in each:
        world.forget_index(layer)
    kept = world.store.blobs / "sha256" / digest_of(each[wrong])[7:]
    kept.chmod(0o644)
    with kept.open("r+b") as blob:
        blob.seek(512)
        blob.write(b"\xff")
    kept.chmod(0o444)
    world.notes.clear()
    assert world.pull(reference) == first
    assert any("fetching it again" in note for note in world.notes)
    assert digest_of(kept.read_bytes()) == digest_of(each[wrong])
    assert os.listdir(world.store.tmp) == []


def test_a_local_layout_is_read_where_it_is(world: World) -> None:
    """Image trial 12: the store had a copy of each layer."""
    each = [base(), TOP]
    reference = world.image(each, packed=("gzip",))
    first = world.pull(reference)
    manifest, config = sorted(path.stat().st_size for path in (world.store.blobs / "sha256").iterdir())
    assert max(manifest, config) < 1000
    assert world.pull(world.archive(each, packed=("gzip",))) == first
    world.forget_sifs()
    assert world.pull(reference) == first  # from the indexes


@pytest.mark.parametrize("known", [False, True], ids=["read for the first time", "with indexes"])
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_layout_that_somebody_changed_gives_no_sif(world: World, wrong: int, known: bool) -> None:
    each = [base(), TOP]
    reference = world.image(each, packed=("plain",))
    if known:
        world.pull(reference)
        world.forget_sifs()
    changed = world.folder / "layout" / "blobs" / "sha256" / digest_of(each[wrong])[7:]
    with changed.open("r+b") as blob:
        blob.seek(-600, os.SEEK_END)
        blob.write(b"\xff")
    with pytest.raises(ImageMismatch, match="has other bytes" if known else "has the digest"):
        world.pull(reference)
    changed.write_bytes(changed.read_bytes()[:-512])
    with pytest.raises(ImageUnavailable, match="not an image that hpcenv can use") as refusal:
        world.pull(reference)
    assert "bytes in it, not" in (refusal.value.why or "")
    assert list((world.store.root / "images").iterdir()) == []
