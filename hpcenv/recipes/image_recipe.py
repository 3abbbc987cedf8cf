"""A Dockerfile and an Apptainer definition file that make the same image, from the files in `templates/`.

Runs on: LOGIN NODE.

Both files run the same shell lines, so a person and a test can compare them. Both files have two stages: `packages`
installs the locked wheels into /opt/venv, and `final` is the image. An image is made from:

    base        an image by digest, or a SIF
    apt         the distribution's Python (if the base contains none), and the libraries for InfiniBand and RoCE
    packages    requirements.lock: NAME==VERSION --hash=sha256:..., wheels only

The files name no package index and no mirror. pip and apt use the configuration of the base image, or the site's files
(`SITE_FILES`). The site's files are mounted at /mnt while a command runs. docker and podman mount them as build
secrets, and Apptainer mounts them with `--bind`. No layer and no SIF contains the site's files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import SpecError
from hpcenv.project.template import fill
from hpcenv.recipes.combination import CPU, Combination
from hpcenv.recipes.compiled_packages import PackageBuild, wheel_folder
from hpcenv.recipes.pinned_packages import PinnedPackage, other_index, pinned_lines, requirements, unusable

TEMPLATES = Path(__file__).with_name("templates")

# The virtual environment of the image; the templates contain this path.
VENV = "/opt/venv"

# The site's configuration is mounted here. Every base has this folder (Filesystem Hierarchy Standard 3.0, 3.12).
SITE = "/mnt"
SITE_FILES = ("pip.conf", "apt.sources", "apt.conf", "ca.crt")

# The number is not 1000, because some bases already have a user with this number (ubuntu 24.04).
USER_ID = 10001

# The beginning of the first line of every written file, for readers.
FIRST_LINE = "# Written by `hpcenv image init`"
_DOCKERIGNORE = "*\n!requirements.*\n"
_SITE_IGNORE = "*\n!.gitignore\n"

_IMAGE_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_/-]{0,254}")
# Debian's policy, 5.6.1 and 5.6.12.
_APT = re.compile(r"[a-z0-9][a-z0-9.+-]+(=[A-Za-z0-9.+:~-]+)?")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./@+-]+")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
_PINNED = re.compile(rf"{_REPOSITORY.pattern}(:{_TAG.pattern})?@{_SHA256.pattern}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseImage:
    """The image that a recipe starts from.

    Attributes:
        reference: repository with its registry, without tag; or the path of a SIF.
        tag: the tag that was resolved, as information for readers; empty without a tag.
        digest: the image's digest, or the sha256 of the SIF.
        is_sif: whether the image is a SIF.
    """

    reference: str
    tag: str = ""
    digest: str
    is_sif: bool = False

    @property
    def name(self) -> str:
        """The reference with the tag."""
        return self.reference + (f":{self.tag}" if self.tag else "")

    @property
    def pinned(self) -> str:
        """The reference with tag and digest."""
        return f"{self.name}@{self.digest}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRecipe:
    """All values that decide the content of a recipe's files.

    Attributes:
        name: the image's name, without tag.
        tag: the image's tag; empty to use the tag of the combination.
        apt: more packages of the distribution.
        base_has_python: whether the base contains the requested Python. Then apt installs no Python.
        installer: a newer pip, if the distribution's pip is too old; None to use the distribution's pip.
        build: packages to compile; None if there are none.
    """

    name: str
    tag: str = ""
    combination: Combination
    base: BaseImage
    apt: tuple[str, ...] = ()
    pins: tuple[PinnedPackage, ...]
    base_has_python: bool = False
    installer: PinnedPackage | None = None
    build: PackageBuild | None = None

    @property
    def image(self) -> str:
        """Name and tag of the image."""
        return f"{self.name}:{self.tag or self.combination.tag}"

    @property
    def sif(self) -> str:
        """The file name of the SIF."""
        return self.image.replace(":", "_") + ".sif"


def render(recipe: ImageRecipe) -> dict[str, str]:
    """Return the files of a recipe: name -> text.

    Raises:
        SpecError: a name or value cannot be written safely into these files.
    """
    _check_words(recipe)
    files = {
        "image.def": _definition(recipe),
        "requirements.lock": f"{FIRST_LINE}; made from the locked packages.\n" + requirements(recipe.pins),
        "README.md": _readme(recipe),
        ".dockerignore": _DOCKERIGNORE,
        "site/.gitignore": _SITE_IGNORE,
    }
    if recipe.installer is not None:
        head = f"{FIRST_LINE}; the pip that installs the packages.\n"
        files["requirements.pip.lock"] = head + pinned_lines((recipe.installer,))
    if recipe.build is not None:
        for name, pins in (("build", recipe.build.tools), ("sources", recipe.build.sources)):
            head = f"{FIRST_LINE}; {_BUILD_FILES[name]}.\n"
            files[f"requirements.{name}.lock"] = head + pinned_lines(pins)
    if not recipe.base.is_sif:
        files["Dockerfile"] = _dockerfile(recipe)
    return files


_BUILD_FILES = {"build": "what only the build stage installs", "sources": "source archives that the build compiles"}


def _check_words(recipe: ImageRecipe) -> None:
    if not _IMAGE_NAME.fullmatch(recipe.name) or len(recipe.name) > 100:
        hint = "NAME or NAME:TAG; a name has small letters, digits, and . _ - between them"
        raise SpecError(f"`{recipe.name[:100]}` is not an image name", hint=hint)
    if recipe.tag and not _TAG.fullmatch(recipe.tag):
        raise SpecError(f"`{recipe.tag[:130]}` is not an image tag", hint="letters, digits, and _ . -")
    base = recipe.base
    valid = _PLAIN_PATH if base.is_sif else _REPOSITORY
    if not valid.fullmatch(base.reference) or (base.tag and not _TAG.fullmatch(base.tag)):
        raise SpecError(f"`{base.reference[:200]}` cannot be written into a recipe", why="it has special characters")
    if not _SHA256.fullmatch(base.digest):
        raise SpecError(f"`{base.digest[:80]}` is not a digest", hint="sha256: and 64 hexadecimal digits")
    if recipe.build is not None and recipe.build.base and not _PINNED.fullmatch(recipe.build.base):
        raise SpecError(
            f"`{recipe.build.base[:200]}` cannot be written into a recipe", why="it is not a name with a digest"
        )
    for package in recipe.apt:
        if not _APT.fullmatch(package):
            hint = "--apt takes NAME or NAME=VERSION: --apt libgl1"
            raise SpecError(f"`{package[:80]}` is not a package of the distribution", hint=hint)
    compiled = (*recipe.build.tools, *recipe.build.sources) if recipe.build is not None else ()
    installer = (recipe.installer,) if recipe.installer is not None else ()
    problems = unusable((*recipe.pins, *compiled, *installer))
    if problems:
        raise SpecError("values cannot be written into a recipe", why="\n".join(problems[:10]))


# -- the files ------------------------------------------------------------------------------------------------------


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _install_packages(recipe: ImageRecipe) -> str:
    """Return the shell lines of the stage `packages`."""
    values = {
        "site_configuration": _template("site-configuration.sh").rstrip(),
        "codename": recipe.combination.distribution.codename,
        "choose_pip": _choose_pip(recipe),
    }
    parts = _parts(("install-python", not recipe.base_has_python))
    return fill(_template("install-packages.sh"), values, parts=parts).rstrip()


def _choose_pip(recipe: ImageRecipe) -> str:
    """Return the shell lines that set `python` to a Python. The pip of this Python installs the packages."""
    part = "own" if recipe.installer is not None else "distribution"
    return fill(_template("choose-pip.sh"), {}, parts=(part,)).rstrip()


def _compile_packages(recipe: ImageRecipe, build: PackageBuild) -> str:
    """Return the shell lines of the stage `build`."""
    has_python = recipe.base_has_python and not build.base
    python = () if has_python else ("python3", "python3-pip", "python3-venv", "python3-dev")
    combination = recipe.combination
    values = {
        "site_configuration": _template("site-configuration.sh").rstrip(),
        "python_tuple": combination.python.replace(".", ", "),
        "codename": combination.distribution.codename,
        "apt_packages": " ".join(("ca-certificates", "g++", "make", *python)),
        "report": _template("built-report.py").rstrip(),
        "choose_pip": _choose_pip(recipe),
    }
    if build.has_wheels:
        values["wheel_folder"] = wheel_folder(combination.cuda)
    if build.arch_list:
        values["cuda"] = combination.cuda
    if build.variables:
        values["variables"] = "\n".join(f'export {name}="{value}"' for name, value in build.variables.items())
    parts = _parts(
        ("toolkit", build.has_wheels),
        ("toolkit-image", build.base and build.arch_list),
        ("nvcc", build.arch_list),
        ("variables", build.variables),
    )
    return fill(_template("compile-packages.sh"), values, parts=parts).rstrip()


def _install_final(recipe: ImageRecipe) -> str:
    """Return the shell lines of the stage `final`."""
    python = () if recipe.base_has_python else ("python3",)
    packages = ("ca-certificates", *python, *recipe.combination.distribution.fabric, *recipe.apt)
    values = {
        "site_configuration": _template("site-configuration.sh").rstrip(),
        "apt_packages": " ".join(packages),
        "user": str(USER_ID),
        "python_tuple": recipe.combination.python.replace(".", ", "),
    }
    return fill(_template("install-final.sh"), values).rstrip()


def _values(recipe: ImageRecipe) -> dict[str, str]:
    """Return the values that the Dockerfile and the definition file share."""
    combination, base = recipe.combination, recipe.base
    values = {
        "torch": combination.torch,
        "cuda": combination.cuda,
        "cuda_name": "CPU only" if combination.cuda == CPU else f"CUDA {combination.cuda}",
        "python": combination.python,
        "os": combination.distribution.name,
        "image": recipe.image,
        "name": recipe.name,
        "version": recipe.tag or combination.tag,
        "base_name": base.name,
        "base_digest": base.digest,
        "install_packages": _install_packages(recipe),
        "install_final": _install_final(recipe),
        "last_stage": "packages" if recipe.build is None else "build",
    }
    if recipe.build is not None:
        values["compile_packages"] = _compile_packages(recipe, recipe.build)
    return values


def _parts(*parts: tuple[str, object]) -> tuple[str, ...]:
    """Return the names of the template parts with a true condition."""
    return tuple(name for name, condition in parts if condition)


def _shared_parts(recipe: ImageRecipe) -> tuple[str, ...]:
    return _parts(
        ("cuda", recipe.combination.cuda != CPU),
        ("build", recipe.build is not None),
        ("installer", recipe.installer is not None),
    )


def _dockerfile(recipe: ImageRecipe) -> str:
    """Return the Dockerfile. It is for BuildKit (docker 23 or later), podman and buildah (1.33 or later)."""
    mounts = (f"--mount=type=secret,id={name},target={SITE}/{name},mode=0444" for name in SITE_FILES)
    values = _values(recipe) | {
        "base": recipe.base.pinned,
        "secrets": " \\\n    ".join(mounts),
        "user": str(USER_ID),
    }
    if recipe.build is not None:
        values["build_base"] = recipe.build.base or values["base"]
    return fill(_template("Dockerfile"), values, parts=_shared_parts(recipe))


def _definition(recipe: ImageRecipe) -> str:
    """Return the definition file. It is for Apptainer 1.1 or later (stages, unprivileged builds)."""
    base = recipe.base
    values = _values(recipe) | {
        "bootstrap": "localimage" if base.is_sif else "docker",
        "base": base.reference if base.is_sif else f"{base.reference}@{base.digest}",
    }
    if recipe.build is not None:
        # Apptainer does not accept a name with both a tag and a digest.
        named = re.sub(r":[^:/@]+@", "@", recipe.build.base)
        values["build_bootstrap"] = "docker" if named else values["bootstrap"]
        values["build_base"] = named or values["base"]
    has_tag = base.tag and not base.is_sif
    if has_tag:
        values["base_tag"] = base.tag
    parts = (*_shared_parts(recipe), *_parts(("sif", base.is_sif), ("base-tag", has_tag)))
    return fill(_template("image.def"), values, parts=parts)


def _readme(recipe: ImageRecipe) -> str:
    """Return the README. It says how to build the image, and where to put the site's files."""
    index = other_index(recipe.pins)
    values = {"image": recipe.image, "sif": recipe.sif} | ({"index": index} if index else {})
    parts = ("sif" if recipe.base.is_sif else "registry", *["index"] * bool(index))
    return fill(_template("README.md"), values, parts=parts)
