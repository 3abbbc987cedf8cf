"""The image's libraries for NCCL's network (verbs, libfabric, plugins), and NCCL variables that have no effect.

Runs on: inside the image. The lockfile has no fields for these facts, because the files are locked with the image. The
decision on the network reads these facts from the part `network` of the answer.
"""

from __future__ import annotations

import os
import re

from hpcenv.incontainer.probe.paths import open_regular
from hpcenv.incontainer.probe.loader import Loader
from hpcenv.incontainer.probe.table import Probe
from hpcenv.incontainer.probe.text import describe_error, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.library import Library
    from hpcenv.incontainer.probe.values import Facts

# The folder of rdma-core's providers, below each folder of libraries.
PROVIDERS = "libibverbs"
PLUGIN_BYTES = 16 << 20
PLUGIN_VERSION = re.compile(rb"aws-ofi-n?r?ccl (\d+\.\d+\.\d+[\w.-]*)")
# Folders outside of the loader's folders, where vendors and their installers put the plugin (aws-ofi-nccl 2daf7d3
# README.md; NGC's and HPC-X's images).
PLUGIN_FOLDERS = (
    "/opt/amazon/ofi-nccl/lib",
    "/opt/amazon/ofi-nccl/lib64",
    "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "/opt/amazon/ofi-nccl/lib/aarch64-linux-gnu",
    "/opt/amazon/aws-ofi-nccl/lib",
    "/opt/aws-ofi-nccl/lib",
    "/opt/hpcx/nccl_rdma_sharp_plugin/lib",
    "/usr/local/lib",
)
MOST_PLUGINS = 8
# At most this many variables of NCCL are searched for. A person does not set more variables by hand.
MOST_NAMES = 32
RODATA_BYTES = 256 << 20
PIECE = 8 << 20


def probe_network(env: ProbedEnvironment) -> Facts:
    """Read the network parts of the image. A failure is reported in the answer, and does not make a field unknown."""
    try:
        env.network = _read(env)
    except Exception as error:  # noqa: BLE001
        env.network = {"problem": describe_error(error)}
    return {}


def _read(env: ProbedEnvironment) -> dict[str, Any] | None:
    nccl = env.libraries.get("nccl")
    if nccl is None:
        return None  # a torch without NCCL does not use these libraries
    loader = Loader(env)
    verbs, fabric, plugin = (
        _first(env, loader, name, nccl) for name in ("libibverbs.so.1", "libfabric.so.1", _plugin_name())
    )
    return {
        "verbs": printable(env.shown(verbs)) if verbs else "",
        "providers": _providers(verbs) if verbs else 0,
        "libfabric": printable(env.shown(fabric)) if fabric else "",
        "plugin": printable(env.shown(plugin)) if plugin else "",
        "plugin-version": _plugin_version(plugin) if plugin else "",
        "other-plugins": _other_plugins(env, loader, plugin, nccl),
        "unread": _unread(env, [lib for lib in (nccl, env.libraries.get("libtorch_cuda")) if lib], plugin),
    }


def _plugin_name() -> str:
    """Return the library that NCCL opens.

    NCCL_NET_PLUGIN is the library's name, or the end of that name (env.rst, NCCL 2.30).
    """
    given = os.environ.get("NCCL_NET_PLUGIN", "").split(",")[0]
    if not given:
        return "libnccl-net.so"
    return given if given.startswith("/") or ".so" in given else "libnccl-net-" + given + ".so"


def _first(env: ProbedEnvironment, loader: Loader, name: str, requester: Library) -> str:
    """Return the file that the loader finds first for a name; empty if it finds no file."""
    for path, _ in loader.places(name, requester):
        if env.elf(path) is not None:
            return path
    return ""


