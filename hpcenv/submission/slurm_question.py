"""A call of one of Slurm's commands that answers while the submission is planned. Runs on: LOGIN NODE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from hpcenv.cluster import munge
from hpcenv.errors import HpcenvError, SubmitRejected
from hpcenv.process import BackgroundProcess
from hpcenv.project.context import Context

if TYPE_CHECKING:
    from typing_extensions import Self

_Found = TypeVar("_Found")


class SlurmQuestion:
    """One call of a command, which answers in the background; use it in a `with`.

    Args:
        begin: starts the command in an environment.
        needed: False calls nothing.
    """

    def __init__(
        self, begin: Callable[[Mapping[str, str]], BackgroundProcess], context: Context, *, needed: bool
    ) -> None:
        self._process: BackgroundProcess | None = None
        self._error: HpcenvError | None = None
        try:
            self._process = begin(context.environ) if needed else None
        except HpcenvError as error:
            self._error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.__exit__()

    def read(self, reader: Callable[[BackgroundProcess], _Found]) -> _Found | str | None:
        """Return what the command answers, or why that is not known; None if nothing was called.

        Raises:
            SubmitRejected: munge does not run here, so nothing can be submitted.
        """
        try:
            if self._error is not None:
                raise self._error
            return None if self._process is None else reader(self._process)
        except HpcenvError as error:
            if error.what == munge.DOWN:
                raise SubmitRejected(error.what, why=error.why, hint=error.hint) from error
            return error.what
