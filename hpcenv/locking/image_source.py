"""The images that hpcenv.toml and a lockfile name, parsed.

Runs on: LOGIN NODE. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpcenv.errors import SpecError
from hpcenv.image.reference import (
    DefinitionFile,
    ImageSource,
    LocalImage,
    Platform,
    Reference,
    SifFile,
    parse_platform,
    parse_source,
)
from hpcenv.project.lockfile import ContainerTable
from hpcenv.project.workspace import Workspace

__all__ = ["absolute", "locked_sif", "locked_source", "project_platform", "project_source", "registry_name", "within"]


def project_source(workspace: Workspace) -> ImageSource:
    """Return the image that `image` in hpcenv.toml names. A path stays as the user wrote it.

    Raises:
        SpecError: the value names no image.
    """
    try:
        return parse_source(workspace.project.image)
    except SpecError as error:
        why = "\n".join(filter(None, (error.why, f"it is `image` in {workspace.spec}")))
        raise SpecError(error.what, why=why, hint=error.hint_parts) from None


def project_platform(workspace: Workspace) -> Platform:
    """Return `platform` of hpcenv.toml.

    Raises:
        SpecError: the value is not a platform.
    """
    try:
        return parse_platform(workspace.project.platform)
    except SpecError as error:
        raise SpecError(error.what, why=f"it is `platform` in {workspace.spec}", hint=error.hint_parts) from None


def registry_name(container: ContainerTable) -> str | None:
    """Return the locked image's name for docker and podman, HOST/NAME@sha256:DIGEST; None if it is not in a registry.

    Raises:
        SpecError: the reference in the lockfile is invalid.
    """
    source = locked_source(container)
    if not isinstance(source, Reference) or container.manifest_digest is None:
        return None
    return f"{source.registry}/{source.repository}@{container.manifest_digest}"


def locked_source(container: ContainerTable) -> ImageSource:
    """Return the image that a lockfile names.

    Raises:
        SpecError: the reference in the lockfile is invalid.
    """
    return parse_source(container.reference)


def locked_sif(workspace: Workspace, container: ContainerTable) -> Path:
    """Return the path of the SIF that a lockfile names: in the store, or in the project."""
    source = locked_source(container)
    if isinstance(source, SifFile):
        return within(workspace, source)
    return workspace.store / "images" / f"{container.digest.replace(':', '-')}.sif"


def within(workspace: Workspace, source: LocalImage | SifFile | DefinitionFile) -> Path:
    """Return the absolute path of an image file. A relative path begins at the project folder."""
    return workspace.root / Path(source.path).expanduser()


def absolute(workspace: Workspace, source: LocalImage) -> LocalImage:
    """Return the same image with an absolute path."""
    return replace(source, path=str(within(workspace, source)))
