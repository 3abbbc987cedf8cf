"""tests/fork_server.py: what runs as a fork starts as a process of its own does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest

ENVIRON = {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "TZ": "Asia/Tokyo", "NAME": "\udcff"}
# All that a program can see of its start, apart from the hash seed and the number of its parent.
SHOW = """
import gc, json, locale, os, resource, signal, sys, threading, time, warnings

print(json.dumps({
    "cwd": os.getcwd(),
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "environment": dict(os.environ),
    "garbage collection": [gc.isenabled(), gc.get_threshold()],
    "group and session": [os.getpgid(0), os.getsid(0)],
    "handlers": {one.name: str(signal.getsignal(one)).partition(" at ")[0] for one in signal.Signals},
    "hooks": [str(one) for one in (sys.excepthook, sys.unraisablehook, sys.displayhook, sys.gettrace())],
    "importers": [str(one).partition(" at ")[0] for one in sys.meta_path],
    "input": sys.stdin.read(),
    "limits": [resource.getrlimit(number) for number in range(16)],
    "locale": locale.setlocale(locale.LC_ALL),
    "main": {key: str(value).partition(" at ")[0] for key, value in globals().items() if key != "__builtins__"},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "path": sys.path,
    "streams": [
        [one.encoding, one.errors, one.line_buffering, one.write_through, one.name, one.isatty(), one.seekable()]
        for one in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "sys": {key: str(value) for key, value in vars(sys).items() if isinstance(value, (str, int, tuple))},
    "threads": threading.active_count(),
    "umask": os.umask(0),
    "warnings": [str(one) for one in warnings.filters],
    "words": [sys.argv, sys.orig_argv],
    "zone": time.tzname,
}))
sys.exit(3)
"""
FORKED = "import os; print(os.getppid())"


def run(folder: Path, *words: str | bytes, timeout: float = 60, **variables: str) -> subprocess.CompletedProcess[bytes]:
    environ = {**ENVIRON, **variables}
    return fork_server.run(words, cwd=folder, environ=environ, timeout=timeout, module="program")


def is_forked(folder: Path, **variables: str) -> bool:
    (folder / "program.py").write_text(FORKED)
    return int(run(folder, **variables).stdout) == fork_server.server().process.pid


def test_a_call_sees_what_a_new_process_sees(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SHOW)
    before = os.umask(0o027)
    try:
        done = run(tmp_path, "a b", b"\xff", "")
        argv = [sys.executable, "-m", "program", "a b", b"\xff", ""]
        expected = subprocess.run(argv, cwd=tmp_path, env=ENVIRON, capture_output=True)
    finally:
        os.umask(before)
    assert (done.returncode, done.stderr) == (3, b"") == (expected.returncode, expected.stderr)
    assert json.loads(done.stdout) == json.loads(expected.stdout)
    assert is_forked(tmp_path)


def test_nothing_of_a_call_is_left_for_the_next(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import hpcenv, os; print(hasattr(hpcenv, 'left')); hpcenv.left = 1; os.umask(0)"
    )
    assert {run(tmp_path).stdout for _ in range(2)} == {b"False\n"}


@pytest.mark.parametrize("variables", [{"PYTHONPATH": "/"}, {"LC_ALL": "C"}, {"LANG": "C"}, {"LD_LIBRARY_PATH": "/"}])
def test_other_imports_need_a_process(tmp_path: Path, variables: dict[str, str]) -> None:
    assert not is_forked(tmp_path, **variables)


@pytest.mark.parametrize("name", ["click.py", "hpcenv/__init__.py", "json.py"])
def test_a_module_of_the_folder_that_hides_another_needs_a_process(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert not is_forked(tmp_path)


def test_a_signal_is_a_negative_status_and_a_traceback_is_shown(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os; os.kill(os.getpid(), 15)")
    assert run(tmp_path).returncode == -signal.SIGTERM
    (tmp_path / "program.py").write_text("import sys; print('so far'); sys.stdout.flush(); 1 / 0")
    done = run(tmp_path)
    assert (done.returncode, done.stdout) == (1, b"so far\n")
    assert done.stderr.endswith(b"ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit()",
        "import sys; print('said'); sys.exit(513)",
        "import sys; print('said'); sys.exit('a reason')",
        "import atexit, sys; atexit.register(print, 'at the end'); sys.exit(3)",
        "import sys, threading; threading.Timer(0.2, print, ['late']).start(); sys.exit(4)",
        "import sys; file = open('left', 'w'); file.write('open'); sys.exit(5)",
        "import os, sys; print('nowhere'); os.close(1); sys.exit(6)",
        "raise KeyboardInterrupt",
    ],
)
def test_it_ends_as_a_new_process_does(tmp_path: Path, program: str) -> None:
    (tmp_path / "program.py").write_text(program)
    left = tmp_path / "left"
    done, text = run(tmp_path), left.read_text() if left.exists() else ""
    left.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "program"]
    expected = subprocess.run(argv, cwd=tmp_path, env=ENVIRON, capture_output=True)
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)
    assert done.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]
    assert text == (left.read_text() if left.exists() else "")


def test_all_output_is_read(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print('a' * 300_000, file=sys.stderr); print('b' * 300_000)")
    done = run(tmp_path)
    assert (len(done.stdout), len(done.stderr)) == (300_001, 300_001)


def test_what_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired) as stopped:
        run(tmp_path, timeout=4)  # the number is printed by then, also on a busy machine
    with pytest.raises(ProcessLookupError):
        while True:  # until its parent has been told
            os.kill(int(stopped.value.output), 0)


def test_calls_beside_each_other(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    (tmp_path / "program.py").write_text("import sys, time; time.sleep(float(sys.argv[1])); print(sys.argv[1])")
    waits = ["0.3", "0", "0.1"]
    with ThreadPoolExecutor() as threads:
        assert [done.stdout.decode().strip() for done in threads.map(lambda wait: run(tmp_path, wait), waits)] == waits
