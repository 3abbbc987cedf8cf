"""When a test ends its process (it hangs and ignores signals, or crashes): it fails, and the others of its file run.

pytest-xdist 3.8 gives such a test to the next worker again with `--dist loadfile`, until no worker may start any more.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadFileScheduling


class Scheduling(LoadFileScheduling):
    def remove_node(self, node):  # type: ignore[no-untyped-def]
        """Take the work of a worker that has ended; return the test that it was at."""
        units = self.assigned_work[node].values()
        crashed = next((test for unit in units for test, done in unit.items() if not done), None)
        for unit in units:
            if crashed in unit:
                unit[crashed] = True
        super().remove_node(node)
        return crashed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):  # type: ignore[no-untyped-def]
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None
