"""Bring an image's blobs into a folder: in parallel, verified while they arrive, resumed.

Runs on: LOGIN NODE.

    FOLDER/sha256/HEX                       a whole blob, mode 0444, named by its content
    FOLDER/sha256/.HEX.OWNER.part           what one process has of it so far

Every process writes to a part file of its own, whose name says which process that is, so
that any number of processes on any number of machines may fetch the same blob at once;
the last step is one rename, and whoever comes second renames the same bytes. No lock is
needed, so none can be left behind.

A part outlives its process and is adopted by the next one: by rename where its owner is
known to be gone, by copying where it only has been idle for long (a stalled owner may
wake up and write on). In both cases what is adopted is read and hashed again first.

A file that is in place is trusted by its name, size and mode: its content is proved when
the layer is read (its `diff_id`). Who finds it wrong there calls `discard` and fetches
again. For the same reason nothing is flushed to the disk here; a power failure shows
as a wrong layer and is repaired the same way.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import queue
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from hpcenv.adapters import lease
from hpcenv.errors import FileUnusable, HpcenvError, ImageUnavailable
from hpcenv.model.progress import Event, OnEvent, ignore

__all__ = [
    "BlobSource",
    "BlobSpec",
    "Broken",
    "Limits",
    "Stream",
    "blob_path",
    "cached",
    "discard",
    "fetch_all",
    "sweep",
]

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_PART = re.compile(r"\.(?P<hex>[0-9a-f]{64})\.(?P<owner>free|[0-9a-f]{0,16}-\d{1,10}-\d{1,20})\.[0-9a-f]{16}\.part")
_CHUNK = 1024 * 1024
# Events of one blob: a person reads no more than five a second.
_EVENT_SECONDS = 0.2
# A part that nobody has written to for so long has no owner, or a stalled one. Longer than
# any pause between two attempts.
_IDLE_SECONDS = 300.0
# One attempt that brings this much was worth it: the count of attempts starts again.
_WORTHWHILE = 1024 * 1024
# Whatever the counting above says, no blob is asked for more often.
_MOST_REQUESTS = 200
# How often a part may vanish under its owner: more than once is no stalled owner but
# something that cleans the folder.
_MOST_TAKEN = 3
_FULL = {
    errno.ENOSPC: "the file system is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than the file system or a limit (ulimit -f) allows",
}


@dataclass(frozen=True, kw_only=True)
class BlobSpec:
    """One blob that is wanted: `sha256:HEX` and its size in bytes."""

    digest: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a transfer may take.

    Attributes:
        stall: seconds in which at least `slowest * stall` bytes must come; there is no
            limit on the whole.
        slowest: bytes per second.
        attempts: how many in a row may bring nothing.
        pauses: seconds before the next attempts; the last one repeats.
        longest_pause: seconds that a registry's `Retry-After` is honoured for; one that
            asks for more is an error at once.
        most_bytes: of all blobs together.
    """

    stall: float = 60.0
    slowest: float = 256.0
    attempts: int = 5
    pauses: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    longest_pause: float = 120.0
    most_bytes: int = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A blob's bytes from `start` on, which is 0 where a source cannot begin elsewhere."""

    start: int
    chunks: Iterator[bytes]

    def close(self) -> None:
        """Let go of the connection or file."""
        close = getattr(self.chunks, "close", None)
        if close is not None:
            close()


class BlobSource(Protocol):
    """Where blobs come from: a registry, a layout or an archive."""

    def fetch(self, digest: str, size: int, offset: int, *, stall: float) -> Stream:
        """Begin to read a blob at `offset`. Called by several threads at once.

        Args:
            stall: seconds to wait for the next byte.

        Raises:
            Broken: it did not work and may work when asked again; also while reading.
            ImageUnavailable: it will not work.
        """

    def close(self) -> None:
        """Let go of connections and files."""


class Broken(Exception):
    """A transfer broke off; asking again may help.

    Args:
        error: what to raise when it does not.
        retry_after: seconds that the server asks to wait.
        restart: what has arrived so far is of no use.
    """

    def __init__(self, error: ImageUnavailable, *, retry_after: float | None = None, restart: bool = False) -> None:
        super().__init__(error.what)
        self.error = error
        self.retry_after = retry_after
        self.restart = restart


