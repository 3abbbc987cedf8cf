"""`hpcenv lock`: resolve the image, make the SIF, read the environment inside, write the lockfile.

Runs on: LOGIN NODE.

    tag --registry--> digests --apptainer build--> SIF --probe--> facts --> NAME.lock.toml
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from hpcenv import filesystem
from hpcenv.container import bare_image
from hpcenv.container.probe_source import probe_source
from hpcenv.errors import (
    Command,
    EnvironmentUnreadable,
    HpcenvError,
    ImageMismatch,
    LockfileInvalid,
    LockfileMissing,
    PinsDiffer,
    SpecError,
)
from hpcenv.facts import facts
from hpcenv.facts.probe import read_answer, read_image_network, run_probe
from hpcenv.identity import bind_content, sif
from hpcenv.image.convert import squashfs_reader
from hpcenv.image.recorded_files import BUILT, REPORT
from hpcenv.judge import compare
from hpcenv.judge.compat.floors import driver_floor
from hpcenv.judge.compat.image_rules import requirements
from hpcenv.locking import compatibility_notes, driver_notes, fabric_notes, overlay, required_hashes
from hpcenv.locking.built_packages import BuiltPackage, parse_built
from hpcenv.locking.conda_packages import (
    InstalledConda,
    compare_conda,
    conda_changes,
    conda_tables,
    installed_conda,
    locked_conda,
)
from hpcenv.locking.conflicts import find_conflicts
from hpcenv.locking.environment import bind_sources, container_environment, host_environment, with_overlay
from hpcenv.locking.image_source import locked_sif
from hpcenv.locking.overlay import FoundOverlay, Origin
from hpcenv.locking.pins.cross_check import PinDifference, cross_check
from hpcenv.locking.pins.formats import PinFile, open_pins, pins_of
from hpcenv.locking.pins.install_report import known_files, parse_report
from hpcenv.locking.pins.pin import Pin, marker_environment
from hpcenv.locking.project_image import BuildOptions, build, definition_changed
from hpcenv.locking.same_tree import stands_for
from hpcenv.locking.wheels.find import find_wheels
from hpcenv.locking.wheels.proof import Index, InstalledDist, KnownFile, WheelProof, no_proof
from hpcenv.progress import OnEvent, ignore
from hpcenv.project import compatibility, document, fields, severities, stale, toml_files
from hpcenv.project import lockfile as lock_model
from hpcenv.project.fields import FieldLevel
from hpcenv.project.lockfile import CondaTable, ContainerTable, DistTable, Lockfile, PackagesTable, SifTable
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.project.workspace import Workspace, notes_on, read_lockfile
from hpcenv.records.codec import SCHEMA
from hpcenv.records.facts import Facts, Network
from hpcenv.records.manifest import Environment
from hpcenv.text import listed
from hpcenv.version import VERSION

ReportProgress = Callable[[str], None]
Kept = TypeVar("Kept", BuiltPackage, KnownFile)

# The probe reads every installed file once: this takes minutes on a cold parallel file
# system, seconds on a warm one.
_PROBE_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class LockResult:
    """What `lock` wrote.

    Attributes:
        path: the lockfile.
        lockfile: its content.
        changed: False when the file already had this content.
        changes: what differs from the previous lockfile.
        sif: the SIF it belongs to, None for `image = "host"`.
        notes: what could not be read, and other things to know.
    """

    path: Path
    lockfile: Lockfile
    changed: bool
    changes: tuple[str, ...] = ()
    sif: Path | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Whether a lockfile still fits hpcenv.toml and the environment.

    Attributes:
        path: the lockfile.
        reasons: why to lock again.
        notes: what could not be checked.
    """

    path: Path
    reasons: tuple[stale.StaleReason, ...]
    notes: tuple[str, ...] = ()

    @property
    def fresh(self) -> bool:
        """Whether there is no reason to lock again."""
        return not self.reasons


