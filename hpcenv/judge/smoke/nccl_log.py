"""Read from NCCL's log how a rank transferred its data, and what NCCL's diagnostics found. Pure.

Runs on: COMPUTE NODE. Standard library only. The lines are from NCCL 2.19 to 2.32 with NCCL_DEBUG=INFO
(NVIDIA/nccl, src/init.cc, src/transport/*.cc, src/plugin/net.cc; aws-ofi-nccl 1.6 to 1.17), read on 2026-11-20.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpcenv.records.smoke import NcclTransport

_VERSION = re.compile(r"NCCL version (\S+)")
_NETWORK = re.compile(r"Using network (.+?)\s*$")
_IB = re.compile(r"NET/IB : Using (.+)")
_ADAPTER = re.compile(r"\[\d+\]\s*(\S+?:\d+/\S+?)(?=\s|;|$)")
_SOCKET = re.compile(r"NET/Socket : Using (.+)")
_SOCKET_ADAPTER = re.compile(r"\[\d+\]\s*([^\s:<]+):")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is (\S+?)[,;]?(?:\s|$)")
# In old versions, the name of the communicator follows the network. The network name of aws-ofi-nccl contains a blank.
_VIA = re.compile(r"Channel \d+(?:/\d+)? : .* via (.+?)(?: comm 0x.*)?\s*$")
_CHANNELS = re.compile(r"(\d+) coll channels")
_NVLS = re.compile(r"NVLS multicast support is (not )?available")
_WARN = re.compile(r"NCCL WARN (.+)")

_MOST_ERRORS = 5
_LONGEST = 300


def read_transport(lines: Iterable[str]) -> NcclTransport:
    """Return the transport of one rank, from its log."""
    found: dict[str, str] = {}
    adapters: dict[str, None] = {}
    via: dict[str, int] = {}
    gpudirect, channels, errors = False, 0, list[str]()
    for line in lines:
        for name, pattern in (("version", _VERSION), ("network", _NETWORK)):
            if match := pattern.search(line):
                found[name] = match[1]
        if match := _NVLS.search(line):
            found["nvls"] = "no" if match[1] else "yes"
        adapters |= dict.fromkeys(_adapters(line))
        if match := _VIA.search(line):
            kind, direct = _kind(match[1])
            via[kind] = via.get(kind, 0) + 1
            gpudirect = gpudirect or direct
        if match := _CHANNELS.search(line):
            channels = max(channels, int(match[1]))
        if (match := _WARN.search(line)) and len(errors) < _MOST_ERRORS:
            errors.append(match[1][:_LONGEST])
    return NcclTransport(
        version=found.get("version", ""),
        network=found.get("network", ""),
        adapters=tuple(adapters),
        via=via,
        gpudirect=gpudirect,
        channels=channels,
        nvls=found.get("nvls", ""),
        errors=tuple(errors),
    )


def _adapters(line: str) -> list[str]:
    if match := _IB.search(line):
        return _ADAPTER.findall(match[1])
    if match := _SOCKET.search(line):
        return _SOCKET_ADAPTER.findall(match[1])
    if match := _PROVIDER.search(line):
        return [match[1]]
    return []


def _kind(word: str) -> tuple[str, bool]:
    """Return the transport without the number of the adapter, and whether the adapter accesses GPU memory directly.

    The number in words such as `NET/IB/0/GDRDMA` or `NET/AWS Libfabric/3/GDRDMA` is different on each channel.
    """
    parts = word.split("/")
    kind = "/".join(part for part in parts if not part.isdigit() and not part.startswith("GDRDMA"))
    return kind, any(part.startswith("GDRDMA") for part in parts)


# -- NCCL's own diagnostics ---------------------------------------------------------------------

# NVIDIA/nccl 031c305, troubleshooting/diagnostics.rst (2.31 and newer): rank 0 of each group prints these lines.
_DIAGNOSTICS = (2, 31)
_DIAGNOSIS = re.compile(r"NCCL DIAG (\[[A-Z]+\].*)")
# Variables that may differ between ranks, because each rank has its own log, and nodes have different interfaces and
# adapters.
_BY_RIGHT = re.compile(r"NCCL_(DEBUG_FILE|SOCKET_IFNAME|IB_HCA|TOPO_FILE|RAS_ADDR)\b")
_MOST_DIAGNOSES = 16


def has_diagnostics(version: str) -> bool:
    """Return whether a version of NCCL can test itself; False if the version is not known."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})", version)
    return match is not None and (int(match[1]), int(match[2])) >= _DIAGNOSTICS


def read_diagnostics(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the results of NCCL's diagnostics, each result once, for example `[OK] p2p: ...`."""
    found: dict[str, None] = {}
    for line in lines:
        match = _DIAGNOSIS.search(line)
        if match and not _BY_RIGHT.search(line) and len(found) < _MOST_DIAGNOSES:
            found.setdefault(" ".join(match[1].split())[:_LONGEST])
    return tuple(found)


# Network profile -> names of networks that fit the profile. Plugins have their own names: HPC-X uses `IBext`, `UCX` and
# `SHARP`, aws-ofi-nccl uses `AWS Libfabric` or, in newer versions, `Libfabric`, and GCP uses `gIB` and `FasTrak`.
_RDMA = r"IB|IBext\S*|UCX\S*|SHARP\S*"
EXPECTED_NETWORKS = {
    "ib": _RDMA,
    "roce2": _RDMA,
    "efa": r"(AWS )?Libfabric|OFI",
    "slingshot": r"(AWS )?Libfabric|OFI",
    "gcp": r"gIB\S*|FasTrak\S*|GPUDirectTCPX\S*",
}


def fits(transport: NcclTransport, *, profile: str, wanted: str) -> tuple[bool, str]:
    """Return whether a rank used the decided network, and which network was expected.

    Args:
        profile: profile of the network decision.
        wanted: value of `NCCL_NET`, if the user or a rule set it; otherwise empty.
    """
    if wanted:
        return _is_wanted(transport.network, wanted), wanted
    pattern = EXPECTED_NETWORKS.get(profile, "")
    if not pattern:
        return True, ""
    return re.fullmatch(pattern, transport.network, re.IGNORECASE) is not None, _in_words(profile)


def _is_wanted(network: str, wanted: str) -> bool:
    """Compare names as NCCL does, ignoring case (net.cc). The names of aws-ofi-nccl all mean the same network."""
    names = {"aws libfabric", "libfabric", "ofi"}
    found, asked = network.lower(), wanted.lower()
    return found == asked or (found in names and asked in names)


def _in_words(profile: str) -> str:
    return {"ib": "IB", "roce2": "IB", "gcp": "gIB or FasTrak"}.get(profile, "Libfabric (aws-ofi-nccl)")
