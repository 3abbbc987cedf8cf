"""The job in the form of `submitit.JobEnvironment()`, inside a function that `hpcenv.Executor` submitted.

Runs on: COMPUTE NODE, in the locked environment, as the module `hpcenv_submitit_job` beside a copy of submitit.
Standard library and submitit; Python 3.8 to 3.14.
"""

import glob
import os
import signal
import sys
import threading
import time
from importlib import metadata
from typing import Any, List

from submitit.core import plugins
from submitit.slurm.slurm import SlurmJobEnvironment

_SECONDS_BETWEEN_LOOKS = 0.5


class HpcenvJobEnvironment(SlurmJobEnvironment):
    """The task and job of this process. submitit handles the function's checkpoint, and hpcenv handles the requeue."""

    # Set by call.py. Slurm's own variables count the tasks of srun, one on each node.
    _env = {
        "job_id": "HPCENV_JOB_ID",
        "num_tasks": "HPCENV_TASKS",
        "num_nodes": "HPCENV_TASK_NODES",
        "node": "HPCENV_TASK_NODE",
        "nodes": "SLURM_JOB_NODELIST",
        "global_rank": "HPCENV_TASK_RANK",
        "local_rank": "HPCENV_TASK_LOCAL_RANK",
        "array_job_id": "SLURM_ARRAY_JOB_ID",
        "array_task_id": "SLURM_ARRAY_TASK_ID",
    }

    @classmethod
    def name(cls) -> str:
        """Return the name of the plug-in, as in `cluster="hpcenv"`."""
        return "hpcenv"

    @property
    def job_id(self) -> str:
        """The id under which the job was submitted; for an element of an array, `ARRAY_INDEX`."""
        return os.environ["HPCENV_JOB_ID"]

    @property
    def raw_job_id(self) -> str:
        """Slurm's number of this job."""
        return os.environ.get("SLURM_JOB_ID", self.job_id)

    @property
    def hostnames(self) -> List[str]:
        """The nodes that take part, in the order of their numbers."""
        try:
            # With spare nodes, not all nodes of the job take part.
            with open(os.path.join(os.environ["HPCENV_RUN_FOLDER"], "env", "launched"), encoding="utf-8") as file:
                names = file.read().split()
        except (KeyError, OSError):
            names = []
        return names or super().hostnames

    def _handle_signals(self, paths: Any, submission: Any) -> None:
        """Handle Slurm's warning only once, because both Slurm and hpcenv's launch step may send it."""
        super()._handle_signals(paths, submission)
        handle = signal.getsignal(self._usr_sig())  # type: Any

        def once(number: int, frame: Any) -> None:
            signal.signal(number, signal.SIG_IGN)
            if self.global_rank != 0:
                threading.Thread(target=self._end_after_checkpoint, daemon=True).start()
            handle(number, frame)

        signal.signal(self._usr_sig(), once)

    def _requeue(self, countdown: int) -> None:
        """Tell the batch script that this job has a checkpoint. When all tasks have ended, the script requeues the job.

        The batch script does this because the container has no scontrol, and because the script has the user's options
        (`requeue`, `max_requeues`).
        """
        folder = os.environ["HPCENV_STOP_FOLDER"]
        os.makedirs(folder, exist_ok=True)
        for name in ("saved-" + os.environ["HPCENV_NODE"], "checkpoint"):
            with open(os.path.join(folder, name), "w"):
                pass
        print("hpcenv: the checkpoint is written; the job is queued again (%d timeouts left)" % countdown, flush=True)
        # The exit status is not 255 as in submitit, because nothing has failed.
        sys.exit(0)

    def _end_after_checkpoint(self) -> None:
        """End this task when rank 0 has written the checkpoint with the state of the function."""
        marker = os.path.join(os.environ["HPCENV_STOP_FOLDER"], "checkpoint")
        while not glob.glob(marker):
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def register() -> None:
    """Let `submitit.JobEnvironment()` find the class of this module.

    An installed hpcenv registers its executor as a plug-in of submitit. On a compute node, only a small part of hpcenv
    can be imported. So the entry of this plug-in would fail with a message, and this function removes the entry.
    """
    found = plugins._iter_submitit_entrypoints  # type: Any
    own = metadata.EntryPoint(
        name="job_environment", value="hpcenv_submitit_job:HpcenvJobEnvironment", group="submitit"
    )
    plugins._iter_submitit_entrypoints = lambda: [
        *(entry for entry in found() if not entry.value.startswith("hpcenv.")),
        own,
    ]
