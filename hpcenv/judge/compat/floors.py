"""The oldest driver for a CUDA toolkit. Pure; standard library only.

Runs on: LOGIN NODE, COMPUTE NODE.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcenv.judge.compat.compat_table import Compat
from hpcenv.judge.compat.versions import numbers, padded


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """The oldest driver for a CUDA toolkit.

    Attributes:
        cuda: the toolkit as asked.
        version: oldest driver, by minor-version compatibility.
        packaged: driver that was packaged with the toolkit, "" when the table has it not.
            From it on all features work; between the two the driver cannot compile PTX of
            this toolkit.
        source: where that is written, and when it was read.
    """

    cuda: str
    version: str
    packaged: str
    source: str


def driver_floor(compat: Compat, cuda: str) -> Floor | None:
    """Return the oldest driver for a CUDA toolkit, None for a major release that is not in the table.

    Args:
        compat: the table.
        cuda: the CUDA runtime version, `13.0` or `13.0.1`.
    """
    toolkit = numbers(cuda)
    if toolkit is None or toolkit[0] not in compat.floors:
        return None
    packaged = compat.packaged.get(padded(toolkit, 3)[:3], "")
    if not packaged:
        # PTX has the version of the minor release, so the first driver that came with that one compiles it.
        same_minor = [update for update in compat.packaged if update[:2] == padded(toolkit, 2)[:2]]
        packaged = compat.packaged[min(same_minor)] if same_minor else ""
    source = f"{compat.floors_source}; {compat.packaged_source}" if packaged else compat.floors_source
    return Floor(cuda=cuda, version=compat.floors[toolkit[0]], packaged=packaged, source=source)
