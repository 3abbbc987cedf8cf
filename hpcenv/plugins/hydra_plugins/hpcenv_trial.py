"""One trial of a Hydra sweep: Hydra's own `run_job`, with the config that was composed at submission.

Runs on: every rank, inside the image. Python 3.8 to 3.14. This file uses the standard library, Hydra, and the copies of
submitit and cloudpickle in the run folder. Because an image may lack hpcenv, submission/function.py copies this file
into the run folder.
"""

import json
import sys
from typing import Any, Callable, Dict


class Trial:
    """A job calls this object instead of the task function. The object calls that function with the composed config.

    Args:
        task: the function under `@hydra.main`. hpcenv names the run after this function, and copies the function's
            file.
        config: the composed config, with the node `hydra`.
        version_base: the version base that `@hydra.main` got.
        resolvers: the resolvers that the program registered, pickled by value.
    """

    def __init__(self, task: Callable[[Any], Any], config: Any, version_base: str, resolvers: bytes) -> None:
        self.__wrapped__ = task
        self.config = config
        self.version_base = version_base
        self.resolvers = resolvers
        self.python = sys.version_info[:2]

    def __call__(self) -> str:
        """Run the task, and return JSON with the values that the launcher needs.

        An exception of the task ends the rank, as without Hydra.
        """
        import submitit
        from hydra._internal.callbacks import Callbacks
        from hydra.core.utils import JobRuntime, run_job
        from hydra.types import HydraContext
        from omegaconf import open_dict

        self.set_globals()
        here = submitit.JobEnvironment()
        with open_dict(self.config):
            self.config.hydra.job.id = here.job_id
            if here.global_rank != 0:
                # All ranks share one output folder, so only rank 0 writes the config into it.
                self.config.hydra.output_subdir = None
        JobRuntime.instance().set("name", self.config.hydra.job.name)
        done = run_job(
            # The config is already composed, so Hydra needs no loader for config files.
            hydra_context=HydraContext(config_loader=None, callbacks=Callbacks(self.config)),
            task_function=self.__wrapped__,
            config=self.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        answer: Dict[str, Any] = {"job_id": here.job_id, "working_dir": done.working_dir}
        answer["output_dir"] = self.config.hydra.runtime.output_dir
        return as_json(done.return_value, answer)

    def set_globals(self) -> None:
        """Set the version base and the resolvers, as `@hydra.main` and the program did on the login node."""
        import cloudpickle  # type: ignore[import-untyped]
        from hydra import version
        from hydra.core.utils import setup_globals
        from omegaconf.basecontainer import BaseContainer

        version.setbase(self.version_base)
        setup_globals()
        # A rank with another version of Python imports the program, and this import registers the resolvers again.
        if self.python == sys.version_info[:2]:
            BaseContainer._resolvers.update(cloudpickle.loads(self.resolvers))

    def checkpoint(self) -> Any:
        """Return the call with which submitit starts the trial again, after the time limit or a preemption."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def as_json(value: Any, answer: Dict[str, Any]) -> str:
    """Return the answer with the value of the task as JSON. A value that JSON cannot represent becomes text."""
    try:
        return json.dumps({**answer, "value": value}, default=plain)
    except (TypeError, ValueError):
        return json.dumps({**answer, "value": plain(str(value))})


def plain(value: Any) -> Any:
    """Return a value for JSON: a number or an array of numpy or torch, or a config, as plain values; else its text."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if hasattr(value, "tolist"):
        return value.tolist()
    print("hpcenv: JSON has no %s, so the sweep gets its text" % type(value).__name__, file=sys.stderr)
    return str(value)
