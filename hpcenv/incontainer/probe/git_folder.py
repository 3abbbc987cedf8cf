"""Make a git folder without the repository's own configuration, so that the repository cannot make git start programs.

Runs on: inside the image; also LOGIN NODE, for the code of a run.

A repository's configuration can name programs in many keys: filters, hooks, transports, difference tools, agents. New
versions of git add further keys. So git gets a new, temporary folder as GIT_COMMON_DIR (gitrepository-layout(5)). The
configuration in this folder has only the keys of KEPT, which say how files are compared, and no hooks. The folder has
links to the data of the repository. The configuration of the user and of the system is used as usual.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Protocol

    class Ask(Protocol):
        """Asks git about a work tree."""

        def __call__(self, *words: str, stdin: bytes) -> bytes:
            """Return what git prints."""


# None of these keys can name a program or another configuration file (git-config(1), git 2.47).
KEPT = frozenset(
    [
        *("core.repositoryformatversion", "core.filemode", "core.symlinks", "core.ignorecase"),
        *("core.precomposeunicode", "core.autocrlf", "core.eol", "core.safecrlf"),
        *("core.excludesfile", "core.attributesfile", "core.sparsecheckout", "core.sparsecheckoutcone"),
        *("extensions.objectformat", "extensions.compatobjectformat", "extensions.refstorage", "index.sparse"),
    ]
)
# The parts of the common folder that git needs. Git LFS is a filter of the user, and keeps its objects in `lfs`.
_LINKED = ("objects", "refs", "packed-refs", "reftable", "info", "shallow", "lfs")
_ALWAYS_LINKED = ("objects", "refs")
CONFIGURATION_BYTES = 1 << 20

# Options of each git command. With `--no-optional-locks`, git writes nothing to the repository. With the
# other options, whatever the configuration says, git reads a file unless all its times, its size and its inode are equal
# to those in the index.
OPTIONS = (
    *("-c", "core.trustctime=true", "-c", "core.checkStat=default"),
    *("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=false"),
    *("-c", "submodule.recurse=false", "--no-optional-locks"),
)
# Prints the configuration that it gets on standard input; includes are not followed.
LISTING = ("config", "--file", "-", "--no-includes", "-z", "--list")

# git sets these variables for a hook. They could name another repository.
_OTHER_REPOSITORY = frozenset(
    [
        *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_NAMESPACE"),
        *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_EXTERNAL_DIFF"),
    ]
)


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for git commands. With it, git does not fetch data and does not ask for a password.

    git 2.44 and newer know GIT_NO_LAZY_FETCH. Older versions start a transport for a missing object, but with
    GIT_ALLOW_PROTOCOL git refuses all transports, for any configuration (git(1)).
    """
    kept = {name: value for name, value in environ.items() if name not in _OTHER_REPOSITORY}
    return {
        **kept,
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }


def find_folders(place: str) -> tuple[str, str]:
    """Return the git folder and the common folder of a work tree; `place` is its `.git`.

    Raises:
        OSError, ValueError: the folders cannot be found, because a file cannot be read.
    """
    folder = place
    if os.path.isfile(place):  # a worktree or submodule: 'gitdir: PATH'
        folder = _followed(os.path.dirname(place), _read(place).partition(b"gitdir:")[2])
    pointer = os.path.join(folder, "commondir")
    return folder, _followed(folder, _read(pointer)) if os.path.isfile(pointer) else folder


def _followed(base: str, pointer: bytes) -> str:
    return os.path.normpath(os.path.join(base, os.fsdecode(pointer).strip()))


def _read(path: str) -> bytes:
    import stat

    # O_NONBLOCK: opening a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is not a regular file")
        content = file.read(CONFIGURATION_BYTES + 1)
    if len(content) > CONFIGURATION_BYTES:
        raise ValueError(f"{path} is larger than {CONFIGURATION_BYTES} bytes")
    return content


def read_configuration(common: str) -> bytes:
    """Return the repository's own configuration, as text for LISTING; empty if it does not exist.

    Raises:
        OSError, ValueError: the configuration cannot be read.
    """
    try:
        return _read(os.path.join(common, "config"))
    except FileNotFoundError:
        return b""


