"""Speak the OCI distribution API to one repository.

Runs on: LOGIN NODE. Imported on use: it loads `oras` and `requests` (0.2 s).

Sending a request, answering a refusal with a login and sending it again is `oras`
(oras-py, Apache-2.0, maintained under the CNCF's ORAS project, read at 0.2.43): the one
maintained OCI client that is pure Python and brings only `requests` and `jsonschema`.
These things are not left to it, each for a reason seen in its source:

- its retry sleeps over two minutes when a registry is down, its requests have no time
  limit, its bodies no bound, and it logs to the terminal;
- its logins know no identity tokens, send a password wherever a realm points (also over
  plain http), read only docker's file, and that through the process's environment;
- its downloads cannot begin in the middle.

OCI distribution-spec 1.1 (2024-02); tokens: distribution.github.io/distribution/spec/auth,
`token` and `oauth` (read 2026-11-20).
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import http.client
import json
import logging
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urljoin, urlsplit

import oras.auth  # type: ignore[import-untyped]
import oras.provider  # type: ignore[import-untyped]
import urllib3.exceptions
from requests import exceptions

from hpcenv.adapters.blobs import Broken, Stream
from hpcenv.adapters.credentials import Credential, Search
from hpcenv.adapters.manifests import CONFIG_LIMIT, INDEXES, MANIFEST_LIMIT, MANIFESTS, digest_of
from hpcenv.adapters.references import Reference
from hpcenv.errors import HpcenvError, ImageUnavailable

__all__ = ["Client", "RegistryBlobs"]

# oras writes every refused request to the terminal, with the server's text.
logging.getLogger("oras.logger").setLevel(logging.CRITICAL + 1)

_ERROR_LIMIT = 64 * 1024
_TOKEN_LIMIT = 1024 * 1024
# Pauses before the second and third try; what is transient is over by then, and a
# registry that is down is reported within two seconds.
_PAUSES = (0.5, 1.0)
_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
_CONNECT_SECONDS = 15.0
_CHUNK = 256 * 1024

# The undecorated method: the retry around it sleeps 131 s in all (see above).
_DO_REQUEST = getattr(oras.provider.Registry.do_request, "__wrapped__", oras.provider.Registry.do_request)
# RFC 9110, 11.6.1: NAME="VALUE" or NAME=TOKEN after a scheme's name.
_CHALLENGE = re.compile(
    r'\b(?P<scheme>bearer|basic)\b(?!\s*=)|(?P<name>[a-z]{1,20})\s*=\s*(?:"(?P<quoted>[^"]{0,2048})"|(?P<bare>[^\s,"]{1,2048}))',
    re.IGNORECASE,
)
_CONTENT_RANGE = re.compile(r"bytes\s+(\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.IGNORECASE)


class Client:
    """One conversation with one repository: credentials, time limits, hashing, errors."""

    def __init__(
        self,
        asked: Reference,
        search: Search,
        *,
        plain_http: bool,
        ca_file: Path | None,
        timeout: float,
        login: _Login | None = None,
    ) -> None:
        self._asked = asked
        self._notes = search.notes
        self._timeout = timeout
        self._base = f"{'http' if plain_http else 'https'}://{asked.api_host}/v2/"
        make = functools.partial(_make, asked, plain_http=plain_http, ca_file=ca_file)
        self._oras = make(timeout=timeout)
        self._answers: list[Any] = []
        self._oras.session.hooks["response"].append(lambda answer, **_: self._answers.append(answer))
        self.login = login or _Login(asked, search.credential, make(timeout=timeout).session, plain_http=plain_http)
        self._owns_login = login is None
        self._oras.auth = self.login

    def close(self) -> None:
        """Close its connections."""
        self._drop_answers()
        self._oras.session.close()
        if self._owns_login:
            self.login.session.close()

    def authenticate(self) -> None:
        """Ask `/v2/` which kind of login is wanted, and log in where one is.

        Some registries say "not found" of what an unknown user may not see, and never ask.
        """
        deadline = time.monotonic() + self._timeout
        answer = self._attempts(lambda: self._oras.session.get(self._base, stream=True), deadline)
        if answer.status_code not in (200, 401, 403, 404):
            self._raise_for(answer, self._base)
        if answer.status_code == 401:
            # A refusal here is none of the image yet: the request for that will tell.
            with contextlib.suppress(_Refused):
                self._guard(lambda: self.login.begin(answer), deadline)
        self._drop_answers()
        if answer.status_code == 401 and self.login.wants_password(answer):
            raise self.denied("the registry wants a user name and password, and none is known for it")

    def manifest(self, name: str) -> tuple[str, bytes]:
        """Fetch a manifest or index by tag or digest; return its digest and its bytes."""
        accept = ", ".join(MANIFESTS + INDEXES)
        url = f"{self._base}{self._asked.repository}/manifests/{name}"
        body, said = self._get(url, MANIFEST_LIMIT, {"Accept": accept})
        digest = digest_of(body)
        expected = name if name.startswith("sha256:") else said.get("docker-content-digest", digest)
        if expected.startswith("sha256:") and expected != digest:
            raise self._wrong_bytes("manifest", expected, digest)
        return digest, body

    def config(self, digest: str) -> bytes:
        """Fetch and verify the image configuration."""
        body, _ = self._get(f"{self._base}{self._asked.repository}/blobs/{digest}", CONFIG_LIMIT, {})
        found = digest_of(body)
        if found != digest:
            raise self._wrong_bytes("configuration", digest, found)
        return body

    def open_blob(self, digest: str, size: int, offset: int) -> tuple[int, Any]:
        """Ask for a blob from `offset` on; return where the answer begins, and the answer.

        Raises:
            Broken: asking again may help.
            ImageUnavailable: it will not.
        """
        url = f"{self._base}{self._asked.repository}/blobs/{digest}"
        # The digest is of the stored bytes; a body that is packed for the way has others.
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        try:
            answer = self._request(url, headers)
        except _Refused as refused:
            raise self.denied(self._server_says(refused.answer) or refused.why) from None
        except exceptions.SSLError as error:
            raise self._unreachable(error) from None
        except (exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            raise Broken(self._unreachable(error)) from None
        if answer.status_code == 200:
            self._check_length(answer, digest, size)
            return 0, answer
        if answer.status_code == 206 and offset:
            self._check_range(answer, digest, size, offset)
            return offset, answer
        return self._refuse_blob(answer, digest, url)

    def read_some(self, answer: Any) -> bytes:
        """Return the next bytes of a blob's answer, undecoded; empty at its end."""
        raw = answer.raw
        try:
            if hasattr(raw, "read1"):
                # What is there, without waiting for a whole chunk: a server that drips is seen to.
                return bytes(raw.read1(_CHUNK, decode_content=False))
            return bytes(raw.read(16 * 1024, decode_content=False))
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ssl.SSLError) as error:
            raise Broken(self._unreachable(error)) from None

    def end(self) -> None:
        """Let go of the answers so far; unread ones take their connection with them."""
        self._drop_answers()

    # One request.

    def _get(self, url: str, limit: int, headers: dict[str, str]) -> tuple[bytes, Mapping[str, str]]:
        deadline = time.monotonic() + self._timeout
        answer = self._attempts(lambda: self._request(url, headers), deadline)
        if answer.status_code != 200:
            self._raise_for(answer, url)
        body = self._read(answer, limit, deadline)
        return body, {key.lower(): value for key, value in answer.headers.items()}

    def _request(self, url: str, headers: dict[str, str]) -> Any:
        self._drop_answers()
        return _DO_REQUEST(self._oras, url, headers=dict(headers), stream=True)

    def _drop_answers(self) -> None:
        # oras drops refused answers unread, and their connections with them.
        for answer in self._answers:
            answer.close()
        self._answers.clear()

    def _attempts(self, request: Callable[[], Any], deadline: float) -> Any:
        """Send, and send again after a transient failure, within the time limit."""
        for pause in (*_PAUSES, None):
            last = pause is None or time.monotonic() + pause >= deadline
            try:
                answer = self._guard(request, deadline, patient=not last)
            except _Refused as refused:
                raise self.denied(self._server_says(refused.answer) or refused.why) from None
            wait = pause or 0.0
            if answer is not None:
                wait = max(wait, _retry_after(answer) or 0.0)
                if last or answer.status_code not in _TRANSIENT or time.monotonic() + wait >= deadline:
                    return answer
                answer.close()
            time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _guard(self, request: Callable[[], Any], deadline: float, *, patient: bool = False) -> Any:
        """Send once, with the errors of the libraries made ours; None where it may be sent again."""
        try:
            return request()
        except (exceptions.SSLError, exceptions.Timeout) as error:
            raise self._unreachable(error) from None
        except exceptions.ConnectionError as error:
            if not patient or "resolve" in str(error) or time.monotonic() >= deadline:
                raise self._unreachable(error) from None
        except (exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            raise self._unreachable(error) from None
        return None

    def _read(self, answer: Any, limit: int, deadline: float) -> bytes:
        """Read a body of at most `limit` bytes before the deadline."""
        body = bytearray()
        try:
            for chunk in _bounded(answer, deadline):
                body += chunk
                if len(body) > limit:
                    raise ImageUnavailable(
                        f"`{self._asked}` has a description of more than {limit >> 20} MiB",
                        why="no image needs that much; it is not read further",
                        hint="check that the reference names an image",
                    )
        except exceptions.RequestException as error:
            raise self._unreachable(error) from None
        finally:
            answer.close()
        return bytes(body)

    # A blob's answer.

    def _check_length(self, answer: Any, digest: str, size: int) -> None:
        said = answer.headers.get("Content-Length", "")
        if said.isdecimal() and int(said[:19]) != size:
            raise Broken(
                ImageUnavailable(
                    f"`{self._asked.registry}` has another size for the layer {digest}",
                    why=f"expected {size} bytes\nannounced {said[:19]}",
                    hint="a proxy or mirror may have changed it; do not use this image from there",
                )
            )

    def _check_range(self, answer: Any, digest: str, size: int, offset: int) -> None:
        """RFC 9110, 15.3.7: a client MUST look at Content-Range to see what a 206 holds."""
        said = answer.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(said.strip())
        fits = match is not None and int(match[1]) == offset and int(match[2]) < size and match[3] in ("*", str(size))
        if not fits:
            raise Broken(
                ImageUnavailable(
                    f"`{self._asked.registry}` sent another part of the layer {digest} than it was asked for",
                    why=f"asked for bytes {offset}-{size - 1} of {size}, got {_clean(said) or 'no Content-Range'}",
                    hint="a proxy in between may be broken; try again",
                ),
                restart=True,
            )

    def _refuse_blob(self, answer: Any, digest: str, url: str) -> NoReturn:
        status = answer.status_code
        if status == 404:
            raise ImageUnavailable(
                f"`{self._asked.registry}` does not have the layer {digest} of `{self._asked}`",
                why=self._server_says(answer) or "the registry answered 404 for it",
                hint="push the image again; layers marked as not distributable have to be pushed explicitly",
            )
        elsewhere = bool(answer.history)
        try:
            self._raise_for(answer, url)
        except ImageUnavailable as error:
            # 416: what is here is longer than the blob there. 403 of the storage that a
            # registry redirects to: its signed link has run out; the registry gives another.
            if status in _TRANSIENT or status == 416 or (elsewhere and status in (400, 401, 403)):
                raise Broken(error, retry_after=_retry_after(answer), restart=status == 416) from None
            raise

    # Errors, most specific first. None of them quotes a header or a request.

    def _raise_for(self, answer: Any, url: str) -> NoReturn:
        status = answer.status_code
        text = self._server_says(answer)
        if status in (401, 403):
            raise self.denied(text or f"the registry answered {status}")
        if status == 404:
            raise ImageUnavailable(
                f"`{self._asked}` does not exist",
                why=text or f"`{self._asked.registry}` answered 404 for {urlsplit(url).path}",
                hint="check the repository's name and the tag; some registries say this of private images",
            )
        if status == 429:
            raise ImageUnavailable(
                f"`{self._asked.registry}` refuses more requests for now (429)",
                why=text or "a cluster's nodes share one address, and the limit is per address",
                hint=f"log in (docker login {self._asked.registry}), use a mirror, or wait{_how_long(answer)}",
            )
        if status == 400 and "HTTPS server" in text:
            raise ImageUnavailable(
                f"`{self._asked.registry}` speaks https, and was asked over http",
                why="it is listed as a plain-http registry",
                hint=f"leave --plain-http {self._asked.registry} away, or remove it from plain-http in hpcenv.toml",
            )
        raise ImageUnavailable(
            f"`{self._asked.registry}` answered with status {status}",
            why=text or answer.reason,
            hint="try again later, or ask whoever runs the registry" if status >= 500 else None,
        )

    def _server_says(self, answer: Any) -> str:
        """Return the distribution API's error text, or the start of what there is."""
        if answer is None:
            return ""
        try:
            raw = self._read(answer, _ERROR_LIMIT, time.monotonic() + self._timeout)
        except (HpcenvError, RuntimeError):
            return ""
        try:
            errors = json.loads(raw)["errors"]
            said = "; ".join(f"{e.get('code', '?')}: {e.get('message', '')}" for e in errors)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            said = raw[:200].decode(errors="replace")
        return _clean(said)

    def denied(self, why: str) -> ImageUnavailable:
        """Return the error for a refusal; says with what hpcenv came."""
        known = self.login.credential
        shown = "no credentials for it were found" if known is None else f"shown: {known}"
        return ImageUnavailable(
            f"access to `{self._asked}` was denied",
            why="\n".join([why, shown, *self._notes]),
            hint=f"log in once (docker login {self._asked.registry}), or check the name: "
            "registries also say this of images that do not exist",
        )

    def _unreachable(self, error: Exception) -> ImageUnavailable:
        host, text = self._asked.api_host, str(error)
        if isinstance(error, (exceptions.Timeout, urllib3.exceptions.TimeoutError, TimeoutError)):
            return self._too_slow()
        if isinstance(error, exceptions.ProxyError):
            what, why = "cannot be reached through the proxy", "http_proxy or https_proxy names a proxy"
            hint = "check the proxy, or add the host to no_proxy"
        elif isinstance(error, exceptions.TooManyRedirects):
            what, why, hint = "redirects in a circle", "more than five redirects for one request", "try again later"
        elif isinstance(error, exceptions.SSLError):
            return self._tls_failed(text)
        elif "NameResolution" in text or "resolve" in text:
            what, why = "is not a known host", "its name does not resolve"
            hint = "check the spelling; compute nodes often have no route outside, login nodes do"
        elif "refused" in text:
            what, why = "is down", f"nothing listens at {host} (connection refused)"
            hint = "start the registry, or check its port"
        else:
            what, why = "broke off the conversation", _network_cause(text)
            hint = "try again; check a firewall or proxy in between"
        return ImageUnavailable(f"the registry `{host}` {what}", why=why, hint=hint)

    def _tls_failed(self, text: str) -> ImageUnavailable:
        host = self._asked.api_host
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return ImageUnavailable(
                f"the certificate of `{host}` is not trusted",
                why=_network_cause(text),
                hint="name your site's CA file in the variable REQUESTS_CA_BUNDLE",
            )
        return ImageUnavailable(
            f"`{host}` does not speak https",
            why=_network_cause(text),
            hint=f"if it is a plain http registry that you trust: --plain-http {host} for `hpcenv image`,\n"
            f'      for `hpcenv lock` add "{host}" to plain-http in hpcenv.toml',
        )

    def _too_slow(self) -> ImageUnavailable:
        return ImageUnavailable(
            f"the registry `{self._asked.api_host}` did not answer within {self._timeout:g} s",
            hint="try again; a firewall that drops packets looks like this",
        )

    def _wrong_bytes(self, what: str, expected: str, found: str) -> ImageUnavailable:
        return ImageUnavailable(
            f"`{self._asked.registry}` sent a wrong {what} for `{self._asked}`",
            why=f"expected {expected}\nreceived {found}",
            hint="a proxy or mirror may have changed it; do not use this image",
        )


class RegistryBlobs:
    """A registry's repository as a `blobs.BlobSource`.

    Each blob that is under way has a connection of its own; they share one login, and
    whoever first finds its token expired renews it for all.
    """

    def __init__(
        self, asked: Reference, search: Search, *, plain_http: bool, ca_file: Path | None, timeout: float
    ) -> None:
        self._make = functools.partial(Client, asked, search, plain_http=plain_http, ca_file=ca_file)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._idle: list[Client] = []
        self._login: _Login | None = None
        self._closed = False

    def __enter__(self) -> RegistryBlobs:  # noqa: PYI034 - typing.Self is Python 3.11's
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fetch(self, digest: str, size: int, offset: int, *, stall: float) -> Stream:
        """As `blobs.BlobSource.fetch`."""
        client = self._take(stall)
        try:
            start, answer = client.open_blob(digest, size, offset)
        except BaseException:
            client.close()
            raise
        return Stream(start=start, chunks=_Arriving(client, answer, self._put_back))

    def close(self) -> None:
        """Close the connections that are not in use; the others go when their blob ends."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for client in idle:
            client.close()
        if self._login is not None:
            self._login.session.close()

    def _take(self, stall: float) -> Client:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            client = self._make(timeout=min(stall, self._timeout) if stall else self._timeout, login=self._login)
            self._login = client.login
            return client

    def _put_back(self, client: Client, *, usable: bool) -> None:
        with self._lock:
            if usable and not self._closed:
                self._idle.append(client)
                return
        client.close()


class _Arriving(Iterator[bytes]):
    """The chunks of a blob's answer. Not a generator: it must also close if never begun."""

    def __init__(self, client: Client, answer: Any, put_back: Callable[..., None]) -> None:
        self._client: Client | None = client
        self._answer = answer
        self._put_back = put_back
        self._whole = False

    def __next__(self) -> bytes:
        if self._client is None:
            raise StopIteration
        chunk = self._client.read_some(self._answer)
        if not chunk:
            self._whole = True
            self.close()
            raise StopIteration
        return chunk

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.end()
            self._put_back(client, usable=self._whole)


# --- logging in ------------------------------------------------------------------------


class _Refused(Exception):
    """The registry refuses, and there is nothing more to show it."""

    def __init__(self, why: str, answer: Any = None) -> None:
        super().__init__(why)
        self.why = why
        self.answer = answer


class _Login(oras.auth.TokenAuth):  # type: ignore[misc]
    """What oras shows to the registry: a token or a password; got when first asked for.

    Shared by the connections of one image, each used by a thread of its own.
    """

    def __init__(self, asked: Reference, credential: Credential | None, session: Any, *, plain_http: bool) -> None:
        super().__init__()
        self.credential = credential
        self.session = session
        self._asked = asked
        self._plain_http = plain_http
        self._lock = threading.Lock()
        # What oras looks at: the whole value of the Authorization header.
        self.token: str | None = None

    def get_auth_header(self) -> dict[str, str]:
        """Return what every request carries (oras calls it)."""
        return {} if self.token is None else {"Authorization": self.token}

    def begin(self, refused: Any) -> None:
        """Log in because of a refused request that showed nothing."""
        self.authenticate_request(refused, {})

    def wants_password(self, refused: Any) -> bool:
        """Whether the registry takes nothing but a password, and there is none."""
        return self.token is None and set(_challenges(refused)) == {"basic"}

    def authenticate_request(
        self, original: Any, headers: dict[str, str] | None, refresh: bool = False
    ) -> tuple[dict[str, str], bool]:
        """Return the headers to send the refused request with again (oras calls it).

        Raises:
            _Refused: another try with what is known makes no sense.
        """
        del refresh  # what was shown and refused is never shown again, whatever the status
        shown = (headers or {}).get("Authorization")
        with self._lock:
            if original.history:
                # Not the registry refuses but where it has sent us, which was shown nothing.
                return dict(headers or {}), True
            if self.token is None or self.token == shown:
                self.token = self._answer(original, shown)
            return {**(headers or {}), **self.get_auth_header()}, True

    def _answer(self, refused: Any, shown: str | None) -> str:
        challenges = _challenges(refused)
        known = self.credential
        if known is not None and known.kind == "bearer" and challenges:
            value = f"Bearer {known.secret}"
        elif "bearer" in challenges:
            # A fresh one each time: the last may have expired.
            return f"Bearer {self._token(challenges['bearer'])}"
        elif "basic" in challenges and known is not None and known.kind == "password":
            value = known.basic()
        else:
            raise _Refused("the registry asks for a login that did not succeed", refused)
        if value == shown:
            raise _Refused("the registry does not take these credentials", refused)
        return value

    def _token(self, challenge: Mapping[str, str]) -> str:
        """Ask the token server (with the password, the identity token, or nothing)."""
        realm = self._realm(challenge.get("realm", ""))
        asked = {"scope": challenge.get("scope") or f"repository:{self._asked.repository}:pull"}
        if challenge.get("service"):
            asked["service"] = challenge["service"]
        known = self.credential
        if known is not None and known.kind == "identity":
            form = {"grant_type": "refresh_token", "client_id": "hpcenv", "refresh_token": known.secret, **asked}
            # No redirects: the body would go wherever it is sent.
            answer = self.session.post(realm, data=form, stream=True, allow_redirects=False)
        else:
            headers = {} if known is None else {"Authorization": known.basic()}
            answer = self.session.get(realm, params=asked, headers=headers, stream=True)
        with contextlib.closing(answer):
            if answer.status_code in _TRANSIENT:
                raise exceptions.ConnectionError(f"the token server answered {answer.status_code}")
            if answer.status_code != 200:
                raise _Refused(f"the token server `{urlsplit(realm).netloc}` answered {answer.status_code}")
            return _read_token(answer)

    def _realm(self, realm: str) -> str:
        """Return where tokens are given, if a password may be sent there."""
        if realm and "://" not in realm:
            realm = f"{'http' if self._plain_http else 'https'}://{realm}"
        try:
            parts = urlsplit(realm)
            usable = bool(parts.hostname) and parts.scheme in ("http", "https") and "@" not in parts.netloc
        except ValueError:
            usable = False
        if not usable:
            raise _Refused("the registry does not say where it gives tokens")
        if parts.scheme == "http" and not self._plain_http:
            raise _Refused(f"the registry wants the login sent to `{parts.netloc}` without encryption; it was not")
        return realm


def _challenges(refused: Any) -> dict[str, dict[str, str]]:
    """Return the parameters of each scheme that `Www-Authenticate` offers and hpcenv knows."""
    found: dict[str, dict[str, str]] = {}
    current: dict[str, str] | None = None
    for match in _CHALLENGE.finditer(refused.headers.get("Www-Authenticate", "")[:8192]):
        if match["scheme"]:
            current = found.setdefault(match["scheme"].lower(), {})
        elif current is not None:
            current.setdefault(match["name"].lower(), match["quoted"] or match["bare"] or "")
    return found


def _read_token(answer: Any) -> str:
    body = bytearray()
    for chunk in _bounded(answer, time.monotonic() + 30.0):
        body += chunk
        if len(body) > _TOKEN_LIMIT:
            raise _Refused("the token server answered with more than a token")
    try:
        said = json.loads(bytes(body))
        token = said.get("access_token") or said.get("token")
    except (ValueError, AttributeError, RecursionError):
        token = None
    # RFC 6750, 2.1; nothing that could end the header.
    if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]{1,65536}", token):
        raise _Refused("the token server answered without a token")
    return token


