"""Pack a data folder into one file on the login node, unpack it on every node, and check its hash.

Runs on: LOGIN NODE (`find`, `pack`) and COMPUTE NODE. Standard library only.

A network and a parallel file system transfer one large file many times faster than a thousand small files, and one hash
covers the whole file. Folders, plain files and symbolic links are packed in the order of their names and without
owners, so that the same content gives the same file. Unpacked files belong to the user and are read-only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from hpcenv.errors import FileUnusable, ImageMismatch
from hpcenv.identity import sif_check
from hpcenv.records.files import write_text
from hpcenv.records.manifest import DataFolder

# Listing a folder takes about 5 us per name on a local disk, and 100 us on a parallel file system.
# Data with more names should be in an archive format.
_MAX_NAMES = 2_000_000
_CHUNK = 4 * 1024 * 1024
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\..+")
_SECONDS_ABANDONED = 86400.0
_HINT = "move them to another folder, or use the shared folder: leave --stage-data out"


@dataclass(frozen=True, kw_only=True)
class _Name:
    """One name below a folder, with its `lstat` result."""

    relative: str
    path: str
    status: os.stat_result


def _names(folder: str, below: str = "") -> Iterator[_Name]:
    """Yield all names below `folder`, sorted by name, each folder before its content."""
    with os.scandir(os.path.join(folder, below)) as scanned:
        entries = sorted(scanned, key=lambda entry: os.fsencode(entry.name))
    for entry in entries:
        relative = f"{below}/{entry.name}" if below else entry.name
        yield _Name(relative=relative, path=entry.path, status=entry.stat(follow_symlinks=False))
        if entry.is_dir(follow_symlinks=False):
            yield from _names(folder, relative)


def _listing(folder: str) -> tuple[str, int]:
    """Return a digest over all names with sizes, times and inodes, and the total bytes of the files.

    Each change or replacement of a file changes its `ctime`, and so the digest.

    Raises:
        FileUnusable: the folder cannot be read, or contains a file that cannot be packed.
    """
    digest, size, count = hashlib.sha256(), 0, 0
    try:
        for name in _names(folder):
            status, count = name.status, count + 1
            kind = stat.S_IFMT(status.st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                raise FileUnusable(f"`{name.path}` is not a file, folder or symbolic link", hint=_HINT)
            if count > _MAX_NAMES:
                raise FileUnusable(f"`{folder}` contains more than {_MAX_NAMES} names", hint=_HINT)
            if kind == stat.S_IFREG:
                size += status.st_size
            state = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            # Size and times of a folder depend on the file system, so only its mode counts.
            recorded = state if kind != stat.S_IFDIR else (status.st_mode,)
            digest.update(os.fsencode(name.relative) + b"\0" + repr(recorded).encode() + b"\0")
    except OSError as error:
        raise FileUnusable(f"cannot read `{folder}`", why=str(error)) from error
    return digest.hexdigest(), size


# -- packing: login node ------------------------------------------------------------------


def find(source: str, store: Path) -> DataFolder:
    """Return the record of a data folder for the manifest, with the packed file if this file already exists.

    Args:
        source: absolute path of the data folder.
        store: folder with the packed files.

    Raises:
        FileUnusable: the folder cannot be read, or contains a file that cannot be packed.
    """
    listing, unpacked = _listing(source)
    plain = DataFolder(source=source, listing_sha256=listing, unpacked=unpacked)
    try:
        known = json.loads((store / f"{listing}.json").read_text(encoding="ascii"))
        tar = store / f"sha256-{known['sha256']}.tar"
        if tar.stat().st_size == known["size"]:
            return replace(plain, tar=str(tar), sha256=str(known["sha256"]), size=int(known["size"]))
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return plain


def pack(folder: DataFolder, store: Path) -> DataFolder:
    """Pack a folder into one file in `store`, if this file does not exist; return the record with path and hash.

    Args:
        folder: record from `find`.
        store: folder with the packed files.

    Raises:
        FileUnusable: a file cannot be read or written, or the folder changed while it was packed.
    """
    if folder.tar:
        return folder
    aside = store / f".{folder.listing_sha256}.{secrets.token_hex(8)}"
    try:
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(store)
        with open(aside, "xb") as out:
            writer = _Hashing(out)
            _write_tar(folder.source, writer)
            out.flush()
            os.fsync(out.fileno())
        if _listing(folder.source)[0] != folder.listing_sha256:
            raise FileUnusable(
                f"`{folder.source}` changed while it was packed", hint="submit again when it is complete"
            )
        sha256 = writer.digest.hexdigest()
        tar = store / f"sha256-{sha256}.tar"
        aside.chmod(0o400)
        os.replace(aside, tar)
    except OSError as error:
        raise FileUnusable(f"cannot pack `{folder.source}` into `{store}`", why=str(error)) from error
    finally:
        aside.unlink(missing_ok=True)
    known = json.dumps({"sha256": sha256, "size": writer.size, "source": ascii(folder.source)})
    write_text(known + "\n", store / f"{folder.listing_sha256}.json")
    return replace(folder, tar=str(tar), sha256=sha256, size=writer.size)


def _remove_abandoned(store: Path) -> None:
    """Remove the unfinished files of killed processes: hidden files that were not written to for a day."""
    for entry in list(os.scandir(store)):
        with suppress(OSError):
            idle = time.time() - entry.stat(follow_symlinks=False).st_mtime
            if _UNFINISHED.fullmatch(entry.name) and idle > _SECONDS_ABANDONED:
                os.unlink(entry.path)


class _Hashing:
    """A file that hashes all data that are written to it or read from it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        self.size += len(data)
        return data


