"""Find the folders on sys.path with the standard library.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import sys

STDLIB = os.path.dirname(os.path.abspath(os.__file__))


def is_stdlib(path: str) -> bool:
    """Return whether a folder or zip file on sys.path belongs to the standard library."""
    if os.path.normpath(path) == STDLIB:
        return True
    zip_name = f"python{sys.version_info[0]}{sys.version_info[1]}.zip"
    in_base = path.startswith((sys.base_prefix + os.sep, sys.base_exec_prefix + os.sep))
    return in_base and os.path.basename(path) in ("lib-dynload", zip_name)
