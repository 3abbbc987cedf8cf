"""The manifest: what the login node tells the compute nodes about a run.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcenv.records.session import SessionOptions

Severity = Literal["must", "warn", "info"]
DeterminismProfile = Literal["off", "seeded", "bitwise"]
DETERMINISM_PROFILES: tuple[DeterminismProfile, ...] = ("off", "seeded", "bitwise")
Launcher = Literal["torchrun", "srun", "none", "ray"]
CpuBinding = Literal["near-gpu", "off"]
CPU_BINDINGS: tuple[CpuBinding, ...] = ("near-gpu", "off")
LAUNCHERS: tuple[Launcher, ...] = ("torchrun", "srun", "none", "ray")
# With these launchers the program starts the ranks itself. hpcenv does not know their number and their environment.
WITHOUT_RANKS: tuple[Launcher, ...] = ("none", "ray")
Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One environment variable for the ranks, with its origin and the reason why it is set.

    Attributes:
        expands: whether each node replaces `${jobid}`, `${node-local}` and `${value}` in the value
            (container/site_values.py).
    """

    name: str
    value: str
    origin: str
    reason: str = ""
    expands: bool = False


@dataclass(frozen=True, kw_only=True)
class Bind:
    """A host folder that the container sees.

    Attributes:
        source: path on the host. In a bind of a site profile the source may be a pattern: each node binds the paths
            that match the pattern (container/site_values.py).
        optional: whether a node without the source starts the container without this bind.
        origin: the site profile or module that adds the bind; empty for a bind of the project or of the user.
    """

    source: str
    target: str
    read_only: bool = False
    optional: bool = False
    origin: str = ""


# `layer` (over the whole image) is only in lockfiles and run records from before 2026-11-25.
OverlayUse = Literal["layer", "venv", "packages"]


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """The squashfs that is mounted over an image, always read-only (docs/decisions/0035).

    Attributes:
        source: absolute path on the host.
        use: `venv`: the squashfs contains a virtual environment, and its Python starts the ranks. `packages`: the
            squashfs contains packages that Python finds through PYTHONPATH.
        target: the folder in the container where the squashfs is mounted.
        python_path: the value of PYTHONPATH for `packages`: the target, then the image's own PYTHONPATH.
    """

    source: str
    use: OverlayUse
    target: str = ""
    python_path: str = ""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the ranks run in: a SIF, or an environment of the host.

    Attributes:
        kind: `sif` or `host`.
        python: the Python interpreter: for `sif` a name or path inside the SIF, for `host` a path on the host.
        sif: path of the SIF file, empty for `host`.
        apptainer: path of the program that starts the container, empty for `host`.
        binds: host folders that are visible in the container, in addition to the folders that hpcenv needs.
        gpus: whether the container gets NVIDIA's driver of the host (`--nv`).
        rocm: whether the container gets ROCm's libraries of the host (`--rocm`).
        wrapper: a command of the site that starts every program in the container, in the check and for the ranks.
        wrapper_origin: which file requests the wrapper, and why.
        overlay: the squashfs that is mounted over the SIF; None without an overlay.
        revision: revision of the lockfile. The revision says what the digests cover (incontainer/probe/rules.py). A
            manifest without this key has revision 1.
    """

    kind: Literal["sif", "host"]
    python: str
    sif: str = ""
    apptainer: str = ""
    binds: tuple[Bind, ...] = ()
    gpus: bool = False
    wrapper: tuple[str, ...] = ()
    wrapper_origin: str = ""
    rocm: bool = False
    overlay: Overlay | None = None
    revision: int = 1


@dataclass(frozen=True, kw_only=True)
class FieldSeverity:
    """The severity of one field in this run, or of a family of fields.

    Attributes:
        field: dotted name of the field. `*` stands for one part of the name. The name `**` stands for all fields.
        severity: the severity in the table of fields, or the severity in the project's [policy].
        same_on_nodes: whether the nodes of a job are compared with each other in this field.
        between_nodes: the severity of a difference between nodes; None if this severity is equal to `severity`.
    """

    field: str
    severity: Severity
    same_on_nodes: bool = False
    between_nodes: Severity | None = None


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What one field must be on every node.

    `rule` is `equal`, or `at-least` for versions that only have a floor (minimum). `note` is printed with a difference.
    `if_unknown` is the severity if a node could not read the field; None if this severity is equal to `severity`.
    """

    field: str
    value: Value
    severity: Severity
    rule: Literal["equal", "at-least"] = "equal"
    origin: str = ""
    note: str = ""
    if_unknown: Severity | None = None


