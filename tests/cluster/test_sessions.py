"""Sessions from a laptop: what ssh gives, what it refuses, what reaches the session, and what is left on the node."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import TESTBED, Cluster, Project
from .laptop import Laptop, plugged_in
from .test_run import PATCH, VICTIM

pytestmark = pytest.mark.cluster

# It prints text, and sets what must not reach a session.
BASHRC = "echo NOISE; export PYTHONPATH=/evil LD_PRELOAD=libm.so.6 PATH=/evil:$PATH\n"
# How long one connection is held by a long test.
MINUTES = int(os.environ.get("HPCENV_TEST_SESSION_MINUTES", "60"))
ON_NODE = "ls -d /tmp/hpcenv-[!0-9]* 2>/dev/null; ps -u alice -o args= | grep -v -e '^ps' -e grep -e 'sh -c'; true"


@pytest.fixture(scope="module")
def laptop(cluster: Cluster) -> Iterator[Laptop]:
    instance = re.search('"instance": "(.*?)"', cluster.testbed("status", "--json").stdout)
    assert instance is not None
    # Paths of control sockets are short.
    with plugged_in(cluster, instance[1], Path(tempfile.mkdtemp(prefix="laptop-"))) as found:
        yield found


@dataclass(frozen=True)
class Session:
    project: Project
    laptop: Laptop
    seconds: float
    """From the open session to the answer of `ssh lab true`."""

    @property
    def run(self) -> str:
        return self.project.json("status", "lab")["data"]["run"]


@pytest.fixture(scope="module")
def bashrc(cluster: Cluster) -> Iterator[None]:
    cluster.write("/home/alice/.bashrc", BASHRC)
    yield
    cluster.run("rm", "-f", "/home/alice/.bashrc")


@pytest.fixture(scope="module")
def session(cluster: Cluster, laptop: Laptop, sif_project: Project, bashrc: None) -> Iterator[Session]:
    """The session `lab` in an image, open, and known to the laptop."""
    try:
        said = sif_project.must("session", "start", "lab", "--time", str(40 + MINUTES), timeout=400)
        assert "session lab is open on n1" in said
        ask = f"cd {sif_project.folder} && /shared/hpcenv/venv/bin/hpcenv session ssh-config lab --login login"
        block = laptop.ssh("login", ask)
        assert block.status == 0, block.text
        known = (laptop.home / ".ssh" / "config").read_text()
        laptop.write(".ssh/config", f"{known}{block.stdout.replace('NOISE', '#')}")
        laptop.ssh("login", "-o", "ControlPersist=10m", "true")
        before = time.monotonic()
        done = laptop.ssh("lab", "true")
        seconds = time.monotonic() - before
        assert (done.status, done.text) == (0, ""), done.text
        yield Session(sif_project, laptop, seconds)
    finally:
        sif_project.hpcenv("cancel", "lab")


def test_a_command_in_the_locked_image_with_the_variables_of_the_ranks(session: Session) -> None:
    done = session.laptop.ssh("lab", 'echo "$SLURMD_NODENAME|$HPCENV_RUN|$PWD|$PYTHONPATH|$LD_PRELOAD|$PATH"; exit 7')
    assert done.status == 7
    assert done.stderr == ""
    node, run, folder, *python, path = done.stdout.strip().split("|")
    assert (node, run, folder, python) == ("n1", session.run, session.project.folder, ["", ""])
    assert "/evil" not in path
    shell = session.laptop.ssh("lab", stdin="env; exit 3\n")
    assert shell.status == 3
    assert "NOISE" not in shell.text
    assert "evil" not in shell.text
    assert "LD_PRELOAD" not in shell.text


def test_a_terminal_and_the_home_of_the_session(session: Session) -> None:
    done = session.laptop.ssh("-tt", "lab", "test -t 0 && echo $TERM && cd && pwd && touch kept", stdin="")
    assert "xterm" in done.stdout
    assert "/hpcenv/home" in done.stdout
    home = f"{session.project.folder}/runs/.sessions-2001/lab/home"
    listed = session.project.cluster.must("stat", "-c", "%a %n", home, f"{home}/kept")
    assert listed.startswith("700 ")


def _up_and_down(session: Session, size: int) -> None:
    content = os.urandom(1 << 20) * (size >> 20)
    (session.laptop.home / "up").write_bytes(content)
    os.chmod(session.laptop.home / "up", 0o644)
    batch = session.laptop.write("batch", "put up up.bin\nget up.bin down\n")
    done = session.laptop.run("sftp", "-q", "-b", str(batch), "lab", timeout=900)
    assert done.status == 0, done.text
    wanted = hashlib.sha256(content).hexdigest()
    assert hashlib.sha256((session.laptop.home / "down").read_bytes()).hexdigest() == wanted
    # A command sees the same file under the same name.
    assert session.laptop.ssh("lab", "sha256sum up.bin; rm up.bin").stdout.split()[0] == wanted


def test_a_file_up_and_down_is_the_same(session: Session) -> None:
    _up_and_down(session, 5 << 20)


@pytest.mark.long
def test_ssh_answers_within_three_seconds(session: Session) -> None:
    """On a machine that has time for it: the first connection, and the fastest of three more."""
    times = [session.seconds]
    for _ in range(3):
        before = time.monotonic()
        assert session.laptop.ssh("lab", "true").status == 0
        times.append(time.monotonic() - before)
    print(f"ssh lab true: {', '.join(f'{one:.2f}' for one in times)} s")
    assert min(times) < 3, times


@pytest.mark.long
def test_half_a_gigabyte_up_and_down(session: Session) -> None:
    _up_and_down(session, 500 << 20)


def test_a_port_inside_is_forwarded_and_named(session: Session) -> None:
    laptop = session.laptop
    serve = "echo page > served.txt; exec python3 -m http.server --bind 127.0.0.1 8765"
    forward = ["ssh", "-o", "BatchMode=yes", "-L", "127.0.0.1:9000:127.0.0.1:8765", "lab", serve]
    server = subprocess.Popen(laptop.command(*forward), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    get = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9000/served.txt').read().decode())"
    try:
        until = time.monotonic() + 60
        while "page" not in (said := laptop.run("python3", "-c", get)).stdout:
            assert time.monotonic() < until, said.text
            time.sleep(1)
        while "127.0.0.1:8765" not in (said := session.project.hpcenv("status", "lab")).stdout:
            assert time.monotonic() < until, said.text
            time.sleep(1)
    finally:
        server.terminate()
        server.wait()


SOCKET = "import os, socket; s = socket.socket(socket.AF_UNIX); s.bind(os.environ['TMPDIR'] + '/x.sock'); s.listen(); \
print(os.environ['TMPDIR'], flush=True); c, _ = s.accept(); c.sendall(b'from the socket')"


def test_a_socket_inside_the_image_is_forwarded(session: Session) -> None:
    """As an editor's server does it: it listens in TMPDIR, and sshd, outside of the image, opens the socket."""
    laptop = session.laptop
    words = laptop.command("ssh", "-o", "BatchMode=yes", "lab", f'python3 -c "{SOCKET}"')
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as server:
        folder = server.stdout.readline().strip()  # type: ignore[union-attr]
        assert folder.startswith("/tmp/hpcenv-session-"), folder
        forward = laptop.command("ssh", "-o", "BatchMode=yes", "-N", "-L", f"127.0.0.1:9001:{folder}/x.sock", "lab")
        with subprocess.Popen(forward, stdin=subprocess.DEVNULL) as through:
            read = "import socket; print(socket.create_connection(('127.0.0.1', 9001)).recv(99).decode())"
            until = time.monotonic() + 60
            while "from the socket" not in (said := laptop.run("python3", "-c", read)).stdout:
                assert time.monotonic() < until, said.text
                time.sleep(0.5)
            through.terminate()
        assert server.wait(60) == 0
    session.laptop.ssh("lab", f"rm {folder}/x.sock")


