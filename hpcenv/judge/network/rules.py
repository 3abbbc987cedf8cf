"""The rules for network variables: which variable is set, when, why, and which source recommends it.

Runs on: COMPUTE NODE (the batch node), and LOGIN NODE for explanations. Standard library only. Pure.

NCCL's authors advise against most tuning variables ("should not be used in production nor retained in scripts",
env.rst). So this module has few rules. Each rule has a source with its date. If a rule leaves out a variable on
purpose, the decision has a row for this variable too, with the reason. docs/reference/network-rules.md is made from
RULES.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hpcenv.judge.network.profiles import data_ports
from hpcenv.records.network import Fabric, RdmaPort, StepOption

NCCL_ENV = "NCCL user guide, env.rst, NVIDIA/nccl 5067397, 2026-06-11"
HPE = "HPE shs-ccl-docs 438fcce, ccl_env.sh, 2026-04-30"
OLCF = "OLCF user documentation 2745903, pytorch_frontier.rst, 2026-07-22"
CSCS = "CSCS documentation 80abed1, nccl_env_vars, 2026-08-20"
CXI = "libfabric manual, fi_cxi(7), read 2026-11-23"
OFI = "aws-ofi-nccl 2daf7d3, nccl_ofi_interface_nvidia.cpp, 2026-08-21"


# The hash leaves out the hardware, which is the largest part. Equal values still have equal hashes.
@dataclass(frozen=True, kw_only=True)
class Situation:
    """The facts about a node and its job that the rules use. Equal nodes of a job have equal values.

    Attributes:
        profile, rdma: see `hpcenv.judge.network.profiles.NetworkProfile`.
        interface, why_interface: the socket interface of this node.
        threads, shared_by: CPU threads for each rank, and the reason for their number.
        in_container: whether the ranks run in a SIF.
        own_plugin: an NCCL plugin in the environment that is not aws-ofi-nccl; empty if there is no such plugin.
        dumps: path prefix for dumps of the flight recorder. Each rank adds its number. Empty without a run folder.
        torch, nccl: versions in the environment; empty if the value is unknown.
        library_path: LD_LIBRARY_PATH with the image's cuda-compat first; empty if not needed or not allowed.
        ras_port: port for NCCL's RAS threads if another job uses the usual port; 0 if the usual port is free.
    """

    profile: str
    rdma: str
    fabric: Fabric | None = field(hash=False)
    nodes: int
    backend: str
    interface: str
    why_interface: str
    threads: int
    shared_by: str
    in_container: bool
    own_plugin: str = ""
    dumps: str = ""
    torch: str = ""
    nccl: str = ""
    library_path: str = ""
    ras_port: int = 0

    @property
    def over_network(self) -> bool:
        """Whether NCCL connects several nodes, and their network hardware is known."""
        return self.backend == "nccl" and self.nodes > 1 and self.fabric is not None


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A variable with its value. The value None means that the variable is left out on purpose."""

    name: str
    value: str | None
    reason: str
    evidence: str = ""


@dataclass(frozen=True, kw_only=True)
class NetworkRule:
    """One rule.

    Attributes:
        id: name of the rule, which does not change.
        sets: the variables that the rule sets or leaves out, as text.
        when, why: condition and reason, as texts for the page of all rules.
        source: the source with its commit or version, and date.
        propose: the function that applies the rule.
    """

    id: str
    sets: str
    when: str
    why: str
    source: str
    propose: Callable[[Situation], Iterator[Proposal]]


# -- every job ------------------------------------------------------------------------------


def _log_prefix(_: Situation) -> Iterator[Proposal]:
    # torchrun's own prefix contains the local rank, which is not unique across nodes (torch >= 2.3).
    yield Proposal(
        name="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", value="[${rank}] ", reason="the rank in front of each line"
    )


def _unbuffered(_: Situation) -> Iterator[Proposal]:
    yield Proposal(name="PYTHONUNBUFFERED", value="1", reason="lines reach the log as they are printed")


