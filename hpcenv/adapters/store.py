"""The store: layers, their indexes and SIFs, named by what is in them.

Runs on: LOGIN NODE.

    STORE/store.json              that this is a store, and whether a group shares it
    STORE/blobs/sha256/HEX        layers as they were pulled (adapters/blobs.py)
    STORE/indexes/sha256/HEX      what is in a layer, by its diff_id (adapters/layers.py)
    STORE/images/sha256-HEX.sif   a SIF; HEX is the image's manifest digest, or the SIF's own
    STORE/images/sha256-HEX.json  its record (model/image_record.py)
    STORE/roots/HEX.json          a lockfile or a run that needs images
    STORE/leases/NAME             who is at work on what (adapters/lease.py)
    STORE/tmp/HOST.PID....        unfinished work of that process

Nothing under a final name is ever half made or changed: files appear whole, by link(2) or
rename(2), and a SIF is read-only. A process that was killed leaves only what the next one
removes by itself.

SIFs are programs. A store is refused when somebody who is not trusted owns one of its
folders, or may write to it; one that the caller may only read is used as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import stat
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from hpcenv import wire
from hpcenv.adapters import filesystem, lease, references, sif
from hpcenv.adapters.filesystem import Trust
from hpcenv.adapters.store_place import StorePlace
from hpcenv.dataclass import dataclass
from hpcenv.errors import FileUnusable, HpcenvError, RecordInvalid, UsageError, WouldOverwrite
from hpcenv.model import image_record
from hpcenv.model.image_record import ImageRecord
from hpcenv.model.progress import OnEvent, ignore

__all__ = ["Root", "Store", "StorePlace", "StoredImage", "open_store"]

SCHEMA = 1
# Signature: Cache Directory Tagging Specification 0.6; backups leave such folders out.
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by hpcenv: images that can be converted again.\n"
_README = """Layers and SIFs of hpcenv, named by their content; see `hpcenv image list`.
Remove what nobody needs with `hpcenv image prune`. Removing all of it is safe while no
job runs from it: `hpcenv image pull` makes the same files again.
"""
_FOLDERS = ("blobs/sha256", "indexes/sha256", "images", "roots", "tmp", "leases")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_IMAGE = re.compile(r"sha256-([0-9a-f]{64})\.sif")
_SCRATCH = re.compile(r"([A-Za-z0-9_-]+)\.(\d{1,20})\.(\d{1,20})\.([0-9a-f]{0,16})\.[0-9a-f]{16}")
# Unfinished work of another machine whose newest file is this old (seconds) is nobody's.
ABANDONED = 86400.0
# The same where it is known that nobody holds a lease: longer than a lease lives without a heartbeat.
UNLEASED = 2 * lease.STALE_AFTER
_CHECKED = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class StoredImage:
    """A SIF of the store.

    Attributes:
        record: None where it is missing or damaged.
        used: when it was last asked for or read, as far as the file system says; seconds
            since 1970 by its own clock.
        distrust: why nobody should run it, though it is there; empty when nothing speaks against it.
    """

    digest: str
    path: Path
    size: int
    record: ImageRecord | None
    used: float
    distrust: str = ""

    @property
    def whole(self) -> bool:
        """Whether it is a SIF with a record, as long as that one says."""
        return self.record is not None and self.record.sif.size == self.size

    @property
    def remedy(self) -> str:
        """The command that makes it trusted again, and all that lies beside it."""
        return f"chmod go-w {shlex.quote(str(self.path.parent))}/*.sif"

    def require_trusted(self) -> None:
        """Refuse what others could change while a job runs from it.

        Raises:
            FileUnusable: names the file, its mode and the remedy.
        """
        if self.distrust:
            hint = f"{self.remedy}\n      or remove that file: it can be made again"
            raise FileUnusable(f"`{self.path}` is not trusted", why=self.distrust, hint=hint)


@dataclass(frozen=True, kw_only=True)
class Root:
    """A lockfile or a run that needs images of the store.

    Attributes:
        path: of the lockfile, or of the run folder.
        digests: the images, as the store names them.
        mount, kind_of_mount, network: where `path` lies: only where the same file system is
            there can be told that the path is gone.
        host, user: who said so, and where.
    """

    schema: int = SCHEMA
    kind: Literal["lockfile", "run"]
    path: str
    digests: tuple[str, ...]
    mount: str
    kind_of_mount: str
    network: bool
    host: str
    user: str
    added: str


@dataclass(frozen=True, kw_only=True)
class Store:
    """An open store; made by `open_store`.

    Attributes:
        writable: False when the caller may only read it; `read_only_because` says why.
        shared: a group may write to it.
    """

    root: Path
    writable: bool
    shared: bool
    read_only_because: str = ""

    @property
    def blobs(self) -> Path:
        """Folder of layers, as adapters/blobs.py takes it."""
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
    def roots(self) -> Path:
        """Folder of what needs images."""
        return self.root / "roots"

    @property
    def indexes(self) -> Path:
        """Folder of layers' indexes."""
        return self.root / "indexes"

    def index_path(self, diff_id: str) -> Path:
        """Return where the index of the layer with this `diff_id` lies, or will lie."""
        return self.indexes / "sha256" / _hex(diff_id)

    def image_path(self, digest: str) -> Path:
        """Return where the SIF of the image lies, or will lie."""
        return self.images / f"sha256-{_hex(digest)}.sif"

    def record_path(self, digest: str) -> Path:
        """Return where the SIF's record lies, or will lie."""
        return self.images / f"sha256-{_hex(digest)}.json"

    def require_writable(self, purpose: str) -> None:
        """Say why the store cannot be changed.

        Args:
            purpose: completes "... is needed to ...".

        Raises:
            FileUnusable: it is read-only for the caller.
        """
        if not self.writable:
            raise FileUnusable(
                f"the store `{self.root}` cannot be written to",
                why=f"{self.read_only_because}; that is needed to {purpose}",
                hint="name a store of your own with --store or HPCENV_STORE",
            )

    @contextlib.contextmanager
    def lease(self, name: str, *, purpose: str, timeout: float, on_event: OnEvent = ignore) -> Iterator[lease.Lease]:
        """Be the only one at work on `name`, a digest or a plain word, on all machines.

        Raises:
            FileUnusable, ToolFailed: as `lease.lease`.
        """
        self.require_writable("work in it")
        path = self.leases / re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".")
        with lease.lease(path, purpose=purpose, timeout=timeout, on_event=on_event) as held:
            yield held

    # -- unfinished work --

    @contextlib.contextmanager
    def scratch(self, need_bytes: int, *, purpose: str = "convert the image") -> Iterator[Path]:
        """Give a private folder on the store's file system; it is removed at the end.

        Leftovers of processes that are no more are removed first. The caller holds a lease
        all the while: by that others know that the folder is in use.

        Args:
            need_bytes: how much will be written there at most.
            purpose: completes "bytes are needed to ...".

        Raises:
            FileUnusable: read-only, or too little space or quota.
        """
        self.require_writable(purpose)
        self.clean_leftovers()
        filesystem.require_space(self.tmp, need_bytes, purpose=purpose)
        path = self.tmp / _scratch_name()
        try:
            os.mkdir(path, 0o700)
            if self.shared:
                os.chmod(path, 0o2770)  # noqa: S103  (any member can remove what is left)
        except OSError as error:
            raise filesystem.refused(path, error, doing="made") from error
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def leftovers(self, *, idle: bool = False) -> tuple[Path, ...]:
        """Return unfinished work of processes that are no more.

        On this machine that is known. Of other machines, what nobody has written to for a
        day, by the clock of the file system itself.

        Args:
            idle: the caller has made sure that no lease is held. Whoever uses `scratch` holds
                one, so that what nobody has written to for a minute belongs to nobody.
        """
        try:
            entries = sorted(self.tmp.iterdir())
            now = filesystem.file_time(self.tmp) if entries and self.writable else None
        except OSError:
            return ()
        return tuple(path for path in entries if _is_abandoned(path, now, UNLEASED if idle else ABANDONED))

    def clean_leftovers(self) -> None:
        """Remove `leftovers`, as far as the caller may."""
        for path in self.leftovers():
            remove(path)

    # -- images --

    def find_image(self, digest: str) -> StoredImage | None:
        """Return the image's SIF if it is there and whole as far as its size tells.

        A SIF without a readable record or of another size counts as absent: the next
        conversion replaces it.

        Raises:
            FileUnusable: somebody else could still write to it.
        """
        found = self.look(digest)
        if found is None or not found.whole:
            return None
        found.require_trusted()
        return found

    def record(self, digest: str) -> ImageRecord | None:
        """Return the SIF's record; None when it is missing, damaged, or of another image."""
        path = self.record_path(digest)
        try:
            with open(path, encoding="utf-8") as file:
                found = image_record.loads(file.read(image_record.LONGEST), origin=str(path))
        except (OSError, UnicodeDecodeError, RecordInvalid):
            return None
        return found if found.digest == digest else None

    def find_source(self, digest: str, platform: str) -> StoredImage | None:
        """Return the whole SIF of the image that a manifest's or an index's digest names; it may not be trusted.

        Args:
            platform: `os/architecture[/variant]`, which of an index's images is meant.

        Raises:
            SpecError: the platform makes no sense.
        """
        wanted = references.parse_platform(platform)
        there = self.look(digest)
        images = [there] if there is not None and there.whole else self.list_images()
        for image in images:
            record = image.record
            if record is None or digest not in (record.manifest_digest, record.index_digest):
                continue
            if image.whole and _fits(record.platform, wanted):
                return image
        return None

    def list_images(self) -> tuple[StoredImage, ...]:
        """Return every SIF of the store, also those without a record, or that are not trusted."""
        try:
            names = sorted(os.listdir(self.images))
        except OSError:
            return ()
        found = (self.look(f"sha256:{match[1]}") for match in map(_IMAGE.fullmatch, names) if match)
        return tuple(image for image in found if image is not None)

    def look(self, digest: str) -> StoredImage | None:
        """Return the image's SIF as it lies there; None where none is that could be one."""
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
        """Give a finished SIF its name in the store, and write its record.

        Never replaces a good file: a job may run from it. Safe when two processes do it at
        once: one wins, and the other finds equal bytes there.

        Args:
            finished: a file on the store's file system, usually in `scratch`; gone afterwards.
            record: what it is; its size and hash are believed.

        Raises:
            WouldOverwrite: a whole SIF with other bytes is there, as its record says.
            FileUnusable: the system does not let us.
        """
        self.require_writable("publish the image")
        final = self.image_path(record.digest)
        try:
            if os.stat(finished).st_size != record.sif.size:
                raise UsageError(f"`{finished}` is not of the size that its record says")
            os.chmod(finished, 0o444)
            sync(finished)
            while not _link(finished, final):
                if self._keeps(final, record):
                    break
            # Now, not later: it changes the other name's ctime, by which nodes know the file.
            finished.unlink(missing_ok=True)
            sync(final.parent)
            self._write_record(record)
        except OSError as error:
            raise filesystem.refused(final, error) from error
        published = self.find_image(record.digest)
        if published is None:
            raise FileUnusable(f"`{final}` vanished while it was published", hint="try again")
        return published

    def _keeps(self, final: Path, record: ImageRecord) -> bool:
        """Whether what is there is the same; what is damaged is moved out of the way."""
        try:
            there = sif.file_sha256(final)
        except HpcenvError:
            there = ""  # no regular file, or gone again
        if there == record.sif.sha256 and _read_only_file(final):
            return True
        known = self.record(record.digest)
        if known is not None and there == known.sif.sha256 != record.sif.sha256:
            raise WouldOverwrite(
                f"`{final}` is there already, with other bytes",
                why=f"it was made from the same image with other tools:\nthere: {_tools(known)}\nnow: {_tools(record)}",
                hint="use it, or remove it first: hpcenv image prune",
            )
        aside = self.tmp / f"damaged.{secrets.token_hex(8)}"
        # Renamed, not removed: a job may run from it.
        with contextlib.suppress(FileNotFoundError):
            os.rename(final, aside)
        return False

    def keep_index(self, diff_id: str, data: bytes) -> None:
        """Keep the index of a layer; does nothing where it cannot be kept: it can be had again."""
        path = self.index_path(diff_id)
        aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with contextlib.suppress(OSError):
            try:
                aside.write_bytes(data)
                os.chmod(aside, 0o664 if self.shared else 0o644)
                os.replace(aside, path)
            finally:
                aside.unlink(missing_ok=True)

    def update_record(self, record: ImageRecord) -> None:
        """Replace the record of an image that is in the store.

        Raises:
            FileUnusable: the system does not let us.
        """
        try:
            self._write_record(record)
        except OSError as error:
            raise filesystem.refused(self.record_path(record.digest), error) from error

    def set_aside(self, digest: str) -> Path | None:
        """Take a damaged SIF out of its place; jobs that run from it keep it until they end.

        Raises:
            FileUnusable: the system does not let us.
        """
        self.require_writable("put a damaged image aside")
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
        self._write(image_record.dumps(record), self.record_path(record.digest))

    def remember(self, digest: str, *, reference: str | None = None, index_digest: str | None = None) -> None:
        """Note that an image was used now, and by which reference it was asked for.

        Does nothing where that cannot be noted.
        """
        with contextlib.suppress(OSError):
            known = self.record(digest) if self.writable else None
            if known is None:
                return
            after = image_record.with_reference(known, reference, index_digest) if reference else known
            if after == known:
                os.utime(self.record_path(digest))
            else:
                self._write(image_record.dumps(after), self.record_path(digest))

    def _write(self, text: str, path: Path) -> None:
        wire.write_text(text, path, mode=0o664 if self.shared else 0o644)

    # -- who needs them --

    def add_root(self, kind: Literal["lockfile", "run"], path: Path, digests: Sequence[str]) -> bool:
        """Note that a lockfile or a run needs images, so that nobody removes them.

        Args:
            path: of the lockfile, or of the run folder.
            digests: as the store names the images; none removes the note.

        Returns:
            Whether it was noted; False in a store that the caller may not write to.

        Raises:
            FileUnusable: the system does not let us.
        """
        if not self.writable:
            return False
        path = Path(os.path.abspath(path))
        mount = filesystem.mount_of(Path(os.path.realpath(path)))
        root = Root(
            kind=kind,
            path=str(path),
            digests=tuple(f"sha256:{_hex(digest)}" for digest in digests),
            mount="" if mount is None else mount.point,
            kind_of_mount="" if mount is None else mount.kind,
            network=mount is not None and mount.network,
            host=os.uname().nodename,
            user=filesystem.user_name(os.geteuid()),
            added=utc_now(),
        )
        file = self.roots / _root_name(root)
        try:
            if digests:
                self._write(wire.dumps(root), file)
            else:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise filesystem.refused(file, error) from error
        return True

    def list_roots(self) -> tuple[tuple[Path, Root | None], ...]:
        """Return every note with its file; None for one that cannot be read.

        Raises:
            FileUnusable: the folder cannot be read: then nobody knows what is needed.
        """
        try:
            names = sorted(name for name in os.listdir(self.roots) if not name.startswith("."))
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise filesystem.refused(self.roots, error, doing="read") from error
        return tuple((self.roots / name, _read_root(self.roots / name)) for name in names)


