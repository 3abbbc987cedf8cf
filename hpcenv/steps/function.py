"""A Python function as a run: what is sent, and what comes back.

Runs on: LOGIN NODE. The ranks run incontainer/call.py, which lies in the run folder with
the function, its arguments and the source of cloudpickle.
"""

from __future__ import annotations

import inspect
import io
import os
import pickle
import re
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcenv import node
from hpcenv.errors import HpcenvError, JobFailed, UsageError
from hpcenv.model.plan import Call
from hpcenv.wire import RunFolder

_FOLDER = "function"
_SCRIPT = f"{_FOLDER}/call.py"
# What a login node's memory can take; more belongs into a file that the function writes.
_MOST_BYTES = 2 * 10**9


def make_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, python: str) -> Call:
    """Return what is written into the run folder for a call.

    Between equal minor versions of Python the function itself is sent (cloudpickle: also
    lambdas and what is defined in a notebook). Otherwise only its name is, and the ranks
    import it from its file: bytecode means nothing to another Python.

    Args:
        python: version of the interpreter in the locked environment.

    Raises:
        UsageError: the function or an argument cannot be sent.
    """
    if not callable(function):
        raise UsageError(f"{function!r} cannot be called")
    name = getattr(function, "__qualname__", type(function).__name__)
    module = getattr(function, "__module__", None) or "__main__"
    file = _file_of(module)
    spec = {"how": "value", "module": module, "qualname": name}
    if _minor(python) == sys.version_info[:2]:
        content = _by_value(function, args, kwargs, name)
    else:
        spec["how"] = "name"
        _require_name(function, name, module, file, python)
        content = _by_name(args, kwargs, name)
    files = {_SCRIPT: _call_script(), f"{_FOLDER}/call.pkl": content, **_packages()}
    word = re.sub(r"[^A-Za-z0-9_-]+", "-", name.rpartition(".")[2]).strip("-") or "call"
    return Call(name=word, script=_SCRIPT, files=files, spec=spec, module=file)


def _file_of(module: str) -> Path | None:
    """Return the file of the user's own module; None for a notebook, and for what is installed."""
    found = getattr(sys.modules.get(module), "__file__", None)
    if found is None or not found.endswith(".py") or not os.path.isfile(found):
        return None
    path = Path(os.path.abspath(found))
    # What the lockfile names is in the environment already.
    return None if {"site-packages", "dist-packages"} & set(path.parts) else path


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall("[0-9]+", version)[:2])


def _require_name(function: object, name: str, module: str, file: Path | None, python: str) -> None:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is function and (file is not None or module != "__main__"):
        return
    raise UsageError(
        f"`{name}` cannot be sent to another Python",
        why=f"the environment has Python {python}, this is {sys.version.split()[0]}: only a function "
        "that stands by its name in a file can be found there",
        hint="define it at the top level of a module, or install hpcenv with the Python of the environment",
    )


def _by_value(function: object, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> bytes:
    import cloudpickle  # type: ignore[import-untyped]

    try:
        content: bytes = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:  # whatever a user's __reduce__ raises
        raise _unsendable(name, error) from error
    return content


def _by_name(args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> bytes:
    try:
        return pickle.dumps((None, tuple(args), dict(kwargs)), protocol=4)
    except Exception as error:
        raise _unsendable(f"an argument of {name}", error) from error


def _unsendable(what: str, error: Exception) -> UsageError:
    return UsageError(
        f"`{what}` cannot be sent to the nodes",
        why=f"{type(error).__name__}: {error}",
        hint="open files, locks and connections in the function itself",
    )


def _call_script() -> bytes:
    return (Path(node.__file__).parents[1] / "incontainer" / "call.py").read_bytes()


def _packages() -> dict[str, bytes]:
    """Return the source of cloudpickle: pure Python, and the image may have another version or none."""
    import cloudpickle

    folder = Path(inspect.getfile(cloudpickle)).parent
    return {f"{_FOLDER}/packages/cloudpickle/{path.name}": path.read_bytes() for path in sorted(folder.glob("*.py"))}


# -- what comes back ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank left.

    Attributes:
        value: what the function returned, pickled; None when it raised.
        error: the exception, pickled; empty when it could not be.
    """

    rank: int
    ok: bool
    time: float
    value: bytes | None = None
    error: bytes = b""
    kind: str = ""
    message: str = ""
    traceback: str = ""


class RemoteTraceback(Exception):
    """The traceback of an exception on its rank: the cause of the one that is raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def read_outcomes(run: RunFolder, ranks: int) -> dict[int, Outcome]:
    """Return what the ranks left, as far as they left something.

    A pickle can do anything when it is loaded: only files that this user wrote are.

    Raises:
        JobFailed: a result is somebody else's file, or damaged.
    """
    found = {}
    for rank in range(ranks):
        content = _read_own(run.path / _FOLDER / "results" / f"{rank}.pkl")
        if content is not None:
            found[rank] = _outcome(rank, content, run)
    return found


def _read_own(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JobFailed(f"cannot read the result `{path}`", why=error.strerror) from error
    with io.FileIO(descriptor) as file:
        status = os.fstat(descriptor)
        folder = os.lstat(path.parent)
        if not stat.S_ISREG(status.st_mode) or {status.st_uid, folder.st_uid} != {os.getuid()}:
            raise JobFailed(f"`{path}` is not read", why="it is not a file of yours, and a pickle can run any code")
        if status.st_size > _MOST_BYTES:
            raise JobFailed(
                f"the result `{path}` has {status.st_size} bytes", hint="let the function write a file, return its name"
            )
        return file.readall()


def _outcome(rank: int, content: bytes, run: RunFolder) -> Outcome:
    try:
        data = pickle.loads(content)  # noqa: S301  (a file of this user's own: _read_own)
        if data.pop("ok"):
            return Outcome(rank=rank, ok=True, value=data["value"], time=data["time"])
        return Outcome(rank=rank, ok=False, **data)
    except Exception as error:
        raise JobFailed(f"the result of rank {rank} in `{run.path}` is damaged", why=str(error)) from error


def value_of(outcome: Outcome) -> Any:
    """Return what the function returned.

    Raises:
        JobFailed: it is of a class that this Python does not have.
    """
    assert outcome.value is not None
    try:
        return pickle.loads(outcome.value)  # noqa: S301
    except Exception as error:
        raise JobFailed(
            f"what rank {outcome.rank} returned cannot be read here",
            why=f"{type(error).__name__}: {error}",
            hint="return plain values, or install here what its class comes from",
        ) from error


def error_of(outcome: Outcome) -> BaseException:
    """Return the exception of a rank, with its traceback there as the cause."""
    error: BaseException | None = None
    if outcome.error:
        try:
            loaded = pickle.loads(outcome.error)  # noqa: S301
            error = loaded if isinstance(loaded, BaseException) else None
        except Exception:  # noqa: BLE001  (its class is not here; what it said is)
            error = None
    if error is None:
        error = JobFailed(f"rank {outcome.rank}: {outcome.kind}: {outcome.message}")
    error.__cause__ = RemoteTraceback(f"rank {outcome.rank}:\n{outcome.traceback}")
    return error


def no_result(run: str, state: str, status: int | None, said: Sequence[str]) -> HpcenvError:
    """Return the error for a run that ended before its function did."""
    how = state if status is None else f"{state}, exit status {status}"
    return JobFailed(f"`{run}` ended without a result", why="\n".join((how, *said)), hint=f"hpcenv report {run}")
