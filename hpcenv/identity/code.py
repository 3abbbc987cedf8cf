"""Check whether the run's copy of the code, as this node sees it, is unchanged since the submission.

Runs on: COMPUTE NODE. Standard library only.

In the first attempt, the copy must be as it was made, and must contain no further file. In a later attempt, the copy
must be as it was at the end of the previous attempt, because the script itself may write into the copy. It is unknown
whether the script or a person changed a module during the previous attempt, so changes are reported (`left_changed`).
If the previous attempt could not record the state of the copy (a node failed), only files that Python can import are
compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from hpcenv import text
from hpcenv.errors import RecordInvalid
from hpcenv.records import code_listing
from hpcenv.records.code_listing import BYTECODE, CopyAfterAttempt, Listing, is_importable
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Source
from hpcenv.records.run_folder import RunFolder

_SHOWN = 3

# The files that are compared. `all`: all files. `new-modules`: submitted files, and new files that Python can import,
# because lines of `setup` may write other files. `own-modules`: only the modules that were submitted, because ranks may
# have begun to write files.
Extent = Literal["all", "new-modules", "own-modules"]


def find_digest(source: Source, run: RunFolder, extent: Extent = "all") -> str:
    """Return the digest of the copy if it is unchanged; otherwise the differences, in words.

    Raises:
        RecordInvalid, OSError: the listing or a file cannot be read.
    """
    listed = load_record(Listing, run.listing)
    if code_listing.digest_of(listed.files) != source.digest:
        return "another source.json"
    after = _read_after(run)
    first = not os.path.lexists(run.attempts)
    all_files = (first or after is not None) and extent != "own-modules"
    problems = [
        *_in_words("changed", _changed(listed, after, run, strict=all_files)),
        *_in_words("link changed", _relinked(listed, run) if first else ()),
        *_in_words("added", _added(listed, after, run, first=first) if all_files else ()),
        *_in_words("added", _new_files(listed, source, run) if first and extent == "all" else ()),
    ]
    return "; ".join(problems) or source.digest


def left_changed(run: RunFolder) -> tuple[str, ...]:
    """Return the modules that differ from the submission, and were already different at the end of the last attempt.

    A new module counts only in a folder with submitted modules, because a script may write any files into folders that
    it makes.

    Raises:
        RecordInvalid: a record of the copy cannot be read.
    """
    after = _read_after(run)
    if after is None:
        return ()
    listed = load_record(Listing, run.listing).files
    folders = {os.path.dirname(path) for path in listed if is_importable(path)}
    changed = (path for path in after.changed if is_importable(path))
    found = (path for path in changed if path in listed or os.path.dirname(path) in folders)
    return tuple(path.partition("/")[2] for path in sorted(found))


def find_hook_digest(run: RunFolder) -> str:
    """Return the digest over the files of the start hook, without the compiled files that Python made.

    Raises:
        OSError: a file cannot be read.
    """
    found = (
        path.partition("/")[2] for path, entry in code_listing.walk(run.path, run.start_hook.name) if not entry.is_dir()
    )
    files = [path for path in found if BYTECODE not in path.split("/")]
    return code_listing.digest_of({path: code_listing.content_of(str(run.start_hook / path)) for path in files})


def _read_after(run: RunFolder) -> CopyAfterAttempt | None:
    return load_record(CopyAfterAttempt, run.listing_after) if os.path.lexists(run.listing_after) else None


def _changed(listed: Listing, after: CopyAfterAttempt | None, run: RunFolder, *, strict: bool) -> Iterator[str]:
    left = {} if after is None else after.changed
    for path, content in listed.files.items():
        if not strict and not is_importable(path):
            continue
        if code_listing.content_of(os.path.join(run.path, path)) != left.get(path, content):
            yield path


def _relinked(listed: Listing, run: RunFolder) -> Iterator[str]:
    for path, target in listed.live.items():
        place = os.path.join(run.path, path)
        if not os.path.islink(place) or os.readlink(place) != target:
            yield path


def _added(listed: Listing, after: CopyAfterAttempt | None, run: RunFolder, *, first: bool) -> Iterator[str]:
    left = {} if after is None else after.changed
    for path in importable_extras(listed, run, with_bytecode=first):
        if left.get(path) != code_listing.content_of(os.path.join(run.path, path)):
            yield path


def _new_files(listed: Listing, source: Source, run: RunFolder) -> Iterator[str]:
    """Yield new files that Python cannot import. Before the first attempt, no rank can have made such files."""
    for path, entry in extras(listed, run):
        # If a person added files to a shared copy, these files are links in the copy of each run (make_own_copy).
        theirs = source.shared and entry.is_symlink()
        # An NFS client gives such a name to a file that was removed while a program had it open.
        silly = entry.name.startswith(".nfs")
        if not (is_importable(path) or entry.is_dir(follow_symlinks=False) or theirs or silly):
            yield path


def importable_extras(listed: Listing, run: RunFolder, *, with_bytecode: bool) -> Iterator[str]:
    """Yield the files of the copy that Python can import and that are not in its listing.

    Args:
        with_bytecode: whether to yield also the files in `__pycache__`. Python writes these files itself as soon as a
            rank has run.

    Raises:
        OSError: a folder cannot be read.
    """
    for path, entry in extras(listed, run):
        in_bytecode = BYTECODE in path.split("/")
        if is_importable(path) and (with_bytecode or not in_bytecode) and not entry.is_dir(follow_symlinks=False):
            yield path


def extras(listed: Listing, run: RunFolder) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the entries of the copy that are not in its listing, by path in the run folder.

    Raises:
        OSError: a folder cannot be read.
    """
    for part in run.parts_of_copy():
        for path, entry in code_listing.walk(run.path, part):
            if path not in listed.files and path not in listed.live:
                yield path, entry


