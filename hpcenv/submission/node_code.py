"""The node code: a copy of hpcenv's code in the run folder. It has whole packages, unchanged, in one archive.

Runs on: LOGIN NODE. Because of the copy, an upgrade of hpcenv does not change a job that waits in the
queue, and the nodes need no installation (docs/decisions/0001-node-code-travels-with-the-run.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import zipfile
from collections.abc import Sequence
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path

from hpcenv import filesystem, steps
from hpcenv.errors import FileUnusable
from hpcenv.records import code_listing
from hpcenv.records.files import read_file, sha256_at
from hpcenv.records.run_folder import RunFolder

# Subpackages whose code runs on a compute node or in the image. A contract in pyproject.toml limits their imports.
NODE_ROOMS = (
    "container", "facts", "identity", "incontainer", "judge", "launch", "machine", "records", "sessions", "smoke",
    "steps",
    "watch",
)  # fmt: skip

# Another Python starts single files of this room by their paths, so these files cannot be in an archive.
FILES_ROOM = "incontainer"

# Modules that a training script can import even in an image without hpcenv: hpcenv.training and the modules that it
# imports.
RANK_MODULES = ("__init__.py", "version.py", "training.py", "incontainer/__init__.py", "incontainer/provenance.py")

# For the ranks, this module replaces `hpcenv.api.executor`, which submitit loads as a plug-in.
_RANK_EXECUTOR = "incontainer/rank_executor.py"

# The start hook is a package next to sitecustomize.py. Python imports sitecustomize.py at its start. The package is not
# named hpcenv, because the image may have a different version of hpcenv.
_HOOK_ROOM = "incontainer/start_hook"
_HOOK_PACKAGE = "_hpcenv_start_hook"
_HOOK_ENTRY = "sitecustomize.py"

# Flags of a compiled module (PEP 552). A flag says what the next 8 bytes mean, and whether Python compares these bytes.
_BY_TIME, _UNCHECKED_HASH, _CHECKED_HASH = 0, 1, 3


def package_folder() -> Path:
    """Return the folder of this package's modules."""
    return Path(steps.__file__).parents[1]


def node_modules() -> list[str]:
    """Return the paths of all modules of the node code, relative to the package."""
    package = package_folder()
    found = [name for name in os.listdir(package) if name.endswith(".py") and name != "__main__.py"]
    for room in NODE_ROOMS:
        for folder, folders, names in os.walk(package / room):
            folders[:] = [name for name in folders if name != code_listing.BYTECODE]
            inside = os.path.relpath(folder, package)
            found += [f"{inside}/{name}" for name in names if name.endswith(".py")]
    return sorted(found)


def copy_node_code(run: RunFolder, *, as_files: bool = False) -> None:
    """Write the code that the nodes run, and the code that the ranks can import, into a run folder.

    The modules that the steps on the nodes import are in one archive, because a parallel file system writes one file
    much faster than hundreds of files.

    Args:
        as_files: write these modules as separate files. This is for a folder that any Python version may run. Python
            can store the compiled code of files, but not the compiled code of modules in an archive.

    Raises:
        FileUnusable: a file cannot be read or written.
    """
    package, modules = package_folder(), node_modules()
    files = modules if as_files else [name for name in modules if name.startswith(f"{FILES_ROOM}/")]
    hook = [f"{_HOOK_ROOM}/{Path(name).name}" for name in start_hook_files() if name != _HOOK_ENTRY]
    try:
        _copy(package / "steps/step.py", run.step)
        for name in ("modules.sh", "setup.sh"):
            _copy(package / "steps" / name, run.code / name)
        for name in files:
            _copy(package / name, run.code / "hpcenv" / name)
        for name in (*RANK_MODULES, *hook):
            _copy(package / name, run.inside / "hpcenv" / name)
        _copy(package / _RANK_EXECUTOR, run.inside / "hpcenv" / "api" / "executor.py")
        copy_start_hook(run.start_hook)
        if not as_files:
            _write_archive(run, packed(package, modules))
    except OSError as error:
        what, path = f"cannot copy the code of the nodes to `{run.code}`", error.filename
        hint = filesystem.refused(Path(path), error).hint
        raise FileUnusable(what, why=f"{error.strerror}: {path}", hint=hint) from error


