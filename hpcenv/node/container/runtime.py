"""Which program starts containers on a machine, what it is, and in what Apptainer and SingularityCE differ.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

Both programs come from Singularity 3.8. Apptainer installs `singularity` as a link to itself, so the name says
nothing: only what the program prints tells them apart. apptainer.py starts containers with options that both know.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hpcenv import process
from hpcenv.errors import HpcenvError, ToolFailed, ToolMissing
from hpcenv.node.container.apptainer import host_environment

# In the order in which they are searched.
PROGRAMS = ("apptainer", "singularity")
# The first releases with every option of the start command, and the same meaning of each.
_OLDEST = {"apptainer": (1, 2), "singularity-ce": (4, 0), "singularity-pro": (4, 0)}
_NAMES = {"apptainer": "Apptainer", "singularity-ce": "SingularityCE", "singularity-pro": "SingularityPRO"}
_SAID = re.compile(r"(apptainer|singularity(?:-ce|-pro)?) version (\d+\.\d+\S*)\Z")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What a program that starts containers is.

    Attributes:
        kind: `apptainer`, `singularity-ce`, `singularity-pro`, or `singularity` for Singularity 3.
        version: as it prints it, for example `4.5.1`.
        program: its path.
    """

    kind: str
    version: str
    program: str

    @property
    def unusable(self) -> str:
        """Why hpcenv cannot start containers with it; empty where it can."""
        oldest = _OLDEST.get(self.kind)
        numbers = tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])
        if oldest is not None and numbers >= oldest:
            return ""
        least = ", ".join(f"{_NAMES[kind]} {one}.{two}" for kind, (one, two) in _OLDEST.items())
        return f"{self.program} is {self.kind} {self.version}; hpcenv needs one of: {least}, or later"

    def __str__(self) -> str:
        return f"{_NAMES.get(self.kind, 'Singularity')} {self.version}"


def find(path: str | None = None) -> str:
    """Return the absolute path of `apptainer`, or else of `singularity`.

    Raises:
        ToolMissing: PATH has neither.
    """
    for name in PROGRAMS:
        try:
            return process.find_tool(name, needed_for="start containers", path=path)
        except ToolMissing:
            continue
    raise ToolMissing(
        "neither `apptainer` nor `singularity` is on PATH",
        why="one of them is needed to start containers",
        hint="load its module, or name it: `program` under [runtime] in the site profile, or `runtime` in hpcenv.toml; "
        'image = "host" does without',
    )


def find_builder(path: str | None = None) -> str:
    """Return the absolute path of `apptainer`, which builds definition files; SingularityCE is not used for that.

    Raises:
        ToolMissing: it is not on PATH.
    """
    return process.find_tool("apptainer", needed_for="build images", path=path)


def identify(program: str, environ: Mapping[str, str] | None = None) -> Runtime:
    """Return what a program is, from what it prints.

    Raises:
        ToolMissing, ToolFailed: it cannot be run, or it is none of the programs that hpcenv knows.
    """
    env = host_environment(os.environ if environ is None else environ)
    done = process.run([program, "--version"], timeout=60, env=env)
    found = parse_version(done.stdout.strip())
    if found is None:
        raise ToolFailed(
            f"`{program} --version` does not name a version",
            argv=done.argv,
            status=done.status,
            why=f"it prints {done.stdout[:100]!r}",
            hint="check which program this is",
        )
    return Runtime(kind=found[0], version=found[1], program=program)


def compression_here(environ: Mapping[str, str], program: str = "") -> Literal["zstd", "gzip"]:
    """Return the compression of SIFs that what starts containers here reads: SingularityCE refuses zstd.

    Args:
        environ: the user's environment.
        program: what starts containers; empty for what is on PATH.
    """
    try:
        found = program or find(environ.get("PATH"))
        # Another name needs no look: only links of the other name exist.
        if os.path.basename(found) == "apptainer":
            return "zstd"
        return "zstd" if identify(found, environ).kind == "apptainer" else "gzip"
    except HpcenvError:
        return "zstd"


