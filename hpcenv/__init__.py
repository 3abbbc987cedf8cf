"""hpcenv: environment lockfiles and a gate before multi-node training on Slurm.

Importing this package imports nothing else; public names load on first use (PEP 562).
The Python API has the words of the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcenv.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from hpcenv.errors import HpcenvError
    from hpcenv.executor import Executor, FunctionJob
    from hpcenv.job import Job, open_job, plan_job, submit, sweep
    from hpcenv.steps.cancel import cancel
    from hpcenv.steps.init import init
    from hpcenv.steps.lock import check_lock, lock
    from hpcenv.steps.report import report
    from hpcenv.steps.status import status
    from hpcenv.steps.workspace import open_workspace

_WHERE = {
    "Executor": "hpcenv.executor",
    "FunctionJob": "hpcenv.executor",
    "HpcenvError": "hpcenv.errors",
    "Job": "hpcenv.job",
    "cancel": "hpcenv.steps.cancel",
    "check_lock": "hpcenv.steps.lock",
    "init": "hpcenv.steps.init",
    "lock": "hpcenv.steps.lock",
    "open_job": "hpcenv.job",
    "open_workspace": "hpcenv.steps.workspace",
    "plan_job": "hpcenv.job",
    "report": "hpcenv.steps.report",
    "status": "hpcenv.steps.status",
    "submit": "hpcenv.job",
    "sweep": "hpcenv.job",
}

__all__ = [
    "Executor",
    "FunctionJob",
    "HpcenvError",
    "Job",
    "__version__",
    "cancel",
    "check_lock",
    "init",
    "lock",
    "open_job",
    "open_workspace",
    "plan_job",
    "report",
    "status",
    "submit",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'hpcenv' has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(_WHERE[name])
    except ModuleNotFoundError as error:
        if error.name != _WHERE[name]:
            raise
        # The ranks have this file and `hpcenv.training`: steps/submit.py.
        text = f"hpcenv.{name} is not there on the compute nodes, only hpcenv.training is: submit from elsewhere"
        raise ModuleNotFoundError(text, name=error.name) from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
