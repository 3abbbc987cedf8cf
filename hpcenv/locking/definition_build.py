"""Build a definition file with Apptainer, and find a SIF that an earlier build made from the same inputs.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcenv.container import runtime
from hpcenv.errors import Command, SpecError, UsageError
from hpcenv.identity import sif
from hpcenv.image.convert import apptainer_build, temporary_folder
from hpcenv.image.convert import definition as definition_file
from hpcenv.image.describe import describe_sif
from hpcenv.image.pull import BuiltImage
from hpcenv.image.reference import Platform, Reference, parse_reference
from hpcenv.image.registry import source as sources
from hpcenv.image.registry.manifests import ResolvedImage
from hpcenv.image.registry.source import Access
from hpcenv.image.store.sif_record import Material, Provenance, utc_now
from hpcenv.image.store.store import Store, StoredImage
from hpcenv.progress import Event, OnEvent, ignore
from hpcenv.records.manifest import Bind

# The minimum of temporary space, in bytes, for the files that %post adds. The real size of these files is not known.
_POST_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class DefinitionBuild:
    """A definition file, and the settings of its build.

    Attributes:
        path: the file; relative paths in it begin at its folder.
        text: its content.
        name: the path as the user wrote it, for the store's list.
        platform: the machines for which the SIF is built.
        access: how to connect to the registries of its sources.
        allow_floating: accept sources whose content may change, such as tags.
        binds: folders of the host that the build sees.
    """

    path: Path
    text: str
    name: str
    platform: Platform = field(default_factory=Platform)
    access: Access = field(default_factory=Access)
    allow_floating: bool = False
    binds: tuple[Bind, ...] = ()


def read_definition(path: Path) -> str:
    """Return the text of a definition file.

    Raises:
        SpecError: the file cannot be read.
    """
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise SpecError(f"`{path}` cannot be read", why=error.strerror, hint="check the path of the file") from error


def parse_bind(text: str, folder: Path) -> Bind:
    """Parse `SRC:DST[:ro|rw]`.

    Args:
        text: the value of `--bind`.
        folder: where a relative SRC begins.

    Raises:
        UsageError: the text does not have this form, or SRC does not exist.
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
        raise UsageError(f"`{parts[1]}` is not an absolute path", why=f"it is the path in the container in `{text}`")
    return Bind(source=source, target=parts[1], read_only=parts[2:] == ["ro"])