# --- one session -----------------------------------------------------------------------


def _make(asked: Reference, *, plain_http: bool, ca_file: Path | None, timeout: float) -> Any:
    """Return oras's client with time limits, without ~/.netrc, and with bounded redirects."""
    verify: bool | str = True if ca_file is None else str(ca_file)
    client = oras.provider.Registry(hostname=asked.api_host, insecure=plain_http, tls_verify=verify)
    session = client.session
    if ca_file is not None:
        session.verify = verify
        # Else requests lets the environment's REQUESTS_CA_BUNDLE win over the session's.
        session.request = functools.partial(session.request, verify=verify)
    session.request = functools.partial(session.request, timeout=(min(timeout, _CONNECT_SECONDS), timeout))
    session.auth = lambda request: request
    session.max_redirects = 5
    if not plain_http:
        session.hooks["response"].append(functools.partial(_refuse_downgrade, asked))
    return client


def _refuse_downgrade(asked: Reference, answer: Any, **_: object) -> None:
    """Stay with https where the user has not said otherwise."""
    if answer.is_redirect and urlsplit(urljoin(answer.url, answer.headers["location"])).scheme != "https":
        answer.close()
        raise ImageUnavailable(
            f"`{asked.registry}` redirects to an address without encryption",
            why=f"{urlsplit(answer.url).netloc} answered {answer.status_code} with a location that is not https",
            hint="ask whoever runs the registry",
        )


