"""A site profile: what one cluster wants, and has, as far as a run needs it.

Runs on: LOGIN NODE. Pure. Its file is `model/site_file.py`, which is loaded only where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hpcenv.dataclass import dataclass, field
from hpcenv.wire import Bind, Setting

if TYPE_CHECKING:
    from hpcenv.model.site_file import SlurmTable


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A site profile, as far as a run needs it.

    Attributes:
        name: of the site.
        path: the file it comes from.
        defaults: values for `hpcenv submit`, by the names of its options with `_`.
        modules: environment modules that the batch script loads.
        binds: host folders that containers see.
        settings: variables for the ranks: the network profile.
        apptainer: program that starts containers; empty to look on PATH.
        accounting: whether sacct answers here; None where nobody knows.
        min_nodes: variable -> how many nodes a run must have for it.
        slurm: what `doctor` found.
    """

    name: str
    path: str
    defaults: dict[str, str | int] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    binds: tuple[Bind, ...] = ()
    settings: tuple[Setting, ...] = ()
    apptainer: str = ""
    accounting: bool | None = None
    min_nodes: Mapping[str, int] = field(default_factory=dict)
    slurm: SlurmTable | None = None

    def default_of(self, name: str) -> str | int | None:
        """Return the site's value for an option of `hpcenv submit`."""
        return self.defaults.get(name)

    def for_nodes(self, nodes: int) -> Profile:
        """Return the profile as a run of so many nodes has it."""
        kept = tuple(setting for setting in self.settings if self.min_nodes.get(setting.name, 1) <= nodes)
        return replace(self, settings=kept)
