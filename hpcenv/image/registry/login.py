"""Log in to a registry: get a token, or use a password.

Runs on: LOGIN NODE. Loads `requests`.

A registry refuses a first request with status 401 and names in `Www-Authenticate` which logins it
accepts (RFC 9110, 11.6.1). `Bearer` names a token server: its address (realm), the registry's name
(service), and what the token is for (scope). `Basic` needs a user name and a password. See
distribution.github.io/distribution/spec/auth, `token` and `oauth` (read 2026-11-20).
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import requests

from hpcenv.image.reference import RegistryName
from hpcenv.image.registry.credentials import Credential
from hpcenv.image.registry.session import RegistrySession, read_in_time

__all__ = ["TRANSIENT", "Login", "LoginRefused"]

# Statuses after which the same request may succeed.
TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})

_TOKEN_LIMIT = 1024 * 1024
_TOKEN_SECONDS = 30.0
# NAME="VALUE" or NAME=TOKEN, after the name of a scheme.
_CHALLENGE = re.compile(
    r'\b(?P<scheme>bearer|basic)\b(?!\s*=)|(?P<name>[a-z]{1,20})\s*=\s*(?:"(?P<quoted>[^"]{0,2048})"|(?P<bare>[^\s,"]{1,2048}))',
    re.IGNORECASE,
)
# RFC 6750, 2.1. The pattern excludes line ends, because a line end would begin another header.
_TOKEN = re.compile(r"[\x21-\x7e]{1,65536}")


class LoginRefused(Exception):
    """The login failed, and another attempt with the same credentials makes no sense.

    Attributes:
        why: the reason, for the user.
        response: the registry's refusal, if its text may say more.
    """

    def __init__(self, why: str, response: requests.Response | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.response = response


class Login:
    """The `Authorization` header for one repository, obtained when the registry first demands it.

    The connections of one image share a login; each connection belongs to one thread.
    """

    def __init__(
        self, reference: RegistryName, credential: Credential | None, session: RegistrySession, *, plain_http: bool
    ) -> None:
        self.credential = credential
        self._reference = reference
        self._session = session
        self._plain_http = plain_http
        self._lock = threading.Lock()
        self._authorization: str | None = None

    def close(self) -> None:
        """Close the connections to the token server."""
        self._session.close()

    def headers(self) -> dict[str, str]:
        """Return the headers that each request to the registry must have."""
        authorization = self._authorization
        return {} if authorization is None else {"Authorization": authorization}

    def renew(self, refusal: requests.Response, sent: str | None) -> None:
        """Log in again after a refused request.

        Args:
            refusal: the response with status 401 or 403.
            sent: the `Authorization` header of the refused request.

        Raises:
            LoginRefused: there is no other login to try.
            requests.RequestException: the token server cannot be reached.
        """
        if refusal.history:
            # Not the registry, but the storage behind a redirect refused the request. We never send our login to the
            # storage.
            return
        with self._lock:
            # Another thread may have renewed the login since the request was sent.
            if self._authorization is None or self._authorization == sent:
                self._authorization = self._new_authorization(refusal, sent)

    def needs_password(self, refusal: requests.Response) -> bool:
        """Return whether the registry accepts only a password, and no password is known."""
        return self._authorization is None and set(_challenges(refusal)) == {"basic"}

    def _new_authorization(self, refusal: requests.Response, sent: str | None) -> str:
        challenges = _challenges(refusal)
        credential = self.credential
        if credential is not None and credential.kind == "bearer" and challenges:
            authorization = f"Bearer {credential.secret}"
        elif "bearer" in challenges:
            # Request a new token each time: the last token may have expired.
            return f"Bearer {self._request_token(challenges['bearer'])}"
        elif "basic" in challenges and credential is not None and credential.kind == "password":
            authorization = credential.basic()
        else:
            raise LoginRefused("the registry demands a login, and the login did not succeed", refusal)
        if authorization == sent:
            raise LoginRefused("the registry does not accept these credentials", refusal)
        return authorization

    def _request_token(self, challenge: Mapping[str, str]) -> str:
        """Request a token with the password, with the identity token, or anonymously."""
        realm = self._token_server(challenge.get("realm", ""))
        fields = {"scope": challenge.get("scope") or f"repository:{self._reference.repository}:pull"}
        if challenge.get("service"):
            fields["service"] = challenge["service"]
        credential = self.credential
        if credential is not None and credential.kind == "identity":
            fields |= {"grant_type": "refresh_token", "client_id": "hpcenv", "refresh_token": credential.secret}
            # Do not follow redirects, because a redirect would send the identity token to a different server.
            response = self._session.post(realm, data=fields, stream=True, allow_redirects=False)
        else:
            headers = {} if credential is None else {"Authorization": credential.basic()}
            response = self._session.get(realm, params=fields, headers=headers, stream=True)
        with contextlib.closing(response):
            if response.status_code in TRANSIENT:
                raise requests.ConnectionError(f"the token server answered {response.status_code}")
            if response.status_code != 200:
                raise LoginRefused(f"the token server `{urlsplit(realm).netloc}` answered {response.status_code}")
            return _read_token(response)

    def _token_server(self, realm: str) -> str:
        """Return the address of the token server, if it is safe to send a password to this server."""
        if realm and "://" not in realm:
            realm = f"{'http' if self._plain_http else 'https'}://{realm}"
        try:
            parts = urlsplit(realm)
            usable = bool(parts.hostname) and parts.scheme in ("http", "https") and "@" not in parts.netloc
        except ValueError:
            usable = False
        if not usable:
            raise LoginRefused("the registry names no usable token server")
        if parts.scheme == "http" and not self._plain_http:
            raise LoginRefused(
                f"the token server `{parts.netloc}` uses no encryption; hpcenv did not send the login there"
            )
        return realm


def _challenges(refusal: requests.Response) -> dict[str, dict[str, str]]:
    """Return the parameters of each login scheme in `Www-Authenticate` that hpcenv supports."""
    challenges: dict[str, dict[str, str]] = {}
    current: dict[str, str] | None = None
    for match in _CHALLENGE.finditer(refusal.headers.get("Www-Authenticate", "")[:8192]):
        if match["scheme"]:
            current = challenges.setdefault(match["scheme"].lower(), {})
        elif current is not None:
            current.setdefault(match["name"].lower(), match["quoted"] or match["bare"] or "")
    return challenges


def _read_token(response: requests.Response) -> str:
    body = bytearray()
    for chunk in read_in_time(response, time.monotonic() + _TOKEN_SECONDS):
        body += chunk
        if len(body) > _TOKEN_LIMIT:
            raise LoginRefused("the token server answered with more than a token")
    try:
        fields: Any = json.loads(bytes(body))
        token = fields.get("access_token") or fields.get("token")
    except (ValueError, AttributeError, RecursionError):
        token = None
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise LoginRefused("the token server answered without a token")
    return token