def filters(listing: bytes) -> frozenset[str]:
    """Return the names of the filters for which the repository's own configuration sets a program."""
    names = set()
    for entry in listing.split(b"\0"):
        key = os.fsdecode(entry.partition(b"\n")[0])
        section, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        if section == "filter" and last in ("clean", "smudge", "process"):
            names.add(name)
    return frozenset(names)


def make(folder: str, common: str, listing: bytes) -> None:
    """Fill an empty folder, which becomes GIT_COMMON_DIR.

    Args:
        common: the repository's own common folder.
        listing: what LISTING printed.

    Raises:
        OSError: the folder cannot be filled.
    """
    lines = []
    for entry in listing.split(b"\0"):
        key, _, value = entry.partition(b"\n")
        section, _, name = key.decode("ascii", "replace").partition(".")
        if f"{section}.{name}" in KEPT:
            escaped = value.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n").replace(b"\t", b"\\t")
            lines.append(b'[%s]\n%s = "%s"\n' % (section.encode(), name.encode(), escaped))
    with open(os.path.join(folder, "config"), "wb") as file:
        file.write(b"".join(lines))
    for name in _LINKED:
        target = os.path.join(common, name)
        if name in _ALWAYS_LINKED or os.path.lexists(target):
            os.symlink(target, os.path.join(folder, name))


def placed(environ: Mapping[str, str], git: str, folder: str, tree: str) -> dict[str, str]:
    """Return the environment in which git reads a work tree through the folder that `make` has filled.

    Args:
        environ: from `variables`.
        git: the repository's git folder.
        folder: the folder that `make` has filled.
        tree: the work tree.
    """
    return {**environ, "GIT_DIR": git, "GIT_COMMON_DIR": folder, "GIT_WORK_TREE": tree}


def filtered(ask: Ask, paths: Iterable[str]) -> dict[str, str]:
    """Return path -> name of the filter, for each file that git compares through a filter (gitattributes(5))."""
    names = b"".join(os.fsencode(path) + b"\0" for path in paths)
    words = [os.fsdecode(word) for word in ask("check-attr", "-z", "--stdin", "filter", stdin=names).split(b"\0")]
    pairs = zip(words[::3], words[2::3])
    return {path: name for path, name in pairs if name not in ("unspecified", "unset", "set")}


_SHA1_DIGITS = 40
_SECONDS_OF_A_WRITE = 1.0


def unseen(ask: Ask, tree: str, blobs: Mapping[str, str]) -> list[str]:
    """Return the files that differ from the index although size and time are equal, because a person set the time.

    Args:
        blobs: path -> the id of its blob in the index.
    """
    odd = [path for path, blob in blobs.items() if "\n" not in path and is_other(tree, path, blob, odd=True)]
    through = filtered(ask, odd) if odd else {}
    plain = [path for path in odd if path not in through]
    names = b"".join(os.fsencode(path) + b"\n" for path in plain)
    # git converts line ends and encodings before it hashes these files.
    ids = ask("hash-object", "--stdin-paths", stdin=names).decode().split() if plain else []
    return [path for path, found in zip(plain, ids) if found != blobs[path]]


def is_other(tree: str, path: str, blob: str, *, odd: bool = False) -> bool:
    """Return whether the bytes of a file differ from a blob.

    Args:
        odd: read only files whose time was set by hand. git notices changes of all other files by their time.
    """
    import hashlib
    import stat

    digest = hashlib.sha1() if len(blob) == _SHA1_DIGITS else hashlib.sha256()  # noqa: S324 - it is git's
    place = os.path.join(tree, path)
    try:
        status = os.lstat(place)
        if not stat.S_ISREG(status.st_mode) or (odd and abs(status.st_ctime - status.st_mtime) < _SECONDS_OF_A_WRITE):
            return False
        digest.update(b"blob %d\0" % status.st_size)
        with open(place, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
    except OSError:
        return False
    return digest.hexdigest() != blob
