"""Facts about the interpreter and its path.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import sys

from hpcenv.incontainer.probe.environment import Site
from hpcenv.incontainer.probe.paths import is_below
from hpcenv.incontainer.probe.stdlib_path import STDLIB, is_stdlib
from hpcenv.incontainer.probe.table import Probe
from hpcenv.incontainer.probe.values import Unknown
from hpcenv.incontainer.probe.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts, Value

SITE_NAMES = ("site-packages", "dist-packages")


def probe_python(env: ProbedEnvironment) -> Facts:
    """Return the facts of this interpreter."""
    return {
        "python.version": sys.version.split()[0],
        "python.implementation": sys.implementation.name,
        "python.soabi": _soabi(),
        "python.executable": printable(sys.executable or ""),
        "python.prefix": printable(env.prefix),
    }


def _soabi() -> Value:
    # The tag is read from the suffix that the import system uses. sysconfig gives the same tag, but takes 10 ms longer.
    from importlib.machinery import EXTENSION_SUFFIXES

    for suffix in EXTENSION_SUFFIXES:
        parts = suffix.split(".")
        if len(parts) == 3 and parts[1] != "abi3":
            return parts[1]
    return Unknown("the import system has no extension suffix with an ABI tag")


def probe_path(env: ProbedEnvironment) -> Facts:
    """Return sys.path, and find the site directories for the other probes."""
    import site

    for path in env.path:
        if not is_stdlib(path):
            _add_site(env, path)
    env.roots = sorted({os.path.realpath(p) for s in env.sites for p in (s.path, s.base)})
    env.roots += [os.path.realpath(env.prefix), os.path.realpath(env.base_prefix), os.path.realpath(STDLIB)]
    user_site = os.path.normpath(site.getusersitepackages() or "")
    # The user site is "on" only if Python imports from it. An enabled user site that does not exist is not on the path.
    user_on = bool(site.getusersitepackages()) and os.path.realpath(user_site) in {
        os.path.realpath(p) for p in env.path
    }
    return {
        "python.sys-path": [_braced(env, path) for path in env.path],
        "python.user-site": "on: " + printable(user_site) if user_on else "off",
        "python.path-variable": printable(os.environ.get("PYTHONPATH", "")),
    }


def _add_site(env: ProbedEnvironment, path: str) -> None:
    if not os.path.isdir(path):
        return
    real = os.path.realpath(path)
    if any(os.path.realpath(known.path) == real for known in env.sites):
        return  # this folder is already in the list: in Fedora, lib and lib64 can be the same folder
    owners = [r for r in (env.prefix, env.base_prefix, env.user_base()) if is_below(path, r)]
    base = max(owners, key=len) if owners else path
    env.sites.append(Site(path, base, bool(owners) or _is_site(env, path)))


def _braced(env: ProbedEnvironment, path: str) -> str:
    mark, rest = env.placed(path)
    return printable((mark + "/" + rest).rstrip("/") if mark else path)


def _is_site(env: ProbedEnvironment, path: str) -> bool:
    """Return whether a folder outside of the prefix counts as a site directory, by its name or because of --site."""
    named = bool(env.site) and os.path.realpath(path) == os.path.realpath(env.site)
    return named or os.path.basename(path) in SITE_NAMES


PROBES: tuple[Probe, ...] = (
    Probe(
        "python",
        ("python.version", "python.implementation", "python.soabi", "python.executable", "python.prefix"),
        probe_python,
    ),
    Probe("path", ("python.sys-path", "python.user-site", "python.path-variable"), probe_path),
)
