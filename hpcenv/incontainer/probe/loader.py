"""Find the file that the dynamic loader would load for the name of a library.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import sys

from hpcenv.incontainer.probe.library import Library
from hpcenv.incontainer.probe.files import SYSTEM_BYTES, read_small

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcenv.incontainer.probe.elf import Elf
    from hpcenv.incontainer.probe.environment import ProbedEnvironment


class Loader:
    """A model of glibc's ld.so(8). It finds the file for the name of a library, and does not load the file.

    The model ignores glibc-hwcaps subfolders, because they contain no CUDA library. It also ignores LD_AUDIT, dlmopen,
    and libraries that code in .pth files or sitecustomize loads before torch. Level ``deep`` reports the libraries that
    are really mapped.

    Attributes:
        loaded: the libraries found so far; the first is the interpreter.
        missing: name of a needed library that was not found -> the file that needs it.
    """

    def __init__(self, env: ProbedEnvironment) -> None:
        self.env = env
        self.loaded: list[Library] = []
        self.missing: dict[str, str] = {}
        self._done: set[str] = set()
        self._cache: LoaderCache | None = None
        self._main: Library | None = None
        path = os.path.realpath("/proc/self/exe" if os.path.exists("/proc/self/exe") else sys.executable)
        elf = env.elf(path)
        if elf is None:
            raise ValueError(f"{path} is not an ELF file")
        self._main = main = self._add(path, elf, None, False)
        self._library_path = [
            d for part in split_path(os.environ.get("LD_LIBRARY_PATH", "")) for d in self._expand(part, main)
        ]
        first = [main]
        for name in os.environ.get("LD_PRELOAD", "").replace(":", " ").split():
            preloaded = self._get(name, main)
            first += [preloaded] if preloaded else []
        self._load_needed(first)
        self.missing.clear()  # the loader found the libraries of Python itself, because Python runs

    def open(self, path: str, parent: Library | None = None) -> Library | None:
        """Find a library and everything that it needs, as dlopen does; return None if the library is not found."""
        library = self._get(path, parent or self._main)
        if library:
            self._load_needed([library])
        return library

    def _load_needed(self, queue: list[Library]) -> None:
        queue = list(queue)
        while queue:  # breadth first, as ld.so does
            library = queue.pop(0)
            if library.path in self._done:
                continue
            self._done.add(library.path)
            for name in library.elf.needed:
                needed = self._get(name, library)
                if needed is None:
                    self.missing.setdefault(name, library.path)
                else:
                    library.needs.append(needed)
                    queue.append(needed)

    def _get(self, name: str, requester: Library | None) -> Library | None:
        for library in self.loaded[1:]:
            if name in library.names or ("/" not in name and name == library.elf.soname):
                return library
        for path, system in self.places(name, requester):
            elf = self.env.elf(path)
            if elf is None or (self._main and elf.kind != self._main.elf.kind):
                continue
            real = os.path.realpath(path)
            for library in self.loaded[1:]:
                if library.real == real:
                    library.names.add(name)
                    return library
            added = self._add(path, elf, requester, system)
            added.names.add(name)
            return added
        return None

    def _add(self, path: str, elf: Elf, parent: Library | None, system: bool) -> Library:
        library = Library(path, elf, parent, system)
        self.loaded.append(library)
        if len(self.loaded) > 2000:
            raise ValueError("more than 2000 libraries")
        return library

    def places(self, name: str, requester: Library | None) -> Iterator[tuple[str, bool]]:
        """Yield the paths that ld.so tries for a name, in this order, and whether each is in a folder of the system."""
        if "/" in name:
            yield os.path.normpath(name), False
            return
        if requester is not None and not requester.elf.runpath:
            chain: Library | None = requester
            while chain is not None:
                for folder in self._folders(chain.elf.rpath, chain):
                    yield os.path.normpath(folder + "/" + name), False
                chain = chain.parent
        for folder in self._library_path:
            yield os.path.normpath(folder + "/" + name), False
        if requester is not None:
            for folder in self._folders(requester.elf.runpath, requester):
                yield os.path.normpath(folder + "/" + name), False
        if self._cache is None:
            self._cache = LoaderCache(self.env)
        for path in self._cache.find(name):
            yield path, True
        for folder in default_folders():
            yield folder + "/" + name, True

    def _folders(self, text: str, library: Library) -> list[str]:
        return [folder for part in text.split(":") if part for folder in self._expand(part, library)]

    def _expand(self, part: str, library: Library) -> list[str]:
        """Replace ld.so's variables in the path of a folder. Leave out relative paths: they depend on the current folder."""
        import re

        part = re.sub(r"\$(?:ORIGIN\b|\{ORIGIN\})", lambda _: os.path.dirname(library.path), part)
        part = re.sub(r"\$(?:PLATFORM\b|\{PLATFORM\})", os.uname().machine, part)
        libs = ("lib/" + os.uname().machine + "-linux-gnu", "lib64", "lib")
        parts = [re.sub(r"\$(?:LIB\b|\{LIB\})", lib, part) for lib in libs] if "$" in part else [part]
        return [p for p in parts if p.startswith("/")]


