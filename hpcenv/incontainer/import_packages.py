"""Import each package once, each in a separate process, and say which ones fail.

Runs on: inside the image (or in a bare host environment), read by Python from standard input. Standard library only,
Python 3.8 to 3.14.

    python3 -B - '{"packages": ["torch", ...], "seconds": 120}'

Prints a line of JSON for each package: name, module, state (imported, failed, no-module, not-installed), found (the
last line of the error). If a module crashes, hangs or ends the process, its state is `failed`.
"""

import importlib.machinery
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, Dict, List, Set

# Each process may need the memory of torch.
_AT_ONCE = 4
_SUFFIXES = tuple(importlib.machinery.all_suffixes())
# Some wheels put these modules into the site directory by mistake. These modules belong to no package.
_STRAY = {"benchmarks", "conftest", "doc", "docs", "example", "examples", "setup", "test", "tests"}
_MARK = "hpcenv-import "
_CHILD = (
    "import importlib, sys\n"
    "sys.path[:] = [entry for entry in sys.path if entry]\n"
    "for name in sys.argv[1:]:\n"
    f"    sys.stderr.write({_MARK!r} + name + chr(10)); sys.stderr.flush()\n"
    "    importlib.import_module(name)\n"
    f"sys.stderr.write({_MARK!r} + chr(10)); sys.stderr.flush()\n"
)


def find_modules(dist: Any) -> List[str]:
    """Return the modules that a program imports from a distribution, for example `google.protobuf`."""
    files = [str(path) for path in dist.files or () if not str(path).startswith(("..", "/"))]
    modules = _packages(files) | {_stem(path) for path in files if "/" not in path and path.endswith(_SUFFIXES)}
    names = [name for name in modules if all(part.isidentifier() for part in name.split("."))]
    # The RECORD of an editable install has only a hook with such a name; top_level.txt has the modules.
    names = [name for name in names if not name.startswith("__editable__")]
    if not names:
        names = (dist.read_text("top_level.txt") or "").split()
    public = [name for name in names if not name.startswith("_")] or names
    return sorted([name for name in public if name not in _STRAY] or public)


def _stem(path: str) -> str:
    return path.split(".", 1)[0]


def _packages(files: List[str]) -> Set[str]:
    """Return the outermost packages.

    A folder above an outermost package has no __init__: it is a namespace that several distributions share.
    """
    found = set()  # type: Set[str]
    starts = [path.rpartition("/") for path in files if path.endswith(_SUFFIXES)]
    for folder in sorted({folder for folder, _, name in starts if folder and _stem(name) == "__init__"}, key=len):
        name = folder.replace("/", ".")
        if not any(name.startswith(outer + ".") for outer in found):
            found.add(name)
    return found


def import_one(name: str, dists: Dict[str, Any], seconds: float) -> Dict[str, str]:
    """Import a package in a separate process; return the result."""
    if name not in dists:
        return {"name": name, "module": "", "state": "not-installed", "found": ""}
    modules = find_modules(dists[name])
    if not modules:
        # Its RECORD lists a .pth file, and not its code (PEP 660).
        editable = '"editable": true' in (dists[name].read_text("direct_url.json") or "")
        found = "an editable install does not list its modules" if editable else ""
        return {"name": name, "module": "", "state": "no-module", "found": found}
    with tempfile.TemporaryFile() as errors:
        # The child gets a new session: a module may start processes, and all of them are ended with the session.
        child = subprocess.Popen(
            [sys.executable, "-B", "-c", _CHILD, *modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            status = child.wait(timeout=seconds)
            why = "" if status == 0 else "it ended the process with status %d" % status
            if status < 0:
                why = "ended by signal %d (%s)" % (-status, signal.strsignal(-status))
        except subprocess.TimeoutExpired:
            status, why = 1, "it has not ended within %g s" % seconds
        _end_all(child)
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2**20))
        lines = errors.read().decode("utf-8", "replace").splitlines()
    begun = [line[len(_MARK) :] for line in lines if line.startswith(_MARK)]
    if status == 0 and begun and not begun[-1]:
        return {"name": name, "module": " ".join(modules), "state": "imported", "found": ""}
    said = [line for line in lines if line.strip() and not line.startswith(_MARK)]
    if status == 1 and said and not why.startswith("it has not"):
        why = said[-1].strip()
    if status == 0:
        why = "it ended the process"
    return {"name": name, "module": (begun or modules)[-1], "state": "failed", "found": why[:500]}


def _end_all(child: Any) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except OSError:
        pass
    child.wait()


def main() -> None:
    """Import the packages that the argument names."""
    asked = json.loads(sys.argv[1])
    dists = {}  # type: Dict[str, Any]
    for dist in metadata.distributions(path=[entry for entry in sys.path if entry]):
        name = dist.metadata["Name"]
        # The first distribution on the path counts, because Python imports it.
        dists.setdefault(re.sub(r"[-_.]+", "-", str(name)).lower(), dist)
    with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as pool:
        for result in pool.map(lambda name: import_one(name, dists, asked["seconds"]), asked["packages"]):
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
