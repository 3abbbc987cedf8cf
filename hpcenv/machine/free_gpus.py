"""GPUs of a machine without Slurm: a run waits for free GPUs in a queue, and reserves them until the run ends.

Runs on: COMPUTE NODE, the machine of `--cluster local`. Standard library only.

A run reserves a GPU with an abstract Unix socket. The name of the socket contains the GPU's UUID (unix(7)).
The kernel gives a name to only one socket. When the last process with the open socket ends, the kernel frees the name,
even after SIGKILL. So hpcenv needs no daemon and no file that all users can write, and nothing must be removed later.
The names are valid inside one network namespace.

A run that waits has a socket, too. The name of this socket contains the time at which the run requested GPUs.
/proc/net/unix shows the socket names of all users. So each run can see which runs requested GPUs earlier. Only the
first run of the queue takes GPUs.
"""

from __future__ import annotations

import os
import pwd
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import NodeRejected, NodesUnknown
from hpcenv.machine.gpus import GpuFacts
from hpcenv.machine.rank_cpus import visible
from hpcenv.text import plural

VARIABLE = "CUDA_VISIBLE_DEVICES"

_HOLDER, _USER, _WAITS = "hpcenv/gpu", "hpcenv/gpu-user", "hpcenv/waits"
_NAMES = Path("/proc/net/unix")
_PAUSE = 1.0
# If other programs use the GPUs, the pause grows up to this time, because such programs often keep a GPU for long.
_LONGEST_PAUSE = 15.0


@dataclass(frozen=True, kw_only=True)
class HeldGpus:
    """GPUs that this process has reserved. The reservation ends when each process that inherited the sockets has ended.

    Attributes:
        uuids: UUIDs of the GPUs, in the order of the PCI bus; empty for GPUs that hpcenv cannot reserve.
        sockets: the sockets that reserve the GPUs.
        note: text about facts of the GPUs that are not known; empty if everything is known.
    """

    uuids: tuple[str, ...] = ()
    sockets: tuple[socket.socket, ...] = ()
    note: str = ""

    @property
    def files(self) -> tuple[int, ...]:
        """The numbers of the open sockets."""
        return tuple(one.fileno() for one in self.sockets)


def take(
    count: int,
    environ: Mapping[str, str],
    *,
    look: Callable[[], GpuFacts],
    on_wait: Callable[[str], None],
    stopped: Callable[[], object],
) -> HeldGpus | None:
    """Wait until the earlier runs in the queue have their GPUs, and take free GPUs. Return None if this run must end.

    Args:
        count: how many GPUs the run needs.
        environ: environment variables. CUDA_VISIBLE_DEVICES limits the choice.
        look: function that reads the GPUs of this machine.
        on_wait: function that gets the reason for the wait, each time the GPUs were not free.
        stopped: function that returns whether the run has to end.

    Raises:
        NodeRejected: this machine has fewer GPUs.
        NodesUnknown: the driver does not report the UUIDs of its GPUs.
    """
    found = look()
    if found.vendor == "amd":
        return HeldGpus(note="hpcenv does not reserve AMD's GPUs: other runs may use the same GPUs")
    choice = _choice(found, environ, count)  # not empty, so the machine has a GPU
    turn, pause = _Turn(_uuids(found)[0], count), _PAUSE
    try:
        while not stopped():
            why = turn.others_before()
            if not why:
                held = _hold_free(choice, count, lambda: _processes(look()))
                if isinstance(held, HeldGpus):
                    return held
                why, asked = held
                pause = min(pause * 1.5, _LONGEST_PAUSE) if asked else _PAUSE
            on_wait(why)
            _sleep(pause, stopped)
    finally:
        turn.end()
    return None


def _choice(found: GpuFacts, environ: Mapping[str, str], count: int) -> dict[str, str]:
    """Return UUID -> number in the list of nvidia-smi, for the GPUs that this run may take."""
    uuids, modes = _uuids(found), found.values.get("host.gpu-mig")
    words = [word.strip() for word in environ.get(VARIABLE, "").split(",")]
    if all(word.startswith("MIG-") for word in words):
        choice = {word: word for word in words}
    else:
        try:
            named = visible(uuids, {uuid: uuid for uuid in uuids}, environ, (VARIABLE,))
        except LookupError as error:
            raise NodesUnknown("the GPUs for this run are not known", why=str(error)) from error
        # A split GPU is left out, because a process can use only one part of the GPU, and must name this part.
        split = dict(zip(uuids, modes, strict=False)) if isinstance(modes, tuple) else {}
        choice = {uuid: str(uuids.index(uuid)) for uuid in named if split.get(uuid) != "enabled"}
    if len(choice) < count:
        raise NodeRejected(
            f"this machine has {plural(len(choice), 'GPU')} for a run, and the run asks for {count}",
            why=f"the driver lists {plural(len(uuids), 'GPU')}; {VARIABLE}={environ.get(VARIABLE, '')}",
            hint=f"a smaller --gpus; {VARIABLE} names the parts of a split GPU (nvidia-smi -L)",
        )
    return choice


def _uuids(found: GpuFacts) -> tuple[str, ...]:
    uuids = found.values.get("host.gpu-uuids")
    if not isinstance(uuids, tuple):
        why = found.unknown.get("host.gpu-uuids") or found.reason
        raise NodesUnknown("which GPUs are free is not known", why=why, hint="look at `nvidia-smi` on this machine")
    return uuids


