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
        first_node_addresses: what that name resolves to, seen from this node.
        routes: one for each of those addresses that can be reached.
        free_port: a TCP port on which this node could listen when it looked; only the
            first node's counts.
        test_ports: more of them, for the smoke test, which must not use the port of the training.
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

    `unknown`: the package could not be read, so it may differ or not.
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
        sif: identity of the node's copy; None where the shared file is used.
        sif_path: its path.
        data: source folder -> the node's copy of it.
        marks: files that are locked while the copies are used, so that no job removes them.
        problems: why something is used from the shared file system instead.
        how: for each thing: `present`, `sbcast` or `copy`.
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


# A reason in `Facts.unknown`: not compared, because something before it already differs.
SKIPPED = "not read: the SIF is not the locked one"
SKIPPED_FOR_OVERLAY = "not read: the overlay is not the locked one"


@dataclass(frozen=True, kw_only=True)
class Look:
    """How the files of a host environment were when they were hashed.

    Attributes:
        digest: over path, size and times of each file.
        newest: the latest change of all of them (ctime, ns).
        files: how many there are.
        not_opened: those that could not be opened, for example links to nothing; at most 20.
    """

    digest: str
    newest: int
    files: int
    not_opened: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankCpus:
    """The CPUs that the ranks of one node are bound to: those near their GPUs.

    Attributes:
        cpus: of each local rank, as Linux writes lists of CPUs (`0-15,64`); empty for a rank that is not bound.
        gpus: the GPU of each local rank, as its address on the PCI bus.
        why: why ranks are not bound; empty if all are.
    """

    cpus: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class CudaCompat:
    """The package cuda-compat of an image: a newer libcuda than that of the node's driver.

    Attributes:
        version: CUDA release that it belongs to, `13.0`.
        folder: folder of its libcuda.so.1 in the image.
        first: the loader takes it already, because of the image or of a setting.
        library_path: LD_LIBRARY_PATH of the environment.
    """

    version: str
    folder: str
    first: bool
    library_path: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one node found, before anybody judges it.

    Attributes:
        attempt: which start of the job this is; 0 for the first, then Slurm's restart count.
        values: field -> value, in the words of the lockfile.
        unknown: field -> why it could not be read.
        differences: packages that differ from the manifest's.
        unlisted: the newest importable files that no package lists: a few names beside their digest.
        sif: which SIF was checked and how.
        overlay: which squashfs was checked that is mounted over the SIF, and how; None without one.
        look: how the hashed files were; None where none was hashed.
        not_staged: why a copy on the node's own disk was asked for and is not used.
        variables: those of the job and the secrets that the ranks get, beside the settings of the run;
            credentials without their value.
        fabric: what the node has to communicate with others; None in facts from before it was recorded.
        image_network: what the environment has for that; None where torch has no NCCL, or it could not be read.
        cuda_compat: the environment's package cuda-compat; None without one.
        checks: what the preflight checks found; None where none ran.
        rank_cpus: what the ranks are bound to; None where no binding is wanted.
        seconds: how long each part took.
        written: when the node wrote this, by its own clock, in seconds since the epoch; 0 if that is not recorded.
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
        """Return whether the node has a value for a field that counts; a field that is also unknown has none."""
        return name in self.values and name not in self.unknown