def lock(
    workspace: Workspace,
    *,
    environ: Mapping[str, str],
    report: ReportProgress,
    on_event: OnEvent = ignore,
    name: str = DEFAULT_LOCK,
    allow_floating: bool = False,
    plain_http: tuple[str, ...] = (),
    upgrade: bool = False,
    level: FieldLevel = "full",
    pins: Path | None = None,
    wheels_cache: Path | None = None,
    require_hashes: bool = False,
) -> LockResult:
    """Lock the project's environment.

    Args:
        workspace: the project.
        environ: the user's environment.
        report: called with one line per phase.
        on_event: called with the progress of an image's conversion.
        name: which lockfile, `lockfiles/NAME.lock.toml`.
        allow_floating: accept a reference that names another image every few weeks.
        plain_http: registries without TLS that the user named himself, beside those of hpcenv.toml.
        upgrade: ask the registry again which image the tag names; otherwise a locked image
            stays locked, as `uv lock` keeps versions.
        level: `full`, or `deep` to import torch and record what the loader really maps.
        pins: a file that the environment must agree with, see pins/formats.py; `#CHOSEN` may stand behind it.
        wheels_cache: where proofs of wheels are kept; None looks for no wheels.
        require_hashes: the wheel of every package must be proved.

    Raises:
        HashesUnproved: a hash that is required is not proved.
        PinsDiffer: the installed packages differ from the pins.
        FileUnusable: the pins cannot be read.
        HpcenvError: the image is not available, the SIF cannot be made, or the environment
            cannot be read. The old lockfile stays as it is.
    """
    path = workspace.lockfile_path(name)
    without_table = _notes_on_environment(workspace, name)
    workspace = workspace.for_lock(name)
    # Before the image is made: a newer lockfile is refused, and that must not take minutes.
    before, unreadable = _previous(path)
    _require_writable(path)  # likewise
    lost = _notes_on_previous(before, path)
    pin_file = None if pins is None else open_pins(pins)  # likewise
    options = BuildOptions(allow_floating=allow_floating, plain_http=plain_http)
    found_overlay = _found_overlay(workspace)  # likewise
    environment, container = _made(workspace, None if upgrade else before, environ, on_event, options)
    report(_reading(workspace, environment))
    kept = _kept_sif(before, container, workspace, path, Path(environment.sif))
    if kept is not None and container is not None:
        container = container.model_copy(update={"sif": kept})
    base = None
    if container is not None:
        # An image that stays locked has the overlay of the old lockfile.
        container = container.model_copy(update={"overlay": None})
        if found_overlay is not None:
            environment, container, base = _with_overlay(workspace, environment, container, found_overlay, environ)
    answer = probe(environment, environ, level=level, variables=workspace.project.env)
    # Before wheels are looked for, which may take a minute where the index does not answer.
    _require_lockable(answer, workspace)
    origins = _origins(environment, answer, base)
    binds = _lock_binds(workspace, environment, environ)
    image = None if container is None else Path(environment.sif)
    built = () if image is None else _report_in(image, BUILT, parse_built, report)
    conda = installed_conda(answer)
    pinned = () if pin_file is None else pins_of(pin_file, environment=marker_environment(answer["values"]))
    proofs: dict[str, WheelProof] = {}
    if wheels_cache is not None or pin_file is not None:
        named = (*known_files(pinned), *_named_in_image(image, built, report))
        proofs = _wheel_proofs(answer, environ, report, cache=wheels_cache, named=named, conda=conda)
    if pin_file is not None:
        _require_as_pinned_here(pin_file, pinned, answer, proofs, conda, report)
    archives = conda_tables(conda, pinned, before if before is not None and _is_whole(before) else None)
    with _invalid_values_refused():
        locked = _compose(workspace, container, answer, _with_builds(proofs, built), archives, before, binds)
    locked = _with_origins(locked, origins)
    reasons = {name: proof.reason for name, proof in proofs.items() if proof.reason}
    required_hashes.require(locked, every=require_hashes, reasons=reasons, hint=_TO_PROVE)
    changed, aside = _write(locked, path, name=name, unreadable=unreadable)
    return LockResult(
        path=path,
        lockfile=locked,
        changed=changed,
        changes=() if before is None else _changes(before, locked),
        sif=image,
        notes=(
            *without_table,
            *(() if aside is None else (_kept_aside(workspace.shown(aside)),)),
            *lost,
            *(() if kept is None else (_other_bytes(environment),)),
            *_notes(locked, answer),
            *_overlay_notes(environment, origins),
            *_conflict_notes(answer),
            *compatibility_notes.notes(locked, compatibility.table(), today=_today()),
            *fabric_notes.notes(locked, read_image_network(answer)),
            *driver_notes.notes(locked),
        ),
    )


def _found_overlay(workspace: Workspace) -> FoundOverlay | None:
    """Return the overlay that hpcenv.toml names; None without one.

    Raises:
        SpecError: it is not there, or cannot be mounted over an image.
    """
    if workspace.project.overlay is None:
        return None
    return overlay.find(workspace)


def _with_overlay(
    workspace: Workspace,
    environment: Environment,
    container: ContainerTable,
    found: FoundOverlay,
    environ: Mapping[str, str],
) -> tuple[Environment, ContainerTable, dict[str, Any] | None]:
    """Return the environment with its overlay, the container with its identity, and what the image alone has.

    Raises:
        SpecError: a virtual environment is of another Python; the overlay cannot be read.
    """
    image, base, why = Path(environment.sif), None, ""
    try:
        base = probe(overlay.base_environment(workspace, image, found), environ, level="record")
    except EnvironmentUnreadable as error:
        why = error.why or error.what
    overlay.require_interpreter(found, base, why, environment)
    overlay.require_python(found.overlay, environment, environ)
    table = overlay.identify(found.overlay, overlay.python_path_of(base))
    mounted = overlay.locked_overlay(workspace, table)
    return with_overlay(environment, mounted, workspace), container.model_copy(update={"overlay": table}), base


def _origins(
    environment: Environment, answer: Mapping[str, Any], base: Mapping[str, Any] | None
) -> Mapping[str, Origin]:
    """Return the packages that are from the overlay."""
    if environment.overlay is None:
        return {}
    return overlay.origins(environment.overlay, answer, base)


def _with_origins(locked: Lockfile, origins: Mapping[str, Origin]) -> Lockfile:
    """Return the lockfile with the layer of each package of the overlay."""
    if not origins:
        return locked
    dists = tuple(
        dist.model_copy(update={"layer": "overlay", "hides": origins[dist.name].hides or None})
        if dist.name in origins
        else dist
        for dist in locked.packages.dist
    )
    draft = locked.model_copy(update={"packages": locked.packages.model_copy(update={"dist": dists})})
    return draft.model_copy(update={"fingerprint": lock_model.fingerprint(lock_model.to_data(draft))})


def _overlay_notes(environment: Environment, origins: Mapping[str, Origin]) -> Sequence[str]:
    if environment.overlay is None:
        return ()
    return overlay.notes(origins)


def _notes_on_environment(workspace: Workspace, name: str) -> tuple[str, ...]:
    """Return a note where a project with several environments has none of this name: it may be misspelt."""
    known = workspace.project.environment
    if not known or name in known or name == DEFAULT_LOCK:
        return ()
    return (f"hpcenv.toml has no [environment.{name}], only {', '.join(known)}: `{name}` is what its top says",)


_TO_PROVE = (
    "install these packages from wheels of an index that pip is configured for (`pip config list`), then lock again"
)


def _made(
    workspace: Workspace, before: Lockfile | None, environ: Mapping[str, str], on_event: OnEvent, options: BuildOptions
) -> tuple[Environment, ContainerTable | None]:
    """Return the environment to lock and, unless it is one of the host, its container; make the SIF where needed."""
    if workspace.project.on_host:
        return host_environment(workspace, environ), None
    made = build(workspace, before=before, environ=environ, on_event=on_event, options=options)
    return container_environment(workspace, made.path, gpus=False), made.container


