"""Resolve images in files: OCI layouts, layouts in tar archives, and archives of `docker save`.

Runs on: LOGIN NODE. Archives are not unpacked: their members are read in place.

A layout (OCI image-layout 1.1, 2024-02) has the files `oci-layout`, `index.json` and `blobs/sha256/HEX`. A docker
archive (moby `image/spec/spec.md` v1.2) has a `manifest.json` with the paths of the configuration and the layers in the
archive, but no manifest with a digest. hpcenv makes such a manifest: the canonical JSON (sorted keys, no spaces) of

    {"config": {"digest", "mediaType": "application/vnd.oci.image.config.v1+json", "size"},
     "layers": [{"digest": DIFF_ID, "mediaType": "application/vnd.oci.image.layer.v1.tar", "size"}, ...],
     "mediaType": "application/vnd.oci.image.manifest.v1+json", "schemaVersion": 2}

with the digest and size of the configuration in the archive, and of the layers as uncompressed
tars. So the manifest's digest is the same for all archives of an image, independent of the program
that saved it and of the compression of the layers. This digest is not the digest that the image has in a registry
(`digest_origin` is `synthesised`).

All input is untrusted: counts, sizes and names are limited, members beyond the end of the file and
circular links are refused, and every fault raises an `HpcenvError`.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO, Protocol

from hpcenv.errors import FileUnusable, HpcenvError, ImageMismatch, ImageUnavailable
from hpcenv.image.content import tar_stream
from hpcenv.image.reference import DIGEST, LocalImage, Platform
from hpcenv.image.registry import manifests
from hpcenv.image.registry.blobs import Stream
from hpcenv.image.registry.gzip_reader import GZIP, MOST_RATIO, GzipReader, GzipState, TooMuchData
from hpcenv.image.registry.manifests import CONFIG_LIMIT, MANIFEST_LIMIT, Layer, ResolvedImage, digest_of
from hpcenv.text import printable

__all__ = ["LocalBlobs", "layer_file", "local_form", "open_source", "resolve"]

_CHUNK = 1024 * 1024
# An archive has about three members for each layer; a layout has one member for each blob.
_MOST_MEMBERS = 100_000
# Limit for the header blocks of a member. `tar_stream.Bounds` allows 1 MiB of headers, and a sparse file's map may have
# another MiB.
_MOST_BLOCKS = 8192
_MOST_LINKS = 8
_DEFAULT_PLATFORM = Platform()
_REF_NAME = "org.opencontainers.image.ref.name"
# containerd and docker write the whole reference here.
_IMAGE_NAME = "io.containerd.image.name"
# The file by which each form is recognised.
_MARKS = {
    "oci": "oci-layout", "oci-archive": "oci-layout", "docker-archive": "manifest.json"
}  # fmt: skip
_FORMS = {"oci": "an OCI layout", "oci-archive": "an OCI archive", "docker-archive": "a docker archive"}
_COMPRESSED = {b"\x28\xb5\x2f\xfd": "zstd -d", b"BZh": "bunzip2", b"\xfd7zXZ\x00": "unxz"}


def resolve(source: LocalImage, *, platform: Platform = _DEFAULT_PLATFORM) -> ResolvedImage:
    """Find an image in its files, and check the digests of its manifest and configuration.

    Only compressed layers of a docker archive are read, because their uncompressed size is needed.

    Args:
        source: the layout or archive; its path is relative to the current folder or absolute.
        platform: selects one image of a multi-platform image.

    Raises:
        ImageUnavailable: the file or the image does not exist, several images fit, or the files are damaged.
        FileUnusable: the operating system denies access.
    """
    files = _open(source)
    if source.kind == "docker-archive":
        return manifests.describe(_DockerArchive(source, files).find(), platform)
    return manifests.describe(_find_in_layout(source, files, platform), platform)


def layer_file(image: ResolvedImage, layer: Layer) -> Path | None:
    """Return the file of a layer in the folder of a local layout; None if the layer must be fetched."""
    if image.layout is None:
        return None
    path = image.layout / _blob_name(layer.digest)
    try:
        status = os.stat(path)
    except OSError:
        return None
    return path if stat.S_ISREG(status.st_mode) and status.st_size == layer.size else None


def local_form(path: Path) -> str | None:
    """Return the scheme for a path that exists: `oci`, `oci-archive` or `docker-archive`; None if it has no image."""
    if path.is_dir():
        return "oci" if (path / "oci-layout").is_file() else None
    if not path.is_file():
        return None
    with suppress(HpcenvError, OSError):
        files = _open(LocalImage(kind="oci-archive", path=str(path)))
        return next((kind for kind in ("oci-archive", "docker-archive") if files.find(_MARKS[kind]) is not None), None)
    return None


def open_source(source: LocalImage, resolved: ResolvedImage) -> LocalBlobs:
    """Give access to the blobs of a resolved image, for `blobs.fetch_all`. The caller must close the result.

    Raises:
        ImageUnavailable, FileUnusable: see `resolve`.
    """
    files = _open(source)
    layers = _DockerArchive(source, files).layers(resolved) if source.kind == "docker-archive" else {}
    return LocalBlobs(source, files, layers)


class LocalBlobs:
    """A layout or archive as a `blobs.BlobSource`."""

    def __init__(self, source: LocalImage, files: _Files, layers: Mapping[str, str]) -> None:
        self._source = source
        self._files = files
        self._layers = layers

    def __enter__(self) -> LocalBlobs:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fetch(self, digest: str, size: int, offset: int, *, stall: float) -> Stream:
        """Begin to read a blob; see `blobs.BlobSource.fetch`. A compressed docker archive layer always begins at 0."""
        del stall
        with _explained(self._source):
            member = self._files.find(self._layers.get(digest) or _blob_name(digest))
            if member is None:
                raise _damaged(self._source, f"the layer {digest} is not in it")
            if digest in self._layers and _is_compressed(self._source, member):
                return Stream(start=0, chunks=_guarded(self._source, _decompress(self._source, member)))
            if member.size != size:
                raise _damaged(self._source, f"the layer {digest} has {member.size} bytes in it, not {size}")
            return Stream(start=offset, chunks=_guarded(self._source, _read(member, offset)))

    def close(self) -> None:
        """Do nothing: each reader closes its own file."""


# --- layouts ---------------------------------------------------------------------------


def _find_in_layout(source: LocalImage, files: _Files, wanted: Platform) -> manifests.ImageDocuments:
    _require_kind(source, files)
    layout = _document(source, files, "oci-layout", "oci-layout file")
    if not isinstance(layout.get("imageLayoutVersion"), str):
        raise _damaged(source, "its oci-layout file names no version")
    index = _document(source, files, "index.json", "index")
    digest = _select(source, index, wanted) if source.digest is None else source.digest
    index_digest: str | None = None
    platforms: tuple[str, ...] = ()

    def read(digest: str) -> tuple[bytes, Mapping[str, Any]]:
        body = _blob(source, files, digest, MANIFEST_LIMIT, "manifest")
        return body, manifests.read_document(body, origin=str(source), what="manifest")

    body, document = read(digest)
    if manifests.kind(document) == "index":
        index_digest = digest
        chosen = manifests.choose(document, wanted, str(source), read)
        body, document, platforms = chosen.body, chosen.document, chosen.platforms
    if manifests.kind(document) != "manifest":
        raise manifests.no_manifest(document, str(source))
    config = _blob(source, files, manifests.config_descriptor(document, str(source)), CONFIG_LIMIT, "configuration")
    return manifests.ImageDocuments(
        reference=str(source),
        tag=source.tag,
        index_digest=index_digest,
        platforms=platforms,
        digest_origin="layout",
        manifest=body,
        config=config,
        layout=Path(os.path.abspath(source.path)) if source.kind == "oci" else None,
    )


def _select(source: LocalImage, index: Mapping[str, Any], wanted: Platform) -> str:
    """Return the digest of the entry of `index.json` that the source selects."""
    listed = index.get("manifests")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    tag = source.tag
    fitting = entries if tag is None else [entry for entry in entries if _is_named(entry, tag)]
    digests = {str(entry.get("digest")): entry for entry in fitting}
    if len(digests) > 1 and all(isinstance(entry.get("platform"), dict) for entry in fitting):
        # The index of a layout may also be a multi-platform index.
        return manifests.select_entry(fitting, wanted, str(source))
    if len(digests) != 1:
        names = (str(_annotations(entry).get(_REF_NAME, entry.get("digest")))[:100] for entry in entries)
        place = f"{source.kind}:{source.path}"
        hint = f"{quote(f'{place}:TAG')} or {quote(f'{place}@sha256:DIGEST')}"
        raise _ambiguous(source, names, found=len(digests), hint=hint)
    digest = next(iter(digests))
    if not DIGEST.fullmatch(digest):
        raise _damaged(source, f"its index has the digest {digest[:80]!r}, not a sha256 one")
    return digest


def _annotations(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    annotations = entry.get("annotations")
    return annotations if isinstance(annotations, dict) else {}


def _is_named(entry: Mapping[str, Any], tag: str) -> bool:
    return tag in (_annotations(entry).get(_REF_NAME), _annotations(entry).get(_IMAGE_NAME))


def _ambiguous(source: LocalImage, names: Iterable[str], *, found: int, hint: str) -> ImageUnavailable:
    """Return the error for a name that fits no image or several images."""
    listed = printable(", ".join(sorted(set(names))[:50]))
    if not found:
        what = f"`{source}` does not exist" if source.tag is not None else f"`{source}` contains no image"
    else:
        what = f"`{source}` could be any of {found} images"
    return ImageUnavailable(what, why=f"its images: {listed or 'none with a name'}", hint=f"name one: {hint}")


def _blob_name(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _blob(source: LocalImage, files: _Files, digest: str, limit: int, what: str) -> bytes:
    body = _small(source, files, _blob_name(digest), limit, what)
    if digest_of(body) != digest:
        raise _damaged(source, f"its {what} has other bytes\nexpected {digest}\nfound {digest_of(body)}")
    return body


def _document(source: LocalImage, files: _Files, name: str, what: str) -> dict[str, Any]:
    body = _small(source, files, name, MANIFEST_LIMIT, what)
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise _damaged(source, f"its {name} is not a JSON object")
    return document


def _small(source: LocalImage, files: _Files, name: str, limit: int, what: str) -> bytes:
    with _explained(source):
        member = files.find(name)
        if member is None:
            raise _damaged(source, f"its {what} ({name[:200]!r}) is not in it")
        if member.size > limit:
            raise _damaged(source, f"its {what} has {member.size} bytes; no image needs more than {limit >> 20} MiB")
        return b"".join(_read(member))


def _require_kind(source: LocalImage, files: _Files) -> None:
    """Refuse files that do not have the form that the scheme of the source names."""
    with _explained(source):
        found = {kind for kind, name in _MARKS.items() if files.find(name) is not None}
    if source.kind in found:
        return
    why = f"it is not {_FORMS[source.kind]}: it has no file `{_MARKS[source.kind]}`"
    hint = None
    if source.kind == "oci" and found:
        hint = f"if skopeo made it, copy it into a layout: skopeo copy dir:{source.path} oci:FOLDER2:TAG"
    elif source.kind == "oci":
        hint = "name the folder that `skopeo copy ... oci:FOLDER:TAG` made; an unpacked root file system is no image"
    elif found:
        other = "docker-archive" if source.kind == "oci-archive" else "oci-archive"
        hint = f"it is {_FORMS[other]}: write {other}:{source.path}"
    raise _damaged(source, why, hint)


# --- docker archives -------------------------------------------------------------------


class _DockerArchive:
    """An archive of `docker save`, `podman save` or of a builder's tar output."""

    def __init__(self, source: LocalImage, files: _Files) -> None:
        self._source = source
        self._files = files

    def find(self) -> manifests.ImageDocuments:
        _require_kind(self._source, self._files)
        entry = self._entry()
        name = entry.get("Config")
        if not isinstance(name, str):
            raise _damaged(self._source, "its manifest.json names no configuration")
        config = _small(self._source, self._files, name, CONFIG_LIMIT, "configuration")
        layers = []
        for layer, diff_id in zip(self._names(entry), self._diff_ids(config, entry), strict=True):
            layers.append({"digest": diff_id, "mediaType": manifests.PLAIN_LAYER, "size": self._size(layer, diff_id)})
        manifest = {
            "schemaVersion": 2,
            "mediaType": manifests.MANIFESTS[0],
            "config": {"digest": digest_of(config), "mediaType": manifests.CONFIGS[0], "size": len(config)},
            "layers": layers,
        }
        return manifests.ImageDocuments(
            reference=str(self._source),
            tag=self._source.tag,
            digest_origin="synthesised",
            manifest=manifests.canonical(manifest),
            config=config,
        )

    def layers(self, resolved: ResolvedImage) -> dict[str, str]:
        """Return the names of the layers in the archive, by digest (which is the diff_id)."""
        names = self._names(self._entry())
        if len(names) != len(resolved.layers):
            raise _damaged(self._source, "it has changed since it was read")
        return {layer.digest: name for name, layer in zip(names, resolved.layers, strict=True)}

    def _entry(self) -> Mapping[str, Any]:
        body = _small(self._source, self._files, "manifest.json", MANIFEST_LIMIT, "manifest.json")
        try:
            listed = json.loads(body)
        except (ValueError, RecursionError):
            listed = None
        entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        tag = self._source.tag
        fitting = [entry for entry in entries if tag is None or _docker_name_fits(entry, tag)]
        if len(fitting) != 1:
            names = (name[:200] for entry in entries for name in _docker_names(entry))
            hint = quote(f"docker-archive:{self._source.path}:NAME:TAG")
            raise _ambiguous(self._source, names, found=len(fitting), hint=hint)
        return fitting[0]

    def _names(self, entry: Mapping[str, Any]) -> list[str]:
        names = entry.get("Layers")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise manifests.unusable(str(self._source), "it has no layers")
        return names

    def _diff_ids(self, config: bytes, entry: Mapping[str, Any]) -> list[str]:
        document = manifests.read_document(config, origin=str(self._source), what="configuration")
        rootfs = document.get("rootfs")
        diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
        count = len(self._names(entry))
        if not isinstance(diff_ids, list) or not all(isinstance(i, str) and DIGEST.fullmatch(i) for i in diff_ids):
            raise manifests.unusable(str(self._source), "its configuration does not list the layers' digests")
        if len(diff_ids) != count:
            raise manifests.unusable(
                str(self._source), f"its manifest has {count} layers, its configuration {len(diff_ids)}"
            )
        return diff_ids

    def _size(self, name: str, diff_id: str) -> int:
        """Return the uncompressed size of a layer; a compressed layer is read completely."""
        digest, size = hashlib.sha256(), 0
        with _explained(self._source):
            member = self._files.find(name)
            if member is None:
                raise _damaged(self._source, f"its layer {name[:200]!r} is not in it")
            if not _is_compressed(self._source, member):
                return member.size
            for chunk in _decompress(self._source, member):
                digest.update(chunk)
                size += len(chunk)
        if f"sha256:{digest.hexdigest()}" != diff_id:
            raise _damaged(self._source, f"its layer {name[:200]!r} has other bytes\nexpected {diff_id}")
        return size