def copy_start_hook(folder: Path) -> None:
    """Write the start hook into its folder.

    Raises:
        OSError: a file cannot be read or written.
    """
    for name, source in start_hook_files().items():
        _copy(Path(source), folder / name)


def _copy(source: Path, target: Path) -> None:
    _write(target, source.read_bytes())


def _write(path: Path, content: bytes) -> None:
    """Write a file and make its folder. The file gets default permissions, even if hpcenv's own files are read-only.

    Raises:
        OSError: the file cannot be written; `filename` of the error is its path.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        # The error of a failed write (full disk, quota) does not name the file.
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from error


def _write_archive(run: RunFolder, content: bytes) -> None:
    """Write the archive of a run: a hard link to a shared archive with the same content; if the link fails, a copy.

    The shared file is not used if it has another owner, or if its content is different (after a crash or an edit).

    Raises:
        OSError: the archive cannot be written; `filename` of the error is its path.
    """
    shared = run.shared_archive(hashlib.sha256(content).hexdigest())
    with contextlib.suppress(OSError):
        os.link(shared, run.archive)
        if os.lstat(run.archive).st_uid == os.geteuid() and read_file(run.archive, follow=False) == content:
            return
    run.archive.unlink(missing_ok=True)  # writing into a hard link would change the archives of other runs
    _write(run.archive, content)


def share_archive(run: RunFolder) -> None:
    """Share the archive of a submitted run, so that later runs can link to it. If the link fails, do nothing."""
    with contextlib.suppress(OSError):
        shared = run.shared_archive(sha256_at(run.archive))
        if not (shared.exists() and shared.samefile(run.archive)):
            shared.parent.mkdir(exist_ok=True)
            shared.unlink(missing_ok=True)
            os.link(run.archive, shared)


def packed(package: Path, modules: Sequence[str]) -> bytes:
    """Return a zip archive of modules and their compiled code, so that the nodes do not compile the modules.

    Equal modules give an archive with equal bytes, because the names are sorted, and all files have the earliest time
    of the zip format. The files are not compressed, so Python reads them without zlib.

    Args:
        package: the folder of the package.
        modules: paths relative to `package`.

    Raises:
        OSError: a module cannot be read.
    """
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(modules):
            source = (package / name).read_bytes()
            archive.writestr(_member(name), source)
            compiled = _compiled(package / name, source)
            if compiled is not None:
                archive.writestr(_member(f"{name}c"), compiled)
    return content.getvalue()


def _member(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"hpcenv/{name}")  # the default time is 1980-01-01


def _compiled(module: Path, source: bytes) -> bytes | None:
    """Return the compiled code of a module; None if it is missing, or was compiled from another source text.

    In an archive, Python compares the time of the source with the time in the compiled code. The comparison has a
    precision of 2 s, and depends on the time zone of the node (zipimport, Python 3.13). To avoid this comparison on the
    node, this function compares the times, and writes a hash that Python does not check into the header of the compiled
    code.
    """
    try:
        compiled = Path(cache_from_source(str(module))).read_bytes()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None  # the nodes compile the module
    status = module.stat()
    flags, stamp = int.from_bytes(compiled[4:8], "little"), compiled[8:16]
    by_hash = source_hash(source)
    by_time = b"".join((int(value) & 0xFFFFFFFF).to_bytes(4, "little") for value in (status.st_mtime, status.st_size))
    fresh = stamp == by_time if flags == _BY_TIME else flags in (_UNCHECKED_HASH, _CHECKED_HASH) and stamp == by_hash
    if compiled[:4] != MAGIC_NUMBER or not fresh:
        return None
    return MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little") + by_hash + compiled[16:]


def start_hook_files() -> dict[str, str]:
    """Return the files of the start hook: path in its folder -> path in this package."""
    folder = package_folder() / _HOOK_ROOM
    names = sorted(name for name in os.listdir(folder) if name.endswith(".py"))
    return {name if name == _HOOK_ENTRY else f"{_HOOK_PACKAGE}/{name}": str(folder / name) for name in names}


def start_hook_digest() -> str:
    """Return the digest over the files of the start hook, computed with `records.code_listing`.

    Raises:
        OSError: a file cannot be read.
    """
    return code_listing.digest_of({name: code_listing.content_of(path) for name, path in start_hook_files().items()})
