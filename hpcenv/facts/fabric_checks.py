"""Checks of InfiniBand and RoCE adapters, and of the limits that RDMA needs.

Runs on: COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence

from hpcenv.records.checks import CheckOutcome
from hpcenv.records.manifest import Manifest
from hpcenv.records.network import Fabric, RdmaPort

_LEAST_MEMLOCK = 2**30


def check_fabric(manifest: Manifest, fabric: Fabric | None) -> Iterator[CheckOutcome]:
    """Yield the outcomes about RDMA adapters; `fabric` is None if the hardware could not be read."""
    if fabric is None:
        for name in ("ib.ports", "ib.rate", "ib.memlock"):
            yield CheckOutcome(id=name, state="unknown", found="the network hardware could not be read")
        return
    if not fabric.ports:
        for name in ("ib.ports", "ib.rate", "ib.memlock"):
            yield CheckOutcome(id=name, state="not-run", found="no RDMA adapter")
        return
    yield _ports(fabric.ports)
    yield _rates(fabric.ports)
    yield _memlock(manifest, fabric.ports)


def _active(port: RdmaPort) -> bool:
    return port.state == "ACTIVE"


def _ports(ports: Sequence[RdmaPort]) -> CheckOutcome:
    """Check for ports that are down although other ports of the same kind are up."""
    kinds = {(port.driver, port.layer) for port in ports if _active(port)}
    down = [port for port in ports if not _active(port) and (port.driver, port.layer) in kinds]
    if not kinds:
        return CheckOutcome(id="ib.ports", state="failed", found="no port is ACTIVE")
    if down:
        found = ", ".join(f"{port.device}:{port.port} {port.state}" for port in down)
        return CheckOutcome(id="ib.ports", state="failed", found=found)
    return CheckOutcome(id="ib.ports", state="fine", found=f"{len(ports)} ACTIVE")


def _rates(ports: Sequence[RdmaPort]) -> CheckOutcome:
    """Check for ports that are slower than other ports of the same kind. With a bad cable, a link has a lower rate."""
    best: dict[tuple[str, str], float] = {}
    for port in ports:
        if _active(port) and port.rate_gbit is not None:
            kind = (port.driver, port.layer)
            best[kind] = max(best.get(kind, 0), port.rate_gbit)
    slow = [
        port
        for port in ports
        if _active(port) and port.rate_gbit is not None and port.rate_gbit < best[(port.driver, port.layer)]
    ]
    if not best:
        return CheckOutcome(id="ib.rate", state="not-run", found="no ACTIVE port reports its rate")
    if slow:
        found = ", ".join(f"{port.device}:{port.port} {port.rate_gbit:g} Gb/s" for port in slow)
        return CheckOutcome(id="ib.rate", state="failed", found=found, limit=f"{max(best.values()):g} Gb/s")
    return CheckOutcome(id="ib.rate", state="fine", found=f"{max(best.values()):g} Gb/s")


def _memlock(manifest: Manifest, ports: Sequence[RdmaPort]) -> CheckOutcome:
    """Compare the limit of locked memory with the amount of memory that RDMA needs."""
    name = "ib.memlock"
    if not any(_active(port) for port in ports) or manifest.backend != "nccl" or manifest.nodes < 2:
        return CheckOutcome(id=name, state="not-run", found="this run uses no RDMA")
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    enough = soft == resource.RLIM_INFINITY or soft >= _LEAST_MEMLOCK
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    return CheckOutcome(id=name, state="fine" if enough else "failed", found=found)
