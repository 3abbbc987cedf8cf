"""Wait for the verdict in a launch step that was started together with the check; load the container while waiting.

Runs on: COMPUTE NODE. Standard library only.

The batch script releases the step by one line on srun's standard input, which Slurm sends to the tasks of all nodes.
If the input ends without this line, or the step is asked to end, the container ends, and nothing of the user ran.

The container is started before the verdict only if this node's check has proved that the file is the locked one.
It loads site-packages and torch only if no mount covers code: the container's own mounts are looked at, which are
those that the ranks will have. Nothing is imported from a folder of the host.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from subprocess import Popen, TimeoutExpired
from typing import Any

from hpcenv import process
from hpcenv.errors import HpcenvError
from hpcenv.node.check import mounts
from hpcenv.node.container import proved_sif
from hpcenv.node.container.start_command import let_through, needed_binds, own_folders
from hpcenv.node.container.start_gate import StartGate
from hpcenv.node.launch import processes
from hpcenv.node.launch.supervise import Signals
from hpcenv.node.stage.staged import data_binds, staged_here
from hpcenv.node.this_node import ThisNode
from hpcenv.records.checked_sif import CheckedSif
from hpcenv.records.manifest import Bind, Manifest

# The line by which the batch script releases the launch step (sbatch_templates/job.sbatch).
RELEASE = b"start\n"

_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_END = 3.0

# Variables that decide which code the loader or Python takes, or which Python is started. A container that starts
# before the verdict has none from outside the image.
DECIDES_CODE = re.compile(
    r"(LD_\w+|GLIBC_TUNABLES|((PREPEND|APPEND)_)?PATH|"
    r"PYTHON(?!(NOUSERSITE|UNBUFFERED|HASHSEED|DONTWRITEBYTECODE|FAULTHANDLER)\Z)\w+)\Z"
)

# The field of binds that hide files of the image: what they show is known only after the check.
_BIND_CONTENT = "container.bind-content"


@dataclass(frozen=True, kw_only=True)
class Begun:
    """An agent that was started and waits at its gate.

    Attributes:
        child: apptainer, or the agent on the host.
        gate: its start gate.
        before: processes below this one that were running before.
        checked: the SIF; None on the host.
        variables: the variables that it was started with.
    """

    child: Popen[bytes]
    gate: StartGate
    before: tuple[int, ...]
    checked: CheckedSif | None
    variables: Mapping[str, str]


class NotReleasedError(Exception):
    """The step was not released: nothing of the user ran.

    Attributes:
        status: exit status of this step.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"not released, status {status}")
        self.status = status


def wait_for_release(
    manifest: Manifest,
    this_node: ThisNode,
    environ: Mapping[str, str],
    signals: Signals,
    *,
    begin: Callable[[CheckedSif], Begun],
    local_rank: int | None = None,
    source: int = 0,
) -> Begun | None:
    """Wait until the batch script releases this step; return the container if it was started while waiting.

    Args:
        manifest: the run.
        this_node: this node and this attempt.
        environ: environment variables of the job step.
        signals: the signals of this process.
        begin: starts the container from a SIF that the check of this node has proved.
        local_rank: of the only rank that this process starts; None if it starts those of the node.
        source: file descriptor that the release is read from.

    Raises:
        NotReleasedError: the input ended, or a signal asked this process to end.
    """
    begun: Begun | None = None
    listener = _listen(manifest, this_node, local_rank) if can_begin(manifest, environ) else None
    received = b""
    try:
        while True:
            ready = _ready(source, listener, begun)
            if signals.asked_to_end is not None:
                raise NotReleasedError(128 + signals.asked_to_end)
            if source in ready:
                piece = os.read(source, 64)
                if not piece:
                    raise NotReleasedError(0)
                received += piece
                if received.startswith(RELEASE):
                    return begun
            if listener is not None and begun is None and listener.fileno() in ready:
                begun = _begin(begin, listener.receive())
            if begun is not None:
                begun = _attend(begun)
    except NotReleasedError:
        if begun is not None:
            end(begun)
        raise
    finally:
        if listener is not None:
            listener.close()


