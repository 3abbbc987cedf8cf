"""The variables that the environment modules of a job set for its ranks (`modules.json` of a run folder).

Runs on: COMPUTE NODE, LOGIN NODE. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcenv.records.manifest import Bind, Setting


@dataclass(frozen=True, kw_only=True)
class ModuleEffects:
    """Changes by the modules of one attempt. The batch script compared the variables before and after `module load`.

    Attributes:
        settings: variables for the ranks. A variable with an empty value must not reach a container.
        binds: folders and files of the host that the modules request in containers.
        notes: sentences about what was not imported.
    """

    schema: int
    settings: tuple[Setting, ...] = ()
    binds: tuple[Bind, ...] = ()
    notes: tuple[str, ...] = ()
