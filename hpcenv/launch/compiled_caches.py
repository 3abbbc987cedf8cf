"""The folders for code that torch and Triton compile in the ranks of a host environment.

Runs on: COMPUTE NODE. All environments of a user share the default folders: `/tmp/torchinductor_USER`, `~/.triton` and
`~/.cache/torch_extensions` (torch 2.13, Triton 3.4). With these default folders, the ranks could run code that a
different environment compiled. In a SIF this cannot happen, because home and /tmp belong to the run.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Container
from pathlib import Path

from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")


def cache_variables(manifest: Manifest, given: Container[str], *, node: str) -> dict[str, str]:
    """Return the variables that name a folder for this user and fingerprint; a `bitwise` run gets its own folder.

    Args:
        given: variables that the ranks already get. These variables are not replaced, because the user may have chosen
            their values.
    """
    if manifest.environment.kind != "host":
        return {}
    of_user = Path(tempfile.gettempdir()) / f"hpcenv-{os.geteuid()}"
    folder = of_user / "compiled" / manifest.fingerprint
    if manifest.determinism.profile == "bitwise" or not manifest.fingerprint or not _is_private(of_user):
        folder = RunFolder(Path(manifest.run_folder)).home_of(node) / "compiled"
    return {name: str(folder / name.partition("_")[0].lower()) for name in NAMES if name not in given}


def _is_private(folder: Path) -> bool:
    """Make a folder of this user; return whether no other user can write into it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    mode = found.st_mode
    return (
        stat.S_ISDIR(mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(mode) & (stat.S_IWGRP | stat.S_IWOTH)
    )
