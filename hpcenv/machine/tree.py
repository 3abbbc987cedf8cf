"""Read small files of one host: below `/` on a node, below a copied folder, or from a recording.

Runs on: COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_MOST = 64 * 1024


class HostTree:
    """Reads the files of one host. A file that does not exist, or cannot be read, counts as empty."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def read(self, path: str, *, most: int = _MOST) -> bytes:
        """Return the beginning of a file."""
        try:
            # A plain read is used, because some files of sysfs give an error if more than their content is read.
            with open(self._place(path), "rb") as file:
                return file.read(most)
        except (OSError, ValueError):
            return b""

    def names(self, path: str) -> tuple[str, ...]:
        """Return the names in a folder, sorted so that `mlx5_2` comes before `mlx5_10`."""
        try:
            return tuple(sorted(os.listdir(self._place(path)), key=_natural))
        except OSError:
            return ()

    def exists(self, path: str) -> bool:
        """Return whether a file, folder or link with this path exists."""
        return os.path.lexists(self._place(path))

    def link(self, path: str) -> str:
        """Return the last part of the path to which a link points; empty if `path` is not a link."""
        try:
            return os.path.basename(os.readlink(self._place(path)))
        except OSError:
            return ""

    def resolved(self, path: str) -> str:
        """Follow all links in a path of this host; return "" if the result does not exist, or is outside the tree."""
        root = os.path.realpath(self._root)
        real = os.path.realpath(self._place(path))
        if not os.path.exists(real) or os.path.commonpath((root, real)) != root:
            return ""
        return "/" + os.path.relpath(real, root)

    def text(self, path: str) -> str:
        """Return the content of a small file, without blanks at its beginning and end."""
        return self.read(path).decode("utf-8", "replace").strip()

    def number(self, path: str) -> int | None:
        """Return the number in a file; None if the file does not contain a number."""
        text = self.text(path)
        return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None

    def search(self, path: str, pattern: re.Pattern[bytes], *, most: int) -> re.Match[bytes] | None:
        """Return the first match of a pattern in the first `most` bytes of a file; None without a match."""
        return pattern.search(self.read(path, most=most))

    def _place(self, path: str) -> Path:
        return self._root / path.lstrip("/")


class RecordedTree(HostTree):
    """The recorded files of another host. No file of this machine is read.

    Args:
        files: path -> content.
        links: path of a link -> last part of the path to which it points.
    """

    def __init__(self, files: Mapping[str, str], links: Mapping[str, str]) -> None:
        super().__init__(Path("/nonexistent"))
        self._files, self._links = files, links
        self._folders: dict[str, set[str]] = {}
        for path in (*files, *links):
            parts = path.rstrip("/").split("/")
            for at in range(1, len(parts)):
                self._folders.setdefault("/".join(parts[:at]), set()).add(parts[at])

    def read(self, path: str, *, most: int = _MOST) -> bytes:
        """Return the recorded content."""
        return self._files.get(path, "").encode()[:most]

    def names(self, path: str) -> tuple[str, ...]:
        """Return the names of the recorded files in a folder."""
        return tuple(sorted(self._folders.get(path.rstrip("/"), ()), key=_natural))

    def exists(self, path: str) -> bool:
        """Return whether the recording contains a file, folder or link with this path."""
        return path in self._files or path in self._links or path.rstrip("/") in self._folders

    def resolved(self, path: str) -> str:  # noqa: ARG002
        """Return an empty text, because a recording contains only the last part of a link's target."""
        return ""

    def link(self, path: str) -> str:
        """Return the last part of the path to which a recorded link points."""
        return self._links.get(path, "")


class TracedTree(HostTree):
    """Reads the files of a host, and remembers the content of these files for a recording.

    Attributes:
        files: path -> content of every file that was read. If a file was only listed, its content is empty.
        links: path of a link -> last part of the path to which it points.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        super().__init__(root)
        self.files: dict[str, str] = {}
        self.links: dict[str, str] = {}

    def read(self, path: str, *, most: int = _MOST) -> bytes:
        """Return the beginning of a file, and remember this content."""
        found = super().read(path, most=most)
        if found:
            self.files[path] = found.decode("utf-8", "replace")
        return found

    def search(self, path: str, pattern: re.Pattern[bytes], *, most: int) -> re.Match[bytes] | None:
        """Return the first match in a file. Remember only the matched text, because the file is a large library."""
        match = pattern.search(HostTree.read(self, path, most=most))
        if HostTree.exists(self, path):
            self.files[path] = match.group(0).decode("utf-8", "replace") if match else ""
        return match

    def names(self, path: str) -> tuple[str, ...]:
        """Return the names in a folder, and remember these names."""
        found = super().names(path)
        for name in found:
            self.files.setdefault(f"{path.rstrip('/')}/{name}", "")
        return found

    def exists(self, path: str) -> bool:
        """Return whether a file with this path exists. Remember the path of an existing file."""
        found = super().exists(path)
        if found:
            self.files.setdefault(path, "")
        return found

    def link(self, path: str) -> str:
        """Return the last part of the path to which a link points, and remember this part."""
        found = super().link(path)
        if found:
            self.links[path] = found
        return found


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