class _NotTaken(Exception):
    """The caller's `on_event` raised; what it raised is its own business, and no disk error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class _Stopped(Exception):
    """Another blob failed, or the user interrupted."""


def fetch_all(
    blobs: Sequence[BlobSpec],
    source: BlobSource,
    folder: Path,
    *,
    workers: int = 4,
    on_event: OnEvent = ignore,
    limits: Limits | None = None,
) -> tuple[Path, ...]:
    """Have all blobs in `folder`, and return their paths in the order asked for.

    Blobs that are there already are not asked for. After an error or ^C what has arrived
    stays in part files and the next call goes on from there.

    Args:
        workers: how many blobs at a time.
        on_event: gets `fetch` events with the digest as `what`; never called twice at once,
            but from other threads. The event with `done == total` comes when the file is
            in place.

    Raises:
        ImageUnavailable: a blob cannot be had, or has other bytes than its digest says.
        FileUnusable: the folder cannot be written, is full, or has too little space.
    """
    limits = limits or Limits()
    wanted = _unique(blobs, limits)
    place = _prepare(folder)
    report = _Reports(on_event)
    try:
        missing = []
        for spec in wanted:
            if cached(folder, spec) is None:
                missing.append(spec)
            else:
                report(spec, spec.size)
        if missing:
            _check_space(place, missing)
            _Crew(source, place, limits, report).work(missing, workers)
    except _NotTaken as problem:
        raise problem.error from None
    return tuple(blob_path(folder, spec.digest) for spec in blobs)


def blob_path(folder: Path, digest: str) -> Path:
    """Return where the blob lies, or will lie."""
    return folder / "sha256" / _hex(digest)


def cached(folder: Path, spec: BlobSpec) -> Path | None:
    """Return the path of a blob that is in place, by name, size and mode.

    What is in its place and is not that (truncated, a link) is removed; so is what can be
    written to, unless it has the bytes of its digest.
    """
    path = blob_path(folder, spec.digest)
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unusable(path, error) from error
    whole = stat.S_ISREG(found.st_mode) and found.st_size == spec.size
    if whole and (not found.st_mode & 0o222 or _sealed(path, spec)):
        return path
    discard(path)
    return None


def _sealed(path: Path, spec: BlobSpec) -> bool:
    """Make a blob read-only that somebody could write to (after `chmod -R g+w`); False where it is not what it was.

    Put into its place is a copy, whose bytes were hashed: who has the old file open changes nothing.
    """
    aside, found = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new"), hashlib.sha256()
    try:
        with open(path, "rb") as old, open(aside, "xb") as new:
            while chunk := old.read(_CHUNK):
                found.update(chunk)
                new.write(chunk)
        if f"sha256:{found.hexdigest()}" != spec.digest:
            return False
        os.chmod(aside, 0o444)
        os.replace(aside, path)
    except OSError:
        return False  # full, or not ours: then it is fetched, or that says why it cannot be
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
    return True


def put(folder: Path, digest: str, data: bytes) -> Path:
    """Keep a small blob that is in memory already: a manifest or a configuration.

    Raises:
        ImageUnavailable: the bytes are not those of the digest.
        FileUnusable: the folder cannot be written to.
    """
    spec = BlobSpec(digest=digest, size=len(data))
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise _wrong(spec, f"sha256:{hashlib.sha256(data).hexdigest()}")
    known = cached(folder, spec)
    if known is not None:
        return known
    place, path = _prepare(folder), blob_path(folder, digest)
    aside = place / f".{_hex(digest)}.{secrets.token_hex(8)}.new"
    try:
        aside.write_bytes(data)
        os.chmod(aside, 0o444)
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise _unusable(path, error, len(data)) from error
    return path


def discard(path: Path) -> None:
    """Remove a blob that has turned out to be wrong; `fetch_all` then brings it anew."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error


