"""The lists of files of an index (PEP 503, PEP 691) and of find-links.

Runs on: LOGIN NODE, in the process beside pip: standard library and pip only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import url2pathname

from hpcenv.locking.wheels.names import SOURCES, WHEELS, is_of_package, is_source_of
from hpcenv.locking.wheels.pip_session import PipSession, Unreachable, limited
from hpcenv.locking.wheels.proof import HEX_SHA256

PAGE_BYTES = 64 << 20  # the largest list seen is 6 MB
# Attributes may contain `>` (data-requires-python). docs/decisions/0037 says why no HTML parser is used.
_ANCHOR = re.compile(r"""<a\s([^>"']*(?:(?:"[^"]*"|'[^']*')[^>"']*)*)>""", re.IGNORECASE)
_HREF = re.compile(r"""(?:^|\s)href\s*=\s*(?:"([^"]*)"|'([^']*)')""", re.IGNORECASE)
_BASE = re.compile(r"""<base\s+href\s*=\s*(?:"([^"]*)"|'([^']*)')""", re.IGNORECASE)


@dataclass(kw_only=True)
class ListedWheel:
    """One wheel in a list, or one source archive if `WheelLists` looks for source archives.

    Attributes:
        label: the index: `pypi`, `extra-N` or `find-links`.
        location: a URL, or a path on this machine.
        local: whether `location` is a path.
        sha256: the hash that the list states.
        others: the same file in lists with less preference.
    """

    label: str
    filename: str
    location: str
    local: bool
    sha256: str | None = None
    others: list[ListedWheel] = field(default_factory=list)


class WheelLists:
    """The lists of files. An index has one list per package. The lists of find-links are read once.

    Args of the constructor:
        pip: pip's session.
        endings: `WHEELS`, or `SOURCES` for source archives.
    """

    def __init__(self, pip: PipSession, endings: tuple[str, ...] = WHEELS) -> None:
        self.pip = pip
        self.endings = endings
        self._lock = threading.Lock()
        self._linked: list[ListedWheel] | None = None
        self._linked_trouble: list[str] = []
        self._failures: dict[str, int] = {}
        self._reasons: dict[str, str] = {}

    def of(self, package: tuple[str, str]) -> tuple[list[ListedWheel], list[str]]:
        """Return the wheels of a name and version in order of preference, and the problems that occurred."""
        links: list[ListedWheel] = []
        trouble: list[str] = []
        for number, index in enumerate(self.pip.indexes):
            label = f"extra-{number}" if number else "pypi"
            try:
                links += self._page(label, index.rstrip("/") + "/" + package[0] + "/", package)
            except Unreachable as error:
                trouble.append(f"{error}: {label}")
        linked, more = self._read_find_links()
        return links + linked, trouble + more

    def _page(self, label: str, url: str, package: tuple[str, str]) -> list[ListedWheel]:
        failures = self._failures.get(label, 0)
        if failures >= 3:  # three packages in a row without any answer
            raise Unreachable(self._reasons[label])  # the same text, so that these packages are counted together
        try:
            links = _read_list(self.pip, label, url, package, self.endings)
        except Unreachable as error:
            if failures >= 0:
                self._reasons[label], self._failures[label] = str(error), failures + 1
            raise
        self._failures[label] = -1
        return links

    def _read_find_links(self) -> tuple[list[ListedWheel], list[str]]:
        with self._lock:
            if self._linked is None:
                self._linked = []
                for location in self.pip.find_links:
                    try:
                        self._linked += _read_linked(self.pip, location, self.endings)
                    except Unreachable as error:
                        self._linked_trouble.append(f"{error}: find-links")
            return self._linked, self._linked_trouble


def _read_linked(pip: PipSession, location: str, endings: tuple[str, ...]) -> list[ListedWheel]:
    """Return the files of one value of find-links: a folder, a page on this machine, or a page on a server."""
    path = _local_path(location) or (os.path.expanduser(location) if "://" not in location else None)
    if path is None:
        return _read_list(pip, "find-links", location, None, endings)
    if not os.path.isdir(path):
        return _read_list(pip, "find-links", Path(os.path.abspath(path)).as_uri(), None, endings)
    names = sorted(os.listdir(path))
    return [
        ListedWheel(label="find-links", filename=name, location=os.path.join(path, name), local=True)
        for name in names
        if name.endswith(endings)
    ]


