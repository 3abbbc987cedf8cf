"""The severities of one project: the table of fields, changed by its [policy].

Runs on: LOGIN NODE. Pure.

A key of [policy] is the name of a field, or a pattern in which `*` stands for one part of a name. The severity of a
field comes from the first item of this list that applies:

1. the table, if it says that the field is fixed;
2. the key of [policy] with the field's own name;
3. the narrowest pattern of [policy] that fits the field: the pattern with the fewest `*`, then the longest pattern;
4. the field that this field follows (a package follows the digest over all packages);
5. the table, in the profile of the lockfile.

In a job without GPUs, a field about GPUs always has the severity `WITHOUT_GPUS` of the table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from hpcenv.project import fields
from hpcenv.project.fields import FIELDS, Field
from hpcenv.records.manifest import DeterminismProfile, FieldSeverity, Severity
from hpcenv.records.severities import ANY_NAME, Severities, fits

Policy = Mapping[str, Severity]


def resolve(policy: Policy, profile: DeterminismProfile = "off", *, gpus: bool = True) -> tuple[FieldSeverity, ...]:
    """Return the severity of every possible field, as a list of rules. For a name, the first rule that fits counts.

    Args:
        policy: [policy] of hpcenv.toml or of a lockfile. Keys of fixed fields have no effect.
        profile: the determinism profile, which decides the column of the table.
        gpus: whether the job uses GPUs.
    """
    names = {field.name for field in FIELDS if not _is_pattern(field.name)}
    names |= {key for key in policy if not _is_pattern(key)}
    rules = [_rule(name, policy, profile, gpus=gpus) for name in sorted(names) if fields.find(name) is not None]
    families = sorted((field for field in FIELDS if _is_pattern(field.name)), key=lambda field: -len(field.name))
    for family in families:
        parts = () if family.fixed else _narrowest_first(policy)
        narrower = [both for key in parts if (both := _intersection(key, family.name)) not in (None, family.name)]
        rules += [_rule(name, policy, profile, gpus=gpus, row=family) for name in narrower if name is not None]
        rules.append(_rule(family.name, policy, profile, gpus=gpus, row=family))
    return (*rules, FieldSeverity(field=ANY_NAME, severity=fields.NOT_IN_TABLE))


def severities(policy: Policy, profile: DeterminismProfile = "off", *, gpus: bool = True) -> Severities:
    """Return the result of `resolve` in a form for look-ups by name."""
    return Severities(resolve(policy, profile, gpus=gpus))


def problems(keys: Iterable[str], locked: Iterable[str] | None = None) -> tuple[str, ...]:
    """Return the keys of a [policy] that have no effect, each with the reason.

    Args:
        keys: the keys of [policy].
        locked: the fields of the locked environment; None if the environment was not read yet.
    """
    names = None if locked is None else frozenset(locked)
    found = (_problem(key, names) for key in sorted(keys))
    return tuple(problem for problem in found if problem is not None)


# Prefixes of the checks that hpcenv removed on 2026-11-25, because DCGM has them.
_UNDER_LOAD = ("cuda.burn", "cuda.speed", "dcgm.", "load.")


def _problem(key: str, locked: frozenset[str] | None) -> str | None:
    rows = [field for field in FIELDS if _intersection(key, field.name) is not None] if _is_pattern(key) else []
    row = fields.find(key)
    if row is not None and not _is_pattern(key):
        rows = [row]
    if rows and all(field.fixed for field in rows):
        return f'`policy."{key}"` cannot be changed: {rows[0].fixed}'
    if rows and (_is_pattern(key) or _may_exist(key, rows[0], locked)):
        return None
    if key.startswith(_UNDER_LOAD):
        return f'`policy."{key}"`: this check is gone; `dcgmi diag -r 3` on a node puts a load on its GPUs'
    close = difflib.get_close_matches(key, sorted(_known(locked)), n=1)
    return f'unknown field `policy."{key}"`' + (f", perhaps you meant `{close[0]}`" if close else "")


# Families with members that are known only after the environment was read.
_READ_LATER = ("libs", "loaded", "packages")
# Families in which every name is allowed.
_ANY_MEMBER = ("env", "data")


def _may_exist(name: str, row: Field, locked: frozenset[str] | None) -> bool:
    room = name.partition(".")[0]
    if name == row.name or name in row.members or room in _ANY_MEMBER:
        return True
    return room in _READ_LATER if locked is None else name in locked


def _known(locked: frozenset[str] | None) -> set[str]:
    own = {field.name for field in FIELDS if not field.fixed}
    return own | {member for field in FIELDS for member in field.members} | set(locked or ())


def _rule(
    name: str, policy: Policy, profile: DeterminismProfile, *, gpus: bool, row: Field | None = None
) -> FieldSeverity:
    row = row or fields.find(name)
    assert row is not None
    return FieldSeverity(
        field=name,
        severity=_severity(name, row, policy, profile, gpus=gpus),
        same_on_nodes="nodes" in row.judged_by,
        between_nodes=row.between_nodes if _chosen(name, policy) is None else None,
    )


def _severity(name: str, row: Field, policy: Policy, profile: DeterminismProfile, *, gpus: bool) -> Severity:
    if row.gpus and not gpus:
        return fields.WITHOUT_GPUS
    if row.fixed:
        return row.severity(profile)
    chosen = _chosen(name, policy)
    if chosen is not None:
        return chosen
    followed = fields.find(row.follows) if row.follows else None
    if followed is not None:
        return _severity(followed.name, followed, policy, profile, gpus=gpus)
    return row.severity(profile)


def _chosen(name: str, policy: Policy) -> Severity | None:
    """Return the severity that [policy] gives to a name or a family of names; None if [policy] does not name it."""
    if name in policy:
        return policy[name]
    return next((policy[key] for key in _narrowest_first(policy) if fits(key, name)), None)


def _narrowest_first(policy: Policy) -> list[str]:
    patterns = (key for key in policy if _is_pattern(key))
    return sorted(patterns, key=lambda key: (key.count("*"), -len(key), key))


def _intersection(one: str, other: str) -> str | None:
    """Return a pattern for the names that fit both patterns; None if no name fits both."""
    parts = list(zip(one.split("."), other.split("."), strict=False))
    if one.count(".") != other.count(".") or any(a != b and "*" not in (a, b) for a, b in parts):
        return None
    return ".".join(b if a == "*" else a for a, b in parts)


def _is_pattern(key: str) -> bool:
    return "*" in key.split(".")
