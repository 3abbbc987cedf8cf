"""The code that travels with a run: whole rooms of this package, copied as they are.

Runs on: LOGIN NODE. A job that waits in the queue is not changed by an upgrade of hpcenv, and the
nodes need no installation (docs/decisions/0001-node-code-travels-with-the-run.md).
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from hpcenv import node
from hpcenv.records import listing
from hpcenv.records.run_folder import RunFolder

# Rooms that run on a compute node or inside the image. Their imports are limited by a contract in pyproject.toml.
NODE_ROOMS = ("incontainer", "node", "records")

# What a training script can import, also in an image without hpcenv: hpcenv.training, and what it imports.
RANK_MODULES = ("__init__.py", "version.py", "training.py", "incontainer/__init__.py", "incontainer/provenance.py")

# The start hook is a package beside the file that Python imports by itself: not under the name of hpcenv, of which the
# image may have another version.
_HOOK_ROOM = "incontainer/start_hook"
_HOOK_PACKAGE = "_hpcenv_start_hook"
_HOOK_ENTRY = "sitecustomize.py"


def package_folder() -> Path:
    """Return the folder of this package's modules."""
    return Path(node.__file__).parents[1]


def node_files() -> list[str]:
    """Return the paths, relative to the package, of every file that travels to a node: modules, and their bytecode."""
    package = package_folder()
    found = [name for name in _files_of(str(package)) if os.path.basename(name).partition(".")[0] != "__main__"]
    for room in NODE_ROOMS:
        for folder, folders, _ in os.walk(package / room):
            folders[:] = [name for name in folders if name != listing.BYTECODE]
            inside = os.path.relpath(folder, package)
            found += [f"{inside}/{name}" for name in _files_of(folder)]
    return sorted(found)


def _files_of(folder: str) -> list[str]:
    """Return the modules in a folder, and what this Python has compiled of them (PEP 3147)."""
    modules = [name for name in os.listdir(folder) if name.endswith(".py")]
    compiled = {f"{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc" for name in modules}
    with suppress(FileNotFoundError, PermissionError):
        modules += [
            f"{listing.BYTECODE}/{name}" for name in compiled.intersection(os.listdir(f"{folder}/{listing.BYTECODE}"))
        ]
    return modules


def copy_node_code(run: RunFolder) -> None:
    """Copy what the nodes run, and what the ranks can import.

    Files that Python has compiled are copied too: the steps on the nodes then compile nothing if their
    Python has this version. Python accepts such a file only with the time and size of its source.
    """
    package, target = str(package_folder()), str(run.code / "hpcenv")
    names = node_files()
    for folder in dict.fromkeys(os.path.dirname(name) for name in names):
        os.makedirs(os.path.join(target, folder), exist_ok=True)
    for name in names:
        try:
            _copy(f"{package}/{name}", f"{target}/{name}")
        except (FileNotFoundError, PermissionError):
            if not name.endswith(".pyc"):  # the nodes can compile it themselves
                raise
    _copy(f"{package}/node/step.py", str(run.step))
    hook = [f"{_HOOK_ROOM}/{name.rpartition('/')[2]}" for name in start_hook_files() if name != _HOOK_ENTRY]
    for name in (*RANK_MODULES, *hook):
        inside = run.inside / "hpcenv" / name
        inside.parent.mkdir(parents=True, exist_ok=True)
        _copy(f"{package}/{name}", str(inside))
    copy_start_hook(run)


def copy_start_hook(run: RunFolder) -> None:
    """Copy what Python runs at the start of every rank."""
    for name, source in start_hook_files().items():
        place = run.start_hook / name
        place.parent.mkdir(parents=True, exist_ok=True)
        _copy(source, str(place))


def start_hook_files() -> dict[str, str]:
    """Return the files of the start hook: path in its folder -> path in this package."""
    folder = package_folder() / _HOOK_ROOM
    names = sorted(name for name in os.listdir(folder) if name.endswith(".py"))
    return {name if name == _HOOK_ENTRY else f"{_HOOK_PACKAGE}/{name}": str(folder / name) for name in names}


def start_hook_digest() -> str:
    """Return the digest over the files of the start hook, as `records.listing` makes it.

    Raises:
        OSError: a file cannot be read.
    """
    return listing.digest_of({name: listing.content_of(path) for name, path in start_hook_files().items()})


def _copy(source: str, target: str) -> None:
    """Copy a file with its time, not with its mode: a read-only installation must not make a read-only copy."""
    with open(source, "rb", buffering=0) as file:
        content, status = file.readall(), os.fstat(file.fileno())
    with open(target, "wb", buffering=0) as copy:
        while content:
            content = content[copy.write(content) :]
        os.utime(copy.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