def _docker_names(entry: Mapping[str, Any]) -> list[str]:
    names = entry.get("RepoTags")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _docker_name_fits(entry: Mapping[str, Any], tag: str) -> bool:
    """Return whether `tag` is the entry's complete name, its name without Docker Hub's defaults, or its tag alone."""
    for name in _docker_names(entry):
        short = name.removeprefix("docker.io/").removeprefix("library/")
        if tag in (name, short, name.rpartition(":")[2]):
            return True
        if f"{tag}:latest" in (name, short):
            return True
    return False


def _is_compressed(source: LocalImage, layer: _Member) -> bool:
    head = b"".join(_read(replace(layer, size=min(layer.size, 6))))
    other = next((program for magic, program in _COMPRESSED.items() if head.startswith(magic)), None)
    if other is not None:
        raise manifests.unusable(
            str(source),
            f"a layer in it has a compression that docker archives do not use ({other} decompresses it)",
            "save it as an OCI archive: skopeo copy docker-archive:FILE oci-archive:FILE2",
        )
    return head.startswith(GZIP)


def _decompress(source: LocalImage, member: _Member) -> Iterator[bytes]:
    """Decompress a layer; the output is limited."""
    try:
        with GzipReader(member.open(), member.size, begin=member.offset) as layer:
            while chunk := layer.read(_CHUNK):
                yield chunk
    except TooMuchData:
        raise manifests.unusable(
            str(source),
            f"a layer in it decompresses to more than {MOST_RATIO} times its size",
            "if this is intended, save it uncompressed: docker save, or podman save",
        ) from None


