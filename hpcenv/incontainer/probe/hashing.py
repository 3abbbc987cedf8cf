"""Hash files in parallel, and compute the digest of a set of lines.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import time

from hpcenv.incontainer.probe.paths import NotAFile, open_regular
from hpcenv.incontainer.probe.text import describe_error, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.environment import ProbedEnvironment

SCAN_SECONDS = 120.0
CONTENT_SECONDS = 1200.0
OUT_OF_TIME = "the time limit for hashing is reached"


def digest_of_lines(tag: str, lines: list[str]) -> str:
    """Return the sha256 (hex) of the lines, sorted by bytes and joined with LF, after a first line with the tag."""
    import hashlib

    text = "\n".join(sorted(lines))
    if text.isascii():
        data = text.encode("ascii")
    else:  # bytes that cannot be decoded sort differently from the characters that represent them
        data = b"\n".join(sorted(line.encode("utf-8", "surrogateescape") for line in lines))
    return hashlib.sha256((tag + "\n").encode() + data if tag else data).hexdigest()


class Hashed:
    """The result for one file.

    Attributes:
        digest: hash of the file, or "missing", "not-a-file" or "unchanged"; None if the hash is unknown.
        problem: why the hash is unknown.
        outside: whether the path leads through a link out of the environment.
    """

    __slots__ = ("digest", "outside", "problem")

    def __init__(self, digest: bytes | str | None, problem: str = "", outside: bool = False) -> None:
        self.digest = digest
        self.problem = problem
        self.outside = outside

    def word(self) -> str:
        """Return the digest as text; "unknown" without a digest."""
        return self.digest.hex() if isinstance(self.digest, bytes) else self.digest or "unknown"


def hash_files(env: ProbedEnvironment, jobs: list[tuple[str, str, int]], deadline: float) -> list[Hashed]:
    """Hash files in parallel, with one buffer of 1 MiB per thread.

    Args:
        env: the environment.
        jobs: one tuple for each file: path, algorithm and expected size in bytes.
        deadline: time of `time.monotonic()` after which no further file is hashed.
    """
    import threading
    from collections import deque

    results = [Hashed(None, "not reached")] * len(jobs)
    # Largest first: otherwise, one thread works alone on libtorch_cuda.so at the end.
    queue = deque(sorted(range(len(jobs)), key=lambda i: -jobs[i][2]))

    def work() -> None:
        buffer = bytearray(1 << 20)
        while True:
            try:
                index = queue.popleft()
            except IndexError:
                return
            file, algorithm, _ = jobs[index]
            results[index] = hash_file(env, file, algorithm, buffer, deadline)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(_thread_count())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _thread_count() -> int:
    try:
        processors = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        processors = os.cpu_count() or 1
    return max(4, min(16, processors))  # at least 4, because reads from a shared file system wait


def hash_file(env: ProbedEnvironment, file: str, algorithm: str, buffer: bytearray, deadline: float) -> Hashed:
    """Hash one file. If the file cannot be hashed, the result contains the reason."""
    import hashlib

    if time.monotonic() > deadline:
        return Hashed(None, OUT_OF_TIME)
    try:
        # Old RECORDs have md5; new() also has the algorithms of OpenSSL. Hashes of any length are refused.
        hasher = hashlib.sha256() if algorithm == "sha256" else hashlib.new(algorithm)
        if not hasher.digest_size:
            raise ValueError("no fixed length")
    except Exception as error:  # noqa: BLE001
        return Hashed(None, f"hash algorithm {printable(algorithm)[:40]!r}: {describe_error(error)}")
    try:
        descriptor, outside = open_regular(file, env.inside)
    except NotAFile:
        return Hashed("not-a-file")
    except (OSError, ValueError) as error:
        if env.recording:
            env.looked[file] = (-1, 0, 0)
        return _unopened(error)
    if _is_known(env, file, os.fstat(descriptor)):
        os.close(descriptor)
        return Hashed("unchanged")
    view = memoryview(buffer)
    try:
        while True:
            count = os.readv(descriptor, [buffer])
            if not count:
                return Hashed(hasher.digest(), outside=outside)
            hasher.update(view[:count])
            if count == len(buffer) and time.monotonic() > deadline:
                return Hashed(None, OUT_OF_TIME)
    except OSError as error:
        return Hashed(None, describe_error(error))
    finally:
        os.close(descriptor)


def _is_known(env: ProbedEnvironment, file: str, status: os.stat_result) -> bool:
    """Record size and times of a file.

    Return whether the first check read the file, and the file is unchanged since then.
    """
    if env.recording:
        env.looked[file] = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return env.since is not None and status.st_ctime_ns <= env.since


def _unopened(error: Exception) -> Hashed:
    import errno

    # Python also cannot open a loop of links or a too long name: for Python, the file is missing.
    gone = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
    if isinstance(error, OSError) and error.errno in gone:
        return Hashed("missing")
    return Hashed(None, describe_error(error))
