"""Why a lockfile is stale: a list of named reasons. Pure.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcenv.errors import Command, Hint
from hpcenv.project import lockfile as lock_model
from hpcenv.project.lockfile import AskedTable, LockedBindTable, Lockfile, OverlayTable
from hpcenv.project.spec import DEFAULT_LOCK, Project, split_overlay
from hpcenv.project.workspace import to_restore
from hpcenv.records.facts import Difference
from hpcenv.records.variables import recorded_value

Name = Literal[
    "image-changed", "python-changed", "platform-changed", "policy-changed", "sif-missing", "sif-differs",
    "environment-differs", "environment-unreadable", "edited", "gpu-changed", "profile-changed",
    "env-changed", "bind-changed", "gpu-memory-changed", "overlay-changed", "overlay-missing", "overlay-differs",
    "overlay-form",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StaleReason:
    """One reason: the locked value, and the value now."""

    name: Name
    locked: str
    found: str
    note: str = ""

    def __str__(self) -> str:
        text = f"{self.name}: locked {self.locked}, now {self.found}"
        return f"{text} ({self.note})" if self.note else text


_ABOUT_THE_SIF = frozenset({"sif-missing", "sif-differs"})


def hint(reasons: Sequence[StaleReason], *, path: Path, name: str) -> Hint:
    """Return what to do about a stale lockfile. If the user may still want the locked values, the hint keeps the file.

    Args:
        path: the path of the lockfile.
        name: the name of the lockfile.
    """
    lock = Command("hpcenv", "lock", *(() if name == DEFAULT_LOCK else ("--lock", name)))
    names = {reason.name for reason in reasons}
    if names and names <= _ABOUT_THE_SIF:
        build = Command("hpcenv", "image", "build", *(() if name == DEFAULT_LOCK else ("--lock", name)))
        return ("to make the SIF that is locked: ", build)
    if "edited" in names:
        return to_restore(path)
    if "overlay-form" in names:
        pack = Command("mksquashfs", "DIR", "x.sqsh")
        return ("pack it: ", pack, '\nthen name it with its place, overlay = "x.sqsh:/TARGET", and: ', lock)
    if names & {"overlay-missing", "overlay-differs"}:
        return ("get the overlay back that was locked; to lock the one that is there now: ", lock)
    if "environment-differs" in names or "environment-unreadable" in names:
        return ("install what is locked, as the lockfile says; to lock what is installed now: ", lock)
    return lock


def asked_by(project: Project) -> AskedTable:
    """Return the part of hpcenv.toml that decides what is locked."""
    return AskedTable(image=project.image, python=project.python, platform=project.platform)


def compare_spec(project: Project, lockfile: Lockfile) -> tuple[StaleReason, ...]:
    """Compare hpcenv.toml with the lockfile, and the lockfile with its fingerprint."""
    asked = asked_by(project)
    reasons = []
    content = edited_content(lockfile)
    if content is not None:
        note = "the file was changed by hand or by a merge"
        reasons.append(StaleReason(name="edited", locked=lockfile.fingerprint, found=content, note=note))
    pairs: tuple[tuple[Name, str | None, str | None], ...] = (
        ("image-changed", lockfile.asked.image, asked.image),
        # On the host, `python` is a path, not an identity. The environment of the host is compared field by field.
        ("python-changed", lockfile.asked.python, lockfile.asked.python if lockfile.kind == "host" else asked.python),
        ("platform-changed", lockfile.asked.platform, asked.platform),
    )
    for name, locked, now in pairs:
        if locked != now:
            reasons.append(StaleReason(name=name, locked=locked or "the default", found=now or "the default"))
    if lockfile.host.gpu != project.host.gpu:
        reasons.append(
            StaleReason(
                name="gpu-changed", locked=lockfile.host.gpu or "no GPU named", found=project.host.gpu or "none"
            )
        )
    if lockfile.host.gpu_memory != project.host.gpu_memory:
        was, now = lockfile.host.gpu_memory, project.host.gpu_memory
        reasons.append(StaleReason(name="gpu-memory-changed", locked=was or "any", found=now or "any"))
    if lockfile.determinism.profile != project.determinism.profile:
        reasons.append(
            StaleReason(
                name="profile-changed",
                locked=lockfile.determinism.profile,
                found=project.determinism.profile,
            )
        )
    if dict(lockfile.policy) != dict(project.policy):
        reasons.append(
            StaleReason(name="policy-changed", locked=_listed(lockfile.policy), found=_listed(project.policy))
        )
    reasons += [
        *_changed_overlay(project, lockfile),
        *_changed_env(project, lockfile),
        *_changed_binds(project, lockfile),
    ]
    return tuple(reasons)


def _changed_overlay(project: Project, lockfile: Lockfile) -> list[StaleReason]:
    """Return a reason if an overlay was added, removed, or got another target.

    The overlay's content is compared later.
    """
    locked = None if lockfile.container is None else lockfile.container.overlay
    path, target = (None, None) if project.overlay is None else split_overlay(project.overlay)
    place = None if target is None else os.path.normpath(target)
    if (path is None) == (locked is None) and (locked is None or locked.target == place):
        return []
    return [StaleReason(name="overlay-changed", locked=_placed(locked), found=project.overlay or "no overlay")]


def _placed(overlay: OverlayTable | None) -> str:
    if overlay is None:
        return "no overlay"
    return f"an overlay at {overlay.target}" if overlay.target else overlay.in_words


def edited_content(lockfile: Lockfile) -> str | None:
    """Return the fingerprint of an edited lockfile's content; None if the lockfile was not edited."""
    content = lock_model.fingerprint(lock_model.to_data(lockfile))
    # This hpcenv does not know all keys of a newer revision, so it cannot compute that fingerprint.
    return content if lockfile.revision <= lock_model.REVISION and content != lockfile.fingerprint else None


