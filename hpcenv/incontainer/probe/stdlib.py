"""The files of the standard library that Python can import.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import time

from hpcenv.incontainer.probe.paths import is_below
from hpcenv.incontainer.probe.hashing import CONTENT_SECONDS, digest_of_lines, hash_files
from hpcenv.incontainer.probe.python import SITE_NAMES
from hpcenv.incontainer.probe.stdlib_path import STDLIB, is_stdlib
from hpcenv.incontainer.probe.table import HASHING, Probe
from hpcenv.incontainer.probe.values import Unknown
from hpcenv.incontainer.probe.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts

# Tests are left out, because many images do not have them. `config-*` is only for building extension modules.
NOT_READ = frozenset(("__pycache__", "test", "tests", "idle_test", *SITE_NAMES))


def probe_stdlib(env: ProbedEnvironment) -> Facts:
    """Return the digest of the standard library: sources, extension modules, .pyc without source, pythonXY.zip."""
    deadline = time.monotonic() + CONTENT_SECONDS
    files = {}
    for mark, root in stdlib_roots(env):
        if os.path.isfile(root):
            files[mark.rstrip("/")] = root
        for path in _importable_files(root):
            files[mark + os.path.relpath(path, root)] = path
    if not files:
        return {"python.stdlib-sha256": Unknown("no source files in " + STDLIB)}
    names = sorted(files)
    results = hash_files(env, [(files[n], "sha256", 0) for n in names], deadline)
    for name, result in zip(names, results):
        if result.digest is None:
            return {"python.stdlib-sha256": Unknown(f"{printable(name)}: {result.problem}")}
    lines = [n + "\0" + result.word() for n, result in zip(names, results)]
    return {"python.stdlib-sha256": digest_of_lines("hpcenv-stdlib-v1", lines)}


def stdlib_roots(env: ProbedEnvironment) -> list[tuple[str, str]]:
    """Return the standard library's entries on sys.path, each with the beginning of its files' names in the digest.

    Python searches pythonXY.zip first. The path pythonXY.zip may also be a folder.
    """
    roots = {STDLIB: ""}
    for path in env.training_path:
        if is_stdlib(path):
            roots.setdefault(os.path.normpath(path), os.path.basename(path) + "/")
    return [(mark, root) for root, mark in roots.items()]


def _importable_files(root: str) -> Iterator[str]:
    for folder, names in walk_stdlib(root):
        sources = {name for name in names if name.endswith(".py")}
        for name in names:
            if name in sources or name.endswith(".so") or (name.endswith(".pyc") and name[:-1] not in sources):
                yield folder + "/" + name


def walk_stdlib(root: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the folders of the standard library that are read, with their files. Links to folders are followed once."""
    followed = {os.path.realpath(root)}
    for folder, folders, files in os.walk(root, followlinks=True):
        kept = []
        for name in sorted(folders):
            path = folder + "/" + name
            if name in NOT_READ or name.startswith("config-"):
                continue
            if os.path.islink(path):
                real = os.path.realpath(path)
                if real in followed or is_below(os.path.realpath(folder), real):
                    continue
                followed.add(real)
            kept.append(name)
        folders[:] = kept
        yield folder, files


PROBES: tuple[Probe, ...] = (Probe("stdlib", ("python.stdlib-sha256",), probe_stdlib, HASHING),)
