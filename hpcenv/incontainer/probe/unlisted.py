"""Importable files and device code that no RECORD lists.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import time

from hpcenv.incontainer.probe.editable import IMPORTABLE, find_modules, is_leftover
from hpcenv.incontainer.probe.paths import is_below
from hpcenv.incontainer.probe.hashing import SCAN_SECONDS, digest_of_lines, hash_file
from hpcenv.incontainer.probe.startup import LAUNCHERS
from hpcenv.incontainer.probe.stdlib_path import is_stdlib
from hpcenv.incontainer.probe.table import Probe
from hpcenv.incontainer.probe.values import Unknown
from hpcenv.incontainer.probe.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts

UNLISTED_NEWEST = 3
DEVICE_CODE = (".cubin", ".fatbin", ".ptx", ".co", ".hsaco", ".bc")  # .bc: libdevice, ROCm's device libraries
METADATA = (".dist-info", ".egg-info")


def probe_unlisted(env: ProbedEnvironment) -> Facts:
    """Return the number and the digest of importable files that belong to no package.

    Such files are in the site directories, but no RECORD file of an installed package lists them.
    """
    if env.dists is None:
        raise RuntimeError(env.unknown.get("packages.count", "the packages could not be read"))
    deadline = time.monotonic() + SCAN_SECONDS
    files: dict[str, str] = {}  # path -> its kind: 'file' or 'link'
    for site in env.sites:
        if site.scanned:
            _scan(env, site.path, files, deadline)
    for path in env.path:
        if os.path.isfile(path) and not is_stdlib(path):
            files[path] = "file"  # a zip or egg on sys.path
    if env.has("unhashed-rows"):
        files.update((path, "file") for dist in env.dists if dist.site.scanned for path in dist.unhashed)
    env.unlisted_files = [path for path in files if ".so" in path]
    entries, problems = _describe(env, files, deadline)
    sites = {printable(env.shown(site.path)) for site in env.sites}
    entries = [e for e in entries if not _is_launcher(e, sites)]
    env.unlisted = entries
    changed = {printable(env.shown(path)): _changed_at(path) for path in files}
    paths = (entry["path"] for entry in entries)
    env.newest = sorted(paths, key=lambda path: (-changed[path], path))[:UNLISTED_NEWEST]
    if problems:
        why = Unknown(f"{len(problems)} files could not be read, among them {problems[0]}")
        return {"packages.unlisted-digest": why, "packages.unlisted-count": len(entries)}
    lines = [e["path"] + "\0" + e["sha256"] for e in entries]
    return {
        "packages.unlisted-digest": "sha256:" + digest_of_lines("hpcenv-unlisted-v1", lines),
        "packages.unlisted-count": len(entries),
    }


def _changed_at(path: str) -> int:
    """Return when a file was last changed (ctime, ns). A copied file may have an old mtime, but never an old ctime."""
    try:
        return os.lstat(path).st_ctime_ns
    except OSError:
        return 0


def _is_launcher(entry: dict[str, str], sites: set[str]) -> bool:
    """Return whether content and folder of this file show that virtualenv or uv put it into the environment."""
    folder, _, name = entry["path"].rpartition("/")
    return folder in sites and "link" not in entry and entry["sha256"] in LAUNCHERS.get(name, ())


def _scan(env: ProbedEnvironment, top: str, files: dict[str, str], deadline: float) -> None:
    """Add the unlisted files of one site directory to ``files``, with the paths by which Python would import them.

    The scan needs no stat call for each file.
    """
    listed = env.listed
    suffixes = IMPORTABLE + DEVICE_CODE if env.has("device-code") else IMPORTABLE
    followed = {os.path.realpath(top)}
    stack = [top]
    while stack:
        folder = stack.pop()
        if time.monotonic() > deadline:
            raise TimeoutError(f"listing {top} took longer than {SCAN_SECONDS:g} s")
        names = set()
        lone = []
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if _is_leftover(env, name, folder == top):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if name != "__pycache__":
                        stack.append(folder + "/" + name)
                elif name.endswith(suffixes) or ".so." in name or _starts_plugins(env, folder, name):
                    names.add(name)
                    if folder + "/" + name not in listed:
                        files[folder + "/" + name] = "file"
                elif name.endswith(".pyc"):
                    lone.append(name)
                elif entry.is_symlink() and os.path.isdir(entry.path):  # a link to itself does not count as a folder
                    _follow(env, folder + "/" + name, followed, stack, files, deadline)
        for name in lone:
            # A compiled file beside its source is only a copy. Without the source, Python imports the compiled file.
            if name[:-1] not in names and folder + "/" + name not in listed:
                files[folder + "/" + name] = "file"


def _is_leftover(env: ProbedEnvironment, name: str, at_top: bool) -> bool:
    """Return whether the name prevents an import, such as `~ackage` after a failed removal by pip."""
    if is_leftover(env, name):
        return True
    unnamed = name == ".ipynb_checkpoints" or (at_top and name.startswith("~") and not name.endswith(".pth"))
    return unnamed and env.has("leftovers")


def _starts_plugins(env: ProbedEnvironment, folder: str, name: str) -> bool:
    """Return whether a file names functions that other programs load, such as torch at its import."""
    return name == "entry_points.txt" and folder.endswith(METADATA) and env.has("entry-points")


def _follow(
    env: ProbedEnvironment,
    link: str,
    followed: set[str],
    stack: list[str],
    files: dict[str, str],
    deadline: float,
) -> None:
    """Scan a linked folder once. A link that leads out of the environment, or in a circle, counts as an unlisted file.

    Outside of the environment, only files that Python could import count, because other files may be data.
    """
    real = os.path.realpath(link)
    is_listed = env.lists_below(link)
    circle = is_below(os.path.realpath(os.path.dirname(link)), real)
    if real not in followed and not circle and (is_listed or env.inside(real)):
        followed.add(real)
        stack.append(link)
    elif not is_listed:
        files[link] = "link"
        if not circle and env.has("links"):
            files.update((path, "file") for path in find_modules(env, link, deadline) if path not in env.listed)


def _describe(env: ProbedEnvironment, files: dict[str, str], deadline: float) -> tuple[list[dict[str, str]], list[str]]:
    import hashlib

    entries = []
    problems = []
    buffer = bytearray(1 << 20)
    for path, kind in files.items():
        entry = {"path": printable(env.shown(path))}
        if os.path.islink(path) and not env.inside(os.path.realpath(path)):
            entry["link"] = printable(os.path.realpath(path))
        if kind == "link":
            target = env.shown(os.path.realpath(path)).encode("utf-8", "surrogateescape")
            entry["sha256"] = hashlib.sha256(b"link\0" + target).hexdigest()
        else:
            result = hash_file(env, path, "sha256", buffer, deadline)
            if result.digest is None:
                problems.append(f"{entry['path']}: {result.problem}")
            entry["sha256"] = result.word()
        entries.append(entry)
    entries.sort(key=lambda e: e["path"])
    return entries, problems


PROBES: tuple[Probe, ...] = (
    Probe("unlisted", ("packages.unlisted-digest", "packages.unlisted-count"), probe_unlisted),
)
