"""Root file systems: one for nodes, one for services, one inside the test image; and the sandbox to run in them.

A root is a plain directory in the cache and never changes after it is made: machines lay
an overlay over it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from . import cache, host
from .instance import Instance
from .process import Runner, tied_to_us
from .progress import Progress

# Debian release -> Slurm: bookworm 22.05, trixie 24.11, sid 26.05.
SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "sid"}
# The libc of bookworm is too old for the only Apptainer that Debian has (sid's): jobs there run in the host mode.
WITHOUT_APPTAINER = frozenset({"bookworm"})

# Fixed, so that files on the shared directory belong to the same person on every machine.
USERS = {"alice": 2001, "bob": 2002}

# fmt: off
_NODE = (
    "slurmd", "slurm-client", "munge", "tini", "iproute2", "iputils-ping", "procps", "mount", "passwd",
    "ca-certificates", "less", "git", "openssh-client", "openssh-server",
)
_APPTAINER = (
    # squashfuse: without it Apptainer unpacks the image at every start (13 to 20 s each).
    "apptainer", "squashfuse", "fuse3", "fuse-overlayfs", "uidmap", "squashfs-tools",
    # `hpcenv image build` with a Dockerfile.
    "buildah", "podman",
)
_PYTHON = (
    # tzdata: without /etc/localtime every `apptainer exec` ends with a mount error.
    "tzdata",
    "python3", "python3-venv", "python3-pip",
)
# What bookworm's python3.11 (hostenv) links to; some names have changed since.
_LIBRARIES = (
    "libssl3t64", "libexpat1", "libffi8", "zlib1g", "libbz2-1.0", "liblzma5", "libsqlite3-0", "libuuid1",
    "libreadline8t64", "libcrypt1",
)
_OLD_NAMES = {"libssl3t64": "libssl3", "libreadline8t64": "libreadline8"}
_SERVICE = (
    "slurmctld", "slurmdbd", "slurm-client", "munge", "mariadb-server", "docker-registry", "skopeo", "tini",
    "iproute2", "procps", "mount", "passwd", "ca-certificates", "python3-minimal",
)
_IMAGE = ("python3", "python3-pip", "python3-venv", "ca-certificates", "tzdata", "procps")
# fmt: on

# Apptainer is in sid only; nothing else may come from there.
_PIN_SID = (
    "Package: *\nPin: release n=sid\nPin-Priority: 50\n\nPackage: apptainer\nPin: release n=sid\nPin-Priority: 990\n"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that decides what is in a root; its text is the cache key."""

    kind: str
    suites: tuple[str, ...]
    packages: tuple[str, ...]
    users: tuple[tuple[str, int], ...] = ()
    revision: int = 1

    @property
    def text(self) -> str:
        """The cache key's text."""
        return f"{self!r}\n{_PIN_SID}"


@dataclass(frozen=True, slots=True)
class Workshop:
    """What every builder needs."""

    instance: Instance
    runner: Runner = field(repr=False)
    progress: Progress = field(repr=False)


def node_root(shop: Workshop, slurm: str, modules: str = "none") -> Path:
    """The root of login and compute nodes."""
    return _root(shop, node_recipe(slurm, modules))


# What gives the command `module`; the packages conflict with each other.
MODULES: dict[str, tuple[str, ...]] = {"none": (), "lmod": ("lmod",), "tcl": ("environment-modules",)}


def node_recipe(slurm: str, modules: str = "none") -> Recipe:
    """What is in it."""
    suite = debian_suite(slurm)
    suites: tuple[str, ...] = (suite,)
    if suite in WITHOUT_APPTAINER:
        packages = (*_NODE, *_PYTHON, *(_OLD_NAMES.get(name, name) for name in _LIBRARIES))
    else:
        suites = (suite,) if suite == "sid" else (suite, "sid")
        packages = (*_NODE, *_APPTAINER, *_PYTHON, *_LIBRARIES)
    packages = (*packages, *MODULES[modules])
    return Recipe(kind="node", suites=suites, packages=packages, users=tuple(USERS.items()))


def service_root(shop: Workshop, slurm: str) -> Path:
    """The root of the machines for slurmctld, slurmdbd and the registry."""
    suite = debian_suite(slurm)
    return _root(shop, Recipe(kind="service", suites=(suite,), packages=_SERVICE, users=tuple(USERS.items())))


def image_root(shop: Workshop) -> Path:
    """The lowest layer of the test image; also the source of hostenv's Python 3.11."""
    return _root(shop, Recipe(kind="image-base", suites=("bookworm",), packages=_IMAGE))


def debian_suite(slurm: str) -> str:
    """The Debian release that ships this Slurm."""
    return SUITES[slurm]


def has_apptainer(slurm: str) -> bool:
    """Whether the nodes of this version can run images."""
    return debian_suite(slurm) not in WITHOUT_APPTAINER


def _root(shop: Workshop, recipe: Recipe) -> Path:
    def build(target: Path) -> None:
        mirror = host.apt_mirror(shop.runner)
        argv = mmdebstrap_argv(recipe, target, mirror, host.apt_options(shop.runner))
        shop.runner.run(tied_to_us(argv), timeout=1800)
        for name, uid in recipe.users:
            shop.runner.run(["chroot", target, "useradd", "--uid", str(uid), "--shell", "/bin/bash", name])

    return cache.entry(shop.instance.cache, recipe.kind, recipe.text, build, shop.progress)


def mmdebstrap_argv(recipe: Recipe, target: Path, mirror: str, apt_options: list[str]) -> list[str]:
    """The command that makes a root."""
    argv = ["mmdebstrap", "--mode=root", "--variant=apt", f"--include={','.join(recipe.packages)}"]
    argv += [f"--aptopt={option}" for option in ('APT::Install-Recommends "false"', *apt_options)]
    if len(recipe.suites) > 1:
        # A hook is a shell line by mmdebstrap's design; this one holds constants only.
        pin = _PIN_SID.replace("\n", "\\n")
        argv.append(f"--setup-hook=printf '{pin}' > \"$1\"/etc/apt/preferences.d/sid")
    # A mirror's Release file of sid can be past its Valid-Until.
    lines = [
        f"deb {'[check-valid-until=no] ' if suite == 'sid' else ''}{mirror} {suite} main" for suite in recipe.suites
    ]
    return [*argv, recipe.suites[0], str(target), *lines]


def sandbox_argv(root: Path, upper: Path, binds: dict[Path, str], argv: list[str]) -> list[str]:
    """A command as root inside an overlay over `root`; what it changes lands in `upper`.

    No network but a loopback: what is installed inside comes from files that pip or apt of
    this machine fetched before.
    """
    script = str(Path(__file__).with_name("sandbox.sh"))
    pairs = [word for source, target in binds.items() for word in (str(source), target)]
    inner = ["unshare", "--net", "--", "bash", script, str(root), str(upper), str(len(binds)), *pairs, *argv]
    return tied_to_us(inner)
