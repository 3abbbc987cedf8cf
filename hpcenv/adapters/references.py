"""What a user may write where an image is wanted, parsed strictly.

Runs on: LOGIN NODE. Pure: no file is looked at here; a missing one is found by whoever
opens it.

    docker://HOST[:PORT]/NAME[:TAG][@sha256:DIGEST]    an image in a registry
    oci:FOLDER[:TAG|@sha256:DIGEST]                    an OCI image layout
    oci-archive:FILE[:TAG|@sha256:DIGEST]              the same in a tar archive
    docker-archive:FILE[:NAME[:TAG]]                   what `docker save` writes
    PATH.sif                                           a finished SIF
    PATH.def                                           an Apptainer definition file
    host                                               no container

The first colon ends FOLDER and FILE, as in containers-transports(5) of containers/image
5.34 (2025-02): a path with a colon cannot be written in this form.
"""

from __future__ import annotations

import re
from typing import Literal, NoReturn

from hpcenv.dataclass import dataclass
from hpcenv.errors import SpecError

__all__ = [
    "DIGEST",
    "DefinitionFile",
    "Host",
    "LocalImage",
    "Platform",
    "Reference",
    "SifFile",
    "Source",
    "parse_platform",
    "parse_reference",
    "parse_source",
    "refuse_floating",
]

# Names of processors as `uname -m` says them, and as OCI does.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

# os, architecture, variant
Platform = tuple[str, str, str | None]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A parsed `docker://` reference; `registry` is the name a user knows, not the API's."""

    registry: str
    repository: str
    tag: str | None
    digest: str | None

    def __str__(self) -> str:
        tag = "" if self.tag is None else f":{self.tag}"
        digest = "" if self.digest is None else f"@{self.digest}"
        return f"docker://{self.registry}/{self.repository}{tag}{digest}"

    @property
    def api_host(self) -> str:
        """The host that serves the distribution API (Docker Hub's has another name)."""
        return "registry-1.docker.io" if self.registry == "docker.io" else self.registry


@dataclass(frozen=True, kw_only=True)
class LocalImage:
    """An image in files: a layout folder, a layout in a tar archive, or `docker save`'s archive.

    Attributes:
        path: as written.
        tag: which image of several; for a docker archive `NAME:TAG` or `TAG`.
    """

    kind: Literal["oci", "oci-archive", "docker-archive"]
    path: str
    tag: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        tag = "" if self.tag is None else f":{self.tag}"
        digest = "" if self.digest is None else f"@{self.digest}"
        return f"{self.kind}:{self.path}{tag}{digest}"


@dataclass(frozen=True, kw_only=True)
class SifFile:
    """A finished SIF; `path` as written."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, kw_only=True)
class DefinitionFile:
    """An Apptainer definition file; `path` as written."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, kw_only=True)
class Host:
    """No container: the Python environment of the machine itself."""

    def __str__(self) -> str:
        return "host"


Source = Reference | LocalImage | SifFile | DefinitionFile | Host

# The grammar of github.com/distribution/reference v0.6 (2024-03), `reference.go`, and its
# `normalize.go`: a first component is a host if it holds a dot or colon or is `localhost`.
_ALNUM = r"[a-z0-9]+"
_PATH = re.compile(rf"{_ALNUM}(?:(?:[._]|__|-+){_ALNUM})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9A-Fa-f:]+\])(?::(?P<port>[0-9]{{1,5}}))?")
_FORM = "docker://HOST[:PORT]/NAME[:TAG][@sha256:DIGEST]"
_FORMS = "docker://..., oci:FOLDER, oci-archive:FILE, docker-archive:FILE, PATH.sif, PATH.def or host"

# image-spec 1.1, annotations.md: the alphabet of `org.opencontainers.image.ref.name`; a
# docker archive's names lie in it too.
_REF_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,254}")
# What other tools take, and what hpcenv says of each.
_ELSEWHERE = {
    "docker-daemon": "save it from there: docker save -o FILE IMAGE, then docker-archive:FILE",
    "containers-storage": "save it from there: podman save --format oci-archive -o FILE IMAGE, then oci-archive:FILE",
    "dir": "copy it into a layout: skopeo copy dir:FOLDER oci:FOLDER2:TAG",
    "library": "pull it with apptainer, and name the SIF file",
    "shub": "pull it with apptainer, and name the SIF file",
    "oras": "pull it with apptainer, and name the SIF file",
    "docker": f"the form is {_FORM}",
}
_LONGEST = 4096


def parse_source(text: str) -> Source:
    """Tell which kind of image `text` names, and parse it.

    Raises:
        SpecError: it is none of the forms above; the message says what is missing.
    """
    if len(text) > _LONGEST or "\0" in text or "\n" in text:
        _bad_source(text, "it is longer than a path, or holds a newline or NUL")
    if text == "host":
        return Host()
    scheme, colon, rest = text.partition(":")
    if colon and rest.startswith("//") and scheme == "docker":
        return parse_reference(text)
    if colon and scheme in ("oci", "oci-archive", "docker-archive"):
        return _local(text, scheme, rest)
    if colon and scheme in _ELSEWHERE:
        _bad_source(text, f"hpcenv does not read {scheme}: sources", _ELSEWHERE[scheme])
    if "://" in text:
        _bad_source(text, f"hpcenv does not read {scheme[:40]}:// sources")
    if text.endswith(".sif") and text != ".sif":
        return SifFile(path=text)
    if text.endswith(".def") and text != ".def":
        return DefinitionFile(path=text)
    return _bad_source(text, "it has no scheme and does not end in .sif or .def", _guess(text))


