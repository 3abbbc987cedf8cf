"""One holder at a time among processes of all nodes, on any POSIX file system.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

flock(2) and fcntl locks are not everywhere: Lustre may be mounted without `flock`, NFS
without lockd, and a lock of a node that died can stay. A lease is a file instead. What it
rests on is link(2), which fails where the name is taken (O_EXCL where there are no hard
links), and rename(2); all of NFS v3 and v4, Lustre, GPFS, BeeGFS and local disks have both.

    NAME                      the lease: line 1 says who holds it, line 2 is its heartbeat
    .NAME.TOKEN.new           a lease before it gets its name
    .NAME.break-KEY           the right to break the one lease KEY; only one can create it
    .NAME.TOKEN.old           a lease that is being removed

The holder's heartbeat writes how long it has held the lease, by its own monotonic clock.
Whoever waits looks whether the file *changes*, by its own monotonic clock: no clock of one
machine is ever compared with another's. A lease is stale

- at once, when its holder ran on this very kernel and process id space and is no more, or
  its process id is now another process (other start time);
- else when it did not change while it was watched for `stale_after` seconds. Time in which
  the watcher itself did not look (stopped, or the file server hung) does not count.

What a lease does not promise: a holder that was stopped for longer than `stale_after` and
then goes on believes it is alone until it asks `still_mine`. Its work must therefore be
harmless when published twice: see `store.Store.publish_image`.
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
from pathlib import Path
from typing import Any

from hpcenv.dataclass import dataclass, field
from hpcenv.errors import FileUnusable, ToolFailed
from hpcenv.model.progress import Event, OnEvent, ignore

__all__ = ["BEAT", "STALE_AFTER", "Holder", "Lease", "Owner", "lease", "live_holders", "this_process"]

# Seconds. A file server that hangs for a moment, or Python code that does not let other
# threads run, must not cost a live holder its lease.
BEAT = 3.0
STALE_AFTER = 30.0

_SCHEMA = 1
_LONGEST = 8192
_TELL_EVERY = 15.0
_POLL_FIRST, _POLL_LAST = 0.05, 1.0
# No hard links here: FAT and some FUSE file systems; BeeGFS only within one folder.
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES})


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process, named so that it is not mistaken for another one.

    Attributes:
        host: for people.
        machine: digest of the kernel's boot id and the process id space; equal only where
            `pid` means the same here. Empty where that cannot be read.
        pid, start: process id and its start in clock ticks since boot (proc(5), stat field 22).
    """

    host: str
    machine: str
    pid: int
    start: int

    def is_dead(self) -> bool:
        """Whether it surely is no more; False where that cannot be told from here."""
        if not self.machine or self.machine != _machine() or self.pid < 1:
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            pass  # another user's
        state, start = _process(self.pid)
        return state in ("Z", "X") or (start != 0 and self.start not in (0, start))


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lease, as its file says.

    Attributes:
        owner: None when the file cannot be read or understood.
        purpose: what for; completes the sentence "pid 1 on n1 ...".
        seconds: how long, by the holder's own clock at its last heartbeat.
    """

    path: Path
    owner: Owner | None
    purpose: str
    seconds: float

    def __str__(self) -> str:
        if self.owner is None:
            return f"somebody holds `{self.path}`"
        said = f"pid {self.owner.pid} on {self.owner.host} {self.purpose} since {self.seconds:.0f} s"
        return "".join(c if c.isprintable() else "?" for c in said)  # of another user, maybe


def this_process() -> Owner:
    """Return the caller's own process."""
    return Owner(host=os.uname().nodename, machine=_machine(), pid=os.getpid(), start=_process(os.getpid())[1])


def _machine() -> str:
    """Return what is equal only for processes that see each other's process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {space}".encode()).hexdigest()[:16]


def _process(pid: int) -> tuple[str, int]:
    """Return a process's state and start in ticks; ("", 0) where that is hidden."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
        words = raw.rpartition(b")")[2].split()  # a program's name may hold anything
        return words[0].decode(), int(words[19])
    except (OSError, IndexError, ValueError):
        return "", 0


