"""What the watching process knows of its node, and where it meets the ranks.

Runs on: COMPUTE NODE. Standard library only.

The ranks and this process meet in a folder of the node (TMPDIR), not on the shared file system: a rank writes after
each step. It is below the folder of the start gate, which is in every container (container/start_gate.py), but
read-only there: this folder has its own bind. With `--launcher srun` each task has its own container, and so its
own folder.
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

# Below the folder of a start gate: what the start hook of a rank writes for the watching process.
FOLDER = "watch"


@dataclass(frozen=True, kw_only=True)
class WatchedNode:
    """The node that this process watches.

    Attributes:
        launch: process id of the launch step, whose children are the ranks.
        options: of the run's manifest.
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
        """Return what returns the processes of the ranks and what is around them; None if others of them are elsewhere.

        With `--launcher srun` each task of the node has its own launch step.
        """
        if self.manifest.launch.launcher not in ("torchrun", "none", "ray"):
            return None
        return lambda: [self.launch, *(pid for pid, _ in proc.descendants(self.launch) if pid != os.getpid())]

    def rank_folders(self) -> list[Path]:
        """Return the folders in which the start hooks of this node's ranks write; only those of this user."""
        found = sorted(Path(tempfile.gettempdir()).glob(f"{folders_prefix(self.this_node)}*/{FOLDER}"))
        return [path for path in found if path.is_dir() and path.lstat().st_uid == os.getuid()]


def folders_prefix(this_node: ThisNode) -> str:
    """Return how the names of the gate folders of this node's attempt begin: several local nodes are one machine."""
    return f"hpcenv-gate-{this_node.job_id}.{this_node.attempt}.{this_node.node}-"


def folder_of_ranks(gate: Path, *, in_container: bool) -> str:
    """Return the folder of a gate's ranks as they see it."""
    return f"{INSIDE}/{FOLDER}" if in_container else str(gate / FOLDER)


def bind_of_ranks(gate: Path) -> Bind:
    """Return the bind by which the ranks in a container write into that folder."""
    return Bind(source=str(gate / FOLDER), target=folder_of_ranks(gate, in_container=True))
