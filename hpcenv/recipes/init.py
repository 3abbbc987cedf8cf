"""`hpcenv image init`: write a Dockerfile and a definition file.

The user chooses the versions of torch, CUDA, Python and the distribution, and names more packages.

Runs on: LOGIN NODE. The command asks a registry for the digest of the base, and pip's index for the packages if no lock
is given. With `--base REF@DIGEST` and `--pylock FILE` the command contacts no server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.utils import canonicalize_name

from hpcenv.errors import ImageUnavailable, LockfileInvalid, SpecError
from hpcenv.identity import sif
from hpcenv.image.reference import Platform, parse_reference
from hpcenv.image.registry import source
from hpcenv.image.registry.source import Access
from hpcenv.judge.compat.compat_table import Compat
from hpcenv.judge.compat.libraries import PAIRS, check_pair, fitting_pairs
from hpcenv.judge.compat.torch_builds import suggest_torch
from hpcenv.locking.pins import formats
from hpcenv.locking.pins.pin import PinSource, marker_environment
from hpcenv.project import compatibility, toml_files
from hpcenv.recipes import image_recipe
from hpcenv.recipes.combination import (
    CPU,
    DISTRIBUTIONS,
    Combination,
    choose,
    has_cuda,
    named_distribution,
    require_distribution,
)
from hpcenv.recipes.compiled_packages import (
    PackageBuild,
    check_tool,
    parse_request,
    require_image,
    tool_requirements,
)
from hpcenv.recipes.compiled_packages import arch_list as architectures
from hpcenv.recipes.image_lint import PACKAGED_TROUBLES, parse_troubles, troubles_of
from hpcenv.recipes.image_recipe import BaseImage, ImageRecipe
from hpcenv.recipes.pinned_packages import PinnedPackage, check_pins, cuda_of_pins, require_names, torch_of_pins
from hpcenv.recipes.pip_resolution import find_installer, find_sources, find_wheels
from hpcenv.recipes.recipe_record import RECORD, BuildRequest, RecipeRequest, require_replaceable, write_record
from hpcenv.records import files as record_files


@dataclass(frozen=True, kw_only=True)
class WrittenRecipe:
    """A recipe that was written.

    Attributes:
        image: name and tag of the image.
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
class PreparedRecipe:
    """A recipe that is not written yet.

    Attributes:
        request: the request, with the chosen torch, CUDA and Python.
        notes: sentences for the user.
    """

    recipe: ImageRecipe
    request: RecipeRequest
    notes: tuple[str, ...]

    @property
    def files(self) -> dict[str, str]:
        """Name and text of each file."""
        return image_recipe.render(self.recipe)


