"""The folder of an export: the archive of the check, the lock, and the code.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcenv.exports.archive import check_archive
from hpcenv.exports.training import Training
from hpcenv.records.codec import encode_record
from hpcenv.records.run_folder import RunFolder


@dataclass(frozen=True)
class Files:
    """The folder, with the names in it that are the same for all engines."""

    folder: Path

    @property
    def code(self) -> RunFolder:
        """The copy of the code; it has the layout of a run folder."""
        return RunFolder(self.folder / "code")

    @property
    def archive(self) -> Path:
        """What the first program of a container runs."""
        return self.folder / "check" / "check.pyz"

    @property
    def lock(self) -> Path:
        """What it compares the container with."""
        return self.folder / "lock" / "lock.json"

    def write(self, training: Training) -> None:
        """Write archive and lock.

        Raises:
            OSError: one cannot be written.
        """
        for path, content in (
            (self.archive, check_archive()),
            (self.lock, encode_record(training.lock).encode()),
            (self.lock.with_name("lock.toml"), training.lockfile.encode()),
        ):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)

    def code_files(self) -> Iterator[tuple[str, bytes, bool]]:
        """Yield path, content and whether it is a program, of each file of the code."""
        for path in sorted(self.code.path.rglob("*")):
            # Beside the folders of code are records of the copy.
            if path.is_file() and path.parent != self.code.path:
                yield str(path.relative_to(self.code.path)), path.read_bytes(), os.access(path, os.X_OK)
