"""Facts: what a compute node reports about itself, before anything is decided.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcenv.records.checked_sif import CheckedSif
from hpcenv.records.checks import NodeChecks
from hpcenv.records.manifest import Setting, SifIdentity, Value
from hpcenv.records.network import Fabric, ImageNetwork


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface with its IPv4 and IPv6 addresses.

    Attributes:
        networks: the network of each address (`10.0.0.0/24`); empty if only the addresses are known.
    """

    name: str
    addresses: tuple[str, ...]
    networks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Route:
    """How this node reaches an address: from which address of the node, through which interface."""

    target: str
    source: str
    interface: str


@dataclass(frozen=True, kw_only=True)
class Network:
    """What a node knows about its network.

    Attributes:
        first_node: name of the node that hosts the rendezvous.
        first_node_addresses: the addresses of that name, as this node resolves it.
        routes: a route to each of those addresses that can be reached.
        free_port: a TCP port on which this node could listen when it looked; only the
            first node's counts.
        test_ports: further free ports for the smoke test, which must not use the port of the training.
        variables: NCCL_*, GLOO_* and TORCH_* found in the job's environment.
    """

    first_node: str
    first_node_addresses: tuple[str, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    free_port: int | None = None
    test_ports: tuple[int, ...] = ()
    variables: tuple[Setting, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A package that differs from the lockfile, or that the lockfile does not have.

    `unknown`: the package could not be read, so it is not known whether it differs.
    """

    field: str
    locked: str
    found: str
    note: str = ""
    unknown: bool = False


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What one node has on its own disk for this attempt (`stage/NODE.json`).

    Attributes:
        sif: identity of the node's copy; None if the shared file is used.
        sif_path: path of that copy.
        data: source folder -> the node's copy of it.
        marks: lock files. While they are locked, no job removes the copies.
        problems: why something is used from the shared file system instead.
        how: for each copied thing: `present`, `sbcast` or `copy`.
        seconds: how long each part took.
    """

    schema: int
    run: str
    node: str
    attempt: int
    sif: SifIdentity | None = None
    sif_path: str = ""
    data: dict[str, str] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    how: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


# Reasons in `Facts.unknown`: the field is not compared, because an earlier check already failed.
SKIPPED = "not read: the SIF is not the locked one"
SKIPPED_FOR_OVERLAY = "not read: the overlay is not the locked one"


@dataclass(frozen=True, kw_only=True)
class Look:
    """The state of a host environment's files when they were hashed.

    Attributes:
        digest: over path, size and times of each file.
        newest: the latest change of all of them (ctime, ns).
        files: the number of files.
        not_opened: files that could not be opened, for example broken links; at most 20.
    """

    digest: str
    newest: int
    files: int
    not_opened: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankCpus:
    """The CPUs to which the ranks of one node are bound: the CPUs near their GPUs.

    Attributes:
        cpus: CPUs of each local rank, in Linux's list format (`0-15,64`); empty for a rank that is not bound.
        gpus: the GPU of each local rank, as its address on the PCI bus.
        why: why ranks are not bound; empty if all are.
    """

    cpus: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class CudaCompat:
    """The package cuda-compat of an image: a libcuda that is newer than the node's driver.

    Attributes:
        version: CUDA release of the package, `13.0`.
        folder: folder of its libcuda.so.1 in the image.
        first: whether the loader already takes it, because of the image or a setting.
        library_path: LD_LIBRARY_PATH of the environment.
    """

    version: str
    folder: str
    first: bool
    library_path: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one node found; not yet judged.

    Attributes:
        attempt: which start of the job this is; 0 for the first, then Slurm's restart count.
        values: field -> value, in the form of the lockfile.
        unknown: field -> why it could not be read.
        differences: packages that differ from the packages in the manifest.
        unlisted: the newest importable files that no package lists: a few names beside their digest.
        sif: which SIF was checked and how.
        overlay: which squashfs was checked that is mounted over the SIF, and how; None without one.
        look: state of the hashed files; None if no file was hashed.
        not_staged: why a requested copy on the node's disk is not used.
        variables: those of the job and the secrets that the ranks get, beside the settings of the run;
            credentials without their value.
        fabric: what the node has to communicate with others; None in older facts, which do not record it.
        image_network: network libraries of the environment; None if torch has no NCCL, or if they could not be read.
        cuda_compat: the environment's package cuda-compat; None if it has none.
        checks: outcomes of the preflight checks; None if no check ran.
        rank_cpus: CPUs to which the ranks are bound; None if no binding is requested.
        seconds: how long each part took.
        written: when the node wrote the facts, by its clock, in seconds since the epoch; 0 if not recorded.
    """

    schema: int
    run: str
    node: str
    attempt: int
    values: dict[str, Value]
    unknown: dict[str, str]
    network: Network
    differences: tuple[Difference, ...] = ()
    unlisted: tuple[str, ...] = ()
    sif: CheckedSif | None = None
    overlay: CheckedSif | None = None
    not_staged: tuple[str, ...] = ()
    look: Look | None = None
    variables: tuple[Setting, ...] = ()
    fabric: Fabric | None = None
    image_network: ImageNetwork | None = None
    cuda_compat: CudaCompat | None = None
    checks: NodeChecks | None = None
    rank_cpus: RankCpus | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    written: float = 0.0

    def has(self, name: str) -> bool:
        """Return whether the node has a valid value for a field; a field that is also unknown has no valid value."""
        return name in self.values and name not in self.unknown
