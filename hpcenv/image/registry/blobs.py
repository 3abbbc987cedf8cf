"""Download an image's blobs into a folder. Downloads run in parallel, are checked, and can be continued.

Runs on: LOGIN NODE.

    FOLDER/sha256/HEX         a complete blob, mode 0444, named by its digest
    FOLDER/sha256/.HEX.part   the part of a blob that has arrived

A process downloads a blob only while it holds the blob's lease, a lock file (image/store/lease.py). Other processes
wait, show which process holds the lease, and then find the complete blob. A part file remains when its process ends;
the next holder of the lease hashes the bytes in it and continues the download. A process may be stopped for so long
that another process takes the lease. The stopped process notices this before its next write, and waits for the lease
again.

hpcenv trusts a complete file if its name, size and mode are right. The content of a layer is checked against the
`diff_id` when the layer is read. If the content is wrong, the reader calls `discard`, and the blob is downloaded again.
Damage by a power failure is repaired in the same way, so nothing is flushed to the disk here.
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
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from hpcenv.errors import Command, FileUnusable, HpcenvError, ImageUnavailable
from hpcenv.image.store import lease
from hpcenv.progress import Event, OnEvent, ignore

__all__ = [
    "BlobSource",
    "BlobSpec",
    "Broken",
    "Stream",
    "TransferLimits",
    "blob_path",
    "cached",
    "discard",
    "fetch_all",
]

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_CHUNK = 1024 * 1024
# Seconds between two events of one blob.
_EVENT_SECONDS = 0.2
# Seconds to wait for a process that downloads the same blob.
_WAIT_SECONDS = 4 * 3600.0
# After an attempt that downloaded this many bytes, the count of failed attempts restarts at zero.
_WORTHWHILE = 1024 * 1024
# The largest number of requests for one blob.
_MOST_REQUESTS = 200
# How often the part file or the lease of a live process may disappear. If it disappears more than once, some program
# cleans the folder.
_MOST_TAKEN = 3
_FULL = {
    errno.ENOSPC: "the file system is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than the file system or a limit (ulimit -f) allows",
}


@dataclass(frozen=True, kw_only=True)
class BlobSpec:
    """A blob to download: `sha256:HEX` and its size in bytes."""

    digest: str
    size: int


@dataclass(frozen=True, kw_only=True)
class TransferLimits:
    """Limits of a download. The total time of a download has no limit.

    Attributes:
        stall: seconds in which at least `slowest * stall` bytes must arrive.
        slowest: bytes per second.
        attempts: how many attempts in a row may make no progress.
        pauses: seconds before the second, third, ... attempt; the last value repeats.
        longest_pause: the longest `Retry-After` of a registry, in seconds, that hpcenv waits for. A longer time is an
            error.
        most_bytes: the largest total size of all blobs, in bytes.
    """

    stall: float = 60.0
    slowest: float = 256.0
    attempts: int = 5
    pauses: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    longest_pause: float = 120.0
    most_bytes: int = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A blob's bytes from `start` on; `start` is 0 if the source can begin only at the first byte."""

    start: int
    chunks: Iterator[bytes]

    def close(self) -> None:
        """Close the connection or file."""
        close = getattr(self.chunks, "close", None)
        if close is not None:
            close()


class BlobSource(Protocol):
    """A source of blobs: a registry, a layout or an archive."""

    def fetch(self, digest: str, size: int, offset: int, *, stall: float) -> Stream:
        """Begin to read a blob at `offset`. Several threads may call this method at the same time.

        Args:
            digest: the blob.
            size: the size of the whole blob in bytes.
            offset: the first byte to read.
            stall: seconds to wait for the next byte.

        Raises:
            Broken: the request failed, but another attempt may succeed; reading the chunks can also raise `Broken`.
            ImageUnavailable: another attempt would fail as well.
        """

    def close(self) -> None:
        """Close connections and files."""


