"""`hpcenv image build Dockerfile`: build a Dockerfile without docker, and put the SIF into the store.

Runs on: LOGIN NODE.

buildah and podman build every Dockerfile without a daemon and without root. hpcenv then converts their image to a SIF.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hpcenv import process
from hpcenv.errors import Command, SpecError, ToolFailed, ToolMissing
from hpcenv.image.pull import BuiltImage, ConvertOptions, ImageRequest, convert_image, resolve
from hpcenv.image.reference import LocalImage, Platform, parse_platform, parse_reference
from hpcenv.image.registry.source import Access
from hpcenv.image.store.store import Store
from hpcenv.progress import Event, OnEvent
from hpcenv.recipes import dockerfile

Engine = Literal["auto", "buildah", "podman"]
ENGINES: tuple[Engine, ...] = ("auto", "buildah", "podman")

_BUILD_SECONDS = 7200.0
_SAVE_SECONDS = 1800.0
# buildah and podman print this text if they cannot start a container for a command (seen with buildah 1.39 and podman
# 5.4 without cgroups).
_NO_CONTAINER = "error running container"
_WITHOUT_CONTAINER = (
    "where this machine cannot start containers, the environment variable BUILDAH_ISOLATION=chroot runs the commands "
    "of the Dockerfile without one (buildah-build(1), --isolation)"
)

# The minimum of free space for a finished image in the store's folder.
_LEAST_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class DockerfileBuild:
    """A Dockerfile and what its build may use.

    Attributes:
        path: the Dockerfile.
        name: the path as the user wrote it, for the store's list.
        context: the folder that the Dockerfile copies files from.
        engine: the program that builds; `auto` takes buildah, or podman if buildah is not installed.
        arguments: values for ARG.
        target: the stage to build; None for the last stage.
    """

    path: Path
    name: str
    context: Path
    engine: Engine = "auto"
    arguments: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    platform: Platform = field(default_factory=Platform)
    access: Access = field(default_factory=Access)


def is_dockerfile(text: str, name: str) -> bool:
    """Return whether a file is a Dockerfile. If it is not, it is a definition file."""
    if name.endswith(".def"):
        return False
    words = (line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    first = next((line[0].lower() for line in words), "")
    return first in ("from", "arg")


def build_dockerfile(
    build: DockerfileBuild, convert: ConvertOptions, store: Store, environ: Mapping[str, str], on_event: OnEvent
) -> BuiltImage:
    """Build a Dockerfile and put the SIF into the store.

    Args:
        build: the file and what its build may use.
        convert: how to convert an image of buildah or podman.
        store: where the SIF is stored.
        environ: the user's environment, for tools and temporary folders.
        on_event: called with the progress.

    Raises:
        ToolMissing: the engine is not installed.
        ToolFailed: the build failed.
        HpcenvError: as for the conversion of an image.
    """
    engine, program = _engine(build.engine, environ)
    on_event(Event(phase="note", what=f"{engine} builds {build.name}"))
    lease = f"dockerfile-{secrets.token_hex(8)}"
    with (
        store.lease(lease, purpose=f"builds {build.name}", timeout=60, on_event=on_event),
        store.scratch(_LEAST_BYTES, purpose="build the Dockerfile") as folder,
    ):
        archive = _archive(build, engine, program, folder, environ, on_event)
        request = ImageRequest(
            source=LocalImage(kind="oci-archive", path=str(archive)), platform=build.platform, access=build.access
        )
        image, open_blobs = resolve(request, on_event=on_event)
        # The archive is removed after this call. So the record names the Dockerfile, not the archive.
        named = replace(image, reference=build.name)
        converted = convert_image(named, open_blobs, convert, store=store, environ=environ, on_event=on_event)
    return BuiltImage(
        path=converted.path,
        record=converted.record,
        reused=converted.reused,
        read=not converted.reused,
        notes=converted.notes,
    )


def _engine(wanted: Engine, environ: Mapping[str, str]) -> tuple[Engine, str]:
    """Return the engine and its program."""
    candidates: tuple[Engine, ...] = ("buildah", "podman") if wanted == "auto" else (wanted,)
    for name in candidates:
        program = shutil.which(name, path=environ.get("PATH", os.defpath))
        if program is not None:
            return name, program
    if wanted == "auto":
        raise ToolMissing(
            "neither buildah nor podman is on PATH",
            why="one of them must build a Dockerfile; Apptainer builds definition files only",
            hint=(
                "install buildah or podman, or load its module\n",
                "or build the image on another machine, push it to a registry, and use ",
                Command("hpcenv", "image", "pull", "docker://HOST/NAME:TAG"),
                "\nor write a definition file, which Apptainer builds: ",
                Command("hpcenv", "image", "init", "--torch", "VERSION"),
            ),
        )
    raise ToolMissing(
        f"{wanted} is not on PATH",
        why=f"--engine {wanted} builds the Dockerfile with it",
        hint=f"install {wanted}, or load its module",
    )


def _archive(
    build: DockerfileBuild, engine: Engine, program: str, folder: Path, environ: Mapping[str, str], on_event: OnEvent
) -> Path:
    """Build with buildah or podman, and save the image as an archive."""
    name, archive = folder / "image-id", folder / "image.tar"
    # In their default format OCI, buildah and podman ignore SHELL, even in the base (buildah 1.39, podman 5.4).
    argv = [program, "build", "--format", "docker", "--file", str(build.path), "--iidfile", str(name)]
    if build.platform != parse_platform(f"linux/{os.uname().machine}"):
        # With --platform, buildah and podman contact the registry even for a base that they already have. Without a
        # network, this request fails only after a time-out.
        argv += ["--platform", str(build.platform)]
    argv += [word for key, value in build.arguments.items() for word in ("--build-arg", f"{key}={value}")]
    argv += ["--target", build.target] if build.target is not None else []
    argv += ["--tls-verify=false"] if _uses_plain_http(build) else []
    try:
        process.stream(
            [*argv, str(build.context)],
            on_line=lambda line: on_event(Event(phase="build", what=line)),
            timeout=_BUILD_SECONDS,
            env=environ,
            cwd=build.context,
        )
        image = name.read_text(encoding="utf-8").strip()
        save = {
            "buildah": [program, "push", image, f"oci-archive:{archive}"],
            "podman": [program, "save", "--format", "oci-archive", "--output", str(archive), image],
        }
        process.run(save[engine], timeout=_SAVE_SECONDS, env=environ)
        # The image stays in the engine's own storage, so that the next build can use its layers again. The user manages
        # this storage.
    except ToolFailed as error:
        if _NO_CONTAINER not in (error.why or ""):
            raise
        ways = (error.hint, _WITHOUT_CONTAINER) if error.hint else (_WITHOUT_CONTAINER,)
        raise error.changed(hint="\nor ".join(ways)) from error
    return archive


def _uses_plain_http(build: DockerfileBuild) -> bool:
    if not build.access.plain_http:
        return False  # in this case hpcenv does not need to read the Dockerfile
    parsed = dockerfile.parse(_text(build), origin=build.name, arguments=build.arguments)
    images = [stage.base for stage in parsed.stages if stage.parent is None and stage.base.lower() != "scratch"]
    return any(parse_reference(f"docker://{image}").registry in build.access.plain_http for image in images)


def _text(build: DockerfileBuild) -> str:
    try:
        return build.path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"`{build.path}` cannot be read", why=str(error), hint="check the path of the file") from error
