"""Every field that is locked or compared: what it is, where it comes from, why it matters.

Runs on: LOGIN NODE. Pure data. The one list behind severities, `hpcenv explain`,
`hpcenv diff`'s grouping and the generated page docs/reference/fields.md. Severities follow
reference/lockfiles.md, section 2 (2026-11-20).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Literal

from hpcenv.dataclass import dataclass
from hpcenv.wire import Severity

Profile = Literal["default", "bitwise"]
Level = Literal["record", "full", "deep"]
LEVELS: tuple[Level, ...] = ("record", "full", "deep")

# What it takes to make two environments equal in a field, hardest first: nobody should fret
# about a package while the GPU is another one.
Repair = Literal["hardware", "driver", "image", "python", "torch", "library", "package", "file", "setting", "note"]
REPAIRS: tuple[Repair, ...] = (
    "hardware", "driver", "image", "python", "torch", "library", "package", "file", "setting", "note",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field, or a family of them (`*` stands for one part of the name).

    Attributes:
        name: dotted name, as in the lockfile, the facts and every table.
        what: what it is.
        source: where the value comes from.
        why: what goes wrong when it differs.
        default, bitwise: severity in the two profiles, None when it is only recorded.
        repair: what it takes to make it equal.
        remedy: what to do about a difference.
        level: how deep a node must look to read it.
    """

    name: str
    what: str
    source: str
    why: str
    default: Severity | None
    bitwise: Severity | None
    repair: Repair
    remedy: str
    level: Level = "record"

    def fits(self, name: str) -> bool:
        """Whether `name` is this field or one of its family."""
        own, words = self.name.split("."), name.split(".")
        return len(own) == len(words) and all(
            part == word or (part == "*" and word != "") for part, word in zip(own, words, strict=True)
        )


_RELOCK = "if the change is wanted: hpcenv lock; else go back to what the lockfile names"
_REBUILD = "use the image that the lockfile names: hpcenv lock makes its SIF again"
_REINSTALL = "pip install --force-reinstall --no-deps NAME==VERSION, or use the locked image"


def _field(
    name: str,
    severities: tuple[Severity | None, Severity | None],
    repair: Repair,
    *,
    what: str,
    source: str,
    why: str,
    remedy: str = _RELOCK,
    level: Level = "record",
) -> Field:
    default, bitwise = severities
    return Field(
        name=name,
        what=what,
        source=source,
        why=why,
        default=default,
        bitwise=bitwise,
        repair=repair,
        remedy=remedy,
        level=level,
    )