def note_after(run: RunFolder, *, schema: int, started: float) -> CopyAfterAttempt | None:
    """Return how the copy differs from its listing now, at the end of an attempt; None if the copy cannot be read.

    Args:
        started: when the attempt began; files that did not change since then are not read again.
    """
    try:
        listed = load_record(Listing, run.listing)
        before = _read_after(run)
        changed = {} if before is None else dict(before.changed)
        for path, content in listed.files.items():
            place = os.path.join(run.path, path)
            if _untouched_since(place, started - _SECONDS_BETWEEN_CLOCKS):
                continue
            now = code_listing.content_of(place)
            changed.pop(path, None)
            if now != content:
                changed[path] = now
        for path in importable_extras(listed, run, with_bytecode=False):
            changed[path] = code_listing.content_of(os.path.join(run.path, path))
    except (OSError, RecordInvalid):
        return None
    return CopyAfterAttempt(schema=schema, started=started, changed=changed)


# The clock of a file server may differ from the clock of a node.
_SECONDS_BETWEEN_CLOCKS = 300.0


def _untouched_since(place: str, moment: float) -> bool:
    try:
        return os.lstat(place).st_ctime < moment
    except OSError:
        return False


def _in_words(word: str, paths: Iterator[str] | tuple[str, ...]) -> list[str]:
    """Return one phrase for some paths, without the folder `source` in front of each."""
    found = [path.partition("/")[2] for path in paths]
    if not found:
        return []
    return [f"{word}: {text.listed(found, _SHOWN)}"]


# -- a copy of the copy -------------------------------------------------------------------


def make_own_copy(source: Source, run: RunFolder) -> None:
    """Give this run its own copy if several runs were submitted with one copy (a sweep, an exported folder).

    Files that a person added to the shared copy later, for example data in an exported folder, appear as links.

    Raises:
        OSError, RecordInvalid: the shared copy cannot be copied.
    """
    if not source.shared:
        return
    shared = RunFolder(Path(source.shared))
    listed = load_record(Listing, shared.listing)
    for part in shared.parts_of_copy():
        target = run.path / part
        if os.path.lexists(target):
            continue
        aside = f".{part}.{os.getpid()}.tmp"
        os.mkdir(run.path / aside)
        for path, entry in code_listing.walk(shared.path, part):
            _copy(path, entry, run.path / aside / path.partition("/")[2], listed)
        os.rename(run.path / aside, target)
    save_record(listed, run.listing)


def _copy(path: str, entry: os.DirEntry[str], target: Path, listed: Listing) -> None:
    import shutil  # imported only here, because every step of a job loads this module

    if BYTECODE in path.split("/"):
        return
    if entry.is_symlink():
        os.symlink(os.readlink(entry.path), target)
    elif entry.is_dir(follow_symlinks=False):
        os.mkdir(target)
    elif path in listed.files:
        shutil.copy(entry.path, target)
    else:
        os.symlink(entry.path, target)
