"""Level full: the real content of the files.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import time

from hpcenv.incontainer.probe.hashing import CONTENT_SECONDS, digest_of_lines, hash_files
from hpcenv.incontainer.probe.packages import digest_line
from hpcenv.incontainer.probe.record import record_digest
from hpcenv.incontainer.probe.table import HASHING, Probe
from hpcenv.incontainer.probe.values import Unknown
from hpcenv.incontainer.probe.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.environment import Dist, ProbedEnvironment
    from hpcenv.incontainer.probe.hashing import Hashed
    from hpcenv.incontainer.probe.values import Facts

MODIFIED_SHOWN = 20


def probe_content(env: ProbedEnvironment) -> Facts:
    """Compare each listed file with its RECORD; return the digest over the content of all listed files."""
    if env.dists is None:
        raise RuntimeError(env.unknown.get("packages.count", "the packages could not be read"))
    deadline = time.monotonic() + CONTENT_SECONDS
    jobs = []
    owners = []
    for dist in env.dists:
        for index, row in enumerate(dist.rows):
            if row.claim and row.file is not None and not row.script:
                jobs.append((row.file, row.claim.partition("=")[0], _size(row.size)))
                owners.append((dist, index))
    hashed: dict[int, dict[int, Hashed]] = {id(dist): {} for dist in env.dists}
    libraries = {os.path.realpath(library.path) for library in env.libraries.values()}
    names = {os.path.basename(path) for path in libraries}
    for (dist, index), (file, algorithm, _), result in zip(owners, jobs, hash_files(env, jobs, deadline)):
        hashed[id(dist)][index] = result
        is_library = os.path.basename(file) in names and os.path.realpath(file) in libraries
        if is_library and algorithm == "sha256" and isinstance(result.digest, bytes):
            env.hashed[os.path.realpath(file)] = result.digest.hex()
    for dist in env.dists:
        if dist.rows:  # an editable install has rows, too, and Python runs its .pth file at every start
            _compare(dist, hashed[id(dist)], env.same)
    unread = [d.name for d in env.dists if d.record and not d.content]
    if unread:
        return {"packages.content-digest": Unknown("not all files could be read of " + ", ".join(unread[:10]))}
    lines = [digest_line(d, d.content) for d in env.dists]
    return {"packages.content-digest": "sha256:" + digest_of_lines("hpcenv-env-v1", lines)}


def _size(text: str) -> int:
    try:
        return int(text[:18])
    except ValueError:
        return 0  # the size is used only for the order of the work


def _compare(dist: Dist, hashed: dict[int, Hashed], same: set[str]) -> None:
    """Set the content digest and the modified files of one dist. Add the dist's unmodified files to `same`."""
    claims: dict[int, str] = {}
    problems = []
    for index, row in enumerate(dist.rows):
        result = hashed.get(index)
        if result is None:
            # A file outside of the environment is not read, so its listed hash counts.
            dist.outside_rows += bool(row.claim) and row.file is None and not row.script
            continue
        dist.linked_outside += result.outside
        if result.digest is None:
            problems.append(f"{printable(row.path)}: {result.problem}")
        elif _same(row.claim, result.digest):
            same.add(str(row.file))
        else:
            claims[index] = _claim(row.claim, result.digest)
    dist.modified_count = len(claims)
    rows = sorted(claims, key=lambda i: dist.rows[i].path)[:MODIFIED_SHOWN]
    dist.modified = [
        {"path": printable(dist.rows[i].path), "locked": printable(dist.rows[i].claim), "found": claims[i]}
        for i in rows
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        dist.reasons.append("content unknown: " + problems[0] + more)
    elif dist.record:
        dist.content = record_digest(dist.rows, claims)


def _claim(listed: str, digest: bytes | str) -> str:
    from base64 import urlsafe_b64encode

    if isinstance(digest, str):
        return digest
    return listed.partition("=")[0] + "=" + urlsafe_b64encode(digest).rstrip(b"=").decode()


def _same(listed: str, digest: bytes | str) -> bool:
    """Return whether a RECORD's hash equals a digest. Old tools wrote padding, the standard base64 alphabet, or hex."""
    if isinstance(digest, str):
        return False
    claim = _claim(listed, digest)
    if claim == listed:
        return True
    text = listed.partition("=")[2].rstrip("=")
    return text.replace("+", "-").replace("/", "_") == claim.partition("=")[2] or text.lower() == digest.hex()


PROBES: tuple[Probe, ...] = (Probe("content", ("packages.content-digest",), probe_content, HASHING),)
