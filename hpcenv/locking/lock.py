"""`hpcenv lock`: resolve the image, make the SIF, read the environment inside, write the lockfile.

Runs on: LOGIN NODE.

    tag --registry--> digests --apptainer build--> SIF --probe--> facts --> NAME.lock.toml
"""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

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
    LockfileStale,
    PinsDiffer,
    SpecError,
)
from hpcenv.facts import facts
from hpcenv.facts.probe import read_answer, run_probe
from hpcenv.identity import bind_content, sif
from hpcenv.image.convert import squashfs_reader
from hpcenv.image.recorded_files import BUILT, REPORT
from hpcenv.image.reference import parse_source
from hpcenv.incontainer.probe.paths import is_below
from hpcenv.incontainer.probe.python import SITE_NAMES
from hpcenv.incontainer.probe.rules import has_rule
from hpcenv.judge import compare
from hpcenv.judge.compat.floors import driver_floor
from hpcenv.judge.compat.image_rules import requirements
from hpcenv.judge.compat.versions import sort_key
from hpcenv.locking import lock_notes, overlay, required_hashes
from hpcenv.locking.built_packages import BuiltPackage, parse_built
from hpcenv.locking.conda_packages import (
    InstalledConda,
    compare_conda,
    conda_changes,
    conda_tables,
    installed_conda,
    locked_conda,
)
from hpcenv.locking.environment import bind_sources, container_environment, host_environment, with_overlay
from hpcenv.locking.image_source import locked_sif
from hpcenv.locking.overlay import FoundOverlay, Origin
from hpcenv.locking.pins.cross_check import PinDifference, cross_check
from hpcenv.locking.pins.formats import PinFile, open_pins, pins_of
from hpcenv.locking.pins.install_report import known_files, parse_report
from hpcenv.locking.pins.pin import Pin, marker_environment, pin_source
from hpcenv.locking.project_image import BuildOptions, build, definition_changed
from hpcenv.locking.same_tree import stands_for
from hpcenv.locking.wheels.find import OpenWheel, find_wheels, open_here
from hpcenv.locking.wheels.proof import Index, InstalledDist, KnownFile, WheelProof, no_proof
from hpcenv.progress import Event, OnEvent, ignore
from hpcenv.project import compatibility, document, fields, severities, stale, toml_files
from hpcenv.project import lockfile as lock_model
from hpcenv.project.context import Context
from hpcenv.project.fields import FieldLevel
from hpcenv.project.lockfile import CondaTable, ContainerTable, DistTable, Lockfile, PackagesTable, SifTable
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.project.workspace import Workspace, notes_on, read_lockfile
from hpcenv.records.codec import SCHEMA
from hpcenv.records.facts import Facts, Network
from hpcenv.records.manifest import Environment
from hpcenv.text import Shown
from hpcenv.version import VERSION

Kept = TypeVar("Kept", BuiltPackage, KnownFile)

# The probe reads every installed file once. This takes seconds if the parallel file system has the files cached, and
# otherwise minutes.
_PROBE_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class LockOptions:
    """The environment to lock or to check, and the options.

    Attributes:
        name: the name of the lockfile, `lockfiles/NAME.lock.toml`.
        allow_floating: accept a reference that names a new image every few weeks.
        plain_http: registries without TLS that the user named himself, in addition to the registries in hpcenv.toml.
        upgrade: ask the registry again which image the tag names. Without `upgrade`, a locked image stays locked, as
            `uv lock` keeps versions.
        level: `full`, or `deep` to import torch and record which libraries the loader maps.
        pins: a file of pins that the environment must agree with, see pins/formats.py. `#CHOSEN` may follow the name of
            the file.
        extras, groups, package: which parts of the project were installed. These options mean the same as for `uv
            sync`.
        wheels: look for the wheels of the packages. The cache folder keeps their proofs. If there is no such folder,
            hpcenv looks for no wheel.
        require_hashes: the sha256 of every package's wheel must be confirmed.
    """

    name: str = DEFAULT_LOCK
    allow_floating: bool = False
    plain_http: tuple[str, ...] = ()
    upgrade: bool = False
    level: FieldLevel = "full"
    pins: str | Path | None = None
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    package: str = ""
    wheels: bool = True
    require_hashes: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class LockResult(Shown):
    """The result of `lock`.

    Attributes:
        path: the lockfile.
        lockfile: its content.
        changed: False when the file already had this content.
        changes: the differences to the previous lockfile.
        sif: the SIF that was locked; None for `image = "host"`.
        notes: values that could not be read, and other notes for the user.
    """

    path: Path
    lockfile: Lockfile
    changed: bool
    changes: tuple[str, ...] = ()
    sif: Path | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """The data that says what to lock. It comes from files only.

    Attributes:
        before: the existing lockfile.
        unreadable: whether a lockfile exists that cannot be read.
        cache: the folder with proofs of wheels. If `cache` is None, no index is asked.
    """

    workspace: Workspace
    options: LockOptions
    path: Path
    before: Lockfile | None
    unreadable: bool
    pins: PinFile | None
    overlay: FoundOverlay | None
    cache: Path | None
    notes: tuple[str, ...]

    @property
    def believed(self) -> Lockfile | None:
        """The existing lockfile if it was not edited: the values in an edited lockfile are not trusted."""
        before = self.before
        whole = before is not None and lock_model.fingerprint(lock_model.to_data(before)) == before.fingerprint
        return before if whole else None


