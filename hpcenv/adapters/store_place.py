"""Where images are kept, without the store itself: what every verb knows, and only some open.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hpcenv.dataclass import dataclass

if TYPE_CHECKING:
    from hpcenv.adapters.store import Store


@dataclass(frozen=True, kw_only=True)
class StorePlace:
    """Where a store is and whom the user trusts with it; arguments as of `open_store`."""

    root: Path
    trusted_owners: tuple[str, ...] = ()
    shared: bool = False

    def exists(self) -> bool:
        """Whether there is anything at that place.

        Raises:
            FileUnusable: the caller may not look there.
        """
        try:
            os.lstat(self.root)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            from hpcenv.adapters import filesystem

            raise filesystem.refused(self.root, error, doing="looked at") from error
        return True

    def open(self, *, create: bool = False) -> Store:
        """Open it; see `open_store`."""
        from hpcenv.adapters.store import open_store

        return open_store(self.root, create=create, shared=self.shared, trusted_owners=self.trusted_owners)
