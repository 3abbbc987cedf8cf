"""`hpcenv image build`: make the SIF of a project. `hpcenv lock` locks this SIF.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcenv.container import runtime
from hpcenv.errors import Command, HpcenvError, ImageMismatch, SpecError, UsageError
from hpcenv.identity import sif
from hpcenv.image.convert import apptainer_build
from hpcenv.image.convert.conversion import Converted
from hpcenv.image.describe import describe_sif
from hpcenv.image.pull import BuiltImage, ConvertOptions, ImageRequest, convert_image, resolve
from hpcenv.image.reference import (
    DefinitionFile,
    HostEnvironment,
    LayeredImage,
    LocalImage,
    SifFile,
    SifReference,
)
from hpcenv.image.registry.blobs import BlobSpec
from hpcenv.image.registry.manifests import ResolvedImage
from hpcenv.image.registry.source import Access
from hpcenv.image.sif_registry import OTHER_COMPRESSION, fetch_sif, resolve_sif
from hpcenv.image.store.sif_record import ImageRecord, Provenance, utc_now
from hpcenv.image.store.store import Store, StoredImage
from hpcenv.image.store.store_folder import open_place, place_exists
from hpcenv.locking.definition_build import (
    DefinitionBuild,
    build_definition,
    find_earlier_build,
    read_definition,
)
from hpcenv.locking.image_source import absolute, locked_source, project_platform, project_source, within
from hpcenv.progress import Event, OnEvent
from hpcenv.project import stale
from hpcenv.project.lockfile import ContainerTable, LayerTable, Lockfile, SifTable
from hpcenv.project.workspace import Workspace
from hpcenv.records.manifest import Bind

# Time to wait while another process converts the same image; `convert` has the same value.
_WAIT_SECONDS = 4 * 3600.0


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How to make a project's SIF.

    Attributes:
        convert: how to convert an image with layers.
        allow_floating: accept an image name that may mean a different image tomorrow.
        binds: folders of the host that the build of a definition file sees.
        plain_http: registries without TLS that the user named himself, in addition to the registries in hpcenv.toml.
        anew: build a definition file even if the store has a SIF from the same file.
    """

    convert: ConvertOptions = field(default_factory=ConvertOptions)
    allow_floating: bool = False
    binds: tuple[Bind, ...] = ()
    plain_http: tuple[str, ...] = ()
    anew: bool = False


@dataclass(frozen=True, kw_only=True)
class ProjectImage(BuiltImage):
    """A project's SIF, and the table that describes it in the lockfile."""

    container: ContainerTable


def build(
    workspace: Workspace,
    *,
    before: Lockfile | None,
    environ: Mapping[str, str],
    on_event: OnEvent,
    options: BuildOptions | None = None,
) -> ProjectImage:
    """Return the project's SIF. If the SIF does not exist, make it.

    Args:
        workspace: the project.
        before: the present lockfile. The locked image is used if hpcenv.toml still names the same image. If `before` is
            None, the registry is asked which image a tag names now.
        environ: the user's environment.
        on_event: called with the progress.
        options: how to make the SIF.

    Raises:
        SpecError: `image` is `host`, names no image, or is a floating tag that was not accepted.
        HpcenvError: the image cannot be fetched or converted.
    """
    made = _make(workspace, before, environ, on_event, options or BuildOptions())
    # If the store is read-only or missing, the use is not recorded. But then `prune` cannot remove files from it
    # either.
    with contextlib.suppress(HpcenvError):
        open_place(workspace.store_place).remember(made.container.digest)
    return made


