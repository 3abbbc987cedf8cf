"""A lock between processes of all nodes, on any POSIX file system.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

flock(2) and fcntl locks are not always available: Lustre can be mounted without `flock`, NFS
without lockd, and the lock of a dead node can remain. So a lease is a file. This lease relies on rename(2) and on
link(2), which fails if the name exists. NFS v3 and v4, Lustre, GPFS, BeeGFS and local disks support these two calls. On
file systems without hard links, O_EXCL is used instead of link(2).

    NAME                      the lease: line 1 names its holder, line 2 is its heartbeat
    .NAME.PROCESS.new         a lease before it gets its name; `private_name` is PROCESS
    .NAME.break-KEY           the right to break the lease KEY; only one process can create it
    .NAME.PROCESS.old         a lease that is being removed

The heartbeat writes how long the holder has held the lease. A waiting process observes whether the file *changes*. Each
process uses its own monotonic clock; clocks of two machines are never compared. A lease is stale

- at once, if its holder ran on this kernel and in this process id space and has ended, or if another process now has
  the holder's process id (with a different start time);
- otherwise, if it did not change while a waiting process observed it for `stale_after` seconds.
  Time without observations (the process was stopped, or the file server did not answer) does
  not count.

A lease has one limitation. If a holder is stopped for longer than `stale_after`, another process can take the lease.
The stopped holder notices this only when it calls `still_mine`. So two processes may publish the same result, and this
must be harmless: see `store.Store.publish_image`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcenv.errors import FileUnusable, ToolFailed
from hpcenv.progress import Event, OnEvent, ignore
from hpcenv.text import printable

__all__ = [
    "BEAT",
    "STALE_AFTER",
    "Holder",
    "Lease",
    "Owner",
    "lease",
    "live_holders",
    "owner_of",
    "private_name",
    "remove_ended",
    "this_process",
    "unfinished",
]

# Seconds. A live holder must not lose its lease if a file server does not answer for a moment, or if Python code does
# not let the heartbeat thread run for a moment.
BEAT = 3.0
STALE_AFTER = 30.0

_SCHEMA = 1
_LARGEST_FILE = 8192
_REPORT_SECONDS = 15.0
_POLL_FIRST, _POLL_LAST = 0.05, 1.0
# link(2) fails with these errors on FAT and some FUSE file systems, and on BeeGFS between folders.
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES})


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process, with values that identify it on all machines and at all times.

    Attributes:
        host: name of the machine, for messages.
        machine: digest of the kernel's boot id and the process id space. If `machine` equals the digest of the caller,
            `pid` means the same process here. `machine` is empty if the digest cannot be determined.
        pid, start: the process id, and the start of the process in clock ticks since boot (proc(5), stat field 22).
    """

    host: str
    machine: str
    pid: int
    start: int

    def is_dead(self) -> bool:
        """Return whether the process has certainly ended; False if that cannot be determined here."""
        if not self.machine or self.machine != _machine() or self.pid < 1:
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            pass  # the process belongs to another user
        state, start = _process(self.pid)
        return state in ("Z", "X") or (start != 0 and self.start not in (0, start))


_PRIVATE = re.compile(r"([A-Za-z0-9_-]+)\.(\d{1,20})\.(\d{1,20})\.([0-9a-f]{0,16})\.[0-9a-f]{16}")


def private_name() -> str:
    """Return a new name for unfinished work of this process; `owner_of` finds the process from the name."""
    me = this_process()
    host = re.sub(r"[^A-Za-z0-9_-]", "-", me.host) or "-"
    return f"{host[:100]}.{me.pid}.{me.start}.{me.machine}.{secrets.token_hex(8)}"


def owner_of(name: str) -> Owner | None:
    """Return the process that made a private name, or a file of `unfinished`; None for any other name."""
    # `.NAME.PROCESS.new`: PROCESS is the five words before the last word.
    match = _PRIVATE.fullmatch(".".join(name.split(".")[-6:-1]) if name.startswith(".") else name)
    if match is None:
        return None
    host, pid, start, machine = match.groups()
    return Owner(host=host, machine=machine, pid=int(pid), start=int(start))