def _bounded(answer: Any, deadline: float) -> Iterator[bytes]:
    # Small chunks, so that a server that drips cannot outlast the deadline.
    for chunk in answer.iter_content(16 * 1024):
        yield chunk
        if time.monotonic() > deadline:
            raise exceptions.ReadTimeout


def _retry_after(answer: Any) -> float | None:
    """Return the seconds that the server asks to wait (RFC 9110, 10.2.3): a number or a date."""
    said = answer.headers.get("Retry-After", "").strip()
    if said.isascii() and said.isdecimal():
        return float(said[:9])
    try:
        until = email.utils.parsedate_to_datetime(said).timestamp()
        # By the server's own clock, where it shows it.
        now = email.utils.parsedate_to_datetime(answer.headers.get("Date", "")).timestamp()
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    return max(0.0, until - now)


def _how_long(answer: Any) -> str:
    seconds = _retry_after(answer)
    return "" if seconds is None else f" {seconds:.0f} s"


def _clean(text: str) -> str:
    """Return a server's words fit for a terminal."""
    return re.sub(r"[^\x20-\x7e]+", " ", text)[:400].strip()


def _network_cause(text: str) -> str:
    """Return the innermost reason of a requests error, which nests it in object names."""
    reasons = re.findall(r"(?:\[SSL[^\]]*\][^()\"']*|[A-Z][a-z][A-Za-z ]{6,}(?=['\")]))", text)
    return str(reasons[-1]).strip() if reasons else text[:200]
