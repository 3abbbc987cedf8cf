"""Whether two copies of a project hold the same code, from their listings.

Runs on: LOGIN NODE. The digest of a copy is what the nodes compare. Two copies of the same code can have two digests: a
copy that was made before 2026-11-25 has the lockfiles that git tracked, and a project without git has links to the
binary files that git tracks elsewhere. So two runs are compared file by file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from hpcenv.records.code_listing import LINK, Listing, content_of

# Lockfiles are compared as environments.
LOCKFILE_SUFFIX = ".lock.toml"


def code_files(files: Mapping[str, str]) -> dict[str, str]:
    """Return the files of a listing that are code: all but lockfiles."""
    return {path: content for path, content in files.items() if not path.endswith(LOCKFILE_SUFFIX)}


def changed_files(then: Listing, now: Listing) -> tuple[str, ...]:
    """Return the files of the code that are not the same now, by path in the run folder.

    A link of the run that leads out of its copy led to nothing, and may be missing here.

    Args:
        then: of a run, which may be somebody else's.
        now: of a copy that is planned here: what it only links to is read.

    Raises:
        OSError: a file cannot be read.
    """
    before, after = code_files(then.files), code_files(now.files)
    return tuple(
        path
        for path in different(before, after)
        if not (path in before and path in now.live and content_of(now.live[path]) == before[path])
        and not (path in before and path not in after and _leads_out(path, before[path]))
    )


def _leads_out(path: str, content: str) -> bool:
    if not content.startswith(LINK):
        return False
    part, target = path.partition("/")[0], os.path.join(os.path.dirname(path), content.removeprefix(LINK))
    return not os.path.normpath(target).startswith(f"{part}/")


def different(left: Mapping[str, str], right: Mapping[str, str]) -> Iterator[str]:
    """Yield the paths whose contents differ, in order."""
    return (path for path in sorted({*left, *right}) if left.get(path) != right.get(path))
