"""Find the user's credentials for a registry in the files of docker, Apptainer and podman.

Runs on: LOGIN NODE. This module writes nothing.

hpcenv uses the first item of this list that has credentials for the registry:

1. `APPTAINER_DOCKER_USERNAME` and `APPTAINER_DOCKER_PASSWORD` (also `SINGULARITY_DOCKER_*`, which Apptainer still
   accepts). These variables apply to every registry, as in Apptainer.
2. The file that `APPTAINER_AUTHFILE` names, then the file that `REGISTRY_AUTH_FILE` names.
3. Apptainer's `docker-config.json` in `$APPTAINER_CONFIGDIR` or `~/.apptainer`
   (`apptainer registry login`, 1.3 and later).
4. Docker's `config.json` in `$DOCKER_CONFIG` or `~/.docker`.
5. Podman's `containers/auth.json` in `$XDG_RUNTIME_DIR`, then in `$XDG_CONFIG_HOME` or
   `~/.config`.

All files have docker's format (docker/cli `cli/config/configfile/file.go`, 28.0, and containers-auth.json(5) of
containers/image 5.34). Within a file, the order of priority is: the helper of the registry (`credHelpers`), the general
helper (`credsStore`), `auths`. Keys of `auths` are hosts, URLs of hosts (old versions of docker), and in podman's files
also `HOST/NAMESPACE`; the longest key that fits is used.

A secret is only in `Credential.secret`: never in its `repr`, in an error, or in an argument of a
program. An unreadable file is not an error here, because most images are public. Such a file adds a note to
`Search.notes`. If the registry refuses access, the error contains these notes.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import pwd
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpcenv import process
from hpcenv.errors import ToolFailed, ToolMissing

__all__ = ["Credential", "Search", "find"]

_FILE_LIMIT = 1024 * 1024
_HELPER_SECONDS = 30.0
# Valid names of helpers; a helper's name becomes part of a program's name.
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# docker-credential-helpers v0.9, credentials/credentials.go: this user name means that
# the secret is an identity token.
_TOKEN_USER = "<token>"  # noqa: S105 - a user name
_HUB_KEY = "https://index.docker.io/v1/"
_HUB_NAMES = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})


@dataclass(frozen=True, kw_only=True)
class Credential:
    """Credentials for a registry.

    Attributes:
        kind: what the secret is: `password` (for Basic authentication and token requests, with the user), `identity` (a
            refresh token), or `bearer` (a token of the registry, which is sent unchanged).
        origin: the file, helper or variable that has the credentials, for messages.
    """

    user: str
    secret: str = field(repr=False)
    kind: Literal["password", "identity", "bearer"]
    origin: str

    def __str__(self) -> str:
        return f"the {self.kind} of {self.user or 'a token'} from {self.origin}"

    def basic(self) -> str:
        """Return the value of an `Authorization` header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret}".encode()).decode("ascii")


@dataclass(frozen=True, kw_only=True)
class Search:
    """The credentials for a registry, and notes about files and helpers that could not be used."""

    credential: Credential | None
    notes: tuple[str, ...] = ()


def find(registry: str, repository: str, environ: Mapping[str, str]) -> Search:
    """Search the user's credentials for a registry.

    Args:
        registry: the registry as the user writes it, HOST[:PORT]; `docker.io` for Docker Hub.
        repository: the image's name in the registry; podman's files may have credentials for a part of a registry.
        environ: the user's environment; without HOME the home folder of the account is used.
    """
    notes: list[str] = []
    for found in _candidates(registry, repository, environ):
        if isinstance(found, Credential):
            return Search(credential=found, notes=tuple(notes))
        if found is not None:
            notes.append(found)
    return Search(credential=None, notes=tuple(notes))


def _candidates(registry: str, repository: str, environ: Mapping[str, str]) -> Iterator[Credential | str | None]:
    """Yield credentials, and notes about files and helpers that could not be used."""
    yield _from_variables(environ)
    for path in _files(environ):
        config = _read(path)
        if isinstance(config, Mapping):
            yield from _from_file(config, path, registry, repository, environ)
        else:
            yield config


def _from_variables(environ: Mapping[str, str]) -> Credential | None:
    # apptainer 1.4 searches each variable with its own prefix first, then with the old prefix.
    for prefix in ("APPTAINER", "SINGULARITY"):
        user, secret = environ.get(f"{prefix}_DOCKER_USERNAME"), environ.get(f"{prefix}_DOCKER_PASSWORD")
        if user and secret:
            return Credential(user=user, secret=secret, kind="password", origin=f"{prefix}_DOCKER_PASSWORD")
    return None


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    for name in ("APPTAINER_AUTHFILE", "REGISTRY_AUTH_FILE"):
        if environ.get(name):
            yield Path(environ[name])
    home = _home(environ)
    yield _folder(environ, "APPTAINER_CONFIGDIR", home / ".apptainer") / "docker-config.json"
    yield _folder(environ, "DOCKER_CONFIG", home / ".docker") / "config.json"
    if environ.get("XDG_RUNTIME_DIR"):
        yield Path(environ["XDG_RUNTIME_DIR"]) / "containers" / "auth.json"
    yield _folder(environ, "XDG_CONFIG_HOME", home / ".config") / "containers" / "auth.json"


