"""Find the program that starts containers on a machine, its kind and its version.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

Apptainer and SingularityCE are both successors of Singularity 3.8. Apptainer installs `singularity` as a link to
itself. So the name of a program does not show whether it is Apptainer or SingularityCE. Only the output of the program
shows this. apptainer.py starts containers with options that both programs know. docs/reference/runtimes.md lists the
differences.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hpcenv import process
from hpcenv.container.apptainer import host_environment, known_cause
from hpcenv.errors import HpcenvError, ToolFailed, ToolMissing

# The names of the programs, in the order in which hpcenv searches for them.
PROGRAMS = ("apptainer", "singularity")
# The first releases that have every option of the start command with the same meaning.
_OLDEST = {"apptainer": (1, 2), "singularity-ce": (4, 0), "singularity-pro": (4, 0)}
_NAMES = {"apptainer": "Apptainer", "singularity-ce": "SingularityCE", "singularity-pro": "SingularityPRO"}
_SAID = re.compile(r"(apptainer|singularity(?:-ce|-pro)?) version (\d+\.\d+\S*)\Z")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A program that starts containers.

    Attributes:
        kind: `apptainer`, `singularity-ce`, `singularity-pro`, or `singularity` for Singularity 3.
        version: the version that the program prints, for example `4.5.1`.
        program: the program's path.
    """

    kind: str
    version: str
    program: str

    @property
    def unusable(self) -> str:
        """Why hpcenv cannot start containers with this program; empty if hpcenv can start them."""
        oldest = _OLDEST.get(self.kind)
        numbers = tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])
        if oldest is not None and numbers >= oldest:
            return ""
        least = ", ".join(f"{_NAMES[kind]} {one}.{two}" for kind, (one, two) in _OLDEST.items())
        return f"{self.program} is {self.kind} {self.version}; hpcenv needs one of: {least}, or later"

    def __str__(self) -> str:
        return f"{_NAMES.get(self.kind, 'Singularity')} {self.version}"


def find(path: str | None = None) -> str:
    """Return the absolute path of `apptainer`; without `apptainer`, of `singularity`.

    Raises:
        ToolMissing: both programs are not on PATH.
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
        'image = "host" needs no such program',
    )


def find_builder(path: str | None = None) -> str:
    """Return the absolute path of `apptainer`, which builds definition files; SingularityCE is not used for builds.

    Raises:
        ToolMissing: `apptainer` is not on PATH.
    """
    return process.find_tool("apptainer", needed_for="build images", path=path)


def identify(program: str, environ: Mapping[str, str]) -> Runtime:
    """Return the kind and version of a program, from its output.

    Raises:
        ToolMissing, ToolFailed: the program cannot be run, or hpcenv does not know it.
    """
    done = process.run([program, "--version"], timeout=60, env=host_environment(environ))
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


def too_old(program: str, environ: Mapping[str, str]) -> str:
    """Return why hpcenv cannot start containers with a program; empty if it can, or if the answer is unknown."""
    try:
        return identify(program or find(environ.get("PATH")), environ).unusable
    except ToolFailed as error:
        return f"{error.what}: {error.why}" if error.status == 0 else ""
    except HpcenvError:
        return ""


def why_not_started(error: ToolFailed, program: str, environ: Mapping[str, str]) -> HpcenvError:
    """Return the error for a container that did not start, with the cause if it is known."""
    if error.status is None:
        return error
    why = "\n".join(filter(None, (error.what, error.why)))
    old = too_old(program, environ)
    if old:
        hint = "load the module of a newer version, or name its program: --runtime, or `runtime` in hpcenv.toml"
        return ToolFailed(old, argv=error.argv, status=error.status, stderr=error.stderr, why=why, hint=hint)
    return known_cause(error.stderr, why, argv=error.argv, status=error.status) or error


def compression_here(environ: Mapping[str, str], program: str = "") -> Literal["zstd", "gzip"]:
    """Return a SIF compression that the container runtime of this machine can read; SingularityCE refuses zstd.

    Args:
        environ: the user's environment.
        program: the program that starts containers; empty for the program on PATH.
    """
    try:
        found = program or find(environ.get("PATH"))
        # A program with the name `apptainer` is not run to identify it, because only `singularity` can be a link.
        if os.path.basename(found) == "apptainer":
            return "zstd"
        return "zstd" if identify(found, environ).kind == "apptainer" else "gzip"
    except HpcenvError:
        return "zstd"


def unreadable_here(compression: str, environ: Mapping[str, str], program: str = "") -> str:
    """Return why the container runtime of this machine cannot read a finished SIF; empty if it can or perhaps can.

    Args:
        compression: the compression of the SIF's file system.
        environ: the user's environment.
        program: the program that starts containers; empty for the program on PATH.
    """
    if compression != "zstd" or compression_here(environ, program) == "zstd":
        return ""
    return "the SIF is compressed with zstd, and SingularityCE, which starts containers here, does not read that"


def parse_version(said: str) -> tuple[str, str] | None:
    """Return kind and version in the line that `--version` prints; None for any other text.

    The line has the name of the package: `apptainer version 1.4.5`, `singularity-ce version 4.5.1`,
    `singularity-pro version 4.1.5`, `singularity version 3.8.7` (cmd/internal/cli/singularity.go of both programs,
    `vt`).
    """
    match = _SAID.fullmatch(said)
    return None if match is None else (match[1], match[2])
