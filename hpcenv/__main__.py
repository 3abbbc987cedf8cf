"""`hpcenv` and `python -m hpcenv`."""

from __future__ import annotations

import gc
import os
import sys

from hpcenv import ahead


def main() -> None:
    """Run the command line; what takes long to load is started first."""
    ahead.begin(sys.argv[1:], os.environ)
    try:
        from hpcenv.cli import main as run

        run()
    finally:
        ahead.end()
        # At its end Python looks for garbage among all that there is.
        gc.freeze()


if __name__ == "__main__":
    main()
