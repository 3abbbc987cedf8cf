"""The run record: all known facts of a run, in one value and one file (`record.json`).

Runs on: LOGIN NODE. `read_record` reads only the run folder, so it works without Slurm, and with run folders of other
people. A value that cannot be read is None or missing, and `notes` has the reason. Values of credentials are left out
(`records/variables.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcenv.errors import HpcenvError, RecordInvalid
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.workspace import read_lockfile
from hpcenv.records.codec import SCHEMA
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest, RecordedData, Value
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.submission import Submission
from hpcenv.records.variables import WITHHELD, looks_like_credential, recorded_command, recorded_value
from hpcenv.reproduction.attempt_record import AttemptRecord, Timings, read_attempts, timings_of
from hpcenv.reproduction.measured import Measured, read_measured
from hpcenv.reproduction.series import Series, exact
from hpcenv.runs.attempts import read_verdict
from hpcenv.version import VERSION


@dataclass(frozen=True, kw_only=True)
class LockRecord:
    """The lockfile of the run.

    Attributes:
        fingerprint: the fingerprint in the file.
        image: the image as it was requested: a reference, a path, or `host`.
        manifest_digest, tree_sha256, sif_sha256: digests of the image; None if the lockfile has no such digest.
        determinism: the determinism profile.
    """

    fingerprint: str
    image: str
    manifest_digest: str | None = None
    tree_sha256: str | None = None
    sif_sha256: str | None = None
    determinism: str = ""


@dataclass(frozen=True, kw_only=True)
class PackageRecord:
    """One installed distribution, as the lockfile describes it."""

    name: str
    version: str
    record_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class CodeRecord:
    """The state of the code.

    Attributes:
        commit: the git commit; empty without git.
        dirty: whether tracked files differed from the commit; None if the value is unknown.
        diff_sha256: sha256 of this difference (`source.diff`); empty without a difference.
        digest: the digest over all copied files; empty without a copy.
        script_sha256: the script's sha256; empty if the script's file is not known.
    """

    commit: str = ""
    dirty: bool | None = None
    diff_sha256: str = ""
    digest: str = ""
    script_sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class ShapeRecord:
    """The numbers of nodes, ranks, GPUs and CPUs."""

    nodes: int
    nproc_per_node: int
    gpus_per_node: int
    cpus_per_task: int
    backend: str
    world_size: int


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """The facts of one node and of its environment.

    Attributes:
        values: field -> value.
        unknown: field -> why it could not be read.
    """

    node: str
    values: dict[str, Value]
    unknown: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EnergyRecord:
    """The energy that the jobs used.

    Attributes:
        joules: the energy in joules; None if the value is unknown.
        source: the source of the number, or why the energy is unknown.
    """

    joules: float | None
    source: str


@dataclass(frozen=True, kw_only=True)
class MetricRecord:
    """One metric: the number of values, the last value, and a digest over all values.

    Attributes:
        last: the last value in exact form (`float.hex`), or `nan`, `inf`, `-inf`.
        digest: sha256 over steps and values, see `hpcenv.reproduction.series.Series`.
    """

    name: str
    source: str
    file: str
    dtype: str
    count: int
    first_step: int
    last_step: int
    last: str
    digest: str
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All known facts of a run.

    Attributes:
        command: the command as the user typed it, without values of credentials.
        program: the program that Python started: `-m MODULE`, or the script's path in the project.
        args: the program's arguments.
        outcome: `completed`, or how the run ended.
        environment: variable -> value in the ranks on the first node. Without a verdict, the values of the manifest.
        secrets: names of variables whose values were read on the nodes.
        determinism: rank -> setting -> the value that the running rank read back; empty if nothing was read.
        notes: what could not be read.
    """

    schema: int
    run: str
    hpcenv_version: str
    recorded_with: str
    submitted: float
    command: tuple[str, ...]
    program: tuple[str, ...]
    args: tuple[str, ...]
    outcome: str
    shape: ShapeRecord
    lock: LockRecord | None
    packages: tuple[PackageRecord, ...]
    code: CodeRecord
    data: tuple[RecordedData, ...]
    environment: dict[str, str]
    secrets: tuple[str, ...]
    nodes: tuple[NodeRecord, ...]
    determinism: dict[str, dict[str, Value | None]]
    attempts: tuple[AttemptRecord, ...]
    timings: Timings
    gpu_hours: float | None
    energy: EnergyRecord
    metrics: tuple[MetricRecord, ...]
    parameters: tuple[MetricRecord, ...] = ()
    notes: tuple[str, ...] = ()


def read_record(folder: Path) -> RunRecord:
    """Return the record of a run, from the files in its folder.

    Args:
        folder: the run folder; it may be a copy.

    Raises:
        RecordInvalid: the manifest or the submission cannot be read.
    """
    return record_of(RunFolder(folder), read_measured(RunFolder(folder)))