class Lease:
    """A lease that this process holds; made by `lease`."""

    def __init__(self, path: Path, token: str) -> None:
        self.path = path
        self.token = token

    def still_mine(self) -> bool:
        """Whether the file still names this holder: ask before publishing.

        False after this process was stopped for so long that another one took over.
        """
        for _ in range(3):
            seen = _look(self.path)
            if seen is not None:
                return seen.key == self.token
            time.sleep(0.05)  # a waiter may have taken it by mistake and is giving it back
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
    """Hold the lease `path` while the block runs; wait until it is free.

    Args:
        path: the file; its folder must exist and be writable.
        purpose: what the holder does, for people who wait: "converts X".
        timeout: seconds to wait; 0 tries once.
        on_event: is told at once and then every 15 s whom this waits for.
        beat: seconds between heartbeats.
        stale_after: seconds without a heartbeat after which a lease is broken; the same
            for all who use a path, and several times `beat`.

    Raises:
        ToolFailed: still held after `timeout`; names the holder.
        FileUnusable: the system does not let us make the file.
    """
    token = secrets.token_hex(16)
    text = _text(this_process(), token, purpose)
    try:
        _acquire(path, text, timeout=timeout, on_event=on_event, stale_after=stale_after)
    except OSError as error:
        raise FileUnusable(
            f"`{path}` cannot be made",
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
        # Not for ever: the file server may hang just now.
        heart.join(timeout=5)
        with contextlib.suppress(OSError):
            if held.still_mine():
                _take_away(path, token)


def live_holders(
    folder: Path, *, on_event: OnEvent = ignore, stale_after: float = STALE_AFTER, but: str = ""
) -> tuple[Holder, ...]:
    """Return who holds a lease in `folder`, without those that are no more.

    Leases of this machine are judged at once, others by watching them: until the first
    one is seen to live, or for `stale_after` seconds if none does.

    Args:
        but: name of a lease that does not count: the caller's own.
    """
    watches: dict[Path, _Watch] = {}
    told = False
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
        if not told:
            on_event(Event(phase="wait", what=f"looking for up to {stale_after:.0f} s whether {waiting[0]} lives"))
            told = True
        time.sleep(min(_POLL_LAST, stale_after / 10))


def _leases(folder: Path, but: str) -> list[Path]:
    try:
        return sorted(folder / name for name in os.listdir(folder) if not name.startswith(".") and name != but)
    except OSError:
        return []


# --- what a file says --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """A lease file as it was at one moment; `key` names this one lease and no other."""

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
    """How long a file did not change while it was looked at."""

    stamp: tuple[Any, ...] | None = None
    looked: float = 0.0
    unchanged: float = 0.0
    changed: bool = field(default=False)

    def see(self, seen: _Seen) -> float:
        """Take one look into account; return the seconds without a change."""
        now = time.monotonic()
        if seen.stamp == self.stamp:
            # A longer gap means that we did not look: stopped, or a hanging file server.
            self.unchanged += min(now - self.looked, 2 * _POLL_LAST)
        else:
            self.changed = self.stamp is not None
            self.unchanged = 0.0
        self.stamp, self.looked = seen.stamp, now
        return self.unchanged


def _text(owner: Owner, token: str, purpose: str) -> bytes:
    said = {
        "schema": _SCHEMA,
        "token": token,
        "host": owner.host,
        "machine": owner.machine,
        "pid": owner.pid,
        "start": owner.start,
        "purpose": purpose[:1000],
    }
    return json.dumps(said).encode() + b"\n" + _pulse(0.0)


def _pulse(seconds: float) -> bytes:
    # Always the same length: it is overwritten in place.
    return b"%015d\n" % int(seconds * 1000)


def _look(path: Path) -> _Seen | None:
    """Read a lease; None when there is none.

    Opening asks an NFS server for the file's state (close-to-open consistency); stat alone
    would be answered from the client's cache for up to a minute.
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
        raw = os.read(fd, _LONGEST)
    except OSError:
        return None  # removed on the server while it was read; the next look tells
    finally:
        os.close(fd)
    return _parse(raw, (status.st_ino, status.st_mtime_ns, raw))


def _unreadable(path: Path) -> _Seen | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return _Seen(key=f"inode-{status.st_ino}", stamp=(status.st_ino, status.st_mtime_ns, status.st_ctime_ns))


def _parse(raw: bytes, stamp: tuple[Any, ...]) -> _Seen:
    """Understand a lease file; one that cannot be understood has a key and no owner."""
    first, _, second = raw.partition(b"\n")
    try:
        said = json.loads(first)
        token = said["token"]
        if not isinstance(token, str) or not re.fullmatch("[0-9a-f]{32}", token):
            raise ValueError
        owner = Owner(
            host=str(said["host"])[:200], machine=str(said["machine"]), pid=int(said["pid"]), start=int(said["start"])
        )
        purpose = str(said["purpose"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return _Seen(key=f"unreadable-{stamp[0]}-{hashlib.sha256(first).hexdigest()[:16]}", stamp=stamp)
    match = re.match(rb"\d{15}\n", second)
    seconds = int(match[0]) / 1000 if match is not None else 0.0
    return _Seen(key=token, stamp=stamp, owner=owner, purpose=purpose, seconds=seconds)


# --- taking, keeping, removing -----------------------------------------------------------


def _acquire(path: Path, text: bytes, *, timeout: float, on_event: OnEvent, stale_after: float) -> None:
    deadline = time.monotonic() + timeout
    watches: dict[Path, _Watch] = {}
    poll, tell_at = _POLL_FIRST, 0.0
    while True:
        seen = _look(path)
        if seen is None and _create(path, text):
            return
        seen = seen or _look(path) or _Seen(key="", stamp=())
        stale = bool(seen.key) and _is_stale(path, seen, watches, stale_after)
        if stale and _break(path, seen, text, watches, stale_after):
            continue
        now = time.monotonic()
        if now >= deadline:
            raise _still_held(seen.holder(path), timeout)
        if seen.key and now >= tell_at:
            on_event(Event(phase="wait", what=str(seen.holder(path))))
            tell_at = now + _TELL_EVERY
        time.sleep(min(poll, max(deadline - time.monotonic(), 0.01)))
        poll = min(poll * 1.5, _POLL_LAST)


def _still_held(holder: Holder, timeout: float) -> ToolFailed:
    hint = "wait for it, or end it"
    if holder.owner is not None:
        hint += f" (on {holder.owner.host}: kill {holder.owner.pid})"
    return ToolFailed(f"another process is still at work after {timeout:g} s", why=str(holder), hint=hint)


def _is_stale(path: Path, seen: _Seen, watches: dict[Path, _Watch], stale_after: float) -> bool:
    return watches.setdefault(path, _Watch()).see(seen) >= stale_after or seen.dead()


def _create(path: Path, text: bytes) -> bool:
    """Make the file with its whole content, unless the name is taken."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    _write_new(aside, text)
    try:
        os.link(aside, path)
        return True
    except FileExistsError:
        # NFS repeats a call whose answer was lost, and then finds its own work.
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
        os.fchmod(fd, 0o644)  # whatever the umask: others must see who holds it
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


def _break(path: Path, seen: _Seen, text: bytes, watches: dict[Path, _Watch], stale_after: float) -> bool:
    """Remove a stale lease; False when that is left to another waiter.

    `seen.key` is never used twice, and only one process can create the claim to it. One
    that comes later finds another key under `path` and leaves that alone.
    """
    claim = path.with_name(f".{path.name}.break-{seen.key}")
    if not _create(claim, text):
        other = _look(claim)
        if other is not None and _is_stale(claim, other, watches, stale_after):
            _take_away(claim, other.key)  # its breaker died between two system calls
        return False
    try:
        again = _look(path)
        if again is None:
            return True
        if again.stamp != seen.stamp:
            return False  # a stopped holder woke up, or another lease came
        _take_away(path, seen.key)
        return True
    finally:
        _forget(claim)


def _take_away(path: Path, key: str) -> None:
    """Remove the lease `key`; another one that got its name meanwhile is given back."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.old")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        if not os.path.lexists(aside):  # see `_create`: the answer may have been lost
            return
    found = _look(aside)
    if found is not None and found.key != key:
        try:
            os.link(aside, path)
        except OSError:
            if not os.path.lexists(path):
                with contextlib.suppress(OSError):
                    os.rename(aside, path)
    _forget(aside)


def _beat(held: Lease, stop: threading.Event, beat: float) -> None:
    """Change the file every `beat` seconds, until told to stop or it is another's."""
    began = time.monotonic()
    try:
        # Held open: what is written goes to this lease, whoever has its name by then.
        fd = os.open(held.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        raw = os.read(fd, _LONGEST)
        if _parse(raw, (0,)).key != held.token:
            return
        place = raw.index(b"\n") + 1
        while not stop.wait(beat):
            try:
                os.pwrite(fd, _pulse(time.monotonic() - began), place)
                os.fsync(fd)
            except OSError as error:
                if error.errno == errno.ESTALE:
                    return
                # A full disk where overwriting needs space (copy on write).
                with contextlib.suppress(OSError):
                    os.utime(fd)
    finally:
        os.close(fd)
