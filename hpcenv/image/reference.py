"""Parse the names of images and platforms that users write.

Runs on: LOGIN NODE. Pure: this module opens no file. It is used for names on the command line, in hpcenv.toml and in
lockfiles. All other functions take an `ImageSource`, a `Reference` or a `Platform` instead of such a name.

    docker://HOST[:PORT]/NAME[:TAG][@sha256:DIGEST]    an image in a registry
    oci:FOLDER[:TAG|@sha256:DIGEST]                    an OCI image layout
    oci-archive:FILE[:TAG|@sha256:DIGEST]              the same in a tar archive
    docker-archive:FILE[:NAME[:TAG]]                   what `docker save` writes
    oras://HOST[:PORT]/NAME[:TAG][@sha256:DIGEST]      a finished SIF in a registry
    PATH.sif                                           a finished SIF
    PATH.def                                           an Apptainer definition file
    host                                               no container

FOLDER and FILE end at the first colon, as in containers-transports(5) of containers/image
5.34 (2025-02). So FOLDER and FILE cannot contain a colon.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal, NoReturn, TypedDict

from hpcenv.errors import Command, Hint, SpecError

__all__ = [
    "DIGEST",
    "DefinitionFile",
    "HostEnvironment",
    "ImageSource",
    "LayeredImage",
    "LocalImage",
    "Platform",
    "Reference",
    "RegistryName",
    "SifFile",
    "SifReference",
    "parse_layered",
    "parse_platform",
    "parse_reference",
    "parse_sif_reference",
    "parse_source",
    "refuse_floating",
    "require_layers",
]

# Names of `uname -m` -> names of OCI.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, kw_only=True)
class Platform:
    """The kind of machine that an image is for, with the names of OCI; the default is linux/amd64."""

    os: str = "linux"
    architecture: str = "amd64"
    variant: str | None = None

    def __str__(self) -> str:
        return "/".join(filter(None, (self.os, self.architecture, self.variant)))


@dataclass(frozen=True, kw_only=True)
class RegistryName:
    """The name of an image or a SIF in a registry; `registry` is the registry's name as users write it."""

    scheme: ClassVar[str] = "docker"

    registry: str
    repository: str
    tag: str | None
    digest: str | None

    def __str__(self) -> str:
        tag = "" if self.tag is None else f":{self.tag}"
        digest = "" if self.digest is None else f"@{self.digest}"
        return f"{self.scheme}://{self.registry}/{self.repository}{tag}{digest}"

    @property
    def api_host(self) -> str:
        """The host of the registry's API; for Docker Hub, this host differs from the registry's name."""
        return "registry-1.docker.io" if self.registry == "docker.io" else self.registry

    @property
    def floats(self) -> bool:
        """Whether the name has no tag or the tag `latest`, so that it means a new image every few weeks."""
        return self.digest is None and self.tag in (None, "latest")


@dataclass(frozen=True, kw_only=True)
class Reference(RegistryName):
    """An image in a registry, `docker://...`."""


@dataclass(frozen=True, kw_only=True)
class SifReference(RegistryName):
    """A finished SIF in a registry, `oras://...`, as `apptainer push` writes it."""

    scheme: ClassVar[str] = "oras"


@dataclass(frozen=True, kw_only=True)
class LocalImage:
    """An image in files: a layout folder, a layout in a tar archive, or an archive of `docker save`.

    Attributes:
        path: the path as the user wrote it.
        tag: the tag that selects one of several images; for a docker archive, `NAME:TAG` or `TAG`.
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
    """A finished SIF; `path` is as the user wrote it."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, kw_only=True)
