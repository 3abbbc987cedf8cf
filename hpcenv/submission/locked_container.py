"""The container of one run, which the lockfile names: its SIF, and how the nodes recognise this SIF.

Runs on: LOGIN NODE. Only submissions with a container import this module.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv.container import runtime
from hpcenv.errors import Command, EnvironmentUnreadable, Hint, ImageMismatch, ToolMissing, UsageError
from hpcenv.identity import sif, sif_check
from hpcenv.identity.overlay_check import FIELD
from hpcenv.image.reference import SifFile
from hpcenv.locking import overlay
from hpcenv.locking.environment import with_overlay
from hpcenv.locking.image_source import locked_sif, locked_source
from hpcenv.locking.same_tree import stands_for
from hpcenv.project import lockfile as lock_model
from hpcenv.project.lockfile import ContainerTable, Lockfile
from hpcenv.project.site_profile import Profile
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.project.store_config import StorePlace
from hpcenv.project.workspace import Workspace
from hpcenv.records.manifest import Environment, SifIdentity


@dataclass(frozen=True, kw_only=True)
class LockedSif:
    """The SIF that a run uses.

    Attributes:
        sha256: the hash of the SIF; empty without a SIF.
        identity: how the nodes recognise the SIF.
        overlay: how the nodes recognise a squashfs that is mounted over the SIF.
        same_tree: whether the SIF has other bytes than the locked SIF, but the same file tree.
        notes: what the user should know about differences.
    """

    sha256: str = ""
    identity: SifIdentity | None = None
    overlay: SifIdentity | None = None
    same_tree: bool = False
    notes: tuple[str, ...] = ()


def find_sif(workspace: Workspace, container: ContainerTable, *, lock: str) -> Path:
    """Return the path of the SIF that the lockfile names.

    Raises:
        ImageMismatch: the SIF is missing.
    """
    image = locked_sif(workspace, container)
    if not image.exists():
        hint = _command_to_make(container, lock)
        raise ImageMismatch(f"there is no SIF `{image}`", why="the lockfile names it", hint=hint)
    return image


def with_locked_overlay(environment: Environment, workspace: Workspace, container: ContainerTable) -> Environment:
    """Return a container's environment with the overlay of the lockfile, if the lockfile has an overlay.

    Raises:
        SpecError: hpcenv.toml names no overlay, or the locked overlay is not a squashfs with a target.
    """
    if container.overlay is None:
        return environment

    return with_overlay(environment, overlay.locked_overlay(workspace, container.overlay), workspace)


def with_wrapper(environment: Environment, profile: Profile | None) -> Environment:
    """Return a container's environment with the wrapper command through which the site starts programs."""
    if profile is None or not profile.entry_wrapper:
        return environment
    of = next(value for value in profile.used if value.kind == "entry-wrapper")
    origin = f"site profile {profile.name}, {of.reason}" + (f" ({of.source})" if of.source else "")
    return replace(environment, wrapper=profile.entry_wrapper, wrapper_origin=origin)


def program_of(named: str | None, profile: Profile | None, environ: Mapping[str, str]) -> str:
    """Return the program that starts containers; empty if no source names a program. Then the caller searches PATH.

    The program may exist only on the nodes, where a module provides it.

    Args:
        named: `--runtime`, or `runtime` of hpcenv.toml.

    Raises:
        UsageError: the value is not the name of a program and not an absolute path.
        ToolMissing: PATH does not have the program.
    """
    origin = "`runtime` of this submission or of hpcenv.toml"
    program = named or ""
    if not program and profile is not None:
        program, origin = profile.program, f"[runtime] in {profile.path}"
    if not program or os.path.isabs(program):
        return program
    if "/" in program or program.startswith("-"):
        raise UsageError(f"`{program}` is no program", why=origin, hint="give its name on PATH, or its absolute path")
    found = shutil.which(program, path=environ.get("PATH"))
    if found is None and (profile is None or not profile.modules):
        raise ToolMissing(
            f"`{program}` is not on PATH",
            why=f"{origin} names it",
            hint="give its absolute path there, or name the modules that provide it",
        )
    return found or program


