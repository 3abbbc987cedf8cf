"""What ssh reads of a session: nothing but the keys that were named opens it, and nothing but it is opened."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hpcenv.errors import UsageError
from hpcenv.records.session import NodeFolder, SessionFolder
from hpcenv.sessions.ssh import SshHost, page_command, parse_keys, ssh_config, sshd_config

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl me@laptop"
HOST = SshHost(
    name="lab", login="login.example.org", user="alice",
    connect=("/opt/a b/hpcenv", "session", "connect", "lab", "--runs-dir", "/p/runs"), host_key=KEY,
)  # fmt: skip


def rendered(session: str = "/p/runs/.sessions-7/lab") -> str:
    return sshd_config(
        SessionFolder(Path(session)),
        NodeFolder(Path("/tmp/hpcenv-session-x")),
        user="alice",
        command=["/usr/bin/python3", "-I", "/p/a b/step.py", "ssh-command"],
        temporary="/local/tmp",
    )


@pytest.mark.parametrize(
    "line",
    [
        "AuthenticationMethods publickey", "PasswordAuthentication no", "UsePAM no", "AllowAgentForwarding no",
        "X11Forwarding no", "AllowTcpForwarding local", "AllowStreamLocalForwarding local", "PermitUserRC no",
        "PermitUserEnvironment no", "GatewayPorts no", "PermitTunnel no", "AllowUsers alice",
        'AuthorizedKeysFile "/p/runs/.sessions-7/lab/authorized_keys"',
        "ForceCommand exec /usr/bin/python3 -I '/p/a b/step.py' ssh-command",
    ],
)  # fmt: skip
def test_the_server_lets_in_and_passes_on_no_more_than_it_must(line: str) -> None:
    assert line in rendered().splitlines()


def test_no_variable_of_the_client_is_accepted() -> None:
    assert "AcceptEnv" not in rendered()


@pytest.mark.parametrize("name", ['a"b', "a%h", "a\\b", "a\nb"])
def test_a_path_that_sshd_would_misread_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be a path of a session"):
        rendered(f"/p/{name}/lab")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh here")
def test_ssh_reads_the_host_block_as_it_is_meant(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(ssh_config(HOST))
    said = subprocess.run(
        ["ssh", "-G", "-F", str(tmp_path / "config"), "lab"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    options = dict(line.split(" ", 1) for line in said if " " in line)
    assert options["user"] == "alice"
    assert options["hostkeyalias"] == "hpcenv-lab"
    assert options["stricthostkeychecking"] in ("yes", "true")
    assert options["forwardagent"] == "no"
    assert options["knownhostscommand"] == f"/bin/echo hpcenv-lab {' '.join(KEY.split()[:2])}"
    assert "'\"'\"'/opt/a b/hpcenv'\"'\"' session connect lab --runs-dir /p/runs" in options["proxycommand"]


def test_a_key_with_options_does_not_open_a_session() -> None:
    text = f'# mine\n{KEY}\n\ncommand="rsync" {KEY}\nfrom="10.0.0.1" {KEY}\nnonsense\n'
    assert parse_keys(text) == ((KEY,), 3)


@pytest.mark.parametrize("folder", ["/p/runs", "/p/a  b/it's, [x]:{y}!"])
@pytest.mark.parametrize("printed", ["", "echo NOISE", "printf NOISE", "echo hpcenv-page-not; echo"])
def test_a_page_gets_the_words_on_the_login_node_and_no_text_of_its_shell(
    folder: str, printed: str, tmp_path: Path
) -> None:
    """socat is the real one. ssh is a program that does with its words what the login node's shell does."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nwhile [ "$1" != login ]; do shift; done; shift; {printed or ":"}\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    serve = 'printf "\\nhpcenv-page\\n"; printf "<%s>" "$@"; cat'
    line = page_command(1, "login", ("sh", "-c", serve, "sh", "--runs-dir", folder))
    line = line.replace("TCP-LISTEN:1,bind=127.0.0.1,reuseaddr,fork", "-")
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", line], env=environ, input=b"\n\0up", capture_output=True, timeout=30)
    assert done.stdout == f"<--runs-dir><{folder}>\n\0up".encode(), done.stderr
