"""A client of the HTTP interface of a hub: resolve a revision, list the files of a commit, download them.

Runs on: LOGIN NODE. Loads `requests` (0.1 s), so import it only where a hub is contacted.

The interface is the one that huggingface_hub 2.4 uses (hf_api.py: `repo_info`, `list_repo_tree`; file_download.py:
`hf_hub_url`). Why not the library itself: docs/decisions/0036.

The token goes to the hub's own host only. A hub redirects large files to a storage on another host, whose address is
signed; that request carries no token.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import ipaddress
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import requests
import urllib3.exceptions
from requests import exceptions

from hpcenv.errors import DataUnavailable, ImageUnavailable
from hpcenv.hub.access import HubAccess
from hpcenv.hub.refusals import HubRefusals
from hpcenv.image.registry import network_faults
from hpcenv.image.registry.blobs import Broken, Stream
from hpcenv.image.registry.login import TRANSIENT
from hpcenv.image.registry.session import RegistrySession, read_in_time, redirect_target, retry_after
from hpcenv.progress import Event, OnEvent, ignore
from hpcenv.project.hub_reference import HubReference
from hpcenv.version import VERSION

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PAUSES = (0.5, 2.0)
_PAGE_LIMIT = 64 << 20
_ERROR_LIMIT = 64 * 1024
# The hub sends 1000 entries in a page; 100,000 files have folders, too.
_MOST_PAGES = 1000
_CHUNK = 256 * 1024
_CONTENT_RANGE = re.compile(r"bytes\s+(\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.IGNORECASE)


class HubClient:
    """A connection to a hub; it adds the token, time limits, bounded answers and errors.

    Args:
        access: hub and token.
        timeout: seconds until an answer begins, and for a whole small answer.
        on_event: called before a request is sent again.
    """

    def __init__(self, access: HubAccess, *, timeout: float = 30.0, on_event: OnEvent = ignore) -> None:
        self._access = access
        self._timeout = timeout
        self._on_event = on_event
        self._refusals = HubRefusals(access=access, timeout=timeout)
        plain = access.endpoint.startswith("http:")
        self._session = RegistrySession(plain_http=plain, ca_file=None, timeout=timeout)
        self._session.headers["User-Agent"] = f"hpcenv/{VERSION}"
        self._session.hooks["response"].append(functools.partial(_refuse_internal, access.endpoint))

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def resolve_commit(self, wanted: HubReference) -> str:
        """Return the commit that a branch, tag or commit names now.

        Raises:
            DataUnavailable: the hub does not know it, refuses it, or cannot be reached.
        """
        path = f"revision/{quote(wanted.revision, safe='')}"
        document, _ = self._json(self._api(wanted, path), wanted)
        commit = document.get("sha") if isinstance(document, dict) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise self._refusals.unusable(wanted, "it names no commit")
        return commit

    def list_entries(self, wanted: HubReference) -> Iterator[Any]:
        """Yield the entries of the list of all files of a commit, unchecked.

        Raises:
            DataUnavailable: as `resolve_commit`.
        """
        url = self._api(wanted, f"tree/{wanted.revision}?recursive=true&expand=false")
        for _ in range(_MOST_PAGES):
            entries, headers = self._json(url, wanted)
            told = headers.get("X-Repo-Commit", wanted.revision)
            if told != wanted.revision:
                raise self._refusals.unusable(wanted, "it is the list of another commit")
            if not isinstance(entries, list):
                raise self._refusals.unusable(wanted, "the list of files is no list")
            yield from entries
            following = _next_page(headers.get("Link", ""))
            if following is None:
                return
            try:
                url = urljoin(url, following)
            except ValueError:
                raise self._refusals.unusable(wanted, "the address of the next page is not valid") from None
            if urlsplit(url)[:2] != urlsplit(self._access.endpoint)[:2]:
                raise self._refusals.unusable(wanted, "the next page of the list is on another host")
        raise self._refusals.unusable(wanted, f"the list of files has more than {_MOST_PAGES} pages")

    def open_file(self, wanted: HubReference, path: str, *, size: int, offset: int, stall: float) -> requests.Response:
        """Request a file; the response begins at `offset` if its status is 206, else at 0.

        Raises:
            Broken: another attempt may succeed.
            DataUnavailable: another attempt would fail as well.
        """
        url = f"{self._access.endpoint}/{quote(wanted.repository)}/resolve/{wanted.revision}/{quote(path)}"
        # The digest covers the stored bytes, so forbid transfer compression.
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={offset}-"} if offset else {})}
        try:
            response = self._get(url, headers, timeout=min(stall, self._timeout))
        except exceptions.SSLError as error:
            raise self._refusals.unreachable(error) from None
        except (exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            raise Broken(self._refusals.unreachable(error)) from None
        if response.status_code == 200 or (response.status_code == 206 and _begins_at(response, offset, size)):
            return response
        with contextlib.closing(response):
            status, refusal = response.status_code, self._refusals.status(response, wanted, self._error_text(response))
            # The signed address of the storage expires; the hub then gives a new one.
            expired = bool(response.history) and status in (400, 401, 403)
            if status in TRANSIENT or status in (206, 416) or expired:
                raise Broken(refusal, retry_after=retry_after(response), restart=status in (206, 416))
        raise refusal

    def read_some(self, response: requests.Response) -> bytes:
        """Return the next bytes of a file; empty at the end.

        Raises:
            Broken: the connection failed, or sent nothing in time.
        """
        raw = response.raw
        try:
            if hasattr(raw, "read1"):
                # Returns what has arrived, so that a slow server is noticed before a chunk is full.
                return bytes(raw.read1(_CHUNK, decode_content=False))
            return bytes(raw.read(16 * 1024, decode_content=False))
        except (
            urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ssl.SSLError,
        ) as error:  # fmt: skip
            raise Broken(self._refusals.unreachable(error)) from None

    def _api(self, wanted: HubReference, path: str) -> str:
        return f"{self._access.endpoint}/api/{wanted.kind}s/{quote(wanted.name)}/{path}"

    def _get(self, url: str, headers: Mapping[str, str], *, timeout: float) -> requests.Response:
        # `RegistrySession.rebuild_auth` removes the header before a redirect to another host.
        token = {"Authorization": f"Bearer {self._access.token}"} if self._access.token else {}
        try:
            return self._session.get(url, headers={**headers, **token}, stream=True, timeout=(timeout, timeout))
        except ImageUnavailable as error:
            # The session refuses a redirect to http in the words of a registry.
            raise self._refusals.redirected(error.why or error.what) from None

    def _json(self, url: str, wanted: HubReference) -> tuple[Any, Mapping[str, str]]:
        """Return the document at an address of the hub, and the headers."""
        deadline = time.monotonic() + 2 * self._timeout
        response = self._retry(lambda: self._get(url, {}, timeout=self._timeout), deadline)
        with contextlib.closing(response):
            if response.status_code != 200:
                raise self._refusals.status(response, wanted, self._error_text(response))
            if urlsplit(response.url)[:2] != urlsplit(self._access.endpoint)[:2]:
                raise self._refusals.redirected(f"its interface answers from {urlsplit(response.url).hostname}")
            body = bytearray()
            try:
                for chunk in read_in_time(response, deadline):
                    body += chunk
                    if len(body) > _PAGE_LIMIT:
                        raise self._refusals.unusable(wanted, f"an answer has more than {_PAGE_LIMIT >> 20} MiB")
            except exceptions.RequestException as error:
                raise self._refusals.unreachable(error) from None
        try:
            return json.loads(body), response.headers
        except (ValueError, RecursionError) as error:
            raise self._refusals.unusable(wanted, "the answer is not JSON") from error

    def _retry(self, request: Callable[[], requests.Response], deadline: float) -> requests.Response:
        """Send a request, and send it again after a transient fault, before the deadline."""
        for pause in (*_PAUSES, None):
            wait, problem = pause or 0.0, None
            try:
                response = request()
            except (exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
                problem = self._refusals.unreachable(error)
                lasting = network_faults.judge(error) in ("unresolved", "tls", "address")
                if lasting or not isinstance(error, exceptions.ConnectionError):
                    raise problem from None
            else:
                wait = max(wait, retry_after(response) or 0.0)
                if response.status_code not in TRANSIENT:
                    return response
            last = pause is None or time.monotonic() + wait >= deadline
            if last and problem is not None:
                raise problem
            if last:
                return response
            self._on_event(Event(phase="note", what=f"the hub did not answer: asking again in {wait:g} s"))
            time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _error_text(self, response: requests.Response) -> str:
        """Return the hub's own words: of the header, else of the JSON body; empty for a page."""
        told = response.headers.get("X-Error-Message", "")
        if told or "json" not in response.headers.get("Content-Type", ""):
            return told
        body = b""
        try:
            for chunk in read_in_time(response, time.monotonic() + self._timeout):
                body += chunk
                if len(body) > _ERROR_LIMIT:
                    return ""
            return str(json.loads(body)["error"])
        except (exceptions.RequestException, ValueError, KeyError, TypeError, RecursionError):
            return ""


