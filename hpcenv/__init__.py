"""hpcenv: environment lockfiles and a gate before multi-node training on Slurm.

`import hpcenv` loads only `hpcenv.version`. The module of a public name is loaded when the name is used for the first
time (PEP 562). The Python API uses the same names as the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcenv.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from hpcenv.api.environment import check_lock, diff, init, lock, verify
    from hpcenv.api.executor import AutoExecutor, Executor
    from hpcenv.api.job import Job, open_job
    from hpcenv.api.reproduce import reproduce
    from hpcenv.api.run import cancel, diagnose, list_runs, report, stacks, status, top, usage
    from hpcenv.api.submit import plan_job, submit, sweep
    from hpcenv.errors import HpcenvError
    from hpcenv.reproduction.bundle.make import bundle
    from hpcenv.reproduction.compare import compare
    from hpcenv.survey.compatibility import compat

_WHERE = {
    "AutoExecutor": "hpcenv.api.executor",
    "Executor": "hpcenv.api.executor",
    "HpcenvError": "hpcenv.errors",
    "Job": "hpcenv.api.job",
    "bundle": "hpcenv.reproduction.bundle.make",
    "cancel": "hpcenv.api.run",
    "check_lock": "hpcenv.api.environment",
    "compare": "hpcenv.reproduction.compare",
    "compat": "hpcenv.survey.compatibility",
    "diagnose": "hpcenv.api.run",
    "diff": "hpcenv.api.environment",
    "init": "hpcenv.api.environment",
    "list_runs": "hpcenv.api.run",
    "lock": "hpcenv.api.environment",
    "open_job": "hpcenv.api.job",
    "plan_job": "hpcenv.api.submit",
    "report": "hpcenv.api.run",
    "reproduce": "hpcenv.api.reproduce",
    "stacks": "hpcenv.api.run",
    "status": "hpcenv.api.run",
    "submit": "hpcenv.api.submit",
    "sweep": "hpcenv.api.submit",
    "top": "hpcenv.api.run",
    "usage": "hpcenv.api.run",
    "verify": "hpcenv.api.environment",
}

__all__ = [
    "AutoExecutor",
    "Executor",
    "HpcenvError",
    "Job",
    "__version__",
    "bundle",
    "cancel",
    "check_lock",
    "compare",
    "compat",
    "diagnose",
    "diff",
    "init",
    "list_runs",
    "lock",
    "open_job",
    "plan_job",
    "report",
    "reproduce",
    "stacks",
    "status",
    "submit",
    "sweep",
    "top",
    "usage",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'hpcenv' has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(_WHERE[name])
    except ModuleNotFoundError as error:
        if not f"{_WHERE[name]}.".startswith(f"{error.name}."):
            raise
        # The copy of hpcenv for the ranks has only this file and `hpcenv.training` (submission/node_code.py).
        text = f"compute nodes have hpcenv.training, but not hpcenv.{name}: submit from a login node"
        if name == "submit":
            text += ", in the project: `hpcenv submit SCRIPT --nodes N --gpus G -- ARGUMENTS`"
        raise ModuleNotFoundError(text, name=error.name) from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