def _reading(workspace: Workspace, environment: Environment) -> str:
    if workspace.project.on_host and workspace.project.python is not None:
        return f"starting {environment.python}, which `python` in {workspace.spec} names, and reading its packages"
    return f"reading {environment.sif or environment.python}"


def _write(locked: Lockfile, path: Path, *, name: str, unreadable: bool) -> tuple[bool, Path | None]:
    """Write a lockfile; return whether the file changed, and where a file that could not be read is kept."""
    text = toml_files.dumps(lock_model.to_data(locked), header=_header(name))
    _require_valid(path, text)
    aside = _set_aside(path) if unreadable else None
    return toml_files.write(text, path), aside


def _notes_on_previous(before: Lockfile | None, path: Path) -> tuple[str, ...]:
    """Return notes on the lockfile that will be replaced. They are read from the file, so before it is written."""
    lost = () if before is None or before.revision <= lock_model.REVISION else notes_on(before, path)
    return tuple(f"of the lockfile that was there: {note}" for note in lost)


def _kept_aside(aside: str) -> str:
    return f"the lockfile that was there could not be read and is kept as {aside}"


def _today() -> dt.date:
    return dt.datetime.now(tz=dt.timezone.utc).date()


def _other_bytes(environment: Environment) -> str:
    other = f"{environment.sif} has other bytes than the locked SIF, and the same tree"
    return f"{other}: the lockfile still names that one"


def _header(name: str) -> str:
    return (
        "Written by `hpcenv lock`; do not edit, commit it with the code.\n"
        f"Check a machine against it: hpcenv lock --check{'' if name == DEFAULT_LOCK else f' --lock {name}'}"
    )


def _previous(path: Path) -> tuple[Lockfile | None, bool]:
    """Return the lockfile to compare with, and whether there is one that cannot be read.

    Raises:
        LockfileNewer: this version does not know all of it; it is never overwritten.
    """
    try:
        return read_lockfile(path), False
    except LockfileMissing:
        return None, False
    except LockfileInvalid:
        return None, True


def _set_aside(path: Path) -> Path:
    """Rename a file that could not be read to a free name."""
    names = (f"{path.name}.unreadable{suffix}" for suffix in ("", *(f".{n}" for n in range(2, 1000))))
    aside = next(place for name in names if not os.path.lexists(place := path.with_name(name)))
    os.replace(path, aside)
    return aside


# -- the environment ----------------------------------------------------------------------


def _kept_sif(
    before: Lockfile | None, container: ContainerTable | None, workspace: Workspace, path: Path, image: Path
) -> SifTable | None:
    """Return the locked table of the SIF if it stays valid: this SIF has other bytes, and the same image and tree.

    None means that this SIF is to be locked.

    Raises:
        ImageMismatch: the tree is another one too, or is unknown. The file may have been exchanged: the user must
            decide which one to lock.
    """
    if before is None or before.container is None or container is None:
        return None
    locked, found = before.container, container
    if locked.manifest_digest != found.manifest_digest or None in (locked.manifest_digest, found.manifest_digest):
        return None
    if locked.sif.sha256 == found.sif.sha256:
        return None
    if stands_for(locked, image, found.sif.sha256, place=workspace.store_place):
        return locked.sif
    raise ImageMismatch(
        "the SIF is not the one that was locked for this very image",
        why=f"{path} says sha256 {locked.sif.sha256}, the file has {found.sif.sha256}, and not the same tree",
        hint=(f"to make the SIF again: remove it and {path.name}, then ", Command("hpcenv", "lock")),
    )


# -- the document -------------------------------------------------------------------------


