"""Start a service of a session; make a Unix socket for a program that can listen only on a TCP port.

Runs on: inside the image (or in a host environment). Needs only the standard library, Python 3.8 and newer.

    python3 service.py CONFIG        # JSON, written by hpcenv/sessions/services.py

If a program can listen on a Unix socket (Jupyter), it replaces this process. For other programs, this process is a
relay between the socket and a TCP port. A program behind the relay runs in a network namespace that has 127.0.0.1 only.
So other users of the node cannot reach the port. Only its owner can open the folder of the socket. The container
runtime makes the namespace; on the host, this process makes the namespace (`own_network`).
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any, List, Optional, Tuple

# Statuses of this process that sessions/services.py knows: statuses as a shell uses them, and one more.
MISSING = 127
NO_NAMESPACE = 126
OPEN_TO_OTHERS = 125

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET of unshare(2)
_SET_FLAGS, _UP = 0x8914, 1  # SIOCSIFFLAGS, IFF_UP of netdevice(7)
_SECONDS_BETWEEN_LOOKS = 0.05
_LISTENS = "0A"  # TCP_LISTEN in /proc/net/tcp


def main(path: str) -> int:
    """Start the program in the configuration; return its exit status."""
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    os.environ.update(config["variables"])
    if config["python_path"]:
        os.environ["PYTHONPATH"] = ":".join(filter(None, [os.environ.get("PYTHONPATH"), config["python_path"]]))
    argv = find(config["module"], config["argv"])
    if argv is None:
        print("the environment has no %s" % (config["module"] or config["argv"][0]), file=sys.stderr)
        return MISSING
    if config["port"] is None:
        os.execv(argv[0], argv)
    if config["own_network"]:
        try:
            make_own_network()
        except OSError as error:
            print("no network namespace: %s" % error, file=sys.stderr)
            return NO_NAMESPACE
    if config["private"] and os.readlink("/proc/self/ns/net") == config["network"]:
        print("no network namespace: this is that of the node", file=sys.stderr)
        return NO_NAMESPACE
    return relay(argv, config["socket"], config["port"] or free_port(), private=config["private"])


def find(module: str, argv: List[str]) -> Optional[List[str]]:
    """Return the command with the path of its program; None if the environment has no such program."""
    if module:
        found = importlib.util.find_spec(module.partition(".")[0])
        return None if found is None else [sys.executable, "-m", module] + argv
    program = shutil.which(argv[0])
    return None if program is None else [program] + argv[1:]


def make_own_network() -> None:
    """Move this process into a network namespace, in which it has its own user id and 127.0.0.1.

    Raises:
        OSError: this machine does not allow such a namespace.
    """
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_USER | _NEW_NETWORK) != 0:
        number = ctypes.get_errno()
        raise OSError(number, "unshare(2): " + os.strerror(number))
    for name, text in (("setgroups", "deny"), ("uid_map", "%d %d 1" % (uid, uid)), ("gid_map", "%d %d 1" % (gid, gid))):
        with open("/proc/self/" + name, "w") as file:
            file.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))


def free_port() -> int:
    """Return a port that no program uses now."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
    return port


def relay(argv: List[str], path: str, port: int, *, private: bool) -> int:
    """Start the program, and connect a Unix socket with its port until it ends; return its exit status.

    The socket is made when the port answers. So a process that waits for the socket also waits for the program.
    """
    if not private and answers(port):
        print("another program listens on port %d already" % port, file=sys.stderr)
        return OPEN_TO_OTHERS
    child = subprocess.Popen([word.replace("{port}", str(port)) for word in argv], stdin=subprocess.DEVNULL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: child.send_signal(number))
    while child.poll() is None and not answers(port):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    if child.poll() is None and not private and is_open_to_others(port):
        print("port %d listens on other addresses than 127.0.0.1: it was ended" % port, file=sys.stderr)
        child.kill()
        child.wait()
        return OPEN_TO_OTHERS
    if child.poll() is None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(64)
        threading.Thread(target=accept, args=(listener, port), daemon=True).start()
    status = child.wait()
    return status if status >= 0 else 128 - status


def answers(port: int) -> bool:
    """Return whether a program listens on the port."""
    try:
        connect(port).close()
    except OSError:
        return False
    return True


def connect(port: int) -> socket.socket:
    """Return a connection with the program, which may listen on an IPv4 or an IPv6 address."""
    try:
        return socket.create_connection(("127.0.0.1", port))
    except ConnectionRefusedError:
        return socket.create_connection(("::1", port))


def is_open_to_others(port: int) -> bool:
    """Return whether the port listens on an address that other machines can reach."""
    local = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
    return any(number == port and address not in local for address, number in listening())


def listening() -> List[Tuple[str, int]]:
    """Return addresses and ports of the TCP sockets that listen here: proc_net(5)."""
    found = []
    for name in ("tcp", "tcp6"):
        try:
            with open("/proc/self/net/" + name) as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        found += [(row[1].split(":")[0], int(row[1].split(":")[1], 16)) for row in rows if row[3] == _LISTENS]
    return found


def accept(listener: socket.socket, port: int) -> None:
    """Accept connections to the socket, and connect each one with the program."""
    while True:
        near, _ = listener.accept()
        try:
            far = connect(port)
        except OSError:
            near.close()
            continue
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=pump, args=(source, target), daemon=True).start()


def pump(source: Any, target: Any) -> None:
    """Copy data from one socket to the other, until the first socket is closed."""
    try:
        while True:
            data = source.recv(1 << 16)
            if not data:
                break
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        # One side has closed its connection, so data can no longer be sent in any direction.
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
