"""The file of a site profile: requirements and properties of one cluster.

Runs on: LOGIN NODE. Pure. The file is data only: nothing in it is executed. Values for a shell,
for sbatch or for the container runtime are quoted in the same way as values from the command line.
site_profile.py computes what the file means for a run.
"""

import datetime as dt
import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator
from typing_extensions import Self

from hpcenv.project import native_options
from hpcenv.project.document import Document
from hpcenv.project.option_values import Count, SbatchTable, SrunTable, Text, Word
from hpcenv.project.site_option_types import SiteSubmitTable
from hpcenv.project.site_when import WhenTable

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# Names of modules, as in Lmod and Environment Modules, for example `PrgEnv-gnu/8.5.0` or `cuda@12.8`.
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


# `${...}` is a variable of the user's environment, or `user`. The folder of images cannot depend on a job's values.
_PLACE = re.compile(r"(?:/|\$\{[A-Z][A-Z0-9_]*\}(?:/|\Z))(?:[^$]|\$\{(?:user|[A-Z][A-Z0-9_]*)\})*\Z")


def _store_folder(value: str) -> str:
    if not value.isprintable() or not _PLACE.match(value):
        raise ValueError("must be an absolute path; it may contain ${user} and variables such as ${SCRATCH}")
    return value


def _host_pattern(value: str) -> str:
    if value.count("{node}") != 1 or not re.fullmatch(r"[A-Za-z0-9._-]*", value.replace("{node}", "")):
        raise ValueError("must be a host name with {node} in it, for example {node}i")
    return value


def _wrapper(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value or value[0].startswith("-") or any(not word.isprintable() for word in value):
        raise ValueError("must be a program and its arguments")
    return value


def _by_digest(value: str) -> str:
    if not re.search(r"@sha256:[0-9a-f]{64}\Z", value):
        raise ValueError("must name a digest: IMAGE@sha256:...")
    return value


AbsolutePath = Annotated[Text, AfterValidator(_absolute)]


class MatchTable(Document):
    """[match]: which cluster the profile is for.

    Attributes:
        cluster: ClusterName of slurm.conf; Slurm ignores its case.
    """

    cluster: Word


class SourceTable(Document):
    """[source.ID]: where values come from.

    Attributes:
        page: title and path or address.
        version: commit or version of the source.
        date: the date of that version.
        checked: when a person last compared the values with the source.
    """

    page: Text
    version: Text | None = None
    date: dt.date | None = None
    checked: dt.date | None = None


class SourcedTable(Document):
    """The information that each value of a profile can have.

    Attributes:
        reason: why the value is set. hpcenv shows the reason in the run. Only a bind may have no reason.
        source: the source of the reason: the ID of a [source.ID], or a page, a ticket, a measurement.
        version: commit or version of the source, if [source.ID] does not have it. `date` and `checked` are used in the
            same way.
        date: the date of the source.
        checked: when a person last compared the value with the source.
        evidence: what showed that the value works: job id, versions, figures.
        expires: after this day the value must be checked again.
        when: the runs that the value is for. Without `when`, the value is for every run.
    """

    reason: Text | None = None
    source: Text | None = None
    version: Text | None = None
    date: dt.date | None = None
    checked: dt.date | None = None
    evidence: Text | None = None
    expires: dt.date | None = None
    when: WhenTable | None = None

    @property
    def cited(self) -> str | None:
        """The ID of a [source.ID], or a page."""
        return self.source


class SiteBindTable(SourcedTable):
    """[[bind]] of a site: a folder or file of the nodes that containers see.

    Attributes:
        source: path on the nodes; with `*`, `?` or `[` a pattern. `${user}` and `${jobid}` are replaced.
        target: path in the container. If the path ends in `/`, it is a folder for all files that fit the pattern.
        read_only: whether programs in the container can only read it.
        optional: whether containers start without this bind on a node that does not have the source.
        cites: the same as `source` in other tables: the ID of a [source.ID], or a page.
    """

    source: AbsolutePath
    target: AbsolutePath | None = None
    read_only: bool = False
    optional: bool = False
    cites: Text | None = None

    @property
    def cited(self) -> str | None:
        """The ID of a [source.ID], or a page."""
        return self.cites


class VariableTable(SourcedTable):
    """[env.NAME] of a site, or one of several [[env.NAME]]: how a variable is set or changed for the ranks.

    If there are several tables for one variable, hpcenv applies the tables with a fulfilled `when`, in their order.

    Attributes:
        value: the new value. `${node-local}`, `${jobid}` and `${user}` in the value are replaced.
        prepend, append: texts that extend the old value. The old value comes from earlier tables, else from modules,
            else from the image.
        separator: the text between the old value and the new part.
        unset: whether hpcenv removes the variable, so that the ranks do not get it from modules or from the job.
        min_nodes: smallest number of nodes for which the variable is set. For example, NCCL_NET=IB fails on one node.
    """

    value: Annotated[str, AfterValidator(_without_nul)] | None = None
    prepend: Annotated[str, AfterValidator(_without_nul)] | None = None
    append: Annotated[str, AfterValidator(_without_nul)] | None = None
    separator: str = ":"
    unset: bool = False
    min_nodes: Count = 1


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, dict) else value


