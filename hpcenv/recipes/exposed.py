"""What a recipe or an image exposes: credentials of package indexes, notebooks without a token, sshd. Pure.

Runs on: LOGIN NODE. The texts are searched and never run. A finding names the kind of secret, never the secret itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Variables of pip, uv and conda (their pages "Environment variables", read 2026-11-23).
_INDEX_VARIABLE = re.compile(
    r"PIP_(?:EXTRA_)?INDEX_URL|PIP_FIND_LINKS|UV_(?:DEFAULT_|EXTRA_)?INDEX(?:_URL)?|UV_FIND_LINKS|CONDA_CHANNELS"
)
_INDEX_PASSWORD = re.compile(r"UV_INDEX_\w+_PASSWORD|POETRY_HTTP_BASIC_\w+_PASSWORD|POETRY_PYPI_TOKEN_\w+")
# A user name with or without a password, because many indexes accept a token as the user name. A URL with a variable in
# place of the user name contains no login.
_LOGIN_IN_URL = re.compile(r"\bhttps?://(?![^/\s@]*\$)[^/\s@'\"]+@", re.IGNORECASE)
_NAMES_INDEX = re.compile(
    r"(?:extra[-_])?index(?:[-_]url)?\b|find[-_]links|\bchannels?\b|\bconda\b|\bdeb\b|URIs:", re.IGNORECASE
)
INDEX_FILE = re.compile(
    r"(?:^|/)(?:\.?pip/pip\.conf|pip\.conf|uv\.toml|\.condarc|condarc|pypoetry/auth\.toml"
    r"|etc/apt/(?:auth\.conf|auth\.conf\.d/[^/]+|sources\.list|sources\.list\.d/[^/]+))$"
)
"""Files that name a package index or a mirror."""

NOTEBOOK_FILE = re.compile(r"(?:^|/)jupyter_\w*config\.(?:py|json)$")
"""Settings of Jupyter."""

# With an empty token, Jupyter requires no login (Jupyter Server 2 "Security", read 2026-11-23).
_EMPTY_TOKEN = re.compile(
    r"--\w+\.token=(?:''|\"\"|\\\"\\\"|(?=\s|$|[\"']\s*(?:[,\]]|$)))"
    r"|(?:NotebookApp|ServerApp|IdentityProvider|LabApp)\.token\s*=\s*u?(?:''|\"\")"
    r"|\"token\"\s*:\s*\"\"|\bJUPYTER_TOKEN=(?:''|\"\"|(?=\s|$))",
    re.MULTILINE,
)


def index_variable(name: str, value: str) -> bool:
    """Return whether a variable contains a credential of a package index."""
    if _INDEX_PASSWORD.fullmatch(name):
        return bool(value) and not value.startswith("$")
    return _INDEX_VARIABLE.fullmatch(name) is not None and _LOGIN_IN_URL.search(value) is not None


def index_credentials(text: str, *, is_index_file: bool = False) -> bool:
    """Return whether a text contains a credential of a package index.

    Args:
        text: a command, or the content of a file.
        is_index_file: whether the file fits `INDEX_FILE`. In such a file, each login is the login of an index.
    """
    if is_index_file and re.search(r"^\s*(?:machine\s+\S+.*)?\bpassword\s*=?\s*['\"]?\S", text, re.MULTILINE):
        return True
    lines = text.splitlines()
    return any(_LOGIN_IN_URL.search(line) and (is_index_file or _NAMES_INDEX.search(line)) for line in lines)


def open_notebook(text: str) -> bool:
    """Return whether a text starts or configures Jupyter without a token."""
    return _EMPTY_TOKEN.search(text) is not None


_INSTALLERS = frozenset({"apt", "apt-get", "dnf", "yum", "microdnf", "apk", "zypper", "conda", "mamba", "micromamba"})


def installs_sshd(program: str, argv: Sequence[str]) -> bool:
    """Return whether a command installs or starts an SSH server."""
    if program == "sshd" or (program in ("service", "systemctl") and {"ssh", "sshd"} & set(argv)):
        return True
    named = {re.split(r"[=<>]", word)[0] for word in argv}
    return program in _INSTALLERS and bool({"openssh-server"} & named or (program == "apk" and "openssh" in named))
