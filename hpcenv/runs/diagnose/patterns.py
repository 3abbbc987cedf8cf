"""The table of texts that failed runs write: `patterns.toml`. Runs on: LOGIN NODE."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from hpcenv.errors import HpcenvError
from hpcenv.project import toml_files

TABLE = Path(__file__).with_name("patterns.toml")

PatternKind = Literal["root", "maybe", "cascade"]
CauseOwner = Literal["user", "node", "site", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A text that failed runs write. The file patterns.toml explains the keys.

    Attributes:
        match: what the line must contain in addition to an anchor; None if an anchor is enough. The groups `rank`,
            `node` and `peer` of this expression are the rank, node and peer that the line names.
        torch: versions of torch that write this text; empty for all versions.
        before_ranks: whether the text is a consequence if a rank of the job has written something before.
        after_failure: whether the text is a consequence if an earlier line reports that a rank or a task failed.
        warns: whether the text counts even in a line that is a warning.
        ends_attempt: whether the text ends an attempt of the job. If a failure follows, the lines before the text
            belong to an earlier attempt.
        source, retrieved: the source of the text or of the hint, and when that source was read.
    """

    id: str
    kind: PatternKind
    owner: CauseOwner
    anchors: tuple[str, ...]
    match: re.Pattern[str] | None
    torch: str
    last: bool
    before_ranks: bool
    after_failure: bool
    warns: bool
    ends_attempt: bool
    cause: str
    hint: str
    source: str
    retrieved: str

    @property
    def of_launcher(self) -> bool:
        """Whether srun, slurmstepd or torchrun writes the text.

        If so, a line of any writer shows that the job went on.
        """
        return self.id.startswith(("slurm-", "torchrun-", "rank-"))

    def applies_to(self, torch: str) -> bool:
        """Return whether this version of torch writes the text; True if the version is unknown."""
        if not self.torch or not torch:
            return True
        try:
            return SpecifierSet(self.torch).contains(Version(torch), prereleases=True)
        except InvalidVersion:
            return True


def patterns_for(torch: str = "") -> tuple[Pattern, ...]:
    """Return the patterns for a version of torch, in the order of the table; all patterns if the version is unknown."""
    return tuple(pattern for pattern in read_patterns() if pattern.applies_to(torch))


@functools.cache
def read_patterns() -> tuple[Pattern, ...]:
    """Return all rows of the table."""
    data = toml_files.read(TABLE, error=HpcenvError)
    return tuple(_pattern(row, data["retrieved"]) for row in data["pattern"])


def _pattern(row: dict[str, Any], retrieved: str) -> Pattern:
    return Pattern(
        id=row["id"],
        kind=row["kind"],
        owner=row["owner"],
        anchors=tuple(row["anchors"]),
        match=re.compile(row["match"]) if "match" in row else None,
        torch=row.get("torch", ""),
        last=row.get("last", False),
        before_ranks=row.get("before_ranks", False),
        after_failure=row.get("after_failure", False),
        warns=row.get("warns", False),
        ends_attempt=row.get("ends_attempt", False),
        cause=row["cause"],
        hint=row["hint"],
        source=row["source"],
        retrieved=row.get("retrieved", retrieved),
    )