def _debug(_: Situation) -> Iterator[Proposal]:
    yield Proposal(name="NCCL_DEBUG", value="WARN", reason="names the cause of a failure in the log")


def _threads(situation: Situation) -> Iterator[Proposal]:
    yield Proposal(name="OMP_NUM_THREADS", value=str(situation.threads), reason=situation.shared_by)


def _socket_interface(situation: Situation) -> Iterator[Proposal]:
    # "=" means exactly this name. Without "=", NCCL reads the name as a prefix.
    yield Proposal(name="NCCL_SOCKET_IFNAME", value=f"={situation.interface}", reason=situation.why_interface)
    yield Proposal(name="GLOO_SOCKET_IFNAME", value=situation.interface, reason=situation.why_interface)


# The binary of torch 2.13 contains the new name. FlightRecorder.cpp of torch 2.6 has only the old name, and torch 2.13
# still reads the old name too.
_NEW_NAME = (2, 13)
# Before this version of torch, the recorder was off by default (0 operations). Now it keeps 2,000 operations.
_RECORDS = (2, 11)


def _flight_recorder(situation: Situation) -> Iterator[Proposal]:
    """Let torch record the last operations, and write the dump for NCCL into the run folder.

    By default, torch writes the dump to the local disk of the node, and only for NCCL. If ranks hang, hpcenv reads the
    record of each process group (start_hook/stacks.py), including groups that use gloo (torch 2.9 and newer).
    """
    if not situation.dumps:
        return
    torch = _release(situation.torch)
    name = "TORCH_FR_DUMP_TEMP_FILE" if torch >= _NEW_NAME else "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    evidence = f"torch {situation.torch or 'of an unknown version'}"
    if torch < _RECORDS:
        why = "the record of operations is off by default before torch 2.11"
        yield Proposal(name="TORCH_NCCL_TRACE_BUFFER_SIZE", value="2000", reason=why, evidence=evidence)
    if situation.backend != "nccl":
        return
    why = "torch writes here what each rank did last, if an operation times out; `hpcenv diagnose` reads it"
    yield Proposal(name=name, value=situation.dumps, reason=why, evidence=evidence)
    why = "the default differs between versions of torch"
    yield Proposal(name="TORCH_NCCL_DUMP_ON_TIMEOUT", value="1", reason=why, evidence=evidence)


def _forward_compat(situation: Situation) -> Iterator[Proposal]:
    """Put the image's libcuda before the driver's libcuda if the driver is too old for the image's CUDA."""
    if situation.library_path:
        why = "the driver is too old for the image's CUDA; cuda-compat of the image runs on this branch and GPU"
        yield Proposal(name="LD_LIBRARY_PATH", value=situation.library_path, reason=why)


# The first NCCL version with RAS threads.
_RAS = (2, 24)


def _ras_address(situation: Situation) -> Iterator[Proposal]:
    """Let NCCL's RAS threads use another port if the usual port is in use on the node."""
    if situation.backend != "nccl" or not situation.ras_port or _release(situation.nccl) < _RAS:
        return
    why = "another program has port 28028: questions about a hang (ncclras) would reach that job"
    evidence = f"net.ras-port failed; NCCL {situation.nccl}"
    yield Proposal(name="NCCL_RAS_ADDR", value=f"localhost:{situation.ras_port}", reason=why, evidence=evidence)


