"""A Python function as a run: send the function to the ranks, and read the results that the ranks send back.

Runs on: LOGIN NODE. The ranks run incontainer/call.py, which is copied into the run folder and calls the function. The
function, its arguments and its results are pickled in the folder of the executor, in the same form as in submitit.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import pickle
import re
import stat
import sys
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar, Literal

from hpcenv import incontainer
from hpcenv.errors import JobFailed, UsageError
from hpcenv.submission.plan import Call

FOLDER = "function"
_SCRIPT = f"{FOLDER}/call.py"
# The login node reads a whole result into its memory. The function should write larger results into a file.
_MOST_BYTES = 2 * 10**9


def make_call(
    function: Callable[..., Any],
    *,
    folder: Path,
    submitit_folder: str,
    python: str,
    per: Literal["task", "rank"],
    outputs: Path | None = None,
    name: str | None = None,
    stderr_to_stdout: bool = False,
) -> Call:
    """Return how a function is called on the ranks.

    Args:
        folder: the part of the executor's folder that all jobs share.
        submitit_folder: the executor's folder, with submitit's `%j`, `%A` and `%a`.
        python: version of the interpreter in the locked environment.
        per: whether the function is called once in each task (a plain process, as in submitit), or in each rank of
            torchrun.
        outputs: a folder that the function writes to.
        name: the name of the run; None for the name of the function.
        stderr_to_stdout: whether the ranks write standard output and standard error to one log.

    Raises:
        UsageError: `function` is not callable, or the locked Python cannot find it by its name.
    """
    if not callable(function):
        raise UsageError(f"{function!r} cannot be called", hint="submit a function, or an object with `__call__`")
    named = _named(function)
    how = "value" if is_same_python(python) else "name"
    if how == "name":
        _require_name(named, python)
    file = _file_of(named.__module__)
    spec: dict[str, object] = {
        "how": how,
        "module": named.__module__,
        "qualname": named.__qualname__,
        "folder": submitit_folder,
        "call": per,
        "stderr_to_stdout": stderr_to_stdout,
    }
    word = re.sub(r"[^A-Za-z0-9_-]+", "-", named.__qualname__.rpartition(".")[2]).strip("-_") or "call"
    return Call(
        name=name or word,
        script=_SCRIPT,
        files={_SCRIPT: _source("call.py"), **_packages(), **_wrapper(function)},
        spec=spec,
        module=file,
        folder=folder,
        outputs=outputs,
        launcher="tasks" if per == "task" else "torchrun",
    )


def is_same_python(version: str) -> bool:
    """Return whether Python `version` can run the compiled code of this Python. The minor versions must be equal."""
    return tuple(int(part) for part in re.findall("[0-9]+", version)[:2]) == sys.version_info[:2]


def dump(submission: Any, path: Path, *, python: str) -> None:
    """Pickle a `submitit.helpers.DelayedSubmission`.

    If the ranks have the same minor version of Python, cloudpickle pickles the code of the function. So lambdas and
    functions of a notebook work, too. If the ranks have another version, only the name of the function is pickled, and
    the ranks import the function from its file.

    Raises:
        UsageError: the function or an argument cannot be pickled, or the ranks would submit again.
    """
    name = getattr(_named(submission.function), "__qualname__", repr(submission.function))
    if not is_same_python(python):
        _require_guard(_named(submission.function), python)
    try:
        if is_same_python(python):
            _dump_by_value(submission, path)
        else:
            path.write_bytes(pickle.dumps(submission, protocol=4))
    except Exception as error:  # the __reduce__ of an argument can raise any exception
        path.unlink(missing_ok=True)
        raise UsageError(
            f"`{name}` and its arguments cannot be sent to the nodes",
            why=f"{type(error).__name__}: {error}",
            hint="pass what can be pickled: paths instead of open files, values instead of locks and generators",
        ) from error


def _dump_by_value(submission: Any, path: Path) -> None:
    """Pickle a function as submitit does, but keep the name of the file in code objects.

    cloudpickle 3.1.3 replaces this name by `<dynamic-code>` (cloudpickle pull request 560). With `<dynamic-code>`, the
    traceback of a function that fails on a rank would not show the file and the text of the line.
    """
    import cloudpickle  # type: ignore[import-untyped]

    def reduce_code(code: CodeType) -> tuple[Any, ...]:
        make, words = cloudpickle.Pickler.dispatch_table[CodeType](code)
        return make, tuple(code.co_filename if word == "<dynamic-code>" else word for word in words)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table: ClassVar = ChainMap({CodeType: reduce_code}, cloudpickle.Pickler.dispatch_table)

    with path.open("wb") as file:
        Pickler(file, pickle.HIGHEST_PROTOCOL).dump(submission)


def _named(function: Any) -> Any:
    """Return the function inside a `partial` or a wrapper. If an object has no name, return its class."""
    while isinstance(function, functools.partial) or _is_wrapper(function):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    has_name = hasattr(function, "__qualname__") and getattr(function, "__module__", None)
    return function if has_name else type(function)


def _is_wrapper(function: Any) -> bool:
    """Return whether `function` is an object that wraps a function: it has `__wrapped__`, but no `__qualname__`."""
    return hasattr(function, "__wrapped__") and not hasattr(function, "__qualname__")


def _wrapper(function: Any) -> dict[str, bytes]:
    """Return the file of a wrapper's class. The environment has the function, but may lack the class of the wrapper."""
    module = sys.modules[type(function).__module__]
    if not _is_wrapper(function) or module.__name__ == "__main__" or not module.__file__:
        return {}
    return {f"{FOLDER}/packages/{module.__name__.replace('.', '/')}.py": Path(module.__file__).read_bytes()}