class HubFiles:
    """The files of a repository as a `blobs.BlobSource`, one connection for each thread.

    Args:
        access: hub and token.
        wanted: the repository and its commit.
        paths: digest -> path of a file with this content.
    """

    def __init__(self, access: HubAccess, wanted: HubReference, paths: Mapping[str, str]) -> None:
        self._access = access
        self._wanted = wanted
        self._paths = paths
        self._local = threading.local()
        self._lock = threading.Lock()
        self._clients: list[HubClient] = []

    def fetch(self, digest: str, size: int, offset: int, *, stall: float) -> Stream:
        """Begin to fetch a file; see `blobs.BlobSource.fetch`."""
        client = self._client()
        response = client.open_file(self._wanted, self._paths[digest], size=size, offset=offset, stall=stall)
        start = offset if response.status_code == 206 else 0
        return Stream(start=start, chunks=_FileChunks(client, response))

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            clients, self._clients = self._clients, []
        for client in clients:
            client.close()

    def _client(self) -> HubClient:
        client: HubClient | None = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = HubClient(self._access)
            with self._lock:
                self._clients.append(client)
        return client


class _FileChunks(Iterator[bytes]):
    """The chunks of one file. Not a generator: `close` must also work before the first chunk."""

    def __init__(self, client: HubClient, response: requests.Response) -> None:
        self._client = client
        self._response = response

    def __next__(self) -> bytes:
        chunk = self._client.read_some(self._response)
        if not chunk:
            raise StopIteration
        return chunk

    def close(self) -> None:
        self._response.close()


