"""The cgroups of Slurm's jobs. Runs on: COMPUTE NODE. Standard library only.

Slurm names a job's cgroup `job_N`. Since Slurm 26.05, with cgroup v2, the name is the job's SLUID instead (release
notes). With `CgroupJobIdPaths=yes` in cgroup.conf (26.05.2), the name is `job_N` again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

# A SLUID is `s` and 13 characters of Crockford's base32.
_STEP = re.compile(r"(.*/(?:job_\d+|s[0-9A-HJKMNP-TV-Z]{13})/step_[^/]+)(?:/|$)")


def steps_of(own: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the controllers and the path of each cgroup of a job step. With cgroup v2, the controllers are empty.

    Args:
        own: the text of /proc/PID/cgroup.
    """
    for line in own.splitlines():
        _, kinds, path = ([*line.split(":", 2), "", ""])[:3]
        step = _STEP.match(path)
        if step is not None:
            yield tuple(filter(None, kinds.split(","))), step[1]


def is_followed(own: str) -> bool:
    """Return whether Slurm tracks a process with a cgroup: the freezer of cgroup v1, or any cgroup of v2."""
    return any(not kinds or "freezer" in kinds for kinds, _ in steps_of(own))


def is_of(own: str, environ: Mapping[str, str]) -> bool:
    """Return whether a process belongs to the job whose variables are in `environ`."""
    names = {f"job_{environ.get('SLURM_JOB_ID', '')}", environ.get("SLURM_JOB_SLUID", "")} - {"job_", ""}
    return any(not names.isdisjoint(path.split("/")) for _, path in steps_of(own))
