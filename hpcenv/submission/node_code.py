"""The code that travels with a run: whole rooms of this package, unchanged, in one archive.

Runs on: LOGIN NODE. A job that waits in the queue is not changed by an upgrade of hpcenv, and the
nodes need no installation (docs/decisions/0001-node-code-travels-with-the-run.md).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
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

# Room of which other Pythons start single files, by their paths: these cannot be in an archive.
FILES_ROOM = "incontainer"

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


def node_modules() -> list[str]:
    """Return the paths, relative to the package, of every module that travels to a node."""
    package = package_folder()
    found = [name for name in os.listdir(package) if name.endswith(".py") and name != "__main__.py"]
    for room in NODE_ROOMS:
        for folder, folders, names in os.walk(package / room):
            folders[:] = [name for name in folders if name != listing.BYTECODE]
            inside = os.path.relpath(folder, package)
            found += [f"{inside}/{name}" for name in names if name.endswith(".py")]
    return sorted(found)


class NodeCodeCopy:
    """Copies what the nodes run, and what the ranks can import, while its caller goes on; use it in a `with`.

    The modules that the steps on the nodes import are in one archive. It also has what Python has compiled of them: the
    steps then compile nothing if their Python has this version.

    Args:
        as_files: write these modules as files: for a folder that a Python of any version runs. Such a Python can keep
            what it compiles of files; of modules in an archive it does not.

    Raises:
        ToolMissing, ToolFailed: Python cannot be started.
    """

    def __init__(self, run: RunFolder, *, as_files: bool = False) -> None:
        self._run = run
        modules = node_modules()
        files = modules if as_files else [name for name in modules if name.startswith(f"{FILES_ROOM}/")]
        pairs = [path for pair in _copies(run, files) for path in pair]
        packed = () if as_files else (file_copies.ARCHIVE, str(run.archive), *modules)
        # Sources are named from the folder of the package: the command line stays short.
        argv = [sys.executable, "-I", "-S", file_copies.__file__, *pairs, *packed]
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


def copy_node_code(run: RunFolder, *, as_files: bool = False) -> None:
    """Copy what the nodes run, and what the ranks can import, and wait for it; arguments as for `NodeCodeCopy`.

    Raises:
        ToolMissing, ToolFailed, FileUnusable: as for `NodeCodeCopy`.
    """
    with NodeCodeCopy(run, as_files=as_files) as copy:
        copy.finish()


def _copies(run: RunFolder, files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each file that is copied, relative to the package, and its place in the run folder."""
    yield from ((name, f"{run.code}/hpcenv/{name}") for name in files)
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
