"""The only module that starts other programs.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

Every call takes argv as a list and the environment as a mapping. So no call uses the environment of the caller by
accident. Every call has a time limit, because Slurm commands sometimes hang when slurmctld is busy. If a program fails,
the error is a `ToolFailed` with argv, status and the end of stderr.

Each program has its own session, so that the program can be killed together with its children. Every wait for a program
has a time limit, for two reasons. A child may keep the output of the program open. A process that hangs in the kernel
does not end when it is killed. Only `run_in_terminal` has no time limit, because the user ends that program.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from hpcenv.errors import HpcenvError, ToolFailed, ToolMissing

# The end of a failed tool's output: enough for Apptainer's FATAL line and the lines before it, not a whole
# build log.
_TAIL_CHARACTERS = 4000
# A value for the streams of `start`. The caller of `start` gets the other end of the pipe.
PIPE = subprocess.PIPE
# The signals that ask a program to end.
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# The largest pipe on Linux for a process without privileges (fs.pipe-max-size), in bytes.
_FEED_BUFFER = 1 << 20
# A wait for output checks at this interval whether the program itself has ended.
_LOOK_SECONDS = 0.2
# After a program has ended, its child may keep the output open for this time. After this time, the child is killed.
_SECONDS_FOR_CHILDREN = 2.0
# How long to wait after SIGKILL. A process that hangs in the kernel (state D) may take longer to end, but hpcenv does
# not wait longer.
_SECONDS_AFTER_KILL = 5.0
# The longest line, in bytes. Longer lines are cut, because a program may write without any newline.
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A finished program: its argv, exit status and decoded output."""

    argv: tuple[str, ...]
    status: int
    stdout: str
    stderr: str


def find_tool(name: str, *, needed_for: str, path: str | None = None) -> str:
    """Return the absolute path of program `name`.

    Args:
        name: the program as typed, for example `sbatch`.
        needed_for: what the program is needed for. This text completes the sentence "it is needed to ..." in the error.
        path: a PATH to search instead of the PATH of this process.

    Raises:
        ToolMissing: the program is not on PATH.
    """
    tool = shutil.which(name, path=path)
    if tool is None:
        raise ToolMissing(
            f"`{name}` is not on PATH",
            why=f"it is needed to {needed_for}",
            hint=f"load the module that provides it, or ask your site where `{name}` is installed",
        )
    return tool


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    cwd: Path | None = None,
    accept: tuple[int, ...] = (0,),
    pass_fds: tuple[int, ...] = (),
    slow: float | None = None,
    explain: Callable[[], HpcenvError | None] = lambda: None,
) -> Completed:
    """Run a program to its end and return its output.

    Args:
        argv: program and arguments, passed literally.
        timeout: seconds after which the program is killed.
        env: the whole environment of the program; None to inherit the environment of this process (only for tools
            that need the user's environment).
        stdin: text for the standard input of the program; None for an empty input.
        cwd: the folder in which the program runs.
        accept: exit statuses that are not an error.
        pass_fds: open files that the program inherits under the same numbers.
        slow: seconds after which `explain` is called once. If `explain` returns an error, this error is raised.
        explain: function that returns the reason why the program is slow, as an error, or None.

    Raises:
        ToolMissing: the program does not exist.
        ToolFailed: the program ended with a status that is not in `accept`, or reached the time limit.
    """
    out, err, status = _run(
        argv,
        timeout=timeout,
        env=env,
        stdin=stdin,
        cwd=cwd,
        accept=accept,
        pass_fds=pass_fds,
        slow=slow,
        explain=explain,
    )
    stdout, stderr = (output.decode(errors="replace") for output in (out, err))
    return Completed(argv=tuple(argv), status=status, stdout=stdout, stderr=stderr)


def read_bytes(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    cwd: Path | None = None,
    accept: tuple[int, ...] = (0,),
) -> bytes:
    """Run a program to its end and return its standard output byte for byte; arguments as for `run`.

    Raises:
        ToolMissing, ToolFailed: as for `run`.
    """
    return _run(argv, timeout=timeout, env=env, stdin=stdin, cwd=cwd, accept=accept)[0]


