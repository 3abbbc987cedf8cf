"""The files to which a rank appends lines of JSON: its metrics and its trace.

The metrics include losses and hashes (hpcenv.records.metrics). The trace is described in hpcenv.records.trace.
"""

import json
import os
import sys
import time
from typing import Any, Dict, List

_SECONDS_BETWEEN_WRITES = 0.2


class Writer:
    """Appends JSON lines. An error such as a full disk does not end the training. Only the first error is reported.
    Only the first error is reported.

    Args:
        path: path of the file.
        afterwards: text after an error message; it says the effect of the error.
    """

    def __init__(self, path: str, afterwards: str = "metrics are no longer recorded") -> None:
        self.path = path
        self._afterwards = afterwards
        self.problem = ""
        self._lines = []  # type: List[str]
        self._written = 0.0

    def add(self, line: Dict[str, Any]) -> int:
        """Add a line; return its length in bytes."""
        text = json.dumps(line, allow_nan=False) + "\n"
        self._lines.append(text)
        return len(text)

    def write(self, *, now: bool = False) -> None:
        """Write the collected lines, at most five times a second."""
        if self.problem or not self._lines or not (now or time.monotonic() - self._written > _SECONDS_BETWEEN_WRITES):
            return
        self._written = time.monotonic()
        content = "".join(self._lines).encode()
        self._lines.clear()
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                while content:
                    content = content[os.write(descriptor, content) :]
            finally:
                os.close(descriptor)
        except OSError as error:
            self.problem = "cannot write %s: %s" % (self.path, error)
            sys.stderr.write("hpcenv: %s; %s\n" % (self.problem, self._afterwards))


def replace_file(path: str, data: Dict[str, Any]) -> str:
    """Write a JSON file through a rename; return the problem, empty without a problem."""
    aside = "%s.%d.tmp" % (path, os.getpid())
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(aside, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
        os.replace(aside, path)
    except OSError as error:
        sys.stderr.write("hpcenv: cannot write %s: %s\n" % (path, error))
        return str(error)
    return ""
