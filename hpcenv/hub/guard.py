"""Hooks for the HTTP client of the hub's library. They limit the requests and the bytes of answers.

Runs on: LOGIN NODE. Needs the extra `hub`.

The library follows each redirect and each next page of a list, and reads an answer to its end (huggingface_hub 2.4,
utils/_http.py, utils/_pagination.py). A hub may be hostile. It could redirect a request of the login node to a service
inside of the site. It could redirect a request with the user's token to a different host. It could also send a list
without end.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Iterator

import httpx2

from hpcenv.errors import DataUnavailable
from hpcenv.image.registry.refusals import one_line

# The hub sends 1000 entries in a page. 100,000 files (hub/repository_files.py) and their folders need fewer pages than
# this.
MOST_PAGES = 300
_MOST_BYTES = 64 << 20
_LONGEST_PAUSE = 10
_PORTS = {"http": 80, "https": 443}


class Guard:
    """The hooks of one client; they raise `DataUnavailable`.

    Args:
        endpoint: address of the hub.
        timeout: seconds until an answer begins, and between two parts of an answer.

    Attributes:
        files: whether files are downloaded now. Files may come from a storage on a different host, but all other
            answers must come from the hub itself.
        left: how many more bytes may arrive, of all files together or of one document.
        stopped: whether all downloads must end.
    """

    def __init__(self, endpoint: str, *, timeout: float) -> None:
        self.files = False
        self.left = _MOST_BYTES
        self.stopped = False
        self._own = httpx2.URL(endpoint)
        self._timeout = timeout
        self._documents = 0
        self._lock = threading.Lock()

    def on_request(self, request: httpx2.Request) -> None:
        """Check a request before it is sent; requests that follow a redirect are checked too.

        Raises:
            DataUnavailable: the request must not be sent.
        """
        if self.stopped:
            raise Stopped
        # The library asks for the pages of a list without a time limit.
        request.extensions["timeout"] = httpx2.Timeout(self._timeout).as_dict()
        host = one_line(request.url.host)
        elsewhere = _origin(request.url) != _origin(self._own)
        if not self.files:
            if elsewhere:
                raise self.refused(f"it leads to {host}, which is another host")
            self._documents += 1
            self.left = _MOST_BYTES
            if self._documents > MOST_PAGES:
                raise self.refused(f"the list of files has more than {MOST_PAGES} pages")
        if not elsewhere:
            return
        if "Authorization" in request.headers:
            raise self.refused(f"the token of the user would be sent to {host}")
        if self._own.scheme == "https" and request.url.scheme != "https":
            raise self.refused(f"it redirects to {host} without encryption")
        if _is_internal(request.url.host) and not _is_internal(self._own.host):
            raise DataUnavailable(
                f"the hub `{self._own.host}` redirects to an address inside of your network",
                why=f"the address is {host}, and the hub is outside of your network",
                hint="report this to the administrators of the hub",
            )

    def on_response(self, response: httpx2.Response) -> None:
        """Count the bytes of an answer's body with `arrived`, while the library reads them.

        Raises:
            DataUnavailable: the answer is compressed, although compression was not requested.
        """
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise self.refused("it is compressed, although hpcenv requests an answer without compression")
        # The library would wait without a message for the time that these two headers give, up to five times.
        response.headers.pop("ratelimit", None)
        pause = response.headers.get("Retry-After", "")
        if not pause.isdecimal() or len(pause) > 3 or int(pause) > _LONGEST_PAUSE:
            response.headers.pop("Retry-After", None)
        if isinstance(response.stream, httpx2.SyncByteStream):
            response.stream = _Counted(response.stream, self)

    def arrived(self, count: int) -> None:
        """Count bytes that arrived.

        Raises:
            DataUnavailable: too many bytes have arrived.
        """
        if self.stopped:
            raise Stopped
        with self._lock:
            self.left -= count
        if self.left < 0:
            raise self.refused("it sends more bytes than it lists" if self.files else "the answer is too long")

    def refused(self, why: str) -> DataUnavailable:
        """Return the error for an answer that is not used."""
        return DataUnavailable(
            f"the answer of `{self._own.netloc.decode()}` cannot be used",
            why=why,
            hint="check that HF_ENDPOINT names a hub, or report this to its administrators",
        )


class Stopped(Exception):
    """The download ends because a different file failed, or because the user interrupted."""


class _Counted(httpx2.SyncByteStream):
    """The body of an answer; its bytes are counted."""

    def __init__(self, stream: httpx2.SyncByteStream, guard: Guard) -> None:
        self._stream = stream
        self._guard = guard

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            self._guard.arrived(len(chunk))
            yield chunk

    def close(self) -> None:
        self._stream.close()


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or _PORTS.get(url.scheme)


def _is_internal(host: str) -> bool:
    """Return whether a host is outside the public internet; False if the name of the host does not resolve here.

    If a proxy is used, the proxy resolves the names, but an address that is written as a number is still checked here.
    """
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
        return any(not ipaddress.ip_address(address.partition("%")[0]).is_global for address in found)
    except (OSError, ValueError, UnicodeError):
        return False
