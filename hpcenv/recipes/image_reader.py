"""Read finished images (SIFs, OCI layouts and archives) for the lint rules.

Runs on: LOGIN NODE. Nothing is mounted or unpacked.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from hpcenv.errors import ImageMismatch
from hpcenv.identity import sif
from hpcenv.image.content import tar_stream
from hpcenv.image.convert import layers, squashfs_reader
from hpcenv.image.reference import LocalImage, Platform
from hpcenv.image.registry import oci_layout
from hpcenv.image.registry.manifests import ResolvedImage
from hpcenv.recipes import image_content
from hpcenv.recipes.image_content import ImageContents, ImageFile, ImageLayer

# The same limit as squashfs_reader.MOST_ENTRIES. Usable images have fewer paths.
_MOST_ENTRIES = 8_000_000
# The most bytes of file content that are read from one layer or SIF.
_SAMPLES = 32 * 1024 * 1024
_STALL_SECONDS = 60.0


def sif_contents(origin: str, file: Path) -> ImageContents:
    """Read the table of contents of a SIF, without Apptainer.

    Args:
        origin: the SIF as the user named it.
        file: the path of the SIF.

    Raises:
        EnvironmentUnreadable: the file is not a SIF, or is damaged.
        ImageMismatch: the file system of the SIF is not a plain squashfs.
    """
    header = sif.read_header(file)
    partition = header.runs
    if partition.partition is None or partition.partition.filesystem != "squashfs":
        raise ImageMismatch(f"`{origin}` cannot be read", why="its file system is not a plain squashfs")
    offset, size = partition.offset, partition.size
    files, sampled = [], 0
    for entry in squashfs_reader.read_tree(file, offset=offset, size=size, content=False):
        path = _text(entry.path)
        text = None
        if entry.kind == "file" and entry.size and sampled < _SAMPLES and image_content.needs_content(path, entry.size):
            raw = squashfs_reader.read_file(file, entry.path, offset=offset, size=size)
            sampled += len(raw)
            text = raw.decode("utf-8", "replace")
        files.append(ImageFile(path=path, kind=entry.kind, mode=entry.mode, size=entry.size, text=text))
    return ImageContents(origin=origin, layers=(ImageLayer(name="", files=files),), base_created=_build_date(files))


def _build_date(files: Sequence[ImageFile]) -> str:
    """Return when the image of a SIF was made, from its labels; "" if the labels have no date."""
    text = next((one.text for one in files if one.path == ".singularity.d/labels.json" and one.text), "{}")
    try:
        labels = json.loads(text)
        value = labels.get("org.opencontainers.image.created") or labels.get("org.label-schema.build-date")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return _iso_date(value) if isinstance(value, str) else ""


def _iso_date(text: str) -> str:
    """Return a date as ISO 8601. Apptainer writes `Thursday_20_November_2026_12:30:00_UTC` (seen with 1.4.5)."""
    match = re.match(r"[A-Z][a-z]+_(\d{1,2})_([A-Z][a-z]+)_(\d{4})_", text)
    if match is None:
        return text
    try:
        return dt.datetime.strptime(" ".join(match.groups()), "%d %B %Y").date().isoformat()  # noqa: DTZ007  (a date)
    except ValueError:
        return ""


def _text(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


# -- an image of layers ---------------------------------------------------------------------------------------------


def layer_contents(origin: str, source: LocalImage, platform: Platform) -> ImageContents:
    """Read the tables of contents of an image's layers, without unpacking them.

    Args:
        origin: the image as the user named it.
        source: the layout or archive.
        platform: the platform of the image to read, if an index has images for several platforms.

    Raises:
        ImageUnavailable, ImageMismatch: the image cannot be read.
    """
    image = oci_layout.resolve(source, platform=platform)
    config: dict[str, Any] = dict(image.config.get("config") or {})
    image_layers = []
    count = 0
    for number, layer in enumerate(image.layers, start=1):
        name = f"layer {number} of {len(image.layers)} ({layer.digest[:19]})"
        with _blob(source, image, number - 1) as blob:
            image_layers.append(_read_layer(blob, layer.media_type, name))
        count += len(image_layers[-1].files)
        if count > _MOST_ENTRIES:
            raise _too_many_paths(f"`{origin}`")
    pairs = (str(entry).partition("=") for entry in config.get("Env") or ())
    history = image.config.get("history")
    return ImageContents(
        origin=origin,
        layers=tuple(image_layers),
        environment={name: value for name, _, value in pairs},
        user=str(config.get("User") or ""),
        history=tuple(str(one.get("created_by", "")) for one in _list(history) if isinstance(one, dict)),
        base_created=_first_date(history, image.created),
        command=" ".join(map(str, (*_list(config.get("Entrypoint")), *_list(config.get("Cmd"))))),
    )


def _first_date(history: Any, created: str | None) -> str:
    """Return when the lowest layer was made.

    If the history has no date for this layer, return when the image was made.
    """
    dates = (str(one.get("created", "")) for one in _list(history) if isinstance(one, dict))
    return next(dates, "") or created or ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


@contextmanager
def _blob(source: LocalImage, image: ResolvedImage, number: int) -> Iterator[Path]:
    """Yield the path of a layer's file. A layer of an archive is first copied into a temporary file."""
    layer = image.layers[number]
    if source.kind == "oci":
        yield Path(source.path) / "blobs" / "sha256" / layer.digest.partition(":")[2]
        return
    with (
        tempfile.TemporaryDirectory(prefix="hpcenv-") as scratch,
        closing(oci_layout.open_source(source, image)) as blobs,
    ):
        path = Path(scratch) / "layer"
        with path.open("wb") as out:
            for chunk in blobs.fetch(layer.digest, layer.size, 0, stall=_STALL_SECONDS).chunks:
                out.write(chunk)
        yield path


def _read_layer(blob: Path, media_type: str, name: str) -> ImageLayer:
    """Read a layer's table of contents, and the content of the few files that a rule needs."""
    files: list[ImageFile] = []
    removed, opaque = set(), set()
    sampled = 0
    with layers.open_blob(blob, media_type) as stream:
        reader = tar_stream.Reader(iter(lambda: stream.read(1 << 20), b""))
        for member in reader:
            path = _text(os.path.normpath(b"/" + member.name).lstrip(b"/"))
            folder, _, last = path.rpartition("/")
            if last == ".wh..wh..opq":
                opaque.add(folder)
                continue
            if last.startswith(".wh."):
                removed.add(f"{folder}/{last[4:]}".lstrip("/"))
                continue
            text = None
            if member.kind == "file" and sampled < _SAMPLES and image_content.needs_content(path, member.size):
                raw = b"".join(bytes(piece) for piece in reader.stored())
                sampled += len(raw)
                text = raw.decode("utf-8", "replace")
            files.append(ImageFile(path=path, kind=member.kind, mode=member.mode, size=member.size, text=text))
            if len(files) > _MOST_ENTRIES:
                raise _too_many_paths(name)
    return ImageLayer(name=name, files=files, removed=frozenset(removed), opaque=frozenset(opaque))


def _too_many_paths(name: str) -> ImageMismatch:
    return ImageMismatch(f"{name} has more than {_MOST_ENTRIES} paths", why="images that can be used have fewer")
