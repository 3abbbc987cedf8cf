"""A Dockerfile and an Apptainer definition file that make the same image. Pure; standard library and `packaging`.

Runs on: LOGIN NODE.

Both run the same shell lines, so they can be compared by eye and by test. Two stages: `packages` installs the locked
wheels into /opt/venv, `final` holds what runs. What an image is made from:

    base        an image by digest, or a SIF on disk
    system      Python of the distribution (unless the base brings it), and the user land of InfiniBand and RoCE
    packages    requirements.lock: NAME==VERSION --hash=sha256:..., wheels only

No package index or mirror is named. pip and apt take their own configuration: that of the base image, or the site's
files (`SITE_FILES`), which are mounted at /mnt while a command runs: as build secrets of docker and podman, by
`--bind` of Apptainer. They are in no layer and in no SIF.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from hpcenv.errors import SpecError
from hpcenv.model.compat import Compat, TorchRelease, numbers

CPU = "cpu"

# Where an image made by hpcenv keeps what its lock needs.
RECORDS = "/usr/share/hpcenv"
REPORT = f"{RECORDS}/pip-report.json"
REQUIREMENTS = f"{RECORDS}/requirements.lock"
UNPROVED = f"{RECORDS}/requirements.unproved.txt"
UNPROVED_REPORT = f"{RECORDS}/pip-report-unproved.json"
SYSTEM_PACKAGES = f"{RECORDS}/dpkg-packages.txt"
VENV = "/opt/venv"

# The site's own configuration, mounted at /mnt (every base has it: Filesystem Hierarchy Standard 3.0, 3.12).
SITE = "/mnt"
SITE_FILES = {
    "pip.conf": "pip: index, proxy, credentials",
    "apt.sources": "apt: mirrors, instead of those of the base image",
    "apt.conf": "apt: proxy and other settings",
    "ca.crt": "certificates of your site, for pip and apt over https",
}

# Not 1000, which bases give to a person of their own (ubuntu 24.04).
USER_ID = 10001

_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,199}")
_PYTHON = re.compile(r"3\.\d{1,2}")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
_BASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_/-]{0,254}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./@+-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A distribution that images are made from.

    Attributes:
        image: its official image.
        python: the Python that it packages.
        python_image: official image of another Python on it, with `{python}`; empty where there is none.
        glibc: its C library, which decides the wheels that run.
        fabric: packages with the user land of InfiniBand and RoCE.
    """

    name: str
    image: str
    python: str
    python_image: str
    glibc: tuple[int, int]
    fabric: tuple[str, ...]


