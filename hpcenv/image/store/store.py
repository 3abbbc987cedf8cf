"""The store: layers, their indexes and SIFs, under the digests of their content.

Runs on: LOGIN NODE.

    STORE/store.json              marks a store; says whether a group shares it (image/store/store_folder.py)
    STORE/blobs/sha256/HEX        layers as downloaded (image/registry/blobs.py) STORE/indexes/sha256/HEX      index of
    a layer, under its diff_id (image/convert/layers.py) STORE/images/sha256-HEX.sif   a SIF; HEX is the image's
    manifest digest, or the SIF's own STORE/images/sha256-HEX.json  its record (image/store/sif_record.py)
    STORE/leases/NAME             a process that is working (image/store/lease.py) STORE/tmp/HOST.PID....
    unfinished work of that process

A file under its final name is complete and never changes: link(2) or rename(2) gives the file its final name, and a SIF
is read-only. The next process removes the files that a killed process left.

SIFs are programs. hpcenv refuses a store if a user who is not trusted owns one of its folders or
may write to it. A store that the caller may only read can be used for reading.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import shlex
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcenv import filesystem
from hpcenv.errors import Command, FileUnusable, HpcenvError, RecordInvalid, UsageError, WouldOverwrite
from hpcenv.identity import sif
from hpcenv.image.reference import Platform
from hpcenv.image.store import lease, sif_record
from hpcenv.image.store.sif_record import ImageRecord
from hpcenv.progress import OnEvent, ignore
from hpcenv.records.files import sync, write_text

__all__ = ["Store", "StoredImage"]

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_IMAGE = re.compile(r"sha256-([0-9a-f]{64})\.sif")
# Unfinished work of another machine counts as abandoned if its newest file is older than this (seconds).
ABANDONED = 86400.0
# The same limit if no lease is held (seconds). A lease without a heartbeat becomes stale after a shorter time.
UNLEASED = 2 * lease.STALE_AFTER


@dataclass(frozen=True, kw_only=True)
class StoredImage:
    """A SIF in the store.

    Attributes:
        digest: the SIF's name in the store.
        size: in bytes.
        record: the SIF's record; None if it is missing or damaged.
        used: when the SIF was last requested or read; seconds since 1970 by the clock of the file system.
        distrust: why the SIF should not be run; empty if it is trusted.
    """

    digest: str
    path: Path
    size: int
    record: ImageRecord | None
    used: float
    distrust: str = ""

    @property
    def whole(self) -> bool:
        """Whether the SIF has a record, and has the size that this record states."""
        return self.record is not None and self.record.sif.size == self.size

    @property
    def hint(self) -> str:
        """The command that makes all SIFs of this folder trusted again."""
        return f"chmod go-w {shlex.quote(str(self.path.parent))}/*.sif"

    def require_trusted(self) -> None:
        """Raise an error if other users could change the SIF while a job runs from it.

        Raises:
            FileUnusable: the error has the file, its mode and the hint.
        """
        if self.distrust:
            hint = f"{self.hint}\nor remove the file: hpcenv can make it again"
            raise FileUnusable(f"`{self.path}` is not trusted", why=self.distrust, hint=hint)


@dataclass(frozen=True, kw_only=True)
class Store:
    """An open store; `store_folder.open_store` makes it.

    Attributes:
        writable: False if the caller may only read the store; then `read_only_because` has the reason.
        shared: whether a group may write to the store.
    """

    root: Path
    writable: bool
    shared: bool
    read_only_because: str = ""

    @property
    def blobs(self) -> Path:
        """Folder of layers; image/registry/blobs.py defines its layout."""
        return self.root / "blobs"

    @property
    def images(self) -> Path:
        """Folder of SIFs and their records."""
        return self.root / "images"

    @property
    def leases(self) -> Path:
        """Folder of leases."""
        return self.root / "leases"

    @property
    def tmp(self) -> Path:
        """Folder of unfinished work."""
        return self.root / "tmp"

    @property
    def indexes(self) -> Path:
        """Folder of layers' indexes."""
        return self.root / "indexes"

    def index_path(self, diff_id: str) -> Path:
        """Return the path of a layer's index, which may not exist yet."""
        return self.indexes / "sha256" / _hex(diff_id)

    def image_path(self, digest: str) -> Path:
        """Return the path of an image's SIF, which may not exist yet."""
        return self.images / f"sha256-{_hex(digest)}.sif"

    def record_path(self, digest: str) -> Path:
        """Return the path of a SIF's record, which may not exist yet."""
        return self.images / f"sha256-{_hex(digest)}.json"

    def require_writable(self, purpose: str) -> None:
        """Raise an error if the caller has no permission to change the store.

        Args:
            purpose: completes "write access is needed to ...".

        Raises:
            FileUnusable: the store is read-only for the caller.
        """
        if not self.writable:
            raise FileUnusable(
                f"the store `{self.root}` cannot be written to",
                why=f"{self.read_only_because}; write access is needed to {purpose}",
                hint="use your own store: --store DIR or HPCENV_STORE",
            )

    @contextlib.contextmanager
    def lease(self, name: str, *, purpose: str, timeout: float, on_event: OnEvent = ignore) -> Iterator[lease.Lease]:
        """Context manager: hold the lease `name` of this store; see `lease.lease`.

        Args:
            name: a digest or another name; it is the same on all machines.
            purpose, timeout, on_event: as for `lease.lease`.

        Raises:
            FileUnusable: the caller has no permission to write to the store.
            ToolFailed: another process still holds the lease after `timeout` seconds.
        """
        self.require_writable("work in it")
        path = self.leases / re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".")
        with lease.lease(path, purpose=purpose, timeout=timeout, on_event=on_event) as held:
            yield held

    @contextlib.contextmanager
    def in_use(self, *, purpose: str, on_event: OnEvent = ignore) -> Iterator[None]:
        """Context manager: hold a lease that only this process uses; `prune` removes nothing while a lease is held.

        If the caller may only read the store, no lease is held. For some time, images are safe also without a lease,
        because `prune` does not remove images that were used recently.

        Args:
            purpose: what the process does, for messages: "compares X with its layers".
            on_event: as for `lease.lease`.
        """
        if not self.writable:
            yield
            return
        with self.lease(f"use-{secrets.token_hex(8)}", purpose=purpose, timeout=0, on_event=on_event):
            yield

    # -- unfinished work --

    @contextlib.contextmanager
    def scratch(self, need_bytes: int, *, purpose: str = "convert the image") -> Iterator[Path]:
        """Context manager: a private folder on the store's file system, removed at the end.

        The context manager first removes the files that ended processes left. The caller must hold a lease all the
        time. The lease tells other processes that the folder is in use.

        Args:
            need_bytes: the most bytes that the caller will write to the folder.
            purpose: completes "bytes are needed to ...".

        Raises:
            FileUnusable: the store is read-only, or has too little space or quota.
        """
        self.require_writable(purpose)
        self.clean_leftovers()
        filesystem.require_space(self.tmp, need_bytes, purpose=purpose)
        path = self.tmp / lease.private_name()
        try:
            os.mkdir(path, 0o700)
            if self.shared:
                os.chmod(path, 0o2770)  # noqa: S103  (any member of the group can remove leftovers)
        except OSError as error:
            raise filesystem.refused(path, error, doing="made") from error
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def leftovers(self, *, idle: bool = False) -> tuple[Path, ...]:
        """Return the unfinished work of ended processes.

        For processes of this machine we know whether they have ended. Work of other machines is included if its files
        have not changed for a day, by the clock of the file system.

        Args:
            idle: whether the caller has made sure that no lease is held. If no lease is held, a minute without changes
                is enough, because each user of `scratch` holds a lease.
        """
        try:
            entries = sorted([*self.tmp.iterdir(), *lease.unfinished(self.leases)])
            now = filesystem.file_time(self.tmp) if entries and self.writable else None
        except OSError:
            return ()
        return tuple(path for path in entries if _is_abandoned(path, now, UNLEASED if idle else ABANDONED))

    def clean_leftovers(self) -> None:
        """Remove those `leftovers` that the caller may remove, and leases of ended processes of this machine."""
        for path in self.leftovers():
            remove(path)
        lease.remove_ended(self.leases)

    # -- images --

    def find_image(self, digest: str) -> StoredImage | None:
        """Return the image's SIF if it exists and has the recorded size.

        A SIF with a different size or without a readable record counts as missing. The next conversion replaces it.

        Raises:
            FileUnusable: other users may write to the SIF.
        """
        image = self.look(digest)
        if image is None or not image.whole:
            return None
        image.require_trusted()
        return image

    def record(self, digest: str) -> ImageRecord | None:
        """Return the SIF's record; None if it is missing, damaged, or belongs to a different image."""
        path = self.record_path(digest)
        try:
            with open(path, encoding="utf-8") as file:
                record = sif_record.loads(file.read(sif_record.LONGEST), origin=str(path))
        except (OSError, UnicodeDecodeError, RecordInvalid):
            return None
        return record if record.digest == digest else None

    def find_source(self, digest: str, platform: Platform) -> StoredImage | None:
        """Return the complete SIF of an image; the caller must check whether it is trusted.

        Args:
            digest: the digest of the image's manifest or index.
            platform: selects one image of an index.
        """
        direct = self.look(digest)
        images = [direct] if direct is not None and direct.whole else self.list_images()
        for image in images:
            record = image.record
            if record is None or digest not in (record.manifest_digest, record.index_digest):
                continue
            if image.whole and _fits(record.platform, platform):
                return image
        return None

    def list_images(self) -> tuple[StoredImage, ...]:
        """Return all SIFs in the store, including those that have no record or are not trusted."""
        try:
            names = sorted(os.listdir(self.images))
        except OSError:
            return ()
        images = (self.look(f"sha256:{match[1]}") for match in map(_IMAGE.fullmatch, names) if match)
        return tuple(image for image in images if image is not None)

    def look(self, digest: str) -> StoredImage | None:
        """Return the image's SIF without any check; None if the file does not exist or is not a regular file."""
        path = self.image_path(digest)
        try:
            status = os.lstat(path)
        except OSError:
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        used = max(status.st_mtime, status.st_atime)
        with contextlib.suppress(OSError):
            used = max(used, os.lstat(self.record_path(digest)).st_mtime)
        return StoredImage(
            digest=digest,
            path=path,
            size=status.st_size,
            record=self.record(digest),
            used=used,
            distrust=_distrust(status),
        )

    def publish_image(self, finished: Path, record: ImageRecord) -> StoredImage:
        """Move a finished SIF into the store, and write its record.

        A good SIF is never replaced, because a job may run from this SIF. Two processes may publish the same image at
        the same time; the second process then finds a file with the same bytes.

        Args:
            finished: a file on the store's file system, usually in `scratch`; it is moved.
            record: the record of the SIF; the size in the record is compared with the file, but the hash is not
                computed again.

        Raises:
            WouldOverwrite: the store has a complete SIF of this image with different bytes.
            FileUnusable: the file system refuses the operation.
        """
        self.require_writable("publish the image")
        final = self.image_path(record.digest)
        try:
            if os.stat(finished).st_size != record.sif.size:
                raise UsageError(f"`{finished}` does not have the size in its record")
            os.chmod(finished, 0o444)
            sync(finished)
            while not _link(finished, final):
                if self._is_published(final, record):
                    break
            # Unlink now, because this changes the ctime of the published file, and nodes identify the file by its
            # ctime.
            finished.unlink(missing_ok=True)
            sync(final.parent)
            self._write_record(record)
        except OSError as error:
            raise filesystem.refused(final, error) from error
        published = self.find_image(record.digest)
        if published is None:
            raise FileUnusable(f"`{final}` disappeared while it was published", hint="try again")
        return published

    def _is_published(self, final: Path, record: ImageRecord) -> bool:
        """Return whether the store already has the same SIF; move a damaged SIF aside."""
        try:
            stored = sif.file_sha256(final)
        except HpcenvError:
            stored = ""  # not a regular file, or removed in the meantime
        if stored == record.sif.sha256 and _read_only_file(final):
            return True
        known = self.record(record.digest)
        if known is not None and stored == known.sif.sha256 != record.sif.sha256:
            raise WouldOverwrite(
                f"`{final}` already exists, with different bytes",
                why=f"it was made from the same image with other tools:\nin the store: {_tools(known)}\n"
                f"now: {_tools(record)}",
                hint=("use it, or remove it first: ", Command("hpcenv", "image", "prune", "--all")),
            )
        aside = self.tmp / f"damaged.{secrets.token_hex(8)}"
        # Rename the SIF and do not remove it, because a job may run from it.
        with contextlib.suppress(FileNotFoundError):
            os.rename(final, aside)
        return False

    def keep_index(self, diff_id: str, data: bytes) -> None:
        """Store the index of a layer. Failures are ignored: an index can be made again."""
        path = self.index_path(diff_id)
        aside = self.tmp / lease.private_name()
        with contextlib.suppress(OSError):
            try:
                aside.write_bytes(data)
                os.chmod(aside, 0o664 if self.shared else 0o644)
                os.replace(aside, path)
            finally:
                aside.unlink(missing_ok=True)

    def update_record(self, record: ImageRecord) -> None:
        """Replace the record of an image in the store.

        Raises:
            FileUnusable: the file system refuses the change.
        """
        try:
            self._write_record(record)
        except OSError as error:
            raise filesystem.refused(self.record_path(record.digest), error) from error

    def set_aside(self, digest: str) -> Path | None:
        """Move a damaged SIF aside. Jobs that run from this SIF can still use the file.

        Returns:
            The new path; None if the SIF does not exist.

        Raises:
            FileUnusable: the store is read-only, or the file system refuses the operation.
        """
        self.require_writable("move a damaged image aside")
        final, aside = self.image_path(digest), self.tmp / f"damaged.{secrets.token_hex(8)}"
        try:
            os.rename(final, aside)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise filesystem.refused(final, error, doing="moved aside") from error
        return aside

    def _write_record(self, record: ImageRecord) -> None:
        before = self.record(record.digest)
        if before is not None:
            for reference in reversed(before.references):
                if reference not in record.references:
                    record = dataclasses.replace(record, references=(*record.references, reference))
        self._write(sif_record.dumps(record), self.record_path(record.digest))

    def remember(self, digest: str, *, reference: str | None = None, index_digest: str | None = None) -> None:
        """Record that an image was used now, and the reference under which it was requested.

        Does nothing if the store is read-only.
        """
        with contextlib.suppress(OSError):
            known = self.record(digest) if self.writable else None
            if known is None:
                return
            after = sif_record.with_reference(known, reference, index_digest) if reference else known
            if after == known:
                os.utime(self.record_path(digest))
            else:
                self._write(sif_record.dumps(after), self.record_path(digest))

    def _write(self, text: str, path: Path, *, durable: bool = True) -> None:
        # The temporary file is in `tmp`, so the next process removes it if this process is killed.
        aside = self.tmp / lease.private_name()
        write_text(text, path, mode=0o664 if self.shared else 0o644, durable=durable, aside=aside)


