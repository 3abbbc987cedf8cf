"""Child processes of the probe.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import sys

from hpcenv.incontainer.probe.values import Unknown
from hpcenv.incontainer.probe.text import describe_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

    from hpcenv.incontainer.probe.environment import ProbedEnvironment

SECONDS_AFTER_KILL = 5.0


def start_child(env: ProbedEnvironment, name: str, arguments: list[str], *, own_path: bool = True) -> None:
    import subprocess

    if not sys.executable:
        env.children[name] = Unknown("sys.executable is empty: cannot start a child")
        return
    variables = dict(os.environ)
    if own_path:
        variables.pop("PYTHONPATH", None)  # it could shadow ctypes
    try:
        env.children[name] = subprocess.Popen(
            [sys.executable, "-B", *(["--check-hash-based-pycs", "always"] if own_path else []), *arguments],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        env.children[name] = Unknown(describe_error(error))


def wait_for_child(child: subprocess.Popen[bytes], seconds: float, stdin: bytes | None = None) -> tuple[bytes, bytes]:
    """Return the output of a child that has its own session, after this child and its children have ended.

    Raises:
        subprocess.TimeoutExpired: the child did not end in time, or one of its children kept its output open.
    """
    try:
        return child.communicate(stdin, timeout=seconds)
    finally:
        end_child(child)


def end_child(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and its descendants. Waits only a short time for a process that hangs in the kernel."""
    import signal
    import subprocess

    if child.returncode is None:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except OSError:
            child.kill()
        try:
            child.wait(timeout=SECONDS_AFTER_KILL)
        except subprocess.TimeoutExpired:
            pass
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                pass


def run_child(
    argv: list[str], variables: dict[str, str], seconds: float, *, cwd: str = "/", stdin: bytes = b""
) -> tuple[int, bytes, bytes]:
    """Run a program to its end; return its status and its output.

    Raises:
        OSError: the program cannot be started.
        subprocess.TimeoutExpired: as for `wait_for_child`.
    """
    import subprocess

    pipe = subprocess.PIPE
    child = subprocess.Popen(argv, env=variables, cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    out, err = wait_for_child(child, seconds, stdin)
    return child.returncode, out, err


def end_children(env: ProbedEnvironment) -> None:
    """Kill the children that still run, so that no child is left after an interrupt of the probe."""
    for child in env.children.values():
        if not isinstance(child, Unknown):
            end_child(child)