def _hold_free(
    choice: Mapping[str, str], count: int, ask_driver: Callable[[], dict[str, tuple[int, ...] | None]]
) -> HeldGpus | tuple[str, bool]:
    """Reserve GPUs that no run has reserved and no process uses.

    If there are too few such GPUs, return the reason, and whether the driver was asked.

    This function reserves the GPUs first, and asks the driver afterwards. If the driver then reports a process on a
    reserved GPU, this process does not belong to another run.
    """
    held = {uuid: own for uuid in choice if (own := _bind(f"{_HOLDER}/{uuid}")) is not None}
    used: dict[str, tuple[int, ...] | None] = {}
    enough = len(held) >= count
    if enough:
        used = ask_driver()
    kept = [uuid for uuid in held if not used.get(uuid, None)][:count]
    for uuid, own in held.items():
        if len(kept) < count or uuid not in kept:
            own.close()
    if not enough or len(kept) < count:
        return _why(choice, count, held, used), enough
    users = tuple(_bind(f"{_USER}/{uuid}/{os.getpid()}/{os.getuid()}") for uuid in kept)
    unknown = [uuid for uuid in kept if used.get(uuid) is None]
    note = f"whether other programs use {', '.join(unknown)} is not known: the driver does not say it"
    return HeldGpus(
        uuids=tuple(kept),
        sockets=(*(held[uuid] for uuid in kept), *(user for user in users if user is not None)),
        note=note if unknown else "",
    )


def _processes(found: GpuFacts) -> dict[str, tuple[int, ...] | None]:
    """Return UUID -> processes of any user that compute on the GPU; None if the driver does not report them."""
    numbers = {gpu.uuid: gpu.numbers.get("processes") for gpu in found.health}
    return {uuid: None if pairs is None else pairs[::2] for uuid, pairs in numbers.items()}


def _why(
    choice: Mapping[str, str], count: int, free: Mapping[str, object], used: Mapping[str, tuple[int, ...] | None]
) -> str:
    """Return why there are not enough GPUs."""
    users = {name.split("/")[2]: _who(name) for name in _names(_USER)}
    left, taken = len(choice), dict[str, list[str]]()
    for uuid, number in choice.items():
        by = f"process {', '.join(map(str, pids))}" if (pids := used.get(uuid)) else f"a run{users.get(uuid, '')}"
        if uuid not in free or pids:
            left -= 1
            taken.setdefault(by, []).append(number)
    by_whom = "; ".join(f"GPU {', '.join(numbers)}: {by}" for by, numbers in taken.items())
    return f"waits for {plural(count, 'GPU')}, and {left} of {len(choice)} are free; others are used: {by_whom}"


class _Turn:
    """The place of this run in the queue.

    Other runs see this place until `end` is called, or until this process ends.
    """

    def __init__(self, first_gpu: str, count: int) -> None:
        self._queue = f"{_WAITS}/{first_gpu}"
        # All processes use the same clock, which counts from the start of the machine (clock_gettime(2)).
        self._name = f"{self._queue}/{time.monotonic_ns():020d}/{os.getpid()}/{os.getuid()}/{count}"
        self._socket = _bind(self._name)

    def others_before(self) -> str:
        """Return a text that names the first run in the queue; empty if this run is the first."""
        earlier = sorted(name for name in _names(self._queue) if name < self._name)
        if not earlier:
            return ""
        first = earlier[0]
        behind = f"waits behind {plural(len(earlier), 'run')} that asked earlier"
        asked = re.search(r"/([0-9]{1,4})\Z", first)
        return f"{behind}: the first one{_who(first)} asks for {plural(int(asked[1]) if asked else 0, 'GPU')}"

    def end(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _who(name: str) -> str:
    """Return user and process from the end of a socket's name; empty if the name does not contain these parts.

    The name may have any form, because any user can choose the name of a socket.
    """
    match = re.search(r"/([0-9]{1,10})/([0-9]{1,10})(/[0-9]{1,4})?\Z", name)
    if match is None:
        return ""
    try:
        user = pwd.getpwuid(int(match[2])).pw_name
    except (KeyError, OverflowError):
        user = f"user {match[2]}"
    return f" of {user} (process {match[1]})"


def _bind(name: str) -> socket.socket | None:
    """Return a socket with this name; None if another socket already has the name."""
    own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        own.bind(f"\0{name}")
    except OSError:
        own.close()
        return None
    return own


def _names(kind: str) -> list[str]:
    """Return the names of the sockets of one kind that any process on this machine has."""
    # The columns are Num, RefCount, Protocol, Flags, Type, St, Inode, Path. An abstract name begins with @ (proc(5)).
    lines = _NAMES.read_text(encoding="utf-8", errors="replace").splitlines()
    names = {parts[7][1:] for line in lines if len(parts := line.split(None, 7)) == 8 and parts[7].startswith("@")}
    return [name for name in names if name.startswith(f"{kind}/") and name.isprintable()]


def _sleep(seconds: float, stopped: Callable[[], object]) -> None:
    until = time.monotonic() + seconds
    while not stopped() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))
