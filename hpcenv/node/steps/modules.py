"""The step `modules`: what the environment modules of the job set for its ranks.

Runs on: COMPUTE NODE (the batch node).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping

from hpcenv.node.container import modules
from hpcenv.node.manifest import open_manifest
from hpcenv.records.files import save_record
from hpcenv.records.run_folder import RunFolder

# A job's environment has some ten kilobytes, and the batch script tells it twice for each module.
_LONGEST = 64 * 1024 * 1024


def keep_effects(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Read on standard input what the batch script saw, and keep what concerns the ranks.

    The environment itself is written nowhere: it may hold credentials.
    """
    manifest = open_manifest(run, environ)
    loaded, unseen = modules.read_report(_entries(sys.stdin.fileno()))
    in_container = manifest.environment.kind == "sif"
    save_record(modules.effects_of(loaded, unseen, in_container=in_container), run.modules)
    return 0


def _entries(source: int) -> Iterator[str]:
    """Yield the entries before `end`; each ends with a NUL byte."""
    rest, total = b"", 0
    while total < _LONGEST and (block := os.read(source, 65536)):
        total += len(block)
        *entries, rest = (rest + block).split(b"\0")
        for entry in entries:
            if entry == b"end":
                return
            yield entry.decode("utf-8", "surrogateescape")