def _run(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None,
    stdin: str | bytes | None,
    cwd: Path | None,
    accept: tuple[int, ...],
    pass_fds: tuple[int, ...] = (),
    slow: float | None = None,
    explain: Callable[[], HpcenvError | None] = lambda: None,
) -> tuple[bytes, bytes, int]:
    """Run a program to its end; return its output, its standard error and its exit status."""
    with _input(stdin) as source:
        child = _popen(argv, env=env, cwd=cwd, stdin=source, stdout=PIPE, stderr=PIPE, pass_fds=pass_fds)
    try:
        out, err = _communicate(child, argv, timeout, slow, explain)
    finally:
        kill_session(child)
        # The pipes are not read to their end, because a child of the program may keep them open.
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
    if child.returncode not in accept:
        # The error shows standard output only if standard error is empty.
        output = err.decode(errors="replace") or out[-4 * _TAIL_CHARACTERS :].decode(errors="replace")
        raise failed(Completed(argv=tuple(argv), status=child.returncode, stdout="", stderr=output))
    return out, err, child.returncode


@contextlib.contextmanager
def _input(content: str | bytes | None) -> Iterator[int]:
    """Yield a file descriptor for the standard input of a program: a file in memory, or an empty input.

    A pipe cannot be used: after a timeout, a second call of `communicate` does not write the rest of the input
    (Python 3.13, `_communicate`).
    """
    if content is None:
        yield subprocess.DEVNULL
        return
    with open(os.memfd_create("input", os.MFD_CLOEXEC), "w+b") as file:
        file.write(content.encode(errors="replace") if isinstance(content, str) else content)
        file.seek(0)
        yield file.fileno()


def _communicate(
    child: subprocess.Popen[bytes],
    argv: Sequence[str],
    timeout: float,
    slow: float | None,
    explain: Callable[[], HpcenvError | None],
) -> tuple[bytes, bytes]:
    """Return the whole output. If the program has ended but a child still writes, wait for the child only a short time.

    Raises:
        ToolFailed: the program did not end in time, and was killed.
    """
    started, ended = time.monotonic(), None
    asked = slow is None
    while True:
        out, err, is_complete = _exchange(child, min(_LOOK_SECONDS, timeout))
        if is_complete:
            return out, err
        now = time.monotonic()
        ended = ended or (now if _has_ended(child) else None)
        if now >= started + timeout or _is_stopped() or (ended is not None and now >= ended + _SECONDS_FOR_CHILDREN):
            break
        if not asked and ended is None and slow is not None and now > started + slow:
            asked, reason = True, explain()
            if reason is not None:
                raise reason
    is_late = not _has_ended(child)
    kill_session(child)
    # A child that left the session may still keep the output open.
    out, err, _ = _exchange(child, _LOOK_SECONDS)
    if is_late or child.returncode is None:
        raise _timed_out(argv, timeout, err.decode(errors="replace"))
    return out, err


def _exchange(child: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, bytes, bool]:
    """Wait at most `seconds` for a program to end; return its output so far, and whether this output is complete."""
    try:
        return (*child.communicate(timeout=seconds), True)
    except subprocess.TimeoutExpired as error:
        return error.stdout or b"", error.stderr or b"", False


_this_thread = threading.local()


def stop_with(event: threading.Event) -> None:
    """When `event` is set, kill the program that this thread waits for. The threads of a pool use this function."""
    _this_thread.stop = event


def _is_stopped() -> bool:
    event: threading.Event | None = getattr(_this_thread, "stop", None)
    return event is not None and event.is_set()


def kill_session(child: subprocess.Popen[bytes]) -> None:
    """Kill a program that this module started, and its children; wait a few seconds for the end of the program.

    If this process has already waited for the end of the program, nothing is killed, because another process may now
    have the same process id.
    """
    if child.returncode is not None:
        return
    # Children are searched first. After the end of the program, they have a different parent and are not found.
    rest = below(child.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    for pid in rest:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_SECONDS_AFTER_KILL)


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Return whether a program has ended.

    The program is not reaped here, so no other process can get its process id.
    """
    if child.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def below(pid: int) -> tuple[int, ...]:
    """Return the running descendants of `pid`: its children, their children and so on (proc(5))."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := parent_of(int(entry))) is not None:
            children.setdefault(parent, []).append(int(entry))
    descendants: list[int] = []
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            descendants.append(child)
            waiting.append(child)
    return tuple(descendants)


