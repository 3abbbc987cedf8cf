"""Start the process that keeps a session open beside what holds the job, and end it after that.

Runs on: COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcenv.errors import ToolMissing
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder

# Until its services have saved and its folder is gone. Slurm kills 30 s after TERM (KillWait).
_SECONDS_TO_END = 15.0


@contextmanager
def opened(manifest: Manifest, environ: Mapping[str, str]) -> Iterator[None]:
    """Keep the session of a run open on this node inside the block; do nothing for a run that is no session.

    Raises:
        ToolMissing: the process cannot be started.
    """
    if manifest.session is None:
        yield
        return
    argv = [sys.executable, "-I", str(RunFolder(Path(manifest.run_folder)).step), "session", manifest.run_folder]
    try:
        # It ends when this pipe is closed, also when this process is killed.
        child = subprocess.Popen(argv, env=dict(environ), stdin=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        raise ToolMissing("the session cannot be opened", why=str(error)) from error
    try:
        yield
    finally:
        assert child.stdin is not None
        with suppress(OSError):
            child.stdin.close()
        try:
            child.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
