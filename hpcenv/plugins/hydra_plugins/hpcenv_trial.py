"""One trial of a Hydra sweep: Hydra's own `run_job`, with the config that was composed at submission.

Runs on: every rank, inside the image. Standard library, Hydra, and the copies of submitit and cloudpickle that the run
brings; Python 3.8 to 3.14. An image may lack hpcenv: submission/function.py sends this file with the run.
"""

import json
import sys
from typing import Any, Callable, Dict


class Trial:
    """What a job runs instead of the task function: it calls that function with its frozen config.

    Args:
        task: the function under `@hydra.main`; hpcenv names the run by it, and copies its file.
        config: the composed config, with `hydra`.
        version_base: as `@hydra.main` was given.
        resolvers: those that the program registered, pickled by value.
    """

    def __init__(self, task: Callable[[Any], Any], config: Any, version_base: str, resolvers: bytes) -> None:
        self.__wrapped__ = task
        self.config = config
        self.version_base = version_base
        self.resolvers = resolvers
        self.python = sys.version_info[:2]

    def __call__(self) -> str:
        """Return what the launcher needs, as JSON. An exception of the task ends the rank, as without Hydra."""
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
                # All ranks share one output folder: only one of them writes the config there.
                self.config.hydra.output_subdir = None
        JobRuntime.instance().set("name", self.config.hydra.job.name)
        done = run_job(
            # The config is composed: nothing here may read its files again.
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
        """Set what `@hydra.main` and the program set on the login node."""
        import cloudpickle  # type: ignore[import-untyped]
        from hydra import version
        from hydra.core.utils import setup_globals
        from omegaconf.basecontainer import BaseContainer

        version.setbase(self.version_base)
        setup_globals()
        # Another version of Python imports the program by its name, which registers them again.
        if self.python == sys.version_info[:2]:
            BaseContainer._resolvers.update(cloudpickle.loads(self.resolvers))

    def checkpoint(self) -> Any:
        """Start again with the same config after the time limit or a preemption, for submitit."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def as_json(value: Any, answer: Dict[str, Any]) -> str:
    """Return the answer with the value of the task; a value that JSON does not have becomes its text."""
    try:
        return json.dumps({**answer, "value": value}, default=plain)
    except (TypeError, ValueError):
        return json.dumps({**answer, "value": plain(str(value))})


def plain(value: Any) -> Any:
    """Return a number or an array of numpy or torch, and a config, as values of JSON; else the text of the value."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if hasattr(value, "tolist"):
        return value.tolist()
    print("hpcenv: JSON has no %s, so the sweep gets its text" % type(value).__name__, file=sys.stderr)
    return str(value)
