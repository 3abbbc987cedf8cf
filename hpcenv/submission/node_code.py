"""The code that travels with a run: whole rooms of this package, copied as they are.

Runs on: LOGIN NODE. A job that waits in the queue is not changed by an upgrade of hpcenv, and the
nodes need no installation (docs/decisions/0001-node-code-travels-with-the-run.md).
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path

from hpcenv import node
from hpcenv.records.run_folder import RunFolder

# Rooms that run on a compute node or inside the image. Their imports are limited by a contract in pyproject.toml.
NODE_ROOMS = ("incontainer", "node", "records")

# What a training script can import, also in an image without hpcenv: hpcenv.training, and what it imports.
RANK_MODULES = ("__init__.py", "version.py", "training.py")


def package_folder() -> Path:
    """Return the folder of this package's modules."""
    return Path(node.__file__).parents[1]


def node_files() -> list[str]:
    """Return the paths, relative to the package, of every file that travels to a node."""
    package = package_folder()
    modules = [path for path in package.glob("*.py") if path.name != "__main__.py"]
    for room in NODE_ROOMS:
        modules += (package / room).rglob("*.py")
    return sorted(str(path.relative_to(package)) for path in modules)


def copy_node_code(run: RunFolder) -> None:
    """Copy what the nodes run, and what the ranks can import.

    Files that Python has compiled are copied too: the steps on the nodes then compile nothing if their
    Python has this version. Python accepts such a file only with the time and size of its source.
    """
    package = package_folder()
    names = node_files()
    for folder in dict.fromkeys(os.path.dirname(name) for name in names):
        (run.code / "hpcenv" / folder / "__pycache__").mkdir(parents=True, exist_ok=True)
    for name in names:
        _copy(package / name, run.code / "hpcenv" / name)
        compiled = Path(cache_from_source(str(package / name))).relative_to(package)
        with suppress(FileNotFoundError, PermissionError):
            _copy(package / compiled, run.code / "hpcenv" / compiled)
    _copy(package / "node" / "step.py", run.step)
    for name in RANK_MODULES:
        target = run.inside / "hpcenv" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(package / name, target)


def _copy(source: Path, target: Path) -> None:
    """Copy a file with its time, not with its mode: a read-only installation must not make a read-only copy."""
    with open(source, "rb") as file:
        content, status = file.read(), os.fstat(file.fileno())
    with open(target, "wb") as file:
        file.write(content)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
