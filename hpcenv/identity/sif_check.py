"""Check whether an open file is the locked SIF, where possible without reading all of it.

Runs on: COMPUTE NODE, and on the login node when a run is planned. Standard library only.

The whole file is hashed once, at submission, and the manifest contains its identity: inode, size, times of the last
change of content and of status, and a digest of header, table and superblock. A node that opens a file with the same
identity reads the same bytes. The reason is that users cannot set `ctime`, so every change to a file and every
replacement changes `ctime`. This is true only if the kernel answers with the values of the storage, and if the clock
has ticked since the last change:

- The kind of file system must keep `ctime` and inode numbers itself and report equal values to every client. NFS asks
  the server again when a file is opened (close-to-open consistency, nfs(5)), but not if the file system is mounted with
  `nocto`. Files on some file systems have no identity. AFS copies `mtime` to `ctime`. User-space file systems (FUSE),
  CIFS and 9p may cache attributes or invent inode numbers.
- A file that changes twice within one tick of the storage's clock has the same times after both changes
  (known from git as "racily clean"). Lustre and ext3 tick once a second. A file that changed
  in the last seconds before it was hashed has no identity yet.

If there is a doubt, the full hash decides. The levels `full` and `deep` never use `identity`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import HpcenvError, ImageMismatch
from hpcenv.identity import sif
from hpcenv.records.checked_sif import CheckedSif, FileIdentity, SifEvidence
from hpcenv.records.manifest import SifIdentity

# Kinds of file systems where one server or one kernel sets `ctime` and the inode numbers. For local file systems, this
# is the kernel of the machine. On a different machine the numbers differ, and the full hash decides.
_OF_ONE_MACHINE = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "overlay"})
_SHARED = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs"})

# Twice the coarsest tick that is in use (FAT: 2 s; ext3 and Lustre: 1 s), plus some time, because the clocks of client
# and server may differ.
_SECONDS_TO_SETTLE = 5.0

# Size of an object table with the greatest number of descriptors that identity/sif.py accepts.
_LONGEST_TABLE = 4096 * 585
_SUPERBLOCK = 96
_MAGIC = b"hsqs"


@dataclass(frozen=True, kw_only=True)
class FileMount:
    """The mount of an open file, from /proc/self/mountinfo."""

    kind: str
    options: tuple[str, ...]


def mount_of(descriptor: int) -> FileMount | None:
    """Return the mount of an open file. The mount is found by its number, so that no path is looked up again."""
    try:
        info = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii", errors="replace")
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    number = re.search(r"^mnt_id:\s*(\d+)$", info, re.MULTILINE)
    for line in table.splitlines() if number else ():
        fields, _, tail = line.partition(" - ")
        if fields.split()[0] == number.group(1):  # type: ignore[union-attr]
            kind, _source, *more = tail.split()
            return FileMount(kind=kind, options=tuple(",".join([fields.split()[5], *more]).split(",")))
    return None


def doubt_about(mount: FileMount | None) -> str:
    """Return why `stat` may not show a change on this mount; empty if `stat` shows every change. Pure."""
    if mount is None:
        return "its file system is not in /proc/self/mountinfo"
    if mount.kind not in _OF_ONE_MACHINE | _SHARED:
        return f"a {mount.kind} file system may not show every change"
    if "nocto" in mount.options:
        return "it is mounted with nocto, so that attributes may be old"
    return ""


def is_node_local(mount: FileMount | None) -> bool:
    """Whether the mount is a file system of this machine."""
    return mount is not None and mount.kind in _OF_ONE_MACHINE


def identity_of(descriptor: int) -> FileIdentity:
    """Return the values that show whether an open file is the file that was hashed."""
    status = os.fstat(descriptor)
    return FileIdentity(
        device=status.st_dev,
        inode=status.st_ino,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
    )


def known_as(file: FileIdentity, sha256: str, header: tuple[str, int, int]) -> SifIdentity:
    """Return the identity of a SIF whose whole hash is known. Pure.

    Args:
        header: the result of `header_of`.
    """
    return SifIdentity(
        sha256=sha256,
        inode=file.inode,
        size=file.size,
        mtime_ns=file.mtime_ns,
        ctime_ns=file.ctime_ns,
        header_sha256=header[0],
        partition_offset=header[1],
        partition_size=header[2],
    )


def is_settled(file: FileIdentity, *, now_ns: int, tick: float = _SECONDS_TO_SETTLE) -> bool:
    """Return whether every change from `now_ns` on gets a later time than the last change. Pure.

    Args:
        tick: seconds after which the clock has certainly ticked. For a disk of this node whose times have fractions of
            a second, `tick` is shorter than the default.
    """
    seconds = tick if file.ctime_ns % 1_000_000_000 else _SECONDS_TO_SETTLE
    return now_ns - file.ctime_ns > seconds * 1e9


def header_of(descriptor: int) -> tuple[str, int, int]:
    """Return the digest over header, table and superblock; and offset and size of the partition.

    Raises:
        ImageMismatch: the file is not a complete SIF.
        EnvironmentUnreadable: the file cannot be read.
    """
    partition = sif.read_header(descriptor).runs
    head = os.pread(descriptor, 128, 0)
    table = int.from_bytes(head[96:104], "little")
    length = min(int.from_bytes(head[104:112], "little"), _LONGEST_TABLE)
    digest = hashlib.sha256()
    for offset, size in ((0, 128), (table, length), (partition.offset, _SUPERBLOCK)):
        digest.update(os.pread(descriptor, size, offset))
    return digest.hexdigest(), partition.offset, partition.size


# A function such as `header_of` or `superblock_of`. It returns the digest of the part of a file that is always read,
# and the offset and size of the file system in the file.
ReadHeader = Callable[[int], tuple[str, int, int]]


def superblock_of(descriptor: int) -> tuple[str, int, int]:
    """Return the digest of the superblock of a squashfs file, the offset 0, and the size of the file.

    Raises:
        ImageMismatch: the file is not a squashfs.
    """
    block = os.pread(descriptor, _SUPERBLOCK, 0)
    if len(block) < _SUPERBLOCK or block[:4] != _MAGIC:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        raise ImageMismatch(f"`{path}` is not a squashfs", why="it does not begin with a superblock of squashfs")
    return hashlib.sha256(block).hexdigest(), 0, os.fstat(descriptor).st_size


def full_sha256(descriptor: int) -> tuple[str, FileIdentity]:
    """Hash the whole file; return its sha256, and its identity (inode, size, times), which stayed the same.

    Raises:
        ImageMismatch: the file changed while it was read.
    """
    before = identity_of(descriptor)
    digest = sif.file_sha256(descriptor)
    if identity_of(descriptor) != before:
        raise ImageMismatch(
            f"`{os.readlink(f'/proc/self/fd/{descriptor}')}` changed while it was read",
            why="somebody writes to it",
            hint="publish SIFs by renaming a finished file",
        )
    return digest, before


# -- records of hashes --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KeptHash:
    """The sha256 of a whole file, and the state of the file.

    The hash is used only while the state of the file is unchanged.
    """

    where: str
    file: FileIdentity
    sha256: str
    header_sha256: str


# A record has some hundred bytes.
_LONGEST_RECORD = 4096
_MOST_RECORDS = 256


@dataclass(frozen=True)
class Records:
    """Hashes that were taken before, in a folder that only this user can write.

    These hashes only save time. A record counts only if the file still has the state in the record. A record with an
    unexpected owner, folder or content is ignored.

    Attributes:
        folder: folder of the records; made when the first record is kept.
        where: the scope of the device numbers: this boot of this machine, or the path.
    """

    folder: Path
    where: str

    def find(self, file: FileIdentity) -> KeptHash | None:
        """Return the record of a file in exactly this state; None without such a record."""
        try:
            if not is_private(self.folder):
                return None
            descriptor = os.open(self._path(file), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                    return None
                data = json.loads(os.read(descriptor, _LONGEST_RECORD))
            finally:
                os.close(descriptor)
            found = KeptHash(**{**data, "file": FileIdentity(**data["file"])})
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        hashes = (found.sha256, found.header_sha256)
        fits = all(isinstance(h, str) and re.fullmatch("[0-9a-f]{64}", h) for h in hashes)
        return found if fits and (found.where, found.file) == (self.where, file) else None

    def keep(self, file: FileIdentity, *, sha256: str, header_sha256: str) -> None:
        """Keep a hash. If the folder cannot be used or the disk is full, only time is lost later."""
        record = KeptHash(where=self.where, file=file, sha256=sha256, header_sha256=header_sha256)
        path = self._path(file)
        aside = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_private(self.folder):
                return
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, json.dumps({**vars(record), "file": vars(file)}, sort_keys=True).encode())
            finally:
                os.close(descriptor)
            os.replace(aside, path)
            self._prune()
        except OSError:
            with suppress(OSError):
                aside.unlink(missing_ok=True)

    def _path(self, file: FileIdentity) -> Path:
        key = json.dumps([self.where, vars(file)], sort_keys=True)
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    def _prune(self) -> None:
        with os.scandir(self.folder) as found:
            aged = sorted((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path) for entry in found)
        for _, path in aged[: max(0, len(aged) - _MOST_RECORDS)]:
            os.unlink(path)


def is_private(folder: Path) -> bool:
    """Return whether `folder` belongs to this user, and no other user can read or write it."""
    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


# Folders in the memory of each node; most systems empty both at boot.
NODE_PLACES: tuple[Path, ...] = (Path("/dev/shm"), Path("/tmp"))  # noqa: S108


def boot_id() -> str | None:
    """Return the id of this boot of this machine; None if unknown. Device numbers are valid only for one boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def node_records(places: Iterable[Path] = NODE_PLACES) -> Records | None:
    """Return the records that this node keeps until it is booted again; None if this node cannot keep records."""
    boot = boot_id()
    if boot is None:
        return None
    usable = [place for place in places if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)]
    # The name contains the user's id. The real owner of the folder is checked at every use.
    return Records(usable[0] / f"hpcenv-{os.geteuid()}" / "sif", boot) if usable else None


