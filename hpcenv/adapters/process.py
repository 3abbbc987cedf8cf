"""The only door to other programs.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

Every call takes argv as a list, an environment as a mapping (never the caller's by
accident), and a time limit: Slurm commands are known to hang when slurmctld is busy.
A failure becomes a `ToolFailed` that carries argv, status and the end of stderr.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, cast

from hpcenv.dataclass import dataclass
from hpcenv.errors import HpcenvError, ToolFailed, ToolMissing

if TYPE_CHECKING:
    from typing_extensions import Self

# What a person can read of a failed tool's output: enough for Apptainer's FATAL line and
# the lines that led to it, not a whole build log.
_TAIL_CHARACTERS = 4000
# For `start`: the other end is the caller's.
PIPE = subprocess.PIPE
# What a pipe may hold without privileges on Linux (fs.pipe-max-size), in bytes.
_FEED_BUFFER = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Completed:
    """What a finished program left: its argv, exit status and decoded output."""

    argv: tuple[str, ...]
    status: int
    stdout: str
    stderr: str


def find_tool(name: str, *, needed_for: str, path: str | None = None) -> str:
    """Return the absolute path of program `name`.

    Args:
        name: the program as typed, for example `sbatch`.
        needed_for: ends the sentence "it is needed to ..." in the error.
        path: a PATH to search instead of the process's own.

    Raises:
        ToolMissing: the program is not there.
    """
    found = shutil.which(name, path=path)
    if found is None:
        raise ToolMissing(
            f"`{name}` is not on PATH",
            why=f"it is needed to {needed_for}",
            hint=f"load the module that provides it, or ask your site where `{name}` is installed",
        )
    return found


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    cwd: Path | None = None,
    accept: tuple[int, ...] = (0,),
    pass_fds: tuple[int, ...] = (),
) -> Completed:
    """Run a program to its end and return its output.

    Args:
        argv: program and arguments, passed literally.
        timeout: seconds before it is killed.
        env: its whole environment; None inherits (only for tools that need the user's).
        stdin: text for its standard input; None gives it an empty one.
        cwd: where it runs.
        accept: exit statuses that are not an error.
        pass_fds: open files that the program inherits under the same numbers.

    Raises:
        ToolMissing: there is no such program.
        ToolFailed: another exit status, or the time limit was reached.
    """
    try:
        done = subprocess.run(
            list(argv),
            input=stdin or "",
            capture_output=True,
            # Not the locale's: the probe that goes in and what tools print is UTF-8.
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            env=None if env is None else dict(env),
            cwd=cwd,
            check=False,
            pass_fds=pass_fds,
        )
    except OSError as error:
        raise _not_started(argv, error) from error
    except subprocess.TimeoutExpired as error:
        raise _timed_out(argv, timeout, error) from error
    result = Completed(argv=tuple(argv), status=done.returncode, stdout=done.stdout, stderr=done.stderr)
    if done.returncode not in accept:
        raise failed(result)
    return result


class Begun:
    """A program that runs while its caller does something else; it ends with the `with` at the latest.

    Args:
        argv: program and arguments, passed literally.
        timeout: seconds that it may still take when its output is asked for.
        env: its whole environment; None inherits.

    Raises:
        ToolMissing, ToolFailed: it cannot be started.
    """

    def __init__(self, argv: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None) -> None:
        self._argv, self._timeout = tuple(argv), timeout
        try:
            self._child = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=None if env is None else dict(env),
            )
        except OSError as error:
            raise _not_started(argv, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.returncode is None:
            self._child.kill()
            self._child.communicate()

    def read_bytes(self, *, accept: tuple[int, ...] = (0,)) -> bytes:
        """Wait for its end and return its output byte for byte; to be called once.

        Raises:
            ToolFailed: as for `run`.
        """
        return self._finish(accept)[0]

    def finish(self) -> Completed:
        """Wait for its end and return its output as text; to be called once.

        Raises:
            ToolFailed: as for `run`.
        """
        out, err = (said.decode("utf-8", errors="replace") for said in self._finish((0,)))
        return Completed(argv=self._argv, status=0, stdout=out, stderr=err)

    def _finish(self, accept: tuple[int, ...]) -> tuple[bytes, bytes]:
        try:
            out, err = self._child.communicate(timeout=self._timeout)
        except subprocess.TimeoutExpired as error:
            raise _timed_out(self._argv, self._timeout, error) from error
        if self._child.returncode not in accept:
            # Of what git prints only its complaints are for people.
            said = err.decode(errors="replace") or out[-_TAIL_CHARACTERS:].decode(errors="replace")
            raise failed(Completed(argv=self._argv, status=self._child.returncode, stdout="", stderr=said))
        return out, err


def _not_started(argv: Sequence[str], error: OSError) -> HpcenvError:
    """No such program, or the kernel refused it: not executable, argument list too long."""
    what = f"`{argv[0]}` cannot be started"
    if isinstance(error, FileNotFoundError):
        return ToolMissing(what, why=str(error))
    return ToolFailed(what, argv=tuple(argv), why=error.strerror)


def failed(result: Completed) -> ToolFailed:
    """Return the error for a program that ended with a status nobody accepts."""
    said = result.stderr.strip() or result.stdout.strip()
    return ToolFailed(
        f"`{Path(result.argv[0]).name}` ended with status {result.status}",
        argv=result.argv,
        status=result.status,
        stderr=said[-_TAIL_CHARACTERS:],
        why=f"{shlex.join(result.argv)}\n{said[-_TAIL_CHARACTERS:]}",
    )


def _timed_out(argv: Sequence[str], timeout: float, error: subprocess.TimeoutExpired) -> ToolFailed:
    captured = error.stderr or b""
    said = captured.decode(errors="replace") if isinstance(captured, bytes) else captured
    return ToolFailed(
        f"`{Path(argv[0]).name}` did not answer within {timeout:g} s",
        argv=tuple(argv),
        stderr=said[-_TAIL_CHARACTERS:],
        why=shlex.join(argv),
    )


def stream(
    argv: Sequence[str],
    *,
    on_line: Callable[[str], None],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Completed:
    """Run a long program and hand over each line of its output as it comes.

    stdout and stderr arrive merged, in order. `timeout` is in seconds for the whole run.

    Raises:
        ToolMissing, ToolFailed: as for `run`.
    """
    import threading

    try:
        child = start(argv, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, new_session=True)
    except OSError as error:
        raise _not_started(argv, error) from error
    watchdog = threading.Timer(timeout, _kill_all, [child])
    watchdog.start()
    lines: list[str] = []
    try:
        assert child.stdout is not None
        for raw in child.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            lines.append(line)
            on_line(line)
        status = child.wait()
    except BaseException:
        _kill_all(child)
        child.wait()
        raise
    finally:
        watchdog.cancel()
        if child.stdout is not None:
            child.stdout.close()
    result = Completed(argv=tuple(argv), status=status, stdout="\n".join(lines), stderr="")
    if status != 0:
        raise failed(result)
    return result


def feed(
    argv: Sequence[str],
    *,
    write: Callable[[BinaryIO], None],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Completed:
    """Run a program that reads its standard input, and let `write` write it.

    stdout and stderr arrive merged; only their end is kept. The program runs in a session
    of its own: ^C reaches this process, which then stops it. It has ended when this returns
    or raises.

    Args:
        write: called once, in this thread; its return ends the program's input.
        timeout: seconds for the whole run.

    Raises:
        ToolMissing: there is no such program.
        ToolFailed: it ended with another status than 0, before or after it had read all,
            or did not end in time.
        Exception: whatever `write` raised, unless it did because the program had ended.
    """
    import threading

    try:
        child = subprocess.Popen(
            list(argv),
            bufsize=_FEED_BUFFER,
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise _not_started(argv, error) from error
    late = threading.Event()

    def stop() -> None:
        late.set()
        _kill_all(child)

    heard = bytearray()
    listener = threading.Thread(target=_keep_the_end, args=(child.stdout, heard), daemon=True)
    watchdog = threading.Timer(timeout, stop)
    watchdog.daemon = True
    try:
        listener.start()
        watchdog.start()
        status = _fed(child, write)
    except BaseException:
        _kill_all(child)
        child.wait()
        if not late.is_set():
            raise
        status = child.returncode
    finally:
        watchdog.cancel()
        if watchdog.ident is not None:
            watchdog.join()
        with contextlib.suppress(OSError):
            cast("IO[bytes]", child.stdin).close()
        if listener.ident is not None:
            listener.join(timeout=5)
        cast("IO[bytes]", child.stdout).close()
    said = heard.decode(errors="replace")
    if late.is_set():
        raise _timed_out(argv, timeout, subprocess.TimeoutExpired(argv, timeout, stderr=said.encode()))
    result = Completed(argv=tuple(argv), status=status, stdout=said, stderr="")
    if status != 0:
        raise failed(result)
    return result


def _fed(child: subprocess.Popen[bytes], write: Callable[[BinaryIO], None]) -> int:
    """Let `write` write, close the pipe, wait for the end; a child that went first is no error here."""
    stdin = cast("BinaryIO", child.stdin)
    # The default of 64 KiB costs a switch between the two processes every 64 KiB.
    with contextlib.suppress(OSError):
        fcntl.fcntl(stdin, fcntl.F_SETPIPE_SZ, _FEED_BUFFER)
    try:
        write(stdin)
    except Exception as error:
        # The pipe's reading end closes a moment before the child can be waited for.
        if not _failed_within(child, 2.0 if _of_a_pipe(error) else 0.0):
            raise
    # What is left in the buffer may be padding that the child did not wait for: its exit
    # status says whether it had what it needed.
    with contextlib.suppress(BrokenPipeError):
        stdin.close()
    return child.wait()


def _failed_within(child: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        return child.wait(timeout=seconds) != 0
    except subprocess.TimeoutExpired:
        return False


def _of_a_pipe(error: BaseException | None) -> bool:
    """True if a broken pipe is among the causes of an error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, BrokenPipeError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _keep_the_end(pipe: IO[bytes], heard: bytearray) -> None:
    """Read a pipe until it ends, so that its writer never waits; keep only the end."""
    with contextlib.suppress(OSError, ValueError):
        while piece := os.read(pipe.fileno(), 1 << 16):
            heard += piece
            del heard[: -4 * _TAIL_CHARACTERS]


def _kill_all(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and its children: else they would hold its output open and go on working."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def talk(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: tuple[int, ...] = (),
) -> int:
    """Run a program on this process's own terminal, input and output; return its exit status (128 + N for signal N).

    ^C is the program's: it reaches it through the terminal, and not this process.

    Raises:
        ToolMissing, ToolFailed: it cannot be started.
    """
    ignored = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        child = subprocess.Popen(
            list(argv),
            env=None if env is None else dict(env),
            cwd=cwd,
            pass_fds=pass_fds,
            preexec_fn=_listen_again,  # noqa: PLW1509  (one thread; what is ignored stays so over execve)
        )
        status = child.wait()
    except OSError as error:
        raise _not_started(argv, error) from error
    finally:
        for number, handler in ignored.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def _listen_again() -> None:
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
    new_session: bool = False,
    ignored: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:
    """Start a program and return at once; the caller supervises it.

    Args:
        stdin: an open file, or nothing to read.
        pass_fds: open files that the program inherits under the same numbers.
        new_session: put it into a session of its own, away from this terminal's signals.
        ignored: signals that it ignores from its first moment, until it sets handlers; only for
            callers without threads.
    """

    def ignore() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    return subprocess.Popen(
        list(argv),
        env=None if env is None else dict(env),
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        start_new_session=new_session,
        preexec_fn=ignore if ignored else None,  # noqa: PLW1509  (no threads: said above)
    )
