"""Libraries that Python, torch and extension modules load, but no package lists.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import sys
import time

from hpcenv.incontainer.probe.files import read_small
from hpcenv.incontainer.probe.paths import is_below, list_folder
from hpcenv.incontainer.probe.hashing import CONTENT_SECONDS, hash_files
from hpcenv.incontainer.probe.interpreter import RUNNING, find_libpython
from hpcenv.incontainer.probe.loader import Loader, default_folders
from hpcenv.incontainer.probe.library import Library
from hpcenv.incontainer.probe.stdlib import stdlib_roots, walk_stdlib
from hpcenv.incontainer.probe.system import glibc_version
from hpcenv.incontainer.probe.table import HASHING, Probe
from hpcenv.incontainer.probe.values import Unknown
from hpcenv.incontainer.probe.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts

FIELDS = ("libs.system", "libs.unlisted")
# These libraries belong to the driver of each node. The field host.driver-version is used to compare the driver.
OF_THE_DRIVER = ("libcuda.so", "libnvidia-", "libnvcuvid.so", "libnvoptix.so", "libcudadebugger.so")
PRELOAD_FILE = "/etc/ld.so.preload"
OWN_FOLDERS = ("/", "/usr", "/usr/local")  # a Python in these folders shares them with the system


def probe_outside_libraries(env: ProbedEnvironment) -> Facts:
    """Return path and hash of each library that no package lists, outside and inside of the environment.

    The file for each name is found with the rules of the loader. Libraries that running code opens later are not found
    in this way. Level deep reports the libraries that `import torch` maps.
    """
    if isinstance(glibc_version(), Unknown):
        return dict.fromkeys(FIELDS, Unknown("the search order of a C library other than glibc is not known here"))
    found = sorted(_Search(env).outside(_start_files(env)))
    deadline = time.monotonic() + CONTENT_SECONDS
    system: list[str] = []
    unlisted: list[str] = []
    for path, result in zip(found, hash_files(env, [(path, "sha256", 0) for path in found], deadline)):
        if result.digest is None:
            return dict.fromkeys(FIELDS, Unknown(f"{printable(path)}: {result.problem}"))
        inside = _is_own(env, path)
        line = printable(env.shown(path) if inside else path) + " " + result.word()[:16]
        (unlisted if inside else system).append(line)
    return {"libs.system": system, "libs.unlisted": unlisted}


def _is_own(env: ProbedEnvironment, path: str) -> bool:
    roots = [root for root in (env.prefix, env.base_prefix) if root not in OWN_FOLDERS]
    return any(is_below(path, root) or is_below(os.path.realpath(path), os.path.realpath(root)) for root in roots)


def _start_files(env: ProbedEnvironment) -> Iterator[str]:
    """Yield the files with which the search starts: Python, its extension modules, and the libraries of packages."""
    yield os.path.realpath(RUNNING if os.path.exists(RUNNING) else sys.executable)
    libpython = find_libpython()
    if libpython:
        yield libpython
    for _, root in stdlib_roots(env):
        for folder, names in walk_stdlib(root):
            yield from (folder + "/" + name for name in names if name.endswith(".so"))
    yield from (path for path in env.listed if ".so" in path)
    yield from env.unlisted_files
    yield from (env.prefix + "/" + file.path for file in env.conda_files if ".so" in file.path)


class _Search:
    """Finds the files of needed libraries. Each name is searched with the search path of the library that needs it."""

    def __init__(self, env: ProbedEnvironment) -> None:
        self.env = env
        self.loader = Loader(env)
        self._names: dict[str, frozenset[str]] = {}
        self._of_packages = {os.path.realpath(env.prefix + "/" + file.path) for file in env.conda_files}
        self._sites = tuple(os.path.realpath(site.path) for site in env.sites if site.scanned)

    def outside(self, start: Iterable[str]) -> set[str]:
        """Return the needed libraries that no package lists."""
        found: set[str] = set()
        queue = [library.path for library in self.loader.loaded[1:]] + list(start)
        found.update(path for path in queue[: len(self.loader.loaded) - 1] if not self._is_listed(path))
        seen = set(queue)
        while queue:
            path = queue.pop()
            for needed in self._needs(path):
                if needed not in seen:
                    seen.add(needed)
                    queue.append(needed)
                    if not self._is_listed(needed):
                        found.add(needed)
        return found

    def _needs(self, path: str) -> Iterator[str]:
        elf = self.env.elf(path)
        if elf is None:
            return
        library = Library(path, elf, None, False)
        for name in elf.needed:
            if name.startswith(OF_THE_DRIVER):
                continue
            for place, is_system in self.loader.places(name, library):
                if os.path.basename(place) in self._listing(os.path.dirname(place)):
                    other = self.env.elf(place)
                    if other is not None and other.kind == elf.kind:
                        yield place
                        break
            yield from self._variants(name)

    def _variants(self, name: str) -> Iterator[str]:
        """Yield the builds of a system library for newer processors (glibc-hwcaps), which ld.so prefers."""
        for folder in default_folders():
            for level in sorted(self._listing(folder + "/glibc-hwcaps")):
                if name in self._listing(folder + "/glibc-hwcaps/" + level):
                    yield folder + "/glibc-hwcaps/" + level + "/" + name

    def _listing(self, folder: str) -> frozenset[str]:
        if folder not in self._names:
            self._names[folder] = frozenset(list_folder(folder))
        return self._names[folder]

    def _is_listed(self, path: str) -> bool:
        real = os.path.realpath(path)
        if path in self.env.listed or real in self._of_packages or any(is_below(real, site) for site in self._sites):
            return True
        return os.path.basename(path).startswith("libpython")  # another field has its hash


def probe_preload_file(env: ProbedEnvironment) -> Facts:
    """Return the libraries that /etc/ld.so.preload loads before all others, each with its hash."""
    try:
        text = read_small(env, PRELOAD_FILE)[0].decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return {"libs.ld-so-preload": []}
    names = [name for line in text.splitlines() for name in line.partition("#")[0].replace(":", " ").split()]
    results = hash_files(env, [(name, "sha256", 0) for name in names], time.monotonic() + CONTENT_SECONDS)
    return {"libs.ld-so-preload": [f"{printable(name)} {r.word()[:16]}" for name, r in zip(names, results)]}


PROBES: tuple[Probe, ...] = (
    Probe("outside-libraries", FIELDS, probe_outside_libraries, HASHING),
    Probe("preload-file", ("libs.ld-so-preload",), probe_preload_file),
)
