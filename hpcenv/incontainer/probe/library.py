"""A library as the dynamic loader finds it.

Runs on: inside the image.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.elf import Elf


class Library:
    """One file that the dynamic loader would map.

    Attributes:
        real: its path without links.
        parent: the first library that needs it; None for the interpreter.
        system: whether the library was found through ld.so.cache or in a default folder.
        names: the names by which the library was requested.
        needs: the further libraries that this library needs.
    """

    __slots__ = ("elf", "names", "needs", "parent", "path", "real", "system")

    def __init__(self, path: str, elf: Elf, parent: Library | None, system: bool) -> None:
        self.path = path
        self.real = os.path.realpath(path)
        self.elf = elf
        self.parent = parent
        self.system = system
        self.names: set[str] = set()
        self.needs: list[Library] = []
