"""The program beside pip: it answers one request on standard input (see pip_request.py).

Runs on: LOGIN NODE, in the process beside pip: standard library and pip only.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hpcenv.locking.wheels.lists import ListedWheel, WheelLists
from hpcenv.locking.wheels.look_up import look_up
from hpcenv.locking.wheels.names import SOURCES, is_source_of, normal_name, normal_version
from hpcenv.locking.wheels.pip_session import PipSession
from hpcenv.locking.wheels.proof import InstalledDist


def serve() -> None:
    """Read the request from stdin, write one line of JSON to stdout, and end at the time limit in any case."""
    request = json.load(sys.stdin)
    # pip may print (a keyring, a warning): stdout is for the answer only.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    reply = _ANSWERS[request["kind"]](request)
    out.write(json.dumps(reply) + "\n")
    out.flush()
    # sys.exit is not used, because it would wait for threads that hang in a read.
    os._exit(0)


def _set_up(seconds: float) -> PipSession | str:
    """Return pip's session, or why it could not be started."""
    try:
        return PipSession(time.monotonic() + seconds)
    except ImportError:
        return "the Python that runs hpcenv has no pip to ask an index with"
    except BaseException as error:  # noqa: BLE001 - SystemExit for a broken pip.conf, AttributeError for a new pip
        return f"pip could not be set up ({type(error).__name__}): its configuration or version"


def _look_up_wheels(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of the wheels of each package."""
    deadline = time.monotonic() + request["seconds"]
    answers: list[dict[str, Any]] = [{"files": [], "trouble": []} for _ in request["dists"]]
    reply: dict[str, Any] = {"dists": answers}
    work = threading.Thread(target=_look_up_all, args=(request, reply), daemon=True)
    work.start()
    work.join(max(deadline - time.monotonic(), 0))
    for answer in answers:
        if not answer.get("done") and "error" not in reply:
            answer["trouble"] = [*answer["trouble"], f"index not reachable within {request['seconds']:g} s"]
    # A copy is returned, because threads that hang in a read may still write into the lists.
    return {**reply, "dists": [{key: list(answer[key]) for key in ("files", "trouble")} for answer in answers]}


def _look_up_all(request: Mapping[str, Any], reply: dict[str, Any]) -> None:
    pip = _set_up(request["seconds"])
    if isinstance(pip, str):
        reply["error"] = pip
        return
    cache = Path(request["cache"])
    lists = WheelLists(pip)

    def look_up_one(number: int) -> None:
        dist = InstalledDist(**request["dists"][number])
        answer = reply["dists"][number]
        try:
            look_up(dist, answer, lists=lists, pip=pip, cache=cache)
        except Exception as error:  # noqa: BLE001 - one unusual page or wheel must not hide the others
            answer["trouble"].append(f"its wheel could not be looked up ({type(error).__name__})")
        answer["done"] = True

    with ThreadPoolExecutor(max(1, request["workers"])) as pool:
        list(pool.map(look_up_one, range(len(request["dists"]))))


def _list_links(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return every listed wheel of each name and version, with its URL."""
    pip = _set_up(request["seconds"])
    if isinstance(pip, str):
        return {"error": pip}
    lists = WheelLists(pip)

    def list_one(package: Sequence[str]) -> dict[str, Any]:
        try:
            links, trouble = lists.of((normal_name(package[0]), normal_version(package[1])))
        except Exception as error:  # noqa: BLE001 - one unusual page must not hide the others
            return {"links": [], "trouble": [f"its list could not be read ({type(error).__name__})"]}
        shown = [
            {"filename": link.filename, "url": None if link.local else link.location, "sha256": link.sha256}
            for link in links
        ]
        return {"links": shown, "trouble": trouble}

    with ThreadPoolExecutor(max(1, request["workers"])) as pool:
        return {"answers": list(pool.map(list_one, request["packages"]))}


def _list_sources(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return every listed source archive of each name and version, with its sha256; None without a stated sha256."""
    pip = _set_up(request["seconds"])
    if isinstance(pip, str):
        return {"error": pip}
    lists = WheelLists(pip, SOURCES)

    def list_one(package: Sequence[str]) -> dict[str, Any]:
        key = (normal_name(package[0]), normal_version(package[1]))
        try:
            links, trouble = lists.of(key)
            found = {link.filename: link for link in reversed(links) if is_source_of(link.filename, key)}
            shown = [{"filename": name, "sha256": _sha256_of(link)} for name, link in sorted(found.items())]
        except Exception as error:  # noqa: BLE001 - one unusual page must not hide the others
            return {"sources": [], "trouble": [f"its list could not be read ({type(error).__name__})"]}
        return {"sources": shown, "trouble": trouble}

    with ThreadPoolExecutor(max(1, request["workers"])) as pool:
        return {"answers": list(pool.map(list_one, request["packages"]))}


def _sha256_of(link: ListedWheel) -> str | None:
    """Return the sha256 that the list states. If it states none, and the file is on this machine, compute it."""
    if link.sha256 is not None or not link.local:
        return link.sha256
    digest = hashlib.sha256()
    with open(link.location, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


_ANSWERS = {"links": _list_links, "wheels": _look_up_wheels, "sources": _list_sources}
