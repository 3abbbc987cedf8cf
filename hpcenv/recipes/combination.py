"""Combinations of torch, CUDA, Python and distribution that an image can have. Pure; needs `packaging` only.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.version import Version

from hpcenv.errors import SpecError
from hpcenv.judge.compat.compat_table import Compat, TorchRelease
from hpcenv.judge.compat.torch_builds import check_python, installs_on

CPU = "cpu"
_PYTHON = re.compile(r"3\.\d{1,2}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """A Linux distribution that images start from.

    Attributes:
        codename: `VERSION_CODENAME` in the distribution's /etc/os-release.
        release: the distribution with its number, as in names of images, but without dots: `debian12`.
        image: the official image of the distribution.
        python: the Python version of the distribution's package `python3`.
        python_image: the official image of the distribution with a chosen Python; `{python}` stands for its version.
            Empty if there is no such image.
        glibc: the version of its C library. Only wheels for this version or an older version run.
        fabric: packages with the user-space libraries of InfiniBand and RoCE.
        old_pip: whether its pip is too old for `--report` and `--python` (options since pip 22.2 and 22.3). Then the
            recipe installs a newer pip.
    """

    name: str
    codename: str
    release: str
    image: str
    python: str
    python_image: str
    glibc: tuple[int, int]
    fabric: tuple[str, ...]
    old_pip: bool = False


# Names from the distributions' package lists, read 2026-11-20. librdmacm1 became librdmacm1t64 with Debian's move to
# a 64-bit time_t (trixie, Ubuntu 24.04), also on amd64. The pip of Ubuntu 22.04 is 22.0.2.
DISTRIBUTIONS = {
    one.name: one
    for one in (
        Distribution(
            name="bookworm",
            codename="bookworm",
            release="debian12",
            image="debian:bookworm-slim",
            python="3.11",
            python_image="python:{python}-slim-bookworm",
            glibc=(2, 36),
            fabric=("libibverbs1", "ibverbs-providers", "librdmacm1"),
        ),
        Distribution(
            name="trixie",
            codename="trixie",
            release="debian13",
            image="debian:trixie-slim",
            python="3.13",
            python_image="python:{python}-slim-trixie",
            glibc=(2, 41),
            fabric=("libibverbs1", "ibverbs-providers", "librdmacm1t64"),
        ),
        Distribution(
            name="ubuntu22.04",
            codename="jammy",
            release="ubuntu2204",
            image="ubuntu:22.04",
            python="3.10",
            python_image="",
            glibc=(2, 35),
            fabric=("libibverbs1", "ibverbs-providers", "librdmacm1"),
            old_pip=True,
        ),
        Distribution(
            name="ubuntu24.04",
            codename="noble",
            release="ubuntu2404",
            image="ubuntu:24.04",
            python="3.12",
            python_image="",
            glibc=(2, 39),
            fabric=("libibverbs1", "ibverbs-providers", "librdmacm1t64"),
        ),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """A torch release, a CUDA release, a Python version and a distribution that work together.

    Attributes:
        cuda: the CUDA runtime version of the torch build, for example `12.6`, or `cpu`.
        requirement: the requirement for pip. The local part, such as `+cu126`, selects a build that is not on the
            default index.
    """

    torch: str
    cuda: str
    python: str
    distribution: Distribution
    requirement: str

    @property
    def numpy(self) -> str:
        """The requirement for NumPy, which torch uses but does not require.

        Without NumPy, `Tensor.numpy()` fails with "Numpy is not available", and so does
        `torch.distributed.broadcast_object_list` (seen with torch 2.14.1 on 2026-11-23). torch 2.3.0 is the first
        release for NumPy 2 (pytorch/pytorch issue 132179, 2024-07-31).
        """
        return "numpy" if Version(self.torch) >= Version("2.3") else "numpy<2"

    @property
    def tag(self) -> str:
        """The image tag: `vTORCH-cudaX.Y-OS`, or `vTORCH-cpu-OS`."""
        return f"v{self.torch}-{self.cuda if self.cuda == CPU else f'cuda{self.cuda}'}-{self.distribution.name}"

    @property
    def has_distribution_python(self) -> bool:
        """Whether the Python of this combination is the distribution's package `python3`."""
        return self.python == self.distribution.python

    @property
    def default_base(self) -> str:
        """The official image to start from, `NAME:TAG`."""
        if self.has_distribution_python:
            return self.distribution.image
        return self.distribution.python_image.format(python=self.python)