Variables = Annotated[
    tuple[VariableTable, ...],
    BeforeValidator(_as_tuple, json_schema_input_type=tuple[VariableTable, ...] | VariableTable),
]


class ModuleTable(SourcedTable):
    """[[module]]: an environment module that the batch script loads, after those in `modules`.

    Attributes:
        name: the name of the module, for example `PrgEnv-gnu/8.5.0`.
        use: folder of modules that `module use` adds before the module is loaded.
    """

    name: Annotated[str, AfterValidator(_module)]
    use: AbsolutePath | None = None


# Options of sbatch that hpcenv has in its own table. [[option]] can set them, too, with a reason and a condition.
OWN_OPTIONS = ("constraint", "exclude", "qos", "reservation")


class OptionTable(SourcedTable):
    """[[option]]: an option of sbatch, or of the srun that starts the training.

    Attributes:
        program: sbatch or srun.
        name, value: the option's name without dashes, and its value; `true` for an option without a value.
    """

    program: Literal["sbatch", "srun"]
    name: Text
    value: str | int | bool = True


def _check_option(option: OptionTable) -> None:
    """Refuse an option that hpcenv cannot pass on.

    Raises:
        ValueError: the option cannot be passed on. The message gives the reason.
    """
    if option.value is False:
        raise ValueError("leave it out in place of `false`")
    if option.program == "sbatch" and option.name in OWN_OPTIONS:
        if not isinstance(option.value, str) or not re.fullmatch(r"[^\s\"'\\]+", option.value):
            raise ValueError("must be one word")
        return
    native_options.check(option.program, option.name, None if option.value is True else str(option.value))


class RuntimeTable(SourcedTable):
    """[runtime]: the program that starts containers on this system. `none` means that hpcenv cannot start containers.

    Attributes:
        kind: `singularity` means SingularityCE or SingularityPRO 4, or a link with the name `singularity` to Apptainer.
        program: absolute path of the program, or its name on PATH after the modules are loaded. Default: `kind`.
    """

    kind: Literal["apptainer", "singularity", "none"]
    program: Annotated[Text, AfterValidator(_program)] | None = None


class StoreTable(SourcedTable):
    """[store]: the folder of images on this system. It is used if the user and the project name no folder.

    Attributes:
        folder: the folder. In this path, `${user}` is replaced by the user's name, and `${NAME}` by the variable NAME
            of the user's environment.
    """

    folder: Annotated[Text, AfterValidator(_store_folder)]


class RendezvousTable(SourcedTable):
    """[rendezvous]: the host name under which other nodes reach a node.

    Attributes:
        host: the name, with `{node}` for the node's name in Slurm.
    """

    host: Annotated[Text, AfterValidator(_host_pattern)]


class EntryWrapperTable(SourcedTable):
    """[entry-wrapper]: the command that starts every program in a container, for the check and for the ranks.

    Attributes:
        command: program and arguments in the container; the program to start follows them.
    """

    command: Annotated[tuple[Text, ...], AfterValidator(_wrapper)]


class BaseImageTable(SourcedTable):
    """[[base-image]]: an image that the site recommends.

    Attributes:
        image: the image, named by its digest: IMAGE@sha256:...
    """

    image: Annotated[Text, AfterValidator(_by_digest)]