class Broken(Exception):
    """A download ended early; another attempt may succeed.

    Args:
        error: the error to raise if no further attempt is made.
        retry_after: seconds that the server asks to wait.
        restart: whether the bytes so far are useless, so that the download must begin again.
    """

    def __init__(self, error: ImageUnavailable, *, retry_after: float | None = None, restart: bool = False) -> None:
        super().__init__(error.what)
        self.error = error
        self.retry_after = retry_after
        self.restart = restart


class _CallbackFailed(Exception):
    """The caller's `on_event` raised an error; it must not be mistaken for a disk error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class _Stopped(Exception):
    """Another blob failed, or the user interrupted."""


class _TakenOver(Exception):
    """Another process took the lease, because this process was stopped for a long time."""


def fetch_all(
    blobs: Sequence[BlobSpec],
    source: BlobSource,
    folder: Path,
    *,
    leases: Path,
    workers: int = 4,
    on_event: OnEvent = ignore,
    limits: TransferLimits | None = None,
) -> tuple[Path, ...]:
    """Download all blobs that the folder does not have, and return the paths of all blobs.

    After an error or ^C the next call continues with the part files.

    Args:
        blobs: the blobs; the result has the same order.
        source: the registry, layout or archive that has the blobs.
        folder: the folder for the blobs.
        leases: folder of the store's leases; it must exist.
        workers: the number of parallel downloads.
        on_event: called with `fetch` events whose `what` is the digest. The calls come from other
            threads, one at a time. The event with `done == total` is sent after the file is complete. While another
            process downloads a blob, a `wait` event names this process.
        limits: limits of the download.

    Raises:
        ImageUnavailable: a blob cannot be downloaded, or its bytes do not have its digest.
        FileUnusable: the folder cannot be written to, is full, or has too little space.
        ToolFailed: another process still downloads a blob after four hours.
    """
    limits = limits or TransferLimits()
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
            _Workers(source, place, leases, limits, report).work(missing, workers)
    except _CallbackFailed as problem:
        raise problem.error from None
    return tuple(blob_path(folder, spec.digest) for spec in blobs)


def blob_path(folder: Path, digest: str) -> Path:
    """Return the path of a blob, which may not exist yet."""
    return folder / "sha256" / _hex(digest)


def cached(folder: Path, spec: BlobSpec) -> Path | None:
    """Return the path of a blob if its name, size and mode show that it is complete; otherwise None.

    A file of another size or kind is removed. A writable file is made read-only if its bytes have the right digest,
    else it is removed.
    """
    path = blob_path(folder, spec.digest)
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unusable(path, error) from error
    complete = stat.S_ISREG(status.st_mode) and status.st_size == spec.size
    if complete and (not status.st_mode & 0o222 or _make_read_only(path, spec)):
        return path
    discard(path)
    return None


def _make_read_only(path: Path, spec: BlobSpec) -> bool:
    """Replace a writable blob by a read-only copy; return False if its bytes are wrong or the copy fails.

    A blob can be writable after `chmod -R g+w`. The bytes of the copy are hashed while they are written. A process that
    has the old file open cannot change the copy.
    """
    aside, digest = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new"), hashlib.sha256()
    try:
        with open(path, "rb") as old, open(aside, "xb") as new:
            while chunk := old.read(_CHUNK):
                digest.update(chunk)
                new.write(chunk)
        if f"sha256:{digest.hexdigest()}" != spec.digest:
            return False
        os.chmod(aside, 0o444)
        os.replace(aside, path)
    except OSError:
        return False  # disk full or no permission: the next download reports this error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
    return True


def put(folder: Path, digest: str, data: bytes) -> Path:
    """Store a small blob from memory: a manifest or a configuration.

    Raises:
        ImageUnavailable: the bytes do not have the digest.
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


def arrived(folder: Path, spec: BlobSpec) -> int:
    """Return how many bytes of a blob are in the folder, complete or partial."""
    path = blob_path(folder, spec.digest)
    for found in (path, _part_path(path)):
        with contextlib.suppress(OSError):
            return min(os.lstat(found).st_size, spec.size)
    return 0