def choose(compat: Compat, *, torch: str, cuda: str | None, python: str | None, distribution: str) -> Combination:
    """Check a combination of torch, CUDA, Python and distribution.

    Args:
        compat: the compatibility table.
        torch: a release, for example `2.13.0`.
        cuda: a CUDA runtime version such as `12.6`, or `cpu`. None chooses the build on the default index.
        python: a Python version such as `3.11`; None for the distribution's Python.
        distribution: name of a `Distribution`.

    Returns:
        The complete combination.

    Raises:
        SpecError: the combination is impossible or unknown; the error names possible combinations.
    """
    chosen = DISTRIBUTIONS.get(distribution)
    if chosen is None:
        raise SpecError(
            f"hpcenv has no recipe for the distribution `{distribution}`", hint=one_of("--os", DISTRIBUTIONS)
        )
    release = next((one for one in compat.torches if one.version == torch), None)
    if release is None:
        known = [one.version for one in compat.torches]
        raise SpecError(
            f"torch `{torch}` is not in the compatibility table",
            why=f"{compat.origin} contains {', '.join(known)}",
            hint=one_of("--torch", known[:4]),
        )
    cuda = _checked_cuda(compat, release, cuda or release.pypi)
    python = _checked_python(compat, release, python or chosen.python, chosen)
    requirement = _requirement(release, cuda)
    return Combination(torch=torch, cuda=cuda, python=python, distribution=chosen, requirement=requirement)


# A distribution with its release, such as `ubuntu20.04` or `rocky9`. `leap2024` and `rocky-7b` are ordinary names.
_RELEASE = re.compile(
    r"(?<![a-z])(?:ubuntu[12]\d\.?(?:04|10)|debian(?:8|9|1\d)|fedora[2-4]\d|alpine3(?:\.\d+)*|amazonlinux(?:2023|2)"
    r"|azurelinux[23](?:\.\d+)*|(?:alma|rocky)(?:linux)?(?:[89]|10)(?:\.\d+)*"
    r"|(?:oracle(?:linux)?|centos|rhel|ubi)(?:[5-9]|10)(?:\.\d+)*|el(?:[5-9]|10)|sles1[0-6](?:\.\d)?"
    r"|(?:opensuse|leap)(?:15|16|42)(?:\.\d)?)(?![a-z\d])"
)
# Names of distributions and of their releases, without a number. Most of them are ordinary words, too.
_NAME = re.compile(
    r"bookworm|trixie|jammy|noble|jessie|stretch|buster|bullseye|forky|xenial|bionic|focal"
    r"|(?:alma|rocky|oracle)(?:linux)?|(?:amazon|arch|azure)linux"
    r"|alpine|centos|fedora|opensuse|rhel|sles|tumbleweed|ubi"
)


def named_distribution(image: str) -> str | None:
    """Return the distribution in the name of an image. If hpcenv has a recipe for it, this is a `Distribution.name`.

    Examples: `cuda:12.6.3-base-ubuntu22.04` is ubuntu22.04, `debian:12-slim` is bookworm, `rocky:9` is rocky9.
    A name without a number counts only as a whole word of the tag, or if it is the whole last part of the name:
    `debian:bookworm-slim` is bookworm, and `lab/focal-loss:1.0` is not focal. The name of a folder or a registry does
    not count. None if the name says no distribution.
    """
    name = image.rsplit("/", 1)[-1].partition("@")[0].lower().removesuffix(".sif")
    last, _, tag = name.partition(":")
    words: list[str] = _RELEASE.findall(re.sub(r"(?<=[a-z])[:_-]+(?=\d)", "", name))
    words += [word for word in (last, *re.findall(r"[a-z0-9]+", tag)) if _NAME.fullmatch(word)]
    known = {word: one.name for one in DISTRIBUTIONS.values() for word in (one.codename, one.release)}
    found = [known.get(word.replace(".", ""), word) for word in words]
    return next((one for one in found if one in DISTRIBUTIONS), found[0] if found else None)


