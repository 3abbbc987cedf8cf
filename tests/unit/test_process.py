"""The one module that starts other programs: literal arguments, a time limit, an error with the reason."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from hpcenv import process
from hpcenv.errors import ToolFailed, ToolMissing


def test_arguments_arrive_literally_and_the_environment_is_the_given_one() -> None:
    show = "import os,sys; print(ascii(sys.argv[1:]), sorted(os.environ))"
    done = process.run([sys.executable, "-c", show, "$(id)", "a b", "", "\udcff"], timeout=20, env={"LC_ALL": "C"})
    assert done.stdout == "['$(id)', 'a b', '', '\\udcff'] ['LC_ALL']\n"


def test_what_a_tool_says_is_read_as_utf_8_whatever_the_locale() -> None:
    write = "import sys; sys.stdout.buffer.write('größe'.encode() + b'\\xff')"
    assert process.run([sys.executable, "-c", write], timeout=20).stdout == "größe\ufffd"


def test_a_failure_carries_argv_status_and_the_end_of_stderr() -> None:
    with pytest.raises(ToolFailed) as caught:
        process.run(["sh", "-c", "echo first >&2; echo last words >&2; exit 3"], timeout=20)
    assert caught.value.what == "`sh` ended with status 3"
    assert caught.value.status == 3
    assert caught.value.stderr.endswith("last words")
    assert "last words" in str(caught.value.why)


def test_a_status_may_be_accepted() -> None:
    assert process.run(["sh", "-c", "exit 3"], timeout=20, accept=(0, 3)).status == 3


def test_a_tool_that_hangs_is_stopped() -> None:
    before = time.monotonic()
    with pytest.raises(ToolFailed, match=r"`sh` did not answer within 0\.3 s") as caught:
        process.run(["sh", "-c", "echo busy >&2; sleep 60; true"], timeout=0.3)
    assert time.monotonic() - before < 10
    assert caught.value.status is None


def test_a_missing_tool_says_what_it_is_for(tmp_path: Path) -> None:
    with pytest.raises(ToolMissing) as caught:
        process.find_tool("sbatch", needed_for="submit a job", path=str(tmp_path))
    assert caught.value.what == "`sbatch` is not on PATH"
    assert caught.value.why == "it is needed to submit a job"
    with pytest.raises(ToolMissing):
        process.run([str(tmp_path / "nothing")], timeout=5)


def test_what_the_kernel_refuses_to_start_is_a_failure(tmp_path: Path) -> None:
    program = tmp_path / "broken"
    program.write_bytes(b"\x7fELF nonsense")
    program.chmod(0o755)
    with pytest.raises(ToolFailed, match="cannot be started"):
        process.run([str(program)], timeout=5)
    with pytest.raises(ToolFailed) as caught:
        process.run(["true", "x" * 3_000_000], timeout=5)
    assert caught.value.why == "Argument list too long"


def test_a_stream_hands_over_lines_as_they_come() -> None:
    lines: list[str] = []
    done = process.stream(["sh", "-c", "echo one; echo two >&2"], on_line=lines.append, timeout=20)
    assert lines == ["one", "two"]
    assert done.status == 0


def test_a_stream_ends_with_all_its_children_at_the_time_limit() -> None:
    before = time.monotonic()
    with pytest.raises(ToolFailed):
        process.stream(["sh", "-c", "sleep 60 & sleep 60"], on_line=print, timeout=0.3)
    assert time.monotonic() - before < 10


def test_every_program_has_a_session_of_its_own() -> None:
    show = [sys.executable, "-c", "import os; print(os.getsid(0) == os.getpid())"]
    assert process.run(show, timeout=20).stdout == "True\n"
    assert process.stream(show, on_line=print, timeout=20).stdout == "True"
    assert process.feed(show, write=lambda _out: None, timeout=20).stdout == "True\n"
    child = process.start(["sleep", "60"])
    assert os.getsid(child.pid) == child.pid
    process.kill_session(child)
    assert child.returncode == -9


# The parent of these ends, or hangs, while its child holds the output open: in the same session, or in another one.
HOLDERS = {"the same session": "sleep 600 &", "another session": "setsid sleep 600 &"}


def gone(pid: int) -> bool:
    """Whether a process ends, perhaps as a zombie that init has not waited for yet. A kill takes effect a moment later."""
    until = time.monotonic() + 2
    while process.parent_of(pid) is not None and time.monotonic() < until:
        time.sleep(0.01)
    return process.parent_of(pid) is None


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_a_child_of_a_program_that_hangs_does_not_keep_the_caller(holder: str, tmp_path: Path) -> None:
    script = f"echo said >&2; {holder} echo $! > {tmp_path}/pid; wait"
    before = time.monotonic()
    with pytest.raises(ToolFailed, match="did not answer within 1 s") as caught:
        process.run(["sh", "-c", script], timeout=1)
    assert caught.value.stderr == "said\n"
    with pytest.raises(ToolFailed, match="did not answer within 1 s"):
        process.stream(["sh", "-c", script], on_line=print, timeout=1)
    assert gone(int((tmp_path / "pid").read_text()))
    assert time.monotonic() - before < 20


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_a_child_that_outlives_its_program_does_not_keep_the_caller(holder: str, tmp_path: Path) -> None:
    script = f"{holder} echo $! > {tmp_path}/pid; echo done"
    before = time.monotonic()
    try:
        assert process.run(["sh", "-c", script], timeout=600).stdout == "done\n"
        assert process.stream(["sh", "-c", script], on_line=print, timeout=600).stdout == "done"
        with pytest.raises(ToolFailed, match="ended with status 3"):
            process.run(["sh", "-c", f"{script}; exit 3"], timeout=600)
        assert time.monotonic() - before < 30
    finally:
        # What left the session on purpose, as a daemon does, is not hunted.
        if not gone(left := int((tmp_path / "pid").read_text())):
            assert "setsid" in holder
            os.kill(left, 9)


def test_a_program_that_closes_its_output_and_stays_is_stopped() -> None:
    before = time.monotonic()
    for call in (process.run, lambda argv, timeout: process.stream(argv, on_line=print, timeout=timeout)):
        with pytest.raises(ToolFailed, match="did not answer"):
            call(["sh", "-c", "exec >&- 2>&-; sleep 600"], timeout=0.5)
    assert time.monotonic() - before < 15


def test_much_input_and_much_output_pass_through_a_slow_program() -> None:
    text = "x" * 3_000_000
    assert process.run(["sh", "-c", "sleep 1.2; cat"], timeout=30, stdin=text).stdout == text


def test_a_stream_cuts_a_line_without_end() -> None:
    lines: list[str] = []
    process.stream(
        ["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo end"], on_line=lines.append, timeout=30
    )
    assert lines[-1] == "end"
    assert len("".join(lines[:-1])) == 3_000_000
    assert max(map(len, lines)) < 1_200_000


def test_a_program_is_fed_by_a_writer(tmp_path: Path) -> None:
    def write(out: BinaryIO) -> None:
        for number in range(3000):
            out.write(b"%d\n" % number * 100)

    done = process.feed(["sh", "-c", "wc -c; echo said >&2"], write=write, timeout=20, env={"PATH": os.defpath})
    assert done.stdout.split() == [str(sum(len(b"%d\n" % number) * 100 for number in range(3000))), "said"]


def test_padding_that_a_program_does_not_wait_for_is_no_failure() -> None:
    def write(out: BinaryIO) -> None:
        out.write(b"x")
        out.flush()
        time.sleep(0.3)
        out.write(bytes(1000))

    assert process.feed(["head", "-c", "1"], write=write, timeout=20).stdout == "x"


def write_much(out: BinaryIO) -> None:
    out.write(bytes(9 << 20))


def test_a_program_that_goes_before_it_is_fed_is_the_failure_not_the_broken_pipe() -> None:
    with pytest.raises(ToolFailed, match="ended with status 4") as caught:
        process.feed(["sh", "-c", "echo why >&2; exit 4"], write=write_much, timeout=20)
    assert caught.value.stderr == "why"
    # One that ends well without reading what it was given has not done its work either.
    with pytest.raises(BrokenPipeError):
        process.feed(["true"], write=write_much, timeout=20)


def test_a_broken_pipe_elsewhere_is_passed_on() -> None:
    def write(_out: BinaryIO) -> None:
        raise BrokenPipeError("the registry hung up")

    with pytest.raises(BrokenPipeError, match="registry"):
        process.feed(["sleep", "30"], write=write, timeout=20)


def test_a_fed_program_that_is_missing_or_hangs() -> None:
    with pytest.raises(ToolMissing):
        process.feed(["/nowhere/at-all"], write=lambda _out: None, timeout=5)
    before = time.monotonic()
    with pytest.raises(ToolFailed, match=r"did not answer within 0\.3 s") as caught:
        process.feed(["sh", "-c", "echo busy; sleep 60; true"], write=lambda _out: None, timeout=0.3)
    assert time.monotonic() - before < 10
    assert caught.value.stderr == "busy\n"


def test_output_is_read_byte_for_byte() -> None:
    assert process.read_bytes(["/bin/sh", "-c", "printf 'a\\377'; echo said >&2"], timeout=20) == b"a\xff"
    assert process.read_bytes(["cat"], timeout=20, stdin=b"\xff\0\n") == b"\xff\0\n"
    assert process.read_bytes(["/bin/sh", "-c", "exit 1"], timeout=20, accept=(0, 1)) == b""
    with pytest.raises(ToolFailed) as caught:
        process.read_bytes(["/bin/sh", "-c", "echo why >&2; exit 3"], timeout=20)
    assert (caught.value.status, caught.value.stderr) == (3, "why")
    with pytest.raises(ToolFailed, match="did not answer within"):
        process.read_bytes(["/bin/sleep", "600"], timeout=0.1)
    with pytest.raises(ToolMissing):
        process.read_bytes(["/nowhere/tool"], timeout=1)


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_a_pool_that_is_stopped_kills_its_programs_and_their_children(holder: str, tmp_path: Path) -> None:
    stop, before = threading.Event(), time.monotonic()
    script = f"{holder} echo $! > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; wait"
    with ThreadPoolExecutor(1, initializer=process.stop_with, initargs=(stop,)) as pool:
        answer = pool.submit(process.run, ["sh", "-c", script], timeout=600)
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        stop.set()
    assert gone(int((tmp_path / "pid").read_text()))
    assert isinstance(answer.exception(), ToolFailed)
    assert time.monotonic() - before < 20
    assert process.run(["sleep", "0.5"], timeout=20).status == 0, "other threads are left alone"


def test_a_signal_that_is_held_back_comes_when_the_program_lets_it_through(tmp_path: Path) -> None:
    program = """
import pathlib, signal, sys, time
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
pathlib.Path(sys.argv[1]).touch()
time.sleep(0.5)
early = len(seen)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
sys.exit(10 * early + len(seen))
"""
    argv = [sys.executable, "-c", program, str(tmp_path / "ready")]
    child = process.start(argv, held_back=process.END_SIGNALS)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    child.terminate()
    assert child.wait(timeout=20) == 1
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(), "of the caller itself nothing is held back"
