"""Find out why a request failed. Only the types of the nested exceptions are used, never a text with an address.

Runs on: LOGIN NODE. Loads `requests`.

The arguments of an exception of `requests` contain an exception of urllib3. The `reason` of the exception of urllib3 is
the cause. Python raised this cause from the error of the operating system (requests 2.34, adapters.py, `send`; urllib3
2.8, connection.py, `_new_conn`). urllib3 1.26 sets no `__cause__`, and Python then keeps `__context__`.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from typing import Literal

import requests
import urllib3.exceptions

__all__ = ["Fault", "judge", "system_words", "tls_words"]

Fault = Literal["too-slow", "tls", "proxy", "circle", "address", "unresolved", "refused", "broken"]
_MOST_NESTED = 20
_BAD_ADDRESS = (
    requests.exceptions.InvalidURL, requests.exceptions.MissingSchema, requests.exceptions.InvalidSchema,
    urllib3.exceptions.LocationValueError,
)  # fmt: skip


def judge(error: Exception) -> Fault:
    """Return why a request failed. `broken` means that the connection ended early for an unknown cause."""
    chain = tuple(_nested(error))
    if isinstance(error, requests.exceptions.ProxyError):
        return "proxy"
    if isinstance(error, requests.TooManyRedirects):
        return "circle"
    if isinstance(error, _BAD_ADDRESS):
        return "address"
    if any(isinstance(one, socket.gaierror) for one in chain):
        return "unresolved"
    if any(isinstance(one, ConnectionRefusedError) for one in chain):
        return "refused"
    if isinstance(error, requests.exceptions.SSLError):
        return "tls"
    return "too-slow" if any(map(_is_timeout, chain)) else "broken"


def tls_words(error: BaseException) -> str:
    """Return the TLS library's message about a failed handshake, without the position in its source; empty if none."""
    found = [one for one in _nested(error) if isinstance(one, ssl.SSLError) and one.args]
    return re.sub(r"\s*\(_ssl\.c:\d+\)\Z", "", str(found[-1].args[-1])) if found else ""


def system_words(error: BaseException) -> str:
    """Return the system's message, such as `Network is unreachable`; empty if the system did not report the error."""
    found = [one.strerror for one in _nested(error) if isinstance(one, OSError) and isinstance(one.strerror, str)]
    return found[-1] if found else ""


def _nested(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and the errors in it, from outside to inside."""
    left: list[BaseException] = [error]
    seen: set[int] = set()
    while left and len(seen) < _MOST_NESTED:
        one = left.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        inner = (*one.args, getattr(one, "reason", None), one.__cause__ or one.__context__)
        left += [each for each in inner if isinstance(each, BaseException)]


def _is_timeout(error: BaseException) -> bool:
    # urllib3 1.26 reports every connection that cannot be made as a ConnectTimeoutError.
    if isinstance(error, urllib3.exceptions.NewConnectionError):
        return False
    return isinstance(error, (requests.Timeout, TimeoutError, urllib3.exceptions.TimeoutError))
