"""Whether the code that a new run would get is that of a recorded run. Runs on: LOGIN NODE."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpcenv.errors import RecordInvalid
from hpcenv.project.code_listing import changed_files
from hpcenv.records.files import load_record
from hpcenv.records.listing import Listing, digest_of
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.submission.plan import PlannedSource
from hpcenv.text import listed

_NAMED = 5


def code_differences(
    run: RunFolder, before: Manifest, now: PlannedSource | None, script_sha256: str
) -> tuple[str, ...]:
    """Return how the code differs from that of a run, in words; empty if it is the same.

    Args:
        run: the folder of the run, or of its bundle.
        before: its manifest.
        now: the copy that is planned; None where the script runs in the live project.
        script_sha256: of the script that is planned; empty where there is no file.
    """
    return tuple(_differences(run, before, now, script_sha256))


def _differences(run: RunFolder, before: Manifest, now: PlannedSource | None, script_sha256: str) -> Iterator[str]:
    if before.script_sha256 != script_sha256:
        yield "the script is not the one of the run"
    source = before.source
    # Equal digests say it at once. Different ones can be of the same code: see `project/code_listing.py`.
    if source is None or now is None or source.digest in ("", now.record.digest):
        return
    try:
        then = _listing_of(run, source.shared)
        names = [path.partition("/")[2] for path in changed_files(then, now.listing)]
    except (RecordInvalid, OSError):
        yield "files of the project differ from those of the run; which ones is not known: its list cannot be read"
        return
    if digest_of(then.files) != source.digest:
        yield "the list of the run's files is not the one that its nodes compared"
    if names:
        yield f"these files differ from those of the run: {listed(names, _NAMED)}"


def _listing_of(run: RunFolder, shared: str) -> Listing:
    """Return the list of a run's files; a run of a sweep has it in the folder of the sweep, but not in a bundle."""
    holder = RunFolder(Path(shared)) if shared and not run.listing.is_file() else run
    return load_record(Listing, holder.listing)