# -- checking -----------------------------------------------------------------------------


def identify(
    descriptor: int, records: Records | None, *, tick: float = _SECONDS_TO_SETTLE, read_header: ReadHeader = header_of
) -> tuple[str, SifIdentity | None]:
    """Return the hash of a SIF, from an earlier record if possible, and its identity for the nodes.

    Args:
        descriptor: the open file.
        records: hashes taken before on this machine; with None, the hash is computed.
        tick: as for `is_settled`.
        read_header: `superblock_of` for a squashfs.

    Returns:
        The whole file's SHA-256, and the identity. The identity is None if the file system or the age of the file does
        not allow an identity.

    Raises:
        ImageMismatch: the file is not a complete SIF, or changed while it was read.
        EnvironmentUnreadable: the file cannot be read.
    """
    header, offset, size = read_header(descriptor)
    file = identity_of(descriptor)
    lasting = not doubt_about(mount_of(descriptor)) and is_settled(file, now_ns=time.time_ns(), tick=tick)
    found = records.find(file) if records is not None and lasting else None
    if found is not None and found.header_sha256 == header:
        digest = found.sha256
    else:
        digest, file = full_sha256(descriptor)
        if records is not None and lasting:
            records.keep(file, sha256=digest, header_sha256=header)
    if not lasting:
        return digest, None
    return digest, known_as(file, digest, (header, offset, size))


