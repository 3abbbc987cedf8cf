"""The answer: one JSON object on one line.

Runs on: inside the image.
"""

from __future__ import annotations

import os

from hpcenv.incontainer.probe.files import SYSTEM_ROOT
from hpcenv.incontainer.probe.hashing import digest_of_lines
from hpcenv.incontainer.probe.programs import program_entry
from hpcenv.incontainer.probe.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hpcenv.incontainer.probe.environment import Dist, ProbedEnvironment

SCHEMA = 1
CHANGED_SHOWN = 20
MOUNTINFO_BYTES = 4 << 20  # a line of an overlay has 500 bytes, and a node has some hundred lines
UNLISTED_SHOWN = 500  # a Debian dist-packages can have thousands of files; count and digest include all of them


def report(env: ProbedEnvironment) -> dict[str, Any]:
    """Return everything that the probes have read."""
    answer: dict[str, Any] = {
        "schema": SCHEMA,
        "level": env.level,
        "values": env.values,
        "unknown": env.unknown,
        "packages": [package_entry(env, dist) for dist in env.dists or ()],
        "unlisted": env.unlisted[:UNLISTED_SHOWN],
        "unlisted-newest": env.newest,
        "shadowed": [
            {"name": dist.name, "version": dist.version, "location": printable(env.shown(dist.site.path))}
            for dist in env.shadowed
        ],
        "conda-packages": env.conda,
        "seconds": env.seconds,
    }
    answer["mountinfo"] = _mountinfo()
    answer["environ"] = dict(os.environ)
    answer["image-variables"] = _image_variables()
    if env.network is not None:
        answer["network"] = env.network
    if env.cuda_compat is not None:
        answer["cuda-compat"] = env.cuda_compat
    if env.level != "record":
        answer["look"] = _look(env) if env.looked else None
        answer["system-packages"] = [
            {"name": name, "version": version, "arch": arch} for name, version, arch in env.system_packages
        ]
    return answer


def _look(env: ProbedEnvironment) -> dict[str, Any]:
    """Return a digest over size and times of all hashed files, to detect a later change."""
    lines = [f"{path}\0{size}\0{written}\0{changed}" for path, (size, written, changed) in env.looked.items()]
    newest = max((changed for _, _, changed in env.looked.values()), default=0)
    closed = sorted(path for path, (size, _, _) in env.looked.items() if size < 0)[:CHANGED_SHOWN]
    return {
        "digest": digest_of_lines("hpcenv-look-v1", lines),
        "newest": newest,
        "files": len(lines),
        "not_opened": [printable(env.shown(path)) for path in closed],
    }


def second_look(env: ProbedEnvironment) -> dict[str, Any]:
    """Return size and times of the files now, and the files that changed after the first check.

    A file that was written again with the content in its RECORD counts as unchanged.
    """
    since = env.since or 0
    moved = sorted(
        p for p, (size, _, changed) in env.looked.items() if (changed > since and p not in env.same) or size < 0
    )
    look = {
        **_look(env),
        "changed": [printable(env.shown(path)) for path in moved[:CHANGED_SHOWN]],
        "count": len(moved),
    }
    empty: dict[str, Any] = {"values": {}, "unknown": env.unknown, "packages": []}
    return {"schema": SCHEMA, "level": env.level, **empty, "look": look}


def _mountinfo() -> str:
    """Return the mounts of this process, as the kernel lists them; empty if they cannot be read."""
    try:
        with open(SYSTEM_ROOT + "proc/self/mountinfo", encoding="utf-8", errors="backslashreplace") as file:
            return file.read(MOUNTINFO_BYTES)
    except OSError:
        return ""


def _image_variables() -> list[str]:
    """Return the variables that the image itself sets. The image's scripts export them (Apptainer, SingularityCE)."""
    import re

    folder, names = SYSTEM_ROOT + ".singularity.d/env", set()
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                names.update(re.findall(r"^\s*export\s+([A-Za-z_]\w*)", file.read(MOUNTINFO_BYTES), re.MULTILINE))
        except OSError:
            continue
    return sorted(names)


def package_entry(env: ProbedEnvironment, dist: Dist) -> dict[str, Any]:
    """Return one distribution as the report shows it."""
    entry: dict[str, Any] = {
        "name": dist.name,
        "version": dist.version,
        "record-sha256": dist.record,
        "content-sha256": dist.content,
        "modified": dist.modified,
        "modified-count": dist.modified_count,
        "location": printable(env.shown(dist.site.path)),
        "installer": dist.installer,
        "build": dist.build,
        "tags": dist.tags,
        "source": dist.source,
    }
    if dist.record and dist.kind != "record":
        entry["digest-kind"] = dist.kind
    owner = env.conda_dists.get(os.path.join(dist.site.path, dist.folder))
    if owner:
        entry["conda"] = owner
    if dist.direct_url:
        entry["direct-url"] = dist.direct_url
    if dist.wheel_file:
        entry["wheel-file"] = dist.wheel_file
    if dist.programs is not None:
        entry["programs"] = program_entry(dist)
    if dist.outside_rows:
        entry["outside-rows"] = dist.outside_rows
    if dist.git:
        entry["git"] = dist.git
    if dist.files:
        entry["files"] = dist.files
    if dist.requires:
        entry["requires"] = dist.requires
    if not dist.site.scanned:
        entry["scanned"] = False
    if dist.linked_outside:
        entry["linked-outside"] = dist.linked_outside
    if dist.reasons:
        entry["reason"] = "; ".join(dist.reasons)
    return entry


def as_json(answer: dict[str, Any]) -> str:
    """Return the answer as one line of JSON."""
    import json

    return json.dumps(answer, sort_keys=True)


def as_plain_json(level: str, fields: list[str], reason: str) -> str:
    """Return an answer without any value, for a Python that cannot import `json`."""
    quoted = '"' + "".join(c if " " <= c <= "~" and c not in '"\\' else "?" for c in reason) + '"'
    unknown = ", ".join(f'"{field}": {quoted}' for field in sorted(fields))
    return (
        f'{{"level": "{level}", "packages": [], "schema": {SCHEMA}, "seconds": {{}}, "shadowed": [], '
        f'"unknown": {{{unknown}}}, "unlisted": [], "values": {{}}}}'
    )


def write_line(line: str) -> None:
    """Write a whole line to standard output."""
    data = (line + "\n").encode("ascii")
    while data:
        data = data[os.write(1, data) :]