def discard(path: Path) -> None:
    """Remove a blob with wrong content, so that `fetch_all` downloads it again."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error


# --- before the first byte -------------------------------------------------------------


def _hex(digest: str) -> str:
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise ImageUnavailable(f"`{digest[:80]}` is not a sha256 digest", why="hpcenv supports only sha256 digests")
    return match[1]


def _part_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _unique(blobs: Sequence[BlobSpec], limits: TransferLimits) -> list[BlobSpec]:
    """Return each blob once, the largest first; an image may contain the same layer several times."""
    sizes: dict[str, int] = {}
    for spec in blobs:
        _hex(spec.digest)
        if spec.size < 0 or sizes.setdefault(spec.digest, spec.size) != spec.size:
            raise ImageUnavailable(
                f"the image has two sizes for the layer {spec.digest}",
                why=f"{sizes.get(spec.digest, 0)} and {spec.size} bytes",
                hint="push the image again with a current docker, podman or skopeo",
            )
    if sum(sizes.values()) > limits.most_bytes:
        raise ImageUnavailable(
            f"the layers of the image have {_amount(sum(sizes.values()))}",
            why=f"hpcenv downloads at most {_amount(limits.most_bytes)} for one image",
        )
    # Begin with the largest blobs. Then the small blobs at the end use all connections until the end.
    return [BlobSpec(digest=d, size=n) for d, n in sorted(sizes.items(), key=lambda item: -item[1])]


def _prepare(folder: Path) -> Path:
    """Create `FOLDER/sha256` with the mode of `FOLDER`."""
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
    # This estimate may be too low: it assumes that the bytes in part files need no more space. If these bytes are wrong
    # or must be copied, they need space again. If the disk becomes full later, an error says so.
    need = sum(spec.size - arrived(place.parent, spec) for spec in missing)
    free = space.f_bavail * space.f_frsize
    if need > free:
        raise _too_full(place, need, free, "the file system has too little space")


# --- the workers -----------------------------------------------------------------------


class _Reports:
    """Passes events to the caller, one at a time, at most five per second for each blob."""

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

    def waits(self, event: Event) -> None:
        self._pass(event)

    def stop(self) -> None:
        self._quiet = True

    def _pass(self, event: Event) -> None:
        with self._lock:
            if self._quiet:
                return
            try:
                self._on_event(event)
            except BaseException as error:
                raise _CallbackFailed(error) from error


class _Workers:
    """Threads that download one blob after the other.

    The workers are daemon threads, not threads of an executor. After ^C a thread may block in a read until the time
    limit. The user should not wait for this thread, and the interpreter should exit without it.
    """

    def __init__(self, source: BlobSource, place: Path, leases: Path, limits: TransferLimits, report: _Reports) -> None:
        self._source = source
        self._place = place
        self._leases = leases
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
        """Download one blob, or raise."""
        path = self._place / _hex(spec.digest)
        try:
            for _ in range(_MOST_TAKEN):
                with self._lease(spec) as held:
                    # If the blob is complete, the process that we waited for has downloaded it.
                    if cached(self._place.parent, spec) or self._resume(spec, path, held):
                        break
                self._report.say(f"{spec.digest}: another process took the partial download; downloading again")
            else:
                raise _taken(self._place)
        except OSError as error:
            raise _unusable(self._place, error, spec.size) from error
        self._report(spec, spec.size)

    def _lease(self, spec: BlobSpec) -> AbstractContextManager[lease.Lease]:
        return lease.lease(
            self._leases / f"blob-{_hex(spec.digest)}",
            purpose=f"downloads the layer {spec.digest[:19]}",
            timeout=_WAIT_SECONDS,
            on_event=self._wait,
        )

    def _wait(self, event: Event) -> None:
        if self._stop.is_set():
            raise _Stopped
        self._report.waits(event)

    def _resume(self, spec: BlobSpec, path: Path, held: lease.Lease) -> bool:
        """Download the rest of a blob; return False if another process took the part file or the lease."""
        try:
            with _Part(path, spec, held, self._stop) as part:
                if part.done:
                    self._report.say(f"{spec.digest}: continuing after {_amount(part.done)}")
                for last in (False, True):
                    self._receive(part, spec)
                    received = part.digest()
                    if received == spec.digest:
                        break
                    part.restart()
                    if last:
                        raise _wrong(spec, received)
                return part.publish()
        except _TakenOver:
            return False

    def _receive(self, part: _Part, spec: BlobSpec) -> None:
        """Download until the part has the blob's size; repeat after failures."""
        failures, highest = 0, part.done
        for _ in range(_MOST_REQUESTS):
            if part.done == spec.size:
                return
            try:
                self._receive_once(part, spec)
            except Broken as broken:
                if broken.restart:
                    part.restart()
                failures = 0 if part.done >= highest + _WORTHWHILE else failures + 1
                highest = max(highest, part.done)
                if failures >= self._limits.attempts:
                    raise broken.error from None
                self._pause(broken, failures, spec)
        raise ImageUnavailable(
            f"the layer {spec.digest} did not arrive in {_MOST_REQUESTS} requests",
            why=f"{_amount(part.done)} of {_amount(spec.size)} arrived; every download ended early",
            hint="try again; a proxy may interrupt long downloads",
        )

    def _receive_once(self, part: _Part, spec: BlobSpec) -> None:
        stream = self._source.fetch(spec.digest, spec.size, part.done, stall=self._limits.stall)
        with closing(stream):
            if stream.start != part.done:
                part.restart()
            if stream.start != part.done:
                raise AssertionError(f"the source began at byte {stream.start}, neither at 0 nor at the offset")
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
                    f"the download of the layer {spec.digest} ended early",
                    why=f"{_amount(part.done)} of {_amount(spec.size)} arrived",
                    hint="try again: hpcenv continues after these bytes",
                )
            )

    def _pause(self, broken: Broken, failures: int, spec: BlobSpec) -> None:
        pauses = self._limits.pauses
        seconds = pauses[min(failures, len(pauses)) - 1] if failures else pauses[0]
        again = f"asking again for the layer {spec.digest[:19]}"
        if broken.retry_after is not None:
            if broken.retry_after > self._limits.longest_pause:
                raise broken.error from None
            seconds = max(seconds, broken.retry_after)
            again = f"waiting {seconds:.0f} s, as the registry requests, then {again}"
        attempt = f" (attempt {failures + 1} of {self._limits.attempts})" if failures else ""
        self._report.say(f"{broken.error.what}: {again}{attempt}")
        if self._stop.wait(seconds):
            raise _Stopped


