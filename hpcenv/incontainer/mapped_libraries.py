"""Find the files that the loader really mapped for the libraries under torch, and their versions.

Runs on: inside the image (or in a host environment), in the agent, which has imported torch. Standard library only,
Python 3.8 to 3.14. Outside, facts/loaded.py compares these files with the locked libraries.
"""

import ctypes
import os
import re
import sys
from typing import Any, Dict, List, Optional

# At most this many copies of one library are reported.
_MOST_COPIES = 8


def read(wanted: Dict[str, Dict[str, str]], build_id: Any) -> Dict[str, Any]:
    """Return the mapped libraries.

    Args:
        wanted: library -> known facts about the library. `stem` is the beginning of the library's file name. `function`
            is the name of a function that returns the library's version, and `how` is the form of this version.
            `function` and `how` are empty if the library has no such function. `origin` is the library's place
            according to the lockfile.
        build_id: function that returns the build-id of the file at a path.
    """
    try:
        paths = _mapped_paths()
    except OSError as error:
        return {"problem": "/proc/self/maps: %s" % error}
    libraries = {}
    for name, parts in wanted.items():
        pattern = re.escape(parts["stem"]) + r"(-[0-9a-f]+)?\.so(\.[0-9]+)*\Z"
        copies = [path for path in paths if re.match(pattern, os.path.basename(path))]
        expected = _place(parts.get("origin", ""))
        libraries[name] = {
            "expected": "" if expected is None else os.path.realpath(expected),
            "mapped": [_describe(path, parts, build_id) for path in copies[:_MOST_COPIES]],
        }
    return {"libraries": libraries}


def _mapped_paths() -> List[str]:
    """Return the mapped files of this process whose names contain `.so` (proc_pid_maps(5))."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        lines = [line.rstrip("\n").split(None, 5) for line in file if ".so" in line]
    return sorted({parts[5] for parts in lines if len(parts) == 6 and parts[5].startswith("/")})


def _place(origin: str) -> Optional[str]:
    """Return the path of a library from its place in the lockfile, for example `prefix:lib/libnccl.so.2`."""
    kind, colon, rest = origin.partition(":")
    roots = {"prefix": sys.prefix, "base-prefix": sys.base_prefix, "system": "/", "other": "/"}
    return os.path.join(roots[kind], rest) if colon and kind in roots else None


def _describe(path: str, parts: Dict[str, str], build_id: Any) -> Dict[str, Any]:
    found = {"path": path, "real": os.path.realpath(path), "build-id": ""}  # type: Dict[str, Any]
    try:
        found["build-id"] = build_id(path)
    except (OSError, ValueError) as error:
        found["problem"] = str(error)
    if parts.get("function"):
        try:
            found["numbers"] = _ask(path, parts["how"], parts["function"])
        except (OSError, AttributeError, ValueError) as error:
            found["problem"] = str(error)
    return found


def _ask(path: str, how: str, function: str) -> List[int]:
    """Return the numbers of a library's version. The library is already mapped, so nothing is loaded."""
    call = getattr(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY), function)
    if how == "size_t":
        call.restype = ctypes.c_size_t
        return [call()]
    numbers = [ctypes.c_int(0) for _ in range({"packed": 1, "pair": 2}.get(how, 3))]
    if how == "property":
        statuses = [call(which, ctypes.byref(number)) for which, number in enumerate(numbers)]
    else:
        statuses = [call(*map(ctypes.byref, numbers))]
    if any(statuses):
        raise ValueError("%s returned %s" % (function, statuses))
    return [number.value for number in numbers]