@dataclass(frozen=True, kw_only=True)
class PackageExpectation:
    """One installed distribution, as the lockfile describes it. A digest is empty if the lockfile does not have it.

    `programs_sha256` is the word `none` for a distribution without programs.
    """

    name: str
    version: str
    record_sha256: str = ""
    content_sha256: str = ""
    programs_sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuNeeds:
    """What a CUDA build of torch, or JAX's plug-in for CUDA, needs from every node's driver and GPUs.

    Attributes:
        cuda: CUDA release that torch was built for; "" if only JAX uses GPUs.
        arch_list: architectures for which torch has kernels; empty if they are not known.
        require: the image's NVIDIA_REQUIRE_* variables, which limit drivers and GPUs.
        table: the compatibility table (judge/compat/table.toml) as JSON, because nodes read no TOML.
        gpu: the GPU that the environment was locked for, as hpcenv.toml names it.
        gpu_memory_gb: the least memory that each GPU must have, in 10^9 bytes; 0 for no minimum.
        built: package and version -> architectures, for the packages whose GPU code was compiled in the image.
        jax_cuda: CUDA release for which JAX's plug-in was built; "" without a plug-in.
    """

    cuda: str
    arch_list: tuple[str, ...]
    require: dict[str, str]
    table: str
    gpu: str = ""
    gpu_memory_gb: int = 0
    built: dict[str, tuple[str, ...]] = field(default_factory=dict)
    jax_cuda: str = ""


@dataclass(frozen=True, kw_only=True)
class SifIdentity:
    """The identity of a SIF, or of a squashfs, at the time when the whole file was hashed.

    A file with these `stat` fields and this header has the same bytes, so a node does not read the whole file
    again (identity/sif_check.py says on which file systems).

    Attributes:
        sha256: sha256 of the whole file.
        inode, size, mtime_ns, ctime_ns: from fstat. The device number is left out, because each machine has its own
            numbers for its mounts.
        header_sha256: sha256 over the SIF's header, descriptor table and squashfs superblock. For a squashfs without a
            SIF, the hash is over the superblock.
        partition_offset, partition_size: place and size of the partition that runs, in bytes.
    """

    sha256: str
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    header_sha256: str
    partition_offset: int
    partition_size: int


@dataclass(frozen=True, kw_only=True)
class DataFolder:
    """A folder of data, packed into one tar file, of which each node gets a copy.

    Attributes:
        source: absolute path of the folder. The ranks see the copy under the same path.
        listing_sha256: sha256 over the names, sizes and times of the files when the folder was packed.
        tar: path of the tar file on the shared file system; empty in a dry run.
        sha256, size: sha256 of the tar file, and its size in bytes.
        unpacked: how many bytes the unpacked files need.
    """

    source: str
    listing_sha256: str
    tar: str = ""
    sha256: str = ""
    size: int = 0
    unpacked: int = 0


