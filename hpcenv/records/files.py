"""Read and write the files of a run folder safely.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcenv.errors import RecordInvalid
from hpcenv.records.codec import Record, decode_record, encode_record

# Limit for documents that a person or a tool wrote: the largest known lockfile of another tool has 5 MiB.
LONGEST = 64 << 20
# Limit for records: a verdict lists every difference of every node, and a rank may record each step of a long training.
LONGEST_RECORD = 512 << 20
# Size of one read from a file that is hashed.
_PIECE = 1 << 20


def open_regular(path: Path, *, follow: bool = False) -> int:
    """Open a regular file for reading and return its descriptor. Use this for files that another user may have written.

    A plain open of a named pipe could wait without end, and a device could give bytes until the memory is full.

    Args:
        follow: whether `path` may be a symbolic link. A file of a run must not be a link. The run folder may belong to
            another user, and a link in it could lead to a private file of the reader. A report would then show this
            file.

    Raises:
        OSError: the file cannot be opened, or is not a regular file; `strerror` has the reason.
    """
    # Without O_NONBLOCK, opening a pipe would wait.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow and os.path.islink(path):
            why = "it is a symbolic link, and files of a run are not read through links"
            raise OSError(errno.ELOOP, why, os.fspath(path)) from error
        raise
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "it is not a regular file, but a pipe or a device", os.fspath(path))


def read_file(path: Path, *, most: int = LONGEST, follow: bool = True) -> bytes:
    """Return the content of a regular file.

    Args:
        follow: as for `open_regular`.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than `most` bytes; `strerror` has the
            reason.
    """
    with open(open_regular(path, follow=follow), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # A file that grows, or that does not report its size, is read up to the same limit.
        content = file.read(min(size, most) + 1)
        if len(content) > size:
            content += file.read(most + 1 - len(content))
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", os.fspath(path))
    return content


def sha256_of(descriptor: int) -> str:
    """Return the sha256 of an open file, in hexadecimal. The file is read in pieces to its end, then closed.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with open(descriptor, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def sha256_at(path: str | bytes | Path) -> str:
    """Return the sha256 of the file at a path, in hexadecimal.

    Raises:
        OSError: the file cannot be read.
    """
    # Without O_NONBLOCK, opening a pipe at this path would wait.
    return sha256_of(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file of a run, with their line ends.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than `LONGEST_RECORD` bytes.
    """
    with open(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > LONGEST_RECORD:
            raise OSError(errno.EFBIG, f"it has more than {LONGEST_RECORD >> 20} MiB", os.fspath(path))
        yield from file


def read_end(path: Path, *, most: int) -> bytes:
    """Return the last bytes of a file of a run, at most `most`.

    Raises:
        OSError: as for `read_file`.
    """
    with open(open_regular(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most)


def read_json(path: Path, *, most: int = LONGEST) -> Any:
    """Return the data of a small file of a run.

    Raises:
        OSError: as for `read_file`.
        ValueError: the content is not JSON.
    """
    try:
        return json.loads(read_file(path, most=most, follow=False))
    except RecursionError as error:
        raise ValueError("it has too many levels") from error


def load_record(kind: type[Record], path: Path) -> Record:
    """Return the record of type `kind` in the file `path`.

    Raises:
        RecordInvalid: the file cannot be read, or does not contain such a record.
    """
    try:
        text = read_file(path, most=LONGEST_RECORD, follow=False).decode("utf-8")
    except OSError as error:
        raise RecordInvalid(f"cannot read `{path}`", why=error.strerror) from error
    except UnicodeDecodeError as error:
        raise RecordInvalid(f"`{path}` is not UTF-8 text", why=str(error)) from error
    return decode_record(kind, text, origin=str(path))


def save_record(record: object, path: Path, *, durable: bool = True) -> None:
    """Write `record` to a temporary file and rename this file to `path`, so that readers never see half a record.

    Args:
        durable: as for `write_bytes`.

    Raises:
        OSError: the record could not be written; an earlier file is unchanged.
    """
    write_text(encode_record(record), path, durable=durable)


def write_text(
    text: str, path: Path, *, mode: int | None = None, durable: bool = True, aside: Path | None = None
) -> None:
    """Write `text` to `path`, in UTF-8. For the rest, see `write_bytes`."""
    write_bytes(text.encode(), path, mode=mode, durable=durable, aside=aside)


def write_bytes(
    content: bytes, path: Path, *, mode: int | None = None, durable: bool = True, aside: Path | None = None
) -> None:
    """Write `content` to `path` through a temporary file in the same folder and a rename.

    The temporary name contains host name and process id, because two nodes may write into one folder.

    Args:
        durable: whether to wait until the file is on the disk, which takes some milliseconds. A file that is useless
            after a crash of this machine need not be `durable`. Other nodes see the file in any case, because NFS sends
            a file when it is closed, and Lustre and GPFS send a file when another node reads it.
        aside: path of the temporary file. The temporary file must be on the same file system as `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if aside is None:
        aside = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if mode is not None:
            os.chmod(aside, mode)
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        # The error of a write or fsync (full disk, quota) does not name the file.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk (fsync).

    Some file systems refuse fsync for folders. This function ignores that error.

    Raises:
        OSError: the file cannot be written to the disk; `filename` names the file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError) if os.path.isdir(path) else contextlib.nullcontext():
            os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        os.close(descriptor)