@dataclass(frozen=True, kw_only=True)
class _Resolved:
    """The environment to lock.

    Attributes:
        container: [container] of the lockfile; None for a Python of the host.
        base: the probe's answer in the image without the overlay. `base` is None if there is no overlay, or if the
            image has no Python.
    """

    environment: Environment
    container: ContainerTable | None = None
    base: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def image(self) -> Path | None:
        """The SIF; None for a Python of the host."""
        return None if self.container is None else Path(self.environment.sif)


@dataclass(frozen=True, kw_only=True)
class _Read:
    """The content of the environment.

    Attributes:
        answer: the probe's answer.
        origins: the packages that come from the overlay, by name.
    """

    answer: Mapping[str, Any]
    origins: Mapping[str, Origin]
    binds: tuple[lock_model.LockedBindTable, ...]
    conda: Sequence[InstalledConda]

    @property
    def dists(self) -> list[InstalledDist]:
        """The packages that Python sees."""
        return [InstalledDist.from_probe(package) for package in self.answer["packages"]]


@dataclass(frozen=True, kw_only=True)
class _Proved:
    """The proofs of the archives that the packages were installed from.

    Attributes:
        wheels: the wheels, by package, each with its proof.
        reasons: why the hash of a wheel is not confirmed, by package.
        archives: the archives of the packages that conda installed.
    """

    wheels: Mapping[str, lock_model.WheelTable]
    reasons: Mapping[str, str]
    archives: tuple[CondaTable, ...]


def lock(workspace: Workspace, options: LockOptions, context: Context, on_event: OnEvent = ignore) -> LockResult:
    """Lock the project's environment.

    Args:
        on_event: called to report the progress of an image's conversion, and with one line per phase.

    Raises:
        HashesUnproved: a hash that is required is not confirmed.
        PinsDiffer: the installed packages differ from the pins.
        FileUnusable: the pins cannot be read.
        HpcenvError: the image is not available, the SIF cannot be made, or the environment
            cannot be read. The old lockfile stays as it is.
    """
    environ = context.environ
    inputs = _inputs(workspace, options, context)
    resolved = _resolve(inputs, environ, on_event)
    read = _probe(inputs, resolved, environ)
    proved = _prove(inputs, resolved, read, environ, on_event)
    locked, notes = _compose(inputs, resolved, read, proved, today=dt.date(*context.now[:3]))
    changed, aside = _write(inputs, locked)
    return LockResult(
        path=inputs.path,
        lockfile=locked,
        changed=changed,
        changes=() if inputs.before is None else _changes(inputs.before, locked),
        sif=resolved.image,
        notes=(*inputs.notes, *aside, *resolved.notes, *notes),
    )


def _inputs(workspace: Workspace, options: LockOptions, context: Context) -> _Inputs:
    """Read the files that say what to lock.

    Wrong values are refused before an image is made, because making an image takes minutes.

    Raises:
        LockfileNewer: a newer hpcenv wrote the existing lockfile.
        SpecError: the overlay in hpcenv.toml does not exist, or cannot be mounted over an image.
        FileUnusable: the pins cannot be read, or the lockfile could not be written.
    """
    path = workspace.lockfile_path(options.name)
    without_table = _notes_on_environment(workspace, options.name)
    workspace = workspace.for_lock(options.name)
    before, unreadable = _previous(path)
    _require_writable(path)
    pins = _pin_file(options, context)
    return _Inputs(
        workspace=workspace,
        options=options,
        path=path,
        before=before,
        unreadable=unreadable,
        pins=pins,
        overlay=None if workspace.project.overlay is None else overlay.find(workspace),
        cache=context.cache / "wheels" if options.wheels and context.cache is not None else None,
        notes=(*(() if pins is None else pins.notes), *without_table, *_notes_on_previous(before, path)),
    )


def _resolve(inputs: _Inputs, environ: Mapping[str, str], on_event: OnEvent) -> _Resolved:
    """Find the environment. For an image, also make the SIF if it does not exist."""
    workspace, options = inputs.workspace, inputs.options
    if workspace.project.on_host:
        environment = host_environment(workspace, environ)
        _tell(on_event, _reading(workspace, environment))
        return _Resolved(environment=environment)
    before = None if options.upgrade else inputs.before
    how = BuildOptions(allow_floating=options.allow_floating, plain_http=options.plain_http)
    made = build(workspace, before=before, environ=environ, on_event=on_event, options=how)
    environment = container_environment(workspace, made.path, gpus=False)
    _tell(on_event, f"reading {environment.sif}")
    kept = _kept_sif(inputs, made.container, made.path)
    # The overlay is identified again below, even if the image stays locked.
    container = made.container.model_copy(update={"overlay": None, "sif": kept or made.container.sif})
    notes = () if kept is None else (_other_bytes(environment),)
    resolved = _Resolved(environment=environment, container=container, notes=notes)
    return resolved if inputs.overlay is None else _with_overlay(workspace, inputs.overlay, resolved, environ)