def unreadable_here(compression: str, environ: Mapping[str, str], program: str = "") -> str:
    """Return why what starts containers here does not read a finished SIF; empty where it does, or that is unknown.

    Args:
        compression: of the SIF's file system.
        environ: the user's environment.
        program: what starts containers; empty for what is on PATH.
    """
    if compression != "zstd" or compression_here(environ, program) == "zstd":
        return ""
    return "the SIF is compressed with zstd, and SingularityCE, which starts containers here, does not read that"


def parse_version(said: str) -> tuple[str, str] | None:
    """Return kind and version in the line that `--version` prints; None for any other text.

    The line has the name of the package: `apptainer version 1.4.5`, `singularity-ce version 4.5.1`,
    `singularity-pro version 4.1.5`, `singularity version 3.8.7` (cmd/internal/cli/singularity.go of both, `vt`).
    """
    match = _SAID.fullmatch(said)
    return None if match is None else (match[1], match[2])


@dataclass(frozen=True, kw_only=True)
class RuntimeDifference:
    """One thing in which the programs differ, and what hpcenv does about it.

    Attributes:
        what: the option, variable or file.
        apptainer, singularity_ce: what each does.
        hpcenv: what hpcenv does, so that a container starts with the same meaning.
        source: file and version of both.
    """

    what: str
    apptainer: str
    singularity_ce: str
    hpcenv: str
    source: str


