"""Call a Python function that `hpcenv.Executor` sent, once on every rank, and write down what became of it.

Runs on: COMPUTE NODE, in the locked environment, started by torchrun. Standard library only
(cloudpickle travels beside this file), Python >= 3.8.

Beside it lie call.json (what is called, and where its module is), call.pkl (function and
arguments) and results/, one file for each rank.
"""

import importlib
import importlib.util
import json
import os
import pickle
import sys
import time
import traceback
from types import ModuleType
from typing import Any, Dict, Optional

IMPORTING = "HPCENV_IMPORTING"
HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    rank = os.environ.get("RANK", "0")
    place = os.path.join(HERE, "results", rank + ".pkl")
    if os.path.exists(place):
        os.unlink(place)  # of an attempt before this one
    try:
        value = call()
        outcome = {"ok": True, "value": dumps(value), "time": time.time()}
    except BaseException as error:
        write(place, failure(error))
        raise
    write(place, outcome)


def call() -> Any:
    with open(os.path.join(HERE, "call.json"), encoding="utf-8") as file:
        spec = json.load(file)
    # In the place of this file's own folder, whose names mean nothing to the function.
    sys.path[0] = os.path.join(HERE, "packages")
    if spec["file"]:
        sys.path.insert(0, import_root(spec["file"], spec["module"]))
    module = None  # type: Optional[ModuleType]
    if spec["how"] == "name":
        module = load(spec["file"], spec["module"], spec["qualname"])
    with open(os.path.join(HERE, "call.pkl"), "rb") as file:
        loaded = pickle.load(file)  # type: Any
    function, args, kwargs = loaded
    if module is not None:
        function = module
        for name in spec["qualname"].split("."):
            function = getattr(function, name)
    return function(*args, **kwargs)


def load(file: str, name: str, function: str) -> ModuleType:
    """The module that has the function; what submits must not run again in it."""
    # `hpcenv submit` refuses while this is set (steps/plan.py).
    os.environ[IMPORTING] = file or name
    try:
        return load_main(file) if name == "__main__" else importlib.import_module(name)
    except BaseException as error:
        raise ImportError(
            "`%s` cannot be imported: %s: %s\n"
            "Every rank imports it, for the environment has another Python than the one that submitted, and\n"
            "`%s` is found there by its name. What submits, and all else that is not for the ranks, belongs under\n"
            '    if __name__ == "__main__":' % (file or name, type(error).__name__, error, function)
        ) from error
    finally:
        del os.environ[IMPORTING]


def import_root(file: str, module: str) -> str:
    """The folder from which `module` is imported: one up for each package that it lies in."""
    folder = os.path.dirname(file)
    levels = 0 if module == "__main__" else module.count(".") + (os.path.basename(file) == "__init__.py")
    for _ in range(levels):
        folder = os.path.dirname(folder)
    return folder


def load_main(file: str) -> ModuleType:
    """The program that submitted, as multiprocessing loads it: its `if __name__ == "__main__"` part does not run."""
    spec = importlib.util.spec_from_file_location("__mp_main__", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # What it pickled is of `__main__`.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    spec.loader.exec_module(module)
    return module


def failure(error: BaseException) -> Dict[str, Any]:
    try:
        pickled = dumps(error)
        pickle.loads(pickled)  # many exceptions can be written and not be read
    except Exception:
        pickled = b""
    return {
        "ok": False,
        "error": pickled,
        "kind": type(error).__name__,
        "message": str(error)[:10000],
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__))[-100000:],
        "time": time.time(),
    }


def dumps(value: Any) -> bytes:
    # Readable by every Python that this package runs on.
    return pickle.dumps(value, protocol=4)


def write(place: str, outcome: Dict[str, Any]) -> None:
    os.makedirs(os.path.dirname(place), exist_ok=True)
    aside = "%s.%d.tmp" % (place, os.getpid())
    with open(aside, "wb") as file:
        file.write(dumps(outcome))
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, place)


if __name__ == "__main__":
    main()
