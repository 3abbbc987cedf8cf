"""The values of a project with an effect outside the project, and the values that the user has accepted.

Runs on: LOGIN NODE. A project often belongs to another person. Some values of a project have an effect outside the
project: for example, they name a folder that the container sees, a secret that hpcenv reads, or a program that hpcenv
starts. The user sees these values once, before hpcenv queues or starts anything, and accepts them. This module lists
these values. It stores the accepted values in the user's state folder, in one file for each project. `hpcenv.cli` asks
the user. The Python API does not ask; its caller gives the digest of the list. Values that the user types himself need
no consent.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hpcenv.errors import FileUnusable, Hint, HpcenvError, NotAccepted
from hpcenv.project import site_files
from hpcenv.project.context import state_folder
from hpcenv.project.option_types import OptionValues
from hpcenv.project.options import BY_NAME, OPTIONS, Option
from hpcenv.project.site import SiteFile
from hpcenv.project.spec import DEFAULT_LOCK, split_overlay
from hpcenv.project.workspace import Workspace
from hpcenv.records.files import read_file, read_json, write_text

_SCHEMA = 1
# Number of values that are kept for a project. If there are more values, the oldest values are removed.
_MOST = 1000
# 128 bits: it is not possible to find a different list with the same digest.
_DIGITS = 32
# A longer value is shortened in the output; the digest covers the whole value.
_SHOWN = 200

# Variables that make every program load additional code. The lockfile's fields cover the variables of Python.
_LOADS_CODE = re.compile(
    r"((PRE|AP)PEND_)?(LD_\w+|PATH)|GLIBC_TUNABLES|BASH_ENV|ENV|PYTHONPATH|PYTHONHOME|PYTHONSTARTUP"
)

# Key, value, and digest of the file.
_AcceptanceRow: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One value of a project with an effect outside the project.

    Attributes:
        key: where the value is: the file or table, and the key.
        value: the value as it is written.
        means: what the value does.
        content: sha256 of the named file, if the user accepts the content of this file.
    """

    key: str
    value: str
    means: str
    content: str = ""

    @property
    def text(self) -> str:
        """The line that the user reads."""
        value = self.value if len(self.value) <= _SHOWN else f"{self.value[:_SHOWN]}... ({len(self.value)} characters)"
        line = f"{self.key} = {value}: {self.means}"
        # After a line end in a value, the rest of the value would look like a line about another value.
        return line if line.isprintable() else ascii(line)[1:-1]


# -- what is asked --------------------------------------------------------------------------


def asked_by(workspace: Workspace) -> tuple[Asked, ...]:
    """Return the values of a project that have an effect on the user's machine outside of the project."""
    return (
        *_programs(workspace),
        *_binds(workspace),
        *_overlays(workspace),
        *_variables(workspace),
        *_passed_on(workspace),
        *_setup(workspace),
        *_sites(workspace),
        *asked_paths(workspace),
    )


def asked_paths(workspace: Workspace) -> tuple[Asked, ...]:
    """Return the folders of [paths] outside the project, for commands that only write or remove files in them."""
    paths = workspace.project.paths
    named = (("runs", paths.runs), ("store", paths.store), ("lockfiles", paths.lockfiles))
    means = "hpcenv writes there, outside the project"
    asked = (
        Asked(key=f"[paths] {key}", value=value, means=means)
        for key, value in named
        if value is not None and _is_outside(workspace, value)
    )
    return (*asked, *_stores_of_sites(workspace, means))


def _stores_of_sites(workspace: Workspace, means: str) -> Iterator[Asked]:
    """Yield the image folders of the project's site profiles. They are used if nothing else names an image folder."""
    for key, path in _own_profiles(workspace).items():
        try:
            table = site_files.read(path)[0].store
        except HpcenvError:
            continue  # the code that needs an image folder reports this error
        if table is not None:
            yield Asked(key=f"[store] of {key}", value=table.folder, means=means)


def asked_by_options(options: OptionValues, origin: str, *, script: str | None) -> tuple[Asked, ...]:
    """Return the recorded options of a submission that need consent. The record may come from another user.

    For each option, the table of options says whether the user must accept it (`Option.asks`). If the script may be
    outside the project, the user must accept the script, because its folder is copied and the ranks see this folder.

    Args:
        origin: the record that contains the options.
        script: the path of the script, or the name of a module or of a console script, as the options say.
    """
    found = [
        Asked(key=key, value=value, means=f"{option.asks} ({origin})")
        for option in OPTIONS
        if option.asks
        for key, value in _given(option, getattr(options, option.name))
    ]
    is_file = script is not None and not options.module and not options.entry
    if script is not None and is_file and (os.path.isabs(script) or ".." in Path(script).parts):
        means = f"it is started, and the ranks can read and write its folder ({origin})"
        found.append(Asked(key="the script", value=script, means=means))
    return tuple(found)


