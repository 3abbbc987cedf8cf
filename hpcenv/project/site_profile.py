"""The effect of a site profile on a run: the values with a fulfilled condition, with their reasons and sources.

Runs on: LOGIN NODE. Pure.
"""

import datetime as dt
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeGuard, TypeVar

from hpcenv.project import document
from hpcenv.project.option_values import OptionValue
from hpcenv.project.site import (
    OptionTable,
    SiteBindTable,
    SiteFile,
    SourcedTable,
    SourceTable,
    VariableTable,
)
from hpcenv.project.site_when import RunFacts, in_words, judge
from hpcenv.records.manifest import Bind, Setting
from hpcenv.records.variables import OLD_VALUE, is_left_alone

# The programs for containers that hpcenv can use.
USABLE_RUNTIMES = ("apptainer", "singularity")


@dataclass(frozen=True, kw_only=True)
class UsedValue:
    """One value that a profile gives to a run, as text for people.

    Attributes:
        kind: `variable`, `module`, `bind`, `sbatch`, `srun`, `rendezvous`, `runtime`, `store`, `entry-wrapper` or
            `base-image`.
        value: the value as it is set. If the value extends the old value of a variable NAME, `${NAME}` stands for the
            old value.
        when: the condition of the value in words; empty without a condition.
        source: page, version, date, and the date of the check; empty if the profile names no source.
        evidence: what showed that the value works.
        expires: the day after which the value must be checked again, as YYYY-MM-DD; empty without such a day.
    """

    kind: str
    name: str
    value: str
    reason: str
    when: str = ""
    source: str = ""
    evidence: str = ""
    expires: str = ""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The part of a site profile that a run needs.

    Attributes:
        name: the name of the profile.
        path: the file of the profile.
        file: the content of that file.
        notes: what a user of the system should know first.
        defaults: values for the options of `hpcenv submit`, by their names in the table of options. Options of
            [[option]] are in `used`.
        modules: environment modules that the batch script loads.
        module_paths: folders that `module use` adds before the modules are loaded.
        binds: host folders that containers see.
        settings: variables of the network profile, for the ranks. Empty before `for_run`.
        unset: variables that the ranks do not get from modules or from the job.
        program: the program that starts containers: a path, or a name on PATH. If `program` is empty, hpcenv searches
            for such a program.
        no_runtime: why hpcenv cannot start containers on this system; empty if hpcenv can, or if this is unknown.
        rendezvous_host: pattern of the name by which nodes reach each other; empty for Slurm's name.
        entry_wrapper: command that starts every program in a container; empty without such a command.
        used: all values with their sources, after `for_run`.
        left_out: one sentence for each value that was not set because hpcenv does not know whether its condition is
            fulfilled, and for each value that had to be checked again before today.
    """

    name: str
    path: str
    file: SiteFile
    notes: tuple[str, ...] = ()
    defaults: Mapping[str, OptionValue] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    module_paths: tuple[str, ...] = ()
    binds: tuple[Bind, ...] = ()
    settings: tuple[Setting, ...] = ()
    unset: tuple[str, ...] = ()
    program: str = ""
    no_runtime: str = ""
    rendezvous_host: str = ""
    entry_wrapper: tuple[str, ...] = ()
    used: tuple[UsedValue, ...] = ()
    left_out: tuple[str, ...] = ()

    def default_of(self, name: str) -> OptionValue:
        """Return the site's value for an option of `hpcenv submit`."""
        return self.defaults.get(name)

    @property
    def default_partition(self) -> str | None:
        """The partition of jobs that name no partition, as `doctor` found it; None if `doctor` found no default."""
        found = [part.name for part in self.file.slurm.partition if part.default]
        return found[0] if len(found) == 1 else None

    def for_run(self, run: RunFacts, *, today: dt.date | None = None, user: str = "") -> "Profile":
        """Return the profile with the values for one run.

        Args:
            run: the values that the conditions check.
            today: the present day. `left_out` names the values that had to be checked again before this day. If `today`
                is None, hpcenv does not compare any day.
            user: the name that replaces `${user}`.
        """
        chosen = _Chosen(self.file, run, today)
        settings, unset = _variables(self, chosen.variables, user)
        return replace(
            self,
            modules=(*self.file.modules, *(one.name for one in chosen.modules)),
            module_paths=tuple(dict.fromkeys((*self.file.module_use, *(m.use for m in chosen.modules if m.use)))),
            binds=tuple(_bind(one, user, origin=f"site profile {self.name}") for one in chosen.binds),
            settings=settings,
            unset=unset,
            rendezvous_host=chosen.rendezvous[0].host if chosen.rendezvous else "",
            entry_wrapper=chosen.entry_wrappers[0].command if chosen.entry_wrappers else (),
            used=chosen.used(),
            left_out=chosen.left_out(),
        )


