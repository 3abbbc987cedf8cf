"""The newer user-space part of NVIDIA's driver in an image: the package cuda-compat (forward compatibility).

Runs on: inside the image. The lockfile has no fields for this package, because its files are locked with the image. The
gate reads the part `cuda-compat` of the answer.

Source: NVIDIA, CUDA Compatibility, section Forward Compatibility (edition of driver 615, read 2026-11-20):
cuda-compat-X-Y installs libcuda.so.1 to /usr/local/cuda-X.Y/compat. NGC's images have this file below compat/lib or
compat/lib.real.
"""

from __future__ import annotations

import os
import re

from hpcenv.incontainer.probe.loader import Loader
from hpcenv.incontainer.probe.paths import list_folder
from hpcenv.incontainer.probe.table import Probe
from hpcenv.incontainer.probe.text import describe_error, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts

TOOLKITS = "/usr/local"
LIBCUDA = "libcuda.so.1"
BELOW = ("compat", "compat/lib", "compat/lib.real")


def probe_forward_compat(env: ProbedEnvironment) -> Facts:
    """Read the packages in the image. A failure is reported in the answer, and does not make a field unknown."""
    try:
        found = sorted(_packages(), reverse=True)
        if found:
            version, folder = found[0]
            env.cuda_compat = {
                "version": "%d.%d" % version,
                "folder": printable(folder),
                "first": _is_first(env, folder),
                "library-path": printable(os.environ.get("LD_LIBRARY_PATH", "")),
            }
    except Exception as error:  # noqa: BLE001
        env.cuda_compat = {"problem": describe_error(error)}
    return {}


def _packages() -> Iterator[tuple[tuple[int, int], str]]:
    """Yield the CUDA version and the folder of each package."""
    for name in list_folder(TOOLKITS):
        if not name.startswith("cuda"):
            continue
        for below in BELOW:
            folder = os.path.realpath(os.path.join(TOOLKITS, name, below))
            match = re.search(r"/cuda-(\d{1,3})\.(\d{1,3})/", folder + "/")
            if match and os.path.exists(os.path.join(folder, LIBCUDA)):
                yield (int(match.group(1)), int(match.group(2))), folder


def _is_first(env: ProbedEnvironment, folder: str) -> bool:
    """Return whether the loader finds the libcuda of the package before the libcuda of the node."""
    for path, _ in Loader(env).places(LIBCUDA, None):
        if env.elf(path) is not None:
            return (
                os.path.dirname(os.path.realpath(path)) == folder or os.path.realpath(os.path.dirname(path)) == folder
            )
    return False


PROBES: tuple[Probe, ...] = (Probe("forward-compat", (), probe_forward_compat),)