# Names from the distributions' package lists, read 2026-11-20. librdmacm1 became librdmacm1t64 with Debian's move to
# a 64-bit time_t (trixie, Ubuntu 24.04), also on amd64. Left out: ubuntu22.04, whose pip 22.0 has no `--report`.
SYSTEMS = {
    one.name: one
    for one in (
        System(
            name="bookworm",
            image="debian:bookworm-slim",
            python="3.11",
            python_image="python:{python}-slim-bookworm",
            glibc=(2, 36),
            fabric=("libibverbs1", "ibverbs-providers", "librdmacm1"),
        ),
        System(
            name="trixie",
            image="debian:trixie-slim",
            python="3.13",
            python_image="python:{python}-slim-trixie",
            glibc=(2, 41),
            fabric=("libibverbs1", "ibverbs-providers", "librdmacm1t64"),
        ),
        System(
            name="ubuntu24.04",
            image="ubuntu:24.04",
            python="3.12",
            python_image="",
            glibc=(2, 39),
            fabric=("libibverbs1", "ibverbs-providers", "librdmacm1t64"),
        ),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A combination that the compatibility table knows.

    Attributes:
        cuda: `12.6`, or `cpu`.
        requirement: what pip is asked for; the local part picks the build where the default index has another.
    """

    torch: str
    cuda: str
    python: str
    system: System
    requirement: str

    @property
    def tag(self) -> str:
        """`vTORCH-cudaX.Y-OS`, or `vTORCH-cpu-OS`."""
        return f"v{self.torch}-{self.cuda if self.cuda == CPU else f'cuda{self.cuda}'}-{self.system.name}"

    @property
    def own_python(self) -> bool:
        """Whether the distribution packages this Python."""
        return self.python == self.system.python


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """What an image is made from.

    Attributes:
        reference: repository with its registry, without tag; or the path of a SIF.
        tag: what was resolved, for people.
        digest: of the image, or of the SIF as a file.
        kind: `docker` for an image of a registry, `sif` for a file.
    """

    reference: str
    tag: str = ""
    digest: str
    kind: str = "docker"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """A package with the sha256 of every file that may be installed; `files` are their names where known."""

    name: str
    version: str
    hashes: tuple[str, ...]
    files: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that decides the files of a recipe.

    Attributes:
        name: the image's name, without tag.
        system_packages: more packages for apt.
        base_has_python: whether the base brings the Python that is asked for.
        unproved: packages whose wheel is not known by hash; for `hpcenv image rebuild` only.
        environment: more variables.
        remarks: lines for the head of both files.
        verb: which command writes it.
    """

    name: str
    choice: Choice
    base: Base
    pins: tuple[Pin, ...]
    system_packages: tuple[str, ...] = ()
    base_has_python: bool = False
    unproved: tuple[Pin, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()
    verb: str = "init"


# -- choosing -------------------------------------------------------------------------------------------------------


def choose(compat: Compat, *, torch: str, cuda: str | None, python: str | None, system: str) -> Choice:
    """Check a combination of torch, CUDA, Python and distribution.

    Args:
        compat: the compatibility table.
        torch: release, `2.13.0`.
        cuda: `12.6`, `cpu`, or None for that of the default index.
        python: `3.11`, or None for the distribution's own.
        system: name of a `System`.

    Raises:
        SpecError: it is not possible, or not known; what is possible is named.
    """
    found = SYSTEMS.get(system)
    if found is None:
        raise SpecError(f"`{system}` is no distribution that hpcenv makes images from", hint=_one_of("--os", SYSTEMS))
    release = next((one for one in compat.torches if one.version == torch), None)
    if release is None:
        known = [one.version for one in compat.torches]
        raise SpecError(
            f"torch `{torch}` is not in the compatibility table",
            why=f"{compat.origin} knows {', '.join(known)}",
            hint=_one_of("--torch", known[:4]) + ", or give a newer table with --compat-file",
        )
    cuda = _checked_cuda(compat, release, cuda or release.pypi)
    python = _checked_python(compat, release, python or found.python, found)
    return Choice(torch=torch, cuda=cuda, python=python, system=found, requirement=_requirement(release, cuda))


def _one_of(option: str, values: Iterable[str]) -> str:
    return f"{option} takes one of: {', '.join(values)}"


def _checked_cuda(compat: Compat, release: TorchRelease, cuda: str) -> str:
    if cuda == CPU or cuda in release.builds:
        return cuda
    others = [
        f"torch {one.version} has one"
        for one in compat.torches
        if cuda in one.builds and one.version != release.version
    ]
    raise SpecError(
        f"there is no build of torch {release.version} for CUDA {cuda}",
        why="; ".join([f"source: {release.source}", *others[:2]]),
        hint=_one_of("--cuda", (*release.builds, CPU)),
    )


def _checked_python(compat: Compat, release: TorchRelease, python: str, system: System) -> str:
    if not _PYTHON.fullmatch(python):
        raise SpecError(f"`{python}` is not a Python version", hint="--python takes, for example, 3.11")
    least = numbers(release.requires_python.removeprefix(">=")) or ()
    if (numbers(python) or ()) < least:
        fits = [one.version for one in compat.torches if _allows(one, python)]
        raise SpecError(
            f"torch {release.version} does not run on Python {python}",
            why=f"it requires Python {release.requires_python}",
            hint=f"take Python {release.requires_python.removeprefix('>=')} or later"
            + (f", or torch {fits[0]}" if fits else ""),
        )
    if python != system.python and not system.python_image:
        raise SpecError(
            f"{system.name} has Python {system.python}, not {python}",
            why="there is no official image of it with another Python",
            hint=f"--python {system.python}, or --os "
            + next((one.name for one in SYSTEMS.values() if one.python == python), "bookworm"),
        )
    return python


def _allows(release: TorchRelease, python: str) -> bool:
    return (numbers(release.requires_python.removeprefix(">=")) or ()) <= (numbers(python) or ())


def _requirement(release: TorchRelease, cuda: str) -> str:
    """Return the requirement; `+cu126` and `+cpu` are the builds that the default index has not."""
    if cuda == release.pypi:
        return f"torch=={release.version}"
    return f"torch=={release.version}+{CPU if cuda == CPU else 'cu' + cuda.replace('.', '')}"


def default_base(choice: Choice) -> str:
    """Return the official image to start from, `NAME:TAG`."""
    if choice.own_python:
        return choice.system.image
    return choice.system.python_image.format(python=choice.python)


# -- packages -------------------------------------------------------------------------------------------------------


def check_pins(pins: Sequence[Pin], choice: Choice) -> tuple[str, ...]:
    """Check that locked packages fit a choice; return what a reader has to know.

    Raises:
        SpecError: torch is missing or another, a package has no hash, or no file of it runs there.
    """
    problems = [*_unusable(pins), *_no_wheel(pins, choice)]
    if problems:
        raise SpecError(
            "the locked packages cannot be installed by hash",
            why="\n".join(problems[:10]) + (f"\nand {len(problems) - 10} more" if len(problems) > 10 else ""),
            hint="lock them again for this Python, with hashes: `pip lock`, `uv export`, `hpcenv export pylock`",
        )
    torch = next((pin for pin in pins if canonicalize_name(pin.name) == "torch"), None)
    if torch is None:
        # What is installed goes into a virtual environment that does not see the base's own packages.
        raise SpecError(
            f"the lock pins no torch, asked was {choice.torch}",
            why="the image would have none: only what is locked is installed into it",
            hint=f"add {choice.requirement} to what is locked, and lock again",
        )
    locked, _, local = torch.version.partition("+")
    if locked != choice.torch:
        raise SpecError(
            f"the lock has torch {torch.version}, asked was {choice.torch}", hint=f"--torch {locked}, or lock again"
        )
    return _check_build(local, pins, choice)


def _check_build(local: str, pins: Sequence[Pin], choice: Choice) -> tuple[str, ...]:
    """Compare the CUDA of the locked torch with the one that was asked for."""
    wanted = choice.requirement.partition("+")[2]
    if local == wanted:
        return ()
    found = cuda_of_pins(pins)
    if found is None or found == choice.cuda:
        return (f"which CUDA the locked torch {choice.torch} was built for cannot be told from its name",)
    raise SpecError(
        f"the locked torch is built for {found if found == CPU else f'CUDA {found}'}, asked was {choice.cuda}",
        why=f"its version is {choice.torch}{'+' + local if local else ''}",
        hint=f"--cuda {found}, or lock {choice.requirement} from an index that has it",
    )


def torch_of_pins(pins: Sequence[Pin]) -> str | None:
    """Return the locked torch release, None without torch."""
    return next((pin.version.partition("+")[0] for pin in pins if canonicalize_name(pin.name) == "torch"), None)


def cuda_of_pins(pins: Sequence[Pin]) -> str | None:
    """Return the CUDA that locked packages bring, `cpu`, or None when they do not say."""
    versions: dict[str, str] = {canonicalize_name(pin.name): pin.version for pin in pins}
    local = versions.get("torch", "").partition("+")[2]
    if local == CPU:
        return CPU
    match = re.fullmatch(r"cu(\d+)(\d)", local)
    if match:
        return f"{match[1]}.{match[2]}"
    for name in (
        "nvidia-cuda-runtime",
        "nvidia-cuda-runtime-cu13",
        "nvidia-cuda-runtime-cu12",
        "nvidia-cuda-runtime-cu11",
    ):
        if name in versions:
            return ".".join(versions[name].split(".")[:2])
    return None


def can_be_pinned(name: str, version: str) -> bool:
    """Say whether a name and version have the form of such, so that they can stand in a requirements file."""
    plain = _NAME.fullmatch(canonicalize_name(name)) is not None
    return plain and _VERSION.fullmatch(version) is not None and _is_version(version)


def _unusable(pins: Sequence[Pin]) -> list[str]:
    found = []
    for pin in pins:
        if not _NAME.fullmatch(canonicalize_name(pin.name)):
            found.append(f"{pin.name[:60]!r} is not a package name")
        elif not can_be_pinned(pin.name, pin.version):
            found.append(f"{pin.name}: {pin.version[:60]!r} is not one version")
        elif not pin.hashes or not all(_SHA256.fullmatch(one) for one in pin.hashes):
            found.append(f"{pin.name} {pin.version} has no sha256")
    return found


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _no_wheel(pins: Sequence[Pin], choice: Choice) -> list[str]:
    """Name packages of whose files none is a wheel for this Python and C library."""
    fits = frozenset(tags(choice))
    return [
        f"{pin.name} {pin.version} has no wheel for Python {choice.python} on {choice.system.name}: "
        + ", ".join(one[:80] for one in pin.files[:2])
        for pin in pins
        if pin.files and not any(_runs(file, fits) for file in pin.files)
    ]


def _runs(filename: str, fits: frozenset[Tag]) -> bool:
    try:
        return not parse_wheel_filename(filename)[3].isdisjoint(fits)
    except (InvalidWheelFilename, InvalidVersion):
        return False


def platforms(system: System) -> tuple[str, ...]:
    """Return the platform tags that run on a distribution, newest first (PEP 600; x86_64)."""
    major, minor = system.glibc
    names = [f"manylinux_{major}_{n}_x86_64" for n in range(minor, 4, -1)]
    return (*names, "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64")


def tags(choice: Choice) -> tuple[Tag, ...]:
    """Return the wheel tags that an image of this choice can install."""
    version = tuple(int(part) for part in choice.python.split("."))
    names = platforms(choice.system)
    interpreter = f"cp{version[0]}{version[1]}"
    return (*cpython_tags(version, platforms=names), *compatible_tags(version, interpreter, names))


def requirements(pins: Sequence[Pin]) -> str:
    """Render requirements.lock for `pip install --no-deps --require-hashes`."""
    lines = ["# Installed with: pip install --no-deps --require-hashes --only-binary :all: -r requirements.lock"]
    for pin in sorted(pins, key=lambda one: canonicalize_name(one.name)):
        hashes = "".join(f" \\\n    --hash={one}" for one in sorted(set(pin.hashes)))
        lines.append(f"{canonicalize_name(pin.name)}=={pin.version}{hashes}")
    return "\n".join(lines) + "\n"


# -- shell lines that both files hold -------------------------------------------------------------------------------


def _site_lines() -> list[str]:
    """Let pip and apt use the site's files where they are mounted."""
    return [
        "set -eu",
        "umask 022",
        "export DEBIAN_FRONTEND=noninteractive",
        "# The site's own configuration, if any: mounted while this runs, never in the image.",
        f'if [ -e {SITE}/apt.conf ]; then export APT_CONFIG="{SITE}/apt.conf"; fi',
        f'if [ -e {SITE}/pip.conf ]; then export PIP_CONFIG_FILE="{SITE}/pip.conf"; fi',
        "# An unprivileged build may have one user only, so apt cannot become another.",
        'apt="apt-get --yes -o APT::Sandbox::User=root -o Dpkg::Use-Pty=0"',
        f"if [ -e {SITE}/apt.sources ]; then",
        f'    apt="$apt -o Dir::Etc::SourceList={SITE}/apt.sources -o Dir::Etc::SourceParts=/dev/null"',
        "fi",
        f"if [ -e {SITE}/ca.crt ]; then",
        f'    apt="$apt -o Acquire::https::CAInfo={SITE}/ca.crt"',
        f'    export PIP_CERT="{SITE}/ca.crt"',
        "fi",
    ]


def _apt_lines(packages: Sequence[str]) -> list[str]:
    return [
        "$apt update",
        f"$apt install --no-install-recommends {' '.join(packages)}",
    ]


def package_lines(recipe: Recipe) -> tuple[str, ...]:
    """Return the shell lines of the stage that installs the locked packages."""
    apt = [] if recipe.base_has_python else _apt_lines(("ca-certificates", "python3", "python3-pip", "python3-venv"))
    reported = REPORT if not recipe.pins else UNPROVED_REPORT
    return (
        *_site_lines(),
        *apt,
        f"python3 -m venv --without-pip {VENV}",
        *(_pip_lines("--require-hashes", REQUIREMENTS, REPORT) if recipe.pins else ()),
        # What the index gives for these shows only when the image is compared with the lock.
        *(_pip_lines("", UNPROVED, reported) if recipe.unproved else ()),
    )


def _pip_lines(option: str, requirements_file: str, report: str) -> tuple[str, ...]:
    hashes = f" {option}" if option else ""
    return (
        f"python3 -m pip --python {VENV}/bin/python install --no-cache-dir --no-input --disable-pip-version-check \\",
        f"    --no-deps{hashes} --only-binary :all: \\",
        f"    --report {report} --requirement {requirements_file}",
    )


def final_lines(recipe: Recipe) -> tuple[str, ...]:
    """Return the shell lines of the stage that runs."""
    python = () if recipe.base_has_python else ("python3",)
    packages = ("ca-certificates", *python, *recipe.choice.system.fabric, *recipe.system_packages)
    release = recipe.choice.python.replace(".", ", ")
    return (
        *_site_lines(),
        *_apt_lines(packages),
        "# Which system packages it came to: apt has no lock.",
        f"dpkg-query --show --showformat '${{Package}} ${{Version}} ${{Architecture}}\\n' > {SYSTEM_PACKAGES}",
        "# Nothing of this is needed to run, and it differs from build to build.",
        "rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /root/.cache \\",
        "    /var/cache/ldconfig/aux-cache /var/log/apt /var/log/dpkg.log /var/log/alternatives.log",
        f"useradd --uid {USER_ID} --create-home --shell /bin/bash trainer",
        "mkdir -p /workspace",
        f"{VENV}/bin/python -c 'import sys; assert sys.version_info[:2] == ({release}), sys.version'",
    )


def variables(recipe: Recipe) -> dict[str, str]:
    """Return the image's environment variables, PATH apart."""
    found = {"LANG": "C.UTF-8", "PYTHONNOUSERSITE": "1", "VIRTUAL_ENV": VENV}
    if recipe.choice.cuda != CPU:
        # For the NVIDIA container tools; Apptainer's --nv needs neither.
        found |= {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    return found | dict(recipe.environment)


def labels(recipe: Recipe) -> dict[str, str]:
    """Return the image's labels (OCI image-spec 1.1, annotations.md)."""
    base = recipe.base
    return {
        "org.opencontainers.image.title": recipe.name,
        "org.opencontainers.image.version": recipe.choice.tag,
        "org.opencontainers.image.base.name": base.reference + (f":{base.tag}" if base.tag else ""),
        "org.opencontainers.image.base.digest": base.digest,
        "hpcenv.torch": recipe.choice.torch,
        "hpcenv.cuda": recipe.choice.cuda,
        "hpcenv.python": recipe.choice.python,
    }


# -- files ----------------------------------------------------------------------------------------------------------

FIRST_LINE = "# Written by `hpcenv image"


def render(recipe: Recipe) -> dict[str, str]:
    """Return every file of a recipe: its name -> its text.

    Raises:
        SpecError: a name or base that has no safe form in these files.
    """
    _check_words(recipe)
    files = {
        "image.def": definition(recipe),
        "requirements.lock": f"{FIRST_LINE} {recipe.verb}`; made from the locked packages.\n"
        + requirements(recipe.pins),
        "README.md": readme(recipe),
        ".dockerignore": "*\n!requirements.*\n",
        "site/.gitignore": "*\n!.gitignore\n",
    }
    if recipe.unproved:
        lines = [f"{pin.name}=={pin.version}" for pin in recipe.unproved]
        about = f"{FIRST_LINE} {recipe.verb}`; the lock knows no hash of these."
        files["requirements.unproved.txt"] = "\n".join([about, *lines]) + "\n"
    if recipe.base.kind == "docker":
        files["Dockerfile"] = dockerfile(recipe)
    return files


def _check_words(recipe: Recipe) -> None:
    if not _NAME.fullmatch(recipe.name) or len(recipe.name) > 100:
        raise SpecError(f"`{recipe.name[:100]}` is not an image name", hint="small letters, digits, and . _ - between")
    base = recipe.base
    fits = _PLAIN_PATH if base.kind == "sif" else _BASE
    if not fits.fullmatch(base.reference) or (base.tag and not _TAG.fullmatch(base.tag)):
        raise SpecError(f"`{base.reference[:200]}` cannot be written into a recipe", why="it has odd characters")
    if not _SHA256.fullmatch(base.digest):
        raise SpecError(f"`{base.digest[:80]}` is not a digest", hint="sha256: and 64 hexadecimal digits")
    problems = _unusable([replace(pin, hashes=("sha256:" + "0" * 64,)) for pin in recipe.unproved])
    problems += [
        f"{name[:40]!r} is not a variable that can be written"
        for name, value in recipe.environment
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name) or not re.fullmatch(r"[ -~]{0,4000}", value)
    ]
    problems += _unusable(recipe.pins)
    if problems:
        raise SpecError("this cannot be written into a recipe", why="\n".join(problems[:10]))
    for package in recipe.system_packages:
        if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]*(=[A-Za-z0-9.+:~-]+)?", package):
            raise SpecError(f"`{package[:60]}` is not a package of apt", hint="NAME or NAME=VERSION")


def _head(recipe: Recipe) -> list[str]:
    choice = recipe.choice
    cuda = "CPU only" if choice.cuda == CPU else f"CUDA {choice.cuda}"
    return [
        f"{FIRST_LINE} {recipe.verb}`: torch {choice.torch}, {cuda}, Python {choice.python}, {choice.system.name}.",
        f"# {recipe.name}:{choice.tag}",
        *(f"# {' '.join(line.split())}" for line in recipe.remarks),
    ]


def dockerfile(recipe: Recipe) -> str:
    """Render the Dockerfile; for BuildKit (docker 23 or later), podman and buildah (1.33 or later)."""
    base = recipe.base
    image = base.reference + (f":{base.tag}" if base.tag else "") + f"@{base.digest}"
    mounts = " \\\n    ".join(f"--mount=type=secret,id={name},target={SITE}/{name},mode=0444" for name in SITE_FILES)
    lines = [
        *_head(recipe),
        "",
        f"FROM {image} AS packages",
        f"COPY requirements.lock {REQUIREMENTS}",
        *([f"COPY requirements.unproved.txt {UNPROVED}"] if recipe.unproved else []),
        f"RUN {mounts} \\\n    <<'EOF'",
        *package_lines(recipe),
        "EOF",
        "",
        f"FROM {image} AS final",
        f"COPY --from=packages {VENV} {VENV}",
        f"COPY --from=packages {RECORDS} {RECORDS}",
        f"RUN {mounts} \\\n    <<'EOF'",
        *final_lines(recipe),
        "EOF",
        f'ENV PATH="{VENV}/bin:$PATH"',
        *(f"ENV {name}={_quoted(value)}" for name, value in variables(recipe).items()),
        *(f"LABEL {name}={_quoted(value)}" for name, value in labels(recipe).items()),
        "WORKDIR /workspace",
        f"USER {USER_ID}:{USER_ID}",
        'CMD ["python3"]',
    ]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    """Quote for ENV and LABEL: nothing in the value is expanded."""
    return '"' + re.sub(r'([\\"$])', r"\\\1", value) + '"'


def definition(recipe: Recipe) -> str:
    """Render the definition file; for Apptainer 1.1 or later (stages, unprivileged builds)."""
    base = recipe.base
    if base.kind == "sif":
        header = ["Bootstrap: localimage", f"From: {base.reference}"]
        about = [f"# The base has sha256 {base.digest}; Apptainer does not compare it: `sha256sum` does."]
    else:
        header = ["Bootstrap: docker", f"From: {base.reference}@{base.digest}"]
        about = [f"# The base is the tag {base.tag}."] if base.tag else []
    lines = [
        *_head(recipe),
        *about,
        "",
        *header,
        "Stage: packages",
        "",
        "%files",
        f"    requirements.lock {REQUIREMENTS}",
        *([f"    requirements.unproved.txt {UNPROVED}"] if recipe.unproved else []),
        "",
        "%post",
        *package_lines(recipe),
        "",
        *header,
        "Stage: final",
        "",
        "%files from packages",
        f"    {VENV} {VENV}",
        f"    {RECORDS} {RECORDS}",
        "",
        "%post",
        *final_lines(recipe),
        "",
        "%environment",
        f"    export PATH={VENV}/bin:$PATH",
        *(f"    export {name}={_shell_quoted(value)}" for name, value in variables(recipe).items()),
        "",
        "%labels",
        *(f"    {name} {value}" for name, value in labels(recipe).items()),
        "",
        "%runscript",
        '    if [ $# -gt 0 ]; then exec "$@"; fi',
        "    exec python3",
    ]
    return "\n".join(lines) + "\n"


def _shell_quoted(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"


def readme(recipe: Recipe) -> str:
    """Render the README: three commands, and where the site's files go."""
    tag, name = recipe.choice.tag, recipe.name
    secrets = " ".join(f"--secret id={one},src=site/{one}" for one in SITE_FILES)
    rows = "\n".join(f"- `{one}`: {use}" for one, use in SITE_FILES.items())
    docker = (
        f"    docker build --tag {name}:{tag} .\n"
        if recipe.base.kind == "docker"
        else "    # the base is a SIF: no docker\n"
    )
    return f"""{FIRST_LINE} {recipe.verb}`.

# {name}:{tag}

    apptainer build --bind "$PWD/site:{SITE}:ro" {name}_{tag}.sif image.def
{docker}    hpcenv image lint Dockerfile image.def {name}_{tag}.sif

The first needs no root. Both files run the same commands, so either gives the same packages.

pip and apt use the configuration of the base image. Where your site has its own, put these files into
`site/` (git and docker leave them out); they are mounted while the image is made and are not in it:

{rows}

Paths in them are seen below `{SITE}`: `find-links = {SITE}/wheels` is `site/wheels`. For docker and podman
add, for each file that is there: `{secrets}`.
A registry without https: `apptainer build --no-https`.

`requirements.lock` holds every Python package with its sha256. In the image, `{REPORT}`
says where each came from (`hpcenv lock` uses it), `{SYSTEM_PACKAGES}` lists the system's packages.
"""


def is_ours(text: str) -> bool:
    """Say whether a file was written by hpcenv, so that it may be replaced."""
    return text.startswith((FIRST_LINE, "*\n!requirements.*\n", "*\n!.gitignore\n"))


def as_json(recipe: Recipe) -> Mapping[str, object]:
    """Return what a script wants to know of a recipe."""
    choice = recipe.choice
    about = {"torch": choice.torch, "cuda": choice.cuda, "python": choice.python, "os": choice.system.name}
    return {**about, "image": f"{recipe.name}:{choice.tag}", "base": json.loads(json.dumps(labels(recipe)))}
