"""Unpack a bundle into a folder, or use the folder of an earlier call. Runs on: LOGIN NODE.

Users call `hpcenv reproduce FILE` more than once: with `--rung 0`, with `--rung 2`, and with other options. The second
call uses the folder of the first call if this folder still has exactly the files of the bundle. An additional file is
refused, because it could be read as a record.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from hpcenv.errors import BundleInvalid, Command, FileUnusable, WouldOverwrite
from hpcenv.progress import OnEvent, ignore
from hpcenv.records.code_listing import LINK, content_of, walk
from hpcenv.records.files import read_file
from hpcenv.reproduction.bundle.archive import LONGEST_SUMS, SUMS, Archive, OnStep, counted, parse_sums
from hpcenv.reproduction.bundle.make import ABOUT
from hpcenv.reproduction.proofs import StatementProof
from hpcenv.text import listed

_NAMED = 3


def unpacked(start: Path, target: str, *, on_event: OnEvent = ignore) -> tuple[str, str]:
    """Unpack a bundle below `start`, unless an earlier call did so. Return its folder and a note.

    A target that is not an archive is returned unchanged, with an empty note.

    Raises:
        BundleInvalid: the bundle is not valid, was changed, or would write outside of its folder. Nothing is written.
        FileUnusable: a file in the folder cannot be read.
        WouldOverwrite: the folder exists and does not have the files of this bundle.
    """
    path = Path(os.path.abspath(start / target))
    if not path.is_file() or path.suffix == ".toml":
        return target, ""
    with Archive(path) as archive:
        folder = start / archive.folder
        written = unpack_once(archive, folder, step=counted(on_event, "stage", path.name, archive.size))
    how = f"unpacked {path.name}" if written else f"{path.name} was unpacked before,"
    return str(folder), f"{how} to {folder}"


def unpack_once(archive: Archive, folder: Path, *, step: OnStep) -> bool:
    """Unpack a bundle if the folder does not contain it already. Return whether anything was written.

    Args:
        archive: an open bundle.
        folder: a new folder, or the folder of an earlier call. The files of an existing folder are compared.
        step: called with the number of bytes that were written.

    Raises:
        WouldOverwrite: the folder exists and has different files; nothing is written.
        FileUnusable: the folder cannot be written or read.
        BundleInvalid: the checksum of a file in the bundle is wrong. No unpacked file is kept.
    """
    if not os.path.lexists(folder):
        archive.unpack(folder, step=step)
        return True
    archive.verify(step=step)
    try:
        why = next(_differences(archive, folder), "")
    except OSError as error:
        raise FileUnusable(f"cannot read `{error.filename}`", why=error.strerror) from error
    if why:
        unpack = Command("hpcenv", "bundle", "unpack", str(archive.path), "FOLDER")
        hint = ("remove it, or unpack the bundle elsewhere and name that folder: ", unpack)
        raise WouldOverwrite(f"`{folder}` exists, and is not this bundle", why=why, hint=hint)
    return False


def prove_published(folder: Path, *, compared: bool) -> tuple[StatementProof, ...]:
    """Prove that the files of an unpacked bundle are the published files; return nothing if the folder is no bundle.

    Args:
        compared: whether all files were compared with the archive a moment ago. They are not read a second time.

    Raises:
        BundleInvalid: the sha256 of a file differs from its entry in SHA256SUMS.
        FileUnusable: a file in the folder cannot be read.
    """
    what = "the files are those of the published bundle"
    if not (folder / SUMS).is_file():
        why = f"{SUMS} is not in the folder: nothing was compared"
        return (StatementProof(what=what, result="unknown", why=why),) if (folder / ABOUT).is_file() else ()
    try:
        sums = parse_sums(read_file(folder / SUMS, most=LONGEST_SUMS).decode("utf-8"))
        # A link has no checksum. If the files were compared with the archive, its links were compared, too.
        files = {
            path.removeprefix("./")
            for path, entry in walk(folder, ".")
            if entry.is_file(follow_symlinks=False) or not (compared or entry.is_dir(follow_symlinks=False))
        }
        named = [] if compared else sums.items()
        changed = [name for name, digest in named if not _is_inside(name) or _sum_of(folder / name) != digest]
    except OSError as error:
        raise FileUnusable(f"cannot read `{error.filename or folder}`", why=error.strerror) from error
    except ValueError as error:
        raise BundleInvalid(f"`{folder / SUMS}` is not valid", why=str(error)) from error
    if changed:
        raise BundleInvalid(
            f"`{folder}` is not the bundle that was published",
            why=f"the checksums in {SUMS} are not those of {listed(sorted(changed), _NAMED)}",
            hint="unpack the bundle again; `sha256sum -c SHA256SUMS` lists every file",
        )
    more = sorted(files - sums.keys() - {SUMS})
    if more:
        return (StatementProof(what=what, result="unknown", why=f"{SUMS} does not name {listed(more, _NAMED)}"),)
    return (StatementProof(what=what, result="proved", why=f"{len(sums)} files have the sha256 that {SUMS} has"),)


def _is_inside(name: str) -> bool:
    return not os.path.isabs(name) and ".." not in name.split("/")


def _sum_of(path: Path) -> str:
    """Return the sha256 of a file; empty for a link, a folder and a missing file."""
    content = content_of(str(path))
    return "" if content.startswith(LINK) else content


def _differences(archive: Archive, folder: Path) -> Iterator[str]:
    """Yield how a folder differs from a bundle. Links out of the folder are not followed."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        yield "it is not a folder"
        return
    found = {path.removeprefix("./") for path, entry in walk(folder, ".") if not entry.is_dir(follow_symlinks=False)}
    members = _contents(archive)
    for name in sorted(members.keys() - found):
        yield f"it has no `{name}`"
    for name in sorted(found - members.keys()):
        yield f"`{name}` in it is not in the bundle"
    for name, content in sorted(members.items()):
        if content_of(str(folder / name)) != content:
            yield f"`{name}` in it differs from the file in the bundle"


def _contents(archive: Archive) -> dict[str, str]:
    """Return the content of each member in the form of a listing: the sha256, or the target of a link."""
    sums = hashlib.sha256(archive.read(SUMS, most=LONGEST_SUMS)).hexdigest()
    return {**archive.sums, **{name: LINK + target for name, target in archive.links.items()}, SUMS: sums}
