"""Commands of Slurm that fail now and then for one user: an executable before the real one on that user's PATH.

Slurm itself stays as it is, and so do all other users. It lies in the home directory, which
all machines share, and `exec` puts it on PATH; what a job does with PATH is its own affair.
"""

from __future__ import annotations

from pathlib import Path

from .errors import Status, TestbedError
from .instance import Instance
from .rootfs import USERS

FOLDER = ".testbed-faults"
_LOST = "Unable to contact slurm controller (connect failure)"
# What each says when slurmctld (for sacct: slurmdbd) does not answer.
MESSAGES = {
    "squeue": f"slurm_load_jobs error: {_LOST}",
    "sinfo": f"slurm_load_partitions: {_LOST}",
    "scontrol": f"slurm_load_jobs error: {_LOST}",
    "sbatch": f"sbatch: error: Batch job submission failed: {_LOST}",
    "scancel": f"scancel: error: Kill job error on job id: {_LOST}",
    "srun": f"srun: error: Unable to allocate resources: {_LOST}",
    "sacct": "sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to "
    "host:ctl:6819: Connection refused\nsacct: error: Problem talking to the database: Connection refused",
}
_WRAPPER = """\
#!/bin/bash
# Put here by `scripts/testbed fault flaky {name}`; taken away by `scripts/testbed fault heal {name}`.
calls=$(flock "$0.calls" sh -c 'n=$(($(cat "$1") + 1)); echo $n >"$1"; echo $n' sh "$0.calls") || exit 1
if [ $((calls % {every})) -eq 0 ]; then
    sleep {delay}
    cat "$0.says" >&2
    exit 1
fi
exec /usr/bin/{name} "$@"
"""


def start(instance: Instance, user: str, name: str, *, every: int, delay_ms: int) -> None:
    """From now on every n-th call fails: counted, not drawn, so that a test knows what it will see."""
    folder = _folder(instance, user)
    folder.mkdir(exist_ok=True)
    own = {
        f"{name}.calls": ("0\n", 0o666),
        f"{name}.says": (MESSAGES[name] + "\n", 0o644),
        name: (_WRAPPER.format(name=name, every=every, delay=delay_ms / 1000), 0o755),
    }
    for filename, (text, mode) in own.items():
        # Aside, then renamed: the user may be running the old one.
        aside = folder / f"{filename}.new"
        aside.write_text(text)
        aside.chmod(mode)
        aside.rename(folder / filename)


def heal(instance: Instance, user: str, name: str) -> None:
    """The real command again."""
    folder = _folder(instance, user)
    for path in (folder / name, folder / f"{name}.calls", folder / f"{name}.says"):
        path.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def in_force(instance: Instance) -> list[str]:
    """Which commands fail, for whom."""
    return [f"{name} for {user}" for user in USERS for name in MESSAGES if (_folder(instance, user) / name).is_file()]


def path_of(instance: Instance, user: str, home: str) -> str | None:
    """What goes in front of a user's PATH, None if nothing does."""
    return f"{home}/{FOLDER}" if user in USERS and _folder(instance, user).is_dir() else None


def _folder(instance: Instance, user: str) -> Path:
    if user not in USERS:
        raise TestbedError(
            f"no user {user!r} for a flaky command", why=f"there are {', '.join(USERS)}", status=Status.USAGE
        )
    return instance.home / user / FOLDER
