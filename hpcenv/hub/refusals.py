"""Errors for the user that explain a hub's refusals and network faults.

Runs on: LOGIN NODE. Needs the extra `hub`. No message quotes the token, a request, or the query of an address, because
this query may contain a signature of a storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx2

from hpcenv.errors import Command, DataUnavailable, Hint
from hpcenv.hub.access import HubAccess
from hpcenv.image.registry import network_faults
from hpcenv.image.registry.refusals import one_line
from hpcenv.project.hub_reference import HubReference

_UNTRUSTED = "name your site's CA file in the variable REQUESTS_CA_BUNDLE"


@dataclass(frozen=True, kw_only=True)
class HubRefusals:
    """The errors of one hub; each method returns the error for one situation.

    Attributes:
        timeout: seconds that one request may take.
    """

    access: HubAccess
    timeout: float

    @property
    def _host(self) -> str:
        return urlsplit(self.access.endpoint).netloc

    @property
    def _token(self) -> str:
        known = f"the token comes from {self.access.token_origin}"
        return known if self.access.token else self.access.token_origin

    def status(self, response: httpx2.Response, wanted: HubReference, text: str) -> DataUnavailable:
        """Return the error for a response whose status is not 200.

        Args:
            text: the hub's message; may be empty.
        """
        status, told = response.status_code, one_line(text)
        page = f"{self.access.endpoint}/{wanted.repository}"
        if status in (401, 403):
            why = "\n".join(part for part in (told or f"the hub answered {status}", self._token) if part)
            hint = f"request access at {page}, log in (hf auth login, or HF_TOKEN), or check the name"
            return DataUnavailable(f"`{self._host}` refuses access to `{wanted}`", why=why, hint=hint)
        if status == 404:
            why = told or f"`{self._host}` answered 404"
            if response.headers.get("X-Error-Code") == "RevisionNotFound":
                why += f"\nthe repository exists, and has no revision `{wanted.revision}`"
            return DataUnavailable(
                f"`{wanted}` does not exist", why=f"{why}\n{self._token}", hint=_when_missing(response, wanted)
            )
        if status == 429:
            why = told or "the limit is per address or per user, and all users of a login node have one address"
            hint = "log in (HF_TOKEN), or wait some minutes; the next attempt continues"
            return DataUnavailable(f"`{self._host}` refuses more requests for now (429)", why=why, hint=hint)
        why = told or one_line(response.reason_phrase)
        later = "try again later: the next attempt continues" if status >= 500 else None
        return DataUnavailable(f"`{self._host}` answered with status {status}", why=why, hint=later)

    def unreachable(self, error: Exception) -> DataUnavailable:
        """Return the error for a network fault."""
        host = _asked(error) or self._host
        named = f"the hub `{host}`" if host == self._host else f"`{host}`, which the hub `{self._host}` named,"
        fault, hint = _fault(error), "try again; check whether a firewall or proxy interferes"
        if fault == "too-slow":
            what, why = f"did not answer within {self.timeout:g} s", "no bytes arrived"
        elif fault == "tls":
            what, why = "cannot be used with https", one_line(network_faults.tls_words(error)) or "the handshake failed"
            hint = _UNTRUSTED if "CERTIFICATE_VERIFY_FAILED" in why else "check whether this address is for http only"
        elif fault == "proxy":
            what, why = "cannot be reached through the proxy", "http_proxy or https_proxy names a proxy"
            hint = "check the proxy, or add the host to no_proxy"
        elif fault == "circle":
            what, why, hint = "redirects in a circle", "more than five redirects for one request", "try again later"
        elif fault == "address":
            what, why = "cannot be used", "its address, or an address that it redirects to, is not valid"
            hint = "check HF_ENDPOINT, or report this to the administrators of the hub"
        elif fault == "unresolved":
            what, why = "is not a known host", "its name does not resolve"
            hint = "compute nodes often cannot reach the internet, login nodes can; a mirror: HF_ENDPOINT"
        elif fault == "refused":
            what, why = "is down", f"no program listens at {host} (connection refused)"
        else:
            said = one_line(network_faults.system_words(error)) or type(error).__name__
            what, why = "cannot be reached, or closed the connection too early", said
        return DataUnavailable(f"{named} {what}", why=f"{why}\nthe address comes from {self.access.endpoint_origin}",
                               hint=hint)  # fmt: skip

    def unusable(self, wanted: HubReference, why: str) -> DataUnavailable:
        """Return the error for an answer that does not follow the interface."""
        return DataUnavailable(
            f"the answer of `{self._host}` for `{wanted}` cannot be used",
            why=f"{one_line(why)}\nthe address comes from {self.access.endpoint_origin}",
            hint="check that HF_ENDPOINT names a hub",
        )


def _asked(error: Exception) -> str:
    """Return host and port of the request that failed; empty if the error names no host."""
    try:
        return error.request.url.netloc.decode() if isinstance(error, httpx2.RequestError) else ""
    except RuntimeError:  # it was raised before there was a request
        return ""


def _fault(error: Exception) -> network_faults.Fault:
    if isinstance(error, httpx2.ProxyError):
        return "proxy"
    if isinstance(error, httpx2.TooManyRedirects):
        return "circle"
    if isinstance(error, (httpx2.InvalidURL, httpx2.UnsupportedProtocol)) or "in location header" in str(error):
        return "address"
    fault = network_faults.judge(error)
    return "tls" if fault == "broken" and network_faults.tls_words(error) else fault


def _when_missing(response: httpx2.Response, wanted: HubReference) -> Hint:
    """Return the hint for a repository or a revision that does not exist."""
    if response.headers.get("X-Error-Code") != "RevisionNotFound":
        return "check the name: ORG/NAME for a model, datasets/ORG/NAME for a data set, spaces/ORG/NAME for a space"
    if wanted.revision == "main":
        return f"name one of its branches: {wanted.repository}@BRANCH"
    return "the newest commit: ", Command("hpcenv", "data", "resolve", wanted.repository)