FIELDS: tuple[Field, ...] = (
    # -- container ------------------------------------------------------------------------
    _field(
        "container.sif.sha256",
        ("must", "must"),
        "image",
        what="sha256 of the SIF file that the nodes run",
        source="hashed on every node, through the descriptor that is then started",
        why="another file is another environment, whatever its name says",
        remedy=_REBUILD,
    ),
    _field(
        "container.rootfs-chain-id",
        ("must", "must"),
        "image",
        what="OCI ChainID over the layers' diff_ids",
        source="the image's config, as the registry served it",
        why="the identity of the file system; the same after recompression, save and load, and conversion",
        remedy=_REBUILD,
    ),
    _field(
        "container.manifest-digest",
        ("warn", "warn"),
        "image",
        what="digest of the platform's manifest: what is pulled",
        source="the registry",
        why="changes with compression alone; compare rootfs-chain-id before worrying",
    ),
    _field(
        "container.config-digest",
        ("must", "must"),
        "image",
        what="digest of the image's config (docker's image id)",
        source="the registry",
        why="environment, entry point and working directory stand in it",
    ),
    _field(
        "container.env-digest",
        ("must", "must"),
        "image",
        what="digest over the image's ENV, ENTRYPOINT, CMD, WORKDIR and USER",
        source="the image's config",
        why="variables decide what Python and the loader find",
    ),
    _field(
        "container.index-digest",
        ("info", "info"),
        "note",
        what="digest of the multi-platform index that the tag named",
        source="the registry",
        why="changes with attestations of other platforms; recorded to find the image again",
    ),
    _field(
        "container.digest-origin",
        ("info", "info"),
        "note",
        what="where the manifest digest comes from, if not from a registry: `layout`, or `synthesised` by hpcenv",
        source="how the image was read",
        why="an archive of `docker save` has no manifest; hpcenv writes the same one for the same image",
    ),
    _field(
        "container.tree-sha256",
        ("info", "info"),
        "note",
        what="digest of the file tree, equal for every SIF of the image whoever made it",
        source="computed from the layers, and compared with what the SIF holds",
        why="absent where nobody compared; rootfs-chain-id names the same files",
    ),
    _field(
        "container.reference",
        ("info", "info"),
        "note",
        what="the reference as it was asked for",
        source="`image` in hpcenv.toml",
        why="tags move; the digests are the identity",
    ),
    _field(
        "container.platform",
        ("must", "must"),
        "hardware",
        what="operating system and architecture of the image",
        source="the image's config",
        why="an image for another processor does not start, or runs in emulation",
    ),
    _field(
        "container.nvidia-require",
        ("info", "info"),
        "driver",
        what="NVIDIA_REQUIRE_CUDA: which drivers the image says it needs",
        source="the image's ENV",
        why="Apptainer ignores it; hpcenv evaluates it before the job waits in the queue",
    ),
    _field(
        "container.nvidia.*",
        ("info", "info"),
        "driver",
        what="one of the image's NVIDIA_* variables, or its CUDA_VERSION",
        source="the image's ENV",
        why="says which drivers and GPUs the image was made for; env-digest covers it",
    ),
    _field(
        "container.sif.*",
        (None, None),
        "note",
        what="how the SIF was made",
        source="the build",
        why="explains why two SIFs of one image have other bytes",
    ),
    # -- python ---------------------------------------------------------------------------
    _field(
        "python.version",
        ("must", "must"),
        "python",
        what="version of the interpreter",
        source="sys.version_info inside the environment",
        why="another minor version is another standard library and another set of wheels",
    ),
    _field(
        "python.implementation",
        ("must", "must"),
        "python",
        what="CPython, PyPy or another one",
        source="sys.implementation",
        why="extension modules are built for one of them",
    ),
    _field(
        "python.soabi",
        ("must", "must"),
        "python",
        what="binary interface of extension modules",
        source="sysconfig",
        why="tells free-threaded and debug builds apart",
    ),
    _field(
        "python.sys-path",
        ("must", "must"),
        "python",
        what="where Python looks for modules, in order, relative to its prefix",
        source="sys.path as the ranks will have it",
        why="a folder in front shadows packages behind it",
        remedy="find what adds the entry: PYTHONPATH, a .pth file, an editable install",
    ),
    _field(
        "python.user-site",
        ("must", "must"),
        "setting",
        what="whether ~/.local is on sys.path",
        source="site.ENABLE_USER_SITE and sys.path",
        why="it differs from user to user and shadows the image",
        remedy="export PYTHONNOUSERSITE=1",
    ),
    _field(
        "python.path-variable",
        ("must", "must"),
        "setting",
        what="PYTHONPATH inside the environment",
        source="the environment that the ranks get",
        why="it goes in front of everything that is locked",
        remedy="unset PYTHONPATH, or set it in the image",
    ),
    _field(
        "python.startup-files",
        ("must", "must"),
        "file",
        what="code that runs at the interpreter's start: .pth, sitecustomize, usercustomize",
        source="the folders of sys.path",
        why="it can change anything before the first line of the script",
    ),
    _field(
        "python.unchecked-pyc",
        ("must", "must"),
        "file",
        what="compiled files that Python runs without looking at their source, and that are not of it",
        source="__pycache__, by the rules of PEP 552",
        why="they run in place of the source that was verified",
        level="full",
    ),
    _field(
        "python.stdlib-sha256",
        ("must", "must"),
        "python",
        what="digest over the standard library",
        source="every *.py of it and lib-dynload, hashed",
        why="no package manager verifies it",
        level="full",
    ),
    # -- torch ----------------------------------------------------------------------------
    _field(
        "torch.version",
        ("must", "must"),
        "torch",
        what="torch.__version__, with its local part (+cu130)",
        source="torch/version.py, read without importing torch",
        why="kernels, defaults and numerics change between releases",
    ),
    _field(
        "torch.git-version",
        ("must", "must"),
        "torch",
        what="commit that torch was built from",
        source="torch/version.py",
        why="one version number has several builds (torch 2.10.0 had three)",
    ),
    _field(
        "torch.cuda",
        ("must", "must"),
        "torch",
        what="CUDA release that torch was built for, `none` for a CPU build",
        source="torch/version.py",
        why="decides which drivers work and which GPUs have kernels",
    ),
    _field(
        "torch.hip",
        ("must", "must"),
        "torch",
        what="ROCm release that torch was built for",
        source="torch/version.py",
        why="as torch.cuda, for AMD",
    ),
    _field(
        "torch.arch-list",
        ("must", "must"),
        "torch",
        what="GPU architectures that torch has kernels for",
        source="strings in torch's own binary, read without importing it",
        why="a GPU outside of the list fails with `no kernel image is available`",
    ),
    _field(
        "torch.config-digest",
        ("must", "must"),
        "torch",
        what="digest of torch's own description of its build",
        source="the running torch (level deep)",
        why="two builds of one version may differ in compiler and options",
        level="deep",
    ),
    _field(
        "torch.running-differs",
        ("must", "must"),
        "torch",
        what="what the running torch says differently from its files",
        source="an import of torch (level deep)",
        why="what was read without importing torch would be wrong",
        level="deep",
    ),
    _field(
        "torch.cpu-capability",
        ("info", "warn"),
        "hardware",
        what="vector instructions that torch uses on this processor",
        source="the running torch (level deep)",
        why="other kernels round differently",
        level="deep",
    ),
    _field(
        "torch.*",
        ("must", "must"),
        "torch",
        what="another property of torch's build",
        source="torch's own files; at level deep from the running torch",
        why="two builds of one version may differ in it",
    ),
    # -- libraries ------------------------------------------------------------------------
    _field(
        "libs.ld-library-path",
        ("must", "must"),
        "setting",
        what="LD_LIBRARY_PATH inside the environment",
        source="the environment that the ranks get",
        why="module systems put other CUDA libraries in front of torch's own (pytorch#111469)",
        remedy="unload the module, or unset LD_LIBRARY_PATH",
    ),
    _field(
        "libs.ld-preload",
        ("must", "must"),
        "setting",
        what="LD_PRELOAD inside the environment",
        source="the environment that the ranks get",
        why="a preloaded library replaces functions of every other one",
        remedy="unset LD_PRELOAD",
    ),
    *(
        _field(
            f"libs.{name}.version",
            ("must", "must"),
            "library",
            what=f"version that {name} gives of itself",
            source="its own API; loading it is too slow for the default level",
            why="the library that loads is not always the one that pip lists",
            level="full",
        )
        for name in ("cublas", "cublaslt")
    ),
    *(
        _field(
            f"libs.{name}.version",
            ("must", "must"),
            "library",
            what=f"version that {name} gives of itself",
            source="its own API, called without a GPU",
            why="the library that loads is not always the one that pip lists",
        )
        for name in ("cudart", "cudnn", "nccl")
    ),
    _field(
        "libs.*.version",
        ("must", "must"),
        "library",
        what="version that a library gives of itself",
        source="its own API, called without a GPU; else its file name",
        why="the library that loads is not always the one that pip lists",
    ),
    _field(
        "libs.*.origin",
        ("must", "must"),
        "library",
        what="where the loader finds a library: in the prefix, in the system, elsewhere",
        source="RPATH and RUNPATH of torch, LD_LIBRARY_PATH and the loader's cache, in ld.so's order",
        why="a copy elsewhere shadows the locked one",
    ),
    _field(
        "libs.*.build-id",
        ("warn", "must"),
        "library",
        what="GNU build-id of a library",
        source="its ELF note",
        why="tells two builds of one version apart",
    ),
    _field(
        "libs.*.sha256",
        ("warn", "must"),
        "library",
        what="sha256 of a library's file",
        source="hashed",
        why="a patched library keeps its version and build-id",
        level="full",
    ),
    _field(
        "loaded.differs",
        ("must", "must"),
        "library",
        what="libraries that were mapped from elsewhere than the loader's rules say",
        source="/proc/PID/maps of a process that imported torch, against libs.*.origin",
        why="installed is not loaded",
        level="deep",
    ),
    _field(
        "loaded.*",
        ("must", "must"),
        "library",
        what="file that the loader really mapped for a library",
        source="/proc/PID/maps of a process that imported torch",
        why="installed is not loaded",
        level="deep",
    ),
    # -- packages -------------------------------------------------------------------------
    _field(
        "packages.env-digest",
        ("must", "must"),
        "package",
        what="digest over every package's name, version and RECORD (hpcenv-env-v1)",
        source="the RECORD files",
        why="one number for the whole Python environment",
    ),
    _field(
        "packages.content-digest",
        ("must", "must"),
        "file",
        what="the same over what is really in the files",
        source="every listed file, hashed",
        why="equal to env-digest if and only if nothing was modified after installation",
        level="full",
    ),
    _field(
        "packages.unlisted-digest",
        ("must", "must"),
        "file",
        what="digest over importable files that no package lists",
        source="a scan of the site folders",
        why="a file that was dropped in is imported like any other",
    ),
    _field(
        "packages.unlisted-count",
        (None, None),
        "note",
        what="how many importable files no package lists",
        source="a scan of the site folders",
        why="explains unlisted-digest",
    ),
    _field(
        "packages.count",
        ("info", "info"),
        "note",
        what="how many packages are installed",
        source="the .dist-info folders",
        why="explains env-digest",
    ),
    _field(
        "packages.conda-digest",
        ("must", "must"),
        "package",
        what="digest over the packages that conda installed",
        source="conda-meta/*.json",
        why="libraries and interpreters come from there without a RECORD",
    ),
    _field(
        "packages.conda-count",
        (None, None),
        "note",
        what="how many packages conda installed",
        source="conda-meta/*.json",
        why="explains conda-digest",
    ),
    _field(
        "packages.*",
        ("must", "must"),
        "package",
        what="one installed package",
        source="its .dist-info folder",
        why="another version, or another build of the same version, is other code",
        remedy=_REINSTALL,
    ),
    _field(
        "packages.*.record-sha256",
        ("must", "must"),
        "package",
        what="digest over a package's RECORD",
        source="the RECORD file",
        why="two builds of one version differ in it; the wheel's own RECORD has the same digest",
        remedy=_REINSTALL,
    ),
    _field(
        "packages.*.content-sha256",
        ("must", "must"),
        "file",
        what="digest over what is really in a package's files",
        source="every listed file, hashed",
        why="no Python tool notices a file that was edited after installation",
        remedy=_REINSTALL,
        level="full",
    ),
    _field(
        "packages.*.commit-id",
        ("must", "must"),
        "package",
        what="commit that a package was installed from, or that an editable install runs",
        source="direct_url.json, and git for an editable install",
        why="an editable install has no digest: its commit stands for its code",
        remedy="check out the locked commit",
    ),
    _field(
        "packages.*.dirty",
        ("warn", "must"),
        "package",
        what="whether the working tree of an editable install is changed",
        source="git",
        why="a changed tree is not its commit, and nobody else has it",
        remedy="commit the change, then: hpcenv lock",
    ),
    _field(
        "packages.*.diff-sha256",
        ("warn", "must"),
        "package",
        what="digest of what differs from the commit of an editable install; `none` if nothing does",
        source="git: changed files; and importable files that it does not track, ignored ones (*.so) too",
        why="two changed trees of one commit are two environments",
        remedy="commit the change, or build again, then: hpcenv lock",
    ),
    _field(
        "packages.*.files-sha256",
        ("warn", "must"),
        "package",
        what="digest over the importable files of an editable install of which git does not tell what it is",
        source="the folders below the one that it was installed from",
        why="without a commit its files are all there is to compare",
        remedy="put it under git, or if the change is wanted: hpcenv lock",
    ),
    _field(
        "packages.*.source",
        ("info", "info"),
        "note",
        what="where a package came from: wheel, sdist, editable, vcs, directory, conda, Debian",
        source="direct_url.json, WHEEL and INSTALLER",
        why="explains other differences: what is compiled on the spot differs from machine to machine",
    ),
    _field(
        "packages.*.wheel-sha256",
        ("info", "info"),
        "note",
        what="sha256 of the wheel that a package came from, with how that was proved",
        source="`hpcenv lock`, through pip with the user's own index",
        why="cannot be seen after installation; it lets others install the very same file",
    ),
    # -- system ---------------------------------------------------------------------------
    _field(
        "system.machine",
        ("must", "must"),
        "hardware",
        what="processor architecture",
        source="uname",
        why="binaries for another one do not run",
    ),
    _field(
        "system.os-release",
        ("info", "info"),
        "image",
        what="distribution and its version",
        source="/etc/os-release inside",
        why="explains differences in system libraries",
    ),
    _field(
        "system.glibc",
        ("info", "info"),
        "image",
        what="version of the C library",
        source="the running process",
        why="wheels need a minimum; math functions may differ in the last bit",
    ),
    _field(
        "system.packages-count",
        (None, None),
        "note",
        what="how many packages the distribution installed",
        source="dpkg, rpm or apk, read without running them",
        why="explains packages-digest",
    ),
    _field(
        "system.packages-digest",
        ("info", "must"),
        "image",
        what="digest over the distribution's packages",
        source="dpkg, rpm or apk, read without running them",
        why="libraries outside of Python come from here; a SIF's own hash covers them already",
    ),
    _field(
        "system.*",
        ("info", "info"),
        "image",
        what="another property of the system inside",
        source="files inside the environment",
        why="explains differences",
    ),
    # -- nodes ----------------------------------------------------------------------------
    _field(
        "host.driver-version",
        ("must", "must"),
        "driver",
        what="version of the NVIDIA driver",
        source="NVML, else /proc/driver/nvidia/version",
        why="a driver older than the toolkit's floor fails at the first CUDA call",
        remedy="ask for other nodes (--constraint, --partition), or use an image for an older CUDA",
    ),
    _field(
        "host.gpu-count",
        ("must", "must"),
        "hardware",
        what="how many GPUs the job sees on a node",
        source="NVML",
        why="each rank needs one",
        remedy="check --gpus and the partition's GRES",
    ),
    _field(
        "host.gpu-models",
        ("must", "must"),
        "hardware",
        what="names of the GPUs",
        source="NVML",
        why="nodes of one job must agree; results are bit for bit equal only on one model",
        remedy="ask for one model: --constraint or --gres",
    ),
    _field(
        "host.gpu-compute-capabilities",
        ("must", "must"),
        "hardware",
        what="compute capability of each GPU",
        source="NVML",
        why="torch has kernels for a fixed list (torch.arch-list)",
        remedy="use a torch build with kernels for this GPU, or other nodes",
    ),
    _field(
        "host.gpu-mig",
        ("must", "must"),
        "hardware",
        what="whether GPUs are split (MIG)",
        source="NVML",
        why="a slice has fewer SMs: other speed, other reduction order",
        remedy="ask for whole GPUs",
    ),
    _field(
        "host.gpu-sm-counts",
        ("warn", "must"),
        "hardware",
        what="streaming multiprocessors of each GPU",
        source="NVML",
        why="cuBLAS promises equal bits only on GPUs with equally many",
        remedy="ask for one model: --constraint or --gres",
    ),
    _field(
        "host.driver-min",
        ("info", "info"),
        "driver",
        what="oldest driver that runs the locked CUDA build",
        source="`hpcenv lock`, from the compatibility table",
        why="checked on every node as host.driver-version",
    ),
    _field(
        "host.gpu",
        ("info", "info"),
        "hardware",
        what="the GPU that the environment was locked for",
        source="`gpu` under [host] in hpcenv.toml",
        why="lets a missing kernel be said before the job waits in the queue",
    ),
    _field(
        "host.nvidia-require.*",
        ("info", "info"),
        "driver",
        what="a rule of the image about drivers and GPUs",
        source="the image's NVIDIA_REQUIRE_* variables",
        why="checked on every node as container.nvidia-require; Apptainer ignores it",
    ),
    *(
        _field(
            f"host.{name}",
            ("info", "info"),
            "note",
            what=what,
            source="NVML, libcuda or the node's own files",
            why="explains differences in speed and results",
        )
        for name, what in (
            ("gpu-uuids", "which GPUs, one by one"),
            ("gpu-memory-mib", "memory of each GPU in MiB"),
            ("gpu-ecc", "whether error correction is on"),
            ("gpu-brands", "product line of each GPU"),
            ("cuda-driver-version", "newest CUDA that the driver's API speaks"),
            ("memlock", "how much memory a process may lock: RDMA needs unlimited"),
            ("shm-mib", "size of /dev/shm in MiB: NCCL and data loaders use it"),
            ("rdma", "InfiniBand and RoCE ports with state and rate"),
            ("kernel", "release of the Linux kernel"),
            ("apptainer", "version of Apptainer"),
            ("slurm", "version of Slurm"),
        )
    ),
    _field(
        "host.machine",
        ("must", "must"),
        "hardware",
        what="processor architecture of a node",
        source="uname",
        why="nodes of one job must agree",
    ),
    _field(
        "host.*",
        ("info", "info"),
        "note",
        what="another property of a node",
        source="the node's own files and tools",
        why="explains differences in speed",
    ),
    _field(
        "network.route",
        ("must", "must"),
        "hardware",
        what="a route from every node to the first one",
        source="the kernel's routing table, asked on each node",
        why="without it the ranks cannot meet",
        remedy="check the nodes' names and networks; `host.*` facts list the interfaces",
    ),
    # -- how strictly ---------------------------------------------------------------------
    _field(
        "determinism.profile",
        ("warn", "must"),
        "setting",
        what="which profile decides how much each field matters: default or bitwise",
        source="`profile` under [determinism] in hpcenv.toml",
        why="under another profile other differences stop a job",
    ),
    _field(
        "policy",
        ("warn", "must"),
        "setting",
        what="severities that the project changed",
        source="[policy] in hpcenv.toml",
        why="what is loosened no longer stops a job",
    ),
    # -- run ------------------------------------------------------------------------------
    _field(
        "code.script-sha256",
        ("must", "must"),
        "setting",
        what="sha256 of the training script",
        source="the file as each node sees it, against the one that was submitted",
        why="an edit while the job waits, or a stale cache, runs other code",
        remedy="submit again",
    ),
    _field(
        "code.*",
        ("must", "must"),
        "setting",
        what="state of the code: commit and uncommitted changes",
        source="git, at submission",
        why="another commit is another experiment",
        remedy="check out the other commit",
    ),
    _field(
        "run.*",
        ("warn", "must"),
        "setting",
        what="shape and command of a run",
        source="the submission",
        why="world size changes the reduction tree and the batch",
        remedy="submit with the same --nodes, --gpus, --nproc and arguments",
    ),
    _field(
        "env.*",
        ("warn", "must"),
        "setting",
        what="a variable that the ranks got",
        source="the verdict's settings",
        why="libraries read them: threads, algorithms and protocols change the order of sums",
        remedy="submit with --env NAME=VALUE, or set it under [env] in hpcenv.toml",
    ),
    _field(
        "job.nodes",
        ("must", "must"),
        "note",
        what="how many nodes the job has",
        source="Slurm, against what was submitted",
        why="a job of another size is another experiment",
        remedy="submit again; somebody changed the job with scontrol or --template",
    ),
    _field(
        "lockfile",
        ("must", "must"),
        "note",
        what="whether a node could compare anything at all",
        source="the facts of the node",
        why="a check that compared nothing must not look like a match",
        remedy="hpcenv lock",
    ),
    _field(
        "lockfile.revision",
        ("warn", "warn"),
        "note",
        what="minor version of the lockfile's format, where it is newer than the one that this hpcenv knows",
        source="the lockfile",
        why="keys that are not known are not compared, and an edit would not be seen",
        remedy="pip install --upgrade hpcenv",
    ),
    _field(
        "facts",
        ("must", "must"),
        "note",
        what="the report of a node",
        source="facts/NODE.json",
        why="a node that says nothing may be anything",
        remedy="look for the node's name in the job's log",
    ),
    _field(
        "environment",
        ("must", "must"),
        "note",
        what="whether the environment could be read at all",
        source="the probe",
        why="what could not be read is never reported as fine",
        remedy="start it by hand on that node: hpcenv verify",
    ),
)


