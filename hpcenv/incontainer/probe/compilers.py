"""The compilers that Triton and the extensions of torch use when a training runs: C, C++, nvcc, ptxas.

Runs on: inside the image.

The compilers are found as those libraries find them (torch 2.13, torch/utils/cpp_extension.py; Triton 3.7,
runtime/build.py and knobs.py). An image has its own compilers, which its digest covers. A Python of the host uses the
compilers of the node. The versions of these compilers are facts of a node, not part of a lockfile.
"""

from __future__ import annotations

import os
import re

from hpcenv.incontainer.probe.children import wait_for_child
from hpcenv.incontainer.probe.table import Probe
from hpcenv.incontainer.probe.text import describe_error, printable
from hpcenv.incontainer.probe.values import Unknown

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts, Value

_SECONDS = 10
_CUDA = "/usr/local/cuda"
_BUNDLED = "triton/backends/nvidia/bin/ptxas"


def probe_compilers(env: ProbedEnvironment) -> Facts:
    """Return the version of each compiler; `absent` for a compiler that is not installed."""
    import subprocess

    started: dict[str, subprocess.Popen[bytes]] = {}
    facts: Facts = {}
    for field, program in _programs(env).items():
        if program is None:
            facts[field] = "absent"
            continue
        try:
            started[field] = subprocess.Popen(
                [program, "--version"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            facts[field] = Unknown(describe_error(error))
    # All programs run at the same time, so the total time is the time of the slowest program.
    for field, child in started.items():
        try:
            facts[field] = _version(field, wait_for_child(child, _SECONDS)[0].decode("utf-8", "replace"))
        except subprocess.TimeoutExpired:
            facts[field] = Unknown("it did not say its version in " + str(_SECONDS) + " s")
    return facts


def _programs(env: ProbedEnvironment) -> dict[str, str | None]:
    environ = os.environ
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    nvcc = os.path.join(home, "bin/nvcc") if home else _which("nvcc") or _CUDA + "/bin/nvcc"
    bundled = [os.path.join(path, _BUNDLED) for path in env.path]
    return {
        "compilers.c": _first(environ.get("CC"), "gcc", "clang"),
        "compilers.cxx": _first(environ.get("CXX"), "c++"),
        "compilers.nvcc": _first(nvcc),
        "compilers.ptxas": _first(environ.get("TRITON_PTXAS_PATH"), *bundled, _CUDA + "/bin/ptxas"),
    }


def _first(chosen: str | None, *others: str) -> str | None:
    """Return the program that a variable names, otherwise the first of `others` that exists; None without a program."""
    # The variable may also contain options.
    names = chosen.split()[:1] if chosen else others
    return next((found for found in map(_which, names) if found is not None), None)


def _which(name: str) -> str | None:
    folders = [""] if "/" in name else os.environ.get("PATH", os.defpath).split(os.pathsep)
    paths = [os.path.join(folder, name) for folder in folders if folder or "/" in name]
    return next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), None)


def _version(field: str, output: str) -> Value:
    """Return the first line that a C or C++ compiler prints, or the release of a CUDA compiler."""
    if field in ("compilers.c", "compilers.cxx"):
        lines = output.strip().splitlines()
        return printable(lines[0].strip()) if lines else Unknown("it printed no version")
    release = re.search(r"V(\d+[\d.]*)", output)
    return release.group(1) if release else Unknown("it printed no release of CUDA")


PROBES: tuple[Probe, ...] = (
    Probe("compilers", ("compilers.c", "compilers.cxx", "compilers.nvcc", "compilers.ptxas"), probe_compilers),
)
