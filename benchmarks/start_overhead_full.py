"""What `--preflight full` adds to the start of a job, with its smoke test: `start_overhead` at this level.

python -m benchmarks.start_overhead_full [--json] [--rounds N] [--nodes N] [--instance NAME]
"""

from __future__ import annotations

import sys

from benchmarks import start_overhead

NEEDS = ("testbed",)


def main() -> int:
    """Measure and print."""
    return start_overhead.main("full")


if __name__ == "__main__":
    sys.exit(main())
