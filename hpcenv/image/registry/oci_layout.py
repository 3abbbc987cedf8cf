"""Resolve images in files: OCI layouts, layouts in tar archives, and archives of `docker save`.

Runs on: LOGIN NODE. Archives are not unpacked: their members are read in place.

OCI image-layout 1.1 (2024-02): `oci-layout`, `index.json`, `blobs/sha256/HEX`. A docker
archive (moby `image/spec/spec.md` v1.2) has a `manifest.json` with the paths of the configuration
and the layers in the archive, but no manifest with a digest. hpcenv makes one:
the canonical JSON (sorted keys, no spaces) of

    {"config": {"digest", "mediaType": "application/vnd.oci.image.config.v1+json", "size"},
     "layers": [{"digest": DIFF_ID, "mediaType": "application/vnd.oci.image.layer.v1.tar", "size"}, ...],
     "mediaType": "application/vnd.oci.image.manifest.v1+json", "schemaVersion": 2}

with the digest and size of the configuration in the archive, and of the layers as uncompressed
tars. So the manifest's digest is the same for all archives of an image, independent of the program
that saved it and of the compression of the layers. It is not the digest that the
image has in a registry (`digest_origin` is `synthesised`).

All input is untrusted: counts, sizes and names are limited, members beyond the end of the file and
circular links are refused, and every fault is an `HpcenvError`.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Protocol

from hpcenv.errors import FileUnusable, HpcenvError, ImageUnavailable
from hpcenv.image.reference import DIGEST, LocalImage, Platform
from hpcenv.image.registry import archive_bytes, manifests
from hpcenv.image.registry.archive_bytes import MOST_RATIO, ArchiveBytes, pread_pieces
from hpcenv.image.registry.blobs import Stream
from hpcenv.image.registry.manifests import CONFIG_LIMIT, MANIFEST_LIMIT, Layer, ResolvedImage, digest_of

__all__ = ["LocalBlobs", "layer_file", "local_form", "open_source", "resolve"]

_CHUNK = 1024 * 1024
_BLOCK = 512
# An archive has about three members for each layer, a layout one for each blob.
_MOST_MEMBERS = 100_000
# Limit for a pax header or long name of a member; real ones are far smaller.
_HEADER_LIMIT = 1024 * 1024
_MOST_LINKS = 8
_UNPACKED_LEAST = 64 * 1024 * 1024
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

    Layers are not read, except compressed layers of a docker archive: their uncompressed
    size is needed.

    Args:
        source: the layout or archive; its path is relative to the current folder or absolute.
        platform: selects one image of a multi-platform image.

    Raises:
        ImageUnavailable: the file or the image does not exist, several images fit, or the files
            are damaged.
        FileUnusable: the operating system denies access.
    """
    with closing(_open(source)) as files:
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
    """Return the scheme for a path that exists: `oci`, `oci-archive` or `docker-archive`; None if it holds no image."""
    if path.is_dir():
        return "oci" if (path / "oci-layout").is_file() else None
    if not path.is_file():
        return None
    with suppress(HpcenvError, OSError), closing(_open(LocalImage(kind="oci-archive", path=str(path)))) as files:
        return next((kind for kind in ("oci-archive", "docker-archive") if files.find(_MARKS[kind]) is not None), None)
    return None


def open_source(source: LocalImage, resolved: ResolvedImage) -> LocalBlobs:
    """Give access to the blobs of a resolved image, for `blobs.fetch_all`; close it afterwards.

    Raises:
        ImageUnavailable, FileUnusable: see `resolve`.
    """
    files = _open(source)
    try:
        layers: dict[str, _Layer] = {}
        if source.kind == "docker-archive":
            layers = _DockerArchive(source, files).layers(resolved)
        return LocalBlobs(source, files, layers)
    except BaseException:
        files.close()
        raise


