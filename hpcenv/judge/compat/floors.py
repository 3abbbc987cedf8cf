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
        cuda: version of the toolkit.
        version: the oldest driver that runs the toolkit, with minor-version compatibility.
        packaged: the driver that was packaged with the toolkit; "" if the value is unknown. With this driver and newer
            drivers, all features work. Drivers between `version` and `packaged` cannot compile PTX of this toolkit.
        source: the source, with the date at which the source was read.
    """

    cuda: str
    version: str
    packaged: str
    source: str


def driver_floor(compat: Compat, cuda: str) -> Floor | None:
    """Return the oldest driver for a CUDA toolkit; None if the toolkit's major release is not in the table.

    Args:
        compat: the table.
        cuda: the CUDA runtime version, `13.0` or `13.0.1`.
    """
    toolkit = numbers(cuda)
    if toolkit is None or toolkit[0] not in compat.floors:
        return None
    packaged = compat.packaged.get(padded(toolkit, 3)[:3], "")
    if not packaged:
        # PTX has the version of the minor release. So the first driver that can compile the PTX is the driver that was
        # packaged with this minor release.
        same_minor = [update for update in compat.packaged if update[:2] == padded(toolkit, 2)[:2]]
        packaged = compat.packaged[min(same_minor)] if same_minor else ""
    source = f"{compat.floors_source}; {compat.packaged_source}" if packaged else compat.floors_source
    return Floor(cuda=cuda, version=compat.floors[toolkit[0]], packaged=packaged, source=source)