def probe(
    environment: Environment, environ: Mapping[str, str], *, level: str, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the probe's answer for an environment on this machine.

    Raises:
        EnvironmentUnreadable: it did not start or did not answer.
    """
    try:
        return run_probe(
            environment,
            environ,
            probe=probe_source(),
            level=level,
            seconds=_PROBE_SECONDS,
            variables=variables,
        )
    except (HpcenvError, ValueError, OSError) as error:
        reason = f"{error.what}\n{error.why or ''}" if isinstance(error, HpcenvError) else str(error)
        raise EnvironmentUnreadable(
            f"cannot look inside {environment.sif or environment.python}", why=reason.strip()
        ) from error


def _lock_binds(
    workspace: Workspace, environment: Environment, environ: Mapping[str, str]
) -> tuple[lock_model.LockedBindTable, ...]:
    """Return [[bind]] as it is locked: with the content of binds over files of the image.

    Raises:
        SpecError: such a bind cannot be hashed.
        EnvironmentUnreadable: the image cannot be looked at.
    """
    binds = stale.locked_binds(workspace.project)
    targets = tuple(bind.target for bind in binds)
    try:
        over_image = bare_image.paths_with_code(environment, targets, environ) if targets else ()
    except (HpcenvError, ValueError, OSError) as error:
        raise EnvironmentUnreadable(f"cannot look at the paths of {environment.sif}", why=str(error)) from error
    sources = bind_sources(workspace)
    return tuple(
        bind.model_copy(update={"content": _bind_content(bind.target, sources[bind.target], workspace)})
        if bind.target in over_image
        else bind
        for bind in binds
    )


def _bind_content(target: str, source: str, workspace: Workspace) -> str:
    try:
        return bind_content.content_digest(source)
    except (OSError, ValueError) as error:
        raise SpecError(
            f"the bind over `{target}` cannot be locked",
            why=f"it hides files of the image, or adds code to it, so its content is locked: {error}",
            hint=f"choose a target that the image does not have, in [[bind]] of {workspace.spec.name}",
        ) from error


def _wheel_proofs(
    answer: Mapping[str, Any],
    environ: Mapping[str, str],
    report: ReportProgress,
    *,
    cache: Path | None,
    named: Sequence[KnownFile],
    conda: Sequence[InstalledConda],
) -> dict[str, WheelProof]:
    """Find the wheels of the installed packages; no index has one of a package that conda installed.

    Args:
        cache: where proofs are kept; None asks no index.
        named: wheels that a file of pins, a report of pip or a build names.
        conda: what conda installed.
    """
    dists = [InstalledDist.from_probe(package) for package in answer["packages"]]
    owners = {name: package.name for package in conda for name in package.dists}
    mine = [dist for dist in dists if dist.name not in owners]
    index = Index(env=environ) if cache is not None else None
    if mine:
        report(f"finding the wheels of {len(mine)} packages")
    proofs = {p.name: p for p in find_wheels(mine, sources=named, index=index, cache=cache or Path(os.devnull))}
    for reason, count in Counter(proof.reason for proof in proofs.values() if proof.proof == "none").most_common(3):
        report(f"  no wheel is proved for {count} of them: {reason}")
    return {
        dist.name: proofs.get(dist.name) or no_proof(dist, f"conda installed it, with its package {owners[dist.name]}")
        for dist in dists
    }


def _named_in_image(image: Path | None, built: Sequence[BuiltPackage], report: ReportProgress) -> tuple[KnownFile, ...]:
    """Return the wheels that an image names itself: reports of pip, and packages that were compiled in it."""
    reported = _report_in(image, REPORT, partial(parse_report, origin=REPORT), report) if image is not None else ()
    return (*(one.file for one in built), *reported)


# Tools that install packages; pins files often leave them out.
_INSTALLERS = ("pip", "setuptools", "wheel")


def _require_as_pinned_here(
    file: PinFile,
    pinned: Sequence[Pin],
    answer: Mapping[str, Any],
    proofs: Mapping[str, WheelProof],
    conda: Sequence[InstalledConda],
    report: ReportProgress,
) -> None:
    """Compare the environment that was just read with the pins, and report what could not be compared.

    Raises:
        PinsDiffer: the installed packages differ from the pins.
        EnvironmentUnreadable: what conda installed could not be read.
    """
    unread = answer["unknown"].get("packages.conda-digest")
    if file.format.conda and unread:
        raise EnvironmentUnreadable(f"cannot compare the environment with `{file.path}`", why=f"conda-meta: {unread}")
    dists = [InstalledDist.from_probe(package) for package in answer["packages"]]
    place = str(answer["values"].get("python.prefix", "the environment"))
    unsure = _require_as_pinned(file, pinned, dists, [proofs[dist.name] for dist in dists], conda, place=place)
    for difference in unsure:
        report(f"  {_unsure(difference)}")


def _require_as_pinned(
    file: PinFile,
    pinned: Sequence[Pin],
    dists: Sequence[InstalledDist],
    proofs: Sequence[WheelProof],
    conda: Sequence[InstalledConda],
    *,
    place: str,
) -> list[PinDifference]:
    """Return what could not be compared with the pins.

    Raises:
        PinsDiffer: the installed packages differ from the pins.
    """
    differences: tuple[PinDifference, ...] = ()
    if file.format.conda:
        _require_conda(file, pinned, conda, place)
        by_conda = {name for package in conda for name in package.dists}
        left = [(dist, proof) for dist, proof in zip(dists, proofs, strict=True) if dist.name not in by_conda]
        dists, proofs = [dist for dist, _ in left], [proof for _, proof in left]
        differences = compare_conda(pinned, conda)
    by_pip = [pin for pin in pinned if pin.manager == "pypi"]
    differences += cross_check(by_pip, dists, proofs, ignore=_INSTALLERS)
    certain = [difference for difference in differences if difference.kind != "unknown"]
    if certain:
        more = [f"and {len(certain) - _DIFFERENCES_SHOWN} more"] if len(certain) > _DIFFERENCES_SHOWN else []
        raise PinsDiffer(
            f"what is installed is not what `{file.path}` says",
            why="\n".join([*map(_difference_line, certain[:_DIFFERENCES_SHOWN]), *more]),
            hint=f"install from it again: {file.reinstall}{file.or_choose}",
        )
    return list(differences)


_DIFFERENCES_SHOWN = 40


def _difference_line(difference: PinDifference) -> str:
    pinned, installed = difference.pinned or "nothing", difference.installed or "nothing"
    note = f" ({difference.note})" if difference.note else ""
    return f"{difference.name}: {difference.kind}, pinned {pinned}, installed {installed}{note}"


def _require_conda(file: PinFile, pinned: Sequence[Pin], conda: Sequence[InstalledConda], place: str) -> None:
    """Refuse an environment in which conda installed nothing: it is another one than the file is about.

    Raises:
        PinsDiffer: likewise.
    """
    if not conda and any(pin.manager == "conda" for pin in pinned):
        raise PinsDiffer(
            f"`{file.path}` is about an environment of conda, and this is none",
            why=f"{place} has no record in conda-meta",
            hint=(
                'name its Python in hpcenv.toml, `python = ".pixi/envs/default/bin/python"` for one of pixi, '
                f"after: {file.reinstall}"
            ),
        )


def _unsure(difference: PinDifference) -> str:
    return f"{difference.name}: could not tell whether it is as pinned ({difference.note})"


def _report_in(
    image: Path, name: str, parse: Callable[[bytes], Sequence[Kept]], report: ReportProgress
) -> tuple[Kept, ...]:
    """Return what a recipe of `hpcenv image init` left in its image about the packages: pip's report, or its own."""
    try:
        part = sif.read_header(image).runs
        text = squashfs_reader.read_file(image, name.lstrip("/").encode(), offset=part.offset, size=part.size)
    except HpcenvError:
        return ()  # most images have none
    try:
        return tuple(parse(text))
    except LockfileInvalid as error:
        report(f"  {error.what}: {error.why}")
        return ()


def _with_builds(proofs: Mapping[str, WheelProof], built: Sequence[BuiltPackage]) -> dict[str, lock_model.WheelTable]:
    """Return what was found of each wheel; of a compiled one with its compilers."""
    tables = {(one.file.filename, one.file.sha256): one.table for one in built}
    return {
        name: lock_model.WheelTable(
            filename=proof.filename,
            sha256=proof.sha256,
            index=proof.index,
            proof=proof.proof,
            # The reason why nothing was proved may be temporary (the index did not answer): it is
            # printed, not locked.
            reason=(proof.reason or None) if proof.proof != "none" else None,
            built=tables.get((proof.filename or "", proof.sha256 or "")) if proof.proof == "built" else None,
        )
        for name, proof in proofs.items()
    }


def _compose(
    workspace: Workspace,
    container: ContainerTable | None,
    answer: Mapping[str, Any],
    found: Mapping[str, lock_model.WheelTable],
    archives: tuple[CondaTable, ...],
    before: Lockfile | None,
    binds: tuple[lock_model.LockedBindTable, ...],
) -> Lockfile:
    values, unknown = dict(answer["values"]), _unknown(answer)
    kept = _proved_before(before, answer)
    wheels = kept | _proved_now(found, kept)
    packages = PackagesTable(
        count=values["packages.count"],
        env_digest=values["packages.env-digest"],
        content_digest=values.get("packages.content-digest"),
        unlisted_count=values["packages.unlisted-count"],
        conda_count=values.get("packages.conda-count") or None,
        conda_digest=values.get("packages.conda-digest"),
        conda_content_digest=values.get("packages.conda-content-digest"),
        conda_modified=tuple(values.get("packages.conda-modified", ())),
        unlisted_digest=values["packages.unlisted-digest"],
        dist=tuple(_dist(package, wheels.get(package["name"]), values) for package in answer["packages"]),
        conda_package=archives,
    )
    draft = Lockfile(
        schema_=lock_model.SCHEMA,
        revision=lock_model.REVISION,
        generated_by=f"hpcenv {VERSION}",
        fingerprint="",
        kind="host" if container is None else "sif",
        asked=stale.asked_by(workspace.project),
        container=container,
        facts={
            field: tuple(value) if isinstance(value, list) else value
            for field, value in sorted(values.items())
            if field.split(".")[0] in lock_model.FACT_TABLES and field not in lock_model.NOT_LOCKED
        },
        packages=packages,
        env=stale.locked_env(workspace.project),
        bind=binds,
        host=_host(workspace, container, values),
        determinism=lock_model.LockedDeterminismTable(profile=workspace.project.determinism.profile),
        unknown={field: _without_path(reason, values) for field, reason in sorted(unknown.items())},
        policy=dict(sorted(workspace.project.policy.items())),
    )
    problems = lock_model.policy_problems(draft)
    if problems:
        raise SpecError(f"`{workspace.spec}` is not valid", why="\n".join(problems))
    return draft.model_copy(update={"fingerprint": lock_model.fingerprint(lock_model.to_data(draft))})


def _unknown(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return what could not be read, with the reasons."""
    return {**answer["unknown"], **_unknown_sources(answer)}


def _unknown_sources(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return which editable installs have no digest of their code, neither against a commit nor of its files."""
    inside = read_answer(answer)
    found = {}
    for package in answer["packages"]:
        name = f"packages.{package['name']}"
        if f"{name}.diff-sha256" in inside.values or f"{name}.files-sha256" in inside.values:
            continue
        part = "diff-sha256" if f"{name}.dirty" in inside.values else "files-sha256"
        if f"{name}.{part}" in inside.unknown:
            found[f"{name}.{part}"] = inside.unknown[f"{name}.{part}"]
    return found


@contextlib.contextmanager
def _invalid_values_refused() -> Iterator[None]:
    """Refuse values that no lockfile can have: they come from a probe, which runs inside the environment.

    Raises:
        EnvironmentUnreadable: what the environment reports gives no valid lockfile.
    """
    try:
        yield
    except ValidationError as error:
        raise _no_valid_lockfile(document.problems(Lockfile, error)) from error


def _require_valid(path: Path, text: str) -> None:
    """Refuse to write a lockfile that could not be read again.

    Raises:
        EnvironmentUnreadable: what the environment reports gives no valid lockfile.
    """
    data = lock_model.from_data(toml_files.loads(text.encode(), path, error=LockfileInvalid))
    _, problems = document.parse(Lockfile, data)
    if problems:
        raise _no_valid_lockfile(problems)


def _no_valid_lockfile(problems: Sequence[str]) -> EnvironmentUnreadable:
    return EnvironmentUnreadable("what this environment reports gives no valid lockfile", why="\n".join(problems))


def _without_path(reason: str, values: Mapping[str, Any]) -> str:
    """Return a reason without the path of this environment: two copies must give the same lockfile."""
    prefix = values.get("python.prefix")
    return reason.replace(prefix, "{prefix}") if isinstance(prefix, str) and prefix != "/" else reason


def _require_writable(path: Path) -> None:
    """Refuse a lockfile that could not be written when all the work is done.

    Raises:
        FileUnusable: no file can be made in its folder, or in the nearest one that is there.
    """
    folder = next(one for one in path.parents if os.path.lexists(one))
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise filesystem.refused(path, error) from error


def _require_lockable(answer: Mapping[str, Any], workspace: Workspace) -> None:
    """Refuse an environment that no lockfile can describe.

    Raises:
        EnvironmentUnreadable: a value that each lockfile has, or that must match on the nodes, could not be read; or it
            has no torch.
    """
    values, unknown = answer["values"], _unknown(answer)
    missing = [field for field in lock_model.REQUIRED if field not in values]
    if missing:
        reasons = "\n".join(f"{field}: {unknown.get(field, 'not reported')}" for field in missing)
        raise EnvironmentUnreadable("this environment cannot be locked", why=reasons)
    _require_torch(values, workspace)
    _require_known(unknown, workspace)


def _require_torch(values: Mapping[str, Any], workspace: Workspace) -> None:
    """Refuse an environment in which no training could start, unless the project says so."""
    severity = severities.severities(workspace.project.policy).of("torch.version")
    if values["torch.version"] == "absent" and severity == "must":
        unnamed = workspace.project.on_host and workspace.project.python is None
        another = "activate another environment, or name its" if unnamed else "name another"
        raise EnvironmentUnreadable(
            "this environment has no torch",
            why=f"looked with {values.get('python.executable', 'its Python')}"
            + (": hpcenv.toml names no `python`" if unnamed else ""),
            hint=f"install torch into it, or {another} `python` in hpcenv.toml;\n"
            '      to lock it all the same: "torch.version" = "info" under [policy]',
        )


def _host(
    workspace: Workspace, container: ContainerTable | None, values: Mapping[str, Any]
) -> lock_model.LockedHostTable:
    """Return what nodes must offer to this environment."""
    cuda = str(values.get("torch.cuda", "none"))
    floor = None
    if cuda not in ("none", "absent"):
        floor = driver_floor(compatibility.table(), cuda)
    variables = container.nvidia if container is not None else {}
    return lock_model.LockedHostTable(
        driver_min=floor.version if floor else None,
        gpu=workspace.project.host.gpu,
        gpu_memory=workspace.project.host.gpu_memory,
        nvidia_require={r.variable: r.text for r in requirements(variables)},
    )


def _require_known(unknown: Mapping[str, str], workspace: Workspace) -> None:
    """Refuse to lock what must match on every node but could not be read here.

    A field without a value could not be compared, and every node would seem to match.
    """
    policy, profile = workspace.project.policy, workspace.project.determinism.profile
    resolved = severities.severities(policy, profile)
    # Members of a family (another library, another property of torch) may be unknown: nodes then warn of them.
    missing = {
        field: reason
        for field, reason in unknown.items()
        if (fields.has_row(field) or field in policy) and resolved.of(field) == "must"
    }
    if missing:
        lines = "\n".join(f'      "{field}" = "info"' for field in sorted(missing))
        raise EnvironmentUnreadable(
            "what must match on every node could not be read here",
            why="\n".join(f"{field}: {reason}" for field, reason in sorted(missing.items())),
            hint=f"repair it, or lock without it and say so under [policy] in {workspace.spec.name}:\n{lines}",
        )


def _dist(package: Mapping[str, Any], wheel: lock_model.WheelTable | None, values: Mapping[str, Any]) -> DistTable:
    record, content = package.get("record-sha256"), package.get("content-sha256")
    reason = package.get("reason")
    return DistTable(
        name=package["name"],
        version=package["version"],
        build=package.get("build") or None,
        tags=tuple(sorted(package.get("tags") or ())),
        source=package.get("source"),
        direct_url=_direct_url(package, values),
        wheel=wheel,
        record_sha256=record,
        content_sha256=content if content != record else None,
        programs_sha256=_programs(package),
        reason=_without_path(reason, values) if reason else None,
    )


def _programs(package: Mapping[str, Any]) -> str | None:
    digest = (package.get("programs") or {}).get("sha256")
    return digest if digest != "none" else None


def _direct_url(package: Mapping[str, Any], values: Mapping[str, Any]) -> lock_model.DirectUrlTable | None:
    found, git, files = package.get("direct-url"), package.get("git") or {}, package.get("files") or {}
    if not found:
        return None
    url = found.get("url")
    return lock_model.DirectUrlTable(
        url=_without_path(url, values) if url else None,
        commit_id=found.get("commit-id") or git.get("commit"),
        editable=found.get("editable"),
        dirty=git.get("dirty"),
        diff_sha256=git.get("diff-sha256"),
        files_sha256=files.get("sha256"),
        hash=found.get("hash"),
    )


def _is_whole(lockfile: Lockfile) -> bool:
    """Return whether a lockfile is as it was written: what an edited one says is not believed."""
    return lock_model.fingerprint(lock_model.to_data(lockfile)) == lockfile.fingerprint


def _proved_before(before: Lockfile | None, answer: Mapping[str, Any]) -> dict[str, lock_model.WheelTable]:
    """Return the wheels that the old lockfile names for what is still installed: the same RECORD, programs, content.

    A proved wheel stays proved: the index is not needed again.
    """
    if before is None or not _is_whole(before):
        return {}
    installed = {
        package["name"]: (package["version"], package.get("record-sha256"), _programs(package))
        for package in answer["packages"]
        if package.get("content-sha256") in (None, package.get("record-sha256"))
    }
    return {
        dist.name: dist.wheel
        for dist in before.packages.dist
        if dist.wheel is not None
        and installed.get(dist.name) == (dist.version, dist.record_sha256, dist.programs_sha256)
        and (dist.record_sha256 is not None or dist.wheel.proof in required_hashes.WEAK)
    }


def _proved_now(
    found: Mapping[str, lock_model.WheelTable], before: Mapping[str, lock_model.WheelTable]
) -> dict[str, lock_model.WheelTable]:
    """Return what was found now, unless the old lockfile has a stronger proof."""
    return {
        name: wheel
        for name, wheel in found.items()
        if wheel.proof not in required_hashes.WEAK or name not in before or before[name].proof in required_hashes.WEAK
    }


def _notes(locked: Lockfile, answer: Mapping[str, Any]) -> tuple[str, ...]:
    notes = [f"{field} is unknown: {reason}" for field, reason in locked.unknown.items()]
    notes.extend(
        f"{dist.name} {dist.version} was modified after it was installed"
        for dist in locked.packages.dist
        if dist.content_sha256 is not None and dist.record_sha256 is not None
    )
    notes.extend(_editable_notes(locked))
    notes.extend(_conda_notes(locked))
    outside = {package["name"] for package in answer["packages"] if package.get("scanned") is False}
    unproved = [d.name for d in locked.packages.dist if d.record_sha256 is None and d.source != "editable"]
    for names, what in (
        ([name for name in unproved if name not in outside], "their files count as unlisted"),
        (
            [name for name in unproved if name in outside],
            "they are outside of the environment: their files are not compared",
        ),
    ):
        if names:
            notes.append(f"packages without a digest ({what}): {listed(names, _NAMED)}")
    return tuple(notes)


def _conflict_notes(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the requirements between packages that are not met, as `pip check` does."""
    if "python.version" not in answer["values"]:
        return
    packages = answer["packages"]
    required = {package["name"]: package.get("requires", ()) for package in packages}
    versions = {package["name"]: package["version"] for package in packages}
    found = list(find_conflicts(versions, required, marker_environment(answer["values"])))
    yield from (f"packages do not fit together: {conflict}" for conflict in found[:_CONFLICTS_SHOWN])
    if len(found) > _CONFLICTS_SHOWN:
        yield f"and {len(found) - _CONFLICTS_SHOWN} more; `python -m pip check` in the environment lists them"


def _editable_notes(locked: Lockfile) -> Iterator[str]:
    """Return notes about editable installs: no other user has the changes in their trees."""
    editable = {
        d.name: d.direct_url for d in locked.packages.dist if d.direct_url is not None and d.direct_url.editable
    }
    for name, source in editable.items():
        if source.dirty:
            kept = "what differs is locked as a digest, " if source.diff_sha256 else ""
            yield (
                f"{name} is an editable install and its tree is not commit {(source.commit_id or '')[:12]}: "
                f"{kept}only you have it; commit it, then lock again"
            )
    by_commit = [name for name, source in editable.items() if source.diff_sha256 and not source.dirty]
    by_files = [name for name, source in editable.items() if source.files_sha256]
    for names, what in ((by_commit, "their commit and what differs from it"), (by_files, "the files of their trees")):
        if names:
            yield f"editable installs, compared by {what}: {listed(names, _NAMED)}"


def _conda_notes(locked: Lockfile) -> Iterator[str]:
    """Return which packages of conda are not proved to be the archive that their record names, by reason."""
    reasons = [(table.name, table.reason) for table in locked.packages.conda_package if table.proof == "none"]
    for reason, _ in Counter(reason for _, reason in reasons).most_common(_CONFLICTS_SHOWN):
        names = listed([name for name, why in reasons if why == reason], _NAMED)
        yield f"packages of conda without a proof: {names}: {reason}"


_NAMED = 5
_CONFLICTS_SHOWN = 5


def _changes(before: Lockfile, after: Lockfile) -> tuple[str, ...]:
    """Return what differs between two lockfiles, one line each, most telling first."""
    lines = []
    if before.container and after.container and before.container.digest != after.container.digest:
        lines.append(f"image {before.container.digest} -> {after.container.digest}")
    for field in sorted(set(before.facts) | set(after.facts)):
        old, new = before.facts.get(field), after.facts.get(field)
        if old != new:
            lines.append(f"{field} {_shown(old)} -> {_shown(new)}")
    lines += [
        f"env.{name} {_shown(before.env.get(name))} -> {_shown(after.env.get(name))}"
        for name in sorted({*before.env, *after.env})
        if before.env.get(name) != after.env.get(name)
    ]
    old_dists = {dist.name: dist for dist in before.packages.dist}
    new_dists = {dist.name: dist for dist in after.packages.dist}
    for name in sorted(set(old_dists) | set(new_dists)):
        old_dist, new_dist = old_dists.get(name), new_dists.get(name)
        if old_dist != new_dist:
            lines.append(f"package {name} {_version(old_dist)} -> {_version(new_dist)}")
    lines += conda_changes(before, after)
    if before.packages.unlisted_digest != after.packages.unlisted_digest:
        lines.append(f"unlisted files {before.packages.unlisted_count} -> {after.packages.unlisted_count}")
    return tuple(lines)


def _shown(value: object) -> str:
    return "absent" if value is None else json.dumps(value, ensure_ascii=False)


def _version(dist: DistTable | None) -> str:
    return "absent" if dist is None else dist.version


# -- checking -----------------------------------------------------------------------------


def check_lock(
    workspace: Workspace,
    *,
    environ: Mapping[str, str],
    name: str = DEFAULT_LOCK,
    pins: Path | None = None,
    spec_only: bool = False,
    require_hashes: bool = False,
) -> CheckResult:
    """Return whether a lockfile is stale, and why. Contacts no registry and no index.

    Compares hpcenv.toml, the SIF on disk and, for `image = "host"`, the environment itself
    with the lockfile.

    Args:
        spec_only: compare hpcenv.toml only, and start nothing: a fresh clone has no SIF and no environment.
        require_hashes: the wheel of every package must be proved.
        pins: a file that a fresh lockfile must agree with too, as for `lock`.

    Raises:
        LockfileMissing, LockfileInvalid, LockfileNewer: there is nothing to check.
        PinsDiffer: the lockfile is fresh, and the installed packages differ from the pins.
        HashesUnproved: the lockfile is fresh, and a hash that is required is not proved.
        FileUnusable: the pins cannot be read.
    """
    pin_file = None if pins is None else open_pins(pins)
    path = workspace.lockfile_path(name)
    workspace = workspace.for_lock(name)
    locked = read_lockfile(path)
    reasons = list(stale.compare_spec(workspace.project, locked))
    if not reasons and not spec_only:
        reasons.extend(_check_sif(workspace, locked) if locked.container else _check_host(workspace, locked, environ))
    unsure = () if reasons or pin_file is None else _check_pins(pin_file, locked)
    if not reasons:
        required_hashes.require(locked, every=require_hashes, reasons={}, hint=_TO_PROVE)
    what = "the SIF" if locked.container else "the environment"
    alone = (f"only hpcenv.toml was compared: {what} was not looked at",) if spec_only else ()
    return CheckResult(path=path, reasons=tuple(reasons), notes=(*notes_on(locked, path), *unsure, *alone))


def _check_pins(file: PinFile, locked: Lockfile) -> tuple[str, ...]:
    """Compare the locked packages with the pins; in a fresh lockfile they are the installed ones.

    Raises:
        PinsDiffer: the installed packages differ from the pins.
        LockfileInvalid: the lockfile is too old to say what conda installed.
    """
    dists = [
        InstalledDist(name=d.name, version=d.version, build=d.build or "", tags=d.tags, record_sha256=d.record_sha256)
        for d in locked.packages.dist
    ]
    conda = locked_conda(locked)
    if file.format.conda and len(conda) != (locked.packages.conda_count or 0):
        raise LockfileInvalid(
            f"the lockfile cannot be compared with `{file.path}`",
            why="it was written by an older hpcenv, and does not list what conda installed",
            hint=("lock again: ", Command("hpcenv", "lock", "--from", file.named)),
        )
    pinned = pins_of(file, environment=marker_environment(locked.facts))
    proofs = [_locked_proof(dist) for dist in locked.packages.dist]
    unsure = _require_as_pinned(file, pinned, dists, proofs, conda, place="the locked environment")
    return tuple(_unsure(difference) for difference in unsure)


def _locked_proof(dist: DistTable) -> WheelProof:
    wheel = dist.wheel
    if wheel is None or wheel.proof == "none":
        return WheelProof(name=dist.name, proof="none", reason="the lockfile has no proof of its wheel")
    return WheelProof(
        name=dist.name, filename=wheel.filename, sha256=wheel.sha256, proof=wheel.proof, reason=wheel.reason or ""
    )


def _check_sif(workspace: Workspace, locked: Lockfile) -> list[stale.StaleReason]:
    assert locked.container is not None
    image = locked_sif(workspace, locked.container)
    if not image.exists():
        return [stale.StaleReason(name="sif-missing", locked=locked.container.sif.sha256, found=f"no {image}")]
    digest = sif.file_sha256(image)
    same = digest == locked.container.sif.sha256
    if not same and not stands_for(locked.container, image, digest, place=workspace.store_place):
        return [
            stale.StaleReason(name="sif-differs", locked=locked.container.sif.sha256, found=digest, note=str(image))
        ]
    reasons = [*_check_overlay(workspace, locked.container), *_check_binds(workspace, locked)]
    if reasons:
        return reasons
    changed = definition_changed(workspace, locked.container, image)
    if changed is not None:
        note = f"`{locked.container.reference}` was changed"
        return [stale.StaleReason(name="image-changed", locked=changed[0], found=changed[1], note=note)]
    return []


def _check_overlay(workspace: Workspace, container: ContainerTable) -> list[stale.StaleReason]:
    """Return why what is mounted over the image is not the locked overlay, or cannot be mounted."""
    if container.overlay is None:
        return []
    wanted = container.overlay.digest
    try:
        source, digest = overlay.current(workspace, container.overlay)
    except (HpcenvError, OSError, ValueError) as error:
        found = error.what if isinstance(error, HpcenvError) else str(error)
        return [stale.StaleReason(name="overlay-missing", locked=wanted, found=found)]
    if digest != wanted:
        return [stale.StaleReason(name="overlay-differs", locked=wanted, found=digest, note=source)]
    if not container.overlay.can_be_mounted:
        only = "only a squashfs at a path of the container is mounted"
        return [stale.StaleReason(name="overlay-form", locked=container.overlay.in_words, found=only)]
    return []


def _check_binds(workspace: Workspace, locked: Lockfile) -> list[stale.StaleReason]:
    """Return the binds over files of the image that show something else than was locked."""
    sources, reasons = bind_sources(workspace), []
    for bind in locked.bind:
        if bind.content is None:
            continue
        try:
            found = bind_content.content_digest(sources[bind.target])
        except (OSError, ValueError) as error:
            found = str(error)
        if found != bind.content:
            reasons.append(stale.StaleReason(name="bind-changed", locked=f"{bind.target} {bind.content}", found=found))
    return reasons


def _check_host(workspace: Workspace, locked: Lockfile, environ: Mapping[str, str]) -> list[stale.StaleReason]:
    try:
        variables = workspace.project.env
        answer = probe(host_environment(workspace, environ), environ, level="full", variables=variables)
    except EnvironmentUnreadable as error:
        return [stale.StaleReason(name="environment-unreadable", locked="readable", found=error.why or error.what)]
    differences = facts.compare_packages(lock_model.package_expectations(locked), answer, level="full")
    severities_here = lock_model.severities_of(locked)
    reasons = list(stale.from_differences([d for d in differences if severities_here.of(d.field) == "must"]))
    inside = read_answer(answer)
    here = Facts(
        schema=SCHEMA,
        run="lock",
        node="here",
        attempt=0,
        values=inside.values,
        unknown=inside.unknown,
        network=Network(first_node="here"),
        unlisted=inside.unlisted,
    )
    for expected in lock_model.expectations(locked, level="full", origin=""):
        explained = expected.field.startswith("packages.") and differences
        found = compare.compare(expected, here) if expected.severity == "must" and not explained else None
        if found is not None:
            reasons.append(
                stale.StaleReason(
                    name="environment-differs",
                    locked=f"{found.field} {found.locked}",
                    found=found.found,
                    note=found.note,
                )
            )
    return reasons
