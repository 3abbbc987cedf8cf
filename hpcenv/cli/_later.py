"""Modules of the standard library that click imports for words nobody types; to be imported before click.

`inspect` is a fifth of what starting hpcenv costs (Python 3.11, click 8.5, 2026-11-20). It is loaded
when something of it is first asked for. (importlib.util.LazyLoader loads it at the next `import`.)
"""

from __future__ import annotations

import importlib.util
import sys
import types

_NAMES = ("inspect",)


class _Later(types.ModuleType):
    """A module whose code runs when somebody asks for what it has not yet."""

    def __getattr__(self, name: str) -> object:
        if self.__spec__ is None or self.__spec__.loader is None:
            raise AttributeError(name)
        self.__class__ = types.ModuleType  # type: ignore[assignment]
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _load_later(name: str) -> None:
    spec = importlib.util.find_spec(name)
    if name in sys.modules or spec is None:
        return
    module = _Later(name)
    module.__spec__, module.__file__ = spec, spec.origin
    sys.modules[name] = module


def load_now() -> None:
    """Load what was put off: before threads are started, of which two could be the first to ask."""
    for name in _NAMES:
        # Any name that only the loaded module has.
        hasattr(sys.modules.get(name), "__all__")


for _name in _NAMES:
    _load_later(_name)
