"""`hpcenv lock`: resolve the image, make the SIF, look inside, write the lockfile.

Runs on: LOGIN NODE.

    tag --registry--> digests --apptainer build--> SIF --probe--> facts --> NAME.lock.toml
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcenv.adapters import sif, toml_files
from hpcenv.adapters.pins import (
    Pin,
    PinDifference,
    cross_check,
    known_files,
    marker_environment,
    parse_report,
    read_pins,
    require_readable,
)
from hpcenv.adapters.wheels import Index, InstalledDist, KnownFile, WheelProof, find_wheels
from hpcenv.errors import (
    EnvironmentUnreadable,
    HpcenvError,
    ImageMismatch,
    LockfileInvalid,
    LockfileMissing,
    PinsDiffer,
    SpecError,
)
from hpcenv.model import compat, fields, stale
from hpcenv.model import lockfile as lock_model
from hpcenv.model.fields import Level
from hpcenv.model.image_recipe import REPORT, UNPROVED_REPORT
from hpcenv.model.lockfile import ContainerTable, DistTable, Lockfile, PackagesTable, SifTable
from hpcenv.model.progress import OnEvent, ignore
from hpcenv.node import decide, facts
from hpcenv.steps.environment import container_environment, host_environment, locked_sif
from hpcenv.steps.image.build import Choices, build, definition_changed, need
from hpcenv.steps.same_tree import stands_for
from hpcenv.steps.workspace import DEFAULT_LOCK, Workspace, notes_on, read_lockfile
from hpcenv.version import VERSION
from hpcenv.wire import SCHEMA, Environment, Facts, Network

Report = Callable[[str], None]

# Looking into an environment reads every installed file once: minutes on a cold parallel
# file system, seconds on a warm one.
_PROBE_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class LockResult:
    """What `lock` wrote.

    Attributes:
        path: the lockfile.
        lockfile: its content.
        changed: False when the file already said exactly this.
        changes: what differs from the lockfile that was there before.
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
    """Whether a lockfile still is what the project asks for and what is there.

    Attributes:
        path: the lockfile.
        reasons: why to lock again.
        notes: what could not be told.
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
    report: Report,
    on_event: OnEvent = ignore,
    name: str = DEFAULT_LOCK,
    allow_floating: bool = False,
    upgrade: bool = False,
    level: Level = "full",
    pins: Path | None = None,
    wheels_cache: Path | None = None,
) -> LockResult:
    """Lock the project's environment.

    Args:
        workspace: the project.
        environ: the user's environment.
        report: called with one line per phase.
        on_event: told how the conversion of an image goes on.
        name: which lockfile, `lockfiles/NAME.lock.toml`.
        allow_floating: accept a reference that names another image every few weeks.
        upgrade: ask the registry again what a tag means; without it, an image that is locked
            stays the one that it is, as `uv lock` keeps versions.
        level: `full`, or `deep` to import torch and record what the loader really maps.
        pins: pylock.toml, requirements.txt or uv.lock that the environment must agree with.
        wheels_cache: where proofs of wheels are kept; None looks for no wheels.

    Raises:
        PinsDiffer: something else is installed than was pinned.
        FileUnusable: the pins cannot be read.
        HpcenvError: the image cannot be had, the SIF cannot be made, or the environment
            cannot be read. The old lockfile stays as it is.
    """
    path = workspace.lockfile_path(name)
    # Before the image is made: a newer lockfile is refused, and that must not take minutes.
    before, unreadable = _previous(path)
    lost = () if before is None else notes_on(before, path)
    if pins is not None:
        require_readable(pins)  # likewise
    if workspace.project.on_host:
        environment, container = host_environment(workspace, environ), None
    else:
        made = build(
            workspace,
            before=None if upgrade else before,
            environ=environ,
            on_event=on_event,
            choices=Choices(allow_floating=allow_floating),
        )
        environment, container = container_environment(workspace, made.path, gpus=False), made.container
    report(f"reading {environment.sif or environment.python}")
    kept = _kept_sif(before, container, workspace, path, Path(environment.sif))
    if kept is not None and container is not None:
        container = replace(container, sif=kept)
    answer = probe(environment, environ, level=level, variables=workspace.project.env)
    image = None if container is None else Path(environment.sif)
    proofs = _wheel_proofs(answer, environ, report, cache=wheels_cache, pins=pins, image=image)
    locked = _compose(workspace, container, answer, proofs, before)
    text = toml_files.dumps(lock_model.to_data(locked), header=_header(name))
    _require_valid(workspace, path, text)
    aside = _set_aside(path) if unreadable else None
    changed = toml_files.write(text, path)
    if container is not None:
        need(workspace, path, container)
    notes = (*_notes(locked, answer), *_gpu_notes(locked))
    if kept is not None:
        other = f"{environment.sif} has other bytes than the locked SIF, and the same tree"
        notes = (f"{other}: the lockfile still names that one", *notes)
    notes = (*(f"of the lockfile that was there: {note}" for note in lost), *notes)
    if aside is not None:
        notes = (f"the lockfile that was there could not be read and is kept as {workspace.shown(aside)}", *notes)
    return LockResult(
        path=path,
        lockfile=locked,
        changed=changed,
        changes=_changes(before, locked) if before is not None else (),
        sif=Path(environment.sif) if container is not None else None,
        notes=notes,
    )


def _header(name: str) -> str:
    return (
        "Written by `hpcenv lock`; do not edit, commit it with the code.\n"
        f"Check a machine against it: hpcenv lock --check{'' if name == DEFAULT_LOCK else f' --name {name}'}"
    )


def _previous(path: Path) -> tuple[Lockfile | None, bool]:
    """Return the lockfile to compare with, and whether there is one that cannot be read.

    Raises:
        LockfileNewer: it may hold what this version would lose; it is never overwritten.
    """
    try:
        return read_lockfile(path), False
    except LockfileMissing:
        return None, False
    except LockfileInvalid:
        return None, True


def _set_aside(path: Path) -> Path:
    """Keep what could not be read, under a name that is free."""
    names = (f"{path.name}.unreadable{suffix}" for suffix in ("", *(f".{n}" for n in range(2, 1000))))
    aside = next(place for name in names if not os.path.lexists(place := path.with_name(name)))
    os.replace(path, aside)
    return aside


# -- the environment ----------------------------------------------------------------------


def _kept_sif(
    before: Lockfile | None, container: ContainerTable | None, workspace: Workspace, path: Path, image: Path
) -> SifTable | None:
    """Return what is locked of the SIF where it stays locked, though this one of the same image has other bytes.

    Raises:
        ImageMismatch: it has another tree too, or that is not known: the file was swapped, or something else
            decides what it is. The user has to say which one is meant.
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
        hint=f"if the SIF may be made anew: remove it and {path.name}, then `hpcenv lock`",
    )


