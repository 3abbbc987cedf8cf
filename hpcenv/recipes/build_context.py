"""The folder that a Dockerfile copies from: which of its files a COPY takes, and what .dockerignore leaves out.

Runs on: LOGIN NODE. It reads names only.

The rules of .dockerignore are those of Docker's reference ("Build context", read 2026-11-23): `*` and `?` as in Go's
filepath.Match, `**` for any number of folders, `!` for exceptions, and the last line that matches decides.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import SpecError

# A definition file has one line for each entry; a context with more belongs into an archive.
_MOST_ENTRIES = 5000


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextEntry:
    """A file, a whole folder, or a symbolic link of the context.

    Attributes:
        path: relative to the context.
        inside: relative to the source of the COPY; "" for the source itself.
        link: the target of a symbolic link.
    """

    path: str
    inside: str
    link: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextSource:
    """One thing that a COPY names: a file, or a folder whose content is copied."""

    path: str
    is_folder: bool
    entries: tuple[ContextEntry, ...]


@dataclass(frozen=True, slots=True)
class _Pattern:
    expression: re.Pattern[str]
    is_exception: bool


class BuildContext:
    """A context folder with its .dockerignore.

    Args of the constructor:
        folder: the context.
        ignore: the text of .dockerignore.
    """

    def __init__(self, folder: Path, ignore: str = "") -> None:
        self.folder = folder
        self._patterns = tuple(_patterns(ignore))
        self._has_exceptions = any(pattern.is_exception for pattern in self._patterns)

    @classmethod
    def of(cls, folder: Path, dockerfile: Path) -> BuildContext:
        """Return a context with NAME.dockerignore beside the Dockerfile, or the context's own .dockerignore."""
        for path in (dockerfile.with_name(f"{dockerfile.name}.dockerignore"), folder / ".dockerignore"):
            if path.is_file():
                return cls(folder, path.read_text(encoding="utf-8", errors="replace"))
        return cls(folder)

    def find(self, source: str) -> tuple[ContextSource, ...]:
        """Return what a source of COPY names; nothing if it is missing or left out.

        Raises:
            ValueError: it, or a link, leads out of the context; the text says so.
        """
        path = os.path.normpath(source.lstrip("/") or ".")
        if path == ".." or path.startswith("../"):
            raise ValueError(f"{source} is outside of the context")
        return tuple(self._source(one) for one in self._matches(path) if not self._is_ignored(one))

    def _matches(self, path: str) -> Iterator[str]:
        """Yield the paths that a pattern matches, sorted; the path itself without special characters."""
        if not re.search(r"[*?\[]", path):
            if os.path.lexists(self.folder / path):
                yield path
            return
        found = [""]
        for part in path.split("/"):
            expression = re.compile(_expression(part))
            found = [
                f"{folder}/{name}".lstrip("/")
                for folder in found
                if (self.folder / folder).is_dir()
                for name in sorted(os.listdir(self.folder / folder))
                if expression.fullmatch(name)
            ]
        yield from found

    def _is_ignored(self, path: str) -> bool:
        if path == ".":
            return False
        ignored = False
        parents = [path]
        while parents[-1].rpartition("/")[0]:
            parents.append(parents[-1].rpartition("/")[0])
        for pattern in self._patterns:
            if any(pattern.expression.fullmatch(one) for one in parents):
                ignored = not pattern.is_exception
        return ignored

    def _source(self, path: str) -> ContextSource:
        full = self.folder / path
        real = os.path.realpath(full)
        if real != os.path.realpath(self.folder) and not real.startswith(os.path.realpath(self.folder) + os.sep):
            raise ValueError(f"{path} is a link that leads out of the context")
        if not os.path.isdir(full):
            return ContextSource(path=path, is_folder=False, entries=(ContextEntry(path=path, inside=""),))
        inner = os.path.relpath(real, os.path.realpath(self.folder))
        _, entries = self._walk(inner, "")
        if len(entries) > _MOST_ENTRIES:
            raise SpecError(
                f"the context folder `{path}` has more than {_MOST_ENTRIES} entries",
                why="the translation has a line for each entry that .dockerignore does not leave out",
                hint="leave out whole folders in .dockerignore, or copy an archive",
            )
        return ContextSource(path=path, is_folder=True, entries=tuple(entries))

    def _walk(self, folder: str, inside: str) -> tuple[bool, list[ContextEntry]]:
        """Return whether a folder is copied as a whole, and its entries."""
        entries: list[ContextEntry] = []
        is_whole = True
        for item in sorted(os.scandir(self.folder / folder), key=lambda item: item.name):
            path, place = os.path.normpath(f"{folder}/{item.name}"), f"{inside}/{item.name}".lstrip("/")
            if item.is_symlink():
                is_whole = False
                if not self._is_ignored(path):
                    entries.append(ContextEntry(path=path, inside=place, link=os.readlink(self.folder / path)))
                continue
            if self._is_ignored(path) and not (item.is_dir() and self._has_exceptions):
                is_whole = False
                continue
            if item.is_dir():
                whole, below = self._walk(path, place)
                is_whole &= whole
                entries += [ContextEntry(path=path, inside=place)] if whole else below
            else:
                entries.append(ContextEntry(path=path, inside=place))
        return is_whole, entries


def _patterns(text: str) -> Iterator[_Pattern]:
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        is_exception = stripped.startswith("!")
        path = os.path.normpath(stripped.removeprefix("!").strip()).lstrip("/")
        yield _Pattern(re.compile(_expression(path)), is_exception)


def _expression(pattern: str) -> str:
    """Return a regular expression for a pattern of Go's filepath.Match, with `**`."""
    parts: Sequence[str] = re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]*\]|\\.|.", pattern, re.DOTALL)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        known.get(part) or (part.replace("[!", "[^") if part[0] == "[" and len(part) > 2 else re.escape(part[-1:]))
        for part in parts
    )