@dataclass(frozen=True, kw_only=True)
class StageRequest:
    """What is copied to the disk of every node before it is used.

    Attributes:
        folder: folder on each node for the copies; empty for the first usable folder that all nodes have.
        limit: the maximum size of the copies of all jobs of this user in this folder, in bytes.
        sif_sha256, sif_size: sha256 and size of the SIF to copy; empty and 0 if the SIF is not copied.
        data: folders of data to copy, in addition to the SIF.
    """

    folder: str
    limit: int
    sif_sha256: str = ""
    sif_size: int = 0
    data: tuple[DataFolder, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How the ranks are started. The numbers of nodes and ranks are in the manifest itself.

    Attributes:
        launcher: what starts the ranks. `torchrun`: torchrun on each node. `srun`: srun starts one Slurm task for each
            rank. `none`: the program is started once on each node. `ray`: Ray is started on all nodes, and the program
            on the first node. `tasks`: plain processes without a rendezvous (incontainer/tasks.py).
        torchrun_args: further arguments for torchrun, which hpcenv does not change.
        cpu_binding: `near-gpu`: each rank runs on the CPUs near its GPU. `off`: hpcenv binds no rank to CPUs.
        expand: whether each node replaces words such as `{master_addr}` in the program's arguments.
    """

    launcher: Launcher | Literal["tasks"] = "torchrun"
    torchrun_args: tuple[str, ...] = ()
    expand: bool = False
    cpu_binding: CpuBinding = "off"


# `deep` is only in runs from before 2026-11-25. It meant the checks of `full`, and a burn-in of the GPUs.
PreflightLevel = Literal["off", "quick", "full", "deep"]


@dataclass(frozen=True, kw_only=True)
class PreflightOptions:
    """Which checks of the nodes run before the training (judge/checks/check_table.py).

    Attributes:
        level: `quick` runs checks on the host, before the verdict. `full` also runs checks in the container, and
            the smoke test. `off` runs none.
        skipped: ids of checks that do not run.
        allow_cpu_torch: whether the check `cuda.start` is left out, because torch does not use the job's GPUs.
    """

    level: PreflightLevel = "off"
    skipped: tuple[str, ...] = ()
    allow_cpu_torch: bool = False


@dataclass(frozen=True, kw_only=True)
class SmokeOptions:
    """The smoke test over all nodes, after the verdict.

    Attributes:
        seconds: time limit of each phase of the test.
    """

    seconds: float = 90.0


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    """What happens when the job must end before the training does.

    Attributes:
        signal: name of the signal that the ranks get, without `SIG`.
        grace: seconds between this signal and the end of the job.
        requeue: when the job is queued again. `saved`: if the script reports that it saved its state
            (`hpcenv.training`). `always`: also without such a report. `never`: not at all.
        max_requeues: how often the job is queued again at most.
    """

    signal: str = "USR2"
    grace: int = 60
    requeue: Literal["saved", "always", "never"] = "saved"
    max_requeues: int = 20


@dataclass(frozen=True, kw_only=True)
class Secret:
    """A variable whose value each node reads itself. No file of the run folder contains the value.

    Attributes:
        name: the variable that the ranks see.
        source: `file:PATH`, or `env:NAME` for a variable in the environment of the submission or of the job.
        origin: the option or key that requests the secret.
        kept: whether the file `Manifest.secret_values` contains the value until the run has ended.
    """

    name: str
    source: str
    origin: str
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class Source:
    """The copy of the code that a run uses and works in.

    Attributes:
        root: the folder that was copied: the top folder of a git work tree, or the project's folder.
        folder: path of the copy in the run folder.
        commit: commit of the work tree; empty without git.
        dirty: whether tracked files differ from that commit.
        diff_sha256: sha256 of the recorded difference to the commit; empty without a difference.
        files: the number of copied files.
        digest: digest over all copied files (`records.code_listing`); empty in an old manifest without digests.
        roots: the folders to which symbolic links in the copy may lead.
        shared: the run folder with a copy for several runs, from which each run makes its own copy when the run begins.
            `shared` is empty if the copy is for this run only.
        live: names of a few links in the copy. The targets of these links were not copied, and no node compares them.
    """

    root: str
    folder: str
    commit: str
    dirty: bool = False
    diff_sha256: str = ""
    files: int = 0
    digest: str = ""
    roots: tuple[str, ...] = ()
    shared: str = ""
    live: tuple[str, ...] = ()


DataCompare = Literal["sha256", "size-and-time", "list"]


@dataclass(frozen=True, kw_only=True)
class RecordedData:
    """The state of data that the run reads, at submission: one `[[data]]` of hpcenv.toml.

    Attributes:
        name: NAME in the field `data.NAME`.
        path: absolute path of the data.
        compare: what is compared: `sha256` (the content), `size-and-time`, or `list` (names and sizes).
        state: the state that the nodes must find, as the text of `identity.data.DataState`.
        hub: `[datasets/]ORG/NAME@COMMIT` for a repository of a hub; empty for other data.
    """

    name: str
    path: str
    compare: DataCompare
    state: str
    hub: str = ""


@dataclass(frozen=True, kw_only=True)
class DeterminismOptions:
    """How strictly the run must repeat.

    Attributes:
        seed: base seed. `incontainer/start_hook/seeds.py` computes the seed of each rank from the base seed.
        seeds: whether the ranks are seeded with the profile `off`, because the user requested a seed but no profile.
        variables: environment variables that profile and seed require. The manifest's `settings` contain these
            variables, too. If the user or the project gives another value, `settings` contain the value of the user or
            the project.
    """

    profile: DeterminismProfile = "off"
    seed: int = 0
    seeds: bool = False
    variables: dict[str, str] = field(default_factory=dict)


OnStall = Literal["report", "stop", "requeue"]
ON_STALL: tuple[OnStall, ...] = ("report", "stop", "requeue")


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """What is watched while the ranks run ([watch] in hpcenv.toml). Times are in seconds.

    Attributes:
        sample: time between two samples of a node; 0 for none.
        stall_after: a rank is examined if it makes no optimizer step for this time. 0 means 10 times the median time of
            the rank's steps, but at least 5 minutes.
        on_stall: what happens after a hang was found.
        idle_end: the run ends if it uses no GPU and no CPU for this time; 0 for never.
        prometheus: folder for a text file that node_exporter's textfile collector reads; empty if no such file is
            written.
    """

    sample: float = 0.0
    stall_after: float = 0.0
    on_stall: OnStall = "report"
    idle_end: float = 0.0
    prometheus: str = ""


@dataclass(frozen=True, kw_only=True)
class RecordingOptions:
    """What the ranks record about the training.

    Attributes:
        metrics: whether losses, metrics and hashes are recorded (`records/metrics.py`).
        hash_parameters_every: N, if the parameters are hashed after each N-th optimizer step; 0 for never.
        stop_after_steps: the training ends with status 0 after this optimizer step; 0 for never.
        trace_first, trace_last: first and last optimizer step whose operations are recorded (`records/trace.py`); 0 for
            no trace.
    """

    metrics: bool = False
    hash_parameters_every: int = 0
    stop_after_steps: int = 0
    trace_first: int = 0
    trace_last: int = 0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything the nodes need to check, decide and launch one run.

    Attributes:
        run: the run's name, also the name of its folder.
        run_folder: absolute path of the run folder, the same on every machine.
        nodes, nproc_per_node, gpus_per_node, cpus_per_task: numbers of nodes, of ranks and GPUs on each node, and of
            CPUs for each task. 0 CPUs mean Slurm's default.
        mem: memory of each node in the form of sbatch's --mem; empty for Slurm's default.
        cpus_origin, mem_origin: where CPUs and memory come from, or why the job does not request them.
        backend: `nccl` or `gloo`, as the locked torch and the requested GPUs allow.
        script, args, workdir: the program, its arguments and its working directory. Paths are absolute, and arguments
            are literal. If script, module, entry and session are all missing, the nodes are only checked.
        module: the Python module that torchrun starts instead of a script. `script` is then the file of the module, or
            empty if the file is not known.
        entry: the console script of the environment that is started instead of a script. `script` is then empty.
        script_sha256: sha256 of the script at submission; empty if the script's file is not known.
        settings: variables set by the user or the project, before detection.
        expectations, packages: the content of the lockfile as flat lists.
        probe_level: `record` trusts RECORD files, because the bytes of the SIF were hashed already. `full` hashes every
            installed file.
        severities: the severities of all fields that the gate can name. The first entry that fits a name counts.
            An older manifest has no severities, and the gate refuses to judge it.
        gpu_needs: None if no GPU is requested, or if torch is a CPU build.
        check_seconds: time limit of each probe on a node, in seconds.
        sif: identity of the SIF at submission; None if the nodes hash the SIF themselves.
        overlay_file: identity of the squashfs that is mounted over the image; None without an overlay, or if the nodes
            hash the squashfs themselves.
        stage: what is copied to the nodes' disks; None if SIF and data are used from the shared file system.
        launch, stop: how the ranks are started, and what happens before the job's end.
        preflight: which checks of the nodes run; an older manifest requests no checks.
        smoke: None if no smoke test is requested.
        pass_env: names of variables of the job's environment that the ranks see. `*` at the end of a name stands for
            any text.
        secrets: variables whose values the nodes read.
        secret_values: the user's file with the values of the secrets from `env:`; see `records/secret_file.py`.
        spare: the number of additional nodes in the allocation. They replace nodes that the gate rejects.
        retry_excluding: how often the job starts again without the nodes that the gate rejected.
        modules: environment modules that the batch script loads.
        module_paths: folders that `module use` adds before the modules are loaded.
        unset: variables that the batch script removes after it has loaded the modules.
        setup: lines of shell that the batch script runs once, before the check.
        rendezvous_host: pattern of the host name by which nodes reach each other, with `{node}` for Slurm's name of the
            node; empty if Slurm's name itself is used.
        imported: one sentence for each setting or bind that the node made from the modules. The login node does not
            write this key.
        source: the copy of the code; None if the script runs in the project folder (`--workdir live`).
        data: the data that the nodes compare before the training.
        submitted_in: the folder in which the user submitted the run.
        element: name -> value of this element of a sweep or array.
        unlocked_binds: targets of binds that are not in the lockfile: the site profile or a later edit added them.
        hides: one phrase for each file of the project that hides a locked package or a standard library module.
        lockfile_edited: the fingerprint of the lockfile's content if the lockfile states another fingerprint; empty if
            these fingerprints are equal.
        start_hook_sha256: sha256 over the files that Python runs at the start of every rank; empty without such files.
        chain: how many jobs of a chain continue this run one after the other; 0 without a chain.
        fingerprint: fingerprint of the lockfile's content; empty in an older manifest.
        resume_from: the checkpoint that the first attempt continues from, or a folder of checkpoints; empty for none.
        session: the options of a session; None if this run is not a session.
    """

    schema: int
    run: str
    run_folder: str
    cluster: Literal["slurm", "local"]
    nodes: int
    nproc_per_node: int
    gpus_per_node: int
    cpus_per_task: int
    backend: Literal["nccl", "gloo"]
    environment: Environment
    script: str
    script_sha256: str
    args: tuple[str, ...]
    workdir: str
    settings: tuple[Setting, ...]
    expectations: tuple[Expectation, ...]
    packages: tuple[PackageExpectation, ...]
    probe_level: Literal["record", "full", "deep"]
    lockfile: str
    lockfile_sha256: str
    hpcenv_version: str
    severities: tuple[FieldSeverity, ...] = ()
    gpu_needs: GpuNeeds | None = None
    check_seconds: int = 300
    sif: SifIdentity | None = None
    overlay_file: SifIdentity | None = None
    stage: StageRequest | None = None
    launch: LaunchOptions = LaunchOptions()
    stop: StopOptions = StopOptions()
    preflight: PreflightOptions = PreflightOptions()
    smoke: SmokeOptions | None = None
    pass_env: tuple[str, ...] = ()
    secrets: tuple[Secret, ...] = ()
    secret_values: str = ""
    spare: int = 0
    retry_excluding: int = 0
    modules: tuple[str, ...] = ()
    module_paths: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    rendezvous_host: str = ""
    imported: tuple[str, ...] = ()
    source: Source | None = None
    data: tuple[RecordedData, ...] = ()
    submitted_in: str = ""
    element: dict[str, str] = field(default_factory=dict)
    chain: int = 0
    unlocked_binds: tuple[str, ...] = ()
    hides: tuple[str, ...] = ()
    lockfile_edited: str = ""
    module: str = ""
    entry: str = ""
    determinism: DeterminismOptions = DeterminismOptions()
    recording: RecordingOptions = RecordingOptions()
    watch: WatchOptions | None = None
    start_hook_sha256: str = ""
    fingerprint: str = ""
    resume_from: str = ""
    cpus_origin: str = ""
    mem: str = ""
    mem_origin: str = ""
    session: SessionOptions | None = None

    @property
    def launches(self) -> bool:
        """Whether the run launches a program or a session. If it launches nothing, the nodes are only checked."""
        return bool(self.script or self.module or self.entry or self.session)

    @property
    def program(self) -> tuple[str, ...]:
        """What is started, without arguments: a script, a module or a console script; for a session, its name."""
        if self.session is not None:
            return ("session", self.session.name)
        if self.entry:
            return (self.entry,)
        return ("-m", self.module) if self.module else (self.script,)