class PartitionTable(Document):
    """[[slurm.partition]]: a partition, as `doctor` found it.

    Attributes:
        name: the name of the partition.
        default: whether jobs that name no partition get this partition.
    """

    name: Word
    default: bool = False


class SlurmTable(Document):
    """[slurm]: the part of the cluster's configuration that hpcenv uses. `hpcenv doctor` shows the rest."""

    partition: tuple[PartitionTable, ...] = ()


class SiteWatchTable(Document):
    """[watch]: the information about jobs that the site collects.

    Attributes:
        prometheus: a folder of node_exporter's textfile collector, in which jobs may write.
    """

    prometheus: AbsolutePath | None = None


class SiteFile(Document):
    """The content of a site profile's file.

    Attributes:
        name: the name of the profile, for `--site`.
        sbatch, srun: options that are passed on to sbatch and srun.
        notes: what a user of the system should know first, for example missing features.
        modules: environment modules that the batch script loads, in this order.
        module_use: folders of modules that `module use` adds before the modules are loaded.
    """

    name: Annotated[str, AfterValidator(_name)]
    notes: tuple[Text, ...] = ()
    runtime: RuntimeTable | None = None
    store: StoreTable | None = None
    modules: tuple[Annotated[str, AfterValidator(_module)], ...] = ()
    module_use: tuple[AbsolutePath, ...] = ()
    match: MatchTable | None = None
    submit: SiteSubmitTable = SiteSubmitTable()
    sbatch: SbatchTable = {}
    srun: SrunTable = {}
    source: dict[str, SourceTable] = {}
    module: tuple[ModuleTable, ...] = ()
    option: tuple[OptionTable, ...] = ()
    rendezvous: RendezvousTable | None = None
    entry_wrapper: EntryWrapperTable | None = None
    bind: tuple[SiteBindTable, ...] = ()
    env: Annotated[dict[str, Variables], AfterValidator(_variables)] = {}
    base_image: tuple[BaseImageTable, ...] = ()
    slurm: SlurmTable = SlurmTable()
    watch: SiteWatchTable = SiteWatchTable()

    @model_validator(mode="after")
    def check(self) -> Self:
        """Check rules that involve several keys; return the table itself.

        Raises:
            ValueError: the profile does not follow a rule. The message names this rule.
        """
        for name, tables in self.env.items():
            for table in tables:
                given = [table.value, table.prepend, table.append, table.unset or None]
                if sum(one is not None for one in given) != 1:
                    raise ValueError(f"`env.{name}` needs one of `value`, `prepend`, `append` and `unset = true`")
        for what, value in self.sourced():
            if value.reason is None and not isinstance(value, SiteBindTable):
                raise ValueError(f"`{what}` has no `reason`")
        if self.store is not None and self.store.when is not None:
            raise ValueError("`store` has a `when`: images are kept in one place for all runs")
        for option in self.option:
            try:
                _check_option(option)
            except ValueError as error:
                raise ValueError(f"`option` {option.name}: {error}") from error
        return self

    def sourced(self) -> Iterator[tuple[str, SourcedTable]]:
        """Yield every value that has a source, with its key."""
        if self.runtime is not None:
            yield "runtime", self.runtime
        if self.store is not None:
            yield "store", self.store
        if self.rendezvous is not None:
            yield "rendezvous", self.rendezvous
        if self.entry_wrapper is not None:
            yield "entry-wrapper", self.entry_wrapper
        yield from ((f"module {one.name}", one) for one in self.module)
        yield from ((f"{one.program} --{one.name}", one) for one in self.option)
        yield from ((f"bind {one.source}", one) for one in self.bind)
        yield from ((f"base-image {one.image}", one) for one in self.base_image)
        for name, tables in self.env.items():
            yield from ((f"env.{name}", table) for table in tables)

    def source_of(self, table: SourcedTable) -> SourceTable | None:
        """Return the source of a value, with the information that the value itself has; None without a source."""
        if table.cited is None:
            return None
        named = self.source.get(table.cited, SourceTable(page=table.cited))
        return SourceTable(
            page=named.page,
            version=table.version or named.version,
            date=table.date or named.date,
            checked=table.checked or named.checked,
        )
