"""The network decision: choose variables, with reasons, from the hardware of all nodes and the given settings. Pure.

Runs on: COMPUTE NODE (the batch node), and LOGIN NODE for explanations. Standard library only.

Values are merged here in this order, and a later value replaces an earlier one: detected values, files of the host, the
environment of the job, and last the variables of site profile, project and user. The manifest already contains these
last variables in merged form. A variable that is given without a value is not set.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv.judge.compat import forward_compat, gpu_rules
from hpcenv.judge.network.effect import read_back
from hpcenv.judge.network.lint import lint
from hpcenv.judge.network.profiles import NetworkProfile
from hpcenv.judge.network.rules import RULES, NetworkRule, Proposal, Situation, step_options
from hpcenv.judge.network.troubles import warn
from hpcenv.records.facts import Facts
from hpcenv.records.manifest import Bind, Manifest, Setting
from hpcenv.records.network import ExplainedBind, Fabric, NetworkDecision, NetworkRow
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.variables import is_left_alone, is_tuning, recorded_value
from hpcenv.text import plural

DETECTED = "detected"


@dataclass(frozen=True, kw_only=True)
class SocketInterface:
    """The interface that one node uses for sockets, and why this interface was chosen."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class NodeDecision:
    """The settings that one node gets."""

    settings: tuple[Setting, ...]
    binds: tuple[Bind, ...] = ()


def decide(
    manifest: Manifest,
    facts: Mapping[str, Facts],
    interfaces: Mapping[str, SocketInterface],
    profile: NetworkProfile,
    *,
    attempt: int = 0,
) -> tuple[dict[str, NodeDecision], NetworkDecision]:
    """Return the settings of each node, and an explanation of all settings.

    Args:
        manifest: the run, with the variables of site profile, project and user.
        facts: facts of the nodes that train, in their order.
        interfaces: node -> its interface for sockets.
        profile: the kind of network that all nodes can use.
        attempt: attempt of the job. Each attempt has its own folder for dumps of the flight recorder.
    """
    rows = _Rows(tuple(facts))
    made: dict[str, NodeDecision] = {}
    proposed: dict[Situation, tuple[tuple[NetworkRule, Proposal], ...]] = {}
    imported: dict[Fabric | None, _Imported] = {}
    for node, found in facts.items():
        situation = _situation(manifest, found, interfaces[node], profile, attempt)
        if situation not in proposed:
            proposed[situation] = tuple((rule, p) for rule in RULES for p in rule.propose(situation))
        if found.fabric not in imported:
            imported[found.fabric] = _import(found.fabric, in_container=situation.in_container)
        given = {s.name: s for s in (*found.network.variables, *manifest.settings)}
        layers = _merge(proposed[situation], imported[found.fabric], given)
        for row in layers:
            rows.add(row, node)
        made[node] = NodeDecision(
            settings=_settings(layers, given), binds=tuple(one.bind for one in imported[found.fabric].binds)
        )
    options = {option: None for situation in proposed for option in step_options(situation)}
    explained = rows.result()
    linted = lint(explained, facts, profile=profile.name, nodes=manifest.nodes)
    effects, without_effect = read_back(explained, facts, profile=profile.name)
    return made, NetworkDecision(
        profile=profile.name,
        why=profile.why,
        rows=explained,
        effects=effects,
        warnings=(*warn(manifest, facts, profile), *without_effect, *linted),
        step_options=tuple(options),
        binds=tuple({one: None for found in imported.values() for one in found.binds}),
    )


def _situation(
    manifest: Manifest, facts: Facts, interface: SocketInterface, profile: NetworkProfile, attempt: int
) -> Situation:
    threads, shared_by = _threads(manifest, facts)
    return Situation(
        profile=profile.name,
        rdma=profile.rdma,
        fabric=facts.fabric,
        nodes=1 if manifest.cluster == "local" else manifest.nodes,
        backend=manifest.backend,
        interface=interface.name,
        why_interface=interface.why,
        threads=threads,
        shared_by=shared_by,
        in_container=manifest.environment.kind == "sif",
        own_plugin=_own_plugin(facts),
        dumps=_dumps(manifest, attempt),
        torch=str(facts.values.get("torch.version", "")),
        nccl=str(facts.values.get("libs.nccl.version", "")),
        library_path=_library_path(manifest, facts),
        ras_port=_ras_port(facts),
    )