# --- part files ------------------------------------------------------------------------


class _Part:
    """The part file of one blob, and the hash of its content; this process holds the blob's lease."""

    def __init__(self, path: Path, spec: BlobSpec, held: lease.Lease, stop: threading.Event) -> None:
        self._final = path
        self._size = spec.size
        self._held = held
        self._held_at = time.monotonic()
        self._stop = stop
        self._ended = False
        self._path = _part_path(path)
        self._fd = self._open()
        self._hash = hashlib.sha256()
        self.done = 0

    def __enter__(self) -> _Part:  # noqa: PYI034 - typing.Self needs Python 3.11
        try:
            self._read()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended:
            return
        with contextlib.suppress(OSError):
            os.close(self._fd)
        with contextlib.suppress(OSError):
            if not self.done and not isinstance(error, _TakenOver):
                os.unlink(self._path)

    def write(self, data: bytes) -> None:
        self._require_lease()
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self._hash.update(data)
        self.done += len(data)

    def restart(self) -> None:
        """Discard the bytes so far."""
        self._require_lease()
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._hash = hashlib.sha256()
        self.done = 0

    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"

    def publish(self) -> bool:
        """Give the complete blob its name; return False if neither the part file nor the blob exists."""
        self._require_lease()
        os.fchmod(self._fd, 0o444)
        self._ended = True
        try:
            # Close before the rename: NFS reports a full disk or quota here.
            os.close(self._fd)
            os.rename(self._path, self._final)
        except FileNotFoundError:
            # NFS repeats a rename whose answer was lost; the second call then fails with this error.
            return _has_size(self._final, self._size)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            raise
        return True

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(self._path, flags, 0o644)
        except PermissionError:
            # The part file belongs to another user of a shared store, or already has its final mode. Only the owner of
            # a file may change its mode.
            self._replace_by_copy()
            return os.open(self._path, flags, 0o644)

    def _replace_by_copy(self) -> None:
        aside = self._path.with_name(f".{self._final.name}.{secrets.token_hex(8)}.new")
        try:
            with open(self._path, "rb") as old, open(aside, "xb") as new:
                while data := old.read(_CHUNK):
                    self._check_stop()
                    new.write(data)
            self._require_lease()
            os.replace(aside, self._path)
        except PermissionError:
            os.unlink(self._path)  # only the owner may read this file, so the download starts again
        finally:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)

    def _read(self) -> None:
        """Hash the bytes that arrived earlier."""
        while data := os.read(self._fd, _CHUNK):
            self._check_stop()
            self._hash.update(data)
            self.done += len(data)
        if self.done > self._size:
            self.restart()

    def _require_lease(self) -> None:
        """Raise `_TakenOver` if this process was stopped for so long that another process has the lease."""
        now = time.monotonic()
        if now - self._held_at < lease.BEAT:
            return
        if not self._held.still_mine():
            raise _TakenOver
        self._held_at = now

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _Stopped