def split_path(text: str) -> list[str]:
    """Return the folders in LD_LIBRARY_PATH."""
    return text.replace(";", ":").split(":") if text else []


def default_folders() -> list[str]:
    triple = os.uname().machine + "-linux-gnu"
    return ["/lib/" + triple, "/usr/lib/" + triple, "/lib64", "/usr/lib64", "/lib", "/usr/lib"]


def without_own_list(env: ProbedEnvironment, folders: list[str]) -> list[str]:
    """Leave out the folders that Apptainer 1.5 adds to LD_LIBRARY_PATH, and that the loader searches anyway.

    If the image does not set LD_LIBRARY_PATH, action_script.sh of Apptainer 1.5.3 with --nv sets LD_LIBRARY_PATH to the
    folders of `ldconfig -Nv`, followed by the folder with the node's libraries. Apptainer 1.4 sets LD_LIBRARY_PATH only
    to the folder with the node's libraries. Only the names of the
    folders are left out: the libraries in the folders are still compared.
    """
    own = {os.path.realpath(folder) for folder in folders[:-1]}
    listed = {os.path.realpath(folder) for folder in _configured(env, "/etc/ld.so.conf") if os.path.isdir(folder)}
    defaults = {os.path.realpath(folder) for folder in default_folders()}
    trusted = {os.path.realpath(folder) for folder in ("/lib", "/usr/lib", "/lib64", "/usr/lib64")}
    if folders[-1:] == ["/.singularity.d/libs"] and listed <= own <= listed | defaults and own & trusted:
        return folders[-1:]
    return folders


def _configured(env: ProbedEnvironment, path: str, depth: int = 0) -> Iterator[str]:
    """Yield the folders of ld.so.conf and of the files that it includes."""
    import glob

    try:
        text = os.fsdecode(read_small(env, path)[0])
    except (OSError, ValueError):
        return
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words[:1] == ["include"] and depth < 4:
            for pattern in words[1:]:
                for name in sorted(glob.glob(os.path.join(os.path.dirname(path), pattern))):
                    yield from _configured(env, name, depth + 1)
        elif words and words[0] != "hwcap":
            yield words[0].partition("=")[0]


class LoaderCache:
    """/etc/ld.so.cache in the format glibc-ld.so.cache1.1, the only format since glibc 2.32."""

    def __init__(self, env: ProbedEnvironment) -> None:
        import struct

        self._data = b""
        self._places: dict[bytes, list[int]] = {}
        try:
            data = read_small(env, "/etc/ld.so.cache", SYSTEM_BYTES)[0]
        except (OSError, ValueError):
            return
        start = data.find(b"glibc-ld.so.cache1.1")
        if start < 0:
            return
        self._data = data = data[start:] + b"\0"
        count = min(struct.unpack_from("=I", data, 20)[0], (len(data) - 48) // 24)
        for _, key, place, _, hwcap in struct.iter_unpack("=iIIIQ", data[48 : 48 + 24 * count]):
            if hwcap == 0 and max(key, place) < len(data):
                self._places.setdefault(self._text(key), []).append(place)

    def _text(self, at: int) -> bytes:
        return self._data[at : self._data.index(b"\0", at)]

    def find(self, name: str) -> list[str]:
        return [os.fsdecode(self._text(place)) for place in self._places.get(os.fsencode(name), ())]
