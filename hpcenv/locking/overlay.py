"""The overlay over an image: hpcenv finds it, checks it and identifies it (docs/decisions/0035).

Runs on: LOGIN NODE. Only projects with an `overlay` import this module.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcenv.container import bare_image
from hpcenv.errors import Command, HpcenvError, ImageMismatch, SpecError
from hpcenv.identity import bind_content, overlay_check, sif_check
from hpcenv.image.content.tree import tree_digest
from hpcenv.image.convert import squashfs_reader
from hpcenv.locking.environment import container_environment
from hpcenv.project.lockfile import OverlayTable
from hpcenv.project.spec import split_overlay
from hpcenv.project.workspace import Workspace
from hpcenv.records.manifest import Environment, Overlay, OverlayUse, SifIdentity
from hpcenv.text import listed

_KEY = "`overlay` in hpcenv.toml"
# An overlay with one of these names at its top is a virtual or conda environment, so its interpreter must be started.
_OF_VENV, _OF_CONDA = "pyvenv.cfg", "conda-meta"
_LONGEST_CFG = 1 << 16
_NAMED = 10


@dataclass(frozen=True, kw_only=True)
class FoundOverlay:
    """The overlay that hpcenv.toml names, in its present state.

    Attributes:
        overlay: how the overlay is mounted.
        interpreter: the image's interpreter that a virtual environment starts; empty for any other overlay.
        version: the version of the Python that made the environment, if it is known.
    """

    overlay: Overlay
    interpreter: str = ""
    version: str = ""


# -- finding it -----------------------------------------------------------------------------


def find(workspace: Workspace) -> FoundOverlay:
    """Return the overlay that hpcenv.toml names, after a check of its file. No program is started.

    Raises:
        SpecError: the overlay does not exist, or is not a squashfs with a target.
    """
    path, target = _named(workspace)
    if workspace.project.on_host:
        raise SpecError(
            "`overlay` needs an image",
            why=f'`image = "host"` in {workspace.spec.name}: there is no image over which it can be mounted',
            hint="name the image, or remove `overlay`",
        )
    _require_squashfs(workspace, path, target)
    if target is None:
        raise SpecError(
            f"the overlay `{path}` has no target",
            why=f"hpcenv mounts a squashfs with packages at a path of the container, not over the whole image: {_KEY}",
            hint=f"name a path that is the same on every machine: {_written(workspace, '/opt/packages')}",
        )
    place = os.path.normpath(target)
    _refuse_binds_below(workspace, place)
    names = _names_in(path)
    use: OverlayUse = "venv" if {_OF_VENV, _OF_CONDA} & names else "packages"
    _require_plain(place)
    overlay = Overlay(source=os.path.realpath(path), use=use, target=place)
    python = workspace.project.python
    if use == "venv" and python is not None and not python.startswith(f"{place}/"):
        raise SpecError(
            f"the virtual environment `{path}` would not be used",
            why=f'`python = "{python}"` in {workspace.spec.name} names another interpreter',
            hint=f"remove `python`, or name a Python below {place}/bin",
        )
    interpreter, version = _interpreter_of(path) if _OF_VENV in names else ("", "")
    return FoundOverlay(overlay=overlay, interpreter=interpreter, version=version)


def locked_overlay(workspace: Workspace, locked: OverlayTable) -> Overlay:
    """Return how a locked overlay is mounted. `require_locked` compares the overlay's content with the lockfile.

    Raises:
        SpecError: hpcenv.toml names no overlay, or the locked overlay is not a squashfs with a target.
    """
    if workspace.project.overlay is None:
        raise SpecError(
            "the lockfile has an overlay, but hpcenv.toml names no overlay",
            why=f"the path of an overlay is not in the lockfile, it must be in {workspace.spec}",
            hint='write `overlay = "PATH"` there, or lock again without it',
        )
    path, _ = _named(workspace)
    if locked.target is None or not locked.can_be_mounted:
        raise SpecError(
            f"the locked overlay cannot be mounted: it is {locked.in_words}",
            why="hpcenv mounts a squashfs at a path of the container; the lockfile was made before 2026-11-25",
            hint=(
                "pack the folder with the packages: ",
                Command("mksquashfs", "DIR", "x.sqsh"),
                f"\nthen write {_overlay_line('x.sqsh', locked.target or '/TARGET')} in {workspace.spec.name}, and: ",
                Command("hpcenv", "lock"),
            ),
        )
    place = locked.target
    python_path = f"{place}:{locked.python_path}" if locked.python_path else place
    return Overlay(
        source=os.path.realpath(path),
        use=locked.use,
        target=place,
        python_path=python_path if locked.use == "packages" else "",
    )


def _named(workspace: Workspace) -> tuple[str, str | None]:
    path, target = split_overlay(workspace.project.overlay or "")
    return os.path.join(workspace.root, os.path.expanduser(path)), target


def _require_plain(place: str) -> None:
    """Refuse a target with a character at which PATH, PYTHONPATH or an option of a container runtime is split."""
    if {":", ","} & set(place):
        raise SpecError(
            f"nothing can be mounted at `{place}`",
            why="PATH and PYTHONPATH are split at `:`, and options of container runtimes at `,`",
            hint="give the overlay a target without `:` and `,`: PATH:TARGET",
        )


def _require_squashfs(workspace: Workspace, path: str, target: str | None) -> None:
    try:
        if os.path.isdir(path):
            raise _is_folder(workspace, path, target)
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise SpecError(f"the overlay `{path}` cannot be read", why=f"{error.strerror}; it is {_KEY}") from error
    if magic != b"hsqs":
        raise SpecError(
            f"the overlay `{path}` is not a squashfs",
            why=f"it is {_KEY}; an overlay that can be written (ext3) changes, so it has no fixed identity",
            hint=("pack the folder with its packages: ", Command("mksquashfs", "FOLDER", f"{Path(path).stem}.sqsh")),
        )


def _is_folder(workspace: Workspace, path: str, target: str | None) -> SpecError:
    # The commands of a virtual environment contain the path at which the environment was made.
    own = os.path.realpath(path) if _OF_VENV in os.listdir(path) else "/opt/packages"
    folder = os.path.normpath(path)
    packed = f"{folder}.sqsh"
    line = _overlay_line(os.path.relpath(packed, workspace.root), target or own)
    return SpecError(
        f"the overlay `{path}` is a folder",
        why=f"a squashfs is one file, and every node can check its identity without reading it: {_KEY}",
        hint=(
            "pack it: ",
            Command("mksquashfs", folder, packed),
            f"\nthen write {line} in {workspace.spec.name}",
        ),
    )


def _written(workspace: Workspace, target: str) -> str:
    return _overlay_line(split_overlay(workspace.project.overlay or "")[0], target)


def _overlay_line(path: str, target: str) -> str:
    """Return the line of hpcenv.toml."""
    return f"overlay = {json.dumps(f'{path}:{target}')}"


def _names_in(path: str) -> frozenset[str]:
    """Return the names at the top of an overlay."""
    entries = squashfs_reader.read_tree(path, offset=0, size=os.path.getsize(path), content=False)
    tops = (entry.path.strip(b"/").split(b"/", 1)[0] for entry in entries)
    return frozenset(os.fsdecode(name) for name in tops)


def _interpreter_of(path: str) -> tuple[str, str]:
    """Return the image's interpreter that a virtual environment names, and the version of the Python that made it."""
    content = squashfs_reader.read_file(
        path, _OF_VENV.encode(), offset=0, size=os.path.getsize(path), limit=_LONGEST_CFG
    )
    pairs = (line.partition("=") for line in content.decode("utf-8", "replace").splitlines())
    values = {key.strip().lower(): value.strip() for key, _, value in pairs}
    home = values.get("home", "")
    if not home.startswith("/"):
        raise SpecError(f"{_OF_VENV} in `{path}` names no interpreter", why=f"`home = {home}`")
    return values.get("executable") or f"{home}/python3", values.get("version") or values.get("version_info") or ""


