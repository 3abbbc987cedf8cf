"""Start the watching process beside the ranks, and end it after the ranks have ended.

Runs on: COMPUTE NODE. Standard library only.

The watch runs in a separate process, because a driver that hangs must not block the ranks or the process that ends the
ranks. The watching process ends when its standard input is closed. The input is also closed if the launch step is
killed.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hpcenv.machine.this_node import ThisNode
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder

# Time for the last sample. After this time the watching process is killed, because the job must end without delay.
_SECONDS_TO_END = 2.0


@contextmanager
def watched(manifest: Manifest, this_node: ThisNode, *, first: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Watch this node inside the block, if the run requests it.

    Args:
        first: whether this is the first task of its node. With `--launcher srun`, only this task watches the node.
        say: called with one line for the job's log if the process cannot be started.
    """
    with ExitStack() as stack:
        if manifest.watch is not None and first:
            try:
                stack.enter_context(beside(manifest, "watch", seconds_to_end=_SECONDS_TO_END))
            except OSError as error:
                say(f"hpcenv: node {this_node.node}: not watched: {error}")
        yield


@contextmanager
def beside(
    manifest: Manifest, step: str, *, seconds_to_end: float, on_early_end: Callable[[int], None] | None = None
) -> Iterator[None]:
    """Run another step in a child process until the block ends. Closing its standard input ends the child.

    Args:
        manifest: manifest of the run.
        step: name of the step.
        seconds_to_end: how long the child may take to end before it is killed.
        on_early_end: called in a thread with the child's exit status, if the child ends before the block.

    Raises:
        OSError: the child cannot be started.
    """
    argv = [sys.executable, "-I", str(RunFolder(Path(manifest.run_folder)).step), step, manifest.run_folder]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
    over = threading.Event()

    def wait_for_early_end(call: Callable[[int], None]) -> None:
        status = child.wait()
        if not over.is_set():
            call(status)

    if on_early_end is not None:
        threading.Thread(target=wait_for_early_end, args=(on_early_end,), daemon=True).start()
    try:
        yield
    finally:
        over.set()
        assert child.stdin is not None
        with suppress(OSError):
            child.stdin.close()
        try:
            child.wait(seconds_to_end)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
