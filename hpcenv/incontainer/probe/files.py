"""Read files of the environment, which cannot be trusted: only regular files, and only up to a limit.

Runs on: inside the image.
"""

from __future__ import annotations

import os

from hpcenv.incontainer.probe.paths import open_regular


TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.environment import Dist, ProbedEnvironment

SMALL_FILE = 1 << 20  # METADATA, direct_url.json, version.py: the largest seen is 150 KiB
SYSTEM_BYTES = 64 << 20  # a dpkg status of 3,000 packages has 4 MiB
SYSTEM_ROOT = "/"


def read_small(env: ProbedEnvironment, path: str, limit: int = SMALL_FILE) -> tuple[bytes, bool]:
    """Return a file's content, and whether the path leads through a link out of the environment.

    Raises:
        ValueError: the path is not a regular file, or the file has more than `limit` bytes.
        OSError: the file cannot be read.
    """
    descriptor, outside = open_regular(path, env.inside)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"larger than {limit} bytes")
    return data, outside


def read_metadata(env: ProbedEnvironment, dist: Dist, path: str, limit: int = SMALL_FILE) -> bytes:
    """Return the content of a dist's file. Count the file if its path leads through a link out of the environment."""
    data, outside = read_small(env, path, limit)
    dist.linked_outside += outside
    return data