def _file_of(module: str) -> Path | None:
    """Return the file of the user's own module; None for a notebook and for an installed module."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not file.endswith(".py") or not os.path.isfile(file):
        return None
    path = Path(os.path.abspath(file))
    # An installed module is not copied, because the environment has the packages of its lockfile.
    return None if {"site-packages", "dist-packages"} & set(path.parts) else path


def _require_name(named: Any, python: str) -> None:
    target: Any = sys.modules.get(named.__module__)
    for part in named.__qualname__.split("."):
        target = getattr(target, part, None)
    if target is named and (named.__module__ != "__main__" or _file_of("__main__") is not None):
        return
    wanted = ".".join(python.split(".")[:2])
    raise UsageError(
        f"`{named.__qualname__}` cannot be sent to another Python",
        why=f"the environment has Python {python}, this is {sys.version.split()[0]}: "
        "that Python imports the function by its name, so it must be at the top level of a file",
        hint="put it into a file beside the notebook (first line of its cell: %%writefile mine.py) and import it from "
        f"there; or run the notebook with Python {wanted}: python{wanted} -m venv ~/hpcenv-notebook, then "
        "~/hpcenv-notebook/bin/pip install ipykernel 'hpcenv @ git+URL_OF_THE_HPCENV_REPOSITORY'",
    )


def _require_guard(named: Any, python: str) -> None:
    """Refuse a program that submits at the top level of its file, because the ranks would run this line, too."""
    file = _file_of("__main__") if named.__module__ == "__main__" else None
    frame = inspect.currentframe()
    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("<module>", "__main__"):
        frame = frame.f_back
    if file is None or frame is None:
        return
    line = frame.f_lineno
    for statement in ast.parse(file.read_bytes()).body:
        here = statement.lineno <= line <= (statement.end_lineno or line)
        if here and not any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement)):
            raise UsageError(
                f"{file.name}, line {line}, submits at the top level of the file",
                why=f"the environment has Python {python}, this is {sys.version.split()[0]}: "
                f"each rank imports the file to find `{named.__qualname__}`, and would run this line, too",
                hint='put the lines that submit under `if __name__ == "__main__":`',
            )


def _source(name: str) -> bytes:
    return (Path(incontainer.__file__).parent / name).read_bytes()


def _packages() -> dict[str, bytes]:
    """Return the source files of submitit and cloudpickle, because the image may lack the same versions.

    Both packages are pure Python.
    """
    import cloudpickle
    import submitit
    import typing_extensions

    files = {f"{FOLDER}/packages/hpcenv_submitit_job.py": _source("submitit_job.py")}
    for package in (cloudpickle, submitit):
        folder = Path(str(package.__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            if not path.name.startswith("test_") and path.name != "conftest.py":
                files[f"{FOLDER}/packages/{package.__name__}/{path.relative_to(folder)}"] = path.read_bytes()
    # This copy is the last entry of the search path. If the copy came before a newer typing_extensions of the
    # environment, the copy could break other packages.
    files[f"{FOLDER}/fallback/typing_extensions.py"] = Path(typing_extensions.__file__).read_bytes()
    return files


# -- results of the ranks -----------------------------------------------------------------


def read_result(path: Path) -> tuple[str, Any]:
    """Return `success` and the value, or `error` and the traceback, from a result file of submitit.

    A pickle can run any code when it is loaded, so only files of this user are loaded.

    Raises:
        FileNotFoundError: there is no result.
        JobFailed: the file belongs to another user, is too large or damaged, or its class is not installed here.
    """
    content = _read_own(path)
    try:
        outcome, value = pickle.loads(content)  # noqa: S301  (a file of this user: _read_own)
    except Exception as error:
        raise JobFailed(
            f"the result `{path}` cannot be read",
            why=f"{type(error).__name__}: {error}",
            hint="return plain values, or install here the package that defines the class of the result",
        ) from error
    return str(outcome), value


def _read_own(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise JobFailed(f"cannot read the result `{path}`", why=error.strerror) from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise JobFailed(f"`{path}` is not read", why="it is not a file of yours, and a pickle can run any code")
        if status.st_size > _MOST_BYTES:
            raise JobFailed(
                f"the result `{path}` has {status.st_size} bytes", hint="let the function write a file, return its name"
            )
        return file.read()