def test_a_cut_connection_ends_what_it_started_and_is_opened_again(session: Session, cluster: Cluster) -> None:
    laptop = session.laptop
    words = laptop.command("ssh", "-o", "BatchMode=yes", "lab", "echo up; exec sleep 4321")
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout.readline() == "up\n"  # type: ignore[union-attr]
        # The connection to the login node, which all others share.
        cut = laptop.run("ssh", "-o", "ControlPath=~/.ssh/hpcenv-%C", "-O", "exit", "login")
        assert cut.status == 0, cut.text
        assert client.wait(60) == 255
    again = laptop.ssh("lab", "echo again")
    assert (again.status, again.stdout) == (0, "again\n"), again.text
    until = time.monotonic() + 60
    while "sleep 4321" in (left := cluster.run("ps", "-u", "alice", "-o", "args=", node="n1")).stdout:
        assert time.monotonic() < until, left.text
        time.sleep(1)


@pytest.mark.long
@pytest.mark.timeout(60 * MINUTES + 600)
def test_a_connection_of_an_hour(session: Session) -> None:
    words = session.laptop.command("ssh", "-o", "BatchMode=yes", "lab", "cat")
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as client:
        for minute in range(MINUTES + 1):
            client.stdin.write(f"{minute}\n")  # type: ignore[union-attr]
            assert client.stdout.readline() == f"{minute}\n"  # type: ignore[union-attr]
            time.sleep(60 if minute < MINUTES else 0)
        client.stdin.close()  # type: ignore[union-attr]
        assert client.wait(60) == 0


