"""Compiled files that Python runs without a check of their source.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import sys
import time

from hpcenv.incontainer.probe.files import read_small
from hpcenv.incontainer.probe.paths import is_below, open_regular
from hpcenv.incontainer.probe.hashing import SCAN_SECONDS
from hpcenv.incontainer.probe.record import RECORD_BYTES
from hpcenv.incontainer.probe.stdlib import NOT_READ, stdlib_roots
from hpcenv.incontainer.probe.table import HASHING, Probe
from hpcenv.incontainer.probe.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts

CACHE = "__pycache__"


def probe_compiled(env: ProbedEnvironment) -> Facts:
    """Return the compiled files that differ from their source, and that Python runs without a check of the source.

    Python loads a .pyc of the 'unchecked hash' kind (PEP 552) even if its source changed. So the hash in the header of
    the .pyc is compared with its source. Python itself checks the other kinds. The code in a .pyc is not compared with
    its source, because it takes a minute to compile 13,000 files.
    """
    unchecked = set()
    deadline = time.monotonic() + SCAN_SECONDS
    tops = {root: True for _, root in stdlib_roots(env) if os.path.isdir(root)}
    tops.update((site.path, False) for site in env.sites if site.scanned)
    for top, is_stdlib in tops.items():
        for path, source in _compiled_files(env, top, is_stdlib, deadline):
            if _is_unbacked(env, path, source):
                unchecked.add(printable(env.shown(path)))
    return {"python.unchecked-pyc": sorted(unchecked)}


def _compiled_files(env: ProbedEnvironment, top: str, is_stdlib: bool, deadline: float) -> Iterator[tuple[str, str]]:
    """Yield each compiled file that Python would read for a module below a folder, with the source.

    With PYTHONPYCACHEPREFIX, Python reads compiled files from a separate tree, and not from `__pycache__`.
    """
    tag = "." + (sys.implementation.cache_tag or "?")
    prefix = (sys.pycache_prefix or "").rstrip("/")
    for folder, names in _folders(env, prefix + top, is_stdlib, deadline):
        if not prefix and os.path.basename(folder) != CACHE:
            continue
        place = folder[len(prefix) :] if prefix else os.path.dirname(folder)
        for name in names:
            stem, _, rest = name.partition(tag)
            if rest == ".pyc" or (rest.startswith(".opt-") and rest.endswith(".pyc")):
                yield folder + "/" + name, place + "/" + stem + ".py"


def _folders(env: ProbedEnvironment, top: str, is_stdlib: bool, deadline: float) -> Iterator[tuple[str, list[str]]]:
    """Yield folders with the names of their files. A link to a folder of the environment is followed once."""
    followed = {os.path.realpath(top)}
    stack = [top]
    while stack:
        folder = stack.pop()
        if time.monotonic() > deadline:
            raise TimeoutError(f"looking for compiled files took longer than {SCAN_SECONDS:g} s")
        names = []
        in_cache = os.path.basename(folder) == CACHE
        try:
            entries = os.scandir(folder)
        except OSError:
            continue  # Python also does not find modules in this folder
        with entries:
            for entry in entries:
                if entry.name.endswith(".pyc"):
                    names.append(entry.name)
                elif in_cache or (is_stdlib and entry.name in NOT_READ and entry.name != CACHE):
                    continue
                elif entry.is_dir(follow_symlinks=False):
                    stack.append(folder + "/" + entry.name)
                elif entry.is_symlink() and entry.is_dir() and _is_followed(env, entry.path, is_stdlib, followed):
                    stack.append(folder + "/" + entry.name)
        yield folder, names


def _is_followed(env: ProbedEnvironment, link: str, is_stdlib: bool, followed: set[str]) -> bool:
    real = os.path.realpath(link)
    if real in followed or is_below(os.path.realpath(os.path.dirname(link)), real):
        return False
    if not (is_stdlib or sys.pycache_prefix or env.inside(real) or env.lists_below(link)):
        return False
    followed.add(real)
    return True


def _is_unbacked(env: ProbedEnvironment, path: str, source: str) -> bool:
    from importlib.util import source_hash

    try:
        descriptor, _ = open_regular(path, env.inside)
        with os.fdopen(descriptor, "rb") as file:
            head = file.read(16)
        if int.from_bytes(head[4:8], "little") != 1:  # not of the kind 'unchecked hash'
            return False
        data = read_small(env, source, RECORD_BYTES)[0]
    except FileNotFoundError:
        return False  # without a source, Python does not read __pycache__
    return source_hash(data) != head[8:16]


PROBES: tuple[Probe, ...] = (Probe("pyc", ("python.unchecked-pyc",), probe_compiled, HASHING),)
