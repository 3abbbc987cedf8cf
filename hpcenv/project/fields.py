"""The table of fields: the meaning of each field, its severity, and what to do about a difference.

Runs on: LOGIN NODE. Pure data, and the look-up by name.

Only this table gives severities. `project/severities.py` applies the project's [policy] to this table, and the
resulting severities travel to the nodes in the manifest. The gate, `hpcenv verify`, `hpcenv image verify` and `hpcenv
diff` judge by the resulting severities. `hpcenv explain` and docs/reference/fields.md show this table.
"""

from __future__ import annotations

import functools
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from hpcenv.judge.checks.check_table import CHECKS
from hpcenv.records.manifest import DeterminismProfile, Severity
from hpcenv.records.severities import fits

FieldLevel = Literal["record", "full", "deep"]
LEVELS: tuple[FieldLevel, ...] = ("record", "full", "deep")

# What must be replaced to make two environments equal in a field. The hardest replacement is first, because a different
# package is not important while the GPU is different.
Repair = Literal["hardware", "driver", "image", "python", "torch", "library", "package", "file", "setting", "note"]
REPAIRS: tuple[Repair, ...] = (
    "hardware", "driver", "image", "python", "torch", "library", "package", "file", "setting", "note",
)  # fmt: skip

# What judges a field:
#   lockfile  the gate and `verify` compare each node with the lockfile
#   nodes     the gate compares the nodes of a job with each other
#   rule      the gate, `verify` or another command judges it by a special rule
# `hpcenv diff` compares every field that both sides have.
JudgedBy = Literal["lockfile", "nodes", "rule"]

# The severity of a name that is not in the table. An unknown name must not count as harmless.
NOT_IN_TABLE: Severity = "must"
# The severity, on the nodes, of a field that was unreadable when the environment was locked.
UNKNOWN_WHEN_LOCKED: Severity = "warn"
# The severity of a field about GPUs in a job that uses no GPU.
WITHOUT_GPUS: Severity = "info"

_RELOCK = "if you want the change: hpcenv lock; otherwise go back to what the lockfile names"


@dataclass(frozen=True)
class Field:
    """One field, or a family of fields (`*` stands for one part of the name).

    Attributes:
        name: dotted name, the same in the lockfile, the facts, [policy] and every table.
        default: the field's severity.
        repair: what must be replaced to make two environments equal in this field.
        bitwise: the severity in the determinism profile `bitwise`, if stricter than `default`.
        between_nodes: the severity between the nodes of one job, if stricter than `default`.
        follows: the name of another field. If [policy] does not name this field, it has the severity of that field.
        members: for a family, the names that every environment has.
        what: what the field is.
        source: where the value comes from.
        why: what goes wrong when the values differ.
        hint: what to do about a difference.
        level: the lowest level of the check that reads the field.
        judged_by: what judges the field, in addition to `hpcenv diff`.
        fixed: why [policy] cannot change the severity; empty if [policy] can change it.
        gpus: whether the field matters only to jobs that use GPUs.
    """

    name: str
    default: Severity
    repair: Repair
    _: KW_ONLY
    bitwise: Severity | None = None
    between_nodes: Severity | None = None
    follows: str = ""
    members: tuple[str, ...] = ()
    what: str
    source: str
    why: str
    hint: str = _RELOCK
    level: FieldLevel = "record"
    judged_by: tuple[JudgedBy, ...] = ("lockfile",)
    fixed: str = ""
    gpus: bool = False

    def fits(self, name: str) -> bool:
        """Return whether `name` is this field or belongs to its family."""
        return fits(self.name, name)

    def severity(self, profile: DeterminismProfile) -> Severity:
        """Return the severity that the table gives, before any [policy]."""
        return self.bitwise or self.default if profile == "bitwise" else self.default


_REBUILD = "use the image that the lockfile names: hpcenv lock makes its SIF again"
_OVERLAY = "use the locked file; if you want to lock the present file: hpcenv lock"
_REINSTALL = "pip install --force-reinstall --no-deps NAME==VERSION, or use the locked image"

_SHAPE = "submit with the same --nodes, --gpus and --nproc"
_SCRIPT = "submit the same script"
_ARGUMENTS = "submit with the same words after `--`"
_WORLD = "the world size changes the order of sums and the batch size"

# Reasons why [policy] cannot change a field.
_ORIGIN = "it only records the origin of something, or how it was made"
_COUNT = "it only explains the digest beside it"
_NO_LAUNCH = "without it the job cannot start"