def _refuse_binds_below(workspace: Workspace, place: str) -> None:
    for bind in workspace.project.bind:
        require_not_below(bind.target or bind.source, place, origin=f"[[bind]] in {workspace.spec.name}")


def require_not_below(target: str, place: str, *, origin: str) -> None:
    """Refuse a bind below the target of an overlay.

    Raises:
        SpecError: the bind would hide locked files.
    """
    path = os.path.normpath(target)
    if path == place or path.startswith(place.rstrip("/") + "/"):
        raise SpecError(
            f"the bind at `{path}` would hide a part of the overlay at `{place}`",
            why=f"it is in {origin}; it would hide locked files",
            hint="choose another target for the bind or for the overlay",
        )


# -- its identity -----------------------------------------------------------------------------


def identify(overlay: Overlay, python_path: str) -> OverlayTable:
    """Return the identity of an overlay for the lockfile.

    Args:
        overlay: as `find` gives it.
        python_path: the image's PYTHONPATH.

    Raises:
        SpecError: the overlay cannot be read.
    """
    try:
        sha256, _ = _file_identity(overlay.source, None)
        size = os.path.getsize(overlay.source)
        tree = tree_digest(squashfs_reader.read_tree(overlay.source, offset=0, size=size))
    except (OSError, ValueError) as error:
        raise SpecError(f"the overlay `{overlay.source}` cannot be locked", why=str(error)) from error
    own = python_path if overlay.use == "packages" else ""
    return OverlayTable(
        form="squashfs",
        use=overlay.use,
        target=overlay.target,
        sha256=sha256,
        size=size,
        tree_sha256=tree,
        python_path=own or None,
    )