def _probe(inputs: _Inputs, resolved: _Resolved, environ: Mapping[str, str]) -> _Read:
    """Look inside the environment.

    Raises:
        EnvironmentUnreadable: the environment does not start, or no lockfile can describe it.
        SpecError: the content of a bind cannot be hashed.
    """
    environment, workspace = replace(resolved.environment, revision=lock_model.REVISION), inputs.workspace
    answer = probe(environment, environ, level=inputs.options.level, variables=workspace.project.env)
    # This check comes first: the search for wheels may take a minute if the index does not answer.
    _require_lockable(answer, workspace)
    return _Read(
        answer=answer,
        origins=overlay.origins(environment.overlay, answer, resolved.base) if environment.overlay else {},
        binds=_lock_binds(workspace, environment, environ, answer["values"].get("python.sys-path", ())),
        conda=installed_conda(answer),
    )


def _prove(inputs: _Inputs, resolved: _Resolved, read: _Read, environ: Mapping[str, str], on_event: OnEvent) -> _Proved:
    """Find the archives that the packages were installed from, and compare packages and archives with the pins.

    Raises:
        PinsDiffer: the installed packages differ from the pins.
        EnvironmentUnreadable: the packages that conda installed could not be read.
    """
    file, before = inputs.pins, inputs.believed
    pinned = () if file is None else pins_of(file, environment=marker_environment(read.answer["values"]))
    built = _report_in(resolved.image, BUILT, parse_built, on_event)
    proofs: dict[str, WheelProof] = {}
    if inputs.cache is not None or file is not None:
        # The image itself names these wheels: in pip's reports, and in the report of packages that were compiled in it.
        reported = _report_in(resolved.image, REPORT, partial(parse_report, origin=REPORT), on_event)
        named = (*known_files(pinned), *(one.file for one in built), *reported)
        proofs = _wheel_proofs(read, environ, on_event, image=resolved.image, cache=inputs.cache, named=named)
    if file is not None:
        _require_as_pinned_here(file, pinned, read, proofs, on_event)
    kept = _proved_before(before, read.answer)
    return _Proved(
        wheels=kept | _proved_now(_with_builds(proofs, built), kept),
        reasons={name: proof.reason for name, proof in proofs.items() if proof.reason},
        archives=conda_tables(read.conda, pinned, before),
    )


def _compose(
    inputs: _Inputs, resolved: _Resolved, read: _Read, proved: _Proved, *, today: dt.date
) -> tuple[Lockfile, tuple[str, ...]]:
    """Return the lockfile, and notes on it for the user.

    Raises:
        HashesUnproved: a hash that is required is not confirmed.
        EnvironmentUnreadable: the values that the environment reports do not make a valid lockfile.
        SpecError: a key of [policy] can have no effect.
    """
    with _invalid_values_refused():
        locked = _lockfile(inputs.workspace, resolved.container, read, proved)
    required_hashes.require(locked, every=inputs.options.require_hashes, reasons=proved.reasons, hint=_TO_PROVE)
    return locked, lock_notes.notes(locked, read.answer, read.origins, today=today)


def _write(inputs: _Inputs, locked: Lockfile) -> tuple[bool, tuple[str, ...]]:
    """Write the lockfile; return whether it changed, and a note if an unreadable old lockfile was kept."""
    text = toml_files.dumps(lock_model.to_data(locked), header=_header(inputs.options.name))
    _require_valid(inputs.path, text)
    kept = inputs.workspace.shown(_set_aside(inputs.path)) if inputs.unreadable else None
    notes = () if kept is None else (f"the old lockfile could not be read and is kept as {kept}",)
    return toml_files.write(text, inputs.path), notes


def _tell(on_event: OnEvent, line: str) -> None:
    on_event(Event(phase="note", what=line))


def _pin_file(options: LockOptions, context: Context) -> PinFile | None:
    choice = {"extras": options.extras, "groups": options.groups}
    source = pin_source(options.pins, context.cwd, **choice, package=options.package)
    return None if source is None else open_pins(source)


def _with_overlay(
    workspace: Workspace, found: FoundOverlay, resolved: _Resolved, environ: Mapping[str, str]
) -> _Resolved:
    """Return the environment with its overlay, [container] with the overlay's identity, and the image's own content.

    Raises:
        SpecError: the image does not have the Python of a virtual environment, or the overlay cannot be read.
    """
    environment, container = resolved.environment, resolved.container
    assert container is not None
    image, base, why = Path(environment.sif), None, ""
    try:
        base = probe(overlay.base_environment(workspace, image, found), environ, level="record")
    except EnvironmentUnreadable as error:
        why = error.why or error.what
    overlay.require_interpreter(found, base, why, environment)
    overlay.require_python(found.overlay, environment, environ)
    table = overlay.identify(found.overlay, overlay.python_path_of(base))
    mounted = with_overlay(environment, overlay.locked_overlay(workspace, table), workspace)
    return replace(resolved, environment=mounted, container=container.model_copy(update={"overlay": table}), base=base)


