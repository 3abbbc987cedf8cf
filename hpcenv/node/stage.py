"""Copies of the SIF and of data folders on the node's own disk, shared by a user's jobs.

Runs on: COMPUTE NODE. Standard library only. Three steps of the batch script:

    stage-look   every node: which folder can be used, what is there already, is there room
    stage-send   batch node: choose one folder for all; sbcast what most nodes lack
    stage-keep   every node: prove what arrived (or copy it from the shared file), keep it

A copy is named by the SHA-256 of its content, appears by rename, and is proved by its full
hash once; later jobs know it by its identity (node/sif_check.py). A node that has no room or
no usable folder works from the shared file and says so: an image that starts slower is better
than a job that waited for a day and does not start.

The folder belongs to the user alone. What a job uses is protected twice: its mark (`.used`)
is locked while the training runs, and nothing that was used within the last hour is removed,
which covers the time between the steps.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpcenv import wire
from hpcenv.adapters import process, sif
from hpcenv.dataclass import dataclass, field, replace
from hpcenv.errors import FileUnusable, HpcenvError, ImageMismatch, RecordInvalid
from hpcenv.node import data_folder, sif_check
from hpcenv.node.place import Place
from hpcenv.wire import SCHEMA, DataFolder, Manifest, RunFolder, SifIdentity, Staged

# Sites name node-local disks in many ways; a job's own folder comes first because its epilog
# empties it. /tmp is last: on many nodes it is memory, and then it is not used unasked.
_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")
_FOLDERS = ("/local", "/scratch/local", "/tmp")  # noqa: S108

_DAYS_UNUSED = 14
_SECONDS_IN_USE = 3600.0
_ROOM_LEFT = 64 * 1024 * 1024
_CHUNK = 4 * 1024 * 1024
# Local file systems stamp with the kernel's tick, 10 ms at most (CONFIG_HZ=100).
_LOCAL_TICK = 0.05
_SLOWEST_BYTES_PER_SECOND = 10e6


@dataclass(frozen=True, kw_only=True)
class Disk:
    """One folder that copies could lie in, as one node found it.

    Attributes:
        folder: the user's own folder in it; the same path on every node that has it.
        reason: why it cannot be used; empty when it can.
        sif: identity of the SIF's copy, proved just now; None without one.
        data: source -> copy, for the data folders that are there.
        no_room: names of what is missing and would not fit, with the reason.
    """

    folder: str
    reason: str = ""
    sif: SifIdentity | None = None
    data: dict[str, str] = field(default_factory=dict)
    no_room: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a node found before anything was copied."""

    schema: int
    run: str
    node: str
    attempt: int
    disks: tuple[Disk, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Sending:
    """What the batch node decided.

    Attributes:
        folder: where all nodes keep their copies; empty where none can.
        sent: names that sbcast brought to every node.
        said: why sbcast was not used where it could have been.
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
    """One thing to have on the node: the SIF, or a data folder packed into one file."""

    name: str
    path: str
    sha256: str
    size: int
    on_disk: int
    data: DataFolder | None = None


def items_of(manifest: Manifest) -> tuple[Item, ...]:
    """Return what the run asks for. Pure."""
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


def look(manifest: Manifest, place: Place, environ: Mapping[str, str]) -> Look:
    """Return what this node has and could take; old copies are removed on the way."""
    assert manifest.stage is not None
    started = time.monotonic()
    asked = manifest.stage.folder
    named = (asked,) if asked else (*(environ.get(name, "") for name in _VARIABLES), *_FOLDERS)
    own = {name for name in (asked, environ.get("SLURM_TMPDIR", "")) if name}
    disks = []
    for base in dict.fromkeys(os.path.normpath(name) for name in named if os.path.isabs(name)):
        disk = _look_at(base, manifest, items_of(manifest), memory_too=base in {os.path.normpath(n) for n in own})
        disks.append(disk)
    return Look(
        schema=SCHEMA,
        run=manifest.run,
        node=place.node,
        attempt=place.attempt,
        disks=tuple(disks),
        seconds=round(time.monotonic() - started, 3),
    )


def _look_at(base: str, manifest: Manifest, items: Sequence[Item], *, memory_too: bool) -> Disk:
    assert manifest.stage is not None
    folder = Path(base) / f"hpcenv-stage-{os.geteuid()}"
    try:
        open_folder(Path(base), folder, memory_too=memory_too)
        with locked(folder):
            there = {item.name: _present(folder, item) for item in items}
            missing = [item for item in items if there[item.name] is None]
            clean(folder, keep={item.name for item in items}, limit=manifest.stage.limit, missing=missing)
            no_room = _no_room(folder, missing, limit=manifest.stage.limit)
    except (OSError, HpcenvError) as error:
        return Disk(folder=str(folder), reason=error.what if isinstance(error, HpcenvError) else str(error))
    identities = [found for found in there.values() if isinstance(found, SifIdentity)]
    return Disk(
        folder=str(folder),
        sif=identities[0] if identities else None,
        data={i.data.source: str(folder / i.name) for i in items if i.data is not None and there[i.name]},
        no_room=no_room,
    )


def open_folder(base: Path, folder: Path, *, memory_too: bool) -> None:
    """Make this user's folder in `base`, and refuse one that is not safe or not this node's.

    Args:
        memory_too: take a tmpfs: somebody said that it is meant.

    Raises:
        FileUnusable: named is what is wrong with which folder.
    """
    for above in (base, *Path(os.path.realpath(base)).parents):
        status = os.stat(above)
        if not stat.S_ISDIR(status.st_mode):
            raise FileUnusable(f"{above} is not a folder")
        if status.st_uid not in (0, os.geteuid()):
            raise FileUnusable(f"{above} belongs to another user (uid {status.st_uid})")
        # With the sticky bit, as on /tmp, others can add but not rename or remove.
        if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            raise FileUnusable(f"others can rename what is in {above}")
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mount = sif_check.mount_of(descriptor)
    finally:
        os.close(descriptor)
    if not sif_check.is_node_local(mount):
        raise FileUnusable(f"{base} is not a disk of this node ({mount.kind if mount else 'unknown file system'})")
    if mount is not None and mount.kind == "tmpfs" and not memory_too:
        raise FileUnusable(f"{base} is memory (tmpfs), which is not used unless --stage-dir names it")
    folder.mkdir(mode=0o700, exist_ok=True)
    if not sif_check.is_private(folder):
        raise FileUnusable(f"{folder} is not this user's own, or others can read or write it")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: jobs of one user on one node take turns. The kernel frees a dead holder's."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _present(folder: Path, item: Item) -> SifIdentity | str | None:
    """Return the proof of a copy that is there and right; one that is not right is removed."""
    path = folder / item.name
    if item.data is not None:
        good = data_folder.is_unchanged(path, folder / f"{item.name}.listing")
        found: SifIdentity | str | None = str(path) if good else None
    else:
        found = _identity_of_copy(folder, path, item.sha256)
    if found is None:
        _remove(folder, item.name)
    else:
        _mark(folder, item.name)
    return found


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
    """Note that a copy is used now; the copy itself keeps its times, which identify it."""
    mark = folder / f"{name}.used"
    os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    os.utime(mark)


# -- room ---------------------------------------------------------------------------------


def clean(folder: Path, *, keep: set[str], limit: int, missing: Sequence[Item]) -> None:
    """Remove what is old, and the longest unused where room is needed; never what is in use.

    Args:
        keep: names that this job wants.
        limit: the most bytes of all copies.
        missing: what will be added.
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
        return False  # the job that brings it has just proved it


def _copies(folder: Path) -> list[str]:
    names = os.listdir(folder)
    return [n for n in names if n.startswith(("sha256-", "data-")) and not n.endswith((".used", ".listing"))]


def _last_used(folder: Path, name: str) -> float:
    try:
        return os.lstat(folder / f"{name}.used").st_mtime
    except OSError:
        return os.lstat(folder / name).st_mtime


def _in_use(folder: Path, name: str, ages: Mapping[str, float]) -> bool:
    # A clock that was set back makes ages negative: not old.
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
    """Return what does not fit, in the order in which it was asked for."""
    free = _free(folder) - _ROOM_LEFT
    allowed = limit - sum(_size_of(folder / name) for name in _copies(folder))
    reasons = {}
    for item in missing:
        need = f"{item.on_disk / 1e6:.0f} MB needed"
        if item.on_disk > free:
            reasons[item.name] = f"no room in {folder}: {need}, {max(free, 0) / 1e6:.0f} MB free"
        elif item.on_disk > allowed:
            reasons[item.name] = (
                f"--stage-limit: {need} in {folder}, {max(allowed, 0) / 1e6:.0f} MB left of {limit / 1e6:.0f} MB"
            )
        else:
            free, allowed = free - item.on_disk, allowed - item.on_disk
    return reasons


# -- send: batch node ---------------------------------------------------------------------


def send(manifest: Manifest, run: RunFolder, place: Place, environ: Mapping[str, str]) -> bool:
    """Choose the folder, broadcast what most nodes lack; return whether nodes have something to do.

    Where every node has everything already, the nodes' records are written here, which saves
    them a job step.
    """
    started = time.monotonic()
    looks = {node: found for node in place.nodes if (found := _read_look(manifest, run, node, place)) is not None}
    folder = choose_folder(looks, items_of(manifest))
    disks = {node: _disk_of(found, folder) for node, found in looks.items()}
    complete = {node: disk for node, disk in disks.items() if not _missing(disk, items_of(manifest))}
    if len(complete) == len(place.nodes):
        for node, disk in complete.items():
            wire.write(
                _as_staged(manifest, place, node, disk, seconds={"look": looks[node].seconds}), run.staged_of(node)
            )
        return False
    sent, said = [], ""
    for item in items_of(manifest):
        if not folder or not worth_sending(item, disks, count=len(place.nodes)):
            continue
        try:
            _broadcast(item, Path(folder) / _incoming(item, place), environ)
            sent.append(item.name)
        except HpcenvError as error:
            said = f"{error.what}: {error.why}" if error.why else error.what
    record = Sending(
        schema=SCHEMA, run=manifest.run, attempt=place.attempt, folder=folder, sent=tuple(sent), said=said,
        seconds=round(time.monotonic() - started, 3),
    )  # fmt: skip
    wire.write(record, run.sending)
    return True


def _read_look(manifest: Manifest, run: RunFolder, node: str, place: Place) -> Look | None:
    try:
        found = wire.read(Look, run.looked_of(node))
    except RecordInvalid:
        return None
    return found if (found.run, found.node, found.attempt) == (manifest.run, node, place.attempt) else None


def choose_folder(looks: Mapping[str, Look], items: Sequence[Item]) -> str:
    """Return the folder for all nodes: the first that serves all, else the one that serves most. Pure."""
    serves: dict[str, tuple[int, int]] = {}
    for disk in (disk for found in looks.values() for disk in found.disks if not disk.reason):
        fitting, usable = serves.get(disk.folder, (0, 0))
        serves[disk.folder] = (fitting + (not set(_missing(disk, items)) & set(disk.no_room)), usable + 1)
    return max(serves, key=lambda folder: serves[folder], default="")


def _disk_of(found: Look, folder: str) -> Disk:
    nothing = Disk(folder=folder, reason="; ".join(d.reason for d in found.disks if d.reason) or "no folder was found")
    return next((disk for disk in found.disks if disk.folder == folder and folder), nothing)


def _missing(disk: Disk, items: Sequence[Item]) -> list[str]:
    return [i.name for i in items if (disk.sif is None if i.data is None else i.data.source not in disk.data)]


def worth_sending(item: Item, disks: Mapping[str, Disk], *, count: int) -> bool:
    """Whether sbcast, which brings a file to all nodes of the job, is the way for this one. Pure.

    It fails as a whole when one node has no room; where few nodes lack the file, those read it
    from the shared file system with less traffic than a broadcast.
    """
    lacking = [disk for disk in disks.values() if item.name in _missing(disk, [item])]
    can = all(not disk.reason and item.name not in disk.no_room for disk in disks.values())
    return can and len(disks) == count and len(lacking) > 1 and 2 * len(lacking) >= count


def _broadcast(item: Item, target: Path, environ: Mapping[str, str]) -> None:
    tool = process.find_tool("sbcast", needed_for="copy a file to all nodes", path=environ.get("PATH"))
    # SBCAST_* are a user's own defaults (compression, fan-out, libraries) and stay.
    argv = [tool, "--force", item.path, str(target)]
    process.run(argv, timeout=120 + item.size / _SLOWEST_BYTES_PER_SECOND, env=environ)


def _incoming(item: Item, place: Place) -> str:
    return f"incoming-{place.job_id}-{place.attempt}-{item.name}"


# -- keep: every node ---------------------------------------------------------------------


def keep(manifest: Manifest, run: RunFolder, place: Place) -> Staged:
    """Prove what arrived, copy what did not, and return what this node has now."""
    started = time.monotonic()
    sending = wire.read(Sending, run.sending)
    found = _read_look(manifest, run, place.node, place)
    if found is None or (sending.run, sending.attempt) != (manifest.run, place.attempt):
        return _as_staged(manifest, place, place.node, Disk(folder="", reason="nothing was looked up for this attempt"))
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
            disk = _take(disk, item, place, arrived=item.name in sending.sent)
        except (OSError, HpcenvError) as error:
            del how[item.name]
            problems.append(
                f"{error.what}: {error.why}" if isinstance(error, HpcenvError) and error.why else str(error)
            )
    if sending.folder and not disk.reason:
        for item in items_of(manifest):
            (Path(sending.folder) / _incoming(item, place)).unlink(missing_ok=True)
    seconds = {"look": found.seconds, "send": sending.seconds, "keep": round(time.monotonic() - started, 3)}
    done = _as_staged(manifest, place, place.node, disk, seconds=seconds)
    return replace(done, how=how, problems=tuple(dict.fromkeys(problems)))


def _take(disk: Disk, item: Item, place: Place, *, arrived: bool) -> Disk:
    """Prove one copy and put it under its name; return the disk with it."""
    folder = Path(disk.folder)
    incoming = folder / _incoming(item, place)
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
            # Another job may have been quicker: then its copy stays, somebody may run from it.
            if _identity_of_copy(folder, target, item.sha256) is None:
                os.replace(incoming, target)
                # From the next tick on a change shows in the copy's ctime.
                time.sleep(_LOCAL_TICK)
            _mark(folder, item.name)
        identity = _known(folder, target, digest)
    finally:
        incoming.unlink(missing_ok=True)
    return replace(disk, sif=identity)


def _known(folder: Path, path: Path, digest: str) -> SifIdentity:
    """Return the identity of a copy that was proved a moment ago, and note it for later jobs."""
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
    """Unpack a data folder, hashing on the way; what is not as packed is thrown away."""
    assert item.data is not None
    folder = Path(disk.folder)
    aside, target = Path(f"{incoming}.d"), folder / item.name
    try:
        digest = data_folder.unpack(incoming if arrived else Path(item.path), aside)
        if digest != item.sha256:
            raise ImageMismatch(
                f"the copy of {item.data.source} is not what was packed", why=f"sha256 {digest[:12]}..."
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
    """Copy a file and return the hash of what was written, in one pass."""
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
    manifest: Manifest, place: Place, node: str, disk: Disk, *, seconds: Mapping[str, float] | None = None
) -> Staged:
    names = [i.name for i in items_of(manifest) if i.name not in _missing(disk, [i])]
    return Staged(
        schema=SCHEMA,
        run=manifest.run,
        node=node,
        attempt=place.attempt,
        sif=disk.sif,
        sif_path="" if disk.sif is None else f"{disk.folder}/sha256-{disk.sif.sha256}.sif",
        data=disk.data,
        marks=tuple(f"{disk.folder}/{name}.used" for name in names),
        problems=(disk.reason,) if disk.reason else (),
        how=dict.fromkeys(names, "present"),
        seconds=dict(seconds or {}),
    )
