"""`hpcenv lock --require-hashes`: refuse to lock if the hash of a wheel or conda archive is not confirmed. Pure.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcenv.errors import HashesUnproved, Hint
from hpcenv.locking.conda_packages import proved_dists
from hpcenv.project import lockfile as lock_model
from hpcenv.project.lockfile import DistTable, Lockfile
from hpcenv.text import plural

# For these proofs the installed files were not compared: the installer's claim, the only file of that name, no proof.
WEAK = ("claimed", "index-only", "none")

_NAMED = 20


def require(locked: Lockfile, *, every: bool, reasons: Mapping[str, str], hint: Hint) -> None:
    """Refuse a lockfile in which a required hash is not confirmed.

    Args:
        locked: the lockfile.
        every: whether every package needs a confirmed hash (`--require-hashes`), or only the packages in [policy]
            `packages.*.wheel-proof`.
        reasons: package -> why its hash was not confirmed now.
        hint: what to do.

    Raises:
        HashesUnproved: the error lists the packages, each with the reason.
    """
    missing = unproved(locked, every=every)
    of_conda = locked.packages.conda_package
    reasons = {**reasons, **{name: one.reason for one in of_conda if one.reason for name in one.dists}}
    lines = [f"{dist.name} {dist.version}: {_reason(dist, reasons)}" for dist in missing]
    if every:
        named = {dist.name for dist in missing}
        unnamed = [one for one in of_conda if one.proof == "none" and not named & {*one.dists}]
        lines += [f"{one.name} {one.version}, from conda: {one.reason}" for one in unnamed]
    if not lines:
        return
    more = [f"and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else []
    kind = "the wheel or of conda's archive" if of_conda else "the wheel"
    what = f"the sha256 of {kind} is not confirmed for {plural(len(lines), 'package')}"
    raise HashesUnproved(what, why="\n".join([*lines[:_NAMED], *more]), hint=hint)


def unproved(locked: Lockfile, *, every: bool) -> tuple[DistTable, ...]:
    """Return the packages whose required hash (of the wheel, or of conda's archive) is not confirmed."""
    severities = lock_model.severities_of(locked)
    by_conda = proved_dists(locked)
    return tuple(
        dist
        for dist in locked.packages.dist
        if (dist.wheel is None or dist.wheel.proof in WEAK)
        and dist.name not in by_conda
        and (every or severities.of(f"packages.{dist.name}.wheel-proof") == "must")
    )


def _reason(dist: DistTable, reasons: Mapping[str, str]) -> str:
    if dist.source == "editable":
        return "an editable install has no wheel"
    wheel = dist.wheel
    if wheel is not None and wheel.proof == "index-only":
        return wheel.reason or "the index has one file of this name, which was not compared"
    return (
        reasons.get(dist.name)
        or (wheel.reason if wheel else None)
        or dist.reason
        or "hpcenv did not look for the wheel of this package"
    )