class LocalBlobs:
    """A layout or archive as a `blobs.BlobSource`."""

    def __init__(self, source: LocalImage, files: _Files, layers: Mapping[str, _Layer]) -> None:
        self._source = source
        self._files = files
        self._layers = layers

    def __enter__(self) -> LocalBlobs:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fetch(self, digest: str, size: int, offset: int, *, stall: float) -> Stream:
        """Begin to read a blob; see `blobs.BlobSource.fetch`. A compressed layer of a docker archive begins at 0."""
        del stall
        layer = self._layers.get(digest)
        name = _blob_name(digest) if layer is None else layer.name
        with _explained(self._source):
            member = self._files.find(name)
            if member is None:
                raise _damaged(self._source, f"the layer {digest} is not in it")
            if layer is not None and layer.compressed:
                return Stream(start=0, chunks=_guarded(self._source, _decompress(self._files, member, self._source)))
            if member.size != size:
                raise _damaged(self._source, f"the layer {digest} has {member.size} bytes in it, not {size}")
            return Stream(start=offset, chunks=_guarded(self._source, self._files.read(member, offset)))

    def close(self) -> None:
        """Close the files."""
        self._files.close()


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
        raise _ambiguous(source, entries, found=len(digests))
    digest = next(iter(digests))
    if not DIGEST.fullmatch(digest):
        raise _damaged(source, f"its index has the digest {digest[:80]!r}, not a sha256 one")
    return digest