def _make(
    workspace: Workspace,
    before: Lockfile | None,
    environ: Mapping[str, str],
    on_event: OnEvent,
    options: BuildOptions,
) -> ProjectImage:
    source = project_source(workspace)
    if isinstance(source, HostEnvironment):
        raise SpecError('this project has no image to build: `image` is "host"', why=f"in {workspace.spec}")
    if isinstance(source, SifFile):
        return _use_sif_file(workspace, source)
    if isinstance(source, SifReference):
        return _fetch_sif(workspace, source, before, environ, on_event, options)
    if isinstance(source, DefinitionFile):
        return _make_from_definition(workspace, source, before, environ, on_event, options)
    if options.binds:
        raise UsageError(
            "only the build of a definition file can see folders of the host",
            why=f"`image` in {workspace.spec} is {workspace.project.image}",
            hint="to let a job see folders of the host, write [[bind]] in hpcenv.toml",
        )
    return _make_from_layers(workspace, source, before, environ, on_event, options)


def _locked_container(workspace: Workspace, before: Lockfile | None) -> ContainerTable | None:
    """Return the locked image, if hpcenv.toml still names the image that was locked."""
    if before is None or before.asked != stale.asked_by(workspace.project):
        return None
    return before.container


# -- an image with layers -------------------------------------------------------------------


def _readable_here(workspace: Workspace, how: ConvertOptions, environ: Mapping[str, str]) -> ConvertOptions:
    """Return the options for the conversion, with a compression that the container program in hpcenv.toml can read."""
    named = workspace.project.submit.runtime
    if named is None or how.compression != "auto":
        return how
    return dataclasses.replace(how, compression=runtime.compression_here(environ, named))


def _make_from_layers(
    workspace: Workspace,
    source: LayeredImage,
    before: Lockfile | None,
    environ: Mapping[str, str],
    on_event: OnEvent,
    options: BuildOptions,
) -> ProjectImage:
    locked = _locked_container(workspace, before)
    request = ImageRequest(
        source=_pinned(workspace, source, locked, on_event),
        platform=project_platform(workspace),
        access=registry_access(workspace, environ, typed=options.plain_http),
        allow_floating=options.allow_floating or workspace.project.allow_floating,
    )
    place = workspace.store_place
    known = open_place(place) if place_exists(place) else None
    image, open_blobs = resolve(request, on_event=on_event, store=known)
    _refuse_other_bytes(image, locked, workspace)
    store = open_place(place, create=True)
    how = _readable_here(workspace, options.convert, environ)

    def convert() -> Converted:
        return convert_image(image, open_blobs, how, store=store, environ=environ, on_event=on_event)

    made = convert()
    if made.reused and not _has_recorded_bytes(made):
        _move_aside(image.manifest_digest, store, on_event)
        made = convert()
    return ProjectImage(
        path=made.path,
        container=_container(workspace.project.image, image, made.record, made.path),
        record=made.record,
        reused=made.reused,
        read=True,
        notes=made.notes,
    )


def _pinned(
    workspace: Workspace, source: LayeredImage, locked: ContainerTable | None, on_event: OnEvent
) -> LayeredImage:
    """Return the image with the locked digest instead of its tag; unchanged if nothing was locked."""
    if isinstance(source, LocalImage):
        return absolute(workspace, source)
    if locked is None or locked.manifest_digest is None:
        return source
    pinned = replace(source, digest=locked.index_digest or locked.manifest_digest)
    on_event(Event(phase="note", what=f"using the locked {pinned} (--upgrade resolves the tag again)"))
    return pinned


def registry_access(workspace: Workspace, environ: Mapping[str, str], *, typed: tuple[str, ...] = ()) -> Access:
    """Return how to connect to the registries of a project.

    Args:
        typed: registries without TLS that the user named himself. Without TLS, a saved password is sent only to these
            registries.
    """
    named = workspace.project.plain_http
    return Access(
        plain_http=(*typed, *named),
        without_password=tuple(host for host in named if host not in typed),
        ca_file=ca_file(workspace),
        environ=environ,
    )


def _has_recorded_bytes(image: Converted | StoredImage) -> bool:
    """Return whether a SIF in the store has the recorded bytes; reads the whole file."""
    try:
        return image.record is not None and sif.file_sha256(image.path) == image.record.sif.sha256
    except HpcenvError:
        return False  # the SIF is damaged, or another process has just moved it aside


