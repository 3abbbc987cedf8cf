"""Requirements of `--launcher ray` for the options and the lockfile.

Runs on: LOGIN NODE. Pure.
"""

from __future__ import annotations

import re

from hpcenv.errors import UsageError
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.option_types import OptionValues

_BY_RAY = "Ray's scheduler starts the workers that the script requests"
_NO_RANKS = "the workers of Ray are not ranks, and hpcenv does not watch them"
_REASONS = {
    "nproc": (f"{_BY_RAY}; Ray itself gets the CPUs and GPUs of each node", "--cpus and --gpus say what Ray gets"),
    "hash_parameters_every": (_NO_RANKS, "leave it out"),
    "trace_steps": (_NO_RANKS, "leave it out"),
    "stop_after_steps": (_NO_RANKS, "leave it out"),
}


def require_for_ray(options: OptionValues) -> None:
    """Refuse options that have no effect in a run with Ray.

    Raises:
        UsageError: such an option is set.
    """
    for name, (why, hint) in _REASONS.items():
        if getattr(options, name):
            what = f"`--{name.replace('_', '-')}` and `--launcher ray` contradict each other"
            raise UsageError(what, why=why, hint=hint)


def require_locked_ray(locked: Lockfile) -> None:
    """Refuse an environment without Ray, or with an old Ray that has no authentication by token.

    Raises:
        UsageError: Ray is missing or too old.
    """
    versions = [] if locked.packages is None else [dist.version for dist in locked.packages.dist if dist.name == "ray"]
    if not versions:
        raise UsageError(
            "`--launcher ray`: the environment has no Ray",
            why="the lockfile has no package `ray`",
            hint="install ray into the image or the host environment, and lock again",
        )
    match = re.match(r"(\d+)\.(\d+)", versions[0])
    if match and (int(match[1]), int(match[2])) < (2, 52):
        raise UsageError(
            f"`--launcher ray`: Ray {versions[0]} is too old",
            why="this Ray has no token: every user who can connect to one of its ports could run code as you",
            hint="install Ray 2.52 or later, and lock again",
        )