def test_what_is_refused(session: Session, cluster: Cluster) -> None:
    laptop = session.laptop
    remote = laptop.ssh("-o", "ExitOnForwardFailure=yes", "-R", "12345:localhost:22", "lab", "true")
    assert (remote.status, "forwarding failed" in remote.stderr) == (255, True), remote.text
    laptop.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ".ssh/other")
    config = (laptop.home / ".ssh" / "config").read_text()
    laptop.write(
        "other-key", config.replace("Host lab\n", "Host lab\n    IdentityFile ~/.ssh/other\n    IdentitiesOnly yes\n")
    )
    wrong = laptop.ssh("-F", "other-key", "lab", "true")
    assert (wrong.status, "Permission denied (publickey)" in wrong.stderr) == (255, True), wrong.text
    other = (laptop.home / ".ssh" / "other.pub").read_text().split()[1]
    laptop.write("other-host", re.sub(r"(KnownHostsCommand .* )\S+", rf"\g<1>{other}", config))
    host = laptop.ssh("-F", "other-host", "lab", "true")
    assert (host.status, "HOST IDENTIFICATION HAS CHANGED" in host.stderr) == (255, True), host.text
    run = f"{session.project.folder}/runs/{session.run}"
    bob = cluster.run("hpcenv", "session", "connect", run, user="bob")
    assert bob.status != 0
    assert bob.stdout == ""
    for path in (
        f"{session.project.folder}/runs/.sessions-2001/lab/host_key",
        "/tmp/hpcenv-session-*/environment.json",
    ):
        assert cluster.run("sh", "-c", f"cat {path}", user="bob", node="n1").status != 0
    twice = session.project.hpcenv("session", "start", "lab")
    assert "the session `lab` has not ended" in twice.stderr


def test_nothing_listens(session: Session, cluster: Cluster) -> None:
    listening = cluster.must("ss", "-ltnH", node="n1")
    assert not {line.split()[3].rpartition(":")[2] for line in listening.splitlines()} & {"22", "2222"}
    assert "sshd" not in cluster.run("ss", "-ltnpH", node="n1", user="root").stdout


def test_other_commands_know_it(session: Session) -> None:
    listed = {line["run"]: line["kind"] for line in session.project.json("list")["data"]["runs"]}
    assert listed[session.run] == "session"
    done = session.project.hpcenv("attach", "lab", "--", "sh", "-c", 'echo "$SLURMD_NODENAME|$HOME"')
    assert done.stdout == "n1|/hpcenv/home\n", done.text


def test_a_changed_byte_of_the_sif_refuses_the_next_shell_and_after_cancel_nothing_is_left(
    session: Session, cluster: Cluster
) -> None:
    sif = session.project.sif()
    swap = 'chmod u+w "$1" && cp -p "$1" "$1.kept" && printf X | dd of="$1" bs=1 seek=200000 conv=notrunc 2>/dev/null'
    cluster.must("sh", "-c", swap, "sh", sif)
    try:
        done = session.laptop.ssh("lab", "true")
    finally:
        cluster.must("mv", f"{sif}.kept", sif)
    assert done.status == 91, done.text
    assert "the SIF is not the one that runs on node n1" in done.stderr
    assert session.project.json("cancel", "lab")["data"]["state"] == "cancelled"
    assert cluster.run("sh", "-c", ON_NODE, node="n1", user="root").stdout == ""
    closed = session.laptop.ssh("lab", "true")
    assert (closed.status, "is not running" in closed.stderr) == (255, True), closed.text