def unfinished(folder: Path) -> list[Path]:
    """Return the files of leases that are being created or removed."""
    ends = (".new", ".old")
    return [path for path in folder.iterdir() if path.name.startswith(".") and path.name.endswith(ends)]


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The holder of a lease, from the file of the lease.

    Attributes:
        path: the file.
        owner: the process; None if the file cannot be read or parsed.
        purpose: completes the sentence "pid 1 on n1 ...".
        seconds: how long the owner had held the lease at its last heartbeat.
    """

    path: Path
    owner: Owner | None
    purpose: str
    seconds: float

    def __str__(self) -> str:
        if self.owner is None:
            return f"an unknown process holds `{self.path}`"
        text = f"pid {self.owner.pid} on {self.owner.host} {self.purpose} since {self.seconds:.0f} s"
        # Another user may have written the file.
        return printable(text)


def this_process() -> Owner:
    """Return the caller's own process."""
    return Owner(host=os.uname().nodename, machine=_machine(), pid=os.getpid(), start=_process(os.getpid())[1])


def _machine() -> str:
    """Return a value that is equal only for processes that see each other's process ids; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {space}".encode()).hexdigest()[:16]


def _process(pid: int) -> tuple[str, int]:
    """Return a process's state and its start time in ticks; ("", 0) if they are hidden."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
        fields = raw.rpartition(b")")[2].split()  # the program's name, before it, may contain anything
        return fields[0].decode(), int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0


class Lease:
    """A lease that this process holds; made by `lease`."""

    def __init__(self, path: Path, token: str) -> None:
        self.path = path
        self.token = token

    def still_mine(self) -> bool:
        """Return whether this process still holds the lease; call it before publishing results.

        The result is False if this process was stopped for so long that another process took the lease.
        """
        for _ in range(3):
            seen = _look(self.path)
            if seen is not None:
                return seen.key == self.token
            time.sleep(0.05)  # another process may have moved the lease by mistake and is moving it back
        return False


@contextlib.contextmanager
def lease(
    path: Path,
    *,
    purpose: str,
    timeout: float,
    on_event: OnEvent = ignore,
    beat: float = BEAT,
    stale_after: float = STALE_AFTER,
) -> Iterator[Lease]:
    """Context manager: hold the lease `path`; wait until it is free.

    Args:
        path: the file; its folder must exist and be writable.
        purpose: what the holder does, for messages in waiting processes: "converts X".
        timeout: seconds to wait; 0 tries once.
        on_event: called with the current holder, at once and then every 15 s.
        beat: seconds between heartbeats.
        stale_after: seconds without a heartbeat after which a lease is broken. `stale_after` must be the same for all
            processes that use `path`, and several times `beat`.

    Raises:
        ToolFailed: another process still holds the lease after `timeout`; the error names the process.
        FileUnusable: the file cannot be created.
    """
    token = secrets.token_hex(16)
    text = _text(this_process(), token, purpose)
    try:
        _acquire(path, text, timeout=timeout, on_event=on_event, stale_after=stale_after)
    except OSError as error:
        raise FileUnusable(
            f"`{path}` cannot be created",
            why=error.strerror or str(error),
            hint=f"check permissions, space and quota of `{path.parent}`",
        ) from error
    held = Lease(path, token)
    stop = threading.Event()
    heart = threading.Thread(target=_beat, args=(held, stop, beat), name=f"lease {path.name}", daemon=True)
    heart.start()
    try:
        yield held
    finally:
        stop.set()
        # Use a time limit, because the file server may not answer now.
        heart.join(timeout=5)
        with contextlib.suppress(OSError):
            if held.still_mine():
                _remove_lease(path, token)


def live_holders(
    folder: Path, *, on_event: OnEvent = ignore, stale_after: float = STALE_AFTER, but: str = ""
) -> tuple[Holder, ...]:
    """Return the live holders of leases in a folder.

    For leases of this machine the answer is known at once. Leases of other machines are observed until one of them has
    a heartbeat, or for `stale_after` seconds.

    Args:
        folder: the folder of leases.
        on_event: called when the function begins to observe.
        stale_after: see `lease`.
        but: name of a lease to ignore, for example the caller's own.
    """
    watches: dict[Path, _Watch] = {}
    reported = False
    while True:
        waiting: list[Holder] = []
        alive: list[Holder] = []
        for path in _leases(folder, but):
            seen = _look(path)
            watch = watches.setdefault(path, _Watch())
            if seen is None or watch.see(seen) >= stale_after or seen.dead():
                continue
            known = seen.owner is not None and seen.owner.machine == _machine() != ""
            (alive if known or watch.changed else waiting).append(seen.holder(path))
        if alive or not waiting:
            return tuple(alive)
        if not reported:
            on_event(
                Event(
                    phase="wait",
                    what=f"observing for up to {stale_after:.0f} s whether this process is alive: {waiting[0]}",
                )
            )
            reported = True
        time.sleep(min(_POLL_LAST, stale_after / 10))