def _library_path(manifest: Manifest, facts: Facts) -> str:
    """Return LD_LIBRARY_PATH with the image's cuda-compat if this node needs that package; otherwise empty."""
    needs = manifest.gpu_needs
    if needs is None or facts.cuda_compat is None:
        return ""
    return forward_compat.library_path(manifest, facts, needs, gpu_rules.table(needs.table))


# These ports are above NCCL's usual port, and below the ports that the kernel gives to connections
# (ip_local_port_range).
_FIRST_RAS_PORT, _RAS_PORTS = 28100, 4000


def _ras_port(facts: Facts) -> int:
    """Return a port for NCCL's RAS threads of this job if the usual port is in use on the node; otherwise 0."""
    others = () if facts.checks is None else facts.checks.others
    if not any(one.id == "net.ras-port" and one.state == "failed" for one in others):
        return 0
    return _FIRST_RAS_PORT + zlib.crc32(facts.run.encode()) % _RAS_PORTS


def _dumps(manifest: Manifest, attempt: int) -> str:
    """Return the path prefix of the flight recorder's dumps; empty if there is no run folder."""
    if not manifest.run_folder:
        return ""
    return str(RunFolder(Path(manifest.run_folder)).flight_of(attempt) / "rank_")


def _own_plugin(facts: Facts) -> str:
    """Return a plugin (for example of HPC-X) that NCCL loads before its own network code; empty for aws-ofi-nccl."""
    image = facts.image_network
    return image.plugin if image is not None and not image.plugin_version else ""