def _next_page(link: str) -> str | None:
    """Return the address of the next page in a `Link` header (RFC 8288)."""
    found = requests.utils.parse_header_links(link[:4096]) if link else []
    return next((one["url"] for one in found if one.get("rel") == "next"), None)


def _begins_at(response: requests.Response, offset: int, size: int) -> bool:
    """RFC 9110, 15.3.7: a client must inspect Content-Range to learn which part a 206 holds."""
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
    return match is not None and int(match[1]) == offset and match[3] in ("*", str(size))


def _refuse_internal(endpoint: str, response: requests.Response, **_: object) -> None:
    """Refuse a redirect to an address inside of the site, from a hub outside: the login node may reach services there.

    Where a proxy is used, names are resolved by the proxy, and an address that is written as a number is still judged.
    """
    if not response.is_redirect:
        return
    # The session has refused a location that is not an address.
    target = redirect_target(response).hostname or ""
    own = urlsplit(endpoint).hostname or ""
    if target == own or not _is_internal(target) or _is_internal(own):
        return
    response.close()
    raise DataUnavailable(
        f"the hub `{own}` redirects to an address inside of your network",
        why=f"it is {ascii(target)[1:-1]}, and the hub is outside",
        hint="report this to the administrators of the hub",
    )


def _is_internal(host: str) -> bool:
    """Tell whether a host is not on the public internet; False if its name does not resolve here."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
        return any(not ipaddress.ip_address(address.partition("%")[0]).is_global for address in found)
    except (OSError, ValueError, UnicodeError):
        return False
