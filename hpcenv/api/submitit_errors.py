"""Errors that inherit from classes of hpcenv and of submitit. Programs for submitit catch submitit's classes.

Runs on: LOGIN NODE. submitit 1.5.4 raises `FailedJobError` if sbatch fails. For an unknown parameter, `SlurmExecutor`
raises ValueError, `AutoExecutor` raises NameError, and a constructor raises TypeError.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from submitit.core import utils

from hpcenv.errors import Hint, JobFailed, SubmitRejected, UsageError
from hpcenv.project.options import in_place


class NoResult(JobFailed, utils.UncompletedJobError):
    """A job ended without a result: it was rejected, cancelled, or killed."""


class NotSubmitted(SubmitRejected, utils.FailedJobError):
    """Slurm refused the job. A program that was written for submitit catches this error as `FailedJobError`."""


class WrongParameter(UsageError, ValueError, NameError, TypeError):
    """A parameter does not exist, or has a wrong value. submitit raises one of three classes, depending on the call."""


@contextlib.contextmanager
def refused_as_in_submitit() -> Iterator[None]:
    """Raise `NotSubmitted` if Slurm refuses a job, and name the keywords of options in the hint of a `UsageError`."""
    try:
        yield
    except UsageError as error:
        raise error.changed(hint=_in_python(error)) from error
    except SubmitRejected as error:
        # The error of an uncertain submission keeps its class, because the job may be queued.
        if type(error) is not SubmitRejected:
            raise
        raise NotSubmitted(error.what, why=error.why, hint=_in_python(error)) from error


def _in_python(error: SubmitRejected | UsageError) -> Hint | None:
    """Return the error's hint. For each option that the error names, add its keyword in Python."""
    said = f"{error.why} {error.hint}"
    named = [option for option in in_place("python") if re.search(rf"{re.escape(option.flag)}(?![\w-])", said)]
    keywords = ", ".join(f"`{option.flag}` is `{option.name}=`" for option in named)
    if not keywords:
        return error.hint_parts or None
    return (*error.hint_parts, f"{'; ' if error.hint_parts else ''}in Python {keywords}")
