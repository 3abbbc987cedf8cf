"""Compare the error counters of the RDMA ports before the start of the ranks with the counters after their end.

Runs on: COMPUTE NODE. Standard library only. Every user may read the files of these counters. If the counters of a port
cannot be read, the result names the port.

Sources: linux, Documentation/ABI/stable/sysfs-class-infiniband; NVIDIA, Understanding mlx5 Linux Counters; aws,
efa_verbs.c and efa counters (2026-11). Counters that also grow in healthy fabrics are left out on purpose:
`out_of_sequence` (adaptive routing), `port_xmit_discards` (congestion), `port_rcv_switch_relay_errors` (multicast),
`VL15_dropped` (management), `req_cqe_error` (each end of a queue pair), and similar counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcenv.machine.tree import HostTree
from hpcenv.records.network import PortErrors
from hpcenv.text import listed

_FOLDER = "/sys/class/infiniband"
# These counters mean that the link itself failed. A single error of this kind is too many.
_LINK = ("link_downed", "link_error_recovery", "local_link_integrity_errors", "excessive_buffer_overrun_errors")
# A few of these errors within some days are normal.
_PACKETS = (
    "symbol_error",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "roce_adp_retrans_to",
    "rx_icrc_encapsulated",
    "retrans_timeout_events",
    "unresponsive_remote_events",
)
_MOST_PACKETS = 100
# The largest values of counters of the InfiniBand specification, which have 4, 8, 16 or 32 bits. A counter that has
# reached its largest value does not change any more (PortCounters).
_FULL = (15, 255, 65535, 2**32 - 1)

PortCounter = tuple[str, int, str]


@dataclass(frozen=True, kw_only=True)
class PortCounters:
    """The error counters of a node at one moment.

    Attributes:
        values: (device, port, counter) -> value.
        unread: ports whose counters could not be read, such as `mlx5_0:1`.
    """

    values: Mapping[PortCounter, int] = field(default_factory=dict)
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PortGrowth:
    """The counters that grew between two moments. `unknown` is a text about counters with unknown growth."""

    errors: tuple[PortErrors, ...] = ()
    unknown: str = ""


def read_counters(tree: HostTree | None = None) -> PortCounters:
    """Return the existing error counters of all RDMA ports of this node."""
    tree = tree or HostTree()
    values: dict[PortCounter, int] = {}
    unread = []
    for device in tree.names(_FOLDER):
        for name in tree.names(f"{_FOLDER}/{device}/ports"):
            if not name.isdecimal():
                continue
            found = _of_port(tree, f"{_FOLDER}/{device}/ports/{name}")
            values.update({(device, int(name), counter): value for counter, value in found.items()})
            if not found:
                unread.append(f"{device}:{name}")
    return PortCounters(values=values, unread=tuple(unread))


def _of_port(tree: HostTree, folder: str) -> dict[str, int]:
    found = {}
    for part in ("counters", "hw_counters"):
        for name in tree.names(f"{folder}/{part}"):
            value = tree.number(f"{folder}/{part}/{name}") if name in _LINK or name in _PACKETS else None
            if value is not None:
                found[name] = value
    return found


def compare(before: PortCounters, after: PortCounters) -> PortGrowth:
    """Return the counters that grew. Pure."""
    errors, reset, full = [], [], []
    for key, first in before.values.items():
        device, port, counter = key
        last = after.values.get(key)
        if last is None or last < first:
            reset.append(f"{device}:{port} {counter}")
        elif last == first and first in _FULL:
            full.append(f"{device}:{port} {counter}")
        elif last > first:
            many = counter in _LINK or last - first > _MOST_PACKETS
            errors.append(PortErrors(device=device, port=port, counter=counter, grown=last - first, many=many))
    unread = sorted({*before.unread, *after.unread})
    reasons = (
        (unread, "no error counter of {} can be read"),
        (reset, "{} was reset while the ranks ran"),
        (full, "{} had reached its end before"),
    )
    unknown = "; ".join(text.format(listed(names, 3)) for names, text in reasons if names)
    return PortGrowth(
        errors=tuple(sorted(errors, key=lambda one: (not one.many, one.device, one.port))), unknown=unknown
    )


def in_words(errors: PortErrors) -> str:
    """Return the growth of one counter as text."""
    return f"{errors.device}:{errors.port} {errors.counter} +{errors.grown}"
