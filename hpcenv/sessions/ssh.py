"""What ssh reads of a session: the configuration of the node's sshd, of the user's ssh, and public keys.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only. Pure.

sshd runs as the user, for one connection, on the input and output of a job step: nothing listens.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from hpcenv.errors import UsageError
from hpcenv.records.session import NodeFolder, SessionFolder

# The name by which sshd asks for its sftp server (enter.py).
SFTP = "hpcenv-sftp"

# Kinds of keys that a line of authorized_keys begins with, where it has no options (sshd(8)).
_KEY_KINDS = ("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-", "sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-")

# Where distributions have it: Debian, SUSE and Red Hat; on PATH only for root.
_PLACES = ("/usr/sbin/sshd", "/usr/local/sbin/sshd", "/usr/lib/ssh/sshd")


def find_sshd() -> str:
    """Return the node's sshd; empty where it has none."""
    return next((path for path in _PLACES if os.access(path, os.X_OK)), "")


def sshd_config(session: SessionFolder, node: NodeFolder, *, user: str, command: Sequence[str], temporary: str) -> str:
    """Return the configuration of a session's sshd (sshd_config(5), OpenSSH 8.0 to 10.2).

    Args:
        session, node: the session's folders.
        user: name of the only user.
        command: what sshd starts instead of any shell, command or sftp server. The login shell starts it.
        temporary: the node's folder of temporary files.
    """
    # Shells read their startup files even for a command. They look in HOME, zsh in ZDOTDIR; bash takes itself for a
    # shell of rshd, which reads .bashrc, only where SHLVL is not set. The forced command sets the real variables.
    empty = _quoted(node.empty_home)
    return "\n".join(
        (
            f"HostKey {_quoted(session.host_key)}",
            f"AuthorizedKeysFile {_quoted(session.authorized_keys)}",
            # hpcenv checks the folder itself; sshd would also ask for the modes of all folders above it.
            "StrictModes no",
            # In a pattern, what stands after `@` is the host from which the user comes.
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
            # A connection that is cut ends within six minutes: the session may wait for the end of the last one.
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
    """What `ssh-config` prints.

    Attributes:
        name: name of the host, which is that of the session.
        login: the login node, as the laptop calls it.
        user: on the cluster.
        connect: argv of `hpcenv session connect` on the login node.
        host_key: the public key of the session.
    """

    name: str
    login: str
    user: str
    connect: tuple[str, ...]
    host_key: str


def ssh_config(host: SshHost) -> str:
    """Return the `Host` blocks for the configuration of ssh on the user's own machine (ssh_config(5))."""
    # ssh has no option for a key itself; KnownHostsCommand (OpenSSH 8.5) prints it, without a file to be kept.
    alias = f"hpcenv-{host.name}"
    shared = "-o ControlMaster=auto -o ControlPath=~/.ssh/hpcenv-%%C -o ControlPersist=10m"
    connect = shlex.join(host.connect).replace("%", "%%")
    # An empty line first: the file before it may end without a line end.
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
    ProxyCommand ssh -T {shared} {host.login} {shlex.quote(connect)}
"""


def parse_keys(text: str) -> tuple[tuple[str, ...], int]:
    """Return the keys of an authorized_keys file that have no options, and the number of the others.

    An option of a key (`command=`, `from=`) limits what the key may do at the site's sshd. A session would not.
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    plain = tuple(line for line in lines if line.startswith(_KEY_KINDS) and len(line.split()) > 1)
    return plain, len(lines) - len(plain)
