"""The files that run as Python: the program, its shared library, and the program that starts it.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import sys
import time

from hpcenv.incontainer.probe.hashing import CONTENT_SECONDS, hash_file
from hpcenv.incontainer.probe.table import HASHING, Probe
from hpcenv.incontainer.probe.values import Unknown
from hpcenv.incontainer.probe.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts, Value

RUNNING = "/proc/self/exe"  # the file of this process, even if another file has its path now
FIELDS = ("python.binary-sha256", "python.libpython-sha256", "python.launcher-sha256")


def probe_interpreter(env: ProbedEnvironment) -> Facts:
    """Return the sha256 of the running program, of libpython, and of a program that started it."""
    running = RUNNING if os.path.exists(RUNNING) else os.path.realpath(sys.executable)
    libpython = find_libpython()
    return {
        "python.binary-sha256": _sha256(env, running),
        "python.libpython-sha256": _sha256(env, libpython) if libpython else "none",
        "python.launcher-sha256": _launcher(env, running),
    }


def find_libpython() -> str:
    """Return the path of the shared library of Python, as it is mapped; empty for a static Python."""
    import re

    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            text = file.read()
    except OSError:
        return ""
    match = re.search(r" (/[^\n]*/libpython[0-9][^/\n]*\.so[^/\n]*)$", text, re.MULTILINE)
    return match.group(1) if match else ""


def _launcher(env: ProbedEnvironment, running: str) -> Value:
    """Return the sha256 of the program that was started; `none` if this program is the running Python.

    The started program may be a script, which can set variables and options before it starts the real Python.
    """
    started = env.started or sys.executable
    try:
        if not started or os.path.samefile(started, running):
            return "none"
    except OSError as error:
        return Unknown(f"{printable(started)}: {error.strerror}")
    return _sha256(env, started)


def _sha256(env: ProbedEnvironment, path: str) -> Value:
    result = hash_file(env, path, "sha256", bytearray(1 << 20), time.monotonic() + CONTENT_SECONDS)
    if isinstance(result.digest, bytes):
        return result.digest.hex()
    return Unknown(f"{printable(path)}: {result.problem or result.digest}")


PROBES: tuple[Probe, ...] = (Probe("interpreter", FIELDS, probe_interpreter, HASHING),)
