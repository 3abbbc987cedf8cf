"""The folder of images, as data. `hpcenv.image.store` opens it.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcenv.records.frozen import Frozen


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StorePlace(Frozen):
    """The folder of a store, and the users who are trusted to own it; see `open_store`."""

    root: Path
    trusted_owners: tuple[str, ...] = ()
    shared: bool = False
