"""The packages that conda installed.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import time

from hpcenv.incontainer.probe.environment import CondaFile
from hpcenv.incontainer.probe.files import read_small
from hpcenv.incontainer.probe.paths import is_below
from hpcenv.incontainer.probe.hashing import CONTENT_SECONDS, digest_of_lines, hash_files
from hpcenv.incontainer.probe.table import HASHING, Probe
from hpcenv.incontainer.probe.values import Unknown
from hpcenv.incontainer.probe.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.hashing import Hashed
    from hpcenv.incontainer.probe.values import Facts

CONDA_BYTES = 64 << 20  # one package can list 100,000 files
PLACEHOLDER_BYTES = 256 << 20  # limit for files into which conda wrote the prefix; they are read as a whole
CONDA_SHOWN = 20


def probe_conda(env: ProbedEnvironment) -> Facts:
    """Return number and digest of the packages in conda-meta, including those without Python (MKL, CUDA)."""
    import json

    packages: dict[str, dict[str, Any]] = {}
    for root in dict.fromkeys((env.prefix, env.base_prefix)):
        for name in sorted(n for n in env.names(root + "/conda-meta") if n.endswith(".json")):
            content = read_small(env, f"{root}/conda-meta/{name}", CONDA_BYTES)[0]
            try:
                record = json.loads(content)
                entry = _conda_entry(record)
            except ValueError as error:
                raise ValueError(f"conda-meta/{name}: {error}") from error
            if root != env.prefix:
                entry["outside"] = True
            elif env.level != "record":
                env.conda_files += _listed_files(env, record)
            if packages.setdefault(entry["name"], entry) is entry:
                env.conda_dists.update(dict.fromkeys(_dist_folders(root, record), entry["name"]))
    env.conda = [packages[name] for name in sorted(packages)]
    if not env.conda:
        return {"packages.conda-count": 0, "packages.conda-digest": "none"}
    lines = ["\0".join(e[k] for k in ("name", "version", "build", "hash", "channel")) for e in env.conda]
    digest = "sha256:" + digest_of_lines("hpcenv-conda-v1", lines)
    return {"packages.conda-count": len(env.conda), "packages.conda-digest": digest}


def _conda_entry(record: dict[str, object]) -> dict[str, Any]:
    """Return name, version, build, hash and channel. The URL's host is left out: it may be a mirror or contain a token.

    `md5` is given in addition to a sha256, because a lockfile of conda-lock may have only the md5.
    """

    def text(key: str) -> str:
        return printable(str(record.get(key) or ""))[:255]

    if not text("name") or not text("version"):
        raise ValueError("it has no name or no version")
    digest = "sha256=" + text("sha256") if text("sha256") else "md5=" + text("md5") if text("md5") else ""
    parts = [p for p in (text("channel") or text("url")).partition("?")[0].split("/") if p]
    if parts and parts[-1].endswith((".conda", ".bz2")):
        parts.pop()
    if parts and (parts[-1] == "noarch" or parts[-1].startswith(("linux-", "osx-", "win-"))):
        parts.pop()
    channel = parts[-1] if parts else ""
    entry = {
        "name": text("name"),
        "version": text("version"),
        "build": text("build") or text("build_string"),
        "hash": digest,
        "channel": channel.rpartition("@")[2],
    }
    return {**entry, "md5": text("md5")} if text("sha256") and text("md5") else entry


def _dist_folders(root: str, record: dict[str, object]) -> list[str]:
    """Return the folders (or files) with the metadata of the Python distributions that a conda package installed."""
    folders = []
    for path in _paths(record):
        folder, _, name = path.rpartition("/")
        if name in ("METADATA", "PKG-INFO") and folder.endswith((".dist-info", ".egg-info")):
            folders.append(f"{root}/{folder}")
        elif name.endswith(".egg-info"):
            folders.append(f"{root}/{path}")
    return folders


def _paths(record: dict[str, object]) -> list[str]:
    """Return the paths of all files of a package, relative to the prefix."""
    files = record.get("files")
    return [os.path.normpath(path) for path in files if isinstance(path, str)] if isinstance(files, list) else []


def _listed_files(env: ProbedEnvironment, record: dict[str, object]) -> list[CondaFile]:
    """Return the files of a package that no RECORD lists, without compiled files, because Python makes them again."""
    paths_data = record.get("paths_data")
    entries: Any = paths_data.get("paths") if isinstance(paths_data, dict) else None
    unhashed = entries is None and env.has("conda-files")  # records in an old form have no hashes
    files = []
    if unhashed:
        entries = [{"_path": path} for path in _paths(record)]
    for entry in entries or ():
        path = os.path.normpath(str(entry.get("_path") or "."))
        if path.startswith(("../", "/")) or path in (".", "..") or path.endswith(".pyc"):
            continue
        if entry.get("path_type") == "directory" or env.prefix + "/" + path in env.listed:
            continue
        file = CondaFile(path, entry, str(record.get("name")))
        if file.packed or file.link or unhashed:  # launchers of entry points have no hash
            files.append(file)
    return files


def probe_conda_content(env: ProbedEnvironment) -> Facts:
    """Return the digest over the content of conda's files, and the files that changed after the installation.

    The digest does not depend on the prefix. If conda wrote the prefix into a file, the prefix is replaced by the
    package's placeholder before the file is hashed.
    """
    if not env.conda:
        return {"packages.conda-content-digest": "none", "packages.conda-modified": []}
    files = list({file.path: file for file in env.conda_files}.values())
    plain = [file for file in files if not file.link]
    jobs = [(env.prefix + "/" + file.path, "sha256", 0) for file in plain]
    found = dict(zip((f.path for f in plain), hash_files(env, jobs, time.monotonic() + CONTENT_SECONDS)))
    lines, modified = [], []
    changed: dict[str, list[str]] = {}
    for file in files:
        word = _link_target(env, file) if file.link else _content(env, file, found[file.path])
        if isinstance(word, Unknown):
            return dict.fromkeys(("packages.conda-content-digest", "packages.conda-modified"), word)
        lines.append(file.path + "\0" + word)
        if file.packed and not file.link and word != file.packed:
            modified.append(printable(file.path))
            changed.setdefault(printable(file.package), []).append(printable(file.path))
    for entry in env.conda:
        if entry["name"] in changed and not entry.get("outside"):
            entry["modified"] = sorted(changed[entry["name"]])[:CONDA_SHOWN]
    more = [f"and {len(modified) - CONDA_SHOWN} more"] if len(modified) > CONDA_SHOWN else []
    return {
        "packages.conda-content-digest": "sha256:" + digest_of_lines("hpcenv-conda-content-v1", lines),
        "packages.conda-modified": sorted(modified)[:CONDA_SHOWN] + more,
    }


def _link_target(env: ProbedEnvironment, file: CondaFile) -> str | Unknown:
    """Return the target of a link, relative to the prefix. The target itself is listed separately."""
    path = env.prefix + "/" + file.path
    try:
        target = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    except FileNotFoundError:
        return "missing"
    except OSError:
        return "not-a-link"
    return "link " + (target[len(env.prefix) :] if is_below(target, env.prefix) else target)


def _content(env: ProbedEnvironment, file: CondaFile, found: Hashed) -> str | Unknown:
    """Return the sha256 of a file as the package has it, with the placeholder instead of the prefix."""
    if found.digest is None:
        return Unknown(f"{printable(file.path)}: {found.problem}")
    word = found.word()
    if not file.placeholder or not isinstance(found.digest, bytes):
        return word
    try:
        data = read_small(env, env.prefix + "/" + file.path, PLACEHOLDER_BYTES)[0]
    except (OSError, ValueError):
        data = b""
    prefix = os.fsencode(env.prefix)
    if prefix in data:
        import hashlib

        return hashlib.sha256(_with_placeholder(data, prefix, os.fsencode(file.placeholder), file.binary)).hexdigest()
    # The environment was moved, and its files still have the old prefix.
    return file.packed if word == file.installed else word


def _with_placeholder(data: bytes, prefix: bytes, placeholder: bytes, binary: bool) -> bytes:
    """Undo the changes that conda made when it installed a file (conda/core/portability.py)."""
    import re

    if not binary:
        return data.replace(prefix, placeholder)
    longer = len(placeholder) - len(prefix)

    def undo(match: re.Match[bytes]) -> bytes:
        text, end = match.group(1), match.group(2)
        added = text.count(prefix) * longer
        return text.replace(prefix, placeholder) + (end[added:] if 0 <= added < len(end) else end)

    return re.sub(b"(" + re.escape(prefix) + rb"[^\0]*)(\0+)", undo, data)


PROBES: tuple[Probe, ...] = (Probe("conda", ("packages.conda-count", "packages.conda-digest"), probe_conda),)
LATE_PROBES: tuple[Probe, ...] = (
    Probe(
        "conda-content",
        ("packages.conda-content-digest", "packages.conda-modified"),
        probe_conda_content,
        HASHING,
    ),
)