def _other_plugins(env: ProbedEnvironment, loader: Loader, first: str, requester: Library) -> list[str]:
    """Return further plugins that a user may have meant: plugins later in the search, and in folders of vendors.

    The loader takes only the first plugin. The same file under a different name is not a further plugin.
    """
    name = _plugin_name()
    paths = [path for path, _ in loader.places(name, requester)]
    paths += [os.path.join(folder, os.path.basename(name)) for folder in PLUGIN_FOLDERS]
    seen = {os.path.realpath(first)} if first else set()
    found: list[str] = []
    for path in paths:
        real = os.path.realpath(path)
        if real in seen or len(found) >= MOST_PLUGINS or env.elf(path) is None:
            continue
        seen.add(real)
        version = _plugin_version(path)
        found.append(printable(env.shown(path)) + (" (aws-ofi-nccl " + version + ")" if version else ""))
    return found


def _providers(verbs: str) -> int:
    """Return the number of providers next to libibverbs. Without a provider, libibverbs finds no device."""
    folder = os.path.join(os.path.dirname(os.path.realpath(verbs)), PROVIDERS)
    try:
        return sum("-rdmav" in name for name in os.listdir(folder))
    except OSError:
        return 0


def _plugin_version(path: str) -> str:
    try:
        with open(path, "rb") as file:
            match = PLUGIN_VERSION.search(file.read(PLUGIN_BYTES))
    except OSError:
        return ""
    return match.group(1).decode("ascii", "replace") if match else ""


# -- variables that nothing reads -----------------------------------------------------------


def _unread(env: ProbedEnvironment, libraries: list[Library], plugin: str) -> list[str]:
    """Return the NCCL variables of this process that no library reads, because no library contains their names.

    Only the constants of the libraries are searched, and only if NCCL variables are set. If a library cannot be
    searched completely, it may read all variables, so the result is empty.
    """
    left = {name.encode() for name in os.environ if re.match(r"NCCL_[A-Z0-9_]+$", name)}
    if not left or len(left) > MOST_NAMES:
        return []
    for path in [library.path for library in libraries] + ([plugin] if plugin else []):
        if not left:
            break
        found = _names_in(env, path, left)
        if found is None:
            return []
        left -= found
    return sorted(name.decode() for name in left)


def _names_in(env: ProbedEnvironment, path: str, names: set[bytes]) -> set[bytes] | None:
    """Return the names that are whole strings in a library's constants; None if the constants cannot be searched."""
    descriptor, _ = open_regular(path, env.inside)
    try:
        sections = _constants(descriptor)
        if sections is None or sum(size for _, size in sections) > RODATA_BYTES:
            return None
        left = set(names)
        longest = max(map(len, names)) + 2
        for start, size in sections:
            for offset in range(start, start + size, PIECE):
                data = os.pread(descriptor, min(PIECE + longest, start + size - offset), offset)
                left -= {name for name in left if name + b"\0" in data}
                if not left:
                    return set(names)
        return names - left
    finally:
        os.close(descriptor)


def _constants(descriptor: int) -> list[tuple[int, int]] | None:
    """Return offset and size of each section `.rodata*` of a 64-bit little-endian ELF file; None without sections.

    Programs for GPUs are in other sections, which are a hundred times as large.
    """
    import struct

    head = os.pread(descriptor, 64, 0)
    if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
        return None
    at = struct.unpack_from("<Q", head, 40)[0]
    size, count, names = struct.unpack_from("<HHH", head, 58)
    if size != 64 or not 0 < count < 4096 or names >= count or at >= 1 << 62:
        return None
    table = os.pread(descriptor, size * count, at)
    rows = [struct.unpack_from("<IIQQQQ", table, row) for row in range(0, len(table) - 63, 64)]
    if names >= len(rows) or rows[names][4] >= 1 << 62:
        return None
    words = os.pread(descriptor, min(rows[names][5], 1 << 20), rows[names][4])
    return [
        (offset, length)
        for word, kind, _, _, offset, length in rows
        if kind == 1 and offset < 1 << 62 and words[word : word + 7] == b".rodata"
    ]


PROBES: tuple[Probe, ...] = (Probe("network", (), probe_network),)