def _read_list(
    pip: PipSession, label: str, url: str, package: tuple[str, str] | None, endings: tuple[str, ...]
) -> list[ListedWheel]:
    """Return the files in a list: PEP 691 JSON or PEP 503 HTML, from a server or from this machine.

    Args:
        pip: pip's session.
        label: the index that the list belongs to.
        url: the URL of the list.
        package: the name and version to select (numpy's list has 4,000 files); None for all.
        endings: the possible ends of the names of files.
    """
    path = _local_path(url)
    if path is not None:
        page = os.path.join(path, "index.html") if os.path.isdir(path) else path
        try:
            text = Path(page).read_text("utf-8", "replace")
        except OSError:
            return []
        base = Path(page).as_uri()
        return [link for line in _html_files(text, endings) for link in _listed(label, base, line, package, endings)]
    accept = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html; q=0.1, text/html; q=0.01"
    answer = pip.get(url, {"Accept": accept, "Cache-Control": "max-age=0"}, stream=True)
    with contextlib.closing(answer):
        if answer.status_code in (404, 410):
            return []
        if answer.status_code != 200:
            raise Unreachable(f"index not reachable (HTTP {answer.status_code})")
        content = b"".join(limited(answer.iter_content(1 << 16), PAGE_BYTES, pip.deadline))
    if "json" in answer.headers.get("Content-Type", ""):
        lines = _json_files(content)
    else:
        lines = _html_files(content.decode(answer.encoding or "utf-8", "replace"), endings)
    return [link for line in lines for link in _listed(label, answer.url, line, package, endings)]


@dataclass(frozen=True, slots=True)
class _ListedFile:
    """A file in a list, unchecked. `base` is the page's own <base>, to which `href` is relative."""

    href: str
    filename: str
    sha256: object
    base: str = ""


def _json_files(content: bytes) -> Iterator[_ListedFile]:
    try:
        for file in json.loads(content)["files"]:
            yield _ListedFile(str(file["url"]), str(file["filename"]), (file.get("hashes") or {}).get("sha256"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreachable("index not reachable: its list is not PEP 691 JSON") from error


def _html_files(text: str, endings: tuple[str, ...]) -> Iterator[_ListedFile]:
    own_base = _BASE.search(text)
    base = unescape(own_base[1] or own_base[2] or "") if own_base else ""
    for anchor in _ANCHOR.finditer(text):
        href = _HREF.search(anchor[1])
        if href is None or not any(ending in href[0] for ending in endings):
            continue
        target, _, fragment = unescape(href[1] or href[2] or "").partition("#")
        stated = re.search(r"(?:^|&)sha256=([0-9a-fA-F]{64})", fragment)
        filename = unquote(target.partition("?")[0].rsplit("/", 1)[-1])
        yield _ListedFile(target, filename, stated[1].lower() if stated else None, base)


def _listed(
    label: str, page: str, line: _ListedFile, package: tuple[str, str] | None, endings: tuple[str, ...]
) -> Iterator[ListedWheel]:
    """Yield the file of a line if it belongs to this package and has a usable URL."""
    filename = line.filename
    is_asked = is_source_of if endings == SOURCES else is_of_package
    if not filename.endswith(endings) or (package is not None and not is_asked(filename, package)):
        return
    url = urljoin(urljoin(page, line.base), line.href)
    path = _local_path(url)
    if path is not None and not page.startswith("file:"):
        return  # a server must not cause hpcenv to read files of this machine
    if path is None and not url.startswith(("http://", "https://")):
        return
    stated = line.sha256 if isinstance(line.sha256, str) and HEX_SHA256.fullmatch(line.sha256) else None
    yield ListedWheel(label=label, filename=filename, location=path or url, local=path is not None, sha256=stated)


def _local_path(url: str) -> str | None:
    parts = urlsplit(url)
    return url2pathname(parts.path) if parts.scheme == "file" else None
