"""Call a Python function that `hpcenv.Executor` submitted, as `python -m submitit.core._submit` does.

Runs on: inside the image (or in a host environment), once for each task or rank. Needs the standard library, and the
copies of submitit and cloudpickle in the folder of this file; Python 3.8 to 3.14.

This folder also contains call.json (see `prepare`), packages/ and fallback/. packages/ has submitit and cloudpickle,
which hide submitit and cloudpickle of the environment. fallback/ has further packages that submitit needs, for an
environment that lacks these packages. The function, its arguments and its result are in the executor's folder, with the
names that submitit gives them.
"""

import importlib
import importlib.util
import json
import os
import pickle
import sys
import time
from types import FunctionType, ModuleType
from typing import Any, Dict

IMPORTING = "HPCENV_IMPORTING"
HERE = os.path.dirname(os.path.abspath(__file__))
_SECONDS_FOR_FILES = 60.0


def main() -> None:
    with open(os.path.join(HERE, "call.json"), encoding="utf-8") as file:
        spec = json.load(file)
    prepare(spec)
    from submitit.core import submission, utils

    importlib.import_module("hpcenv_submitit_job").register()
    if spec["how"] == "name":
        load(spec["file"], spec["module"], spec["qualname"])
        # The submitting Python has a different version. That Python can read pickled names, but not the pickled code of
        # this Python.
        utils.cloudpickle_dump = dump_by_name  # type: ignore[assignment]
    submission.process_job(spec["folder"])


def prepare(spec: Dict[str, Any]) -> None:
    """Set the import path and the variables of this process.

    Args:
        spec: content of call.json. `folder` is the executor's folder. `how` says whether the function is pickled by
            `value` or by `name`. `file`, `module` and `qualname` say where the function is. `call` says
            whether the function is called once for each `task` or for each `rank`. `stderr_to_stdout` is true if stderr goes to stdout.
    """
    # This replaces the entry for the folder of this file, because the function must not import from this folder.
    sys.path[0] = os.path.join(HERE, "packages")
    spec["file"] = place_of(spec["file"])
    if spec["file"]:
        sys.path.insert(0, import_root(spec["file"], spec["module"]))
    # As in submitit, modules in the working directory can be imported.
    sys.path += [os.getcwd(), os.path.join(HERE, "fallback")]
    if spec["stderr_to_stdout"]:
        os.dup2(1, 2)
    rank = os.environ["RANK"]
    job = job_id(spec["folder"])
    os.environ.update(
        {
            "SUBMITIT_EXECUTOR": "hpcenv",
            "SUBMITIT_FOLDER": spec["folder"],
            "SUBMITIT_PREEMPT_SIGNAL": record("manifest.json")["stop"]["signal"],
            "HPCENV_JOB_ID": job,
            "HPCENV_TASK_RANK": rank,
            "HPCENV_TASK_LOCAL_RANK": os.environ["LOCAL_RANK"],
            "HPCENV_TASKS": os.environ["WORLD_SIZE"],
            "HPCENV_TASK_NODE": os.environ["GROUP_RANK"],
            "HPCENV_TASK_NODES": str(int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])),
        }
    )
    show_logs(spec["folder"], job, rank, spec["stderr_to_stdout"])
    if spec["call"] == "task":
        # As in submitit, the function itself sets these variables, for example with
        # submitit.helpers.TorchDistributedEnvironment.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            os.environ.pop(name, None)


def place_of(file: str) -> str:
    """Return the absolute path of the function's file. A relative path is in the run's own copy of the code."""
    return os.path.join(os.environ["HPCENV_RUN_FOLDER"], file) if file else ""


def record(name: str) -> Dict[str, Any]:
    """Return a record of the run folder."""
    with open(os.path.join(os.environ["HPCENV_RUN_FOLDER"], name), encoding="utf-8") as file:
        return dict(json.load(file))


def job_id(folder: str) -> str:
    """Return the job id under which the function was submitted.

    The result is the id of this job, or the id of the first job if the run was submitted again.
    """
    own = str(record("started.json")["submitted_as"])
    deadline = time.monotonic() + _SECONDS_FOR_FILES
    while time.monotonic() < deadline:
        if os.path.exists(named(folder, own) + "_submitted.pkl"):
            return own
        try:
            with open(os.path.join(HERE, "job"), encoding="utf-8") as file:
                return file.read().strip()
        except OSError:
            time.sleep(0.2)
    return own


def named(folder: str, job: str) -> str:
    """Return the beginning of the paths of a job's files, as submitit makes it (JobPaths)."""
    array, _, element = job.partition("_")
    return os.path.join(folder.replace("%j", job).replace("%A", array).replace("%a", element), job)


def show_logs(folder: str, job: str, rank: str, only_stdout: bool) -> None:
    """Make submitit's log files as symbolic links to the log files in the run folder."""
    for number, name in [(1, "out"), (2, "err")][: 1 if only_stdout else 2]:
        link = "%s_%s_log.%s" % (named(folder.replace("%t", rank), job), rank, name)
        try:
            source = os.readlink("/proc/self/fd/%d" % number)
            if not os.path.isfile(source):
                continue
            os.makedirs(os.path.dirname(link), exist_ok=True)
            if os.path.lexists(link):
                os.unlink(link)
            os.symlink(source, link)
        except OSError as error:
            print("hpcenv: cannot make the link %s: %s" % (link, error), file=sys.stderr)


def load(file: str, name: str, function: str) -> ModuleType:
    """Return the module with the function. While the module is imported, the module must not submit again."""
    # `hpcenv submit` refuses to run while this variable is set (submission/plan_job.py).
    os.environ[IMPORTING] = file or name
    try:
        return load_main(file) if name == "__main__" else importlib.import_module(name)
    except BaseException as error:
        raise ImportError(
            "`%s` cannot be imported: %s: %s\n"
            "Every rank imports it to find `%s` by its name, because the environment's Python has another version\n"
            "than the submitting one. Code that submits, or that is not for the ranks, belongs under\n"
            '    if __name__ == "__main__":' % (file or name, type(error).__name__, error, function)
        ) from error
    finally:
        del os.environ[IMPORTING]


def import_root(file: str, module: str) -> str:
    """Return the folder from which `module` is imported: one level up for each package that contains it."""
    folder = os.path.dirname(file)
    levels = 0 if module == "__main__" else module.count(".") + (os.path.basename(file) == "__init__.py")
    for _ in range(levels):
        folder = os.path.dirname(folder)
    return folder


def load_main(file: str) -> ModuleType:
    """Load the submitting program as multiprocessing does, without running its `if __name__ == "__main__"` part."""
    spec = importlib.util.spec_from_file_location("__mp_main__", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The pickles of the submitting program name `__main__`.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    spec.loader.exec_module(module)
    # Functions that are pickled here must name `__main__` too, as in the submitting program.
    for value in vars(module).values():
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__mp_main__":
            value.__module__ = "__main__"
    return module


def dump_by_name(value: Any, path: Any) -> None:
    """Pickle by name, so that any version of Python can read the result.

    `dump_by_name` replaces submitit's own function.
    """
    with open(path, "wb") as file:
        pickle.dump(value, file, protocol=4)


if __name__ == "__main__":
    main()
