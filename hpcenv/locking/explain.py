"""`hpcenv explain`: show the meaning of a field, the origin of its value, and why the field matters.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import Command, HpcenvError, UsageError
from hpcenv.locking import difference as diff_model
from hpcenv.project import fields
from hpcenv.project.fields import Field
from hpcenv.project.lockfile import Lockfile, severities_of
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.project.workspace import open_workspace, read_lockfile
from hpcenv.records.manifest import Severity


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A field, and its entry in the project's lockfile.

    Attributes:
        name: the field's name as the user wrote it. If the field is a family, this is a member of the family.
        locked: the value in the lockfile; None without a lockfile, or if the lockfile has no value.
        unknown: why the value could not be read when the environment was locked.
        severity: the field's severity in this project; None without a lockfile.
        override: the severity that [policy] sets; None if the severity in the table of fields is used.
    """

    name: str
    field: Field
    locked: str | None = None
    unknown: str | None = None
    severity: Severity | None = None
    override: str | None = None


def explain(start: Path, name: str, *, lock: str = DEFAULT_LOCK) -> Explanation:
    """Explain a field.

    Args:
        start: the folder where the user is.
        name: the field's dotted name.
        lock: which lockfile's value to show.

    Raises:
        UsageError: there is no such field; the hint names fields with similar names.
    """
    field = fields.find(name)
    if field is None:
        raise _no_such_field(name, _close(name, cutoff=0.6))
    locked = _lockfile(start, lock)
    value = diff_model.of_lockfile(locked).get(name) if locked is not None else None
    unknown = locked.unknown.get(name) if locked is not None else None
    # A family such as `torch.*` fits any name, but a misspelled name must not count as a member of the family.
    misspelled = _close(name, cutoff=0.85) if field.name.endswith(".*") and name != field.name else []
    if misspelled and value is None and unknown is None:
        raise _no_such_field(name, misspelled)
    severity = None if locked is None else severities_of(locked).of(name)
    changed = locked is not None and severity != field.severity(locked.determinism.profile)
    return Explanation(
        name=name,
        field=field,
        locked=None if value is None else diff_model.show(value),
        unknown=unknown,
        severity=severity,
        override=severity if changed else None,
    )


def _lockfile(start: Path, name: str) -> Lockfile | None:
    """Return the project's lockfile; None if there is no project, or no lockfile that can be read."""
    try:
        return read_lockfile(open_workspace(start).lockfile_path(name))
    except HpcenvError:
        return None


def _close(name: str, *, cutoff: float) -> list[str]:
    return difflib.get_close_matches(name, [field.name for field in fields.FIELDS], n=3, cutoff=cutoff)


def _no_such_field(name: str, close: list[str]) -> UsageError:
    return UsageError(
        f"there is no field `{name}`",
        hint=f"perhaps {' or '.join(close)}" if close else (Command("hpcenv", "explain"), " lists them all"),
    )