def _move_aside(digest: str, store: Store, on_event: OnEvent) -> None:
    """Move a damaged SIF aside. If another process has replaced the SIF in the meantime, do nothing."""
    with store.lease(digest, purpose="moves a damaged image aside", timeout=_WAIT_SECONDS, on_event=on_event):
        image = store.find_image(digest)
        if image is not None and not _has_recorded_bytes(image):
            note = f"`{image.path}` has changed since it was made: it is moved aside and made again"
            on_event(Event(phase="note", what=note))
            store.set_aside(digest)


def ca_file(workspace: Workspace) -> Path | None:
    """Return the file of certificates (PEM) that a project trusts instead of the system's certificates."""
    path = workspace.project.ca_file
    return None if path is None else workspace.root / Path(path).expanduser()


def _refuse_other_bytes(image: ResolvedImage, locked: ContainerTable | None, workspace: Workspace) -> None:
    """Refuse a changed image layout or archive. A registry cannot return different bytes for a digest."""
    if locked is not None and locked.manifest_digest not in (None, image.manifest_digest):
        raise ImageMismatch(
            f"`{workspace.project.image}` is not the image that was locked",
            why=f"locked {locked.manifest_digest}\nfound {image.manifest_digest}",
            hint=("to lock the new image: ", Command("hpcenv", "lock", "--upgrade")),
        )


def _container(reference: str, image: ResolvedImage, record: ImageRecord, path: Path) -> ContainerTable:
    return ContainerTable(
        reference=reference,
        index_digest=image.index_digest,
        manifest_digest=image.manifest_digest,
        digest_origin=None if image.digest_origin == "registry" else image.digest_origin,
        config_digest=image.config_digest,
        rootfs_chain_id=image.rootfs_chain_id,
        tree_sha256=record.tree_sha256,
        platform=image.platform,
        env_digest=image.env_digest,
        nvidia=_nvidia_variables(image.config.get("config")),
        layers=tuple(
            LayerTable(digest=layer.digest, diff_id=layer.diff_id, size=layer.size, media_type=layer.media_type)
            for layer in image.layers
        ),
        sif=_sif_table(record, path),
    )


def _nvidia_variables(settings: object) -> dict[str, str]:
    """Return the variables of the image that concern GPUs and drivers."""
    env = settings.get("Env") if isinstance(settings, dict) else None
    pairs = (str(entry).partition("=") for entry in (env if isinstance(env, list) else ()))
    return {name: value for name, _, value in sorted(pairs) if name.startswith("NVIDIA_") or name == "CUDA_VERSION"}


def _sif_table(record: ImageRecord, path: Path) -> SifTable:
    made = record.made
    tools = ", ".join(f"{name} {version}" for name, version in sorted(made.tools.items()))
    return SifTable(
        sha256=record.sif.sha256,
        size=record.sif.size,
        partition_sha256=record.sif.partition_sha256 or sif.partition_sha256(path),
        partition_size=record.sif.partition_size,
        compression=record.sif.compression,
        arch=record.sif.architecture,
        built_with=tools or None,
        builder=made.builder if tools else None,
        mksquashfs_args=made.arguments,
        source_date_epoch=made.epoch,
    )


# -- a SIF, and a definition file -----------------------------------------------------------


def _use_sif_file(workspace: Workspace, source: SifFile) -> ProjectImage:
    """Return a SIF that the user made, with its digests, and with the origin that is in its labels."""
    path = within(workspace, source)
    record = describe_sif(path, str(source), Provenance(builder="apptainer", tools={}, created=utc_now()))
    container = _described_container(str(source), path, record)
    return ProjectImage(path=path, container=container, record=record, reused=True, read=True)