def _given(option: Option, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the values of an option, each with its key. If the option is not given, yield nothing."""
    if value is None or value == option.absent:
        return
    if option.kind == "texts":
        yield from ((option.flag, one) for one in value)
    elif option.kind == "variables":
        yield from ((f"{option.flag} {name}", one) for name, one in _loading(value))
    elif isinstance(value, Mapping):
        yield from ((f"{option.flag} {name}", str(one)) for name, one in value.items())
    elif option.name != "site" or site_files.is_path(value):  # a name is not a file of the project
        yield option.flag, str(value)


def _means(name: str) -> str:
    """Return what an option does outside the project; the same key of hpcenv.toml has the same text."""
    return BY_NAME[name].asks or ""


def _is_outside(workspace: Workspace, path: str) -> bool:
    place = os.path.realpath(workspace.root / os.path.expanduser(path))
    return not Path(place).is_relative_to(os.path.realpath(workspace.root))


def _programs(workspace: Workspace) -> Iterator[Asked]:
    project = workspace.project
    # An environment with its own table may name another program, even if it uses the image at the top of the file.
    for name in (DEFAULT_LOCK, *project.environment):
        one = project.for_lock(name)
        place = "" if name == DEFAULT_LOCK else f"[environment.{name}] "
        inherited = place and (one.image, one.python) == (project.image, project.python)
        if one.on_host and one.python is not None and not inherited:
            yield Asked(key=f"{place}python", value=one.python, means=_means("runtime"))
        if one.image.endswith(".def") and not inherited:
            yield Asked(key=f"{place}image", value=one.image, means="Apptainer runs the commands of this file here")
    if project.submit.runtime is not None:
        yield Asked(key="[submit] runtime", value=project.submit.runtime, means=_means("runtime"))
    if project.ca_file is not None:
        yield Asked(key="ca-file", value=project.ca_file, means="registries with its certificates get your passwords")


def _binds(workspace: Workspace) -> Iterator[Asked]:
    project = workspace.project
    binds = [("[[bind]]", bind) for bind in project.bind]
    binds += [(f"[[environment.{name}.bind]]", bind) for name, one in project.environment.items() for bind in one.bind]
    for key, bind in binds:
        if _is_outside(workspace, bind.source):
            mode = "read" if bind.read_only else "read and write"
            target = bind.target or bind.source
            yield Asked(key=key, value=f"{bind.source} at {target}", means=f"the ranks can {mode} it")


def _overlays(workspace: Workspace) -> Iterator[Asked]:
    project = workspace.project
    named = [("overlay", project.overlay)]
    named += [(f"[environment.{name}] overlay", one.overlay) for name, one in project.environment.items()]
    for key, value in named:
        if value is not None and _is_outside(workspace, split_overlay(value)[0]):
            yield Asked(key=key, value=value, means="the ranks can read it, and run its code in the container")


def _variables(workspace: Workspace) -> Iterator[Asked]:
    project = workspace.project
    for name, source in project.secrets.items():
        yield Asked(key=f"[secrets] {name}", value=source, means=_means("secret"))
    for name, value in _loading(project.env):
        yield Asked(key=f"[env] {name}", value=value, means=_means("env"))
    for environment, table in project.environment.items():
        for name, value in _loading(table.env):
            yield Asked(key=f"[environment.{environment}.env] {name}", value=value, means=_means("env"))
    for name in project.submit.pass_env:
        yield Asked(key="[submit] pass-env", value=name, means=_means("pass_env"))


def _loading(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, value) for name, value in variables.items() if _LOADS_CODE.fullmatch(name))


def _passed_on(workspace: Workspace) -> Iterator[Asked]:
    yield from _native("[sbatch]", workspace.project.sbatch, "sbatch gets it")
    yield from _native("[srun]", workspace.project.srun, "srun gets it")


def _native(table: str, options: Mapping[str, object], means: str) -> Iterator[Asked]:
    for name, value in options.items():
        yield Asked(key=f"{table} {name}", value=str(value), means=means)


def _setup(workspace: Workspace) -> Iterator[Asked]:
    for line in workspace.project.submit.setup:
        yield Asked(key="[submit] setup", value=line, means=_means("setup"))


def _sites(workspace: Workspace) -> Iterator[Asked]:
    """Yield the site profiles of the project. If one of them fits the cluster, it overrides the machine's profiles."""
    for key, path in _own_profiles(workspace).items():
        try:
            means = _profile_in_words(site_files.read(path)[0])
        except HpcenvError as error:
            means = f"it cannot be read: {error.what}"
        yield Asked(key="site profile", value=key, means=means, content=_sha256(path))


def _own_profiles(workspace: Workspace) -> dict[str, Path]:
    """Return the site profiles of the project, each with the key that names it."""
    folder, named = workspace.root / "sites", workspace.project.site
    paths = (
        {}
        if _same_folder(folder, site_files.shipped())
        else {f"sites/{p.name}": p for p in site_files.in_folder(folder)}
    )
    if named is not None and site_files.is_path(named):
        paths[f"site = {named}"] = Path(os.path.abspath(workspace.root / os.path.expanduser(named)))
    return paths


def _same_folder(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _profile_in_words(site: SiteFile) -> str:
    binds = [f"{bind.source} at {bind.target or bind.source}" for bind in site.bind]
    parts = (
        ("containers start with", [] if site.runtime is None else [site.runtime.program or site.runtime.kind]),
        ("images are kept in", [] if site.store is None else [site.store.folder]),
        ("containers enter through", [] if site.entry_wrapper is None else [" ".join(site.entry_wrapper.command)]),
        ("modules", [*site.modules, *(one.name for one in site.module)]),
        ("folders of modules", [*site.module_use, *(one.use for one in site.module if one.use)]),
        ("lines in the batch script", list(site.submit.setup)),
        ("binds", binds),
        ("variables", list(site.env)),
        ("sbatch gets", [*site.sbatch, *(one.name for one in site.option if one.program == "sbatch")]),
        ("srun gets", [*site.srun, *(one.name for one in site.option if one.program == "srun")]),
        ("samples of jobs are written to", [] if site.watch.prometheus is None else [site.watch.prometheus]),
        ("nodes are reached as", [] if site.rendezvous is None else [site.rendezvous.host]),
    )
    said = [f"{what} {', '.join(names)}" for what, names in parts if names]
    return "; ".join(said) or "defaults for options of submit"


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(read_file(path)).hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror}"


# -- what is accepted -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Review:
    """For a dry run: the values of a project that need consent, and whether the user has accepted them.

    Attributes:
        asks: one line for each value.
        digest: the digest of the list; empty if the list is empty.
        accepted: whether the user has accepted all values.
    """

    asks: tuple[str, ...]
    digest: str
    accepted: bool


def review(asked: Sequence[Asked], root: Path, environ: Mapping[str, str]) -> Review:
    """Return the values of a project that need consent, and whether the user has accepted them."""
    return Review(
        asks=tuple(one.text for one in asked),
        digest=digest_of(asked) if asked else "",
        accepted=not new_in(asked, root, environ),
    )


def digest_of(asked: Sequence[Asked]) -> str:
    """Return the digest of a list. The digest covers every value, but not the explanations of the values."""
    text = json.dumps(sorted(set(map(_row, asked))))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _row(one: Asked) -> _AcceptanceRow:
    return one.key, one.value, one.content


def new_in(asked: Sequence[Asked], root: Path, environ: Mapping[str, str]) -> tuple[Asked, ...]:
    """Return the values that the user has not accepted for the project in this folder."""
    accepted = set(_read(root, environ)) if asked else set()
    return tuple(one for one in asked if _row(one) not in accepted)


def keep(asked: Sequence[Asked], root: Path, environ: Mapping[str, str]) -> None:
    """Record that the user accepted these values for the project in this folder.

    Raises:
        FileUnusable: the state folder cannot be written.
    """
    rows = list(dict.fromkeys(map(_row, asked)))
    if not rows:
        return
    kept = [row for row in _read(root, environ) if row not in rows]
    path = _file(root, environ)
    data = {"schema": _SCHEMA, "project": os.path.realpath(root), "accepted": [*kept, *rows][-_MOST:]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text(json.dumps(data, indent=1) + "\n", path, mode=0o600)
    except OSError as error:
        why = f"{error.strerror}; what you accept for a project is kept there"
        raise FileUnusable(
            f"`{path}` cannot be written", why=why, hint="set XDG_STATE_HOME to another folder"
        ) from error


def require(asked: Sequence[Asked], root: Path, environ: Mapping[str, str], *, given: str | None, hint: Hint) -> None:
    """Refuse values that the user has not accepted; record the values that `given` accepts.

    Args:
        given: the digest of the list that the user accepts; None without a digest. If `given` is not the digest of the
            present list, the call fails, even if all values are already accepted. So a script that gives a digest
            notices every change.
        hint: how to accept.

    Raises:
        NotAccepted: a value is not accepted, or `given` is another digest. The error has the list.
    """
    new = new_in(asked, root, environ)
    if asked and given == digest_of(asked):
        if new:
            # If nothing can be recorded, the typed digest counts for this call.
            with suppress(FileUnusable):
                keep(asked, root, environ)
        return
    if not new and (given is None or not asked):
        return
    lines = [one.text for one in asked]
    if given is not None:
        lines.append(f"the digest of this list is {digest_of(asked)}, not {given}")
    raise NotAccepted(
        f"the project {root} needs settings that you have not accepted; nothing was started",
        why="\n".join(lines),
        hint=hint,
    )


def _file(root: Path, environ: Mapping[str, str]) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:_DIGITS]
    return state_folder(environ) / "accepted" / f"{name}.json"


def _read(root: Path, environ: Mapping[str, str]) -> list[_AcceptanceRow]:
    """Return what the user accepted for a project, the newest last. If the file is damaged, return an empty list."""
    try:
        data = read_json(_file(root, environ))
        if data["schema"] != _SCHEMA or data["project"] != os.path.realpath(root):
            return []
        return [(str(key), str(value), str(content)) for key, value, content in data["accepted"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