@functools.lru_cache(maxsize=10_000)
def find(name: str) -> Field | None:
    """Return the field that `name` belongs to: the exact one, else the narrowest family."""
    exact = _by_name().get(name)
    if exact is not None:
        return exact
    families = [field for field in _by_name().values() if "*" in field.name and field.fits(name)]
    return max(families, key=lambda field: len(field.name), default=None)


@functools.cache
def _by_name() -> dict[str, Field]:
    return {field.name: field for field in FIELDS}


def must_be_known(name: str) -> bool:
    """Whether an environment cannot be locked without this field: it has an entry of its own.

    Members of a family (another library, another property of torch) may be unknown; nodes
    then warn of them.
    """
    return name in _by_name()


# What the probe reads of families whose members are the same everywhere.
MEMBERS = ("system.packages-manager", "torch.cxx11-abi", "torch.debug")
# Which libraries there are is known when the environment was read.
_OPEN = ("libs", "loaded")


def policy_problems(names: Iterable[str], facts: Iterable[str] | None = None) -> tuple[str, ...]:
    """Say which fields of a [policy] no environment has, with the nearest that there is.

    Args:
        facts: of the environment; None before it was read.
    """
    known = {field.name for field in FIELDS if "*" not in field.name} | set(MEMBERS if facts is None else facts)
    problems = []
    for name in sorted(set(names) - known):
        if facts is None and name.partition(".")[0] in _OPEN and find(name) is not None:
            continue
        import difflib

        close = difflib.get_close_matches(name, sorted(known), n=1)
        hint = f", perhaps you meant `{close[0]}`" if close else ""
        problems.append(f'unknown field `policy."{name}"`{hint}')
    return tuple(problems)


def severity(name: str, profile: Profile = "default") -> Severity | None:
    """Return how much a field matters in a profile, None when it is not compared."""
    field = find(name)
    if field is None:
        return None
    return field.bitwise if profile == "bitwise" else field.default