def record_of(run: RunFolder, measured: Measured) -> RunRecord:
    """Return the record of a run, like `read_record`, but with metrics that the caller has already read."""
    manifest = load_record(Manifest, run.manifest)
    submission = load_record(Submission, run.submission)
    locked, lock_notes = _locked(run)
    attempts = read_attempts(run)
    nodes, node_notes = _nodes(run)
    verdict, problem = read_verdict(run)
    notes = (*measured.problems, *lock_notes, *node_notes, *filter(None, (problem,)))
    first = next(iter(verdict.settings), "") if verdict is not None else ""
    known = (*verdict.inherited.get(first, ()), *verdict.settings[first]) if verdict and first else manifest.settings
    return RunRecord(
        schema=SCHEMA,
        run=manifest.run,
        hpcenv_version=manifest.hpcenv_version,
        recorded_with=VERSION,
        submitted=submission.submitted,
        command=recorded_command(submission.command),
        program=_program(manifest),
        args=manifest.args,
        outcome=attempts[-1].outcome if attempts else "never started",
        shape=_shape(manifest),
        lock=None if locked is None else _lock_record(locked),
        packages=() if locked is None else _packages(locked),
        code=_code(manifest),
        data=manifest.data,
        environment={one.name: recorded_value(one.name, one.value) for one in known},
        secrets=tuple(secret.name for secret in manifest.secrets),
        nodes=nodes,
        determinism=measured.effective,
        attempts=attempts,
        timings=timings_of(submission, attempts),
        gpu_hours=_gpu_hours(manifest, attempts),
        energy=EnergyRecord(joules=None, source="not asked: only Slurm's accounting knows it"),
        metrics=tuple(metric_record(series) for series in measured.series),
        parameters=tuple(_parameter_record(rank, hashes) for rank, hashes in measured.parameters.items() if hashes),
        notes=tuple(dict.fromkeys(notes)),
    )


def with_energy(record: RunRecord, joules: float | None, source: str) -> RunRecord:
    """Return the record with the energy from Slurm's accounting added."""
    return replace(record, energy=EnergyRecord(joules=joules, source=source))


# -- parts --------------------------------------------------------------------------------


def _locked(run: RunFolder) -> tuple[Lockfile | None, tuple[str, ...]]:
    try:
        return read_lockfile(run.lockfile), ()
    except HpcenvError as error:
        return None, (f"the lockfile of the run cannot be read: {error.what}",)


def _lock_record(locked: Lockfile) -> LockRecord:
    container = locked.container
    return LockRecord(
        fingerprint=locked.fingerprint,
        image=locked.asked.image,
        manifest_digest=None if container is None else container.manifest_digest,
        tree_sha256=None if container is None else container.tree_sha256,
        sif_sha256=None if container is None else container.sif.sha256,
        determinism=locked.determinism.profile,
    )


def _packages(locked: Lockfile) -> tuple[PackageRecord, ...]:
    return tuple(
        PackageRecord(name=dist.name, version=dist.version, record_sha256=dist.record_sha256)
        for dist in locked.packages.dist
    )


def _program(manifest: Manifest) -> tuple[str, ...]:
    """Return the program that Python started.

    A script is given by its path in the project, which is equal on every machine.
    """
    if manifest.module or manifest.entry:
        return manifest.program
    path = Path(manifest.script)
    folder = None if manifest.source is None else Path(manifest.source.folder)
    return (str(path.relative_to(folder)) if folder and path.is_relative_to(folder) else path.name,)


def _shape(manifest: Manifest) -> ShapeRecord:
    return ShapeRecord(
        nodes=manifest.nodes,
        nproc_per_node=manifest.nproc_per_node,
        gpus_per_node=manifest.gpus_per_node,
        cpus_per_task=manifest.cpus_per_task,
        backend=manifest.backend,
        world_size=manifest.nodes * manifest.nproc_per_node,
    )


def _code(manifest: Manifest) -> CodeRecord:
    source = manifest.source
    if source is None:
        return CodeRecord(script_sha256=manifest.script_sha256)
    return CodeRecord(
        commit=source.commit,
        dirty=source.dirty if source.commit else None,
        diff_sha256=source.diff_sha256,
        digest=source.digest,
        script_sha256=manifest.script_sha256,
    )


def _nodes(run: RunFolder) -> tuple[tuple[NodeRecord, ...], list[str]]:
    found, notes = [], []
    for path in sorted(run.facts.glob("*.json")):
        try:
            facts = load_record(Facts, path)
        except RecordInvalid as error:
            notes.append(error.what)
            continue
        values = {name: _without_credential(name, value) for name, value in facts.values.items()}
        found.append(NodeRecord(node=facts.node, values=values, unknown=facts.unknown))
    if not found:
        notes.append("no node has written its facts")
    return tuple(found), notes


def _without_credential(name: str, value: Value) -> Value:
    if not name.startswith("env."):
        return value
    variable = name.removeprefix("env.")
    if looks_like_credential(variable):
        return WITHHELD
    return recorded_value(variable, value) if isinstance(value, str) else value


def _gpu_hours(manifest: Manifest, attempts: tuple[AttemptRecord, ...]) -> float | None:
    """Return the GPU hours of all attempts, each from its start to its end; None if an end is unknown."""
    if manifest.gpus_per_node == 0:
        return 0.0
    spans = [(len(one.nodes), one.ended - one.began) for one in attempts if one.ended is not None]
    if len(spans) != len(attempts) or not attempts:
        return None
    return sum(nodes * seconds for nodes, seconds in spans) * manifest.gpus_per_node / 3600


def metric_record(series: Series) -> MetricRecord:
    """Return the summary of a series."""
    return MetricRecord(
        name=series.name,
        source=series.source,
        file=series.file,
        dtype=series.dtype,
        count=len(series.steps),
        first_step=series.steps[0],
        last_step=series.steps[-1],
        last=exact(series.values[-1]),
        digest=series.digest,
        rank=series.rank,
    )


def _parameter_record(rank: int, hashes: dict[int, str]) -> MetricRecord:
    steps = sorted(hashes)
    return MetricRecord(
        name="parameters",
        source="ranks",
        file="",
        dtype="sha256",
        count=len(steps),
        first_step=steps[0],
        last_step=steps[-1],
        last=hashes[steps[-1]],
        digest="",
        rank=rank,
    )