def _fetch_sif(
    workspace: Workspace,
    source: SifReference,
    before: Lockfile | None,
    environ: Mapping[str, str],
    on_event: OnEvent,
    options: BuildOptions,
) -> ProjectImage:
    """Return a SIF from a registry: the locked SIF by its sha256, or the SIF that the tag names now."""
    access = registry_access(workspace, environ, typed=options.plain_http)
    locked = _locked_container(workspace, before)
    if locked is None:
        floating = options.allow_floating or workspace.project.allow_floating
        spec = resolve_sif(source, access, allow_floating=floating, on_event=on_event)
    else:
        spec = BlobSpec(digest=f"sha256:{locked.sif.sha256}", size=locked.sif.size)
        on_event(Event(phase="note", what=f"using the locked SIF {spec.digest} (--upgrade resolves the tag again)"))
    store = open_place(workspace.store_place, create=True)
    made = fetch_sif(
        source, spec, access, platform=project_platform(workspace), store=store, on_event=on_event
    )  # fmt: skip
    named = workspace.project.submit.runtime or ""
    unreadable = runtime.unreadable_here(made.record.sif.compression, environ, named)
    if unreadable:
        on_event(Event(phase="note", what=f"{unreadable}; {OTHER_COMPRESSION}"))
    container = _described_container(str(source), made.path, made.record)
    return ProjectImage(path=made.path, container=container, record=made.record, reused=made.reused, read=True)


def _described_container(reference: str, path: Path, record: ImageRecord) -> ContainerTable:
    labels = sif.labels(path)
    return ContainerTable(
        reference=reference,
        manifest_digest=None,
        config_digest=labels.get("hpcenv.source.config-digest"),
        rootfs_chain_id=labels.get("hpcenv.source.chain-id"),
        tree_sha256=record.tree_sha256,
        platform=record.platform,
        nvidia=_nvidia_variables(_oci_config(path)),
        sif=_sif_table(record, path),
    )


def _oci_config(path: Path) -> Any:
    entry = sif.read_header(path).named("oci-config.json")
    if entry is None:
        return None
    try:
        return json.loads(sif.read_object(path, entry))
    except (ValueError, RecursionError):
        return None


def _make_from_definition(
    workspace: Workspace,
    source: DefinitionFile,
    before: Lockfile | None,
    environ: Mapping[str, str],
    on_event: OnEvent,
    options: BuildOptions,
) -> ProjectImage:
    """Return the SIF of an earlier build from the same file and inputs, or build the SIF."""
    path = within(workspace, source)
    definition = DefinitionBuild(
        path=path,
        text=read_definition(path),
        name=str(source),
        platform=project_platform(workspace),
        access=registry_access(workspace, environ, typed=options.plain_http),
        allow_floating=options.allow_floating or workspace.project.allow_floating,
        binds=options.binds,
    )
    store = open_place(workspace.store_place, create=True)
    locked = _locked_container(workspace, before)
    digest = None if locked is None else locked.digest
    earlier = None if options.anew else find_earlier_build(store, definition, digest)
    made = earlier or build_definition(definition, store, environ, on_event)
    container = _described_container(str(source), made.path, made.record)
    return ProjectImage(path=made.path, container=container, record=made.record, reused=made.reused, read=True)


def definition_changed(workspace: Workspace, container: ContainerTable, image: Path) -> tuple[str, str] | None:
    """Return the digests of the locked and of the present definition file, if they differ.

    Args:
        workspace: the project.
        container: the lockfile's table of the image.
        image: the locked SIF. A label in the SIF contains the digest of the definition file.

    Raises:
        ImageMismatch: the SIF cannot be read.
    """
    source = locked_source(container)
    if not isinstance(source, DefinitionFile):
        return None

    try:
        now = apptainer_build.definition_digest(read_definition(within(workspace, source)))
    except SpecError:
        return None  # the file is missing or unreadable: jobs need only the SIF
    locked = sif.labels(image).get("hpcenv.definition.digest", "none")
    return None if locked == now else (locked, now)
