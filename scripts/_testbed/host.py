"""This machine: can it run a testbed, what does it lack, where do its packages come from.

Package sources are always this machine's own configuration (apt's and pip's); no mirror or
index is named in this code.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import sys
from ipaddress import IPv4Network
from pathlib import Path

from .errors import Status, TestbedError
from .process import Runner
from .progress import Progress

# linux/capability.h; CAP_SYS_RESOURCE is not among them on purpose: some virtual machines' root lacks it.
_CAPABILITIES = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_FOWNER": 3,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_CHROOT": 18,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_MKNOD": 27,
}
_TOOLS = {
    "mmdebstrap": "mmdebstrap",
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "tar": "tar",
}
_FILESYSTEMS = {"overlay": "the nodes' root file systems", "fuse": "Apptainer (squashfuse)"}


def require_root_and_capabilities(uid: int) -> None:
    """What no package can give: refuse at once, naming everything that is missing."""
    if uid != 0:
        raise TestbedError(
            "must run as root",
            why=f"it makes namespaces, mounts and device files; this is uid {uid}",
            hint="sudo scripts/testbed ...",
            status=Status.CANNOT_RUN_HERE,
        )
    status = Path("/proc/self/status").read_text()
    effective = int(re.search(r"^CapEff:\s*(\w+)", status, re.M).group(1), 16)  # type: ignore[union-attr]
    missing = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if missing:
        raise TestbedError(
            f"root lacks {', '.join(missing)} here",
            why="nodes are namespaces with their own devices and networks",
            hint="run it on a machine or container that has them",
            status=Status.CANNOT_RUN_HERE,
        )


def require_machine(runner: Runner, progress: Progress) -> None:
    """Debian 12 or later with what is needed, after installing the tools that apt can give."""
    problems = _system_problems()
    if problems:
        raise TestbedError(
            "this machine cannot run a testbed",
            why="\n".join(problems),
            hint="use a Debian 12 machine",
            status=Status.CANNOT_RUN_HERE,
        )
    packages = sorted({package for tool, package in _TOOLS.items() if shutil.which(tool, path=_path(runner)) is None})
    if runner.run([sys.executable, "-m", "pip", "--version"], check=False).status != 0:
        packages.append("python3-pip")
    if packages:
        _apt_install(packages, runner, progress)


def _path(runner: Runner) -> str:
    return runner.environment["PATH"]


def _system_problems() -> list[str]:
    release = dict(line.split("=", 1) for line in _read(Path("/etc/os-release")).splitlines() if "=" in line)
    problems = []
    identity, version = release.get("ID", "unknown").strip('"'), release.get("VERSION_ID", "").strip('"')
    if identity != "debian" or not version.isdigit() or int(version) < 12:
        problems.append(f"Debian 12 or later is needed, this is {identity} {version}".rstrip())
    if shutil.which("apt-get") is None:
        problems.append("apt-get is missing")
    if platform.machine() != "x86_64":
        problems.append(f"x86_64 is needed, this is {platform.machine()}")
    known = {line.split()[-1] for line in _read(Path("/proc/filesystems")).splitlines()}
    for name, use in _FILESYSTEMS.items():
        if name not in known and not _loads_module(name):
            problems.append(f"the kernel has no {name} file system, needed for {use}")
    if _read(Path("/proc/sys/user/max_user_namespaces")).strip() in ("", "0"):
        problems.append("user namespaces are off (user.max_user_namespaces), Apptainer needs them")
    if _read(Path("/proc/sys/kernel/unprivileged_userns_clone")).strip() == "0":
        problems.append("unprivileged user namespaces are off (kernel.unprivileged_userns_clone)")
    return problems


def _loads_module(name: str) -> bool:
    modprobe = shutil.which("modprobe", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if modprobe is None:
        return False
    quiet = Runner(mark="", environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    return quiet.run([modprobe, name], check=False).status == 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _apt_install(packages: list[str], runner: Runner, progress: Progress) -> None:
    with progress.phase(f"apt: installing {', '.join(packages)} on this machine"):
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        argv = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
        if runner.run(argv, timeout=600, check=False, extra=quiet).status == 0:
            return
        # A fresh machine's package lists are empty or stale.
        runner.run(["apt-get", "update"], timeout=300, check=False, extra=quiet)
        done = runner.run(argv, timeout=600, check=False, extra=quiet)
        if done.status != 0:
            raise TestbedError(
                f"missing here and not installable: {', '.join(packages)}",
                why=done.stderr.strip()[-800:],
                hint=f"make this work: apt-get install {' '.join(packages)}",
                status=Status.CANNOT_RUN_HERE,
            )


def apt_mirror(runner: Runner) -> str:
    """The URI from which this machine's own apt gets Debian's main packages."""
    fields = "$(REPO_URI) $(COMPONENT) $(RELEASE)"
    codename = re.search(r"^VERSION_CODENAME=\"?(\w+)", _read(Path("/etc/os-release")), re.M)
    release = codename.group(1) if codename else ""
    done = runner.run(["apt-get", "indextargets", "--format", fields, "Created-By: Packages"], check=False)
    for line in done.stdout.splitlines():
        uri, _, rest = line.partition(" ")
        if rest.split() == ["main", release]:
            return uri.rstrip("/")
    raise TestbedError(
        f"apt knows no source of {release} main",
        why=f"apt-get indextargets said: {done.stdout.strip()[:300] or done.stderr.strip()[:300]}",
        hint="apt-get update, then look at /etc/apt/sources.list.d",
        status=Status.CANNOT_RUN_HERE,
    )


def apt_options(runner: Runner) -> list[str]:
    """This machine's apt settings for proxies and certificates, for mmdebstrap to hand on."""
    dump = runner.run(["apt-config", "dump", "Acquire"], check=False).stdout
    wanted = re.compile(r'Acquire::(?:https?|ftp)::\S*(?:Proxy|CaInfo|Verify-Peer|Verify-Host|SslCert|SslKey)\S* ".+";')
    return [line.rstrip(";") for line in dump.splitlines() if wanted.fullmatch(line)]


def used_networks(runner: Runner) -> list[IPv4Network]:
    """Networks to which this machine has a route."""
    routes = json.loads(runner.run(["ip", "-4", "-j", "route", "show", "table", "all"]).stdout or "[]")
    networks = []
    for route in routes:
        try:
            networks.append(IPv4Network(route["dst"], strict=False))
        except (KeyError, ValueError):  # "default", or a kind of route without an address
            continue
    return networks
