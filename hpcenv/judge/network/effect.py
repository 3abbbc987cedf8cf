"""Find out whether settings take effect: compare each setting with values that can be read before the training. Pure.

Runs on: COMPUTE NODE (the batch node), and LOGIN NODE for explanations. Standard library only.

If the host lacks what a setting needs, libraries often ignore the setting silently. A row in CHECKS reads back one kind
of setting. A setting that cannot be read back is `unknown`. NCCL's log gives more information, and is read after the
smoke test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpcenv.records.facts import Facts
from hpcenv.records.network import NetworkRow, NetworkWarning, SettingEffect, YesNo
from hpcenv.text import listed

CXI = "libfabric manual, fi_cxi(7), read 2026-11-23"
MONITORS = "libfabric manual, fi_mr(3), FI_MR_CACHE_MONITOR, read 2026-11-23"
UFFD = "ofiwg/libfabric 1c71093, prov/util/src/uffd_mem_monitor.c, read 2026-11-23"
USERFAULTFD = "Linux, Documentation/admin-guide/sysctl/vm.rst, unprivileged_userfaultfd (5.11)"
NCCL_ENV = "NCCL user guide, env.rst, NVIDIA/nccl 5067397, 2026-06-11"

# Networks that need locked memory, and the smallest amount with which a training works.
_RDMA_PROFILES = ("ib", "roce2", "mnnvl", "efa", "slingshot")
_LEAST_LOCKED = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ReadBack:
    """The values that were read back for one setting.

    Attributes:
        where: the file or library that was read.
        found: what the file or library says.
        why: why the setting has no effect, or what happens if it has no effect. One sentence.
        hint: what to do if the setting has no effect.
    """

    took_effect: YesNo
    where: str
    found: str
    why: str = ""
    hint: str = ""
    source: str = ""


EffectCheck = Callable[[str, Facts], Iterator[ReadBack]]


# -- Slingshot --------------------------------------------------------------------------------


def _rendezvous_get(value: str, facts: Facts) -> Iterator[ReadBack]:
    fabric = facts.fabric
    if value != "alt_read" or fabric is None or not fabric.cxi:
        return
    states = {device.device: device.rendezvous_get for device in fabric.cxi}
    answer: YesNo = "no" if "yes" in states.values() else "unknown" if "unknown" in states.values() else "yes"
    yield ReadBack(
        took_effect=answer,
        where=f"/sys/class/cxi/{next(iter(states))}/device/properties/rdzv_get_en",
        found={"yes": "0", "no": "1", "unknown": "cannot be read"}[answer],
        why="libfabric ignores alt_read while rdzv_get_en is 1",
        hint="start the step with --network=disable_rdzv_get ([srun])",
        source=CXI,
    )


def _cache_monitor(value: str, facts: Facts) -> Iterator[ReadBack]:
    if facts.fabric is None:
        return
    versions = {one.name: one for one in facts.fabric.versions}
    if value == "kdreg2":
        yield ReadBack(
            took_effect="yes" if "kdreg2" in versions else "no",
            where="/dev/kdreg2",
            found="present" if "kdreg2" in versions else "absent",
            why="without the module kdreg2 libfabric registers memory anew each time, and says nothing",
            hint="use FI_MR_CACHE_MONITOR=userfaultfd, or ask the site for the module",
            source=MONITORS,
        )
    if value == "userfaultfd":
        allowed = versions.get("userfaultfd")
        # A new libfabric needs only the page faults of the program (UFFD_USER_MODE_ONLY). Every user may watch these.
        answer: YesNo = "yes" if allowed is not None and allowed.version == "all users" else "unknown"
        yield ReadBack(
            took_effect=answer,
            where="/proc/sys/vm/unprivileged_userfaultfd",
            found="1" if answer == "yes" else "0: a new libfabric works, an old one does not" if allowed else "no file",
            source=f"{UFFD}; {USERFAULTFD}",
        )


# -- names of interfaces and adapters ---------------------------------------------------------


def _interfaces(value: str, facts: Facts) -> Iterator[ReadBack]:
    if facts.fabric is None or not facts.fabric.links:
        return
    found = {link.name for link in facts.fabric.links} | {one.name for one in facts.network.interfaces}
    names = sorted(found)
    used = selected(value, names)
    yield ReadBack(
        took_effect="yes" if used else "no",
        where="/sys/class/net",
        found=listed(used or names, 4),
        why="no interface of this node has such a name",
        hint="leave the variable out: hpcenv chooses the interface of each node",
        source=NCCL_ENV,
    )


def _adapters(value: str, facts: Facts) -> Iterator[ReadBack]:
    if facts.fabric is None:
        return
    active = [f"{port.device}:{port.port}" for port in facts.fabric.ports if port.state == "ACTIVE"]
    used = selected(value, active, parts=":")
    yield ReadBack(
        took_effect="yes" if used else "no",
        where="/sys/class/infiniband",
        found=listed(used or active, 4) or "no active port",
        why="the value selects none of this node's active ports, so NCCL falls back to TCP or ends",
        hint="leave the variable out: hpcenv names the ports if this is needed",
        source=NCCL_ENV,
    )


def selected(value: str, names: Sequence[str], *, parts: str = "") -> list[str]:
    """Return the names that an NCCL list selects.

    The words of a list are prefixes. After `=` the words are exact names. After `^` the list selects all other names.

    Args:
        value: for example `=eth0`, `^docker,lo`, `mlx5_0:1,mlx5_1`.
        names: the names that exist on the node.
        parts: `:` if names have a port after `:`. With such names, a word without a port selects all ports of the
            adapter.
    """
    match = re.match(r"(\^?)(=?)(.*)", value, re.DOTALL)
    assert match is not None
    words = [word.strip() for word in match[3].split(",") if word.strip()]

    def is_meant(name: str) -> bool:
        whole = [name, name.partition(parts)[0]] if parts else [name]
        return any(word in whole if match[2] else name.startswith(word) for word in words)

    return [name for name in names if is_meant(name) != bool(match[1])]


# -- libraries of the environment -------------------------------------------------------------


def _network(value: str, facts: Facts) -> Iterator[ReadBack]:
    image = facts.image_network
    if image is None or not value:
        return
    if value.upper() == "IB":
        found = image.verbs or "no libibverbs.so.1"
        found += "" if not image.verbs or image.providers else ", without a provider"
        answer: YesNo = "yes" if image.verbs and image.providers else "no"
        why, hint = "NCCL finds no InfiniBand in this environment", "install libibverbs1 and ibverbs-providers"
    elif value.lower() in ("aws libfabric", "libfabric", "ofi"):
        found, answer = image.plugin or "no libnccl-net.so", "yes" if image.plugin_version else "no"
        why = "only the plugin aws-ofi-nccl answers to this name, and the loader does not find it first"
        hint = "put its folder first in LD_LIBRARY_PATH, or name it in NCCL_NET_PLUGIN"
    else:
        return
    yield ReadBack(took_effect=answer, where="the environment", found=found, why=why, hint=hint, source=NCCL_ENV)


def _plugin(value: str, facts: Facts) -> Iterator[ReadBack]:
    image = facts.image_network
    if image is None or not value or value == "none":
        return
    yield ReadBack(
        took_effect="yes" if image.plugin else "no",
        where="the environment",
        found=image.plugin or "the loader finds no such library",
        why="NCCL continues without the plugin, over a different network",
        hint="give its path, or put its folder into LD_LIBRARY_PATH",
        source=NCCL_ENV,
    )


def _gpudirect(value: str, facts: Facts) -> Iterator[ReadBack]:
    fabric = facts.fabric
    if fabric is None or value in ("", "0", "LOC") or fabric.gpu_vendor != "nvidia" or fabric.cxi:
        return
    yield ReadBack(
        took_effect="yes" if fabric.gpudirect else "no",
        where="/sys/module/nvidia_peermem, /proc/driver/nvidia/version",
        found=fabric.gpudirect or "neither nvidia_peermem nor the open kernel module",
        why="no adapter can access GPU memory on this node, so the level has no effect",
        hint="ask the site to load nvidia_peermem, or to install the open kernel module",
        source=NCCL_ENV,
    )


CHECKS: dict[str, EffectCheck] = {
    "FI_CXI_RDZV_PROTO": _rendezvous_get,
    "FI_MR_CACHE_MONITOR": _cache_monitor,
    "GLOO_SOCKET_IFNAME": _interfaces,
    "NCCL_IB_HCA": _adapters,
    "NCCL_NET": _network,
    "NCCL_NET_GDR_LEVEL": _gpudirect,
    "NCCL_NET_PLUGIN": _plugin,
    "NCCL_SOCKET_IFNAME": _interfaces,
}


def _locked_memory(_: str, facts: Facts) -> Iterator[ReadBack]:
    """Read back how much memory a process of the step may lock. RDMA locks the memory of its buffers."""
    limit = facts.values.get("host.memlock")
    if not isinstance(limit, str):
        return
    match = re.match(r"(\d{1,18}) KiB", limit)
    enough = match is None or int(match[1]) << 10 >= _LEAST_LOCKED
    yield ReadBack(
        took_effect="yes" if enough else "no",
        where="RLIMIT_MEMLOCK of the step",
        found=limit,
        why="RDMA cannot register its buffers, because the step has the limit of the login node or of slurmd",
        hint="start the step with --propagate=NONE ([srun]), or ask the site to set LimitMEMLOCK=infinity for slurmd",
        source="Slurm FAQ, memlock, 2026-08-20; NVIDIA/nccl-tests#206",
    )


# -- all settings ------------------------------------------------------------------------------


def read_back(
    rows: Sequence[NetworkRow], facts: Mapping[str, Facts], *, profile: str
) -> tuple[tuple[SettingEffect, ...], tuple[NetworkWarning, ...]]:
    """Return whether each setting that can be read back takes effect, and a warning for each setting that does not.

    Args:
        rows: the decided settings.
        facts: facts of the nodes that train.
        profile: name of the network profile.
    """
    found: dict[SettingEffect, list[str]] = {}
    for row, check in _to_read(rows, profile):
        for node in row.nodes or facts:
            for one in check(row.value, facts[node]):
                effect = SettingEffect(
                    name=row.name, value=row.value, origin=row.origin, took_effect=one.took_effect, where=one.where,
                    found=one.found, why=one.why, todo=one.hint, source=one.source,
                )  # fmt: skip
                found.setdefault(effect, []).append(node)
    effects = tuple(
        replace(effect, nodes=() if len(nodes) == len(facts) else tuple(nodes)) for effect, nodes in found.items()
    )
    return effects, tuple(map(_warning, (effect for effect in effects if effect.took_effect == "no")))


def _to_read(rows: Sequence[NetworkRow], profile: str) -> Iterator[tuple[NetworkRow, EffectCheck]]:
    """Yield each setting that is set and can be read back, with the function that reads it."""
    for row in rows:
        if profile == "gloo" and not row.name.startswith("GLOO_"):
            continue
        # An empty value means the library's default.
        chosen_there = row.action == "set" and row.name in _CHOSEN_FROM_WHAT_IS_READ
        if row.action != "skip" and row.value and row.name in CHECKS and not chosen_there:
            yield row, CHECKS[row.name]
    if profile in _RDMA_PROFILES:
        yield _MEMLOCK, _locked_memory


# hpcenv chooses these values from the same files. To read the files again would prove nothing.
_CHOSEN_FROM_WHAT_IS_READ = ("GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME")

# Slurm sets this limit for each step.
_MEMLOCK = NetworkRow(action="given", name="memlock", value="unlimited", origin="Slurm", reason="RDMA locks memory")


def _warning(effect: SettingEffect) -> NetworkWarning:
    seen = f"{effect.where}: {effect.found}"
    what = f"{effect.name}={effect.value} ({effect.origin}) has no effect: {effect.why} ({seen})"
    return NetworkWarning(rule="effect.none", what=what, todo=effect.todo, source=effect.source, nodes=effect.nodes)
