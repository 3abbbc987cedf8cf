"""Facts about the operating system.

Runs on: inside the image.
"""

from __future__ import annotations

import os

from hpcenv.incontainer.probe.files import read_small
from hpcenv.incontainer.probe.table import Probe
from hpcenv.incontainer.probe.values import Unknown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts, Value


def probe_system(env: ProbedEnvironment) -> Facts:
    """Return the distribution, the C library and the machine."""
    return {
        "system.os-release": _os_release(env),
        "system.glibc": glibc_version(),
        "system.machine": os.uname().machine,
    }


def _os_release(env: ProbedEnvironment) -> Value:
    for path in ("/etc/os-release", "/usr/lib/os-release"):
        try:
            text = read_small(env, path)[0].decode("utf-8", "replace")
        except (OSError, ValueError):
            continue
        pairs = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        words = [pairs.get(key, "").strip().strip("\"'") for key in ("ID", "VERSION_ID")]
        return " ".join(w for w in words if w) or Unknown("neither ID nor VERSION_ID in " + path)
    return Unknown("no readable os-release")


def glibc_version() -> Value:
    """Return the version of glibc; unknown for another C library."""
    try:
        words = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (ValueError, OSError):
        words = []
    return words[1] if len(words) == 2 else Unknown("the C library is not glibc")


PROBES: tuple[Probe, ...] = (Probe("system", ("system.os-release", "system.glibc", "system.machine"), probe_system),)