def parent_of(pid: int) -> int | None:
    """Return the parent of a running process, None if the process has ended (proc_pid_stat(5), fields 3 and 4)."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(parent)


def _popen(argv: Sequence[str], *, env: Mapping[str, str] | None, **options: Any) -> subprocess.Popen[bytes]:
    """Start a program in its own session.

    Raises:
        ToolMissing, ToolFailed: the program cannot be started.
    """
    try:
        return subprocess.Popen(list(argv), env=None if env is None else dict(env), start_new_session=True, **options)
    except OSError as error:
        raise _not_started(argv, error) from error


def _not_started(argv: Sequence[str], error: OSError) -> HpcenvError:
    """Return the error for a program that does not exist, is not executable, or has too long an argument list."""
    what = f"`{argv[0]}` cannot be started"
    if isinstance(error, FileNotFoundError):
        return ToolMissing(what, why=str(error))
    return ToolFailed(what, argv=tuple(argv), why=error.strerror)


def failed(result: Completed) -> ToolFailed:
    """Return the error for a program whose exit status the caller does not accept."""
    output = (result.stderr.strip() or result.stdout.strip())[-_TAIL_CHARACTERS:]
    return ToolFailed(
        f"`{Path(result.argv[0]).name}` ended with status {result.status}",
        argv=result.argv,
        status=result.status,
        stderr=output,
        why=f"{shlex.join(result.argv)}\n{output}",
    )


def _timed_out(argv: Sequence[str], timeout: float, output: str) -> ToolFailed:
    return ToolFailed(
        f"`{Path(argv[0]).name}` did not answer within {timeout:g} s",
        argv=tuple(argv),
        stderr=output[-_TAIL_CHARACTERS:],
        why=shlex.join(argv),
    )


def stream(
    argv: Sequence[str],
    *,
    on_line: Callable[[str], None],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    umask: int = -1,
) -> Completed:
    """Run a long program, and call `on_line` with each line of its output as soon as the line is complete.

    Standard output and standard error are merged, in order. `timeout` is the limit for the whole run, in seconds.
    `umask` is the umask of the program; -1 means the umask of the caller.

    Raises:
        ToolMissing, ToolFailed: as for `run`.
    """
    lines: list[str] = []
    options = {"umask": umask} if umask >= 0 else {}  # Python 3.8 on a node does not know this argument
    with _watched(argv, timeout=timeout, env=env, cwd=cwd, stdin=subprocess.DEVNULL, **options) as watched:
        for raw in _lines(watched.pieces()):
            line = raw.decode(errors="replace")
            lines.append(line)
            on_line(line)
        watched.wait()
    return watched.completed("\n".join(lines))


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield each line as soon as it is complete; a line that is too long is cut."""
    rest = b""
    for piece in pieces:
        *complete, rest = (rest + piece).split(b"\n")
        yield from complete
        if len(rest) > _LONGEST_LINE:
            yield rest
            rest = b""
    if rest:
        yield rest


def feed(
    argv: Sequence[str],
    *,
    write: Callable[[BinaryIO], None],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Completed:
    """Run a program that reads its standard input, and let `write` write this input.

    Standard output and standard error are merged; only their end is kept. ^C reaches only this process,
    which then stops the program. The program has ended when this function returns or raises.

    Args:
        write: function that writes the input. It is called once, in this thread. When it returns, the input ends.
        timeout: seconds for the whole run.

    Raises:
        ToolMissing: the program does not exist.
        ToolFailed: the program ended with a status that is not 0, or did not end in time. A program that fails may
            have read only a part of its input.
        Exception: an exception of `write`. If the failure of the program caused this exception, ToolFailed is raised
            instead.
    """
    tail = bytearray()
    with _watched(argv, timeout=timeout, env=env, cwd=cwd, stdin=PIPE, bufsize=_FEED_BUFFER) as watched:
        listener = threading.Thread(target=_keep_the_end, args=(watched.child.stdout, tail), daemon=True)
        listener.start()
        try:
            _feed_and_wait(watched, write)
        except BaseException:
            watched.kill()
            raise
        finally:
            listener.join(timeout=5)
    return watched.completed(tail.decode(errors="replace"))


@dataclass
class _Watched:
    """A program with a time limit, in its own session. When the program is killed, its children are killed, too."""

    child: subprocess.Popen[bytes]
    argv: Sequence[str]
    timeout: float
    late: threading.Event

    def kill(self) -> None:
        kill_session(self.child)

    def expire(self) -> None:
        self.late.set()
        self.kill()

    def wait(self) -> None:
        """Wait for the end of the program, at most until the time limit kills it."""
        while not self.late.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(timeout=_LOOK_SECONDS)
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout=_SECONDS_AFTER_KILL)

    def pieces(self) -> Iterator[bytes]:
        """Yield each piece of the program's output as soon as it is written.

        If a child keeps the output open after the program has ended, the child is killed after a short time.
        """
        output = cast("IO[bytes]", self.child.stdout).fileno()
        ended = None
        while True:
            ready = select.poll()
            ready.register(output, select.POLLIN)
            if ready.poll(_LOOK_SECONDS * 1000):
                piece = os.read(output, 1 << 16)
                if not piece:
                    return
                yield piece
            now = time.monotonic()
            ended = ended or (now if self.late.is_set() or _has_ended(self.child) else None)
            if ended is not None and now >= ended + _SECONDS_FOR_CHILDREN:
                self.kill()
                return

    def completed(self, output: str) -> Completed:
        """Return the result; raise ToolFailed if the program failed or reached the time limit."""
        if self.late.is_set() or self.child.returncode is None:
            raise _timed_out(self.argv, self.timeout, output)
        result = Completed(argv=tuple(self.argv), status=self.child.returncode, stdout=output, stderr="")
        if result.status != 0:
            raise failed(result)
        return result


