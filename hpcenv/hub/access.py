"""Find the address of the user's hub, and the token for it. The hub's library would use the same values.

Runs on: LOGIN NODE. The names of the variables and their order are taken from huggingface_hub 2.4 (constants.py,
utils/_auth.py). A project cannot name a hub, because the project's author could then get the tokens of other users.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from hpcenv.errors import UsageError
from hpcenv.records.files import read_file

# constants.py of the library: _HF_DEFAULT_ENDPOINT.
DEFAULT_ENDPOINT = "https://huggingface.co"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})
_FALSE = frozenset({"0", "OFF", "NO", "FALSE"})
_PRINTABLE = re.compile(r"[\x21-\x7e]+")
_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}")


@dataclass(frozen=True, kw_only=True)
class HubAccess:
    """A hub and the user's token for it.

    Attributes:
        endpoint: address without a slash at the end.
        endpoint_origin: where the address comes from, for messages.
        token: the token; empty if no token is known.
        token_origin: where the token comes from, or why no token is known.
        ca_file: PEM file of certificates to trust; empty to trust the certificates of the library.
        xet: whether to use Xet, the library's faster transfer; only if HF_HUB_DISABLE_XET has a false value such as 0.
    """

    endpoint: str
    endpoint_origin: str
    token: str = field(default="", repr=False)
    token_origin: str = ""
    ca_file: str = ""
    xet: bool = False


def find_access(environ: Mapping[str, str]) -> HubAccess:
    """Return the hub and the token that the user's environment names.

    Raises:
        UsageError: HF_ENDPOINT is not an address.
    """
    named = environ.get("HF_ENDPOINT", "").rstrip("/")
    endpoint = named or DEFAULT_ENDPOINT
    address = _address(endpoint)
    token, origin = _token(environ)
    if token and address.scheme == "http" and address.hostname not in _LOOPBACK:
        token, origin = "", f"the token ({origin}) is not sent: {address.netloc} is used without encryption"
    return HubAccess(
        endpoint=endpoint,
        endpoint_origin="HF_ENDPOINT" if named else "the default of the hub's library",
        token=token,
        token_origin=origin,
        ca_file=environ.get("REQUESTS_CA_BUNDLE", ""),
        xet=environ.get("HF_HUB_DISABLE_XET", "").upper() in _FALSE,
    )


def _address(endpoint: str) -> SplitResult:
    """Return the parts of a hub's address.

    Raises:
        UsageError: the text is not an address, or has more than scheme, host, port and path.
    """
    # `urlsplit` removes line ends and tabs, but the requests would still contain them.
    usable = _PRINTABLE.fullmatch(endpoint) is not None and not {"@", "?", "#", "\\"}.intersection(endpoint)
    try:
        address = urlsplit(endpoint)
        usable = usable and address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:  # `[` without `]`, or a port that is not a number
        usable = False
    if not usable:
        # The value is not quoted, because it may contain a password.
        why = "it is not an address of the form https://HOST[:PORT]; a password does not belong there"
        raise UsageError("the variable HF_ENDPOINT cannot be used", why=why, hint="export HF_ENDPOINT=https://HOST")
    return address


def _token(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the token, and where it comes from or why no token is known."""
    if environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in _TRUE:
        return "", "no token is sent: HF_HUB_DISABLE_IMPLICIT_TOKEN is set"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        value = environ.get(name, "").strip()
        if value:
            return (value, name) if _TOKEN.fullmatch(value) else ("", f"{name} does not contain a token")
    path = _token_file(environ)
    try:
        value = read_file(path, most=1 << 16).decode("ascii").strip()
    except FileNotFoundError:
        return "", f"no token: HF_TOKEN is not set, and there is no {path}"
    except (OSError, UnicodeDecodeError) as error:
        return "", f"no token: {path} cannot be read ({getattr(error, 'strerror', None) or 'not ASCII'})"
    return (value, str(path)) if _TOKEN.fullmatch(value) else ("", f"{path} does not contain a token")


def _token_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the file in which the library stores the token."""
    user = Path(environ.get("HOME") or os.path.expanduser("~"))
    cache = environ.get("XDG_CACHE_HOME") or str(user / ".cache")
    home = environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    path = environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")
    return Path(re.sub(r"\A~(?=/|\Z)", lambda _: str(user), path))
