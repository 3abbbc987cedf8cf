"""Compute the clock differences between a run's nodes from the facts that the nodes wrote. Runs on: LOGIN NODE.

A node writes its own time into its facts. The file server sets the modification time of the file of facts from the
server's clock, which is the same for all nodes. The difference between the node's time and the modification time is the
error of the node's clock. If nodes share one clock, or if the file system uses the node's time, the difference is
almost 0, and nothing is corrected.
"""

from __future__ import annotations

import os
import statistics

from hpcenv.errors import RecordInvalid
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record
from hpcenv.records.run_folder import RunFolder
from hpcenv.text import visible

# Smaller differences are caused by the duration of a write.
_NOTHING = 1.0
_NOTES = 4


def node_clocks(folder: RunFolder) -> tuple[dict[str, float], list[str]]:
    """Return the seconds to add to the times of each node with a wrong clock, and notes on the wrong clocks.

    A node has no entry if its facts are missing, or if the version of hpcenv that wrote them recorded no time.
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
    # The file server's clock is a third clock: it shows which of two nodes has the wrong time.
    usual = statistics.median_low([0.0, *behind.values()])
    wrong = {node: value - usual for node, value in behind.items() if abs(value - usual) > _NOTHING}
    notes = [
        f"the clock of node {visible(node)} is {abs(value):.0f} s {'behind' if value > 0 else 'ahead'}: "
        "its times are corrected to compare them"
        for node, value in wrong.items()
    ]
    more = [f"the clocks of {len(notes) - _NOTES} more nodes are wrong"] if len(notes) > _NOTES else []
    return wrong, [*notes[:_NOTES], *more]