def _release(version: str) -> tuple[int, int]:
    """Return major and minor number of a version; (0, 0) if the version is not known."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


# -- one node -------------------------------------------------------------------------------


def _single_node(situation: Situation) -> Iterator[Proposal]:
    if situation.backend == "nccl" and situation.nodes == 1:
        yield Proposal(name="NCCL_NET", value=None, reason="one node: the GPUs reach each other without a network")


# -- InfiniBand and RoCE --------------------------------------------------------------------


def _verbs_network(situation: Situation) -> Iterator[Proposal]:
    if situation.over_network and situation.rdma:
        fabric = situation.fabric
        assert fabric is not None
        if _imported_plugin(situation):
            yield Proposal(name="NCCL_NET", value=None, reason="a file of the host names a plugin")
            return
        if situation.own_plugin:
            why = f"the environment has a plugin, whose name NCCL_NET would have to be: {situation.own_plugin}"
            yield Proposal(name="NCCL_NET", value=None, reason=why)
            return
        yield Proposal(
            name="NCCL_NET",
            value="IB",
            reason="an error instead of a silent fall back to TCP, if the image lacks libibverbs or its providers",
            evidence=f"{len(data_ports(fabric, situation.rdma))} active {situation.rdma} ports on this node",
        )


def _imported_plugin(situation: Situation) -> str:
    """Return the network or the plugin that a file of the host names; empty if no file names one."""
    fabric = situation.fabric
    found = [] if fabric is None else [s for t in fabric.tuning for s in t.variables]
    return next((s.value for s in found if s.name in ("NCCL_NET", "NCCL_NET_PLUGIN")), "")


def _adapters(situation: Situation) -> Iterator[Proposal]:
    if not (situation.over_network and situation.rdma):
        return
    assert situation.fabric is not None
    used, left = split_ports(situation.fabric, situation.rdma)
    if not left or not used:
        return
    yield Proposal(
        name="NCCL_IB_HCA",
        value="=" + ",".join(f"{port.device}:{port.port}" for port in used),
        reason="NCCL would use every active port; these carry the training's data",
        evidence="left out: " + ", ".join(_in_words(port) for port in left),
    )


def split_ports(fabric: Fabric, layer: str) -> tuple[tuple[RdmaPort, ...], tuple[RdmaPort, ...]]:
    """Return the active ports that transfer the training's data, and the remaining active ports.

    A port is assumed to be for storage or management if it has a different link layer, or at most half of the fastest
    rate.
    """
    fastest = max((port.rate_gbit or 0 for port in data_ports(fabric, layer)), default=0)
    used = tuple(port for port in data_ports(fabric, layer) if 2 * (port.rate_gbit or 0) > fastest)
    return used, tuple(port for port in fabric.ports if port.state == "ACTIVE" and port not in used)


def _in_words(port: RdmaPort) -> str:
    rate = "unknown rate" if port.rate_gbit is None else f"{port.rate_gbit:g} Gb/s"
    return f"{port.device}:{port.port} ({port.layer}, {rate})"


def _gid_index(situation: Situation) -> Iterator[Proposal]:
    if situation.over_network and situation.rdma == "Ethernet":
        why = "NCCL 2.21 and newer find the GID of RoCE v2 themselves"
        yield Proposal(name="NCCL_IB_GID_INDEX", value=None, reason=why)
        why = "depends on the switches: only a site profile or a file of the host can know it"
        yield Proposal(name="NCCL_IB_TC", value=None, reason=why)


def _mnnvl(situation: Situation) -> Iterator[Proposal]:
    if situation.over_network and situation.profile == "mnnvl":
        yield Proposal(name="NCCL_MNNVL_ENABLE", value=None, reason="NCCL finds NVLink across nodes by itself (2)")


# -- TCP ------------------------------------------------------------------------------------

_FAST_MBIT = 100_000
# Drivers of adapters for which NCCL itself uses more sockets.
_OWN_DEFAULT = ("ena", "gve")


def _socket_threads(situation: Situation) -> Iterator[Proposal]:
    if not (situation.over_network and situation.profile == "tcp"):
        return
    assert situation.fabric is not None
    link = next((link for link in situation.fabric.links if link.name == situation.interface), None)
    if link is None or (link.speed_mbit or 0) < _FAST_MBIT or link.driver in _OWN_DEFAULT:
        return
    evidence = f"{link.name}: {(link.speed_mbit or 0) / 1000:g} Gb/s, {link.driver or 'no driver'}"
    why = "one socket and one thread do not fill a link of 100 Gb/s"
    yield Proposal(name="NCCL_SOCKET_NTHREADS", value="4", reason=why, evidence=evidence)
    yield Proposal(name="NCCL_NSOCKS_PERTHREAD", value="4", reason=why, evidence=evidence)


# -- libfabric ------------------------------------------------------------------------------


def _libfabric_network(situation: Situation) -> Iterator[Proposal]:
    if situation.over_network and situation.profile in ("efa", "slingshot"):
        why = "an error instead of a silent fall back to TCP, if the libfabric plugin is not found"
        yield Proposal(name="NCCL_NET", value="AWS Libfabric", reason=why)


def _efa_provider(situation: Situation) -> Iterator[Proposal]:
    if situation.over_network and situation.profile == "efa":
        why = "the plugin selects EFA itself, and sets what the instance type needs"
        yield Proposal(name="FI_PROVIDER", value=None, reason=why)


def _on_slingshot(situation: Situation) -> bool:
    return situation.over_network and situation.profile == "slingshot"


def _slingshot_registration(situation: Situation) -> Iterator[Proposal]:
    if _on_slingshot(situation):
        why = "the monitor memhooks can deadlock with the libfabric plugin, this one does not"
        yield Proposal(name="FI_MR_CACHE_MONITOR", value="userfaultfd", reason=why)
        why = "registration with the GPU locks much host memory where many processes share a GPU"
        yield Proposal(name="FI_CXI_DISABLE_HOST_REGISTER", value="1", reason=why)


def _slingshot_queues(situation: Situation) -> Iterator[Proposal]:
    if _on_slingshot(situation):
        yield Proposal(
            name="FI_CXI_DEFAULT_CQ_SIZE",
            value="131072",
            reason="NCCL's plugin takes the provider's default, which large jobs fill",
        )
        yield Proposal(
            name="FI_CXI_DEFAULT_TX_SIZE",
            value="2048",
            reason="NCCL's plugin takes the provider's default; the vendor's value",
        )
        why = "messages are matched in software where the adapter's resources are exhausted"
        yield Proposal(name="FI_CXI_RX_MATCH_MODE", value="hybrid", reason=why)


_RENDEZVOUS = (
    ("FI_CXI_RDZV_PROTO", "alt_read"),
    ("FI_CXI_RDZV_EAGER_SIZE", "0"),
    ("FI_CXI_RDZV_THRESHOLD", "0"),
    ("FI_CXI_RDZV_GET_MIN", "0"),
)


def _slingshot_rendezvous(situation: Situation) -> Iterator[Proposal]:
    """Set alt_read only if the adapters allow it, because libfabric would otherwise ignore it silently."""
    if not _on_slingshot(situation):
        return
    assert situation.fabric is not None
    states = {device.rendezvous_get for device in situation.fabric.cxi}
    evidence = "rdzv_get_en: " + ", ".join(sorted(states))
    if states == {"no"}:
        for name, value in _RENDEZVOUS:
            why = "the vendor's recommendation for NCCL; it works, since rdzv_get_en is 0"
            yield Proposal(name=name, value=value, reason=why, evidence=evidence)
    else:
        why = "has no effect without srun --network=disable_rdzv_get"
        yield Proposal(name=_RENDEZVOUS[0][0], value=None, reason=why, evidence=evidence)


def _slingshot_nics(situation: Situation) -> Iterator[Proposal]:
    if not _on_slingshot(situation):
        return
    assert situation.fabric is not None
    yield Proposal(name="NCCL_CROSS_NIC", value="1", reason="all adapters of a node are on one network")
    if situation.fabric.gpu_vendor == "nvidia":
        yield Proposal(name="NCCL_NET_GDR_LEVEL", value="PHB", reason="GPUDirect RDMA up to the same PCIe host bridge")
    else:
        why = "PHB hangs jobs of several nodes with ROCm 6.2 and newer (laifs-container-recipes#30)"
        yield Proposal(name="NCCL_NET_GDR_LEVEL", value=None, reason=why)


def _slingshot_mpich(situation: Situation) -> Iterator[Proposal]:
    if _on_slingshot(situation):
        why = "GPU support of Cray MPICH can deadlock beside NCCL"
        yield Proposal(name="MPICH_GPU_SUPPORT_ENABLED", value="0", reason=why)


RULES = (
    NetworkRule(
        id="base.log-prefix",
        sets="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        when="always",
        why="the rank in front of each line of the log",
        source="torch 2.3 to 2.15, distributed/elastic/multiprocessing",
        propose=_log_prefix,
    ),
    NetworkRule(
        id="base.unbuffered",
        sets="PYTHONUNBUFFERED",
        when="always",
        why="lines reach the log as they are printed",
        source="Python 3.13 documentation, command line and environment",
        propose=_unbuffered,
    ),
    NetworkRule(
        id="base.debug",
        sets="NCCL_DEBUG",
        when="always",
        why="by default, NCCL does not print the cause of a failure",
        source=NCCL_ENV,
        propose=_debug,
    ),
    NetworkRule(
        id="base.threads",
        sets="OMP_NUM_THREADS",
        when="always",
        why="if the variable is not set, torchrun sets it to 1",
        source="torch 2.15, distributed/run.py",
        propose=_threads,
    ),
    NetworkRule(
        id="base.flight-recorder",
        sets="TORCH_FR_DUMP_TEMP_FILE, TORCH_NCCL_DUMP_ON_TIMEOUT (names and sizes as the installed torch uses them)",
        when="in a run; the file and the dump only for NCCL, the size for each backend (before torch 2.11)",
        why="without it, the dump is on the node's own disk, and is lost when the job ends",
        source="torch 2.13 libtorch_cpu.so and FlightRecorder.hpp, 2026-11-23; pytorch 00f0e2f, FlightRecorder.cpp",
        propose=_flight_recorder,
    ),
    NetworkRule(
        id="base.forward-compat",
        sets="LD_LIBRARY_PATH (the image's cuda-compat first)",
        when="in a SIF with cuda-compat, on a node whose driver is too old, where the table of compatibility allows it",
        why="without it, the first CUDA call fails, because the driver is too old for the CUDA of the image",
        source="NVIDIA CUDA Compatibility, Forward Compatibility (edition of driver 615), 2026-11-20",
        propose=_forward_compat,
    ),
    NetworkRule(
        id="base.ras-address",
        sets="NCCL_RAS_ADDR",
        when="NCCL 2.24 and newer, on nodes whose port 28028 is in use",
        why="each NCCL job uses the same port; the RAS service of a second job on the node cannot be reached",
        source="NVIDIA/nccl 12df1a1, troubleshooting/ras.rst, 2026-11",
        propose=_ras_address,
    ),
    NetworkRule(
        id="base.socket-interface",
        sets="NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME",
        when="always; each node has its own value",
        why="NCCL prefers names that begin with `ib`, then any name; Gloo uses the address of the host name",
        source=f"{NCCL_ENV}; Gloo: torch documentation, distributed, 2.15",
        propose=_socket_interface,
    ),
    NetworkRule(
        id="single.net",
        sets="NCCL_NET (left out)",
        when="NCCL on one node",
        why="one node needs no network; a forced network costs time, or gives an error",
        source=HPE,
        propose=_single_node,
    ),
    NetworkRule(
        id="verbs.net",
        sets="NCCL_NET=IB",
        when="profiles ib, roce2 and mnnvl, if neither a file of the host nor the environment has a plugin",
        why="without it, NCCL may fall back to TCP without a message, and is then 5 to 70 times slower",
        source=NCCL_ENV,
        propose=_verbs_network,
    ),
    NetworkRule(
        id="verbs.adapters",
        sets="NCCL_IB_HCA",
        when="profiles ib, roce2, mnnvl, if active ports have a different link layer, or at most half of the rate",
        why="NCCL uses every active port, also the ports for storage and management",
        source=NCCL_ENV,
        propose=_adapters,
    ),
    NetworkRule(
        id="roce.left-out",
        sets="NCCL_IB_GID_INDEX, NCCL_IB_TC (left out)",
        when="profile roce2",
        why="NCCL 2.21 and newer select the GID; the right traffic class depends on the switches",
        source=NCCL_ENV,
        propose=_gid_index,
    ),
    NetworkRule(
        id="mnnvl.left-out",
        sets="NCCL_MNNVL_ENABLE (left out)",
        when="profile mnnvl",
        why="the default is automatic",
        source=NCCL_ENV,
        propose=_mnnvl,
    ),
    NetworkRule(
        id="tcp.threads",
        sets="NCCL_SOCKET_NTHREADS=4, NCCL_NSOCKS_PERTHREAD=4",
        when="profile tcp, with an interface of 100 Gb/s or more that is not an adapter of AWS or Google",
        why="one socket cannot use the full rate of such a link",
        source=NCCL_ENV,
        propose=_socket_threads,
    ),
    NetworkRule(
        id="libfabric.net",
        sets="NCCL_NET=AWS Libfabric",
        when="profiles efa and slingshot",
        why="NCCL would fall back to TCP without a message; every version of the plugin accepts this name",
        source=OFI,
        propose=_libfabric_network,
    ),
    NetworkRule(
        id="efa.left-out",
        sets="FI_PROVIDER (left out)",
        when="profile efa",
        why="the plugin sets the variables that the instance type needs",
        source="aws-ofi-nccl 2daf7d3, platform-aws.cpp, 2026-08-21",
        propose=_efa_provider,
    ),
    NetworkRule(
        id="slingshot.registration",
        sets="FI_MR_CACHE_MONITOR=userfaultfd, FI_CXI_DISABLE_HOST_REGISTER=1",
        when="profile slingshot",
        why="the monitor memhooks can deadlock; registration with the GPU locks much memory",
        source=f"{HPE}; {OLCF}; {CXI}",
        propose=_slingshot_registration,
    ),
    NetworkRule(
        id="slingshot.queues",
        sets="FI_CXI_DEFAULT_CQ_SIZE, FI_CXI_DEFAULT_TX_SIZE, FI_CXI_RX_MATCH_MODE",
        when="profile slingshot",
        why="NCCL's plugin takes the provider's defaults, which large jobs exhaust",
        source=f"{HPE}; {CXI}",
        propose=_slingshot_queues,
    ),
    NetworkRule(
        id="slingshot.rendezvous",
        sets="FI_CXI_RDZV_PROTO=alt_read, and the three variables for its sizes",
        when="profile slingshot, and `rdzv_get_en` is 0 on every adapter",
        why="the vendor recommends it; without --network=disable_rdzv_get, libfabric ignores it silently",
        source=HPE,
        propose=_slingshot_rendezvous,
    ),
    NetworkRule(
        id="slingshot.nics",
        sets="NCCL_CROSS_NIC=1; NCCL_NET_GDR_LEVEL=PHB on NVIDIA",
        when="profile slingshot",
        why="adapters and GPUs are attached in pairs, on one network",
        source=f"{HPE}; {CSCS}",
        propose=_slingshot_nics,
    ),
    NetworkRule(
        id="slingshot.mpich",
        sets="MPICH_GPU_SUPPORT_ENABLED=0",
        when="profile slingshot",
        why="GPU support of Cray MPICH can deadlock beside NCCL",
        source="CSCS documentation 80abed1, access/jupyterlab.md, 2026-08-20",
        propose=_slingshot_mpich,
    ),
)


def step_options(situation: Situation) -> Iterator[StepOption]:
    """Yield the srun options that the launch step needs. No variable can replace these options."""
    if _on_slingshot(situation):
        assert situation.fabric is not None
        if any(device.rendezvous_get != "no" for device in situation.fabric.cxi):
            yield StepOption(
                option="--network=disable_rdzv_get",
                reason="HPE requires it with NCCL; rdzv_get_en is not 0 on this job's adapters",
                rule="slingshot.rendezvous",
                source=HPE,
            )
