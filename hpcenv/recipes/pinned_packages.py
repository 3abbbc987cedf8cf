"""Packages that an image installs by hash, and whether they fit its torch, CUDA and Python. Pure; needs `packaging`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from hpcenv.errors import Command, Hint, SpecError
from hpcenv.recipes.combination import CPU, Combination, wheel_tags

if TYPE_CHECKING:
    from packaging.tags import Tag

_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,199}")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
# An error lists this many problems.
_MOST_PROBLEMS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedPackage:
    """A package with one version.

    Attributes:
        hashes: `sha256:...` of every file that pip may install.
        files: the names of these files, if they are known.
    """

    name: str
    version: str
    hashes: tuple[str, ...]
    files: tuple[str, ...] = ()


def require_names(requirements: Sequence[str]) -> None:
    """Check requirements that a user names for an image, before pip sees them.

    Raises:
        SpecError: a text names torch, or is not the requirement of a package, for example a path, a URL or an option.
    """
    for text in requirements:
        try:
            found = Requirement(text)
        except InvalidRequirement:
            found = None
        if found is None or found.url:
            raise SpecError(
                f"`{text[:100]}` is not a package of an index",
                hint="--with takes NAME, NAME==VERSION or NAME>=VERSION: --with transformers==4.51.0",
            )
        if canonicalize_name(found.name) == "torch":
            raise SpecError("--with names torch", hint="name its release: --torch 2.13.0")


def check_pins(pins: Sequence[PinnedPackage], combination: Combination) -> tuple[str, ...]:
    """Check that locked packages can be installed in an image of a combination.

    Returns:
        Notes for the user.

    Raises:
        SpecError: torch is missing or has another version, a package has no hash, or a package has no wheel for this
            Python and C library.
    """
    with_hashes: Hint = (
        "lock them again, with hashes: `pip lock`, `uv export`, ",
        Command("hpcenv", "export", "pylock"),
    )
    for problems, hint in (
        (unusable(pins), with_hashes),
        (_source_only(pins), _TO_BUILD),
        (_without_wheel(pins, combination), _OTHER_PYTHON),
    ):
        if problems:
            more = len(problems) - _MOST_PROBLEMS
            raise SpecError(
                "the locked packages cannot be installed by hash",
                why="\n".join(problems[:_MOST_PROBLEMS]) + (f"\nand {more} more" if more > 0 else ""),
                hint=hint,
            )
    torch = _torch(pins)
    if torch is None:
        # The virtual environment of the image does not see the packages of the base.
        raise SpecError(
            f"the lock does not contain torch, and torch {combination.torch} is required",
            why="the image installs only what is locked",
            hint=f"add {combination.requirement} to what is locked, and lock again",
        )
    locked, _, local = torch.version.partition("+")
    if locked != combination.torch:
        raise SpecError(
            f"the lock has torch {torch.version}, and torch {combination.torch} is required",
            hint=f"--torch {locked}, or lock again",
        )
    return (*_check_build(local, pins, combination), *_index_notes(pins), *_check_numpy(pins, combination))


_TO_BUILD = (
    "make a wheel of it (`pip wheel --no-deps NAME==VERSION`), and lock the wheel;\n"
    "or leave the package out of the lock, and let the image compile it: --build NAME==VERSION"
)
_OTHER_PYTHON = "take a Python that has wheels (--python 3.12, or --os ubuntu24.04), or lock again for this Python"


def other_index(pins: Sequence[PinnedPackage]) -> str:
    """Return the name of PyTorch's index that has the locked torch, for example `cu128`; empty for the default index.

    The default index accepts no version with a local label (PEP 440). So a version with a label is on the index with
    the name of this label.
    """
    torch = _torch(pins)
    return "" if torch is None else torch.version.partition("+")[2]


def _index_notes(pins: Sequence[PinnedPackage]) -> tuple[str, ...]:
    index = other_index(pins)
    if not index:
        return ()
    return (f"the locked torch is on PyTorch's index {index}, not on the default index: site/pip.conf must name it",)


def _check_numpy(pins: Sequence[PinnedPackage], combination: Combination) -> tuple[str, ...]:
    """Return a note if NumPy is missing. torch does not require NumPy, but parts of torch fail without NumPy."""
    if any(canonicalize_name(pin.name) == "numpy" for pin in pins):
        return ()
    note = "the lock does not contain numpy: Tensor.numpy() and torch.distributed's functions for Python objects fail "
    return (f"{note}without it; if you need them, add `{combination.numpy}` to what is locked, and lock again",)


def _check_build(local: str, pins: Sequence[PinnedPackage], combination: Combination) -> tuple[str, ...]:
    """Compare the CUDA of the locked torch with the CUDA of the combination."""
    if local == combination.requirement.partition("+")[2]:
        return ()
    cuda = cuda_of_pins(pins)
    if cuda == combination.cuda and local:
        return ()
    if cuda is None or cuda == combination.cuda:
        return (f"the name of the locked torch {combination.torch} does not say which CUDA it was built for",)
    built_for = cuda if cuda == CPU else f"CUDA {cuda}"
    raise SpecError(
        f"the locked torch is built for {built_for}, and {combination.cuda} is required",
        why=f"its version is {combination.torch}{'+' + local if local else ''}",
        hint=f"--cuda {cuda}, or lock {combination.requirement} from an index that has it",
    )


def torch_of_pins(pins: Sequence[PinnedPackage]) -> str | None:
    """Return the locked torch release; None if torch is not locked."""
    torch = _torch(pins)
    return None if torch is None else torch.version.partition("+")[0]


def _torch(pins: Sequence[PinnedPackage]) -> PinnedPackage | None:
    return next((pin for pin in pins if canonicalize_name(pin.name) == "torch"), None)


def cuda_of_pins(pins: Sequence[PinnedPackage]) -> str | None:
    """Return the CUDA runtime version of the locked packages, or `cpu`; None if it is not known."""
    versions: dict[str, str] = {canonicalize_name(pin.name): pin.version for pin in pins}
    local = versions.get("torch", "").partition("+")[2]
    if local == CPU:
        return CPU
    match = re.fullmatch(r"cu(\d+)(\d)", local)
    if match:
        return f"{match[1]}.{match[2]}"
    for end in ("", "-cu13", "-cu12", "-cu11"):
        runtime = versions.get(f"nvidia-cuda-runtime{end}")
        if runtime is not None:
            return ".".join(runtime.split(".")[:2])
    return None


def can_be_pinned(name: str, version: str) -> bool:
    """Return whether a name and a version are valid, so that a requirements file may contain them."""
    if not _NAME.fullmatch(canonicalize_name(name)) or not _VERSION.fullmatch(version):
        return False
    try:
        Version(version)
    except InvalidVersion:
        return False
    return True


def unusable(pins: Sequence[PinnedPackage]) -> list[str]:
    """Return a problem for each package with a name, version or hash that a requirements file cannot contain."""
    problems = []
    for pin in pins:
        if not _NAME.fullmatch(canonicalize_name(pin.name)):
            problems.append(f"{pin.name[:60]!r} is not a package name")
        elif not can_be_pinned(pin.name, pin.version):
            problems.append(f"{pin.name}: {pin.version[:60]!r} is not one version")
        elif not pin.hashes or not all(_SHA256.fullmatch(one) for one in pin.hashes):
            problems.append(f"{pin.name} {pin.version} has no sha256")
    return problems


def _source_only(pins: Sequence[PinnedPackage]) -> list[str]:
    """Return a problem for each package that is locked without any wheel."""
    return [
        f"{pin.name} {pin.version} is locked as a source archive only: {pin.files[0][:80]}"
        for pin in pins
        if pin.files and not any(file.endswith(".whl") for file in pin.files)
    ]


def _without_wheel(pins: Sequence[PinnedPackage], combination: Combination) -> list[str]:
    """Return a problem for each package without a wheel for this Python and C library."""
    tags = wheel_tags(combination)
    return [
        f"{pin.name} {pin.version} has no wheel for Python {combination.python} on {combination.distribution.name}: "
        + ", ".join(file[:80] for file in pin.files[:2])
        for pin in pins
        if pin.files and not any(_is_wheel_for(file, tags) for file in pin.files)
    ]


def _is_wheel_for(filename: str, tags: frozenset[Tag]) -> bool:
    try:
        return not parse_wheel_filename(filename)[3].isdisjoint(tags)
    except (InvalidWheelFilename, InvalidVersion):
        return False


def requirements(pins: Sequence[PinnedPackage]) -> str:
    """Return the text of requirements.lock for `pip install --no-deps --require-hashes`."""
    head = "# Installed with: pip install --no-deps --require-hashes --only-binary :all: -r requirements.lock\n"
    return head + pinned_lines(pins)


def pinned_lines(pins: Sequence[PinnedPackage]) -> str:
    """Return one requirement with hashes for each package, sorted by name."""
    lines = []
    for pin in sorted(pins, key=lambda one: canonicalize_name(one.name)):
        hashes = "".join(f" \\\n    --hash={one}" for one in sorted(set(pin.hashes)))
        lines.append(f"{canonicalize_name(pin.name)}=={pin.version}{hashes}\n")
    return "".join(lines)