def build_definition(build: DefinitionBuild, store: Store, environ: Mapping[str, str], on_event: OnEvent) -> BuiltImage:
    """Build a definition file and put the SIF into the store, even if an earlier SIF was built from the same file.

    Tags of registries are resolved to digests, and the build uses the digests.

    Args:
        build: the file and the settings of its build.
        store: where the SIF is stored.
        environ: the user's environment, for tools and temporary folders.
        on_event: called with the progress.

    Raises:
        SpecError: the content of a source may change and `allow_floating` is not set, or only some registries use
            https.
        HpcenvError: see `apptainer_build.build_definition`.
    """
    plain_http = _uses_plain_http(build)
    registries = {reference.registry for reference in _registry_sources(build).values()}
    images = _resolve_sources(build, on_event)
    digests = {origin: image.manifest_digest for origin, image in images.items()}
    if build.access.ca_file is not None:
        environ = {**environ, "SSL_CERT_FILE": str(build.access.ca_file)}
    need = _POST_BYTES + sum(
        apptainer_build.space_needed(sum(layer.size for layer in image.layers)) for image in images.values()
    )
    # The name is unique, because two builds of one file may run at the same time. `prune` waits for both builds.
    lease = f"definition-{secrets.token_hex(8)}"
    with (
        store.lease(lease, purpose=f"builds {build.name}", timeout=60, on_event=on_event),
        store.scratch(1 << 30, purpose="build the definition file") as folder,
    ):
        if registries & set(build.access.without_password):
            environ = _without_logins(environ, folder)
        made = apptainer_build.build_definition(
            apptainer=runtime.find_builder(environ.get("PATH")),
            text=build.text,
            folder=build.path.parent,
            architecture=build.platform.architecture,
            destination=folder / "image.sif",
            temporary=temporary_folder.choose_temporary(
                temporary_folder.candidates(environ), need, likely_bytes=need + apptainer_build.CUDA_BYTES
            ),
            digests=digests,
            allow_floating=build.allow_floating,
            plain_http=plain_http,
            binds=build.binds,
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
        record = describe_sif(made.path, build.name, provenance)
        stored = store.publish_image(made.path, record)
    return BuiltImage(path=stored.path, record=stored.record or record, reused=False, read=True)


def _without_logins(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return an environment in which Apptainer looks for saved passwords in `folder`, which contains none."""
    (folder / "no-login.json").write_text("{}")
    files = dict.fromkeys(("APPTAINER_AUTHFILE", "REGISTRY_AUTH_FILE"), str(folder / "no-login.json"))
    folders = dict.fromkeys(("APPTAINER_CONFIGDIR", "DOCKER_CONFIG"), str(folder))
    kept = {
        name: value for name, value in environ.items() if not name.endswith(("_DOCKER_USERNAME", "_DOCKER_PASSWORD"))
    }
    return {**kept, **files, **folders}


def _registry_sources(build: DefinitionBuild) -> dict[str, Reference]:
    """Return the images that the file takes from docker registries; the keys are `DefinitionSource.origin`."""
    return {
        source.origin: parse_reference(f"docker://{source.origin}")
        for source in definition_file.sources(build.text)
        if source.bootstrap == "docker" and "{{" not in source.origin
    }


def _uses_plain_http(build: DefinitionBuild) -> bool:
    """Return whether Apptainer must use http. Apptainer's option for http applies to all sources of a file."""
    registries = {reference.registry for reference in _registry_sources(build).values()}
    plain = sorted(registries & set(build.access.plain_http))
    secure = sorted(registries - set(build.access.plain_http))
    if plain and secure:
        raise SpecError(
            "the definition file names registries with and without TLS",
            why=f"Apptainer would use http for all of them: {', '.join(plain)} and {', '.join(secure)}",
            hint=(
                "first convert the image of one registry, and start from its SIF: ",
                Command("hpcenv", "image", "pull", f"docker://{plain[0]}/..."),
            ),
        )
    return bool(plain)


def _resolve_sources(build: DefinitionBuild, on_event: OnEvent) -> dict[str, ResolvedImage]:
    """Ask the registries which images the sources of the file name now. The keys are `DefinitionSource.origin`."""
    images = {}
    for origin, reference in _registry_sources(build).items():
        image = sources.resolve(reference, build.access, platform=build.platform, allow_floating=build.allow_floating)
        if reference.digest is None:
            on_event(Event(phase="note", what=f"{reference} is {image.manifest_digest}"))
        images[origin] = image
    return images


def find_earlier_build(store: Store, build: DefinitionBuild, locked: str | None) -> BuiltImage | None:
    """Return a SIF in the store that was built from the same file and the same inputs.

    Without a locked SIF, hpcenv asks the registries which images the tags name now. The result is None if an input
    cannot be compared, such as the packages of a distribution.

    Args:
        store: where to look.
        build: the file and its inputs.
        locked: digest of the SIF in the lockfile; only this SIF is considered. If `locked` is None, the newest SIF is
            taken.
    """
    identity = apptainer_build.definition_digest(build.text)
    if locked is not None:
        images = [image for image in (store.find_image(locked),) if image is not None]
        used = apptainer_build.materials(build.text, build.path.parent)
    else:
        images = [image for image in store.list_images() if image.record and image.record.made.definition == identity]
        if not images:
            return None
        digests = {origin: image.manifest_digest for origin, image in _resolve_sources(build, ignore).items()}
        pinned = definition_file.pin(build.text, digests)
        used = apptainer_build.materials(pinned, build.path.parent)
        if not all(source.fixed for source in definition_file.sources(pinned)):
            return None
    known = [material for material in used if material.digest is not None]
    wanted = {(bind.source, bind.target, bind.read_only) for bind in build.binds}
    for image in sorted(images, key=_when_made, reverse=True):
        if _same_inputs(image, identity, known, wanted):
            assert image.record is not None
            image.require_trusted()
            return BuiltImage(path=image.path, record=image.record, reused=True, read=True)
    return None


def _when_made(image: StoredImage) -> tuple[str, float]:
    """Return when a SIF was built, and when it was last used.

    The last use decides if both were built in the same second.
    """
    return (image.record.made.created if image.record else "", image.used)


def _same_inputs(
    image: StoredImage, identity: str, known: Sequence[Material], binds: set[tuple[str, str, bool]]
) -> bool:
    if image.record is None or image.record.made.definition != identity:
        return False
    used = image.record.made.materials
    names = {f"{source}:{target}:{'ro' if read_only else 'rw'}" for source, target, read_only in binds}
    bound = {material.name for material in used if material.what == "bind"}
    # If `build` has no binds, a SIF that was built with any binds fits, so `lock` uses the SIF of `image build --bind`.
    return (
        all(material in used for material in known)
        and (not names or names == bound)
        and sif.file_sha256(image.path) == image.record.sif.sha256
    )
