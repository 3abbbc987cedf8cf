"""`hydra/launcher=hpcenv`: each trial of a Hydra sweep is a job of `hpcenv.AutoExecutor`, and starts after the check.

Runs on: LOGIN NODE. The fields and defaults are the same as in hydra-submitit-launcher 1.2.0 and 1.4.0.dev9, so a user
changes only one word. Hydra runs this file at each start of a program, so only `launch` imports hpcenv and submitit.
Hydra runs this file before the file is in sys.modules. At that time a dataclass cannot read annotations that are text,
so this file does not use `from __future__ import annotations`.
"""

import copy
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra import version
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, filter_overrides, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.basecontainer import BaseContainer

if TYPE_CHECKING:
    from hpcenv.api.executor import AutoExecutor
    from hpcenv.api.job import Job

log = logging.getLogger(__name__)

# Parameters that submitit's AutoExecutor accepts without the prefix of an executor.
_GENERIC = frozenset(
    ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node", "stderr_to_stdout")
)
_OF_THE_EXECUTOR = ("max_num_timeout", "python", "project", "accept")
_HYDRAS_OWN_RESOLVERS = ("now", "hydra", "python_version")


@dataclass
class HpcenvConf:
    """The fields of `hydra.launcher`. `+hydra.launcher.NAME=` sets any other keyword of `hpcenv.submit`."""

    _target_: str = "hydra_plugins.hpcenv_launcher.HpcenvLauncher"
    submitit_folder: str = "${hydra.sweep.dir}/.submitit/%j"
    timeout_min: int = 60
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    tasks_per_node: int | None = 1
    mem_gb: int | None = None
    nodes: int = 1
    name: str = "${hydra.job.name}"
    stderr_to_stdout: bool = False
    partition: str | None = None
    qos: str | None = None
    comment: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    gres: str | None = None
    cpus_per_gpu: int | None = None
    gpus_per_task: int | None = None
    mem_per_gpu: str | None = None
    mem_per_cpu: str | None = None
    account: str | None = None
    signal_delay_s: int = 120
    max_num_timeout: int = 0
    python: str | None = None
    additional_parameters: dict[str, Any] = field(default_factory=dict)
    array_parallelism: int = 256
    setup: list[str] | None = None
    srun_args: list[str] | None = None
    # These fields are only in hpcenv.
    torchrun: bool = False
    cluster: str | None = None


ConfigStore.instance().store(group="hydra/launcher", name="hpcenv", node=HpcenvConf, provider="hpcenv")


class HpcenvLauncher(Launcher):
    """Submits the trials of a sweep. Trials with the same request are one array."""

    def __init__(self, **_parameters: Any) -> None:
        # `launch` reads the parameters from the config of each trial, because a config group may choose for example the
        # nodes of its trials.
        super().__init__()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store the objects that Hydra passes."""
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose the config of every trial, submit all trials, and wait for them."""
        setup_globals()
        folder = os.path.abspath(str(self.config.hydra.sweep.dir))
        os.makedirs(folder, exist_ok=True)
        log.info("hpcenv sweep output dir : %s", folder)
        configs = [
            self._compose(list(overrides), number, folder)
            for number, overrides in enumerate(job_overrides, initial_job_idx)
        ]
        jobs = self._submit(configs)
        return [_finish(job, config) for job, config in zip(jobs, configs, strict=True)]

    def _compose(self, overrides: list[str], number: int, folder: str) -> DictConfig:
        """Return the config of a trial, composed now, so that a later change of the config files has no effect."""
        config = self.context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.num = number
            # A trial runs in the run's own copy of the project, but its outputs go to the folder that a user of Hydra
            # expects.
            config.hydra.sweep.dir = folder
            # The classes of these configs are in plug-ins. The image may lack these plug-ins, so the job gets
            # plain dicts and lists.
            for plugin in ("launcher", "sweeper"):
                config.hydra[plugin] = OmegaConf.to_container(config.hydra[plugin])
        log.info("\t#%d : %s", number, " ".join(filter_overrides(overrides)))
        return config

    def _submit(self, configs: Sequence[DictConfig]) -> list["Job[str]"]:
        # This import is here, because Hydra runs the files of plug-ins again when it looks for plug-ins. An earlier
        # import would get a different class.
        from hydra_plugins.hpcenv_trial import Trial

        alike: dict[str, list[int]] = {}
        for place, config in enumerate(configs):
            asked = OmegaConf.to_container(config.hydra.launcher, resolve=True)
            alike.setdefault(json.dumps(asked), []).append(place)
        base, resolvers = _globals()
        task = _findable(self.task)
        jobs: dict[int, Any] = {}
        for text, places in alike.items():
            executor = _executor(json.loads(text), configs[0].hydra.sweep.dir)
            with executor.batch():
                for place in places:
                    jobs[place] = executor.submit(Trial(task, configs[place], base, resolvers))
        return [jobs[place] for place in range(len(configs))]