def remove_ended(folder: Path) -> None:
    """Remove the leases of ended processes of this machine; a killed process does not remove its lease itself."""
    for path in _leases(folder, ""):
        seen = _look(path)
        if seen is not None and seen.dead():
            text = _text(this_process(), secrets.token_hex(16), "removes the lease of a process that has ended")
            with contextlib.suppress(OSError):
                _break(path, seen, text, {}, STALE_AFTER)


def _leases(folder: Path, but: str) -> list[Path]:
    try:
        return sorted(folder / name for name in os.listdir(folder) if not name.startswith(".") and name != but)
    except OSError:
        return []


# --- the file of a lease -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Observation:
    """The file of a lease at one moment; `key` is unique to this lease."""

    key: str
    stamp: tuple[Any, ...]
    owner: Owner | None = None
    purpose: str = ""
    seconds: float = 0.0

    def dead(self) -> bool:
        return self.owner is not None and self.owner.is_dead()

    def holder(self, path: Path) -> Holder:
        return Holder(path=path, owner=self.owner, purpose=self.purpose, seconds=self.seconds)


@dataclass(kw_only=True)
class _Watch:
    """Measures for how long a file did not change while it was observed."""

    stamp: tuple[Any, ...] | None = None
    looked: float = 0.0
    unchanged: float = 0.0
    changed: bool = field(default=False)

    def see(self, seen: _Observation) -> float:
        """Add an observation; return the seconds without a change."""
        now = time.monotonic()
        if seen.stamp == self.stamp:
            # After a longer gap, the time does not count: this process was stopped, or the file server did not answer.
            self.unchanged += min(now - self.looked, 2 * _POLL_LAST)
        else:
            self.changed = self.stamp is not None
            self.unchanged = 0.0
        self.stamp, self.looked = seen.stamp, now
        return self.unchanged


def _text(owner: Owner, token: str, purpose: str) -> bytes:
    fields = {
        "schema": _SCHEMA,
        "token": token,
        "host": owner.host,
        "machine": owner.machine,
        "pid": owner.pid,
        "start": owner.start,
        "purpose": purpose[:1000],
    }
    return json.dumps(fields).encode() + b"\n" + _pulse(0.0)


def _pulse(seconds: float) -> bytes:
    # The length is constant, because each heartbeat overwrites the last heartbeat in place.
    return b"%015d\n" % int(seconds * 1000)


