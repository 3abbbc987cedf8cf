"""A hub on the loopback that speaks the interface that huggingface_hub 2.4 uses: `revision`, `tree`, `resolve`.

Large files are redirected to a second server, as the hub redirects to its storage; that one refuses a token.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
import urllib.parse
from contextlib import suppress
from typing import Any

from tests.http_server import Served, asked_from

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def entry(path: str, data: bytes, /, *, lfs: bool = False, **changed: Any) -> dict[str, Any]:
    """Return the entry of a file as the hub lists it."""
    found: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_sha1(data)}
    if lfs:
        # The `oid` of such a file is that of its pointer.
        found["oid"] = git_sha1(b"pointer of " + path.encode())
        found["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 134}
    return {**found, **changed}


class Hub:
    """One repository at one commit.

    Args:
        files: path -> content.
        lfs: the paths of the large files.
        token: without it access is refused; empty for a public repository.
        page: entries in one page of the list.
        listed: entries in place of those of `files`, for a hub with wrong answers.
        faults: path -> functions or answers; each of them answers one request for that file.
    """

    def __init__(
        self,
        files: dict[str, bytes],
        *,
        repository: str = "lab/tiny",
        lfs: tuple[str, ...] = (),
        token: str = "",
        page: int = 1000,
        listed: list[Any] | None = None,
        commit: str = COMMIT,
        faults: dict[str, list[Any]] | None = None,
    ) -> None:
        self.files, self.lfs, self.token, self.page, self.commit = files, lfs, token, page, commit
        self.repository = repository
        folders = sorted({path.rpartition("/")[0] for path in files} - {""})
        self.listed = listed
        self.folders = [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in folders]
        self.faults = {path: list(left) for path, left in (faults or {}).items()}
        self.api, self.storage = _Front(self), _Storage(self)
        self.endpoint = f"http://{self.api.host}"

    def environ(self, **more: str) -> dict[str, str]:
        """Return the variables with which a user names this hub."""
        return {"HF_ENDPOINT": self.endpoint, **more}

    def asked(self, *, storage: bool = False) -> list[str]:
        """Return the paths of all requests."""
        return [path for path, _ in (self.storage if storage else self.api).requests]

    def close(self) -> None:
        self.api.close()
        self.storage.close()

    def entries(self) -> list[Any]:
        if self.listed is not None:
            return self.listed
        return [*self.folders, *(entry(path, data, lfs=path in self.lfs) for path, data in self.files.items())]


def _json(document: Any, status: int = 200, **headers: str) -> tuple[int, dict[str, str], bytes]:
    return status, {"Content-Type": "application/json; charset=utf-8", **headers}, json.dumps(document).encode()


def part_of(handler: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
    begin = asked_from(handler)
    if not begin:
        return 200, {"Content-Type": "application/octet-stream"}, body
    return 206, {"Content-Range": f"bytes {begin}-{len(body) - 1}/{len(body)}"}, body[begin:]


def cut_after(count: int) -> Any:
    """Answer with the beginning of a file, and close the connection."""

    def answer(handler: Any, body: bytes) -> None:
        begin = asked_from(handler)
        handler.send_response(206 if begin else 200)
        if begin:
            handler.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
        handler.send_header("Content-Length", str(len(body) - begin))
        handler.end_headers()
        with suppress(OSError):
            handler.wfile.write(body[begin : begin + count])
            handler.wfile.flush()
        handler.close_connection = True

    return answer


def hang_after(count: int, seconds: float = 60.0) -> Any:
    """Answer with the beginning of a file, and keep the connection open."""

    def answer(handler: Any, body: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        with suppress(OSError):
            handler.wfile.write(body[:count])
            handler.wfile.flush()
            time.sleep(seconds)
        handler.close_connection = True

    return answer


class _Front(Served):
    """The hub itself."""

    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self.hub = hub

    def other(self, handler: Any, path: str) -> Any:
        hub = self.hub
        kind, name = (
            ("models", hub.repository)
            if "/" not in hub.repository.partition("/")[2]
            else (hub.repository.split("/", 1))
        )
        if hub.token and handler.headers.get("Authorization") != f"Bearer {hub.token}":
            return _json({"error": "Access to this repository is restricted"}, 401, **{"X-Error-Code": "GatedRepo"})
        api, files = f"/api/{kind}/{name}/", f"/{hub.repository}/resolve/{hub.commit}/"
        if path in (f"{api}revision/main", f"{api}revision/{hub.commit}"):
            return _json({"id": name, "sha": hub.commit})
        if path == f"{api}tree/{hub.commit}":
            return self._page(handler, path)
        if path.startswith(files):
            return self._file(handler, urllib.parse.unquote(path.removeprefix(files)))
        if path.startswith(api):
            return _json({"error": "Invalid rev id: nothing"}, 404, **{"X-Error-Code": "RevisionNotFound"})
        return _json({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})

    def _page(self, handler: Any, path: str) -> Any:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(handler.path).query)
        begin = int(query.get("cursor", ["0"])[0])
        end = begin + self.hub.page
        entries = self.hub.entries()
        more = (
            {"Link": f'<{self.hub.endpoint}{path}?recursive=true&cursor={end}>; rel="next"'}
            if end < len(entries)
            else {}
        )
        return _json(entries[begin:end], **{"X-Repo-Commit": self.hub.commit}, **more)

    def _file(self, handler: Any, path: str) -> Any:
        hub = self.hub
        if path not in hub.files:
            return _json({"error": "Entry not found"}, 404, **{"X-Error-Code": "EntryNotFound"})
        if path in hub.lfs:
            place = f"http://{hub.storage.host}/{urllib.parse.quote(path)}?Signature=secret-signature"
            linked = {"X-Linked-Etag": f'"{sha256(hub.files[path])}"', "X-Linked-Size": str(len(hub.files[path]))}
            return 302, {"Location": place, "X-Repo-Commit": hub.commit, **linked}, b""
        answer = _answer(hub, handler, path)
        if callable(answer):
            return answer
        status, headers, body = answer
        return status, {"ETag": f'"{git_sha1(hub.files[path])}"', "X-Repo-Commit": hub.commit, **headers}, body


class _Storage(Served):
    """The storage of the large files: its addresses are signed, and it refuses any other credential."""

    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self.hub = hub

    def other(self, handler: Any, path: str) -> Any:
        if handler.headers.get("Authorization"):
            return 400, {}, b"Only one auth mechanism allowed"
        return _answer(self.hub, handler, urllib.parse.unquote(path.lstrip("/")))


def _fail(fault: Any, body: bytes, handler: Any) -> None:
    fault(handler, body)


def _answer(hub: Hub, handler: Any, path: str) -> Any:
    left = hub.faults.get(path)
    if left:
        fault = left.pop(0)
        return functools.partial(_fail, fault, hub.files[path]) if callable(fault) else fault
    return part_of(handler, hub.files[path])
