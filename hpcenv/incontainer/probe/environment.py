"""Types that the modules of the probe share: the environment, its site directories and its distributions (dists).

Runs on: inside the image.
"""

from __future__ import annotations

import os
import sys

from hpcenv.incontainer.probe.elf import Elf
from hpcenv.incontainer.probe.paths import is_below, list_folder, open_regular
from hpcenv.incontainer.probe.rules import has_rule

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any

    from hpcenv.incontainer.probe.library import Library
    from hpcenv.incontainer.probe.values import Unknown, Value


class Site:
    """A folder on sys.path that can contain dists.

    Attributes:
        base: the folder that must contain all files that the RECORDs in this site folder list.
        scanned: whether the files in this folder are read; False for a folder with the user's code.
    """

    __slots__ = ("base", "path", "scanned")

    def __init__(self, path: str, base: str, scanned: bool) -> None:
        self.path = path
        self.base = base
        self.scanned = scanned


class Row:
    """One line of a RECORD after step 2 of the digest; ``file`` is None if the file must not be opened."""

    __slots__ = ("claim", "file", "path", "script", "size")

    def __init__(self, path: str, claim: str, size: str, file: str | None, script: bool) -> None:
        self.path = path
        self.claim = claim
        self.size = size
        self.file = file
        self.script = script


class Dist:
    """One installed distribution.

    Attributes:
        folder: the name of the distribution's metadata folder.
        kind: how the digest was made: "record" or "walk".
        no_record: why the distribution has no RECORD; empty if it has a RECORD.
        rows: the rows of its RECORD; empty if the fast reader was used (`_read_plain_record`).
        plain_digest: the digest from the fast reader.
        listed: the paths of the files that its RECORD lists with a hash.
        unhashed: the paths of the files that its RECORD lists without a hash.
        record, content: the two digests; None for an unknown digest.
        modified_count: number of files that differ from the RECORD; None if the files were not read.
        requires: the distribution's `Requires-Dist` lines, without lines for extras; empty at level record.
        outside_rows: number of listed files outside of the environment, which are never read.
        programs: its files in bin/ without the launchers of entry points; None if the files were not read.
        linked_outside: number of files that were read through a link that leads out of the environment.
        reasons: why a digest is unknown.
    """

    def __init__(self, site: Site, folder: str) -> None:
        self.site = site
        self.folder = folder
        self.name = ""
        self.version = ""
        self.installer: str | None = None
        self.build = ""
        self.tags: list[str] = []
        self.source = "unknown"
        self.direct_url: dict[str, Any] = {}
        self.wheel_file = ""  # the path of the wheel that it was installed from; not written to a lockfile
        self.git: dict[str, Any] = {}
        self.files: dict[str, str] = {}
        self.kind = "record"
        self.no_record = ""
        self.rows: list[Row] = []
        self.plain_digest = ""
        self.listed: list[str] = []
        self.unhashed: set[str] = set()
        self.record: str | None = None
        self.content: str | None = None
        self.modified: list[dict[str, str]] = []
        self.modified_count: int | None = None
        self.linked_outside = 0
        self.requires: list[str] = []
        self.outside_rows = 0
        self.programs: list[Program] | None = None
        self.reasons: list[str] = []


class CondaFile:
    """One file that a record in conda-meta lists (conda's `paths_data`).

    Attributes:
        path: relative to the prefix.
        packed: sha256 of the file in the package; empty if the record does not have it.
        installed: sha256 of the file after conda wrote the prefix into it; the same as `packed` if conda wrote no
            prefix.
        placeholder: the text that the prefix replaced; empty if conda wrote no prefix.
        binary: whether the prefix is in strings that end with NUL, and the file kept its size.
        link: whether the file is a symbolic link.
        package: the package's name.
    """

    __slots__ = ("binary", "installed", "link", "package", "packed", "path", "placeholder")

    def __init__(self, path: str, entry: dict[str, object], package: str) -> None:
        self.path = path
        self.package = package
        self.packed = str(entry.get("sha256") or entry.get("sha256_in_prefix") or "")
        self.installed = str(entry.get("sha256_in_prefix") or self.packed)
        self.placeholder = str(entry.get("prefix_placeholder") or "")
        self.binary = entry.get("file_mode") == "binary"
        self.link = entry.get("path_type") == "softlink"


class Program:
    """One file in bin/ that a RECORD lists.

    Attributes:
        name: path below bin/.
        digest: sha256 of its content without the line that names the environment's Python; or "missing" or
            "not-a-file". For the launcher of an entry point, it is "entry-point MODULE:FUNCTION".
        modified: whether the file differs from the file that the RECORD describes. The line that names Python does not
            count.
    """

    __slots__ = ("digest", "modified", "name")

    def __init__(self, name: str, digest: str, modified: bool) -> None:
        self.name = name
        self.digest = digest
        self.modified = modified


