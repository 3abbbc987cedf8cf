"""Find problems with given variables: tuning to avoid, contradictions, and names that no library reads. Pure.

Runs on: COMPUTE NODE (the batch node), and LOGIN NODE for explanations. Standard library only. A given value is always
kept. The warning says which effect the value has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from hpcenv.judge.network.known_bad import KNOWN_BAD, matches
from hpcenv.records.facts import Facts
from hpcenv.records.network import NetworkRow, NetworkWarning

_ENV_RST = "NCCL user guide, env.rst (2.30), 2026-06-11"
_DEBUGGING = "a variable for debugging: NCCL's authors say that it should not be kept in scripts"

# Name -> why the variable should not be set. Each variable is in the section "Debugging" of env.rst, or NCCL's default
# is better than a fixed value since the NCCL version in the text.
_AVOID = {
    "NCCL_P2P_DISABLE": "hides a broken node: GPUs of a node then talk through host memory",
    "NCCL_P2P_LEVEL": _DEBUGGING,
    "NCCL_SHM_DISABLE": "hides a small /dev/shm: GPUs of a node then talk over the network",
    "NCCL_IB_DISABLE": "turns InfiniBand and RoCE off: TCP is 5 to 70 times slower",
    "NCCL_ALGO": _DEBUGGING,
    "NCCL_PROTO": "LL128 on a platform that does not support it corrupts data (env.rst)",
    "NCCL_BUFFSIZE": _DEBUGGING,
    "NCCL_NTHREADS": _DEBUGGING,
    "NCCL_MIN_NCHANNELS": "replaced by NCCL_MIN_CTAS; " + _DEBUGGING,
    "NCCL_MAX_NCHANNELS": "replaced by NCCL_MAX_CTAS; " + _DEBUGGING,
    "NCCL_CUMEM_ENABLE": _DEBUGGING,
    "NCCL_CUMEM_HOST_ENABLE": _DEBUGGING,
    "NCCL_NVLS_ENABLE": "0 hides a broken NVSwitch or fabric manager",
    "NCCL_MNNVL_ENABLE": "the default finds NVLink across nodes by itself",
    "NCCL_DMABUF_ENABLE": _DEBUGGING,
    "NCCL_IB_QPS_PER_CONNECTION": _DEBUGGING,
    "NCCL_IB_SPLIT_DATA_ON_QPS": _DEBUGGING,
    "NCCL_IB_AR_THRESHOLD": _DEBUGGING,
    "NCCL_IB_ADAPTIVE_ROUTING": _DEBUGGING,
    "NCCL_IB_PCI_RELAXED_ORDERING": _DEBUGGING,
    "NCCL_PXN_DISABLE": _DEBUGGING,
    "NCCL_COLLNET_ENABLE": "needs SHARP on the switches; else it has no effect",
    "NCCL_IB_GID_INDEX": "NCCL 2.21 and newer find the GID themselves; a fixed index differs between nodes",
    "NCCL_IB_TIMEOUT": "only makes a hang longer; the default is 20 since NCCL 2.23",
    "NCCL_IB_RETRY_CNT": "only makes a hang longer",
    "NCCL_NET_GDR_LEVEL": _DEBUGGING,
    "NCCL_NET_GDR_READ": _DEBUGGING,
    "NCCL_IGNORE_NET_MISMATCH": "hides nodes that differ",
    "NCCL_IGNORE_CPU_AFFINITY": "gives up the CPUs that Slurm bound the ranks to",
}

_SEEN = "not in libnccl 2.21.5 to 2.32.3 (binaries searched, 2026-11-20)"
# Names that no current NCCL reads, and their replacements.
_DEAD = {
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL, which is best left alone",
    "NCCL_TIMEOUT": "the argument `timeout` of init_process_group",
    "NCCL_SOCKET_TIMEOUT": "",
    "NCCL_MIN_CHANNELS": "NCCL_MIN_CTAS",
    "NCCL_NET_MAX_REQUESTS": "",
    "NCCL_LL_THRESHOLD": "",
    "NCCL_TREE_THRESHOLD": "",
    "NCCL_SINGLE_RING_THRESHOLD": "",
    "NCCL_CHECKS_DISABLE": "NCCL_CHECK_POINTERS",
    "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL, which is best left alone",
    "NCCL_AVOID_RECORD_STREAMS": "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "TORCH_NCCL_FLIGHT_RECORDER_ENABLED": "TORCH_FR_BUFFER_SIZE",
}

_SEARCHED = "not in libnccl, its plugin and libtorch_cuda of this environment (constants searched in this job)"

# torch still reads these names, but prints a warning.
_OLD = ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT")

_GIVEN = ("given", "host")

# Values with these origins are set on purpose: by the administrator, or by the table of determinism switches.
_MEANT = ("site profile", "determinism profile", "base seed")


def lint(
    rows: Sequence[NetworkRow], facts: Mapping[str, Facts], *, profile: str, nodes: int
) -> tuple[NetworkWarning, ...]:
    """Return warnings about the variables that are given on any node, and about versions in the image."""
    if profile == "gloo":
        return ()  # such a run does not use NCCL
    given = [row for row in rows if row.action in _GIVEN]
    values: dict[str, str] = {row.name: row.value for row in rows if row.action != "skip"}
    unread = {name for one in facts.values() if one.image_network is not None for name in one.image_network.unread}
    return (
        *_avoid(given),
        *_dead(given, unread),
        *_contradictions(values, nodes),
        *_names_in_lists(values, facts),
        *_differing(given),
        *_bad_image(facts, profile),
    )


def _avoid(given: Sequence[NetworkRow]) -> Iterator[NetworkWarning]:
    # Values from files of the host are not reported, because the administrator of the host may have a reason for them.
    for row in given:
        if row.action == "given" and row.name in _AVOID and not row.origin.startswith(_MEANT):
            yield NetworkWarning(
                rule="lint.avoid",
                what=f"{row.name}={row.value} ({row.origin}): {_AVOID[row.name]}",
                todo="remove it, or measure on this cluster whether it helps",
                source=_ENV_RST,
                nodes=row.nodes,
            )


def _dead(given: Sequence[NetworkRow], unread: Collection[str]) -> Iterator[NetworkWarning]:
    for row in given:
        if row.name in _OLD:
            yield NetworkWarning(
                rule="lint.old-name",
                what=f"{row.name}={row.value} ({row.origin}): an old name; torch prints a warning",
                todo=f"use TORCH_{row.name}",
                source="torch 2.15, ProcessGroupNCCL.hpp",
                nodes=row.nodes,
            )
            continue
        if row.name not in _DEAD and row.name not in unread:
            continue
        instead = f"use {_DEAD[row.name]}" if _DEAD.get(row.name) else "take it out"
        yield NetworkWarning(
            rule="lint.dead",
            what=f"{row.name}={row.value} ({row.origin}): no library reads it",
            todo=instead,
            source=_SEARCHED if row.name in unread else _SEEN,
            nodes=row.nodes,
        )


def _is_on(values: Mapping[str, str], name: str) -> bool:
    return values.get(name, "0") not in ("", "0")


def _contradictions(values: Mapping[str, str], nodes: int) -> Iterator[NetworkWarning]:
    found: list[tuple[str, str]] = []
    if _is_on(values, "NCCL_IB_DISABLE"):
        if values.get("NCCL_NET", "").upper() == "IB":
            found.append(("NCCL_NET=IB and NCCL_IB_DISABLE=1: NCCL cannot start", "take one of them out"))
        if "NCCL_IB_HCA" in values:
            found.append(("NCCL_IB_HCA has no effect with NCCL_IB_DISABLE=1", "take one of them out"))
    if nodes == 1 and values.get("NCCL_NET"):
        what = f"NCCL_NET={values['NCCL_NET']} on one node: it costs time, or fails where the network is not there"
        found.append((what, "give it for two or more nodes only (`min-nodes` in a site profile)"))
    threads, sockets = (_number(values, f"NCCL_{name}") for name in ("SOCKET_NTHREADS", "NSOCKS_PERTHREAD"))
    if threads * sockets > 64:
        what = "NCCL_SOCKET_NTHREADS times NCCL_NSOCKS_PERTHREAD is more than 64, which NCCL does not allow"
        found.append((what, "make one of them smaller"))
    for what, todo in found:
        yield NetworkWarning(rule="lint.contradiction", what=what, todo=todo, source=_ENV_RST)


def _number(values: Mapping[str, str], name: str) -> int:
    text = values.get(name, "1")
    return int(text) if re.fullmatch("[0-9]{1,4}", text) else 1


def _names_in_lists(values: Mapping[str, str], facts: Mapping[str, Facts]) -> Iterator[NetworkWarning]:
    """Report a prefix that also matches other adapters. For example, `mlx5_1` also matches mlx5_10 to mlx5_19."""
    text = values.get("NCCL_IB_HCA", "")
    if not text or text.startswith(("=", "^=")):
        return
    devices = {port.device for found in facts.values() if found.fabric is not None for port in found.fabric.ports}
    for word in text.lstrip("^").split(","):
        name = word.partition(":")[0]
        longer = sorted(device for device in devices if name in devices and device != name and device.startswith(name))
        if longer:
            yield NetworkWarning(
                rule="lint.prefix",
                what=f"NCCL_IB_HCA={text}: `{name}` also means {', '.join(longer[:3])}",
                todo=f"write ={text.lstrip('^')} for exact names",
                source=_ENV_RST,
            )


# Variables that may differ between nodes.
_PER_NODE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "OMP_NUM_THREADS")


def _differing(given: Sequence[NetworkRow]) -> Iterator[NetworkWarning]:
    for name in sorted({row.name for row in given if row.nodes and row.name not in _PER_NODE}):
        values = sorted({row.value for row in given if row.name == name})
        rows = [row for row in given if row.name == name]
        yield NetworkWarning(
            rule="lint.differs",
            what=f"{name} is not the same on all nodes: {', '.join(values)}",
            todo="give one value with --env or in [env]",
            nodes=rows[-1].nodes,
        )


def _bad_image(facts: Mapping[str, Facts], profile: str) -> Iterator[NetworkWarning]:
    seen = set()
    for found in facts.values():
        image = found.image_network
        versions = {"nccl": str(found.values.get("libs.nccl.version", ""))}
        versions["aws-ofi-nccl"] = "" if image is None else image.plugin_version
        machine = str(found.values.get("host.machine", ""))
        for entry in KNOWN_BAD:
            usable = entry.where == "image" and entry.machine in ("", machine) and entry.id not in seen
            usable = usable and profile in (entry.profiles or (profile,))
            version = versions.get(entry.component, "")
            where = f" ({image.plugin})" if image is not None and entry.component == "aws-ofi-nccl" else ""
            if usable and matches(entry, version):
                seen.add(entry.id)
                yield NetworkWarning(
                    rule=f"known-bad.{entry.id}",
                    what=f"{entry.component} {version}{where}: {entry.what}",
                    todo=entry.hint,
                    source=f"{entry.source}, {entry.date}",
                )