def sweep(folder: Path, *, idle: float = 7 * 86400.0) -> int:
    """Remove part files that nobody has written to for `idle` seconds; return the bytes freed."""
    place = folder / "sha256"
    freed = 0
    with contextlib.suppress(FileNotFoundError):
        now = _file_time(place)
        for entry in list(os.scandir(place)):
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                if _PART.fullmatch(entry.name) and now - found.st_mtime >= idle and not _is_alive(entry.name):
                    os.unlink(entry.path)
                    freed += found.st_size
    return freed


# --- before the first byte -------------------------------------------------------------


def _hex(digest: str) -> str:
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise ImageUnavailable(f"`{digest[:80]}` is not a sha256 digest", why="blobs are named by their sha256")
    return match[1]


def _unique(blobs: Sequence[BlobSpec], limits: Limits) -> list[BlobSpec]:
    """Return every blob once: an image may hold the same layer several times."""
    sizes: dict[str, int] = {}
    for spec in blobs:
        _hex(spec.digest)
        if spec.size < 0 or sizes.setdefault(spec.digest, spec.size) != spec.size:
            raise ImageUnavailable(
                f"the image gives two sizes for the layer {spec.digest}",
                why=f"{sizes.get(spec.digest, 0)} and {spec.size} bytes",
                hint="push the image again with a current docker, podman or skopeo",
            )
    if sum(sizes.values()) > limits.most_bytes:
        raise ImageUnavailable(
            f"the image says that its layers have {_amount(sum(sizes.values()))}",
            why=f"hpcenv fetches at most {_amount(limits.most_bytes)} for one image",
        )
    # The largest first: what is left at the end are short ones that share the line well.
    return [BlobSpec(digest=d, size=n) for d, n in sorted(sizes.items(), key=lambda item: -item[1])]


def _prepare(folder: Path) -> Path:
    """Make `FOLDER/sha256`, open to the same people as `FOLDER`."""
    place = folder / "sha256"
    try:
        if not place.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                place.mkdir()
                place.chmod(stat.S_IMODE(folder.stat().st_mode))
    except OSError as error:
        raise _unusable(place, error) from error
    return place


def _check_space(place: Path, missing: Sequence[BlobSpec]) -> None:
    try:
        space = os.statvfs(place)
    except OSError as error:
        raise _unusable(place, error) from error
    # What parts hold already need not be written again, unless it is copied or wrong: an
    # estimate in the user's favour; a disk that does fill up is reported as such.
    parts = sum(part.size for spec in missing for part in _parts(place, _hex(spec.digest))[:1])
    need = sum(spec.size for spec in missing) - parts
    free = space.f_bavail * space.f_frsize
    if need > free:
        raise _too_full(place, need, free, "the file system has too little space")


# --- the workers -----------------------------------------------------------------------