def profile(site: SiteFile, path: str) -> Profile:
    """Return a profile from the content of its file; messages give `path` as the origin of its values."""
    passed_on = {"sbatch": site.sbatch, "srun": site.srun}
    given = {
        name: value for name, value in document.plain(site.submit, by_key=False).items() if value not in ([], False)
    }
    defaults = given | {name: table for name, table in passed_on.items() if table}
    return Profile(
        name=site.name,
        path=path,
        file=site,
        notes=site.notes,
        defaults=defaults,
        modules=site.modules,
        program=_program(site),
        no_runtime=_why_no_runtime(site),
    )


def _program(site: SiteFile) -> str:
    if site.runtime is None or site.runtime.kind not in USABLE_RUNTIMES:
        return ""
    return site.runtime.program or site.runtime.kind


def _why_no_runtime(site: SiteFile) -> str:
    if site.runtime is None or site.runtime.kind in USABLE_RUNTIMES:
        return ""
    return site.runtime.reason or "the profile does not say why"


_Value = TypeVar("_Value", bound=SourcedTable)


class _Chosen:
    """The values of a profile file that apply to one run.

    Attributes:
        modules, binds, options, rendezvous, entry_wrappers, base_images: the tables with a fulfilled condition, in the
            order of the file.
        variables: the tables of variables with a fulfilled condition, each with the name of the variable.
    """

    def __init__(self, site: SiteFile, run: RunFacts, today: dt.date | None) -> None:
        self._site, self._run, self._today = site, run, today
        self._left_out: list[str] = []
        self.modules = self._for_this(site.module, lambda one: f"module {one.name}")
        self.options = self._for_this(site.option, lambda one: f"{one.program} --{one.name}")
        self.binds = self._for_this(site.bind, lambda one: f"bind {one.source}")
        one = () if site.rendezvous is None else (site.rendezvous,)
        self.rendezvous = self._for_this(one, lambda _: "the host of the rendezvous")
        wrapper = () if site.entry_wrapper is None else (site.entry_wrapper,)
        self.entry_wrappers = self._for_this(wrapper, lambda _: "the entry wrapper")
        self.base_images = self._for_this(site.base_image, lambda one: f"base image {one.image}")
        self.variables = [
            (name, table)
            for name, tables in sorted(site.env.items())
            for table in tables
            if table.min_nodes <= run.nodes and self._accepts(name, table)
        ]

    def _for_this(self, tables: Iterable[_Value], name_of: Callable[[_Value], str]) -> list[_Value]:
        return [table for table in tables if self._accepts(name_of(table), table)]

    def _accepts(self, what: str, table: SourcedTable) -> bool:
        holds, unknown = judge(table.when, self._run)
        if holds == "unknown":
            condition = in_words(table.when)
            self._left_out.append(f"{what} is not set: it is for {condition}, and {unknown} is not known here")
        if holds == "yes" and self._today is not None and table.expires is not None and table.expires < self._today:
            self._left_out.append(f"{what} had to be checked again before {table.expires}; it is set all the same")
        return holds == "yes"

    def left_out(self) -> tuple[str, ...]:
        """Return a sentence for each value that the user should know about."""
        return tuple(f"site profile {self._site.name}: {text}" for text in self._left_out)

    def used(self) -> tuple[UsedValue, ...]:
        """Return the values with their sources, in the order in which they apply."""
        runtime, store = self._site.runtime, self._site.store
        return (
            *(() if runtime is None else (self._used("runtime", "", runtime.program or runtime.kind, runtime),)),
            *(() if store is None else (self._used("store", "", store.folder, store),)),
            *(self._used("module", one.name, one.use or "", one) for one in self.modules),
            *(self._used(one.program, f"--{one.name}", _option_text(one), one) for one in self.options),
            *(self._used("rendezvous", "host", one.host, one) for one in self.rendezvous),
            *(self._used("entry-wrapper", "", shlex.join(one.command), one) for one in self.entry_wrappers),
            *(self._used("bind", one.source, one.target or one.source, one) for one in self.binds),
            *(self._used("variable", name, _change_text(name, table), table) for name, table in self.variables),
            *(self._used("base-image", "", one.image, one) for one in self.base_images),
        )

    def _used(self, kind: str, name: str, value: str, table: SourcedTable) -> UsedValue:
        return UsedValue(
            kind=kind,
            name=name,
            value=value,
            reason=table.reason or "",
            when=in_words(table.when) or (f"nodes >={table.min_nodes}" if _from_some_nodes(table) else ""),
            source=source_line(self._site.source_of(table)),
            evidence=table.evidence or "",
            expires="" if table.expires is None else str(table.expires),
        )