FIELDS: tuple[Field, ...] = (
    # -- container ------------------------------------------------------------------------
    Field(
        "container.sif.sha256",
        "must",
        "image",
        what="sha256 of the SIF file that the nodes run",
        source="hashed on every node, through the file descriptor that is then started",
        why="a different file is a different environment, even if its name is the same",
        hint=_REBUILD,
    ),
    Field(
        "container.sif.made-again",
        "info",
        "note",
        what="whether the SIF was made again from the locked image: the bytes differ, the file tree is equal",
        source="the tree digest of the SIF, compared with the locked tree digest",
        why="the files inside are the same; only the packing differs",
        judged_by=("rule",),
    ),
    Field(
        "container.sif.tree",
        "must",
        "image",
        what="whether a SIF has the files of its image's layers",
        source="`hpcenv image verify` compares every path",
        why="a SIF with other files is not this image",
        hint="move the SIF away, then: hpcenv image pull",
        judged_by=("rule",),
    ),
    Field(
        "container.rootfs-chain-id",
        "must",
        "image",
        what="OCI ChainID over the layers' diff_ids",
        source="the image's config, from the registry",
        why="it is the identity of the file system; compression, save and load, and conversion do not change it",
        hint=_REBUILD,
        judged_by=(),
    ),
    Field(
        "container.manifest-digest",
        "warn",
        "image",
        what="digest of the image's manifest for this platform, which lists the layers to pull",
        source="the registry",
        why="a different compression alone changes it; compare rootfs-chain-id first",
        judged_by=(),
    ),
    Field(
        "container.config-digest",
        "must",
        "image",
        what="digest of the image's config (docker's image id)",
        source="the registry",
        why="the config contains the environment, the entry point and the working directory",
        judged_by=(),
    ),
    Field(
        "container.env-digest",
        "must",
        "image",
        what="digest over the image's ENV, ENTRYPOINT, CMD, WORKDIR and USER",
        source="the image's config",
        why="variables decide what Python and the loader find",
        judged_by=(),
    ),
    Field(
        "container.index-digest",
        "info",
        "note",
        what="digest of the multi-platform index that the tag named",
        source="the registry",
        why="it helps to find the image again; attestations of other platforms change it",
        judged_by=(),
        fixed=_ORIGIN,
    ),
    Field(
        "container.digest-origin",
        "info",
        "note",
        what="where the manifest digest comes from, if not from a registry: `layout`, or `synthesised` by hpcenv",
        source="how the image was read",
        why="an archive of `docker save` has no manifest; for the same image, hpcenv always makes the same manifest",
        judged_by=(),
        fixed=_ORIGIN,
    ),
    Field(
        "container.tree-sha256",
        "info",
        "note",
        what="digest of the file tree, equal for every SIF of the image, however it was made",
        source="computed from the layers, and compared with the files in the SIF; for oras://, computed from the SIF",
        why="it is absent if layers and SIF were not compared; rootfs-chain-id identifies the same files",
        judged_by=(),
    ),
    Field(
        "container.reference",
        "info",
        "note",
        what="the image reference that the project names",
        source="`image` in hpcenv.toml",
        why="tags move; the digests are the identity",
        judged_by=(),
        fixed="a reference is a name; the digests are compared",
    ),
    Field(
        "container.platform",
        "must",
        "hardware",
        what="operating system and architecture of the image",
        source="the image's config",
        why="an image for another processor does not start, or runs in emulation",
        judged_by=(),
    ),
    Field(
        "container.nvidia-require",
        "must",
        "driver",
        what="a rule of the image about drivers and GPUs (NVIDIA_REQUIRE_*), evaluated on a node",
        source="the image's ENV, against the node's driver and GPUs",
        why="Apptainer ignores the rule; on a node that does not fulfil the rule, the first CUDA call fails",
        hint="ask for other nodes (--constraint, --partition), or use another image",
        judged_by=("rule",),
        gpus=True,
    ),
    Field(
        "container.nvidia.*",
        "info",
        "driver",
        what="one of the image's NVIDIA_* variables, or its CUDA_VERSION",
        source="the image's ENV",
        why="it says which drivers and GPUs the image was made for",
        judged_by=(),
        fixed="container.env-digest covers it, and nodes evaluate it as container.nvidia-require",
    ),
    Field(
        "container.sif.*",
        "info",
        "note",
        what="how the SIF was made",
        source="the build",
        why="it explains why two SIFs of one image have different bytes",
        judged_by=(),
        fixed=_ORIGIN,
    ),
    Field(
        "container.overlay.sha256",
        "must",
        "image",
        what="sha256 of the squashfs that is mounted over the image",
        source="hashed on every node, or recognised as the file that was hashed at submission",
        why="its files hide files of the image, so a different overlay is a different environment",
        hint=_OVERLAY,
    ),
    Field(
        "container.overlay.content",
        "must",
        "image",
        what="digest over all files of a folder that is mounted over the image; only in older lockfiles",
        source="`hpcenv lock --check` and `hpcenv diff`; such a lockfile cannot be submitted any more",
        why="its files hide files of the image, so a different overlay is a different environment",
        hint="pack the folder, and lock the squashfs: mksquashfs DIR x.sqsh",
        judged_by=(),
    ),
    Field(
        "container.overlay.made-again",
        "info",
        "note",
        what="whether the squashfs over the image was made again: the bytes differ, the file tree is equal",
        source="`hpcenv diff`: the tree digests of both overlays",
        why="the files inside are the same; only the packing differs",
        judged_by=(),
    ),
    Field(
        "container.overlay.*",
        "info",
        "note",
        what="form, use, target and other properties of the overlay",
        source="`overlay` in hpcenv.toml, and the file that it names",
        why="it says where the packages of the overlay are found",
        judged_by=(),
        fixed=_ORIGIN,
    ),
    Field(
        "container.bind-content",
        "must",
        "file",
        what="digest of each locked bind that hides files of the image, or in which Python looks for code",
        source="the files of the host that the bind shows, hashed on every node",
        why="the hash of the SIF does not cover a file that a bind mounts over the image",
        judged_by=("lockfile", "nodes"),
    ),
    Field(
        "container.mounts",
        "must",
        "setting",
        what="mounts that are not locked, but hide files of the image or contain code that Python finds",
        source="/proc/self/mountinfo in the container, without what hpcenv and Apptainer mount themselves",
        why="such a mount replaces files of the image; an example is `bind path` in apptainer.conf",
        hint="put the bind under [[bind]] in hpcenv.toml, then: hpcenv lock; or ask your site about apptainer.conf",
        judged_by=("rule",),
    ),
    Field(
        "container.mounts-elsewhere",
        "info",
        "note",
        what="other mounts that hpcenv did not request, at paths that the image does not have",
        source="/proc/self/mountinfo in the container",
        why="it explains what a node shows to its containers",
        judged_by=("nodes",),
    ),
    Field(
        "container.binds",
        "warn",
        "setting",
        bitwise="must",
        what="target and mode of each [[bind]] of hpcenv.toml",
        source="[[bind]] in hpcenv.toml; a change after the lock makes the lockfile stale",
        why="a script may find other data, or may write where it could only read",
        judged_by=(),
    ),
    # -- python ---------------------------------------------------------------------------
    Field(
        "python.version",
        "must",
        "python",
        what="version of the interpreter",
        source="sys.version_info inside the environment",
        why="another minor version has a different standard library, and needs different wheels",
    ),
    Field(
        "python.implementation",
        "must",
        "python",
        what="CPython, PyPy or another one",
        source="sys.implementation",
        why="each extension module is built for one implementation",
    ),
    Field(
        "python.soabi",
        "must",
        "python",
        what="binary interface of extension modules",
        source="sysconfig",
        why="it tells free-threaded and debug builds apart",
    ),
    Field(
        "python.sys-path",
        "must",
        "python",
        what="the folders in which Python looks for modules, in order, relative to its prefix",
        source="sys.path as the ranks will have it",
        why="an earlier folder hides packages of a later one",
        hint="find what adds the entry: PYTHONPATH, a .pth file, an editable install",
    ),
    Field(
        "python.user-site",
        "must",
        "setting",
        what="whether ~/.local is on sys.path",
        source="site.ENABLE_USER_SITE and sys.path",
        why="it differs from user to user and hides packages of the image",
        hint="export PYTHONNOUSERSITE=1",
    ),
    Field(
        "python.path-variable",
        "must",
        "setting",
        what="PYTHONPATH inside the environment",
        source="the environment that the ranks get",
        why="Python searches its folders before the locked packages",
        hint="unset PYTHONPATH, or set it in the image",
    ),
    Field(
        "python.variables",
        "must",
        "setting",
        what="variables that change which code Python imports: PYTHONHOME, PYTHONOPTIMIZE and similar ones",
        source="the environment that the ranks get",
        why="with them, Python runs files that were not verified, or ignores asserts",
        hint="unset the variable: look in --env, --pass-env, the site profile and the image",
    ),
    Field(
        "python.startup-files",
        "must",
        "file",
        what="code that runs when the interpreter starts: .pth, sitecustomize, usercustomize",
        source="the folders of sys.path",
        why="it can change anything before the first line of the script",
    ),
    Field(
        "python.unchecked-pyc",
        "must",
        "file",
        what="compiled files that differ from their source, although Python runs them without reading the source",
        source="__pycache__ of packages and of the standard library, or PYTHONPYCACHEPREFIX, by the rules of PEP 552",
        why="they run in place of the source that was verified",
        level="full",
    ),
    Field(
        "python.stdlib-sha256",
        "must",
        "python",
        what="digest over the standard library",
        source="the hash of each of its files that Python can import, and of pythonXY.zip; without its tests",
        why="no package manager verifies it",
        level="full",
    ),
    Field(
        "python.binary-sha256",
        "must",
        "python",
        what="sha256 of the Python program that runs",
        source="/proc/self/exe inside the environment, hashed",
        why="another build of the same version may give different results, and no package manager verifies it",
        level="full",
    ),
    Field(
        "python.libpython-sha256",
        "must",
        "python",
        what="sha256 of Python's shared library; `none` if the Python program contains all of it",
        source="the file that the running process has mapped",
        why="it contains most of the interpreter",
        level="full",
    ),
    Field(
        "python.launcher-sha256",
        "must",
        "python",
        what="sha256 of the program that starts Python, if `python` of hpcenv.toml is not Python itself",
        source="the file, hashed; `none` if this file is Python itself",
        why="a script around Python can set variables and options that are not visible elsewhere",
        hint="name the real Python as `python` in hpcenv.toml, or if you want the script: hpcenv lock",
        level="full",
    ),
    # -- torch ----------------------------------------------------------------------------
    Field(
        "torch.version",
        "must",
        "torch",
        what="torch.__version__, with its local part (+cu130)",
        source="torch/version.py, read without importing torch",
        why="kernels, defaults and numerics change between releases",
    ),
    Field(
        "torch.git-version",
        "must",
        "torch",
        what="commit that torch was built from",
        source="torch/version.py",
        why="one version number has several builds (torch 2.10.0 had three)",
    ),
    Field(
        "torch.cuda",
        "must",
        "torch",
        what="CUDA release that torch was built for, `none` for a CPU build",
        source="torch/version.py",
        why="it decides which drivers work and which GPUs have kernels",
    ),
    Field(
        "torch.hip",
        "must",
        "torch",
        what="ROCm release that torch was built for",
        source="torch/version.py",
        why="the same as torch.cuda, for AMD GPUs",
    ),
    Field(
        "torch.arch-list",
        "must",
        "torch",
        what="GPU architectures that torch has kernels for",
        source="strings in torch's own binary, read without importing it",
        why="a GPU that is not in the list fails with `no kernel image is available`",
    ),
    Field(
        "torch.config-digest",
        "must",
        "torch",
        what="digest of torch's own description of its build",
        source="the running torch (level deep)",
        why="two builds of one version may differ in compiler and options",
        level="deep",
    ),
    Field(
        "torch.running-differs",
        "must",
        "torch",
        what="differences between the running torch and its files",
        source="an import of torch (level deep)",
        why="if there are differences, the values that were read without importing torch are wrong",
        level="deep",
    ),
    Field(
        "torch.cpu-capability",
        "info",
        "hardware",
        bitwise="warn",
        what="vector instructions that torch uses on this processor",
        source="the running torch (level deep)",
        why="different kernels round differently",
        level="deep",
    ),
    Field(
        "torch.*",
        "must",
        "torch",
        members=("torch.cxx11-abi", "torch.debug"),
        what="another property of torch's build",
        source="torch's own files; at level deep the running torch",
        why="two builds of one version may have different values",
    ),
    # -- JAX ------------------------------------------------------------------------------
    *(
        Field(
            f"jax.{name}",
            "must",
            "package",
            what=what,
            source="the installed packages; this field is missing if jax is not installed",
            why=why,
            hint=_REINSTALL,
        )
        for name, what, why in (
            ("version", "version of jax", "kernels and numerics change between releases"),
            (
                "jaxlib",
                "version of jaxlib, which has the compiler XLA",
                "a different version compiles different code, which rounds differently",
            ),
            (
                "cuda",
                "CUDA release that JAX's plug-in is for, `none` without one",
                "it decides which drivers work and which GPUs are supported",
            ),
            (
                "cuda-plugin",
                "version of JAX's plug-in for CUDA, `absent` without one",
                "without this plug-in, or with one of another release, JAX computes on the CPU",
            ),
        )
    ),
    # -- compilers ------------------------------------------------------------------------
    *(
        Field(
            f"compilers.{name}",
            "info",
            "setting",
            what=what,
            source=f"`--version` of the program that {found}, inside the environment",
            why=why,
            hint="load the same module on all nodes, or use an image that has the compiler",
            judged_by=("nodes",),
        )
        for name, what, found, why in (
            (
                "c",
                "the C compiler that Triton uses, `absent` without one",
                "CC names, else gcc or clang on PATH",
                "without it, torch.compile and your own Triton kernels fail at their first call",
            ),
            (
                "cxx",
                "the C++ compiler that torch's extensions and torch.compile on CPUs use, `absent` without one",
                "CXX names, else c++ on PATH",
                "code that is compiled at run time rounds differently with a different compiler",
            ),
            (
                "nvcc",
                "release of the CUDA compiler that torch's extensions use, `absent` without one",
                "CUDA_HOME or CUDA_PATH has, else nvcc on PATH or in /usr/local/cuda",
                "without it, extensions with CUDA code cannot be compiled",
            ),
            (
                "ptxas",
                "release of the assembler that Triton uses for NVIDIA GPUs, `absent` without one",
                "TRITON_PTXAS_PATH names, else Triton's own or that of /usr/local/cuda",
                "an older release does not support newer GPUs",
            ),
        )
    ),
    # -- libraries ------------------------------------------------------------------------
    Field(
        "libs.ld-library-path",
        "must",
        "setting",
        what="LD_LIBRARY_PATH inside the environment",
        source="the environment that the ranks get",
        why="environment modules make the loader find other CUDA libraries before torch's own (pytorch#111469)",
        hint="unload the module, or unset LD_LIBRARY_PATH",
    ),
    Field(
        "libs.ld-preload",
        "must",
        "setting",
        what="LD_PRELOAD inside the environment, with the start of each library's sha256",
        source="the environment that the ranks get",
        why="a preloaded library replaces functions of every other library",
        hint="unset LD_PRELOAD",
    ),
    Field(
        "libs.ld-audit",
        "must",
        "setting",
        what="LD_AUDIT inside the environment, with the start of each library's sha256",
        source="the environment that the ranks get",
        why="the loader loads such a library first, and this library can replace the others",
        hint="unset LD_AUDIT",
    ),
    Field(
        "libs.glibc-tunables",
        "warn",
        "setting",
        bitwise="must",
        what="GLIBC_TUNABLES inside the environment",
        source="the environment that the ranks get",
        why="they decide which math functions of the C library run, for example functions for another processor",
        hint="unset GLIBC_TUNABLES",
    ),
    Field(
        "libs.ld-so-preload",
        "must",
        "library",
        what="libraries that /etc/ld.so.preload loads before all others, each with the start of its sha256",
        source="/etc/ld.so.preload inside the environment",
        why="a preloaded library replaces functions of every other library",
        hint="ask the administrator; if it belongs to this cluster: hpcenv lock, or change the severity in [policy]",
        judged_by=("lockfile", "nodes"),
    ),
    Field(
        "libs.system",
        "warn",
        "library",
        bitwise="must",
        between_nodes="must",
        what="libraries outside of the environment that Python, torch and other packages load, each with the start of "
        "its sha256",
        source="the libraries that each library names (DT_NEEDED), in ld.so's order; without the NVIDIA driver",
        why="math functions of another libc round differently; the nodes of one job must have the same libraries",
        hint="on another cluster this is normal; on one cluster, ask for nodes of one kind (--constraint, --nodelist)",
        level="full",
        judged_by=("lockfile", "nodes"),
    ),
    Field(
        "libs.unlisted",
        "must",
        "library",
        what="libraries inside the environment that are loaded and that no package lists, each with the start of its "
        "sha256",
        source="the libraries that each library names (DT_NEEDED), in ld.so's order",
        why="no package manager verifies them",
        level="full",
    ),
    *(
        Field(
            f"libs.{name}.version",
            "must",
            "library",
            what=f"version that {name} itself reports",
            source="the library's own API; loading the library is too slow for the default level",
            why="the library that loads is not always the one that pip lists",
            level="full",
        )
        for name in ("cublas", "cublaslt")
    ),
    *(
        Field(
            f"libs.{name}.version",
            "must",
            "library",
            what=f"version that {name} itself reports",
            source="its own API, called without a GPU",
            why="the library that loads is not always the one that pip lists",
        )
        for name in ("cudart", "cudnn", "nccl")
    ),
    Field(
        "libs.*.version",
        "must",
        "library",
        what="version that a library itself reports",
        source="its own API, called without a GPU; otherwise its file name",
        why="the library that loads is not always the one that pip lists",
    ),
    Field(
        "libs.*.origin",
        "must",
        "library",
        what="the place where the loader finds a library: prefix, system or elsewhere",
        source="RPATH and RUNPATH of torch, LD_LIBRARY_PATH and the loader's cache, in ld.so's order",
        why="a copy in another place hides the locked library",
    ),
    Field(
        "libs.*.build-id",
        "warn",
        "library",
        bitwise="must",
        what="GNU build-id of a library",
        source="its ELF note",
        why="two builds of one version have different build-ids",
    ),
    Field(
        "libs.*.sha256",
        "warn",
        "library",
        bitwise="must",
        what="sha256 of a library's file",
        source="the file, hashed",
        why="a patched library keeps its version and build-id",
        level="full",
    ),
    Field(
        "loaded.differs",
        "must",
        "library",
        what="libraries that the loader mapped from a different path than its rules give",
        source="/proc/PID/maps of a process that imported torch, against libs.*.origin",
        why="an installed library is not always the loaded one",
        level="deep",
    ),
    Field(
        "loaded.*",
        "must",
        "library",
        what="the file that the loader really mapped for a library",
        source="/proc/PID/maps of a process that imported torch: of torchrun before its first rank starts (NCCL, "
        "cuDNN, cuBLAS and torch's own), or of a child of the probe at level deep",
        why="an installed library is not always the loaded one",
        level="deep",
        judged_by=("lockfile", "rule"),
    ),
    # -- packages -------------------------------------------------------------------------
    Field(
        "packages.env-digest",
        "must",
        "package",
        what="digest over every package's name, version and RECORD (hpcenv-env-v1)",
        source="the RECORD files",
        why="it covers the whole Python environment; single packages that differ are reported themselves",
    ),
    Field(
        "packages.content-digest",
        "must",
        "file",
        what="the same digest over the real content of the files",
        source="every listed file, hashed",
        why="it equals env-digest only if no file was modified; single packages that differ are reported themselves",
        level="full",
    ),
    Field(
        "packages.unlisted-digest",
        "must",
        "file",
        what="digest over importable files, device code and entry points that no package lists with a hash",
        source="a scan of the site folders",
        why="Python imports such a file like any other",
    ),
    Field(
        "packages.unlisted-count",
        "info",
        "note",
        what="how many importable files no package lists",
        source="a scan of the site folders",
        why="it explains unlisted-digest",
        judged_by=(),
        fixed=_COUNT,
    ),
    Field(
        "packages.count",
        "info",
        "note",
        what="how many packages are installed",
        source="the .dist-info folders",
        why="it explains env-digest",
    ),
    Field(
        "packages.conda-digest",
        "must",
        "package",
        what="digest over the packages that conda installed",
        source="conda-meta/*.json",
        why="conda installs libraries and interpreters without a RECORD",
    ),
    Field(
        "packages.conda-count",
        "info",
        "note",
        what="how many packages conda installed",
        source="conda-meta/*.json",
        why="it explains conda-digest",
        judged_by=(),
        fixed=_COUNT,
    ),
    Field(
        "packages.conda-content-digest",
        "must",
        "file",
        what="digest over the real content of the files that conda installed and no RECORD lists",
        source="every such file, hashed without the prefix that conda wrote into files",
        why="no conda tool notices a file that was changed after the installation",
        hint="conda install --force-reinstall NAME, or if you want the change: hpcenv lock",
        level="full",
    ),
    Field(
        "packages.conda-modified",
        "must",
        "file",
        follows="packages.conda-content-digest",
        what="files that have changed since conda installed them",
        source="every file in conda-meta's paths_data, hashed",
        why="it lists the changed files that make conda-content-digest differ",
        hint="conda install --force-reinstall NAME, or if you want the change: hpcenv lock",
        level="full",
    ),
    Field(
        "packages.*",
        "must",
        "package",
        follows="packages.env-digest",
        what="one installed package",
        source="its .dist-info folder",
        why="another version, or another build of the same version, contains different code",
        hint=_REINSTALL,
    ),
    Field(
        "packages.*.record-sha256",
        "must",
        "package",
        follows="packages.env-digest",
        what="digest over a package's RECORD",
        source="the RECORD file",
        why="two builds of one version have different RECORDs; the RECORD inside the wheel has the same digest",
        hint=_REINSTALL,
    ),
    Field(
        "packages.*.content-sha256",
        "must",
        "file",
        follows="packages.content-digest",
        what="digest over the real content of a package's files",
        source="every listed file, hashed",
        why="no Python tool notices a file that was edited after installation",
        hint=_REINSTALL,
        level="full",
    ),
    Field(
        "packages.*.programs-sha256",
        "must",
        "file",
        follows="packages.content-digest",
        what="digest over a package's programs in bin/, without their first line, which names the environment's Python",
        source="every listed program, hashed; launchers of entry points are left out while they are as installers "
        "write them",
        why="the RECORD's hash of a program changes with the folder of the environment",
        hint=_REINSTALL,
        level="full",
    ),
    Field(
        "packages.*.commit-id",
        "must",
        "package",
        what="commit that a package was installed from, or that an editable install runs",
        source="direct_url.json, and git for an editable install",
        why="an editable install has no digest, so its commit identifies its code",
        hint="check out the locked commit",
    ),
    Field(
        "packages.*.dirty",
        "warn",
        "package",
        bitwise="must",
        what="whether the working tree of an editable install has changes",
        source="git",
        why="the changes are not in the commit, and no other user has them",
        hint="commit the change, then: hpcenv lock",
    ),
    Field(
        "packages.*.diff-sha256",
        "warn",
        "package",
        bitwise="must",
        what="digest of the differences from the commit of an editable install; `none` without differences",
        source="git: changed files; and importable files that git does not track, also ignored ones (*.so)",
        why="two working trees with different changes are two environments, even with the same commit",
        hint="commit the change, or build again, then: hpcenv lock",
    ),
    Field(
        "packages.*.files-sha256",
        "warn",
        "package",
        bitwise="must",
        what="digest over the importable files of an editable install that git cannot describe",
        source="the folders below the folder that it was installed from",
        why="without a commit only the files can be compared",
        hint="put it under git, or if you want the change: hpcenv lock",
    ),
    Field(
        "packages.*.layer",
        "info",
        "note",
        what="`overlay` for a package that is not from the image",
        source="`hpcenv lock`: where the package was found, with the overlay and without it",
        why="it says whether the overlay or the image must be changed",
        judged_by=(),
        fixed=_ORIGIN,
    ),
    Field(
        "packages.*.hides",
        "info",
        "note",
        what="version of the same package in the image, for a package of the overlay",
        source="`hpcenv lock`: the packages of the image without the overlay",
        why="the image was tested with a different version",
        judged_by=(),
        fixed=_ORIGIN,
    ),
    Field(
        "packages.*.source",
        "info",
        "note",
        what="where a package came from: wheel, sdist, editable, vcs, directory, conda, Debian",
        source="direct_url.json, WHEEL and INSTALLER",
        why="it explains other differences: a package that was compiled at its installation differs between machines",
        judged_by=(),
        fixed=_ORIGIN,
    ),
    Field(
        "packages.*.wheel-proof",
        "info",
        "note",
        what="whether the sha256 of the wheel that a package came from is confirmed",
        source="`hpcenv lock`: the installed RECORD, compared with the RECORD of the wheel; or a lockfile in the image",
        why="without a confirmed hash, a later installation may get a different file",
        hint="install it from a wheel of an index that pip is configured for, then: hpcenv lock --require-hashes",
        judged_by=("rule",),
    ),
    Field(
        "packages.*.wheel-sha256",
        "info",
        "note",
        what="sha256 of the wheel that a package came from, and how it was confirmed",
        source="`hpcenv lock`, through pip with the user's own index",
        why="it cannot be read after installation; it lets others install the very same file",
        judged_by=(),
        fixed=_ORIGIN,
    ),
    Field(
        "packages.*.nvcc",
        "info",
        "note",
        what="version of the CUDA compiler that compiled a package in the image",
        source="`hpcenv lock`: the report of the build in the image (`hpcenv image init --build`)",
        why="it explains a different wheel: a different compiler produces different machine code",
        judged_by=(),
        fixed=_ORIGIN,
    ),
    Field(
        "packages.*.compiler",
        "info",
        "note",
        what="the C++ compiler that compiled a package in the image, as `c++ --version` names it",
        source="`hpcenv lock`: the report of the build in the image (`hpcenv image init --build`)",
        why="it explains a different wheel: a different compiler produces different machine code",
        judged_by=(),
        fixed=_ORIGIN,
    ),
    # -- system ---------------------------------------------------------------------------
    Field(
        "system.machine",
        "must",
        "hardware",
        what="processor architecture",
        source="uname",
        why="binaries for another architecture do not run",
    ),
    Field(
        "system.os-release",
        "info",
        "image",
        what="distribution and its version",
        source="/etc/os-release inside the environment",
        why="it explains differences in system libraries",
    ),
    Field(
        "system.glibc",
        "info",
        "image",
        what="version of the C library",
        source="the running process",
        why="wheels need a minimum version; math functions of two versions may differ in the last bit",
    ),
    Field(
        "system.packages-count",
        "info",
        "note",
        what="how many packages the distribution installed",
        source="dpkg, rpm or apk, read without running them",
        why="it explains packages-digest",
        judged_by=(),
        fixed=_COUNT,
    ),
    Field(
        "system.packages-digest",
        "info",
        "image",
        bitwise="must",
        what="digest over the distribution's packages",
        source="dpkg, rpm or apk, read without running them",
        why="libraries outside of Python come from here; the hash of a SIF covers them already",
    ),
    Field(
        "system.*",
        "info",
        "image",
        members=("system.packages-manager",),
        what="another property of the system inside the environment",
        source="files inside the environment",
        why="it explains differences",
    ),
    # -- compatibility --------------------------------------------------------------------
    Field(
        "compat.torch",
        "info",
        "torch",
        what="whether the compatibility table has this release of torch",
        source="the compatibility table (docs/reference/compatibility.md), against torch.version",
        why="for a release that is not in the table, hpcenv cannot judge the other compat fields",
        hint="a newer hpcenv has a newer table; a torch that you built yourself is never in it",
        judged_by=("rule",),
    ),
    *(
        Field(
            f"compat.{name}",
            "warn",
            "library",
            what=f"whether {word} has the version that the wheel of torch requires",
            source=f"the compatibility table, against libs.{name}.version or the package of {word}",
            why=why,
            hint="install the version that torch requires, or lower the severity in [policy] if you want another one",
            judged_by=("rule",),
            gpus=True,
        )
        for name, word, why in (
            ("cudnn", "cuDNN", "torch refuses an older version, and was not tested with a different one"),
            ("nccl", "NCCL", "torch was not tested with different versions; some hang or give wrong results"),
            ("cublas", "cuBLAS", "another version rounds differently"),
        )
    ),
    *(
        Field(
            f"compat.{name}",
            "must",
            "package",
            what=f"whether {name} is made for this torch; another patch release of the same torch is only a warning",
            source=f"the compatibility table, against packages.{name}",
            why=f"`import {name}` fails, or its operators are missing",
            hint=f"install the {name} that the note names",
            judged_by=("rule",),
        )
        for name in ("torchvision", "torchaudio")
    ),
    # -- nodes ----------------------------------------------------------------------------
    Field(
        "host.driver-version",
        "must",
        "driver",
        what="version of the NVIDIA driver",
        source="NVML, otherwise /proc/driver/nvidia/version",
        why="a driver older than the minimum of the CUDA runtime fails at the first CUDA call",
        hint="ask for other nodes (--constraint, --partition), or use an image for an older CUDA runtime",
        judged_by=("rule", "nodes"),
        gpus=True,
    ),
    Field(
        "host.gpu-count",
        "must",
        "hardware",
        what="how many GPUs the job sees on a node",
        source="NVML or AMD's driver (/sys/class/kfd), compared with --gpus",
        why="each rank needs one GPU",
        hint="check --gpus and the partition's GRES",
        judged_by=("rule",),
        gpus=True,
    ),
    Field(
        "host.gpu-models",
        "must",
        "hardware",
        what="names of the GPUs",
        source="NVML; for AMD the driver, amd-smi or rocm-smi",
        why="the nodes of one job must have the same GPU model; results are equal in every bit only on one model",
        hint="ask for one model: --gpu-type or --constraint",
        judged_by=("nodes",),
        gpus=True,
    ),
    Field(
        "host.gpu-compute-capabilities",
        "must",
        "hardware",
        what="compute capability of each GPU; for AMD the target, for example gfx90a, which is not judged",
        source="NVML, compared with torch.arch-list and `arch-list` of built packages; for AMD /sys/class/kfd",
        why="torch, and a package compiled in the image, have kernels for a fixed list of architectures",
        hint="use a torch build, or compile the package, for this GPU; or use other nodes",
        judged_by=("rule",),
        gpus=True,
    ),
    Field(
        "host.gpu-mig",
        "must",
        "hardware",
        what="whether GPUs are split (MIG)",
        source="NVML",
        why="a MIG instance has fewer SMs, so its speed and its order of reductions differ",
        hint="ask for whole GPUs",
        judged_by=("rule", "nodes"),
        gpus=True,
    ),
    Field(
        "host.gpu-sm-counts",
        "warn",
        "hardware",
        bitwise="must",
        what="number of streaming multiprocessors of each GPU",
        source="NVML",
        why="cuBLAS gives equal bits only on GPUs with the same number of SMs",
        hint="ask for one model: --gpu-type or --constraint",
        judged_by=("nodes",),
        gpus=True,
    ),
    Field(
        "host.gpu",
        "warn",
        "hardware",
        bitwise="must",
        what="the GPU that the environment was locked for",
        source="`gpu` under [host] in hpcenv.toml, against the GPUs of each node",
        why="different GPUs round differently",
        hint="ask for that model: --gpu-type or --constraint",
        judged_by=("rule",),
        gpus=True,
    ),
    Field(
        "host.gpu-memory",
        "must",
        "hardware",
        what="the least memory that each GPU must have",
        source="`gpu-memory` under [host] in hpcenv.toml, against host.gpu-memory-mib of each node",
        why="a smaller GPU runs out of memory, often after hours",
        hint="ask for other nodes (--constraint, --gres), or lower `gpu-memory`",
        judged_by=("rule",),
        gpus=True,
    ),
    Field(
        "host.driver-min",
        "info",
        "driver",
        what="oldest driver that runs the locked CUDA build",
        source="`hpcenv lock`, from the compatibility table",
        why="it tells readers of the lockfile which nodes they need",
        judged_by=(),
        fixed="nodes are judged by host.driver-version",
    ),
    Field(
        "host.nvidia-require.*",
        "info",
        "driver",
        what="a rule of the image about drivers and GPUs",
        source="the image's NVIDIA_REQUIRE_* variables",
        why="it tells readers of the lockfile which nodes they need",
        judged_by=(),
        fixed="nodes are judged by container.nvidia-require",
    ),
    Field(
        "host.gpu-uuids",
        "info",
        "note",
        what="UUID of each GPU",
        source="NVML",
        why="it helps to find a broken GPU",
        judged_by=(),
        fixed="every GPU has its own",
        gpus=True,
    ),
    Field(
        "host.hostname",
        "info",
        "note",
        what="name of the node",
        source="uname",
        why="it helps to find the node",
        judged_by=(),
        fixed="every node has its own",
    ),
    Field(
        "host.cpu-model",
        "info",
        "hardware",
        bitwise="must",
        what="type of the processor of a node",
        source="/proc/cpuinfo",
        why="libraries choose kernels for the processor, so CPU computations give different bits on another type",
        hint="ask for nodes of one kind: --constraint, --partition or --nodelist",
        judged_by=("nodes",),
    ),
    *(
        Field(
            f"host.{name}",
            "info",
            "note",
            what=what,
            source="NVML or the node's own files",
            why="it explains differences in speed and results",
            hint="ask for nodes of one kind: --constraint, --partition or --nodelist",
            judged_by=("nodes",),
            gpus=gpus,
        )
        for name, gpus, what in (
            ("gpu-memory-mib", True, "memory of each GPU in MiB"),
            ("gpu-ecc", True, "whether error correction is on"),
            ("gpu-brands", True, "product line of each GPU"),
            ("cuda-driver-version", True, "newest CUDA driver API version that the driver supports"),
            ("cpus", False, "how many processors the job may use on a node"),
            ("memlock", False, "how much memory a process may lock; RDMA needs `unlimited`"),
            ("shm-mib", False, "size of /dev/shm in MiB; NCCL and data loaders use it"),
            ("rdma", False, "InfiniBand and RoCE ports with state and rate"),
            ("kernel", False, "release of the Linux kernel"),
            ("glibc", False, "version of the node's own C library"),
            ("apptainer", False, "version of Apptainer"),
            ("slurm", False, "version of Slurm"),
        )
    ),
    Field(
        "host.machine",
        "must",
        "hardware",
        what="processor architecture of a node",
        source="uname",
        why="the nodes of one job must have the same architecture",
        hint="ask for nodes of one kind: --constraint or --partition",
        judged_by=("nodes",),
    ),
    Field(
        "host.*",
        "info",
        "note",
        what="another property of a node",
        source="the node's own files and tools",
        why="it explains differences in speed",
        judged_by=("nodes",),
    ),
    Field(
        "network.route",
        "must",
        "hardware",
        what="a route from every node to the first one",
        source="the kernel's routing table on each node",
        why="without a route the ranks cannot meet",
        hint="check the nodes' names and networks; `host.*` facts list the interfaces",
        judged_by=("rule",),
        fixed=_NO_LAUNCH,
    ),
    Field(
        "stage",
        "warn",
        "note",
        what="whether a node uses its own copy of the SIF and the data",
        source="the staging step of each node",
        why="the shared file system is slower, and many nodes slow it down for everyone",
        hint="free space on the node's disk, or stage less",
        judged_by=("rule",),
    ),
    # -- how strict -----------------------------------------------------------------------
    Field(
        "determinism.profile",
        "warn",
        "setting",
        bitwise="must",
        what="how exactly runs must repeat: off, seeded or bitwise; this also decides the severity of some fields",
        source="`profile` under [determinism] in hpcenv.toml",
        why="in a different profile, the ranks have different settings, and different fields stop a job",
        judged_by=(),
    ),
    Field(
        "policy",
        "warn",
        "setting",
        bitwise="must",
        what="severities that the project changed",
        source="[policy] in hpcenv.toml",
        why="a difference in a field with a lower severity does not stop a job any more",
        judged_by=(),
        fixed="a project must not hide that it lowered the severities of other fields",
    ),
    # -- run ------------------------------------------------------------------------------
    Field(
        "code.script-sha256",
        "must",
        "setting",
        what="sha256 of the training script, or of the file of the module",
        source="the file as each node reads it, compared with the submitted file",
        why="after an edit while the job waits, or with an old file in a cache, the job would run different code",
        hint="submit again",
        judged_by=("rule",),
    ),
    Field(
        "code.digest",
        "must",
        "setting",
        what="sha256 over all files of the run's own copy of the code",
        source="each file as every node reads it, compared with the submitted file",
        why="a different module, configuration or link gives different results",
        hint="submit again; do not edit files in the run folder",
        judged_by=("rule",),
    ),
    Field(
        "code.changed",
        "warn",
        "setting",
        what="modules of the run's own copy that an earlier attempt has changed since the submission",
        source="the record of the copy at the end of the previous attempt",
        why="the script or another person may have written these modules, and a later attempt runs them",
        hint="if the script did not write them: submit again; do not edit files in the run folder",
        judged_by=("rule",),
    ),
    Field(
        "code.start-hook-sha256",
        "must",
        "setting",
        what="sha256 over the files that Python runs at the start of every rank, before the script",
        source="the files as each node reads them, compared with the submitted files",
        why="they set the determinism switches and record the training; changed files may do something else",
        hint="submit again; do not edit files in the run folder",
        judged_by=("rule",),
    ),
    Field(
        "code.*",
        "must",
        "setting",
        members=("code.commit", "code.dirty", "code.diff-sha256", "code.workdir", "code.files"),
        what="state of the code: commit and uncommitted changes",
        source="git, at submission",
        why="another commit is another experiment",
        hint="check out the other commit; without git, take the files of the other run from its folder (`source`)",
        judged_by=(),
    ),
    Field(
        "data.*",
        "must",
        "setting",
        what="state of data that [[data]] in hpcenv.toml names",
        source="names and sizes, times or content, compared with the state at submission",
        why="different data give different results",
        hint="bring the old data back, or submit again with the present data",
        judged_by=("rule",),
    ),
    Field(
        "run.outcome",
        "must",
        "note",
        what="whether a run trained, and how it ended if it did not",
        source="verdict and exit of the run",
        why="a run that was rejected or did not complete has no result to compare",
        hint="hpcenv report RUN says why",
        judged_by=(),
    ),
    *(
        Field(
            f"run.{name}",
            "must",
            "setting",
            what=what,
            source="the submission",
            why=why,
            hint=hint,
            judged_by=(),
        )
        for name, what, why, hint in (
            ("nodes", "number of nodes that train", _WORLD, _SHAPE),
            ("nproc-per-node", "ranks on each node", _WORLD, _SHAPE),
            ("gpus-per-node", "GPUs on each node", "a GPU and a CPU compute different sums", _SHAPE),
            ("backend", "backend of torch.distributed", "different backends add in a different order", _SHAPE),
            ("script", "path of the training script in its project", "another program is another experiment", _SCRIPT),
            ("data", "staged folders of data", "other data are another experiment", "stage the same folders"),
            ("arguments", "arguments of the training script", "other arguments are another experiment", _ARGUMENTS),
        )
    ),
    Field(
        "run.*",
        "warn",
        "setting",
        bitwise="must",
        members=("run.argv",),
        what="another part of the shape and command of a run",
        source="the submission",
        why="the world size changes the order of sums and the batch size",
        hint="submit with the same --nodes, --gpus, --nproc and arguments",
        judged_by=(),
    ),
    Field(
        "env.*",
        "warn",
        "setting",
        bitwise="must",
        what="a variable that the ranks get",
        source="[env] in hpcenv.toml is locked; on each node, all variables that the ranks get, with their origin",
        why="libraries read variables: threads, algorithms and protocols change the order of sums",
        hint="submit with --env NAME=VALUE, or set it under [env] in hpcenv.toml, then: hpcenv lock",
        judged_by=("lockfile", "nodes"),
    ),
    Field(
        "job.nodes",
        "must",
        "note",
        what="how many nodes the job has",
        source="Slurm, compared with the submitted number",
        why="a job of another size is another experiment",
        hint="submit again; scontrol changed the job",
        judged_by=("rule",),
        fixed="ranks and rendezvous are planned for this number of nodes",
    ),
    Field(
        "lockfile",
        "must",
        "note",
        what="whether a node could compare any field",
        source="the facts of the node",
        why="a check that compared nothing must not look like a match",
        hint="hpcenv lock",
        judged_by=("rule",),
        fixed="a check that compared nothing must not look like a match",
    ),
    Field(
        "lockfile.edited",
        "warn",
        "note",
        what="whether an edited lockfile was used (--frozen)",
        source="the fingerprint in the lockfile, compared with the fingerprint of its content",
        why="the fingerprint in a paper would then name another environment",
        hint="hpcenv lock, or: git checkout the lockfile",
        judged_by=("rule",),
        fixed="the person who edits a lockfile must not be able to hide the edit",
    ),
    Field(
        "lockfile.revision",
        "warn",
        "note",
        what="minor version of the lockfile's format, if this hpcenv has a different one",
        source="the lockfile",
        why="hpcenv does not compare keys that it does not know, and fields that are missing in an older lockfile",
        hint="for a newer lockfile: pip install --upgrade hpcenv; for an older one: hpcenv lock",
        judged_by=("rule",),
        fixed="with `hpcenv verify --strict`, this difference is an error",
    ),
    Field(
        "facts",
        "must",
        "note",
        what="the report of a node",
        source="facts/NODE.json",
        why="nothing is known about a node that does not report",
        hint="look for the node's name in the job's log",
        judged_by=("rule",),
        fixed="nothing is known about a node that does not report",
    ),
    Field(
        "environment",
        "must",
        "note",
        what="whether the environment could be read",
        source="the probe",
        why="a value that could not be read is never reported as a match",
        hint="start it by hand on that node: hpcenv verify",
        judged_by=("rule",),
        fixed="a value that could not be read is never reported as a match",
    ),
    *(
        Field(
            check.id,
            check.severity,
            "hardware" if check.owner == "node" else "setting",
            what=check.measures,
            source="a check of every start with GPUs"
            if check.place == "start"
            else f"a preflight check of level {check.level}",
            why=check.why,
            hint=check.hint,
            judged_by=("rule",),
            gpus=check.gpus,
        )
        for check in CHECKS
    ),
)


@functools.lru_cache(maxsize=10_000)
def find(name: str) -> Field | None:
    """Return the row for `name`: the row with exactly this name, otherwise the row of the narrowest family."""
    exact = _by_name().get(name)
    if exact is not None:
        return exact
    return max((field for field in _families() if field.fits(name)), key=lambda field: len(field.name), default=None)


@functools.cache
def _by_name() -> dict[str, Field]:
    return {field.name: field for field in FIELDS}


@functools.cache
def _families() -> tuple[Field, ...]:
    return tuple(field for field in FIELDS if "*" in field.name)


def has_row(name: str) -> bool:
    """Return whether the table has a row for exactly this name, not only for its family."""
    return name in _by_name()
