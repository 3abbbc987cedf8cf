"""Find the file of the Python module that `hpcenv submit -m` names, in the project or in the environment.

Runs on: LOGIN NODE. Reads folders; imports nothing and starts nothing.

The ranks start in the run's copy of the working directory. Python searches this copy first for modules.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcenv import filesystem
from hpcenv.errors import Command, Hint, ScriptUnusable
from hpcenv.records.manifest import Environment

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\Z")


def in_project(module: str, cwd: Path, command: Sequence[str]) -> Path | None:
    """Return the file that `python -m MODULE` starts in a folder; None if the folder does not have the module.

    Args:
        command: the command line of the submission, for a hint.

    Raises:
        ScriptUnusable: `module` is not the name of a module, or the project has the package but not the module.
    """
    if module.endswith(".py") or "/" in module:
        dotted = os.path.relpath(cwd / module, cwd).removesuffix(".py").replace("/", ".")
        hint = _instead(command, module, dotted) if _NAME.match(dotted) else Command("hpcenv", "submit", module)
        raise ScriptUnusable(
            f"`{module}` is the path of a file", why="-m takes the name of a module: package.module", hint=hint
        )
    if not _NAME.match(module):
        raise ScriptUnusable(
            f"`{module}` is not the name of a module", why="Python names are letters, digits and `_`, joined by dots"
        )
    found = _file_of(module, cwd)
    if found is None and _is_fixed(module, cwd):
        raise _missing(module, f"looked for {_place_of(module, cwd)}.py and {_place_of(module, cwd)}/__main__.py", cwd)
    return found


def name_of(script: str, cwd: Path) -> str | None:
    """Return `script` if it is the name of a module of the project instead of a script; else None."""
    return script if _NAME.match(script) and _file_of(script, cwd) is not None else None


def require_in_environment(
    module: str, cwd: Path, environment: Environment, variables: Mapping[str, str]
) -> tuple[str, ...]:
    """Look for a module that the project does not have; return a note if this cannot be checked here.

    Args:
        variables: variables of the ranks.

    Raises:
        ScriptUnusable: the environment does not have the module.
    """
    top = module.partition(".")[0]
    unknown = f"not checked whether the environment has the module `{module}`: the project does not have it"
    folder = only_packages(environment, variables)
    if folder is None or top in sys.stdlib_module_names:
        return (unknown,)
    folders, complete = places_below(folder)
    if any(_file_of(module, place) is not None for place in folders):
        return ()
    if complete or any(_is_fixed(module, place) for place in folders):
        raise _missing(module, f"neither the project {cwd} nor {folder} has it", cwd)
    return (unknown,)


def _file_of(module: str, folder: Path) -> Path | None:
    """Return the file that `-m` starts; for a package, `__main__.py`. A package has precedence over a file."""
    base = _place_of(module, folder)
    main, own = base / "__main__.py", base.with_name(f"{base.name}.py")
    if _is_package(base):
        return main if main.is_file() else None
    if own.is_file():
        return own
    return main if main.is_file() else None


def _place_of(module: str, folder: Path) -> Path:
    return folder.joinpath(*module.split("."))


def _is_package(place: Path) -> bool:
    return (place / "__init__.py").is_file()


def _is_fixed(module: str, folder: Path) -> bool:
    """Return whether Python searches for a module only here: the folder has its top-level package or top-level file."""
    top = folder / module.partition(".")[0]
    return _is_package(top) or top.with_name(f"{top.name}.py").is_file()


def only_packages(environment: Environment, variables: Mapping[str, str]) -> Path | None:
    """Return the folder with the packages of a host environment; None if there may be several such folders."""
    # In an image, the interpreter may be a name without a path.
    if environment.kind != "host" or "PYTHONPATH" in variables:
        return None
    prefix = Path(environment.python).parent.parent
    try:
        settings = (prefix / "pyvenv.cfg").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if re.search(r"(?im)^\s*include-system-site-packages\s*=\s*true", settings):
        return None
    folders = [path for path in prefix.glob("lib/python3.*/site-packages") if path.is_dir()]
    return folders[0] if len(folders) == 1 else None


def places_below(folder: Path) -> tuple[list[Path], bool]:
    """Return a list of the folder and the folders that its .pth files add, and whether the list is complete.

    The list may be incomplete in two cases. A line of a .pth file runs code, and the code may add folders (editable
    installs). Or a folder is not on this machine, but it may be on a node.
    """
    found, complete = [folder], True
    try:
        for path in sorted(folder.glob("*.pth")):
            lines = [line for line in path.read_text("utf-8").splitlines() if line.strip() and line[0] != "#"]
            code = any(line.startswith(("import ", "import\t")) for line in lines)
            complete &= not code or path.name in _HARMLESS
            places = [folder / line.rstrip() for line in lines if not line.startswith(("import ", "import\t"))]
            found += [place for place in places if place.is_dir()]
            complete &= all(place.is_dir() for place in places)
    except (OSError, ValueError):
        return found, False
    return found, complete


# Files of setuptools and virtualenv. Their lines run code, but add no modules.
_HARMLESS = ("distutils-precedence.pth", "_virtualenv.pth")


def _missing(module: str, why: str, cwd: Path) -> ScriptUnusable:
    return ScriptUnusable(f"there is no module `{module}`", why=why, hint=_near(module, cwd))


def _near(module: str, cwd: Path) -> Hint | None:
    place = _place_of(module, cwd)
    for wanted in (place.with_name(f"{place.name}.py"), place):
        near = filesystem.most_similar(wanted)
        dotted = None if near is None else os.path.relpath(near, cwd).removesuffix(".py").replace("/", ".")
        if dotted is not None and dotted != module and _NAME.match(dotted) and _file_of(dotted, cwd) is not None:
            return f"perhaps you meant `-m {dotted}`"
    return "-m takes a module of the folder that you submit from, or of the environment"


def _instead(command: Sequence[str], old: str, new: str) -> Command:
    end = list(command).index("--") if "--" in command else len(command)
    words = [new if number < end and word == old else word for number, word in enumerate(command)]
    return Command(*words) if new in words else Command("hpcenv", "submit", "-m", new)
