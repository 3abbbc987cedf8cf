"""Parse Apptainer definition files (sections and sources), and pin their sources.

Runs on: LOGIN NODE. Pure. Apptainer's user guide describes the format ("Definition Files", 1.4). The following details
are not in the guide and were seen with 1.4.5 on 2026-11-20. A stage begins with `Bootstrap:` at the start of a line,
even within a section. Only the first `Bootstrap:` may be indented. In a header, `#` begins a comment. Each line that
begins with `%` begins a section. Names of sections may be in upper case. This module does not run or change sections.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hpcenv.errors import SpecError

__all__ = [
    "Copy",
    "Definition",
    "DefinitionHeader",
    "DefinitionSource",
    "DefinitionStage",
    "Section",
    "copies",
    "parse",
    "pin",
    "sources",
]

BaseKind = Literal["registry", "layout", "file", "nothing", "distribution"]

_KINDS: Mapping[str, BaseKind] = {
    "docker": "registry",
    "oras": "registry",
    "library": "registry",
    "shub": "registry",
    "oci": "layout",
    "localimage": "file",
    "oci-archive": "file",
    "docker-archive": "file",
    "scratch": "nothing",
}
_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})\Z")
_HEADER = re.compile(r"([A-Za-z][A-Za-z0-9_]*)\s*:(.*)")
_HOLE = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_LONGEST = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class DefinitionHeader:
    """The value of a header line, without comment and blanks; lines count from 1."""

    value: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A section; `line` is the line of `%name`, and the text begins on the next line.

    Attributes:
        name: in lower case, without `%`.
        arguments: the text after the name.
    """

    line: int
    name: str
    arguments: str
    text: str

    @property
    def lines(self) -> Iterator[tuple[int, str]]:
        """The text's lines with their numbers in the file."""
        return enumerate(self.text.split("\n"), self.line + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DefinitionStage:
    """A stage: headers by name in lower case, and sections in order; `line` is the line of `Bootstrap`."""

    line: int
    headers: Mapping[str, DefinitionHeader]
    sections: tuple[Section, ...]

    def header(self, name: str) -> str:
        """Return the value of a header; empty if the stage does not have it."""
        header = self.headers.get(name)
        return "" if header is None else header.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """A definition file.

    Attributes:
        arguments: the defaults of its build arguments; arguments with two defaults are left out.
        stray: lines that belong to no header and no section, with their numbers; Apptainer
            rejects a file with such a line.
    """

    stages: tuple[DefinitionStage, ...]
    arguments: Mapping[str, str] = field(default_factory=dict)
    stray: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class DefinitionSource:
    """The source of a stage.

    Attributes:
        bootstrap: the bootstrap agent, in lower case: `docker`, `localimage`, `debootstrap` ...
        origin: the value of `From`. For `docker`, the values of `Registry` and `Namespace` are put before the value of
            `From`.
        kind: `registry`, `layout` (an OCI layout), `file`, `nothing` (for scratch), or `distribution` (for agents that
            install the current packages from package servers).
        digest: the digest at the end of `origin`, or None.
        line: the line of `From`, or else of `Bootstrap`; counted from 1.
        stage: the stage's name, or None.
    """

    bootstrap: str
    origin: str
    kind: BaseKind
    digest: str | None
    line: int
    stage: str | None

    @property
    def fixed(self) -> bool:
        """Whether the source always gives the same bytes, or is a file that can be hashed."""
        return self.digest is not None or self.kind in ("file", "nothing")


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A path of the host that `%files` copies, as it is written in the definition file; it may be a pattern."""

    path: str
    line: int


def parse(text: str, *, origin: str = "the definition file") -> Definition:
    """Parse a definition file of Apptainer.

    Args:
        text: the content of the file.
        origin: the name of the file for messages.

    Raises:
        SpecError: the file has no `Bootstrap`, or is too long.
    """
    if len(text) > _LONGEST:
        raise SpecError(f"{origin} is too long", why=f"it has more than {_LONGEST} characters")
    reader = _Reader()
    for number, line in enumerate(text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n"), 1):
        reader.take(number, line)
    if not reader.stages:
        raise SpecError(
            f"{origin} names no source",
            why="no line begins with `Bootstrap:`",
            hint="begin the file with, for example, `Bootstrap: docker` and `From: IMAGE@sha256:...`",
        )
    stages = tuple(reader.finished())
    sections = [section for stage in stages for section in stage.sections if section.name == "arguments"]
    return Definition(stages=stages, arguments=_defaults(sections), stray=tuple(reader.stray))


class _Reader:
    """Collects the stages of a file from its lines."""

    def __init__(self) -> None:
        self.stages: list[tuple[int, dict[str, DefinitionHeader], list[tuple[int, str, str, list[str]]]]] = []
        self.stray: list[tuple[int, str]] = []
        self._inside: list[str] | None = None

    def take(self, number: int, line: str) -> None:
        plain = line.partition("#")[0]
        header = _HEADER.match(plain.strip() if self._inside is None else plain)
        starts = header is not None and header[1].lower() == "bootstrap"
        if header is not None and starts and (not self.stages or plain[:1].strip()):
            self.stages.append((number, {"bootstrap": DefinitionHeader(value=header[2].strip(), line=number)}, []))
            self._inside = None
        elif line.startswith("%") and self.stages:
            name, _, arguments = line[1:].strip().partition(" ")
            self._inside = []
            self.stages[-1][2].append((number, name.lower(), arguments.strip(), self._inside))
        elif self._inside is not None:
            self._inside.append(line)
        elif header is not None and self.stages:
            self.stages[-1][1][header[1].lower()] = DefinitionHeader(value=header[2].strip(), line=number)
        elif plain.strip():
            self.stray.append((number, line))

    def finished(self) -> Iterator[DefinitionStage]:
        for line, headers, sections in self.stages:
            parsed = (
                Section(line=start, name=name, arguments=arguments, text="\n".join(body))
                for start, name, arguments, body in sections
            )
            yield DefinitionStage(line=line, headers=headers, sections=tuple(parsed))


def _defaults(sections: Sequence[Section]) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for section in sections:
        for _, line in section.lines:
            name, equals, value = line.strip().partition("=")
            if equals and not name.startswith("#"):
                # Apptainer 1.4.5 ends the value at ` #`, and quotes are a part of the value (tried).
                found.setdefault(name.strip(), set()).add(value.partition(" #")[0].strip())
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def fill(text: str, arguments: Mapping[str, str]) -> str:
    """Replace each `{{ NAME }}` by the default of this build argument; without a default, write `{{NAME}}`."""
    return _HOLE.sub(lambda hole: arguments.get(hole[1], f"{{{{{hole[1]}}}}}"), text)


def sources(text: str) -> tuple[DefinitionSource, ...]:
    """Return the sources of a definition file's stages, in order.

    Raises:
        SpecError: see `parse`.
    """
    return _sources(parse(text))


def _sources(definition: Definition) -> tuple[DefinitionSource, ...]:
    return tuple(_source(stage, definition.arguments) for stage in definition.stages)


def _source(stage: DefinitionStage, arguments: Mapping[str, str]) -> DefinitionSource:
    bootstrap, origin = stage.header("bootstrap").lower(), fill(stage.header("from"), arguments)
    if bootstrap == "docker":
        prefix = [fill(stage.header(key), arguments).strip("/") for key in ("registry", "namespace")]
        origin = "/".join([*filter(None, prefix), origin.removeprefix("//")])
    digest = _DIGEST.search(origin)
    return DefinitionSource(
        bootstrap=bootstrap,
        origin=origin,
        kind=_KINDS.get(bootstrap, "distribution"),
        digest=digest[1] if digest else None,
        line=stage.headers["from"].line if "from" in stage.headers else stage.line,
        stage=stage.header("stage") if "stage" in stage.headers else None,
    )


def pin(text: str, digests: Mapping[str, str]) -> str:
    """Return the definition file with its images named by digest.

    Args:
        text: the definition file.
        digests: `DefinitionSource.origin` -> manifest digest, for sources of kind `registry`. The digest replaces the
            tag, because Apptainer does not accept a reference with a tag and a digest.

    Raises:
        SpecError: the `From` line of an image cannot be rewritten.
    """
    lines, definition = text.split("\n"), parse(text)
    for source in _sources(definition):
        digest = digests.get(source.origin)
        if source.digest is not None or digest is None:
            continue
        if source.kind != "registry" or not _DIGEST.fullmatch(f"@{digest}"):
            raise SpecError(f"`{source.origin}` cannot be pinned to {digest[:80]!r}")
        written = _HEADER.match(lines[source.line - 1].partition("#")[0].strip())
        image = "" if written is None else fill(written[2].strip(), definition.arguments)
        if written is None or written[1].lower() != "from" or "{{" in image:
            raise SpecError(
                f"line {source.line} of the definition file cannot be pinned",
                why=f"the line is {lines[source.line - 1][:200]!r}",
                hint=f"write the image with its digest: {digest}",
            )
        lines[source.line - 1] = f"From: {_without_tag(image)}@{digest}"
    return "\n".join(lines)


def _without_tag(reference: str) -> str:
    path, slash, name = reference.rpartition("/")
    return path + slash + name.partition(":")[0]


def copies(text: str) -> tuple[Copy, ...]:
    """Return the paths that `%files` sections copy from the host (not from another stage).

    Raises:
        SpecError: see `parse`.
    """
    definition = parse(text)
    return tuple(
        Copy(path=_first_word(fill(line.strip(), definition.arguments)), line=number)
        for stage in definition.stages
        for section in stage.sections
        if section.name == "files" and not section.arguments
        for number, line in section.lines
        if line.strip() and not line.strip().startswith("#")
    )


def _first_word(line: str) -> str:
    try:
        return shlex.split(line)[0]
    except (ValueError, IndexError):
        return line.split(maxsplit=1)[0]
