"""By how much the clocks of a run's nodes differ, from the facts that the nodes wrote. Runs on: LOGIN NODE.

A node writes its own time into its facts. The file server dates the file with its clock, which is one for all nodes.
The difference of both is the error of the node's clock. Where nodes share one clock, or the file system takes the time
of the node, the difference is nearly nothing, and nothing is corrected.
"""

from __future__ import annotations

import os
import statistics

from hpcenv.errors import RecordInvalid
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record
from hpcenv.records.run_folder import RunFolder
from hpcenv.text import visible

# Smaller differences are the time that a write takes.
_NOTHING = 1.0
_NOTES = 4


def node_clocks(folder: RunFolder) -> tuple[dict[str, float], list[str]]:
    """Return for each node how many seconds to add to its times, and notes on clocks that are wrong.

    A node whose facts are missing, or were written by an hpcenv that recorded no time, has no entry.
    """
    behind: dict[str, float] = {}
    for path in sorted(folder.facts.glob("*.json")):
        try:
            facts = load_record(Facts, path)
            dated = os.stat(path, follow_symlinks=False).st_mtime
        except (OSError, RecordInvalid):
            continue
        if facts.written:
            behind[facts.node] = dated - facts.written
    if not behind:
        return {}, []
    # The file server's clock is one of the clocks: of two nodes the wrong one is known by it.
    usual = statistics.median_low([0.0, *behind.values()])
    wrong = {node: value - usual for node, value in behind.items() if abs(value - usual) > _NOTHING}
    notes = [
        f"the clock of node {visible(node)} is {abs(value):.0f} s {'behind' if value > 0 else 'ahead'}: "
        "its times are corrected to compare them"
        for node, value in wrong.items()
    ]
    more = [f"the clocks of {len(notes) - _NOTES} more nodes are wrong"] if len(notes) > _NOTES else []
    return wrong, [*notes[:_NOTES], *more]
