"""Run the checks of one node on its host, before the verdict.

Runs on: COMPUTE NODE. Standard library only. No check may hang or hide another one: what can wait for hardware or a
file system runs in a child process with the time limit of the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from hpcenv.errors import HpcenvError
from hpcenv.node.preflight import limits
from hpcenv.node.preflight.table import active
from hpcenv.records.checks import CheckOutcome, NodeChecks
from hpcenv.records.manifest import Manifest

# Check -> the function that measures it.
_MEASURED: dict[str, Callable[[Manifest], CheckOutcome]] = {
    "sys.nofile": limits.check_open_files,
    "sys.affinity": limits.check_affinity,
}


def run(manifest: Manifest) -> NodeChecks | None:
    """Run the checks of this node's host that the run asks for; None where it asks for none."""
    started = time.monotonic()
    checks = [check for check in active(manifest) if check.place == "host"]
    if not checks:
        return None
    results = [_measure(check.id, manifest) for check in checks]
    return NodeChecks.of(results, seconds=time.monotonic() - started)


def _measure(name: str, manifest: Manifest) -> CheckOutcome:
    started = time.monotonic()
    try:
        result = _MEASURED[name](manifest)
    except (HpcenvError, OSError, ValueError) as error:
        result = CheckOutcome(id=name, state="unknown", found=str(error))
    return replace(result, seconds=round(time.monotonic() - started, 3))