def _write_tar(source: str, writer: _Hashing) -> None:
    with tarfile.open(fileobj=writer, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK) as tar:  # type: ignore[call-overload]
        for name in _names(source):
            member = tarfile.TarInfo(name.relative)
            member.mtime = int(name.status.st_mtime)
            member.mode = 0o555 if name.status.st_mode & 0o111 else 0o444
            if stat.S_ISDIR(name.status.st_mode):
                member.type = tarfile.DIRTYPE
                tar.addfile(member)
            elif stat.S_ISLNK(name.status.st_mode):
                member.type, member.linkname = tarfile.SYMTYPE, os.readlink(name.path)
                tar.addfile(member)
            else:
                member.size = name.status.st_size
                # If the file shrinks now, this is an error. If the file grows, the listing changes.
                with open(name.path, "rb") as file:
                    tar.addfile(member, file)


# -- unpacking: compute node --------------------------------------------------------------


def unpack(tar: Path, target: Path) -> str:
    """Unpack `tar` into the new folder `target`; return the sha256 of the packed file.

    The caller compares the hash, and removes the folder if it is wrong.

    Raises:
        ImageMismatch: `tar` is not a file that `pack` wrote.
        OSError: no free space, or `tar` cannot be read.
    """
    remove(target)
    target.mkdir(mode=0o700)
    with open(tar, "rb") as file:
        reader = _Hashing(file)
        folders = {"": None}
        try:
            with tarfile.open(fileobj=reader, mode="r|", bufsize=_CHUNK) as packed:  # type: ignore[call-overload]
                for member in packed:
                    _unpack_one(packed, member, target, folders)
        except (tarfile.TarError, ValueError, EOFError) as error:
            raise ImageMismatch(f"`{tar}` is damaged", why=str(error)) from error
        while reader.read(_CHUNK):
            pass
    for name in reversed(folders):
        (target / name).chmod(0o500)
    return reader.digest.hexdigest()


def _unpack_one(packed: tarfile.TarFile, member: tarfile.TarInfo, target: Path, folders: dict[str, None]) -> None:
    parent, _, last = member.name.rpartition("/")
    # The hash is not known yet, so the content is not trusted. Each name must be below a folder that this function
    # made.
    if not last or last in (".", "..") or parent not in folders or member.name.startswith("/"):
        raise ValueError(f"unexpected name {member.name!r}")
    path = target / member.name
    if member.type == tarfile.DIRTYPE:
        path.mkdir(mode=0o700)
        folders[member.name] = None
    elif member.type == tarfile.SYMTYPE:
        os.symlink(member.linkname, path)
    elif member.type == tarfile.REGTYPE:
        content = packed.extractfile(member)
        assert content is not None
        with open(path, "xb") as out:
            shutil.copyfileobj(content, out, _CHUNK)
        os.utime(path, (member.mtime, member.mtime))
        path.chmod(0o500 if member.mode & 0o111 else 0o400)
    else:
        raise ValueError(f"unexpected kind {member.type!r} of {member.name!r}")


def note_listing(folder: Path, record: Path) -> None:
    """Record the state of a folder whose hash was just checked."""
    listing, size = _listing(str(folder))
    write_text(json.dumps({"listing": listing, "size": size, "boot": sif_check.boot_id()}) + "\n", record, mode=0o600)


def is_unchanged(folder: Path, record: Path) -> bool:
    """Return whether a folder still has the recorded state.

    The result is False after a reboot, because a reboot may lose data.
    """
    try:
        known = json.loads(record.read_text(encoding="ascii"))
        return (
            known["boot"] is not None
            and known["boot"] == sif_check.boot_id()
            and known["listing"] == _listing(str(folder))[0]
        )
    except (OSError, FileUnusable, ValueError, TypeError, KeyError):
        return False


def remove(folder: Path) -> None:
    """Remove a read-only folder."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
        return
    with suppress(OSError):
        folder.chmod(0o700)
    for top, names, _files in os.walk(folder):
        for name in names:
            path = Path(top, name)
            if not path.is_symlink():
                with suppress(OSError):
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
