"""The severity of each field in one run, found by the field's name.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

The login node resolves the severities once (`project/severities.py`) and writes them into the manifest.
Every function that judges gets a field's severity from this module. This module defines no severity.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpcenv.errors import RecordInvalid
from hpcenv.records.manifest import FieldSeverity, Severity

STRICTEST_FIRST: tuple[Severity, ...] = ("must", "warn", "info")

# A pattern that fits every name, with any number of parts.
ANY_NAME = "**"


class Severities:
    """Severities by field name. If a rule has exactly the field's name, it counts. Otherwise the first pattern counts.

    Args:
        rules: the rules from a manifest, or from `project.severities.resolve`.

    Raises:
        RecordInvalid: there are no rules, so no field has a severity.
    """

    def __init__(self, rules: Iterable[FieldSeverity]) -> None:
        every = tuple(rules)
        if not every:
            raise _missing("the manifest gives no severities")
        self._known = {rule.field: rule for rule in reversed(every) if "*" not in rule.field}
        self._families = tuple(rule for rule in every if "*" in rule.field)

    def of(self, field: str) -> Severity:
        """Return the severity of a field.

        Raises:
            RecordInvalid: no rule fits the field.
        """
        return self._rule(field).severity

    def same_on_nodes(self, field: str) -> bool:
        """Return whether the nodes of one job are compared with each other in this field."""
        return self._rule(field).same_on_nodes

    def between_nodes(self, field: str) -> Severity:
        """Return the severity of a difference between the nodes of one job.

        Raises:
            RecordInvalid: no rule fits the field.
        """
        rule = self._rule(field)
        return rule.between_nodes or rule.severity

    def _rule(self, field: str) -> FieldSeverity:
        if field not in self._known:
            rule = next((rule for rule in self._families if fits(rule.field, field)), None)
            if rule is None:
                raise _missing(f"the manifest gives no severity for `{field}`")
            self._known[field] = rule
        return self._known[field]


def _missing(what: str) -> RecordInvalid:
    why = "another version of hpcenv wrote it, or somebody edited it"
    return RecordInvalid(what, why=why, hint="submit the run again")


def fits(pattern: str, name: str) -> bool:
    """Return whether a name fits a pattern: `*` stands for exactly one part, `**` for any name."""
    if pattern == ANY_NAME:
        return True
    # Most names differ from most patterns at their beginning.
    if not name.startswith(pattern.partition("*")[0]):
        return False
    own, parts = pattern.split("."), name.split(".")
    return len(own) == len(parts) and all(
        word == part or (word == "*" and part != "") for word, part in zip(own, parts, strict=True)
    )


def strictest(severities: Iterable[Severity]) -> Severity:
    """Return the strictest of the given severities. At least one must be given."""
    return min(severities, key=STRICTEST_FIRST.index)
