"""A site profile: what one cluster needs and has.

Runs on: LOGIN NODE. Pure. The file is data only: nothing in it is executed. Values for a shell,
for sbatch or for Apptainer are quoted in the same way as values from the command line.
"""

import datetime as dt
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from hpcenv.project import document
from hpcenv.project.document import Document
from hpcenv.project.option_values import Count, CountOrNone, OptionValue, SbatchTable, SrunTable, Text, Word
from hpcenv.project.site_option_types import SiteSubmitTable
from hpcenv.project.table_schema import After
from hpcenv.records.manifest import Bind, Setting

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


AbsolutePath = Annotated[Text, After(_absolute)]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MatchTable(Document):
    """[match]: which cluster the profile is for.

    Attributes:
        cluster: ClusterName of slurm.conf; Slurm ignores its case.
    """

    cluster: Word


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SiteBindTable(Document):
    """[[bind]] of a site: a folder or file of the nodes that containers see."""

    source: AbsolutePath
    target: AbsolutePath | None = None
    read_only: bool = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VariableTable(Document):
    """[env.NAME] of a site: one variable for the ranks.

    Attributes:
        reason: why it is set; the run shows it.
        source: where the reason comes from: a page, a ticket, a measurement.
        date: date of the source.
        min_nodes: smallest number of nodes for which it is set: NCCL_NET=IB is an error on one node.
    """

    value: Annotated[str, After(_without_nul)]
    reason: Text
    source: Text | None = None
    date: dt.date | None = None
    min_nodes: Count = 1


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PartitionTable(Document):
    """[[slurm.partition]]: what `doctor` reports about a partition. Times as Slurm writes them."""

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


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
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


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SiteFile(Document):
    """The content of a site profile's file.

    Attributes:
        modules: environment modules that the batch script loads, in this order.
        apptainer: program that starts containers, by absolute path, or by the name that
            PATH has after the modules are loaded.
        accounting: whether sacct answers here.
    """

    name: Annotated[str, After(_name)]
    modules: tuple[Annotated[str, After(_module)], ...] = ()
    apptainer: Annotated[Text, After(_program)] | None = None
    accounting: bool | None = None
    match: MatchTable | None = None
    submit: SiteSubmitTable = field(default_factory=SiteSubmitTable)
    sbatch: SbatchTable = field(default_factory=dict)
    srun: SrunTable = field(default_factory=dict)
    bind: tuple[SiteBindTable, ...] = ()
    env: Annotated[dict[str, VariableTable], After(_variables)] = field(default_factory=dict)
    slurm: SlurmTable = field(default_factory=SlurmTable)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A site profile, as far as a run needs it.

    Attributes:
        name: of the site.
        path: the file it comes from.
        defaults: values for the options of `hpcenv submit`, by their names in the table of options.
        modules: environment modules that the batch script loads.
        binds: host folders that containers see.
        settings: variables for the ranks: the network profile.
        apptainer: program that starts containers; empty to look on PATH.
        accounting: whether sacct answers here; None if unknown.
        min_nodes: variable -> how many nodes a run must have for it.
        slurm: what `doctor` found.
    """

    name: str
    path: str
    defaults: Mapping[str, OptionValue] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    binds: tuple[Bind, ...] = ()
    settings: tuple[Setting, ...] = ()
    apptainer: str = ""
    accounting: bool | None = None
    min_nodes: Mapping[str, int] = field(default_factory=dict)
    slurm: SlurmTable | None = None

    def default_of(self, name: str) -> OptionValue:
        """Return the site's value for an option of `hpcenv submit`."""
        return self.defaults.get(name)

    def for_nodes(self, nodes: int) -> "Profile":
        """Return the profile for a run of so many nodes."""
        kept = tuple(setting for setting in self.settings if self.min_nodes.get(setting.name, 1) <= nodes)
        return replace(self, settings=kept)


def profile(site: SiteFile, path: str) -> Profile:
    """Return a profile from the content of its file; messages name `path` as the origin of its values."""
    passed_on = {"sbatch": site.sbatch, "srun": site.srun}
    given = {name: value for name, value in document.plain(site.submit, by_key=False).items() if value != []}
    defaults = given | {name: table for name, table in passed_on.items() if table}
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
