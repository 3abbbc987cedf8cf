"""An HTTP session for a registry, with time limits, bounded bodies, and only the credentials that hpcenv sets.

Runs on: LOGIN NODE. Loads `requests`.
"""

from __future__ import annotations

import email.utils
import http.client
import time
from collections.abc import Iterator
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import requests
import urllib3.exceptions

from hpcenv.errors import ImageUnavailable

__all__ = ["RegistrySession", "read_in_time", "redirect_target", "retry_after"]

_CONNECT_SECONDS = 15.0
_CHUNK = 64 * 1024
_MOST_REDIRECTS = 5


class RegistrySession(requests.Session):
    """A session whose defaults are safe for a registry.

    - Each request has a time limit.
    - `ca_file` has priority over REQUESTS_CA_BUNDLE in the environment.
    - ~/.netrc is not read, and cookies are not kept. (Some registries treat a client with cookies
      as a browser, and then demand CSRF tokens.)
    - If a request is redirected to a different host, it has no credentials. A redirect from https to http is an error.
    """

    def __init__(self, *, plain_http: bool, ca_file: Path | None, timeout: float) -> None:
        super().__init__()
        self.max_redirects = _MOST_REDIRECTS
        self.auth = _unchanged
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        self._limits = (min(timeout, _CONNECT_SECONDS), timeout)
        self._ca_file = None if ca_file is None else str(ca_file)
        self.hooks["response"].append(_refuse_broken_redirect)
        if not plain_http:
            self.hooks["response"].append(_refuse_downgrade)

    def request(self, method: str, url: str | bytes, *args: Any, **options: Any) -> requests.Response:
        """Send a request with this session's time limit and certificates."""
        options.setdefault("timeout", self._limits)
        if self._ca_file is not None:
            # Pass the certificates as an argument, because requests prefers REQUESTS_CA_BUNDLE to the session's own
            # `verify`.
            options.setdefault("verify", self._ca_file)
        return super().request(method, url, *args, **options)

    def rebuild_auth(self, prepared_request: requests.PreparedRequest, response: requests.Response) -> None:
        """Remove the credentials before a redirect to another host.

        The method of `requests` would also read ~/.netrc.
        """
        old, new = str(response.request.url), str(prepared_request.url)
        if self.should_strip_auth(old, new):
            prepared_request.headers.pop("Authorization", None)


def _unchanged(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Return a request unchanged. If a session has an `auth` function, requests does not read ~/.netrc."""
    return request


def redirect_target(response: requests.Response) -> SplitResult:
    """Return the address that a response redirects to. The port is checked, too.

    Raises:
        ValueError: the response does not redirect to an address.
    """
    target = urlsplit(urljoin(response.url, response.headers["location"]))
    _ = target.port
    return target


def _refuse_broken_redirect(response: requests.Response, **_: object) -> None:
    # Without this check, requests would raise a ValueError, which is not a RequestException.
    if not response.is_redirect:
        return
    try:
        redirect_target(response)
    except ValueError:
        response.close()
        host = urlsplit(response.url).netloc
        raise ImageUnavailable(
            f"`{host}` redirects to something that is not an address",
            why=f"{host} answered {response.status_code} with a location that is not valid",
            hint="report this to the administrators of the registry",
        ) from None


def _refuse_downgrade(response: requests.Response, **_: object) -> None:
    if response.is_redirect and redirect_target(response).scheme != "https":
        response.close()
        host = urlsplit(response.url).netloc
        raise ImageUnavailable(
            f"`{host}` redirects to an address without encryption",
            why=f"{host} answered {response.status_code} with a location that is not https",
            hint="report this to the administrators of the registry",
        )


def read_in_time(response: requests.Response, deadline: float) -> Iterator[bytes]:
    """Yield a body in chunks.

    Args:
        response: a streamed response.
        deadline: when the whole body must have arrived, on the clock of `time.monotonic()`.

    Raises:
        requests.ReadTimeout: the deadline has passed.
    """
    for chunk in _arriving(response):
        yield chunk
        if time.monotonic() > deadline:
            raise requests.ReadTimeout(request=response.request)


def _arriving(response: requests.Response) -> Iterator[bytes]:
    """Yield the bytes that have arrived, even if they are less than a chunk.

    So a slow server cannot exceed the deadline.
    """
    raw = response.raw
    if not hasattr(raw, "read1"):  # urllib3 before 2.1
        yield from response.iter_content(256)
        return
    try:
        while chunk := raw.read1(_CHUNK, decode_content=True):
            yield bytes(chunk)
    except urllib3.exceptions.ReadTimeoutError as error:
        raise requests.ReadTimeout(error, request=response.request) from None
    except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
        raise requests.ConnectionError(error, request=response.request) from None


def retry_after(response: requests.Response) -> float | None:
    """Return how many seconds the server asks us to wait; None without a valid `Retry-After` header.

    RFC 9110, 10.2.3: the value is a number of seconds or a date.
    """
    value = response.headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdecimal():
        return float(value[:9])
    try:
        until = email.utils.parsedate_to_datetime(value).timestamp()
        # Compare with the server's clock, not with the clock of this machine.
        now = email.utils.parsedate_to_datetime(response.headers.get("Date", "")).timestamp()
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    return max(0.0, until - now)
