"""The parts of a module's table of probes: rows and levels.

Runs on: inside the image.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts

LEVELS = ("record", "full", "deep")
HASHING = ("full", "deep")  # the levels that hash every file
DEEP = ("deep",)


class Probe:
    """One row of a module's table of probes: a function and the fields that it must return.

    Args:
        name: name of the probe, which is also the key of its running time in the report's "seconds".
        fields: the fields that the answer must have. A missing field becomes unknown.
        read: the function of the probe, which may add further fields to its answer.
        levels: the levels at which the probe runs.
    """

    __slots__ = ("fields", "levels", "name", "read")

    def __init__(
        self,
        name: str,
        fields: tuple[str, ...],
        read: Callable[[ProbedEnvironment], Facts],
        levels: tuple[str, ...] = LEVELS,
    ) -> None:
        self.name = name
        self.fields = fields
        self.read = read
        self.levels = levels
