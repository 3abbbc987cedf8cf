"""Hold the job of a session until the session ends. A session runs this program instead of a training.

Runs on: inside the image (or in a host environment), once on each node. Standard library only; Python 3.8 to 3.14.

    python3 hold.py END

This program ends when the file END exists, or on a signal. The programs that the user starts run in other steps of the
job.
"""

import os
import signal
import sys
import time
from typing import Any

_SECONDS_BETWEEN_LOOKS = 2.0


def _end(_number: int, _frame: Any) -> None:
    sys.exit(0)


def main(end: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    while not os.path.exists(end):
        time.sleep(_SECONDS_BETWEEN_LOOKS)


if __name__ == "__main__":
    main(sys.argv[1])