def prepare(request: RecipeRequest, *, environ: Mapping[str, str], plain_http: Sequence[str] = ()) -> PreparedRecipe:
    """Find the base and the packages of a recipe. This function writes no file.

    Args:
        request: the user's request.
        environ: the user's environment, with the variables that configure pip.
        plain_http: registries that are contacted without TLS. Because hpcenv.toml lists these registries, they get no
            saved password.

    Raises:
        SpecError: the combination is impossible; the error names possible combinations.
        FileUnusable, LockfileInvalid: the lock cannot be read, or is not a lock.
        ImageUnavailable: the base cannot be resolved.
        ToolFailed: pip found no packages.
    """
    table, build = compatibility.table(), request.build
    default_python = request.python or _distribution_python(request.distribution)
    pins, notes = None, []
    if request.pins is not None:
        file = formats.open_pins(request.pins)
        pins, notes = pins_of(file, default_python), [*file.notes]
        torch, cuda = request.torch or torch_of_pins(pins), request.cuda or cuda_of_pins(pins)
    else:
        torch, cuda = _with_requirements(request, default_python)
    torch = torch or _newest(table, default_python)
    combination = choose(table, torch=torch, cuda=cuda, python=request.python, distribution=request.distribution)
    # These checks come before a registry is contacted.
    require_distribution(combination, request.base or "")
    require_distribution(combination, build.base or "")
    arch_list = _check_build(build, table, combination) if build.packages else ""
    if pins is not None:
        notes += check_pins(pins, combination)
    found = find_base(
        request.base or combination.default_base, environ=environ, plain_http=plain_http, without_password=plain_http
    )
    if pins is None:
        pins, resolved = resolve(combination, environ, request, table)
        notes += [*resolved, *check_pins(pins, combination)]
        request = replace(request, torch=torch, cuda=combination.cuda, python=combination.python)
    compiled = None
    if build.packages:
        _require_separate(build, pins)
        compiled = _find_build(build, combination, pins, arch_list, environ=environ, plain_http=plain_http)
    notes += [*pair_notes(pins, combination.torch, table), *_trouble_notes(pins)]
    name, _, version = request.tag.partition(":")
    recipe = ImageRecipe(
        name=name,
        tag=version,
        combination=combination,
        base=found,
        apt=request.apt,
        pins=tuple(pins),
        installer=find_installer(combination, environ),
        build=compiled,
        base_has_python=not combination.has_distribution_python,
    )
    notes += _notes(recipe, is_official=request.base is None)
    return PreparedRecipe(recipe=recipe, request=request, notes=tuple(notes))


def _with_requirements(request: RecipeRequest, python: str) -> tuple[str | None, str | None]:
    """Check the requested packages.

    Return the torch and CUDA that are requested, or that the requirements file pins.
    """
    require_names(request.packages)
    if request.requirements is None:
        return request.torch, request.cuda
    source = PinSource(path=Path(request.requirements))
    torch = next(
        (
            pin.version
            for pin in formats.read_pins(source, environment=_image_environment(python))
            if pin.name == "torch"
        ),
        None,
    )
    if torch is None:
        return request.torch, request.cuda
    pinned = PinnedPackage(name="torch", version=torch, hashes=())
    return request.torch or torch_of_pins((pinned,)), request.cuda or cuda_of_pins((pinned,))


def _notes(recipe: ImageRecipe, *, is_official: bool) -> list[str]:
    notes = []
    if recipe.base_has_python and not is_official:
        notes.append(f"the base must contain Python {recipe.combination.python}; the build checks that")
    if named_distribution(recipe.base.name) is None:
        distribution = recipe.combination.distribution.name
        notes.append(f"the name of the base does not say whether it is {distribution}; the build checks this")
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