# Read on 2026-11-23 in apptainer/apptainer (tags v1.4.5 and v1.5.3) and sylabs/singularity (tag v4.5.1).
DIFFERENCES: tuple[RuntimeDifference, ...] = (
    RuntimeDifference(
        what="variables for the program",
        apptainer="`APPTAINERENV_NAME`; `SINGULARITYENV_NAME` too, with a message",
        singularity_ce="`SINGULARITYENV_NAME` only",
        hpcenv="`--env-file` with a file in memory: both evaluate it alike, and no process list shows it",
        source="Apptainer 1.4.5 internal/pkg/util/env/create.go; SingularityCE 4.5.1 internal/pkg/util/env/clean.go",
    ),
    RuntimeDifference(
        what="settings by variables",
        apptainer="`APPTAINER_BIND` and so on; `SINGULARITY_BIND` too",
        singularity_ce="`SINGULARITY_BIND` and so on only",
        hpcenv="inherits neither; what modules set is taken over with its origin",
        source="Apptainer 1.4.5 cmd/internal/cli/apptainer.go; SingularityCE 4.5.1 cmd/internal/cli/singularity.go",
    ),
    RuntimeDifference(
        what="`--bind`",
        apptainer="paths may contain a comma after a backslash",
        singularity_ce="every comma separates two binds",
        hpcenv="`--mount` with quoted fields, which both read as one CSV record",
        source="Apptainer 1.4.5 and SingularityCE 4.5.1 cmd/internal/cli/action_flags.go, mount.go (ParseMountString)",
    ),
    RuntimeDifference(
        what="a bind over /tmp",
        apptainer="lies over the node's /tmp",
        singularity_ce="the same, with a warning that names the node's /tmp",
        hpcenv="binds a folder of the job over /tmp",
        source="seen with Apptainer 1.4.5 and SingularityCE 4.5.1 (internal/pkg/util/fs/layout/manager.go)",
    ),
    RuntimeDifference(
        what="`bind path = /etc/localtime`, where it is a link in the image",
        apptainer="mounted at /etc/localtime",
        singularity_ce="mounted at the target of the link, below /usr/share/zoneinfo",
        hpcenv="both are mounts that the gate knows (`container.mounts`)",
        source="seen with Apptainer 1.4.5 and SingularityCE 4.5.1",
    ),
    RuntimeDifference(
        what="`oci mode = yes` in singularity.conf",
        apptainer="does not exist",
        singularity_ce="`exec` starts an OCI runtime, with other options and mounts",
        hpcenv="`SINGULARITY_NO_OCI=1`, the variable of `--no-oci`; Apptainer 1.4.5 does not read it",
        source="SingularityCE 4.5.1 cmd/internal/cli/singularity.go (--no-oci); Apptainer 1.4.5 has no such flag",
    ),
    RuntimeDifference(
        what="compression of SIFs",
        apptainer="gzip, lzma, lzo, xz, lz4 and zstd",
        singularity_ce="all of these but zstd, which is called a corrupted image",
        hpcenv="writes gzip where only SingularityCE starts containers, else zstd; `--compression` chooses",
        source="pkg/image/squashfs.go of Apptainer 1.4.5 and SingularityCE 4.5.1",
    ),
    RuntimeDifference(
        what="SIFs without setuid",
        apptainer="mounted with squashfuse; unpacked where that fails",
        singularity_ce="the same, unless `tmp sandbox = no`; `image driver` does not exist",
        hpcenv="nothing: both take the file by /proc/self/fd",
        source="Apptainer 1.4.5 internal/pkg/runtime/launch; SingularityCE 4.5.1 launcher/native/launcher_linux.go",
    ),
    RuntimeDifference(
        what="`--no-mount cwd,bind-paths,tmp,hostfs`",
        apptainer="since 1.2",
        singularity_ce="since 3.11",
        hpcenv="uses it with both",
        source="Apptainer 1.4.5 and SingularityCE 4.5.1 cmd/internal/cli/action_flags.go",
    ),
    RuntimeDifference(
        what="`--cleanenv`, `--no-eval`, `--home`, `--no-home`, `--pwd`, `--mount`, `--nv`, `--rocm`",
        apptainer="the same meaning",
        singularity_ce="the same meaning",
        hpcenv="uses them with both",
        source="Apptainer 1.4.5 and SingularityCE 4.5.1 cmd/internal/cli/action_flags.go",
    ),
    RuntimeDifference(
        what="libraries of `--nv`",
        apptainer="also libcudadebugger.so; since 1.5 files of EGL, Vulkan and OptiX",
        singularity_ce="shorter list, `libnvoptix.so.1`",
        hpcenv="nothing: CUDA and NCCL need what is in both lists",
        source="etc/nvliblist.conf of Apptainer 1.4.5 and 1.5.3, and of SingularityCE 4.5.1",
    ),
    RuntimeDifference(
        what="`--nvccli`, `use nvidia-container-cli`, `always use nv`",
        apptainer="option and settings",
        singularity_ce="the same names; the path is in `nvidia-container-cli path`",
        hpcenv="gives `--nv` only; a site's setting still acts",
        source="pkg/util/apptainerconf/config.go 1.4.5; pkg/util/singularityconf/config.go 4.5.1",
    ),
    RuntimeDifference(
        what="`--userns`, `allow setuid`",
        apptainer="without a setuid installation a user namespace is used by itself",
        singularity_ce="the same; packages are setuid by default",
        hpcenv="gives no option; `hpcenv doctor` says which way containers start",
        source="Apptainer 1.4.5 internal/pkg/runtime/launch; SingularityCE 4.5.1 launcher/native (useSuid)",
    ),
    RuntimeDifference(
        what="overlays: `--mount` with `image-src=/`",
        apptainer="mounts the squashfs at a path in the image",
        singularity_ce="the same option; not run with a SingularityCE",
        hpcenv="uses it with both; the gate reads in the mounts of the container whether the overlay is there",
        source='seen with Apptainer 1.4.5; for SingularityCE 4 only its user guide, section "Image mounts"',
    ),
    RuntimeDifference(
        what="building a definition file",
        apptainer="used; `--reproducible` since 1.5",
        singularity_ce="possible",
        hpcenv="with Apptainer only; images of registries need neither, because hpcenv writes the SIF",
        source="hpcenv/image/convert/apptainer_build.py, for Apptainer 1.4.5; not tried with SingularityCE 4.5.1",
    ),
)