class _Reports:
    """Passes events on, one at a time, at most five a second for each blob."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._quiet = False

    def __call__(self, spec: BlobSpec, done: int, *, finished: bool = True) -> None:
        now = time.monotonic()
        if not finished and (done >= spec.size or now - self._last.get(spec.digest, 0.0) < _EVENT_SECONDS):
            return
        self._last[spec.digest] = now
        self._pass(Event(phase="fetch", what=spec.digest, done=done, total=spec.size, unit="bytes"))

    def say(self, text: str) -> None:
        self._pass(Event(phase="note", what=text))

    def stop(self) -> None:
        self._quiet = True

    def _pass(self, event: Event) -> None:
        with self._lock:
            if self._quiet:
                return
            try:
                self._on_event(event)
            except BaseException as error:
                raise _NotTaken(error) from error


class _Crew:
    """Threads that take one blob after the other.

    Daemon threads, not an executor: after ^C a thread may sit in a read for as long as a
    stall may last, and neither the user nor the end of the interpreter should wait for it.
    """

    def __init__(self, source: BlobSource, place: Path, limits: Limits, report: _Reports) -> None:
        self._source = source
        self._place = place
        self._limits = limits
        self._report = report
        self._stop = threading.Event()

    def work(self, blobs: Sequence[BlobSpec], workers: int) -> None:
        todo: queue.SimpleQueue[BlobSpec | None] = queue.SimpleQueue()
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        for spec in blobs:
            todo.put(spec)
        threads = [
            threading.Thread(target=self._run, args=(todo, ended), daemon=True, name=f"hpcenv-fetch-{number}")
            for number in range(max(1, min(workers, len(blobs))))
        ]
        for thread in threads:
            todo.put(None)
            thread.start()
        try:
            for _ in blobs:
                problem = ended.get()
                if problem is not None:
                    raise problem
        finally:
            self._stop.set()
            if not self._all_ended(threads):
                self._report.stop()

    @staticmethod
    def _all_ended(threads: Sequence[threading.Thread]) -> bool:
        deadline = time.monotonic() + 2.0
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _run(self, todo: queue.SimpleQueue[BlobSpec | None], ended: queue.SimpleQueue[BaseException | None]) -> None:
        while (spec := todo.get()) is not None and not self._stop.is_set():
            try:
                self._fetch(spec)
            except BaseException as problem:  # noqa: BLE001 - raised again in the caller's thread
                ended.put(problem)
                return
            ended.put(None)

    def _fetch(self, spec: BlobSpec) -> None:
        """Have one blob in place, or raise."""
        path = self._place / _hex(spec.digest)
        try:
            for _ in range(_MOST_TAKEN):
                if self._fetch_once(spec, path):
                    break
                # Another machine takes the part of a process that was stalled for long.
                self._report.say(f"{spec.digest}: another process took what was here, beginning again")
            else:
                raise _taken(self._place)
        except OSError as error:
            raise _unusable(self._place, error, spec.size) from error
        self._report(spec, spec.size)

    def _fetch_once(self, spec: BlobSpec, path: Path) -> bool:
        with _Part(self._place, spec, self._stop) as part:
            if part.done:
                self._report.say(f"{spec.digest}: {_amount(part.done)} are here already, going on from there")
            for last in (False, True):
                self._receive(part, spec)
                found = part.digest()
                if found == spec.digest:
                    break
                part.restart()
                if last:
                    raise _wrong(spec, found)
            return part.publish(path)

    def _receive(self, part: _Part, spec: BlobSpec) -> None:
        """Go on until the part has the blob's size, through breaks and pauses."""
        fruitless, highest = 0, part.done
        for _ in range(_MOST_REQUESTS):
            if part.done == spec.size:
                return
            try:
                self._receive_once(part, spec)
            except Broken as broken:
                if broken.restart:
                    part.restart()
                fruitless = 0 if part.done >= highest + _WORTHWHILE else fruitless + 1
                highest = max(highest, part.done)
                if fruitless >= self._limits.attempts:
                    raise broken.error from None
                self._pause(broken, fruitless)
        raise ImageUnavailable(
            f"the layer {spec.digest} did not arrive in {_MOST_REQUESTS} requests",
            why=f"{_amount(part.done)} of {_amount(spec.size)} came; every transfer broke off early",
            hint="try again; a proxy in between may cut long transfers",
        )

    def _receive_once(self, part: _Part, spec: BlobSpec) -> None:
        stream = self._source.fetch(spec.digest, spec.size, part.done, stall=self._limits.stall)
        with closing(stream):
            if stream.start != part.done:
                part.restart()
            if stream.start != part.done:
                raise AssertionError(f"a source began at {stream.start}, neither 0 nor as asked")
            window, then = part.done, time.monotonic()
            for chunk in stream.chunks:
                if self._stop.is_set():
                    raise _Stopped
                if part.done + len(chunk) > spec.size:
                    part.restart()
                    raise Broken(_too_long(spec))
                part.write(chunk)
                self._report(spec, part.done, finished=False)
                now = time.monotonic()
                if now - then >= self._limits.stall:
                    if part.done - window < self._limits.slowest * self._limits.stall:
                        raise Broken(_too_slow(spec, self._limits))
                    window, then = part.done, now
        if part.done < spec.size:
            raise Broken(
                ImageUnavailable(
                    f"the layer {spec.digest} broke off",
                    why=f"{_amount(part.done)} of {_amount(spec.size)} came",
                    hint="try again: what has arrived is kept",
                )
            )

    def _pause(self, broken: Broken, fruitless: int) -> None:
        pauses = self._limits.pauses
        seconds = pauses[min(fruitless, len(pauses)) - 1] if fruitless else pauses[0]
        if broken.retry_after is not None:
            if broken.retry_after > self._limits.longest_pause:
                raise broken.error from None
            seconds = max(seconds, broken.retry_after)
            self._report.say(f"waiting {seconds:.0f} s as the registry asks: {broken.error.what}")
        if self._stop.wait(seconds):
            raise _Stopped


