"""The files for ssh into a session: the configurations of the node's sshd and of the user's ssh, and public keys.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only. Pure.

Each connection has its own sshd, which runs as the user on the standard input and output of a job step. So nothing
listens on a port.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from hpcenv.errors import UsageError
from hpcenv.records.session import NodeFolder, SessionFolder

# The name with which sshd requests its sftp server (enter.py).
SFTP = "hpcenv-sftp"

# A line of authorized_keys that has no options begins with one of these kinds of keys (sshd(8)).
_KEY_KINDS = ("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-", "sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-")

# Characters with a meaning in an address of socat.
_SPECIAL_IN_SOCAT = frozenset("\\\"'(){}[],:!")

# The line before the first byte of a page. All text before this line is from the shell of the login node, for example
# from .bashrc, and would break the page.
PAGE_BEGINS = "hpcenv-page"
# `read` of every shell takes single bytes from a pipe, so `cat` gets all bytes after the line.
_AFTER_THE_LINE = f'while read -r line && [ "$line" != {PAGE_BEGINS} ]; do :; done; cat'

# All connections to the login node share one TCP connection, so the user enters a second factor only once.
SHARED = ("-o", "ControlMaster=auto", "-o", "ControlPath=~/.ssh/hpcenv-%C", "-o", "ControlPersist=10m")

# The paths of sshd on Debian, SUSE and Red Hat. sshd is on PATH only for root.
_PLACES = ("/usr/sbin/sshd", "/usr/local/sbin/sshd", "/usr/lib/ssh/sshd")


def find_sshd() -> str:
    """Return the path of the node's sshd; empty if the node has none."""
    return next((path for path in _PLACES if os.access(path, os.X_OK)), "")


def sshd_config(session: SessionFolder, node: NodeFolder, *, user: str, command: Sequence[str], temporary: str) -> str:
    """Return the configuration of a session's sshd (sshd_config(5), OpenSSH 8.0 to 10.2).

    Args:
        session, node: the session's folders.
        user: name of the only user that may connect.
        command: the command that sshd starts through the login shell. sshd starts it instead of the shell, the command
            or the sftp server that a client requests.
        temporary: the node's folder of temporary files.
    """
    # Shells read startup files even for a command, from HOME (zsh: from ZDOTDIR), so these variables name an empty
    # folder. If SHLVL is not set, bash believes that rshd started it, and reads .bashrc. The command sets the real
    # variables.
    empty = _quoted(node.empty_home)
    return "\n".join(
        (
            f"HostKey {_quoted(session.host_key)}",
            f"AuthorizedKeysFile {_quoted(session.authorized_keys)}",
            # hpcenv checks the folder itself. With `yes`, sshd would also check the modes of all folders above it.
            "StrictModes no",
            # In a pattern, the text after `@` is the host from which the user connects.
            f"AllowUsers {user.replace('@', '?')}",
            "AuthenticationMethods publickey",
            "PubkeyAuthentication yes",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "HostbasedAuthentication no",
            "UsePAM no",
            "UseDNS no",
            "PidFile none",
            "LogLevel ERROR",
            "PrintMotd no",
            "PrintLastLog no",
            "PermitUserEnvironment no",
            "PermitUserRC no",
            "PermitTunnel no",
            "AllowAgentForwarding no",
            "X11Forwarding no",
            "GatewayPorts no",
            "AllowTcpForwarding local",
            "AllowStreamLocalForwarding local",
            "MaxSessions 100",
            # A broken connection ends within six minutes. The session may wait for the end of the last connection.
            "ClientAliveInterval 120",
            "ClientAliveCountMax 3",
            f"SetEnv HOME={empty} ZDOTDIR={empty} XDG_CONFIG_HOME={empty} SHLVL=1 TMPDIR={_quoted(temporary)}",
            f"Subsystem sftp {SFTP}",
            f"ForceCommand exec {shlex.join(command)}",
            "",
        )
    )


def _quoted(path: object) -> str:
    """Return a path as one word of sshd's or ssh's configuration, in which `%` begins a token."""
    text = str(path)
    if not text.isprintable() or '"' in text or any(one in text for one in "\\%#"):
        raise UsageError(f"{text!r} cannot be a path of a session", why="ssh would misread it")
    return f'"{text}"'


@dataclass(frozen=True, kw_only=True)
class SshHost:
    """The values that `hpcenv session ssh-config` prints.

    Attributes:
        name: name of the host, which is also the name of the session.
        login: the login node, as the laptop calls it.
        user: name of the user on the cluster.
        connect: argv of `hpcenv session connect` on the login node.
        host_key: the public host key of the session.
    """

    name: str
    login: str
    user: str
    connect: tuple[str, ...]
    host_key: str


def ssh_config(host: SshHost) -> str:
    """Return the `Host` blocks for the configuration of ssh on the user's own machine (ssh_config(5))."""
    # ssh has no option that takes a host key. KnownHostsCommand (OpenSSH 8.5) prints the key, so no file is needed.
    alias = f"hpcenv-{host.name}"
    proxy = _on_login_node(host.login, host.connect).replace("%", "%%")
    # The text begins with an empty line, because the file to which it is added may end without a line end.
    return f"""\

# hpcenv session {host.name}. VS Code: "remote.SSH.remoteServerListenOnSocket": true, so that its server opens no port.
Host {host.name}
    User {host.user}
    HostName {alias}
    HostKeyAlias {alias}
    IgnoreUnknown KnownHostsCommand
    KnownHostsCommand /bin/echo {alias} {" ".join(host.host_key.split()[:2])}
    UserKnownHostsFile ~/.ssh/known_hosts.{alias}
    GlobalKnownHostsFile none
    StrictHostKeyChecking yes
    UpdateHostKeys no
    ForwardAgent no
    ForwardX11 no
    ServerAliveInterval 60
    ProxyCommand {proxy}
"""


def _on_login_node(login: str, connect: Sequence[str]) -> str:
    """Return a line for a shell on the laptop that starts `connect` on the login node."""
    # ssh joins its words with spaces, and the shell of the login node splits them. So they are quoted once more.
    return " ".join(("ssh", "-T", *SHARED, shlex.quote(login), shlex.quote(shlex.join(connect))))


def page_command(port: int, login: str, connect: Sequence[str]) -> str:
    """Return the command with which a laptop reaches a web page of a session, for a node without sshd.

    For each connection of the browser, socat starts ssh to the login node, and ssh starts `connect` there (socat(1),
    SYSTEM).

    Args:
        port: port on the laptop.
        login: the login node, as the laptop calls it.
        connect: argv of `hpcenv session connect --page` on the login node.
    """
    command = f"{_on_login_node(login, connect)} | {{ {_AFTER_THE_LINE}; }}"
    command = "".join(f"\\{one}" if one in _SPECIAL_IN_SOCAT else one for one in command)
    return shlex.join(("socat", f"TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork", f"SYSTEM:{command}"))


def parse_keys(text: str) -> tuple[tuple[str, ...], int]:
    """Return the keys of an authorized_keys file that have no options, and the number of the other lines.

    Keys with options (`command=`, `from=`) are left out: the options limit what the key may do, and a session would
    ignore them.
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    plain = tuple(line for line in lines if line.startswith(_KEY_KINDS) and len(line.split()) > 1)
    return plain, len(lines) - len(plain)
