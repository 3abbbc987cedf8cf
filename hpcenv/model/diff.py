"""What differs between two locked environments or runs, hardest to repair first. Pure.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpcenv.dataclass import dataclass
from hpcenv.model import document, fields
from hpcenv.model.fields import REPAIRS, Profile, Repair
from hpcenv.model.lockfile import DistTable, Lockfile, LockTable, source_fields
from hpcenv.wire import Facts, Manifest, Severity, Value, Verdict

ABSENT = "absent"

# Nested numbers of one finding: a reader who saw the single package needs no digest.
_EXPLAINED_BY_PACKAGES = ("packages.env-digest", "packages.content-digest", "packages.count")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One field in which two sides differ.

    Attributes:
        repair: what it takes to make them equal; changes come in this order.
        severity: in the profile that was asked for, `info` for what is only recorded.
        what, why, remedy: from the list of fields.
    """

    field: str
    left: str
    right: str
    repair: Repair
    severity: Severity
    what: str
    why: str
    remedy: str


def compare(
    left: Mapping[str, Value], right: Mapping[str, Value], *, profile: Profile = "default"
) -> tuple[Change, ...]:
    """Compare two sides field by field.

    Args:
        left, right: dotted field -> value, from `of_lockfile` or `of_run`.
        profile: whose severities to give.

    Returns:
        The differences, hardest to repair first, then by severity and name.
    """
    names = {name for name in {*left, *right} if left.get(name) != right.get(name)}
    if any(_is_package(name) for name in names):
        names -= set(_EXPLAINED_BY_PACKAGES)
    changes = [_change(name, left.get(name), right.get(name), profile) for name in sorted(names)]
    chain = left.get("container.rootfs-chain-id")
    if chain is not None and chain == right.get("container.rootfs-chain-id"):
        # One file system in two files: layers were compressed anew, or the SIF was made anew.
        changes = [replace(c, severity="info") if c.field == "container.sif.sha256" else c for c in changes]
    return tuple(sorted(changes, key=_hardest_first))


def _is_package(name: str) -> bool:
    field = fields.find(name)
    return field is not None and field.name.startswith("packages.*")


def _change(name: str, left: Value | None, right: Value | None, profile: Profile) -> Change:
    field = fields.find(name)
    return Change(
        field=name,
        left=show(left),
        right=show(right),
        repair=field.repair if field else "note",
        severity=(fields.severity(name, profile) or "info"),
        what=field.what if field else "",
        why=field.why if field else "",
        remedy=field.remedy if field else "",
    )


def _hardest_first(change: Change) -> tuple[int, int, str]:
    return REPAIRS.index(change.repair), ("must", "warn", "info").index(change.severity), change.field


def show(value: Value | None) -> str:
    """Return a value as one line of text."""
    if value is None:
        return ABSENT
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def of_lockfile(lockfile: Lockfile) -> dict[str, Value]:
    """Flatten a lockfile into dotted fields."""
    flat: dict[str, Value] = dict(lockfile.facts)
    if lockfile.container is not None:
        _flatten("container", _tables(lockfile.container, "layers"), into=flat)
    _flatten("host", _tables(lockfile.host), into=flat)
    flat["determinism.profile"] = lockfile.determinism.profile
    if lockfile.policy:
        flat["policy"] = tuple(f"{field} = {severity}" for field, severity in sorted(lockfile.policy.items()))
    packages = lockfile.packages
    flat["packages.env-digest"] = packages.env_digest
    flat["packages.unlisted-digest"] = packages.unlisted_digest
    flat["packages.unlisted-count"] = packages.unlisted_count
    flat["packages.count"] = packages.count
    for name, value in (
        ("content-digest", packages.content_digest),
        ("conda-count", packages.conda_count),
        ("conda-digest", packages.conda_digest),
    ):
        if value is not None:
            flat[f"packages.{name}"] = value
    for dist in packages.dist:
        flat[f"packages.{dist.name}"] = dist.version
        flat.update({f"packages.{dist.name}.{part}": value for part, value in _parts(dist) if value is not None})
    return flat


def _parts(dist: DistTable) -> Iterator[tuple[str, Value | None]]:
    yield "record-sha256", dist.record_sha256
    yield "content-sha256", dist.content_sha256
    yield "source", dist.source
    yield "wheel-sha256", dist.wheel.sha256 if dist.wheel else None
    yield from source_fields(dist.direct_url).items()


def _tables(table: LockTable, *left_out: str) -> dict[str, Any]:
    return document.plain(table, *left_out)


def _flatten(prefix: str, value: Any, *, into: dict[str, Value]) -> None:
    """Turn nested tables into dotted fields."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}", inner, into=into)
    else:
        into[prefix] = tuple(value) if isinstance(value, list) else value


def of_run(
    lockfile: Lockfile, manifest: Manifest, verdict: Verdict | None, facts: Mapping[str, Facts]
) -> dict[str, Value]:
    """Flatten a run: its environment, its command and shape, its settings, its nodes.

    What all nodes share has one value; what differs lists each node's.
    """
    flat = environment_of_run(lockfile, verdict, facts)
    flat["run.nodes"] = manifest.nodes
    flat["run.nproc-per-node"] = manifest.nproc_per_node
    flat["run.gpus-per-node"] = manifest.gpus_per_node
    flat["run.backend"] = manifest.backend
    flat["run.arguments"] = manifest.args
    if lockfile.code is not None:
        _flatten("code", _tables(lockfile.code, "reason"), into=flat)
    if verdict is not None and verdict.settings:
        first = next(iter(verdict.settings.values()))
        flat.update({f"env.{setting.name}": setting.value for setting in first})
    for name in sorted({n for f in facts.values() for n in f.values if n.startswith("host.") and n != "host.hostname"}):
        flat[name] = _of_nodes({node: f.values[name] for node, f in facts.items() if name in f.values})
    return flat


def environment_of_run(lockfile: Lockfile, verdict: Verdict | None, facts: Mapping[str, Facts]) -> dict[str, Value]:
    """Flatten a run's lockfile, with what the nodes that trained found in its place where that was something else.

    They may differ where the lockfile's policy does not insist, or a SIF was made anew.
    """
    flat = of_lockfile(lockfile)
    trained = verdict.launched if verdict is not None else ()
    told = {node: f for node, f in facts.items() if node in trained or not trained}
    for name in [name for name in flat if not name.startswith("host.")]:
        seen = {node: f.values[name] for node, f in told.items() if name in f.values}
        if any(value != flat[name] for value in seen.values()):
            flat[name] = _of_nodes(seen)
    for name in sorted({d.field for f in told.values() for d in f.differences if not d.unknown}):
        flat[name] = _of_nodes({node: d.found for node, f in told.items() for d in f.differences if d.field == name})
    return flat


def _of_nodes(seen: Mapping[str, Value]) -> Value:
    if len(set(seen.values())) == 1:
        return next(iter(seen.values()))
    return tuple(f"{node}: {show(value)}" for node, value in sorted(seen.items()))
