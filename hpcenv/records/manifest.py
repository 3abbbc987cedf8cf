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
# The program starts the ranks itself: hpcenv knows neither their number nor their environment.
WITHOUT_RANKS: tuple[Launcher, ...] = ("none", "ray")
Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One environment variable for the ranks, with where it comes from and why it is set.

    Attributes:
        expands: each node replaces `${jobid}`, `${node-local}` and `${value}` in the value (container/manifest.py).
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
        source: in a bind of a site profile also a pattern; each node finds what fits it (container/manifest.py).
        optional: a node that does not have the source goes without it.
        origin: the site profile or module that brings it; empty for a bind of the project or of the user.
    """

    source: str
    target: str
    read_only: bool = False
    optional: bool = False
    origin: str = ""


# `layer` (over the whole image) is only in what was locked or recorded before 2026-11-25.
OverlayUse = Literal["layer", "venv", "packages"]


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """The squashfs that is mounted over an image, always read-only (docs/decisions/0035).

    Attributes:
        source: absolute path on the host.
        use: a `venv`, whose Python starts the ranks; `packages` for PYTHONPATH.
        target: where it is in the container.
        python_path: PYTHONPATH for `packages`: the target, and what the image itself has there.
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
        python: the interpreter; in a SIF a name or path inside it, else a path on the host.
        sif: path of the SIF file, empty for `host`.
        apptainer: program to start it with, empty for `host`.
        binds: host folders visible inside, in addition to those that hpcenv needs.
        gpus: pass NVIDIA's driver of the host into the container (`--nv`).
        rocm: pass ROCm's libraries of the host into the container (`--rocm`).
        wrapper: command of the site that starts every program in the container, for the check as for the ranks.
        wrapper_origin: the place that requests it, and why.
        overlay: what is mounted over the SIF; None without one.
        revision: revision of the lockfile. It says what the digests cover (incontainer/probe/rules.py). Older
            manifests have none.
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
        field: dotted name; `*` stands for one part of it, `**` alone for any name.
        severity: from the table of fields, changed by the project's [policy].
        same_on_nodes: the nodes of a job are compared with each other in this field.
        between_nodes: the severity of that comparison, if it is another one.
    """

    field: str
    severity: Severity
    same_on_nodes: bool = False
    between_nodes: Severity | None = None


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What one field must be on every node.

    `rule` is `equal`, or `at-least` for versions that only have a floor; `note` is printed with a difference.
    `if_unknown` is the severity where the field could not be read, if that is another one.
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
    """One installed distribution as locked; empty digests were unknown at lock time.

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
        arch_list: architectures that it has kernels for; empty when that is not known.
        require: the image's NVIDIA_REQUIRE_* variables.
        table: the compatibility table (judge/compat/table.toml) as JSON: nodes read no TOML.
        gpu: the GPU that the environment was locked for, as hpcenv.toml names it.
        gpu_memory_gb: the least memory of each GPU, in 10^9 bytes; 0 for any.
        built: package and version -> architectures, for the packages that were compiled in the image for GPUs.
        jax_cuda: CUDA release that JAX's plug-in is for; "" without one.
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

    A file with these `stat` fields and this header has the same bytes, so a node does not read all
    of it again (identity/sif_check.py says on which file systems).

    Attributes:
        sha256: of the whole file.
        inode, size, mtime_ns, ctime_ns: from fstat; the device number is not here because
            each machine numbers its mounts by itself.
        header_sha256: of header, descriptor table and squashfs superblock; of a squashfs only the last one.
        partition_offset, partition_size: of the partition that runs, in bytes.
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
    """A folder of data that the nodes get a copy of, packed into one file.

    Attributes:
        source: its absolute path; the copy is seen under the same one.
        listing_sha256: of names, sizes and times, as they were when it was packed.
        tar: path of the packed folder on the shared file system; empty in a dry run.
        sha256, size: of that file; size in bytes.
        unpacked: bytes that the files need.
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
        folder: where on the nodes; empty for the first place that all of them have.
        limit: the most bytes that copies of all jobs of this user may take there.
        sif_sha256, sif_size: of the SIF; empty and 0 to leave it where it is.
        data: folders in addition to the SIF.
    """

    folder: str
    limit: int
    sif_sha256: str = ""
    sif_size: int = 0
    data: tuple[DataFolder, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How the ranks are started, beyond the shape of the run.

    Attributes:
        launcher: `torchrun`; `srun`, which starts one Slurm task for each rank; `none`, which starts the program once
            on each node; `ray`, which starts Ray on all nodes and the program on the first; or `tasks`, which starts
            plain processes without a rendezvous (incontainer/tasks.py).
        torchrun_args: more arguments for torchrun, each literal.
        cpu_binding: `near-gpu`: each rank runs on the CPUs near its GPU; `off`.
        expand: words such as `{master_addr}` in the program's arguments are replaced on each node.
    """

    launcher: Launcher | Literal["tasks"] = "torchrun"
    torchrun_args: tuple[str, ...] = ()
    expand: bool = False
    cpu_binding: CpuBinding = "off"


# `deep` is only in runs that were recorded before 2026-11-25; it had the checks of `full`, and a burn-in of the GPUs.
PreflightLevel = Literal["off", "quick", "full", "deep"]


@dataclass(frozen=True, kw_only=True)
class PreflightOptions:
    """Which checks of the nodes run before the training (judge/checks/check_table.py).

    Attributes:
        level: `quick` runs checks on the host, before the verdict. `full` also runs checks in the container, and
            the smoke test. `off` runs none.
        skipped: ids of checks that do not run.
        allow_cpu_torch: the GPUs are for something else than torch, so `cuda.start` does not run.
    """

    level: PreflightLevel = "off"
    skipped: tuple[str, ...] = ()
    allow_cpu_torch: bool = False


@dataclass(frozen=True, kw_only=True)
class SmokeOptions:
    """The smoke test over all nodes, after the verdict.

    Attributes:
        seconds: limit of each of its phases.
    """

    seconds: float = 90.0


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    """What happens when the job must end before the training does.

    Attributes:
        signal: name of the signal that ranks get, without `SIG`.
        grace: seconds between that and the end.
        requeue: `saved`: the job is queued again when the script says that it saved itself
            (`hpcenv.training`); `always`: also when it does not; `never`.
        max_requeues: how often the job is queued again at most.
    """

    signal: str = "USR2"
    grace: int = 60
    requeue: Literal["saved", "always", "never"] = "saved"
    max_requeues: int = 20


@dataclass(frozen=True, kw_only=True)
class Secret:
    """A variable whose value is read on the node, and written into no file of the run.

    Attributes:
        name: the variable that the ranks see.
        source: `file:PATH`, or `env:NAME` of the submission's environment or the job's.
        origin: the flag or key that requests it.
        kept: its value is in the file `Manifest.secret_values` until the run has ended.
    """

    name: str
    source: str
    origin: str
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class Source:
    """The copy of the code that a run uses and works in.

    Attributes:
        root: the folder it was copied from: a git work tree's top, or the project's folder.
        folder: the copy, in the run folder.
        commit: of the work tree; empty without git.
        dirty: whether tracked files differ from that commit.
        diff_sha256: of the recorded difference; empty without one.
        files: how many were copied.
        digest: over all copied files, see `records.code_listing`; empty in a manifest from before it existed.
        roots: the folders that links of the copy may lead to.
        shared: the run folder that holds the copy for several runs; each makes its own when it begins.
        live: a few names of what the copy only links to, and no node compares.
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
    """Data that the run reads, as they were at submission: one `[[data]]` of hpcenv.toml.

    Attributes:
        name: for the field `data.NAME`.
        path: absolute.
        compare: what is compared: content, sizes and times, or names and sizes.
        state: what the nodes must find, see `node.check.data.DataState`.
        hub: `[datasets/]ORG/NAME@COMMIT` for a repository of a hub; else empty.
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
        seed: base seed; `incontainer/start_hook/seeds.py` has the rule for each rank.
        seeds: the ranks are seeded although the profile is `off`, because a seed was requested and no profile.
        variables: environment variables that profile and seed ask for. `settings` has them too, unless the user or the
            project gives another value.
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
        stall_after: a rank is examined if it makes no optimizer step for this time; 0 for 10 times its median step, and
            at least 5 minutes.
        on_stall: what happens after a hang was found.
        idle_end: the run ends after this time without use of any GPU and CPU; 0 for never.
        prometheus: folder for a text file of node_exporter's textfile collector; empty for none.
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
        metrics: losses, metrics and hashes (`records/metrics.py`).
        hash_parameters_every: the parameters are hashed after each N-th optimizer step; 0 for never.
        stop_after_steps: the training ends with status 0 after this optimizer step; 0 for never.
        trace_first, trace_last: optimizer steps whose operations are recorded (`records/trace.py`); 0 for none.
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
        run_folder: absolute path, the same on every machine.
        nodes, nproc_per_node, gpus_per_node, cpus_per_task: the shape; GPUs are per node. 0 CPUs are Slurm's default.
        mem: memory of each node as sbatch's --mem; empty for Slurm's default.
        cpus_origin, mem_origin: where these figures come from, or why they are not requested.
        backend: `nccl` or `gloo`, as the locked torch and the requested GPUs allow.
        script, args, workdir: the program; absolute paths, literal arguments. Without script
            and module the nodes are checked and nothing is launched.
        module: the Python module that torchrun starts instead of a script; `script` is its file then, or empty
            where that is not known.
        entry: the console script of the environment that is started instead of a script; `script` is empty then.
        script_sha256: of the script's bytes at submission; empty where its file is not known.
        settings: variables set by the user or the project, before detection.
        expectations, packages: the lockfile, flattened.
        probe_level: `record` trusts RECORD files (the SIF's bytes were hashed already),
            `full` hashes every installed file.
        severities: of all fields that the gate can name; the first one that fits a name counts.
            Empty in a manifest from before they existed: the gate then refuses to judge.
        gpu_needs: None when no GPU is requested, or torch is a CPU build.
        check_seconds: time limit of each probe on a node, in seconds.
        sif: identity of the SIF at submission; None where the nodes hash it themselves.
        overlay_file: the same for a squashfs that is mounted over the image.
        stage: None to use SIF and data where they are.
        launch, stop: torchrun's options, and what happens before the job's end.
        preflight: which checks of the nodes run; none in a manifest from before they existed.
        smoke: None if no smoke test is requested.
        pass_env: names of the job's own variables that the ranks see; `*` stands for any end.
        secrets: variables that are read on the nodes.
        secret_values: file of the user with the values of those from `env:`; see `records/secret_file.py`.
        spare: nodes allocated beyond `nodes`, to replace those that the gate rejects.
        retry_excluding: how often the job starts again without the nodes that the gate rejected.
        modules: environment modules that the batch script loads.
        module_paths: folders that `module use` adds before.
        unset: variables that the batch script removes after it has loaded the modules.
        setup: lines of shell that the batch script runs once, before the check.
        rendezvous_host: pattern of the name by which nodes reach each other, `{node}` in it; empty for Slurm's name.
        imported: one sentence for each thing that the node made from the modules; not in the file.
        source: None where the script runs from its own place (`--workdir live`).
        data: what is compared before training.
        submitted_in: the folder where the user was.
        element: name -> value of this element of a sweep or array.
        unlocked_binds: targets of binds that the lockfile does not have, from the site profile or added since.
        hides: one phrase for each file of the project that hides a locked package or a standard library module.
        lockfile_edited: the fingerprint that the lockfile's content has, where it says another one; else empty.
        start_hook_sha256: over the files that Python runs at the start of every rank; empty if it runs none.
        chain: how many jobs follow each other on this run, 0 for one alone.
        fingerprint: of the lockfile's content; empty in a manifest from before it existed.
        resume_from: the checkpoint that the first attempt continues from, or a folder of checkpoints; empty for none.
        session: what makes it a session; None for any other run.
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
        """Whether something is launched; otherwise the nodes are only checked."""
        return bool(self.script or self.module or self.entry or self.session)

    @property
    def program(self) -> tuple[str, ...]:
        """What is started, without its arguments: a script, a module, or a console script; of a session, its name."""
        if self.session is not None:
            return ("session", self.session.name)
        if self.entry:
            return (self.entry,)
        return ("-m", self.module) if self.module else (self.script,)
