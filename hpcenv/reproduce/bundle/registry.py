"""A bundle in a registry, with what belongs to it as referrers of its image.

Runs on: LOGIN NODE.

    REF                  the bundle: an artifact with the archive as its file
    the image's digest   lockfile, bill of materials, conversion proof and run record, each an artifact that refers
                         to it; the bundle refers to it, too

The image is the one that the lockfile names, if the same repository has it; or the SIF, if the bundle or the repository
has it. If the image lies elsewhere, the bundle takes its place: a registry lists referrers within one repository only.
Every name in a registry is a claim; what counts are the bytes, which `bundle verify` compares, and a signature.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpcenv import filesystem
from hpcenv.errors import BundleInvalid, ImageUnavailable, SpecError, WouldOverwrite
from hpcenv.image.reference import RegistryName, SifReference
from hpcenv.image.registry import blobs, manifests, sif_manifest, source
from hpcenv.image.registry.blobs import BlobSpec
from hpcenv.image.registry.source import Access
from hpcenv.locking.formats.cyclonedx import cyclonedx
from hpcenv.node.check.sif import file_sha256
from hpcenv.progress import Event, OnEvent
from hpcenv.project.lockfile import ContainerTable, Lockfile
from hpcenv.project.workspace import parse_lockfile
from hpcenv.records.files import read_file
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduce.bundle.archive import Archive
from hpcenv.reproduce.bundle.make import IMAGE, RECORD, SUFFIX
from hpcenv.reproduce.bundle.verify import verify_bundle

if TYPE_CHECKING:
    from hpcenv.image.registry.client import Client
    from hpcenv.image.registry.referrers import Descriptor, Referrer

Kind = Literal["lock", "sbom", "proof", "record", "signature"]

BUNDLE_TYPE = "application/vnd.hpcenv.bundle.v1+zip"
# Kind -> type of the artifact and of its file. A reader of the registry chooses by it.
TYPES: dict[Kind, str] = {
    "lock": "application/vnd.hpcenv.lock.v1+toml",
    "sbom": "application/vnd.cyclonedx+json",
    "proof": "application/vnd.hpcenv.conversion.v1+json",
    "record": "application/vnd.hpcenv.record.v1+json",
    "signature": "application/vnd.hpcenv.signature.v1",
}
_STATEMENT = "application/vnd.in-toto+json"
_SSH_SIGNATURE = "application/vnd.hpcenv.signature.v1+ssh"
CONVERSION = "urn:hpcenv:conversion:1"
# Annotation of each attached artifact: the sha256 of the bundle that it came with. One image has many runs.
_OF_BUNDLE = "org.hpcenv.bundle"
_LONGEST = 8 << 20
_LOCK = RunFolder(Path()).lockfile.name
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,150}")


@dataclass(frozen=True, kw_only=True)
class Attached:
    """One artifact beside a bundle.

    Attributes:
        digest: of its manifest.
        result: for a lockfile or record that was fetched: whether it is the one in the bundle; else empty.
    """

    kind: Kind
    digest: str
    result: Literal["", "match", "mismatch"] = ""


@dataclass(frozen=True, kw_only=True)
class PushedBundle:
    """A bundle in a registry.

    Attributes:
        reference, by_digest: names of it.
        sha256: of the archive.
        subject: digest of the manifest that the artifacts refer to.
        subject_is: what that is.
        attached: the artifacts.
        left_out: kind -> why there is no such artifact.
    """

    reference: str
    by_digest: str
    sha256: str
    subject: str
    subject_is: Literal["image", "sif", "bundle"]
    attached: tuple[Attached, ...]
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PulledBundle:
    """A bundle from a registry; `path` is the archive."""

    path: Path
    sha256: str
    by_digest: str
    subject: str
    attached: tuple[Attached, ...]

    @property
    def same(self) -> bool:
        """No artifact beside the bundle says something else than the bundle."""
        return all(one.result != "mismatch" for one in self.attached)


# -- push -----------------------------------------------------------------------------------


def push_bundle(path: Path, target: SifReference, access: Access, *, on_event: OnEvent) -> PushedBundle:
    """Upload a bundle and the artifacts that belong to it.

    A signature beside the file (`hpcenv sign`) is uploaded, too.

    Raises:
        SpecError: the reference names a digest or no tag.
        BundleInvalid: the bundle was changed.
        ImageUnavailable: the registry refuses it or cannot be reached.
        FileUnusable: a file cannot be read.
    """
    if target.digest is not None or target.tag is None:
        raise SpecError(f"cannot push to `{target}`", why="a tag is needed", hint="write oras://HOST/NAME:TAG")
    if verify_bundle(path, on_event=on_event).result == "mismatch":
        raise BundleInvalid(f"`{path.name}` was changed: nothing was uploaded", hint="hpcenv bundle verify says where")
    spec = BlobSpec(digest=f"sha256:{file_sha256(path)}", size=path.stat().st_size)
    with contextlib.closing(source.open_client(target, access, on_event=on_event)) as client, Archive(path) as archive:
        client.authenticate()
        return _Push(client=client, archive=archive, target=target, spec=spec, on_event=on_event).work()


@dataclass(frozen=True, kw_only=True)
class _Push:
    """One upload; `spec` is of the archive."""

    client: Client
    archive: Archive
    target: SifReference
    spec: BlobSpec
    on_event: OnEvent

    def work(self) -> PushedBundle:
        from hpcenv.image.registry import referrers, upload

        lock = self.archive.read(_LOCK, most=_LONGEST)
        locked = parse_lockfile(lock, Path(_LOCK))
        image, what = self._image(locked.container)
        upload.push_file(self.client, self.spec, self.archive.path, on_event=self.on_event)
        file = referrers.ArtifactFile(spec=self.spec, media_type=BUNDLE_TYPE, title=_name(self.archive.path.name))
        made = referrers.push_artifact(self.client, BUNDLE_TYPE, [file], subject=image, tag=self.target.tag)
        bundle = referrers.Descriptor(media_type=manifests.MANIFESTS[0], digest=made.digest, size=made.size)
        documents, left_out = _documents(locked, lock, self.archive)
        attached = [self._attach(kind, [(TYPES[kind], name, content)], image or bundle)
                    for kind, (name, content) in documents.items()]  # fmt: skip
        signature = _signature(self.archive.path)
        if signature:
            attached.append(self._attach("signature", signature, bundle))
        else:
            left_out["signature"] = "the bundle is not signed (hpcenv sign)"
        return PushedBundle(
            reference=str(self.target),
            by_digest=str(replace(self.target, tag=None, digest=made.digest)),
            sha256=self.spec.digest.removeprefix("sha256:"),
            subject=(image or bundle).digest,
            subject_is=what,
            attached=tuple(attached),
            left_out=left_out,
        )

    def _attach(self, kind: Kind, files: list[tuple[str, str, bytes]], subject: Descriptor) -> Attached:
        from hpcenv.image.registry import referrers, upload

        made = referrers.push_artifact(
            self.client,
            TYPES[kind],
            [
                referrers.ArtifactFile(spec=upload.push_bytes(self.client, content), media_type=media, title=title)
                for media, title, content in files
            ],
            subject=subject,
            annotations={_OF_BUNDLE: self.spec.digest},
        )
        self.on_event(Event(phase="push", what=kind, done=1, total=1))
        return Attached(kind=kind, digest=made.digest)

    def _image(self, container: ContainerTable | None) -> tuple[Descriptor | None, Literal["image", "sif", "bundle"]]:
        """Return the image of the run in this repository; None if it is elsewhere."""
        from hpcenv.image.registry import referrers, upload

        if container is None:
            return None, "bundle"
        if container.manifest_digest is not None:
            image = referrers.find_manifest(self.client, container.manifest_digest)
            if image is not None:
                return image, "image"
        sif = BlobSpec(digest=f"sha256:{container.sif.sha256}", size=container.sif.size)
        if IMAGE in self.archive.sums:
            upload.push_blob(self.client, sif, IMAGE, lambda: self.archive.chunks(IMAGE), on_event=self.on_event)
        elif self.client.call("HEAD", f"blobs/{sif.digest}", accept=(200, 404)).status == 404:
            return None, "bundle"
        upload.push_bytes(self.client, upload.EMPTY)
        # Without a tag, some registries would remove it.
        made = upload.push_manifest(
            self.client, f"{(self.target.tag or '')[:120]}-sif", sif_manifest.sif_manifest(sif, self.target)
        )
        return referrers.Descriptor(media_type=manifests.MANIFESTS[0], digest=made.digest, size=made.size), "sif"


def _documents(locked: Lockfile, lock: bytes, archive: Archive) -> tuple[dict[Kind, tuple[str, bytes]], dict[str, str]]:
    """Return the name and content of each attached file, and which there is not, with the reason."""
    found: dict[Kind, tuple[str, bytes]] = {
        "lock": (_LOCK, lock),
        "sbom": ("sbom.cdx.json", cyclonedx(locked).text.encode()),
        "record": (RECORD, archive.read(RECORD, most=_LONGEST)),
    }
    proof = conversion_proof(locked.container)
    if proof is not None:
        return {**found, "proof": ("conversion.json", proof)}, {}
    return found, {"proof": "the lockfile has no tree digest that was compared with the layers of an image"}


def conversion_proof(container: ContainerTable | None) -> bytes | None:
    """Return the statement that a SIF holds what the layers of its image hold; None if that was not compared.

    An in-toto Statement v1 about the SIF. Its predicate names the image, the tree of both, and how the SIF was made.
    """
    if container is None or container.tree_sha256 is None or container.manifest_digest is None:
        return None
    sif = container.sif
    predicate: dict[str, Any] = {
        "image": {
            "reference": container.reference,
            "digest": container.manifest_digest,
            "config": container.config_digest,
            "chain-id": container.rootfs_chain_id,
            "layers": [{"digest": layer.digest, "diff-id": layer.diff_id} for layer in container.layers],
        },
        "tree": container.tree_sha256,
        "partition": f"sha256:{sif.partition_sha256}",
        "builder": sif.builder,
        "built-with": sif.built_with,
        "mksquashfs-args": list(sif.mksquashfs_args),
        "source-date-epoch": sif.source_date_epoch,
    }
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "image.sif", "digest": {"sha256": sif.sha256}}],
        "predicateType": CONVERSION,
        "predicate": predicate,
    }
    return (json.dumps(statement, indent=1, sort_keys=True) + "\n").encode()


def _signature(path: Path) -> list[tuple[str, str, bytes]]:
    """Return the files of the signature beside a bundle; empty without one."""
    statement = path.with_name(f"{path.name}.statement.json")
    signature = statement.with_name(f"{statement.name}.sig")
    if not (statement.is_file() and signature.is_file()):
        return []
    return [
        (media, file.name, read_file(file, most=1 << 20))
        for media, file in ((_STATEMENT, statement), (_SSH_SIGNATURE, signature))
    ]


def _name(text: str) -> str:
    return text if _FILE_NAME.fullmatch(text) else f"bundle{SUFFIX}"


# -- pull -----------------------------------------------------------------------------------


def pull_bundle(
    wanted: SifReference, target: Path | None, folder: Path, access: Access, *, on_event: OnEvent
) -> PulledBundle:
    """Fetch a bundle, compare what is attached with it, and write its signature beside it.

    Args:
        wanted: the bundle, by tag or digest.
        target: the file to write; None takes the name that the registry has for it.
        folder: where that file goes then.
        access: how to connect to the registry.
        on_event: gets the progress.

    Raises:
        WouldOverwrite: the file exists.
        ImageUnavailable: there is no bundle, or its bytes do not have its digest.
        BundleInvalid: the archive is not one that may be unpacked, or a file in it differs from its sum.
    """
    with contextlib.closing(source.open_client(wanted, access, on_event=on_event)) as client:
        client.authenticate()
        digest, body = client.manifest(wanted.digest or wanted.tag or "latest")
        document = manifests.read_document(body, origin=wanted.registry, what="manifest")
        spec, name = _archive_of(document, wanted)
        path = target or folder / name
        if os.path.lexists(path):
            raise WouldOverwrite(f"`{path}` exists", hint="-o FILE names another file")
        _fetch(wanted, spec, path, access, on_event)
        verify_bundle(path, on_event=on_event)
        subject = document.get("subject")
        anchor = subject.get("digest") if isinstance(subject, dict) else None
        with Archive(path) as archive:
            attached = tuple(_attached(client, archive, str(anchor or digest), digest, spec))
    return PulledBundle(
        path=path,
        sha256=spec.digest.removeprefix("sha256:"),
        by_digest=str(replace(wanted, tag=None, digest=digest)),
        subject=str(anchor or digest),
        attached=attached,
    )


def _archive_of(document: dict[str, Any], wanted: RegistryName) -> tuple[BlobSpec, str]:
    from hpcenv.image.registry import referrers

    files = [file for file in referrers.read_files(document) if file.media_type == BUNDLE_TYPE]
    if len(files) != 1:
        stated = str(document.get("artifactType") or document.get("mediaType"))[:100]
        raise ImageUnavailable(
            f"`{wanted}` is no bundle", why=f"it is of type {stated!r}", hint="hpcenv bundle push uploads one"
        )
    return files[0].spec, _name(files[0].title)


def _fetch(wanted: RegistryName, spec: BlobSpec, path: Path, access: Access, on_event: OnEvent) -> None:
    """Download the archive. What an interrupted call has fetched stays beside the file, and the next call goes on."""
    parts = path.with_name(f".{spec.digest[7:23]}.pull")
    try:
        parts.mkdir(parents=True, exist_ok=True)
        with source.open_blobs(wanted, access) as connection:
            (blob,) = blobs.fetch_all([spec], connection, parts, on_event=on_event)
        if f"sha256:{file_sha256(blob)}" != spec.digest:
            blobs.discard(blob)
            raise ImageUnavailable(f"the bytes of `{wanted}` were changed on this disk", hint="type the command again")
        os.chmod(blob, 0o644)
        os.rename(blob, path)
        shutil.rmtree(parts, ignore_errors=True)
    except OSError as error:
        raise filesystem.refused(path, error) from error


def _attached(client: Client, archive: Archive, anchor: str, bundle: str, spec: BlobSpec) -> Iterator[Attached]:
    """Yield what the registry has beside a bundle; write the signature beside the file."""
    from hpcenv.image.registry import referrers

    kinds = {artifact_type: kind for kind, artifact_type in TYPES.items()}
    listed = [(anchor, one) for one in referrers.list_referrers(client, anchor)]
    if bundle != anchor:
        listed += [(bundle, one) for one in referrers.list_referrers(client, bundle)]
    for subject, one in listed:
        kind = kinds.get(one.artifact_type)
        if kind is None or one.annotations.get(_OF_BUNDLE) != spec.digest:
            continue
        document = referrers.read_referrer(client, one, subject)
        if document is None:
            continue
        yield _compared(client, archive, kind, one, document)


def _compared(client: Client, archive: Archive, kind: Kind, referrer: Referrer, document: dict[str, Any]) -> Attached:
    from hpcenv.image.registry import referrers

    files = referrers.read_files(document)
    member = {"lock": _LOCK, "record": RECORD}.get(kind)
    if kind == "signature":
        _write_signature(client, archive.path, {file.media_type: file.spec.digest for file in files})
        return Attached(kind=kind, digest=referrer.digest)
    if member is None:
        return Attached(kind=kind, digest=referrer.digest)
    same = [file.spec.digest for file in files] == [f"sha256:{archive.sums[member]}"]
    return Attached(kind=kind, digest=referrer.digest, result="match" if same else "mismatch")


def _write_signature(client: Client, path: Path, files: dict[str, str]) -> None:
    """Write a signature beside the bundle, under the names that `verify --signature` expects; keep existing files."""
    statement = path.with_name(f"{path.name}.statement.json")
    for media, file in ((_STATEMENT, statement), (_SSH_SIGNATURE, statement.with_name(f"{statement.name}.sig"))):
        if media not in files or os.path.lexists(file):
            return
        content = client.document(files[media], "signature")
        try:
            with open(file, "xb") as opened:
                opened.write(content)
        except OSError as error:
            raise filesystem.refused(file, error) from error
