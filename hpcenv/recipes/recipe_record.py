"""The request to `hpcenv image init` and the files that it wrote: `recipe.json` in the recipe's folder.

Runs on: LOGIN NODE.

The sha256 of each written file shows whether a person has edited the file since. `hpcenv image refresh` makes the
recipe again from the request.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv.errors import WouldOverwrite
from hpcenv.locking.pins.pin import PinSource
from hpcenv.records import files as record_files

RECORD = "recipe.json"
DEFAULT_DISTRIBUTION = "bookworm"


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """Packages that the image compiles.

    Attributes:
        packages: the packages, each as `NAME==VERSION`.
        tools: more packages that the build needs.
        base: an image with a compiler and the CUDA toolkit. If `base` is None, compilers come from apt and pip's index.
        gpu: the GPU to compile for, `h100`; None if it is not known.
    """

    packages: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    base: str | None = None
    gpu: str | None = None


@dataclass(frozen=True, kw_only=True)
class RecipeRequest:
    """What a user requests for a recipe. Paths are absolute here, and relative to the recipe's folder in `recipe.json`.

    Attributes:
        tag: the image's name, `NAME` or `NAME:TAG`. Without a tag, the tag of the combination is used.
        torch: a release. None means the locked release with `pylock`, and without `pylock` the newest release for this
            Python.
        cuda: a version such as `12.6`, or `cpu`. None means the CUDA of the locked packages with `pylock`, and without
            `pylock` the CUDA of the build on the default index.
        python: a version such as `3.11`; None for the distribution's Python.
        distribution: the distribution's name.
        base: `NAME[:TAG]@sha256:...`, `NAME:TAG` (resolved now) or a SIF; None for the official image. If the Python is
            not the distribution's Python, the base must contain the Python. The build checks this.
        packages: more Python packages, as requirements of pip: `transformers==4.51.0`. pip resolves them with torch.
        requirements: a requirements file that pip resolves with torch.
        apt: more packages of the distribution.
        pylock: uv.lock, pylock.toml or requirements with hashes. If `pylock` is None, pip resolves the packages now.
        extras, groups, package: the requested parts of `pylock`.
        build: packages to compile in the image.
    """

    tag: str = "train"
    torch: str | None = None
    cuda: str | None = None
    python: str | None = None
    distribution: str = DEFAULT_DISTRIBUTION
    base: str | None = None
    packages: tuple[str, ...] = ()
    requirements: str | None = None
    apt: tuple[str, ...] = ()
    pylock: str | None = None
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    package: str = ""
    build: BuildRequest = BuildRequest()

    @property
    def pins(self) -> PinSource | None:
        """The file of locked packages, and the requested parts of this file."""
        if self.pylock is None:
            return None
        return PinSource(path=Path(self.pylock), extras=self.extras, groups=self.groups, package=self.package)


@dataclass(frozen=True, kw_only=True)
class RecipeRecord:
    """The content of `recipe.json`.

    Attributes:
        request: the user's request, with the chosen torch, CUDA and Python.
        base: the base that the recipe names, `NAME@DIGEST`.
        files: the sha256 of each written file.
    """

    request: RecipeRequest
    base: str
    files: dict[str, str]
    schema: int = 1


def read_record(folder: Path) -> RecipeRecord | None:
    """Return the record of a recipe; None if the folder has no record.

    Raises:
        RecordInvalid: the file is not such a record.
    """
    if not os.path.lexists(folder / RECORD):
        return None
    record = record_files.load_record(RecipeRecord, folder / RECORD)
    return replace(record, request=_moved(record.request, lambda path: os.path.abspath(folder / path)))


def write_record(folder: Path, request: RecipeRequest, base: str, files: Mapping[str, str]) -> None:
    """Write `recipe.json`. `files` contains the name and the text of each file of the recipe."""
    relative = _moved(request, lambda path: os.path.relpath(path, folder))
    record = RecipeRecord(request=relative, base=base, files={name: _digest(text) for name, text in files.items()})
    record_files.save_record(record, folder / RECORD)


def _moved(request: RecipeRequest, move: Callable[[str], str]) -> RecipeRequest:
    """Return the request with its paths changed by a function."""
    base = move(request.base) if request.base is not None and request.base.endswith(".sif") else request.base
    pylock, requirements = (None if one is None else move(one) for one in (request.pylock, request.requirements))
    return replace(request, base=base, pylock=pylock, requirements=requirements)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def require_replaceable(folder: Path, files: Mapping[str, str], *, force: bool) -> None:
    """Refuse to replace a file that was edited, or that hpcenv did not write.

    Args:
        files: name and text of each file that will be written.
        force: replace even files that were edited, or that hpcenv did not write.

    Raises:
        WouldOverwrite: the call would replace such a file. A link or a folder in place of a file is never replaced.
        RecordInvalid: `recipe.json` is not a record of a recipe.
    """
    for name in (*sorted(files), RECORD):
        path = folder / name
        if os.path.lexists(path) and (not path.is_file() or path.is_symlink()):
            raise WouldOverwrite(f"`{path}` is not a plain file", hint="choose another folder with --output")
    if force:
        return
    record = read_record(folder)
    written = {} if record is None else record.files
    for name in sorted(files):
        path = folder / name
        now = path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else None
        if now is None or now == files[name] or written.get(name) == _digest(now):
            continue
        edited = name in written
        raise WouldOverwrite(
            f"`{path}` {'was edited' if edited else 'exists'}",
            why=f"{'after ' if edited else ''}`hpcenv image init` {'wrote it' if edited else 'did not write it'}",
            hint="choose another folder with --output, or give --force: your changes are then lost",
        )
