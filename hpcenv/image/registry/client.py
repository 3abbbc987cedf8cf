"""A client of the OCI distribution API, for one repository.

Runs on: LOGIN NODE. This module loads `requests` (0.1 s), so import it only where a registry is contacted.

The client follows OCI distribution-spec 1.1 (2024-02). The client fetches manifests, configurations and layers. The
client checks the digest of each manifest and configuration; `blobs` checks layers while they arrive.
docs/decisions/0012 says why the client uses requests and no OCI library.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

import requests
import urllib3.exceptions
from requests import exceptions

from hpcenv.errors import HpcenvError, ImageUnavailable
from hpcenv.image.reference import RegistryName
from hpcenv.image.registry import network_faults
from hpcenv.image.registry.blobs import Broken, Stream
from hpcenv.image.registry.credentials import Search
from hpcenv.image.registry.login import TRANSIENT, Login, LoginRefused
from hpcenv.image.registry.manifests import CONFIG_LIMIT, INDEXES, MANIFEST_LIMIT, MANIFESTS, digest_of
from hpcenv.image.registry.refusals import Refusals, one_line
from hpcenv.image.registry.session import RegistrySession, read_in_time, retry_after
from hpcenv.progress import Event, OnEvent, ignore

__all__ = ["Client", "RegistryBlobs"]

_T = TypeVar("_T")
_ERROR_LIMIT = 64 * 1024
# Seconds before the second and the third attempt. A short fault ends in this time, and the error for an unreachable
# registry comes within two seconds.
_PAUSES = (0.5, 1.0)
_CHUNK = 256 * 1024
_CONTENT_RANGE = re.compile(r"bytes\s+(\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.IGNORECASE)


class Client:
    """A connection to one repository; it adds login, time limits, digest checks and errors.

    Args:
        reference: the image, or another file of the repository.
        search: the user's credentials for the registry.
        plain_http: whether to use http instead of https.
        ca_file: a file of PEM certificates to trust instead of the system's.
        timeout: seconds for one request, including its retries.
        login: a login that several connections share; None for a new login of this connection.
        on_event: called before a request is sent again.
    """

    def __init__(
        self,
        reference: RegistryName,
        search: Search,
        *,
        plain_http: bool,
        ca_file: Path | None,
        timeout: float,
        login: Login | None = None,
        on_event: OnEvent = ignore,
    ) -> None:
        self._reference = reference
        self._timeout = timeout
        self._on_event = on_event
        self._refusals = Refusals(reference=reference, search=search, timeout=timeout)
        self._api = f"{'http' if plain_http else 'https'}://{reference.api_host}/v2/"
        make_session = functools.partial(RegistrySession, plain_http=plain_http, ca_file=ca_file, timeout=timeout)
        self._session = make_session()
        self.login = login or Login(reference, search.credential, make_session(), plain_http=plain_http)
        self._owns_login = login is None
        self._response: requests.Response | None = None

    def close(self) -> None:
        """Close the connections."""
        self.end()
        self._session.close()
        if self._owns_login:
            self.login.close()

    def authenticate(self) -> None:
        """Request `/v2/` to find out which login the registry demands, and log in.

        Some registries never demand a login. Such registries answer "not found" for a private image.
        """
        deadline = time.monotonic() + self._timeout
        response = self._retry(lambda: self._session.get(self._api, stream=True), deadline)
        status = response.status_code
        if status not in (200, 401, 403, 404):
            self._refusals.raise_for_status(response, self._error_text(response))
        with contextlib.closing(response):
            if status == 401:
                # A failed login is not an error yet: the image itself may be public.
                with contextlib.suppress(LoginRefused):
                    self._translated(lambda: self.login.renew(response, None), deadline)
        if status == 401 and self.login.needs_password(response):
            raise self._refusals.denied("the registry requires a user name and a password, and none is known for it")

    def manifest(self, name: str) -> tuple[str, bytes]:
        """Fetch a manifest or index by tag or digest; return its digest and its bytes."""
        accept = ", ".join(MANIFESTS + INDEXES)
        url = f"{self._api}{self._reference.repository}/manifests/{name}"
        body, headers = self._get(url, MANIFEST_LIMIT, {"Accept": accept})
        digest = digest_of(body)
        expected = name if name.startswith("sha256:") else headers.get("Docker-Content-Digest", digest)
        if expected.startswith("sha256:") and expected != digest:
            raise self._refusals.wrong_bytes("manifest", expected=expected, received=digest)
        return digest, body

    def config(self, digest: str) -> bytes:
        """Fetch an image configuration and check its digest."""
        body, _ = self._get(f"{self._api}{self._reference.repository}/blobs/{digest}", CONFIG_LIMIT, {})
        received = digest_of(body)
        if received != digest:
            raise self._refusals.wrong_bytes("configuration", expected=digest, received=received)
        return body

    def open_blob(self, digest: str, size: int, offset: int) -> tuple[int, requests.Response]:
        """Request a blob.

        Args:
            digest: the blob.
            size: the size of the blob in bytes, from the manifest.
            offset: the first byte that is still missing.

        Returns:
            The offset of the first byte of the response, and the response.

        Raises:
            Broken: another attempt may succeed.
            ImageUnavailable: another attempt would fail as well.
        """
        url = f"{self._api}{self._reference.repository}/blobs/{digest}"
        # The digest covers the stored blob, so forbid transfer compression.
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        try:
            response = self._request(url, headers)
        except LoginRefused as refused:
            raise self._denied(refused) from None
        except exceptions.SSLError as error:
            raise self._refusals.unreachable(error) from None
        except (exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            raise Broken(self._refusals.unreachable(error)) from None
        if response.status_code == 200:
            self._check_length(response, digest, size)
            return 0, response
        if response.status_code == 206 and offset:
            self._check_range(response, digest, size, offset)
            return offset, response
        return self._refuse_blob(response, digest)

    def read_some(self, response: requests.Response) -> bytes:
        """Return the next bytes of a blob, not decompressed; empty at the end."""
        raw = response.raw
        try:
            if hasattr(raw, "read1"):
                # This returns the bytes that have arrived, so a slow server is noticed before a chunk is full.
                return bytes(raw.read1(_CHUNK, decode_content=False))
            return bytes(raw.read(16 * 1024, decode_content=False))
        except (urllib3.exceptions.TimeoutError, TimeoutError):
            raise Broken(self._refusals.stalled()) from None
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ssl.SSLError) as error:
            raise Broken(self._refusals.unreachable(error)) from None

    def end(self) -> None:
        """Close the last response. If the response was not read to its end, its connection is closed as well."""
        if self._response is not None:
            self._response.close()
            self._response = None

    # Requests.

    def _get(self, url: str, limit: int, headers: dict[str, str]) -> tuple[bytes, Mapping[str, str]]:
        deadline = time.monotonic() + self._timeout
        response = self._retry(lambda: self._request(url, headers), deadline)
        if response.status_code != 200:
            self._refusals.raise_for_status(response, self._error_text(response))
        return self._read(response, limit, deadline), response.headers

    def _request(self, url: str, headers: Mapping[str, str]) -> requests.Response:
        """Send a request; after a refusal log in and send it once more."""
        authorization = self.login.headers()
        response = self._send(url, {**headers, **authorization})
        if response.status_code in (401, 403):
            self.login.renew(response, authorization.get("Authorization"))
            response = self._send(url, {**headers, **self.login.headers()})
        return response

    def _send(self, url: str, headers: Mapping[str, str]) -> requests.Response:
        self.end()
        self._response = self._session.get(url, headers=headers, stream=True)
        return self._response

    def _retry(self, request: Callable[[], requests.Response], deadline: float) -> requests.Response:
        """Send a request, and send it again after a transient fault, before the deadline."""
        for pause in (*_PAUSES, None):
            last = pause is None or time.monotonic() + pause >= deadline
            try:
                response = self._translated(request, deadline, may_retry=not last)
            except LoginRefused as refused:
                raise self._denied(refused) from None
            wait, why = pause or 0.0, "closed the connection"
            if response is not None:
                why = f"answered with status {response.status_code}"
                wait = max(wait, retry_after(response) or 0.0)
                if last or response.status_code not in TRANSIENT or time.monotonic() + wait >= deadline:
                    return response
                response.close()
            what = f"the registry `{self._reference.api_host}` {why}: asking again in {wait:g} s"
            self._on_event(Event(phase="note", what=what))
            time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _translated(self, request: Callable[[], _T], deadline: float, *, may_retry: bool = False) -> _T | None:
        """Send a request once; turn the errors of the HTTP library into hpcenv's errors.

        None means that the caller can try again.
        """
        try:
            return request()
        except (exceptions.SSLError, exceptions.Timeout) as error:
            raise self._refusals.unreachable(error) from None
        except exceptions.ConnectionError as error:
            if not may_retry or network_faults.judge(error) == "unresolved" or time.monotonic() >= deadline:
                raise self._refusals.unreachable(error) from None
        except (exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            raise self._refusals.unreachable(error) from None
        return None

    def _read(self, response: requests.Response, limit: int, deadline: float) -> bytes:
        """Read a body of at most `limit` bytes before the deadline."""
        body = bytearray()
        try:
            for chunk in read_in_time(response, deadline):
                body += chunk
                if len(body) > limit:
                    raise self._refusals.too_large(limit)
        except exceptions.RequestException as error:
            raise self._refusals.unreachable(error) from None
        finally:
            response.close()
        return bytes(body)

    def _error_text(self, response: requests.Response) -> str:
        """Return the error text of an answer: an error of the distribution API, or else the beginning of the body."""
        try:
            body = self._read(response, _ERROR_LIMIT, time.monotonic() + self._timeout)
        except (HpcenvError, RuntimeError):
            return ""
        try:
            errors = json.loads(body)["errors"]
            text = "; ".join(f"{error.get('code', '?')}: {error.get('message', '')}" for error in errors)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            text = body[:200].decode(errors="replace")
        return one_line(text)

    def _denied(self, refused: LoginRefused) -> ImageUnavailable:
        text = "" if refused.response is None else self._error_text(refused.response)
        return self._refusals.denied(text or refused.why)

    # The response to a request for a blob.

    def _check_length(self, response: requests.Response, digest: str, size: int) -> None:
        announced = response.headers.get("Content-Length", "")[:19]
        if announced.isdecimal() and int(announced) != size:
            raise Broken(self._refusals.wrong_size(digest, expected=size, announced=announced))

    def _check_range(self, response: requests.Response, digest: str, size: int, offset: int) -> None:
        """Check which part of a blob a 206 response contains. RFC 9110, 15.3.7: a client MUST inspect Content-Range."""
        header = response.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(header.strip())
        fits = match is not None and int(match[1]) == offset and int(match[2]) < size and match[3] in ("*", str(size))
        if not fits:
            requested = f"bytes {offset}-{size - 1} of {size}"
            raise Broken(self._refusals.wrong_range(digest, requested=requested, received=header), restart=True)

    def _refuse_blob(self, response: requests.Response, digest: str) -> NoReturn:
        status = response.status_code
        text = self._error_text(response)
        if status == 404:
            raise self._refusals.missing_layer(digest, text)
        # The signed link to the storage behind a redirect expires; the registry then gives a new one.
        link_expired = bool(response.history) and status in (400, 401, 403)
        # Status 416: our part of the blob is longer than the blob in the registry.
        try:
            self._refusals.raise_for_status(response, text)
        except ImageUnavailable as error:
            if status in TRANSIENT or status == 416 or link_expired:
                raise Broken(error, retry_after=retry_after(response), restart=status == 416) from None
            raise


class RegistryBlobs:
    """A repository in a registry as a `blobs.BlobSource`.

    Each blob that is being fetched has its own connection. The connections share one login; the first connection whose
    token has expired renews the login for all.
    """

    def __init__(
        self, reference: RegistryName, search: Search, *, plain_http: bool, ca_file: Path | None, timeout: float
    ) -> None:
        self._make_client = functools.partial(Client, reference, search, plain_http=plain_http, ca_file=ca_file)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._idle: list[Client] = []
        self._login: Login | None = None
        self._closed = False

    def __enter__(self) -> RegistryBlobs:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fetch(self, digest: str, size: int, offset: int, *, stall: float) -> Stream:
        """Begin to fetch a blob; see `blobs.BlobSource.fetch`."""
        client = self._take(stall)
        try:
            start, response = client.open_blob(digest, size, offset)
        except BaseException:
            client.close()
            raise
        return Stream(start=start, chunks=_BlobChunks(client, response, self._give_back))

    def close(self) -> None:
        """Close the idle connections. A busy connection is closed at the end of its blob."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for client in idle:
            client.close()
        if self._login is not None:
            self._login.close()

    def _take(self, stall: float) -> Client:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            timeout = min(stall, self._timeout) if stall else self._timeout
            client = self._make_client(timeout=timeout, login=self._login)
            self._login = client.login
            return client

    def _give_back(self, client: Client, *, usable: bool) -> None:
        with self._lock:
            if usable and not self._closed:
                self._idle.append(client)
                return
        client.close()


class _BlobChunks(Iterator[bytes]):
    """The chunks of one blob. This iterator is no generator, because `close` must also work before the first chunk."""

    def __init__(self, client: Client, response: requests.Response, give_back: Callable[..., None]) -> None:
        self._client: Client | None = client
        self._response = response
        self._give_back = give_back
        self._complete = False

    def __next__(self) -> bytes:
        if self._client is None:
            raise StopIteration
        chunk = self._client.read_some(self._response)
        if not chunk:
            self._complete = True
            self.close()
            raise StopIteration
        return chunk

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.end()
            self._give_back(client, usable=self._complete)
