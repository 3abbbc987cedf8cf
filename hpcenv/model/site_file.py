"""The file of a site profile: what one cluster wants, and has.

Runs on: LOGIN NODE. Pure. The file is data only: nothing of it is run, and whatever of it
reaches a shell, sbatch or Apptainer goes through the same quoting as the user's own words.
"""

import datetime as dt
import re
from typing import Annotated, Literal

from hpcenv.dataclass import dataclass, field
from hpcenv.model import document
from hpcenv.model.document import Check, Document
from hpcenv.model.project import Count, CountOrNone, Text, Time, Word
from hpcenv.model.site import Profile
from hpcenv.wire import Bind, Setting

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# As Lmod and Environment Modules name them, for example `PrgEnv-gnu/8.5.0` or `cuda@12.8`.
_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+/:@=-]*\Z")


def _name(value: str) -> str:
    if not NAME.match(value):
        raise ValueError("use letters, digits, '.', '_' and '-', at most 64, a letter or digit first")
    return value


def _module(value: str) -> str:
    if not _MODULE.match(value):
        raise ValueError("is not the name of a module")
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/") or not value.isprintable():
        raise ValueError("must be an absolute path")
    return value


def _program(value: str) -> str:
    if not value.isprintable() or value.startswith("-") or ("/" in value and not value.startswith("/")):
        raise ValueError("must be a program's name or an absolute path")
    return value


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not hold a NUL byte")
    return value


def _variables(value: dict[str, object]) -> dict[str, object]:
    for name in value:
        if not _VARIABLE.match(name):
            raise ValueError(f"{name!r} is not a variable name")
    return value


AbsolutePath = Annotated[Text, Check(_absolute)]


@dataclass(frozen=True, kw_only=True)
class MatchTable(Document):
    """[match]: which cluster the profile is for.

    Attributes:
        cluster: ClusterName of slurm.conf, which Slurm does not distinguish by case.
    """

    cluster: Word


@dataclass(frozen=True, kw_only=True)
class SiteSubmitTable(Document):
    """[submit] of a site: defaults for `hpcenv submit`; hpcenv.toml and every flag win over them.

    Attributes:
        cpus_per_gpu: CPUs per node for each GPU asked for, where `cpus` is not given.
        gpu_request: the form in which this cluster wants GPUs asked for.
        gpu_type: the type in the GRES name, where the cluster insists on one.
    """

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    reservation: Word | None = None
    exclude: Word | None = None
    time: Time | None = None
    mem: Word | None = None
    cpus: Count | None = None
    cpus_per_gpu: Count | None = None
    spare: CountOrNone | None = None
    gpu_request: Literal["gpus-per-node", "gres"] | None = None
    gpu_type: Word | None = None


@dataclass(frozen=True, kw_only=True)
class SiteBindTable(Document):
    """[[bind]] of a site: a folder or file of the nodes that containers see."""

    source: AbsolutePath
    target: AbsolutePath | None = None
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class VariableTable(Document):
    """[env.NAME] of a site: one variable for the ranks.

    Attributes:
        reason: why it is set; shown with the run.
        source: who says so: a page, a ticket, a measurement.
        date: when that was read or measured.
        min_nodes: set for runs of at least so many nodes: NCCL_NET=IB is an error on one.
    """

    value: Annotated[str, Check(_without_nul)]
    reason: Text
    source: Text | None = None
    date: dt.date | None = None
    min_nodes: Count = 1


@dataclass(frozen=True, kw_only=True)
class PartitionTable(Document):
    """[[slurm.partition]]: what `doctor` saw of a partition. Times as Slurm writes them."""

    name: Word
    default: bool = False
    state: Word | None = None
    nodes: CountOrNone | None = None
    cpus: Text | None = None
    memory: Text | None = None
    gpus: Text | None = None
    max_time: Word | None = None
    default_time: Word | None = None
    max_nodes: Word | None = None
    preempt_mode: Text | None = None
    grace_time: CountOrNone | None = None


@dataclass(frozen=True, kw_only=True)
class SlurmTable(Document):
    """[slurm]: what `doctor` found; a key that is not there is unknown.

    Attributes:
        kill_on_bad_exit: whether the site's default ends a step with its first bad task.
        send_user_signal: whether a preempted job gets its `--signal` before it must end.
        cred_expire: seconds; a requeued job waits as long before it can start again.
        kill_wait: seconds between TERM and KILL at the time limit.
        grace_time: the same of preempted jobs, see `partition`.
        preempt_mode: of the cluster.
    """

    version: Word | None = None
    select: Word | None = None
    proctrack: Word | None = None
    task: Text | None = None
    kill_on_bad_exit: bool | None = None
    send_user_signal: bool | None = None
    signal_children: bool | None = None
    cred_expire: CountOrNone | None = None
    kill_wait: CountOrNone | None = None
    job_requeue: bool | None = None
    max_array_size: CountOrNone | None = None
    preempt_type: Word | None = None
    preempt_mode: Text | None = None
    enforce_part_limits: Word | None = None
    gres: tuple[Word, ...] = ()
    partition: tuple[PartitionTable, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SiteFile(Document):
    """A site profile as it stands in its file.

    Attributes:
        modules: environment modules that the batch script loads, in this order.
        apptainer: program that starts containers, by absolute path, or by the name that
            PATH has after the modules are loaded.
        accounting: whether sacct answers here.
    """

    name: Annotated[str, Check(_name)]
    modules: tuple[Annotated[str, Check(_module)], ...] = ()
    apptainer: Annotated[Text, Check(_program)] | None = None
    accounting: bool | None = None
    match: MatchTable | None = None
    submit: SiteSubmitTable = field(default_factory=SiteSubmitTable)
    bind: tuple[SiteBindTable, ...] = ()
    env: Annotated[dict[str, VariableTable], Check(_variables)] = field(default_factory=dict)
    slurm: SlurmTable = field(default_factory=SlurmTable)


def profile(site: SiteFile, path: str) -> Profile:
    """Return a profile from its file's content; `path` is told as the origin of its values."""
    defaults = document.plain(site.submit, by_key=False)
    return Profile(
        name=site.name,
        path=path,
        defaults=defaults,
        modules=site.modules,
        binds=tuple(
            Bind(source=bind.source, target=bind.target or bind.source, read_only=bind.read_only) for bind in site.bind
        ),
        settings=tuple(
            Setting(name=name, value=table.value, origin=f"site profile {site.name}", reason=_reason(table))
            for name, table in sorted(site.env.items())
        ),
        apptainer=site.apptainer or "",
        accounting=site.accounting,
        min_nodes={name: table.min_nodes for name, table in site.env.items()},
        slurm=site.slurm,
    )


def _reason(table: VariableTable) -> str:
    known = ", ".join(str(part) for part in (table.source, table.date) if part is not None)
    return f"{table.reason} ({known})" if known else table.reason