def test_a_shell_is_left_and_its_job_ends(host_project: Project, cluster: Cluster) -> None:
    words = "hpcenv shell --time 10"
    typed = "echo on $((40 + 2)) $SLURMD_NODENAME $HOME\nexit 3\n"
    done = cluster.run("script", "-qec", words, "/dev/null", cwd=host_project.folder, stdin=typed)
    assert done.status == 3, done.text
    assert re.search(r"on 42 n[12] \S+/runs/.sessions-2001/shell-[0-9a-f]{8}/home", done.stdout), done.text
    (line,) = [one for one in host_project.json("list")["data"]["runs"] if one["run"].startswith("shell-")]
    assert (line["state"], line["kind"]) == ("cancelled", "session")
    assert "shell-" not in cluster.must("ls", "runs/.sessions-2001", cwd=host_project.folder)


# `hpcenv shell` that ends its job after 15 s without a shell, in place of ten minutes. A terminal that is lost sends
# SIGHUP. The signal has its default here, also if the tests were started by nohup, as sshd sets it.
SHELL = """\
import signal, sys
from hpcenv.cli import shell, main
signal.signal(signal.SIGHUP, signal.SIG_DFL)
shell._SECONDS_UNUSED = 15
sys.exit(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("keeps", [False, True], ids=["lost", "kept"])
def test_a_shell_that_is_lost_ends_its_job_after_a_while_and_a_kept_job_goes_on(
    host_project: Project, cluster: Cluster, keeps: bool
) -> None:
    """The terminal goes away, as sshd takes it away when the connection of a laptop is cut."""
    words = ("shell", "--nodelist", "n1", "--time", "10", *(["--keep"] if keeps else []))
    inside = shlex.join(("/shared/hpcenv/venv/bin/python", "-c", SHELL, *words))
    where = ("--node", "login", "--user", "alice", "--cwd", host_project.folder)
    argv = [str(TESTBED), "exec", *where, "--", "script", "-qec", inside, "/dev/null"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        client.stdin.write("echo on $SLURMD_NODENAME\n")  # type: ignore[union-attr]
        client.stdin.flush()  # type: ignore[union-attr]
        seen = ""
        while not re.search(r"^on n1", seen, re.M):
            assert (line := client.stdout.readline()), seen  # type: ignore[union-attr]
            seen += line
        cluster.must("pkill", "-KILL", "-u", "alice", "-x", "script", node="login", user="root")
    run = re.search(r"(shell-\S+), node n1", seen)[1]  # type: ignore[index]
    until = time.monotonic() + 90
    while (state := host_project.json("status", run)["data"]["state"]) == "running" and time.monotonic() < until:
        time.sleep(2)
    if keeps:
        assert state == "running"
        assert host_project.hpcenv("attach", run, "--", "true").status == 0
        host_project.must("cancel", run)
    assert state == ("running" if keeps else "completed")
    assert cluster.run("sh", "-c", ON_NODE, node="n1", user="root").stdout == ""


WEB = ("--serve", "8501", "--", "python3", "-m", "http.server", "--bind", "127.0.0.1", "8501")


@pytest.mark.usefixtures("bashrc")
def test_a_page_of_a_node_without_sshd_opens_through_srun(
    host_project: Project, laptop: Laptop, cluster: Cluster
) -> None:
    cluster.must("mount", "--bind", "/dev/null", "/usr/sbin/sshd", node="n1", user="root")
    try:
        started = host_project.hpcenv("session", "start", "bare", "--nodelist", "n1", *WEB, timeout=400)
    finally:
        cluster.must("umount", "/usr/sbin/sshd", node="n1", user="root")
    assert "note: node n1 has no sshd: hpcenv attach and web pages work;" in started.stderr, started.text
    try:
        line, address = host_project.must("session", "open", "bare", "--login", "login").splitlines()[:2]
        page = subprocess.Popen(laptop.command("sh", "-c", f"exec {line}"), stdin=subprocess.DEVNULL)
        get = f"import urllib.request as u; print(u.urlopen('{address}').read().decode())"
        try:
            until = time.monotonic() + 60
            while "Directory listing" not in (said := laptop.run("python3", "-c", get)).stdout:
                assert time.monotonic() < until, said.text
                time.sleep(1)
        finally:
            page.terminate()
            page.wait()
        other = host_project.hpcenv("session", "connect", "bare", "--page", "other")
        assert "the service 'other' does not answer on node n1\nwhy: the services: port-8501" in other.stderr, (
            other.text
        )
    finally:
        host_project.must("cancel", "bare")
    assert "sshd" not in cluster.run("sh", "-c", ON_NODE, node="n1", user="root").stdout


@pytest.mark.long
def test_after_the_time_limit_nothing_is_left(host_project: Project, cluster: Cluster) -> None:
    host_project.must("session", "start", "limit", "--nodelist", "n1", "--time", "2", *WEB, timeout=400)
    assert "hpcenv-session-" in cluster.run("sh", "-c", ON_NODE, node="n1", user="root").stdout
    until = time.monotonic() + 300
    while (status := host_project.json("status", "limit")["data"])["state"] == "running":
        assert time.monotonic() < until
        time.sleep(2)
    print(status["state"], status.get("detail"))
    while left := cluster.run("sh", "-c", ON_NODE, node="n1", user="root").stdout:
        assert time.monotonic() < until, left
        time.sleep(2)


@pytest.mark.long
def test_a_killed_node_leaves_nothing_that_others_can_read_and_the_next_job_removes_it(
    host_project: Project, cluster: Cluster
) -> None:
    """First everything of the user is killed, so that nothing can clean up; then the machine loses its power."""
    start = ("session", "start", "power", "--nodelist", "n2", "--time", "20")
    folders = ("sh", "-c", "ls -d /tmp/hpcenv-session-* 2>/dev/null")
    host_project.must(*start, *WEB, timeout=400)
    (old,) = cluster.run(*folders, node="n2", user="root").stdout.split()
    cluster.must("pkill", "-KILL", "-u", "alice", node="n2", user="root")
    host_project.hpcenv("cancel", "power")
    assert cluster.must(*folders, node="n2", user="root").split() == [old]
    assert cluster.must("stat", "-c", "%a %U", old, node="n2", user="root") == "700 alice\n"
    assert "Permission denied" in cluster.run("ls", old, node="n2", user="bob").text
    host_project.must("submit", "examples/train.py", "--wait", "--nodelist", "n2", "--nproc", "1", timeout=400)
    assert cluster.run(*folders, node="n2", user="root").stdout == ""
    host_project.must(*start, *WEB, timeout=400)
    cluster.testbed("fault", "kill", "n2")
    try:
        host_project.hpcenv("cancel", "power", timeout=400)
    finally:
        assert cluster.testbed("fault", "heal", "n2").status == 0
    until = time.monotonic() + 300
    while "idle" not in cluster.run("sinfo", "-h", "-n", "n2", "-o", "%T").stdout.replace("idle*", ""):
        assert time.monotonic() < until
        time.sleep(2)
    for path in cluster.run(*folders, node="n2", user="root").stdout.split():
        assert "Permission denied" in cluster.run("ls", path, node="n2", user="bob").text
    print("left after the power was lost:", cluster.run("sh", "-c", ON_NODE, node="n2", user="root").stdout)


def test_a_node_that_differs_opens_no_session(host_project: Project, cluster: Cluster) -> None:
    for node in ("n1", "n2"):
        cluster.must("sh", "-c", PATCH, "sh", VICTIM, node=node, user="root")
    try:
        done = host_project.hpcenv("session", "start", "other")
    finally:
        for node in ("n1", "n2"):
            cluster.must("umount", VICTIM, node=node, user="root")
    assert done.status == 90, done.text
    assert re.search(r"n[12] +packages\.numpy", done.text), done.text
    assert host_project.hpcenv("attach", "other", "--", "true").status == 23
