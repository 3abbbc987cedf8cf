"""What is started before the command line is even parsed: submitit, for a submission.

Runs on: LOGIN NODE. Importing submitit takes longer than planning a run; its process
(`adapters/submitit_books.py`) has the time that this one takes to load click and the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcenv.adapters.submitit_bridge import Books

# With one of these there is no job, or none of submitit's.
_WITHOUT = ("--dry-run", "--test-only", "--help", "-h", "--sweep", "--array", "--cluster=local")

_begun: list[Books] = []


def begin(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Start submitit if these words submit a job to Slurm; `take` gives it to whom it is for.

    It is a guess: if it is wrong, the process ends with this one, having done nothing.
    """
    own = words[: words.index("--")] if "--" in words else words
    if list(own[:1]) != ["submit"] or any(word.partition("=")[0] in _WITHOUT or word in _WITHOUT for word in own):
        return
    import itertools
    import shutil

    local = any(pair == ("--cluster", "local") for pair in itertools.pairwise(own))
    if local or shutil.which("sbatch", path=environ.get("PATH")) is None:
        return
    from hpcenv.adapters.submitit_bridge import Books

    _begun.append(Books(environ))


def take() -> Books | None:
    """Return what was begun; the caller ends it."""
    return _begun.pop() if _begun else None


def end() -> None:
    """End what nobody took."""
    books = take()
    if books is not None:
        books.__exit__()