def is_there(root: Root) -> bool | None:
    """Whether what a note names still is there; None where that cannot be told from here."""
    path = Path(root.path)
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError):
        return None
    else:
        return True
    mount = filesystem.mount_of(Path(os.path.realpath(path)))
    here = root.network or root.host == os.uname().nodename
    same = mount is not None and (mount.point, mount.kind) == (root.mount, root.kind_of_mount)
    return False if here and same else None


def open_store(root: Path, *, create: bool = False, shared: bool = False, trusted_owners: Sequence[str] = ()) -> Store:
    """Open a store after checking that only trusted users can have put SIFs into it.

    Args:
        root: its folder.
        create: make it, or what is missing in it.
        shared: trust the group that owns it, and let that group write to what is made.
        trusted_owners: login names or user ids besides the caller and root.

    Raises:
        FileUnusable: there is none, it is not trusted, or the system refuses it.
        UsageError: a trusted owner that this machine does not know.
    """
    root = Path(os.path.abspath(root))
    trust = Trust(owners=filesystem.user_ids(trusted_owners), group=shared)
    try:
        if create and not os.path.lexists(root):
            _make_root(root, shared=shared)
        trust, is_store = _declared(root, trust)
        filesystem.require_trusted(root, trust)
        if not is_store and not create:
            raise FileNotFoundError(None, "no store", str(root))
        because = _read_only(root)
        if create and not because:
            _furnish(root, shared=trust.group, is_store=is_store)
        for name in ("blobs", "indexes", *_FOLDERS):
            if os.path.lexists(root / name):
                filesystem.require_trusted(root / name, trust)
    except (FileNotFoundError, NotADirectoryError) as error:
        if create:
            why = f"{error.filename or root}: {error.strerror}"
            hint = "name a folder that you can write to: --store DIR, or `store` under [paths] in hpcenv.toml"
            raise FileUnusable(f"no store can be made in `{root}`", why=why, hint=hint) from error
        raise FileUnusable(f"there is no store in `{root}`", hint="hpcenv image pull makes one") from error
    except OSError as error:
        raise filesystem.refused(Path(os.fsdecode(error.filename or root)), error, doing="used") from error
    return Store(root=root, writable=not because, shared=trust.group, read_only_because=because)