# --- part files ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Leftover:
    """A part file of another process."""

    path: Path
    owner: str
    size: int
    mtime: float


def _parts(place: Path, name: str) -> list[_Leftover]:
    """Return the part files of one blob, the longest first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(place):
            match = _PART.fullmatch(entry.name)
            if match is None or match["hex"] != name:
                continue
            with contextlib.suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(facts.st_mode):
                    found.append(
                        _Leftover(path=Path(entry.path), owner=match["owner"], size=facts.st_size, mtime=facts.st_mtime)
                    )
    return sorted(found, key=lambda part: -part.size)


class _Part:
    """This process's part file of one blob, and the hash of what is in it."""

    def __init__(self, place: Path, spec: BlobSpec, stop: threading.Event) -> None:
        self._place = place
        self._size = spec.size
        self._stop = stop
        self._name = _hex(spec.digest)
        self._published = False
        self._path = self._fresh(_owner())
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._hash = hashlib.sha256()
        self.done = 0

    def __enter__(self) -> _Part:  # noqa: PYI034 - typing.Self is Python 3.11's
        try:
            self._adopt()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._published:
            return
        with contextlib.suppress(OSError):
            os.close(self._fd)
        with contextlib.suppress(OSError):
            if self.done:
                # From now on nobody's: the next one, this very process too, may take it.
                os.rename(self._path, self._fresh("free"))
            else:
                os.unlink(self._path)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self._hash.update(data)
        self.done += len(data)

    def restart(self) -> None:
        """Forget what has arrived."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._hash = hashlib.sha256()
        self.done = 0

    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"

    def publish(self, path: Path) -> bool:
        """Put the whole blob into its place, where another process's same bytes may lie already.

        False where the part has been taken away, and the blob is not there either.
        """
        os.fchmod(self._fd, 0o444)
        self._published = True
        try:
            # Before the rename: on NFS a full disk or quota shows here.
            os.close(self._fd)
            os.rename(self._path, path)
        except FileNotFoundError:
            # Also what an NFS server says to a rename's second try when its first answer got lost.
            if not _has_size(path, self._size):
                return False
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            raise
        self._tidy()
        return True

    def _fresh(self, owner: str) -> Path:
        return self._place / f".{self._name}.{owner}.{secrets.token_hex(8)}.part"

    def _adopt(self) -> None:
        """Take over the longest part that nobody works on."""
        now = os.fstat(self._fd).st_mtime  # the file server's clock, as theirs
        for part in _parts(self._place, self._name):
            if part.path == self._path or not 0 < part.size <= self._size:
                continue
            gone = part.owner == "free" or _is_gone(part.owner)
            if not gone and (_is_ours(part.owner) or now - part.mtime < _IDLE_SECONDS):
                continue
            try:
                if gone and self._take(part):
                    return
                self._copy(part)
            except OSError as error:
                self.restart()
                if error.errno in _FULL:
                    raise
            else:
                return

    def _take(self, part: _Leftover) -> bool:
        """Go on in a file whose owner is known to be gone; only one process gets it."""
        mine = self._fresh(_owner())
        os.rename(part.path, mine)
        try:
            fd = os.open(mine, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            # Another member's of a shared cache: readable at best. Back, for its owner.
            os.rename(mine, part.path)
            return False
        os.close(self._fd)
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        self._fd, self._path = fd, mine
        while data := os.read(fd, _CHUNK):
            self._check_stop()
            self._hash.update(data)
            self.done += len(data)
        if self.done > self._size:
            self.restart()
        return True

    def _copy(self, part: _Leftover) -> None:
        """Copy what a silent owner left: it may wake up and write to its own file."""
        fd = os.open(part.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while self.done < part.size and (data := os.read(fd, min(_CHUNK, part.size - self.done))):
                self._check_stop()
                self.write(data)
        finally:
            os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(part.path)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _Stopped

    def _tidy(self) -> None:
        """Remove other parts of this blob that nobody works on: it is whole now."""
        with contextlib.suppress(OSError):
            for part in _parts(self._place, self._name):
                if part.owner == "free" or _is_gone(part.owner):
                    with contextlib.suppress(OSError):
                        os.unlink(part.path)


def _has_size(path: Path, size: int) -> bool:
    try:
        return os.lstat(path).st_size == size
    except OSError:
        return False


# An owner is a process, named as in a lease: only on its own machine can be told for sure
# whether it is gone; on another one only idleness counts.


def _owner() -> str:
    me = lease.this_process()
    return f"{me.machine}-{me.pid}-{me.start}"


def _is_ours(owner: str) -> bool:
    return owner == _owner()


def _is_gone(owner: str) -> bool:
    """Whether the process certainly does not run any more."""
    machine, pid, start = owner.split("-")
    return lease.Owner(host="", machine=machine, pid=int(pid), start=int(start)).is_dead()


def _is_alive(name: str) -> bool:
    match = _PART.fullmatch(name)
    if match is None or match["owner"] == "free":
        return False
    here = match["owner"].partition("-")[0] == lease.this_process().machine != ""
    return here and not _is_gone(match["owner"])


def _file_time(place: Path) -> float:
    """Return the time as the file server has it."""
    path = place / f".clock.{secrets.token_hex(8)}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unusable(place, error) from error
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
        os.unlink(path)


# --- errors ----------------------------------------------------------------------------


def _amount(count: int) -> str:
    """Return bytes as a person reads them."""
    if count < 10_000:
        return f"{count} bytes"
    for unit, size in (("kB", 10**3), ("MB", 10**6), ("GB", 10**9)):
        if count < 1000 * size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 10**12:.1f} TB"


def _unusable(path: Path, error: OSError, need: int | None = None) -> HpcenvError:
    if error.errno in _FULL:
        free = None
        with contextlib.suppress(OSError):
            space = os.statvfs(path)
            free = space.f_bavail * space.f_frsize
        return _too_full(path, need, free, _FULL[error.errno])
    return FileUnusable(
        f"`{path}` cannot be used for image layers",
        why=error.strerror or str(error),
        hint="check its owner and mode, or name another folder for the image store",
    )


def _too_full(path: Path, need: int | None, free: int | None, why: str) -> FileUnusable:
    known = [f"{_amount(need)} needed" if need is not None else "", f"{_amount(free)} free" if free is not None else ""]
    numbers = ", ".join(part for part in known if part)
    return FileUnusable(
        f"`{path}` has no room for the image's layers",
        why=f"{why} ({numbers})" if numbers else why,
        hint="free space there (`hpcenv image prune`), or name another folder for the image store; "
        "what has arrived is kept",
    )


def _taken(path: Path) -> FileUnusable:
    return FileUnusable(
        f"files that are being written vanish from `{path}`",
        why=f"it happened {_MOST_TAKEN} times to one layer",
        hint="something cleans this folder; name another one for the image store",
    )


def _wrong(spec: BlobSpec, found: str) -> ImageUnavailable:
    return ImageUnavailable(
        f"the layer {spec.digest} came with other bytes, twice",
        why=f"expected {spec.digest}\nreceived {found}",
        hint="a proxy or mirror may change it; do not use this image from there",
    )


def _too_long(spec: BlobSpec) -> ImageUnavailable:
    return ImageUnavailable(
        f"the layer {spec.digest} came with other bytes",
        why=f"expected {spec.size} bytes\nreceived more",
        hint="a proxy or mirror may change it; do not use this image from there",
    )


def _too_slow(spec: BlobSpec, limits: Limits) -> ImageUnavailable:
    return ImageUnavailable(
        f"the layer {spec.digest} comes too slowly",
        why=f"less than {_amount(int(limits.slowest * limits.stall))} came in {limits.stall:g} s",
        hint="try again: what has arrived is kept",
    )
