"""A laptop for the tests: its own network namespace and user. It reaches the login node only, and there only ssh listens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .conftest import Cluster, Done

_USER = 4242
_SSHD = """\
mkdir -p /run/sshd && ssh-keygen -A >/dev/null && exec /usr/sbin/sshd -D -e -o PasswordAuthentication=no
"""


def _run(*argv: str, check: bool = True) -> str:
    return subprocess.run(argv, check=check, capture_output=True, text=True, timeout=30).stdout


@dataclass(frozen=True)
class Laptop:
    """The user's machine.

    Attributes:
        home: of its user.
        login: address of the login node, which its ssh configuration calls `login`.
    """

    home: Path
    netns: str
    login: str

    def command(self, *argv: str) -> list[str]:
        """Return how a program is started on it."""
        enter = 'mount --bind "$1" /etc/passwd && cd "$2" && shift 2 && exec setpriv --reuid=4242 --regid=4242 --clear-groups env -i "$@"'
        words = ["ip", "netns", "exec", self.netns, "sh", "-c", enter, "sh", f"{self.home}/passwd", str(self.home)]
        return [*words, f"HOME={self.home}", "PATH=/usr/bin:/bin", "TERM=xterm", *argv]

    def run(self, *argv: str, stdin: str = "", timeout: float = 120) -> Done:
        done = subprocess.run(self.command(*argv), input=stdin.encode(), capture_output=True, timeout=timeout)
        return Done(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    def ssh(self, *words: str, stdin: str = "", timeout: float = 120) -> Done:
        return self.run("ssh", "-o", "BatchMode=yes", *words, stdin=stdin, timeout=timeout)

    def write(self, name: str, text: str, mode: int = 0o600) -> Path:
        path = self.home / name
        path.write_text(text)
        path.chmod(mode)
        os.chown(path, _USER, _USER)
        return path


@contextmanager
def plugged_in(cluster: Cluster, instance: str, home: Path) -> Iterator[Laptop]:
    """Give a laptop a cable to the cluster's switch, its user a key for alice, and the login node an sshd."""
    switch, netns = f"hpcenv-{instance}-switch", f"hpcenv-{instance}-laptop"
    bridge = json.loads(_run("ip", "-n", switch, "-j", "link", "show", "type", "bridge"))[0]["ifname"]
    found = json.loads(_run("ip", "-n", f"hpcenv-{instance}-login", "-j", "-4", "address", "show", "eth0"))
    login = found[0]["addr_info"][0]["local"]
    _run("ip", "netns", "add", netns)
    server = None
    try:
        _run("ip", "-n", switch, "link", "add", "laptop", "type", "veth", "peer", "name", "eth0", "netns", netns)
        _run("ip", "-n", switch, "link", "set", "laptop", "master", bridge, "up")
        _run("ip", "-n", netns, "link", "set", "lo", "up")
        _run("ip", "-n", netns, "address", "add", f"{login.rpartition('.')[0]}.250/32", "dev", "eth0")
        _run("ip", "-n", netns, "link", "set", "eth0", "up")
        _run("ip", "-n", netns, "route", "add", f"{login}/32", "dev", "eth0")
        laptop = Laptop(home=home, netns=netns, login=login)
        _make_home(laptop)
        key = (home / ".ssh" / "id_ed25519.pub").read_text()
        cluster.write("/home/alice/.ssh/authorized_keys", key)
        argv = ["exec", "--node", "login", "--user", "root", "--", "sh", "-c", _SSHD]
        testbed = Path(__file__).resolve().parents[2] / "scripts" / "testbed"
        server = subprocess.Popen([str(testbed), *argv], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while (said := laptop.ssh("login", "true")).status != 0:
            assert time.monotonic() < until, said.text
            time.sleep(0.5)
        yield laptop
    finally:
        if server is not None:
            cluster.run("pkill", "-x", "sshd", user="root")
            server.kill()
            server.wait()
        _run("ip", "netns", "del", netns, check=False)
        _run("ip", "-n", switch, "link", "del", "laptop", check=False)
        shutil.rmtree(home, ignore_errors=True)


def _make_home(laptop: Laptop) -> None:
    (laptop.home / ".ssh").mkdir(mode=0o700)
    laptop.home.chmod(0o700)
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(laptop.home / ".ssh" / "id_ed25519"))
    passwd = Path("/etc/passwd").read_text() + f"laptop:x:{_USER}:{_USER}::{laptop.home}:/bin/sh\n"
    (laptop.home / "passwd").write_text(passwd)
    block = f"Host login\n    HostName {laptop.login}\n    User alice\n    StrictHostKeyChecking accept-new\n"
    (laptop.home / ".ssh" / "config").write_text(block)
    for path in (laptop.home, *laptop.home.rglob("*")):
        os.chown(path, _USER, _USER)