def _declared(root: Path, trust: Trust) -> tuple[Trust, bool]:
    """Read store.json: whether this is a store, and whether its (trusted) owner shares it."""
    path = root / "store.json"
    try:
        status = os.lstat(path)
        # Only the word of somebody trusted counts: others may have been able to put a file here.
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in {os.geteuid(), 0, *trust.owners}:
            return trust, True
        said = json.loads(path.read_text(encoding="utf-8"))
        schema, shared = said["schema"], said["shared"] is True
    except FileNotFoundError:
        return trust, False
    except (ValueError, KeyError, TypeError, RecursionError):
        return trust, True
    if isinstance(schema, int) and schema > SCHEMA:
        raise FileUnusable(
            f"the store `{root}` was made by a newer hpcenv",
            why=f"its schema is {schema}, this hpcenv knows {SCHEMA}",
            hint="pip install --upgrade hpcenv, or name another store",
        )
    return dataclasses.replace(trust, group=trust.group or shared), True


def _read_only(root: Path) -> str:
    """Return why the caller may not write to the store; empty when they may."""
    if os.access(root, os.W_OK | os.X_OK, effective_ids=True):
        return ""
    owner = filesystem.user_name(os.stat(root).st_uid)
    return f"it belongs to {owner}" if os.stat(root).st_uid != os.geteuid() else "you may not write to it"


