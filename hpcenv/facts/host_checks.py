"""Run the checks of one node on its host, before the verdict.

Runs on: COMPUTE NODE. Standard library only. A check must not hang, and must not hide the result of another check. So
each group has a thread with a time limit. Code that may wait for hardware or a file system runs in a child process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from hpcenv.errors import HpcenvError
from hpcenv.facts import fabric_checks, gpu_checks, net_checks, pci_checks, places
from hpcenv.judge.checks.check_table import BY_ID, Check, at_level
from hpcenv.machine import host_glibc, limits
from hpcenv.machine.gpus import GpuFacts
from hpcenv.machine.this_node import ThisNode
from hpcenv.machine.tree import HostTree
from hpcenv.records.checks import CheckOutcome, NodeChecks
from hpcenv.records.facts import Network
from hpcenv.records.manifest import Manifest
from hpcenv.records.network import Fabric


@dataclass(frozen=True, kw_only=True)
class AlreadyRead:
    """Values that the check step has already read on this node.

    Attributes:
        gpus: the GPUs; None if they could not be read.
        network: the interfaces and routes of this node.
        fabric: the network hardware; None if it could not be read.
        look: the child process that looks at the folders of the run.
    """

    gpus: GpuFacts | None
    network: Network
    fabric: Fabric | None
    look: places.FolderLook


def run(manifest: Manifest, place: ThisNode, environ: Mapping[str, str], seen: AlreadyRead) -> NodeChecks:
    """Run the checks that the run requests for the host of this node."""
    started = time.monotonic()
    asked = at_level(manifest.preflight, gpus=manifest.gpus_per_node > 0, places=("host",))
    groups = [_CheckGroup(prefixes, measure, asked) for prefixes, measure in _groups(manifest, place, environ, seen)]
    found = {one.id: one for group in groups for one in group.outcomes()}
    silent = CheckOutcome(id="", state="unknown", found="the check gave no result")
    results = [found.get(check.id, replace(silent, id=check.id)) for check in asked]
    return NodeChecks.of(results, seconds=time.monotonic() - started, clock=places.clock_offset(found.values()))


_Measure = Callable[[], Iterable[CheckOutcome]]


def _groups(
    manifest: Manifest, place: ThisNode, environ: Mapping[str, str], seen: AlreadyRead
) -> tuple[tuple[tuple[str, ...], _Measure], ...]:
    """Return the groups of checks, each with prefixes of check ids and the function that measures these checks."""
    names, _ = places.folders_of(manifest, environ)
    return (
        (("sys.",), lambda: limits.check_limits(manifest, environ)),
        (("fs.", "time."), lambda: places.check_places(seen.look, names)),
        (("net.",), lambda: net_checks.check_network(manifest, place, seen.network)),
        (("ib.",), lambda: fabric_checks.check_fabric(manifest, seen.fabric)),
        (("pci.",), lambda: pci_checks.check_pci(seen.fabric, HostTree())),
        (("glibc.",), lambda: host_glibc.check_glibc(manifest, environ, hanging=seen.look.hanging)),
        (("gpu.",), lambda: _gpus(manifest, environ, seen.gpus)),
    )


def _gpus(manifest: Manifest, environ: Mapping[str, str], found: GpuFacts | None) -> Iterable[CheckOutcome]:
    if found is None:
        names = [name for name in BY_ID if name.startswith("gpu.")]
        return [CheckOutcome(id=name, state="unknown", found="the GPUs could not be read") for name in names]
    return gpu_checks.check_gpus(gpu_checks.GpuNode(found=found, wanted=manifest.gpus_per_node, environ=environ))


class _CheckGroup(threading.Thread):
    """Checks that are measured together in one thread.

    The step waits for the thread at most until the checks' time limit.
    """

    def __init__(self, prefixes: tuple[str, ...], measure: _Measure, asked: Iterable[Check]) -> None:
        super().__init__(name=f"hpcenv-check-{prefixes[0]}", daemon=True)
        self._checks = [check for check in asked if check.id.startswith(prefixes)]
        self._measure = measure
        self._found: list[CheckOutcome] = []
        self._problem = ""
        self._until = time.monotonic() + max((check.seconds for check in self._checks), default=0)
        if self._checks:
            self.start()

    def run(self) -> None:
        try:
            for one in self._measure():
                self._found.append(one)
        except (HpcenvError, OSError, ValueError) as error:
            self._problem = str(error)

    def outcomes(self) -> list[CheckOutcome]:
        """Wait for the outcomes, at most until the time limit, and return them.

        A check without an outcome is `unknown`.
        """
        if not self._checks:
            return []
        # This wait is a little longer than the time limit of this thread's child processes.
        self.join(max(self._until + 0.5 - time.monotonic(), 0))
        found = list(self._found)
        known = {one.id for one in found}
        why = "no answer within its time limit" if self.is_alive() else self._problem
        missing = [check.id for check in self._checks if check.id not in known]
        return [*found, *(CheckOutcome(id=name, state="unknown", found=why) for name in missing if why)]
