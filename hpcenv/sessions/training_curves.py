"""The folder that TensorBoard reads. It has event files of the scripts, or otherwise metrics that hpcenv recorded.

Runs on: COMPUTE NODE. Standard library only. The runs may still be training, so their folders are read again and again.
The content of these folders is not trusted: the search is bounded, and links are not followed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from hpcenv.errors import RecordInvalid
from hpcenv.records import event_file, metrics
from hpcenv.records.code_listing import Listing
from hpcenv.records.files import load_record
from hpcenv.records.run_folder import RunFolder

_SECONDS_BETWEEN_LOOKS = 10.0
# A shared disk may answer late. At the end of a session, the wait for the disk has this limit.
_SECONDS_TO_END = 2.0
_MOST_ENTRIES = 20_000
_EVENTS = re.compile(r"events\.out\.tfevents\.", re.DOTALL)
_OWN = "hpcenv"


class Curves:
    """A context manager that keeps TensorBoard's folder up to date.

    For each run, the folder has links to the event files of the run. If the run has no event files, the folder has an
    event file that is made from the records of the run.

    Args:
        folder: TensorBoard's folder, which exists.
        runs: the run folders.
    """

    def __init__(self, folder: Path, runs: Sequence[Path]) -> None:
        self._folder = folder
        self._runs = [RunFolder(run) for run in runs]
        # Run and attempt -> size of the records when they were last read, and how many records have been written.
        self._read: dict[tuple[str, int], tuple[int, int]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(_SECONDS_TO_END)

    def _keep(self) -> None:
        while True:
            self.look()
            if self._over.wait(_SECONDS_BETWEEN_LOOKS):
                return

    def look(self) -> None:
        """Bring the folder up to date once."""
        for run in self._runs:
            with contextlib.suppress(OSError):  # the run may be removed at this moment; it is read again later
                self._look_at(run, self._folder / run.path.name)

    def _look_at(self, run: RunFolder, place: Path) -> None:
        if not run.manifest.exists():  # a folder of event files, which is not a run
            self._link(place, run.path)
            return
        written = folders_with_events(run)
        if not written:
            self._write_records(run, place / _OWN)
            return
        shutil.rmtree(place / _OWN, ignore_errors=True)
        place.mkdir(exist_ok=True)
        for name in written:
            self._link(place / name.replace("/", "-"), run.path / name)

    @staticmethod
    def _link(link: Path, folder: Path) -> None:
        if not link.is_symlink():
            link.symlink_to(folder)

    def _write_records(self, run: RunFolder, place: Path) -> None:
        """Append the values that the first rank has recorded since the last call."""
        for attempt, path in _first_ranks(run).items():
            key = (str(run.path), attempt)
            size, count = self._read.get(key, (-1, 0))
            status = path.stat()
            if status.st_size == size:
                continue
            found = [one for one in metrics.read_metrics(path, attempt, 0).records if one.kind != "parameters"]
            if not found:
                continue
            # A record has no time, so all new records get the time at which their file was last written.
            frames = [
                event_file.scalar_frame(one.label, one.step, metrics.number(one), status.st_mtime)
                for one in found[count:]
                if one.used
            ]
            place.mkdir(parents=True, exist_ok=True)
            # The number in the name orders the files of a restarted training.
            with (place / f"events.out.tfevents.{attempt}.{_OWN}").open("ab") as file:
                file.write(b"".join([*([] if count else [event_file.first_frame(status.st_mtime)]), *frames]))
            self._read[key] = (status.st_size, len(found))


def _first_ranks(run: RunFolder) -> Mapping[int, Path]:
    """For each attempt, return the records file of the first rank that has such a file: attempt -> file."""
    found: dict[int, Path] = {}
    for attempt, _rank, path in metrics.rank_files(run.metrics, ".jsonl"):
        found.setdefault(attempt, path)
    return found


def folders_with_events(run: RunFolder) -> list[str]:
    """Return the folders, relative to the run folder, in which the script wrote event files."""
    try:
        brought = set(load_record(Listing, run.listing).files)
    except RecordInvalid:
        brought = set()
    folders: list[str] = []
    for name in _files(run):
        folder = os.path.dirname(name)
        if _EVENTS.match(os.path.basename(name)) and name not in brought and folder not in folders:
            folders.append(folder)
    return sorted(folders)


def _files(run: RunFolder) -> Iterator[str]:
    """Yield the files in the folders of the run that a script can write to, relative to the run folder."""
    left = _MOST_ENTRIES
    for top in (*run.parts_of_copy(), run.checkpoints.name):
        for folder, folders, names in os.walk(run.path / top):
            folders[:] = [name for name in folders if not name.startswith(".")]
            left -= len(folders) + len(names)
            if left < 0:
                return
            yield from (os.path.relpath(os.path.join(folder, name), run.path) for name in names)