def can_begin(manifest: Manifest, environ: Mapping[str, str]) -> bool:
    """Return whether a container of this run may be started before the verdict. Pure."""
    if manifest.environment.kind != "sif" or any(e.field == _BIND_CONTENT for e in manifest.expectations):
        return False
    if manifest.environment.overlay is not None:
        return False  # the check step proves the SIF first, and only then what is mounted over it
    names = {setting.name for setting in manifest.settings} | {secret.name for secret in manifest.secrets}
    names |= set(let_through(environ, manifest.pass_env, on_host=False))
    return not any(DECIDES_CODE.match(name) for name in names)


def may_load(
    manifest: Manifest, this_node: ThisNode, report: Mapping[str, Any], on_node: str
) -> tuple[str, ...] | None:
    """Return the folders from which a waiting container must import nothing; None if it must not import at all.

    Args:
        manifest: the run.
        this_node: this node and this attempt.
        report: of the agent: its mounts, and the folders of its code.
        on_node: /proc/self/mountinfo of the node.
    """
    own: tuple[Bind, ...] = (*data_binds(manifest, staged_here(manifest, this_node)), *manifest.environment.binds)
    asked = needed_binds((*own, *own_folders(manifest)))
    try:
        inside, outside = mounts.parse_mountinfo(str(report.get("mountinfo", ""))), mounts.parse_mountinfo(on_node)
    except ValueError:
        return None
    gpus = manifest.environment.gpus or manifest.environment.rocm
    if mounts.unexplained(inside, asked, outside, gpus=gpus) or mounts.missing(inside, asked, outside):
        return None
    shown = {mount.target for mount in inside if not mounts.is_of_runtime(mount, gpus=gpus)}
    shown |= {os.path.normpath(bind.target) for bind in asked}
    code = report.get("code")
    if not isinstance(code, list) or any(_overlap(str(path), target) for path in code for target in shown):
        return None
    return tuple(sorted(shown))


def end(begun: Begun) -> None:
    """End a container that waits; nothing of it is left."""
    begun.gate.close()
    with suppress(TimeoutExpired):
        begun.child.wait(timeout=_SECONDS_TO_END)
    if begun.child.poll() is None:
        processes.send((*process.below(begun.child.pid), begun.child.pid), 9)
        begun.child.wait()
    processes.end_rest(begun.before)


def _listen(manifest: Manifest, this_node: ThisNode, local_rank: int | None) -> proved_sif.Listener | None:
    try:
        return proved_sif.Listener(proved_sif.address_of(manifest.run, this_node, local_rank))
    except OSError:
        return None  # then the container starts after the verdict


def _ready(source: int, listener: proved_sif.Listener | None, begun: Begun | None) -> frozenset[int]:
    """Wait for a short time; return the file descriptors that can be read, or whose other end is closed."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    if listener is not None and begun is None:
        poll.register(listener.fileno(), select.POLLIN)
    if begun is not None:
        poll.register(begun.gate.fileno(), select.POLLIN)
    return frozenset(descriptor for descriptor, _ in poll.poll(_SECONDS_BETWEEN_LOOKS * 1000))


def _begin(begin: Callable[[CheckedSif], Begun], checked: CheckedSif | None) -> Begun | None:
    """Start the container; what prevents it is reported when it is started after the verdict."""
    if checked is None or not checked.lasting:
        return None
    try:
        return begin(checked)
    except (HpcenvError, OSError):
        return None


def _attend(begun: Begun) -> Begun | None:
    begun.gate.attend()
    if begun.child.poll() is None and not begun.gate.refused:
        return begun
    end(begun)
    return None


def _overlap(one: str, other: str) -> bool:
    first, second = one.rstrip("/") + "/", other.rstrip("/") + "/"
    return first.startswith(second) or second.startswith(first)