# --- files -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Member:
    """A file, or a member of an archive; `offset` is its position in the stream that `open` returns."""

    open: Callable[[], BinaryIO]
    offset: int
    size: int


class _Files(Protocol):
    """The files of a layout or archive."""

    def find(self, name: str) -> _Member | None:
        """Return the file of that name; None if it does not exist."""


def _open(source: LocalImage) -> _Files:
    with _explained(source):
        try:
            status = os.stat(source.path)
        except FileNotFoundError:
            raise ImageUnavailable(
                f"`{source}` does not exist",
                why=f"`{source.path}` does not exist here",
                hint="check the path; a path with a colon is not possible in this form",
            ) from None
        if source.kind == "oci":
            if not stat.S_ISDIR(status.st_mode):
                form = local_form(Path(source.path)) or "oci-archive"
                raise _damaged(source, "it is not a folder", f"for a tar archive write {form}:{source.path}")
            return _Folder(Path(source.path))
        if not stat.S_ISREG(status.st_mode):
            hint = f"for a layout's folder write oci:{source.path}" if stat.S_ISDIR(status.st_mode) else None
            raise _damaged(source, "it is not a file", hint)
        return _Archive(source)


def _open_file(path: str | Path) -> BinaryIO:
    # O_NONBLOCK: a pipe that replaced the file does not block.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")