def identify_sif(
    environment: Environment,
    locked: Lockfile,
    container: ContainerTable,
    place: StorePlace,
    cache: Path | None,
    *,
    lock: str,
) -> LockedSif:
    """Return the SIF's hash and identity.

    Args:
        place: the store of images. hpcenv may have built the SIF again there.
        cache: the user's folder for hashes of earlier runs.
        lock: name or path of the lockfile, for a hint.

    Raises:
        ImageMismatch: the SIF cannot be read; or the lockfile's policy requires the locked SIF, and this SIF has other
            bytes and another file tree.
    """
    image, wanted = environment.sif, container.sif
    hint = _command_to_make(container, lock)
    records = None if cache is None else sif_check.Records(cache / "sif", os.path.realpath(image))
    try:
        descriptor = os.open(image, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ImageMismatch(f"cannot read the SIF `{image}`", why=error.strerror, hint=hint) from error
    try:
        digest, identity = sif_check.identify(descriptor, records)
    finally:
        os.close(descriptor)
    over, notes = _identify_overlay(environment, locked, container, cache, lock=lock)
    found = LockedSif(sha256=digest, identity=identity, overlay=over, notes=notes)
    if digest == wanted.sha256:
        return found
    same_tree = stands_for(container, Path(image), digest, place=place, cache=cache)
    if same_tree:
        by = f" (of {wanted.built_with})" if wanted.built_with else ""
        note = f"{image} is used as the locked SIF{by}: its bytes differ, but its file tree is the same"
    elif lock_model.severities_of(locked).of("container.sif.sha256") == "must":
        raise ImageMismatch(
            f"`{image}` is not the locked SIF",
            why=f"its sha256 is {digest}, the lockfile says {wanted.sha256}",
            hint=_to_repair(container, lock),
        )
    else:
        note = f"{image} is not the locked SIF: sha256 {digest[:12]}... instead of {wanted.sha256[:12]}..."
    return replace(found, same_tree=same_tree, notes=(*notes, note))


def _identify_overlay(
    environment: Environment,
    locked: Lockfile,
    container: ContainerTable,
    cache: Path | None,
    *,
    lock: str,
) -> tuple[SifIdentity | None, tuple[str, ...]]:
    """Return the identity of the squashfs over the SIF (None if there is no overlay), and notes about the overlay."""
    if environment.overlay is None or container.overlay is None:
        return None, ()
    for bind in environment.binds:
        origin = bind.origin or "the binds of this submission"
        overlay.require_not_below(bind.target, environment.overlay.target, origin=origin)
    return overlay.require_locked(
        environment.overlay,
        container.overlay,
        cache,
        must=lock_model.severities_of(locked).of(FIELD) == "must",
        relock=Command("hpcenv", "lock", *(() if lock == DEFAULT_LOCK else ("--lock", lock))),
    )


def notes_on_sif(environment: Environment, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note if the container program is too old, or cannot read the compression of the SIF.

    This function may start the container program to find its version. The project may name this program, and the user
    must accept the program before a submission. So this function is not called while a run is planned.
    """
    if environment.kind != "sif":
        return ()
    old = runtime.too_old(environment.apptainer, environ)
    if old:
        return (f"{old}: the check of the nodes would fail",)
    path = Path(environment.sif)
    try:
        compression = sif.superblock(path, sif.read_header(path)).compression
    except (ImageMismatch, EnvironmentUnreadable):
        return ()  # for other kinds of file systems, the check of the nodes starts the container and reports problems
    unreadable = runtime.unreadable_here(compression, environ, environment.apptainer)
    return (f"{unreadable}: the check of the nodes would fail",) if unreadable else ()


def _to_repair(container: ContainerTable, lock: str) -> Hint:
    """Return a hint for a SIF that has changed."""
    command = _command_to_make(container, lock)
    if isinstance(locked_source(container), SifFile):
        return ("restore the locked file; to lock the changed file instead: ", command)
    if container.manifest_digest is None:
        return ("move it away, then: ", command)
    return (command, " moves it aside, and makes the locked one again")


def _command_to_make(container: ContainerTable, lock: str) -> Command:
    """Return the command that makes a missing SIF: a build of the locked image, or a new lock if no image is locked."""
    verb = ("lock",) if container.manifest_digest is None else ("image", "build")
    return Command("hpcenv", *verb, *(() if lock == DEFAULT_LOCK else ("--lock", lock)))