def _guess(text: str) -> str:
    """Return a hint for something without a scheme: most often an image's name."""
    try:
        return f"for an image in a registry, write {parse_reference(f'docker://{text}')}"
    except SpecError:
        return f"the forms are {_FORMS}"


def _local(text: str, kind: str, rest: str) -> LocalImage:
    if rest.startswith("//"):
        _bad_source(text, f"after {kind}: comes a path, not //", f"write {kind}:{rest[2:]}")
    path, digest = rest, None
    before, mark, after = rest.rpartition("@")
    if mark and DIGEST.fullmatch(after):
        path, digest = before, after
        if kind == "docker-archive":
            _bad_source(text, "a docker archive holds no digests to choose by", "name an image of it, NAME:TAG")
    elif mark and after.startswith("sha256:"):
        _bad_source(text, f"`{after[:80]}` is not a digest (sha256: and 64 hexadecimal digits)")
    path, colon, tag = path.partition(":")
    if not path:
        _bad_source(text, "it names no path", f"write {kind}:PATH")
    if colon and not _REF_NAME.fullmatch(tag):
        _bad_source(text, f"`{tag[:80]}` is not a tag; a path that holds a colon cannot be written here")
    if colon and digest:
        _bad_source(text, "it has both a tag and a digest", "leave the tag out: a digest names one image")
    return LocalImage(
        kind="oci" if kind == "oci" else "oci-archive" if kind == "oci-archive" else "docker-archive",
        path=path,
        tag=tag if colon else None,
        digest=digest,
    )


def _bad_source(text: str, why: str, hint: str | None = None) -> NoReturn:
    raise SpecError(f"`{_shown(text)}` does not name an image", why=why, hint=hint or f"the forms are {_FORMS}")


def _shown(text: str) -> str:
    return text[:300].encode("unicode_escape").decode() if not text.isprintable() else text[:300]


# --- docker:// -------------------------------------------------------------------------


def parse_reference(reference: str) -> Reference:
    """Parse `docker://...` strictly and spell out Docker Hub's defaults.

    Raises:
        SpecError: it is not such a reference; the message says which part is wrong.
    """
    scheme, mark, rest = reference.partition("://")
    if not mark:
        _bad_reference(reference, "it has no scheme", f"write docker://{reference}")
    if scheme != "docker":
        _bad_reference(reference, f"hpcenv resolves docker:// references, not {scheme}://")
    rest, mark, digest = rest.partition("@")
    if mark and not DIGEST.fullmatch(digest):
        _bad_reference(reference, f"`{digest}` is not a digest (sha256: and 64 hexadecimal digits)")
    host, slash, path = rest.partition("/")
    if not slash or not (set(".:") & set(host) or host == "localhost" or host != host.lower()):
        host, path = "docker.io", rest
    path, colon, tag = path.partition(":")
    _check_host(reference, host)
    if colon and not _TAG.fullmatch(tag):
        _bad_reference(reference, f"`{tag}` is not a tag (letters, digits, `_`, `.`, `-`; at most 128)")
    if host == "index.docker.io":
        host = "docker.io"
    if host == "docker.io" and "/" not in path:
        path = f"library/{path}"
    for part in path.split("/"):
        if not _PATH.fullmatch(part):
            _bad_reference(reference, f"`{part}` cannot be part of a repository name (lower case only)")
    if len(host) + 1 + len(path) > 255:
        _bad_reference(reference, "the name is longer than 255 characters")
    return Reference(registry=host, repository=path, tag=tag if colon else None, digest=digest or None)


def _check_host(reference: str, host: str) -> None:
    match = _HOST.fullmatch(host)
    if match is None:
        _bad_reference(reference, f"`{host}` is not a host name or HOST:PORT")
    port = match["port"]
    if port is not None and not 0 < int(port) < 65536:
        _bad_reference(reference, f"`{port}` is not a port")


def _bad_reference(reference: str, why: str, hint: str | None = None) -> NoReturn:
    raise SpecError(
        f"`{reference[:300]}` is not an image reference",
        why=why,
        hint=hint or f"the form is {_FORM}",
    )


def refuse_floating(asked: Reference) -> NoReturn:
    """Raise for a reference that names another image every few weeks."""
    says = "names no tag" if asked.tag is None else f"uses the tag `{asked.tag}`"
    raise SpecError(
        f"`{asked}` {says}, which names another image every few weeks",
        why="a floating reference cannot be asked again to find the same image",
        hint="name a version's tag or a digest, or accept it once with --allow-floating",
    )


def parse_platform(platform: str) -> Platform:
    """Parse `os/architecture[/variant]`; architectures may be named as `uname -m` does."""
    parts = platform.split("/")
    if len(parts) not in (2, 3) or not all(re.fullmatch(r"[a-z0-9_.-]+", part) for part in parts):
        raise SpecError(f"`{platform}` is not a platform", hint="write os/architecture, for example linux/amd64")
    return parts[0], _ARCHITECTURES.get(parts[1], parts[1]), parts[2] if len(parts) == 3 else None
