"""One testbed among several on this machine: its name, and every other name derived from it.

`down` after a crash knows nothing but these names, so each process, network namespace and
directory of an instance must be reachable from here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from ipaddress import IPv4Network
from pathlib import Path

from .errors import Status, TestbedError

# hpcenv itself, as the machines see it. Here, because `exec` runs often and must not load `wheel` for it.
VENV = "/shared/hpcenv/venv"

ENV_INSTANCE = "HPCENV_TESTBED_INSTANCE"
ENV_STATE = "HPCENV_TESTBED_STATE"
ENV_CACHE = "HPCENV_TESTBED_CACHE"
ENV_PACKAGES = "HPCENV_TEST_PACKAGES"

# Short, because Linux allows 15 characters for an interface, and the bridge's name holds it.
_NAME = re.compile(r"[a-z0-9]{1,10}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """Where one testbed lives."""

    name: str
    checkout: Path
    state: Path
    cache: Path
    packages: Path

    @property
    def prefix(self) -> str:
        """Every network namespace of this instance starts with it."""
        return f"hpcenv-{self.name}-"

    @property
    def bridge(self) -> str:
        """The bridge's name, inside the switch's namespace."""
        return f"tb-{self.name}"

    def netns(self, machine: str) -> str:
        """The name of a machine's network namespace."""
        return f"{self.prefix}{machine}"

    def netns_path(self, machine: str) -> Path:
        """Where `ip netns` keeps it."""
        return Path("/run/netns") / self.netns(machine)

    @property
    def home(self) -> Path:
        """Home directories, the same for all machines."""
        return self.state / "home"

    @property
    def shared(self) -> Path:
        """What the machines see as /shared."""
        return self.state / "shared"

    @property
    def etc(self) -> Path:
        """Configuration that all machines read."""
        return self.state / "etc"

    def machine(self, name: str) -> Path:
        """A machine's own changeable files (the upper layer of its root)."""
        return self.state / "machines" / name


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What was asked for at the first `up`; a later one repairs exactly this."""

    nodes: int
    slurm: str
    subnet: str
    node_root: str
    service_root: str
    store: str
    hostenv: str
    proctrack: str = "linuxproc"
    task: str = "none"
    modules: str = "none"
    accounting: bool = True
    preempt_signal: bool = True


def choose_instance(checkout: Path, environ: Mapping[str, str], name: str | None) -> Instance:
    """The instance asked for by option, then environment, then the one of this checkout."""
    chosen = name if name is not None else environ.get(ENV_INSTANCE)
    if chosen is None:
        chosen = hashlib.sha256(os.fsencode(checkout)).hexdigest()[:8]
    if not _NAME.fullmatch(chosen):
        raise TestbedError(
            f"{chosen!r} is not an instance name",
            why="names of network interfaces hold it: 1 to 10 of a-z and 0-9",
            hint="choose another --instance",
            status=Status.USAGE,
        )
    home = Path(environ.get("HOME", "/root"))
    state = Path(environ.get(ENV_STATE) or f"/var/tmp/hpcenv-testbed/{chosen}")
    cache = Path(environ.get(ENV_CACHE) or home / ".cache" / "hpcenv-testbed")
    packages = Path(environ.get(ENV_PACKAGES) or checkout / "tests" / "packages")
    return Instance(
        name=chosen,
        checkout=checkout,
        state=state.absolute(),
        cache=cache.absolute(),
        packages=packages.absolute(),
    )


def choose_subnet(name: str, taken: list[IPv4Network]) -> IPv4Network:
    """A /24 that this machine has no route to, always the same one for a name if it can be."""
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:2], "big")
    for step in range(1 << 14):
        number = (start + step) % (1 << 14)
        subnet = IPv4Network((f"10.{64 + number // 256}.{number % 256}.0", 24))
        if not any(subnet.overlaps(other) for other in taken):
            return subnet
    raise TestbedError("no free /24 between 10.64.0.0 and 10.127.255.0", why="this machine has routes to all of them")


def read_layout(instance: Instance) -> Layout | None:
    """The layout of a testbed that is up (or was when it crashed), None if there is none."""
    try:
        return Layout(**json.loads((instance.state / "layout.json").read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise TestbedError(
            f"cannot read {instance.state / 'layout.json'}",
            why=str(error),
            hint="scripts/testbed down (needs no state file), then up",
        ) from error


def write_layout(instance: Instance, layout: Layout) -> None:
    """Aside, then renamed: a reader sees all of it or nothing."""
    aside = instance.state / "layout.json.new"
    aside.write_text(json.dumps(asdict(layout), indent=2) + "\n")
    aside.rename(instance.state / "layout.json")


def wanted_layout(instance: Instance) -> Layout:
    """The layout, or the error that says how to get one."""
    layout = read_layout(instance)
    if layout is None:
        raise TestbedError(
            f"testbed {instance.name} is not up",
            why=f"no {instance.state / 'layout.json'}",
            hint="scripts/testbed up",
            status=Status.NOT_UP,
        )
    return layout


@contextmanager
def locked(instance: Instance) -> Iterator[None]:
    """Only one command changes an instance at a time; the lock dies with its holder."""
    path = Path(f"{instance.state}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise TestbedError(
                f"testbed {instance.name} is being changed by another command (pid {lock.read().strip() or '?'})",
                why=f"it holds {path}",
                hint="wait for it to end, or kill it and run: scripts/testbed down",
                status=Status.BUSY,
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
