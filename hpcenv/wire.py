"""The records that cross machines, and the one place that names the files of a run.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

A run folder is all that couples the machines of a run: the login node writes
`manifest.json`, every compute node writes `facts/NODE.json`, the batch node writes
`verdict.json` and `env/NODE.json`, and anyone can read them with `cat`. Each record
carries a `schema` number. Reading is strict, because a record may come from another
version or be cut short: a wrong type or a missing key names its path in the record.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import stat
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from hpcenv.dataclass import dataclass, field, is_record, shape
from hpcenv.errors import RecordInvalid

SCHEMA = 1

Severity = Literal["must", "warn", "info"]
Result = Literal["match", "mismatch", "unknown"]
SifEvidence = Literal["identity", "node-record", "full"]
Value = str | int | float | bool | tuple[str, ...]

Record = TypeVar("Record")


# -- what the login node tells the compute nodes ------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One environment variable for the ranks, with where it comes from and why it is set."""

    name: str
    value: str
    origin: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Bind:
    """A host folder that the container sees."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the ranks run in: a SIF, or an environment of the host.

    Attributes:
        kind: `sif` or `host`.
        python: the interpreter; in a SIF a name or path inside it, else a path on the host.
        sif: path of the SIF file, empty for `host`.
        apptainer: program to start it with, empty for `host`.
        binds: host folders visible inside, besides the ones hpcenv needs.
        gpus: pass the host's GPU driver into the container (`--nv`).
    """

    kind: Literal["sif", "host"]
    python: str
    sif: str = ""
    apptainer: str = ""
    binds: tuple[Bind, ...] = ()
    gpus: bool = False


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What one field must be on every node.

    `rule` is `equal`, or `at-least` for versions that only have a floor; `note` is told where it differs.
    """

    field: str
    value: Value
    severity: Severity
    rule: Literal["equal", "at-least"] = "equal"
    origin: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class PackageExpectation:
    """One installed distribution as locked; empty digests were unknown at lock time."""

    name: str
    version: str
    record_sha256: str = ""
    content_sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuNeeds:
    """What a CUDA build of torch asks of every node's driver and GPUs.

    Attributes:
        cuda: CUDA release that torch was built for.
        arch_list: architectures that it has kernels for; empty when that is not known.
        require: the image's NVIDIA_REQUIRE_* variables.
        table: the compatibility table (model/compat.toml) as JSON: nodes read no TOML.
        severity: of each check, by field.
        gpu: the GPU that the environment was locked for, as hpcenv.toml names it.
    """

    cuda: str
    arch_list: tuple[str, ...]
    require: dict[str, str]
    table: str
    severity: dict[str, Severity]
    gpu: str = ""


@dataclass(frozen=True, kw_only=True)
class SifIdentity:
    """A SIF as it was when its whole hash was taken.

    Whoever opens a file with these `stat` fields and this header has the same bytes before
    them and need not read them all again (node/sif_check.py says on which file systems).

    Attributes:
        sha256: of the whole file.
        inode, size, mtime_ns, ctime_ns: from fstat; the device number is not here because
            each machine numbers its mounts by itself.
        header_sha256: of header, descriptor table and squashfs superblock.
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
    """What shall be copied to the disk of every node before it is used.

    Attributes:
        folder: where on the nodes; empty for the first place that all of them have.
        limit: the most bytes that copies of all jobs of this user may take there.
        sif_sha256, sif_size: of the SIF; empty and 0 to leave it where it is.
        data: folders besides the SIF.
    """

    folder: str
    limit: int
    sif_sha256: str = ""
    sif_size: int = 0
    data: tuple[DataFolder, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How torchrun is started, beyond the shape of the run.

    Attributes:
        standalone: one node, and a rendezvous that nobody else can reach.
        max_restarts: how often torchrun starts its ranks again after a failure.
        torchrun_args: further words for torchrun, each literal.
    """

    standalone: bool = False
    max_restarts: int = 0
    torchrun_args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    """What happens when the job must end before the training does.

    Attributes:
        signal: name of the signal that ranks get, without `SIG`.
        grace: seconds between that and the end.
        requeue: `saved`: the job is queued again when the script says that it saved itself
            (`hpcenv.training`); `always`: also when it does not; `never`.
        max_requeues: how often at most.
    """

    signal: str = "USR2"
    grace: int = 60
    requeue: Literal["saved", "always", "never"] = "saved"
    max_requeues: int = 20


@dataclass(frozen=True, kw_only=True)
class Secret:
    """A variable whose value is read on the node and written nowhere.

    Attributes:
        name: the variable that the ranks see.
        source: `file:PATH` or `env:NAME` of the job's environment.
        origin: which flag or key asks for it.
    """

    name: str
    source: str
    origin: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """The copy of the code that a run uses.

    Attributes:
        root: the folder it was copied from, a git work tree's top.
        folder: the copy, in the run folder.
        commit: of the work tree.
        dirty: whether files differ from that commit.
        diff_sha256: of the recorded difference; empty without one.
        files: how many were copied.
    """

    root: str
    folder: str
    commit: str
    dirty: bool = False
    diff_sha256: str = ""
    files: int = 0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything the nodes need to check, decide and launch one run.

    Attributes:
        run: the run's name, also the name of its folder.
        run_folder: absolute path, the same on every machine.
        nodes, nproc_per_node, gpus_per_node, cpus_per_task: the shape; GPUs are per node.
        backend: `nccl` or `gloo`, what the locked torch and the GPUs asked for allow.
        script, args, workdir: the program; absolute paths, literal arguments. Without a
            script the nodes are checked and nothing is launched.
        script_sha256: of the script's bytes at submission.
        settings: variables asked for by the user or the project, before detection.
        expectations, packages: the lockfile, flattened.
        probe_level: `record` trusts RECORD files (the SIF's bytes were hashed already),
            `full` hashes every installed file.
        gpu_needs: None when no GPU is asked for, or torch is a CPU build.
        check_seconds: time limit of each probe on a node, in seconds.
        sif: identity of the SIF at submission; None where the nodes hash it themselves.
        stage: None to use SIF and data where they are.
        launch, stop: torchrun's options, and what happens before the job's end.
        pass_env: names of the job's own variables that the ranks see; `*` stands for any end.
        secrets: variables that are read on the nodes.
        spare: nodes allocated beyond `nodes`, to replace those that the gate rejects.
        retry_excluding: how often the job starts again without the nodes that the gate rejected.
        modules: environment modules that the batch script loads.
        source: None where the script runs from its own place.
        element: name -> value of this element of a sweep or array.
        chain: how many jobs follow each other on this run, 0 for one alone.
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
    gpu_needs: GpuNeeds | None = None
    check_seconds: int = 300
    sif: SifIdentity | None = None
    stage: StageRequest | None = None
    launch: LaunchOptions = LaunchOptions()
    stop: StopOptions = StopOptions()
    pass_env: tuple[str, ...] = ()
    secrets: tuple[Secret, ...] = ()
    spare: int = 0
    retry_excluding: int = 0
    modules: tuple[str, ...] = ()
    source: Source | None = None
    element: dict[str, str] = field(default_factory=dict)
    chain: int = 0


# -- what a compute node reports ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface with its IPv4 and IPv6 addresses."""

    name: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Route:
    """How this node reaches an address: from which own address, through which interface."""

    target: str
    source: str
    interface: str


@dataclass(frozen=True, kw_only=True)
class Network:
    """What a node knows of its network.

    Attributes:
        first_node: name of the node that hosts the rendezvous.
        first_node_addresses: what that name resolves to, seen from this node.
        routes: one for each of those addresses that can be reached.
        free_port: a TCP port on which this node could listen when it looked; only the
            first node's counts.
        variables: NCCL_*, GLOO_* and TORCH_* found in the job's environment.
    """

    first_node: str
    first_node_addresses: tuple[str, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    free_port: int | None = None
    variables: tuple[Setting, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A locked package that is not what it was, or one that should not be there.

    `unknown` tells a package that could not be read from one that was found to differ.
    """

    field: str
    locked: str
    found: str
    note: str = ""
    unknown: bool = False


@dataclass(frozen=True, kw_only=True)
class FileIdentity:
    """Identity of an open file at the time it was hashed (`stat` fields)."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, kw_only=True)
class CheckedSif:
    """The SIF that a node checked, so that the launch step can prove that it starts this one.

    Attributes:
        path: which file: the shared one, or the node's own copy of it.
        staged: whether it is the node's own copy.
        checked: how its hash is known: `identity` (the very file that was hashed at
            submission, or while it was copied to this node), `node-record` (hashed by an
            earlier job on this node and not changed since), `full` (read and hashed now).
        why: what spoke against the cheaper ways.
        sha256: of the whole file.
        file: `stat` fields of the open file.
        lasting: a change after the check would show in `file`; where it might not, the
            launch step hashes again.
    """

    path: str
    staged: bool
    checked: SifEvidence
    why: str
    sha256: str
    file: FileIdentity
    lasting: bool


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
        not_staged: why a copy on the node's own disk was asked for and is not used.
        seconds: how long each part took.
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
    not_staged: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)


# -- what the batch node decides ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One comparison that did not end in `match`, or that is worth telling."""

    node: str
    field: str
    locked: str
    found: str
    result: Result
    severity: Severity
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeVerdict:
    """One node's result.

    Attributes:
        compared: how many fields could be compared: reported, not only asked for.
        sif: how the SIF was checked, for people; empty without one.
    """

    node: str
    result: Result
    compared: int
    sif: str = ""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks meet: torchrun's c10d arguments.

    `host` and `port` name the endpoint on the first node, `id` changes with every restart
    so that a stale store is never rejoined.
    """

    host: str
    port: int
    id: str


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """What the launch step needs on one node (`env/NODE.json`)."""

    schema: int
    run: str
    node: str
    attempt: int
    node_rank: int
    local_address: str
    rendezvous: Rendezvous
    settings: tuple[Setting, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The gate's decision on one attempt, over all nodes."""

    schema: int
    run: str
    attempt: int
    result: Result
    nodes: tuple[NodeVerdict, ...]
    findings: tuple[Finding, ...]
    rendezvous: Rendezvous | None
    settings: dict[str, tuple[Setting, ...]]
    launched: tuple[str, ...] = ()
    """The nodes that train, in the order of their node ranks: all, or without those a spare one replaces."""


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How one rank ended.

    Attributes:
        rank, local_rank: global and on its node; -1 where it is not known.
        pid: of the process, on its node.
        status: exit status, 128 + number for a signal; None where it is not known.
        signal: its name, `SIGKILL`, empty without one.
        ended: seconds since the epoch; None where it is not known.
        message: the exception in one line, or what else is known.
        traceback: empty where there is none.
        source: where message and traceback come from: torchelastic's `error-file`, the
            rank's `stderr`, or nowhere.
        log: the rank's standard error, relative to the run folder.
    """

    rank: int
    local_rank: int
    pid: int
    status: int | None
    signal: str = ""
    ended: float | None = None
    message: str = ""
    traceback: str = ""
    source: Literal["error-file", "stderr", ""] = ""
    log: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeExit:
    """How the launch ended on one node, independent of Slurm's accounting.

    Attributes:
        status: exit status of torchrun, 128 + number for a signal.
        asked_to_end: name of the signal that asked this node to end before it ended by
            itself; empty when nobody did. Such a node died of another's failure, or was
            cancelled, and says nothing about the training.
        stopped: why the training was asked to save itself and end; empty when it was not.
            `unknown`: it was asked, and Slurm did not say why.
        saved: the script said that it saved itself (`hpcenv.training`).
        asked_at: when that was, in seconds since the epoch.
        ranks: the ranks that failed here, the first one first.
        oom_kills: processes of this job step that the kernel killed for lack of memory on
            this node; None where that could not be read.
        detail: what else is known, in words.
    """

    schema: int
    run: str
    node: str
    attempt: int
    status: int
    signal: str
    started: float
    ended: float
    asked_to_end: str = ""
    asked_at: float | None = None
    stopped: Literal["", "time-limit", "preemption", "unknown"] = ""
    saved: bool = False
    ranks: tuple[RankExit, ...] = ()
    oom_kills: int | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """The training on one node shall save itself and end (`stop/NODE.json`).

    Attributes:
        signal: what this node got, `SIGUSR2` or `SIGTERM`.
        reason: what Slurm says; `unknown` until it has said something.
        asked: when, in seconds since the epoch.
        ends: when Slurm ends the job; None while that is not known.
    """

    schema: int
    run: str
    node: str
    attempt: int
    signal: str
    reason: Literal["time-limit", "preemption", "cancelled", "unknown"]
    asked: float
    ends: float | None = None


@dataclass(frozen=True, kw_only=True)
class Submission:
    """How a run came to be (`submission.json`): written once, by the login node."""

    schema: int
    run: str
    cluster: Literal["slurm", "local"]
    job_id: str
    submitted: float
    command: tuple[str, ...]
    chain: tuple[str, ...] = ()
    """Job ids of a chain, the first one first."""
    nodes: int = 0
    """How many nodes were asked for; 0 where that was not recorded."""


@dataclass(frozen=True, kw_only=True)
class SweepElement:
    """One element of a sweep or array.

    Attributes:
        index: in Slurm's array.
        folder: its run folder's name in the folder of the sweep.
        values: name -> value; empty for an array.
    """

    index: int
    folder: str
    values: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """What a sweep or array consists of (`sweep.json`): written once, by the login node.

    Attributes:
        names: of the sweep, in the order in which they were given; empty for an array.
        at_once: how many elements may run at a time, 0 for any number.
    """

    schema: int
    run: str
    run_folder: str
    names: tuple[str, ...]
    elements: tuple[SweepElement, ...]
    at_once: int = 0


# -- the files of a run -------------------------------------------------------------------


@dataclass(frozen=True)
class RunFolder:
    """Every path of a run, named once.

    What belongs to one attempt of the job lies under `attempt_folders` and is moved to
    `attempts/N/` when the job starts again, so that the top level always is the newest.
    """

    path: Path

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def script(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def lockfile(self) -> Path:
        return self.path / "lock.toml"

    @property
    def submission(self) -> Path:
        return self.path / "submission.json"

    @property
    def sweep(self) -> Path:
        """Of a folder that holds the run folders of a sweep's elements."""
        return self.path / "sweep.json"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def step(self) -> Path:
        return self.code / "step.py"

    @property
    def inside(self) -> Path:
        """What ranks can import: `hpcenv.training`, and the start of torchrun."""
        return self.path / "inside"

    @property
    def source(self) -> Path:
        """The copy of the code that the run uses."""
        return self.path / "source"

    @property
    def source_diff(self) -> Path:
        """How that differs from the recorded commit."""
        return self.path / "source.diff"

    @property
    def checkpoints(self) -> Path:
        """What the training saves; kept over all attempts."""
        return self.path / "checkpoints"

    @property
    def stopping(self) -> Path:
        """Requests to stop, and the ranks' answers: of one attempt."""
        return self.path / "stop"

    @property
    def submitit(self) -> Path:
        return self.path / "submitit"

    @property
    def log(self) -> Path:
        return self.path / "job.log"

    @property
    def facts(self) -> Path:
        return self.path / "facts"

    @property
    def stage(self) -> Path:
        """What was copied to the nodes: one record per node."""
        return self.path / "stage"

    @property
    def verdict(self) -> Path:
        return self.path / "verdict.json"

    @property
    def env(self) -> Path:
        return self.path / "env"

    @property
    def exits(self) -> Path:
        return self.path / "exits"

    @property
    def ranks(self) -> Path:
        return self.path / "ranks"

    @property
    def homes(self) -> Path:
        return self.path / "home"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def started(self) -> Path:
        """Marker that the batch script began: which attempt, on which batch node."""
        return self.path / "started.json"

    @property
    def finished(self) -> Path:
        """Exit status of the batch script, written as its last act."""
        return self.path / "finished.json"

    def facts_of(self, node: str) -> Path:
        return self.facts / f"{node}.json"

    def staged_of(self, node: str) -> Path:
        return self.stage / f"{node}.json"

    def looked_of(self, node: str) -> Path:
        """What a node found on its disk before anything was copied."""
        return self.stage / "look" / f"{node}.json"

    @property
    def sending(self) -> Path:
        """What the batch node decided to copy, and where to."""
        return self.stage / "plan.json"

    def env_of(self, node: str) -> Path:
        return self.env / f"{node}.json"

    @property
    def launched(self) -> Path:
        """The nodes that train, for srun's --nodelist; written where there are spare ones."""
        return self.env / "launched"

    @property
    def excluded(self) -> Path:
        """The nodes that this job was queued again without; kept over all attempts."""
        return self.path / "excluded.json"

    def stop_of(self, node: str) -> Path:
        return self.stopping / f"{node}.json"

    def saved_on(self, node: str) -> Path:
        """What a rank leaves when it has saved itself after a request to stop (`hpcenv.training`)."""
        return self.stopping / f"saved-{node}"

    def exit_of(self, node: str) -> Path:
        return self.exits / f"{node}.json"

    def home_of(self, node: str) -> Path:
        return self.homes / node

    def of_one_attempt(self) -> tuple[Path, ...]:
        """What an attempt leaves and the next one must not mistake for its own."""
        return (
            *(self.facts, self.stage, self.verdict, self.env, self.exits, self.ranks),
            *(self.stopping, self.started, self.finished),
        )


# -- reading and writing ------------------------------------------------------------------


def dumps(record: object) -> str:
    """Return `record` (a dataclass of this module) as JSON text, keys sorted, one final newline."""
    return json.dumps(_parts(record), default=_parts, indent=1, sort_keys=True) + "\n"


def _parts(record: object) -> dict[str, Any]:
    if not is_record(type(record)):
        raise TypeError(f"{type(record).__name__} is no record")
    return {name: getattr(record, name) for name in shape(type(record)).names}


def loads(kind: type[Record], text: str, *, origin: str) -> Record:
    """Return the record of type `kind` that `text` holds.

    Args:
        origin: where the text comes from, for messages.

    Raises:
        RecordInvalid: not JSON, another schema, a missing key or a wrong type.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordInvalid(f"`{origin}` is not JSON", why=str(error)) from error
    if isinstance(data, dict) and data.get("schema", SCHEMA) != SCHEMA:
        raise RecordInvalid(
            f"`{origin}` has schema {data.get('schema')!r}, this hpcenv reads schema {SCHEMA}",
            hint="use the hpcenv version that made this run folder",
        )
    return typing.cast("Record", _decode(kind, data, path=kind.__name__, origin=origin))


# Documents that a person or a tool wrote: the largest uv.lock that was seen has 5 MiB.
LONGEST = 64 << 20
# A verdict tells every difference of every node.
_LONGEST_RECORD = 512 << 20


def read_file(path: Path, *, most: int = LONGEST) -> bytes:
    """Return what a regular file holds: the door for all that others may have put there.

    A named pipe would wait for a writer for ever, and a device gives bytes until the memory ends.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than `most` bytes; `strerror` says which.
    """
    # O_NONBLOCK: for a pipe, opening alone would wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file, but a pipe or a device", os.fspath(path))
        with open(descriptor, "rb", closefd=False) as file:
            # What grows meanwhile, or does not know its size, is read up to the same bound.
            content = file.read(min(status.st_size, most) + 1)
            if len(content) > status.st_size:
                content += file.read(most + 1 - len(content))
    finally:
        os.close(descriptor)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", os.fspath(path))
    return content


def read(kind: type[Record], path: Path) -> Record:
    """Return the record of type `kind` in the file `path`.

    Raises:
        RecordInvalid: unreadable, or not such a record.
    """
    try:
        text = read_file(path, most=_LONGEST_RECORD).decode("utf-8")
    except OSError as error:
        raise RecordInvalid(f"cannot read `{path}`", why=error.strerror) from error
    except UnicodeDecodeError as error:
        raise RecordInvalid(f"`{path}` is not UTF-8 text", why=str(error)) from error
    return loads(kind, text, origin=str(path))


def write(record: object, path: Path) -> None:
    """Write `record` to `path`: aside, then renamed, so that readers never see half of it.

    Raises:
        OSError: it could not be written; what was there before is still there.
    """
    write_text(dumps(record), path)


def write_text(text: str, path: Path, *, mode: int | None = None) -> None:
    """Write `text` to `path` through a temporary file in the same folder and a rename.

    The temporary name holds the process id: two nodes may write into one folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(aside, mode)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _decode(kind: Any, data: Any, *, path: str, origin: str) -> Any:
    """Turn JSON `data` into `kind`, naming `path` when it does not fit."""
    # Most values by far: text and numbers that are what they should be.
    if type(data) in _plain_kinds(kind):
        return data
    base = typing.get_origin(kind)
    if is_record(kind):
        return _decode_record(kind, data, path=path, origin=origin)
    if base is Literal:
        return _require(isinstance(data, str) and data in typing.get_args(kind), data, kind, path, origin)
    if base in (typing.Union, types.UnionType):
        return _decode_union(kind, data, path=path, origin=origin)
    if base is tuple:
        _require(isinstance(data, list), data, kind, path, origin)
        item = typing.get_args(kind)[0]
        return tuple(_decode(item, value, path=f"{path}[{n}]", origin=origin) for n, value in enumerate(data))
    if base is dict:
        _require(isinstance(data, dict), data, kind, path, origin)
        item = typing.get_args(kind)[1]
        return {k: _decode(item, v, path=f"{path}.{k}", origin=origin) for k, v in data.items()}
    if kind is types.NoneType:
        return _require(data is None, data, kind, path, origin)
    if kind is float:
        _require(isinstance(data, (int, float)) and not isinstance(data, bool), data, kind, path, origin)
        return float(data)
    # JSON tells true from 1; isinstance does not.
    fits = isinstance(data, kind) and (kind is bool or not isinstance(data, bool))
    return _require(fits, data, kind, path, origin)


_PLAIN = (str, int, float, bool, types.NoneType)


@functools.cache
def _plain_kinds(kind: Any) -> frozenset[type]:
    """Return the JSON types that are `kind` as they come."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = typing.get_args(kind) if is_union else (kind,)
    return frozenset(plain for plain in _PLAIN if plain in kinds)


def _decode_record(kind: type[Any], data: Any, *, path: str, origin: str) -> Any:
    _require(isinstance(data, dict), data, kind, path, origin)
    hints = _hints(kind)
    values = {}
    known = shape(kind)
    for name in known.names:
        if name in data:
            values[name] = _decode(hints[name], data[name], path=f"{path}.{name}", origin=origin)
        elif name not in known.defaults and name not in known.factories:
            raise RecordInvalid(f"`{origin}` lacks `{path}.{name}`")
    return kind(**values)


def _decode_union(kind: Any, data: Any, *, path: str, origin: str) -> Any:
    kinds = [one for one in typing.get_args(kind) if one is not types.NoneType]
    if len(kinds) == 1 and data is not None:
        # `X | None`: what is wrong inside X is more telling than "neither".
        return _decode(kinds[0], data, path=path, origin=origin)
    for one in kinds:
        if isinstance(data, list) and typing.get_origin(one) is not tuple:
            continue  # a reason that nobody reads costs more than the value
        try:
            return _decode(one, data, path=path, origin=origin)
        except RecordInvalid:
            continue
    return _require(False, data, kind, path, origin)


def _require(fits: bool, data: Any, kind: Any, path: str, origin: str) -> Any:
    if not fits:
        shown = repr(data)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        raise RecordInvalid(f"`{origin}`: `{path}` is {shown}, expected {_in_words(kind)}")
    return data


_SHOWN = 80
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "null"}


def _in_words(kind: Any) -> str:
    """Return what a kind looks like in JSON."""
    base = typing.get_origin(kind)
    if base is Literal:
        return " or ".join(f"`{word}`" for word in typing.get_args(kind))
    if base in (typing.Union, types.UnionType):
        return " or ".join(_in_words(one) for one in typing.get_args(kind))
    if base is tuple:
        return "a list"
    return _WORDS.get(kind, "an object")


_HINTS: dict[type[Any], Mapping[str, Any]] = {}


def _hints(kind: type[Any]) -> Mapping[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]
