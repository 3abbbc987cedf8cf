"""Distributions without a RECORD: a digest over their files.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import time

from hpcenv.incontainer.probe.files import SYSTEM_BYTES, SYSTEM_ROOT, read_metadata, read_small
from hpcenv.incontainer.probe.paths import is_below, list_folder
from hpcenv.incontainer.probe.hashing import SCAN_SECONDS, digest_of_lines, hash_files
from hpcenv.incontainer.probe.record import RECORD_BYTES, UNHASHED_METADATA
from hpcenv.incontainer.probe.text import describe_error, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.environment import Dist, ProbedEnvironment

DPKG_SECONDS = 20.0


def digest_unrecorded(env: ProbedEnvironment) -> None:
    """For each dist with no RECORD but another list of its files, compute a digest over the files (kind ``walk``)."""
    debian = [d for d in env.dists or () if os.path.basename(d.site.path) == "dist-packages"]
    owners = _dpkg_files(env, [d for d in debian if d.no_record or d.installer in (None, "debian")])
    for dist in env.dists or ():
        files = owners.get(id(dist))
        if files is not None:
            dist.source = "dpkg"
        elif dist.no_record:
            files = _installed_files(env, dist)
        if files is None or not dist.no_record or dist.direct_url:
            continue
        try:
            _walk(env, dist, sorted(files))
        except (OSError, ValueError) as error:
            dist.reasons.append("walk: " + describe_error(error))


def _dpkg_files(env: ProbedEnvironment, dists: list[Dist]) -> dict[int, set[str]]:
    """Return the files of the Debian packages that own these dists, from dpkg's lists."""
    folder = SYSTEM_ROOT + "var/lib/dpkg/info"
    lists = sorted((n for n in list_folder(folder) if n.endswith(".list")), key=lambda n: not n.startswith("python"))
    wanted = {os.path.join(d.site.path, d.folder): d for d in dists}
    owned: dict[int, set[str]] = {}
    deadline = time.monotonic() + DPKG_SECONDS
    for name in lists:
        if len(owned) == len(wanted) or time.monotonic() > deadline:
            break
        try:
            data = read_small(env, os.path.join(folder, name), SYSTEM_BYTES)[0]
        except (OSError, ValueError):
            continue
        if b"-packages/" not in data:
            continue
        paths = set(os.fsdecode(data).split("\n"))
        for metadata in wanted.keys() & paths:
            owned[id(wanted[metadata])] = paths
    return owned


def _installed_files(env: ProbedEnvironment, dist: Dist) -> set[str] | None:
    """Return the files that `setup.py install` listed, with paths from the egg-info; None without such a list."""
    info = os.path.join(dist.site.path, dist.folder)
    try:
        text = os.fsdecode(read_metadata(env, dist, info + "/installed-files.txt", RECORD_BYTES))
    except (OSError, ValueError):
        return None
    return {os.path.normpath(os.path.join(info, line)) for line in text.splitlines() if line}


def _walk(env: ProbedEnvironment, dist: Dist, files: list[str]) -> None:
    """Compute the digest ``hpcenv-walk-v1``: lines ``path NUL sha256`` of the files below the site directory."""
    skipped = {dist.folder + "/" + name for name in UNHASHED_METADATA}
    inner = [f for f in files if is_below(f, dist.site.path) and not f.endswith(".pyc")]
    jobs = [f for f in inner if f[len(dist.site.path) + 1 :] not in skipped and not os.path.isdir(f)]
    if not jobs:
        return
    lines = []
    results = hash_files(env, [(f, "sha256", 0) for f in jobs], time.monotonic() + SCAN_SECONDS)
    for file, result in zip(jobs, results):
        if result.digest is None:
            raise ValueError(f"{printable(file)}: {result.problem}")
        dist.linked_outside += result.outside
        lines.append(file[len(dist.site.path) + 1 :] + "\0" + result.word())
    dist.listed = jobs
    dist.reasons.remove(dist.no_record)
    if not dist.reasons:
        dist.record = dist.content = digest_of_lines("hpcenv-walk-v1", lines)
        dist.kind = "walk"
