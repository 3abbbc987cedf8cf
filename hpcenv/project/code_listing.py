"""Compare the listings of two copies of a project: do they contain the same code?

Runs on: LOGIN NODE. The nodes compare the digest of a copy. But two copies of the same code can have different digests.
For example, a copy from before 2026-11-25 contains the lockfiles that git tracked. In the copy of a project without
git, links replace the binary files that git would track. So this module compares two runs file by file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from hpcenv.records.code_listing import LINK, Listing, content_of

# Lockfiles are compared elsewhere, as environments.
LOCKFILE_SUFFIX = ".lock.toml"


def code_files(files: Mapping[str, str]) -> dict[str, str]:
    """Return all files of a listing except lockfiles."""
    return {path: content for path, content in files.items() if not path.endswith(LOCKFILE_SUFFIX)}


def changed_files(then: Listing, now: Listing) -> tuple[str, ...]:
    """Return the code files that have changed, by path in the run folder.

    A link may be missing in the result if its target is outside the run's copy.

    Args:
        then: listing of a run, which may belong to another user.
        now: listing of a copy that is planned here; the targets of its links are read.

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
