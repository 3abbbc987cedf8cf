"""The data about its node that the watching process has, and the folders in which the ranks write for this process.

Runs on: COMPUTE NODE. Standard library only.

The ranks write into a folder on the node (TMPDIR), not on the shared file system, because a rank writes after each
step. This folder is inside the folder of the start gate. Every container has the folder of the start gate
(container/start_gate.py), but read-only. So the folder of the ranks has a separate bind. With `--launcher srun`, each
task has its own container, and its own folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpcenv.container.start_gate import INSIDE
from hpcenv.incontainer import proc
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.manifest import Bind, Manifest, WatchOptions
from hpcenv.records.run_folder import RunFolder

# Inside the folder of a start gate: the folder with the files that the start hooks of ranks write for this process.
FOLDER = "watch"


@dataclass(frozen=True, kw_only=True)
class WatchedNode:
    """The node that this process watches.

    Attributes:
        launch: process id of the launch step, whose children are the ranks.
        options: options of the watch, from the run's manifest.
    """

    manifest: Manifest
    this_node: ThisNode
    launch: int
    options: WatchOptions

    @property
    def run(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(Path(self.manifest.run_folder))

    def processes(self) -> Callable[[], list[int]] | None:
        """Return a function that lists the launch step and all processes below it, without this process.

        Returns None if the run has more processes on this node. With `--launcher srun`, each task of the node has a
        different launch step, so this function would list the processes of one task only.
        """
        if self.manifest.launch.launcher not in ("torchrun", "none", "ray"):
            return None
        return lambda: [self.launch, *(pid for pid, _ in proc.descendants(self.launch) if pid != os.getpid())]

    def rank_folders(self) -> list[Path]:
        """Return the folders of this user in which the start hooks of this node's ranks write."""
        found = sorted(Path(tempfile.gettempdir()).glob(f"{folders_prefix(self.this_node)}*/{FOLDER}"))
        return [path for path in found if path.is_dir() and path.lstat().st_uid == os.getuid()]


def folders_prefix(this_node: ThisNode) -> str:
    """Return the beginning of the names of this node's gate folders.

    The name of the node is needed because emulated nodes share the parent folder.
    """
    return f"hpcenv-gate-{this_node.job_id}.{this_node.attempt}.{this_node.node}-"


def folder_of_ranks(gate: Path, *, in_container: bool) -> str:
    """Return the path at which the ranks of a gate see their folder for the watching process."""
    return f"{INSIDE}/{FOLDER}" if in_container else str(gate / FOLDER)


def bind_of_ranks(gate: Path) -> Bind:
    """Return the bind through which ranks in a container write into their folder for the watching process."""
    return Bind(source=str(gate / FOLDER), target=folder_of_ranks(gate, in_container=True))