def _open_gzip(path: str, size: int, states: list[GzipState]) -> BinaryIO:
    return io.BufferedReader(GzipReader(_open_file(path), size, states=states))


def _read(member: _Member, offset: int = 0) -> Iterator[bytes]:
    """Read a file from `offset` on; several threads may call this function at the same time."""
    with member.open() as file:
        file.seek(member.offset + offset)
        left = member.size - offset
        while left > 0 and (data := file.read(min(_CHUNK, left))):
            left -= len(data)
            yield data


class _Folder:
    """A layout's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, name: str) -> _Member | None:
        path = self._folder / name
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return _Member(open=partial(_open_file, path), offset=0, size=status.st_size)


class _Archive:
    """A tar archive, which may be compressed with gzip: the positions of its members."""

    def __init__(self, source: LocalImage) -> None:
        with _open_file(source.path) as file:
            start, size = file.read(6), os.fstat(file.fileno()).st_size
        _refuse_compressed(source, start)
        opened: Callable[[], BinaryIO] = partial(_open_file, source.path)
        if start.startswith(GZIP):
            opened = partial(_open_gzip, source.path, size, [])
        self._members: dict[str, _Member | str] = dict(_scan(source, opened))

    def find(self, name: str) -> _Member | None:
        wanted = _plain(name, "")
        for _ in range(_MOST_LINKS):
            if wanted is None:
                return None
            member = self._members.get(wanted)
            if not isinstance(member, str):
                return member
            wanted = member
        return None


def _refuse_compressed(source: LocalImage, start: bytes) -> None:
    for magic, program in _COMPRESSED.items():
        if start.startswith(magic):
            raise manifests.unusable(
                str(source),
                f"the whole archive is compressed ({program} decompresses it); hpcenv reads plain and gzip archives",
                f"decompress it first: {program} < {source.path} > FILE.tar",
            )


def _plain(name: str, folder: str) -> str | None:
    """Return a member's name without `.`, `..` and double slashes; None if it leaves the archive's root."""
    parts: list[str] = []
    for part in f"{folder}/{name}".split("/") if not name.startswith("/") else name.split("/"):
        if part == "..":
            if not parts:
                return None
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def _scan(source: LocalImage, opened: Callable[[], BinaryIO]) -> Iterator[tuple[str, _Member | str]]:
    """Yield a tar archive's files and links; only headers are read.

    If members have the same name, the last one counts.
    """
    position, count = 0, 0
    with opened() as file:
        while (member := _member_at(file, position)) is not None:
            count += 1
            if count > _MOST_MEMBERS:
                raise _damaged(source, f"it has more than {_MOST_MEMBERS} members")
            end = member.offset + member.stored
            if member.stored and not _holds(file, end):
                raise _damaged(source, "it ends within a member: the copy is incomplete")
            position = end + tar_stream.padding(member.stored)
            path = _plain(_text(member.name), "")
            if path is None:
                continue
            if member.kind == "file" and member.sparse is None:
                yield path, _Member(open=opened, offset=member.offset, size=member.size)
            elif member.kind in {"hard-link", "symlink"}:
                # A symbolic link is relative to its folder, a hard link to the archive's root.
                folder = path.rpartition("/")[0] if member.kind == "symlink" else ""
                target = _plain(_text(member.target), folder)
                if target is not None:
                    yield path, target


def _member_at(file: BinaryIO, position: int) -> tar_stream.Member | None:
    """Read the headers of the member at a position; None at the end of the archive.

    Raises:
        ImageMismatch: see `tar_stream.Reader`.
    """
    file.seek(position)
    first = file.read(tar_stream.BLOCK)
    following = islice(iter(partial(file.read, tar_stream.BLOCK), b""), _MOST_BLOCKS)
    member = tar_stream.Reader(chain((first,), following), start=position).next_member()
    # Only a block of zeros ends an archive. Other programs continue to read after thousands of empty headers.
    if member is None and any(first) and file.tell() > position + _MOST_BLOCKS * tar_stream.BLOCK:
        raise ImageMismatch(
            "a member of a tar archive has too many headers", why=f"at byte {position:,}", hint=tar_stream.PULL_AGAIN
        )
    return member


def _holds(file: BinaryIO, end: int) -> bool:
    """Return whether a file has at least `end` bytes."""
    try:
        file.seek(end - 1)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False  # `end` is larger than any file on this file system
    return bool(file.read(1))


def _text(name: bytes) -> str:
    """Return a member's name as JSON documents write it: UTF-8 in every locale."""
    return name.decode("utf-8", "surrogateescape")