@contextlib.contextmanager
def _watched(
    argv: Sequence[str], *, timeout: float, env: Mapping[str, str] | None, cwd: Path | None, **options: Any
) -> Iterator[_Watched]:
    """Start a program with merged standard output and error; kill it at the time limit, or if the block raises.

    If the block raises an exception after the time limit, this exception is dropped, because `completed` raises
    ToolFailed.
    """
    options |= {"stdout": PIPE, "stderr": subprocess.STDOUT}
    child = _popen(argv, env=env, cwd=cwd, **options)
    watched = _Watched(child=child, argv=argv, timeout=timeout, late=threading.Event())
    watchdog = threading.Timer(timeout, watched.expire)
    watchdog.daemon = True
    try:
        watchdog.start()
        yield watched
    except BaseException:
        watched.kill()
        if not watched.late.is_set():
            raise
    finally:
        watchdog.cancel()
        if watchdog.ident is not None:
            watchdog.join()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _feed_and_wait(watched: _Watched, write: Callable[[BinaryIO], None]) -> None:
    """Call `write`, close the pipe, and wait for the end of the program.

    If the program fails before it has read all its input, this function raises no error. The caller checks the exit
    status.
    """
    child = watched.child
    stdin = cast("BinaryIO", child.stdin)
    # With the default size of the pipe, one process would have to wait for the other after every 64 KiB.
    with contextlib.suppress(OSError):
        fcntl.fcntl(stdin, fcntl.F_SETPIPE_SZ, _FEED_BUFFER)
    try:
        write(stdin)
    except Exception as error:
        # The reading end of the pipe closes a moment before the exit status of the child is available.
        if not _failed_within(child, 2.0 if _of_a_pipe(error) else 0.0):
            raise
    # The rest of the buffer may be padding that the child does not read. The exit status of the child shows whether it
    # had all the input that it needed.
    with contextlib.suppress(BrokenPipeError):
        stdin.close()
    watched.wait()


def _failed_within(child: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        return child.wait(timeout=seconds) != 0
    except subprocess.TimeoutExpired:
        return False


def _of_a_pipe(error: BaseException | None) -> bool:
    """Return whether a broken pipe is among the causes of an error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, BrokenPipeError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _keep_the_end(pipe: IO[bytes], tail: bytearray) -> None:
    """Read a pipe until it ends, so that the program never has to wait; keep only the end of the output."""
    with contextlib.suppress(OSError, ValueError):
        while piece := os.read(pipe.fileno(), 1 << 16):
            tail += piece
            del tail[: -4 * _TAIL_CHARACTERS]


def run_in_terminal(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: tuple[int, ...] = (),
) -> int:
    """Run a program with the terminal, input and output of this process; return its exit status (128 + N for signal N).

    ^C in the terminal stops only the program, because this process ignores ^C. The program stays in the session of this
    process, because this session has the terminal. There is no time limit.

    Raises:
        ToolMissing, ToolFailed: the program cannot be started.
    """
    ignored = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        child = subprocess.Popen(
            list(argv),
            env=None if env is None else dict(env),
            cwd=cwd,
            pass_fds=pass_fds,
            preexec_fn=_restore_signals,  # noqa: PLW1509  (one thread; an ignored signal stays ignored over execve)
        )
        status = child.wait()
    except OSError as error:
        raise _not_started(argv, error) from error
    finally:
        for number, handler in ignored.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def _restore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    pass_fds: tuple[int, ...] = (),
    ignored: tuple[int, ...] = (),
    held_back: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:
    """Start a program in its own session, so that it gets no signals of this terminal. The caller waits for its end.

    Args:
        stdin: an open file; by default the program has an empty input.
        pass_fds: open files that the program inherits under the same numbers.
        ignored: signals that the program ignores until it sets handlers; only for callers without threads.
        held_back: signals that are blocked when the program starts. Such a signal reaches the program after the program
            has unblocked it.
    """

    def ignore() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    # A program inherits the blocked signals of the thread that starts it (signal(7)).
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held_back)
    try:
        return subprocess.Popen(
            list(argv),
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=ignore if ignored else None,  # noqa: PLW1509  (no threads, see above)
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