def _annotations(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    annotations = entry.get("annotations")
    return annotations if isinstance(annotations, dict) else {}


def _is_named(entry: Mapping[str, Any], tag: str) -> bool:
    return tag in (_annotations(entry).get(_REF_NAME), _annotations(entry).get(_IMAGE_NAME))


def _ambiguous(source: LocalImage, entries: list[dict[str, Any]], *, found: int) -> ImageUnavailable:
    names = sorted({str(_annotations(entry).get(_REF_NAME, entry.get("digest")))[:100] for entry in entries})
    listed = manifests.printable(", ".join(names[:50])) or "none"
    if not found:
        what = f"`{source}` does not exist" if source.tag is not None else f"`{source}` contains no image"
    else:
        what = f"`{source}` could be any of {found} images"
    place = f"{source.kind}:{source.path}"
    return ImageUnavailable(
        what,
        why=f"its images: {listed}",
        hint=f"name one: {quote(f'{place}:TAG')} or {quote(f'{place}@sha256:DIGEST')}",
    )


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
        return b"".join(files.read(member, 0))


def _require_kind(source: LocalImage, files: _Files) -> None:
    """Refuse files of another form than the scheme of the source says."""
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


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The path of a layer in a docker archive, and whether the layer is compressed."""

    name: str
    compressed: bool


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

    def layers(self, resolved: ResolvedImage) -> dict[str, _Layer]:
        """Return the layers of the archive, by digest (which is the diff_id)."""
        names = self._names(self._entry())
        if len(names) != len(resolved.layers):
            raise _damaged(self._source, "it has changed since it was read")
        return {
            layer.digest: _Layer(name=name, compressed=self._is_compressed(self._member(name)))
            for name, layer in zip(names, resolved.layers, strict=True)
        }

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
            raise self._ambiguous(entries, len(fitting))
        return fitting[0]

    def _ambiguous(self, entries: list[dict[str, Any]], found: int) -> ImageUnavailable:
        names = sorted({name[:200] for entry in entries for name in _docker_names(entry)})
        listed = manifests.printable(", ".join(names[:50]))
        source = self._source
        if not found:
            what = f"`{source}` does not exist" if source.tag is not None else f"`{source}` contains no image"
        else:
            what = f"`{source}` could be any of {found} images"
        return ImageUnavailable(
            what,
            why=f"its images: {listed or 'none with a name'}",
            hint=f"name one: {quote(f'docker-archive:{source.path}:NAME:TAG')}",
        )

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

    def _member(self, name: str) -> _Member:
        with _explained(self._source):
            member = self._files.find(name)
        if member is None:
            raise _damaged(self._source, f"its layer {name[:200]!r} is not in it")
        return member

    def _is_compressed(self, member: _Member) -> bool:
        with _explained(self._source):
            head = b"".join(self._files.read(member, 0, most=6))
        if head[:2] == b"\x1f\x8b":
            return True
        other = next((program for magic, program in _COMPRESSED.items() if head.startswith(magic)), None)
        if other is not None:
            raise manifests.unusable(
                str(self._source),
                f"docker archives do not use the compression of a layer in it ({other} decompresses it)",
                "save it as an OCI archive: skopeo copy docker-archive:FILE oci-archive:FILE2",
            )
        return False

    def _size(self, name: str, diff_id: str) -> int:
        """Return the uncompressed size of a layer; a compressed layer is read completely."""
        member = self._member(name)
        if not self._is_compressed(member):
            return member.size
        digest, size = hashlib.sha256(), 0
        for chunk in _guarded(self._source, _decompress(self._files, member, self._source)):
            digest.update(chunk)
            size += len(chunk)
        if f"sha256:{digest.hexdigest()}" != diff_id:
            raise _damaged(self._source, f"its layer {name[:200]!r} has other bytes\nexpected {diff_id}")
        return size


def _docker_names(entry: Mapping[str, Any]) -> list[str]:
    names = entry.get("RepoTags")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _docker_name_fits(entry: Mapping[str, Any], tag: str) -> bool:
    """Tell whether `tag` is a name of the entry: complete, without Docker Hub's defaults, or the tag alone."""
    for name in _docker_names(entry):
        short = name.removeprefix("docker.io/").removeprefix("library/")
        if tag in (name, short, name.rpartition(":")[2]):
            return True
        if f"{tag}:latest" in (name, short):
            return True
    return False


def _decompress(files: _Files, member: _Member, source: LocalImage) -> Iterator[bytes]:
    """Decompress gzip data, which may have several members; the output is limited."""
    engine, size, ended = zlib.decompressobj(31), 0, False
    for compressed in files.read(member, 0):
        data = compressed
        while data:
            if engine.eof:
                engine = zlib.decompressobj(31)
            chunk = engine.decompress(data, _CHUNK)
            size += len(chunk)
            if size > _UNPACKED_LEAST + member.size * MOST_RATIO:
                raise manifests.unusable(
                    str(source),
                    f"a layer in it decompresses to more than {MOST_RATIO} times its size",
                    "if this is intended, save it uncompressed: docker save, or podman save",
                )
            if chunk:
                yield chunk
            ended = engine.eof
            # Another member or padding may follow the end of a member.
            data = engine.unused_data.lstrip(b"\0") if ended else engine.unconsumed_tail
    if not ended:
        raise zlib.error("incomplete")


# --- files -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Member:
    """A file, or a member of an archive with its position."""

    path: str
    offset: int
    size: int


class _Files(Protocol):
    """The files of a layout or archive."""

    def find(self, name: str) -> _Member | None:
        """Return the file of that name; None if it does not exist."""

    def read(self, member: _Member, offset: int, *, most: int | None = None) -> Iterator[bytes]:
        """Read a file from `offset` on; several threads may call it at the same time."""

    def close(self) -> None:
        """Close all open files."""


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
        return _Member(path=str(path), offset=0, size=status.st_size)

    def read(self, member: _Member, offset: int, *, most: int | None = None) -> Iterator[bytes]:
        fd = os.open(member.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb", buffering=0) as file:
            yield from pread_pieces(
                file.fileno(), offset, member.size if most is None else min(offset + most, member.size)
            )

    def close(self) -> None:
        pass


class _Archive:
    """A tar archive, which may be compressed with gzip: the positions of its members."""

    def __init__(self, source: LocalImage) -> None:
        self._data = archive_bytes.open_archive(source.path)
        try:
            _refuse_compressed(source, self._data)
            self._members: dict[str, _Member | str] = dict(_scan(source, self._data))
        except BaseException:
            self._data.close()
            raise

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

    def read(self, member: _Member, offset: int, *, most: int | None = None) -> Iterator[bytes]:
        begin, end = member.offset + offset, member.offset + member.size
        return self._data.pieces(begin, end if most is None else min(begin + most, end))

    def close(self) -> None:
        self._data.close()


def _refuse_compressed(source: LocalImage, data: ArchiveBytes) -> None:
    head = _at(data, 6, 0)
    for magic, program in _COMPRESSED.items():
        if head.startswith(magic):
            raise manifests.unusable(
                str(source),
                f"the whole archive is compressed ({program} decompresses it); hpcenv reads plain and gzip archives",
                f"decompress it first: {program} < {source.path} > FILE.tar",
            )


def _at(data: ArchiveBytes, count: int, position: int) -> bytes:
    """Return at most `count` bytes at a position."""
    return b"".join(data.pieces(position, position + count)) if data.reaches(position + 1) else b""


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


def _scan(source: LocalImage, data: ArchiveBytes) -> Iterator[tuple[str, _Member | str]]:
    """Yield a tar archive's files and links (POSIX.1-2017 pax, GNU long names). Later members win."""
    position, count = 0, 0
    extra: dict[str, str] = {}
    while data.reaches(position + _BLOCK):
        header = _at(data, _BLOCK, position)
        if header.count(0) == _BLOCK:
            return
        count += 1
        if count > _MOST_MEMBERS:
            raise _damaged(source, f"it has more than {_MOST_MEMBERS} members")
        kind = header[156:157]
        length = _number(header[124:136])
        if len(header) < _BLOCK or length is None or not _checksum_fits(header):
            raise _damaged(source, f"it is not a tar archive at byte {position}")
        if kind not in b"xgLK" and extra.get("size", "").isdecimal():
            length = int(extra["size"][:19])
        begin = position + _BLOCK
        if kind in b"123456" and kind != b"":
            length = 0
        if not data.reaches(begin + length):
            raise _damaged(source, "it ends within a member: the copy is incomplete")
        position = begin + -(-length // _BLOCK) * _BLOCK
        if kind in (b"x", b"L", b"K"):
            if length > _HEADER_LIMIT:
                raise _damaged(source, "a member's name has more than 1 MiB")
            extra.update(_long(kind, _at(data, length, begin)))
            continue
        if kind == b"g":
            continue
        name = extra.get("path") or _text(header)
        link = extra.get("linkpath") or header[157:257].split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
        extra = {}
        plain = _plain(name, "")
        if plain is None:
            continue
        if kind in (b"0", b"\0", b"7"):
            yield plain, _Member(path=name, offset=begin, size=length)
        elif kind in (b"1", b"2"):
            # A symbolic link is relative to its folder, a hard link to the archive's root.
            target = _plain(link, plain.rpartition("/")[0] if kind == b"2" else "")
            if target is not None:
                yield plain, target


def _text(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    return name.decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int | None:
    """Return a number of a tar header: octal, or GNU's base 256; None if it is neither."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    text = field.split(b"\0", 1)[0].strip(b" ")
    if not text:
        return 0
    return int(text, 8) if all(digit in b"01234567" for digit in text) else None


def _checksum_fits(header: bytes) -> bool:
    return _number(header[148:156]) == sum(header) - sum(header[148:156]) + 8 * 0x20


def _long(kind: bytes, data: bytes) -> dict[str, str]:
    """Return the fields that a GNU long name or a pax header sets for the next member."""
    if kind in (b"L", b"K"):
        text = data.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
        return {"path" if kind == b"L" else "linkpath": text}
    fields = {}
    while data:
        digits, blank, _ = data.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 10 else 0
        if not blank or not len(digits) + 1 < length <= len(data):
            break
        name, _, value = data[len(digits) + 1 : length - 1].partition(b"=")
        if name in (b"path", b"linkpath", b"size"):
            fields[name.decode()] = value.decode("utf-8", "surrogateescape")
        data = data[length:]
    return fields


# --- errors ----------------------------------------------------------------------------


@contextmanager
def _explained(source: LocalImage) -> Iterator[None]:
    """Context manager: turn errors of the operating system into errors that name the source."""
    try:
        yield
    except zlib.error:
        raise _damaged(source, "its gzip data are damaged or incomplete") from None
    except archive_bytes.TooMuchData:
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
