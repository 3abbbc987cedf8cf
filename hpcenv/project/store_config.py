"""The folder of images, as data. `hpcenv.image.store` opens it.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StorePlace:
    """The folder of a store, and the users who are trusted to own it; see `open_store`."""

    root: Path
    trusted_owners: tuple[str, ...] = ()
    shared: bool = False