def write(prepared: PreparedRecipe, folder: Path, *, force: bool = False) -> WrittenRecipe:
    """Write all files of a recipe. If a file in the folder was edited, or hpcenv did not write it, write no file.

    Args:
        force: replace files that were edited, or that hpcenv did not write.

    Raises:
        SpecError: a name or value cannot be written safely into these files.
        WouldOverwrite: a file was edited, or hpcenv did not write it.
    """
    recipe = prepared.recipe
    files = prepared.files
    require_replaceable(folder, files, force=force)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        record_files.write_text(text, folder / name)
    combination = recipe.combination
    write_record(folder, prepared.request, recipe.base.pinned, files)
    return WrittenRecipe(
        folder=folder,
        image=recipe.image,
        torch=combination.torch,
        cuda=combination.cuda,
        python=combination.python,
        os=combination.distribution.name,
        base=recipe.base.pinned,
        files=tuple(folder / name for name in sorted((*files, RECORD))),
        packages=len(recipe.pins),
        compiled=() if recipe.build is None else tuple(f"{one.name}=={one.version}" for one in recipe.build.sources),
        arch_list="" if recipe.build is None else recipe.build.arch_list,
        notes=prepared.notes,
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
        SpecError: `base` is not an image reference and not a SIF.
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


def pins_of(file: formats.PinFile, python: str) -> tuple[PinnedPackage, ...]:
    """Return the packages of a uv.lock, pylock.toml or requirements file, for Linux on x86_64.

    Args:
        file: the file, and the requested parts of this file.
        python: the Python version, for example `3.11`. Packages for other Python versions are left out.

    Raises:
        LockfileInvalid: a package in the file cannot be pinned by hash.
    """
    pins = []
    lock = file.path
    for pin in formats.pins_of(file, environment=_image_environment(python)):
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


def _image_environment(python: str) -> Mapping[str, str]:
    """Return the values for markers in an image with this Python."""
    facts = {"python.version": f"{python}.0", "system.machine": "x86_64", "python.implementation": "cpython"}
    return marker_environment(facts)


def resolve(
    combination: Combination, environ: Mapping[str, str], request: RecipeRequest, table: Compat
) -> tuple[tuple[PinnedPackage, ...], tuple[str, ...]]:
    """Find wheels of torch, NumPy, more packages and their requirements on the index that pip is configured for.

    torchvision and torchaudio can only have the version that the compatibility table names for torch. If the table
    names no version for this torch, pip chooses the version.

    Returns:
        The packages, and notes for the user.

    Raises:
        ToolFailed: pip found no wheels.
    """
    fitting = fitting_pairs(table, combination.torch)
    file = () if request.requirements is None else (f"--requirement={request.requirements}",)
    pins = find_wheels(
        (combination.requirement, combination.numpy, *request.packages, *file),
        combination,
        environ,
        otherwise="give your own lock: --pylock FILE",
        limits=tuple(f"{name}=={version}" for name, version in fitting.items()),
    )
    notes = ["pip resolved the packages now, from its index: commit requirements.lock"]
    if combination.python != f"{sys.version_info[0]}.{sys.version_info[1]}":
        notes.append(
            f"pip evaluates markers for its own Python, not for {combination.python}: "
            "if that matters, give a lock with --pylock"
        )
    return pins, tuple(notes)


def pair_notes(pins: Sequence[PinnedPackage], torch: str, table: Compat) -> list[str]:
    """Return notes on torchvision and torchaudio: whether their versions fit this torch, by the compatibility table."""
    notes = []
    for pin in pins:
        name = canonicalize_name(pin.name)
        if name in PAIRS:
            judged = check_pair(table, name, pin.version, torch).judgement
            reason = "" if judged.result == "match" else judged.why
            notes.append(judged.what + (f" ({reason})" if reason else "") + (f": {judged.hint}" if judged.hint else ""))
    return notes


def _trouble_notes(pins: Sequence[PinnedPackage]) -> list[str]:
    """Return a note for each package with known trouble; `hpcenv image lint` reports it in the finished image, too."""
    troubles = parse_troubles(toml_files.read(PACKAGED_TROUBLES, error=SpecError))
    versions: dict[str, str | None] = {canonicalize_name(pin.name): pin.version for pin in pins}
    return [
        f"{name} {versions[name]} has known trouble: {one.why}; {one.hint} ({one.source})"
        for name, one in troubles_of(troubles, versions)
    ]


# -- packages to compile --------------------------------------------------------------------------------------------


def _check_build(request: BuildRequest, table: Compat, combination: Combination) -> str:
    """Refuse packages that cannot be compiled, and return TORCH_CUDA_ARCH_LIST. This function needs no network."""
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
    """Return the source archives, the tools and the image that are needed to compile the packages."""
    has_wheels = request.base is None and combination.cuda != CPU
    base = ""
    if request.base is not None:
        found = find_base(request.base, environ=environ, plain_http=plain_http, without_password=plain_http)
        base = f"{found.name}@{found.digest}"
    tools = tool_requirements(combination, request.tools, with_toolkit=has_wheels)
    otherwise = "take compiler and CUDA toolkit from an image: --build-base IMAGE"
    # The image already has these packages, so the build must not install another version of them.
    found_tools = find_wheels(tools, combination, environ, otherwise=otherwise, constraints=pins)
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