class ProbedEnvironment:
    """The place of the environment, and the facts that the probes have read so far.

    Attributes:
        started: the program that was started for this Python; empty if it is not known.
        site: a folder of packages outside of the prefix; the files in it are read. Empty for no such folder.
        revision: revision of the lockfile, see rules.py.
        since: in the second check, the latest change (ctime, ns) that the first check saw. Files that did not change
            since then are not read. None in the first check.
        looked: size, mtime and ctime of each file that was hashed while `recording`.
        same: files that changed after the first check, but match their RECORD.
        training_path: sys.path as a training process gets it.
        path: the entries of `training_path` as absolute paths.
        values: field -> value.
        unknown: field -> why its value is unknown.
        roots: the real paths of the folders that belong to the environment.
        listed: all files that a RECORD lists with a hash.
        unlisted_files: paths of the unlisted libraries.
        newest: paths of the newest unlisted files.
        trees: working tree -> the answer of git (status, tracked files), or the error of git.
        source_deadline: end of the time for all editable installs together.
        conda_files: at level full, the files that are in conda's records and in no RECORD.
        conda_dists: path of a distribution's .dist-info -> the conda package that installed the distribution.
        hashed: real path of a library -> its sha256.
        torch: torch's folder.
        libraries: the libraries that torch would load.
        at_import: the libraries that `import torch` loads.
        missing_libraries: name of a needed library that was not found -> the file that needs it.
        answers: the versions of libraries.
        no_libraries: why the libraries are unknown.
    """

    def __init__(
        self,
        level: str,
        training_path: list[str],
        started: str = "",
        since: int | None = None,
        site: str = "",
        revision: int = 0,
    ) -> None:
        self.level = level
        self.site = site
        self.revision = revision
        self.since = since
        self.recording = False
        self.looked: dict[str, tuple[int, int, int]] = {}
        self.same: set[str] = set()
        self.started = started
        self.training_path = training_path
        self.prefix = os.path.normpath(sys.prefix)
        self.base_prefix = os.path.normpath(sys.base_prefix)
        self.path = [os.path.normpath(os.path.abspath(p)) for p in training_path]
        self.values: dict[str, Any] = {}
        self.unknown: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.sites: list[Site] = []
        self.roots: list[str] = []
        self.dists: list[Dist] | None = None
        self.shadowed: list[Dist] = []
        self.listed: set[str] = set()
        self.unlisted: list[dict[str, str]] = []
        self.unlisted_files: list[str] = []
        self.newest: list[str] = []
        self.trees: dict[str, tuple[bytes, bytes] | Exception] = {}
        self.source_deadline = 0.0
        self.conda: list[dict[str, Any]] = []
        self.conda_files: list[CondaFile] = []
        self.conda_dists: dict[str, str] = {}
        self.system_packages: list[tuple[str, str, str]] = []
        self.hashed: dict[str, str] = {}
        self.torch: str | None = None
        self.libraries: dict[str, Library] = {}
        self.network: dict[str, Any] | None = None
        self.cuda_compat: dict[str, Any] | None = None
        self.at_import: set[str] = set()
        self.missing_libraries: dict[str, str] = {}
        self.torch_incomplete = False
        self.answers: dict[str, Value] = {}
        self.no_libraries = ""
        self.children: dict[str, subprocess.Popen[bytes] | Unknown] = {}
        self._elves: dict[str, Elf | None] = {}
        self._folders: dict[str, list[str]] = {}
        self._listed_sorted: list[str] = []
        self._inside: dict[str, bool] = {}

    def has(self, rule: str) -> bool:
        """Return whether the digests follow a rule of rules.py."""
        return has_rule(rule, self.revision)

    def user_base(self) -> str:
        import site

        return os.path.normpath(site.getuserbase() or "")

    def placed(self, path: str) -> tuple[str, str]:
        """Return which prefix contains a path, such as `{prefix}` ('' for none), and the path below that prefix."""
        # A virtual environment may be below its base prefix, or above it. So the longer prefix that contains the path
        # is used.
        roots = [("{prefix}", self.prefix), ("{base-prefix}", self.base_prefix)]
        for mark, root in sorted(roots, key=lambda r: -len(r[1])):
            if is_below(path, root):
                return mark, path[len(root.rstrip("/")) + 1 :]
        return "", path

    def shown(self, path: str) -> str:
        """Return a path in the form of the report. This form stays the same if the environment is moved."""
        mark, rest = self.placed(path)
        if mark == "{prefix}":
            return rest or "."
        base = self.user_base()
        if not mark and is_below(path, base):
            mark, rest = "{user-base}", path[len(base) + 1 :]
        return mark + "/" + rest if mark else path

    def inside(self, folder: str) -> bool:
        """Return whether a folder, with its links resolved, is in the environment."""
        known = self._inside.get(folder)
        if known is None:
            real = os.path.realpath(folder)
            known = self._inside[folder] = any(is_below(real, root) for root in self.roots)
        return known

    def names(self, folder: str) -> list[str]:
        """Return a folder's entries; none if it cannot be read."""
        if folder not in self._folders:
            self._folders[folder] = list_folder(folder)
        return self._folders[folder]

    def elf(self, path: str) -> Elf | None:
        """Return the parts of a file that the loader reads; None if it is not an ELF file or cannot be opened."""
        if path not in self._elves:
            self._elves[path] = None
            try:
                descriptor, _ = open_regular(path, self.inside)
                try:
                    self._elves[path] = Elf(descriptor)
                finally:
                    os.close(descriptor)
            except (OSError, ValueError):
                pass  # the loader also skips this file and tries the next folder
        return self._elves[path]

    def lists_below(self, folder: str) -> bool:
        """Return whether the RECORD of a distribution lists a file in this folder or below it."""
        if not self._listed_sorted:
            self._listed_sorted = sorted(self.listed)  # only links need this sorted list, and links are rare
        from bisect import bisect_left

        index = bisect_left(self._listed_sorted, folder + "/")
        return index < len(self._listed_sorted) and self._listed_sorted[index].startswith(folder + "/")