def require_distribution(combination: Combination, base: str) -> None:
    """Refuse a base if its name contains another distribution, which has other apt packages and another Python.

    Args:
        base: an image; empty for the official image. If its name contains no distribution, it is accepted here, and the
            build compares the distribution.

    Raises:
        SpecError: the base has another distribution.
    """
    found = named_distribution(base)
    if found is None or found == combination.distribution.name:
        return
    what = f"the base `{base[:200]}` is {found}, and the recipe is for {combination.distribution.name}"
    other = DISTRIBUTIONS.get(found)
    if other is None:
        raise SpecError(
            what, why=f"hpcenv has no recipe for {found}", hint=f"take a base of one of: {', '.join(DISTRIBUTIONS)}"
        )
    raise SpecError(
        what,
        why=f"{found} has Python {other.python} and its own names of apt packages",
        hint=f"--os {found}, or another --base",
    )


def has_cuda(image: str) -> bool:
    """Return whether an image of nvidia/cuda contains CUDA's libraries. torch's wheels contain them, too.

    The images with `base` tags contain only cudart (README of nvidia/cuda on its registry, read 2026-11-23).
    """
    match = re.search(r"(?:^|/)nvidia/cuda(?::([^@]*))?(?:@|$)", image.partition("://")[2] or image)
    return match is not None and "-base" not in (match[1] or "")


def one_of(option: str, values: Iterable[str]) -> str:
    """Return a hint that lists the values of an option."""
    return f"{option} takes one of: {', '.join(values)}"


def _checked_cuda(compat: Compat, release: TorchRelease, cuda: str) -> str:
    if cuda == CPU or cuda in release.builds:
        return cuda
    others = [
        f"torch {one.version} has such a build"
        for one in compat.torches
        if cuda in one.builds and one.version != release.version
    ]
    raise SpecError(
        f"there is no build of torch {release.version} for CUDA {cuda}",
        why="; ".join([f"source: {release.source}", *others[:2]]),
        hint=one_of("--cuda", (*release.builds, CPU)),
    )


def _checked_python(compat: Compat, release: TorchRelease, python: str, distribution: Distribution) -> str:
    if not _PYTHON.fullmatch(python):
        raise SpecError(f"`{python}` is not a Python version", hint="--python takes, for example, 3.11")
    judged = check_python(compat, release, python)
    if judged.result != "match":
        other = next((one for one in compat.torches if installs_on(one, python)), None)
        instead = f", or --torch {other.version}" if other is not None else ""
        first, last = release.python
        hint = f"take Python {first} to {last}{instead}"
        raise SpecError(judged.what, why=judged.why, hint=hint)
    if python != distribution.python and not distribution.python_image:
        fitting = next((one.name for one in DISTRIBUTIONS.values() if one.python == python), "bookworm")
        raise SpecError(
            f"{distribution.name} has Python {distribution.python}, not {python}",
            why="there is no official image of it with another Python",
            hint=f"--python {distribution.python}, or --os {fitting}",
        )
    return python


def _requirement(release: TorchRelease, cuda: str) -> str:
    """Return the requirement. If the build is not on the default index, it has a local part (`+cu126`, `+cpu`)."""
    if cuda == release.pypi:
        return f"torch=={release.version}"
    return f"torch=={release.version}+{CPU if cuda == CPU else 'cu' + cuda.replace('.', '')}"


def platforms(distribution: Distribution) -> tuple[str, ...]:
    """Return the platform tags of wheels that run on a distribution, newest first (PEP 600; x86_64)."""
    major, minor = distribution.glibc
    names = [f"manylinux_{major}_{n}_x86_64" for n in range(minor, 4, -1)]
    return (*names, "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64")


def wheel_tags(combination: Combination) -> frozenset[Tag]:
    """Return the tags of the wheels that an image of this combination can install."""
    version = tuple(int(part) for part in combination.python.split("."))
    names = platforms(combination.distribution)
    interpreter = f"cp{version[0]}{version[1]}"
    tags = (*cpython_tags(version, platforms=names), *compatible_tags(version, interpreter, names))
    return frozenset(tags)
