"""What one of Slurm's commands answers while the submission is planned. Runs on: LOGIN NODE."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

from hpcenv.cluster import munge
from hpcenv.errors import HpcenvError, SubmitRejected

_Found = TypeVar("_Found")


def read_answer(answer: Future[_Found] | None) -> _Found | str | None:
    """Return what a command answers, or why that is not known; None if nothing was called.

    Raises:
        SubmitRejected: munge does not run here, so nothing can be submitted.
    """
    try:
        return None if answer is None else answer.result()
    except HpcenvError as error:
        if error.what == munge.DOWN:
            raise SubmitRejected(error.what, why=error.why, hint=error.hint) from error
        return error.what
