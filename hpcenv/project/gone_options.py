"""Removed options of a submission. The record of an older run may contain such options.

Runs on: LOGIN NODE. Pure. The options were removed on 2026-11-25. `rerun` and `reproduce` leave such options out. If a
value was not the default, the new run differs from the old run, and `rerun` and `reproduce` report this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GoneOption:
    """One option that was removed.

    Attributes:
        name: the name in the record.
        default: the value that changed nothing.
        instead: what to use in place of the option.
    """

    name: str
    default: str | int | bool | None
    instead: str


GONE = (
    GoneOption(name="compat_file", default=None, instead="the table of a newer hpcenv"),
    GoneOption(name="cpus_per_gpu", default=None, instead="--cpus"),
    GoneOption(name="launch_step", default="beside-check", instead="the launch step always starts after the check"),
    GoneOption(name="licenses", default=None, instead="--sbatch licenses=LIST"),
    GoneOption(name="locked", default=False, instead="`hpcenv lock --check` before"),
    GoneOption(name="max_restarts", default=0, instead="--torchrun-args --max-restarts=N"),
    GoneOption(name="smoke_limit", default=90, instead="each part of the smoke test may take 90 s"),
    GoneOption(name="standalone", default=False, instead="the rendezvous that hpcenv chooses"),
    GoneOption(name="template", default=None, instead='setup = ["LINE"] under [submit] of hpcenv.toml'),
)
_BY_NAME = {option.name: option for option in GONE}
# The same options, as keys of [submit] in hpcenv.toml and in site profiles.
GONE_KEYS = {option.name.replace("_", "-"): f"this option is gone; in its place: {option.instead}" for option in GONE}


def without_gone(recorded: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return recorded options without removed options, and a note for each removed option that had an effect.

    Args:
        recorded: name -> value, as in request.json.
    """
    kept = {name: value for name, value in recorded.items() if name not in _BY_NAME}
    notes = [
        f"the run had {name} = {_shown(recorded[name])}, an option that is gone: {option.instead}"
        for name, option in _BY_NAME.items()
        if name in recorded and recorded[name] not in (option.default, None)
    ]
    if kept.get("preflight") == "deep":
        kept["preflight"] = "full"
        notes.append("the run had preflight = deep, a level that is gone: full, and `dcgmi diag -r 3` on each node")
    return kept, tuple(notes)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
