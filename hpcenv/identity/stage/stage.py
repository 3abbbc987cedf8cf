"""Copies of the SIF and of data folders on the node's own disk, shared by the jobs of a user.

Runs on: COMPUTE NODE. Standard library only. Three steps of the batch script:

    stage-look   every node: find usable folders, existing copies and free space
    stage-send   batch node: choose one folder for all nodes; sbcast files that most nodes lack
    stage-keep   every node: check the files that arrived, or copy them from the shared file system

A copy is named by the SHA-256 of its content, and gets its name by a rename. The full hash of a copy is checked once.
Later jobs recognise a copy by its identity (identity/sif_check.py). If a node has no free space or no usable folder, it
uses the shared file system and reports this. A slower start is better than a job that waited for a day and does not
start.

The folder belongs to the user alone. A copy in use is protected in two ways. The file `NAME.used` beside the copy is
locked while the training runs. In addition, a copy that was used within the last hour is not removed. This hour
protects the copy in the time between the steps.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcenv import process
from hpcenv.errors import FileUnusable, HpcenvError, ImageMismatch, RecordInvalid
from hpcenv.identity import sif, sif_check
from hpcenv.identity.stage import data_folder
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.codec import SCHEMA
from hpcenv.records.facts import Staged
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import DataFolder, Manifest, SifIdentity
from hpcenv.records.run_folder import RunFolder

# Sites have different names for node-local disks. The job's own folder is first, because the epilog empties it. /tmp is
# last, because on many nodes /tmp is in memory. Memory is used only on request.
_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")
_FOLDERS = ("/local", "/scratch/local", "/tmp")  # noqa: S108

_DAYS_UNUSED = 14
_SECONDS_IN_USE = 3600.0
_ROOM_LEFT = 64 * 1024 * 1024
_CHUNK = 4 * 1024 * 1024
# Local file systems record times with the kernel's tick, at most 10 ms (CONFIG_HZ=100).
_LOCAL_TICK = 0.05
_SLOWEST_BYTES_PER_SECOND = 10e6


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A candidate folder for copies on one node.

    Attributes:
        folder: the user's folder in the candidate folder; it has the same path on every node.
        reason: why the folder cannot be used; empty if it can be used.
        sif: identity of the checked copy of the SIF; None without a copy.
        data: source -> copy, for the data folders that have a copy.
        no_room: name -> reason, for the missing items that do not fit.
    """

    folder: str
    reason: str = ""
    sif: SifIdentity | None = None
    data: dict[str, str] = field(default_factory=dict)
    no_room: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NodeDisks:
    """The candidate folders of a node, before files are copied."""

    schema: int
    run: str
    node: str
    attempt: int
    disks: tuple[Disk, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Sending:
    """The decision of the batch node.

    Attributes:
        folder: folder for the copies on all nodes; empty if no node has a usable folder.
        sent: names of the items that sbcast copied to every node.
        said: the error of sbcast; empty if sbcast reported no error.
        seconds: duration of the step.
    """

    schema: int
    run: str
    attempt: int
    folder: str
    sent: tuple[str, ...] = ()
    said: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Item:
    """A file to stage: the SIF, or a data folder packed into one file.

    Attributes:
        name: name of the copy in the folder.
        path: path of the shared file.
        size: size of the shared file, in bytes.
        on_disk: how many bytes are needed on the node while the item is staged.
        data: record of the data folder; None for the SIF.
    """

    name: str
    path: str
    sha256: str
    size: int
    on_disk: int
    data: DataFolder | None = None


def items_of(manifest: Manifest) -> tuple[Item, ...]:
    """Return the files that the run stages. Pure."""
    request = manifest.stage
    if request is None:
        return ()
    items = []
    if request.sif_sha256:
        items.append(
            Item(
                name=f"sha256-{request.sif_sha256}.sif",
                path=manifest.environment.sif,
                sha256=request.sif_sha256,
                size=request.sif_size,
                on_disk=request.sif_size,
            )
        )
    items.extend(
        Item(name=f"data-{d.sha256}", path=d.tar, sha256=d.sha256, size=d.size, on_disk=d.size + d.unpacked, data=d)
        for d in request.data
    )
    return tuple(items)


# -- look: every node ---------------------------------------------------------------------


def look(manifest: Manifest, this_node: ThisNode, environ: Mapping[str, str]) -> NodeDisks:
    """Return the candidate folders of this node with their copies. Old copies are removed."""
    assert manifest.stage is not None
    started = time.monotonic()
    requested = manifest.stage.folder
    named = (requested,) if requested else (*(environ.get(name, "") for name in _VARIABLES), *_FOLDERS)
    own = {name for name in (requested, environ.get("SLURM_TMPDIR", "")) if name}
    disks = []
    for base in dict.fromkeys(os.path.normpath(name) for name in named if os.path.isabs(name)):
        disk = _look_at(base, manifest, items_of(manifest), memory_too=base in {os.path.normpath(n) for n in own})
        disks.append(disk)
    return NodeDisks(
        schema=SCHEMA,
        run=manifest.run,
        node=this_node.node,
        attempt=this_node.attempt,
        disks=tuple(disks),
        seconds=round(time.monotonic() - started, 3),
    )


def _look_at(base: str, manifest: Manifest, items: Sequence[Item], *, memory_too: bool) -> Disk:
    assert manifest.stage is not None
    folder = Path(base) / f"hpcenv-stage-{os.geteuid()}"
    try:
        open_folder(Path(base), folder, memory_too=memory_too)
        with locked(folder):
            copies = {item.name: _present(folder, item) for item in items}
            missing = [item for item in items if copies[item.name] is None]
            clean(folder, keep={item.name for item in items}, limit=manifest.stage.limit, missing=missing)
            no_room = _no_room(folder, missing, limit=manifest.stage.limit)
    except (OSError, HpcenvError) as error:
        return Disk(folder=str(folder), reason=error.what if isinstance(error, HpcenvError) else str(error))
    identities = [copy for copy in copies.values() if isinstance(copy, SifIdentity)]
    return Disk(
        folder=str(folder),
        sif=identities[0] if identities else None,
        data={i.data.source: str(folder / i.name) for i in items if i.data is not None and copies[i.name]},
        no_room=no_room,
    )


def open_folder(base: Path, folder: Path, *, memory_too: bool) -> None:
    """Make this user's folder in `base`; refuse a folder that is not safe or not on this node's disk.

    Args:
        base: candidate folder.
        folder: the user's folder in `base`.
        memory_too: whether a tmpfs may be used, because the user or the site named it.

    Raises:
        FileUnusable: the folder cannot be used; the error says why.
    """
    for above in (base, *Path(os.path.realpath(base)).parents):
        status = os.stat(above)
        if not stat.S_ISDIR(status.st_mode):
            raise FileUnusable(f"{above} is not a folder")
        if status.st_uid not in (0, os.geteuid()):
            raise FileUnusable(f"{above} belongs to another user (uid {status.st_uid})")
        # With the sticky bit, as on /tmp, other users cannot rename or remove files.
        if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            raise FileUnusable(f"other users can rename files in {above}")
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mount = sif_check.mount_of(descriptor)
    finally:
        os.close(descriptor)
    if not sif_check.is_node_local(mount):
        raise FileUnusable(f"{base} is not on a disk of this node ({mount.kind if mount else 'unknown file system'})")
    if mount is not None and mount.kind == "tmpfs" and not memory_too:
        raise FileUnusable(f"{base} is memory (tmpfs), which is used only if --stage-dir names it")
    folder.mkdir(mode=0o700, exist_ok=True)
    if not sif_check.is_private(folder):
        raise FileUnusable(f"{folder} belongs to another user, or other users can read or write it")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder in this context, so that the jobs of one user on one node use the folder one after the other.

    The kernel releases the lock if its holder ends.
    """
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _present(folder: Path, item: Item) -> SifIdentity | str | None:
    """Return the identity or the path of a correct copy; None if there is no such copy. A wrong copy is removed."""
    path = folder / item.name
    if item.data is not None:
        good = data_folder.is_unchanged(path, folder / f"{item.name}.listing")
        copy: SifIdentity | str | None = str(path) if good else None
    else:
        copy = _identity_of_copy(folder, path, item.sha256)
    if copy is None:
        _remove(folder, item.name)
    else:
        _mark(folder, item.name)
    return copy


def _identity_of_copy(folder: Path, path: Path, sha256: str) -> SifIdentity | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        digest, identity = sif_check.identify(descriptor, _records(folder), tick=_LOCAL_TICK)
    except HpcenvError:
        return None
    finally:
        os.close(descriptor)
    return identity if digest == sha256 else None


def _records(folder: Path) -> sif_check.Records | None:
    boot = sif_check.boot_id()
    return None if boot is None else sif_check.Records(folder / "records", boot)


def _mark(folder: Path, name: str) -> None:
    """Record that a copy is used now.

    The time of use is stored as the time of a separate file, because the copy's own times are part of its identity.
    """
    mark = folder / f"{name}.used"
    os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    os.utime(mark)


# -- free space ---------------------------------------------------------------------------


def clean(folder: Path, *, keep: set[str], limit: int, missing: Sequence[Item]) -> None:
    """Remove old copies. If space is needed, remove also the copies with the oldest last use. Copies in use are kept.

    Args:
        folder: the user's folder.
        keep: names that this job needs.
        limit: the largest size of all copies together, in bytes.
        missing: items that will be added.
    """
    for name in os.listdir(folder):
        if name.startswith("incoming-") and _is_left_behind(folder / name):
            _remove(folder, name)
    ages = {name: time.time() - _last_used(folder, name) for name in _copies(folder)}
    sizes = {name: _size_of(folder / name) for name in ages}
    to_add = sum(item.on_disk for item in missing)
    for name in sorted(ages, key=lambda n: -ages[n]):
        crowded = sum(sizes.values()) + to_add > limit or _free(folder) < to_add + _ROOM_LEFT
        if name not in keep and (crowded or ages[name] > _DAYS_UNUSED * 86400) and not _in_use(folder, name, ages):
            _remove(folder, name)
            del sizes[name]


def _is_left_behind(incoming: Path) -> bool:
    try:
        return time.time() - os.lstat(incoming).st_mtime > 24 * 3600
    except FileNotFoundError:
        return False  # its job has just renamed this file


def _copies(folder: Path) -> list[str]:
    names = os.listdir(folder)
    return [n for n in names if n.startswith(("sha256-", "data-")) and not n.endswith((".used", ".listing"))]


def _last_used(folder: Path, name: str) -> float:
    try:
        return os.lstat(folder / f"{name}.used").st_mtime
    except OSError:
        return os.lstat(folder / name).st_mtime


def _in_use(folder: Path, name: str, ages: Mapping[str, float]) -> bool:
    # If the clock was set back, the age can be negative. Such an age counts as recent use.
    if ages[name] < _SECONDS_IN_USE:
        return True
    try:
        descriptor = os.open(folder / f"{name}.used", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove(folder: Path, name: str) -> None:
    path = folder / name
    if path.is_dir() and not path.is_symlink():
        data_folder.remove(path)
    else:
        path.unlink(missing_ok=True)
    for more in (".used", ".listing"):
        (folder / f"{name}{more}").unlink(missing_ok=True)


def _size_of(path: Path) -> int:
    if path.is_symlink() or not path.is_dir():
        return os.lstat(path).st_blocks * 512
    return sum(os.lstat(os.path.join(top, name)).st_blocks * 512 for top, _, files in os.walk(path) for name in files)


def _free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _no_room(folder: Path, missing: Sequence[Item], *, limit: int) -> dict[str, str]:
    """Return the items that do not fit, each with the reason, in the order of the request."""
    free = _free(folder) - _ROOM_LEFT
    allowed = limit - sum(_size_of(folder / name) for name in _copies(folder))
    reasons = {}
    for item in missing:
        need = f"{item.on_disk / 1e6:.0f} MB needed"
        if item.on_disk > free:
            reasons[item.name] = f"no space in {folder}: {need}, {max(free, 0) / 1e6:.0f} MB free"
        elif item.on_disk > allowed:
            reasons[item.name] = (
                f"stage-limit: {need} in {folder}, {max(allowed, 0) / 1e6:.0f} MB left of {limit / 1e6:.0f} MB"
            )
        else:
            free, allowed = free - item.on_disk, allowed - item.on_disk
    return reasons


# -- send: batch node ---------------------------------------------------------------------


def send(manifest: Manifest, run: RunFolder, this_node: ThisNode, environ: Mapping[str, str]) -> bool:
    """Choose the folder and broadcast the files that most nodes lack; return whether a keep step is needed.

    If every node already has all copies, this function writes the records of the nodes, and the job needs one step
    less.

    Args:
        manifest: manifest of the run.
        run: the run folder.
        this_node: the batch node.
        environ: environment variables for sbcast.
    """
    started = time.monotonic()
    looks = {
        node: found for node in this_node.nodes if (found := _read_look(manifest, run, node, this_node)) is not None
    }
    folder = choose_folder(looks, items_of(manifest))
    disks = {node: _disk_of(found, folder) for node, found in looks.items()}
    complete = {node: disk for node, disk in disks.items() if not _missing(disk, items_of(manifest))}
    if len(complete) == len(this_node.nodes):
        for node, disk in complete.items():
            save_record(
                _as_staged(manifest, this_node, node, disk, seconds={"look": looks[node].seconds}), run.staged_of(node)
            )
        return False
    sent, said = [], ""
    for item in items_of(manifest):
        if not folder or not worth_sending(item, disks, count=len(this_node.nodes)):
            continue
        try:
            _broadcast(item, Path(folder) / _incoming(item, this_node), environ)
            sent.append(item.name)
        except HpcenvError as error:
            said = f"{error.what}: {error.why}" if error.why else error.what
    record = Sending(
        schema=SCHEMA, run=manifest.run, attempt=this_node.attempt, folder=folder, sent=tuple(sent), said=said,
        seconds=round(time.monotonic() - started, 3),
    )  # fmt: skip
    save_record(record, run.sending)
    return True


def _read_look(manifest: Manifest, run: RunFolder, node: str, this_node: ThisNode) -> NodeDisks | None:
    try:
        found = load_record(NodeDisks, run.looked_of(node))
    except RecordInvalid:
        return None
    return found if (found.run, found.node, found.attempt) == (manifest.run, node, this_node.attempt) else None


def choose_folder(looks: Mapping[str, NodeDisks], items: Sequence[Item]) -> str:
    """Return the folder for all nodes: the first of the folders in which the items fit on the most nodes. Pure."""
    counts: dict[str, tuple[int, int]] = {}
    for disk in (disk for node_look in looks.values() for disk in node_look.disks if not disk.reason):
        fitting, usable = counts.get(disk.folder, (0, 0))
        counts[disk.folder] = (fitting + (not set(_missing(disk, items)) & set(disk.no_room)), usable + 1)
    return max(counts, key=lambda folder: counts[folder], default="")


def _disk_of(found: NodeDisks, folder: str) -> Disk:
    nothing = Disk(folder=folder, reason="; ".join(d.reason for d in found.disks if d.reason) or "no folder was found")
    return next((disk for disk in found.disks if disk.folder == folder and folder), nothing)


def _missing(disk: Disk, items: Sequence[Item]) -> list[str]:
    return [i.name for i in items if (disk.sif is None if i.data is None else i.data.source not in disk.data)]


def worth_sending(item: Item, disks: Mapping[str, Disk], *, count: int) -> bool:
    """Whether to copy an item with sbcast, which sends a file to all nodes of the job. Pure.

    sbcast fails for all nodes if one node has no space. If only a few nodes lack the file, reading
    it from the shared file system causes less traffic.
    """
    lacking = [disk for disk in disks.values() if item.name in _missing(disk, [item])]
    can = all(not disk.reason and item.name not in disk.no_room for disk in disks.values())
    return can and len(disks) == count and len(lacking) > 1 and 2 * len(lacking) >= count


def _broadcast(item: Item, target: Path, environ: Mapping[str, str]) -> None:
    tool = process.find_tool("sbcast", needed_for="copy a file to all nodes", path=environ.get("PATH"))
    # SBCAST_* variables are the user's defaults (compression, fan-out, libraries). They are kept.
    argv = [tool, "--force", item.path, str(target)]
    process.run(argv, timeout=120 + item.size / _SLOWEST_BYTES_PER_SECOND, env=environ)


def _incoming(item: Item, this_node: ThisNode) -> str:
    return f"incoming-{this_node.job_id}-{this_node.attempt}-{item.name}"


# -- keep: every node ---------------------------------------------------------------------


def keep(manifest: Manifest, run: RunFolder, this_node: ThisNode) -> Staged:
    """Check the files that arrived, copy the missing files, and return the copies of this node."""
    started = time.monotonic()
    sending = load_record(Sending, run.sending)
    found = _read_look(manifest, run, this_node.node, this_node)
    if found is None or (sending.run, sending.attempt) != (manifest.run, this_node.attempt):
        return _as_staged(
            manifest,
            this_node,
            this_node.node,
            Disk(folder="", reason="there is no stage-look record for this attempt"),
        )
    disk = _disk_of(found, sending.folder)
    problems, how = [], {}
    for item in items_of(manifest):
        if item.name not in _missing(disk, [item]):
            how[item.name] = "present"
            continue
        if disk.reason or item.name in disk.no_room:
            problems.append(disk.no_room.get(item.name) or disk.reason)
            continue
        how[item.name] = "sbcast" if item.name in sending.sent else "copy"
        try:
            disk = _take(disk, item, this_node, arrived=item.name in sending.sent)
        except (OSError, HpcenvError) as error:
            del how[item.name]
            problems.append(
                f"{error.what}: {error.why}" if isinstance(error, HpcenvError) and error.why else str(error)
            )
    if sending.folder and not disk.reason:
        for item in items_of(manifest):
            (Path(sending.folder) / _incoming(item, this_node)).unlink(missing_ok=True)
    seconds = {"look": found.seconds, "send": sending.seconds, "keep": round(time.monotonic() - started, 3)}
    done = _as_staged(manifest, this_node, this_node.node, disk, seconds=seconds)
    return replace(done, how=how, problems=tuple(dict.fromkeys(problems)))


def _take(disk: Disk, item: Item, this_node: ThisNode, *, arrived: bool) -> Disk:
    """Check the hash of one copy, rename it to its final name, and return its disk with this copy added."""
    folder = Path(disk.folder)
    incoming = folder / _incoming(item, this_node)
    if item.data is not None:
        return _take_data(disk, item, incoming, arrived=arrived)
    try:
        digest = sif.file_sha256(incoming) if arrived else _copy(Path(item.path), incoming)
        if digest != item.sha256:
            raise ImageMismatch(
                f"the copy of {item.path} is not the locked SIF",
                why=f"sha256 {digest[:12]}... instead of {item.sha256[:12]}...",
            )
        incoming.chmod(0o400)
        with locked(folder):
            target = folder / item.name
            # Another job may have made the copy first. Keep the copy of that job, because it may be in use.
            if _identity_of_copy(folder, target, item.sha256) is None:
                os.replace(incoming, target)
                # After the next tick, each change of the copy changes its ctime.
                time.sleep(_LOCAL_TICK)
            _mark(folder, item.name)
        identity = _known(folder, target, digest)
    finally:
        incoming.unlink(missing_ok=True)
    return replace(disk, sif=identity)


def _known(folder: Path, path: Path, digest: str) -> SifIdentity:
    """Return the identity of a copy whose hash was just checked, and record it for later jobs."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        header = sif_check.header_of(descriptor)
        file = sif_check.identity_of(descriptor)
    finally:
        os.close(descriptor)
    records = _records(folder)
    if records is not None:
        records.keep(file, sha256=digest, header_sha256=header[0])
    return sif_check.known_as(file, digest, header)


def _take_data(disk: Disk, item: Item, incoming: Path, *, arrived: bool) -> Disk:
    """Unpack a data folder and hash its file in one pass; remove the result if the hash is wrong."""
    assert item.data is not None
    folder = Path(disk.folder)
    aside, target = Path(f"{incoming}.d"), folder / item.name
    try:
        digest = data_folder.unpack(incoming if arrived else Path(item.path), aside)
        if digest != item.sha256:
            raise ImageMismatch(
                f"the copy of {item.data.source} differs from the packed file", why=f"sha256 {digest[:12]}..."
            )
        with locked(folder):
            if not data_folder.is_unchanged(target, folder / f"{item.name}.listing"):
                _remove(folder, item.name)
                os.rename(aside, target)
                time.sleep(_LOCAL_TICK)
                data_folder.note_listing(target, folder / f"{item.name}.listing")
            _mark(folder, item.name)
    finally:
        data_folder.remove(aside)
        incoming.unlink(missing_ok=True)
    return replace(disk, data={**disk.data, item.data.source: str(target)})


def _copy(source: Path, target: Path) -> str:
    """Copy a file and return the sha256 of the written data, in one pass."""
    target.unlink(missing_ok=True)
    digest = hashlib.sha256()
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(source, "rb") as incoming, open(descriptor, "wb", buffering=0) as outgoing:
        while piece := incoming.read(_CHUNK):
            digest.update(piece)
            left = memoryview(piece)
            while left:
                left = left[outgoing.write(left) :]
        os.fsync(outgoing.fileno())
    return digest.hexdigest()


def _as_staged(
    manifest: Manifest, this_node: ThisNode, node: str, disk: Disk, *, seconds: Mapping[str, float] | None = None
) -> Staged:
    names = [i.name for i in items_of(manifest) if i.name not in _missing(disk, [i])]
    return Staged(
        schema=SCHEMA,
        run=manifest.run,
        node=node,
        attempt=this_node.attempt,
        sif=disk.sif,
        sif_path="" if disk.sif is None else f"{disk.folder}/sha256-{disk.sif.sha256}.sif",
        data=disk.data,
        marks=tuple(f"{disk.folder}/{name}.used" for name in names),
        problems=(disk.reason,) if disk.reason else (),
        how=dict.fromkeys(names, "present"),
        seconds=dict(seconds or {}),
    )
