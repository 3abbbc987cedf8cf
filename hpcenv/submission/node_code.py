"""The code that travels with a run: whole rooms of this package, copied as they are.

Runs on: LOGIN NODE. A job that waits in the queue is not changed by an upgrade of hpcenv, and the
nodes need no installation (docs/decisions/0001-node-code-travels-with-the-run.md).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpcenv import filesystem, node, process
from hpcenv.errors import FileUnusable, ToolFailed
from hpcenv.records import listing
from hpcenv.records.run_folder import RunFolder
from hpcenv.submission import file_copies

if TYPE_CHECKING:
    from typing_extensions import Self

# A file system that hangs. Usually it takes 50 ms.
_SECONDS = 600.0

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


class NodeCodeCopy:
    """Copies what the nodes run, and what the ranks can import, while its caller goes on; use it in a `with`.

    Files that Python has compiled are copied too: the steps on the nodes then compile nothing if their
    Python has this version. Python accepts such a file only with the time and size of its source.

    Raises:
        ToolMissing, ToolFailed: Python cannot be started.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        # Sources are named from the folder of the package: the command line stays short.
        pairs = [path for pair in _copies(run) for path in pair]
        argv = [sys.executable, "-I", "-S", file_copies.__file__, *pairs]
        self._program = process.BackgroundProcess(argv, timeout=_SECONDS, cwd=package_folder())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.__exit__()

    def finish(self) -> None:
        """Wait until the files are there.

        Raises:
            FileUnusable: a file cannot be copied.
        """
        try:
            printed = self._program.finish().stdout
        except ToolFailed as error:
            raise self._failed(error.stderr, error.what) from error
        # Where the caller ignores SIGCHLD, Python takes each status for 0.
        if printed != file_copies.DONE:
            raise self._failed("", "the program that copies it did not come to its end")

    def _failed(self, written: str, otherwise: str) -> FileUnusable:
        """Return the error that the program wrote, with the hint for a full file system."""
        what = f"cannot copy the code of the nodes to `{self._run.code}`"
        number, _, path = written.strip().partition(" ")
        if not number.isdigit() or not path:
            return FileUnusable(what, why=written or otherwise)
        reason = os.strerror(int(number))
        full = filesystem.refused(Path(path), OSError(int(number), reason))
        return FileUnusable(what, why=f"{reason}: {path}", hint=full.hint)


def copy_node_code(run: RunFolder) -> None:
    """Copy what the nodes run, and what the ranks can import, and wait for it.

    Raises:
        ToolMissing, ToolFailed, FileUnusable: as for `NodeCodeCopy`.
    """
    with NodeCodeCopy(run) as copy:
        copy.finish()


def _copies(run: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield each file, relative to the package, and its place in the run folder."""
    yield from ((name, f"{run.code}/hpcenv/{name}") for name in node_files())
    yield "node/step.py", str(run.step)
    hook = [f"{_HOOK_ROOM}/{name.rpartition('/')[2]}" for name in start_hook_files() if name != _HOOK_ENTRY]
    yield from ((name, f"{run.inside}/hpcenv/{name}") for name in (*RANK_MODULES, *hook))
    yield from ((source, f"{run.start_hook}/{name}") for name, source in start_hook_files().items())


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
