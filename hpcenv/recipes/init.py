"""`hpcenv image init`: write a Dockerfile and a definition file.

The user chooses the versions of torch, CUDA, Python and the distribution.

Runs on: LOGIN NODE. It asks a registry for the digest of the base, and pip's index for the packages if no lock is
given. With `--base REF@DIGEST` and `--pylock FILE` it contacts no server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.utils import canonicalize_name

from hpcenv.errors import ImageUnavailable, LockfileInvalid, SpecError, WouldOverwrite
from hpcenv.identity import sif
from hpcenv.image.reference import Platform, parse_reference
from hpcenv.image.registry import source
from hpcenv.image.registry.source import Access
from hpcenv.judge.compat.compat_table import Compat
from hpcenv.judge.compat.torch_builds import suggest_torch
from hpcenv.locking.pins.formats import read_pins
from hpcenv.locking.pins.pin import PinSource, marker_environment
from hpcenv.project import compatibility
from hpcenv.recipes import image_recipe
from hpcenv.recipes.combination import CPU, DISTRIBUTIONS, Combination, choose, has_cuda
from hpcenv.recipes.compiled_packages import (
    PackageBuild,
    check_tool,
    parse_request,
    require_image,
    tool_requirements,
)
from hpcenv.recipes.compiled_packages import arch_list as architectures
from hpcenv.recipes.image_recipe import BaseImage, ImageRecipe
from hpcenv.recipes.pinned_packages import PinnedPackage, check_pins, cuda_of_pins, torch_of_pins
from hpcenv.recipes.pip_resolution import find_installer, find_sources, find_wheels
from hpcenv.records import files as record_files

DEFAULT_DISTRIBUTION = "bookworm"


@dataclass(frozen=True, kw_only=True)
class WrittenRecipe:
    """A recipe that was written.

    Attributes:
        image: its name and tag.
        files: the files of the recipe.
        packages: number of locked packages.
        compiled: the packages that the build compiles, `NAME==VERSION`.
        arch_list: the GPU architectures that these packages are compiled for, TORCH_CUDA_ARCH_LIST.
        notes: sentences for the user.
    """

    folder: Path
    image: str
    torch: str
    cuda: str
    python: str
    os: str
    base: str
    files: tuple[Path, ...]
    packages: int
    compiled: tuple[str, ...] = ()
    arch_list: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """Packages that the image compiles.

    Attributes:
        packages: `NAME==VERSION` each.
        tools: more packages that their build needs.
        base: an image with a compiler and the CUDA toolkit; None to take compilers from apt and pip's index.
        gpu: the GPU to compile for, `h100`; None if it is not known.
    """

    packages: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    base: str | None = None
    gpu: str | None = None


def init(
    folder: Path,
    *,
    environ: Mapping[str, str],
    tag: str,
    torch: str | None = None,
    cuda: str | None = None,
    python: str | None = None,
    distribution: str = DEFAULT_DISTRIBUTION,
    pylock: PinSource | None = None,
    base: str | None = None,
    build: BuildRequest | None = None,
    plain_http: Sequence[str] = (),
    force: bool = False,
) -> WrittenRecipe:
    """Write a recipe.

    Args:
        folder: the folder for its files.
        environ: the user's environment; pip finds its configuration through it.
        tag: the image's name, `NAME` or `NAME:TAG`; without a tag, the tag of the combination is used.
        torch: a release; None for the locked release, or the newest release that runs on the Python.
        cuda: `12.6`, `cpu`, or None for the CUDA of the locked packages, or of the build on the default index.
        python: `3.11`, or None for the distribution's Python.
        distribution: the distribution's name.
        pylock: uv.lock, pylock.toml or requirements with hashes; None to ask pip's index now.
        base: `NAME[:TAG]@sha256:...`, `NAME:TAG` (resolved now) or a SIF; None for the official image. A base must
            contain the Python if it is not the distribution's Python; the build checks this.
        build: packages to compile in the image; None for none.
        plain_http: registries that are contacted without TLS; hpcenv.toml lists them, so they get no saved password.
        force: replace files that hpcenv did not write.

    Returns:
        The recipe.

    Raises:
        SpecError: the combination is impossible; the error names possible ones.
        FileUnusable, LockfileInvalid: the lock cannot be read, or is not a lock.
        ImageUnavailable: the base cannot be resolved.
        ToolFailed: pip found no packages.
        WouldOverwrite: a file exists that hpcenv did not write; nothing is written.
    """
    table = compatibility.table()
    pins = None if pylock is None else pins_of(pylock, python or _distribution_python(distribution))
    if pins is not None:
        torch, cuda = torch or torch_of_pins(pins), cuda or cuda_of_pins(pins)
    torch = torch or _newest(table, python or _distribution_python(distribution))
    combination = choose(table, torch=torch, cuda=cuda, python=python, distribution=distribution)
    # Checked before a registry is contacted.
    arch_list = _check_build(build, table, combination) if build is not None and build.packages else ""
    notes = [] if pins is None else [*check_pins(pins, combination)]
    found = find_base(
        base or combination.default_base, environ=environ, plain_http=plain_http, without_password=plain_http
    )
    if pins is None:
        pins, resolved = resolve(combination, environ)
        notes += [*resolved, *check_pins(pins, combination)]
    compiled = None
    if build is not None and build.packages:
        _require_separate(build, pins)
        compiled = _find_build(build, combination, pins, arch_list, environ=environ, plain_http=plain_http)
    name, _, version = tag.partition(":")
    recipe = ImageRecipe(
        name=name,
        tag=version,
        combination=combination,
        base=found,
        pins=tuple(pins),
        installer=find_installer(combination, environ),
        build=compiled,
        base_has_python=not combination.has_distribution_python,
    )
    return replace(write(recipe, folder, force=force), notes=(*notes, *_notes(recipe, is_official=base is None)))


def _notes(recipe: ImageRecipe, *, is_official: bool) -> list[str]:
    notes = []
    if recipe.base_has_python and not is_official:
        notes.append(f"the base must contain Python {recipe.combination.python}; the build checks that")
    if has_cuda(recipe.base.name) and recipe.combination.cuda != CPU:
        notes.append(
            f"the base {recipe.base.name} has CUDA, and torch's wheels contain CUDA too: "
            "an image of the distribution alone is several GB smaller (leave out --base)"
        )
    if recipe.base.is_sif:
        notes.append("no Dockerfile: docker cannot start from a SIF")
    if recipe.build is not None:
        notes.append(
            "what the compiled packages require is not known before the build: "
            "`hpcenv lock` names what is missing, and the lock for --pylock must contain it"
        )
    return notes


def _distribution_python(name: str) -> str:
    distribution = DISTRIBUTIONS.get(name)
    return distribution.python if distribution else "3.11"


def _newest(table: Compat, python: str) -> str:
    suggestions = suggest_torch(table, "", python=python)
    return suggestions[0].torch if suggestions else table.torches[0].version


def write(recipe: ImageRecipe, folder: Path, *, force: bool = False) -> WrittenRecipe:
    """Write all files of a recipe; write no file if one of them exists and hpcenv did not write it.

    Args:
        force: replace files that hpcenv did not write.

    Raises:
        WouldOverwrite: a file exists that hpcenv did not write.
    """
    files = image_recipe.render(recipe)
    _refuse_overwriting(folder, files, force=force)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        record_files.write_text(text, folder / name)
    combination, base = recipe.combination, recipe.base
    return WrittenRecipe(
        folder=folder,
        image=recipe.image,
        torch=combination.torch,
        cuda=combination.cuda,
        python=combination.python,
        os=combination.distribution.name,
        base=f"{base.name}@{base.digest}",
        files=tuple(folder / name for name in sorted(files)),
        packages=len(recipe.pins),
        compiled=() if recipe.build is None else tuple(f"{one.name}=={one.version}" for one in recipe.build.sources),
        arch_list="" if recipe.build is None else recipe.build.arch_list,
    )


def _refuse_overwriting(folder: Path, names: Mapping[str, str], *, force: bool) -> None:
    for name in sorted(names):
        path = folder / name
        if not os.path.lexists(path):
            continue
        if not path.is_file() or path.is_symlink():
            raise WouldOverwrite(f"`{path}` is not a plain file", hint="choose another folder with --output")
        if not force and not image_recipe.is_ours(path.read_text(encoding="utf-8", errors="replace")[:200]):
            raise WouldOverwrite(
                f"`{path}` exists",
                why="`hpcenv image init` did not write it",
                hint="choose another folder with --output, or give --force",
            )


# -- the base -------------------------------------------------------------------------------------------------------


def find_base(
    base: str, *, environ: Mapping[str, str], plain_http: Sequence[str] = (), without_password: Sequence[str] = ()
) -> BaseImage:
    """Return a base with its digest: the given digest, or the digest that the registry names now.

    Args:
        base: an image reference, or the path of a SIF.
        environ: the user's environment, for credentials.
        plain_http: registries that are contacted without TLS.
        without_password: registries in `plain_http` to which no saved password is sent.

    Raises:
        SpecError: `base` is neither an image reference nor a SIF.
        ImageUnavailable: `base` has no digest, and its registry does not answer.
        EnvironmentUnreadable: the SIF cannot be read.
    """
    if base.endswith(".sif"):
        path = os.path.abspath(base)
        sif.read_header(path)
        return BaseImage(reference=path, digest=f"sha256:{sif.file_sha256(path)}", is_sif=True)
    reference = parse_reference(base if "://" in base else f"docker://{base}")
    # Docker and Apptainer read a name without a registry as a name on Docker Hub.
    name = f"{reference.registry}/{reference.repository}"
    if reference.digest is not None:
        return BaseImage(reference=name, tag=reference.tag or "", digest=reference.digest)
    try:
        access = Access(plain_http=tuple(plain_http), without_password=tuple(without_password), environ=environ)
        image = source.resolve(reference, access, platform=Platform())
    except ImageUnavailable as error:
        with_digest = f"name the digest, so that no registry is contacted: --base {base}@sha256:..."
        before = (*error.hint_parts, "\nor ") if error.hint_parts else ()
        raise error.changed(hint=(*before, with_digest)) from error
    return BaseImage(reference=name, tag=reference.tag or "", digest=image.index_digest or image.manifest_digest)


# -- the packages ---------------------------------------------------------------------------------------------------


def pins_of(source: PinSource, python: str) -> tuple[PinnedPackage, ...]:
    """Return the packages of a uv.lock, pylock.toml or requirements file, for Linux on x86_64.

    Args:
        source: the file, and which parts of it are wanted.
        python: `3.11`; packages for other Python versions are left out.

    Raises:
        FileUnusable: the file cannot be read.
        LockfileInvalid: a package in the file cannot be pinned by hash.
    """
    facts = {"python.version": f"{python}.0", "system.machine": "x86_64", "python.implementation": "cpython"}
    pins = []
    lock = source.path
    for pin in read_pins(source, environment=marker_environment(facts)):
        if pin.manager == "conda":
            raise LockfileInvalid(
                f"`{lock}` pins packages of conda, and the image installs with pip",
                why=f"for example {pin.name} {pin.version} {pin.build}",
                hint="lock the Python packages for pip: `pip lock` or `uv export --format pylock.toml`",
            )
        if not pin.required:
            continue
        if pin.version is None:
            raise LockfileInvalid(
                f"`{lock}` does not pin {pin.name} to a file",
                why=f"{pin.source}: a folder, a repository or a range has no sha256",
                hint="build a wheel from it, and lock the wheel",
            )
        hashes = tuple(one for one in pin.hashes if one.startswith("sha256:"))
        pins.append(PinnedPackage(name=pin.name, version=pin.version, hashes=hashes, files=pin.filenames))
    if not pins:
        raise LockfileInvalid(f"`{lock}` pins no package for Python {python}")
    return tuple(pins)


def resolve(combination: Combination, environ: Mapping[str, str]) -> tuple[tuple[PinnedPackage, ...], tuple[str, ...]]:
    """Ask the index that pip is configured for about wheels of torch, NumPy and their requirements.

    Returns:
        The packages, and notes for the user.

    Raises:
        ToolFailed: pip found no wheels.
    """
    pins = find_wheels(
        (combination.requirement, combination.numpy), combination, environ, hint=_how_to_lock(combination)
    )
    notes = ["pip resolved the packages now, from its index: commit requirements.lock"]
    if combination.python != f"{sys.version_info[0]}.{sys.version_info[1]}":
        notes.append(
            f"pip evaluates markers for its own Python, not for {combination.python}: "
            "if that matters, give a lock with --pylock"
        )
    return pins, tuple(notes)


def _how_to_lock(combination: Combination) -> str:
    local = combination.requirement.partition("+")[2]
    elsewhere = f"; builds `+{local}` are on another index, which pip must be configured for" if local else ""
    return f"check `pip config list`{elsewhere},\nor give your own lock: --pylock FILE"


# -- packages to compile --------------------------------------------------------------------------------------------


def _check_build(request: BuildRequest, table: Compat, combination: Combination) -> str:
    """Refuse packages that cannot be compiled, and return TORCH_CUDA_ARCH_LIST. Needs no network."""
    for text in request.packages:
        parse_request(text)
    for name in request.tools:
        check_tool(name)
    require_image(combination, request.base)
    return architectures(table, combination, request.gpu)


def _find_build(
    request: BuildRequest,
    combination: Combination,
    pins: Sequence[PinnedPackage],
    arch_list: str,
    *,
    environ: Mapping[str, str],
    plain_http: Sequence[str],
) -> PackageBuild:
    """Return what is needed to compile the packages: their source archives, the tools, and the image to compile in."""
    has_wheels = request.base is None and combination.cuda != CPU
    base = ""
    if request.base is not None:
        found = find_base(request.base, environ=environ, plain_http=plain_http, without_password=plain_http)
        base = f"{found.name}@{found.digest}"
    tools = tool_requirements(combination, request.tools, with_toolkit=has_wheels)
    hint = "check `pip config list`; --build-base IMAGE takes compiler and CUDA toolkit from an image"
    # The image already has these packages: the build must not install another version of them.
    found_tools = find_wheels(tools, combination, environ, hint=hint, constraints=pins)
    return PackageBuild(
        sources=find_sources([parse_request(text) for text in request.packages], environ),
        tools=found_tools,
        arch_list=arch_list,
        base=base,
        has_wheels=has_wheels,
    )


def _require_separate(request: BuildRequest, pins: Sequence[PinnedPackage]) -> None:
    """Refuse a package that must be compiled and is also locked as a wheel."""
    locked: dict[str, str] = {canonicalize_name(pin.name): pin.version for pin in pins}
    for name, version in map(parse_request, request.packages):
        if name in locked:
            raise SpecError(
                f"{name} is to be compiled, and it is locked as a wheel ({locked[name]})",
                why="the image can contain it once",
                hint=f"lock without {name}, or leave out --build {name}=={version}",
            )
