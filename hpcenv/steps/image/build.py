"""`hpcenv image build`: the SIF of a project, whatever its `image` is; also what `lock` locks.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcenv.adapters import references, sif, sources
from hpcenv.adapters.layer_index import Limits
from hpcenv.adapters.manifests import ResolvedImage
from hpcenv.adapters.references import DefinitionFile, Host, LocalImage, Reference, SifFile
from hpcenv.adapters.sources import Access
from hpcenv.adapters.store import Store, StoredImage, utc_now
from hpcenv.errors import HpcenvError, ImageMismatch, SpecError, UsageError
from hpcenv.model import definition as definition_file
from hpcenv.model import stale
from hpcenv.model.image_record import ImageRecord, Material, Provenance, SifFacts
from hpcenv.model.lockfile import ContainerTable, LayerTable, Lockfile, SifTable
from hpcenv.model.progress import Event, OnEvent, ignore
from hpcenv.steps.image.convert import Builder, Converted
from hpcenv.steps.image.on_cluster import Allocation
from hpcenv.steps.image.pull import Asked, BuiltImage, convert_as_asked, resolve
from hpcenv.steps.workspace import Workspace
from hpcenv.wire import Bind

# How long another conversion of the same image is waited for, as in `convert`.
_SECONDS = 4 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How a SIF is made; see `convert`.

    Attributes:
        limits: what the image may cost.
        allow_floating: accept what may be something else tomorrow.
        binds: what of the host the build of a definition file sees.
    """

    builder: Builder = "auto"
    prove: bool = True
    allocation: Allocation | None = None
    limits: Limits = field(default_factory=Limits)
    allow_floating: bool = False
    binds: tuple[Bind, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProjectImage(BuiltImage):
    """A project's SIF and what a lockfile says of it."""

    container: ContainerTable


def build(
    workspace: Workspace,
    *,
    before: Lockfile | None,
    environ: Mapping[str, str],
    on_event: OnEvent,
    choices: Choices | None = None,
    lockfile: Path | None = None,
) -> ProjectImage:
    """Return the project's SIF, made now if it is not there.

    Args:
        before: the lockfile whose image is kept, where it answers the very same request; None
            asks the registry what a tag means today.
        lockfile: where `before` lies; it is noted in the store as one that needs its image.

    Raises:
        SpecError: `image` is `host`, or makes no sense, or floats.
        HpcenvError: the image cannot be had or converted.
    """
    made = _made(workspace, before, environ, on_event, choices or Choices())
    # A clone has the lockfile, and nobody has locked there.
    kept = None if before is None else before.container
    if lockfile is not None and kept is not None and kept.digest == made.container.digest:
        need(workspace, lockfile, made.container)
    return made


def need(workspace: Workspace, lockfile: Path, container: ContainerTable) -> None:
    """Let the store know that a lockfile needs its SIF, so that nobody prunes it."""
    with contextlib.suppress(HpcenvError):  # not writable, or not there: then nothing is kept in it
        workspace.store_place.open().add_root("lockfile", lockfile, [container.digest])


def _made(
    workspace: Workspace,
    before: Lockfile | None,
    environ: Mapping[str, str],
    on_event: OnEvent,
    choices: Choices,
) -> ProjectImage:
    source = references.parse_source(workspace.project.image)
    if isinstance(source, Host):
        raise SpecError('there is no image to build: `image` is "host"', why=f"in {workspace.spec}")
    if isinstance(source, SifFile):
        return _sif_file(workspace, source)
    if isinstance(source, DefinitionFile):
        return _definition(workspace, source, before, environ, on_event, choices)
    if choices.binds:
        raise UsageError(
            "only the build of a definition file can see folders of the host",
            why=f"`image` in {workspace.spec} is {workspace.project.image}",
            hint="for folders that a job sees, write [[bind]] in hpcenv.toml",
        )
    return _layers(workspace, source, before, environ, on_event, choices)


def _kept(workspace: Workspace, before: Lockfile | None) -> ContainerTable | None:
    """Return what is locked, if it was locked for the very same request."""
    if before is None or before.asked != stale.asked_by(workspace.project):
        return None
    return before.container


# -- an image in layers ---------------------------------------------------------------------


def _layers(
    workspace: Workspace,
    source: Reference | LocalImage,
    before: Lockfile | None,
    environ: Mapping[str, str],
    on_event: OnEvent,
    choices: Choices,
) -> ProjectImage:
    project, kept = workspace.project, _kept(workspace, before)
    reference = str(source)
    if isinstance(source, LocalImage):
        reference = str(replace(source, path=str(workspace.root / Path(source.path).expanduser())))
    elif kept is not None and kept.manifest_digest is not None:
        reference = f"{reference.partition('@')[0]}@{kept.index_digest or kept.manifest_digest}"
        on_event(Event(phase="note", what=f"keeping {reference} (--upgrade asks for the tag anew)"))
    asked = Asked(
        reference=reference,
        platform=project.platform,
        plain_http=tuple(project.plain_http),
        ca_file=ca_file(workspace),
        allow_floating=choices.allow_floating or project.allow_floating,
        builder=choices.builder,
        prove=choices.prove,
        allocation=choices.allocation,
        limits=choices.limits,
    )
    place = workspace.store_place
    known = place.open() if place.exists() else None
    image, open_blobs = resolve(asked, environ=environ, on_event=on_event, store=known)
    _refuse_other_bytes(image, kept, workspace)
    store = place.open(create=True)

    def once() -> Converted:
        return convert_as_asked(image, open_blobs, asked, store=store, environ=environ, on_event=on_event)

    made = once()
    if made.reused and not _is_as_made(made):
        _put_aside(image.manifest_digest, store, on_event)
        made = once()
    return ProjectImage(
        path=made.path,
        container=_container(project.image, image, made.record, made.path),
        record=made.record,
        reused=made.reused,
        read=True,
        notes=made.notes,
    )


def _is_as_made(image: Converted | StoredImage) -> bool:
    """Whether a SIF of the store has the bytes that its record names."""
    try:
        return image.record is not None and sif.file_sha256(image.path) == image.record.sif.sha256
    except HpcenvError:
        return False  # cannot be read to its end, or another process has put it aside just now


def _put_aside(digest: str, store: Store, on_event: OnEvent) -> None:
    """Move a damaged SIF out of its place, unless another process has made it again meanwhile."""
    with store.lease(digest, purpose="puts a damaged image aside", timeout=_SECONDS, on_event=on_event):
        found = store.find_image(digest)
        if found is not None and not _is_as_made(found):
            said = f"`{found.path}` is not as it was made: moved aside, and made again"
            on_event(Event(phase="note", what=said))
            store.set_aside(digest)


def ca_file(workspace: Workspace) -> Path | None:
    """Return the certificates that a project trusts instead of the system's, PEM."""
    named = workspace.project.ca_file
    return None if named is None else workspace.root / Path(named).expanduser()


def _refuse_other_bytes(image: ResolvedImage, kept: ContainerTable | None, workspace: Workspace) -> None:
    """A layout or archive can change in place; a registry cannot give other bytes for a digest."""
    if kept is not None and kept.manifest_digest not in (None, image.manifest_digest):
        raise ImageMismatch(
            f"`{workspace.project.image}` is not the image that was locked",
            why=f"locked {kept.manifest_digest}\nfound {image.manifest_digest}",
            hint="hpcenv lock --upgrade takes the new one",
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
    """Return what the image's ENV says about GPUs and drivers."""
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


def _sif_file(workspace: Workspace, source: SifFile) -> ProjectImage:
    """A SIF that somebody made: its own digests, and what its labels say of its origin."""
    path = workspace.root / Path(source.path).expanduser()
    record = _described(path, str(source), Provenance(builder="apptainer", tools={}, created=utc_now()))
    container = _described_container(str(source), path, record)
    return ProjectImage(path=path, container=container, record=record, reused=True, read=True)


def _described(path: Path, reference: str, made: Provenance) -> ImageRecord:
    """Return a record of a SIF from what the file itself says."""
    header = sif.read_header(path)
    sha256 = sif.file_sha256(path)
    return ImageRecord(
        digest=f"sha256:{sha256}",
        references=(reference,),
        platform=f"linux/{header.architecture}",
        sif=SifFacts(
            sha256=sha256,
            size=header.file_size,
            partition_sha256=sif.partition_sha256(path, header),
            partition_size=header.runs.size,
            compression=sif.superblock(path, header).compression,
            architecture=header.architecture,
        ),
        made=made,
    )


def _described_container(reference: str, path: Path, record: ImageRecord) -> ContainerTable:
    labels = sif.labels(path)
    return ContainerTable(
        reference=reference,
        manifest_digest=None,
        config_digest=labels.get("hpcenv.source.config-digest"),
        rootfs_chain_id=labels.get("hpcenv.source.chain-id"),
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


def _definition(
    workspace: Workspace,
    source: DefinitionFile,
    before: Lockfile | None,
    environ: Mapping[str, str],
    on_event: OnEvent,
    choices: Choices,
) -> ProjectImage:
    """Take the SIF that was made from the very same file and inputs, or build one."""
    if choices.allocation is not None:
        refuse_on_cluster(source.path)
    path = workspace.root / Path(source.path).expanduser()
    recipe = Recipe(
        path=path,
        text=_text(path),
        name=str(source),
        platform=workspace.project.platform,
        access=Access(plain_http=frozenset(workspace.project.plain_http), ca_file=ca_file(workspace), environ=environ),
        allow_floating=choices.allow_floating or workspace.project.allow_floating,
        binds=choices.binds,
    )
    store = workspace.store_place.open(create=True)
    kept = _kept(workspace, before)
    there = _made_before(store, recipe, None if kept is None else kept.digest)
    made = there or _build_recipe(recipe, store, environ, on_event)
    container = _described_container(str(source), made.path, made.record)
    return ProjectImage(path=made.path, container=container, record=made.record, reused=made.reused, read=True)


# Bytes of temporary space beside the unpacked sources.
_FOR_POST = 1 << 30


def refuse_on_cluster(path: str) -> None:
    """Refuse a definition file in an allocation.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        "a definition file cannot be built with --on-cluster",
        why="it may fetch from anywhere, and compute nodes often have no way out",
        hint=f"where they have one: srun hpcenv image build {path}",
    )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A definition file and what its build may see.

    Attributes:
        path: where it is; its relative paths begin there.
        text: what it says.
        name: as the user wrote it; for the store's list.
        access: how to speak to the registries of its sources.
    """

    path: Path
    text: str
    name: str
    platform: str = "linux/amd64"
    access: Access
    allow_floating: bool = False
    binds: tuple[Bind, ...] = ()


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise SpecError(f"`{path}` cannot be read", why=error.strerror, hint="check the path of the file") from error


def parse_bind(text: str, folder: Path) -> Bind:
    """Parse `SRC:DST[:ro|rw]`.

    Args:
        folder: where a relative SRC begins.

    Raises:
        UsageError: it is not of that form, or SRC is not there.
    """
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(parts) or (len(parts) == 3 and parts[2] not in ("ro", "rw")):
        raise UsageError(
            f"`{text}` is not a bind", why="the form is SRC:DST[:ro]", hint="for example --bind site:/mnt:ro"
        )
    source = os.path.abspath(folder / Path(parts[0]).expanduser())
    if not os.path.exists(source):
        raise UsageError(f"bind source `{source}` does not exist", hint="check the path before the first `:`")
    if not parts[1].startswith("/"):
        raise UsageError(f"`{parts[1]}` is not an absolute path", why=f"it is the place in the container of `{text}`")
    return Bind(source=source, target=parts[1], read_only=parts[2:] == ["ro"])


def build_definition(
    path: Path,
    name: str,
    store: Store,
    environ: Mapping[str, str],
    on_event: OnEvent,
    choices: Choices,
    *,
    platform: str = "linux/amd64",
    plain_http: Sequence[str] = (),
    ca_file: Path | None = None,
) -> BuiltImage:
    """Build a definition file into the store, whatever is there already.

    Tags of registries are resolved to digests, and the digests are built.

    Args:
        path: the definition file.
        name: what it is called in the store's list.
        plain_http: registries that are spoken to without TLS.
        ca_file: certificates to trust instead of the system's, PEM.

    Raises:
        UsageError: an allocation is asked for.
        SpecError: a source that floats, without `allow_floating`; registries with and without TLS together.
        HpcenvError: as `apptainer_build.build_definition`.
    """
    if choices.allocation is not None:
        refuse_on_cluster(name)
    recipe = Recipe(
        path=path,
        text=_text(path),
        name=name,
        platform=platform,
        access=Access(plain_http=frozenset(plain_http), ca_file=ca_file, environ=environ),
        allow_floating=choices.allow_floating,
        binds=choices.binds,
    )
    return _build_recipe(recipe, store, environ, on_event)


def _build_recipe(recipe: Recipe, store: Store, environ: Mapping[str, str], on_event: OnEvent) -> BuiltImage:
    from hpcenv.adapters import apptainer, apptainer_build, temporary

    plain = _speaks_plain_http(recipe)
    images = _resolved(recipe, on_event)
    digests = {origin: image.manifest_digest for origin, image in images.items()}
    if recipe.access.ca_file is not None:
        environ = {**environ, "SSL_CERT_FILE": str(recipe.access.ca_file)}
    # What %post adds, nobody knows before.
    need = _FOR_POST + sum(
        apptainer_build.space_needed(sum(layer.size for layer in image.layers)) for image in images.values()
    )
    # A name of its own: two builds of one file may run side by side, and `prune` waits for both.
    lease = f"definition-{secrets.token_hex(8)}"
    with (
        store.lease(lease, purpose=f"builds {recipe.name}", timeout=60, on_event=on_event),
        store.scratch(1 << 30, purpose="build the definition file") as place,
    ):
        made = apptainer_build.build_definition(
            apptainer=apptainer.find(environ.get("PATH")),
            text=recipe.text,
            folder=recipe.path.parent,
            architecture=references.parse_platform(recipe.platform)[1],
            destination=place / "image.sif",
            temporary=temporary.choose_temporary(temporary.candidates(environ), need),
            digests=digests,
            allow_floating=recipe.allow_floating,
            plain_http=plain,
            binds=recipe.binds,
            on_line=lambda line: on_event(Event(phase="build", what=line)),
            environ=environ,
        )
        provenance = Provenance(
            builder="apptainer",
            tools={"apptainer": made.apptainer_version},
            arguments=made.arguments,
            created=utc_now(),
            definition=made.definition_digest,
            materials=made.materials,
        )
        record = _described(made.path, recipe.name, provenance)
        stored = store.publish_image(made.path, record)
    return BuiltImage(path=stored.path, record=stored.record or record, reused=False, read=True)


def _registry_sources(recipe: Recipe) -> dict[str, Reference]:
    """Return what the file takes from registries that speak docker's protocol, by `Source.origin`."""
    return {
        source.origin: references.parse_reference(f"docker://{source.origin}")
        for source in definition_file.sources(recipe.text)
        if source.bootstrap == "docker" and "{{" not in source.origin
    }


def _speaks_plain_http(recipe: Recipe) -> bool:
    """Say whether Apptainer has to speak http: its flag is for all sources of a file."""
    registries = {asked.registry for asked in _registry_sources(recipe).values()}
    plain = sorted(registries & recipe.access.plain_http)
    secure = sorted(registries - recipe.access.plain_http)
    if plain and secure:
        raise SpecError(
            "the definition file names registries with and without TLS",
            why=f"Apptainer would speak http to all of them: {', '.join(plain)} and {', '.join(secure)}",
            hint=f"convert the image of one first, and start from the SIF: hpcenv image pull docker://{plain[0]}/...",
        )
    return bool(plain)


def _resolved(recipe: Recipe, on_event: OnEvent) -> dict[str, ResolvedImage]:
    """Ask the registries what the file's sources are now; by `Source.origin`."""
    images = {}
    for origin, asked in _registry_sources(recipe).items():
        image = sources.resolve(asked, recipe.access, platform=recipe.platform, allow_floating=recipe.allow_floating)
        if asked.digest is None:
            on_event(Event(phase="note", what=f"{asked} is {image.manifest_digest}"))
        images[origin] = image
    return images


def _made_before(store: Store, recipe: Recipe, kept: str | None) -> BuiltImage | None:
    """Return a SIF that was made from the same file and inputs: the locked one, else the newest.

    Without a locked one the registries are asked what tags mean now, and there must be
    nothing that nobody can compare, such as a distribution's packages.
    """
    from hpcenv.adapters import apptainer_build

    identity = apptainer_build.definition_digest(recipe.text)
    if kept is not None:
        images = [image for image in (store.find_image(kept),) if image is not None]
        used = apptainer_build.materials(recipe.text, recipe.path.parent)
    else:
        images = [image for image in store.list_images() if image.record and image.record.made.definition == identity]
        if not images:
            return None
        digests = {origin: image.manifest_digest for origin, image in _resolved(recipe, ignore).items()}
        pinned = definition_file.pin(recipe.text, digests)
        used = apptainer_build.materials(pinned, recipe.path.parent)
        if not all(source.fixed for source in definition_file.sources(pinned)):
            return None
    known = [material for material in used if material.digest is not None]
    wanted = {(bind.source, bind.target, bind.read_only) for bind in recipe.binds}
    for image in sorted(images, key=lambda image: image.record.made.created if image.record else "", reverse=True):
        if _same_inputs(image, identity, known, wanted):
            assert image.record is not None
            image.require_trusted()
            return BuiltImage(path=image.path, record=image.record, reused=True, read=True)
    return None


def _same_inputs(
    image: StoredImage, identity: str, known: Sequence[Material], binds: set[tuple[str, str, bool]]
) -> bool:
    if image.record is None or image.record.made.definition != identity:
        return False
    used = image.record.made.materials
    names = {f"{source}:{target}:{'ro' if read_only else 'rw'}" for source, target, read_only in binds}
    bound = {material.name for material in used if material.what == "bind"}
    # No binds asked for: `lock` takes what `image build --bind` made.
    return (
        all(material in used for material in known)
        and (not names or names == bound)
        and sif.file_sha256(image.path) == image.record.sif.sha256
    )


def definition_changed(workspace: Workspace, container: ContainerTable, image: Path) -> tuple[str, str] | None:
    """Return digests of the definition file, of the one that was locked and of today's, where they differ.

    Args:
        image: the locked SIF, which names the file that it was made from.

    Raises:
        ImageMismatch: the SIF cannot be read.
    """
    source = references.parse_source(container.reference)
    if not isinstance(source, DefinitionFile):
        return None
    from hpcenv.adapters import apptainer_build

    try:
        now = apptainer_build.definition_digest(_text(workspace.root / Path(source.path).expanduser()))
    except SpecError:
        return None  # gone or not readable here: the SIF is there, and that is what runs
    locked = sif.labels(image).get("hpcenv.definition.digest", "none")
    return None if locked == now else (locked, now)