def _threads(manifest: Manifest, facts: Facts) -> tuple[int, str]:
    """Return the number of threads per rank, and the reason. Without --cpus, the ranks share the CPUs from Slurm."""
    seen = facts.values.get("host.cpus")
    cpus = manifest.cpus_per_task or (seen if isinstance(seen, int) else 1)
    if manifest.cluster == "local":
        ranks, where = manifest.nproc_per_node * manifest.nodes, "on this machine"
    else:
        ranks, where = manifest.nproc_per_node, "on a node"
    return max(1, cpus // ranks), f"{plural(cpus, 'CPU')} for {plural(ranks, 'rank')} {where}"


# -- files of the host ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Imported:
    """Settings from files of one host: variables, and binds of the files that the container needs."""

    rows: tuple[NetworkRow, ...] = ()
    binds: tuple[ExplainedBind, ...] = ()


# Variables that name a library or a file. To bind only this library of the host into a container is not enough: the
# container would lack the libraries that it needs.
_LIBRARIES = ("NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "NCCL_ENV_PLUGIN")


def _import(fabric: Fabric | None, *, in_container: bool) -> _Imported:
    rows: dict[str, NetworkRow] = {}
    binds: list[ExplainedBind] = []
    for file in () if fabric is None else fabric.tuning:
        if file.kind == "topology" and in_container:
            bind = Bind(source=file.path, target=file.path, read_only=True)
            why = "the machine's topology, which the virtual machine hides from NCCL"
            binds.append(ExplainedBind(bind=bind, reason=why, rule="host.topology"))
        for setting in file.variables:
            rows.setdefault(setting.name, _imported_row(setting, in_container=in_container))
    topology = _vendor_topology(fabric)
    if topology:
        rows.setdefault("NCCL_TOPO_FILE", topology)
    return _Imported(rows=tuple(rows.values()), binds=tuple(binds))


def _imported_row(setting: Setting, *, in_container: bool) -> NetworkRow:
    if in_container and setting.name in _LIBRARIES and "/" in setting.value:
        why = f"{setting.value} is a library of the host, which the container does not see"
        return _host_row("skip", setting.name, "", setting.origin, why)
    why = "tuning of this host" + (", which the container does not see" if in_container else "")
    return _host_row("host", setting.name, setting.value, setting.origin, why)


_CONF = "NCCL reads this file where it sees it: env.rst, NVIDIA/nccl 5067397, 2026-06-11"
_SCRIPT = "the provider has its users source this script: GoogleCloudPlatform/cluster-toolkit, 2026-11-20"


def _host_row(action: str, name: str, value: str, origin: str, reason: str) -> NetworkRow:
    return NetworkRow(
        action="skip" if action == "skip" else "host",
        name=name,
        value=value,
        origin=origin,
        reason=reason,
        rule="host.tuning",
        source=_SCRIPT if origin.endswith(".sh") else _CONF,
    )


def _vendor_topology(fabric: Fabric | None) -> NetworkRow | None:
    """Return the topology file of Microsoft's image, because NCCL does not look for this file by itself."""
    files = () if fabric is None else tuple(t.path for t in fabric.tuning if t.path.startswith("/opt/microsoft/"))
    if fabric is None or fabric.cloud != "azure" or len(files) != 1:
        return None
    return NetworkRow(
        action="host",
        name="NCCL_TOPO_FILE",
        value=files[0],
        origin=files[0],
        reason="the machine's topology, which the virtual machine hides from NCCL",
        rule="host.topology",
        source="Azure/ai-infrastructure-on-azure a01b073, 2026-04-22",
    )


# -- layers -----------------------------------------------------------------------------------

# Variable -> other variables. If one of the other variables is given, hpcenv must not set the first variable.
_YIELDS_TO = {
    "NCCL_NET": ("NCCL_NET_PLUGIN", "NCCL_IB_DISABLE"),
    # Old and new names of the same variable.
    "TORCH_FR_DUMP_TEMP_FILE": ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",),
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": ("TORCH_FR_DUMP_TEMP_FILE",),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": ("TORCH_FR_BUFFER_SIZE",),
}


def _merge(
    proposed: Iterable[tuple[NetworkRule, Proposal]], imported: _Imported, given: Mapping[str, Setting]
) -> list[NetworkRow]:
    """Return a row for each variable. If several sources have the variable, the value of the last source is used."""
    rows: dict[str, NetworkRow] = {}
    for rule, proposal in proposed:
        rows[proposal.name] = _detected_row(rule, proposal, given)
    rows.update({row.name: row for row in imported.rows})
    for name, setting in given.items():
        if name in rows or is_tuning(name):
            rows[name] = _given_row(setting)
    return [rows[name] for name in sorted(rows)]


def _detected_row(rule: NetworkRule, proposal: Proposal, given: Mapping[str, Setting]) -> NetworkRow:
    in_the_way = next((name for name in _YIELDS_TO.get(proposal.name, ()) if name in given), "")
    value, reason = (None, f"{in_the_way} is given") if in_the_way else (proposal.value, proposal.reason)
    return NetworkRow(
        action="skip" if value is None else "set",
        name=proposal.name,
        value=value or "",
        origin=DETECTED,
        reason=reason,
        rule=rule.id,
        source=rule.source,
        evidence=proposal.evidence,
    )


def _given_row(setting: Setting) -> NetworkRow:
    empty = not setting.value
    return NetworkRow(
        action="skip" if empty and is_left_alone(setting.name) else "given",
        name=setting.name,
        value=recorded_value(setting.name, setting.value),
        origin=setting.origin,
        reason=setting.reason or ("given without a value: hpcenv sets nothing" if empty else "given"),
    )


def _settings(rows: Sequence[NetworkRow], given: Mapping[str, Setting]) -> tuple[Setting, ...]:
    """Return the variables of a node: the variables that the rows set, and all other variables that are given."""
    chosen = {
        row.name: Setting(name=row.name, value=row.value, origin=row.origin, reason=row.reason)
        for row in rows
        if row.action in ("set", "host")
    }
    left_out = {row.name for row in rows if row.action == "skip"}
    chosen |= {name: setting for name, setting in given.items() if name not in left_out}
    return tuple(chosen[name] for name in sorted(chosen))


class _Rows:
    """Collects the rows of all nodes. Equal rows become one row with the names of the nodes."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._found: dict[NetworkRow, list[str]] = {}

    def add(self, row: NetworkRow, node: str) -> None:
        self._found.setdefault(row, []).append(node)

    def result(self) -> tuple[NetworkRow, ...]:
        """Return the rows sorted by name; `nodes` is empty if all nodes have the row."""
        ordered = sorted(self._found.items(), key=lambda one: (one[0].name, one[1][0]))
        return tuple(
            row if len(nodes) == len(self._nodes) else replace(row, nodes=tuple(nodes)) for row, nodes in ordered
        )