def remove(path: Path) -> None:
    """Remove a file or a tree; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _hex(digest: str) -> str:
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise UsageError(f"`{digest[:80]}` is not a digest", hint="a digest is `sha256:` and 64 hexadecimal digits")
    return match[1]


def _is_abandoned(path: Path, now: float | None, after: float) -> bool:
    owner = lease.owner_of(path.name)
    if owner is not None and owner.is_dead():
        return True
    try:
        inside = [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path)] if path.is_dir() else []
        status = path.lstat()
        # A damaged SIF was renamed to this name. A rename changes its ctime, but not its mtime. Jobs may run from this
        # SIF.
        renamed = [status.st_ctime] if path.name.startswith("damaged.") else []
        newest = max([status.st_mtime, *renamed, *inside])
    except OSError:
        return False
    return now is not None and now - newest > (ABANDONED if owner is None else after)


def _distrust(status: os.stat_result) -> str:
    """Return who could change a SIF while jobs run from it, with the file's mode; empty if only the owner could."""
    writers = [who for bit, who in ((stat.S_IWGRP, "its group"), (stat.S_IWOTH, "everybody")) if status.st_mode & bit]
    if not writers:
        return ""
    mode, owner = stat.S_IMODE(status.st_mode), filesystem.user_name(status.st_uid)
    return f"{writers[-1]} may write to it (mode {mode:04o}, owner {owner})"


def _read_only_file(path: Path) -> bool:
    """Make a file read-only. Return False if this is not permitted and other users can write to the file."""
    with contextlib.suppress(PermissionError):
        os.chmod(path, 0o444)
    return not os.stat(path).st_mode & 0o022


def _link(finished: Path, final: Path) -> bool:
    """Link the file to its final name; return False if a different file has the final name."""
    try:
        os.link(finished, final)
    except FileExistsError:
        # NFS repeats a call whose answer was lost; the second call then fails although the first one succeeded.
        return os.path.samestat(os.lstat(finished), os.lstat(final)) if os.path.lexists(final) else False
    except OSError as error:
        if error.errno not in lease.NO_LINKS:
            raise
        if os.path.lexists(final):
            return False
        os.rename(finished, final)  # only the caller's lease prevents a race here
    return True


def _fits(recorded: str, wanted: Platform) -> bool:
    parts = (*recorded.split("/"), "", "")[:3]
    return parts[:2] == (wanted.os, wanted.architecture) and wanted.variant in (None, parts[2])


def _tools(record: ImageRecord) -> str:
    tools = ", ".join(f"{name} {version}" for name, version in sorted(record.made.tools.items()))
    return f"{record.made.builder} ({tools or 'versions unknown'})"