class DefinitionFile:
    """An Apptainer definition file; `path` is as the user wrote it."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, kw_only=True)
class HostEnvironment:
    """No container: the Python environment of the host."""

    def __str__(self) -> str:
        return "host"


# An image that consists of layers, so hpcenv can convert it.
LayeredImage = Reference | LocalImage
ImageSource = Reference | LocalImage | SifReference | SifFile | DefinitionFile | HostEnvironment

# The grammar of github.com/distribution/reference v0.6 (2024-03), `reference.go`, and its
# `normalize.go`: the first component is a host if it contains a dot or colon or is `localhost`.
_ALNUM = r"[a-z0-9]+"
_PATH = re.compile(rf"{_ALNUM}(?:(?:[._]|__|-+){_ALNUM})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9A-Fa-f:]+\])(?::(?P<port>[0-9]{{1,5}}))?")
_FORM = "docker://HOST[:PORT]/NAME[:TAG][@sha256:DIGEST]"
_FORMS = "docker://..., oci:FOLDER, oci-archive:FILE, docker-archive:FILE, oras://..., PATH.sif, PATH.def or host"

# image-spec 1.1, annotations.md: the alphabet of `org.opencontainers.image.ref.name`. Names in a
# docker archive use the same alphabet.
_REF_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,254}")
# Schemes of other tools -> what to do instead.
_ELSEWHERE = {
    "docker-daemon": "save it from there: docker save -o FILE IMAGE, then docker-archive:FILE",
    "containers-storage": "save it from there: podman save --format oci-archive -o FILE IMAGE, then oci-archive:FILE",
    "dir": "copy it into a layout: skopeo copy dir:FOLDER oci:FOLDER2:TAG",
    "library": "pull it with apptainer, and name the SIF file",
    "shub": "pull it with apptainer, and name the SIF file",
    "oras": f"the form is {_FORM.replace('docker', 'oras', 1)}",
    "docker": f"the form is {_FORM}",
}
_DOCKERFILE = re.compile(r"(?:Dockerfile|Containerfile)(?:\..+)?|.+\.(?:dockerfile|containerfile)", re.IGNORECASE)
_LONGEST = 4096


def parse_source(text: str) -> ImageSource:
    """Parse the name of an image.

    Raises:
        SpecError: the text has none of the forms that this module lists; the message says what is wrong.
    """
    if len(text) > _LONGEST or "\0" in text or "\n" in text:
        _bad_source(text, "it is longer than any path, or contains a newline or NUL")
    if text == "host":
        return HostEnvironment()
    scheme, colon, rest = text.partition(":")
    if colon and rest.startswith("//") and scheme == "docker":
        return parse_reference(text)
    if colon and rest.startswith("//") and scheme == "oras":
        return parse_sif_reference(text)
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
    if _DOCKERFILE.fullmatch(text.rpartition("/")[2]):
        why = "it has the name of a Dockerfile; `image` takes an image or a definition file"
        build = Command("hpcenv", "image", "build", text)
        ways = ("build the image, push it to a registry, and name it docker://HOST/NAME:TAG\nor run ", build)
        return _bad_source(text, why, (*ways, ", copy the SIF into the project, and name that file"))
    return _bad_source(text, "it has no scheme and does not end in .sif or .def", _guess(text))


def parse_layered(text: str) -> LayeredImage:
    """Parse the name of an image that hpcenv can convert.

    Raises:
        SpecError: the text names no image, or an image without layers.
    """
    return require_layers(parse_source(text))


def require_layers(source: ImageSource) -> LayeredImage:
    """Return the image, if hpcenv can convert it.

    Raises:
        SpecError: the source is a SIF, a definition file or `host`.
    """
    if isinstance(source, (Reference, LocalImage)):
        return source
    if isinstance(source, SifReference):
        raise SpecError(
            f"`{source}` is not an image with layers",
            why="it is a finished SIF, which has nothing to convert or to compare with",
            hint=("to fetch it: ", Command("hpcenv", "image", "pull", str(source))),
        )
    raise SpecError(
        f"`{source}` is not an image with layers",
        why="hpcenv converts only such images",
        hint=("a SIF needs no conversion; a definition file: ", Command("hpcenv", "image", "build", "FILE.def")),
    )


def _guess(text: str) -> str:
    """Return a hint for a text without a scheme, which is most often the name of an image."""
    try:
        return f"for an image in a registry, write {parse_reference('docker://' + text.replace('#', '/'))}"
    except SpecError:
        return f"the forms are {_FORMS}"


def _local(text: str, kind: str, rest: str) -> LocalImage:
    if rest.startswith("//"):
        _bad_source(text, f"a path must follow {kind}:, not //", f"write {kind}:{rest[2:]}")
    path, digest = rest, None
    before, mark, after = rest.rpartition("@")
    if mark and DIGEST.fullmatch(after):
        path, digest = before, after
        if kind == "docker-archive":
            _bad_source(text, "a docker archive contains no digests", "select an image by name: NAME:TAG")
    elif mark and after.startswith("sha256:"):
        _bad_source(text, f"`{after[:80]}` is not a digest (sha256: and 64 hexadecimal digits)")
    path, colon, tag = path.partition(":")
    if not path:
        _bad_source(text, "it names no path", f"write {kind}:PATH")
    if colon and not _REF_NAME.fullmatch(tag):
        _bad_source(text, f"`{tag[:80]}` is not a tag; a path with a colon is not possible here")
    if colon and digest:
        _bad_source(text, "it has both a tag and a digest", "omit the tag: a digest names one image")
    return LocalImage(
        kind="oci" if kind == "oci" else "oci-archive" if kind == "oci-archive" else "docker-archive",
        path=path,
        tag=tag if colon else None,
        digest=digest,
    )


def _bad_source(text: str, why: str, hint: Hint | None = None) -> NoReturn:
    raise SpecError(f"`{_shown(text)}` does not name an image", why=why, hint=hint or f"the forms are {_FORMS}")


def _shown(text: str) -> str:
    return text[:300].encode("unicode_escape").decode() if not text.isprintable() else text[:300]


# --- docker:// -------------------------------------------------------------------------


def parse_reference(reference: str) -> Reference:
    """Parse `docker://...` strictly, and fill in Docker Hub's defaults.

    Raises:
        SpecError: the text is not a reference; the message says which part is wrong.
    """
    return Reference(**_parsed(reference, Reference.scheme))


def parse_sif_reference(reference: str) -> SifReference:
    """Parse `oras://...`, by the rules of `parse_reference`.

    Raises:
        SpecError: the text is not a reference; the message says which part is wrong.
    """
    return SifReference(**_parsed(reference, SifReference.scheme))


class _Parts(TypedDict):
    registry: str
    repository: str
    tag: str | None
    digest: str | None


def _parsed(reference: str, wanted: str) -> _Parts:
    scheme, mark, rest = reference.partition("://")
    if not mark:
        _bad_reference(reference, "it has no scheme", f"write {wanted}://{reference}")
    if scheme != wanted:
        _bad_reference(reference, f"hpcenv reads {wanted}:// references here, not {scheme}://")
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
    return {"registry": host, "repository": path, "tag": tag if colon else None, "digest": digest or None}


def _check_host(reference: str, host: str) -> None:
    match = _HOST.fullmatch(host)
    if match is None:
        _bad_reference(reference, f"`{host}` is not a host name or HOST:PORT")
    port = match["port"]
    if port is not None and not 0 < int(port) < 65536:
        _bad_reference(reference, f"`{port}` is not a port")


def _bad_reference(reference: str, why: str, hint: str | None = None) -> NoReturn:
    if "#" in reference:  # enroot writes HOST#NAME:TAG
        hint = f"write / for #: {reference.replace('#', '/')}"
    form = _FORM.replace("docker", "oras", 1) if reference.startswith("oras:") else _FORM
    raise SpecError(f"`{reference[:300]}` is not an image reference", why=why, hint=hint or f"the form is {form}")


def refuse_floating(
    reference: RegistryName,
    *,
    hint: str = "use the tag of a version or a digest, or accept it once with --allow-floating",
) -> NoReturn:
    """Raise the error for a reference that has no tag, or the tag `latest`.

    Args:
        hint: what the user can do about the error.

    Raises:
        SpecError: always.
    """
    has = "has no tag" if reference.tag is None else f"has the tag `{reference.tag}`"
    raise SpecError(
        f"`{reference}` {has}, which means a new image every few weeks",
        why="later, this reference can name a different image",
        hint=hint,
    )


def parse_platform(text: str) -> Platform:
    """Parse `os/architecture[/variant]`; names of `uname -m` are accepted too.

    Raises:
        SpecError: the text does not have this form.
    """
    parts = text.split("/")
    if len(parts) not in (2, 3) or not all(re.fullmatch(r"[a-z0-9_.-]+", part) for part in parts):
        raise SpecError(f"`{text}` is not a platform", hint="write os/architecture, for example linux/amd64")
    architecture = _ARCHITECTURES.get(parts[1], parts[1])
    return Platform(os=parts[0], architecture=architecture, variant=parts[2] if len(parts) == 3 else None)
