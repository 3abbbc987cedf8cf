"""The file that a rank appends its losses, metrics and hashes to (hpcenv.records.metrics has the format)."""

import json
import os
import sys
import time
from typing import Any, Dict, List

_SECONDS_BETWEEN_WRITES = 0.2


class Writer:
    """Appends JSON lines. A full disk must not end the training: the first error is reported, then nothing more is."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problem = ""
        self._lines = []  # type: List[str]
        self._written = 0.0

    def add(self, line: Dict[str, Any]) -> None:
        self._lines.append(json.dumps(line, allow_nan=False) + "\n")

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
            sys.stderr.write("hpcenv: %s; metrics are no longer recorded\n" % self.problem)


def replace_file(path: str, data: Dict[str, Any]) -> str:
    """Write a JSON file through a rename; return the problem, empty without one."""
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
