"""Variables that change which code Python and the loader run.

Runs on: inside the image. PYTHONPATH, PYTHONNOUSERSITE, LD_LIBRARY_PATH and LD_PRELOAD have fields in other modules.
"""

from __future__ import annotations

import os
import sys
import time

from hpcenv.incontainer.probe.hashing import SCAN_SECONDS, hash_file
from hpcenv.incontainer.probe.loader import Loader
from hpcenv.incontainer.probe.table import Probe
from hpcenv.incontainer.probe.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts

# Python ignores each of these variables if it is empty (Doc/using/cmdline.rst, 3.14).
_PYTHON = (
    "PYTHONHOME",  # sets another standard library
    "PYTHONPLATLIBDIR",  # sets another folder of the standard library
    "PYTHONPYCACHEPREFIX",  # reads compiled files from another place
    "PYTHONSAFEPATH",  # leaves the folder of the script out of sys.path
    "PYTHONOPTIMIZE",  # removes asserts, and reads other compiled files
    "PYTHONWARNINGS",  # imports the module of a category
    "PYTHON_FROZEN_MODULES",  # reads the standard library's own modules from files
    "PYTHON_PRESITE",  # imports a module before site
)


def probe_variables(env: ProbedEnvironment) -> Facts:
    """Return the variables that change what Python imports, and the variables of the loader."""
    return {
        "python.variables": [
            name + "=" + printable(env.shown(value) if value.startswith("/") else value)
            for name in _PYTHON
            for value in [os.environ.get(name, "")]
            if value and _has_effect(name, value)
        ],
        "libs.ld-audit": preloaded(env, [p for p in os.environ.get("LD_AUDIT", "").split(":") if p]),
        "libs.glibc-tunables": [printable(p) for p in os.environ.get("GLIBC_TUNABLES", "").split(":") if p],
    }


def preloaded(env: ProbedEnvironment, names: list[str]) -> list[str]:
    """Return the libraries that the loader loads first because of a variable, each with the start of its hash."""
    if not names or not env.has("preloaded"):
        return [printable(env.shown(name)) for name in names]
    lines = []
    for name in names:
        path = name if "/" in name else next((p for p, _ in Loader(env).places(name, None) if os.path.isfile(p)), name)
        found = hash_file(env, path, "sha256", bytearray(1 << 20), time.monotonic() + SCAN_SECONDS)
        lines.append(printable(env.shown(name)) + " " + found.word()[:16])
    return lines


def _has_effect(name: str, value: str) -> bool:
    if name == "PYTHONHOME":
        return os.path.realpath(value.split(":")[0]) != _own_home()
    if name == "PYTHONOPTIMIZE":
        return value != "0"
    if name == "PYTHONWARNINGS":
        # action:message:category:module:line. A category with a dot is imported.
        return any("." in (rule.split(":") + ["", ""])[2] for rule in value.split(","))
    return True


def _own_home() -> str:
    """Return the home folder that Python uses without PYTHONHOME: the folder above the folder of its program."""
    program: str = getattr(sys, "_base_executable", "") or sys.executable or ""
    return os.path.dirname(os.path.dirname(os.path.realpath(program)))


PROBES: tuple[Probe, ...] = (
    Probe("variables", ("python.variables", "libs.ld-audit", "libs.glibc-tunables"), probe_variables),
)
