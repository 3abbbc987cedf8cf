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
    """The route from this node to an address: the source address and the interface."""

    target: str
    source: str
    interface: str


@dataclass(frozen=True, kw_only=True)
class Network:
    """What a node found out about its network.

    Attributes:
        first_node: name of the node that hosts the rendezvous.
        first_node_addresses: the addresses to which this node resolves the name of the first node.
        routes: a route to each address of the first node that this node can reach.
        free_port: a TCP port that was free on this node; only the port of the first node is used.
        test_ports: further free ports for the smoke test, which must not use the port of the training.
        variables: the variables NCCL_*, GLOO_* and TORCH_* in the job's environment.
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
    """A package that differs from the lockfile, or that is not in the lockfile.

    `unknown` is true if the package could not be read. Then it is not known whether the package differs.
    """

    field: str
    locked: str
    found: str
    note: str = ""
    unknown: bool = False


@dataclass(frozen=True, kw_only=True)
class Staged:
    """The copies on one node's own disk for this attempt (`stage/NODE.json`).

    Attributes:
        sif: identity of the node's copy; None if the shared file is used.
        sif_path: path of that copy.
        data: source folder -> the node's copy of this folder.
        marks: lock files. While these files are locked, no job removes the copies.
        problems: why the node uses the SIF or a folder on the shared file system, and not a copy on its own disk.
        how: how each copy came to the node: `present` (the node already had the copy), `sbcast` or `copy`.
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
        digest: the digest over path, size and times of each file.
        newest: the time of the latest change of any of these files (ctime, ns).
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
        why: why ranks are not bound; empty if all ranks are bound.
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
        first: whether the loader uses this libcuda first, because the image or a setting adds its folder.
        library_path: LD_LIBRARY_PATH of the environment.
    """

    version: str
    folder: str
    first: bool
    library_path: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one node found. No decision was made yet.

    Attributes:
        attempt: 0 at the first start of the job, later Slurm's restart count.
        values: field -> value, in the form of the lockfile.
        unknown: field -> why it could not be read.
        differences: packages that differ from the packages in the manifest.
        unlisted: names of the newest few importable files that no package lists. `values` has the digest of all such
            files.
        sif: which SIF was checked, and how.
        overlay: which squashfs over the SIF was checked, and how; None without an overlay.
        look: state of the hashed files; None if no file was hashed.
        not_staged: why a requested copy on the node's disk is not used.
        variables: variables of the job and secrets that the ranks get in addition to the settings of the run.
            Credentials are recorded without their value.
        fabric: the node's hardware and software for communication with other nodes; None in older facts.
        image_network: network libraries of the environment; None if torch has no NCCL, or if they could not be read.
        cuda_compat: the environment's package cuda-compat; None without such a package.
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
        """Return whether the node has a value for a field. The value does not count if the field is also unknown."""
        return name in self.values and name not in self.unknown