def _make_root(root: Path, *, shared: bool) -> None:
    for folder in reversed(root.parents):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o755)
    with contextlib.suppress(FileExistsError):
        os.mkdir(root, 0o700)
        os.chmod(root, 0o2775 if shared else 0o755)


def _furnish(root: Path, *, shared: bool, is_store: bool) -> None:
    """Make what is missing in a store, with the same modes whatever the umask."""
    if not is_store:
        foreign = sorted(name for name in os.listdir(root) if not name.startswith(".") and name not in _KNOWN)
        if foreign:
            raise FileUnusable(
                f"`{root}` is not a store, and not empty",
                why=f"`{foreign[0]}` lies there",
                hint="name a folder that is empty or not there yet",
            )
    mode = 0o2775 if shared else 0o755
    mine = os.stat(root).st_uid == os.geteuid()
    if mine and shared and stat.S_IMODE(os.stat(root).st_mode) != mode:
        os.chmod(root, mode)
    said = json.dumps({"schema": SCHEMA, "shared": shared}) + "\n"
    texts = {"store.json": said, "CACHEDIR.TAG": _TAG, ".gitignore": "*\n", "README": _README}
    for name, text in texts.items():
        if not os.path.lexists(root / name):
            wire.write_text(text, root / name, mode=0o664 if shared else 0o644)
    for name in ("blobs", "indexes", *_FOLDERS):
        folder = root / name
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
            os.chmod(folder, mode)


