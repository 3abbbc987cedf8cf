"""Which version of a shared library a program is linked with.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

mksquashfs says its own version and not that of libzstd, which decides the bytes of a squashfs
as much. glibc's loader names the files that it takes for a program when
LD_TRACE_LOADED_OBJECTS is set (ld.so(8)), without starting it; a library's file, behind its
links, is named by its version. Nothing is guessed: where this does not tell, that is said.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from hpcenv.adapters import process
from hpcenv.errors import HpcenvError

__all__ = ["library_version"]

_SECONDS = 30.0


def library_version(program: str, library: str, *, env: Mapping[str, str]) -> str:
    """Return a version such as `1.5.4`, or `unknown:` and why.

    Args:
        program: its path.
        library: the name without `lib` and `.so`, for example `zstd`.
        env: the environment that the program is run with: its library path counts.
    """
    try:
        # A static program, and one of another C library, runs: it then says its version and ends.
        said = process.run(
            [program, "-version"], timeout=_SECONDS, env={**env, "LD_TRACE_LOADED_OBJECTS": "1"}, accept=(0, 1)
        ).stdout
    except HpcenvError as error:
        return f"unknown: {error.what}"
    return _version_in(said, library)


def _version_in(said: str, library: str) -> str:
    found = re.search(rf"^\s*lib{re.escape(library)}\.so\S* => (/.*) \(0x[0-9a-f]+\)$", said, re.MULTILINE)
    if found is None:
        return f"unknown: the loader names no shared lib{library} of the program"
    name = os.path.basename(os.path.realpath(found[1]))
    version = re.fullmatch(rf"lib{re.escape(library)}\.so\.(\d+(?:\.\d+)+)", name)
    return version[1] if version is not None else f"unknown: its file is called {ascii(name)[1:-1][:100]}"
