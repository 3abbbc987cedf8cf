"""`python -m hpcenv` for tests, without a new interpreter for each call.

A server imports the modules of hpcenv once and forks for each call. A call is what
`subprocess.run([sys.executable, "-m", "hpcenv", ...])` is: it gets its words, its folder, the whole environment, the
umask, standard input, two pipes, an exit status and a time limit. The server runs no code of hpcenv apart from its
imports, so a child starts as a new process does after the same imports.

A call is a process of its own where these imports would have another result:
- a variable differs that Python or the dynamic loader reads at its start, or that one of the imports has read;
- the folder contains a module with the name of an imported one: Python would import it instead.

Three things remain different. The parent is the server. All children have the same hash seed: Python chooses it once.
A traceback has lines more. Tests of the start itself (imports, interrupts, streams, locale) start processes.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

# The variables of the server: a call that is forked has the same of these kinds.
VARIABLES = {"LANG": "C.UTF-8"}
AT_THE_START = ("PYTHON", "LANG", "LC_", "LD_", "MALLOC_", "GLIBC_", "OPENSSL_")
# The first two load submitit, the others are programs. A command imports those that it needs.
NOT_IMPORTED = ("hpcenv.api", "hpcenv.submission.submitit_executor", "hpcenv.incontainer", "hpcenv.steps.step")


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[bytes]
    calls: socket.socket
    variables: frozenset[str]  # that its imports have read
    modules: frozenset[str]  # that it has imported; their first names

    def has_the_imports_of(self, cwd: Path, environ: Mapping[str, str]) -> bool:
        read = {key: value for key, value in environ.items() if key in self.variables or key.startswith(AT_THE_START)}
        here = {path.stem for path in cwd.iterdir() if path.suffix in (".py", ".so") or (path / "__init__.py").exists()}
        return read == VARIABLES and not here & self.modules

    def end(self) -> None:
        self.calls.close()
        self.process.communicate()


@functools.cache
def server() -> Server:
    calls, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its_end:
        words = [sys.executable, __file__, str(its_end.fileno())]
        # Its streams are pipes as those of each call: Python decides by the kind how it buffers.
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(words, cwd="/", env=VARIABLES, pass_fds=[its_end.fileno()], **pipes)
    said = calls.recv(1 << 20)
    if not said:
        raise RuntimeError(f"the fork server did not start: {process.communicate()[1].decode()}")
    started = Server(process, calls, *map(frozenset, json.loads(said)))
    atexit.register(started.end)
    return started


def run(
    words: Sequence[str | bytes], *, cwd: Path, environ: Mapping[str, str], timeout: float, module: str = "hpcenv"
) -> subprocess.CompletedProcess[bytes]:
    """Run `python -m MODULE WORDS`; the result is that of `subprocess.run`."""
    argv = [sys.executable, "-m", module, *words]
    forks = server()
    if not forks.has_the_imports_of(cwd, environ):
        return subprocess.run(argv, cwd=cwd, env=environ, capture_output=True, timeout=timeout)
    os.umask(umask := os.umask(0o077))
    call = {"argv": list(map(os.fsdecode, argv)), "cwd": str(cwd), "umask": umask, "environ": dict(environ)}
    (stdout, stdout_end), (stderr, stderr_end) = _pipe(), _pipe()
    reply, reply_end = socket.socketpair()
    with stdout, stderr, reply:
        with stdout_end, stderr_end, reply_end:
            passed = [0, stdout_end.fileno(), stderr_end.fileno(), reply_end.fileno()]
            socket.send_fds(forks.calls, [b"call"], passed)
        reply.sendall(json.dumps(call).encode())
        reply.shutdown(socket.SHUT_WR)
        out, err, said = _read_all(stdout.fileno(), stderr.fileno(), reply.fileno(), timeout, argv)
    if len(said.split()) != 2:
        raise RuntimeError("the fork server has ended before its child")
    _, status = said.split()
    return subprocess.CompletedProcess(argv, int(status), out, err)


def _pipe() -> tuple[BinaryIO, BinaryIO]:
    read, write = os.pipe()
    return open(read, "rb", buffering=0), open(write, "wb", buffering=0)


def _read_all(out: int, err: int, reply: int, timeout: float, argv: list[str | bytes]) -> tuple[bytes, bytes, bytes]:
    """Read all three to their ends. The reply is the number of the process, and its status when it has ended."""
    ends = time.monotonic() + timeout
    got = {out: b"", err: b"", reply: b""}
    try:
        with selectors.DefaultSelector() as selector:
            for descriptor in got:
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(0, ends - time.monotonic()))
                if not ready:
                    raise subprocess.TimeoutExpired(argv, timeout, got[out], got[err])
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    got[key.fd] += data
                    if not data:
                        selector.unregister(key.fd)
    except BaseException:
        # As subprocess.run: what does not end in time, or is no longer waited for, is killed.
        if got[reply].count(b"\n") == 1:
            with suppress(ProcessLookupError):
                os.kill(int(got[reply]), signal.SIGKILL)
        raise
    return got[out], got[err], got[reply]


def _import_hpcenv() -> set[str]:
    """Import the modules; return the variables that they read."""
    read = set()

    class Recording(type(os.environ)):
        def __getitem__(self, name: str) -> str:
            read.add(name)
            return super().__getitem__(name)

    os.environ.__class__ = Recording
    import hpcenv

    for module in pkgutil.walk_packages(hpcenv.__path__, "hpcenv."):
        if module.name.startswith(NOT_IMPORTED) or module.name.endswith("__main__"):
            continue
        # What fails or warns here does so in each call that imports it.
        with suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("error")
            importlib.import_module(module.name)
    os.environ.__class__ = Recording.__base__
    # `sysconfig` asks at its import whether there is a home, which is always true, and not where.
    return read - {"HOME"}


def _serve(calls: socket.socket) -> list[int]:
    """Fork for each call, and tell how it ended. Return in the children only, with the descriptors of the call."""
    poll = select.poll()
    poll.register(calls, select.POLLIN)
    running = {}
    while True:
        for ready, _ in poll.poll():
            if ready == calls.fileno():
                _, passed, _, _ = socket.recv_fds(calls, 16, 4)
                if not passed:
                    os._exit(0)
                number = os.fork()
                if number == 0:
                    calls.detach()
                    return passed
                for descriptor in passed[:3]:
                    os.close(descriptor)
                running[ended := os.pidfd_open(number)] = number, passed[3]
                poll.register(ended, select.POLLIN)
                said = b"%d\n" % number
                reply = passed[3]
            else:
                poll.unregister(ready)
                os.close(ready)
                number, reply = running.pop(ready)
                said = b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
            with suppress(BrokenPipeError):  # the time limit was over
                os.write(reply, said)
            if ready != calls.fileno():
                os.close(reply)


def _become(call: list[int]) -> str:
    """Make this child what a new process is; return the name of the module to run."""
    with open(call[3], "rb", closefd=False) as file:
        asked = json.load(file)
    for number, descriptor in enumerate(call[:3]):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(asked["cwd"])
    os.umask(asked["umask"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    time.tzset()
    sys.orig_argv = asked["argv"]
    sys.argv = ["-m", *asked["argv"][3:]]
    sys.path[0] = os.getcwd()
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__annotations__ = {}
    return asked["argv"][2]


def _end(status: object) -> None:
    """End this child without freeing the objects of all modules, which takes ten times as long as a short command.

    Threads are waited for, exit functions are called and streams are written, in Python's order (Py_FinalizeEx in
    Python 3.11). It returns where Python's own end does more: a status that is a text, a file that was not closed,
    output that cannot be written.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    if not isinstance(status, int) or any(type(one) is io.FileIO and not one.closed for one in gc.get_objects()):
        return
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status & 0xFF)


if __name__ == "__main__":
    sys.path[0] = "/"  # nothing is imported from tests/
    _calls = socket.socket(fileno=int(sys.argv[1]))
    _read = _import_hpcenv()
    gc.collect()
    gc.freeze()
    _calls.send(json.dumps([sorted(_read), sorted({name.partition(".")[0] for name in sys.modules})]).encode())
    _module = _become(_serve(_calls))
    try:
        runpy._run_module_as_main(_module)
    except SystemExit as _exit:
        _end(0 if _exit.code is None else _exit.code)
        raise