def _from_some_nodes(table: SourcedTable) -> TypeGuard[VariableTable]:
    return isinstance(table, VariableTable) and table.min_nodes > 1


def _option_text(option: OptionTable) -> str:
    return "" if option.value is True else str(option.value)


def _change_text(name: str, table: VariableTable) -> str:
    if table.unset:
        return "(not set)"
    if table.value is not None:
        return table.value
    old = f"${{{name}}}"
    parts = [table.prepend, old] if table.prepend is not None else [old, table.append]
    return table.separator.join(part for part in parts if part)


def _bind(table: SiteBindTable, user: str, *, origin: str) -> Bind:
    return Bind(
        source=_for_user(table.source, user),
        target=_for_user(table.target or table.source, user),
        read_only=table.read_only,
        optional=table.optional,
        origin=origin,
    )


def _for_user(text: str, user: str) -> str:
    return text.replace("${user}", user)


# -- variables ----------------------------------------------------------------------------


def _variables(
    profile: Profile, tables: Iterable[tuple[str, VariableTable]], user: str
) -> tuple[tuple[Setting, ...], tuple[str, ...]]:
    """Return the variables for the ranks, and the names of variables that the ranks must not get."""
    values: dict[str, tuple[str, list[str]]] = {}
    unset: dict[str, str] = {}
    for name, table in tables:
        reason = _reason(profile.file, table)
        if table.unset:
            values.pop(name, None)
            unset[name] = reason
            continue
        before, reasons = values.get(name, ("" if name in unset else OLD_VALUE, []))
        values[name] = (_new_value(table, before), [reason] if table.value is not None else [*reasons, reason])
    origin = f"site profile {profile.name}"
    settings = {
        name: Setting(
            name=name,
            value=_for_user(value, user),
            origin=origin,
            reason="; ".join(reasons),
            expands="${" in value,
        )
        for name, (value, reasons) in values.items()
    }
    # An empty value for such a variable means that hpcenv does not set it either (judge/network/decision.py).
    settings |= {
        name: Setting(name=name, value="", origin=origin, reason=reason)
        for name, reason in unset.items()
        if name not in settings and is_left_alone(name)
    }
    return tuple(settings[name] for name in sorted(settings)), tuple(name for name in unset if name not in values)


def _new_value(table: VariableTable, before: str) -> str:
    if table.value is not None:
        return table.value
    parts = [table.prepend, before] if table.prepend is not None else [before, table.append]
    return table.separator.join(part for part in parts if part)


def _reason(site: SiteFile, table: SourcedTable) -> str:
    source = source_line(site.source_of(table))
    known = f" ({source})" if source else ""
    return f"{table.reason or ''}{known}"


def source_line(source: SourceTable | None) -> str:
    """Return a source in one line; empty without a source."""
    if source is None:
        return ""
    # The word `version` is left out before a text with blanks, such as `pull request 438`.
    version = source.version if " " in (source.version or "") else source.version and f"version {source.version}"
    parts = [
        source.page,
        version,
        source.date and f"of {source.date}",
        source.checked and f"checked {source.checked}",
    ]
    return ", ".join(part for part in parts if part)
