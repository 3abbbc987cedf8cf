"""Errors for the user that explain a registry's refusals and network faults.

Runs on: LOGIN NODE. Loads `requests`. No message quotes a header or a request, because these may contain secrets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import urlsplit

import requests
import urllib3.exceptions

from hpcenv.errors import Command, ImageUnavailable
from hpcenv.image.reference import RegistryName
from hpcenv.image.registry import network_faults
from hpcenv.image.registry.credentials import Search
from hpcenv.image.registry.session import retry_after

__all__ = ["Refusals", "one_line"]


@dataclass(frozen=True, kw_only=True)
class Refusals:
    """The errors of one image; each method returns or raises the error for one situation.

    Attributes:
        reference: the image.
        search: the credentials that were used, for messages.
        timeout: seconds that one request may take.
    """

    reference: RegistryName
    search: Search
    timeout: float

    def raise_for_status(self, response: requests.Response, text: str) -> NoReturn:
        """Raise the error for a response whose status is not 200.

        Args:
            response: the response.
            text: the server's error text; may be empty.
        """
        status, registry = response.status_code, self.reference.registry
        if status in (401, 403):
            raise self.denied(text or f"the registry answered {status}")
        if status == 404:
            raise ImageUnavailable(
                f"`{self.reference}` does not exist",
                why=text or f"`{registry}` answered 404 for {urlsplit(response.url).path}",
                hint="check the name of the repository and the tag; some registries answer 404 for private images",
            )
        if status == 429:
            seconds = retry_after(response)
            wait = "" if seconds is None else f" {seconds:.0f} s"
            raise ImageUnavailable(
                f"`{registry}` refuses more requests for now (429)",
                why=text or "all nodes of a cluster share one address, and the limit is per address",
                hint=f"log in (docker login {registry}), use a mirror, or wait{wait}",
            )
        if status == 400 and "HTTPS server" in text:
            raise ImageUnavailable(
                f"`{registry}` requires https, and hpcenv used http",
                why="it is listed as a plain-http registry",
                hint=f"omit --plain-http {registry}, or remove it from plain-http in hpcenv.toml",
            )
        raise ImageUnavailable(
            f"`{registry}` answered with status {status}",
            why=text or response.reason,
            hint="try again later, or ask the administrators of the registry" if status >= 500 else None,
        )

    def denied(self, why: str) -> ImageUnavailable:
        """Return the error for a refused login; it names the credentials that hpcenv used."""
        credential = self.search.credential
        used = "no credentials for it were found" if credential is None else f"used: {credential}"
        return ImageUnavailable(
            f"access to `{self.reference}` was denied",
            why="\n".join([why, used, *self.search.notes]),
            hint=(
                "log in once (",
                Command("docker", "login", self.reference.registry),
                "), or check the name: registries also refuse access to images that do not exist",
            ),
        )

    def unreachable(self, error: Exception) -> ImageUnavailable:
        """Return the error for a network fault."""
        host, text = _asked(error) or self.reference.api_host, str(error)
        fault = network_faults.judge(error)
        if isinstance(error, (requests.Timeout, urllib3.exceptions.TimeoutError, TimeoutError)):
            return self._too_slow(host)
        if isinstance(error, requests.exceptions.SSLError):
            return self._tls_failed(host, text)
        if isinstance(error, requests.exceptions.ProxyError):
            what, why = "cannot be reached through the proxy", "http_proxy or https_proxy names a proxy"
            hint = "check the proxy, or add the host to no_proxy"
        elif isinstance(error, requests.TooManyRedirects):
            what, why = "redirects in a circle", "more than five redirects for one request"
            hint = "its configuration is wrong; check the host in the reference, or ask the registry's administrators"
        elif fault == "unresolved":
            what, why = "is not a known host", "its name does not resolve"
            hint = "check the spelling; compute nodes often cannot reach the internet, login nodes can"
        elif fault == "refused":
            what, why = "is down", f"no program listens at {host} (connection refused)"
            hint = "start the registry, or check its port"
        else:
            what, why = "closed the connection too early", _cause(text)
            hint = "try again; check whether a firewall or proxy interferes"
        return ImageUnavailable(f"{self._named(host)} {what}", why=why, hint=hint)

    def _named(self, host: str) -> str:
        """Return a host's name for messages: the registry itself, or a server that the registry redirected us to."""
        own = self.reference.api_host
        return f"the registry `{own}`" if host == own else f"`{host}`, which the registry `{own}` named,"

    def _tls_failed(self, host: str, text: str) -> ImageUnavailable:
        if host != self.reference.api_host:
            return ImageUnavailable(
                f"{self._named(host)} cannot be used with https",
                why=_cause(text),
                hint="report this to the administrators of the registry",
            )
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return ImageUnavailable(
                f"the certificate of `{host}` is not trusted",
                why=_cause(text),
                hint="name your site's CA file in the variable REQUESTS_CA_BUNDLE",
            )
        return ImageUnavailable(
            f"`{host}` does not use https",
            why=_cause(text),
            hint=(
                "if it is a plain http registry that you trust: ",
                Command("hpcenv", "image", "pull", "--plain-http", host, str(self.reference)),
                f';\nin a project, add "{host}" to plain-http in hpcenv.toml',
            ),
        )

    def _too_slow(self, host: str) -> ImageUnavailable:
        return ImageUnavailable(
            f"{self._named(host)} did not answer within {self.timeout:g} s",
            hint="try again; a firewall that drops packets can be the cause",
        )

    def stalled(self) -> ImageUnavailable:
        """Return the error for a layer that stopped arriving."""
        return ImageUnavailable(
            f"the registry `{self.reference.api_host}` sent no bytes for {self.timeout:g} s",
            why="the connection is open, but a layer stopped arriving",
            hint="try again: hpcenv continues the download; a firewall that drops packets can be the cause",
        )

    def too_large(self, limit: int) -> ImageUnavailable:
        """Return the error for a manifest or configuration of more than `limit` bytes."""
        return ImageUnavailable(
            f"the manifest or configuration of `{self.reference}` has more than {limit >> 20} MiB",
            why="no image needs that much; hpcenv stopped reading",
            hint="check that the reference names an image",
        )

    def wrong_bytes(self, document: str, *, expected: str, received: str) -> ImageUnavailable:
        """Return the error for a document whose digest is not the expected one."""
        return ImageUnavailable(
            f"`{self.reference.registry}` sent a wrong {document} for `{self.reference}`",
            why=f"expected {expected}\nreceived {received}",
            hint="a proxy or mirror may have changed it; do not use this image",
        )

    def wrong_size(self, digest: str, *, expected: int, announced: str) -> ImageUnavailable:
        """Return the error for a layer if the registry announces a different size than the manifest."""
        return ImageUnavailable(
            f"`{self.reference.registry}` announced another size for the layer {digest}",
            why=f"expected {expected} bytes\nannounced {announced}",
            hint="a proxy or mirror may have changed it; do not use this image from there",
        )

    def wrong_range(self, digest: str, *, requested: str, received: str) -> ImageUnavailable:
        """Return the error for a part of a layer that we did not request."""
        return ImageUnavailable(
            f"`{self.reference.registry}` sent a wrong part of the layer {digest}",
            why=f"requested {requested}, received {one_line(received) or 'no Content-Range'}",
            hint="a proxy may be broken; try again",
        )

    def missing_layer(self, digest: str, text: str) -> ImageUnavailable:
        """Return the error for a layer that the registry does not have."""
        return ImageUnavailable(
            f"`{self.reference.registry}` does not have the layer {digest} of `{self.reference}`",
            why=text or "the registry answered 404 for it",
            hint="push the image again; layers marked as not distributable have to be pushed explicitly",
        )


def _asked(error: Exception) -> str:
    """Return the host that a failed request was sent to; empty if the error does not name the host."""
    request = getattr(error, "request", None)
    url = getattr(request, "url", None)
    return urlsplit(url).netloc.rpartition("@")[2] if isinstance(url, str) else ""


def one_line(text: str) -> str:
    """Return a server's text as one line of printable ASCII, at most 400 characters."""
    return re.sub(r"[^\x20-\x7e]+", " ", text)[:400].strip()


def _cause(text: str) -> str:
    """Return the innermost reason from an error text of `requests`, without the names of objects around the reason."""
    reasons = re.findall(r"(?:\[SSL[^\]]*\][^()\"']*|[A-Z][a-z][A-Za-z ]{6,}(?=['\")]))", text)
    return str(reasons[-1]).strip() if reasons else text[:200]
