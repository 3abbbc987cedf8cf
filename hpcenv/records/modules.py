"""What the environment modules of a job set for its ranks (`modules.json` of a run folder).

Runs on: COMPUTE NODE, LOGIN NODE. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcenv.records.manifest import Bind, Setting


@dataclass(frozen=True, kw_only=True)
class ModuleEffects:
    """What the modules of one attempt set, as the batch script saw it before and after each `module load`.

    Attributes:
        settings: variables for the ranks; without a value those that a container must not get.
        binds: folders and files that the modules show in containers.
        notes: what was not imported, a sentence each.
    """

    schema: int
    settings: tuple[Setting, ...] = ()
    binds: tuple[Bind, ...] = ()
    notes: tuple[str, ...] = ()
