"""Replaces hpcenv/api/executor.py in the ranks: submitit loads that module as a plug-in if hpcenv is installed.

Runs on: every rank, inside the image, as `hpcenv.api.executor` of the small package `hpcenv` in the run folder.
Standard library only. Without this module, submitit prints a traceback in each rank that calls submitit for a list of
executors. Hydra's launcher does this.
"""

from typing import Any, Set


class NoExecutor:
    """An entry for submitit's table of executors. A rank cannot use this executor, because a rank does not submit."""

    def __init__(self, *_args: Any, **_parameters: Any) -> None:
        raise RuntimeError("hpcenv.Executor is for the program that submits, and not for a rank of a run")

    @classmethod
    def name(cls) -> str:
        return "hpcenv"

    @classmethod
    def affinity(cls) -> int:
        return -1

    @classmethod
    def _valid_parameters(cls) -> Set[str]:
        return set()


Executor = AutoExecutor = NoExecutor