def _file_identity(path: str, cache: Path | None) -> tuple[str, SifIdentity | None]:
    records = None if cache is None else sif_check.Records(cache / "sif", os.path.realpath(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return overlay_check.identify(descriptor, records)
    finally:
        os.close(descriptor)


def current(workspace: Workspace, locked: OverlayTable) -> tuple[str, str]:
    """Return the path and the present digest of a project's locked overlay.

    The overlay may be a folder, because an older lockfile may name a folder.

    Raises:
        OSError, ValueError, HpcenvError: the overlay cannot be read.
    """
    source = os.path.realpath(_named(workspace)[0])
    if locked.form == "folder":
        return source, bind_content.content_digest(source, compiled=True)
    return source, _file_identity(source, None)[0]


def require_locked(
    overlay: Overlay, locked: OverlayTable, cache: Path | None, *, must: bool, relock: Command
) -> tuple[SifIdentity | None, tuple[str, ...]]:
    """Return the overlay's identity, which the nodes must find too, and a note if the digest is not the locked digest.

    Args:
        must: whether the lockfile's policy requires the locked overlay.
        relock: the command that locks the overlay that is there now.

    Raises:
        ImageMismatch: the overlay does not exist or cannot be read, or it is not the locked overlay and `must` is set.
    """
    try:
        digest, identity = _file_identity(overlay.source, cache)
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise ImageMismatch(
            f"the overlay `{overlay.source}` cannot be read",
            why=f"{reason}; the lockfile has its digest, and {_KEY} says where it is",
            hint="get the locked file, or correct its path there",
        ) from error
    if digest == locked.digest:
        return identity, ()
    if must:
        raise ImageMismatch(
            f"`{overlay.source}` is not the locked overlay",
            why=f"its digest is {digest}, the lockfile says {locked.digest}",
            hint=("restore the locked file; to lock this file: ", relock),
        )
    note = f"{overlay.source} is not the locked overlay: {digest[:19]}... instead of {locked.digest[:19]}..."
    return identity, (note,)


# -- the source of each package -----------------------------------------------------------------


def base_environment(workspace: Workspace, image: Path, found: FoundOverlay) -> Environment:
    """Return the environment of the image without the overlay."""
    environment = container_environment(workspace, image, gpus=False)
    if found.overlay.use != "venv":
        return environment
    return replace(environment, python=found.interpreter or "python3")


def require_interpreter(
    found: FoundOverlay, answer: Mapping[str, Any] | None, why: str, environment: Environment
) -> None:
    """Refuse a virtual environment if the image does not have the Python of that environment.

    Args:
        answer: the probe's answer in the image without overlay; None if the probe could not be started.
        why: the reason why the probe could not be started.
        environment: the environment of the image.

    Raises:
        SpecError: the virtual environment was made on the host, or for a different image.
    """
    if not found.interpreter:
        return
    make = _making(found.overlay, environment)
    version = None if answer is None else str(answer["values"].get("python.version", ""))
    if version is None:
        raise SpecError(
            f"the virtual environment `{found.overlay.source}` was not made for this image",
            why=f"its {_OF_VENV} names {found.interpreter}, which does not start in the image: {why}",
            hint=("make it with the Python of the image, in an empty FOLDER: ", *make),
        )
    if _minor(found.version) and _minor(found.version) != _minor(version):
        raise SpecError(
            f"the virtual environment `{found.overlay.source}` has another Python than the image",
            why=f"it was made with {found.version}, and {found.interpreter} in the image is {version}",
            hint=("make it again, in an empty FOLDER: ", *make),
        )


def _making(overlay: Overlay, environment: Environment) -> tuple[str | Command, ...]:
    """Return a part of a hint: the commands that make a virtual environment with the image's Python."""
    # The files in `bin` contain the path at which the environment was made. So the environment is made at the same path
    # at which it is mounted later.
    program = os.path.basename(environment.apptainer)
    start = (program, "exec", "-B", f"FOLDER:{overlay.target}", environment.sif)
    make = Command(*start, "python3", "-m", "venv", "--system-site-packages", overlay.target)
    return make, "; then install into it, and: ", Command("mksquashfs", "FOLDER", os.path.basename(overlay.source))


def require_python(overlay: Overlay, environment: Environment, environ: Mapping[str, str]) -> None:
    """Refuse a virtual environment over an image without `python3`. The nodes read the image alone with this program.

    Args:
        overlay: as `find` gives it.
        environment: the environment of the image.
        environ: environment of this process.

    Raises:
        SpecError: the image has no `python3`.
    """
    if overlay.use != "venv":
        return
    try:
        bare_image.paths_with_code(replace(environment, overlay=overlay), ("/",), environ)
    except (HpcenvError, ValueError) as error:
        raise SpecError(
            f"the overlay `{overlay.source}` cannot be used with this image",
            why=f"the check of the nodes starts `python3` of {environment.sif} without the overlay: "
            f"{getattr(error, 'why', None) or error}",
            hint="use an image that has python3 on its PATH",
        ) from error


def _minor(version: str) -> str:
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else ""


def python_path_of(answer: Mapping[str, Any] | None) -> str:
    """Return the image's PYTHONPATH, from the probe's answer in the image without overlay."""
    return "" if answer is None else str(answer["values"].get("python.path-variable") or "")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of a package from the overlay. `hides` is the version in the image that it hides, or empty."""

    hides: str = ""


def origins(overlay: Overlay, answer: Mapping[str, Any], base: Mapping[str, Any] | None) -> dict[str, Origin]:
    """Return the packages that come from the overlay. Pure.

    Args:
        answer: the probe's answer in the image with the overlay.
        base: the probe's answer in the image without overlay; None if the probe could not be started.
    """
    in_image = {package["name"]: package for package in (base or {}).get("packages", ())}
    prefix = str(answer["values"].get("python.prefix", "/"))
    found = {}
    for package in answer["packages"]:
        below = in_image.get(package["name"])
        if _is_of_overlay(overlay, package, prefix):
            found[package["name"]] = Origin(hides="" if below is None else str(below["version"]))
    return found


def _is_of_overlay(overlay: Overlay, package: Mapping[str, Any], prefix: str) -> bool:
    location = str(package.get("location", ""))
    if location.startswith("{"):
        return False  # the package is in the image, or in the user's home
    path = os.path.normpath(os.path.join(prefix, location))
    return path == overlay.target or path.startswith(overlay.target.rstrip("/") + "/")


def notes(found: Mapping[str, Origin]) -> Sequence[str]:
    """Return notes on the packages of an overlay."""
    hidden = [f"{name} {origin.hides}" for name, origin in sorted(found.items()) if origin.hides]
    lines = [f"packages from the overlay: {listed(sorted(found), _NAMED) or 'none'}"]
    return [*lines, f"the overlay hides packages of the image: {listed(hidden, _NAMED)}"] if hidden else lines
