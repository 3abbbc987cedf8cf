"""Start the probe, either from the text that `container/probe_source.py` makes, or from the folder of the probe.

Runs on: inside the image.

The text defines SOURCES (module -> its source) in front of this file. Modules of the probe are not searched on
sys.path.
"""

import sys

_streamed = "SOURCES" in globals()
if not _streamed or not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    # This comes before any other import, because '' or the folder of this file could contain a json.py.
    del sys.path[0]
_training_path = list(sys.path)

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_PACKAGE = "hpcenv.incontainer.probe"


def _own_sources() -> "dict[str, str]":
    folder = os.path.dirname(os.path.abspath(__file__))
    sources = {}
    for name in os.listdir(folder):
        if name.endswith(".py"):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                sources[name[:-3]] = file.read()
    return sources


class _Chapters:
    """An importer (importlib.abc.MetaPathFinder and Loader) for the sources."""

    def __init__(self, sources: "dict[str, str]") -> None:
        self.sources = {_PACKAGE + "." + name: text for name, text in sources.items()}
        # The image may contain another version of hpcenv. So the packages above the probe are also made here, empty.
        self.packages = {"hpcenv": "", "hpcenv.incontainer": "", _PACKAGE: sources["__init__"]}

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name not in self.sources and name not in self.packages:
            return None
        # importlib.machinery.ModuleSpec, without an import that PYTHONPATH could shadow.
        module_spec: "Any" = type(sys.__spec__)
        return module_spec(name, self, is_package=name in self.packages)

    def create_module(self, spec: object) -> None:
        return None  # the usual kind of module

    def exec_module(self, module: "ModuleType") -> None:
        name = module.__name__
        text = self.packages[name] if name in self.packages else self.sources[name]
        exec(compile(text, "<" + name + ">", "exec"), module.__dict__)


_importer: "Any" = _Chapters(globals()["SOURCES"] if _streamed else _own_sources())
sys.meta_path.insert(0, _importer)

from hpcenv.incontainer.probe.stdlib_path import is_stdlib

# PYTHONPATH may shadow the standard library. The probe reports this, but must not import from there.
sys.path[:] = [path for path in sys.path if is_stdlib(path)] or sys.path

from hpcenv.incontainer.probe.run import main

_status = main(sys.argv[1:], _training_path)
# sys.exit is not used, because exit handlers that a .pth file or sitecustomize registered could print after the line of
# the probe.
os._exit(_status)
