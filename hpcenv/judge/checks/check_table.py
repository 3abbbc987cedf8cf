"""The table of preflight checks: what each check measures, its limit, who must act, and the hint. Data only.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

`project/fields.py` copies the severities from this table into its table of fields. So [policy] can change the
severities. `facts/host_checks.py` names the modules that measure. docs/reference/checks.md is made from this table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from hpcenv.records.manifest import Manifest, PreflightLevel, PreflightOptions, Severity

LEVELS: tuple[PreflightLevel, ...] = ("off", "quick", "full")

CheckOwner = Literal["node", "user"]

# Where a check runs:
#   host       on every node, before the verdict
#   nodes      on the batch node, from the reports of all nodes
#   container  on every node after the verdict, inside the environment
#   smoke      on all nodes together after the verdict, started in the same way as the training
#   start      in the environment of every node, by the process that then starts the ranks; even with --preflight off
#   run        on every node, from the start to the end of the ranks; shown in report and diagnosis
CheckPlace = Literal["host", "nodes", "container", "smoke", "start", "run"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        id: name in `--skip-check`, [policy], records and tables.
        measures: what is measured, and how.
        limit: the condition that the measured value must meet.
        why: what goes wrong in a job if the check fails.
        severity: severity of a failure, which [policy] can change. `must` stops the job.
        owner: where the cause is: `node` means in the hardware or in a service of the node, `user` means in the job.
        level: the lowest level of `--preflight` with which the check runs. `off` is the lowest level: the check always
            runs.
        place: where the check runs.
        cost: time and load of the check, as text.
        seconds: time limit of the check. After this time the result is unknown. A check that measures its time itself
            has then failed.
        source: the source of the limit, with its date.
        hint: what to do if the check fails.
        gpus: whether the check applies only to jobs with GPUs.
    """

    id: str
    measures: str
    limit: str
    why: str
    severity: Severity
    owner: CheckOwner
    level: PreflightLevel
    place: CheckPlace
    cost: str
    seconds: float
    source: str
    hint: str
    gpus: bool = False


_EXCLUDE = "tell the site's support; until it is repaired, submit with --exclude NODE or --spare 1"
_CHILD = "in a child process, while the container starts"

# Sources that several rows of the table have.
_NVML = "nvml.h of CUDA 13.1"
_XID = "NVIDIA, Xid errors (docs.nvidia.com/deploy/xid-errors, 2026-11)"
_GCM = "facebookresearch/gcm health checks (2026-11)"
_AZURE = "Azure/azurehpc-health-checks (2026-11)"
_NCCL = "NCCL user guide, Troubleshooting (2.30, 2026-11)"
_OURS = "hpcenv's own judgement, 2026-11"


def _host(name: str, severity: Severity, owner: CheckOwner, **texts: Any) -> Check:
    """Return a quick check on the host of each node."""
    parts: dict[str, Any] = {"level": "quick", "place": "host", "cost": "< 1 ms", "seconds": 2.0} | texts
    return Check(id=name, severity=severity, owner=owner, **parts)


def _gpu(name: str, severity: Severity, **texts: Any) -> Check:
    """Return a quick check of the GPUs of each node, which asks NVML."""
    parts: dict[str, Any] = {"cost": f"some ms, {_CHILD}", "seconds": 60.0, "hint": _EXCLUDE} | texts
    return _host(name, severity, "node", gpus=True, **parts)


def _inside(name: str, severity: Severity, owner: CheckOwner, **texts: Any) -> Check:
    """Return a check of level full inside the environment of each node."""
    parts: dict[str, Any] = {"level": "full", "place": "container", "cost": "< 10 ms", "seconds": 10.0} | texts
    return Check(id=name, severity=severity, owner=owner, **parts)


