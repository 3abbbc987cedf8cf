"""`exec`: become a command inside a machine, as a user who has just logged in."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from . import flaky, machine
from .errors import Status, TestbedError
from .instance import VENV, Instance

_LOGIN_PATH = f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin"
_ROOT_PATH = f"{VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# A shell to type in. The first one is a login shell, for what /etc/profile.d sets (`module`). Debian's /etc/profile
# gives it a PATH without hpcenv; the second shell has the PATH that a command of `exec` has.
_INTERACTIVE = ("bash", "--login", "-c", "PATH=$1 exec bash", "bash")


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Who runs what, where; without a command it is a shell."""

    node: str
    user: str
    cwd: str | None
    command: tuple[str, ...] = ()


def become(instance: Instance, session: Session, caller: Mapping[str, str]) -> NoReturn:
    """Replace this process: input, output, signals and the exit status are the command's own."""
    init = machine.init_of(instance, session.node)
    if init is None:
        raise TestbedError(
            f"testbed {instance.name} has no running machine {session.node!r}",
            hint="scripts/testbed status",
            status=Status.EXEC_FAILED,
        )
    if init.state == "T":
        raise TestbedError(
            f"{session.node} is stopped",
            hint=f"scripts/testbed fault heal {session.node}",
            status=Status.EXEC_FAILED,
        )
    home = _home_of(init.pid, session.user)
    environment = login_environment(session.user, home, caller)
    wrappers = flaky.path_of(instance, session.user, home)
    if wrappers is not None:
        environment["PATH"] = f"{wrappers}:{environment['PATH']}"
    # The shell only changes the directory: the words reach the command as they are.
    enter = ["sh", "-c", 'cd -- "$1" || exit 125; shift; exec "$@"', "testbed-exec"]
    command = session.command or (*_INTERACTIVE, environment["PATH"])
    words = [*enter, session.cwd if session.cwd is not None else home, *command]
    os.execve("/usr/bin/nsenter", machine.enter_argv(init.pid, machine.as_user(session.user, words)), environment)


def login_environment(user: str, home: str, caller: Mapping[str, str]) -> dict[str, str]:
    """What a login gives, and of the caller's only the terminal's type."""
    environment = {
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/bash",
        "PATH": _ROOT_PATH if user == "root" else _LOGIN_PATH,
        "LANG": "C.UTF-8",
    }
    return environment | ({"TERM": caller["TERM"]} if "TERM" in caller else {})


def _home_of(init_pid: int, user: str) -> str:
    for line in Path(f"/proc/{init_pid}/root/etc/passwd").read_text().splitlines():
        fields: Sequence[str] = line.split(":")
        if fields[0] == user:
            return fields[5]
    raise TestbedError(
        f"no user {user!r} in the testbed", why="there are alice, bob and root", status=Status.EXEC_FAILED
    )