def check(
    descriptor: int,
    *,
    path: str,
    staged: bool,
    known: SifIdentity | None,
    records: Records | None,
    tick: float = _SECONDS_TO_SETTLE,
    read_header: ReadHeader = header_of,
) -> CheckedSif:
    """Return the hash of an open SIF, in the fastest way that is certain.

    Args:
        descriptor: the open file. The result is the hash of this file, even if its name leads to a different file
            later.
        path, staged: for the record.
        known: the identity that was recorded together with the full hash; None if there is no such identity.
        records: the hashes that were taken on this machine before; None if there are no records.
        tick: as for `is_settled`.
        read_header: `superblock_of` for a squashfs.

    Raises:
        ImageMismatch: the file changed while it was read.
        EnvironmentUnreadable: the file cannot be read.
    """
    file = identity_of(descriptor)
    doubt = doubt_about(mount_of(descriptor))
    lasting = not doubt and is_settled(file, now_ns=time.time_ns(), tick=tick)
    header = _header_or_nothing(descriptor, read_header)

    def established(evidence: SifEvidence, digest: str, *, lasting: bool, why: str = "") -> CheckedSif:
        return CheckedSif(
            path=path, staged=staged, checked=evidence, why=why, sha256=digest, file=file, lasting=lasting
        )

    if known is not None:
        doubt = doubt or _difference(known, file, header)
        if not doubt:
            # When `known` was recorded, the file was unchanged for long enough. So this node's clock does not matter.
            return established("identity", known.sha256, lasting=True)
    found = records.find(file) if records is not None and lasting else None
    if found is not None and found.header_sha256 == header:
        return established("node-record", found.sha256, lasting=True, why=doubt)
    digest, file = full_sha256(descriptor)
    if records is not None and lasting and header:
        records.keep(file, sha256=digest, header_sha256=header)
    return established("full", digest, lasting=lasting, why=doubt if known is not None else "")


def _header_or_nothing(descriptor: int, read_header: ReadHeader) -> str:
    """Return the header's digest; empty if the file is not a SIF, because then the hash differs in any case."""
    try:
        return read_header(descriptor)[0]
    except HpcenvError:
        return ""


def _difference(known: SifIdentity, file: FileIdentity, header: str) -> str:
    """Return how a file differs from the file that was hashed; empty if it is the same file. Pure."""
    parts = (
        ("inode", known.inode, file.inode),
        ("size", known.size, file.size),
        ("time of last change", known.mtime_ns, file.mtime_ns),
        ("ctime", known.ctime_ns, file.ctime_ns),
        ("header", known.header_sha256, header),
    )
    names = [name for name, before, now in parts if before != now]
    return f"not the file that was hashed before: another {', '.join(names)}" if names else ""