CHECKS: tuple[Check, ...] = (
    # -- limits of a process, memory ---------------------------------------------------------
    _host(
        "sys.nofile",
        "warn",
        "user",
        measures="how many files a process may open: the soft limit RLIMIT_NOFILE of the step",
        limit="at least 1024, and 4 for each rank of the job",
        why="the rendezvous keeps a connection to every rank; above the limit, it fails with `Too many open files`",
        source=f"{_NCCL}, system limits; the factor is {_OURS}",
        hint="`ulimit -n 65536` in the shell before hpcenv submit: Slurm passes limits on (PropagateResourceLimits)",
    ),
    _host(
        "sys.nproc",
        "warn",
        "user",
        measures="how many processes and threads of this user may run on the node (RLIMIT_NPROC), less those that run",
        limit="512 for each rank of the node",
        why="data loaders and threads cannot be started (`Resource temporarily unavailable`)",
        source=f"getrlimit(2); the number is {_OURS}",
        hint="`ulimit -u 65536` in the shell before hpcenv submit: Slurm passes limits on (PropagateResourceLimits)",
    ),
    _host(
        "sys.stack",
        "warn",
        "user",
        measures="the size of the stack (RLIMIT_STACK), for jobs with the backend nccl",
        limit="not `unlimited`, with a NCCL before 2.28",
        why="without a limit, glibc gives each thread a stack of 2 MB; NCCL's search for paths can then crash",
        source=f"{_NCCL}, stack size",
        hint="`ulimit -s 8192` in the shell before hpcenv submit: Slurm passes limits on (PropagateResourceLimits)",
    ),
    _host(
        "sys.affinity",
        "warn",
        "user",
        measures="how many CPU cores the step may use, against the ranks of the node; threads of one core count once",
        limit="a core for each rank",
        why="ranks that share one core wait for each other in every operation, data loaders too",
        source="PyTorch, Performance Tuning Guide, CPU affinity (2.13); nccl-tests#300 (2025-03)",
        hint="request cores: --cpus N; if this does not help: --srun cpu-bind=none, or check task/affinity of Slurm",
    ),
    _host(
        "sys.shm",
        "must",
        "node",
        measures="free space in /dev/shm",
        limit="at least 1 GiB, for jobs with the backend nccl",
        why="NCCL and data loaders of one node communicate through /dev/shm; if it is full, they fail (`Bus error`)",
        source=f"{_NCCL}, shared memory; pytorch#5040",
        hint="files of ended jobs fill it (`ls -l /dev/shm`): remove your own; " + _EXCLUDE,
    ),
    _host(
        "sys.shm.ranks",
        "warn",
        "node",
        measures="free space in /dev/shm",
        limit="at least 1 GiB for each rank of the node, for jobs with the backend nccl",
        why="with little shared memory, data loaders with many workers end with Bus error",
        source=f"{_NCCL}, shared memory; pytorch#5040; the factor is {_OURS}",
        hint="fewer data loader workers, or other nodes: --exclude NODE",
    ),
    _host(
        "sys.memory",
        "warn",
        "node",
        measures="MemAvailable of the node, against the memory that Slurm gave to the job",
        limit="at least 0.9 of the memory of the job",
        why="processes of other users use the memory of this job; the kernel may end the ranks of the job",
        source="nebius/soperator, idle_mem_used (2026-11); the factor is hpcenv's",
        hint=_EXCLUDE,
    ),
    # -- folders and clocks -----------------------------------------------------------------
    _host(
        "fs.answers",
        "must",
        "node",
        measures="whether the folders of a run answer: run folder, working directory, environment, data, binds, TMPDIR",
        limit="an answer within the time limit",
        why="a file system that hangs stops every process that touches it, without a message",
        cost=_CHILD,
        seconds=10.0,
        source="NVRx, NFS checks; gpud, nfs (2026-11)",
        hint="the file system or its network is down on this node: " + _EXCLUDE,
    ),
    _host(
        "fs.usable",
        "must",
        "user",
        measures="whether a file can be written to run folder and TMPDIR, and read back",
        limit="no error",
        why="records, checkpoints and temporary files cannot be written",
        cost=_CHILD,
        seconds=10.0,
        source=_OURS,
        hint="check path, permissions and quota on that node: srun -w NODE ls -ld PATH",
    ),
    _host(
        "fs.full",
        "must",
        "user",
        measures="free space and files in run folder and TMPDIR",
        limit="at least 64 MiB and 100 files",
        why="records and checkpoints cannot be written",
        cost=_CHILD,
        seconds=10.0,
        source=f"{_GCM}, storage; the numbers are {_OURS}",
        hint="remove old runs (hpcenv clean), or --runs-dir DIR; for TMPDIR: --exclude NODE",
    ),
    _host(
        "fs.space",
        "warn",
        "user",
        measures="free space in run folder and TMPDIR",
        limit="at least 1 GiB",
        why="logs and checkpoints may not fit",
        cost=_CHILD,
        seconds=10.0,
        source=f"{_GCM}, storage; the number is {_OURS}",
        hint="remove old runs (hpcenv clean), or --runs-dir DIR",
    ),
    _host(
        "fs.lustre",
        "must",
        "node",
        measures="if a folder of the run is on Lustre: the health that the Lustre client reports (health_check)",
        limit="healthy",
        why="the client has met an internal error (LBUG): each process that touches the file system may hang",
        cost=_CHILD,
        seconds=10.0,
        source="Lustre Operations Manual 2.x, health_check and import states (2026-11)",
        hint="the node has to be started again: " + _EXCLUDE,
    ),
    _host(
        "fs.lustre.servers",
        "warn",
        "node",
        measures="if a folder of the run is on Lustre: the state of each connection to the Lustre servers",
        limit="FULL or IDLE",
        why="files on a server that is not connected do not answer, or only after a recovery of minutes",
        cost=_CHILD,
        seconds=10.0,
        source="Lustre Operations Manual 2.x, health_check and import states (2026-11)",
        hint="one node: " + _EXCLUDE + "; all nodes: the file server is down",
    ),
    _host(
        "fs.gpfs",
        "must",
        "node",
        measures="if a folder of the run is on GPFS (Storage Scale): whether the GPFS daemon mmfsd runs",
        limit="it runs",
        why="without the daemon, each access hangs, or ends with the error Stale file handle",
        cost=_CHILD,
        seconds=10.0,
        source="IBM Storage Scale 5.2, Problem Determination Guide (2026-11)",
        hint="the site's support has to start GPFS on the node: " + _EXCLUDE,
    ),
    _host(
        "time.filesystem",
        "warn",
        "node",
        measures="this node's clock, against the time that the file system stamps on a new file of the run folder",
        limit="at most 2 s apart",
        why="files look newer or older than they are, so make, caches and the choice of the newest checkpoint go wrong",
        cost=_CHILD,
        seconds=10.0,
        source=_OURS,
        hint="the clock of the node or of the file server is wrong (chronyc tracking): tell the site's support",
    ),
    Check(
        id="time.nodes",
        measures="the clocks of the nodes against each other, by the shared file system and by the batch node's clock",
        limit="at most 30 s apart",
        why="certificates and tokens are refused, and lines from several nodes cannot be sorted by time",
        severity="must",
        owner="node",
        level="quick",
        place="nodes",
        cost="< 1 ms",
        seconds=1.0,
        source=f"Lambda's cluster guide (2025); the number is {_OURS}",
        hint="the node's clock is wrong (chronyc tracking): " + _EXCLUDE,
    ),
    # -- libraries of the host in the container -----------------------------------------------
    _host(
        "glibc.driver",
        "must",
        "user",
        gpus=True,
        measures="the glibc that each library of the driver on the node needs (`ldconfig -p`, `readelf -V`)",
        limit="not newer than the image's glibc, by the lockfile",
        why="--nv and --rocm mount them into the container, whose loader refuses them: version `GLIBC_2.34' not found",
        cost="some ms: ldconfig, and a few kB of each library",
        seconds=10.0,
        source="apptainer#598, apptainer#2421; Linux Standard Base 5.0, Symbol Versioning",
        hint="build the image on a base with at least the named glibc (`ldd --version` says which a base has)",
    ),
    _host(
        "glibc.binds",
        "warn",
        "user",
        measures="the same for libraries in binds: files *.so, and folders that are in LD_LIBRARY_PATH",
        limit="not newer than the image's glibc, by the lockfile",
        why="the loader takes the host's library (libfabric, MPI) and refuses it",
        cost="a few kB of each library",
        seconds=10.0,
        source="apptainer#598, apptainer#2421; Linux Standard Base 5.0, Symbol Versioning",
        hint="build the image on a newer distribution, or leave the bind out and install the library in the image",
    ),
    # -- network ----------------------------------------------------------------------------
    _host(
        "net.loopback",
        "warn",
        "node",
        measures="the address that the node's own name resolves to",
        limit="an address that is not loopback",
        why="a library that announces its host name gives other nodes the address 127.0.1.1; hpcenv uses addresses",
        source="pytorch#150532 (2025); Debian Reference 5.1.1",
        hint="torchrun works without a change; other launchers need a correct /etc/hosts: tell the site's support",
        seconds=10.0,
    ),
    _host(
        "net.port",
        "must",
        "user",
        measures="whether MASTER_PORT, if you set it, is free on the first node; hpcenv itself chooses a free port",
        limit="free",
        why="two jobs with the same port connect to each other, or fail: EADDRINUSE",
        source="pytorch#116974 (2024)",
        hint="leave MASTER_PORT out, or choose another port",
    ),
    _host(
        "net.ras-port",
        "info",
        "user",
        measures="whether the port of NCCL's RAS threads (28028) is free",
        limit="free",
        why="if two jobs share a node, a request to RAS may reach the wrong job",
        source="NCCL user guide, RAS (2.24 and newer)",
        hint="do nothing: hpcenv gives NCCL 2.24 and newer a different port (hpcenv net explain RUN: NCCL_RAS_ADDR)",
    ),
    _host(
        "net.reach",
        "must",
        "node",
        measures="whether the first node answers to a TCP connection from each other node (a refusal is an answer)",
        limit="an answer within 4 s",
        why="if a firewall blocks connections, the ranks wait for the rendezvous until its time limit",
        cost="one round trip",
        seconds=5.0,
        source="sglang#3820 (2025)",
        hint="a firewall or a broken link between the nodes: " + _EXCLUDE,
    ),
    # -- RDMA -------------------------------------------------------------------------------
    _host(
        "ib.ports",
        "warn",
        "node",
        measures="state of the RDMA ports, from /sys/class/infiniband",
        limit="at least one port is ACTIVE, and all ports of the same kind as an ACTIVE port are ACTIVE",
        why="NCCL uses fewer adapters on this node, and every node waits for the slowest one",
        source="NVRx, NicLinkStateHealthCheck; imbue cluster-health, ibstatus (2026-11)",
        hint="a cable or switch port is down: " + _EXCLUDE,
    ),
    _host(
        "ib.rate",
        "warn",
        "node",
        measures="rate of the ACTIVE RDMA ports",
        limit="as fast as the fastest port of the same kind",
        why="a bad cable trains at a lower rate, and every node waits for the slowest one",
        source="NVRx, NicLinkStateHealthCheck (2026-11)",
        hint="a cable or switch port is bad: " + _EXCLUDE,
    ),
    _host(
        "ib.memlock",
        "must",
        "node",
        measures="how much memory a process may lock (RLIMIT_MEMLOCK), on nodes with RDMA",
        limit="at least 1 GiB",
        why="RDMA locks the memory that it uses; above the limit, ibv_reg_mr or ibv_create_cq fails",
        source="nccl-tests#206; AWS health checks (2026-11)",
        hint="slurmd needs LimitMEMLOCK=infinity: tell the site's support, and submit with --exclude NODE",
    ),
    Check(
        id="ib.errors",
        measures="error counters of the RDMA ports (/sys/class/infiniband) before and after the ranks ran",
        limit="no link down or recovered; at most 100 more of each other error",
        why="lost packets are sent again, so one bad cable slows all ranks, or ends the job",
        severity="warn",
        owner="node",
        level="quick",
        place="run",
        cost="some ms",
        seconds=2.0,
        source="linux ABI, sysfs-class-infiniband; NVRx, NicHealthCheck (2026-11); the number is " + _OURS,
        hint="a cable, adapter or switch port is bad: " + _EXCLUDE,
    ),
    # -- PCI --------------------------------------------------------------------------------
    _host(
        "pci.iommu",
        "warn",
        "node",
        measures="whether the IOMMU translates the addresses of GPUs and RDMA adapters (/sys/kernel/iommu_groups)",
        limit="identity (iommu=pt), or no IOMMU; on x86 without a hypervisor",
        why="transfers between GPUs, and from adapter to GPU, go through the CPU, so they are slow or hang",
        source=f"{_NCCL}, PCI Access Control Services; linux, Documentation/ABI/testing/sysfs-kernel-iommu_groups",
        hint="the kernel needs iommu=pt, or VT-d off in the firmware: tell the site's support",
        gpus=True,
    ),
    _host(
        "pci.acs",
        "warn",
        "node",
        measures="access control of the PCI bridges above GPUs and RDMA adapters (ACSCtl), if it can be read",
        limit="no redirection to the CPU",
        why="transfers between GPUs, and from adapter to GPU, go through the CPU, so they are slow or hang",
        source=f"{_NCCL}, PCI Access Control Services; PCI Express Base Specification 5.0, 7.7.8",
        hint="the site's support can turn ACS off: setpci ECAP_ACS+0x6.w=0000 for each bridge, at each boot",
        gpus=True,
    ),
    # -- GPUs -------------------------------------------------------------------------------
    _gpu(
        "gpu.count",
        "must",
        measures="how many GPUs NVML lists, against --gpus",
        limit="as many as requested",
        why="each rank needs a GPU",
        source=_NVML,
    ),
    _gpu(
        "gpu.lost",
        "must",
        measures="whether every GPU and the driver answer",
        limit="an answer from each",
        why="a GPU that has fallen off the bus hangs or ends each process that asks for it",
        source=f"{_GCM}; {_NVML}, NVML_ERROR_GPU_IS_LOST",
    ),
    _gpu(
        "gpu.recovery",
        "must",
        measures="the action that the driver requires before new work (NVML field 230, driver 570 and newer)",
        limit="nothing",
        why="the driver has found the GPU broken",
        source=f"{_NVML}, nvmlDeviceGpuRecoveryAction; NVRx, GPUHealthCheck (2026-11)",
    ),
    _gpu(
        "gpu.ecc.uncorrected",
        "must",
        measures="uncorrected memory errors since the driver was loaded",
        limit="0",
        why="a process that touches the memory ends with CUDA_ERROR_ECC_UNCORRECTABLE",
        source=f"{_GCM}; {_AZURE}",
    ),
    _gpu(
        "gpu.ecc.corrected",
        "warn",
        measures="corrected memory errors since the driver was loaded",
        limit="at most 1,000,000",
        why="uncorrected errors often follow so many corrected errors",
        source=f"{_AZURE}; {_GCM}",
    ),
    _gpu(
        "gpu.remap.failed",
        "must",
        measures="whether a bad row of memory could not be replaced",
        limit="none",
        why="the memory has no spare rows left",
        source=f"{_NVML}, nvmlDeviceGetRemappedRows; {_GCM}",
    ),
    _gpu(
        "gpu.remap.pending",
        "warn",
        measures="whether bad rows of memory wait for a reset, which replaces them",
        limit="none",
        why="until the reset the bad rows are in use",
        source=f"{_NVML}, nvmlDeviceGetRemappedRows; {_GCM}",
    ),
    _gpu(
        "gpu.retired",
        "warn",
        measures="whether bad pages of memory wait for a reset, which retires them (GPUs before Ampere)",
        limit="none",
        why="until the reset the bad pages are in use",
        source=f"{_NVML}, nvmlDeviceGetRetiredPagesPendingStatus; {_GCM}",
    ),
    _gpu(
        "gpu.xid",
        "warn",
        measures="Xid errors that need a reset or a reboot, in the kernel's log since boot (/dev/kmsg)",
        limit="none",
        why="the GPU had a hardware error; gpu.recovery says whether the error is still there",
        source=f"{_XID}; {_AZURE}",
    ),
    _gpu(
        "gpu.throttle",
        "warn",
        measures="the reasons for low clocks: hardware slowdown, heat, power brake",
        limit="none of these",
        why="one slow GPU slows all ranks",
        source=f"{_NVML}, nvmlClocksEventReasons; {_AZURE}",
    ),
    _gpu(
        "gpu.pcie.width",
        "warn",
        measures="lanes of the PCIe link now, against the number that GPU and slot can use",
        limit="all of them",
        why="copies to and from the GPU are slower; all ranks wait for them",
        source=f"{_AZURE}; gpud (2026-11)",
    ),
    _gpu(
        "gpu.nvlink",
        "must",
        measures="the number of NVLink links that are up on each GPU",
        limit="the same number on all GPUs of the node",
        why="NCCL uses PCIe in place of the missing link, or hangs",
        source="NVRx, NVLHealthCheck; NCCL 2.31 diagnostics (2026-11)",
    ),
    _gpu(
        "gpu.fabric",
        "must",
        measures="state of the NVLink switches' fabric (GpuFabricInfo)",
        limit="done, without an error",
        why="CUDA does not start: error 802, system not yet initialized",
        source=f"{_NVML}, nvmlGpuFabricInfo; nccl#1672 (2025)",
        hint="the fabric manager does not run on the node: " + _EXCLUDE,
    ),
    _gpu(
        "gpu.compute-mode",
        "must",
        measures="compute mode of each GPU",
        limit="not `prohibited`",
        why="no process can compute on the GPU",
        source=f"{_NVML}, nvmlComputeMode",
    ),
    _gpu(
        "gpu.persistence",
        "info",
        measures="persistence mode",
        limit="on",
        why="without it the first CUDA call takes seconds, and clocks and settings are lost between jobs",
        source="NVIDIA, Driver Persistence (2026-11)",
        hint="this costs seconds, but no results; the site's support can start nvidia-persistenced",
    ),
    _gpu(
        "gpu.stray",
        "must",
        measures="processes outside of this job that use more than 1 GiB of the memory of the job's GPUs",
        limit="none",
        why="the memory of the GPU is not all for this job: CUDA out of memory",
        source=f"{_GCM}; nebius/soperator, alloc_gpus_busy (2026-11)",
        hint="your own process: end it (scancel, or kill on that node); another user's: " + _EXCLUDE,
    ),
    _gpu(
        "gpu.shared",
        "warn",
        measures="other processes outside of this job that have the job's GPUs open",
        limit="none",
        why="they share the GPU's time and memory with this job",
        source=f"{_GCM}; nebius/soperator, alloc_gpus_busy (2026-11)",
        hint="your own process: end it (scancel, or kill on that node); another user's: " + _EXCLUDE,
    ),
    # -- inside the environment ---------------------------------------------------------------
    _inside(
        "inside.shm",
        "must",
        "node",
        measures="free space in /dev/shm, as the ranks see it",
        limit="at least 1 GiB, for jobs with the backend nccl",
        why="NCCL and data loaders communicate through /dev/shm; a container may have its own, small /dev/shm",
        source=f"{_NCCL}, shared memory; pytorch#5040",
        hint="compare with the host (sys.shm): a bind of the project or site may hide it; else " + _EXCLUDE,
    ),
    _inside(
        "inside.memlock",
        "must",
        "node",
        measures="how much memory the ranks may lock (RLIMIT_MEMLOCK), on nodes with RDMA",
        limit="at least 1 GiB",
        why="RDMA locks the memory that it uses; above the limit, ibv_reg_mr or ibv_create_cq fails",
        source="nccl-tests#206; AWS health checks (2026-11)",
        hint="slurmd needs LimitMEMLOCK=infinity: tell the site's support, and submit with --exclude NODE",
    ),
    _inside(
        "inside.affinity",
        "warn",
        "user",
        measures="how many CPU cores the launch step may use, against the ranks of the node; threads of one core count "
        "once",
        limit="a core for each rank",
        why="ranks that share one core wait for each other in every operation, data loaders too",
        source="PyTorch, Performance Tuning Guide, CPU affinity (2.13)",
        hint="request cores: --cpus N; if this does not help: --srun cpu-bind=none, or check task/affinity of Slurm",
    ),
    _inside(
        "inside.verbs",
        "must",
        "user",
        measures="how many RDMA devices libibverbs of the environment opens (ibv_get_device_list)",
        limit="as many as the host has",
        why="NCCL falls back to TCP without an error, and is 5 to 70 times slower",
        source="PrimeIntellect-ai/prime-rl#1599, pytorch#111424 (2026-11)",
        hint="install libibverbs1 and ibverbs-providers in the image: hpcenv image lint names the line",
    ),
    Check(
        id="cuda.start",
        measures="whether torch starts CUDA or HIP, sees the GPUs and makes a context on each, in a child that ends "
        "before the ranks start",
        limit="as many GPUs as Slurm and CUDA_, HIP_ and ROCR_VISIBLE_DEVICES give, within the time limit",
        why="without a GPU, some scripts train on the CPU to the end, and others fail later with an error of torch",
        severity="must",
        owner="node",
        level="off",
        place="start",
        cost="what CUDA needs to start on all GPUs: some seconds; `hpcenv report` has the time",
        seconds=120.0,
        source="imbue cluster-health; microsoft/superbenchmark (2026-11)",
        hint="`hpcenv diagnose RUN` knows the messages of CUDA; on one node only: " + _EXCLUDE,
        gpus=True,
    ),
    _inside(
        "cuda.matmul",
        "must",
        "node",
        measures="a product of two matrices on every GPU, against the exact result",
        limit="every number right",
        why="a broken GPU computes wrong numbers without an error",
        source="imbue cluster-health; microsoft/superbenchmark (2026-11)",
        hint="the GPU is broken: " + _EXCLUDE,
        seconds=120.0,
        cost="some seconds",
    ),
    _inside(
        "cuda.amp",
        "must",
        "node",
        measures="the same product in mixed precision (autocast), on every GPU",
        limit="every number is right, in bfloat16 or float16",
        why="training in mixed precision uses different units of the GPU",
        source="imbue cluster-health; microsoft/superbenchmark (2026-11)",
        hint="wrong on one node: " + _EXCLUDE + "; wrong on all nodes: torch and driver do not fit (hpcenv compat)",
        seconds=120.0,
        cost="some seconds",
    ),
    _inside(
        "dist.gloo",
        "must",
        "user",
        measures="whether a process group of one rank starts with gloo, and computes a sum",
        limit="the right sum, within the time limit",
        why="the ranks cannot form a group",
        source=_OURS,
        hint="this torch has no gloo, or a library is missing: hpcenv diagnose RUN",
        seconds=120.0,
        cost="the import of torch",
    ),
    _inside(
        "dist.nccl",
        "must",
        "user",
        measures="whether NCCL can be loaded, and computes a sum in a process group of one rank",
        limit="the right sum, within the time limit",
        why="the ranks cannot form a group",
        source=_NCCL,
        hint="the loader finds a different libnccl first, or libnccl does not fit the driver: hpcenv diagnose RUN",
        seconds=120.0,
        cost="the import of torch",
    ),
    # -- smoke test --------------------------------------------------------------------------
    Check(
        id="smoke.init",
        measures="a process group of all ranks, started like the training, and one all_reduce of one element",
        limit="an end within 90 s",
        why="the training would hang at its first collective until a watchdog ends it, and no message names a node",
        severity="must",
        owner="node",
        level="full",
        place="smoke",
        cost="the start of a job without work: 5 to 20 s",
        seconds=90,
        source="stas00/ml-engineering, torch-distributed-gpu-test.py (2026-11)",
        hint="look for a firewall, a cut link or a wrong interface between the addresses that are named: `hpcenv net "
        "explain RUN` says why they were chosen; --exclude NODE submits without a node",
    ),
    Check(
        id="smoke.correct",
        measures="every value of all_reduce, all_gather, reduce_scatter and all_to_all at four sizes up to 4 MiB",
        limit="the known results, within 90 s",
        why="a wrong protocol or a broken GPU changes numbers, and no other check notices it (nccl#596, nccl#2001)",
        severity="must",
        owner="node",
        level="full",
        place="smoke",
        cost="< 1 s",
        seconds=90,
        source="NVIDIA/nccl issues 596 and 2001; sizes: NCCL's protocols LL, LL128, Simple (2.30, 2026-11)",
        hint="for wrong values: --exclude NODE, tell the site's support, and look for NCCL_PROTO or NCCL_ALGO in your "
        "settings; if it does not end: look for a slow or cut link",
    ),
    Check(
        id="smoke.second-group",
        measures="a second process group of all ranks, used at the same time as the first one",
        limit="an end within 90 s, and the known results",
        why="on some fabrics one group works, but two groups hang; sharded training uses several groups",
        severity="must",
        owner="node",
        level="full",
        place="smoke",
        cost="< 1 s",
        seconds=90,
        source="lumi-ai-factory/laifs-container-recipes#44 (2026)",
        hint="new connections between these nodes do not get through although the first ones did: look for a "
        "firewall that closes a range of ports, and with RDMA for a limit of queue pairs or registered memory",
    ),
    Check(
        id="smoke.transport",
        measures="NCCL's own log of each rank; with Gloo the addresses of its connections",
        limit="the network and the interface that were decided, the same on all nodes",
        why="NCCL falls back to TCP without an error, and is 5 to 70 times slower",
        severity="must",
        owner="user",
        level="full",
        place="smoke",
        cost="< 10 ms",
        seconds=10,
        source="ROCm/container-toolkit#88; NVIDIA/nccl src/init.cc (2.30, 2026-11)",
        hint="`hpcenv net explain RUN` says what was decided and what the environment lacks; "
        "--env NCCL_NET=NAME asks for another network on purpose",
    ),
    Check(
        id="smoke.diagnostics",
        measures="NCCL's own diagnostics when the groups start (NCCL_RUN_DIAGNOSTICS, NCCL_RUN_RAS_DIAGNOSTICS)",
        limit="only [OK]; NCCL 2.31 and newer have these diagnostics",
        why="NCCL tests its paths between GPUs, and compares driver, GPUs and settings of all ranks",
        severity="warn",
        owner="node",
        level="full",
        place="smoke",
        cost="< 1 s",
        seconds=90,
        source="NVIDIA/nccl 031c305, troubleshooting/diagnostics.rst and ras.rst (2.31, 2026-11)",
        hint="read the line of NCCL; a pair of GPUs or an adapter that it names is broken: " + _EXCLUDE,
        gpus=True,
    ),
    Check(
        id="smoke.gpudirect",
        measures="channels with GDRDMA in NCCL's log, if driver and adapter of every node support GPUDirect RDMA",
        limit="at least one per node",
        why="without GPUDirect RDMA, all data go through the memory of the host",
        severity="warn",
        owner="node",
        level="full",
        place="smoke",
        cost="< 10 ms",
        seconds=10,
        source="NCCL user guide, Troubleshooting, GPU Direct (2.30, 2026-11)",
        hint="look for NCCL_NET_GDR_LEVEL in your settings, and ask the site for nvidia_peermem or DMA-BUF",
        gpus=True,
    ),
    Check(
        id="smoke.link",
        measures="bus bandwidth of all_reduce against the rate of the adapter",
        limit="NCCL 10 % of the rate, Gloo 0.5 % (of at most 10 Gb/s); and an end within 90 s",
        why="such a slow link is broken, or is not the link that was chosen",
        severity="must",
        owner="node",
        level="full",
        place="smoke",
        cost="< 1 s",
        seconds=90,
        source="the limits are hpcenv's (2026-11-23)",
        hint="look for a slow or cut link between the addresses that are named, or submit with --exclude NODE",
    ),
    Check(
        id="smoke.bandwidth",
        measures="bus bandwidth of all_reduce against the rate of the adapter",
        limit="NCCL 60 % of the rate, Gloo 3 % (of at most 10 Gb/s)",
        why="one slow link makes every step of all ranks slower",
        severity="warn",
        owner="node",
        level="full",
        place="smoke",
        cost="< 1 s",
        seconds=90,
        source="stas00/ml-engineering, eth-cscs/vetnode 5dd9d25 (60 to 80 %); for Gloo hpcenv's (2026-11-23)",
        hint="compare with other jobs of this partition: `hpcenv net diff RUN1 RUN2`",
    ),
)

BY_ID = {check.id: check for check in CHECKS}


def active(manifest: Manifest) -> tuple[Check, ...]:
    """Return the checks that a run executes, in the order of the table."""
    return at_level(manifest.preflight, gpus=manifest.gpus_per_node > 0)


def at_level(options: PreflightOptions, *, gpus: bool, places: Iterable[CheckPlace] | None = None) -> tuple[Check, ...]:
    """Return the checks of a level, without skipped checks.

    Args:
        gpus: whether the run has GPUs.
        places: return only checks that run in one of these places; None for all places.
    """
    depth = LEVELS.index("full" if options.level == "deep" else options.level)
    return tuple(
        check
        for check in CHECKS
        if LEVELS.index(check.level) <= depth
        and check.id not in options.skipped
        and (gpus or not check.gpus)
        and (places is None or check.place in tuple(places))
    )
