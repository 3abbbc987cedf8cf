"""Start the process that asks the index through pip.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcenv import process
from hpcenv.errors import HpcenvError
from hpcenv.locking.wheels.proof import Index, InstalledDist

GRACE_SECONDS = 5.0  # more time for the start of Python and for the last answer

# Python can then import hpcenv itself, but not the other packages in its site-packages folder. The reason is that
# `index.python` may be a different Python, and its own pip must answer. The entry '' is removed from sys.path, because
# pip would otherwise import a `queue.py` in the user's folder instead of the standard module.
_PROGRAM = """
import os, sys
from importlib.util import module_from_spec, spec_from_file_location
sys.path[:] = [path for path in sys.path if path]
folder = sys.argv[1]
spec = spec_from_file_location("hpcenv", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
sys.modules["hpcenv"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["hpcenv"])
from hpcenv.locking.wheels.pip_process import serve
serve()
"""


def ask_for_wheels(
    dists: Sequence[InstalledDist], *, index: Index, cache: Path, timeout: float, workers: int
) -> dict[str, Any]:
    """Return the wheels that the index lists, and their content. `dists` has one entry per package.

    After a failure, `error` has one sentence about it.
    """
    request = {
        "kind": "wheels",
        "dists": [asdict(dist) | {"direct_url": _on_a_server(dist), "wheel_file": ""} for dist in dists],
        "cache": os.path.abspath(cache),
        "seconds": timeout,
        "workers": workers,
    }
    return _ask(request, index, timeout)


def _on_a_server(dist: InstalledDist) -> dict[str, str] | None:
    """Return the URL that the wheel was downloaded from, if direct_url.json names a wheel on a server."""
    url = str((dist.direct_url or {}).get("url", ""))
    return {"url": url} if url.startswith(("http://", "https://")) and url.endswith(".whl") else None


def ask_for_links(packages: Sequence[tuple[str, str]], *, index: Index, timeout: float, workers: int) -> dict[str, Any]:
    """Return every wheel that the index lists for each name and version, with its URL, under `links`.

    After a failure, `error` has one sentence about it. The URLs may contain passwords, so never show them unchecked.
    """
    request = {"kind": "links", "packages": list(packages), "seconds": timeout, "workers": workers}
    return _ask(request, index, timeout)


def ask_for_sources(packages: Sequence[tuple[str, str]], *, index: Index, timeout: float) -> dict[str, Any]:
    """Return the source archives that the index lists for each name and version. `answers` has one entry per package.

    An entry has `sources` (`filename`, and `sha256` or None) and `trouble`. After a failure, `error` has one sentence
    about it.
    """
    return _ask({"kind": "sources", "packages": list(packages), "seconds": timeout, "workers": 4}, index, timeout)


def _ask(request: Mapping[str, Any], index: Index, timeout: float) -> dict[str, Any]:
    argv = [index.python, "-B", "-c", _PROGRAM, str(Path(__file__).parents[2])]
    try:
        done = process.run(argv, timeout=timeout + GRACE_SECONDS, env=index.env, stdin=json.dumps(request))
        reply = json.loads(done.stdout.splitlines()[-1])
        return reply if isinstance(reply, dict) else {"error": "pip's process gave no answer"}
    except HpcenvError as error:
        # The text of the error is not used, because pip's messages contain URLs.
        status = getattr(error, "status", None)
        if status is None:
            return {"error": f"index not reachable: no answer within {timeout:g} s, or pip could not be started"}
        return {"error": f"pip's process ended with status {status}"}
    except (ValueError, IndexError):
        return {"error": "pip's process gave no answer"}