def _executor(asked: dict[str, Any], outputs: str) -> "AutoExecutor":
    from hpcenv.api.executor import AutoExecutor

    given = {name: value for name, value in asked.items() if value is not None and name != "_target_"}
    own = {f"hpcenv_{name}": given.pop(name) for name in _OF_THE_EXECUTOR if name in given}
    executor = AutoExecutor(given.pop("submitit_folder"), **own)
    given |= {"call": "rank" if given.pop("torchrun") else "task", "outputs": outputs}
    executor.update_parameters(**{name if name in _GENERIC else f"hpcenv_{name}": given[name] for name in given})
    return executor


def _globals() -> tuple[str, bytes]:
    """Return Hydra's version base, and the resolvers that the program registered, pickled by value."""
    import cloudpickle  # type: ignore[import-untyped]

    version.base_at_least("1.1")  # sets the version base if the program did not
    known = BaseContainer._resolvers  # noqa: SLF001  (as Hydra itself does: core/singleton.py)
    own = {name: known[name] for name in known if not name.startswith("oc.") and name not in _HYDRAS_OWN_RESOLVERS}
    return str(version.getbase()), cloudpickle.dumps(own)


def _findable(task: TaskFunction) -> TaskFunction:
    """Return the object that a module has under the task's name. `@hydra.main` has replaced the task by a wrapper.

    A rank with another version of Python finds the task by this name.
    """
    found: Any = sys.modules.get(getattr(task, "__module__", ""))
    for part in getattr(task, "__qualname__", "?").split("."):
        found = getattr(found, part, None)
    return found if getattr(found, "__wrapped__", None) is task else task


def _finish(job: "Job[str]", config: DictConfig) -> JobReturn:
    """Wait for a trial; return the value that rank 0 returned, or the first failure."""
    from submitit.core.utils import UncompletedJobError

    done = JobReturn(overrides=list(config.hydra.overrides.task), task_name=str(config.hydra.job.name))
    try:
        answer = json.loads(job.results()[0])
    except UncompletedJobError as error:
        done.status, done.return_value = JobStatus.FAILED, _failure(job, config, error)
    else:
        done.status, done.return_value = JobStatus.COMPLETED, answer["value"]
        done.working_dir = answer["working_dir"]
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.job.id = answer["job_id"]
            config.hydra.runtime.output_dir = answer["output_dir"]
    done.hydra_cfg = OmegaConf.masked_copy(config, "hydra")
    done.cfg = copy.deepcopy(config)
    with read_write(done.cfg), open_dict(done.cfg):
        del done.cfg["hydra"]
    return done


def _failure(job: "Job[str]", config: DictConfig, error: Exception) -> Exception:
    """Return the first failure of a trial as an error, and log it, because Hydra shows only the first failed trial."""
    from hpcenv.errors import Command, JobFailed

    job.run.wait()
    report = job.run.report()
    first = report.status.state if report.failure is None else report.failure.headline
    what = f"trial #{config.hydra.job.num} ({' '.join(config.hydra.overrides.task)}) failed: {first}"
    log.error("\t%s; hpcenv report %s", what, report.status.run)
    return JobFailed(what, why=str(error), hint=Command("hpcenv", "report", report.status.run))