def _has_size(path: Path, size: int) -> bool:
    try:
        return os.lstat(path).st_size == size
    except OSError:
        return False


# --- errors ----------------------------------------------------------------------------


def _amount(count: int) -> str:
    """Return a number of bytes for messages."""
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
        hint="check its owner and mode, or use another folder for the image store",
    )


def _too_full(path: Path, need: int | None, free: int | None, why: str) -> FileUnusable:
    known = [f"{_amount(need)} needed" if need is not None else "", f"{_amount(free)} free" if free is not None else ""]
    numbers = ", ".join(part for part in known if part)
    return FileUnusable(
        f"`{path}` has not enough space for the image's layers",
        why=f"{why} ({numbers})" if numbers else why,
        hint=(
            "free space there (",
            Command("hpcenv", "image", "prune"),
            "), or use another folder for the image store; the next attempt continues the download",
        ),
    )


def _taken(path: Path) -> FileUnusable:
    return FileUnusable(
        f"files disappear from `{path}` while hpcenv writes them",
        why=f"it happened {_MOST_TAKEN} times to one layer",
        hint="some program cleans this folder; use another folder for the image store",
    )


def _wrong(spec: BlobSpec, received: str) -> ImageUnavailable:
    return ImageUnavailable(
        f"the layer {spec.digest} arrived twice with wrong bytes",
        why=f"expected {spec.digest}\nreceived {received}",
        hint="a proxy or mirror may change it; do not use this image from there",
    )


def _too_long(spec: BlobSpec) -> ImageUnavailable:
    return ImageUnavailable(
        f"the layer {spec.digest} arrived with wrong bytes",
        why=f"expected {spec.size} bytes\nreceived more",
        hint="a proxy or mirror may change it; do not use this image from there",
    )


def _too_slow(spec: BlobSpec, limits: TransferLimits) -> ImageUnavailable:
    return ImageUnavailable(
        f"the download of the layer {spec.digest} is too slow",
        why=f"less than {_amount(int(limits.slowest * limits.stall))} arrived in {limits.stall:g} s",
        hint="try again: hpcenv continues the download",
    )