def _look(path: Path) -> _Observation | None:
    """Read the file of a lease; None if it does not exist.

    Opening a file makes an NFS client ask the server for its state (close-to-open consistency). For
    stat alone the client would use its cache for up to a minute.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:
            return None
        return _unreadable(path)
    try:
        status = os.fstat(fd)
        raw = os.read(fd, _LARGEST_FILE)
    except OSError:
        return None  # the file was removed on the server during the read; the next call notices this
    finally:
        os.close(fd)
    return _parse(raw, (status.st_ino, status.st_mtime_ns, raw))


def _unreadable(path: Path) -> _Observation | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return _Observation(key=f"inode-{status.st_ino}", stamp=(status.st_ino, status.st_mtime_ns, status.st_ctime_ns))


def _parse(raw: bytes, stamp: tuple[Any, ...]) -> _Observation:
    """Parse the file of a lease; if that fails, the result has a key but no owner."""
    first, _, second = raw.partition(b"\n")
    try:
        fields = json.loads(first)
        token = fields["token"]
        if not isinstance(token, str) or not re.fullmatch("[0-9a-f]{32}", token):
            raise ValueError
        owner = Owner(
            host=str(fields["host"])[:200],
            machine=str(fields["machine"]),
            pid=int(fields["pid"]),
            start=int(fields["start"]),
        )
        purpose = str(fields["purpose"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return _Observation(key=f"unreadable-{stamp[0]}-{hashlib.sha256(first).hexdigest()[:16]}", stamp=stamp)
    match = re.match(rb"\d{15}\n", second)
    seconds = int(match[0]) / 1000 if match is not None else 0.0
    return _Observation(key=token, stamp=stamp, owner=owner, purpose=purpose, seconds=seconds)


# --- taking, keeping, removing -----------------------------------------------------------


def _acquire(path: Path, text: bytes, *, timeout: float, on_event: OnEvent, stale_after: float) -> None:
    deadline = time.monotonic() + timeout
    watches: dict[Path, _Watch] = {}
    poll, report_at = _POLL_FIRST, 0.0
    while True:
        seen = _look(path)
        if seen is None and _create(path, text):
            return
        seen = seen or _look(path) or _Observation(key="", stamp=())
        stale = bool(seen.key) and _is_stale(path, seen, watches, stale_after)
        if stale and _break(path, seen, text, watches, stale_after):
            continue
        now = time.monotonic()
        if now >= deadline:
            raise _still_held(seen.holder(path), timeout)
        if seen.key and now >= report_at:
            on_event(Event(phase="wait", what=str(seen.holder(path))))
            report_at = now + _REPORT_SECONDS
        time.sleep(min(poll, max(deadline - time.monotonic(), 0.01)))
        poll = min(poll * 1.5, _POLL_LAST)


def _still_held(holder: Holder, timeout: float) -> ToolFailed:
    hint = "wait for it, or end it"
    if holder.owner is not None:
        hint += f" (on {holder.owner.host}: kill {holder.owner.pid})"
    return ToolFailed(f"another process is still working after {timeout:g} s", why=str(holder), hint=hint)


def _is_stale(path: Path, seen: _Observation, watches: dict[Path, _Watch], stale_after: float) -> bool:
    return watches.setdefault(path, _Watch()).see(seen) >= stale_after or seen.dead()


def _create(path: Path, text: bytes) -> bool:
    """Create the file with its complete content; return False if the name exists."""
    aside = path.with_name(f".{path.name}.{private_name()}.new")
    _write_new(aside, text)
    try:
        os.link(aside, path)
        return True
    except FileExistsError:
        # NFS repeats a call whose answer was lost; the second call then fails although the first one succeeded.
        return _same_file(aside, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    finally:
        _forget(aside)
    try:
        _write_new(path, text)
    except FileExistsError:
        return False
    return True


def _write_new(path: Path, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        os.fchmod(fd, 0o644)  # independent of the umask, because other users must be able to read who the holder is
        os.write(fd, text)
        os.fsync(fd)
    except OSError:
        _forget(path)
        raise
    finally:
        os.close(fd)


def _same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samestat(os.lstat(one), os.lstat(other))
    except OSError:
        return False


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _break(path: Path, seen: _Observation, text: bytes, watches: dict[Path, _Watch], stale_after: float) -> bool:
    """Remove a stale lease; return False if another process is removing it.

    `seen.key` is never used twice, and only one process can create the file `.NAME.break-KEY` with this key. A later
    process finds a different key in `path`, and does not remove the lease with the different key.
    """
    claim = path.with_name(f".{path.name}.break-{seen.key}")
    if not _create(claim, text):
        other = _look(claim)
        if other is not None and _is_stale(claim, other, watches, stale_after):
            _remove_lease(claim, other.key)  # the process that made this claim file ended before it removed the lease
        return False
    try:
        again = _look(path)
        if again is None:
            return True
        if again.stamp != seen.stamp:
            return False  # the holder was stopped and continued, or another process got the lease
        _remove_lease(path, seen.key)
        return True
    finally:
        _forget(claim)


def _remove_lease(path: Path, key: str) -> None:
    """Remove the lease `key`. If a different lease has the name now, restore the different lease."""
    aside = path.with_name(f".{path.name}.{private_name()}.old")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        if not os.path.lexists(aside):  # if the answer to the rename was lost, the rename succeeded; see `_create`
            return
    moved = _look(aside)
    if moved is not None and moved.key != key:
        try:
            os.link(aside, path)
        except OSError:
            if not os.path.lexists(path):
                with contextlib.suppress(OSError):
                    os.rename(aside, path)
    _forget(aside)


def _beat(held: Lease, stop: threading.Event, beat: float) -> None:
    """Change the file every `beat` seconds, until `stop` is set or another process holds the lease."""
    began = time.monotonic()
    try:
        # The file stays open, so writes go to this lease even if another lease gets its name.
        fd = os.open(held.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        raw = os.read(fd, _LARGEST_FILE)
        if _parse(raw, (0,)).key != held.token:
            return
        offset = raw.index(b"\n") + 1
        while not stop.wait(beat):
            try:
                os.pwrite(fd, _pulse(time.monotonic() - began), offset)
                os.fsync(fd)
            except OSError as error:
                if error.errno == errno.ESTALE:
                    return
                # The disk is full, and overwriting needs space (copy on write).
                with contextlib.suppress(OSError):
                    os.utime(fd)
    finally:
        os.close(fd)
