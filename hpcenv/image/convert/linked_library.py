"""Find the version of a shared library that a program uses.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

mksquashfs prints its own version, but not the version of libzstd, which also determines the bytes of a squashfs. If
LD_TRACE_LOADED_OBJECTS is set, glibc's loader lists the libraries of a program and does not start it (ld.so(8)). After
all links are followed, the name of a library's file contains the version. If the version cannot be found in this way,
the result is `unknown:` with the reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from hpcenv import process
from hpcenv.errors import HpcenvError

__all__ = ["library_version"]

_SECONDS = 30.0


def library_version(program: str, library: str, *, env: Mapping[str, str]) -> str:
    """Return a version such as `1.5.4`, or `unknown:` and the reason.

    Args:
        program: path of the program.
        library: the name without `lib` and `.so`, for example `zstd`.
        env: the environment of the program, for example its library path.
    """
    try:
        # A static program, or a program with another C library, is really started: it prints its version and ends.
        output = process.run(
            [program, "-version"], timeout=_SECONDS, env={**env, "LD_TRACE_LOADED_OBJECTS": "1"}, accept=(0, 1)
        ).stdout
    except HpcenvError as error:
        return f"unknown: {error.what}"
    return _version_in(output, library)


def _version_in(output: str, library: str) -> str:
    match = re.search(rf"^\s*lib{re.escape(library)}\.so\S* => (/.*) \(0x[0-9a-f]+\)$", output, re.MULTILINE)
    if match is None:
        return f"unknown: the loader lists no shared lib{library} for the program"
    name = os.path.basename(os.path.realpath(match[1]))
    version = re.fullmatch(rf"lib{re.escape(library)}\.so\.(\d+(?:\.\d+)+)", name)
    return version[1] if version is not None else f"unknown: the name of its file is {ascii(name)[1:-1][:100]}"
