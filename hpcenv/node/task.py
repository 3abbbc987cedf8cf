"""What submitit pickles, ships and calls: one importable callable that takes a path.

Runs on: COMPUTE NODE, inside submitit's process. Importable under the same name on the
login node (for pickling) and from the run folder's copy of the code (for running), so the
pickle holds a reference and a string, never code or user objects.
"""

from __future__ import annotations

import sys


class LaunchTask:
    """Callable that launches one run on the node it is called on."""

    def __call__(self, run_folder: str) -> int:
        """Launch; a status other than 0 becomes the process's own exit status.

        submitit turns exceptions into exit status 1 and would lose the training's own;
        `SystemExit` passes through it untouched (submitit 1.5.4, core/submission.py).
        """
        from hpcenv.node.main import launch_here

        status = launch_here(run_folder)
        if status != 0:
            sys.exit(status)
        return status