_KNOWN = frozenset({"store.json", "CACHEDIR.TAG", "README", *(name.partition("/")[0] for name in _FOLDERS)})


def sync(path: Path) -> None:
    """Bring a file's or folder's content to the disk; some network file systems refuse folders."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError) if os.path.isdir(path) else contextlib.nullcontext():
            os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a file or a tree as far as the caller may."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def utc_now() -> str:
    """Return the time as records have it: RFC 3339, UTC, whole seconds."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _hex(digest: str) -> str:
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise UsageError(f"`{digest[:80]}` is not a digest", hint="digests read `sha256:` and 64 hexadecimal digits")
    return match[1]


def _scratch_name() -> str:
    me = lease.this_process()
    host = re.sub(r"[^A-Za-z0-9_-]", "-", me.host) or "-"
    return f"{host[:100]}.{me.pid}.{me.start}.{me.machine}.{secrets.token_hex(8)}"


def _is_abandoned(path: Path, now: float | None, after: float) -> bool:
    match = _SCRATCH.fullmatch(path.name)
    if match is not None:
        host, pid, start, machine = match.groups()
        if lease.Owner(host=host, machine=machine, pid=int(pid), start=int(start)).is_dead():
            return True
    try:
        inside = [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path)] if path.is_dir() else []
        status = path.lstat()
        # ctime: a damaged SIF was put here by a rename, which does not touch its mtime. Jobs may run from it.
        renamed = [status.st_ctime] if path.name.startswith("damaged.") else []
        newest = max([status.st_mtime, *renamed, *inside])
    except OSError:
        return False
    return now is not None and now - newest > (ABANDONED if match is None else after)


