"""Start a console script of the environment as one process of a run: a rank, or the program of a node.

Runs on: inside the image (or in a host environment). Needs only the standard library, Python 3.8 to 3.14.

    python3 entry.py NAME ARGUMENTS...

This program finds the script by its name in the metadata of the installed distributions, as pip's start files do
(packaging.python.org, "Entry points specification", `console_scripts`). So hpcenv does not need a path of the image,
and cannot start a file of another environment by mistake. A program without such an entry is started from the folder of
this Python, where conda and wheels put programs.
"""

import difflib
import os
import sys
from typing import Any, List, Set

try:
    from importlib import metadata
except ImportError:  # pragma: no cover  (Python 3.7)
    metadata = None  # type: ignore[assignment]

# The exit status of a shell for a missing command (POSIX, 2.8.2).
NOT_FOUND = 127


def main(arguments: List[str]) -> Any:
    """Start the console script; return its result."""
    if not arguments:
        print("usage: entry.py NAME ARGUMENTS...", file=sys.stderr)
        return 2
    name = arguments[0]
    beside = os.path.join(os.path.dirname(sys.executable), name)
    # For a console script, the first entry of the path is the folder of the script. The folder of this file must not be
    # in the path.
    sys.path[0] = os.path.dirname(sys.executable)
    sys.argv = [beside, *arguments[1:]]
    found = [entry for entry in _console_scripts() if entry.name == name]
    if found:
        return found[0].load()()
    if os.path.basename(name) == name and os.access(beside, os.X_OK) and os.path.isfile(beside):
        os.execv(beside, sys.argv)
    known = {str(entry.name) for entry in _console_scripts()}
    print("hpcenv: %s" % _missing(name, known), file=sys.stderr, flush=True)
    return NOT_FOUND


def _console_scripts() -> List[Any]:
    """Return the entry points `console_scripts`, in the order in which their distributions are found."""
    entries: Any = metadata.entry_points()
    if hasattr(entries, "select"):  # Python 3.10
        return list(entries.select(group="console_scripts"))
    return list(entries.get("console_scripts", ()))


def _missing(name: str, known: Set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    meant = "; did you mean `%s`?" % near[0] if near else ""
    return "the environment has no console script `%s` (%s)%s" % (name, os.path.dirname(sys.executable), meant)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