# --- errors ----------------------------------------------------------------------------


@contextmanager
def _explained(source: LocalImage) -> Iterator[None]:
    """Context manager: turn errors of the operating system into errors that name the source."""
    try:
        yield
    except zlib.error:
        raise _damaged(source, "its gzip data are damaged or incomplete") from None
    except ImageMismatch as error:
        raise _damaged(source, f"{error.what}\n{error.why}") from None
    except TooMuchData:
        raise manifests.unusable(
            str(source),
            f"it decompresses to more than {MOST_RATIO} times its size",
            f"if this is intended, decompress it first: gunzip < {source.path} > FILE.tar",
        ) from None
    except (OSError, ValueError) as error:
        raise FileUnusable(
            f"`{source.path}` cannot be read",
            why=getattr(error, "strerror", None) or "a name in it is no valid file name",
            hint="check the path and its permissions",
        ) from None


def _guarded(source: LocalImage, chunks: Iterator[bytes]) -> Iterator[bytes]:
    with _explained(source):
        yield from chunks


def _damaged(source: LocalImage, why: str, hint: str | None = None) -> ImageUnavailable:
    return ImageUnavailable(
        f"`{source}` is not an image that hpcenv can use",
        why=why,
        hint=hint or "make it again, for example with skopeo copy or docker save",
    )