def _notes_on_environment(workspace: Workspace, name: str) -> tuple[str, ...]:
    """Return a note if the project has several environments, but none with this name: the name may be misspelt."""
    known = workspace.project.environment
    if not known or name in known or name == DEFAULT_LOCK:
        return ()
    return (f"hpcenv.toml has no [environment.{name}], only {', '.join(known)}: `{name}` uses the keys at its top",)


_TO_PROVE = (
    "install these packages from wheels of an index that pip is configured for (`pip config list`), then lock again"
)


def _reading(workspace: Workspace, environment: Environment) -> str:
    if workspace.project.python is None:
        return f"reading {environment.python}"
    return f"starting {environment.python}, which `python` in {workspace.spec} names, and reading its packages"


def _notes_on_previous(before: Lockfile | None, path: Path) -> tuple[str, ...]:
    """Return notes on the lockfile that will be replaced. Call this before the new lockfile is written."""
    lost = () if before is None or before.revision <= lock_model.REVISION else notes_on(before, path)
    return tuple(f"about the old lockfile: {note}" for note in lost)


def _other_bytes(environment: Environment) -> str:
    other = f"{environment.sif} has different bytes than the locked SIF, and the same file tree"
    return f"{other}: the lockfile still names the locked SIF"


def _header(name: str) -> str:
    return (
        "Written by `hpcenv lock`; do not edit, commit it with the code.\n"
        f"Check a machine against it: hpcenv lock --check{'' if name == DEFAULT_LOCK else f' --lock {name}'}"
    )


def _previous(path: Path) -> tuple[Lockfile | None, bool]:
    """Return the old lockfile to compare with, and whether an old lockfile exists that cannot be read.

    Raises:
        LockfileNewer: this version of hpcenv does not know all fields of the lockfile, so it must not replace the file.
    """
    try:
        return read_lockfile(path), False
    except LockfileMissing:
        return None, False
    except LockfileInvalid:
        return None, True


def _set_aside(path: Path) -> Path:
    """Rename an unreadable file to a name that is not in use."""
    names = (f"{path.name}.unreadable{suffix}" for suffix in ("", *(f".{n}" for n in range(2, 1000))))
    aside = next(place for name in names if not os.path.lexists(place := path.with_name(name)))
    os.replace(path, aside)
    return aside


# -- the environment ----------------------------------------------------------------------


def _kept_sif(inputs: _Inputs, found: ContainerTable, image: Path) -> SifTable | None:
    """Return the old lockfile's table of the SIF; None if the caller must lock the SIF that was found.

    The old table stays valid if the SIF has different bytes, but the same image and the same file tree.

    Raises:
        ImageMismatch: the file trees differ too, or cannot be compared. Somebody may have replaced the file, so the
            user must decide which SIF to lock.
    """
    locked = None if inputs.before is None else inputs.before.container
    if locked is None:
        return None
    if locked.manifest_digest != found.manifest_digest or None in (locked.manifest_digest, found.manifest_digest):
        return None
    if locked.sif.sha256 == found.sif.sha256:
        return None
    if stands_for(locked, image, found.sif.sha256, place=inputs.workspace.store_place):
        return locked.sif
    raise ImageMismatch(
        "the SIF is not the SIF that was locked for this image",
        why=f"{inputs.path} says sha256 {locked.sif.sha256}, the file has {found.sif.sha256}, and another tree",
        hint=(f"to make the SIF again: remove it and {inputs.path.name}, then ", Command("hpcenv", "lock")),
    )


# -- the document -------------------------------------------------------------------------


