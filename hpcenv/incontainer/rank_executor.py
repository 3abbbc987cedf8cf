"""Replaces hpcenv/api/executor.py in the ranks: submitit loads that module as a plug-in if hpcenv is installed.

Runs on: every rank, inside the image, as `hpcenv.api.executor` of the run's own small package. Standard library only.
Without this module, submitit prints a traceback in each rank that asks for its executors (Hydra's launcher does).
"""

from typing import Any, Set


class NoExecutor:
    """An entry for submitit's table of executors, which no rank can use, because a rank does not submit."""

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