def _changed_env(project: Project, lockfile: Lockfile) -> list[StaleReason]:
    """Return the variables of [env] that differ from the lockfile. For a credential, only the name is compared."""
    now = locked_env(project)
    names = sorted(name for name in {*now, *lockfile.env} if now.get(name) != lockfile.env.get(name))
    if not names:
        return []
    return [StaleReason(name="env-changed", locked=_values(names, lockfile.env), found=_values(names, now))]


def locked_env(project: Project) -> dict[str, str]:
    """Return [env] of hpcenv.toml in the form of a lockfile."""
    return {name: recorded_value(name, value) for name, value in sorted(project.env.items())}


def _values(names: list[str], env: Mapping[str, str]) -> str:
    return ", ".join(f"{name} = {env[name]}" if name in env else f"no {name}" for name in names)


def _changed_binds(project: Project, lockfile: Lockfile) -> list[StaleReason]:
    """Return a reason if the bound paths of the container or their modes differ."""
    now, locked = binds_in_words(locked_binds(project)), binds_in_words(lockfile.bind)
    if now == locked:
        return []
    return [
        StaleReason(name="bind-changed", locked=", ".join(locked) or "no binds", found=", ".join(now) or "no binds")
    ]


def locked_binds(project: Project) -> tuple[LockedBindTable, ...]:
    """Return [[bind]] of hpcenv.toml in the form of a lockfile, without content. An environment on the host has none.

    If two binds have the same target, the first bind counts, as at the start of a container.
    """
    binds: dict[str, LockedBindTable] = {}
    for bind in () if project.on_host else project.bind:
        target = os.path.normpath(bind.target or bind.source)
        binds.setdefault(target, LockedBindTable(target=target, read_only=bind.read_only))
    return tuple(binds[target] for target in sorted(binds))


def binds_in_words(binds: Iterable[LockedBindTable]) -> tuple[str, ...]:
    """Return target and mode of each bind."""
    return tuple(sorted(f"{bind.target} ({'read-only' if bind.read_only else 'read-write'})" for bind in binds))


def _listed(policy: object) -> str:
    items = sorted(policy.items()) if isinstance(policy, dict) else []
    return ", ".join(f"{field} = {severity}" for field, severity in items) or "no overrides"


def from_differences(differences: list[Difference]) -> tuple[StaleReason, ...]:
    """Return a reason for each difference of the environment."""
    return tuple(
        StaleReason(name="environment-differs", locked=f"{d.field} {d.locked}", found=d.found, note=d.note)
        for d in differences
    )