# -- the document -------------------------------------------------------------------------


def probe(
    environment: Environment, environ: Mapping[str, str], *, level: str, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the probe's answer for an environment on this machine.

    Raises:
        EnvironmentUnreadable: it did not start or did not answer.
    """
    source = Path(facts.__file__).parents[1] / "incontainer" / "probe.py"
    try:
        return facts.run_probe(
            environment,
            environ,
            probe=source.read_text(encoding="utf-8"),
            level=level,
            seconds=_PROBE_SECONDS,
            variables=variables,
        )
    except (HpcenvError, ValueError, OSError) as error:
        reason = f"{error.what}\n{error.why or ''}" if isinstance(error, HpcenvError) else str(error)
        raise EnvironmentUnreadable(
            f"cannot look inside {environment.sif or environment.python}", why=reason.strip()
        ) from error


def _wheel_proofs(
    answer: Mapping[str, Any],
    environ: Mapping[str, str],
    report: Report,
    *,
    cache: Path | None,
    pins: Path | None,
    image: Path | None = None,
) -> dict[str, WheelProof]:
    """Find the wheels of what is installed, and hold them against the pins.

    Args:
        image: a SIF in which pip's own reports may lie.

    Raises:
        PinsDiffer: something else is installed than was pinned.
    """
    dists = [InstalledDist.from_probe(package) for package in answer["packages"]]
    pinned = read_pins(pins, environment=marker_environment(answer["values"])) if pins is not None else ()
    if cache is None and pins is None:
        return {}
    report(f"finding the wheels of {len(dists)} packages")
    index = Index(env=environ) if cache is not None else None
    place = cache or Path(os.devnull)
    named = (*known_files(pinned), *(_reported_wheels(image, report) if image is not None else ()))
    proofs = find_wheels(dists, sources=named, index=index, cache=place)
    for reason, count in Counter(proof.reason for proof in proofs if proof.proof == "none").most_common(3):
        report(f"  no wheel is proved for {count} of them: {reason}")
    if pins is not None:
        for difference in _require_as_pinned(pins, pinned, dists, proofs):
            report(f"  {_unsure(difference)}")
    return {proof.name: proof for proof in proofs}


# What installs, and need not be pinned.
_INSTALLERS = ("pip", "setuptools", "wheel")


def _require_as_pinned(
    pins: Path, pinned: Sequence[Pin], dists: Sequence[InstalledDist], proofs: Sequence[WheelProof]
) -> list[PinDifference]:
    """Return what could not be compared with the pins.

    Raises:
        PinsDiffer: something else is installed than was pinned.
    """
    differences = cross_check(pinned, dists, proofs, ignore=_INSTALLERS)
    certain = [difference for difference in differences if difference.kind != "unknown"]
    if certain:
        raise PinsDiffer(
            f"what is installed is not what `{pins}` says",
            why="\n".join(
                f"{d.name}: {d.kind}, pinned {d.pinned or 'nothing'}, installed {d.installed or 'nothing'}"
                + (f" ({d.note})" if d.note else "")
                for d in certain
            ),
            hint=f"install from it again: pip install -r {pins}",
        )
    return list(differences)


def _unsure(difference: PinDifference) -> str:
    return f"{difference.name}: could not tell whether it is as pinned ({difference.note})"


def _reported_wheels(image: Path, report: Report) -> tuple[KnownFile, ...]:
    """Return what pip said when it installed into the image, where `image init` had it kept."""
    from hpcenv.adapters import squashfs_reader

    found: list[KnownFile] = []
    try:
        part = sif.read_header(image).runs
    except HpcenvError:
        return ()
    for place in (REPORT, UNPROVED_REPORT):
        try:
            text = squashfs_reader.read_file(image, place.lstrip("/").encode(), offset=part.offset, size=part.size)
        except HpcenvError:
            continue  # most images have none
        try:
            found += parse_report(text, origin=place)
        except LockfileInvalid as error:
            report(f"  {error.what}: {error.why}")
    return tuple(found)


def _compose(
    workspace: Workspace,
    container: ContainerTable | None,
    answer: Mapping[str, Any],
    proofs: Mapping[str, WheelProof],
    before: Lockfile | None,
) -> Lockfile:
    values, unknown = dict(answer["values"]), {**answer["unknown"], **_unknown_sources(answer)}
    missing = [field for field in lock_model.REQUIRED if field not in values]
    if missing:
        reasons = "\n".join(f"{field}: {unknown.get(field, 'not reported')}" for field in missing)
        raise EnvironmentUnreadable("this environment cannot be locked", why=reasons)
    _require_torch(values, workspace)
    _require_known(unknown, workspace)
    kept = _proved_before(before, answer)
    wheels = kept | _proved_now(proofs, kept)
    packages = PackagesTable(
        count=values["packages.count"],
        env_digest=values["packages.env-digest"],
        content_digest=values.get("packages.content-digest"),
        unlisted_count=values["packages.unlisted-count"],
        conda_count=values.get("packages.conda-count") or None,
        conda_digest=values.get("packages.conda-digest"),
        unlisted_digest=values["packages.unlisted-digest"],
        dist=tuple(_dist(package, wheels.get(package["name"]), values) for package in answer["packages"]),
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
        host=_host(workspace, container, values),
        determinism=lock_model.DeterminismTable(profile=workspace.project.determinism.profile),
        unknown={field: _without_place(reason, values) for field, reason in sorted(unknown.items())},
        policy=dict(sorted(workspace.project.policy.items())),
    )
    problems = lock_model.policy_problems(draft)
    if problems:
        raise SpecError(f"`{workspace.spec}` is not valid", why="\n".join(problems))
    return replace(draft, fingerprint=lock_model.fingerprint(lock_model.to_data(draft)))


def _unknown_sources(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return which editable installs have no digest of their code, neither against a commit nor of its files."""
    inside = facts.read_answer(answer)
    found = {}
    for package in answer["packages"]:
        name = f"packages.{package['name']}"
        if f"{name}.diff-sha256" in inside.values or f"{name}.files-sha256" in inside.values:
            continue
        part = "diff-sha256" if f"{name}.dirty" in inside.values else "files-sha256"
        if f"{name}.{part}" in inside.unknown:
            found[f"{name}.{part}"] = inside.unknown[f"{name}.{part}"]
    return found


def _require_valid(workspace: Workspace, path: Path, text: str) -> None:
    """Refuse to write what could not be read again: it is made of what a probe said. `submit` finds it known.

    Raises:
        EnvironmentUnreadable: the environment reports what makes no lockfile.
    """
    data = lock_model.from_data(toml_files.loads(text.encode(), path, error=LockfileInvalid))
    _, problems = workspace.accepted.parse(Lockfile, data, text.encode())
    if problems:
        raise EnvironmentUnreadable("what this environment reports makes no lockfile", why="\n".join(problems))


def _without_place(reason: str, values: Mapping[str, Any]) -> str:
    """Return a reason without the place of this environment: two copies lock to the same bytes."""
    prefix = values.get("python.prefix")
    return reason.replace(prefix, "{prefix}") if isinstance(prefix, str) and prefix != "/" else reason


def _require_torch(values: Mapping[str, Any], workspace: Workspace) -> None:
    """Refuse an environment in which no training could start, unless the project says so."""
    severity = lock_model.severity_of("torch.version", workspace.project.policy)
    if values["torch.version"] == "absent" and severity == "must":
        raise EnvironmentUnreadable(
            "this environment has no torch",
            why=f"looked with {values.get('python.executable', 'its Python')}",
            hint="install torch into it, or name another `python` in hpcenv.toml;\n"
            '      to lock it all the same: "torch.version" = "info" under [policy]',
        )


def _host(workspace: Workspace, container: ContainerTable | None, values: Mapping[str, Any]) -> lock_model.HostTable:
    """Return what nodes must offer to this environment."""
    cuda = str(values.get("torch.cuda", "none"))
    floor = None
    if cuda not in ("none", "absent"):
        floor = compat.driver_floor(_compat(), cuda)
    variables = container.nvidia if container is not None else {}
    return lock_model.HostTable(
        driver_min=floor.version if floor else None,
        gpu=workspace.project.host.gpu,
        nvidia_require={r.variable: r.text for r in compat.requirements(variables)},
    )


def _compat() -> compat.Compat:
    return compat.parse(toml_files.read(compat.PACKAGED, error=SpecError), origin=str(compat.PACKAGED))


def _gpu_notes(locked: Lockfile) -> tuple[str, ...]:
    """Say at lock time what would fail on the GPU that the project names."""
    arch_list = lock_model.arch_list_of(locked)
    if locked.host.gpu is None or not arch_list or lock_model.cuda_of(locked) is None:
        return ()
    table = _compat()
    model = compat.gpu_by_name(table, locked.host.gpu)
    if model is None:
        return (f"the GPU `{locked.host.gpu}` is not in the compatibility table: kernels are not checked for it",)
    judged = compat.covers(table, arch_list, model.compute_capability, gpu=model.name)
    return () if judged.result == "match" else (f"{judged.what}; {judged.hint or judged.why}",)


def _require_known(unknown: Mapping[str, str], workspace: Workspace) -> None:
    """Refuse to lock what must match on every node but could not be read here.

    A field without a value could not be compared, and every node would seem to match.
    """
    profile = workspace.project.determinism.profile
    missing = {
        field: reason
        for field, reason in unknown.items()
        if fields.must_be_known(field) and lock_model.severity_of(field, workspace.project.policy, profile) == "must"
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
        reason=_without_place(reason, values) if reason else None,
    )


def _direct_url(package: Mapping[str, Any], values: Mapping[str, Any]) -> lock_model.DirectUrlTable | None:
    found, git, files = package.get("direct-url"), package.get("git") or {}, package.get("files") or {}
    if not found:
        return None
    url = found.get("url")
    return lock_model.DirectUrlTable(
        url=_without_place(url, values) if url else None,
        commit_id=found.get("commit-id") or git.get("commit"),
        editable=found.get("editable"),
        dirty=git.get("dirty"),
        diff_sha256=git.get("diff-sha256"),
        files_sha256=files.get("sha256"),
        hash=found.get("hash"),
    )


def _proved_before(before: Lockfile | None, answer: Mapping[str, Any]) -> dict[str, lock_model.WheelTable]:
    """Return the wheels that the old lockfile names for what is still installed, RECORD for RECORD.

    A wheel that was proved stays proved: no index needs to be asked again, or to answer.
    """
    if before is None or lock_model.fingerprint(lock_model.to_data(before)) != before.fingerprint:
        return {}
    records = {package["name"]: (package["version"], package.get("record-sha256")) for package in answer["packages"]}
    return {
        dist.name: dist.wheel
        for dist in before.packages.dist
        if dist.wheel is not None
        and records.get(dist.name) == (dist.version, dist.record_sha256)
        and (dist.record_sha256 is not None or dist.wheel.proof in _WEAK)
    }


def _proved_now(
    proofs: Mapping[str, WheelProof], before: Mapping[str, lock_model.WheelTable]
) -> dict[str, lock_model.WheelTable]:
    """Return what was found today, unless it is less than what was proved before."""
    return {
        name: lock_model.WheelTable(
            filename=proof.filename,
            sha256=proof.sha256,
            index=proof.index,
            proof=proof.proof,
            # Why nothing was proved is of the moment (an index that did not answer), not of
            # the environment: it is said, not locked.
            reason=(proof.reason or None) if proof.proof != "none" else None,
        )
        for name, proof in proofs.items()
        if proof.proof not in _WEAK or name not in before or before[name].proof in _WEAK
    }


# Not compared with the installed files: what is found today may say more than these.
_WEAK = ("index-only", "none")


def _notes(locked: Lockfile, answer: Mapping[str, Any]) -> tuple[str, ...]:
    notes = [f"{field} is unknown: {reason}" for field, reason in locked.unknown.items()]
    notes.extend(
        f"{dist.name} {dist.version} was modified after it was installed"
        for dist in locked.packages.dist
        if dist.content_sha256 is not None and dist.record_sha256 is not None
    )
    notes.extend(_editable_notes(locked))
    outside = {package["name"] for package in answer["packages"] if package.get("scanned") is False}
    unproved = [d.name for d in locked.packages.dist if d.record_sha256 is None and d.source != "editable"]
    for names, what in (
        ([name for name in unproved if name not in outside], "their files count as unlisted"),
        (
            [name for name in unproved if name in outside],
            "they lie beside the environment: their files are not compared",
        ),
    ):
        if names:
            notes.append(f"packages without a digest of their own ({what}): {_some(names)}")
    return tuple(notes)


def _editable_notes(locked: Lockfile) -> Iterator[str]:
    """Say by what editable installs are compared: what is changed in their trees nobody else has."""
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
            yield f"editable installs, compared by {what}: {_some(names)}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


_NAMED = 5


def _changes(before: Lockfile, after: Lockfile) -> tuple[str, ...]:
    """Return what differs between two lockfiles, one line each, most telling first."""
    lines = []
    if before.container and after.container and before.container.digest != after.container.digest:
        lines.append(f"image {before.container.digest} -> {after.container.digest}")
    for field in sorted(set(before.facts) | set(after.facts)):
        old, new = before.facts.get(field), after.facts.get(field)
        if old != new:
            lines.append(f"{field} {_shown(old)} -> {_shown(new)}")
    old_dists = {dist.name: dist for dist in before.packages.dist}
    new_dists = {dist.name: dist for dist in after.packages.dist}
    for name in sorted(set(old_dists) | set(new_dists)):
        old_dist, new_dist = old_dists.get(name), new_dists.get(name)
        if old_dist != new_dist:
            lines.append(f"package {name} {_version(old_dist)} -> {_version(new_dist)}")
    if before.packages.unlisted_digest != after.packages.unlisted_digest:
        lines.append(f"unlisted files {before.packages.unlisted_count} -> {after.packages.unlisted_count}")
    return tuple(lines)


def _shown(value: object) -> str:
    return "absent" if value is None else json.dumps(value, ensure_ascii=False)


def _version(dist: DistTable | None) -> str:
    return "absent" if dist is None else dist.version


# -- checking -----------------------------------------------------------------------------


def check_lock(
    workspace: Workspace, *, environ: Mapping[str, str], name: str = DEFAULT_LOCK, pins: Path | None = None
) -> CheckResult:
    """Say whether a lockfile is stale, and why. Asks no registry and no index.

    Compares hpcenv.toml, the SIF on disk and, for `image = "host"`, the environment itself
    with the lockfile.

    Args:
        pins: pylock.toml, requirements.txt or uv.lock that a fresh lockfile must agree with too.

    Raises:
        LockfileMissing, LockfileInvalid, LockfileNewer: there is nothing to check.
        PinsDiffer: the lockfile is fresh, and something else is installed than was pinned.
        FileUnusable: the pins cannot be read.
    """
    if pins is not None:
        require_readable(pins)
    path = workspace.lockfile_path(name)
    locked = read_lockfile(path)
    reasons = list(stale.compare_spec(workspace.project, locked))
    if not reasons:
        reasons.extend(_check_sif(workspace, locked) if locked.container else _check_host(workspace, locked, environ))
    unsure = () if reasons or pins is None else _check_pins(pins, locked)
    return CheckResult(path=path, reasons=tuple(reasons), notes=(*notes_on(locked, path), *unsure))


def _check_pins(pins: Path, locked: Lockfile) -> tuple[str, ...]:
    """Hold what is locked, which of a fresh lockfile is what is installed, against the pins.

    Raises:
        PinsDiffer: something else is installed than was pinned.
    """
    dists = [
        InstalledDist(name=d.name, version=d.version, build=d.build or "", tags=d.tags, record_sha256=d.record_sha256)
        for d in locked.packages.dist
    ]
    pinned = read_pins(pins, environment=marker_environment(locked.facts))
    unsure = _require_as_pinned(pins, pinned, dists, [_locked_proof(dist) for dist in locked.packages.dist])
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
    changed = definition_changed(workspace, locked.container, image)
    if changed is not None:
        note = f"`{locked.container.reference}` was changed"
        return [stale.StaleReason(name="image-changed", locked=changed[0], found=changed[1], note=note)]
    return []


def _check_host(workspace: Workspace, locked: Lockfile, environ: Mapping[str, str]) -> list[stale.StaleReason]:
    try:
        variables = workspace.project.env
        answer = probe(host_environment(workspace, environ), environ, level="full", variables=variables)
    except EnvironmentUnreadable as error:
        return [stale.StaleReason(name="environment-unreadable", locked="readable", found=error.why or error.what)]
    differences = facts.compare_packages(lock_model.package_expectations(locked), answer, level="full")
    reasons = list(stale.from_differences(differences))
    inside = facts.read_answer(answer)
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
        found = decide.compare(expected, here) if expected.severity == "must" and not explained else None
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
