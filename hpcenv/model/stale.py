"""Why a lockfile is stale: named reasons, not a bool. Pure.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from typing import Literal

from hpcenv.dataclass import dataclass
from hpcenv.model import lockfile as lock_model
from hpcenv.model.lockfile import AskedTable, Lockfile
from hpcenv.model.project import Project
from hpcenv.wire import Difference

Name = Literal[
    "image-changed", "python-changed", "platform-changed", "policy-changed", "sif-missing", "sif-differs",
    "environment-differs", "environment-unreadable", "edited", "gpu-changed", "profile-changed",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StaleReason:
    """One reason, with what the lockfile says and what is asked or found."""

    name: Name
    locked: str
    found: str
    note: str = ""

    def __str__(self) -> str:
        text = f"{self.name}: locked {self.locked}, now {self.found}"
        return f"{text} ({self.note})" if self.note else text


def asked_by(project: Project) -> AskedTable:
    """Return the part of hpcenv.toml that decides what is locked."""
    return AskedTable(image=project.image, python=project.python, platform=project.platform)


def compare_spec(project: Project, lockfile: Lockfile) -> tuple[StaleReason, ...]:
    """Compare hpcenv.toml with what the lockfile answers, and the lockfile with its own fingerprint."""
    asked = asked_by(project)
    reasons = []
    content = lock_model.fingerprint(lock_model.to_data(lockfile))
    # Of a newer revision only a part is known here.
    if lockfile.revision <= lock_model.REVISION and content != lockfile.fingerprint:
        note = "the file was changed by hand or by a merge"
        reasons.append(StaleReason(name="edited", locked=lockfile.fingerprint, found=content, note=note))
    pairs: tuple[tuple[Name, str | None, str | None], ...] = (
        ("image-changed", lockfile.asked.image, asked.image),
        ("python-changed", lockfile.asked.python, asked.python),
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
    return tuple(reasons)


def _listed(policy: object) -> str:
    items = sorted(policy.items()) if isinstance(policy, dict) else []
    return ", ".join(f"{field} = {severity}" for field, severity in items) or "no overrides"


def from_differences(differences: list[Difference]) -> tuple[StaleReason, ...]:
    """Turn differences of the environment itself into reasons."""
    return tuple(
        StaleReason(name="environment-differs", locked=f"{d.field} {d.locked}", found=d.found, note=d.note)
        for d in differences
    )