def _folder(environ: Mapping[str, str], variable: str, default: Path) -> Path:
    return Path(environ[variable]) if environ.get(variable) else default


def _home(environ: Mapping[str, str]) -> Path:
    if environ.get("HOME"):
        return Path(environ["HOME"])
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path("/nonexistent")


def _read(path: Path) -> Mapping[str, Any] | str | None:
    """Return the content of a credentials file, None if the file is missing, or a note why it cannot be used."""
    try:
        # Non-blocking: the file may be a pipe.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {getattr(error, 'strerror', None) or 'not a path'}"
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return f"{path} is not a file"
        raw = os.read(fd, _FILE_LIMIT + 1)
        config = json.loads(raw) if len(raw) <= _FILE_LIMIT else None
    except (OSError, ValueError, RecursionError):
        config = None
    finally:
        os.close(fd)
    # The note omits the parser's message, because this message would quote the file.
    return config if isinstance(config, dict) else f"{path} is not a docker configuration (JSON)"


def _from_file(
    config: Mapping[str, Any], path: Path, registry: str, repository: str, environ: Mapping[str, str]
) -> Iterator[Credential | str | None]:
    keys = _keys(registry, repository)
    for helper in _helpers(config, keys):
        if isinstance(helper, str) and _HELPER.fullmatch(helper):
            yield _ask_helper(helper, registry, path, environ)
        else:
            yield f"{path} names a credential helper for {registry} that is not a valid name of a program"
    auths = config.get("auths")
    entries = {_plain(key): entry for key, entry in auths.items()} if isinstance(auths, dict) else {}
    for key in keys:
        yield _from_entry(entries.get(key), f"{path} ({key})")


def _keys(registry: str, repository: str) -> list[str]:
    """Return the keys that fit, the longest first: HOST/A/B, HOST/A, HOST."""
    hosts = sorted(_HUB_NAMES) if registry in _HUB_NAMES else [registry]
    parts = repository.split("/")
    return ["/".join([host, *parts[:count]]) for count in range(len(parts), -1, -1) for host in hosts]


def _plain(key: str) -> str:
    """Return a key of `auths` as HOST[/NAMESPACE]; old versions of docker wrote URLs with /v1/ or /v2/."""
    return re.sub(r"/v[12]/?$", "", re.sub(r"^https?://", "", key)).rstrip("/")


def _helpers(config: Mapping[str, Any], keys: list[str]) -> list[object]:
    """Return the helpers that a file names for a registry, each once."""
    own = config.get("credHelpers")
    named = {_plain(key): helper for key, helper in own.items()} if isinstance(own, dict) else {}
    found: list[object] = []
    for helper in (*(named.get(key) for key in keys), config.get("credsStore")):
        found += [helper] if helper and helper not in found else []
    return found


def _ask_helper(helper: str, registry: str, path: Path, environ: Mapping[str, str]) -> Credential | str | None:
    """Run `docker-credential-HELPER get`; the registry and the secret pass through pipes."""
    name = f"docker-credential-{helper}"
    server = _HUB_KEY if registry in _HUB_NAMES else registry
    try:
        program = process.find_tool(name, needed_for="log in to registries", path=environ.get("PATH"))
        # Accept any status: the output of a failed program may be a secret and must not be in a message.
        answer = process.run(
            [program, "get"],
            timeout=_HELPER_SECONDS,
            env=dict(environ) or None,
            stdin=server,
            accept=tuple(range(-64, 256)),
        )
    except (ToolMissing, ToolFailed) as error:
        return f"{path} names `{name}`: {error.what}"
    if answer.status != 0:
        # Helpers print this if they have no credentials; it is not a failure.
        without = "credentials not found" in answer.stdout + answer.stderr
        return None if without else f"`{name}` (named in {path}) ended with status {answer.status}"
    try:
        fields = json.loads(answer.stdout)
        user, secret = fields["Username"], fields["Secret"]
    except (ValueError, KeyError, TypeError, RecursionError):
        user = secret = None
    if not isinstance(user, str) or not isinstance(secret, str) or not secret:
        return f"`{name}` (named in {path}) did not answer with a credential"
    return Credential(
        user="" if user == _TOKEN_USER else user,
        secret=secret,
        kind="identity" if user == _TOKEN_USER else "password",
        origin=f"{name} (named in {path})",
    )


def _from_entry(entry: object, origin: str) -> Credential | str | None:
    if not isinstance(entry, dict):
        return None
    for name, kind in (("identitytoken", "identity"), ("registrytoken", "bearer")):
        token = entry.get(name)
        if isinstance(token, str) and token:
            return Credential(user="", secret=token, kind="identity" if kind == "identity" else "bearer", origin=origin)
    user, secret = entry.get("username"), entry.get("password")
    auth = entry.get("auth")
    if isinstance(auth, str) and auth:
        try:
            text = base64.b64decode(auth, validate=True).decode("utf-8").rstrip("\0")
        except (ValueError, binascii.Error):
            return f"{origin}: `auth` is not base64 of USER:PASSWORD"
        user, _, secret = text.partition(":")
    if isinstance(user, str) and isinstance(secret, str) and user and secret:
        kind_: Literal["password", "identity"] = "identity" if user == _TOKEN_USER else "password"
        return Credential(user="" if user == _TOKEN_USER else user, secret=secret, kind=kind_, origin=origin)
    return None
