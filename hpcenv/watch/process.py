"""Start the watching process beside the ranks, and end it after them.

Runs on: COMPUTE NODE. Standard library only.

A separate process: a driver that hangs must hang neither the ranks nor what ends them. It ends when its standard
input is closed, so also when this process is killed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcenv.machine.this_node import ThisNode
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder

# For the last sample. Then it is killed: the end of the job must not wait for it.
_SECONDS_TO_END = 2.0


@contextmanager
def watched(manifest: Manifest, this_node: ThisNode, *, first: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Watch this node inside the block, where the run asks for it.

    Args:
        first: whether this is the first task of its node: with `--launcher srun` one of them watches for all.
        say: called with one line for the job's log where the process cannot be started.
    """
    child = None if manifest.watch is None or not first else _start(manifest, this_node, say)
    try:
        yield
    finally:
        if child is not None:
            _end(child)


def _start(manifest: Manifest, this_node: ThisNode, say: Callable[[str], None]) -> subprocess.Popen[bytes] | None:
    argv = [sys.executable, "-I", str(RunFolder(Path(manifest.run_folder)).step), "watch", manifest.run_folder]
    try:
        return subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        say(f"hpcenv: node {this_node.node}: not watched: {error}")
        return None


def _end(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    with suppress(OSError):
        child.stdin.close()
    try:
        child.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
