"""submitit's part of a submission, in a process of its own; the only import of submitit.

Runs on: LOGIN NODE. `submitit_bridge` starts it before there is anything to submit: importing
submitit takes as long as planning a run, and here it takes that time beside it. submitit pickles
a reference to the task and keeps its books; the call of sbatch is the bridge's, whose job id comes
with each line of standard input. Each is answered with a line; the end of the input is the end.

`_submit_command` is a private hook of submitit 1.5: the version is pinned and a contract test
guards it.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any


def main() -> int:
    """Keep the books of the jobs on standard input."""
    # What the caller can import: this process began with the standard library alone.
    sys.path[:] = json.loads(sys.argv[1])
    # Nothing else than answers goes to the pipe.
    answers, sys.stdout = sys.stdout, sys.stderr
    # It ends soon, and keeps nearly all that it makes.
    gc.disable()
    # Before there is anything to do.
    import submitit

    executor = submitit.SlurmExecutor
    for line in sys.stdin:
        print(_keep(executor, json.loads(line)), file=answers, flush=True)
    return 0


def _keep(slurm_executor: Any, job: dict[str, Any]) -> str:
    """Let submitit submit what is queued already; return the job id by its books."""
    import contextlib
    import importlib
    from pathlib import Path

    class _Executor(slurm_executor):  # type: ignore[misc]
        def _submit_command(self, command: str) -> Any:  # noqa: ARG002
            queued = self.job_class(folder=self.folder, job_id=job["job_id"], tasks=list(range(job["nodes"])))
            # Where submitit's own tools look for the script of a job.
            with contextlib.suppress(OSError):
                queued.paths.submission_file.symlink_to(job["script"])
            return queued

        @classmethod
        def affinity(cls) -> int:
            # submitit would look for srun on this process's PATH, not on the caller's.
            return 1

    task = getattr(importlib.import_module(job["module"]), job["task"])()
    executor = _Executor(folder=Path(job["folder"]), python="python3")
    executor.update_parameters(nodes=job["nodes"], ntasks_per_node=1, time=job["minutes"])
    return str(executor.submit(task, job["run_folder"]).job_id)


if __name__ == "__main__":
    sys.exit(main())