def _distrust(status: os.stat_result) -> str:
    """Return who could change a SIF while jobs run from it, and how that shows; empty when nobody could."""
    writers = [who for bit, who in ((stat.S_IWGRP, "its group"), (stat.S_IWOTH, "everybody")) if status.st_mode & bit]
    if not writers:
        return ""
    mode, owner = stat.S_IMODE(status.st_mode), filesystem.user_name(status.st_uid)
    return f"{writers[-1]} may write to it (mode {mode:04o}, owner {owner})"


def _read_only_file(path: Path) -> bool:
    """Make a file of ours read-only; False for one that others may go on writing to."""
    with contextlib.suppress(PermissionError):
        os.chmod(path, 0o444)
    return not os.stat(path).st_mode & 0o022


def _link(finished: Path, final: Path) -> bool:
    """Give the file its final name too; False when that name is taken."""
    try:
        os.link(finished, final)
    except FileExistsError:
        # NFS repeats a call whose answer was lost, and then finds its own work.
        return os.path.samestat(os.lstat(finished), os.lstat(final)) if os.path.lexists(final) else False
    except OSError as error:
        if error.errno not in lease.NO_LINKS:
            raise
        if os.path.lexists(final):
            return False
        os.rename(finished, final)  # the caller's lease is the only guard here
    return True


def _fits(platform: str, wanted: references.Platform) -> bool:
    parts = (*platform.split("/"), "", "")[:3]
    return parts[:2] == wanted[:2] and wanted[2] in (None, parts[2])


def _tools(record: ImageRecord) -> str:
    tools = ", ".join(f"{name} {version}" for name, version in sorted(record.made.tools.items()))
    return f"{record.made.builder} ({tools or 'versions unknown'})"


def _root_name(root: Root) -> str:
    place = f"{root.kind}\0{root.path}\0{'' if root.network else root.host}"
    return hashlib.sha256(os.fsencode(place)).hexdigest()[:32] + ".json"


def _read_root(path: Path) -> Root | None:
    try:
        with open(path, encoding="utf-8") as file:
            found = wire.loads(Root, file.read(_CHECKED), origin=str(path))
    except (OSError, UnicodeDecodeError, RecordInvalid):
        return None
    return found if all(_DIGEST.fullmatch(digest) for digest in found.digests) else None