def probe(
    environment: Environment, environ: Mapping[str, str], *, level: str, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the probe's answer for an environment on this machine.

    Raises:
        EnvironmentUnreadable: the environment did not start, or the probe in it did not answer.
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
        hint = error.hint if isinstance(error, HpcenvError) else None
        raise EnvironmentUnreadable(
            f"cannot look inside {environment.sif or environment.python}", why=reason.strip(), hint=hint
        ) from error


def _lock_binds(
    workspace: Workspace, environment: Environment, environ: Mapping[str, str], search: Sequence[str]
) -> tuple[lock_model.LockedBindTable, ...]:
    """Return [[bind]] for the lockfile, with a digest of each bind that hides files of the image or adds code to it.

    Args:
        search: sys.path of the ranks.

    Raises:
        SpecError: the content of such a bind cannot be hashed.
        EnvironmentUnreadable: the image cannot be read.
    """
    binds = stale.locked_binds(workspace.project)
    targets = tuple(bind.target for bind in binds)
    try:
        over_image = bare_image.paths_with_code(environment, targets, environ) if targets else ()
    except (HpcenvError, ValueError, OSError) as error:
        raise EnvironmentUnreadable(f"cannot look at the paths of {environment.sif}", why=str(error)) from error
    sources = bind_sources(workspace)
    # The lockfile lists packages in the prefix, and in folders with the names SITE_NAMES, one by one.
    code = [path for path in search if path.startswith("/") and os.path.basename(path) not in SITE_NAMES]
    places = {path: bind_content.source_of(path, sources) for path in code}
    locked = []
    for bind in binds:
        if bind.target in over_image or any(is_below(bind.target, path) for path in code):
            whole = _bind_content(bind.target, sources[bind.target], workspace)
            locked.append(bind.model_copy(update={"content": whole}))
            continue
        parts = {path: place for path, (target, place) in places.items() if target == bind.target}
        found = {path: _bind_content(path, place, workspace) for path, place in parts.items() if os.path.exists(place)}
        locked.append(bind.model_copy(update={"code": found}))
    return tuple(locked)


def _bind_content(target: str, source: str, workspace: Workspace) -> str:
    try:
        return bind_content.content_digest(source)
    except (OSError, ValueError) as error:
        raise SpecError(
            f"the bind over `{target}` cannot be locked",
            why=f"the bind hides files of the image, or adds code to the image, so its content must be locked: {error}",
            hint=f"in [[bind]] of {workspace.spec.name}, choose a smaller folder, or a target that is not in the image "
            "or on PYTHONPATH",
        ) from error


def _wheel_proofs(
    read: _Read,
    environ: Mapping[str, str],
    on_event: OnEvent,
    *,
    image: Path | None,
    cache: Path | None,
    named: Sequence[KnownFile],
) -> dict[str, WheelProof]:
    """Find the wheels of the installed packages. For a package that conda installed, no index is asked.

    Args:
        image: the SIF, which may still contain a local wheel that was installed; None for an environment of the host.
        cache: where proofs are kept. If `cache` is None, no index is asked.
        named: wheels that are named by a file of pins, a report of pip or the report of a build.
    """
    owners = {name: package.name for package in read.conda for name in package.dists}
    mine = [dist for dist in read.dists if dist.name not in owners]
    index = Index(env=environ) if cache is not None else None
    if mine:
        _tell(on_event, f"finding the wheels of {len(mine)} packages")
    found = find_wheels(mine, sources=named, index=index, cache=cache or Path(os.devnull), open_wheel=_opener(image))
    proofs = {proof.name: proof for proof in found}
    for reason, count in Counter(proof.reason for proof in proofs.values() if proof.proof == "none").most_common(3):
        _tell(on_event, f"  no wheel is confirmed for {count} of them: {reason}")
    return {
        dist.name: proofs.get(dist.name) or no_proof(dist, f"conda installed it, with its package {owners[dist.name]}")
        for dist in read.dists
    }


# Tools that install packages. Files of pins often do not list them.
_INSTALLERS = ("pip", "setuptools", "wheel")


def _require_as_pinned_here(
    file: PinFile, pinned: Sequence[Pin], read: _Read, proofs: Mapping[str, WheelProof], on_event: OnEvent
) -> None:
    """Compare the environment that was just read with the pins, and report packages that could not be compared.

    Raises:
        PinsDiffer: the installed packages differ from the pins.
        EnvironmentUnreadable: the packages that conda installed could not be read.
    """
    unread = read.answer["unknown"].get("packages.conda-digest")
    if file.format.conda and unread:
        raise EnvironmentUnreadable(f"cannot compare the environment with `{file.path}`", why=f"conda-meta: {unread}")
    place = str(read.answer["values"].get("python.prefix", "the environment"))
    dists, of_each = read.dists, [proofs[dist.name] for dist in read.dists]
    for difference in _require_as_pinned(file, pinned, dists, of_each, read.conda, place=place):
        _tell(on_event, f"  {_unsure(difference)}")


def _require_as_pinned(
    file: PinFile,
    pinned: Sequence[Pin],
    dists: Sequence[InstalledDist],
    proofs: Sequence[WheelProof],
    conda: Sequence[InstalledConda],
    *,
    place: str,
) -> list[PinDifference]:
    """Return the packages that could not be compared with the pins.

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
    of_pip = cross_check(by_pip, dists, proofs, ignore=(*_INSTALLERS, *file.project))
    differences += of_pip
    certain = [difference for difference in differences if difference.kind != "unknown"]
    if certain:
        more = [f"and {len(certain) - _DIFFERENCES_SHOWN} more"] if len(certain) > _DIFFERENCES_SHOWN else []
        too_many = [difference.name for difference in of_pip if difference.kind == "not-pinned"]
        force = any(difference.kind == "other-file" for difference in of_pip)
        raise PinsDiffer(
            f"what is installed is not what `{file.path}` says",
            why="\n".join([*map(_difference_line, certain[:_DIFFERENCES_SHOWN]), *more]),
            hint=file.mend(too_many, others=len(certain) > len(too_many), force=force),
        )
    return list(differences)


_DIFFERENCES_SHOWN = 40


def _difference_line(difference: PinDifference) -> str:
    pinned, installed = difference.pinned or "nothing", difference.installed or "nothing"
    note = f" ({difference.note})" if difference.note else ""
    return f"{difference.name}: {difference.kind}, pinned {pinned}, installed {installed}{note}"


def _require_conda(file: PinFile, pinned: Sequence[Pin], conda: Sequence[InstalledConda], place: str) -> None:
    """Refuse an environment in which conda installed nothing, if the file pins packages of conda.

    Raises:
        PinsDiffer: the file pins packages of conda, and conda installed nothing.
    """
    if not conda and any(pin.manager == "conda" for pin in pinned):
        raise PinsDiffer(
            f"`{file.path}` describes a conda environment, and this is not a conda environment",
            why=f"{place} has no record in conda-meta",
            hint=(
                'name its Python in hpcenv.toml, `python = ".pixi/envs/default/bin/python"` for one of pixi, '
                f"after: {file.reinstall()}"
            ),
        )


def _unsure(difference: PinDifference) -> str:
    return f"{difference.name}: could not tell whether it is as pinned ({difference.note})"


def _opener(image: Path | None) -> OpenWheel:
    """Return a function that opens a file of the environment by its path in the environment.

    If the file cannot be read, the function raises OSError on the host, and HpcenvError for a file in an image.
    """
    if image is None:
        return open_here

    def open_in_image(path: str) -> BinaryIO:
        part, inside = sif.read_header(image).runs, path.lstrip("/").encode()
        return io.BytesIO(squashfs_reader.read_file(image, inside, offset=part.offset, size=part.size))

    return open_in_image


def _report_in(
    image: Path | None, name: str, parse: Callable[[bytes], Sequence[Kept]], on_event: OnEvent
) -> tuple[Kept, ...]:
    """Return a report on packages that a recipe of `hpcenv image init` left in the image, from pip or from a build."""
    if image is None:
        return ()
    try:
        text = _opener(image)(name).read()
    except HpcenvError:
        return ()  # most images have no such report
    try:
        return tuple(parse(text))
    except LockfileInvalid as error:
        _tell(on_event, f"  {error.what}: {error.why}")
        return ()


def _with_builds(proofs: Mapping[str, WheelProof], built: Sequence[BuiltPackage]) -> dict[str, lock_model.WheelTable]:
    """Return each wheel's table for the lockfile, with the compilers for a wheel that was compiled in the image."""
    tables = {(one.file.filename, one.file.sha256): one.table for one in built}
    return {
        name: lock_model.WheelTable(
            filename=proof.filename,
            sha256=proof.sha256,
            index=proof.index,
            proof=proof.proof,
            # The reason why nothing was confirmed may be temporary (the index did not answer). So this reason is
            # printed, but it is not locked.
            reason=(proof.reason or None) if proof.proof != "none" else None,
            built=tables.get((proof.filename or "", proof.sha256 or "")) if proof.proof == "built" else None,
        )
        for name, proof in proofs.items()
    }


def _lockfile(workspace: Workspace, container: ContainerTable | None, read: _Read, proved: _Proved) -> Lockfile:
    answer = read.answer
    values, unknown = dict(answer["values"]), _unknown(answer)
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
        dist=tuple(_dist(package, read, proved) for package in answer["packages"]),
        conda_package=proved.archives,
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
        bind=read.binds,
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
    """Return the fields that could not be read, with the reasons."""
    # Compilers are facts of a node. A lockfile does not contain them.
    unknown = {field: why for field, why in answer["unknown"].items() if not field.startswith("compilers.")}
    return {**unknown, **_unknown_sources(answer)}


def _unknown_sources(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return the editable installs whose code has no digest, with the reasons.

    The digest is over the changes since a commit, or over the files.
    """
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
    """Refuse values that are not valid in a lockfile. The probe reads these values inside the environment.

    Raises:
        EnvironmentUnreadable: the values that the environment reports do not make a valid lockfile.
    """
    try:
        yield
    except ValidationError as error:
        raise _no_valid_lockfile(document.problems(Lockfile, error)) from error


def _require_valid(path: Path, text: str) -> None:
    """Refuse to write a lockfile that could not be read again.

    Raises:
        EnvironmentUnreadable: the values that the environment reports do not make a valid lockfile.
    """
    data = lock_model.from_data(toml_files.loads(text.encode(), path, error=LockfileInvalid))
    _, problems = document.parse(Lockfile, data)
    if problems:
        raise _no_valid_lockfile(problems)


def _no_valid_lockfile(problems: Sequence[str]) -> EnvironmentUnreadable:
    return EnvironmentUnreadable("what this environment reports gives no valid lockfile", why="\n".join(problems))


def _without_path(reason: str, values: Mapping[str, Any]) -> str:
    """Remove the environment's path from a reason: two copies of an environment must give the same lockfile."""
    prefix = values.get("python.prefix")
    return reason.replace(prefix, "{prefix}") if isinstance(prefix, str) and prefix != "/" else reason


def _require_writable(path: Path) -> None:
    """Refuse a lockfile that cannot be written, before the work begins.

    Raises:
        FileUnusable: no file can be made in its folder, or in the nearest parent folder that exists.
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
        EnvironmentUnreadable: a value that every lockfile has, or that must match on the nodes, could not be read; or
            the environment has no torch.
    """
    values, unknown = answer["values"], _unknown(answer)
    missing = [field for field in lock_model.REQUIRED if field not in values]
    if missing:
        reasons = "\n".join(f"{field}: {unknown.get(field, 'not reported')}" for field in missing)
        raise EnvironmentUnreadable("this environment cannot be locked", why=reasons)
    _require_torch(values, workspace)
    _require_known(unknown, workspace)


def _require_torch(values: Mapping[str, Any], workspace: Workspace) -> None:
    """Refuse an environment without torch if the severity of `torch.version` is `must`."""
    severity = severities.severities(workspace.project.policy).of("torch.version")
    if values["torch.version"] == "absent" and severity == "must":
        unnamed = workspace.project.on_host and workspace.project.python is None
        another = "activate another environment, or name its" if unnamed else "name another"
        raise EnvironmentUnreadable(
            "this environment has no torch",
            why=f"hpcenv looked for torch with {values.get('python.executable', 'its Python')}"
            + (": hpcenv.toml names no `python`" if unnamed else ""),
            hint=f"install torch into this environment, or {another} `python` in hpcenv.toml;\n"
            'to lock it without torch: "torch.version" = "info" under [policy]',
        )


def _host(
    workspace: Workspace, container: ContainerTable | None, values: Mapping[str, Any]
) -> lock_model.LockedHostTable:
    """Return the minimum that nodes must have to run this environment."""
    # `jax.cuda` has only major releases of CUDA. They are enough to find the oldest driver.
    releases = [one for field in ("torch.cuda", "jax.cuda") for one in str(values.get(field, "none")).split(", ")]
    floors = [driver_floor(compatibility.table(), cuda) for cuda in releases]
    floor = max((one for one in floors if one is not None), key=lambda one: sort_key(one.version), default=None)
    variables = container.nvidia if container is not None else {}
    return lock_model.LockedHostTable(
        driver_min=floor.version if floor else None,
        gpu=workspace.project.host.gpu,
        gpu_memory=workspace.project.host.gpu_memory,
        nvidia_require={r.variable: r.text for r in requirements(variables)},
    )


def _require_known(unknown: Mapping[str, str], workspace: Workspace) -> None:
    """Refuse to lock if a field that must match on every node could not be read here.

    A field without a value could not be compared, and every node would seem to match.
    """
    policy, profile = workspace.project.policy, workspace.project.determinism.profile
    resolved = severities.severities(policy, profile)
    # Fields of a family (a library, a property of torch) may be unknown: nodes then give a warning for each field.
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
            hint=f"repair it, or allow that it is unknown, under [policy] in {workspace.spec.name}:\n{lines}",
        )


def _dist(package: Mapping[str, Any], read: _Read, proved: _Proved) -> DistTable:
    values, origin = read.answer["values"], read.origins.get(package["name"])
    record, content = package.get("record-sha256"), package.get("content-sha256")
    reason = package.get("reason")
    return DistTable(
        name=package["name"],
        version=package["version"],
        build=package.get("build") or None,
        tags=tuple(sorted(package.get("tags") or ())),
        source=package.get("source"),
        direct_url=_direct_url(package, values),
        wheel=proved.wheels.get(package["name"]),
        record_sha256=record,
        content_sha256=content if content != record else None,
        programs_sha256=_programs(package),
        reason=_without_path(reason, values) if reason else None,
        layer="overlay" if origin else None,
        hides=(origin.hides or None) if origin else None,
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


def _proved_before(before: Lockfile | None, answer: Mapping[str, Any]) -> dict[str, lock_model.WheelTable]:
    """Return the old lockfile's wheels of the packages whose version, RECORD, programs and content are unchanged.

    A wheel that was confirmed before stays confirmed, so the index is not needed again.
    """
    if before is None:
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
        # In lockfiles before revision 2, direct_url.json was a proof. Now the proof of such a wheel is `claimed`.
        and (dist.wheel.proof != "direct-url" or before.revision >= 2)
    }


def _proved_now(
    found: Mapping[str, lock_model.WheelTable], before: Mapping[str, lock_model.WheelTable]
) -> dict[str, lock_model.WheelTable]:
    """Return the new proofs to lock. A weak new proof does not replace a strong proof of the old lockfile."""
    return {
        name: wheel
        for name, wheel in found.items()
        if wheel.proof not in required_hashes.WEAK or name not in before or before[name].proof in required_hashes.WEAK
    }


def _changes(before: Lockfile, after: Lockfile) -> tuple[str, ...]:
    """Return the differences between two lockfiles as lines, the most important difference first."""
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


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckResult(Shown):
    """Whether a lockfile still fits hpcenv.toml and the environment.

    Attributes:
        name: the lockfile's name.
        path: the lockfile.
        reasons: why the environment must be locked again.
        notes: the parts that could not be checked.
        problem: None if the lockfile is fresh; otherwise an error that says that the lockfile is stale. In a result of
            `check_locks`, the error may also say why the lockfile cannot be checked.
    """

    name: str
    path: Path
    reasons: tuple[stale.StaleReason, ...] = ()
    notes: tuple[str, ...] = ()
    problem: HpcenvError | None = None

    @property
    def fresh(self) -> bool:
        """Whether there is no reason to lock again."""
        return self.problem is None


def check_locks(
    workspace: Workspace, options: LockOptions, context: Context, *, spec_only: bool = False
) -> tuple[CheckResult, ...]:
    """Check a lockfile and the lockfiles of all [environment.NAME].

    An error is not raised; it is `problem` of its result.
    """
    names = dict.fromkeys((options.name, *sorted(workspace.project.environment)))
    found = []
    for name in names:
        try:
            found.append(check_lock(workspace, replace(options, name=name), context, spec_only=spec_only))
        except HpcenvError as error:
            found.append(CheckResult(name=name, path=workspace.lockfile_path(name), problem=error))
    return tuple(found)


def problem_of(checked: Sequence[CheckResult]) -> HpcenvError | None:
    """Return the problems of several lockfiles as one error, with the first exit status; None if all are fresh."""
    problems = [one.problem for one in checked if one.problem is not None]
    if len(problems) < 2:
        return problems[0] if problems else None
    lines = [line for one in problems for line in (one.what, *(f"  {why}" for why in (one.why or "").splitlines()))]
    hints = dict.fromkeys(one.hint for one in problems if one.hint)
    what = f"{len(problems)} of {len(checked)} lockfiles are not right"
    return problems[0].changed(what=what, why="\n".join(lines), hint="\n".join(hints) or None)


def check_lock(workspace: Workspace, options: LockOptions, context: Context, *, spec_only: bool = False) -> CheckResult:
    """Return whether a lockfile is stale, and why. Contacts no registry and no index.

    Compares hpcenv.toml, the SIF on disk and, for `image = "host"`, the environment itself with the lockfile.

    Args:
        options: only `name`, `require_hashes`, and `pins` with `extras`, `groups` and `package` are used.
        spec_only: compare hpcenv.toml only, and start nothing. A fresh clone has no SIF and no environment.

    Raises:
        LockfileMissing, LockfileInvalid, LockfileNewer: there is nothing to check.
        SpecError: `image` names no image, so `hpcenv lock` would refuse the project too.
        PinsDiffer: the lockfile is fresh, but the installed packages differ from the pins.
        HashesUnproved: the lockfile is fresh, but a hash that is required is not confirmed.
        FileUnusable: the pins cannot be read.
    """
    pin_file, name = _pin_file(options, context), options.name
    path = workspace.lockfile_path(name)
    workspace = workspace.for_lock(name)
    locked = read_lockfile(path)
    reasons = list(stale.compare_spec(workspace.project, locked))
    if not reasons and not spec_only:
        of_sif = locked.container is not None
        reasons += _check_sif(workspace, locked) if of_sif else _check_host(workspace, locked, context.environ)
    unsure = () if reasons or pin_file is None else _check_pins(pin_file, locked)
    if not reasons:
        required_hashes.require(locked, every=options.require_hashes, reasons={}, hint=_TO_PROVE)
    what = "the SIF" if locked.container else "the environment"
    alone = (f"only hpcenv.toml was compared: {what} was not looked at",) if spec_only else ()
    return CheckResult(
        name=name,
        path=path,
        reasons=tuple(reasons),
        notes=(*notes_on(locked, path), *unsure, *alone),
        problem=_stale(workspace, path, name, reasons) if reasons else None,
    )


def _stale(workspace: Workspace, path: Path, name: str, reasons: Sequence[stale.StaleReason]) -> LockfileStale:
    parse_source(workspace.project.image)  # `ubuntu` names no image, so `hpcenv lock` would refuse the project too
    why = "\n".join(str(reason) for reason in reasons)
    hint = stale.hint(reasons, path=path, name=name)
    return LockfileStale(f"`{workspace.shown(path)}` is stale", why=why, hint=hint)


def _check_pins(file: PinFile, locked: Lockfile) -> tuple[str, ...]:
    """Compare the locked packages with the pins. The lockfile is fresh, so the locked packages are installed.

    Raises:
        PinsDiffer: the installed packages differ from the pins.
        LockfileInvalid: the lockfile is too old to list the packages that conda installed.
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
    """Return why the overlay is not the locked overlay, or why it cannot be mounted."""
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
    """Return the binds over files of the image that do not have the locked content."""
    sources = bind_sources(workspace)
    compiled = not has_rule("path-binds", locked.revision)
    reasons = []
    for path, digest in lock_model.bind_contents(locked):
        try:
            found = bind_content.content_digest(bind_content.source_of(path, sources)[1], compiled=compiled)
        except (OSError, ValueError) as error:
            found = str(error)
        if found != digest:
            reasons.append(stale.StaleReason(name="bind-changed", locked=f"{path} {digest}", found=found))
    return reasons


def _check_host(workspace: Workspace, locked: Lockfile, environ: Mapping[str, str]) -> list[stale.StaleReason]:
    try:
        variables = workspace.project.env
        environment = replace(host_environment(workspace, environ), revision=locked.revision)
        answer = probe(environment, environ, level="full", variables=variables)
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
